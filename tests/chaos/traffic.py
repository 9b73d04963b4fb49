"""Requests that never stop while replicas are killed, and what became of each of them."""

import itertools
import threading
import time
from dataclasses import dataclass, field

from torchrl_vllm_sync.errors import SyncError

PROMPT_TOKENS, ANSWER_TOKENS = 6, 24
BATCH = 4
# Seconds between requests of one client: the engines' processes must get to start, too.
PAUSE_S = 0.3
REQUEST_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Asked:
    """One prompt and what came back for it.

    Attributes:
        kind: How it was asked: ``batch``, ``single`` or ``stream``.
        prompt: Token ids, unlike any other's.
        floor: Newest version that every push before it had committed.
        began_at: ``time.monotonic()`` when it was asked.
        ended_at: When the answer came.
        outputs: Outputs that say they are finished.
        errors: Errors instead.
    """

    kind: str
    prompt: list[int]
    floor: int
    began_at: float
    ended_at: float = 0.0
    outputs: list[object] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def take(self, answer):
        self.ended_at = time.monotonic()
        if isinstance(answer, Exception):
            self.errors.append(answer)
        else:
            self.outputs.append(answer)


class Traffic:
    """Clients in threads: one sends batches, one single prompts, one reads streams.

    Args:
        service: Where they go.
        floor: Returns the newest version that every finished push has committed.
    """

    def __init__(self, service, floor):
        self._service, self._floor = service, floor
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = []
        self.asked = []
        self.broken = []

    def start(self):
        self._stop.clear()
        kinds = (self._batch, self._single, self._stream)
        self._threads = [
            threading.Thread(target=self._run, args=(one,), daemon=True) for one in kinds
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s):
        """Lets the requests under way end, and returns everything asked since the last time."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = sum(thread.is_alive() for thread in self._threads)
        assert not hung, f"{hung} clients still wait for answers after {timeout_s:g} s"
        assert not self.broken, f"clients met what no caller should: {self.broken}"
        self._threads = []
        asked, self.asked = self.asked, []
        return asked

    def _run(self, ask):
        while not self._stop.is_set():
            try:
                ask()
            except Exception as error:  # noqa: BLE001  the cell's verdict, not this thread's
                self.broken.append(error)
                return
            self._stop.wait(PAUSE_S)

    def _ask(self, kind):
        with self._lock:
            number = next(self._numbers)
            head = [5 + number // 400**place % 400 for place in range(3)]
            prompt = head + [7 + number % 13] * (PROMPT_TOKENS - len(head))
            asked = Asked(kind, prompt, self._floor(), time.monotonic())
            self.asked.append(asked)
        return asked

    def _params(self):
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=0.0, logprobs=0
        )

    def _batch(self):
        batch = [self._ask("batch") for _ in range(BATCH)]
        try:
            answers = self._service.generate(
                prompt_token_ids=[one.prompt for one in batch],
                sampling_params=self._params(),
                return_exceptions=True,
                timeout_seconds=REQUEST_TIMEOUT_S,
            )
        except SyncError as error:
            answers = [error] * BATCH
        for one, answer in zip(batch, answers, strict=True):
            one.take(answer)

    def _single(self):
        one = self._ask("single")
        try:
            one.take(
                self._service.generate(
                    prompt_token_ids=one.prompt,
                    sampling_params=self._params(),
                    timeout_seconds=REQUEST_TIMEOUT_S,
                )
            )
        except SyncError as error:
            one.take(error)

    def _stream(self):
        one = self._ask("stream")
        try:
            for output in self._service.generate(
                prompt_token_ids=one.prompt,
                sampling_params=self._params(),
                stream=True,
                timeout_seconds=REQUEST_TIMEOUT_S,
            ):
                if output.finished:
                    one.take(output)
        except SyncError as error:
            one.take(error)

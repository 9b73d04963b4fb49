"""The request side of a service: from what a caller passes to ``RequestOutput`` objects."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import sys
import threading
import uuid
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from tqdm.auto import tqdm

from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    NoReplicaAvailableError,
    RequestLostError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.ray_errors import loss
from torchrl_vllm_sync.requests.dispatch import Dispatcher
from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult
from torchrl_vllm_sync.requests.prompts import as_requests, check_sampling_params
from torchrl_vllm_sync.routing.placer import key_per_prompt
from torchrl_vllm_sync.versions import check_version

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Coroutine,
        Iterator,
        Sequence,
    )

    from vllm import RequestOutput

    from torchrl_vllm_sync.replica import EngineDescription, Replica
    from torchrl_vllm_sync.routing.balancer import LoadBalancer, Reservation
    from torchrl_vllm_sync.routing.ledger import LoadTracker


# ---- One event loop in a background thread, on which blocking calls run asynchronous code

_Result = TypeVar("_Result")
# An interrupted caller waits this long for its coroutine to clean up, and a dropped iterator for
# its stream to close: the garbage collector may drop it in a thread that holds a lock which closing
# needs, such as the ledger's.
CLEAN_UP_TIMEOUT_S = 10.0

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_closing: set[asyncio.Task[None]] = set()
# Streams that are iterated over. The garbage collector must not find one with its iterator:
# it would finalize the stream while the loop closes it.
_streams: set[AsyncIterator[object]] = set()


def _loop() -> asyncio.AbstractEventLoop:
    """This process's background loop; a forked child gets one of its own."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="torchrl_vllm_sync", daemon=True).start()
            _loops[os.getpid()] = loop
        return loop


def run_blocking(coroutine: Coroutine[object, object, _Result]) -> _Result:
    """Runs ``coroutine`` on the background loop, from any other thread, a notebook's too."""
    ended = threading.Event()

    async def run() -> _Result:
        try:
            return await coroutine
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), _loop())
    try:
        return future.result()
    except BaseException:
        if future.cancel():  # this thread was interrupted: the coroutine cleans up
            ended.wait(CLEAN_UP_TIMEOUT_S)
        raise


def iterate_blocking(stream: AsyncIterator[_Result]) -> Iterator[_Result]:
    """Iterates over ``stream`` from synchronous code; dropping the iterator closes it."""
    _streams.add(stream)
    try:
        while True:
            try:
                item = run_blocking(_next(stream))
            except StopAsyncIteration:
                return
            yield item
    finally:
        _close_blocking(stream)


def _close_blocking(stream: AsyncIterator[object]) -> None:
    """Closes ``stream``, and waits for that, but not for ever."""
    # Iterators are also dropped by the garbage collector, in whatever thread it runs, and at the
    # end of the process, when the background loop no longer runs.
    if sys.is_finalizing():
        return
    loop = _loop()
    if asyncio._get_running_loop() is loop:
        task = loop.create_task(_close(stream))
        _closing.add(task)
        task.add_done_callback(_closing.discard)
    else:
        closing = asyncio.run_coroutine_threadsafe(_close(stream), loop)
        wait([closing], timeout=CLEAN_UP_TIMEOUT_S)
        if closing.done():
            closing.result()


async def _next(stream: AsyncIterator[_Result]) -> _Result:
    return await anext(stream)


async def _close(stream: AsyncIterator[object]) -> None:
    try:
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]  an async generator
    finally:
        _streams.discard(stream)


REQUEST_ENDS: tuple[str, ...] = ("answered", "lost", "failed", "cancelled")
"""Each request ends in one of these ways; ``lost`` is by a ``RequestLostError``."""


class RequestCounts:
    """Counts requests by their end. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REQUEST_ENDS, 0)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def following(self, num_requests: int) -> Iterator[Callable[[Exception | None], None]]:
        """Gives a function to call with the error, or ``None``, of each request as it ends.

        The others have failed if the block raises, and were cancelled if it is cancelled or closed.
        """
        left = num_requests

        def end(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            lost = isinstance(error, RequestLostError)
            self._add("answered" if error is None else "lost" if lost else "failed", 1)

        try:
            yield end
        except Exception:
            self._add("failed", left)
            raise
        except BaseException:  # asyncio.CancelledError, or the end of a stream that is not read on
            self._add("cancelled", left)
            raise

    def _add(self, end: str, number: int) -> None:
        with self._lock:
            self._counts[end] += number


# A bar appears for batches of at least this many prompts that take longer than this many seconds.
PROGRESS_MIN_PROMPTS = 32
PROGRESS_DELAY_S = 1.0
TOKENIZER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A checked call to ``generate``, of which nothing has been sent yet."""

    requests: list[EngineRequest]  # one for each prompt, in the caller's order
    is_batch: bool  # whether the caller passed a batch, and so gets a list
    only: str | None  # the replica that the caller chose: there is no second choice


class Generation:
    """Checks calls, runs them over replicas and rebuilds vLLM's outputs."""

    def __init__(
        self,
        replicas: Callable[[], list[Replica]],
        load: LoadTracker,
        description: EngineDescription,
        recovers: Callable[[], bool] = lambda: False,
    ) -> None:
        self._replicas, self._description = replicas, description
        self._dispatcher = Dispatcher(replicas, load, recovers)
        self.counts = RequestCounts()  # of this process
        self._tokenizer: Any = None
        self._prefix = uuid.uuid4().hex[:12]
        self._counter = itertools.count()

    def prepare(
        self,
        prompts: Any,
        prompt_token_ids: Any,
        sampling_params: Any,
        *,
        lora_request: Any,
        timeout_s: float,
        stream: bool,
        min_version: int | None = None,
        session_id: Any = None,
        group_id: Any = None,
        only: str | None = None,
    ) -> PreparedBatch:
        """Checks everything about a call before any of it is sent."""
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise UnsupportedArgumentError(
                f"timeout_seconds must be a number greater than 0, got {timeout_s!r}"
            )
        if min_version is not None:
            check_version("min_version", min_version)
        checked, is_batch = as_requests(
            prompts,
            prompt_token_ids,
            encode=self._encode,
            max_model_len=self._description.max_model_len,
            vocab_size=self._description.vocab_size,
        )
        num = len(checked)
        if stream and num > 1:
            raise InvalidPromptError(f"a stream must have exactly 1 prompt, got {num}")
        sessions = key_per_prompt("session_id", session_id, num)
        groups = key_per_prompt("group_id", group_id, num)
        params = _prepared_sampling_params(
            check_sampling_params(sampling_params, num), stream=stream
        )
        requests = [
            EngineRequest(
                request_id=f"{self._prefix}-{next(self._counter)}",
                prompt=record.as_tokens_prompt(),
                sampling_params=params[at],
                lora_request=lora_request,
                timeout_s=timeout_s,
                min_version=min_version or 0,
                session_id=sessions[at],
                group_id=groups[at],
            )
            for at, record in enumerate(checked)
        ]
        return PreparedBatch(requests, is_batch, only)

    async def run(
        self, batch: PreparedBatch, balancer: LoadBalancer, *, use_tqdm: bool
    ) -> list[RequestOutput | Exception]:
        """Runs a prepared call; each entry is an output, or the error of that request."""
        total = len(batch.requests)

        def on_result(result: EngineResult) -> None:
            end(result.error)
            progress.update()

        with (
            self.counts.following(total) as end,
            tqdm(
                total=total,
                desc="Processed prompts",
                unit="prompt",
                delay=PROGRESS_DELAY_S,
                disable=not use_tqdm or total < PROGRESS_MIN_PROMPTS,
                dynamic_ncols=True,
            ) as progress,
        ):
            results = await self._dispatcher.run(
                batch.requests, _reserver(balancer, batch.only), on_result=on_result
            )
        return [_as_output(*one) for one in zip(results, batch.requests, strict=True)]

    async def stream(
        self, batch: PreparedBatch, balancer: LoadBalancer
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the outputs of a prepared call with one prompt as they grow."""
        (request,) = batch.requests
        results = self._dispatcher.stream(request, _reserver(balancer, batch.only))
        with self.counts.following(1) as end:
            async with contextlib.aclosing(results):
                async for result in results:
                    if result.error is not None or result.finished:
                        end(result.error)
                    output = _as_output(result, request)
                    if isinstance(output, Exception):
                        raise output
                    yield output

    def _encode(self, text: str) -> list[int]:
        """Tokenises as the engines would, with their tokenizer, fetched once in each process."""
        if self._tokenizer is None:
            self._tokenizer = self._fetch_tokenizer()
        return self._tokenizer.encode(text)

    def _fetch_tokenizer(self) -> Any:
        reasons: list[str] = []
        for one in self._replicas():
            try:
                return ray.get(one.actor.get_tokenizer.remote(), timeout=TOKENIZER_TIMEOUT_S)
            except RayError as error:
                if not isinstance(error, GetTimeoutError) and loss(one.replica_id, error) is None:
                    raise
                reasons.append(f"replica {one.replica_id}: {type(error).__name__}")
        raise NoReplicaAvailableError(f"no replica could send its tokenizer: {', '.join(reasons)}")


def _reserver(
    balancer: LoadBalancer, only: str | None = None
) -> Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]:
    """What reserves places for requests: on one replica, or on any but some."""

    def reserve(requests: Sequence[EngineRequest], avoid: Collection[str]) -> list[Reservation]:
        others = [one for one in balancer.load.replica_ids if one != only] if only else ()
        return balancer.reserve_batch(
            [_routed(request) for request in requests],
            exclude={*others, *avoid},
            min_version=requests[0].min_version,
            session_id=[request.session_id for request in requests],
            group_id=[request.group_id for request in requests],
            sampling_params=[request.sampling_params for request in requests],
        )

    return reserve


def _routed(request: EngineRequest) -> dict[str, Any]:
    """A request's prompt, salted by its LoRA adapter as vLLM's prefix cache is."""
    lora = request.lora_request
    if lora is None:
        return request.prompt
    salt = repr((lora.lora_name, lora.lora_path, request.prompt.get("cache_salt")))
    return {**request.prompt, "cache_salt": salt}


def _prepared_sampling_params(given: Sequence[Any], *, stream: bool) -> list[Any]:
    """Copies each distinct object once; only streams want anything before the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    copies: dict[int, Any] = {}
    for one in given:
        if id(one) not in copies:
            params = SamplingParams() if one is None else copy.copy(one)
            if not stream:
                params.output_kind = RequestOutputKind.FINAL_ONLY
            copies[id(one)] = params
    return [copies[id(one)] for one in given]


def _as_output(result: EngineResult, request: EngineRequest) -> RequestOutput | Exception:
    return result.output.unread(result, request) if result.error is None else result.error

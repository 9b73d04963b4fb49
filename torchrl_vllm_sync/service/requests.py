"""The requests of a service: from what a caller passes to ``RequestOutput`` objects."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from tqdm.auto import tqdm

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import check_positive, check_version, shown
from torchrl_vllm_sync.requests.dispatch import Dispatcher, Reserve
from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult, VersionSpan
from torchrl_vllm_sync.requests.prompts import as_requests, prepared_sampling_params
from torchrl_vllm_sync.routing.balancer import LoadBalancer, RequestKey, Reservation, key_per_prompt
from torchrl_vllm_sync.service.replicas import Replicas

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm import RequestOutput

    Prompt = str | list[int] | torch.Tensor | np.ndarray | Mapping[str, Any]

    class ServedOutput(RequestOutput):
        """vLLM's output, which stays of vLLM's class, with the attributes that it is given here."""

        replica_id: str
        version_spans: tuple[tuple[VersionSpan, ...], ...]  # of each sample
        min_version: int
        max_version: int


Ids = TypeVar("Ids")
Errors = TypeVar("Errors")


class GenerateOptions(TypedDict, Generic[Ids, Errors], total=False):
    """Keyword arguments of ``generate``, but ``stream``."""

    prompt_token_ids: Ids | None
    return_exceptions: Errors
    use_tqdm: bool
    lora_request: Any
    timeout_seconds: float | None
    actor_index: int | None
    min_version: int | None
    session_id: RequestKey | Sequence[RequestKey | None] | None
    group_id: RequestKey | Sequence[RequestKey | None] | None
    adapter: str | None


# Each request ends in one of these ways; ``lost`` is by a ``RequestLostError``.
REQUEST_ENDS: tuple[str, ...] = ("answered", "lost", "failed", "cancelled")
RETRIED = "retried"  # sent again, after a replica has lost or refused it


class RequestCounts:
    """Counts requests by their end, and how often one was sent again. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*REQUEST_ENDS, RETRIED), 0)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def following(self, num_requests: int) -> Iterator[Callable[[Exception | None], None]]:
        """Gives a function to call with the error, or ``None``, of each request as it ends."""
        left = num_requests

        def end(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            lost = isinstance(error, errors.RequestLostError)
            self.add("answered" if error is None else "lost" if lost else "failed", 1)

        try:
            yield end
        except BaseException as error:  # not an Exception: cancelled, or a stream not read on
            self.add("failed" if isinstance(error, Exception) else "cancelled", left)
            raise

    def add(self, end: str, number: int) -> None:
        with self._lock:
            self._counts[end] += number


# A bar appears for batches of at least this many prompts that take longer than this many seconds.
PROGRESS_MIN_PROMPTS = 32
PROGRESS_DELAY_S = 1.0
FETCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A checked call to ``generate``, of which nothing has been sent yet."""

    requests: list[EngineRequest]  # one for each prompt, in the caller's order
    is_batch: bool  # whether the caller passed a batch, and so gets a list
    only: str | None  # the replica that the caller chose: there is no second choice


class Requests:
    """Checks calls to ``generate``, runs them over the replicas and rebuilds vLLM's outputs."""

    def __init__(
        self, replicas: Replicas, balancer: LoadBalancer | None, recovers: Callable[[], bool]
    ) -> None:
        self._replicas, self._balancer = replicas, balancer
        self.counts = RequestCounts()  # of this process
        on_retry = functools.partial(self.counts.add, RETRIED)
        self._dispatcher = Dispatcher(replicas.answering, replicas.load, recovers, on_retry)
        self._tokenizer: Any = None
        self._prefix = uuid.uuid4().hex[:12]
        self._counter = itertools.count()

    @property
    def balancer(self) -> LoadBalancer:
        self._replicas.require()
        assert self._balancer is not None, "there are replicas"
        return self._balancer

    @balancer.setter
    def balancer(self, balancer: LoadBalancer) -> None:
        self._balancer = balancer

    def prepare(
        self,
        prompts: Any,
        sampling_params: Any,
        prompt_token_ids: Any,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        min_version: int | None = None,
        session_id: Any = None,
        group_id: Any = None,
        adapter: str | None = None,
        *,
        stream: bool = False,
    ) -> PreparedBatch:
        """Checks everything about a call before any of it is sent."""
        engine = self._replicas.require().members[0].description
        if timeout_seconds is None:
            timeout_seconds = self._replicas.settings.request_timeout_s
        check_positive("timeout_seconds", timeout_seconds)
        if min_version is not None:
            check_version("min_version", min_version)
        if lora_request is not None and not hasattr(lora_request, "lora_int_id"):
            told = f"lora_request must be a LoRARequest, for all prompts, got {shown(lora_request)}"
            raise errors.UnsupportedArgumentError(told)
        if adapter is not None and (lora_request is not None or not isinstance(adapter, str)):
            told = "adapter must be the name of one that was pushed, and lora_request None"
            raise errors.UnsupportedArgumentError(f"{told}, got {shown(adapter)}")
        only = None if actor_index is None else self._replicas.at(actor_index).replica_id
        has_none = self._replicas.settings.engine_args.skip_tokenizer_init
        checked, is_batch = as_requests(
            prompts,
            prompt_token_ids,
            encode=None if has_none else lambda text: self.tokenizer().encode(text),
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
        )
        num = len(checked)
        if stream and num > 1:
            raise errors.InvalidPromptError(f"a stream must have exactly 1 prompt, got {num}")
        sessions = key_per_prompt("session_id", session_id, num)
        groups = key_per_prompt("group_id", group_id, num)
        params = prepared_sampling_params(sampling_params, num, stream=stream)
        requests = [
            EngineRequest(
                request_id=f"{self._prefix}-{next(self._counter)}",
                prompt=prompt,
                sampling_params=params[at],
                lora_request=lora_request,
                adapter=adapter,
                timeout_s=timeout_seconds,
                min_version=min_version or 0,
                session_id=sessions[at],
                group_id=groups[at],
            )
            for at, prompt in enumerate(checked)
        ]
        return PreparedBatch(requests, is_batch, only)

    async def run(self, batch: PreparedBatch, *, use_tqdm: bool, return_exceptions: bool) -> Any:
        """Returns a list for a batch and one output otherwise; raises the first error."""
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
                batch.requests, _reserver(self.balancer, batch.only), on_result=on_result
            )
        outputs = [_as_output(*one) for one in zip(results, batch.requests, strict=True)]
        if not return_exceptions or not batch.is_batch:
            for output in outputs:
                if isinstance(output, Exception):
                    raise output
        return outputs if batch.is_batch else outputs[0]

    async def stream(self, batch: PreparedBatch) -> AsyncGenerator[ServedOutput]:
        """Yields the outputs of a prepared call with one prompt as they grow."""
        (request,) = batch.requests
        results = self._dispatcher.stream(request, _reserver(self.balancer, batch.only))
        with self.counts.following(1) as end:
            async with contextlib.aclosing(results):
                async for result in results:
                    if result.error is not None or result.finished:
                        end(result.error)
                    output = _as_output(result, request)
                    if isinstance(output, Exception):
                        raise output
                    yield output

    def tokenizer(self) -> Any:
        """The engines' tokenizer, fetched once in each process."""
        if self._tokenizer is None:
            self._tokenizer = self.fetch("get_tokenizer")
        return self._tokenizer

    def fetch(self, method: str) -> Any:
        """What the first replica that can be reached answers; all would answer the same."""
        reasons: list[str] = []
        for one in self._replicas.current():
            try:
                return ray.get(getattr(one.actor, method).remote(), timeout=FETCH_TIMEOUT_S)
            except RayError as error:
                is_late = isinstance(error, GetTimeoutError)
                if not is_late and errors.loss(one.replica_id, error) is None:
                    raise
                reasons.append(f"replica {one.replica_id}: {type(error).__name__}")
        why = ", ".join(reasons)
        raise errors.NoReplicaAvailableError(f"no replica could answer {method}: {why}")


def _reserver(balancer: LoadBalancer, only: str | None = None) -> Reserve:
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
    if lora is None and request.adapter is None:
        return request.prompt
    own = (lora.lora_name, lora.lora_path) if lora is not None else request.adapter
    salt = repr((own, request.prompt.get("cache_salt")))
    return {**request.prompt, "cache_salt": salt}


def _as_output(result: EngineResult, request: EngineRequest) -> Any:
    return result.output.unread(result, request) if result.error is None else result.error

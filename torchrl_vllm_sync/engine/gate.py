"""The admission of requests to one engine: which run, which wait, which end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.internals import UNLABELLED
from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests.messages import SampleReport, slice_spans, spans_from_starts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm import RequestOutput
    from vllm.outputs import CompletionOutput

    from torchrl_vllm_sync.engine.internals import SampleState
    from torchrl_vllm_sync.requests.messages import BegunAnswer, EngineRequest, VersionSpan

logger = logging.getLogger(__name__)


class SampleVersions:
    """Which versions sampled one sample, counted at each switch."""

    __slots__ = ("_begun", "_delivered", "_received", "_starts", "_was_swapped", "state")

    def __init__(self, state: SampleState, version: int, begun: BegunAnswer | None = None) -> None:
        self.state, self._begun, self._was_swapped = state, begun, False
        self._received = self._delivered = len(begun.token_ids) if begun else 0
        former = begun.spans if begun else ()
        self._starts = [(one.version, one.start) for one in former] + [(version, self._received)]

    @property
    def has_begun(self) -> bool:
        """Whether a token was sampled here, or it ended without one."""
        num_tokens = max(self.state.num_tokens, self._starts[-1][1])
        return num_tokens > self._received or self.state.is_finished

    def switch(self, version: int, computed: Mapping[str, int] | None = None) -> None:
        start = self.state.num_tokens
        if computed is not None:
            self._was_swapped = True
            on_their_way = self._received + self.state.num_sampled(computed)
            start = max(start, on_their_way, self._starts[-1][1])
        self._starts.append((version, start))

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        return spans_from_starts(self._starts, num_tokens)

    def report(self, completion: CompletionOutput, checker: SpanChecker) -> SampleReport:
        """Returns the report on the sample's next output."""
        start = self._delivered if self.state.yields_only_new else 0
        end = self._delivered = start + len(completion.token_ids)
        spans = self.spans(end)
        if completion.finish_reason is not None and self._was_swapped:
            # vLLM labels tokens when a step has ended, by which time another version may serve.
            internals.relabel(completion, spans)
        elif completion.finish_reason is not None:
            labelled = internals.label_spans(completion)
            spans = checker.agreed(self.state.engine_id, spans, labelled, end)
        first = self._begun or self.state
        return SampleReport(
            spans=slice_spans(spans, start, end) if start else spans,
            num_cached_tokens=first.num_cached_tokens,
            queue_s=first.queue_s,
            prefill_s=first.prefill_s,
            # Unknown where another replica began: some seconds were lost on the way.
            decode_s=None if self._begun else self.state.decode_s,
        )


@dataclass(slots=True)
class SpanChecker:
    """Compares counted spans with vLLM's own, which count: it is the process that samples."""

    replica_id: str
    num_disagreements: int = 0

    def agreed(
        self,
        request_id: str,
        counted: tuple[VersionSpan, ...],
        labelled: Sequence[tuple[str, int, int]] | None,
        num_tokens: int,
    ) -> tuple[VersionSpan, ...]:
        """Returns the spans of a finished sample."""
        theirs = versions_of_labels(labelled, num_tokens)
        if theirs is None or theirs == counted:
            return counted
        self.num_disagreements += 1
        what = "replica %s, request %s: version spans counted as %s, by vLLM as %s, which is used"
        spans = [[tuple(one) for one in some] for some in (counted, theirs)]
        logger.error(what, self.replica_id, request_id, *spans)
        return theirs


def versions_of_labels(
    labelled: Sequence[tuple[str, int, int]] | None, num_tokens: int
) -> tuple[VersionSpan, ...] | None:
    """Makes version spans of vLLM's; ``None`` if a label, perhaps a user's, is no version."""
    if labelled is None:
        return None
    try:
        starts = [(0 if one == UNLABELLED else int(one), start) for one, start, _ in labelled]
    except ValueError:
        return None
    return spans_from_starts(starts, num_tokens)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One sample of a request that is inside the engine."""

    engine_id: str  # a new one after each restart
    request: EngineRequest
    owner: Any  # takes outputs, or why there will be none, and ends the request: a ``Batch``
    answer: Any = None  # the owner's, of which it is a sample
    index: int = 0  # of the sample in its request
    sample: SampleVersions | None = None  # None until vLLM has registered it
    restart: bool = False  # an update sends it back to the gate before its first token

    @property
    def has_begun(self) -> bool:
        return self.sample is not None and self.sample.has_begun

    def put(self, output: RequestOutput | Exception) -> None:
        """Takes what vLLM would put into the request's queue."""
        self.owner.take(self, output)


@dataclass
class AdmissionGate:
    """One replica's state: requests pass if ``SERVING``, wait if ``UPDATING``, or are refused."""

    replica_id: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""  # why it is stale or failed
    version: int = 0
    running: dict[str, RunningRequest] = field(default_factory=dict)  # by engine id
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, state: ReplicaState, reason: str = "") -> None:
        """Moves to ``state``, wakes what waits at the gate, and ends requests inside if it must."""
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()
        if self.is_over or state is ReplicaState.STALE:
            for request in list(self.running.values()):
                request.owner.refuse(request)

    def refusal(self) -> ReplicaUnavailableError:
        return ReplicaUnavailableError(self.replica_id, self.state, self.reason)

    def describe(self) -> str:
        return f"holds version {self.version} and is {self.state}"

    @property
    def is_over(self) -> bool:
        return self.state in (ReplicaState.FAILED, ReplicaState.CLOSED)

    def register(self, state: SampleState) -> None:
        """Notes that vLLM has registered one of the samples inside."""
        running = self.running.get(state.engine_id)
        if running is None:
            return
        if begun := running.request.begun:
            state.resume(begun, running.request.sampling_params)
        running.sample = SampleVersions(state, self.version, begun)
        state.deliver_to(running)

    def switch(self, version: int, computed: Mapping[str, int] | None = None) -> None:
        """Notes that ``version`` samples from now on: all that was sampled before is settled.

        But for the last step of an engine that is not paused: ``computed`` says how far it came.
        """
        self.version = version
        for request in self.running.values():
            if request.sample is not None:
                request.sample.switch(version, computed)

    def is_open(self, min_version: int = 0) -> bool:
        """Whether a request may enter now."""
        return self.state is ReplicaState.SERVING and self.version >= min_version

    async def enter(self, min_version: int = 0) -> None:
        """Waits until the replica serves, with ``min_version`` or later; the caller bounds it."""
        while not self.is_open(min_version):
            if not self.state.admits_requests:
                raise self.refusal()
            await self._changed.wait()

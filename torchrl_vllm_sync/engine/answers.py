"""The requests of one engine: which wait at its gate, run, are streamed, or end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import pickle
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util import get_node_ip_address
from vllm import RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.internals import UNLABELLED, SampleState
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests.messages import (
    BegunAnswer,
    EngineRequest,
    EngineResult,
    PackedResults,
    PlainOutput,
    SampleReport,
    VersionSpan,
    as_dicts,
    framed,
    received,
    slice_spans,
    spans_from_starts,
)
from torchrl_vllm_sync.requests.prompts import as_requests, prepared_sampling_params

logger = logging.getLogger(__name__)

Spans = tuple[VersionSpan, ...]
Labels = list[tuple[str, int, int]] | None  # vLLM's spans, each with its label
Step = Callable[[EngineResult], object]
# What a prompt may hold that vLLM need not render.
_OF_TOKENS = {"prompt_token_ids", "prompt", "cache_salt"}
# Seconds that finished outputs of a batch wait at most, to be sent back together.
BATCH_LINGER_S = 0.05
# Seconds that the entering requests of a batch keep all others from running, at most.
TURN_S = 0.005
# What a caller says before it asks for streams, and for how long it is waited for.
KEY_BYTES, KEY_TIMEOUT_S = 32, 10.0
# Seconds for a caller to take what it was sent, such as one whose loop was kept busy.
TAKEN_TIMEOUT_S = 600.0
# Seconds for a request by default.
TIMEOUT_S = 3600.0
# How many ids are remembered of requests that were given up before they arrived.
MAX_GIVEN_UP = 10_000


class SampleVersions:
    """Which versions sampled one sample, counted at each switch."""

    __slots__ = ("_begun", "_delivered", "_received", "_starts", "_was_swapped", "state")

    def __init__(
        self,
        state: SampleState,
        version: int,
        begun: BegunAnswer | None = None,
        *,
        is_labelled: bool = True,
    ) -> None:
        self.state, self._begun, self._was_swapped = state, begun, not is_labelled
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

    def spans(self, num_tokens: int) -> Spans:
        return spans_from_starts(self._starts, num_tokens)

    def report(self, completion: CompletionOutput, checker: SpanChecker) -> SampleReport:
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

    def agreed(self, request_id: str, counted: Spans, labelled: Labels, num_tokens: int) -> Spans:
        theirs = versions_of_labels(labelled, num_tokens)
        if theirs is None or theirs == counted:
            return counted
        self.num_disagreements += 1
        what = "replica %s, request %s: version spans counted as %s, by vLLM as %s, which is used"
        spans = [[tuple(one) for one in some] for some in (counted, theirs)]
        logger.error(what, self.replica_id, request_id, *spans)
        return theirs


def versions_of_labels(labelled: Labels, num_tokens: int) -> Spans | None:
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
    adapter: Any = None  # a ``Held``, which stays as long
    restart: bool = False  # an update sends it back to the gate before its first token

    @property
    def has_begun(self) -> bool:
        return self.sample is not None and self.sample.has_begun

    def put(self, output: RequestOutput | Exception) -> None:
        self.owner.take(self, output)


@dataclass
class AdmissionGate:
    """One replica's state: requests pass if ``SERVING``, wait if ``UPDATING``, or are refused."""

    replica_id: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""  # why it is stale or failed
    version: int = 0
    running: dict[str, RunningRequest] = field(default_factory=dict)  # by engine id
    _base: int | None = None  # version of the weights, where later ones brought adapters
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def base(self) -> int:
        """Version of the weights without adapters."""
        return self.version if self._base is None else self._base

    def set(self, state: ReplicaState, reason: str = "") -> None:
        """Moves to ``state``, wakes what waits at the gate, and ends requests inside if it must."""
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()
        if self.is_over or state is ReplicaState.STALE:
            for request in list(self.running.values()):
                request.put(self.refusal())

    def refusal(self) -> errors.ReplicaUnavailableError:
        return errors.ReplicaUnavailableError(self.replica_id, self.state, self.reason)

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
        version, own = self.base, running.adapter
        if own is not None:
            version = max(version, own.adapter.version)
        # vLLM's label is that of the base weights.
        running.sample = SampleVersions(state, version, begun, is_labelled=own is None)
        state.deliver_to(running)

    def switch(self, version: int, computed: Mapping[str, int] | None = None) -> None:
        """Notes that ``version`` samples from now on, bar a last step that ``computed`` shows."""
        self.version, self._base = version, None
        for request in self.running.values():
            if request.sample is not None:
                request.sample.switch(version, computed)

    def advance(self, version: int) -> None:
        """Notes that an adapter came as ``version``: what is inside goes on with what it has."""
        self._base, self.version = self.base, version

    def is_open(self, min_version: int = 0) -> bool:
        return self.state is ReplicaState.SERVING and self.version >= min_version

    async def enter(self, min_version: int = 0) -> None:
        """Waits until the replica serves, with ``min_version`` or later; the caller bounds it."""
        while not self.is_open(min_version):
            if not self.state.admits_requests:
                raise self.refusal()
            await self._changed.wait()


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each sample, with seeds as vLLM gives them (``ParentRequest``)."""
    # Samples are separate requests: an update lets those go on that have begun, and sends the
    # others back, which must not start on keys of the old weights. vLLM cannot with a part.
    params.skip_clone = True  # nobody else has it: vLLM need not copy each field for each request
    if params.n == 1 and params.logprobs is None and params.prompt_logprobs is None:
        return [params]
    samples = [copy.copy(params) for _ in range(params.n)]
    for index, sample in enumerate(samples):
        sample.n, sample.flat_logprobs = 1, True  # log-probabilities are made and sent as columns
        if params.seed is not None:
            sample.seed = params.seed + index
    return samples


def continued(prompt: Any, params: SamplingParams, begun: BegunAnswer) -> tuple[Any, Any]:
    """A ``TokensPrompt`` with another replica's tokens, and what is left; see ``SampleState``."""
    prompt = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *begun.token_ids]}
    num_tokens, remaining = len(begun.token_ids), copy.copy(params)
    remaining.min_tokens = max(0, params.min_tokens - num_tokens)
    remaining.prompt_logprobs = None
    if params.max_tokens is not None:
        remaining.max_tokens = params.max_tokens - num_tokens
    return prompt, remaining


def tell_of_first_replica(output: RequestOutput, begun: BegunAnswer) -> None:
    """Sets an output's prompt facts to the first replica's; drops what is of the last one alone."""
    output.num_cached_tokens = begun.num_cached_tokens
    for completion in output.outputs:
        # Of the last replica, also for tokens that the first computed, by experts of its choice.
        completion.routed_experts = None
        masked = getattr(completion, "sampling_mask", None)  # vLLM 0.32; of the last replica alone
        if masked is not None and len(masked.token_ids) != len(completion.token_ids):
            completion.sampling_mask = None


@dataclass(slots=True, eq=False)
class Answer:
    request: EngineRequest
    samples: list[SamplingParams]  # the parameters of each
    final_only: bool
    running: dict[str, RunningRequest] = field(default_factory=dict)  # by engine id
    finished: dict[int, tuple[CompletionOutput, SampleReport]] = field(default_factory=dict)
    has_ended: bool = False


class Batch:
    """Requests of one call, each of which ends once; vLLM calls :meth:`take` with all outputs."""

    def __init__(
        self, replica: Answers, requests: Sequence[EngineRequest], on_step: Step = lambda _: None
    ) -> None:
        self._replica, self._gate, self._on_step = replica, replica.gate, on_step
        self._clock = asyncio.get_running_loop().time
        self._begin = self._clock()
        self._left: dict[Answer, None] = {}
        for one in requests:
            final_only = one.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
            self._left[Answer(one, split_samples(one.sampling_params), final_only)] = None
        self._ended: list[EngineResult] = []
        self._some, self._every = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # one enters requests, others wait at the gate
        self._unwanted: list[str] = []  # engine ids of samples whose request has ended

    async def run(self) -> AsyncGenerator[list[EngineResult]]:
        try:
            # In a task, as the time limits hold while the engine takes them, too.
            self._tasks.append(asyncio.create_task(self._enter_all()))
            while self._ended or self._left:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_limit()):
                        await self._some.wait()
                if not self._ended:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BATCH_LINGER_S):
                        await self._every.wait()
                await self._abort_unwanted()
                results, self._ended = self._ended, []
                self._some.clear()
                yield results
        finally:
            for task in self._tasks:
                task.cancel()
            for answer in self._left:
                answer.has_ended = True
                self._drop(answer)
            await self._abort_unwanted()

    def _next_limit(self) -> float:
        """Ends what has reached its time limit; returns when the next one will."""
        limits = {one: self._begin + one.request.timeout_s for one in self._left}
        now = self._clock()
        for one, limit in limits.items():
            if limit <= now:
                self._fail(one, TimeoutError())
        return min(limits.values(), default=now)

    async def _enter_all(self) -> None:
        turn = Deadline(TURN_S)
        for answer in [*self._left]:
            is_quick = not self._replica.needs_rendering(answer.request.prompt)
            for index in range(len(answer.samples)):
                if is_quick and self._gate.is_open(answer.request.min_version):
                    await self._enter(answer, index)
                else:
                    self._enter_later(answer, index)
            # vLLM, which only queues them, lets nobody else run. After each request would be too
            # often: those that are in run meanwhile, step by step, with a part of the batch.
            if turn.passed:
                await asyncio.sleep(0)
                turn = Deadline(TURN_S)

    def _enter_later(self, answer: Answer, index: int) -> None:
        self._tasks.append(asyncio.create_task(self._enter(answer, index)))

    async def _enter(self, answer: Answer, index: int) -> None:
        """Gives a sample to the engine, once more if an update finds it before its first token."""
        request = answer.request
        try:
            await self._gate.enter(request.min_version)
            if answer.has_ended:
                return
            engine_id = self._replica.new_engine_id(request)
            prompt, params = request.prompt, answer.samples[index]
            if (begun := request.begun) is not None:
                prompt, params = continued(prompt, params, begun)
            running = RunningRequest(engine_id, request, self, answer, index)
            own = running.adapter = self._replica.adapter_of(request)
            self._gate.running[engine_id] = answer.running[engine_id] = running
            prompt = self._replica.rendered(prompt)
            lora = request.lora_request if own is None else own.request
            await self._replica.engine.add_request(engine_id, prompt, params, lora_request=lora)
        except Exception as failure:  # noqa: BLE001  a result, too
            self._fail(answer, failure)
            return
        is_unwanted = answer.has_ended or request.abort_id in self._replica.given_up
        if is_unwanted or running.restart:  # meanwhile: it was not there to be aborted
            self._unwanted.append(engine_id)
            await self._abort_unwanted()

    def take(self, running: RunningRequest, output: RequestOutput | Exception) -> None:
        """Takes an output of a sample, or why there is none; vLLM, which calls, must not fail."""
        answer = running.answer
        if answer.has_ended:
            return
        if isinstance(output, Exception):
            self._fail(answer, output)
            return
        try:
            if output.finished:
                self._leave(running)
            if not running.restart:
                self._add(running, output)
            elif output.finished:  # and what it sampled meanwhile has read keys of the old weights
                self._enter_later(answer, running.index)
        except Exception as failure:  # noqa: BLE001  a result, too
            self._fail(answer, failure)

    def _add(self, running: RunningRequest, output: RequestOutput) -> None:
        """Adds an output to its answer; final outputs of several samples are put together."""
        answer, (completion,) = running.answer, output.outputs
        request = answer.request
        output.request_id, completion.index = request.request_id, running.index
        if request.begun is not None:
            tell_of_first_replica(output, request.begun)
        assert running.sample is not None, "vLLM registers it before any output"
        report = running.sample.report(completion, self._replica.checker)
        if output.finished:
            answer.finished[running.index] = completion, report
        output.finished = len(answer.finished) == len(answer.samples)
        reports = (report,)
        if answer.final_only:
            if not output.finished:
                return
            together = [answer.finished[one] for one in range(len(answer.samples))]
            output.outputs, reports = map(list, zip(*together, strict=True))
        result = EngineResult(
            request_id=request.request_id,
            replica_id=self._gate.replica_id,
            output=output,
            finished=output.finished,
            samples=tuple(reports),
            version=self._gate.version,
        )
        if output.finished:
            self._end(answer, result)
        else:
            self._on_step(result)

    def _fail(self, answer: Answer, failure: Exception) -> None:
        if not answer.has_ended:
            self._end(answer, self._replica.failure(answer.request, failure))

    def _end(self, answer: Answer, result: EngineResult) -> None:
        # Failing may have stopped the replica, which ends all that is inside.
        if answer.has_ended:
            return
        answer.has_ended = True
        del self._left[answer]
        self._drop(answer)
        self._ended.append(result)
        self._some.set()
        if not self._left:
            self._every.set()

    def _leave(self, running: RunningRequest) -> None:
        del self._gate.running[running.engine_id], running.answer.running[running.engine_id]

    def _drop(self, answer: Answer) -> None:
        self._unwanted += answer.running
        for running in [*answer.running.values()]:
            self._leave(running)
        self._replica.given_up.pop(answer.request.abort_id, None)

    async def _abort_unwanted(self) -> None:
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            with contextlib.suppress(EngineDeadError):  # nothing runs on in it
                await self._replica.engine.abort(unwanted)


class Streams:
    """Requests of one caller, whose outputs are sent to it as they grow, until it is gone."""

    def __init__(self, replica: Answers) -> None:
        self._replica, self._some, self._taken = replica, asyncio.Event(), asyncio.Event()
        # What has not been sent yet, by whose it is and by sample, in the order of the newest.
        self._unsent: dict[tuple[str, int], EngineResult] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(writer))
            while True:
                asked = await received(reader)
                if not asked:
                    self._taken.set()
                for one in asked:
                    tasks.create_task(self._run(one))

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Sends all that has come while the caller was at what it was sent, again and again."""
        while await self._some.wait():
            self._some.clear()
            unsent, self._unsent = self._unsent, {}
            results = [_without_prompt(one) for one in unsent.values()]
            writer.write(framed(pickle.dumps(([name for name, _ in unsent], results))))
            async with asyncio.timeout(TAKEN_TIMEOUT_S):
                await writer.drain()
                await self._taken.wait()
            self._taken.clear()

    async def _run(self, request: EngineRequest) -> None:
        """Runs a request by itself: its time limit holds while nobody reads, too."""
        # As in vLLM's own streams, new tokens are put together, and newer wholes replace others.
        is_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA

        def keep(step: EngineResult) -> None:
            at = -1  # an error is of all samples, and comes last
            for sample in step.output.outputs if step.output is not None else ():
                sample.token_ids = [*sample.token_ids]  # vLLM adds to its own
                sample.logprobs = sample.logprobs and sample.logprobs[:]
                at = sample.index
            former = self._unsent.pop((request.abort_id, at), None)
            if is_delta and former is not None:
                step = _put_together(former, step)
            self._unsent[request.abort_id, at] = step
            self._some.set()

        try:
            async with contextlib.aclosing(Batch(self._replica, [request], keep).run()) as ends:
                async for (last,) in ends:
                    keep(last)
        except Exception as failure:  # noqa: BLE001  a result, too
            keep(self._replica.failure(request, failure))


def _without_prompt(step: EngineResult) -> EngineResult:
    if step.output is None:
        return step
    step.output.prompt = step.output.prompt_token_ids = None
    return dataclasses.replace(step, output=PlainOutput(step.output))


def _put_together(former: EngineResult, step: EngineResult) -> EngineResult:
    """Two outputs of new tokens of one sample as one."""
    (first,), (last,) = former.samples, step.samples
    num_tokens = len(former.output.outputs[0].token_ids)
    starts = [(one.version, one.start) for one in first.spans]
    starts += [(one.version, num_tokens + one.start) for one in last.spans]
    former.output.add(step.output, aggregate=True)
    spans = spans_from_starts(starts, len(former.output.outputs[0].token_ids))
    samples = (dataclasses.replace(last, spans=spans),)
    return dataclasses.replace(step, output=former.output, samples=samples)


class Answers:
    """The part of a replica that runs requests."""

    engine: AsyncLLM
    _updates: Any  # an ``Updates``: that file imports this one

    def __init__(self, replica_id: str, gate: AdmissionGate) -> None:
        self.replica_id, self.gate = replica_id, gate
        self.checker = SpanChecker(replica_id)
        self.given_up: dict[str, None] = {}  # by abort id, before they came or ended
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._key = secrets.token_bytes(KEY_BYTES)
        self._restarts = 0

    def begin(
        self,
        engine: AsyncLLM,
        updates: Any,
        adapter_of: Callable[[EngineRequest], Any] = lambda _: None,
    ) -> None:
        """Runs requests with ``engine`` from now on; until then the gate refuses them."""
        self.engine, self._updates, self.adapter_of = engine, updates, adapter_of
        self._renders = engine.vllm_config.model_config.is_encoder_decoder

    async def run_batch(self, requests: list[EngineRequest]) -> AsyncIterator[PackedResults]:
        """Yields the results of ``requests``, one each within its time limit, several at a time."""
        async with contextlib.aclosing(Batch(self, requests).run()) as ends:
            async for results in ends:
                yield PackedResults(results)

    async def streams_at(self) -> tuple[str, int, bytes]:
        """Host and port to send requests to whose outputs are to come as they grow, and a key."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, get_node_ip_address(), 0)
        (listening, *_) = self._server.sockets
        return (*listening.getsockname()[:2], self._key)

    def close(self) -> None:
        """Lets no more callers in."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one caller; nothing is unpickled of those that do not say the key."""
        with contextlib.closing(writer):
            try:
                async with asyncio.timeout(KEY_TIMEOUT_S):
                    key = await reader.readexactly(KEY_BYTES)
                if secrets.compare_digest(key, self._key):
                    await Streams(self).serve(reader, writer)
            except* (OSError, asyncio.IncompleteReadError) as gone:
                logger.debug("a caller, or the loop that it asked from, has ended: %s", gone)

    def new_engine_id(self, request: EngineRequest) -> str:
        """A name for a sample that enters, unless its request was given up."""
        if request.abort_id in self.given_up:
            raise errors.GenerationError(request.request_id, "its caller gave it up")
        self._restarts += 1
        return f"{request.abort_id}~{self._restarts}"

    def needs_rendering(self, prompt: dict[str, Any]) -> bool:
        """Whether vLLM prepares a prompt itself, which may take it long."""
        return self._renders or not prompt.keys() <= _OF_TOKENS

    def rendered(self, prompt: dict[str, Any]) -> Any:
        """A prompt as the engine takes it; its salt allows for hits on the same weights alone."""
        own = prompt.get("cache_salt")
        salt = self._updates.salt if own is None else f"{self._updates.salt}:{own}"
        if self.needs_rendering(prompt):
            return {**prompt, "cache_salt": salt}
        # As vLLM's renderer makes it, which it is slow at, and some versions do in a thread.
        ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
        return tokens_input(ids, prompt=text, cache_salt=salt)

    def failure(self, request: EngineRequest, failure: Exception) -> EngineResult:
        name, limit_s, error = request.request_id, request.timeout_s, failure
        match failure:
            case EngineDeadError():
                self.gate.set(ReplicaState.FAILED, f"engine core died: {failure}")
                error = self.gate.refusal()
            case errors.SyncError():
                pass
            case TimeoutError() if request.min_version > self._updates.version:
                told = f"holds version {self.gate.version} and is {self.gate.state}"
                held = {self.replica_id: told}
                error = errors.VersionNotReachedError(request.min_version, held, limit_s)
            case TimeoutError():
                error = errors.GenerationTimeoutError(
                    f"request {name} did not finish within {limit_s:g} s; "
                    "its work in the engine was ended"
                )
            case _:
                cause = failure.__cause__ or failure
                if not isinstance(cause, (ValueError, TypeError)):  # these are the caller's fault
                    logger.error("request %s failed", name, exc_info=failure)
                error = errors.GenerationError(name, f"{type(cause).__name__}: {cause}")
        return EngineResult(request_id=name, replica_id=self.replica_id, error=error)

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests by ``abort_id`` and waits for it; those that have not begun never will."""
        wanted = set(request_ids)
        self.given_up.update(dict.fromkeys(wanted))
        for _ in range(len(self.given_up) - MAX_GIVEN_UP):
            del self.given_up[next(iter(self.given_up))]
        inside = self.gate.running.items()
        left = [name for name, one in inside if one.sample and one.request.abort_id in wanted]
        await self.engine.abort(left)
        return len(left)

    async def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = False,  # noqa: ARG002  TorchRL's argument
        lora_request: Any = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """TorchRL's actor surface: generates on this replica and returns vLLM's own outputs."""
        config = self.engine.vllm_config.model_config
        checked, is_batch = as_requests(
            prompts,
            prompt_token_ids,
            encode=None if config.skip_tokenizer_init else self.engine.get_tokenizer().encode,
            max_model_len=config.max_model_len,
            vocab_size=config.get_vocab_size(),
        )
        params = prepared_sampling_params(sampling_params, len(checked))
        requests = [
            EngineRequest(
                request_id=f"direct-{uuid.uuid4().hex}",
                prompt=prompt,
                sampling_params=params[at],
                timeout_s=TIMEOUT_S if timeout_seconds is None else timeout_seconds,
                lora_request=lora_request,
            )
            for at, prompt in enumerate(checked)
        ]
        async with contextlib.aclosing(Batch(self, requests).run()) as ends:
            ended = {one.request_id: one async for results in ends for one in results}
        results = [ended[request.request_id] for request in requests]
        for request, result in zip(requests, results, strict=True):
            if result.error is not None:
                raise result.error
            if not request.sampling_params.flat_logprobs:
                result.output.prompt_logprobs = as_dicts(result.output.prompt_logprobs)
                for one in result.output.outputs:
                    one.logprobs = as_dicts(one.logprobs)
        outputs = [result.output for result in results]
        return outputs if is_batch else outputs[0]

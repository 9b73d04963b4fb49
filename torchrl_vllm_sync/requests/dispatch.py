"""Sending requests to replicas: one call a replica; what a replica loses goes to another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

from ray import cloudpickle
from ray.exceptions import RayError

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.replica import Replica, ReplicaState
from torchrl_vllm_sync.requests.messages import (
    BegunAnswer,
    EngineRequest,
    EngineResult,
    framed,
    received,
    spans_from_starts,
)
from torchrl_vllm_sync.routing.balancer import Reservation
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import staying_connected

logger = logging.getLogger(__name__)

Reserve: TypeAlias = Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]
Accept: TypeAlias = Callable[[EngineResult], None]

_Answer = TypeVar("_Answer")

# A replica that died, or turned stale, costs a request one attempt; the next goes elsewhere.
MAX_ATTEMPTS = 3
# What a request whose version came at the last moment gets all the same, in seconds.
LEAST_TIMEOUT_S = 0.001
_FAILED = ReplicaState.FAILED
# Asks a replica for nothing: it may send what else has come of its streams.
_TAKEN = framed(pickle.dumps([]))
# The ledger knows when one of these states is over, and the replica is a candidate again.
_PASSING = (ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.DRAINING, ReplicaState.STALE)
# Engines end a request at its time limit. A replica silent for this much longer has hung.
GRACE_S = 10.0
# What a failed replica had sent before is on its way for at most this long, in seconds.
LINGER_S = 0.2
# Seconds for a replica to drop requests that are not waited for any more.
ABORT_TIMEOUT_S = 5.0
# Seconds for which a connection stays that brings no stream.
IDLE_S = 10.0
# Seconds between looks at whether a replica is still on its way.
RECOVERY_POLL_S = 0.5


# To go on with an answer that another replica began, the new one gets the prompt and the tokens so
# far, all of which its engine takes for prompt. That gives the answer of an unbroken run wherever
# sampling neither asks which of them are prompt and which are answer, nor keeps state from step to
# step. ``engine.answers`` has all else that vLLM does with an answer begin where it ended.
# Fields of vLLM's SamplingParams with which an answer can be gone on with. A field that is not here
# must have its default, so that one which a later vLLM adds is unsound until it was looked at.
# Among those left out: `seed` (the generator's state is lost), `presence_penalty` and
# `frequency_penalty` (count the answer alone), `bad_words` and `repetition_detection` (match within
# the answer), `structured_outputs`, `thinking_token_budget` and `extra_args` (state of their own),
# `n` (samples that have ended would be sampled again), `prompt_logprob_token_ids` and
# `prompt_logprob_start` (rows of the prompt), `trace_decode_token_ids` (counted from the first).
_SOUND_SETTINGS = frozenset(
    (
        # Applied to each distribution by itself.
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
        # Counts prompt and answer alike: apply_penalties in vllm/model_executor/layers/utils.py.
        "repetition_penalty",
        # Reduced by what was received.
        *("max_tokens", "min_tokens"),
        # Looked for in the newest token alone, or in the text, which begins where it ended.
        *("stop_token_ids", "ignore_eos", "stop", "include_stop_str_in_output"),
        # Of what is reported, not of what is sampled.
        *("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        *("stream_interval", "skip_clone", "skip_reading_prefix_cache"),
        # Set by vLLM itself, from those above and from the model.
        *("output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids"),
    )
)
# Entries of a prompt that say the same of one that is longer. Placeholders of images or sound would
# also be looked for among the tokens of the answer.
_SOUND_ENTRIES = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def unsound_settings(request: EngineRequest) -> list[str]:
    """Returns what makes it unsound to go on with an answer to a request; empty if nothing does."""
    from vllm import SamplingParams

    default, found = SamplingParams(), list[str]()
    for name in (one for one in SamplingParams.__struct_fields__ if one not in _SOUND_SETTINGS):
        value, usual = getattr(request.sampling_params, name), getattr(default, name)
        if type(value) is not type(usual) or value != usual:
            found.append(name)
    return found + [name for name in request.prompt if name not in _SOUND_ENTRIES]


class AnswerSoFar:
    """What a stream has yielded of the answer to one request."""

    def __init__(self, request: EngineRequest) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._request = request
        self._only_new = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._forget()

    def _forget(self) -> None:
        self._last: EngineResult | None = None
        # Of the outputs so far together: those of single tokens would take 10 KB each.
        self._token_ids: list[int] = []
        self._starts: list[tuple[int, int]] = []  # where each version began
        self._logprobs: Any = None

    def add(self, result: EngineResult) -> None:
        if not self._only_new:
            self._forget()
        if result.output is not None:
            self._last = result
            if self._only_new:
                self._take(result)

    def _take(self, result: EngineResult) -> None:
        logprobs: Any = result.output.make().outputs[0].logprobs
        if self._logprobs is None:  # a copy, which grows
            self._logprobs = None if logprobs is None else logprobs[:]
        else:
            self._logprobs.extend(logprobs or ())
        begin = len(self._token_ids)
        self._starts += [(one.version, begin + one.start) for one in result.samples[0].spans]
        self._token_ids += result.output.answers[0].tolist()

    @property
    def is_whole(self) -> bool:
        """Whether the last output has all tokens, not only those of a step or of one sample."""
        return self._request.sampling_params.n == 1 and not self._only_new

    @property
    def final_reason(self) -> str:
        """Why no other replica can take the request up; empty if one can."""
        if not self._only_new or not self._num_tokens() or not (unsound := self._obstacles()):
            return ""
        return (
            "and a stream of deltas that has begun can neither begin again nor be gone on with "
            f"because of {', '.join(unsound)}"
        )

    def follow_up(self, request: EngineRequest) -> EngineRequest:
        """Returns what to ask the next replica for."""
        if not self._num_tokens() or self._obstacles():
            self._forget()
            return request
        return dataclasses.replace(request, begun=self._begun())

    def _obstacles(self) -> list[str]:
        unsound = unsound_settings(self._request)
        limit = self._request.sampling_params.max_tokens
        if limit is not None and self._num_tokens() >= limit:
            unsound.append(f"max_tokens={limit}, which have all come")
        return unsound

    def _num_tokens(self) -> int:
        return len(self._token_ids or (self._last.output.answers[0] if self._last else ()))

    def _begun(self) -> BegunAnswer:
        assert self._last is not None, "there are tokens"
        if not self._token_ids:
            self._take(self._last)
        output, report = self._last.output.make(), self._last.samples[0]
        is_rest = self._only_new and output.prompt_logprobs is not None
        return BegunAnswer(
            token_ids=tuple(self._token_ids),
            spans=spans_from_starts(self._starts, len(self._token_ids)),
            logprobs=self._logprobs,
            cumulative_logprob=output.outputs[0].cumulative_logprob,
            prompt_logprobs=[] if is_rest else output.prompt_logprobs,
            num_cached_tokens=report.num_cached_tokens,
            queue_s=report.queue_s,
            prefill_s=report.prefill_s,
        )


class Loss(NamedTuple):
    """An attempt that a replica lost or refused."""

    error: errors.ReplicaUnavailableError
    actor: Any  # a replica that was restarted has another
    abort_id: str  # by which the attempt is aborted there


@dataclass(slots=True)
class PendingRequest:
    """A request that has not ended, and what became of the attempts at it."""

    request: EngineRequest
    begin: float  # time.monotonic() from which its time limit counts
    so_far: AnswerSoFar | None = None  # what was yielded of it, if it is streamed
    losses: list[Loss] = field(default_factory=list)
    has_waited: bool = False  # for a replica, which counts against its time limit
    has_ended: bool = False
    place: Any = None  # the Reservation of the latest attempt, as the next two are
    actor: Any = None
    abort_id: str = ""

    @property
    def left_s(self) -> float:
        return self.begin + self.request.timeout_s - time.monotonic()

    @property
    def final_reason(self) -> str:
        """Why there must be no further attempt; empty if there may be one."""
        # A draining replica turns requests away that it had no part in yet: that is no attempt.
        attempts = sum(one.error.state is not ReplicaState.DRAINING for one in self.losses)
        if attempts >= MAX_ATTEMPTS:
            return f"and {MAX_ATTEMPTS} attempts are the limit"
        if self.losses and self.left_s <= 0:
            return f"and its time limit of {self.request.timeout_s:g} s is over"
        return "" if self.so_far is None else self.so_far.final_reason

    def send(self, actor: Any) -> EngineRequest:
        """The request for an actor: with what is left of its time limit, and of its answer."""
        request = self.request
        if self.has_waited or self.losses:
            timeout_s = max(self.left_s, LEAST_TIMEOUT_S)
            request = dataclasses.replace(request, timeout_s=timeout_s, attempt=len(self.losses))
        self.actor, self.abort_id = actor, request.abort_id
        return request if self.so_far is None else self.so_far.follow_up(request)

    def lose(self, error: errors.ReplicaUnavailableError) -> None:
        """Notes that a replica lost or refused the request, and gives its place back."""
        self.place.release()
        self.losses.append(Loss(error, self.actor, self.abort_id))
        self.actor, self.abort_id = None, ""

    def note(self, result: EngineResult) -> None:
        """Notes an answer or a step of one; gives the place back if it is the end."""
        if self.so_far is not None:
            self.so_far.add(result)
        self.has_ended = result.error is not None or result.finished
        if self.has_ended:
            # For placing what goes on from it: what is in the cache, under the oldest version.
            is_whole = result.output is not None and (self.so_far is None or self.so_far.is_whole)
            answers = result.output.answers if result.output is not None and is_whole else []
            begun = [one.spans[0].version for one in result.samples if one.spans]
            self.place.release(answers, min(begun, default=None))

    def end(self, error: Exception) -> EngineResult:
        """The result that says why there is no answer."""
        self.has_ended = True
        return _unanswered(self.request.request_id, error)

    def end_lost(self, why: str) -> EngineResult:
        """The result of a request that no replica takes up any more."""
        lost = tuple(one.error for one in self.losses)
        return self.end(errors.RequestLostError(self.request.request_id, lost, why))


class ReplicaWatch:
    """Gives up waiting for a replica that fails, leaves or has another actor, not if it drains."""

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], load: LoadTracker, replica: Replica
    ) -> None:
        self._replicas, self._load, self._replica = replicas, load, replica
        self._loss: errors.ReplicaUnavailableError | None = None  # why it is no longer waited for
        self._give_up_at = 0.0
        self._timer: asyncio.Timeout | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Learns inside what becomes of the replica."""
        with self._load.watched(_from_any_thread(self._check), urgent=False):
            self._check()
            yield

    async def wait(self, awaitable: Awaitable[_Answer], limit_s: float) -> _Answer:
        """Awaits an answer of the replica, for so long at most."""
        try:
            async with asyncio.timeout(limit_s) as self._timer:
                self._hurry()
                return await awaitable
        except TimeoutError:
            self._check()
            if self._loss is not None:
                raise self._loss from None
            raise
        finally:
            self._timer = None

    def _check(self) -> None:
        if self._loss is None:
            self._loss = self._find_loss()
            self._give_up_at = asyncio.get_running_loop().time() + LINGER_S
            self._hurry()

    def _hurry(self) -> None:
        timer = self._timer
        if self._loss is not None and timer is not None and not timer.expired():
            last = timer.when()
            timer.reschedule(self._give_up_at if last is None else min(last, self._give_up_at))

    def _find_loss(self) -> errors.ReplicaUnavailableError | None:
        name = self._replica.replica_id
        known, now = self._load.snapshot(name), _find(self._replicas(), name)
        if known is not None and known.state is _FAILED:
            is_away = known.away_since is not None
            return errors.ReplicaUnavailableError(name, _FAILED, known.reason, is_away)
        if now is not None and now.actor != self._replica.actor:
            return errors.ReplicaUnavailableError(name, _FAILED, "its actor was replaced")
        return _gone(name) if now is None else None


class Streams:
    """One actor's answers as they grow, over one connection, on which all come that are there."""

    # Of all: a loop holds its tasks weakly, and one that reads would be garbage between streams.
    _tasks: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, actor: Any) -> None:
        self._actor, self._writer = actor, cast("asyncio.StreamWriter | None", None)
        self._starting: list[EngineRequest] = []
        self._queues: dict[str, asyncio.Queue[Any]] = {}  # by abort id

    async def answers(
        self, request: EngineRequest, *, are_whole: bool
    ) -> AsyncGenerator[EngineResult]:
        """Yields the answer of one request as it grows; the newest, if each holds all of it."""
        queue = self._queues[request.abort_id] = asyncio.Queue[Any]()
        self._starting.append(request)
        if len(self._starting) == 1:  # with all others that come in this turn of the loop
            self._begin(self._start())
        try:
            while True:
                answer = await queue.get()
                while are_whole and not queue.empty():
                    answer = queue.get_nowait()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self._queues.pop(request.abort_id, None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self) -> None:
        starting = self._starting  # which others join until it is sent
        try:
            if self._writer is None:
                limit_s = max(one.timeout_s for one in starting) + GRACE_S
                async with asyncio.timeout(limit_s):
                    host, port, key = await _call(self._actor.streams_at)
                    reader, writer = await asyncio.open_connection(host, port)
                # The loop may end before the task has begun.
                reading, self._writer = self._begin(self._read(reader, writer)), writer
                reading.add_done_callback(lambda _: writer.close())
                writer.write(key)
            self._starting = []
            data = cloudpickle.dumps(starting)  # pyright: ignore[reportPrivateImportUsage]
            self._writer.write(framed(data))
        except Exception as error:  # noqa: BLE001
            if isinstance(error, TimeoutError):  # which there means that the replica is silent
                error = ConnectionError(f"no connection for streams: {error!r}")
            self._starting = []
            self._fail([one.abort_id for one in starting], error)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._take(reader, writer):
                pass
            self._writer = None  # others connect anew, as below
        except Exception as failure:  # noqa: BLE001  handed to who waits
            self._writer, waiting = None, [*self._queues]
            error: Exception = ConnectionError(f"the connection for streams ended: {failure!r}")
            try:  # Ray knows what became of the actor; asked too late it would end this process
                with staying_connected() as is_connected:
                    asked = self._actor.streams_at.remote() if waiting and is_connected else None
                if asked is not None:
                    with contextlib.suppress(TimeoutError):  # it has hung
                        async with asyncio.timeout(GRACE_S):
                            await asked
            except Exception as known:  # noqa: BLE001
                error = known
            self._fail(waiting, error)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Hands on what comes next; whether there is more to wait for."""
        try:
            names, results = await received(reader, IDLE_S)
        except TimeoutError:
            return bool(self._queues)
        for name, result in zip(names, results, strict=True):
            if (queue := self._queues.get(name)) is not None:
                queue.put_nowait(result)
            if result.finished or result.error is not None:
                self._queues.pop(name, None)
        await asyncio.sleep(0)  # who waited for these comes first
        writer.write(_TAKEN)
        return True

    def _fail(self, names: Collection[str], error: Exception) -> None:
        """Raises an error where answers to these are waited for."""
        for name in names:
            if (queue := self._queues.pop(name, None)) is not None:
                queue.put_nowait(error)


class Dispatcher:
    """Sends requests to replicas, three times at most; each ends once, with its place free."""

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        load: LoadTracker,
        recovers: Callable[[], bool] = lambda: False,
        on_retry: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._replicas, self._load, self._recovers = replicas, load, recovers
        self._on_retry = on_retry
        # By loop and actor, as long as one of them lasts: callers have loops of their own.
        self._streams = weakref.WeakValueDictionary[tuple[Any, Any], Streams]()

    async def run(
        self,
        requests: Sequence[EngineRequest],
        reserve: Reserve,
        *,
        on_result: Accept = lambda _: None,
    ) -> list[EngineResult]:
        """Runs every request to an output or an error; what a dead replica lost goes to others."""
        results: dict[str, EngineResult] = {}
        begin = time.monotonic()

        def accept(result: EngineResult) -> None:
            results[result.request_id] = result
            on_result(result)

        await self._place([PendingRequest(one, begin) for one in requests], reserve, accept)
        return [results[request.request_id] for request in requests]

    async def stream(
        self, request: EngineRequest, reserve: Reserve
    ) -> AsyncGenerator[EngineResult]:
        """Yields the partial outputs of one request, the last one finished.

        After a lost replica another goes on where sampling allows that (``AnswerSoFar``), or
        begins again; a stream of only new tokens then ends with a ``RequestLostError``.
        """
        pending = PendingRequest(request, time.monotonic(), AnswerSoFar(request))
        while not pending.has_ended:
            async with self._reserved([pending], reserve) as (shares, results):
                for result in results:
                    yield result
                for replica_id, share in shares.items():
                    async with contextlib.aclosing(self._call(replica_id, share)) as steps:
                        async for result in steps:
                            yield result

    async def _place(
        self, pending: Sequence[PendingRequest], reserve: Reserve, accept: Accept
    ) -> None:
        """Sends each request to a replica, and those that it lost to another."""

        async def serve(replica_id: str, share: list[PendingRequest]) -> None:
            async with contextlib.aclosing(self._call(replica_id, share)) as results:
                async for result in results:
                    accept(result)
            if again := [one for one in share if not one.has_ended]:
                await self._place(again, reserve, accept)

        async with self._reserved(pending, reserve) as (shares, results):
            for result in results:
                accept(result)
            try:
                async with asyncio.TaskGroup() as group:
                    for replica_id, share in shares.items():
                        group.create_task(serve(replica_id, share))
            except BaseExceptionGroup as failures:  # such as what cannot be pickled
                raise failures.exceptions[0] from None

    async def _call(
        self, replica_id: str, share: Sequence[PendingRequest]
    ) -> AsyncGenerator[EngineResult]:
        """Yields one replica's answers; what it loses stays for another, or ends here."""
        pending = {one.request.request_id: one for one in share}
        async with contextlib.aclosing(self._answers(replica_id, share)) as answers:
            async for result in answers:
                one = pending[result.request_id]
                if not isinstance(result.error, errors.ReplicaUnavailableError):
                    one.note(result)
                    yield self._completed(result)
                else:
                    one.lose(result.error)
                    if why := one.final_reason:
                        yield one.end_lost(why)

    async def _answers(
        self, replica_id: str, share: Sequence[PendingRequest]
    ) -> AsyncGenerator[EngineResult]:
        """Yields one replica's answers; what it leaves unanswered is answered by an error."""
        replica = _find(self._replicas(), replica_id)
        if replica is None:
            self._mark(_gone(replica_id), None)
            for one in share:
                yield _unanswered(one.request.request_id, _gone(replica_id))
            return
        actor = replica.actor
        await self._end_former(actor, share)
        asked = [one.send(actor) for one in share]
        if num_retries := sum(one.attempt > 0 for one in asked):
            self._on_retry(num_retries)
        left = {one.request_id: one.abort_id for one in asked}
        limit_s = max(one.timeout_s for one in asked) + GRACE_S
        end, watch = time.monotonic() + limit_s, ReplicaWatch(self._replicas, self._load, replica)
        key, so_far = (asyncio.get_running_loop(), actor), share[0].so_far
        is_stream = so_far is not None
        lost: errors.ReplicaUnavailableError | None = None
        may_return, reason = False, ""

        def failure(name: str) -> Exception:
            if reason:
                return errors.GenerationError(name, reason)
            late = f"request {name}: replica {replica_id} did not answer within {limit_s:g} s"
            return errors.GenerationTimeoutError(late)

        async def next_answer() -> Any:
            return [await anext(answers)] if is_stream else await (await anext(answers))

        try:
            try:
                if so_far is not None:
                    streams = self._streams.setdefault(key, Streams(actor))
                    answers: Any = streams.answers(asked[0], are_whole=so_far.is_whole)
                else:
                    run_batch = actor.run_batch.options(num_returns="streaming")
                    answers = aiter(_call(run_batch, asked))
                with watch.active():
                    while left:
                        # A stream may be read slowly, and each step in a task of its own: there the
                        # limit is on silence.
                        step_s = limit_s if is_stream else end - time.monotonic()
                        answer = await watch.wait(next_answer(), step_s)
                        for result in answer:
                            if result.error is not None or result.finished:
                                del left[result.request_id]
                            if isinstance(result.error, errors.ReplicaUnavailableError):
                                self._mark(result.error, actor)
                            yield result
            except errors.ReplicaUnavailableError as error:
                lost, may_return = error, True
            except RayError as error:
                reason = f"replica {replica_id}: {error}"
                lost = errors.loss(replica_id, error)
                if lost is not None:
                    self._mark(lost, actor)
                    may_return = lost.may_return
            except TimeoutError:
                silence = f"it was silent for {limit_s:g} s"
                self._mark(errors.ReplicaUnavailableError(replica_id, _FAILED, silence), actor)
            except OSError as error:
                lost = errors.ReplicaUnavailableError(replica_id, _FAILED, str(error), True)
                may_return = True
            names, ids = list(left), list(left.values())
            if left:  # the next stream shall not wait for the same connection
                self._streams.pop(key, None)
            if lost is not None:
                left.clear()
                if may_return and ids:  # not waited for: it is out of reach
                    _call(actor.abort, ids)
            for name in names:
                yield _unanswered(name, lost or failure(name))
        finally:
            if left:
                await asyncio.shield(self._abort(actor, list(left.values())))

    @contextlib.asynccontextmanager
    async def _reserved(
        self, pending: Sequence[PendingRequest], reserve: Reserve
    ) -> AsyncGenerator[tuple[dict[str, list[PendingRequest]], list[EngineResult]]]:
        """Gives the requests by the replica that has their places, or the ends of all of them."""
        shares: dict[str, list[PendingRequest]] = {}
        results: list[EngineResult] = []
        with contextlib.ExitStack() as places:
            try:
                for one, place in zip(pending, await self._reserve(pending, reserve), strict=True):
                    one.place = places.enter_context(place)
                    shares.setdefault(place.replica_id, []).append(one)
            except errors.NoReplicaAvailableError as error:
                if not any(one.losses for one in pending):
                    raise
                results = [one.end_lost(f"and {error}") for one in pending]
            except errors.VersionNotReachedError as error:
                results = [one.end(error) for one in pending]
            yield shares, results

    async def _reserve(
        self, pending: Sequence[PendingRequest], reserve: Reserve
    ) -> list[Reservation]:
        """Reserves places, waiting up to the time limit for the version or a replica on its way."""
        changed, requests = asyncio.Event(), [one.request for one in pending]

        def try_once() -> list[Reservation]:
            actors = {one.replica_id: one.actor for one in self._replicas()}
            # What died with one of the requests is avoided, unless it was restarted since.
            lost_with = {
                error.replica_id
                for one in pending
                for error, actor, _ in one.losses
                if not error.may_return and error.state not in _PASSING
                if actors.get(error.replica_id, actor) == actor
            }
            return reserve(requests, lost_with)

        with contextlib.suppress(errors.VersionNotReachedError, errors.NoReplicaAvailableError):
            return try_once()
        limit_s = max(request.timeout_s for request in requests)
        for one in pending:
            one.has_waited = True
        with self._load.watched(_from_any_thread(changed.set)):
            while True:
                changed.clear()
                left_s = max(one.left_s for one in pending)
                try:
                    return try_once()
                except errors.VersionNotReachedError as error:
                    if left_s <= 0:
                        raise errors.VersionNotReachedError(
                            error.version, error.held, limit_s
                        ) from None
                    if not self._replicas():  # of which the ledger learns no more
                        raise errors.NoReplicaAvailableError("the service was shut down") from None
                except errors.NoReplicaAvailableError:
                    if left_s <= 0 or not self._recovers():
                        raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, RECOVERY_POLL_S)):
                        await changed.wait()

    def _mark(self, error: errors.ReplicaUnavailableError, actor: Any) -> None:
        """Has the balancer avoid a replica until it reports that it serves."""
        now, name = _find(self._replicas(), error.replica_id), error.replica_id
        if (None if now is None else now.actor) != actor:
            return
        with self._load.lock:
            known = self._load.snapshot(name)
            # One that is being restarted is known not to take any.
            if known is not None and (now is not None or known.state.admits_requests):
                self._load.mark(name, error.state, error.reason, may_return=error.may_return)

    async def _abort(self, actor: Any, request_ids: list[str]) -> None:
        """Has the engine drop requests; one that is dead or hung has nothing to drop."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await _call(actor.abort, request_ids)
        except (RayError, TimeoutError, errors.ServiceClosedError) as error:
            logger.warning("could not abort %d requests: %s", len(request_ids), error)

    async def _end_former(self, actor: Any, pending: Sequence[PendingRequest]) -> None:
        """Aborts what an actor that was out of reach may still do for requests it gets again."""
        losses = [loss for one in pending for loss in one.losses]
        if left := [one.abort_id for one in losses if one.error.may_return and one.actor == actor]:
            await self._abort(actor, left)

    def _completed(self, result: EngineResult) -> EngineResult:
        """Has an error about a version say what every replica holds, not only the one asked."""
        error = result.error
        if not isinstance(error, errors.VersionNotReachedError):
            return result
        held = {one.replica_id: one.describe() for one in self._load.snapshots()} | error.held
        told = errors.VersionNotReachedError(error.version, held, error.timeout_s)
        return dataclasses.replace(result, error=told)


def _call(method: Any, *args: Any, **options: Any) -> Any:
    """Calls an actor, unless Ray was shut down: another would be started, or this process ended."""
    with staying_connected() as is_connected:
        if not is_connected:
            raise errors.ServiceClosedError("Ray was shut down, and the service with it")
        return method.remote(*args, **options)


def _from_any_thread(callback: Callable[[], object]) -> Callable[[], None]:
    """Has the running loop call something, unless it was closed under its requests."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    return call


def _find(replicas: Sequence[Replica], replica_id: str) -> Replica | None:
    """A replica, or ``None`` if it was removed or the service shut down."""
    return next((one for one in replicas if one.replica_id == replica_id), None)


def _unanswered(request_id: str, error: Exception) -> EngineResult:
    return EngineResult(request_id=request_id, replica_id="", error=error)


def _gone(replica_id: str) -> errors.ReplicaUnavailableError:
    return errors.ReplicaUnavailableError(replica_id, ReplicaState.CLOSED, "it left the service")

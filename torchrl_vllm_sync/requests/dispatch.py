"""Sending requests to replicas: batches and streams, attempts, deaths, every one answered once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    RequestLostError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.ray_errors import loss
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests.continuation import AnswerSoFar
from torchrl_vllm_sync.requests.messages import EngineResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence

    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.requests.messages import EngineRequest
    from torchrl_vllm_sync.routing.balancer import Reservation
    from torchrl_vllm_sync.routing.ledger import LoadTracker

    Reserve = Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]
    Accept = Callable[[EngineResult], None]

logger = logging.getLogger(__name__)

# One request on its way through several replicas: what each ended with, and what may follow.


# A replica that died, or turned stale, costs a request one attempt; the next goes elsewhere.
MAX_ATTEMPTS = 3
# What a request whose version came at the last moment gets all the same, in seconds.
LEAST_TIMEOUT_S = 0.001
# Whoever refuses in these states says so in the ledger, and is a candidate again when that is over.
_PASSING = (ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.DRAINING, ReplicaState.STALE)


@dataclass(slots=True)
class PendingRequest:
    """A request that has no result yet.

    Attributes:
        request: As it was given.
        begin: ``time.monotonic()`` from which its time limit counts.
        losses: What each replica that had it ended with, in order.
        lost_with: Actors that it was lost with for good: a replica that was restarted has another.
        left_with: Actors that were only out of reach, and may still be at work on it: each with the
            id by which it is aborted there.
        has_waited: Whether it had to wait for a replica, which counts against its time limit.
    """

    request: EngineRequest
    begin: float
    losses: list[ReplicaUnavailableError] = field(default_factory=list)
    lost_with: list[tuple[str, Any]] = field(default_factory=list)
    left_with: list[tuple[Any, str]] = field(default_factory=list)
    has_waited: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left of its time limit."""
        return self.begin + self.request.timeout_s - time.monotonic()

    def note(self, loss: ReplicaUnavailableError, actor: Any) -> None:
        """Takes note that a replica lost or refused the request."""
        if loss.may_return:
            self.left_with.append((actor, self.shortened().abort_id))
        elif loss.state not in _PASSING:
            self.lost_with.append((loss.replica_id, actor))
        self.losses.append(loss)

    @property
    def verdict(self) -> str:
        """Why there must be no further attempt; empty if there may be one.

        A draining replica turns requests away that it had no part in yet: that is no attempt.
        """
        attempts = sum(one.state is not ReplicaState.DRAINING for one in self.losses)
        if attempts >= MAX_ATTEMPTS:
            return f"and {MAX_ATTEMPTS} attempts are the limit"
        if self.losses and self.left_s <= 0:
            return f"and its time limit of {self.request.timeout_s:g} s is over"
        return ""

    def lost(self, why: str) -> EngineResult:
        """Returns the result of a request that nobody takes up any more."""
        name = self.request.request_id
        return failed(self.request, RequestLostError(name, tuple(self.losses), why))

    def shortened(self) -> EngineRequest:
        """Returns the request as it is sent next, with what is left of its time limit."""
        if not self.has_waited and not self.losses:
            return self.request
        timeout_s = max(self.left_s, LEAST_TIMEOUT_S)
        return dataclasses.replace(self.request, timeout_s=timeout_s, attempt=len(self.losses))


def lost_all(pending: Iterable[PendingRequest], replicas: Iterable[Replica]) -> set[str]:
    """Returns the ids of the replicas that lost one of these requests and have no other actor."""
    actors = {one.replica_id: one.actor for one in replicas}
    return {
        replica_id
        for one in pending
        for replica_id, actor in one.lost_with
        if actors.get(replica_id, actor) == actor
    }


def failed(request: EngineRequest, error: Exception) -> EngineResult:
    """Returns the result of a request that ended with an error."""
    return EngineResult(request_id=request.request_id, replica_id="", error=error)


# Waiting for one replica: up to a time limit, and not once it is known to have failed.


# What a failed replica had sent before is on its way for at most this long, in seconds.
LINGER_S = 0.2


class ReplicaWatch:
    """Gives up waiting for a replica that fails, leaves the service or gets another actor.

    A replica that is draining or stale goes on being waited for: it answers what it has, or ends it
    by itself.

    Example:
        >>> watch = ReplicaWatch(lambda: replicas, load, replica)
        >>> async with watch.limited(60.0):
        ...     answer = await replica.actor.report.remote()

    Attributes:
        loss: Why it is no longer waited for; ``None`` while it is.
    """

    def __init__(
        self, replicas: Callable[[], list[Replica]], load: LoadTracker, replica: Replica
    ) -> None:
        self._replicas, self._load, self._replica = replicas, load, replica
        self.loss: ReplicaUnavailableError | None = None

    @contextlib.asynccontextmanager
    async def limited(self, limit_s: float) -> AsyncGenerator[None]:
        """Bounds what is awaited inside."""
        loop = asyncio.get_running_loop()
        inside = True

        def notice() -> None:
            # In whatever thread learns of it: a replica that is restarted at once has no longer
            # failed when the loop gets round to looking.
            self._note_failure()
            with contextlib.suppress(RuntimeError):  # the loop was closed under its requests
                loop.call_soon_threadsafe(look)

        def look() -> None:
            if not inside:
                return
            self._note_absence()
            last = timer.when()
            if self.loss is not None and last is not None and not timer.expired():
                timer.reschedule(min(last, loop.time() + LINGER_S))

        try:
            async with asyncio.timeout(limit_s) as timer:
                with self._load.watched(notice, urgent=False):
                    self._note_failure()
                    look()
                    yield
        except TimeoutError:
            if self.loss is not None:
                raise self.loss from None
            raise
        finally:
            inside = False

    def _note_failure(self) -> None:
        name = self._replica.replica_id
        known = self._load.snapshot(name)
        if self.loss is None and known is not None and known.state is ReplicaState.FAILED:
            is_away = known.away_since is not None
            self.loss = ReplicaUnavailableError(name, known.state, known.reason, is_away)

    def _note_absence(self) -> None:
        if self.loss is not None:
            return
        name = self._replica.replica_id
        now = next((one for one in self._replicas() if one.replica_id == name), None)
        if now is None:
            self.loss = ReplicaUnavailableError(name, ReplicaState.CLOSED, "it left the service")
        elif now.actor != self._replica.actor:
            self.loss = ReplicaUnavailableError(name, ReplicaState.FAILED, "its actor was replaced")


# What every way of sending requests needs of the replicas: places, actors, marks, aborts.


# Engines end a request at its time limit. A replica silent for this much longer has hung.
GRACE_S = 10.0
# Seconds for telling a replica to drop requests nobody waits for any more.
ABORT_TIMEOUT_S = 5.0
# Seconds between looks at whether a replica is still on its way.
RECOVERY_POLL_S = 0.5


class ReplicaAccess:
    """Access to the replicas of a service."""

    def __init__(
        self,
        replicas: Callable[[], list[Replica]],
        load: LoadTracker,
        recovers: Callable[[], bool],
    ) -> None:
        self._replicas, self._load, self._recovers = replicas, load, recovers

    async def reserve(
        self, pending: Sequence[PendingRequest], reserve: Reserve
    ) -> list[Reservation]:
        """Reserves a place for each request, waiting for a replica up to their time limit.

        It waits for one at their version, and for any while one is on its way. What died with one
        of the requests is avoided, unless it was restarted since.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        requests = [one.request for one in pending]

        def notice() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed under its requests
                loop.call_soon_threadsafe(changed.set)

        def try_once() -> list[Reservation]:
            return reserve(requests, lost_all(pending, self._replicas()))

        with contextlib.suppress(VersionNotReachedError, NoReplicaAvailableError):
            return try_once()
        limit_s = max(request.timeout_s for request in requests)
        for one in pending:
            one.has_waited = True
        with self._load.watched(notice):
            while True:
                changed.clear()
                left_s = max(one.left_s for one in pending)
                try:
                    return try_once()
                except VersionNotReachedError as error:
                    if left_s <= 0:
                        raise VersionNotReachedError(error.version, error.held, limit_s) from None
                    if not self._replicas():  # of whom the ledger hears no more
                        raise NoReplicaAvailableError("the service was shut down") from None
                except NoReplicaAvailableError:
                    if left_s <= 0 or not self._recovers():
                        raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, RECOVERY_POLL_S)):
                        await changed.wait()

    def replica(self, replica_id: str) -> Replica | None:
        """Returns a replica, or ``None`` if it was removed or the service shut down."""
        return next((one for one in self._replicas() if one.replica_id == replica_id), None)

    def watch(self, replica: Replica) -> ReplicaWatch:
        """Returns what bounds the waits for a replica."""
        return ReplicaWatch(self._replicas, self._load, replica)

    def mark(self, error: ReplicaUnavailableError, actor: Any) -> None:
        """Has the balancer avoid a replica until it reports that it serves."""
        now = self.replica(error.replica_id)
        if (None if now is None else now.actor) != actor:
            return
        with self._load.lock:
            known = self._load.snapshot(error.replica_id)
            if known is None or (now is None and not known.state.admits_requests):
                return  # one that is being restarted is known not to take any
            self._load.mark(
                error.replica_id, error.state, error.reason, may_return=error.may_return
            )

    async def abort(self, actor: Any, request_ids: list[str]) -> None:
        """Has the engine drop requests; one that is dead or hung has nothing to drop."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await actor.abort.remote(request_ids)
        except (RayError, TimeoutError) as error:
            logger.warning("could not abort %d requests: %s", len(request_ids), error)

    async def end_former(self, actor: Any, pending: Iterable[PendingRequest]) -> None:
        """Aborts what an actor that was out of reach may still do for requests it gets again."""
        left = [name for one in pending for former, name in one.left_with if former == actor]
        if left:
            await self.abort(actor, left)

    def disown(self, actor: Any, request_ids: list[str]) -> None:
        """Tells an actor that is not waited for to drop requests, should it come back to life."""
        if request_ids:
            actor.abort.remote(request_ids)

    def completed(self, result: EngineResult) -> EngineResult:
        """Has an error about a version say what every replica holds, not only the one asked."""
        error = result.error
        if not isinstance(error, VersionNotReachedError):
            return result
        held = {one.replica_id: one.describe() for one in self._load.snapshots()} | error.held
        told = VersionNotReachedError(error.version, held, error.timeout_s)
        return dataclasses.replace(result, error=told)


def gone(replica_id: str) -> ReplicaUnavailableError:
    """Says that a replica had left before it was called."""
    return ReplicaUnavailableError(replica_id, ReplicaState.CLOSED, "it left the service")


def silence(replica_id: str, limit_s: float) -> ReplicaUnavailableError:
    """Says that a replica did not end a request at its time limit, as all do."""
    reason = f"it was silent for {limit_s:g} s"
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, reason)


def timed_out(request: EngineRequest, replica_id: str, limit_s: float) -> GenerationTimeoutError:
    """Returns the error of a request that such a replica had."""
    return GenerationTimeoutError(
        f"request {request.request_id}: replica {replica_id} did not answer within {limit_s:g} s"
    )


# Streaming one request, from as many replicas as it takes.


async def stream_request(
    access: ReplicaAccess, request: EngineRequest, reserve: Reserve
) -> AsyncGenerator[EngineResult]:
    """Yields the partial outputs of one request, the last one finished.

    When its replica is lost another takes it up, up to three attempts in all. It goes on behind the
    tokens that were received where the sampling parameters allow that, see ``continuation``.
    Otherwise it begins again: outputs that hold all tokens so far then start over. A stream of
    outputs that hold only new tokens cannot, and ends with a ``RequestLostError``.
    """
    pending, so_far = PendingRequest(request, time.monotonic()), AnswerSoFar(request)
    while True:
        try:
            (reservation,) = await access.reserve([pending], reserve)
        except NoReplicaAvailableError as error:
            if not pending.losses:
                raise
            yield pending.lost(f"and {error}")
            return
        except VersionNotReachedError as error:
            yield failed(request, error)
            return
        with reservation:
            replica = access.replica(reservation.replica_id)
            if replica is None:
                access.mark(gone(reservation.replica_id), None)
                pending.note(gone(reservation.replica_id), None)
            else:
                await access.end_former(replica.actor, [pending])
                asked = so_far.follow_up(pending.shortened())
                steps = _steps(access, asked, replica, reservation)
                try:
                    async for result in steps:
                        so_far.add(result)
                        yield result
                except ReplicaUnavailableError as error:
                    pending.note(error, replica.actor)
                else:
                    return
                finally:
                    await steps.aclose()
        why = pending.verdict or so_far.verdict
        if why:
            yield pending.lost(why)
            return


async def _steps(
    access: ReplicaAccess, request: EngineRequest, replica: Replica, reservation: Reservation
) -> AsyncGenerator[EngineResult]:
    """Yields what one replica answers, up to the end."""
    from vllm.sampling_params import RequestOutputKind

    params, actor, name = request.sampling_params, replica.actor, replica.replica_id
    # Whether the last output has all tokens, and not only those of a step or of one sample.
    is_whole = params.n == 1 and params.output_kind is not RequestOutputKind.DELTA
    # A stream may be read slowly, and each step in a task of its own: the limit is on silence.
    limit_s = request.timeout_s + GRACE_S
    watch, ended = access.watch(replica), False
    try:
        refs = aiter(actor.stream.options(num_returns="streaming").remote(request))
        while not ended:
            try:
                async with watch.limited(limit_s):
                    result: EngineResult = await (await anext(refs))
            except ReplicaUnavailableError:
                ended = True
                access.disown(actor, [request.abort_id])
                raise
            except RayError as error:
                found = loss(name, error)
                if found is not None:
                    ended = True
                    access.mark(found, actor)
                    if found.may_return:
                        access.disown(actor, [request.abort_id])
                    raise found from None
                reason = f"replica {name}: {error}"
                yield failed(request, GenerationError(request.request_id, reason))
                return
            except TimeoutError:
                access.mark(silence(name, limit_s), actor)
                yield failed(request, timed_out(request, name, limit_s))
                return
            ended = result.error is not None or result.finished
            if isinstance(result.error, ReplicaUnavailableError):
                access.mark(result.error, actor)
                raise result.error
            if ended:
                reservation.release(_streamed_answers(result) if is_whole else [])
            yield access.completed(result)
    finally:
        if not ended:
            await asyncio.shield(access.abort(actor, [request.abort_id]))


def _streamed_answers(result: EngineResult) -> list[Any]:
    """Token ids of the one sample of a result, for whom places the next requests."""
    return [] if result.output is None else result.output.answers


class Dispatcher:
    """Sends requests to replicas and collects one result for each."""

    def __init__(
        self,
        replicas: Callable[[], list[Replica]],
        load: LoadTracker,
        recovers: Callable[[], bool] = lambda: False,
    ) -> None:
        self._access = ReplicaAccess(replicas, load, recovers)

    async def run(
        self,
        requests: Sequence[EngineRequest],
        reserve: Reserve,
        *,
        on_result: Accept | None = None,
    ) -> list[EngineResult]:
        """Runs every request to a result, an output or an error.

        What a replica lost by dying is sent to the others, up to three attempts; results that had
        arrived are kept. Cancelling ends the engines' work too.
        """
        results: dict[str, EngineResult] = {}
        begin = time.monotonic()

        def accept(result: EngineResult) -> None:
            results[result.request_id] = result
            if on_result is not None:
                on_result(result)

        await self._place([PendingRequest(one, begin) for one in requests], reserve, accept)
        return [results[request.request_id] for request in requests]

    async def _place(
        self, pending: Sequence[PendingRequest], reserve: Reserve, accept: Accept
    ) -> None:
        """Sends each request to a replica, and those that it lost to another."""
        try:
            reservations = await self._access.reserve(pending, reserve)
        except NoReplicaAvailableError as error:
            if not any(one.losses for one in pending):
                raise
            for one in pending:
                accept(one.lost(f"and {error}"))
            return
        except VersionNotReachedError as error:
            for one in pending:
                accept(failed(one.request, error))
            return
        shares: dict[str, list[tuple[PendingRequest, Reservation]]] = {}
        for one, reservation in zip(pending, reservations, strict=True):
            shares.setdefault(reservation.replica_id, []).append((one, reservation))
        with contextlib.ExitStack() as releases:
            for reservation in reservations:
                releases.callback(reservation.release)
            try:
                async with asyncio.TaskGroup() as group:
                    for replica_id, share in shares.items():
                        group.create_task(self._serve(replica_id, share, reserve, accept))
            except BaseExceptionGroup as failures:  # such as what cannot be pickled
                raise failures.exceptions[0] from None

    async def _serve(
        self,
        replica_id: str,
        share: list[tuple[PendingRequest, Reservation]],
        reserve: Reserve,
        accept: Accept,
    ) -> None:
        """Has one replica run its share, and others what it lost."""
        lost = await self._call(replica_id, share, accept)
        for one in [one for one in lost if one.verdict]:
            accept(one.lost(one.verdict))
        again = [one for one in lost if not one.verdict]
        if again:
            await self._place(again, reserve, accept)

    async def _call(
        self,
        replica_id: str,
        share: list[tuple[PendingRequest, Reservation]],
        accept: Accept,
    ) -> list[PendingRequest]:
        """Makes the one call to one replica, giving places back as results arrive."""
        inside = {one.request.request_id: (one, place) for one, place in share}
        lost: list[PendingRequest] = []
        actor: Any = None

        def lose(request_id: str, error: ReplicaUnavailableError) -> None:
            one, place = inside.pop(request_id)
            place.release()
            one.note(error, actor)
            lost.append(one)

        def lose_all(error: ReplicaUnavailableError) -> None:
            for request_id in list(inside):
                lose(request_id, error)

        def abort_ids() -> list[str]:
            return [one.abort_id for one in batch if one.request_id in inside]

        replica = self._access.replica(replica_id)
        if replica is None:
            self._access.mark(gone(replica_id), None)
            lose_all(gone(replica_id))
            return lost
        actor = replica.actor
        await self._access.end_former(actor, [one for one, _ in share])
        batch = [one.shortened() for one, _ in share]
        limit_s = max(request.timeout_s for request in batch) + GRACE_S
        try:
            async with self._access.watch(replica).limited(limit_s):
                async for ref in actor.run_batch.options(num_returns="streaming").remote(
                    batch, want_prompt=False
                ):
                    for result in await ref:
                        if isinstance(result.error, ReplicaUnavailableError):
                            self._access.mark(result.error, actor)
                            lose(result.request_id, result.error)
                            continue
                        _, place = inside.pop(result.request_id)
                        place.release(_answers(result), _begun(result))
                        accept(self._access.completed(result))
        except ReplicaUnavailableError as error:
            self._access.disown(actor, abort_ids())
            lose_all(error)
        except RayError as error:
            found = loss(replica_id, error)
            if found is not None:
                self._access.mark(found, actor)
                if found.may_return:
                    self._access.disown(actor, abort_ids())
                lose_all(found)
            for one, _ in inside.values():
                reason = f"replica {replica_id}: {error}"
                accept(failed(one.request, GenerationError(one.request.request_id, reason)))
        except TimeoutError:
            self._access.mark(silence(replica_id, limit_s), actor)
            for one, _ in inside.values():
                accept(failed(one.request, timed_out(one.request, replica_id, limit_s)))
        finally:
            if inside:
                await asyncio.shield(self._access.abort(actor, abort_ids()))
        return lost

    def stream(self, request: EngineRequest, reserve: Reserve) -> AsyncGenerator[EngineResult]:
        """Yields the partial outputs of one request, the last one finished.

        See :func:`stream_request`.
        """
        return stream_request(self._access, request, reserve)


def _answers(result: EngineResult) -> list[Any]:
    """Token ids of the samples of a result, for whom places the next requests."""
    return [] if result.output is None else result.output.answers


def _begun(result: EngineResult) -> int | None:
    """Oldest version that sampled a token of a result, whose keys and values its replica has."""
    return min((one.spans[0].version for one in result.samples if one.spans), default=None)

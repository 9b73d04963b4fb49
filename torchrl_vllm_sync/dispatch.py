"""Sending a batch to its replicas: one Ray call for each, and every request answered once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from ray.exceptions import ObjectLostError, RayActorError, RayError

from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests import EngineResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence

    from torchrl_vllm_sync.load import LoadTracker
    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.requests import EngineRequest
    from torchrl_vllm_sync.reservation import Reservation

    Reserve = Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

# A replica that died, or turned stale, costs a request one attempt; the next goes elsewhere.
MAX_ATTEMPTS = 3
# Engines end a request at its time limit. A replica silent for this much longer has hung.
GRACE_S = 10.0
# Seconds for telling a replica to drop requests nobody waits for any more.
ABORT_TIMEOUT_S = 5.0
# What a request whose version came at the last moment gets all the same, in seconds.
LEAST_TIMEOUT_S = 0.001


class Dispatcher:
    """Sends requests to replicas and collects one result for each.

    Args:
        replicas: Returns the current replicas.
        load: Ledger to mark replicas in that turn out dead or stale.
    """

    def __init__(self, replicas: Callable[[], list[Replica]], load: LoadTracker) -> None:
        self._replicas, self._load = replicas, load

    async def run(
        self,
        requests: Sequence[EngineRequest],
        reserve: Reserve,
        *,
        on_result: Callable[[EngineResult], None] | None = None,
    ) -> list[EngineResult]:
        """Runs every request to a result, an output or an error.

        What a replica lost by dying is sent to the others, up to three attempts; results that had
        arrived are kept. Cancelling ends the engines' work too.

        Args:
            requests: Requests with unique ids, and one ``min_version``. None is sent before a
                replica holds that; the wait counts against their time limits.
            reserve: Reserves a replica for each of the given requests, avoiding the given ids.
            on_result: Called with each result as it arrives.

        Returns:
            Results in the order of ``requests``.

        Raises:
            NoReplicaAvailableError: No replica took requests at the first attempt.
        """
        results: dict[str, EngineResult] = {}
        waiting = list(requests)
        lost: list[tuple[EngineRequest, Exception]] = []
        avoid: set[str] = set()
        begin = time.monotonic()

        def accept(result: EngineResult) -> None:
            results[result.request_id] = result
            if on_result is not None:
                on_result(result)

        for attempt in range(MAX_ATTEMPTS):
            try:
                reservations = await self._reserve(waiting, reserve, avoid, begin)
            except NoReplicaAvailableError:
                if attempt == 0:
                    raise
                break
            except VersionNotReachedError as error:
                lost = [(request, error) for request in waiting]
                break
            waiting = [_shortened(request, begin) for request in waiting]
            dropped = await self._attempt(waiting, reservations, accept)
            lost = [(request, error) for request, error in dropped]
            avoid |= {error.replica_id for _, error in dropped}
            waiting = [request for request, _ in dropped]
            if not waiting:
                break
        for request, error in lost:
            accept(_failed(request, error))
        return [results[request.request_id] for request in requests]

    async def _reserve(
        self,
        requests: Sequence[EngineRequest],
        reserve: Reserve,
        avoid: Collection[str],
        begin: float,
    ) -> list[Reservation]:
        """Reserves, waiting up to the requests' time limit for a replica at their version.

        Args:
            requests: Requests with one ``min_version``.
            reserve: See :meth:`run`.
            avoid: Ids of replicas not to use.
            begin: ``time.monotonic()`` from which the limit counts.

        Raises:
            NoReplicaAvailableError: No replica takes requests.
            VersionNotReachedError: None came to hold the version.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notice() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed under its requests
                loop.call_soon_threadsafe(changed.set)

        limit_s = max(request.timeout_s for request in requests)
        with contextlib.suppress(VersionNotReachedError):
            return reserve(requests, avoid)
        with self._load.watched(notice):
            while True:
                changed.clear()
                try:
                    return reserve(requests, avoid)
                except VersionNotReachedError as error:
                    left_s = begin + limit_s - time.monotonic()
                    if left_s <= 0:
                        raise VersionNotReachedError(error.version, error.held, limit_s) from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await changed.wait()

    async def _attempt(
        self,
        requests: Sequence[EngineRequest],
        reservations: Sequence[Reservation],
        accept: Callable[[EngineResult], None],
    ) -> list[tuple[EngineRequest, ReplicaUnavailableError]]:
        """Sends each request to its reserved replica; returns those that the replica lost."""
        shares: dict[str, list[tuple[EngineRequest, Reservation]]] = {}
        for request, reservation in zip(requests, reservations, strict=True):
            shares.setdefault(reservation.replica_id, []).append((request, reservation))
        with contextlib.ExitStack() as releases:
            for reservation in reservations:
                releases.callback(reservation.release)
            try:
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(self._call(replica_id, share, accept))
                        for replica_id, share in shares.items()
                    ]
            except BaseExceptionGroup as failures:  # such as what cannot be pickled
                raise failures.exceptions[0] from None
        return [one for call in calls for one in call.result()]

    async def _call(
        self,
        replica_id: str,
        share: list[tuple[EngineRequest, Reservation]],
        accept: Callable[[EngineResult], None],
    ) -> list[tuple[EngineRequest, ReplicaUnavailableError]]:
        """Makes the one call to one replica, giving places back as results arrive."""
        open_requests = {request.request_id: (request, place) for request, place in share}
        lost: list[tuple[EngineRequest, ReplicaUnavailableError]] = []

        def lose_all(error: ReplicaUnavailableError) -> None:
            self._mark(error)
            lost.extend((request, error) for request, _ in open_requests.values())
            open_requests.clear()

        actor = self._actor(replica_id)
        if actor is None:
            lose_all(_gone(replica_id))
            return lost
        limit_s = max(request.timeout_s for request, _ in share) + GRACE_S
        batch = [request for request, _ in share]
        try:
            async with asyncio.timeout(limit_s):
                async for ref in actor.run_batch.options(num_returns="streaming").remote(
                    batch, want_prompt=False
                ):
                    for result in await ref:
                        request, place = open_requests.pop(result.request_id)
                        place.release(_answers(result), _begun(result))
                        if isinstance(result.error, ReplicaUnavailableError):
                            self._mark(result.error)
                            lost.append((request, result.error))
                        else:
                            accept(self._completed(result))
        except (RayActorError, ObjectLostError) as death:
            lose_all(_death(replica_id, death))
        except RayError as error:
            for request, _ in open_requests.values():
                reason = f"replica {replica_id}: {error}"
                accept(_failed(request, GenerationError(request.request_id, reason)))
        except TimeoutError:
            self._mark(_silence(replica_id, limit_s))
            for request, _ in open_requests.values():
                accept(_failed(request, _timeout(request, replica_id, limit_s)))
        finally:
            if open_requests:
                await asyncio.shield(self._abort(actor, list(open_requests)))
        return lost

    async def stream(
        self, request: EngineRequest, reserve: Reserve
    ) -> AsyncGenerator[EngineResult]:
        """Yields the partial outputs of one request, the last one finished.

        A stream that has begun stays with its replica: if that dies, the stream ends with the
        error as its last result.

        Args:
            request: What to run.
            reserve: As in :meth:`run`.

        Raises:
            NoReplicaAvailableError: No replica takes requests.
        """
        from vllm.sampling_params import RequestOutputKind

        params = request.sampling_params
        # Whether the last output has all tokens, and not only those of a step or of one sample.
        is_whole = params.n == 1 and params.output_kind is not RequestOutputKind.DELTA
        begin = time.monotonic()
        try:
            (reservation,) = await self._reserve([request], reserve, (), begin)
        except VersionNotReachedError as error:
            yield _failed(request, error)
            return
        request = _shortened(request, begin)
        replica_id = reservation.replica_id
        # A stream may be read slowly, and each step in a task of its own: the limit is on silence.
        limit_s = request.timeout_s + GRACE_S
        with reservation:
            actor = self._actor(replica_id)
            if actor is None:
                yield _failed(request, _gone(replica_id))
                return
            finished = False
            try:
                refs = aiter(actor.stream.options(num_returns="streaming").remote(request))
                while not finished:
                    async with asyncio.timeout(limit_s):
                        result: EngineResult = await (await anext(refs))
                    finished = result.error is not None or result.finished
                    if finished:
                        reservation.release(_answers(result) if is_whole else [])
                    if isinstance(result.error, ReplicaUnavailableError):
                        self._mark(result.error)
                    yield self._completed(result)
            except (RayActorError, ObjectLostError) as death:
                finished = True
                error = _death(replica_id, death)
                self._mark(error)
                yield _failed(request, error)
            except RayError as error:
                reason = f"replica {replica_id}: {error}"
                yield _failed(request, GenerationError(request.request_id, reason))
            except TimeoutError:
                self._mark(_silence(replica_id, limit_s))
                yield _failed(request, _timeout(request, replica_id, limit_s))
            finally:
                if not finished:
                    await asyncio.shield(self._abort(actor, [request.request_id]))

    def _completed(self, result: EngineResult) -> EngineResult:
        """Has an error about a version say what every replica holds, not only the one asked."""
        error = result.error
        if not isinstance(error, VersionNotReachedError):
            return result
        held = {one.replica_id: one.describe() for one in self._load.snapshots()} | error.held
        told = VersionNotReachedError(error.version, held, error.timeout_s)
        return dataclasses.replace(result, error=told)

    def _actor(self, replica_id: str) -> Any | None:  # noqa: ANN401  a Ray actor handle
        """Returns a replica's actor, or ``None`` if it was removed or the service shut down."""
        return next((one.actor for one in self._replicas() if one.replica_id == replica_id), None)

    def _mark(self, error: ReplicaUnavailableError) -> None:
        """Has the balancer avoid a replica until it reports that it serves."""
        with self._load.lock:
            if error.replica_id in self._load.replica_ids:
                self._load.mark(error.replica_id, error.state, error.reason)

    async def _abort(self, actor: Any, request_ids: list[str]) -> None:  # noqa: ANN401
        """Has the engine drop requests; one that is dead or hung has nothing to drop."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await actor.abort.remote(request_ids)
        except (RayError, TimeoutError) as error:
            logger.warning("could not abort %d requests: %s", len(request_ids), error)


def _shortened(request: EngineRequest, begin: float) -> EngineRequest:
    """Takes from a request's time limit what it has waited for its version."""
    if not request.min_version:
        return request
    left_s = request.timeout_s - (time.monotonic() - begin)
    return dataclasses.replace(request, timeout_s=max(left_s, LEAST_TIMEOUT_S))


def _answers(result: EngineResult) -> list[Any]:
    """Token ids of the samples of a result, for whom places the next requests."""
    return [] if result.output is None else result.output.answers


def _begun(result: EngineResult) -> int | None:
    """Oldest version that sampled a token of a result, whose keys and values its replica has."""
    return min((one.spans[0].version for one in result.samples if one.spans), default=None)


def _failed(request: EngineRequest, error: Exception) -> EngineResult:
    return EngineResult(request_id=request.request_id, replica_id="", error=error)


def _death(replica_id: str, error: RayError) -> ReplicaUnavailableError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, f"its actor died: {first_line}")


def _gone(replica_id: str) -> ReplicaUnavailableError:
    return ReplicaUnavailableError(replica_id, ReplicaState.CLOSED, "it left the service")


def _silence(replica_id: str, limit_s: float) -> ReplicaUnavailableError:
    reason = f"it was silent for {limit_s:g} s"
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, reason)


def _timeout(request: EngineRequest, replica_id: str, limit_s: float) -> GenerationTimeoutError:
    return GenerationTimeoutError(
        f"request {request.request_id}: replica {replica_id} did not answer within {limit_s:g} s"
    )

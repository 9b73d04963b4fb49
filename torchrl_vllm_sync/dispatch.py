"""Sending a batch to its replicas: one Ray call for each of them, and every request answered once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests import EngineResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from torchrl_vllm_sync.balancer import Reservation
    from torchrl_vllm_sync.load import LoadTracker
    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.requests import EngineRequest

    Reserve = Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

# A replica that died, or turned stale, costs a request one attempt; the next goes elsewhere.
MAX_ATTEMPTS = 3
# Engines end a request at its time limit. A replica silent for this much longer has hung.
GRACE_S = 10.0
# Seconds for telling a replica to drop requests nobody waits for any more.
ABORT_TIMEOUT_S = 5.0


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
            requests: Requests with unique ids.
            reserve: Reserves a replica for each of the given requests, avoiding the given ids.
            on_result: Called with each result as it arrives.

        Returns:
            Results in the order of ``requests``.

        Raises:
            NoReplicaAvailableError: No replica took requests at the first attempt.
        """
        results: dict[str, EngineResult] = {}
        waiting = list(requests)
        avoid: set[str] = set()

        def accept(result: EngineResult) -> None:
            results[result.request_id] = result
            if on_result is not None:
                on_result(result)

        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                reservations = reserve(waiting, avoid)
            except NoReplicaAvailableError as error:
                if attempt == 1:
                    raise
                for request in waiting:
                    accept(_failed(request, GenerationError(request.request_id, str(error))))
                break
            lost = await self._attempt(waiting, reservations, accept)
            avoid |= {error.replica_id for _, error in lost}
            if attempt == MAX_ATTEMPTS:
                for request, error in lost:
                    accept(_failed(request, error))
            waiting = [request for request, _ in lost]
            if not waiting:
                break
        return [results[request.request_id] for request in requests]

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
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(self._call(replica_id, share, accept))
                    for replica_id, share in shares.items()
                ]
        return [one for call in calls for one in call.result()]

    async def _call(
        self,
        replica_id: str,
        share: list[tuple[EngineRequest, Reservation]],
        accept: Callable[[EngineResult], None],
    ) -> list[tuple[EngineRequest, ReplicaUnavailableError]]:
        """Makes the one call to one replica, giving places back as results arrive."""
        actor = self._actor(replica_id)
        open_requests = {request.request_id: (request, place) for request, place in share}
        lost: list[tuple[EngineRequest, ReplicaUnavailableError]] = []
        limit_s = max(request.timeout_s for request, _ in share) + GRACE_S
        batch = [request for request, _ in share]
        try:
            async with asyncio.timeout(limit_s):
                async for ref in actor.run_batch.options(num_returns="streaming").remote(
                    batch, want_prompt=False
                ):
                    for result in await ref:
                        request, place = open_requests.pop(result.request_id)
                        place.release()
                        if isinstance(result.error, ReplicaUnavailableError):
                            self._load.mark(replica_id, result.error.state, result.error.reason)
                            lost.append((request, result.error))
                        else:
                            accept(result)
        except RayActorError as death:
            error = _death(replica_id, death)
            self._load.mark(replica_id, error.state, error.reason)
            lost += [(request, error) for request, _ in open_requests.values()]
            open_requests.clear()
        except TimeoutError:
            for request, _ in open_requests.values():
                message = (
                    f"request {request.request_id}: replica {replica_id} did not answer within "
                    f"{limit_s:g} s"
                )
                accept(_failed(request, GenerationTimeoutError(message)))
        finally:
            if open_requests:
                await asyncio.shield(self._abort(actor, list(open_requests)))
        return lost

    async def stream(self, request: EngineRequest, reserve: Reserve) -> AsyncIterator[EngineResult]:
        """Yields the partial outputs of one request, the last one finished.

        A stream that has begun stays with its replica: if that dies, the stream ends with the
        error as its last result.

        Args:
            request: What to run.
            reserve: As in :meth:`run`.

        Raises:
            NoReplicaAvailableError: No replica takes requests.
        """
        (reservation,) = reserve([request], ())
        with reservation:
            actor = self._actor(reservation.replica_id)
            finished = False
            try:
                async with asyncio.timeout(request.timeout_s + GRACE_S):
                    async for ref in actor.stream.options(num_returns="streaming").remote(request):
                        result: EngineResult = await ref
                        finished = result.error is not None or result.finished
                        yield result
            except RayActorError as death:
                finished = True
                error = _death(reservation.replica_id, death)
                self._load.mark(error.replica_id, error.state, error.reason)
                yield _failed(request, error)
            except TimeoutError:
                message = (
                    f"request {request.request_id}: replica {reservation.replica_id} is silent"
                )
                yield _failed(request, GenerationTimeoutError(message))
            finally:
                if not finished:
                    await asyncio.shield(self._abort(actor, [request.request_id]))

    def _actor(self, replica_id: str) -> Any:  # noqa: ANN401  a Ray actor handle
        return next(one.actor for one in self._replicas() if one.replica_id == replica_id)

    async def _abort(self, actor: Any, request_ids: list[str]) -> None:  # noqa: ANN401
        """Has the engine drop requests; one that is dead or hung has nothing to drop."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await actor.abort.remote(request_ids)
        except (RayActorError, TimeoutError) as error:
            logger.warning("could not abort %d requests: %s", len(request_ids), error)


def _failed(request: EngineRequest, error: Exception) -> EngineResult:
    return EngineResult(request_id=request.request_id, replica_id="", error=error)


def _death(replica_id: str, error: RayActorError) -> ReplicaUnavailableError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, f"its actor died: {first_line}")

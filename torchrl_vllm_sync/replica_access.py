"""What every way of sending requests needs of the replicas: places, actors, marks, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from torchrl_vllm_sync.attempts import lost_all
from torchrl_vllm_sync.errors import (
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.replica_watch import ReplicaWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torchrl_vllm_sync.attempts import PendingRequest
    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.requests import EngineRequest, EngineResult
    from torchrl_vllm_sync.routing.balancer import Reservation
    from torchrl_vllm_sync.routing.ledger import LoadTracker

    Reserve = Callable[[Sequence[EngineRequest], Collection[str]], list[Reservation]]

__all__ = ["ReplicaAccess", "gone", "silence", "timed_out"]

logger = logging.getLogger(__name__)

# Engines end a request at its time limit. A replica silent for this much longer has hung.
GRACE_S = 10.0
# Seconds for telling a replica to drop requests nobody waits for any more.
ABORT_TIMEOUT_S = 5.0
# Seconds between looks at whether a replica is still on its way.
RECOVERY_POLL_S = 0.5


class ReplicaAccess:
    """Access to the replicas of a service.

    Args:
        replicas: Returns the current replicas.
        load: Ledger to mark replicas in that turn out dead or stale.
        recovers: Says whether a replica is on its way, so that it is worth waiting for while none
            takes requests.
    """

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

        Args:
            pending: Requests with one ``min_version`` and one beginning.
            reserve: Reserves a replica for each of the given requests, avoiding the given ids.

        Raises:
            NoReplicaAvailableError: No replica takes requests.
            VersionNotReachedError: None came to hold the version.
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
        """Has the balancer avoid a replica until it reports that it serves.

        Args:
            error: What is wrong with it.
            actor: The actor that it is wrong with, whose successor is left alone, and whoever
                brings that about; ``None`` where there is none.
        """
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

"""One request on its way through several replicas: what each ended with, and what may follow."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import ReplicaUnavailableError, RequestLostError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests import EngineResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.requests import EngineRequest

__all__ = ["MAX_ATTEMPTS", "PendingRequest", "failed", "lost_all"]

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
        has_waited: Whether it had to wait for a replica, which counts against its time limit.
    """

    request: EngineRequest
    begin: float
    losses: list[ReplicaUnavailableError] = field(default_factory=list)
    lost_with: list[tuple[str, Any]] = field(default_factory=list)
    has_waited: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left of its time limit."""
        return self.begin + self.request.timeout_s - time.monotonic()

    def note(self, loss: ReplicaUnavailableError, actor: Any) -> None:
        """Takes note that a replica lost or refused the request."""
        self.losses.append(loss)
        if loss.state not in _PASSING:
            self.lost_with.append((loss.replica_id, actor))

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
        """Returns the request with what is left of its time limit, if that is not all of it."""
        if not self.has_waited and not self.losses:
            return self.request
        return dataclasses.replace(self.request, timeout_s=max(self.left_s, LEAST_TIMEOUT_S))


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

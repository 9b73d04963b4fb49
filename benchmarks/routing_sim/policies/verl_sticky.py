"""verl's ``GlobalRequestLoadBalancer``."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.in_flight import CountingPolicy

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["VerlSticky"]


class VerlSticky(CountingPolicy):
    """A trajectory stays with its server; a new one goes to the fewest requests in flight.

    Source: verl 0.9.1, ``verl/workers/rollout/router.py``, ``GlobalRequestLoadBalancer``, and its
    choices (``benchmarks.routing_peers``). Of several servers with equally few requests one is
    taken at random (verl's main branch took the first in November 2026). Trajectories are
    remembered in an LRU of 10,000 that is never told of their end.

    The key is the session. verl gives every sample of a group an id of its own and knows no groups,
    so a request without a session is new each time.

    Args:
        cluster: What is known of the engines.
        seed: Of the ties.
        max_remembered: Trajectories that are remembered.
    """

    def __init__(self, cluster: Cluster, seed: int, *, max_remembered: int = 10_000) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._max_remembered = max_remembered
        self._servers: OrderedDict[int, int] = OrderedDict()

    def pick(self, request: SimRequest, now: float) -> int:
        """The trajectory's server, or the least loaded one."""
        counts = self.in_flight.counts
        session_id = request.session_id
        if session_id != -1 and session_id in self._servers:
            self._servers.move_to_end(session_id)
            if self._servers[session_id] in counts:
                return self._servers[session_id]
            del self._servers[session_id]
        replica_id = self.ties.one_of(self.in_flight.fewest())
        if session_id != -1:
            if len(self._servers) >= self._max_remembered:
                self._servers.popitem(last=False)
            self._servers[session_id] = replica_id
        return replica_id

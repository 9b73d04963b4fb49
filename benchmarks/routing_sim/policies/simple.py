"""Routers that look at nothing but whose turn it is, or how many requests are in flight."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.in_flight import CountingPolicy

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["LeastRequests", "RoundRobin"]


class RoundRobin(CountingPolicy):
    """The next replica, whoever asks.

    Args:
        cluster: What is known of the engines.
        seed: Unused.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._turn = 0

    def pick(self, request: SimRequest, now: float) -> int:
        """The next replica."""
        replica_ids = list(self.in_flight.counts)
        replica_id = replica_ids[self._turn % len(replica_ids)]
        self._turn += 1
        return replica_id


class LeastRequests(CountingPolicy):
    """The replica with the fewest requests in flight of this router; ties at random.

    Args:
        cluster: What is known of the engines.
        seed: Of the ties.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster.replica_ids, seed)

    def pick(self, request: SimRequest, now: float) -> int:
        """One of those with the fewest requests."""
        return self.ties.one_of(self.in_flight.fewest())

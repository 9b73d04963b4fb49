"""Consistent hashing of keys, with a bound on load."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.in_flight import CountingPolicy
from benchmarks.routing_sim.policies.ring_hash import default_address, request_key, ring_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["BoundedConsistentHash"]


class BoundedConsistentHash(CountingPolicy):
    """The replica after the key on a ring, or the next one that is not above its share of the load.

    Source: sgl-project/sglang, ``sgl-model-gateway/src/policies/bounded_consistent_hashing.rs`` at
    1cfac30, with the ring of ``core/worker_registry.rs``: 150 points for each address, BLAKE3. A
    replica may take a request while its requests are at most ``max_load_skew`` times the mean; if
    none may, the key's own replica takes it. A request without a key goes to any replica at random.
    The ring is that of the wheel smg 1.13.0 (``benchmarks.routing_peers``). No wheel that was tried
    has the bound, so that it is not checked against a real router; sglang-router 0.3.2 takes the
    key's hash modulo the number of workers where it speaks HTTP.

    The key is the session, else the group.

    Args:
        cluster: What is known of the engines.
        seed: Of the replicas for requests without a key.
        max_load_skew: Requests of a replica over the mean; None for no bound.
        address: The address that stands on the ring for a replica.
        key: The key of a request.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        *,
        max_load_skew: float | None = 1.5,
        address: Callable[[int], str] = default_address,
        key: Callable[[int, int], str | None] = request_key,
    ) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._max_load_skew = max_load_skew
        self._address = address
        self._key = key
        self._set_ring()

    def _set_ring(self) -> None:
        points = sorted(
            (ring_position(f"{self._address(replica_id)}#{point}"), replica_id)
            for replica_id in self.in_flight.counts
            for point in range(150)
        )
        self._positions = [position for position, _ in points]
        self._owners = [replica_id for _, replica_id in points]

    def pick(self, request: SimRequest, now: float) -> int:
        """The first replica after the key that may take it."""
        counts = self.in_flight.counts
        key = self._key(request.session_id, request.group_id)
        if key is None:
            return self.ties.one_of(list(counts))
        clockwise = self._clockwise(ring_position(key))
        first = next(clockwise)
        if self._max_load_skew is None:
            return first
        limit = sum(counts.values()) / len(counts) * self._max_load_skew
        if counts[first] <= limit:
            return first
        return next((other for other in clockwise if counts[other] <= limit), first)

    def _clockwise(self, position: int) -> Iterator[int]:
        """The replicas in the order of the ring, each once."""
        start = bisect_left(self._positions, position)
        seen = set()
        for owner in self._owners[start:] + self._owners[:start]:
            if owner not in seen:
                seen.add(owner)
                yield owner

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """Moves the keys of who left, and some to who joined."""
        self._set_ring()

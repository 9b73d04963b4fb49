"""SGLang's ``lmetric`` policy: uncached work times load."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.blocks import PrefixNames
from benchmarks.routing_sim.policies.cache_aware import CHARS_PER_TOKEN
from benchmarks.routing_sim.policies.in_flight import CountingPolicy
from benchmarks.routing_sim.policies.tenant_tree import TenantTree

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["LMetric"]


class LMetric(CountingPolicy):
    """The least product of the tokens that a replica has not seen and its requests plus one.

    Source: sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs`` at acaa759, which
    ports the Blitz router's rule. Of equal products fewer requests win, then fewer unseen tokens,
    then the first replica. A prompt is inserted for whoever was chosen. No wheel that was tried has
    this policy, so it is not checked against a real router.

    Simplified: as ``cache_aware``, with its limits, as the policy's own defaults were not found;
    every replica's prefix is followed through the nodes that it owns.

    Args:
        cluster: What is known of the engines.
        seed: Unused.
        eviction_interval_s: Seconds between two evictions; 0 for none.
        max_tree_tokens: Tokens that a replica may own after an eviction.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        *,
        eviction_interval_s: float = 60,
        max_tree_tokens: int = 2**26 // CHARS_PER_TOKEN,
    ) -> None:
        super().__init__(cluster.replica_ids, seed)
        self.tree = TenantTree(cluster.block_size)
        self._names = PrefixNames(cluster.block_size)
        self._interval = self._next_eviction = eviction_interval_s
        self._max_tree_tokens = max_tree_tokens
        self._clock = 0
        for replica_id in cluster.replica_ids:
            self.tree.add_tenant(replica_id)

    def pick(self, request: SimRequest, now: float) -> int:
        """The least product."""
        if self._interval and now >= self._next_eviction:
            self._next_eviction = now + self._interval
            for replica_id, size in list(self.tree.sizes.items()):
                if size > self._max_tree_tokens:
                    self.tree.shrink(replica_id, self._max_tree_tokens)
        names = self._names(request.tokens, tail=True)
        num_tokens = len(request.tokens)
        best = None
        for order, (replica_id, load) in enumerate(self.in_flight.counts.items()):
            node, matched = self.tree.match(names, num_tokens, (replica_id,))
            self._clock += 1
            node.times[replica_id] = self._clock
            unseen = num_tokens - matched
            key = (unseen * (load + 1), load, unseen, order, replica_id)
            if best is None or key < best:
                best = key
        assert best is not None
        path = self.tree.insert(names, num_tokens, best[-1])
        self._clock += 1
        if path:
            path[-1].times[best[-1]] = self._clock
        return best[-1]

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """Forgets who left."""
        for replica_id in left:
            self.tree.remove_tenant(replica_id)
        for replica_id in joined:
            self.tree.add_tenant(replica_id)

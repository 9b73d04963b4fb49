"""Ray Serve's ``PrefixCacheAffinityRouter``."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.blocks import PrefixNames
from benchmarks.routing_sim.policies.cache_aware import CHARS_PER_TOKEN
from benchmarks.routing_sim.policies.in_flight import CountingPolicy
from benchmarks.routing_sim.policies.tenant_tree import TenantTree

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["RayPrefixAffinity", "RayPrefixSettings", "ray_prefix_tuned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPrefixSettings:
    """Settings of the router; the defaults are Ray's.

    Attributes:
        imbalanced_threshold: Requests between the longest and the shortest queue, above which
            prefixes do not count.
        match_rate_threshold: Share of the prompt that must match for its owners to be candidates.
        eviction_threshold_tokens: Tokens that a replica must own for an eviction; None for none.
        eviction_target_tokens: Tokens that it owns afterwards, at most.
        eviction_interval_s: Seconds between two evictions.
    """

    imbalanced_threshold: float = math.inf
    match_rate_threshold: float = 0.1
    eviction_threshold_tokens: int | None = None
    eviction_target_tokens: int = 360_000 // CHARS_PER_TOKEN
    eviction_interval_s: float = 10


class RayPrefixAffinity(CountingPolicy):
    """The owners of the longest matching prefix, or whoever owns least; then the shortest queue.

    Source: ``ray/llm/_internal/serve/routing_policies/prefix_aware/`` (``prefix_tree.py``,
    ``prefix_aware_router.py``) and ``ray/serve/_private/request_router/`` of Ray 2.60.0. While
    queues differ by no more than ``imbalanced_threshold``, the prompt is followed down a tree of
    earlier prompts; the owners of the last node are the candidates if at least
    ``match_rate_threshold`` of the prompt was found, otherwise the replicas that own the fewest
    tokens. With uneven queues the candidates are two at random. The candidate with the shortest
    queue is chosen, the first of equals, and the prompt is inserted for it. Answers are not.

    Simplified: blocks of tokens instead of characters (``tenant_tree``), limits in characters
    counted as 4 to a token; queues are this router's own requests in flight, always up to date, and
    never full; the tree, in Ray an actor that several routers share, is this router's; its blocking
    calls cost no simulated time; candidates come in the order of replicas, in Ray in that of a set.

    Args:
        cluster: What is known of the engines.
        seed: Of the two replicas at random.
        settings: Thresholds.
    """

    def __init__(
        self, cluster: Cluster, seed: int, settings: RayPrefixSettings | None = None
    ) -> None:
        super().__init__(cluster.replica_ids, seed)
        self.settings = RayPrefixSettings() if settings is None else settings
        self.tree = TenantTree(cluster.block_size)
        self._names = PrefixNames(cluster.block_size)
        self._clock = 0
        self._next_eviction = self.settings.eviction_interval_s
        for replica_id in cluster.replica_ids:
            self.tree.add_tenant(replica_id)

    def pick(self, request: SimRequest, now: float) -> int:
        """The shortest queue among the candidates."""
        self._evict(now)
        names = self._names(request.tokens, tail=True)
        num_tokens = len(request.tokens)
        counts = self.in_flight.counts
        candidates = self.candidates(names, num_tokens) or self.ties.pair_of(list(counts))
        replica_id = min(candidates, key=counts.__getitem__)
        self._clock += 1  # Ray's is the wall clock; here no two insertions are at the same time
        self.tree.root.times[replica_id] = self._clock
        for node in self.tree.insert(names, num_tokens, replica_id):
            node.times[replica_id] = self._clock
        return replica_id

    def candidates(self, names: list[int], num_tokens: int) -> list[int]:
        """The replicas that prefixes speak for; none if queues are uneven."""
        counts = self.in_flight.counts
        if max(counts.values()) - min(counts.values()) > self.settings.imbalanced_threshold:
            return []
        node, matched = self.tree.match(names, num_tokens, counts)
        if num_tokens and matched / num_tokens >= self.settings.match_rate_threshold:
            return [replica_id for replica_id in counts if replica_id in node.times]
        least = min(self.tree.sizes.values())
        return [replica_id for replica_id, size in self.tree.sizes.items() if size == least]

    def _evict(self, now: float) -> None:
        threshold = self.settings.eviction_threshold_tokens
        if threshold is None or now < self._next_eviction:
            return
        self._next_eviction = now + self.settings.eviction_interval_s
        for replica_id, size in list(self.tree.sizes.items()):
            if size > threshold:
                excess = size - self.settings.eviction_target_tokens
                self.tree.shrink_by_age(replica_id, excess)

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """Forgets who left."""
        for replica_id in left:
            self.tree.remove_tenant(replica_id)
        for replica_id in joined:
            self.tree.add_tenant(replica_id)


def ray_prefix_tuned(cluster: Cluster, seed: int) -> RayPrefixAffinity:
    """The router with the settings of the example in Ray's guide to prefix-aware routing.

    Prefixes stop counting from a difference of more than 5 requests on, 15 % of a prompt must
    match, and trees are cut from 500,000 characters to 400,000 every 30 s.
    """
    settings = RayPrefixSettings(
        imbalanced_threshold=5,
        match_rate_threshold=0.15,
        eviction_threshold_tokens=500_000 // CHARS_PER_TOKEN,
        eviction_target_tokens=400_000 // CHARS_PER_TOKEN,
        eviction_interval_s=30,
    )
    return RayPrefixAffinity(cluster, seed, settings)

"""SGLang's ``cache_aware`` policy, which vllm-project/router has inherited."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.blocks import PrefixNames
from benchmarks.routing_sim.policies.in_flight import CountingPolicy
from benchmarks.routing_sim.policies.tenant_tree import TenantTree

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["CHARS_PER_TOKEN", "CacheAware", "CacheAwareSettings", "cache_aware_tuned"]

CHARS_PER_TOKEN = 4
"""Characters that a token stands for where a router has a limit in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAwareSettings:
    """Settings of the policy; the defaults are those of sglang-router 0.3.2's command line.

    Attributes:
        cache_threshold: Share of the prompt that must match for its owner to be chosen.
        balance_abs_threshold: Requests between the most and the least loaded replica, above which
            load may decide.
        balance_rel_threshold: Ratio of the two that must be exceeded as well.
        eviction_interval_s: Seconds between two evictions; 0 for none.
        max_tree_tokens: Tokens that a replica may own after an eviction.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 60
    max_tree_tokens: int = 2**26 // CHARS_PER_TOKEN


class CacheAware(CountingPolicy):
    """The longest matching prefix while load is even, the fewest requests otherwise.

    Source: sgl-project/sglang, ``sgl-model-gateway/src/policies/cache_aware.rs`` and ``tree.rs``
    (as of November 2026), and the choices of the wheel sglang-router 0.3.2
    (``benchmarks.routing_peers``). Load is even unless the most loaded replica has more than
    ``balance_abs_threshold`` requests over the least loaded one, and more than
    ``balance_rel_threshold`` times as many. Then the prompt is followed down a tree of earlier
    prompts; if more than ``cache_threshold`` of it is found, the replica is chosen that made the
    last node reached, otherwise the one with the fewest requests, the first of equals. Either way
    the prompt is inserted for whoever was chosen. Answers are not. An eviction takes the leaves of
    a replica whose last insertion is longest ago; a lookup does not renew them in the wheel (one in
    eight does in the source).

    Simplified: blocks of tokens instead of characters (``tenant_tree``); limits in characters are
    counted as 4 to a token.

    Args:
        cluster: What is known of the engines.
        seed: Unused.
        settings: Thresholds.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        settings: CacheAwareSettings | None = None,
    ) -> None:
        super().__init__(cluster.replica_ids, seed)
        self.settings = CacheAwareSettings() if settings is None else settings
        self.tree = TenantTree(cluster.block_size)
        self._names = PrefixNames(cluster.block_size)
        self._epoch = 0
        self._next_eviction = self.settings.eviction_interval_s
        for replica_id in cluster.replica_ids:
            self.tree.add_tenant(replica_id)

    def pick(self, request: SimRequest, now: float) -> int:
        """By prefix or by load."""
        self._evict(now)
        names = self._names(request.tokens, tail=True)
        num_tokens = len(request.tokens)
        replica_id = self.in_flight.fewest()[0]
        if not self._imbalanced():
            node, matched = self.tree.match(names, num_tokens)
            owner = node.maker
            if owner not in node.times:
                owner = node.maker = next(iter(node.times), replica_id)
            if num_tokens and matched / num_tokens > self.settings.cache_threshold:
                replica_id = owner
        replica_id = self.ties.settle(replica_id)
        path = self.tree.insert(names, num_tokens, replica_id)
        self._epoch += 1
        if path:
            path[-1].times[replica_id] = self._epoch
        return replica_id

    def _imbalanced(self) -> bool:
        counts = self.in_flight.counts.values()
        least, most = min(counts), max(counts)
        return (
            most - least > self.settings.balance_abs_threshold
            and most > least * self.settings.balance_rel_threshold
        )

    def _evict(self, now: float) -> None:
        interval = self.settings.eviction_interval_s
        if not interval or now < self._next_eviction:
            return
        self._next_eviction = now + interval
        for replica_id, size in list(self.tree.sizes.items()):
            if size > self.settings.max_tree_tokens:
                self.tree.shrink(replica_id, self.settings.max_tree_tokens)

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """Forgets who left."""
        for replica_id in left:
            self.tree.remove_tenant(replica_id)
        for replica_id in joined:
            self.tree.add_tenant(replica_id)


def cache_aware_tuned(cluster: Cluster, seed: int) -> CacheAware:
    """The policy with settings for tens of requests a replica instead of hundreds.

    Load decides from a difference of more than 8 requests and a ratio of 1.25 on, where the
    defaults' 64 is never reached; and a replica's tree holds as many tokens as its KV cache.
    """
    settings = CacheAwareSettings(
        balance_abs_threshold=8,
        balance_rel_threshold=1.25,
        eviction_interval_s=10,
        max_tree_tokens=cluster.num_kv_blocks * cluster.block_size,
    )
    return CacheAware(cluster, seed, settings)

"""Routers to compare: this library's own, and others re-described from their public sources.

Each description names its source, its version and what it leaves out, in words and code of its own;
``benchmarks.routing_peers`` compares their choices with those of the real routers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.cache_aware import CacheAware, cache_aware_tuned
from benchmarks.routing_sim.policies.consistent_hash import BoundedConsistentHash
from benchmarks.routing_sim.policies.dynamo_cost import DynamoCost
from benchmarks.routing_sim.policies.lmetric import LMetric
from benchmarks.routing_sim.policies.ours import OwnBalancer
from benchmarks.routing_sim.policies.ray_prefix import RayPrefixAffinity, ray_prefix_tuned
from benchmarks.routing_sim.policies.simple import LeastRequests, RoundRobin
from benchmarks.routing_sim.policies.sticky_least_loaded import StickyLeastLoaded
from benchmarks.routing_sim.policies.torchrl_rule import TorchRLRule
from benchmarks.routing_sim.policies.verl_sticky import VerlSticky

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import PolicyFactory

__all__ = ["POLICIES"]

POLICIES: dict[str, PolicyFactory] = {
    "ours": OwnBalancer,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "consistent-hash-bounded": BoundedConsistentHash,
    "sticky-least-loaded": StickyLeastLoaded,
    "sglang-cache-aware": CacheAware,
    "sglang-cache-aware-tuned": cache_aware_tuned,
    "dynamo-cost": DynamoCost,
    "ray-prefix-affinity": RayPrefixAffinity,
    "ray-prefix-affinity-tuned": ray_prefix_tuned,
    "lmetric": LMetric,
    "verl-sticky": VerlSticky,
    "torchrl": TorchRLRule,
}

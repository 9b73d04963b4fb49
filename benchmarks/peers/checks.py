"""Which real routers are compared with which descriptions, in which regimes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.peers import regimes
from benchmarks.peers.script import BLOCK_SIZE
from benchmarks.routing_sim.interface import Cluster
from benchmarks.routing_sim.policies.cache_aware import CacheAware, CacheAwareSettings
from benchmarks.routing_sim.policies.consistent_hash import BoundedConsistentHash
from benchmarks.routing_sim.policies.dynamo_cost import DynamoCost
from benchmarks.routing_sim.policies.ray_prefix import RayPrefixAffinity, RayPrefixSettings
from benchmarks.routing_sim.policies.sticky_least_loaded import StickyLeastLoaded
from benchmarks.routing_sim.policies.torchrl_rule import TorchRLRule
from benchmarks.routing_sim.policies.verl_sticky import VerlSticky

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.script import Script
    from benchmarks.routing_sim.policies.in_flight import CountingPolicy

__all__ = ["NUM_REPLICAS", "PEERS", "Check", "checks", "description"]

NUM_REPLICAS = 4

PEERS = {
    "sglang-router": "sglang_router",
    "smg": "smg",
    "vllm-router": "vllm_router",
    "ray": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
    "torchrl": "torchrl",
    "ai-dynamo-runtime": "dynamo._core",
    "verl": "verl.workers.rollout.router",
}
"""The real routers' distributions, each with a module that is there if it can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison.

    Attributes:
        peer: The real router.
        regime: What the script is like.
        script: What happens.
        settings: Of the real router.
        words: Prompts are words for the real router (``Script.text``).
        exact: Every decision must agree.
        golden: Every decision of a golden script must agree.
    """

    peer: str
    regime: str
    script: Script
    settings: dict[str, Any] = field(default_factory=dict)
    words: bool = False
    exact: bool = True
    golden: bool = True


def checks(num_sends: int, *, seed: int = 0) -> list[Check]:
    """All comparisons.

    Args:
        num_sends: Requests of a comparison, about.
        seed: Of the scripts.
    """
    aware = {"policy": "cache_aware", "eviction_interval_secs": 3600}
    tuned = aware | {"balance_abs_threshold": 8, "balance_rel_threshold": 1.25}
    evicting = {"policy": "cache_aware", "eviction_interval_secs": 3, "max_tree_size": 60}
    ray_default = {"imbalanced_threshold": None, "match_rate_threshold": 0.1}
    ray_tuned = {"imbalanced_threshold": 5, "match_rate_threshold": 0.15}
    ray_evicting = ray_default | {"eviction_threshold": 60, "eviction_target": 40}

    branching = regimes.mixed(seed, num_sends=num_sends, in_flight=40)
    talking = regimes.conversations(seed, num_sends=num_sends, concurrent=30)
    crowding = regimes.strangers(seed, num_sends=max(200, num_sends), in_flight=120)
    bursts = regimes.phases(seed, num_phases=max(4, num_sends // 100), sends=40, wait_s=3.4)
    leaving = regimes.leaving(seed, sends=num_sends // 3, replicas=NUM_REPLICAS)
    found = []

    def add(peer: str, regime: str, script: Script, settings: dict[str, Any], **more: Any) -> None:
        found.append(Check(peer=peer, regime=regime, script=script, settings=settings, **more))

    add("sglang-router", "branching prompts", branching, aware)
    add("sglang-router", "crowding on one prefix", crowding, aware)
    add("sglang-router", "branching prompts, tuned", branching, tuned)
    add("sglang-router", "conversations, tuned", talking, tuned)
    # Not exact: an eviction, which the router times, may fall into a burst instead of a rest.
    add("sglang-router", "evictions", bursts, evicting, exact=False)
    add("sglang-router", "replicas leave", leaving, aware)
    add(
        "sglang-router",
        "branching prompts, words",
        branching,
        aware,
        words=True,
        exact=False,
        golden=False,
    )
    add(
        "sglang-router",
        "conversations, tuned, words",
        talking,
        tuned,
        words=True,
        exact=False,
        golden=False,
    )
    hashing = {"policy": "consistent_hashing"}
    add("smg", "conversations", talking, hashing)
    add("smg", "replicas leave", leaving, hashing)
    sticky = {"policy": "sticky_least_loaded"}
    add("vllm-router", "conversations", talking, sticky)
    add("ray", "branching prompts", branching, ray_default)
    add("ray", "crowding on one prefix", crowding, ray_default)
    add("ray", "crowding on one prefix, tuned", crowding, ray_tuned)
    add("ray", "conversations, tuned", talking, ray_tuned)
    add("ray", "evictions", bursts, ray_evicting)
    add("ray", "replicas leave", leaving, ray_tuned)
    add("torchrl", "branching prompts", branching, {})
    add("torchrl", "conversations", talking, {})
    for at_once, how in ((True, "prompts computed at once"), (False, "prompts never computed")):
        settings = {"prefill_at_once": at_once}
        add("ai-dynamo-runtime", f"branching prompts, {how}", branching, settings)
        add("ai-dynamo-runtime", f"conversations, {how}", talking, settings)
        add("ai-dynamo-runtime", f"crowding on one prefix, {how}", crowding, settings)
    add("verl", "conversations", talking, {})
    add("verl", "branching prompts", branching, {})
    add("verl", "replicas leave", leaving, {})
    return found


def description(
    peer: str, settings: dict[str, Any], addresses: Sequence[str] = ()
) -> CountingPolicy:
    """The description of a real router with the same settings.

    Args:
        peer: The real router.
        settings: Of the real router.
        addresses: Of its workers, in its order, where they matter.
    """
    rate = math.inf if settings.get("prefill_at_once", True) else 1e-9
    cluster = Cluster(tuple(range(NUM_REPLICAS)), BLOCK_SIZE, 10**7, 256, rate)

    def address(replica_id: int) -> str:
        return addresses[replica_id]

    match peer:
        case "sglang-router":
            default = CacheAwareSettings()
            return CacheAware(
                cluster,
                0,
                CacheAwareSettings(
                    balance_abs_threshold=settings.get(
                        "balance_abs_threshold", default.balance_abs_threshold
                    ),
                    balance_rel_threshold=settings.get(
                        "balance_rel_threshold", default.balance_rel_threshold
                    ),
                    eviction_interval_s=settings["eviction_interval_secs"],
                    max_tree_tokens=settings.get("max_tree_size", 2**26) * BLOCK_SIZE,
                ),
            )
        case "smg":
            return BoundedConsistentHash(cluster, 0, max_load_skew=None, address=address)
        case "vllm-router":
            return StickyLeastLoaded(cluster, 0, address=address)
        case "ray":
            threshold = settings["imbalanced_threshold"]
            most = settings.get("eviction_threshold")
            return RayPrefixAffinity(
                cluster,
                0,
                RayPrefixSettings(
                    imbalanced_threshold=math.inf if threshold is None else threshold,
                    match_rate_threshold=settings["match_rate_threshold"],
                    eviction_threshold_tokens=None if most is None else most * BLOCK_SIZE,
                    eviction_target_tokens=settings.get("eviction_target", 0) * BLOCK_SIZE,
                    eviction_interval_s=1,
                ),
            )
        case "torchrl":
            return TorchRLRule(cluster, 0)
        case "ai-dynamo-runtime":
            return DynamoCost(cluster, 0)
        case "verl":
            return VerlSticky(cluster, 0)
    raise ValueError(f"peer must be one of {', '.join(PEERS)}, got {peer!r}")

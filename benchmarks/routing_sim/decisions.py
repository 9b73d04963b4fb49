"""How long a policy takes to decide, by the real clock.

Prompts are arrays of token ids, as the simulation has them. ``benchmarks.routing_decisions`` times
this library's balancer with lists, as callers have them, which takes it longer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.interface import Cluster, SimRequest

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import PolicyFactory

__all__ = ["DECISION_CASES", "MIN_DECISIONS", "decision_times"]

DECISION_CASES = ("keyed", "2048-tokens")
"""Requests of a known session; requests without a key, of 2048 tokens each."""

MIN_DECISIONS = 1000
"""Fewer say nothing of a 99th percentile."""

_CLUSTER = Cluster(
    replica_ids=tuple(range(8)),
    block_size=16,
    num_kv_blocks=20_000,
    max_num_seqs=256,
    prefill_tokens_per_s=28_000.0,
)
_PROMPT_LEN = 2048
_IN_FLIGHT = 128


def decision_times(
    factory: PolicyFactory, case: str, count: int, seed: int = 0
) -> tuple[float, float]:
    """Times ``choose`` alone, with 128 requests in flight over 8 replicas.

    Every session, or prompt without a key, comes four times in all; half of each prompt is common
    to sixteen of them. A tenth as many decisions as are counted go before, to warm up.

    Args:
        factory: Of the policy.
        case: One of :data:`DECISION_CASES`.
        count: Decisions to time, at least :data:`MIN_DECISIONS`.
        seed: Of the prompts and the policy.

    Returns:
        p50 and p99 in microseconds.

    Raises:
        ValueError: An argument is out of its range.
    """
    if case not in DECISION_CASES:
        raise ValueError(f"case must be one of {', '.join(DECISION_CASES)}, got {case!r}")
    if count < MIN_DECISIONS:
        raise ValueError(f"count must be at least {MIN_DECISIONS}, got {count}")
    generator = np.random.default_rng([seed, 16])
    warm = count // 10
    num_sessions = -(-(count + warm) // 4)
    size = (num_sessions, _PROMPT_LEN)
    texts = generator.integers(0, 32_000, size, np.int32)
    common = np.arange(num_sessions) // 16 * 16
    texts[:, : _PROMPT_LEN // 2] = texts[common, : _PROMPT_LEN // 2]
    order = generator.permutation(np.tile(np.arange(num_sessions), 4))[: count + warm].tolist()
    policy = factory(_CLUSTER, seed)
    taken = []
    flying: list[tuple[SimRequest, int]] = []
    output = generator.integers(0, 32_000, 64, np.int32)
    for number, session in enumerate(order):
        key = session if case == "keyed" else -1
        request = SimRequest(number, texts[session], session_id=key, group_id=key)
        now = number * 0.01
        begin = time.perf_counter_ns()
        replica_id = policy.choose(request, now)
        taken.append(time.perf_counter_ns() - begin)
        flying.append((request, replica_id))
        if len(flying) > _IN_FLIGHT:
            policy.finish(*flying.pop(0), output, now)
    p50, p99 = np.percentile(np.array(taken[warm:]) / 1e3, (50, 99))
    return float(p50), float(p99)

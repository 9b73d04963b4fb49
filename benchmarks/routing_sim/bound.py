"""A time that no routing can beat."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.costs import EngineCosts
    from benchmarks.routing_sim.scenario import Scenario

__all__ = ["lower_bound"]


def lower_bound(scenario: Scenario, costs: EngineCosts, keys: Sequence[Sequence[int]]) -> float:
    """Seconds that any routing needs for a trace: the greatest of three bounds.

    Write ``b``, ``s``, ``c`` and ``f`` for the cost of a step, of a sequence in it, of a token of
    its context, and of a prompt token; ``D`` for the tokens that decode, ``X`` for the sum of their
    contexts, ``F`` for the prompt tokens that must be computed, ``N`` for the sessions at a time.

    *Critical path.* A session's turns and its tools follow one another. A turn of ``n`` output
    tokens takes at least ``n`` steps, of which ``n - 1`` decode, and one prefills what no other
    request could have computed: the tokens in blocks that occur in no other session and in none of
    its own earlier turns, and the rest of the prompt that fills no block; at least one token. With
    arrivals by the clock a session starts at its arrival. The longest session is a bound.

    *Work.* Every distinct block must be computed once, so ``F`` counts what follows the last answer
    in distinct blocks, and the rest of each prompt that fills none. A step has at most
    ``B = min(max_num_seqs, N)`` decoding sequences and ``token_budget`` tokens, so there are at
    least ``S = max(D / B, (D + F) / token_budget)`` steps. All engines together work
    ``b S + s D + c X + f F``; the bound is the first time at which engines that are there could
    have done so much.

    *Decoding.* At any time engines have batches of ``x_1, ..., x_R`` with a sum of at most ``N``,
    and engine ``i`` decodes at most ``x_i / (b + s x_i)`` tokens a second. That is concave, so the
    sum is greatest for even batches: ``N / (b + s N / R)``. Thus ``D (b R / N + s)`` is work as
    above that ``R`` engines share, wherever ``N / R`` is below ``max_num_seqs``.

    The bound knows of no queue, no full cache, no batches of training, no lost request and no
    update that makes engines compute a prompt again; so the ratio to it is not 1 even for the best
    policy, but it is comparable between policies and between seeds.

    Args:
        scenario: The trace.
        costs: Of every engine.
        keys: Chained block keys of each session's text.
    """
    size = costs.block_size
    owners: Counter[int] = Counter()
    for own in keys:
        owners.update(own)
    counted: set[int] = set()
    longest = 0.0
    decoding = context = prompt = 0
    for session, own in zip(scenario.sessions, keys, strict=True):
        path = 0.0 if scenario.concurrency is not None else session.arrival_s
        seen = 0  # where the last answer ended
        for number, turn in enumerate(session.turns):
            start, count = turn.prompt_len, turn.output_len - 1
            first, last = seen // size, start // size
            rest = start - max(last * size, seen)
            prompt += rest
            new = [key for key in own[first:last] if key not in counted]
            prompt += len(new) * size
            if new and new[0] == own[first]:
                prompt -= seen - first * size
            counted.update(new)
            alone = sum(owners[key] == 1 for key in own[-(-seen // size) : last])
            total = count * start + count * (count - 1) // 2
            decoding += count
            context += total
            path += (
                turn.output_len * costs.base_step_s
                + count * costs.per_sequence_s
                + total * costs.per_context_token_s
                + max(alone * size + rest, 1) / costs.prefill_tokens_per_s
            )
            if number + 1 < len(session.turns):
                path += turn.tool_s
            seen = start + turn.output_len
        longest = max(longest, path)
    sessions = scenario.concurrency or len(scenario.sessions)
    batch = min(costs.max_num_seqs, sessions)
    steps = max(decoding / batch, (decoding + prompt) / costs.token_budget)
    work = (
        costs.base_step_s * steps
        + costs.per_sequence_s * decoding
        + costs.per_context_token_s * context
        + prompt / costs.prefill_tokens_per_s
    )
    most = scenario.num_replicas + sum(event.joins for event in scenario.churn)
    even = min(sessions / most, costs.max_num_seqs)
    decode = decoding * (costs.base_step_s / even + costs.per_sequence_s)
    return max(longest, _shared(work, scenario), _shared(decode, scenario))


def _shared(work: float, scenario: Scenario) -> float:
    """The first time at which the engines that are there could have done that much work."""
    changes = [(event.at_s, 1 if event.joins else -1) for event in scenario.churn]
    count = scenario.num_replicas
    now = 0.0
    for when, change in sorted(changes):
        if work <= count * (when - now):
            break
        work -= count * (when - now)
        now = when
        count += change
    return now + work / count

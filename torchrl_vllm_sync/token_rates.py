"""Tokens per second of an engine, from what its last few reports had counted."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrl_vllm_sync.replica import EngineCounters

__all__ = ["WINDOW_S", "Counted", "TokenRates", "count", "token_rates"]

WINDOW_S = 2.0
"""Rates are over at least this many seconds, if the reports reach back as far."""
# Over less than this the moments at which reports arrive count for too much.
_SHORTEST_S = 0.5


@dataclass(frozen=True, slots=True)
class Counted:
    """An engine's counters, and when they came.

    Attributes:
        at: Time by the ledger's clock, in seconds.
        counters: What it had done by then.
    """

    at: float
    counters: EngineCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """How fast an engine is; each is ``None`` if it is unknown.

    Attributes:
        prompt_tokens_per_s: Tokens of prompts whose prefill ended, cached ones included.
        generated_tokens_per_s: Tokens sampled.
    """

    prompt_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None


def count(
    before: tuple[Counted, ...], counters: EngineCounters | None, now: float
) -> tuple[Counted, ...]:
    """Adds what an engine reported, and drops what rates no longer need.

    An engine that has done less than before is another one, of which nothing else is known yet.
    """
    if counters is None:
        return ()
    if before and any(
        was > now for was, now in zip(astuple(before[-1].counters), astuple(counters), strict=True)
    ):
        before = ()
    kept = [one for one in before if one.at > now - WINDOW_S]
    older = before[: len(before) - len(kept)]
    return (*older[-1:], *kept, Counted(now, counters))


def token_rates(counted: Sequence[Counted]) -> TokenRates:
    """Returns the rates between the first and the last of ``counted``."""
    if not counted or (passed_s := counted[-1].at - counted[0].at) < _SHORTEST_S:
        return TokenRates()
    first, last = counted[0].counters, counted[-1].counters
    return TokenRates(
        prompt_tokens_per_s=(last.num_prompt_tokens - first.num_prompt_tokens) / passed_s,
        generated_tokens_per_s=(last.num_generated_tokens - first.num_generated_tokens) / passed_s,
    )

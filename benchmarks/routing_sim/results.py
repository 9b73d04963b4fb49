"""What a simulated run is told by: its numbers, and the sums over time that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

__all__ = ["UNITS", "LoadIntegral", "RunResult"]

UNITS = {
    "makespan": "s",
    "bound_ratio": "ratio",
    "hit_rate": "fraction",
    "latency_p50": "s",
    "latency_p99": "s",
    "group_p99": "s",
    "imbalance": "ratio",
    "kv_imbalance": "ratio",
    "preemptions": "requests",
    "moved_sessions": "turns",
    "lost": "requests",
    "decision_p50": "µs",
    "decision_p99": "µs",
}
"""Unit of each number of a run, in the order of reports."""


class LoadIntegral:
    """Sums the most loaded replica's load over time, and the mean one's."""

    def __init__(self) -> None:
        self._since = 0.0
        self._most = 0.0
        self._mean = 0.0

    def advance(self, now: float, loads: Iterable[float], count: int) -> None:
        """The loads of ``count`` replicas have been these since the last call."""
        span = now - self._since
        if span > 0:
            loads = list(loads)
            self._most += span * max(loads)
            self._mean += span * sum(loads) / count
            self._since = now

    @property
    def ratio(self) -> float:
        """Time-averaged load of whoever had the most, over the time-averaged mean load; 1 is even.

        Both are averaged before they are divided, so a nearly idle cluster weighs little.
        """
        return self._most / self._mean if self._mean else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """One policy on one trace.

    Attributes:
        metrics: By the names of :data:`UNITS`, but for those below; in simulated time.
        decisions_us: p50 and p99 of what the policy's ``choose`` took, in real microseconds on the
            machine that simulates; noisy, and different in every run.
        replicas: Who answered each request: int32, by request id.
        finished_s: When: float64, by request id.
        output_tokens: Tokens answered in all.
        num_steps: Steps of all engines.
    """

    metrics: dict[str, float]
    decisions_us: tuple[float, float]
    replicas: np.ndarray
    finished_s: np.ndarray
    output_tokens: int
    num_steps: int

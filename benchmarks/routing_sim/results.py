"""What a simulated run is told by: its numbers, and the sums over time that they come from.

Times are simulated ones, but for those of decisions:

* ``makespan``: until the last session has ended. ``bound_ratio``: that over what no routing could
  beat (``bound``), which knows of no updates and no training; so it compares policies of one trace.
* ``hit_rate``: share of prompt tokens that were in the prefix cache of the engine that was chosen.
* ``latency_p50``, ``latency_p99``: of requests, from the turn's being ready to the whole answer.
  ``group_p99``: of groups, from the start of the first session to the end of the last.
* ``imbalance``, ``kv_imbalance``: the most loaded replica's requests (KV blocks) over the mean
  one's, over time; 1 is even, the number of replicas is one replica with all of it.
* ``preemptions``: times that a request lost its blocks and was computed again.
* ``moved_sessions``: turns answered by another replica than the session's turn before.
* ``lost``: requests that were in a replica that died, and were sent again.
* ``decision_p50``, ``decision_p99``: what choosing took by the real clock, on the machine that
  simulates, beside whatever else ran there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.routing_sim.model import Replica
    from benchmarks.routing_sim.workload import Turn

__all__ = ["UNITS", "LoadIntegral", "RunResult", "Tally"]

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


class Tally:
    """Counts what happens in a run, and sums it up.

    Args:
        replica_ids: Replicas at the start.
        num_requests: Requests of the trace.

    Attributes:
        in_flight: Requests of each replica that is there.
        kv_blocks: KV-cache blocks that they hold.
        decision_ns: Nanoseconds of each decision, by the real clock.
        moved: Turns on another replica than the session's turn before.
        lost: Requests that a dead replica had.
    """

    def __init__(self, replica_ids: Iterable[int], num_requests: int) -> None:
        self.in_flight = dict.fromkeys(replica_ids, 0)
        self.kv_blocks = dict.fromkeys(replica_ids, 0)
        self.decision_ns: list[int] = []
        self.moved = 0
        self.lost = 0
        self._load, self._kv_load = LoadIntegral(), LoadIntegral()
        self._latencies = np.zeros(num_requests)
        self._finished_s = np.full(num_requests, np.nan)
        self._served_by = np.full(num_requests, -1, np.int32)
        self._output_tokens = self._prompt_tokens = self._hit_tokens = 0
        self._preemptions = self._num_steps = 0
        self._groups: dict[int, list[float]] = {}  # start of the first session, end of the last

    def advance(self, now: float) -> None:
        """Loads have been these until now; to be called before one changes."""
        count = len(self.in_flight)
        if count:
            self._load.advance(now, self.in_flight.values(), count)
            self._kv_load.advance(now, self.kv_blocks.values(), count)

    def join(self, replica_id: int) -> None:
        """A replica is there, and empty."""
        self.in_flight[replica_id] = self.kv_blocks[replica_id] = 0

    def leave(self, replica_id: int, replica: Replica) -> None:
        """A replica is there no more."""
        del self.in_flight[replica_id], self.kv_blocks[replica_id]
        self.count(replica)

    def count(self, replica: Replica) -> None:
        """Adds what an engine counted itself, once it has done all it will do."""
        self._preemptions += replica.num_preemptions
        self._num_steps += replica.num_steps

    def begin_session(self, group_id: int, now: float) -> None:
        """A session of this group starts."""
        self._groups.setdefault(group_id, [now, now])

    def end_session(self, group_id: int, now: float) -> None:
        """A session of this group has had its last answer."""
        self._groups[group_id][1] = now

    def finish(
        self,
        request_id: int,
        replica_id: int,
        turn: Turn,
        hit_tokens: int,
        ready_s: float,
        now: float,
    ) -> None:
        """A request has been answered; it was ready to be sent at ``ready_s``."""
        self.in_flight[replica_id] -= 1
        self._finished_s[request_id] = now
        self._served_by[request_id] = replica_id
        self._latencies[request_id] = now - ready_s
        self._output_tokens += turn.output_len
        self._prompt_tokens += turn.prompt_len
        self._hit_tokens += hit_tokens

    def result(self, now: float, bound_s: float) -> RunResult:
        """The numbers of a run that has ended, on a trace with this lower bound."""
        self.advance(now)
        latency = np.percentile(self._latencies, (50, 99))
        decision = np.percentile(np.array(self.decision_ns) / 1e3, (50, 99))
        groups = [end - start for start, end in self._groups.values()]
        return RunResult(
            metrics={
                "makespan": now,
                "bound_ratio": now / bound_s,
                "hit_rate": self._hit_tokens / self._prompt_tokens,
                "latency_p50": float(latency[0]),
                "latency_p99": float(latency[1]),
                "group_p99": float(np.percentile(groups, 99)),
                "imbalance": self._load.ratio,
                "kv_imbalance": self._kv_load.ratio,
                "preemptions": float(self._preemptions),
                "moved_sessions": float(self.moved),
                "lost": float(self.lost),
            },
            decisions_us=(float(decision[0]), float(decision[1])),
            replicas=self._served_by,
            finished_s=self._finished_s,
            output_tokens=self._output_tokens,
            num_steps=self._num_steps,
        )

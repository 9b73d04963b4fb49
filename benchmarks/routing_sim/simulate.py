"""Runs one policy on one trace: sessions, a router and engines from event to event; sums it up.

* ``makespan``: simulated time until the last session has ended.
* ``hit_rate``: share of prompt tokens that were in the prefix cache of the engine that was chosen.
* ``latency_p99``: of requests, from the turn's being ready to the whole answer.
* ``imbalance``: the most loaded replica's requests over the mean one's, both averaged over time; 1
  is even, the number of replicas is one replica with all of it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.engine import Engine, Job
from benchmarks.routing_sim.policies import SimRequest
from benchmarks.routing_sim.traces import BlockKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.routing_sim.engine import EngineCosts
    from benchmarks.routing_sim.policies import Policy
    from benchmarks.routing_sim.traces import Scenario, Session

UNITS = {"makespan": "s", "hit_rate": "fraction", "latency_p99": "s", "imbalance": "ratio"}

REPORT_EVERY_S = 1.0
UPDATE_PAUSE_S = 0.5

_FIRST, _LAST = 0, 1  # of the events of one time: engines begin their steps after all others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """One policy on one trace."""

    metrics: dict[str, float]
    replicas: np.ndarray  # who answered each request: int32, by request id
    finished_s: np.ndarray  # when: float64, likewise


def simulate(
    scenario: Scenario, costs: EngineCosts, factory: Callable[..., Policy], seed: int = 0
) -> RunResult:
    return _Simulation(scenario, costs, factory, seed).run()


class _Simulation:
    def __init__(
        self, scenario: Scenario, costs: EngineCosts, factory: Callable[..., Policy], seed: int
    ) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.events: list[tuple[float, int, int, Callable[..., None], tuple]] = []
        self.num_events = 0
        self.engines = [Engine(costs, str(number)) for number in range(scenario.num_replicas)]
        self.policy = factory(scenario.num_replicas, costs, seed)
        self.keys = BlockKeys(costs.block_size)
        self.num_started = self.num_ended = 0
        first_requests = np.cumsum([0, *(len(one.turns) for one in scenario.sessions)]).tolist()
        self.first_requests = dict(zip(scenario.sessions, first_requests, strict=False))
        self.finished_s = np.full(first_requests[-1], np.nan)
        self.latencies = np.zeros(first_requests[-1])
        self.replicas = np.full(first_requests[-1], -1, np.int32)
        self.prompt_tokens = self.hit_tokens = 0
        self.in_flight = [0] * scenario.num_replicas
        self.loads_since = self.most_load = self.all_load = 0.0

    def run(self) -> RunResult:
        self._start_more()
        self._at(REPORT_EVERY_S, self._report_by_clock)
        if self.scenario.update_every_s is not None:
            self._at(self.scenario.update_every_s, self._update_by_clock)
        while self.num_ended < len(self.scenario.sessions):
            self.now, _, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
        metrics = {
            "makespan": self.now,
            "hit_rate": self.hit_tokens / self.prompt_tokens,
            "latency_p99": float(np.percentile(self.latencies, 99)),
            "imbalance": self.most_load / self.all_load * len(self.engines),
        }
        return RunResult(metrics=metrics, replicas=self.replicas, finished_s=self.finished_s)

    def _at(
        self, when: float, call: Callable[..., None], *arguments: object, order: int = _FIRST
    ) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, order, self.num_events, call, arguments))

    # sessions and their requests

    def _start_more(self) -> None:
        sessions = self.scenario.sessions
        most = min(len(sessions), self.num_ended + self.scenario.concurrency)
        while self.num_started < most:
            session = sessions[self.num_started]
            self.num_started += 1
            self._send(session, self.keys.of(session.tokens), 0)

    def _send(self, session: Session, keys: list[bytes], number: int) -> None:
        seen = self.scenario.keys
        request = SimRequest(
            request_id=self.first_requests[session] + number,
            tokens=session.tokens[: session.turns[number].prompt_len],
            session_id=session.session_id if seen == "session" else None,
            group_id=None if seen == "none" else session.group_id,
        )
        replica_id = self.policy.choose(request, self.now)
        job = Job(request, session, session.turns[number], keys, ready_s=self.now)
        self._load(replica_id, 1)
        self.engines[replica_id].add(job, self.now)
        self._drive(replica_id)

    def _finish(self, replica_id: int, job: Job) -> None:
        session, turn, number = job.session, job.turn, job.request.request_id
        self._load(replica_id, -1)
        self.finished_s[number] = self.now
        self.latencies[number] = self.now - job.ready_s
        self.replicas[number] = replica_id
        self.prompt_tokens += turn.prompt_len
        self.hit_tokens += job.hit_tokens or 0
        output = session.tokens[turn.prompt_len : turn.prompt_len + turn.output_len]
        self.policy.finish(job.request, replica_id, output, self.now)
        following = number - self.first_requests[session] + 1
        if following < len(session.turns):
            self._at(self.now + turn.tool_s, self._send, session, job.keys, following)
            return
        self.num_ended += 1
        if self.scenario.keys == "session":
            self.policy.end_session(session.session_id)
        self._start_more()

    def _load(self, replica_id: int, change: int) -> None:
        """A replica has one request more or less; until now the loads were what they were."""
        span = self.now - self.loads_since
        self.most_load += span * max(self.in_flight)
        self.all_load += span * sum(self.in_flight)
        self.loads_since = self.now
        self.in_flight[replica_id] += change

    # engines

    def _drive(self, replica_id: int) -> None:
        """Comes back to an engine when it wants it; of several plans only the last one counts."""
        engine = self.engines[replica_id]
        if engine.stepping:
            self._at(engine.end, self._settle, replica_id)
        else:
            self._at(self.now, self._begin, replica_id, order=_LAST)

    def _begin(self, replica_id: int) -> None:
        engine = self.engines[replica_id]
        if not engine.stepping:
            engine.begin(self.now)
            if engine.stepping:
                self._drive(replica_id)

    def _settle(self, replica_id: int) -> None:
        engine = self.engines[replica_id]
        if engine.stepping and engine.end == self.now:
            for job in engine.settle():
                self._finish(replica_id, job)
            self._drive(replica_id)

    # what routers learn of engines, and new weights

    def _report_by_clock(self) -> None:
        self._report()
        self._at(self.now + REPORT_EVERY_S, self._report_by_clock)

    def _report(self) -> None:
        for engine in self.engines:
            self.policy.report(engine.report(self.now), self.now)

    def _update_by_clock(self) -> None:
        for replica_id, engine in enumerate(self.engines):
            engine.update(self.now, self.now + UPDATE_PAUSE_S)
            self._drive(replica_id)
        self._report()
        self._at(self.now + self.scenario.update_every_s, self._update_by_clock)

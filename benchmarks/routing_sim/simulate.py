"""Runs one policy on one trace: sessions, routers and engines from event to event; and sums it up.

* ``makespan``: simulated time until the last session has ended.
* ``hit_rate``: share of prompt tokens that were in the prefix cache of the engine that was chosen.
* ``latency_p50``, ``latency_p99``: of requests, from the turn's being ready to the whole answer.
  ``group_p99``: of groups, from the start of the first session to the end of the last.
* ``imbalance``, ``kv_imbalance``: the most loaded replica's requests (KV blocks) over the mean
  one's, over time; 1 is even, the number of replicas is one replica with all of it.
* ``preemptions``: times that a request lost its blocks and was computed again.
* ``moved_sessions``: turns answered by another replica than the session's turn before.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.engine import IDLE, Job, Replica
from benchmarks.routing_sim.policies import Cluster, SimRequest
from benchmarks.routing_sim.scenario import BlockKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from benchmarks.routing_sim.costs import EngineCosts
    from benchmarks.routing_sim.policies import EngineFigures, Policy, PolicyFactory
    from benchmarks.routing_sim.scenario import Scenario, Session, Turn

UNITS = {
    "makespan": "s",
    "hit_rate": "fraction",
    "latency_p50": "s",
    "latency_p99": "s",
    "group_p99": "s",
    "imbalance": "ratio",
    "kv_imbalance": "ratio",
    "preemptions": "requests",
    "moved_sessions": "turns",
}
"""Unit of each number of a run, in the order of reports."""


class LoadIntegral:
    """Sums the most loaded replica's load over time, and the mean one's."""

    def __init__(self) -> None:
        self._since = 0.0
        self._most = 0.0
        self._mean = 0.0

    def advance(self, now: float, loads: Collection[float]) -> None:
        """The replicas' loads have been these since the last call."""
        span = now - self._since
        if span > 0:
            self._most += span * max(loads)
            self._mean += span * sum(loads) / len(loads)
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
        metrics: By the names of :data:`UNITS`.
        replicas: Who answered each request: int32, by request id.
        finished_s: When: float64, by request id.
        output_tokens: Tokens answered in all.
        num_steps: Steps of all engines.
    """

    metrics: dict[str, float]
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
        moved: Turns on another replica than the session's turn before.
    """

    def __init__(self, replica_ids: Iterable[int], num_requests: int) -> None:
        self.in_flight = dict.fromkeys(replica_ids, 0)
        self.kv_blocks = dict.fromkeys(replica_ids, 0)
        self.moved = 0
        self._load, self._kv_load = LoadIntegral(), LoadIntegral()
        self._latencies = np.zeros(num_requests)
        self._finished_s = np.full(num_requests, np.nan)
        self._served_by = np.full(num_requests, -1, np.int32)
        self._output_tokens = self._prompt_tokens = self._hit_tokens = 0
        self._preemptions = self._num_steps = 0
        self._groups: dict[int, list[float]] = {}  # start of the first session, end of the last

    def advance(self, now: float) -> None:
        """Loads have been these until now; to be called before one changes."""
        self._load.advance(now, self.in_flight.values())
        self._kv_load.advance(now, self.kv_blocks.values())

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

    def result(self, now: float) -> RunResult:
        """The numbers of a run that has ended."""
        self.advance(now)
        latency = np.percentile(self._latencies, (50, 99))
        groups = [end - start for start, end in self._groups.values()]
        return RunResult(
            metrics={
                "makespan": now,
                "hit_rate": self._hit_tokens / self._prompt_tokens,
                "latency_p50": float(latency[0]),
                "latency_p99": float(latency[1]),
                "group_p99": float(np.percentile(groups, 99)),
                "imbalance": self._load.ratio,
                "kv_imbalance": self._kv_load.ratio,
                "preemptions": float(self._preemptions),
                "moved_sessions": float(self.moved),
            },
            replicas=self._served_by,
            finished_s=self._finished_s,
            output_tokens=self._output_tokens,
            num_steps=self._num_steps,
        )


_FIRST, _LAST = 0, 1  # of the events of one time: engines begin their steps after all others


class Prepared:
    """What all policies share of one trace on engines of one kind.

    Args:
        scenario: The trace.
        costs: Of every engine.
    """

    def __init__(self, scenario: Scenario, costs: EngineCosts) -> None:
        self.scenario = scenario
        self.costs = costs
        keys = BlockKeys(costs.block_size)
        self.keys = [keys.of(session.tokens) for session in scenario.sessions]
        self.first_request = np.cumsum([0, *(len(one.turns) for one in scenario.sessions)]).tolist()
        self.num_requests = self.first_request[-1]


class _Running:
    """A session on its way."""

    __slots__ = ("index", "last_replica", "session", "turn")

    def __init__(self, index: int, session: Session) -> None:
        self.index = index
        self.session = session
        self.turn = 0
        self.last_replica = -1


class _Asked:
    """A request on its way."""

    __slots__ = ("ready_s", "replica_id", "request", "router", "running")

    def __init__(self, request: SimRequest, router: int, running: _Running, ready_s: float) -> None:
        self.request = request
        self.router = router
        self.running = running
        self.ready_s = ready_s
        self.replica_id = -1


def simulate(prepared: Prepared, factory: PolicyFactory, seed: int = 0) -> RunResult:
    """Runs a policy on a trace.

    Args:
        prepared: The trace.
        factory: Makes one policy for each router.
        seed: Of the policies, and of which reports are lost.

    Raises:
        ValueError: The policy chose a replica that takes no requests.
    """
    return _Simulation(prepared, factory, seed).run()


class _Simulation:
    def __init__(self, prepared: Prepared, factory: PolicyFactory, seed: int) -> None:
        self.prepared = prepared
        self.scenario = scenario = prepared.scenario
        self.costs = costs = prepared.costs
        self.now = 0.0
        self.events: list[tuple[float, int, int, Callable[..., None], tuple]] = []
        self.num_events = 0
        self.version = 0
        self.replicas = {number: Replica(costs) for number in range(scenario.num_replicas)}
        self.cuts = dict.fromkeys(self.replicas, 0)  # which planned end of each still counts
        cluster = Cluster(
            replica_ids=tuple(self.replicas),
            block_size=costs.block_size,
            num_kv_blocks=costs.num_kv_blocks,
        )
        count = scenario.num_routers
        self.policies: list[Policy] = [factory(cluster, seed + number) for number in range(count)]
        generator = np.random.default_rng([seed, 1])
        self.random_routers = generator.integers(0, count, prepared.num_requests)
        self.losses = np.random.default_rng([seed, 2])
        self.unstarted = deque(range(len(scenario.sessions)))
        self.active = 0
        self.num_ended = 0
        self.tally = Tally(self.replicas, prepared.num_requests)

    def run(self) -> RunResult:
        scenario = self.scenario
        if scenario.concurrency is None:
            for index, session in enumerate(scenario.sessions):
                self._at(session.arrival_s, self._start, index)
        else:
            self._start_more()
        if scenario.reports is not None:
            self._at(scenario.reports.interval_s, self._report_all)
        if scenario.updates is not None:
            self._at(scenario.updates.every_s, self._update_by_clock)
        events = self.events
        total = len(scenario.sessions)
        while self.num_ended < total:
            if not events:
                raise RuntimeError(f"{total - self.num_ended} sessions are stuck at {self.now} s")
            self.now, _, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        for replica in self.replicas.values():
            self.tally.count(replica)
        return self.tally.result(self.now)

    def _at(
        self, when: float, call: Callable[..., None], *arguments: object, order: int = _FIRST
    ) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, order, self.num_events, call, arguments))

    # sessions

    def _start_more(self) -> None:
        assert self.scenario.concurrency is not None
        while self.unstarted and self.active < self.scenario.concurrency:
            self._start(self.unstarted[0])

    def _start(self, index: int) -> None:
        self.unstarted.popleft()
        self.active += 1
        session = self.scenario.sessions[index]
        self.tally.begin_session(session.group_id, self.now)
        self._turn(_Running(index, session))

    def _turn(self, running: _Running) -> None:
        session = running.session
        turn = session.turns[running.turn]
        number = self.prepared.first_request[running.index] + running.turn
        keys = self.scenario.keys
        request = SimRequest(
            request_id=number,
            tokens=session.tokens[: turn.prompt_len],
            session_id=session.session_id if keys == "session" else -1,
            group_id=-1 if keys == "none" else session.group_id,
        )
        self._send(_Asked(request, int(self.random_routers[number]), running, self.now))

    def _end(self, running: _Running) -> None:
        session = running.session
        self.active -= 1
        self.num_ended += 1
        self.tally.end_session(session.group_id, self.now)
        if self.scenario.keys == "session":
            for policy in self.policies:
                policy.end_session(session.session_id, self.now)
        if self.scenario.concurrency is not None:
            self._start_more()

    # requests

    def _send(self, asked: _Asked) -> None:
        policy = self.policies[asked.router]
        replica_id = policy.choose(asked.request, self.now)
        if replica_id not in self.replicas:
            raise ValueError(
                f"{type(policy).__name__} chose replica {replica_id}, "
                f"there are {sorted(self.replicas)}"
            )
        asked.replica_id = replica_id
        running = asked.running
        turn = running.session.turns[running.turn]
        keys = self.prepared.keys[running.index]
        job = Job(asked, keys, turn.prompt_len, turn.output_len, self.version)
        replica = self.replicas[replica_id]
        self.tally.advance(self.now)
        self.tally.in_flight[replica_id] += 1
        idle, end = replica.end == IDLE, replica.end
        replica.add(job, self.now)
        if idle and not replica.stepping:
            replica.end = self.now  # not idle any more
            self._at(self.now, self._begin, replica_id, order=_LAST)
        elif replica.end != end:
            self._await(replica_id)

    def _await(self, replica_id: int) -> None:
        """The engine's present run ends when it says; any earlier plan is void."""
        cut = self.cuts[replica_id] = self.cuts[replica_id] + 1
        self._at(self.replicas[replica_id].end, self._settle, replica_id, cut)

    def _begin(self, replica_id: int) -> None:
        replica = self.replicas[replica_id]
        if replica.stepping:
            return
        replica.begin(self.now)
        self.tally.kv_blocks[replica_id] = replica.num_used_blocks
        if replica.stepping:
            self._await(replica_id)

    def _settle(self, replica_id: int, cut: int) -> None:
        replica = self.replicas[replica_id]
        if cut != self.cuts[replica_id]:
            return
        self.tally.advance(self.now)
        for job in replica.settle():
            self._finish(replica_id, job)
        self.tally.kv_blocks[replica_id] = replica.num_used_blocks
        if self.events and self.events[0][0] <= self.now:
            self._at(self.now, self._begin, replica_id, order=_LAST)
        else:
            self._begin(replica_id)

    def _finish(self, replica_id: int, job: Job) -> None:
        asked = job.owner
        assert isinstance(asked, _Asked)
        assert job.hit_tokens is not None
        running = asked.running
        session = running.session
        turn = session.turns[running.turn]
        self.tally.finish(
            asked.request.request_id, replica_id, turn, job.hit_tokens, asked.ready_s, self.now
        )
        self.tally.moved += running.last_replica not in (-1, replica_id)
        running.last_replica = replica_id
        output = session.tokens[turn.prompt_len : turn.prompt_len + turn.output_len]
        self.policies[asked.router].finish(asked.request, replica_id, output, self.now)
        running.turn += 1
        if running.turn == len(session.turns):
            self._end(running)
        else:
            self._at(self.now + turn.tool_s, self._turn, running)

    # reports

    def _report_all(self) -> None:
        reports = self.scenario.reports
        assert reports is not None
        lost = self.losses.random((len(self.policies), len(self.replicas)))
        self._report(lost < reports.loss)
        self._at(self.now + reports.interval_s, self._report_all)

    def _report(self, lost: np.ndarray) -> None:
        """Every router asks these engines now, and hears of them later unless it is ``lost``."""
        reports = self.scenario.reports
        assert reports is not None
        for column, (replica_id, replica) in enumerate(self.replicas.items()):
            figures = replica.figures(self.now)
            for router, policy in enumerate(self.policies):
                if lost[router, column]:
                    continue
                arguments = (policy, replica_id, figures, self.now)
                if reports.delay_s:
                    self._at(self.now + reports.delay_s, self._hear, *arguments)
                else:
                    self._hear(*arguments)

    def _hear(
        self, policy: Policy, replica_id: int, figures: EngineFigures, asked_at: float
    ) -> None:
        policy.report(replica_id, figures, asked_at, self.now)

    # weights

    def _update_by_clock(self) -> None:
        updates = self.scenario.updates
        assert updates is not None
        self._update(updates.pause_s, clear=updates.clear)
        self._at(self.now + updates.every_s, self._update_by_clock)

    def _update(self, pause_s: float, *, clear: bool) -> None:
        """New weights everywhere: what is sent from now on waits for them, and routers are told."""
        self.version += 1
        for replica_id, replica in self.replicas.items():
            replica.version = self.version
            end = replica.end
            replica.pause(self.now, self.now + pause_s, clear=clear)
            if replica.stepping and replica.end != end:
                self._await(replica_id)
        if self.scenario.reports is not None:
            self._report(np.zeros((len(self.policies), len(self.replicas)), bool))

"""Runs one policy on one trace: sessions, routers and engines from event to event."""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.bound import lower_bound
from benchmarks.routing_sim.interface import Cluster, SimRequest
from benchmarks.routing_sim.job import Job
from benchmarks.routing_sim.model import IDLE, Replica
from benchmarks.routing_sim.results import Tally
from benchmarks.routing_sim.workload import BlockKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.routing_sim.costs import EngineCosts
    from benchmarks.routing_sim.interface import EngineFigures, Policy, PolicyFactory
    from benchmarks.routing_sim.results import RunResult
    from benchmarks.routing_sim.scenario import Churn, Scenario
    from benchmarks.routing_sim.workload import Session

__all__ = ["Prepared", "simulate"]

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
        self.bound_s = lower_bound(scenario, costs, self.keys)


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
        self.dead: dict[int, list[_Asked]] = {}  # not known yet, with what is lost there
        cluster = Cluster(
            replica_ids=tuple(self.replicas),
            block_size=costs.block_size,
            num_kv_blocks=costs.num_kv_blocks,
            max_num_seqs=costs.max_num_seqs,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )
        count = scenario.routers.count
        self.policies: list[Policy] = [factory(cluster, seed + number) for number in range(count)]
        self.known = set(self.replicas)
        generator = np.random.default_rng([seed, 1])
        self.random_routers = generator.integers(0, count, prepared.num_requests)
        self.losses = np.random.default_rng([seed, 2])
        self.unstarted = deque(range(len(scenario.sessions)))
        self.active = 0
        self.num_ended = 0
        self.trained = 0
        self.training = False
        self.left_in_batch: list[int] = []
        if (batches := scenario.batches) is not None:
            sizes = range(0, len(scenario.sessions), batches.size)
            total = len(scenario.sessions)
            self.left_in_batch = [min(batches.size, total - start) for start in sizes]
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
        for event in scenario.churn:
            self._at(event.at_s, self._join if event.joins else self._die, event)
        events = self.events
        total = len(scenario.sessions)
        while self.num_ended < total:
            if not events:
                raise RuntimeError(f"{total - self.num_ended} sessions are stuck at {self.now} s")
            self.now, _, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        for replica in self.replicas.values():
            self.tally.count(replica)
        return self.tally.result(self.now, self.prepared.bound_s)

    def _at(
        self, when: float, call: Callable[..., None], *arguments: object, order: int = _FIRST
    ) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, order, self.num_events, call, arguments))

    # sessions

    def _start_more(self) -> None:
        scenario = self.scenario
        limit = len(scenario.sessions)
        if (batches := scenario.batches) is not None:
            limit = (self.trained + 1 + batches.max_staleness) * batches.size
        assert scenario.concurrency is not None
        while self.unstarted and self.active < scenario.concurrency and self.unstarted[0] < limit:
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
        split = self.scenario.routers.split
        if split == "random":
            router = int(self.random_routers[number])
        else:
            owner = session.session_id if split == "session" else session.group_id
            router = (owner * 2654435761 >> 8) % self.scenario.routers.count
        self._send(_Asked(request, router, running, self.now))

    def _end(self, running: _Running) -> None:
        session = running.session
        self.active -= 1
        self.num_ended += 1
        self.tally.end_session(session.group_id, self.now)
        if self.scenario.keys == "session":
            for policy in self.policies:
                policy.end_session(session.session_id, self.now)
        if (batches := self.scenario.batches) is not None:
            self.left_in_batch[running.index // batches.size] -= 1
            self._train_next()
        if self.scenario.concurrency is not None:
            self._start_more()

    # requests

    def _send(self, asked: _Asked) -> None:
        policy = self.policies[asked.router]
        begin = time.perf_counter_ns()
        replica_id = policy.choose(asked.request, self.now)
        self.tally.decision_ns.append(time.perf_counter_ns() - begin)
        if replica_id not in self.known:
            raise ValueError(
                f"{type(policy).__name__} chose replica {replica_id}, "
                f"known are {sorted(self.known)}"
            )
        asked.replica_id = replica_id
        if replica_id in self.dead:
            self.dead[replica_id].append(asked)
            return
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
        replica = self.replicas.get(replica_id)
        if replica is None or replica.stepping:
            return
        replica.begin(self.now)
        self.tally.kv_blocks[replica_id] = replica.num_used_blocks
        if replica.stepping:
            self._await(replica_id)

    def _settle(self, replica_id: int, cut: int) -> None:
        replica = self.replicas.get(replica_id)
        if replica is None or cut != self.cuts[replica_id]:
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
        alive = [number for number in self.replicas if number in self.known]
        self._report(alive, lost < reports.loss)
        self._at(self.now + reports.interval_s, self._report_all)

    def _report(self, replica_ids: Sequence[int], lost: np.ndarray) -> None:
        """Every router asks these engines now, and hears of them later unless it is ``lost``."""
        reports = self.scenario.reports
        assert reports is not None
        for column, replica_id in enumerate(replica_ids):
            figures = self.replicas[replica_id].figures(self.now)
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
        if replica_id in self.known:
            policy.report(replica_id, figures, asked_at, self.now)

    # weights

    def _update_by_clock(self) -> None:
        updates = self.scenario.updates
        assert updates is not None
        self._update(updates.pause_s, clear=updates.clear)
        self._at(self.now + updates.every_s, self._update_by_clock)

    def _train_next(self) -> None:
        batches = self.scenario.batches
        assert batches is not None
        left = self.left_in_batch
        if not self.training and self.trained < len(left) and not left[self.trained]:
            self.training = True
            self._at(self.now + batches.train_s, self._trained)

    def _trained(self) -> None:
        batches = self.scenario.batches
        assert batches is not None
        self.training = False
        self.trained += 1
        self._update(batches.pause_s, clear=False)
        self._start_more()
        self._train_next()

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
            alive = [number for number in self.replicas if number in self.known]
            self._report(alive, np.zeros((len(self.policies), len(alive)), bool))

    # deaths and joins

    def _die(self, event: Churn) -> None:
        self.tally.advance(self.now)
        replica = self.replicas.pop(event.replica_id)
        self.tally.leave(event.replica_id, replica)
        lost = self.dead[event.replica_id] = []
        for job in replica.jobs():
            assert isinstance(job.owner, _Asked)
            lost.append(job.owner)
        self._at(self.now + event.detection_s, self._detect, event.replica_id)

    def _detect(self, replica_id: int) -> None:
        lost = self.dead.pop(replica_id)
        self.tally.lost += len(lost)
        self.known.discard(replica_id)
        for asked in lost:
            self.policies[asked.router].finish(asked.request, replica_id, None, self.now)
        self._tell_replicas()
        for asked in lost:
            self._send(asked)

    def _join(self, event: Churn) -> None:
        self.tally.advance(self.now)
        replica_id = event.replica_id
        replica = self.replicas[replica_id] = Replica(self.costs)
        replica.version = self.version
        self.cuts.setdefault(replica_id, 0)
        self.tally.join(replica_id)
        self.known.add(replica_id)
        self._tell_replicas()

    def _tell_replicas(self) -> None:
        for policy in self.policies:
            policy.set_replicas(tuple(sorted(self.known)), self.now)

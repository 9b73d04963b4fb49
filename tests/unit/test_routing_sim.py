"""The simulation behind ``benchmarks.routing``: its engines against naive ones, and its sums."""

import heapq
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.record import ROOT
from benchmarks.routing_sim.costs import EngineCosts
from benchmarks.routing_sim.model import IDLE, Job, Replica
from benchmarks.routing_sim.scenario import Batches, Churn, Reports, Routers, Updates
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, agents, grpo, make_trace
from benchmarks.routing_sim.workload import BlockKeys, Session, Turn

# Powers of two: sums of them are exact, so equal times are equal numbers.
EXACT = EngineCosts(
    base_step_s=2**-7,
    per_sequence_s=2**-12,
    per_context_token_s=2**-20,
    prefill_tokens_per_s=2.0**14,
    per_prefill_context_s2=2**-30,
    token_budget=16,
    max_num_seqs=4,
    num_kv_blocks=48,
    block_size=4,
)


class RoundRobin:
    """The smallest policy; also notes all that it is told."""

    def __init__(self, cluster, seed):
        self.ids = list(cluster.replica_ids)
        self.count = seed
        self.finished, self.lost, self.ended, self.reports = [], [], [], []

    def choose(self, request, now):
        self.count += 1
        return self.ids[self.count % len(self.ids)]

    def finish(self, request, replica_id, output, now):
        if output is None:
            self.lost.append((request.request_id, replica_id))
        else:
            self.finished.append((request.request_id, output.tobytes()))

    def end_session(self, session_id, now):
        self.ended.append(session_id)

    def report(self, replica_id, figures, asked_at, now):
        self.reports.append((replica_id, figures, asked_at, now))

    def set_replicas(self, replica_ids, now):
        self.ids = list(replica_ids)


class FirstReplica(RoundRobin):
    def choose(self, request, now):
        return self.ids[0]


class Sticky(RoundRobin):
    """A session stays where it was first; a group likewise, if there is no session."""

    def choose(self, request, now):
        key = request.session_id if request.session_id >= 0 else request.group_id
        return self.ids[key % len(self.ids)]


class Observed:
    """Makes policies and keeps them."""

    def __init__(self, factory):
        self.factory = factory
        self.made = []

    def __call__(self, cluster, seed):
        self.made.append(self.factory(cluster, seed))
        return self.made[-1]


# An engine as vLLM has it, one block and one step at a time.


class NaiveCache:
    """Every block by itself: who holds it, and a list of free ones with a key."""

    def __init__(self, num_blocks):
        self.plain = num_blocks
        self.refs = {}
        self.queue = []

    def free(self):
        return self.plain + len(self.queue)

    def match(self, keys, limit):
        found = []
        for key in keys[:limit]:
            if key not in self.refs and key not in self.queue:
                break
            found.append(key)
        return found

    def hold(self, key):
        if key in self.queue:
            self.queue.remove(key)
            self.refs[key] = 0
        self.refs[key] += 1

    def take(self):
        if self.plain:
            self.plain -= 1
        else:
            self.queue.pop(0)

    def drop(self, key):
        self.refs[key] -= 1
        if not self.refs[key]:
            del self.refs[key]
            self.queue.append(key)


class NaiveRequest:
    def __init__(self, name, keys, prompt_len, output_len, salt=0):
        self.name = name
        self.keys = [(salt, key) for key in keys]
        self.prompt_len, self.output_len = prompt_len, output_len
        self.done = self.computed = self.blocks = self.preemptions = 0
        self.held, self.private = [], 0
        self.hits = None
        self.decodes = False

    def target(self):
        return self.prompt_len + self.done


class NaiveEngine:
    def __init__(self, costs):
        self.costs = costs
        self.cache = NaiveCache(costs.num_kv_blocks)
        self.running, self.waiting = [], []
        self.steps = 0

    def take(self, request, count):
        """Blocks for ``count`` more tokens; False if there are not enough."""
        size = self.costs.block_size
        need = -(-(request.computed + count) // size) - request.blocks
        if need > self.cache.free():
            return False
        for _ in range(need):
            self.cache.take()
        request.blocks += need
        request.private += need
        return True

    def register(self, request, tokens):
        for key in request.keys[len(request.held) : tokens // self.costs.block_size]:
            if key in self.cache.refs or key in self.cache.queue:
                self.cache.hold(key)  # the copy stays private
            else:
                self.cache.refs[key] = 1
                request.private -= 1
            request.held.append(key)

    def release(self, request):
        for key in reversed(request.held):
            self.cache.drop(key)
        self.cache.plain += request.private
        request.held, request.private, request.blocks = [], 0, 0

    def preempt(self):
        victim = self.running.pop()
        self.release(victim)
        victim.computed = 0
        victim.decodes = False
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        return victim

    def step(self):
        """Runs one step; returns its seconds and the requests that ended with it."""
        costs = self.costs
        budget = costs.token_budget
        scheduled = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(request.target() - request.computed, budget)
            while not self.take(request, count):
                preempted = True
                if self.preempt() is request:
                    break
            else:
                scheduled.append((request, count))
                self.register(request, request.computed + count)
                budget -= count
                index += 1
                continue
            break
        while not preempted and self.waiting and budget:
            if len(self.running) >= costs.max_num_seqs:
                break
            request = self.waiting[0]
            size = costs.block_size
            found = self.cache.match(request.keys, (request.target() - 1) // size)
            idle = sum(key in self.cache.queue for key in found)
            if -(-request.target() // size) - len(found) + idle > self.cache.free():
                break
            self.running.append(self.waiting.pop(0))
            for key in found:
                self.cache.hold(key)
            request.held = list(found)
            request.blocks = len(found)
            request.computed = len(found) * size
            if request.hits is None:
                request.hits = request.computed
            count = min(request.target() - request.computed, budget)
            assert self.take(request, count)
            self.register(request, request.computed + count)
            scheduled.append((request, count))
            budget -= count
        seconds = costs.base_step_s
        ended = []
        assert scheduled
        for request, count in scheduled:
            if request.decodes:
                seconds += costs.per_sequence_s + costs.per_context_token_s * request.computed
            else:
                seconds += count / costs.prefill_tokens_per_s
                for position in range(request.computed, request.computed + count):
                    seconds += costs.per_prefill_context_s2 * position
            request.computed += count
            if request.computed == request.target():
                request.done += 1
                request.decodes = True
                if request.done == request.output_len:
                    ended.append(request)
        for request in ended:
            self.running.remove(request)
            self.release(request)
        self.steps += 1
        return seconds, ended


@dataclass
class Outcome:
    """What one engine made of some sessions."""

    finished_s: dict
    hits: dict
    preemptions: int
    steps: int


def run_naively(costs, sessions, pauses=()):
    """Sessions on one naive engine; ``pauses`` are (at, until), after which salts change."""
    keys = BlockKeys(costs.block_size)
    chains = [keys.of(session.tokens) for session in sessions]
    engine = NaiveEngine(costs)
    arrivals = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    outcome = Outcome({}, {}, 0, 0)
    now = 0.0
    while arrivals or engine.running or engine.waiting:
        if not engine.running and not engine.waiting:
            now = max(now, arrivals[0][0])
        while held_back := [until for at, until in pauses if at <= now < until]:
            now = max(held_back)
        while arrivals and arrivals[0][0] <= now:
            at, index, number = heapq.heappop(arrivals)
            turn = sessions[index].turns[number]
            salt = sum(begin <= at for begin, _ in pauses)
            name = (index, number)
            request = NaiveRequest(name, chains[index], turn.prompt_len, turn.output_len, salt)
            engine.waiting.append(request)
        seconds, ended = engine.step()
        now += seconds
        for request in ended:
            index, number = request.name
            outcome.finished_s[request.name] = now
            outcome.hits[request.name] = request.hits
            outcome.preemptions += request.preemptions
            if number + 1 < len(sessions[index].turns):
                gap = sessions[index].turns[number].tool_s
                heapq.heappush(arrivals, (now + gap, index, number + 1))
    assert engine.cache.free() == costs.num_kv_blocks
    outcome.steps = engine.steps
    return outcome


def run_jumping(costs, sessions, pauses=()):
    """The same on the engine that jumps."""
    keys = BlockKeys(costs.block_size)
    chains = [keys.of(session.tokens) for session in sessions]
    replica = Replica(costs)
    events = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    events += [(at, -1, until) for at, until in pauses]
    heapq.heapify(events)
    outcome = Outcome({}, {}, 0, 0)
    salt = 0
    while events or replica.end != IDLE:
        now = min(replica.end, events[0][0] if events else IDLE)
        while events and events[0][0] <= now:
            _, index, number = heapq.heappop(events)
            if index < 0:
                salt += 1
                replica.pause(now, number)
                continue
            turn = sessions[index].turns[number]
            job = Job((index, number), chains[index], turn.prompt_len, turn.output_len, salt)
            replica.add(job, now)
        figures = replica.figures(now)
        assert figures.num_running + figures.num_waiting == replica.num_in_flight
        assert 0 <= figures.kv_cache_usage <= 1
        if replica.stepping and now < replica.end:
            continue
        for job in replica.settle() if replica.stepping else ():
            index, number = job.owner
            outcome.finished_s[job.owner] = now
            outcome.hits[job.owner] = job.hit_tokens
            outcome.preemptions += job.preemptions
            if number + 1 < len(sessions[index].turns):
                gap = sessions[index].turns[number].tool_s
                heapq.heappush(events, (now + gap, index, number + 1))
        if not (events and events[0][0] <= now):
            replica.begin(now)
        else:
            replica.end = now
    assert replica.cache.num_free == costs.num_kv_blocks
    outcome.steps = replica.num_steps
    return outcome


@st.composite
def some_sessions(draw):
    """A few sessions with common beginnings."""
    sessions = []
    fresh = iter(range(1000, 1_000_000))
    for number in range(draw(st.integers(1, 8))):
        group = draw(st.integers(0, 2))
        common = draw(st.integers(0, 40))
        tokens = [group * 100 + position for position in range(common)]
        turns = []
        for _ in range(draw(st.integers(1, 3))):
            own = draw(st.integers(0 if tokens else 1, 12))
            output = draw(st.integers(1, 30))
            if len(tokens) + own + output > 180:
                break
            tokens += [next(fresh) for _ in range(own)]
            turns.append(Turn(len(tokens), output, draw(st.integers(0, 8)) / 64))
            tokens += [next(fresh) for _ in range(output)]
        arrival_s = draw(st.integers(0, 64)) / 64
        text = np.array(tokens, np.int32)
        sessions.append(Session(number, group, text, tuple(turns), arrival_s))
    return sessions


def some_pauses():
    begins = st.lists(st.integers(1, 200), max_size=3, unique=True).map(sorted)
    return begins.map(lambda all_: [(at / 64, at / 64 + 0.125) for at in all_[::2]])


@given(
    some_sessions(),
    some_pauses(),
    st.integers(1, 6),
    st.sampled_from([8, 16, 64]),
    st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_jumps_end_where_single_steps_do(
    sessions, pauses, max_num_seqs, token_budget, spare_blocks
):
    longest = max(len(session.tokens) for session in sessions)
    costs = replace(
        EXACT,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        num_kv_blocks=-(-longest // EXACT.block_size) + spare_blocks,
    )
    assert run_jumping(costs, sessions, pauses) == run_naively(costs, sessions, pauses)


def test_a_full_cache_preempts_and_loses_nothing():
    sessions = [single(number, 0, list(range(8)), 120) for number in range(4)]
    outcome = run_jumping(EXACT, sessions)
    assert outcome.preemptions > 0
    assert len(outcome.finished_s) == 4
    assert outcome == run_naively(EXACT, sessions)
    roomy = run_jumping(replace(EXACT, num_kv_blocks=200), sessions)
    assert roomy.preemptions == 0
    assert max(roomy.finished_s.values()) < max(outcome.finished_s.values())


def single(number, group, prompt, output_len, arrival_s=0.0):
    """A session of one turn, whose output is nobody else's."""
    own = range(10_000 * (number + 1), 10_000 * (number + 1) + output_len)
    text = np.array([*prompt, *own], np.int32)
    return Session(number, group, text, (Turn(len(prompt), output_len),), arrival_s)


def test_one_request_takes_what_its_steps_cost():
    costs = replace(EXACT, num_kv_blocks=1000, block_size=16)
    outcome = run_jumping(costs, [single(0, 0, range(40), 100)])
    # 40 tokens in chunks of 16, 16 and 8, then 99 steps over contexts of 40 to 138 tokens
    prefill = 3 * costs.base_step_s + 40 / costs.prefill_tokens_per_s
    prefill += costs.per_prefill_context_s2 * sum(range(40))
    decode = 99 * (costs.base_step_s + costs.per_sequence_s)
    decode += costs.per_context_token_s * sum(range(40, 139))
    assert outcome.finished_s == {(0, 0): prefill + decode}
    assert outcome.steps == 102


def test_a_request_that_arrives_between_two_steps_is_in_the_second():
    plain = replace(EXACT, per_sequence_s=0.0, per_context_token_s=0.0, per_prefill_context_s2=0.0)
    first = single(0, 0, range(16), 20)
    prefill, step = 2**-7 + 16 / 2**14, 2**-7
    boundary = prefill + 5 * step
    for arrival_s, begins in [(boundary, boundary), (boundary + 2**-20, boundary + step)]:
        sessions = [first, single(1, 1, range(100, 104), 1, arrival_s)]
        outcome = run_jumping(plain, sessions)
        assert outcome == run_naively(plain, sessions)
        assert outcome.finished_s[1, 0] == begins + step + 4 / 2**14


def test_siblings_find_what_the_first_one_computes_but_for_the_last_token():
    costs = replace(EXACT, num_kv_blocks=1000, token_budget=64)
    prompt = range(24)  # six blocks of four: the last one is computed again
    outcome = run_jumping(costs, [single(number, 0, prompt, 3) for number in range(4)])
    assert outcome.hits == {(0, 0): 0, (1, 0): 20, (2, 0): 20, (3, 0): 20}
    other = [
        single(number, number, range(100 * number, 100 * number + 24), 3) for number in range(4)
    ]
    assert set(run_jumping(costs, other).hits.values()) == {0}


def test_new_weights_hide_what_was_computed_before():
    costs = replace(EXACT, num_kv_blocks=1000, token_budget=64)
    late = [single(0, 0, range(24), 3), single(1, 0, range(24), 3, arrival_s=1.0)]
    assert run_jumping(costs, late).hits == {(0, 0): 0, (1, 0): 20}
    assert run_jumping(costs, late, [(0.5, 0.75)]).hits == {(0, 0): 0, (1, 0): 0}


def test_a_cleared_engine_computes_again():
    costs = replace(EXACT, num_kv_blocks=1000, token_budget=64)
    ends = {}
    for clear in (False, True):
        replica = Replica(costs)
        keys = BlockKeys(4).of(np.arange(140))
        replica.add(Job("only", keys, 40, 100), 0.0)
        replica.begin(0.0)
        replica.settle()
        replica.begin(replica.end)
        replica.pause(0.25, 0.5, clear=clear)
        ended = []
        while not ended:
            ended = replica.settle()
            replica.begin(replica.end)
        assert replica.num_preemptions == clear
        ends[clear] = replica.busy_s
    assert ends[True] > ends[False]


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(ValueError, match=r"200 tokens does not fit into 48 blocks of 4"):
        Replica(EXACT).add(Job("long", [], 100, 100), 0.0)


# whole clusters

SMALL = EngineCosts(
    base_step_s=0.01,
    per_sequence_s=0.0002,
    per_context_token_s=1e-7,
    prefill_tokens_per_s=8000.0,
    token_budget=512,
    max_num_seqs=16,
    num_kv_blocks=2500,
    block_size=16,
)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("factory", [RoundRobin, Sticky])
def test_every_request_is_answered_once_with_its_tokens(name, factory):
    prepared = Prepared(make_trace(name, 3, smoke=True), SMALL)
    scenario = prepared.scenario
    observed = Observed(factory)
    result = simulate(prepared, observed, 3)
    answers = [one for policy in observed.made for one in policy.finished]
    expected = {}
    for first, session in zip(prepared.first_request, scenario.sessions, strict=False):
        for number, turn in enumerate(session.turns):
            end = turn.prompt_len + turn.output_len
            expected[first + number] = session.tokens[turn.prompt_len : end].tobytes()
    assert len(answers) == len(expected)
    assert dict(answers) == expected
    assert result.output_tokens == sum(map(len, expected.values())) // 4
    assert np.isfinite(result.finished_s).all()
    assert result.metrics["makespan"] == result.finished_s.max()
    assert result.metrics["bound_ratio"] >= 1
    assert 0 <= result.metrics["hit_rate"] < 1
    assert result.metrics["imbalance"] >= 1
    ended = Counter(one for policy in observed.made for one in policy.ended)
    keyed = scenario.keys == "session"
    assert set(ended.values()) == ({len(observed.made)} if keyed else set())
    assert len(ended) == len(scenario.sessions) * keyed
    lost = sum(len(policy.lost) for policy in observed.made)
    assert result.metrics["lost"] == lost
    assert bool(lost) == bool(scenario.churn)


def test_keys_are_seen_only_where_the_trace_has_them():
    class Looking(RoundRobin):
        def choose(self, request, now):
            seen.add((request.session_id >= 0, request.group_id >= 0))
            return super().choose(request, now)

    for keys, expected in {
        "session": (True, True),
        "group": (False, True),
        "none": (False, False),
    }.items():
        seen = set()
        scenario = grpo(0, num_groups=2, group_size=2, output_median=5.0, keys=keys)
        simulate(Prepared(scenario, SMALL), Looking)
        assert seen == {expected}


def test_sticky_sessions_hit_and_stay_where_round_robin_does_neither():
    prepared = Prepared(make_trace("agents", 0, smoke=True), SMALL)
    sticky, spread = simulate(prepared, Sticky), simulate(prepared, RoundRobin)
    assert sticky.metrics["hit_rate"] > spread.metrics["hit_rate"] + 0.1
    assert sticky.metrics["moved_sessions"] == 0
    assert spread.metrics["moved_sessions"] > len(prepared.scenario.sessions)


def test_one_replica_for_all_is_the_worst_balance():
    prepared = Prepared(make_trace("grpo", 0, smoke=True), SMALL)
    alone, spread = simulate(prepared, FirstReplica), simulate(prepared, RoundRobin)
    assert alone.metrics["imbalance"] == pytest.approx(3)
    assert spread.metrics["imbalance"] < 2
    assert alone.metrics["makespan"] > spread.metrics["makespan"]
    assert set(alone.replicas) == {0}
    assert set(spread.replicas) == {0, 1, 2}


def test_a_policy_that_names_a_dead_replica_is_refused():
    class Stubborn(RoundRobin):
        def set_replicas(self, replica_ids, now):
            pass

    prepared = Prepared(make_trace("agents-churn", 0, smoke=True), SMALL)
    with pytest.raises(ValueError, match=r"Stubborn chose replica 1, known are \[0, 2\]"):
        simulate(prepared, Stubborn)


def test_late_reports_are_late_and_lost_ones_missing():
    def heard(delay_s, loss):
        scenario = replace(
            make_trace("agents-unkeyed", 0, smoke=True),
            routers=Routers(2, "random"),
            reports=Reports(interval_s=0.25, delay_s=delay_s, loss=loss),
        )
        observed = Observed(RoundRobin)
        simulate(Prepared(scenario, SMALL), observed)
        return [report for policy in observed.made for report in policy.reports]

    at_once, late, half = heard(0.0, 0.0), heard(0.5, 0.0), heard(0.0, 0.5)
    assert {now - asked_at for _, _, asked_at, now in at_once} == {0.0}
    assert {now - asked_at for _, _, asked_at, now in late} == {0.5}
    assert 0.4 * len(at_once) < len(half) < 0.6 * len(at_once)
    assert {replica_id for replica_id, *_ in half} == {0, 1, 2}
    assert any(figures.num_running for _, figures, *_ in at_once)


def test_updates_change_the_version_that_engines_report():
    scenario = replace(make_trace("agents", 0, smoke=True), updates=Updates(1.0, 0.125))
    observed = Observed(RoundRobin)
    result = simulate(Prepared(scenario, SMALL), observed)
    versions = [figures.weight_version for _, figures, *_ in observed.made[0].reports]
    assert versions == sorted(versions)
    assert versions[-1] == int(result.metrics["makespan"])
    without = simulate(Prepared(replace(scenario, updates=None), SMALL), RoundRobin)
    assert result.metrics["makespan"] > without.metrics["makespan"]
    assert result.metrics["hit_rate"] < without.metrics["hit_rate"]


def test_no_batch_starts_further_ahead_than_staleness_allows():
    started = []

    class Noting(RoundRobin):
        def choose(self, request, now):
            started.append((request.request_id, now))
            return super().choose(request, now)

    batches = Batches(size=8, max_staleness=1, train_s=0.5, pause_s=0.125)
    scenario = replace(make_trace("grpo", 0, smoke=True), batches=batches)
    result = simulate(Prepared(scenario, SMALL), Noting)
    trained = 0.0
    known = []
    for batch in range(len(scenario.sessions) // 8):
        begin = min(now for number, now in started if number // 8 == batch)
        if batch >= 2:
            assert begin >= known[batch - 2]
        done = result.finished_s[8 * batch : 8 * batch + 8].max()
        trained = max(trained, done) + 0.5
        known.append(trained)
    free = simulate(Prepared(replace(scenario, batches=None), SMALL), RoundRobin)
    assert result.metrics["makespan"] > free.metrics["makespan"]


def test_a_death_costs_what_was_in_flight_and_a_join_takes_work():
    scenario = make_trace("agents", 0, smoke=True)
    churn = (Churn(1.0, 0, detection_s=0.5), Churn(2.0, 3, joins=True))
    result = simulate(Prepared(replace(scenario, churn=churn), SMALL), RoundRobin)
    after = result.replicas[result.finished_s > 1.0]
    assert result.metrics["lost"] > 0
    assert 0 not in after
    assert 3 in after
    assert 0 in result.replicas


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sessions": ()}, "no sessions"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"updates": Updates(0.5, 0.5)}, "every_s must be greater"),
        ({"concurrency": None, "batches": Batches(4)}, "batches need sessions"),
        ({"churn": (Churn(1.0, 7),)}, "is not possible with replicas"),
        ({"churn": (Churn(1.0, 1, joins=True),)}, "is not possible with replicas"),
        ({"churn": (Churn(1.0, 1), Churn(1.5, 1, joins=True))}, "is not possible with replicas"),
        ({"churn": tuple(Churn(1.0, one) for one in range(3))}, "no replica is left"),
    ],
)
def test_impossible_scenarios_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(make_trace("grpo", 0, smoke=True), **changes)


@pytest.mark.parametrize("turns", [(), (Turn(0, 3),), (Turn(4, 0),), (Turn(2, 3), Turn(4, 1))])
def test_impossible_sessions_are_refused(turns):
    with pytest.raises(ValueError, match="session 5"):
        Session(5, 0, np.arange(20, dtype=np.int32), turns)
    with pytest.raises(ValueError, match="has 20 tokens, its turns 21"):
        Session(5, 0, np.arange(20, dtype=np.int32), (Turn(20, 1),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_step_s": 0.0}, "base_step_s must be greater than 0, got 0.0"),
        ({"per_sequence_s": -1.0}, "per_sequence_s must be at least 0, got -1.0"),
        ({"per_context_token_s": float("nan")}, "per_context_token_s must be at least 0, got nan"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"token_budget": 8}, r"token_budget must be at least max_num_seqs \(16\), got 8"),
    ],
)
def test_impossible_costs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_traces_are_the_same_from_the_same_seed_alone():
    one, same, other = agents(5), agents(5), agents(6)
    assert [session.turns for session in one.sessions] == [sess.turns for sess in same.sessions]
    assert all(
        left.tokens.tobytes() == right.tokens.tobytes()
        for left, right in zip(one.sessions, same.sessions, strict=True)
    )
    assert one.sessions[0].turns != other.sessions[0].turns


DIGEST = """
import hashlib
from benchmarks.routing_sim.costs import costs_named
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import make_trace

digest = hashlib.sha256()
for trace in ("agents-churn", "routers-lost", "grpo-async"):
    prepared = Prepared(make_trace(trace, 1, smoke=True), costs_named("facts-8b-h200"))
    for name, factory in POLICIES.items():
        result = simulate(prepared, factory, 1)
        digest.update(repr((trace, name, result.metrics)).encode())
        digest.update(result.replicas.tobytes() + result.finished_s.tobytes())
print(digest.hexdigest())
"""


def test_processes_of_any_hash_seed_agree():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64

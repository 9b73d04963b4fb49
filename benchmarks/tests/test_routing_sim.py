"""The simulation behind ``benchmarks.routing``: vLLM's scheduler in simulated time; its sums."""

import heapq
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.record import ROOT
from benchmarks.routing_sim.engine import IDLE, Engine, EngineCosts, Job
from benchmarks.routing_sim.policies import Policy, RoundRobin, SimRequest
from benchmarks.routing_sim.simulate import simulate
from benchmarks.routing_sim.traces import TRACES, BlockKeys, Session, Turn

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
ROOMY = replace(EXACT, num_kv_blocks=1000, token_budget=64)


# one engine


def single(number, prompt, output_len):
    """A session of one turn, whose output is nobody else's."""
    own = range(10_000 * (number + 1), 10_000 * (number + 1) + output_len)
    text = np.array([*prompt, *own], np.int32)
    return Session(number, 0, text, (Turn(len(prompt), output_len),))


def run(costs, sessions, arrivals=None, updates=(), **settings):
    """Ends, hits and preemptions of sessions on one engine, and its steps."""
    engine = Engine(costs, **settings)
    keys = BlockKeys(costs.block_size)
    chains = [keys.of(session.tokens) for session in sessions]
    arrivals = arrivals or [0.0] * len(sessions)
    events = [(arrival_s, index, 0) for index, arrival_s in enumerate(arrivals)]
    events += [(at, -1, until) for at, until in updates]
    heapq.heapify(events)
    outcome = {}
    while events or engine.end != IDLE:
        now = min(engine.end, events[0][0] if events else IDLE)
        while events and events[0][0] <= now:
            _, index, number = heapq.heappop(events)
            if index < 0:
                engine.update(now, number)
                continue
            request = SimRequest(1000 * index + number, None)
            turn = sessions[index].turns[number]
            engine.add(Job(request, sessions[index], turn, chains[index]), now)
        report = engine.report(now)
        assert report.num_running + report.num_waiting == report.num_unfinished
        assert 0 <= report.kv_cache_usage <= 1
        if engine.stepping and now < engine.end:
            continue
        for job in engine.settle() if engine.stepping else ():
            index, number = divmod(job.request.request_id, 1000)
            outcome[index, number] = now, job.hit_tokens, job.state.num_preemptions
            if number + 1 < len(sessions[index].turns):
                heapq.heappush(events, (now + job.turn.tool_s, index, number + 1))
        if not (events and events[0][0] <= now):
            engine.begin(now)
        else:
            engine.end = now
    assert engine.num_free_blocks == costs.num_kv_blocks
    return outcome, engine.num_steps


def hits(*arguments, **settings):
    outcome, _ = run(*arguments, **settings)
    return [outcome[name][1] for name in sorted(outcome)]


@st.composite
def some_sessions(draw):
    """A few sessions with common beginnings, and when they arrive."""
    sessions = []
    fresh = iter(range(1000, 1_000_000))
    for number in range(draw(st.integers(1, 8))):
        group = draw(st.integers(0, 2))
        tokens = [group * 100 + position for position in range(draw(st.integers(0, 40)))]
        turns = []
        for _ in range(draw(st.integers(1, 3))):
            own = draw(st.integers(0 if tokens else 1, 12))
            output = draw(st.integers(1, 30))
            if len(tokens) + own + output > 180:
                break
            tokens += [next(fresh) for _ in range(own)]
            turns.append(Turn(len(tokens), output, draw(st.integers(0, 8)) / 64))
            tokens += [next(fresh) for _ in range(output)]
        sessions.append(Session(number, group, np.array(tokens, np.int32), tuple(turns)))
    return sessions, [draw(st.integers(0, 64)) / 64 for _ in sessions]


def some_updates():
    begins = st.lists(st.integers(1, 200), max_size=3, unique=True).map(sorted)
    return begins.map(lambda all_: [(at / 64, at / 64 + 0.125) for at in all_[::2]])


@given(
    some_sessions(),
    some_updates(),
    st.integers(1, 6),
    st.sampled_from([8, 16, 64]),
    st.integers(0, 30),
)
@settings(max_examples=150, deadline=None)
def test_jumps_end_where_single_steps_do(some, updates, max_num_seqs, token_budget, spare_blocks):
    sessions, arrivals = some
    longest = max(len(session.tokens) for session in sessions)
    costs = replace(
        EXACT,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        num_kv_blocks=-(-longest // EXACT.block_size) + spare_blocks,
    )
    jumping = run(costs, sessions, arrivals, updates)
    assert jumping == run(costs, sessions, arrivals, updates, jump=False)


def test_a_full_cache_preempts_and_loses_nothing():
    sessions = [single(number, range(8), 120) for number in range(4)]
    full, roomy = run(EXACT, sessions), run(replace(EXACT, num_kv_blocks=200), sessions)
    assert full == run(EXACT, sessions, jump=False)
    assert len(full[0]) == len(roomy[0]) == 4
    assert sum(preempted for *_, preempted in full[0].values()) > 0
    assert sum(preempted for *_, preempted in roomy[0].values()) == 0
    assert max(roomy[0].values())[0] < max(full[0].values())[0]


def test_one_request_takes_what_its_steps_cost():
    costs = replace(EXACT, num_kv_blocks=1000, block_size=16)
    # 40 tokens in chunks of 16, 16 and 8, then 99 steps over contexts of 40 to 138 tokens
    prefill = 3 * costs.base_step_s + 40 / costs.prefill_tokens_per_s
    prefill += costs.per_prefill_context_s2 * sum(range(40))
    decode = 99 * (costs.base_step_s + costs.per_sequence_s)
    decode += costs.per_context_token_s * sum(range(40, 139))
    outcome = run(costs, [single(0, range(40), 100)])
    assert outcome == ({(0, 0): (prefill + decode, 0, 0)}, 102)


def test_a_request_that_arrives_between_two_steps_is_in_the_second():
    plain = replace(EXACT, per_sequence_s=0.0, per_context_token_s=0.0, per_prefill_context_s2=0.0)
    prefill, step = 2**-7 + 16 / 2**14, 2**-7
    boundary = prefill + 5 * step
    for arrival_s, begins in [(boundary, boundary), (boundary + 2**-20, boundary + step)]:
        sessions = [single(0, range(16), 20), single(1, range(100, 104), 1)]
        outcome, _ = run(plain, sessions, [0.0, arrival_s])
        assert outcome[1, 0][0] == begins + step + 4 / 2**14


def test_siblings_find_what_the_first_one_computes_but_for_the_last_token():
    # six blocks of four: the last one is computed again
    assert hits(ROOMY, [single(number, range(24), 3) for number in range(4)]) == [0, 20, 20, 20]
    others = [single(number, range(100 * number, 100 * number + 24), 3) for number in range(4)]
    assert hits(ROOMY, others) == [0, 0, 0, 0]


def test_new_weights_hide_what_was_computed_before():
    sessions = [single(number, range(24), 3) for number in range(2)]
    assert hits(ROOMY, sessions, [0.0, 1.0]) == [0, 20]
    assert hits(ROOMY, sessions, [0.0, 1.0], [(0.5, 0.75)]) == [0, 0]


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(RuntimeError, match="none of them can run"):
        run(EXACT, [single(0, range(200), 100)])


# whole clusters

SMALL = EngineCosts(
    base_step_s=0.01,
    per_sequence_s=0.0002,
    per_context_token_s=1e-7,
    prefill_tokens_per_s=8000.0,
    per_prefill_context_s2=0.0,
    token_budget=512,
    max_num_seqs=16,
    num_kv_blocks=2500,
)


class Noting(RoundRobin):
    """Notes all that it is told."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen, self.finished, self.ended, self.reports = set(), [], [], []

    def choose(self, request, now):
        self.seen.add((request.session_id is not None, request.group_id is not None))
        return super().choose(request, now)

    def finish(self, request, replica_id, output, now):
        self.finished.append((request.request_id, output.tobytes()))

    def end_session(self, session_id):
        self.ended.append(session_id)

    def report(self, report, now):
        self.reports.append(report)


class Sticky(Policy):
    """A session stays where it was first; a group likewise, if there is no session."""

    def pick(self, request):
        key = request.group_id if request.session_id is None else request.session_id
        return (key or 0) % len(self.in_flight)


class FirstReplica(Policy):
    def pick(self, request):
        return 0


def noted(scenario):
    """What a policy was told, and what came of it."""
    made = []

    def factory(*arguments):
        made.append(Noting(*arguments))
        return made[0]

    return simulate(scenario, SMALL, factory), made[0]


@pytest.mark.parametrize("name", TRACES)
def test_every_request_is_answered_once_with_its_tokens(name):
    scenario = TRACES[name](3, True)
    result, policy = noted(scenario)
    expected = [
        session.tokens[turn.prompt_len : turn.prompt_len + turn.output_len].tobytes()
        for session in scenario.sessions
        for turn in session.turns
    ]
    assert sorted(policy.finished) == list(enumerate(expected))
    assert result.metrics["makespan"] == result.finished_s.max()
    assert 0 <= result.metrics["hit_rate"] < 1
    assert result.metrics["imbalance"] >= 1
    keyed = scenario.keys == "session"
    assert sorted(policy.ended) == list(range(len(scenario.sessions) * keyed))
    assert policy.seen == {(keyed, scenario.keys != "none")}
    assert {report.replica_id for report in policy.reports} == {"0", "1", "2"}
    assert any(report.num_running for report in policy.reports)


def test_sticky_sessions_hit_where_round_robin_does_not():
    scenario = TRACES["agents"](0, True)
    sticky, spread = (simulate(scenario, SMALL, one) for one in (Sticky, RoundRobin))
    assert sticky.metrics["hit_rate"] > spread.metrics["hit_rate"] + 0.1


def test_one_replica_for_all_is_the_worst_balance():
    scenario = TRACES["grpo"](0, True)
    alone, spread = (simulate(scenario, SMALL, one) for one in (FirstReplica, RoundRobin))
    assert alone.metrics["imbalance"] == pytest.approx(3)
    assert spread.metrics["imbalance"] < 2
    assert alone.metrics["makespan"] > spread.metrics["makespan"]
    assert set(alone.replicas) == {0}
    assert set(spread.replicas) == {0, 1, 2}


def test_updates_change_the_version_that_engines_report():
    scenario = replace(TRACES["agents"](0, True), update_every_s=1.0)
    with_it, policy = noted(scenario)
    versions = [report.weight_version for report in policy.reports]
    assert versions == sorted(versions)
    assert versions[-1] == int(with_it.metrics["makespan"])
    without, _ = noted(replace(scenario, update_every_s=None))
    assert with_it.metrics["makespan"] > without.metrics["makespan"]
    assert with_it.metrics["hit_rate"] < without.metrics["hit_rate"]


@pytest.mark.parametrize("name", TRACES)
def test_small_traces_are_small(name):
    small, whole = (TRACES[name](0, smoke) for smoke in (True, False))
    assert (small.num_replicas, whole.num_replicas) == (3, 8)
    assert len(small.sessions) < len(whole.sessions) / 10


DIGEST = """
import hashlib

from benchmarks.routing_sim.engine import COSTS
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import simulate
from benchmarks.routing_sim.traces import TRACES

digest = hashlib.sha256()
for trace in ("agents-updates", "grpo"):
    for name, factory in POLICIES.items():
        result = simulate(TRACES[trace](1, True), COSTS, factory, 1)
        digest.update(repr((trace, name, result.metrics)).encode())
        digest.update(result.replicas.tobytes() + result.finished_s.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.timeout(300)
def test_processes_of_any_hash_seed_agree():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout.split()[-1]
        for seed in ("0", "1")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 64

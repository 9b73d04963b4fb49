"""The simulation behind ``benchmarks.routing``: its engines against naive ones, and its sums."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.record import ROOT
from benchmarks.routing_sim.costs import EngineCosts
from benchmarks.routing_sim.engine import Job, Replica
from benchmarks.routing_sim.scenario import BlockKeys, Reports, Session, Turn, Updates
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, agents, grpo, make_trace
from benchmarks.tests.routing_sim_engines import (
    EXACT,
    run_jumping,
    run_naively,
    single,
    some_pauses,
    some_sessions,
)


class RoundRobin:
    """The smallest policy; also notes all that it is told."""

    def __init__(self, cluster, seed):
        self.ids = list(cluster.replica_ids)
        self.count = seed
        self.finished, self.ended, self.reports = [], [], []

    def choose(self, request, now):
        self.count += 1
        return self.ids[self.count % len(self.ids)]

    def finish(self, request, replica_id, output, now):
        self.finished.append((request.request_id, output.tobytes()))

    def end_session(self, session_id, now):
        self.ended.append(session_id)

    def report(self, replica_id, figures, asked_at, now):
        self.reports.append((replica_id, figures, asked_at, now))


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
    assert 0 <= result.metrics["hit_rate"] < 1
    assert result.metrics["imbalance"] >= 1
    ended = Counter(one for policy in observed.made for one in policy.ended)
    keyed = scenario.keys == "session"
    assert set(ended.values()) == ({len(observed.made)} if keyed else set())
    assert len(ended) == len(scenario.sessions) * keyed


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


def test_a_policy_that_names_no_replica_is_refused():
    class Confused(RoundRobin):
        def choose(self, request, now):
            return 7

    prepared = Prepared(make_trace("agents", 0, smoke=True), SMALL)
    with pytest.raises(ValueError, match=r"Confused chose replica 7, there are \[0, 1, 2\]"):
        simulate(prepared, Confused)


def test_late_reports_are_late_and_lost_ones_missing():
    def heard(delay_s, loss):
        scenario = replace(
            make_trace("agents-unkeyed", 0, smoke=True),
            num_routers=2,
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sessions": ()}, "no sessions"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"updates": Updates(0.5, 0.5)}, "every_s must be greater"),
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
from benchmarks.routing_sim.costs import COSTS
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import make_trace

digest = hashlib.sha256()
for trace in ("agents-updates", "routers-lost", "grpo"):
    prepared = Prepared(make_trace(trace, 1, smoke=True), COSTS)
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

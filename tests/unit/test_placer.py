"""Where requests with keys go, and what is learned of lengths and caches as they come and go."""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

SERVING = ReplicaState.SERVING
STRATEGIES = ["prefix-aware", "requests", "kv-cache", "round-robin"]
PROMPT = list(range(300))


class Rig:
    """A balancer over replicas ``"0"``, ``"1"``, ..., with KV caches of 10,000 tokens each."""

    def __init__(self, num=3, strategy="requests", num_kv_blocks=625, **options):
        self.now = 1000.0
        self.load = LoadTracker(map(str, range(num)), state=SERVING, clock=lambda: self.now)
        for replica_id in self.load.replica_ids:
            self.load.describe(replica_id, block_size=16, num_kv_blocks=num_kv_blocks)
        self.balancer = LoadBalancer([object()] * num, strategy, tracker=self.load, **options)
        self.placer = self.balancer
        self.index = self.placer._index

    def send(self, prompt=(1, 2, 3), n=1, max_tokens=None, exclude=(), **keys):
        """Reserves for one request and leaves it in flight."""
        (place,) = self.balancer.reserve_batch(
            [prompt],
            exclude=exclude,
            sampling_params=[SimpleNamespace(n=n, max_tokens=max_tokens)],
            **keys,
        )
        return place

    def talk(self, prompt=(1, 2, 3), answers=(), **keys):
        """Has one request served; returns where."""
        place = self.send(prompt, **keys)
        place.release(answers)
        return place.replica_id

    def occupy(self, replica_id, num=1, tokens=0):
        self.load.reserve(replica_id, num, tokens)

    def report(self, replica_id, version=None, **figures):
        self.load.observe(
            EngineReport(
                replica_id=replica_id, state=SERVING, weight_version=version, **figures
            )
        )  # fmt: skip

    def held(self):
        return [one.held_tokens for one in self.load.snapshots()]

    def in_flight(self):
        return [one.in_flight for one in self.load.snapshots()]


def others(replica_id, num=3):
    return [str(at) for at in range(num) if str(at) != replica_id]


# Sessions


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_session_stays_however_many_requests_its_replica_has(strategy):
    rig = Rig(strategy=strategy)
    home = rig.talk(session_id="chat")
    rig.occupy(home, 500)
    assert {rig.talk(session_id="chat") for _ in range(5)} == {home}
    assert home not in {rig.talk([at] * 9) for at in range(5)} or strategy == "round-robin"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keys_come_before_every_strategy(strategy):
    rig = Rig(strategy=strategy)
    homes = {chat: rig.talk(session_id=chat) for chat in range(9)}
    for _ in range(3):
        rig.send()  # so that the loads differ
        assert {chat: rig.talk(session_id=chat) for chat in range(9)} == homes
    group = rig.send(group_id="prompt").replica_id
    for other in others(group):
        rig.occupy(other)
    assert {rig.send(group_id="prompt").replica_id for _ in range(3)} == {group}


@pytest.mark.parametrize("state", [one for one in ReplicaState if not one.admits_requests])
def test_a_session_moves_when_its_replica_is_gone_and_stays_where_it_moved(state):
    rig = Rig()
    home = rig.talk(session_id="chat")
    rig.load.mark(home, state)
    moved = rig.talk(session_id="chat")
    assert moved != home
    rig.load.mark(home, SERVING)
    rig.occupy(moved, 10)
    assert rig.talk(session_id="chat") == moved
    rig.load.remove(moved)
    assert rig.talk(session_id="chat") != moved


def test_a_session_excluded_from_its_replica_goes_elsewhere():
    rig = Rig()
    home = rig.talk(session_id="chat")
    moved = rig.talk(session_id="chat", exclude=[home])
    assert moved != home
    rig.occupy(moved)
    assert rig.talk(session_id="chat") == moved


def test_a_session_is_placed_anew_when_its_replica_has_other_weights():
    rig = Rig()
    for replica_id in "012":
        rig.report(replica_id, version=1)
    home = rig.talk(session_id="chat")
    rig.occupy(home, 3)
    assert rig.talk(session_id="chat") == home
    rig.report(home, version=2)
    moved = rig.talk(session_id="chat")
    assert moved != home  # by load: its cache is worth nothing anywhere
    rig.occupy(moved, 5)
    assert rig.talk(session_id="chat") == moved


@pytest.mark.parametrize(("begun", "stays"), [(2, True), (1, False), (None, False)])
def test_a_session_answered_under_weights_not_heard_of_yet_stays_when_they_are(begun, stays):
    rig = Rig()
    for replica_id in "012":
        rig.report(replica_id, version=1)
    place = rig.balancer.reserve(PROMPT, session_id="chat")
    place.release([[1, 2, 3]], begun)
    rig.occupy(place.replica_id, 3)
    rig.report(place.replica_id, version=2)
    assert (rig.talk(session_id="chat") == place.replica_id) is stays


def test_a_session_stays_when_only_other_replicas_have_other_weights():
    rig = Rig()
    for replica_id in "012":
        rig.report(replica_id, version=1)
    home = rig.talk(session_id="chat")
    rig.occupy(home, 3)
    for replica_id in others(home):
        rig.report(replica_id, version=2)
    assert rig.talk(session_id="chat") == home


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("here", "there", "moves"),
    [
        (8_900, 0, False),  # there is room
        (9_500, 0, True),
        (9_500, 9_300, False),  # 300 more would fill it too
        (9_500, 8_700, True),
        (9_500, 8_701, False),
        (30_000, 9_100, False),
        (30_000, 8_000, True),
    ],
)
def test_a_session_leaves_a_full_cache_if_a_move_costs_less(strategy, here, there, moves):
    rig = Rig(strategy=strategy)
    home = rig.talk(PROMPT, session_id="chat")
    rig.occupy(home, 1, here)
    for other in others(home):
        rig.occupy(other, 2, there)
    again = rig.send(PROMPT, session_id="chat")
    assert (again.replica_id != home) is moves
    if moves:
        assert rig.send(PROMPT, session_id="chat").replica_id == again.replica_id


def test_the_longer_a_session_is_the_more_must_be_gained_by_a_move():
    def moves(length):
        rig = Rig()
        prompt = list(range(length))
        home = rig.talk(prompt, session_id="chat")
        rig.occupy(home, 1, 9_500)
        for other in others(home):
            rig.occupy(other, 1, 8_000)
        return rig.talk(prompt, session_id="chat") != home

    assert moves(1_000)
    assert not moves(1_001)


def test_a_session_leaves_a_cache_that_other_processes_filled():
    rig = Rig()
    home = rig.talk(PROMPT, session_id="chat")
    for other in others(home):
        rig.occupy(other, 1, 3_000)  # more than this process has at home
    rig.report(home, kv_cache_usage=0.95)
    assert rig.talk(PROMPT, session_id="chat") != home


def test_a_session_stays_where_the_size_of_caches_is_unknown():
    load = LoadTracker("01", state=SERVING)
    balancer = LoadBalancer([object()] * 2, "requests", tracker=load)
    home = balancer.reserve(PROMPT, session_id="chat").replica_id
    load.observe(EngineReport(replica_id=home, state=SERVING, kv_cache_usage=0.99))
    assert {balancer.reserve(PROMPT, session_id="chat").replica_id for _ in range(9)} == {home}


def test_a_reported_full_cache_moves_a_session_while_the_report_is_fresh():
    for age_s, moves in ((0, True), (60, False)):
        rig = Rig()
        home = rig.talk(session_id="chat")
        rig.occupy(home, 1, 500)
        rig.report(home, kv_cache_usage=0.99)
        rig.now += age_s
        assert (rig.talk(session_id="chat") != home) is moves


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    st.lists(st.integers(0, 12) | st.integers(0, 12_000), min_size=2, max_size=5),
    st.sampled_from([9_100, 9_500, 12_000, 40_000]),
    st.integers(1, 4_000),
    st.integers(1, 4_000),
)
def test_a_session_moves_exactly_when_and_where_it_costs_less(strategy, loads, full, first, second):
    rig = Rig(len(loads), strategy=strategy)
    before = rig.talk([1] * first, session_id="chat")
    loads[int(before)] = full
    for replica_id, tokens in enumerate(loads):
        rig.occupy(str(replica_id), 1, tokens)
    after = rig.talk([1] * second, session_id="chat")
    better = {str(at) for at, held in enumerate(loads) if held + second <= 9_000}
    assert after in better if better else after == before
    assert all(full - loads[int(at)] > second for at in better)  # less to wait for than to compute


def test_released_sessions_are_forgotten():
    rig = Rig()
    home = rig.talk(session_id="chat")
    rig.occupy(home)
    assert rig.balancer.release_sessions(["chat", "other"]) == 1
    assert rig.talk(session_id="chat") != home
    assert rig.balancer.release_sessions("chat") == 1
    assert rig.balancer.release_sessions("chat") == 0


def test_the_least_recently_used_sessions_and_groups_are_forgotten():
    rig = Rig(2, max_sessions=100)
    old = rig.talk(session_id="old")
    old_group = rig.talk(group_id="old")
    for at in range(99):
        rig.talk(session_id=at)
        rig.talk(group_id=at)
    assert rig.talk(session_id="old") == old  # used, so the youngest now
    assert rig.talk(group_id="old") == old_group
    for at in range(100, 199):
        rig.talk(session_id=at)
        rig.talk(group_id=at)
    assert len(rig.placer.sessions) == len(rig.placer.groups) == 100
    rig.occupy(old, 5)
    assert rig.talk(session_id="old") == old
    homes = {at: rig.talk(session_id=at) for at in (0, 1, 2)}
    assert old not in homes.values()  # forgotten: placed by load


# Groups


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("with_sessions", [False, True])
def test_eight_siblings_are_together_on_an_idle_service(strategy, with_sessions):
    rig = Rig(8, strategy=strategy)
    homes = [
        rig.send(PROMPT, group_id="prompt", session_id=at if with_sessions else None).replica_id
        for at in range(8)
    ]
    assert len(set(homes)) == 1


def test_a_group_spreads_when_its_replica_is_overloaded_and_comes_back():
    rig = Rig(2)
    first = [rig.send(group_id="prompt") for _ in range(8)]
    (home,) = {place.replica_id for place in first}
    assert rig.send(group_id="prompt").replica_id != home
    for place in first:
        place.release()
    assert rig.send(group_id="prompt").replica_id == home  # the group has not moved


def test_groups_stay_together_on_a_busy_service_as_far_as_the_bound_lets_them():
    rig = Rig(4)
    for replica_id in "0123":
        rig.occupy(replica_id, 100)
    homes = [rig.send(group_id="prompt").replica_id for _ in range(250)]
    assert len(set(homes[:40])) == 1
    assert len(set(homes)) > 1
    assert max(rig.in_flight()) <= 1.5 * sum(rig.in_flight()) / 4 + 1


def test_a_group_that_is_too_large_for_its_replica_spreads():
    rig = Rig(4)
    for _ in range(200):
        rig.send(group_id="prompt")
    assert max(rig.in_flight()) <= 1.5 * 200 / 4 + 1


def test_groups_spread_evenly():
    rig = Rig(4)
    homes = [rig.send(group_id=at // 8).replica_id for at in range(256)]
    assert all(len(set(homes[at : at + 8])) == 1 for at in range(0, 256, 8))
    assert collections.Counter(homes) == dict.fromkeys("0123", 64)


def test_a_group_moves_when_its_replica_is_gone_or_has_other_weights():
    rig = Rig()
    home = rig.send(group_id="prompt").replica_id
    rig.load.mark(home, ReplicaState.FAILED)
    moved = rig.send(group_id="prompt").replica_id
    assert moved != home
    assert rig.send(group_id="prompt").replica_id == moved
    rig.load.mark(home, SERVING)
    rig.occupy(moved, 3)
    assert rig.send(group_id="prompt").replica_id == moved
    rig.report(moved, version=1)
    assert rig.send(group_id="prompt").replica_id != moved


def test_siblings_with_sessions_follow_their_sessions_afterwards():
    rig = Rig(2)
    places = [rig.send(session_id=at, group_id="prompt") for at in range(12)]
    homes = [place.replica_id for place in places]
    assert len(set(homes)) == 2
    for place in places:
        place.release()
    assert [rig.talk(session_id=at, group_id="prompt") for at in range(12)] == homes


def test_what_lost_its_cache_does_not_follow_its_group():
    rig = Rig()
    for replica_id in "012":
        rig.report(replica_id, version=1)
    group = rig.talk(group_id="prompt")
    (home, _) = others(group)
    chat = rig.talk(session_id="chat", exclude=[one for one in "012" if one != home])
    assert chat == home
    rig.report(home, version=2)
    rig.occupy(group, 3)
    assert rig.talk(session_id="chat", group_id="prompt") != group  # by load
    assert rig.talk(session_id="new", group_id="prompt") == group


def test_a_request_for_many_samples_counts_as_many():
    rig = Rig(2)
    rig.send(n=20, group_id="prompt")
    assert sorted(rig.in_flight()) == [0, 20]
    rig.send(n=3)
    assert sorted(rig.in_flight()) == [3, 20]
    rig.send(n=1, group_id="prompt")  # 20 are more than 1.5 times the mean of 24
    assert sorted(rig.in_flight()) == [4, 20]


# Lengths


def test_expected_answers_are_those_that_came_and_no_longer_than_allowed():
    rig = Rig(1)
    assert rig.placer.mean_output is None
    place = rig.send([1] * 50, n=4)
    assert rig.held() == [50]
    place.release([[1] * 100])
    assert rig.placer.mean_output == 100
    place = rig.send([1] * 50)
    assert rig.held() == [150]
    rig.send([1] * 50, max_tokens=10)
    assert rig.held() == [150 + 60]
    rig.send([1] * 50, n=3, max_tokens=1000)
    assert rig.held() == [150 + 60 + 350]
    place.release([np.ones(200, np.int32)])
    assert rig.held() == [60 + 350]
    assert 100 < rig.placer.mean_output < 110
    for _ in range(500):
        rig.talk(answers=[[1] * 40])
    assert 40 <= rig.placer.mean_output < 41


def test_a_request_that_was_not_answered_teaches_nothing():
    rig = Rig(1)
    rig.talk(PROMPT, session_id="chat", answers=[])
    assert rig.placer.mean_output is None
    rig.talk(PROMPT, answers=[[]])
    assert rig.placer.mean_output == 0


# The index


@pytest.mark.parametrize("strategy", ["requests", "round-robin", "kv-cache"])
def test_the_index_costs_nothing_where_no_strategy_asks_for_it(strategy):
    rig = Rig(strategy=strategy)
    rig.talk(PROMPT, answers=[[7] * 300])
    assert len(rig.index) == 0


def test_keyed_requests_are_not_digested():
    rig = Rig(strategy="prefix-aware")
    rig.talk(PROMPT, session_id="chat", answers=[[7] * 300])
    known = len(rig.index)
    assert known > 0  # where it begins is the strategy's choice
    rig.talk(PROMPT * 4, session_id="chat", answers=[[7] * 300])
    assert len(rig.index) == known


def test_prompts_are_known_when_they_are_sent_and_answers_when_they_come():
    rig = Rig(1, strategy="prefix-aware")
    place = rig.send(PROMPT)

    def cached(prompt):
        return rig.index.cached_tokens(rig.index.chain(prompt), "0", 0)

    assert cached([*PROMPT, *[7] * 212]) == 256
    place.release([[7] * 212, [8] * 10])
    assert cached([*PROMPT, *[7] * 212, 9]) == 512
    assert cached([*PROMPT, *[8] * 10]) == 310


def test_the_cache_of_a_replica_that_left_is_forgotten():
    rig = Rig(2, strategy="prefix-aware")
    place = rig.send(PROMPT)
    assert len(rig.index) == 3
    rig.load.mark(place.replica_id, ReplicaState.FAILED)
    rig.send(PROMPT)
    assert rig.index.cached_tokens(rig.index.chain(PROMPT), place.replica_id, 0) == 0
    place.release([[7] * 300])  # answered all the same: nobody will be sent there
    assert rig.index.cached_tokens(rig.index.chain(PROMPT), place.replica_id, 0) == 0
    rig.load.mark(place.replica_id, SERVING)
    rig.send(PROMPT)
    rig.load.remove(place.replica_id)
    rig.send(PROMPT)
    assert set(rig.index._blocks) == set(rig.load.replica_ids)


def test_the_index_holds_as_much_as_the_caches_do():
    rig = Rig(2, strategy="prefix-aware", num_kv_blocks=160)  # 20 blocks of the index
    for at in range(100):
        rig.talk([at] * 500)
    assert len(rig.index) == 40
    smaller = Rig(2, strategy="prefix-aware", num_kv_blocks=16)
    for at in range(100):
        smaller.talk([at] * 500)
    assert len(smaller.index) == 4


def test_blocks_of_the_index_follow_the_engines():
    rig = Rig(1, strategy="prefix-aware", prefix_length=1000)
    rig.send(PROMPT)
    assert rig.index.block_tokens == 128
    load = LoadTracker(["0"], state=SERVING)
    load.describe("0", block_size=400, num_kv_blocks=10)
    balancer = LoadBalancer([object()], tracker=load)
    place = balancer.reserve(PROMPT)
    assert balancer._index.block_tokens == 400
    load.describe("0", block_size=16, num_kv_blocks=10)
    balancer.reserve(PROMPT)
    place.release([[7] * 300])  # of the time before, in other blocks: passed over
    assert balancer._index.block_tokens == 128
    assert len(balancer._index) == 1  # the cache has room for 160 tokens


# Batches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
def test_a_batch_is_placed_knowing_all_of_it(num_replicas, num_groups, size):
    rig = Rig(num_replicas, strategy="prefix-aware")
    prompts = [[group] * 600 for group in range(num_groups) for _ in range(size)]
    places = rig.balancer.reserve_batch(prompts)
    num = num_groups * size
    assert sum(rig.in_flight()) == num
    assert max(rig.in_flight()) <= 1.5 * num / num_replicas + 1
    for place in places:
        place.release()
    assert rig.in_flight() == rig.held() == [0] * num_replicas


def test_siblings_in_one_batch_are_together_though_the_service_is_idle():
    rig = Rig(4, strategy="prefix-aware")
    places = rig.balancer.reserve_batch([[at // 4] * 1000 for at in range(32)])
    homes = [place.replica_id for place in places]
    assert all(len(set(homes[at : at + 4])) == 1 for at in range(0, 32, 4))
    alone = Rig(4, strategy="prefix-aware")
    assert len({alone.send([1] * 1000).replica_id for _ in range(4)}) > 1  # the bound, one by one

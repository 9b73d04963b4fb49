"""Strategies one by one."""

import collections
import random  # noqa: TID251 - seeded below
import time

import pytest

from tests.fakes.routing import snapshot
from torchrl_vllm_sync import (
    ReplicaState,
    RoutingRequest,
    StrategySettings,
    known_strategies,
    register_strategy,
)
from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.routing.strategies import PrefixIndex, not_overloaded, strategy_factory

SYSTEM = list(range(1000, 1512))


def idle(num=4, **figures):
    return [snapshot(str(i), state=ReplicaState.SERVING, **figures) for i in range(num)]


def loaded(*counts):
    return [
        snapshot(str(i), state=ReplicaState.SERVING, in_flight=count)
        for i, count in enumerate(counts)
    ]


def strategy(name, **settings):
    return strategy_factory(name)(StrategySettings(**settings))


def prompts(num, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(100_000) for _ in range(length)] for _ in range(num)]


def choose(router, prompt, snapshots):
    return router.choose(RoutingRequest(prompt), snapshots)


class Caches:
    """The strategy ``prefix-aware``, and an index that learns where prompts went."""

    def __init__(self, **settings):
        self.index = PrefixIndex(block_tokens=128)
        self.router = strategy("prefix-aware", index=self.index, **settings)

    def send(self, prompt, snapshots):
        """Chooses a replica for a prompt, whose cache has it from then on."""
        request = RoutingRequest(prompt)
        position = self.router.choose(request, snapshots)
        chosen = snapshots[position]
        self.index.insert(request.known_chain, chosen.replica_id, chosen.cache_version)
        return position

    def hold(self, prompt, *replica_ids, version=0):
        for replica_id in replica_ids:
            self.index.insert(self.index.chain(prompt), replica_id, version)


# Registry


def test_unknown_strategy_lists_the_known_ones():
    with pytest.raises(UnknownStrategyError, match=r"prefix-aware, .*round-robin.*, got 'fastest'"):
        strategy_factory("fastest")


def test_registered_strategy_is_known_and_its_name_taken(monkeypatch):
    monkeypatch.setattr("torchrl_vllm_sync.routing.strategies._FACTORIES", {})

    class Last:
        def __init__(self, settings): ...
        def choose(self, request, snapshots):
            return len(snapshots) - 1

    register_strategy("last", Last)
    assert known_strategies() == ["last"]
    assert choose(strategy("last"), None, idle()) == 3
    with pytest.raises(UnsupportedArgumentError, match="name must be new, got 'last'"):
        register_strategy("last", Last)


# requests, kv-cache, round-robin


def test_requests_takes_the_least_loaded_and_spreads_ties():
    router = strategy("requests")
    assert choose(router, None, loaded(3, 0, 2)) == 1
    counts = collections.Counter(choose(router, None, loaded(5, 0, 0, 0)) for _ in range(300))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 60


def test_requests_sees_load_of_other_processes_while_the_report_is_fresh():
    now = time.monotonic()
    serving = ReplicaState.SERVING
    busy = snapshot("0", state=serving, num_elsewhere=1000, measured_at=now)
    mine = snapshot("1", state=serving, in_flight=2)
    stale = snapshot("0", state=serving, num_elsewhere=1000, measured_at=now - 60)
    router = strategy("requests")
    assert choose(router, None, [busy, mine]) == 1
    assert choose(router, None, [stale, mine]) == 0


def test_kv_cache_takes_the_emptiest_and_cannot_tell_without_every_figure():
    now = time.monotonic()

    def replicas(*usages, age_s=0.0):
        return [
            snapshot(
                str(i),
                state=ReplicaState.SERVING,
                kv_cache_usage=usage,
                measured_at=now - age_s,
            )
            for i, usage in enumerate(usages)
        ]

    router = strategy("kv-cache")
    assert choose(router, None, replicas(0.5, 0.1, 0.9)) == 1
    assert choose(router, None, replicas(0.5, None, 0.9)) is None
    assert choose(router, None, replicas(0.5, 0.1, 0.9, age_s=60)) is None
    assert choose(router, None, idle(2)) is None
    assert {choose(router, None, replicas(0.5, 0.5)) for _ in range(50)} == {0, 1}


def test_kv_cache_does_not_send_everything_to_one_replica_between_reports():
    now = time.monotonic()
    router, counts = strategy("kv-cache"), [0, 0, 0, 0]
    for _ in range(100):
        snapshots = [
            snapshot(
                str(i),
                state=ReplicaState.SERVING,
                in_flight=count,
                kv_cache_usage=i / 10,
                measured_at=now,
            )
            for i, count in enumerate(counts)
        ]
        counts[choose(router, None, snapshots)] += 1
    assert max(counts) <= 38  # ceil(1.5 * 100 / 4)


def test_round_robin_takes_turns_and_copies_may_begin_elsewhere():
    assert [choose(router, None, idle(3)) for router in [strategy("round-robin")] * 7] == [
        0, 1, 2, 0, 1, 2, 0,
    ]  # fmt: skip
    later = strategy("round-robin", first_turn=2)
    assert [choose(later, None, idle(3)) for _ in range(4)] == [2, 0, 1, 2]


def test_round_robin_skips_nobody_when_membership_changes():
    router, replicas = strategy("round-robin"), idle(4)

    def turn(*ids):
        candidates = [r for r in replicas if r.replica_id in ids]
        return candidates[choose(router, None, candidates)].replica_id

    assert [turn("0", "1", "2") for _ in range(2)] == ["0", "1"]
    assert [turn("1", "2") for _ in range(3)] == ["2", "1", "2"]  # 0 is out
    assert turn("1", "2", "3") == "3"  # 3 is new
    assert [turn("1", "2", "3") for _ in range(3)] == ["1", "2", "3"]


# prefix-aware


def test_prefix_aware_cannot_tell_without_a_prompt():
    assert choose(strategy("prefix-aware"), None, idle()) is None


def test_prefix_aware_takes_the_replica_that_has_the_prompt():
    caches = Caches()
    caches.hold(SYSTEM, "2")
    assert caches.send(SYSTEM, idle()) == 2
    assert caches.send(SYSTEM + [1] * 100, idle()) == 2
    assert caches.send(SYSTEM[:300], idle()) == 2


def test_prefix_aware_takes_the_replica_that_has_most_of_the_prompt():
    caches = Caches()
    caches.hold(SYSTEM[:128], "0")
    caches.hold(SYSTEM[:384], "3")
    caches.hold(SYSTEM[:256], "1")
    assert caches.send(SYSTEM, idle()) == 3


def test_what_is_cached_under_other_weights_draws_nothing():
    def choices(version):
        caches = Caches()
        caches.hold(SYSTEM, "2", version=1)
        snapshots = idle(weight_version=version)
        for at in (0, 1, 3):
            snapshots[at].in_flight = at  # replica 0 is the only idle one but replica 2
        snapshots[2].in_flight = 1
        return caches.send(SYSTEM, snapshots)

    assert choices(version=1) == 2
    assert choices(version=2) == 0


def test_a_new_prompt_goes_to_the_least_loaded_replica():
    for prompt in prompts(20, 300):
        assert Caches().send(prompt, loaded(4, 3, 5, 4)) == 1


def test_a_prompt_that_all_have_goes_to_the_least_loaded_replica():
    caches = Caches()
    caches.hold(SYSTEM, "0", "1", "2", "3")
    assert caches.send(SYSTEM, loaded(4, 3, 5, 4)) == 1


def test_little_cached_does_not_draw_to_a_busy_replica_and_much_does():
    caches = Caches(overload_threshold=4)
    little, much = prompts(2, 4096)
    caches.hold(little[:128], "0")
    caches.hold(much, "0")
    assert caches.send(little, loaded(12, 1)) == 1
    assert caches.send(much, loaded(12, 1)) == 0


@pytest.mark.parametrize("prompt", [SYSTEM, SYSTEM * 8])
def test_siblings_on_a_busy_service_share_a_replica_until_waiting_there_costs_more(prompt):
    caches, counts, homes = Caches(), [20, 20, 20, 20], []
    for _ in range(64):
        homes.append(caches.send(prompt, loaded(*counts)))
        counts[homes[-1]] += 1
    assert set(homes[:8]) == {homes[0]}
    assert len(set(homes)) > 1
    assert max(counts) <= 1.5 * sum(counts) / 4 + 1


@pytest.mark.parametrize("length", [2, 40, 300])
def test_prompts_with_one_beginning_spread_over_all_replicas(length):
    caches, counts = Caches(), [0, 0, 0, 0]
    for question in prompts(300, length):
        counts[caches.send(SYSTEM + question, loaded(*counts))] += 1
    assert min(counts) >= 60
    assert max(counts) <= 90  # a mean of 75


def test_texts_with_one_beginning_spread_over_all_replicas():
    caches, counts = Caches(), [0, 0, 0, 0]
    for i in range(300):
        text = f"You are a careful assistant. {'Think twice. ' * 90} Solve: {i}"
        counts[caches.send(text, loaded(*counts))] += 1
    assert min(counts) >= 60


def test_different_prompts_spread_on_an_idle_service():
    counts = collections.Counter(Caches().send(prompt, idle(4)) for prompt in prompts(400, 12))
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) <= 140  # a mean of 100, and 4 standard deviations


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_stay_where_they_began(as_text):
    caches = Caches()
    for at, opening in enumerate(prompts(30, 200)):
        turn = f"user: What is {at}? {'Say. ' * 200}" if as_text else SYSTEM + opening
        home = caches.send(turn, idle(4))
        for answer in prompts(5, 150, seed=at):
            turn = turn + (f"{answer}user: Sure?" if as_text else answer)
            assert caches.send(turn, idle(4)) == home


def test_conversation_moves_when_its_replica_is_gone_and_then_stays():
    caches, replicas = Caches(), idle(4)
    home = replicas[caches.send(SYSTEM, replicas)]
    left = [one for one in replicas if one is not home]
    new_home = left[caches.send(SYSTEM, left)]
    caches.index.remove(home.replica_id)
    assert replicas[caches.send(SYSTEM, replicas)] is new_home
    assert replicas[caches.send(SYSTEM + [1] * 200, replicas)] is new_home


def test_overloaded_replica_gets_nothing_even_if_it_alone_has_the_prompt():
    caches = Caches()
    caches.hold(SYSTEM * 100, "0")
    assert caches.send(SYSTEM * 100, loaded(30, 0, 1, 1)) == 1


def test_a_replica_without_room_gets_nothing_while_others_have_room():
    caches = Caches()
    caches.hold(SYSTEM[:256], "0")
    replicas = idle(3, kv_cache_tokens=10_000)
    replicas[0].held_tokens = 8_800  # 9,056 with what is not cached, and 90 % are 9,000
    assert caches.send(SYSTEM, replicas) != 0
    for one in replicas:
        one.held_tokens = 8_800
    caches.index.remove("1")
    caches.index.remove("2")
    assert caches.send(SYSTEM, replicas) == 0  # no worse than elsewhere
    replicas[0].held_tokens = 8_600
    caches.index.remove("0")
    caches.hold(SYSTEM[:256], "0")
    assert caches.send(SYSTEM, replicas) == 0  # what is cached takes no more room


def test_a_report_of_a_full_cache_counts_while_it_is_fresh():
    now = time.monotonic()
    for age_s, chosen in ((0, 1), (60, 0)):
        caches = Caches()
        caches.hold(SYSTEM, "0")
        full = {"kv_cache_usage": 0.95, "measured_at": now - age_s}
        replicas = [snapshot("0", kv_cache_tokens=10_000, **full), *idle(2)[1:]]
        replicas[1].kv_cache_tokens = 10_000
        assert caches.send(SYSTEM, replicas) == chosen


def test_hot_prompt_is_bounded_by_the_documented_share():
    caches, counts = Caches(overload_threshold=1.25), [0, 0, 0, 0]
    for placed in range(1, 201):
        counts[caches.send(SYSTEM * 20, loaded(*counts))] += 1
        assert max(counts) <= 1.25 * placed / 4 + 1
    assert sum(counts) == 200


def test_threshold_of_one_still_leaves_an_open_replica():
    caches, counts = Caches(overload_threshold=1), [0, 0, 0]
    for prompt in prompts(99, 10):
        counts[caches.send(prompt, loaded(*counts))] += 1
    assert max(counts) <= 34


def test_removing_a_replica_moves_only_its_share():
    replicas = idle(8)
    left = replicas[:3] + replicas[4:]
    moved = stayed = 0
    for prompt in prompts(400, 12):
        before = replicas[choose(strategy("prefix-aware"), prompt, replicas)]
        after = left[choose(strategy("prefix-aware"), prompt, left)]
        if before is replicas[3]:
            moved += 1
        else:
            stayed += after is before
    assert moved + stayed == 400
    assert 20 <= moved <= 85  # a mean of 50


@pytest.mark.parametrize("prompt", [[1, "two"], [1, 2**31], [1, 2.5]])
def test_ids_that_are_none_are_refused(prompt):
    with pytest.raises(InvalidPromptError, match="integers of 32 bits"):
        choose(strategy("prefix-aware"), prompt, idle())


# The bound


@pytest.mark.parametrize(
    ("loads", "num_samples", "num_coming", "threshold", "open_positions"),
    [
        ([0, 0], 1, 1, 1.0, [0, 1]),
        ([1, 0], 1, 1, 1.0, [0, 1]),  # 1 is at most 2 / 2
        ([2, 0], 1, 1, 1.0, [1]),
        ([2, 0], 1, 3, 1.0, [0, 1]),  # 5 / 2 with what comes along
        ([3, 0, 0], 1, 1, 1.5, [1, 2]),
        ([3, 0, 0], 4, 4, 1.5, [0, 1, 2]),
        ([3, 0, 0], 4, 1, 1.5, [0, 1, 2]),  # its own samples count in any case
        ([7, 7, 7], 1, 1, 1.0, [0, 1, 2]),
        ([1000, 0], 1, 1, 100.0, [0, 1]),
        ([5], 1, 1, 1.0, [0]),
    ],
)
def test_who_may_take_a_request(loads, num_samples, num_coming, threshold, open_positions):
    request = RoutingRequest(num_samples=num_samples, num_coming=num_coming)
    found = not_overloaded(loads, request, StrategySettings(overload_threshold=threshold))
    assert found == open_positions

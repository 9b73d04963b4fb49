"""Strategies one by one, and the memory of prompts."""

import collections
import os
import random  # noqa: TID251 - seeded below
import subprocess
import sys
import time

import numpy as np
import pytest

from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.load import LoadSnapshot
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing import (
    RoutingRequest,
    StrategySettings,
    known_strategies,
    register_strategy,
    strategy_factory,
)
from torchrl_vllm_sync.routing.prefix import PrefixMemory, digest_prompt

SYSTEM = list(range(1000, 1100))


def idle(num=4, **figures):
    return [
        LoadSnapshot(replica_id=str(i), state=ReplicaState.SERVING, **figures) for i in range(num)
    ]


def loaded(*counts):
    return [
        LoadSnapshot(replica_id=str(i), state=ReplicaState.SERVING, in_flight=count)
        for i, count in enumerate(counts)
    ]


def strategy(name, **settings):
    return strategy_factory(name)(StrategySettings(**settings))


def prompts(num, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(100_000) for _ in range(length)] for _ in range(num)]


def choose(router, prompt, snapshots):
    return router.choose(RoutingRequest(prompt), snapshots)


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
    busy = LoadSnapshot(replica_id="0", state=serving, num_unfinished=1000, measured_at=now)
    mine = LoadSnapshot(replica_id="1", state=serving, in_flight=2)
    stale = LoadSnapshot(replica_id="0", state=serving, num_unfinished=1000, measured_at=now - 60)
    router = strategy("requests")
    assert choose(router, None, [busy, mine]) == 1
    assert choose(router, None, [stale, mine]) == 0


def test_kv_cache_takes_the_emptiest_and_cannot_tell_without_every_figure():
    now = time.monotonic()

    def replicas(*usages, age_s=0.0):
        return [
            LoadSnapshot(
                replica_id=str(i),
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
            LoadSnapshot(
                replica_id=str(i),
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


def test_group_siblings_share_a_replica_on_an_idle_service():
    router, counts = strategy("prefix-aware"), [0, 0, 0, 0]
    for _ in range(8):
        counts[choose(router, SYSTEM, loaded(*counts))] += 1
    assert sorted(counts) == [0, 0, 0, 8]


def test_list_tuple_and_array_are_one_prompt():
    digests = {
        digest_prompt(form, 8).whole for form in (SYSTEM, tuple(SYSTEM), np.array(SYSTEM, np.int64))
    }
    assert len(digests) == 1


@pytest.mark.parametrize("tail", [2, 40])
def test_shared_system_prompt_spreads_without_any_load(tail):
    router = strategy("prefix-aware")
    counts = collections.Counter(
        choose(router, SYSTEM + question, idle(4)) for question in prompts(300, tail)
    )
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) <= 105  # mean 75, and 4 standard deviations


def test_shared_system_text_spreads_without_any_load():
    router = strategy("prefix-aware")
    counts = collections.Counter(
        choose(router, f"You are a careful assistant. Solve: {i}", idle(4)) for i in range(300)
    )
    assert max(counts.values()) <= 105


@pytest.mark.parametrize("times", [1, 2])
def test_template_that_was_once_sent_alone_draws_only_as_many(times):
    router = strategy("prefix-aware")
    home = {choose(router, SYSTEM, idle(4)) for _ in range(times)}.pop()
    counts = collections.Counter(
        choose(router, SYSTEM + question, idle(4)) for question in prompts(300, 20)
    )
    assert counts[home] <= 105
    assert len(counts) == 4


def test_conversations_stay_where_they_began():
    router = strategy("prefix-aware")
    for opening in prompts(50, 30):
        turn = SYSTEM + opening
        home = choose(router, turn, idle(4))
        for answer in prompts(5, 21, seed=opening[0]):
            turn = turn + answer
            assert choose(router, turn, idle(4)) == home


def test_text_conversation_stays_where_it_began():
    router = strategy("prefix-aware")
    for i in range(20):
        turn = f"system: You are a careful assistant.\nuser: What is {i} plus {i}?\nassistant:"
        home = choose(router, turn, idle(4))
        for answer in (" It is even.\nuser: Sure?\nassistant:", " Sure.\nuser: Ok\nassistant:"):
            turn += answer
            assert choose(router, turn, idle(4)) == home


def test_second_turns_of_a_group_stay_with_its_prompt():
    router = strategy("prefix-aware")
    homes = {choose(router, SYSTEM, idle(4)) for _ in range(8)}
    for answer in prompts(8, 30):
        homes.add(choose(router, SYSTEM + answer, idle(4)))
    assert len(homes) == 1


def test_retried_turn_is_not_another_continuation():
    router = strategy("prefix-aware")
    home = choose(router, SYSTEM, idle(4))
    following = SYSTEM + [7] * 30
    assert [choose(router, following, idle(4)) for _ in range(5)] == [home] * 5


def test_conversation_moves_when_its_replica_is_gone_and_then_stays():
    router, turn = strategy("prefix-aware"), SYSTEM
    replicas = idle(4)
    home = replicas[choose(router, turn, replicas)]
    left = [r for r in replicas if r is not home]
    new_home = left[choose(router, turn, left)]
    assert replicas[choose(router, turn, replicas)] is new_home
    assert replicas[choose(router, turn + [1] * 20, replicas)] is new_home


def test_overloaded_replica_gets_nothing():
    router = strategy("prefix-aware")
    counts = collections.Counter(choose(router, p, loaded(1000, 1, 1, 1)) for p in prompts(50, 30))
    assert counts[0] == 0
    assert sum(counts.values()) == 50


def test_hot_prompt_is_bounded_by_the_documented_share():
    router, counts = strategy("prefix-aware", overload_threshold=1.25), [0, 0, 0, 0]
    for _ in range(200):
        counts[choose(router, SYSTEM, loaded(*counts))] += 1
    assert max(counts) <= 63  # ceil(1.25 * 200 / 4)
    assert sum(counts) == 200


def test_threshold_of_one_still_leaves_an_open_replica():
    router, counts = strategy("prefix-aware", overload_threshold=1), [0, 0, 0]
    for prompt in prompts(99, 10):
        counts[choose(router, prompt, loaded(*counts))] += 1
    assert max(counts) <= 33


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


_PREFERENCES = """
from torchrl_vllm_sync.load import LoadSnapshot
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing import RoutingRequest, StrategySettings, strategy_factory
router = strategy_factory("prefix-aware")(StrategySettings())
replicas = [LoadSnapshot(replica_id=str(i), state=ReplicaState.SERVING) for i in range(4)]
prompts = [f"question {i} of many" for i in range(40)] + [list(range(i, i + 30)) for i in range(40)]
print([router.choose(RoutingRequest(prompt), replicas) for prompt in prompts])
"""


def test_every_process_prefers_the_same_replica():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PREFERENCES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 4  # not one replica for all


@pytest.mark.parametrize("prompt", [[1, "two"], [1, 2**31], [1, 2.5]])
def test_ids_that_are_none_are_refused(prompt):
    with pytest.raises(InvalidPromptError, match="integers of 32 bits"):
        choose(strategy("prefix-aware"), prompt, idle())


# The memory itself


def test_memory_is_bounded_and_forgets_the_least_recent():
    memory = PrefixMemory(prefix_length=4, capacity=10)
    many = [memory.digest(prompt) for prompt in prompts(30, 12)]
    for prompt in many:
        memory.record(prompt, memory.recall(prompt), "0")
        assert memory.recall(many[0]).replica_id == "0"  # used, so kept
    assert len(memory) == 10
    assert memory.recall(many[5]).replica_id is None
    assert memory.recall(many[-1]).replica_id == "0"
    assert len(memory._tails) <= 10


@pytest.mark.parametrize("length", [8, 9, 100, 1500, 5000])
def test_continuation_is_found_at_any_length(length):
    memory = PrefixMemory(prefix_length=8)
    (earlier,) = prompts(1, length)
    digest = memory.digest(earlier)
    memory.record(digest, memory.recall(digest), "7")
    assert memory.recall(memory.digest([*earlier, 5])).replica_id == "7"
    assert memory.recall(memory.digest([*earlier[:-1], earlier[-1] + 1, 5])).replica_id is None


def test_the_longest_earlier_turn_decides():
    memory = PrefixMemory(prefix_length=8)
    for length, replica_id in ((40, "short"), (80, "long")):
        digest = memory.digest(list(range(length)))
        memory.record(digest, memory.recall(digest), replica_id)
    assert memory.recall(memory.digest(list(range(120)))).replica_id == "long"


def test_prompt_shorter_than_a_block_is_repeated_but_not_continued():
    memory = PrefixMemory(prefix_length=8)
    digest = memory.digest([1, 2, 3])
    memory.record(digest, memory.recall(digest), "7")
    assert memory.recall(memory.digest([1, 2, 3])).replica_id == "7"
    assert memory.recall(memory.digest(list(range(1, 30)))).replica_id is None


def test_long_prompts_cost_few_digests():
    assert len(digest_prompt(list(range(2048)), 8).anchors) < 80
    assert len(digest_prompt(list(range(32768)), 8).anchors) < 140

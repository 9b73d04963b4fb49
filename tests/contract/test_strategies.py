"""What every routing strategy owes, run on each registered one."""

import copy
import pickle
import time
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.balancer import LoadBalancer
from torchrl_vllm_sync.load import LoadSnapshot, LoadTracker
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.routing import (
    RoutingRequest,
    StrategySettings,
    known_strategies,
    strategy_factory,
)

PROMPTS = [None, "Hello", "a longer text " * 50, [1], list(range(500)), (5, 6, 7)] * 10
REQUESTS = [RoutingRequest(prompt, {"session_id": 1}) for prompt in PROMPTS]


@pytest.fixture(params=known_strategies())
def name(request):
    return request.param


@pytest.fixture(params=["reported", "unreported"])
def snapshots(request):
    figures = {}
    if request.param == "reported":
        figures = {"num_unfinished": 3, "kv_cache_usage": 0.5, "measured_at": time.monotonic()}
    return [
        LoadSnapshot(replica_id=f"r{i}", state=ReplicaState.SERVING, in_flight=i % 3, **figures)
        for i in range(5)
    ]


class Untouchable:
    """Stands where an actor would: using it at all is a call that a decision must not make."""

    def __getattribute__(self, name):
        raise AssertionError(f"a decision used {name}")


def service_of(num):
    return SimpleNamespace(
        load=LoadTracker([f"r{i}" for i in range(num)], state=ReplicaState.SERVING),
        actors=[Untouchable() for _ in range(num)],
    )


def decisions(name, snapshots, seed=0):
    strategy = strategy_factory(name)(StrategySettings(seed=seed))
    return [strategy.choose(request, snapshots) for request in REQUESTS]


def test_choice_is_a_position_or_none(name, snapshots):
    assert set(decisions(name, snapshots)) <= {None, 0, 1, 2, 3, 4}


def test_same_seed_decides_the_same(name, snapshots):
    assert decisions(name, snapshots, seed=4) == decisions(name, snapshots, seed=4)


def test_snapshots_are_not_changed(name, snapshots):
    before, order = copy.deepcopy(snapshots), list(map(id, snapshots))
    decisions(name, snapshots)
    decisions(name, tuple(snapshots))
    assert snapshots == before
    assert list(map(id, snapshots)) == order


def test_one_replica_is_enough(name, snapshots):
    assert set(decisions(name, snapshots[:1])) <= {None, 0}


def test_candidates_may_change_from_call_to_call(name, snapshots):
    strategy = strategy_factory(name)(StrategySettings())
    for i, request in enumerate(REQUESTS):
        candidates = snapshots[i % 5 :]
        assert strategy.choose(request, candidates) in (None, *range(len(candidates)))


@pytest.mark.parametrize("name", [name for name in known_strategies() if name != "round-robin"])
def test_all_but_round_robin_pass_over_an_overloaded_replica(name, snapshots):
    serving = ReplicaState.SERVING
    busy = LoadSnapshot(
        replica_id="busy", state=serving, in_flight=1000, kv_cache_usage=0.0,
        measured_at=time.monotonic(),
    )  # fmt: skip
    assert 5 not in decisions(name, [*snapshots, busy])


def test_balancer_never_touches_actors_and_counts_exactly(name):
    service = service_of(4)
    balancer = LoadBalancer(service, name)
    reservations = [balancer.reserve(prompt) for prompt in PROMPTS]
    reservations += balancer.reserve_batch(PROMPTS)
    assert all(0 <= balancer.select_actor(prompt) < 4 for prompt in PROMPTS)
    assert service.load.total_in_flight == 2 * len(PROMPTS)
    for reservation in reservations:
        reservation.release()
    assert service.load.total_in_flight == 0


def test_dead_and_excluded_replicas_are_never_chosen(name):
    service = service_of(4)
    service.load.mark("r1", ReplicaState.FAILED, "died")
    service.load.observe(EngineReport(replica_id="r1", state=ReplicaState.STALE, num_unfinished=0))
    balancer = LoadBalancer(service, name)
    chosen = {balancer.reserve(prompt, exclude=["r3"]).replica_id for prompt in PROMPTS}
    assert chosen == {"r0", "r2"}


def test_pickled_copy_decides_too(name):
    balancer = LoadBalancer(
        ["a", "b"], name, tracker=LoadTracker(["0", "1"], state=ReplicaState.SERVING)
    )
    copied = pickle.loads(pickle.dumps(balancer))
    assert {copied.reserve([i] * 9).index for i in range(40)} == {0, 1}

"""What every routing strategy owes, run on each registered one and on one of a user's own."""

import copy
import doctest
import inspect
import pickle
import random  # noqa: TID251 - seeded
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import cloudpickle

from tests.fakes.routing import snapshot
from torchrl_vllm_sync import (
    ReplicaState,
    RoutingRequest,
    StrategySettings,
    known_strategies,
    register_strategy,
)
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing import strategies
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.strategies import strategy_factory

PROMPTS = [None, "Hello", "a longer text " * 50, [1], list(range(500)), (5, 6, 7)] * 10
REQUESTS = [RoutingRequest(prompt, {"session_id": 1}) for prompt in PROMPTS]


class FewestTokens:
    """The example of ``register_strategy``, which a test below compares with this one."""

    def __init__(self, settings):
        self.threshold = settings.overload_threshold

    def choose(self, request, snapshots):
        held = [one.held_tokens for one in snapshots]
        if max(held) <= self.threshold * min(held):
            return None
        return held.index(min(held))


NAMES = [*known_strategies(), "fewest-tokens"]


@pytest.fixture(autouse=True)
def fewest_tokens(monkeypatch):
    monkeypatch.setattr(strategies, "_FACTORIES", dict(strategies._FACTORIES))
    register_strategy("fewest-tokens", FewestTokens)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(params=["reported", "unreported"])
def snapshots(request):
    figures = {}
    if request.param == "reported":
        figures = {"num_elsewhere": 3, "kv_cache_usage": 0.5, "measured_at": time.monotonic()}
    return [
        snapshot(f"r{i}", state=ReplicaState.SERVING, in_flight=i % 3, **figures) for i in range(5)
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
    busy = snapshot(
        "busy", state=serving, in_flight=1000, kv_cache_usage=0.0,
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


# A strategy of a user's own


def test_a_users_strategy_is_asked_like_any_other():
    service = service_of(3)
    balancer = LoadBalancer(service, ["fewest-tokens", "requests"])
    for prompt in ([1] * 100, [1] * 10, [1] * 50, [1] * 30, [1] * 5):
        balancer.reserve(prompt)
    assert sorted(one.held_tokens for one in service.load.snapshots()) == [45, 50, 100]
    even = LoadBalancer(service_of(3), ["fewest-tokens", "round-robin"])
    assert [even.select_actor([1]) for _ in range(4)] == [0, 1, 2, 0]  # it cannot tell


def test_the_example_of_the_docs_is_that_strategy():
    text = inspect.getdoc(register_strategy)
    service, names = service_of(3), {"register_strategy": lambda name, factory: None}
    names |= {"LoadBalancer": LoadBalancer, "service": service}
    for example in doctest.DocTestParser().get_examples(text):
        exec(example.source, names)
    theirs = names["FewestTokens"](StrategySettings())
    ours = FewestTokens(StrategySettings())
    chance = random.Random(0)
    for _ in range(100):
        snapshots = [
            snapshot(str(at), state=ReplicaState.SERVING, held_tokens=chance.randrange(20))
            for at in range(3)
        ]
        assert theirs.choose(REQUESTS[1], snapshots) == ours.choose(REQUESTS[1], snapshots)
    assert len(text[text.index(">>> class") : text.index(">>> register")].splitlines()) <= 15


_READER = """
import pickle, sys
balancer = pickle.load(sys.stdin.buffer)
print(balancer.strategies, [balancer.reserve([1] * 9).index for _ in range(3)])
"""


def test_a_pickled_balancer_takes_a_users_strategy_to_processes_that_never_registered_it():
    class Last:  # in here, so that the other process cannot import it
        def __init__(self, settings): ...
        def choose(self, request, snapshots):
            return len(snapshots) - 1

    register_strategy("last", Last)
    tracker = LoadTracker(["0", "1", "2"], state=ReplicaState.SERVING)
    balancer = LoadBalancer(["a", "b", "c"], "last", tracker=tracker)
    done = subprocess.run(
        [sys.executable, "-c", _READER],
        input=cloudpickle.dumps(balancer),  # as Ray does
        capture_output=True,
        check=True,
        timeout=50,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout.decode() == "['last'] [2, 2, 2]\n"

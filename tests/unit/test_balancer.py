"""The balancer: settings, prompts, reservations, statistics, copies."""

import asyncio
import collections
import pickle
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    NoReplicaAvailableError,
    SyncError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing import strategies
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker

SERVING = ReplicaState.SERVING


class Actor:
    """Refuses every use: a decision must not cost an actor call."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(f"a decision used actor.{name}")


class Service:
    def __init__(self, num=4):
        self.actors = [Actor() for _ in range(num)]
        self.load = LoadTracker([f"r{i}" for i in range(num)], state=SERVING)


@pytest.fixture
def service():
    return Service()


def in_flight(service):
    return [snapshot.in_flight for snapshot in service.load.snapshots()]


def held(service):
    return [snapshot.held_tokens for snapshot in service.load.snapshots()]


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_length": 0}, "prefix_length must be at least 1, got 0"),
        ({"overload_threshold": 0.9}, "overload_threshold must be at least 1, got 0.9"),
        ({"overload_threshold": float("nan")}, "overload_threshold must be at least 1, got nan"),
        ({"strategy": []}, r"strategy must name at least one, got \[\]"),
        ({"strategy": "fastest"}, "strategy must be one of prefix-aware, .* got 'fastest'"),
        ({"monitor_interval_s": 0}, "monitor_interval_s must be greater than 0, got 0"),
        ({"tracker": LoadTracker(["0"])}, r"one replica for each of the 2 actors, got \['0'\]"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        LoadBalancer([Actor(), Actor()], **settings)
    assert isinstance(caught.value, SyncError)


@pytest.mark.parametrize("actors", [[], Service(0), object()])
def test_no_actors_is_refused(actors):
    with pytest.raises(ValueError, match="actors_or_service must"):
        LoadBalancer(actors)


def test_defaults_and_attributes_are_those_of_torchrl(service):
    balancer = LoadBalancer(service)
    assert balancer.strategies == ["prefix-aware", "requests"]
    assert balancer.strategy == "prefix-aware"
    assert (balancer.prefix_length, balancer.overload_threshold) == (8, 1.5)
    assert balancer.actors is service.actors
    assert LoadBalancer(service, "requests").strategies == ["requests"]
    assert LoadBalancer(service, ("kv-cache", "requests"), 16, 2.0).prefix_length == 16


# Prompts


IDS = list(range(20))


@pytest.mark.parametrize(
    "form",
    [
        tuple(IDS),
        np.array(IDS),
        {"prompt_token_ids": IDS},
        {"prompt": "x", "prompt_token_ids": IDS},
    ],
)
def test_every_form_of_a_prompt_goes_to_the_same_replica(form):
    assert LoadBalancer(Service(16)).select_actor(form) == LoadBalancer(Service(16)).select_actor(
        IDS
    )


def test_text_prompt_dict_is_its_text():
    alone = LoadBalancer(Service(16)).select_actor("Hello world")
    assert LoadBalancer(Service(16)).select_actor({"prompt": "Hello world"}) == alone


@pytest.mark.parametrize(
    "prompt",
    ["", [], (), np.array([], int), {}, {"prompt": ""}, {"prompt_token_ids": []},
     np.zeros((2, 2), int), np.zeros(2), 7, b"x", ["two", "prompts"], [[1], [2]], [1.5], object()],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["prefix-aware", "requests"])
def test_empty_or_foreign_prompt_is_refused_and_reserves_nothing(service, prompt, strategy):
    balancer = LoadBalancer(service, strategy)
    for call in (balancer.select_actor, balancer.reserve):
        with pytest.raises(InvalidPromptError):
            call(prompt)
    with pytest.raises(InvalidPromptError):
        balancer.reserve_batch([IDS, prompt])
    assert in_flight(service) == [0, 0, 0, 0]


# Decisions


def test_select_actor_reserves_nothing(service):
    balancer = LoadBalancer(service)
    assert balancer.select_actor() in range(4)
    assert balancer.select_actor("Hello", {"session": 1}) in range(4)
    assert in_flight(service) == [0, 0, 0, 0]


def test_without_a_prompt_the_next_strategy_decides(service):
    balancer = LoadBalancer(service, ["prefix-aware", "round-robin"])
    assert [balancer.select_actor() for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_where_no_strategy_can_tell_the_least_loaded_is_taken(service):
    balancer = LoadBalancer(service, ["prefix-aware", "kv-cache"])
    for _ in range(20):
        balancer.reserve()
    assert in_flight(service) == [5, 5, 5, 5]


def test_overload_guard_sees_the_engines_own_queue(service):
    service.load.observe(EngineReport(replica_id="r2", state=SERVING, num_unfinished=1000))
    balancer = LoadBalancer(service)
    chosen = [balancer.select_actor([i] * 10) for i in range(50)]
    assert 2 not in chosen
    assert set(chosen) == {0, 1, 3}


@pytest.mark.parametrize("state", [s for s in ReplicaState if not s.admits_requests])
def test_replica_that_admits_nothing_is_never_chosen(service, state):
    service.load.mark("r1", state, "test")
    balancer = LoadBalancer(service)
    chosen = {balancer.select_actor([i] * 10) for i in range(100)}
    chosen |= {balancer.select_actor() for _ in range(100)}
    assert chosen == {0, 2, 3}


def test_updating_replica_is_still_chosen(service):
    for replica_id in ("r0", "r1", "r2"):
        service.load.mark(replica_id, ReplicaState.DRAINING)
    service.load.mark("r3", ReplicaState.UPDATING)
    assert LoadBalancer(service).reserve(IDS).replica_id == "r3"


def test_excluded_replica_is_not_chosen(service):
    balancer = LoadBalancer(service)
    first = balancer.reserve(IDS)
    others = {balancer.reserve(IDS, exclude={first.replica_id}).replica_id for _ in range(8)}
    assert first.replica_id not in others


def test_no_candidate_names_every_replica_and_its_state(service):
    service.load.mark("r0", ReplicaState.FAILED, "actor died")
    service.load.mark("r1", ReplicaState.STALE, "missed version 3")
    service.load.mark("r2", ReplicaState.DRAINING)
    with pytest.raises(NoReplicaAvailableError) as caught:
        LoadBalancer(service).reserve(IDS, exclude=["r3"])
    assert str(caught.value) == (
        "no replica can take a request: replica r0 is failed (actor died), "
        "replica r1 is stale (missed version 3), replica r2 is draining, "
        "replica r3 is serving and excluded"
    )


def test_replicas_can_come_and_go(service):
    balancer = LoadBalancer(service, "requests")
    held = balancer.reserve()
    service.load.remove(held.replica_id)
    service.actors.pop(held.index)
    service.load.add("r9", SERVING)
    service.actors.append(Actor())
    assert "r9" in {balancer.reserve().replica_id for _ in range(8)}
    held.release()
    assert sum(in_flight(service)) == service.load.total_in_flight == 8


@pytest.mark.parametrize("position", [-1, 4])
def test_strategy_that_chooses_out_of_range_is_named(service, monkeypatch, position):
    class Wrong:
        def __init__(self, settings): ...
        def choose(self, request, snapshots):
            return position

    monkeypatch.setitem(strategies._FACTORIES, "wrong", Wrong)
    with pytest.raises(IndexError, match=f"strategy 'wrong' must choose .* got {position}"):
        LoadBalancer(service, "wrong").select_actor()


# Reservations


async def test_reservation_is_released_by_every_door(service):
    balancer = LoadBalancer(service)
    with balancer.reserve(IDS) as reservation:
        assert in_flight(service)[reservation.index] == 1
        assert reservation.replica_id == f"r{reservation.index}"
        reservation.release()
        assert sum(in_flight(service)) == 0
    async with balancer.reserve(IDS):
        assert sum(in_flight(service)) == 1
    assert sum(in_flight(service)) == 0
    with pytest.raises(ZeroDivisionError), balancer.reserve(IDS):
        raise ZeroDivisionError
    assert sum(in_flight(service)) == 0


def test_batch_is_reserved_with_each_choice_seeing_the_ones_before(service):
    reservations = LoadBalancer(service, "requests").reserve_batch([IDS] * 20)
    assert len(reservations) == 20
    assert in_flight(service) == [5, 5, 5, 5]


def test_failed_batch_leaves_nothing_reserved(service, monkeypatch):
    class FailsAtThird:
        def __init__(self, settings):
            self.calls = 0

        def choose(self, request, snapshots):
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError
            return 0

    monkeypatch.setitem(strategies._FACTORIES, "fails", FailsAtThird)
    with pytest.raises(ZeroDivisionError):
        LoadBalancer(service, "fails").reserve_batch([IDS] * 5)
    assert in_flight(service) == [0, 0, 0, 0]


@pytest.mark.parametrize("prompts", [[], "text", {"prompt": "text"}])
def test_batch_must_be_a_sequence_of_prompts(service, prompts):
    with pytest.raises(InvalidPromptError, match="prompts must be a sequence of prompts"):
        LoadBalancer(service).reserve_batch(prompts)


def test_choosing_and_reserving_is_one_step_for_threads_of_two_balancers(service):
    balancers = [LoadBalancer(service, "requests", seed=seed) for seed in range(2)]
    gate = threading.Barrier(4)

    def work(balancer):
        gate.wait()
        for _ in range(50):
            balancer.reserve()

    threads = [threading.Thread(target=work, args=(balancers[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_flight(service) == [50, 50, 50, 50]


def test_ledger_is_locked_from_the_choice_to_the_count(service, monkeypatch):
    events = []

    def note(what):
        """Notes whether another thread could take the ledger's lock now."""

        def try_to_enter():
            if entered := service.load.lock.acquire(blocking=False):
                service.load.lock.release()
            events.append((what, "open" if entered else "locked"))

        thread = threading.Thread(target=try_to_enter)
        thread.start()
        thread.join()

    class Noting:
        def __init__(self, settings): ...
        def choose(self, request, snapshots):
            note("choose")
            return 0

    monkeypatch.setitem(strategies._FACTORIES, "noting", Noting)

    def set_figure(record, name, value):
        if name == "in_flight":
            note(f"count {value - record.in_flight}")
        object.__setattr__(record, name, value)

    monkeypatch.setattr(LoadSnapshot, "__setattr__", set_figure)
    service.load.reserve("r0")
    balancer = LoadBalancer(service, "noting")
    balancer.reserve()
    balancer.reserve_batch([IDS, IDS])
    note("after")
    assert events == [
        ("count 1", "locked"),
        *[("choose", "locked"), ("count 1", "locked")] * 3,
        ("after", "open"),
    ]


@pytest.mark.parametrize("_", range(20))
async def test_counters_are_exact_whatever_the_ending(service, _):
    balancer, gate = LoadBalancer(service), asyncio.Event()

    async def request(ending):
        async with asyncio.timeout(None) as limit, balancer.reserve(IDS):
            await gate.wait()
            if ending == "error":
                raise ZeroDivisionError
            if ending == "timeout":
                limit.reschedule(0)
            if ending != "success":
                await asyncio.Event().wait()

    endings = ["success", "error", "timeout", "cancel"] * 8
    tasks = [asyncio.create_task(request(ending)) for ending in endings]
    await asyncio.sleep(0)
    assert sum(in_flight(service)) == len(tasks)
    gate.set()
    await asyncio.sleep(0)
    for task in tasks[3::4]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert collections.Counter(type(outcome).__name__ for outcome in outcomes) == {
        "NoneType": 8, "ZeroDivisionError": 8, "TimeoutError": 8, "CancelledError": 8,
    }  # fmt: skip
    assert in_flight(service) == [0, 0, 0, 0]


@pytest.mark.parametrize("_", range(20))
def test_threads_leave_the_counters_at_zero(service, _):
    balancer = LoadBalancer(service)

    def work(offset):
        for i in range(30):
            with suppress(ZeroDivisionError), balancer.reserve([offset + i] * 10):
                1 // (i % 3)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_flight(service) == [0, 0, 0, 0]


def test_samples_and_tokens_are_counted_and_given_back(service):
    balancer = LoadBalancer(service, "round-robin")
    many, one = SimpleNamespace(n=5, max_tokens=10), SimpleNamespace(n=1, max_tokens=None)
    places = balancer.reserve_batch([IDS, IDS], sampling_params=[many, one])
    assert in_flight(service) == [5, 1, 0, 0]
    assert held(service) == [20, 20, 0, 0]  # nothing is known of answers yet
    places[0].release(answers=[[1] * 6] * 5)
    places[1].release()
    assert in_flight(service) == held(service) == [0, 0, 0, 0]
    places = balancer.reserve_batch([IDS, IDS], sampling_params=[many, one])
    assert held(service) == [0, 0, 20 + 5 * 6, 20 + 6]
    for place in places:
        place.release()
    assert held(service) == [0, 0, 0, 0]


def test_a_batch_with_too_few_sampling_params_reserves_nothing(service):
    with pytest.raises(UnsupportedArgumentError, match=r"sampling_params must .* 2 prompts, got 1"):
        LoadBalancer(service).reserve_batch(
            [IDS, IDS], sampling_params=[SimpleNamespace(n=1, max_tokens=None)]
        )
    assert in_flight(service) == [0, 0, 0, 0]


# Statistics


def test_stats_are_what_was_counted_and_reported(service):
    balancer = LoadBalancer(service, ["round-robin", "requests"], 16, 2.0)
    service.load.observe(
        EngineReport(
            replica_id="r1", state=SERVING, num_unfinished=5, num_running=3, num_waiting=2,
            kv_cache_usage=0.5, weight_version=7,
        )
    )  # fmt: skip
    service.load.mark("r3", ReplicaState.FAILED, "actor died")
    balancer.reserve()
    stats = balancer.get_stats()
    actor_stats = stats.pop("actor_stats")
    assert stats == {
        "strategies": ["round-robin", "requests"],
        "primary_strategy": "round-robin",
        "num_actors": 4,
        "prefix_length": 16,
        "overload_threshold": 2.0,
        "round_robin_index": 1,
    }
    assert [entry["actor_index"] for entry in actor_stats] == [0, 1, 2, 3]
    assert [entry["pending_requests"] for entry in actor_stats] == [1, 0, 0, 0]
    assert [entry["cache_usage"] for entry in actor_stats] == [None, 0.5, None, None]
    assert [entry["state"] for entry in actor_stats] == ["serving"] * 3 + ["failed"]
    assert actor_stats[3]["reason"] == "actor died"
    assert actor_stats[0]["age_s"] is None
    assert actor_stats[1].pop("age_s") < 5
    assert actor_stats[1] == {
        "actor_index": 1, "replica_id": "r1", "state": "serving", "reason": "",
        "pending_requests": 0, "num_unfinished": 5, "num_running": 3, "num_waiting": 2,
        "cache_usage": 0.5, "weight_version": 7,
    }  # fmt: skip


# Copies


class PicklableService(Service):
    """A service that holds its balancer, as a real one does."""

    def __init__(self, num=4):
        super().__init__(num)
        self.actors = [f"handle {i}" for i in range(num)]
        self.balancer = LoadBalancer(self, ["prefix-aware", "round-robin"], seed=3)


def test_pickled_copies_decide_alike_count_apart_and_begin_their_turns_apart():
    service = PicklableService(16)
    alone = service.balancer.reserve(IDS)
    copies = [pickle.loads(pickle.dumps(service)).balancer for _ in range(8)]
    for copy in copies:
        assert copy.load.total_in_flight == 0
        assert copy.actors == service.actors
        assert copy.strategies == service.balancer.strategies
        assert copy.select_actor(IDS) == alone.index  # a new prompt on an idle service
    assert len({copy.select_actor() for copy in copies}) > 1
    copies[0].reserve(IDS)
    assert service.load.total_in_flight == 1
    assert copies[1].load.total_in_flight == 0


def test_balancer_of_actors_pickles_with_its_ledger():
    tracker = LoadTracker(["0", "1"], state=SERVING)
    tracker.mark("0", ReplicaState.FAILED)
    balancer = LoadBalancer(["handle 0", "handle 1"], tracker=tracker)
    copy = pickle.loads(pickle.dumps(balancer))
    assert copy.reserve(IDS).replica_id == "1"
    assert tracker.total_in_flight == 0
    balancer.close()
    balancer.close()


def test_unknown_strategy_is_told_at_construction(service):
    with pytest.raises(UnknownStrategyError, match="got 'least'"):
        LoadBalancer(service, ["requests", "least"])

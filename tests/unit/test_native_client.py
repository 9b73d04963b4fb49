"""vLLM's own calls on every replica: what each is sent, and what is refused, without engines."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.service import member, replicas_of
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    ServiceClosedError,
    TransferNotReadyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.service.fleet import Fleet
from torchrl_vllm_sync.service.replicas import Answers
from torchrl_vllm_sync.service.weights import NativeClient

OUT_OF_TURN = TransferNotReadyError("no update was begun")


def of_two_workers(name):
    one = member(name)
    return replace(one, description=replace(one.description, num_workers=2))


class Rig:
    """Two replicas of two workers each; their calls are noted, and answered with ``answers``."""

    def __init__(self, monkeypatch, launched=True, colocated=False):
        self.replicas = replicas_of(
            [of_two_workers("0"), of_two_workers("1")],
            launched=launched,
            colocated=colocated,
            engine_args=SimpleNamespace(
                tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1
            ),
        )
        self.calls, self.answers, self.learned, self.aside = [], {}, [], []
        weights = SimpleNamespace(
            pusher=SimpleNamespace(
                step_aside=lambda: self.aside.append(1), exclusive=contextlib.nullcontext
            ),
            learn_versions=lambda *, notify: self.learned.append(notify),
        )
        monkeypatch.setattr(self.replicas, "start_calls", self.start)
        monkeypatch.setattr(self.replicas, "learn", lambda: self.learned.append(True))
        self.client = NativeClient(self.replicas, weights)

    def start(self, method, calls, **options):
        self.calls.append((method, calls, options))
        answers = Answers({name: self.answers.get(name) for name in calls})
        return SimpleNamespace(answers=lambda deadline_s: answers)


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_each_replica_gets_ranks_and_parts_of_its_own(rig):
    rig.client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5}, timeout_s=9)
    rig.client.update_weights([{"part": at} for at in range(4)], timeout_s=8)
    info = {"rank_offset": 1, "world_size": 5}
    (_, ranks, limit), (_, parts, _) = rig.calls
    assert ranks == {"0": (info,), "1": (info | {"rank_offset": 3},)}
    assert limit == {"timeout_s": 9}
    assert parts == {
        "0": ([{"part": 0}, {"part": 1}],),
        "1": ([{"part": 2}, {"part": 3}],),
    }
    assert rig.aside == [1]


def test_all_get_the_same_arguments_and_time(rig):
    rig.client.finish_weight_update("7", timeout_s=5)
    rig.client.pause_generation(mode="keep", clear_cache=False, timeout_s=6)
    rig.client.sleep(2, "wait", timeout_s=7)
    rig.client.use_transfer_engine("nccl")
    pause = {"mode": "keep", "clear_cache": False, "timeout_s": 6}
    assert rig.calls == [
        ("finish_weight_update", {"0": ("7",), "1": ("7",)}, {"timeout_s": 5}),
        ("pause_generation", {"0": (), "1": ()}, pause),
        ("sleep", {"0": (2, "wait"), "1": (2, "wait")}, {"timeout_s": 7}),
        ("use_transfer_engine", {"0": ("nccl",), "1": ("nccl",)}, {}),
    ]


def test_a_start_that_one_refuses_is_taken_back_from_the_others(rig):
    rig.answers = {"1": OUT_OF_TURN}
    with pytest.raises(TransferNotReadyError):
        rig.client.start_weight_update(timeout_s=3)
    assert [(method, [*calls]) for method, calls, _ in rig.calls] == [
        ("start_weight_update", ["0", "1"]),
        ("shutdown_weight_transfer_engine", ["0"]),
    ]


@pytest.mark.parametrize("answers", [{}, {"0": OUT_OF_TURN}])
def test_versions_are_learned_however_an_update_ends_and_announced_if_all_have_it(rig, answers):
    rig.answers = answers
    if answers:
        with pytest.raises(TransferNotReadyError):
            rig.client.finish_weight_update("7")
    else:
        rig.client.finish_weight_update("7")
    assert rig.learned == [not answers]


@pytest.mark.parametrize("replica_id", ["0", "1"])
def test_the_service_is_awake_when_all_are(rig, replica_id):
    rig.answers = {"0": True, "1": True}
    assert rig.client.wake_up(["weights"])
    assert not rig.answers.update({replica_id: False})
    assert not rig.client.wake_up(["weights"])
    assert rig.learned == [True, True]


def test_where_engines_sleep_for_a_trainer_the_dead_keep_none_awake(monkeypatch):
    dead = ReplicaUnavailableError("1", ReplicaState.FAILED, "its actor died")
    rig = Rig(monkeypatch, colocated=True)
    rig.answers = {"0": True, "1": dead}
    rig.client.sleep(2, "keep")
    assert not rig.client.wake_up()
    away = ReplicaUnavailableError("1", ReplicaState.FAILED, "out of reach", may_return=True)
    for failure in (away, ReplicaUnavailableError("1", ReplicaState.STALE), TimeoutError("silent")):
        rig.answers["1"] = failure
        with pytest.raises(type(failure)):
            rig.client.sleep(2, "keep")
    rig.answers = {"0": False, "1": dead}
    with pytest.raises(ReplicaUnavailableError, match="replica 1 is failed"):
        rig.client.wake_up()
    others = Rig(monkeypatch)
    others.answers = {"0": True, "1": dead}
    for call in (others.client.sleep, others.client.wake_up):
        with pytest.raises(ReplicaUnavailableError, match="replica 1 is failed"):
            call()


@pytest.mark.parametrize(("level", "sleeps"), [(0, False), (1, True), (2, True)])
def test_those_that_die_as_they_fall_asleep_come_back_asleep(monkeypatch, level, sleeps):
    rig = Rig(monkeypatch, colocated=True)
    load = rig.replicas.load
    serving = [EngineReport(replica_id=name, state=ReplicaState.SERVING) for name in "01"]
    for one in serving:
        load.observe(one)
    asked_at = load.clock()
    rig.answers = {"1": ReplicaUnavailableError("1", ReplicaState.FAILED, "its actor died")}
    rig.client.sleep(level, "keep")
    for one in serving:
        load.observe(one, asked_at=asked_at)  # on its way meanwhile
        load.mark(one.replica_id, ReplicaState.FAILED)
    monkeypatch.setattr(rig.replicas, "learn", lambda timeout_s: None)
    assert Fleet(rig.replicas, rig.client)._are_asleep() == sleeps


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda client: client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 4}),
            r"world_size must be at least 5, for 1 trainer rank\(s\) and 4 workers, got 4",
        ),
        (
            lambda client: client.update_weights([{"part": 0}]),
            "must have one for each of 4 workers, got 1",
        ),
    ],
)
def test_what_does_not_fit_the_workers_is_refused_before_anything_is_sent(rig, call, words):
    with pytest.raises(UnsupportedArgumentError, match=words):
        call(rig.client)
    assert (rig.calls, rig.aside) == ([], [])


def test_a_service_that_is_not_launched_is_asked_nothing(monkeypatch):
    client = Rig(monkeypatch, launched=False).client
    for call in (
        client.is_paused,
        client.start_weight_update,
        client.resume_generation,
        client.wake_up,
        client.finish_weight_update,
    ):
        with pytest.raises(ServiceClosedError, match="is not launched, or was shut down"):
            call()

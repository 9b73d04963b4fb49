"""Which version a replica that joins must hold, and that coming and going loses nobody."""

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from tests.fakes.service import member, replicas_of
from torchrl_vllm_sync import AsyncVLLM, ReplicaState
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.service import fleet as fleet_module
from torchrl_vllm_sync.service import replicas as replicas_module
from torchrl_vllm_sync.service.fleet import Fleet, Supervisor
from torchrl_vllm_sync.service.replicas import Answers, Membership, ServiceSettings

SERVING, STALE, STARTING = ReplicaState.SERVING, ReplicaState.STALE, ReplicaState.STARTING


class Pusher:
    """Pushes nothing."""

    committed_run_id = None

    def __init__(self, committed=0):
        self.committed = committed

    def exclusive(self, timeout_s):
        del timeout_s
        return contextlib.nullcontext()


@pytest.fixture
def load():
    return LoadTracker(["0", "1"])


def newest_for_0(load, committed=0):
    pusher = Pusher(committed)
    fleet = Fleet(replicas_of(load=load), pusher)
    return fleet._newest(["0"])[0]


def told(load, replica_id, state, version):
    load.observe(EngineReport(replica_id=replica_id, state=state, weight_version=version))


def test_what_the_others_serve_with(load):
    told(load, "0", SERVING, 9)  # alone; its trainer was killed before the other had it
    told(load, "1", SERVING, 8)
    load.renew("0", STARTING)
    assert newest_for_0(load) == 8
    assert newest_for_0(load, committed=9) == 9


def test_launched_weights_do_not_come_back_while_nobody_serves(load):
    told(load, "0", SERVING, 20)  # another process pushed
    told(load, "1", SERVING, 20)
    told(load, "1", STALE, 20)  # and the next push broke off
    load.renew("0", STARTING)
    assert newest_for_0(load) == 20
    load.renew("1", STARTING)
    assert newest_for_0(load) == 20


def test_nothing_was_pushed_yet(load):
    told(load, "1", SERVING, 0)
    assert newest_for_0(load) == 0


def test_one_that_begins_anew_sleeps_if_others_do_or_if_all_last_did(load, monkeypatch):
    replicas = replicas_of(load=load)
    monkeypatch.setattr(replicas, "learn", lambda timeout_s: None)
    pusher = Pusher()
    fleet = Fleet(replicas, pusher)

    def says(replica_id, state, asleep):
        load.observe(EngineReport(replica_id=replica_id, state=state, asleep=asleep))

    assert not fleet._are_asleep()
    says("0", ReplicaState.UPDATING, True)
    says("1", ReplicaState.UPDATING, True)
    load.mark("0", STARTING)
    assert fleet._are_asleep()
    says("1", SERVING, False)  # a push has woken it
    assert not fleet._are_asleep()
    says("1", ReplicaState.UPDATING, True)
    load.mark("1", ReplicaState.FAILED)
    assert fleet._are_asleep()


# ---------------------------------------------------------------- leaving and restarting


class Rig:
    """Two replicas whose actors' calls are noted; ``during`` runs in the first one of a method."""

    def __init__(self, monkeypatch):
        self.load, self.pusher = LoadTracker(["0", "1"], state=SERVING), Pusher()
        self.replicas = replicas_of([member(one, f"actor {one}") for one in "01"], load=self.load)
        self.fleet = Fleet(self.replicas, self.pusher)
        self.fleet.supervises = True
        self.calls, self.during, self.closed, self.ended = [], {}, [], []
        self.limits = {}
        monkeypatch.setattr(self.replicas, "start_calls", self.start)
        monkeypatch.setattr(fleet_module, "close_members", self.close)
        monkeypatch.setattr(self.fleet, "_end", lambda one: self.ended.append(one.actor))
        monkeypatch.setattr(fleet_module, "launch_replicas", self.launch)

    @property
    def membership(self):
        return self.replicas.membership

    def start(self, method, calls, *, among=None):
        current = self.replicas.current() if among is None else among
        replicas = [one for one in current if one.replica_id in calls]
        self.calls.append((method, *(one.actor for one in replicas)))
        self.during.pop(method, lambda: None)()
        reports = {
            one.replica_id: EngineReport(replica_id=one.replica_id, state=SERVING)
            for one in replicas
        }

        def answers(deadline_s):
            self.limits[method] = deadline_s
            return Answers(reports)

        return SimpleNamespace(answers=answers)

    def close(self, members, **_):
        self.closed += [one.actor for one in members]

    def launch(self, settings, ids, *, num_restarts=0, **_):
        del settings
        self.during.pop("launch", lambda: None)()
        return [member(one, f"new {one}", num_restarts=num_restarts) for one in ids]


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def test_who_is_restarted_while_it_is_removed_is_ended_as_what_it_is_then(rig):
    rig.during["drain"] = lambda: rig.fleet.restart("1")
    rig.fleet.remove_replicas(["1"], drain_timeout_s=0)
    assert rig.closed == ["new 1"]
    assert rig.load.replica_ids == ["0"]


def test_one_that_dies_again_before_it_has_reported_sleeps_again(rig, monkeypatch):
    rig.replicas.settings = replace(rig.replicas.settings, colocated=True)
    rig.replicas.put(without={"1"})
    rig.load.follow(["0"])
    monkeypatch.setattr(rig.replicas, "learn", lambda *_, **__: None)
    rig.load.observe(EngineReport(replica_id="0", state=ReplicaState.UPDATING, asleep=True))
    for _ in range(2):
        rig.load.mark("0", ReplicaState.FAILED)
        rig.calls.clear()
        rig.fleet.restart("0")
        assert ("sleep", "new 0") in rig.calls


def test_who_is_removed_twice_at_once_is_ended_once_and_with_it_the_others(rig):
    rig.replicas.put(member("2", "actor 2"))
    rig.load.add("2", SERVING)
    rig.during["drain"] = lambda: rig.fleet.remove_replicas(["2"], drain_timeout_s=0)
    rig.fleet.remove_replicas(["1", "2"], drain_timeout_s=0)
    assert rig.closed == ["actor 2", "actor 1"]
    assert rig.load.replica_ids == ["0"]


def test_those_who_leave_at_once_leave_one_behind(rig):
    def other():
        with pytest.raises(UnsupportedArgumentError, match="must leave at least 1"):
            rig.fleet.remove_replicas(["0"], drain_timeout_s=0)

    rig.during["drain"] = other
    rig.fleet.remove_replicas(["1"], drain_timeout_s=0)
    assert rig.load.replica_ids == ["0"]


def test_those_who_are_leaving_are_not_counted_again(rig):
    rig.replicas.put(member("2", "actor 2"))
    rig.load.add("2", SERVING)
    rig.during["drain"] = lambda: rig.fleet.remove_replicas(1, drain_timeout_s=0)
    rig.fleet.remove_replicas(1, drain_timeout_s=0)
    assert rig.load.replica_ids == ["2"]
    assert sorted(rig.closed) == ["actor 0", "actor 1"]


def test_who_hangs_is_not_waited_for_longer_than_who_is_busy(rig):
    rig.fleet.remove_replicas(["1"], drain_timeout_s=2)
    assert rig.limits["drain"] == 2
    assert 0 < rig.limits["report"] <= 2


def interrupt():
    raise KeyboardInterrupt


def test_who_is_waited_for_until_the_user_interrupts_stays(rig):
    rig.during["report"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.fleet.remove_replicas(["1"])
    assert rig.calls[-1] == ("undrain", "actor 1")
    rig.fleet.remove_replicas(["1"])
    assert rig.load.replica_ids == ["0"]


def test_who_is_removed_by_another_thread_is_not_waited_for(rig):
    rig.replicas.put(member("2", "actor 2"))
    rig.load.add("2", SERVING)
    rig.during["report"] = lambda: rig.fleet.remove_replicas(["2"], drain_timeout_s=0)
    assert rig.fleet.remove_replicas(["1", "2"]) == ["1", "2"]
    assert rig.load.replica_ids == ["0"]


def test_who_cannot_leave_for_a_push_that_never_ends_stays(rig, monkeypatch):
    @contextlib.contextmanager
    def never(timeout_s):
        raise SyncError(f"a push was under way for {timeout_s:g} s")
        yield

    monkeypatch.setattr(rig.pusher, "exclusive", never)
    with pytest.raises(SyncError, match="a push was under way"):
        rig.fleet.remove_replicas(["1"], drain_timeout_s=0)
    assert rig.calls[-1] == ("undrain", "actor 1")
    assert (rig.load.replica_ids, rig.closed) == (["0", "1"], [])


def test_nothing_is_started_for_who_was_removed_or_for_a_service_that_is_over(rig, monkeypatch):
    launched = []
    monkeypatch.setattr(fleet_module, "launch_replicas", lambda *_, **__: launched.append(1))
    monkeypatch.setattr(rig.fleet, "_end", lambda _: rig.replicas.put(without="1"))
    with pytest.raises(KeyError):
        rig.fleet.restart("1")
    monkeypatch.setattr(rig.fleet, "_end", lambda _: rig.fleet.close())
    with pytest.raises(ServiceClosedError):
        rig.fleet.restart("0")
    assert launched == []


def test_who_was_removed_while_it_started_does_not_join(rig):
    rig.during["launch"] = lambda: rig.fleet.remove_replicas(["1"], drain_timeout_s=0)
    with pytest.raises(KeyError):
        rig.fleet.restart("1")
    assert "new 1" in rig.closed
    assert rig.load.replica_ids == ["0"]


def test_a_restarted_replica_is_known_to_serve_when_its_restart_is_over(rig):
    """Requests wait as long as a restart is under way; they must find the replica at its end."""
    rig.fleet.restart("1")
    assert rig.load.snapshot("1").state is SERVING


@pytest.mark.parametrize(
    "change",
    [lambda fleet: fleet.add_replicas(), lambda fleet: fleet.remove_replicas("1")],
    ids=["who comes", "who goes"],
)
def test_pushes_go_on_while_replicas_are_told_who_is_there(rig, monkeypatch, change):
    """One that hangs answers after 30 s."""
    held, told = threading.Lock(), []
    monkeypatch.setattr(rig.pusher, "exclusive", lambda timeout_s: held)
    rig.during["keep_card"] = lambda: told.append((held.locked(), rig.fleet._lock.locked()))
    change(rig.fleet)
    assert told == [(False, False)]


def test_after_a_shutdown_nobody_is_removed_any_more(rig):
    rig.fleet.close()
    with pytest.raises(ServiceClosedError):
        rig.fleet.remove_replicas(["1"], drain_timeout_s=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fleet: fleet.add_replicas(0), "num_replicas must be at least 1, got 0"),
        (lambda fleet: fleet.add_replicas(1.5), "num_replicas must be an integer"),
        (lambda fleet: fleet.remove_replicas("nobody"), "replicas must be among"),
        (lambda fleet: fleet.remove_replicas([]), "replicas must be among"),
        (lambda fleet: fleet.remove_replicas(["0", "1"]), "must leave at least 1"),
        (lambda fleet: fleet.remove_replicas(2), "must leave at least 1"),
        (lambda fleet: fleet.remove_replicas(1, drain_timeout_s=-1), "drain_timeout_s must be"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(rig, call, words):
    with pytest.raises(UnsupportedArgumentError, match=words):
        call(rig.fleet)
    rig.fleet.supervises = False
    for change in (rig.fleet.add_replicas, rig.fleet.remove_replicas):
        with pytest.raises(UnsupportedArgumentError, match="by the process that launched it"):
            change()
    assert (rig.load.replica_ids, rig.calls, rig.closed) == (["0", "1"], [], [])


def test_what_others_restart_takes_no_requests_meanwhile(rig):
    newer = Membership([member("0", "actor 0"), member("1", "x", joined=False)], epoch=9)
    rig.replicas._follow(newer)
    assert [one.state for one in rig.load.snapshots()] == [SERVING, STARTING]


# ---------------------------------------------------------------- hearing, and the end


@pytest.mark.parametrize(
    ("told", "expected"),
    [(0, ["0", "1"]), (5, ["1", "2"]), (None, ["1", "2"])],  # None: nobody answers
)
def test_before_a_push_it_follows_whoever_knows_more(rig, monkeypatch, told, expected):
    rig.replicas.follows = True
    epoch = rig.membership.epoch
    newer = Membership([member("1"), member("2")], epoch=epoch + 5)
    answer = None
    if told is not None:
        answer = EngineReport(replica_id="1", state=SERVING, membership_epoch=epoch + told)
    calls = SimpleNamespace(first_answer=lambda deadline_s: answer)
    monkeypatch.setattr(rig.replicas, "start_calls", lambda *_: calls)
    monkeypatch.setattr(replicas_module, "find_service", lambda *_, **__: (None, newer))
    rig.replicas.refresh_members()
    assert rig.load.replica_ids == expected


def test_looking_outlives_errors_of_the_cluster_and_never_joins_one(rig, monkeypatch):
    asked = []

    def named_actors(_):
        asked.append(1)
        raise RpcError("the head is busy")

    monkeypatch.setattr(replicas_module, "named_actors", named_actors)
    rig.replicas.follows = True
    rig.load.mark("1", ReplicaState.FAILED)
    monkeypatch.setattr(replicas_module.ray, "is_initialized", lambda: False)
    rig.replicas.to_ask()
    assert asked == []
    monkeypatch.setattr(replicas_module.ray, "is_initialized", lambda: True)
    rig.replicas.to_ask()
    assert asked == [1]


def test_looking_waits_for_nobody(rig, monkeypatch):
    """The monitor looks under a lock that every request takes."""
    newer = Membership([member("1"), member("2")], epoch=rig.membership.epoch + 5)
    card, silent = Future(), Future()

    def actor(answer):
        asked = SimpleNamespace(future=lambda: answer)
        return SimpleNamespace(card=SimpleNamespace(remote=lambda bare: asked))

    actors = {"1": actor(card), "2": actor(silent)}
    monkeypatch.setattr(replicas_module, "named_actors", lambda _: actors)
    monkeypatch.setattr(replicas_module.ray, "is_initialized", lambda: True)
    rig.replicas.follows = True
    rig.load.mark("1", ReplicaState.FAILED)
    monkeypatch.setattr(replicas_module, "wait", None)
    for _ in range(3):
        assert [one.replica_id for one in rig.replicas.to_ask()] == ["0", "1"]
    card.set_result({"settings": None, "membership": newer})
    eventually(lambda: [one.replica_id for one in rig.replicas.to_ask()] == ["1", "2"])
    assert not silent.done()


def test_supervision_keeps_no_service_alive(load):
    class Service:
        def __init__(self):
            self.pusher = Pusher()
            self.pusher.client = self

    service = Service()
    me = weakref.ref(service)
    fleet = Fleet(replicas_of(load=load), service.pusher)
    ended = threading.Event()

    def is_wanted():
        if me() is None:
            ended.set()
        return me() is not None

    supervisor = Supervisor(fleet, load, max_restarts=1, is_wanted=is_wanted)
    supervisor.start()
    del service
    gc.collect()
    assert ended.wait(10)
    with pytest.raises(ServiceClosedError):
        fleet.catch_up(["0"])


def test_a_service_that_nobody_holds_is_collected_though_it_is_supervised(monkeypatch):
    monkeypatch.setattr(Fleet, "is_open", True)
    service = object.__new__(AsyncVLLM)
    service.scaling = None
    settings = ServiceSettings(name="dropped", engine_args=None, max_restarts=1)
    service._set_up(settings, Membership([member("0")]))
    thread = service.fleet.supervisor._thread
    service.register_version_hook(lambda report, service=service: service.weight_version)
    assert thread.is_alive()
    me = weakref.ref(service)
    del service
    eventually(lambda: gc.collect() is not None and me() is None)
    thread.join(10)
    assert not thread.is_alive()


def eventually(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

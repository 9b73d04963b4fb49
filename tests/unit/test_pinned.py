"""Who is held at its version, and how it comes back."""

import contextlib

import pytest

from tests.unit.test_fleet import SERVING, STARTING, Rig, told
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    SyncError,
    UnsupportedArgumentError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.service import fleet as fleet_module


@pytest.fixture
def rig(monkeypatch):
    rig = Rig(monkeypatch)
    monkeypatch.setattr(rig.pusher, "quiet", rig.pusher.exclusive, raising=False)
    monkeypatch.setattr(rig.replicas, "learn", lambda *_, **__: None)
    monkeypatch.setattr(fleet_module, "PROPAGATION_S", 0.0)
    rig.caught_up = []
    rig.pusher.catch_up = lambda ids, timeout_s: rig.caught_up.append(ids) or {}
    for one in "01":
        told(rig.load, one, SERVING, 5)
    return rig


def held(rig, version=None, **options):
    return rig.fleet.held(version, 1.0, **{"allow_last": False} | options)


def test_the_least_busy_is_held_and_then_admitted_as_a_new_one_is(rig):
    rig.load.reserve("0")
    with held(rig) as one:
        assert one.replica_id == "1"
        assert rig.load.snapshot("1").state is STARTING
        assert [each.replica_id for each in rig.replicas.current()] == ["0"]  # of pushes, too
        assert [each.replica_id for each in rig.replicas.answering()] == ["0", "1"]
        assert {("keep_card", "actor 1"), ("pin", "actor 1")} <= {*rig.calls}
        told(rig.load, "0", SERVING, 7)
        rig.calls.clear()
    first = next(name for name, actor in rig.calls if actor == "actor 1")
    assert first == "hold_back"  # its actor has said all the while that it serves
    assert ("admit", "actor 1") in rig.calls
    assert rig.caught_up == [["1"]]
    assert rig.replicas.current() == rig.replicas.members
    assert rig.load.snapshot("1").state is ReplicaState.STALE  # until it reports the version
    told(rig.load, "1", SERVING, 5)  # as it did before
    assert [one.replica_id for one in rig.load.admitting()] == ["0"]
    told(rig.load, "1", SERVING, 7)
    assert [one.replica_id for one in rig.load.admitting()] == ["0", "1"]


@pytest.mark.parametrize(
    ("version", "serve", "error", "words"),
    [
        (4, 2, VersionNotReachedError, "holds version 5"),
        (6, 2, VersionNotReachedError, "version 6"),
        (None, 1, NoReplicaAvailableError, "must be 2"),
        (None, 0, NoReplicaAvailableError, "must be 2"),
    ],
)
def test_who_cannot_be_held_stays_as_it_is(rig, version, serve, error, words):
    for one in "01"[serve:]:
        rig.load.mark(one, ReplicaState.FAILED)
    before = [one.state for one in rig.load.snapshots()]
    with pytest.raises(error, match=words):
        held(rig, version).__enter__()
    assert [one.state for one in rig.load.snapshots()] == before
    assert rig.replicas.current() == rig.replicas.members


def test_the_last_may_be_held_if_that_is_allowed(rig):
    with held(rig), held(rig, allow_last=True):
        assert rig.replicas.current() == []
    assert len(rig.replicas.current()) == 2


def test_it_comes_back_whatever_the_body_raises(rig):
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), held(rig):
            raise error
        assert len(rig.replicas.current()) == 2
        for one in "01":
            told(rig.load, one, SERVING, 5)


def test_who_was_restarted_removed_or_shut_down_meanwhile_is_left_alone(rig):
    with held(rig, 5) as one:
        rig.fleet.restart(one.replica_id)
    assert rig.membership.find(one.replica_id).actor == f"new {one.replica_id}"
    for each in "01":
        told(rig.load, each, SERVING, 5)
    with held(rig) as one:
        assert rig.fleet.remove_replicas(one.replica_id, drain_timeout_s=0)
    assert rig.membership.find(one.replica_id) is None
    with held(rig, allow_last=True):
        rig.fleet.close()
    assert rig.replicas.members == []


def test_who_is_held_is_not_removed_by_number(rig):
    with held(rig), pytest.raises(UnsupportedArgumentError, match="must leave at least 1"):
        rig.fleet.remove_replicas(1)


@pytest.mark.parametrize("why", [SyncError("a push was under way"), KeyboardInterrupt()])
def test_who_cannot_come_back_for_a_push_that_never_ends_is_restarted(rig, monkeypatch, why):
    @contextlib.contextmanager
    def never(timeout_s):
        raise why
        yield

    with pytest.raises(type(why)), held(rig) as one:
        monkeypatch.setattr(rig.pusher, "exclusive", never)
    assert rig.load.snapshot(one.replica_id).state is ReplicaState.FAILED

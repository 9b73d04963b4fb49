"""Requests that ask for a least version, and waiting for one, without engines."""

import asyncio
import threading
import time

import pytest

from tests.fakes.requests import FakeActor, Rig, ids, make_requests
from tests.fakes.service import replicas_of, service_of
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    UnsupportedArgumentError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.weights.push import VersionHooks


def at(load, replica_id, version, state=ReplicaState.SERVING):
    load.observe(EngineReport(replica_id=replica_id, state=state, weight_version=version))


class VersionRig(Rig):
    def reserve(self, requests, avoid):
        return self.balancer.reserve_batch(
            [one.prompt for one in requests],
            exclude=avoid,
            min_version=requests[0].min_version,
        )


def asking(min_version, num=4, timeout_s=5.0):
    from dataclasses import replace

    return [replace(one, min_version=min_version) for one in make_requests(num, timeout_s)]


# ---------------------------------------------------------------- routing


async def test_only_replicas_at_the_version_are_asked():
    rig = VersionRig(FakeActor("a"), FakeActor("b"), FakeActor("c"))
    for name, version in (("a", 4), ("b", 5), ("c", 7)):
        at(rig.load, name, version)
    results = await rig.run(asking(5, num=20))
    assert {one.replica_id for one in results} == {"b", "c"}
    assert {one.replica_id for one in await rig.run(asking(7))} == {"c"}
    assert {one.replica_id for one in await rig.run(asking(0, num=20))} == {"a", "b", "c"}
    assert rig.load.total_in_flight == 0


async def test_a_version_to_come_is_waited_for_and_the_wait_shortens_the_limit():
    rig = VersionRig(FakeActor("a"), FakeActor("b"))
    limits = []
    for actor in rig.actors:
        actor.answer = lambda one, actor=actor: (limits.append(one.timeout_s), actor.result(one))[1]
    at(rig.load, "a", 1)
    running = asyncio.ensure_future(rig.run(asking(2, timeout_s=60.0)))
    await asyncio.sleep(0.1)
    assert not running.done()
    assert rig.load.is_watched
    at(rig.load, "b", 1)
    await asyncio.sleep(0.05)
    assert not running.done()
    threading.Thread(target=at, args=(rig.load, "b", 2)).start()
    results = await running
    assert {one.replica_id for one in results} == {"b"}
    assert ids(results) == [f"r{i}" for i in range(4)]
    assert not rig.load.is_watched
    assert all(30 < limit < 59.9 for limit in limits)


async def test_streams_wait_too():
    rig = VersionRig(FakeActor("a"))
    at(rig.load, "a", 1)
    (request,) = asking(2, num=1)

    async def read():
        return [one async for one in rig.stream(request)]

    running = asyncio.ensure_future(read())
    await asyncio.sleep(0.05)
    assert not rig.actors[0].calls
    at(rig.load, "a", 2)
    steps = await running
    assert [one.finished for one in steps] == [False, False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_at_the_limit_the_error_says_what_each_replica_holds(stream):
    rig = VersionRig(FakeActor("a"), FakeActor("b"))
    at(rig.load, "a", 3)
    requests = asking(4, num=1, timeout_s=0.1)
    begin = time.monotonic()
    if stream:
        results = [one async for one in rig.stream(requests[0])]
    else:
        results = await rig.run(requests)
    assert 0.1 <= time.monotonic() - begin < 20
    (error,) = [one.error for one in results]
    assert isinstance(error, VersionNotReachedError)
    assert (error.version, error.timeout_s) == (4, 0.1)
    assert "replica a holds version 3 and is serving" in str(error)
    assert "replica b has not said what it holds" in str(error)
    assert not any(actor.calls for actor in rig.actors)
    assert not rig.load.is_watched
    assert rig.load.total_in_flight == 0


async def test_an_engine_that_knows_better_is_believed_and_the_others_are_named():
    """What is known here may be out of date; the gate of the engine has the last word."""
    actor = FakeActor("a")
    refusal = VersionNotReachedError(5, {"a": "holds version 4 and is serving"}, 1.0)
    actor.answer = lambda request: actor.result(request, error=refusal)
    rig = VersionRig(actor, FakeActor("b"))
    at(rig.load, "a", 5)
    at(rig.load, "b", 2)
    (result,) = await rig.run(asking(5, num=1))
    assert result.error.held == {
        "a": "holds version 4 and is serving",
        "b": "holds version 2 and is serving",
    }


async def test_with_nobody_serving_nothing_is_waited_for():
    rig = VersionRig(FakeActor("a"))
    rig.load.mark("a", ReplicaState.STALE)
    with pytest.raises(NoReplicaAvailableError):
        await rig.run(asking(1))


async def test_a_request_cancelled_while_it_waits_leaves_nothing():
    rig = VersionRig(FakeActor("a"))
    at(rig.load, "a", 1)
    running = asyncio.ensure_future(rig.run(asking(2)))
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not rig.load.is_watched
    assert not rig.actors[0].calls


def test_the_balancer_says_who_holds_what():
    rig = VersionRig(FakeActor("a"), FakeActor("b"))
    at(rig.load, "b", 2)
    assert rig.balancer.reserve([1, 2], min_version=2).replica_id == "b"
    with pytest.raises(VersionNotReachedError, match="replica b holds version 2"):
        rig.balancer.reserve([1, 2], min_version=3)


# ---------------------------------------------------------------- the ledger and its monitor


def test_watchers_hear_of_states_and_versions_only():
    load, heard = LoadTracker(["a"], state=ReplicaState.SERVING), []
    with load.watched(lambda: heard.append(load.snapshots()[0].weight_version)):
        at(load, "a", 1)
        at(load, "a", 1)
        load.reserve("a")
        load.release("a")
        at(load, "a", 2)
        load.mark("a", ReplicaState.STALE)
    at(load, "a", 3)
    assert heard == [1, 2, 2]


def test_the_monitor_asks_more_often_while_somebody_watches():
    load = LoadTracker(["a"])
    monitor = LoadMonitor(load, list, interval_s=30.0)
    assert monitor._round_s() == 30.0
    with load.watched(lambda: None):
        assert monitor._round_s() == pytest.approx(0.1)
    assert LoadMonitor(load, list, interval_s=0.05)._round_s() == 0.05


# ---------------------------------------------------------------- waiting


def versions(*replica_ids):
    """A service of replicas that nobody can call."""
    load = LoadTracker(replica_ids, state=ReplicaState.SERVING)
    return service_of(replicas_of(load=load))


def test_who_holds_what_is_what_was_reported():
    service = versions("a", "b")
    assert service.weight_versions == {"a": None, "b": None}
    at(service.load, "a", 3)
    at(service.load, "b", 2)
    assert service.weight_versions == {"a": 3, "b": 2}
    assert service.weight_version == 2


def test_a_copy_that_heard_of_some_replicas_asks_the_others_once(monkeypatch):
    service, asked = versions("a", "b", "c"), []
    monkeypatch.setattr("ray.is_initialized", lambda: True)

    def answer():
        asked.append(1)
        at(service.load, "b", 2)

    service.replicas.is_copy, service.replicas.learn = True, answer
    at(service.load, "a", 3)
    assert service.weight_version == 2
    assert service.weight_versions == {"a": 3, "b": 2, "c": None}
    assert asked == [1]


def test_the_version_stays_while_no_replica_serves():
    service = versions("a", "b")
    at(service.load, "a", 3)
    at(service.load, "b", 4)
    assert service.weight_version == 3
    service.load.mark("a", ReplicaState.STALE)
    assert service.weight_version == 4
    service.load.mark("b", ReplicaState.FAILED)
    assert service.weight_version == 4
    at(service.load, "a", 5)
    assert service.weight_version == 5


@pytest.mark.parametrize("_", range(20))
def test_waiting_ends_when_every_serving_replica_is_there(_):
    service, reached = versions("a", "b"), []
    at(service.load, "a", 1)
    at(service.load, "b", 1)
    assert service.wait_for_version(1, timeout_s=0) == 1
    waiting = [
        threading.Thread(target=lambda: reached.append(service.wait_for_version(2, timeout_s=10)))
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    at(service.load, "a", 2)
    time.sleep(0.005)
    assert not reached
    at(service.load, "b", 3)
    for thread in waiting:
        thread.join(10)
    assert reached == [2, 2, 2]
    assert not service.load.is_watched


def test_waiting_in_vain_says_what_each_replica_holds():
    service = versions("a", "b")
    at(service.load, "a", 1)
    with pytest.raises(VersionNotReachedError, match=r"within 0\.05 s: replica a holds version 1"):
        service.wait_for_version(2, timeout_s=0.05)
    with pytest.raises(VersionNotReachedError):
        service.wait_for_version(2, timeout_s=0)


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        ((-1,), {}, "version"),
        ((1.5,), {}, "version"),
        ((True,), {}, "version"),
        ((1,), {"timeout_s": -1}, "timeout_s"),
        ((1,), {"timeout_s": float("inf")}, "timeout_s"),
        ((1,), {"timeout_s": float("nan")}, "timeout_s"),
        ((1,), {"timeout_s": None}, "timeout_s"),
    ],
)
def test_waiting_for_nonsense_is_refused(arguments, options, name):
    with pytest.raises(UnsupportedArgumentError, match=f"^{name} must be"):
        versions("a").wait_for_version(*arguments, **options)


# ---------------------------------------------------------------- hooks


def test_hooks_are_called_in_order_until_they_are_taken_away():
    hooks, calls = VersionHooks(), []
    report = type("Report", (), {"version": 4})()
    first = hooks.register(lambda one: calls.append(("first", one)))
    hooks.register(lambda one: calls.append(("second", one)))
    hooks.announce(report)
    first()
    first()
    hooks.announce(report)
    assert calls == [("first", report), ("second", report), ("second", report)]


def test_a_hook_that_fails_does_not_keep_the_others_from_hearing():
    hooks, calls = VersionHooks(), []
    report = type("Report", (), {"version": 4})()

    def fail(_):
        raise KeyError("mine")

    hooks.register(fail)
    hooks.register(calls.append)
    with pytest.raises(KeyError, match="mine"):
        hooks.announce(report)
    assert calls == [report]


def test_bad_hooks_are_refused():
    hooks = VersionHooks()
    hook = hooks.announce
    hooks.register(hook)
    with pytest.raises(UnsupportedArgumentError, match="registered already"):
        hooks.register(hook)
    with pytest.raises(UnsupportedArgumentError, match="must be callable"):
        hooks.register("hook")

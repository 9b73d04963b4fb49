"""Who is restarted, brought along, added and removed, and when; the replicas are pretended."""

import itertools
import threading
import time

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import (
    LaunchError,
    PlacementError,
    ServiceClosedError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.service.fleet import (
    RESTART_WINDOW_S,
    RETURN_S,
    QueueLengthScaling,
    RestartBudget,
    Supervisor,
    idlest,
)

SERVING, STALE = ReplicaState.SERVING, ReplicaState.STALE
FAILED, STARTING = ReplicaState.FAILED, ReplicaState.STARTING


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Fleet:
    """Replicas that restart at once, unless told to fail or to wait."""

    def __init__(self, load):
        self.load, self.done = load, []
        self.failures, self.add_failures, self.gate = [], [], threading.Event()
        self.gate.set()

    def restart(self, replica_id):
        self.done.append(("restart", replica_id))
        self.load.mark(replica_id, STARTING)
        assert self.gate.wait(10)
        if self.failures:
            raise self.failures.pop(0)
        self.load.renew(replica_id, SERVING)

    def catch_up(self, replica_ids):
        self.done.append(("catch up", *replica_ids))
        return dict.fromkeys(replica_ids, "nothing is stored")

    def add_replicas(self, num_replicas):
        self.done.append(("add", num_replicas))
        if self.add_failures:
            raise self.add_failures.pop(0)
        for _ in range(num_replicas):
            self.load.add(str(len(self.load.replica_ids)), SERVING)

    def remove_replicas(self, number, *, drain_timeout_s):
        replica_ids = idlest(self.load.snapshots())[:number]
        self.done.append(("remove", *replica_ids))
        for one in replica_ids:
            self.load.remove(one)


class Rig:
    def __init__(self, num_replicas=2, **options):
        self.clock = Clock()
        self.load = LoadTracker(map(str, range(num_replicas)), state=SERVING, clock=self.clock)
        self.fleet = Fleet(self.load)
        options.setdefault("max_restarts", 3)
        self.supervisor = Supervisor(self.fleet, self.load, **options)

    def look(self, after_s=0.0):
        """Lets time pass, has the supervisor look, and waits until what it began has ended."""
        self.clock.now += after_s
        self.supervisor.look()
        wait_for(lambda: not self.supervisor._busy)

    def state(self, replica_id):
        return {one.replica_id: one.state for one in self.load.snapshots()}[replica_id]


def wait_for(what, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_replicas_that_serve_are_left_alone():
    rig = Rig()
    rig.look()
    assert rig.fleet.done == []
    assert not rig.supervisor.is_at_work


def test_a_failed_replica_is_restarted_and_no_other():
    rig = Rig()
    rig.load.mark("1", FAILED, "it died")
    assert rig.supervisor.is_at_work
    rig.look()
    assert rig.fleet.done == [("restart", "1")]
    assert rig.state("1") is SERVING
    assert not rig.supervisor.is_at_work


def test_one_restart_at_a_time_for_each_replica_and_several_side_by_side():
    rig = Rig()
    rig.fleet.gate.clear()
    for replica_id in ("0", "1"):
        rig.load.mark(replica_id, FAILED)
    rig.supervisor.look()
    wait_for(lambda: len(rig.fleet.done) == 2)
    rig.load.mark("0", FAILED)  # such as the monitor does, which still asks the former actor
    rig.supervisor.look()
    assert rig.supervisor.is_at_work
    rig.fleet.gate.set()
    wait_for(lambda: not rig.supervisor._busy)
    assert sorted(rig.fleet.done) == [("restart", "0"), ("restart", "1")]


def test_a_restart_that_fails_is_tried_again_after_growing_pauses_until_the_budget_is_spent(caplog):
    rig = Rig(1)
    rig.fleet.failures = [LaunchError({"0": "out of memory"}) for _ in range(9)]
    rig.load.mark("0", FAILED)
    tries = []
    for _ in range(100):
        before = len(rig.fleet.done)
        rig.look(after_s=0.25)
        tries += [rig.clock.now] * (len(rig.fleet.done) - before)
    first, second, third = tries
    assert 1.0 <= second - first <= 1.5
    assert 2.0 <= third - second <= 2.5
    assert rig.state("0") is FAILED
    assert "out of memory" in rig.load.snapshots()[0].reason
    assert not rig.supervisor.is_at_work
    assert [one.levelname for one in caplog.records].count("ERROR") == 1
    rig.fleet.failures = []
    rig.look(after_s=RESTART_WINDOW_S)
    assert rig.state("0") is SERVING


def test_what_was_removed_or_is_over_meanwhile_is_no_failure():
    rig = Rig()
    for error in (KeyError("1"), ServiceClosedError("over")):
        rig.fleet.failures = [error]
        rig.load.mark("1", FAILED)
        rig.look(after_s=100.0)
    assert rig.state("1") is STARTING


def test_a_service_that_another_process_ended_does_not_come_back():
    rig = Rig()
    rig.load.mark("0", ReplicaState.CLOSED, "the service was shut down")
    rig.load.mark("0", FAILED, "its actor died")
    rig.load.mark("1", FAILED, "it was starting when it was ended")
    assert not rig.supervisor.is_at_work
    rig.look()
    assert rig.fleet.done == []


def test_no_restarts_at_all():
    rig = Rig(max_restarts=0)
    rig.load.mark("1", FAILED)
    rig.look()
    assert rig.fleet.done == []
    assert not rig.supervisor.is_at_work


def test_a_stale_replica_is_brought_along_with_growing_pauses():
    rig = Rig()
    rig.load.mark("1", STALE, "it did not reach version 3")
    tries = []
    for _ in range(40):
        before = len(rig.fleet.done)
        rig.look(after_s=0.5)
        tries += [rig.clock.now] * (len(rig.fleet.done) - before)
    assert rig.fleet.done[:2] == [("catch up", "1")] * 2
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    rig.load.mark("1", SERVING)
    rig.look()
    rig.load.mark("1", STALE, "again")
    before = len(rig.fleet.done)
    rig.look()
    assert len(rig.fleet.done) == before + 1  # the pauses begin anew


def test_one_that_may_be_back_is_restarted_only_if_it_stays_away():
    rig = Rig(2)
    for name in "01":
        rig.load.mark(name, FAILED, "its actor cannot be reached", may_return=True)
    rig.look(after_s=RETURN_S / 2)
    assert rig.fleet.done == []
    assert rig.supervisor.is_at_work  # requests wait for it
    rig.load.observe(EngineReport(replica_id="0", state=SERVING))
    rig.load.mark("1", FAILED, "its actor cannot be reached", may_return=True)
    rig.look(after_s=RETURN_S / 2)
    assert rig.fleet.done == [("restart", "1")]
    rig.load.mark("0", FAILED, "its actor cannot be reached", may_return=True)
    rig.load.mark("0", FAILED, "its actor died")
    rig.look()
    assert rig.fleet.done == [("restart", "1"), ("restart", "0")]


def test_no_restart_is_tried_before_ray_knows_that_a_silent_node_is_dead():
    timeout_s, threshold, period_s = 10, 5, 3  # Ray's health_check_* settings, as it sets them
    assert timeout_s * threshold + period_s * (threshold - 1) < RETURN_S


def test_the_thread_notices_a_failure_at_once_and_ends():
    rig = Rig(2)
    rig.supervisor.start()
    rig.load.mark("0", FAILED)
    wait_for(lambda: rig.state("0") is SERVING)
    rig.supervisor.stop()
    rig.supervisor.stop()
    rig.load.mark("0", FAILED)
    time.sleep(0.05)
    assert rig.state("0") is FAILED
    assert not rig.supervisor.is_at_work


def test_the_thread_ends_with_its_service():
    wanted = [True]
    rig = Rig(is_wanted=lambda: wanted[0])
    rig.supervisor.start()
    wanted.clear()
    wanted.append(False)
    rig.supervisor._wake.set()
    wait_for(lambda: not rig.supervisor._thread.is_alive())


def test_a_budget_forgets_what_is_an_hour_old():
    budget = RestartBudget(2)
    assert budget.is_due("a", 0.0)
    budget.spend("a", 0.0)
    assert not budget.is_due("a", 0.5)
    assert budget.is_due("a", 1.0)
    budget.spend("a", 1.0)
    assert budget.is_spent("a", 2.0)
    assert not budget.is_due("a", 3599.0)
    assert budget.is_due("a", 3600.0)
    assert budget.is_due("b", 2.0)
    budget.refund("a")
    assert budget.is_due("a", 2.0)


# ---------------------------------------------------------------- scaling


def report(load, replica_id, **figures):
    load.observe(EngineReport(replica_id=replica_id, state=SERVING, **figures))


def test_a_long_queue_adds_a_replica_and_idle_engines_lose_one():
    scaling = QueueLengthScaling(1, 3, long_queue=4, idle_load=1, patience_s=10)
    rig = Rig(2, scaling=scaling)
    for replica_id in ("0", "1"):
        report(rig.load, replica_id, num_waiting=5, num_unfinished=20)
    rig.look()
    rig.look(after_s=9.0)
    assert rig.fleet.done == []
    rig.look(after_s=1.0)
    assert rig.fleet.done == [("add", 1)]
    for replica_id in ("0", "1", "2"):
        report(rig.load, replica_id, num_waiting=50, num_unfinished=90)
    for _ in range(5):
        rig.look(after_s=10.0)
    assert rig.fleet.done == [("add", 1)]  # there are as many as may be
    for replica_id in ("0", "1", "2"):
        report(rig.load, replica_id, num_waiting=0, num_unfinished=0)
    rig.load.reserve("0")
    rig.look(after_s=1.0)
    rig.look(after_s=10.0)
    assert rig.fleet.done[1:] == [("remove", "1")]  # not the one that is busy


def test_a_queue_that_is_short_between_adds_nothing():
    rig = Rig(1, scaling=QueueLengthScaling(1, 2, long_queue=4, patience_s=10))
    for waiting in (5, 5, 1, 5, 5):
        report(rig.load, "0", num_waiting=waiting, num_unfinished=9)
        rig.look(after_s=6.0)
    assert rig.fleet.done == []


def test_too_few_are_filled_up_at_once():
    rig = Rig(1, scaling=QueueLengthScaling(3, 4))
    rig.look()
    assert rig.fleet.done == [("add", 2)]


def test_one_busy_replica_does_not_lose_another():
    """Two samples are more than the one that would be left has when idle."""
    rig = Rig(2, scaling=QueueLengthScaling(1, 2, idle_load=1, patience_s=1))
    report(rig.load, "0", num_waiting=0, num_unfinished=2)
    for _ in range(5):
        rig.look(after_s=2.0)
    assert rig.fleet.done == []


@pytest.mark.parametrize("wish", [ZeroDivisionError(), 0, None, 2.5])
def test_a_policy_that_fails_does_not_end_the_restarts(wish, caplog):
    def scaling(snapshots, now):
        del snapshots, now
        if isinstance(wish, Exception):
            raise wish
        return wish

    scaling.drain_timeout_s = 1.0
    rig = Rig(2, scaling=scaling)
    rig.look()
    rig.load.mark("1", FAILED)
    rig.look(after_s=5.0)
    assert rig.fleet.done == [("restart", "1")]
    assert [one.levelname for one in caplog.records].count("ERROR") == 1


def test_a_policy_that_lacks_a_time_limit_does_not_end_the_restarts(caplog):
    rig = Rig(2, scaling=lambda snapshots, now: 1)
    rig.look()
    rig.load.mark("1", FAILED)
    rig.look(after_s=5.0)
    assert rig.fleet.done == [("restart", "1")]
    assert "drain_timeout_s" in caplog.text


def test_what_the_cluster_cannot_hold_is_asked_for_after_growing_pauses():
    rig = Rig(1, scaling=QueueLengthScaling(2, 2))
    full = PlacementError("no room")
    rig.fleet.add_failures = [full] * 4
    tries = []
    for _ in range(100):
        before = len(rig.fleet.done)
        rig.look(after_s=1.0)
        tries += [rig.clock.now] * (len(rig.fleet.done) - before)
    assert [after - before for before, after in itertools.pairwise(tries)] == [1, 2, 4, 8]
    assert len(rig.load.replica_ids) == 2


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0, 1), {}),
        ((2, 1), {}),
        ((1, 2), {"patience_s": -1.0}),
        ((1, 2), {"long_queue": "many"}),
        ((1, 2), {"drain_timeout_s": float("inf")}),  # which no removal takes
    ],
)
def test_policies_that_cannot_be_are_refused(arguments, options):
    with pytest.raises(UnsupportedArgumentError):
        QueueLengthScaling(*arguments, **options)

"""The ledger: exact counts, last reports, marks; and the monitor before it is started."""

import gc
import pickle
import threading
import time

import pytest

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.load import LoadSnapshot, LoadTracker
from torchrl_vllm_sync.load_monitor import BareActorReader, LoadMonitor, ReportReader
from torchrl_vllm_sync.replica import EngineReport, Replica, ReplicaState

SERVING, FAILED = ReplicaState.SERVING, ReplicaState.FAILED


def snapshot_of(tracker, replica_id):
    return next(s for s in tracker.snapshots() if s.replica_id == replica_id)


def report(replica_id="0", state=SERVING, **figures):
    return EngineReport(replica_id=replica_id, state=state, **figures)


def test_nothing_is_known_before_the_first_report():
    (snapshot,) = LoadTracker(["0"]).snapshots()
    assert snapshot == LoadSnapshot(replica_id="0", state=ReplicaState.STARTING)
    assert (snapshot.kv_cache_usage, snapshot.num_unfinished, snapshot.age_s) == (None, None, None)


def test_reserve_and_release_count():
    tracker = LoadTracker(["0", "1"])
    tracker.reserve("1")
    tracker.reserve("1")
    tracker.release("1")
    assert [s.in_flight for s in tracker.snapshots()] == [0, 1]
    assert (tracker.in_flight("1"), tracker.total_in_flight) == (1, 1)


def test_release_without_reserve_names_the_replica():
    with pytest.raises(RuntimeError, match="replica 0 with none in flight"):
        LoadTracker(["0"]).release("0")


@pytest.mark.parametrize("call", ["reserve", "release", "remove", "in_flight"])
def test_unknown_replica_is_refused(call):
    with pytest.raises(KeyError, match=r"one of \['0'\], got '7'"):
        getattr(LoadTracker(["0"]), call)("7")


def test_report_replaces_figures_and_keeps_the_count():
    tracker = LoadTracker(["0"])
    tracker.reserve("0")
    tracker.observe(report(num_unfinished=5, kv_cache_usage=0.25, weight_version=3))
    tracker.observe(report(num_running=2))
    snapshot = snapshot_of(tracker, "0")
    assert (snapshot.in_flight, snapshot.num_running, snapshot.num_unfinished) == (1, 2, None)
    assert 0 <= snapshot.age_s < 5


def test_report_of_a_removed_replica_is_dropped():
    tracker = LoadTracker(["0", "1"])
    tracker.remove("0")
    tracker.observe(report("0"))
    assert tracker.replica_ids == ["1"]


@pytest.mark.parametrize(
    ("figures", "load"),
    [
        ({}, 2),
        ({"num_unfinished": 7}, 7),
        ({"num_unfinished": 1}, 2),
        ({"num_running": 3, "num_waiting": 4}, 7),
        ({"num_running": 9}, 2),
    ],
)
def test_load_is_the_greater_of_counted_and_reported(figures, load):
    now = time.monotonic()
    snapshot = LoadSnapshot(
        replica_id="0", state=SERVING, in_flight=2, measured_at=now - 1, **figures
    )
    assert snapshot.load(now, max_age_s=5) == load
    assert snapshot.load(now, max_age_s=0.5) == 2


def test_failed_mark_sticks_until_a_report_of_serving():
    tracker = LoadTracker(["0"], state=SERVING)
    tracker.mark("0", FAILED, "actor died")
    tracker.observe(report(state=ReplicaState.UPDATING))
    assert snapshot_of(tracker, "0").state is FAILED
    assert snapshot_of(tracker, "0").reason == "actor died"
    tracker.observe(report(state=SERVING))
    assert snapshot_of(tracker, "0").state is SERVING
    assert snapshot_of(tracker, "0").reason == ""


def test_report_asked_for_before_a_mark_does_not_undo_it():
    tracker = LoadTracker(["0"], state=SERVING)
    asked_at = time.monotonic()
    tracker.mark("0", FAILED, "actor died")
    tracker.observe(report(num_unfinished=4), asked_at=asked_at - 1)
    assert snapshot_of(tracker, "0").state is FAILED
    assert snapshot_of(tracker, "0").num_unfinished == 4


def test_membership_changes_keep_order_and_late_releases():
    tracker = LoadTracker(["a", "b"], state=SERVING)
    tracker.reserve("a")
    tracker.remove("a")
    tracker.add("c")
    assert tracker.replica_ids == ["b", "c"]
    assert (tracker.in_flight("a"), tracker.total_in_flight) == (1, 1)
    with pytest.raises(ValueError, match="'a', which is tracked"):
        tracker.add("a")
    tracker.release("a")
    assert tracker.total_in_flight == 0
    with pytest.raises(KeyError):
        tracker.release("a")


def test_ids_must_differ():
    with pytest.raises(ValueError, match="must be new, got '0'"):
        LoadTracker(["0", "0"])


def test_pickled_copy_keeps_states_and_starts_an_empty_ledger():
    tracker = LoadTracker(["a", "b"], state=SERVING)
    tracker.reserve("a")
    tracker.mark("b", FAILED, "gone")
    tracker.observe(report("a", num_unfinished=3))
    copy = pickle.loads(pickle.dumps(tracker))
    assert copy.replica_ids == ["a", "b"]
    assert copy.total_in_flight == 0
    assert snapshot_of(copy, "a") == LoadSnapshot(replica_id="a", state=SERVING)
    assert snapshot_of(copy, "b").reason == "gone"
    copy.reserve("a")
    assert tracker.in_flight("a") == 1


@pytest.mark.parametrize("_", range(20))
def test_threads_leave_the_counts_at_zero(_):
    tracker = LoadTracker(["0", "1"])
    gate = threading.Barrier(4)

    def work(replica_id):
        gate.wait()
        for _ in range(100):
            tracker.reserve(replica_id)
            tracker.release(replica_id)

    threads = [threading.Thread(target=work, args=(str(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [s.in_flight for s in tracker.snapshots()] == [0, 0]


def test_one_thread_may_hold_the_lock_and_count():
    tracker = LoadTracker(["0"])
    with tracker.lock:
        tracker.reserve("0")
        tracker.release("0")
    assert tracker.total_in_flight == 0


class Owner:
    """Has a monitor and is asked by it, as a service is."""

    def __init__(self):
        self.tracker = LoadTracker(["0"], state=SERVING)
        self.monitor = LoadMonitor(self.tracker, self.replicas, interval_s=0.5)

    def replicas(self):
        return [Replica("0", "handle")]


@pytest.mark.parametrize("name", ["interval_s", "timeout_s"])
def test_monitor_settings_are_refused_by_name(name):
    with pytest.raises(UnsupportedArgumentError, match=f"{name} must be greater than 0, got 0"):
        LoadMonitor(LoadTracker([]), list, **{name: 0})


def test_monitor_does_not_keep_its_owner_alive_and_pickles_unstarted():
    owner = Owner()
    copy = pickle.loads(pickle.dumps(owner))
    assert not copy.monitor.is_running
    assert copy.monitor._tracker is copy.tracker
    assert copy.monitor._replicas()() == [Replica("0", "handle")]
    gone = owner.monitor
    del owner
    gc.collect()
    assert gone._replicas() is None


def test_readers_tell_an_answer_from_a_failure():
    own, bare = ReportReader(), BareActorReader()
    assert own.read("0", [report(num_running=1)]).num_running == 1
    with pytest.raises(ZeroDivisionError):
        own.read("0", [ZeroDivisionError()])
    with pytest.raises(TypeError, match="must return an EngineReport, got 7"):
        own.read("0", [7])
    assert bare.read("0", [3, RuntimeError()]) == report(num_unfinished=3)
    assert bare.read("0", [RuntimeError(), 0.5]) == report(kv_cache_usage=0.5)

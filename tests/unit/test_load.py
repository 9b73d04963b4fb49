"""The ledger: exact counts, last reports, marks; and the monitor before it is started."""

import gc
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from tests.fakes.routing import snapshot
from torchrl_vllm_sync import LoadBalancer, ReplicaState
from torchrl_vllm_sync.errors import LaunchError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineDescription, EngineReport, Replica, Silence
from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker
from torchrl_vllm_sync.routing.monitor import BareActorMonitor, LoadMonitor, _Ask
from torchrl_vllm_sync.service.launch import _check_block_sizes

SERVING, FAILED = ReplicaState.SERVING, ReplicaState.FAILED


class Clock:
    """Stands still until it is moved."""

    now = 1000.0

    def __call__(self):
        return self.now


def snapshot_of(tracker, replica_id):
    return next(s for s in tracker.snapshots() if s.replica_id == replica_id)


def report(replica_id="0", state=SERVING, **figures):
    return EngineReport(replica_id=replica_id, state=state, **figures)


def test_nothing_is_known_before_the_first_report():
    (snapshot,) = LoadTracker(["0"]).snapshots()
    assert snapshot == LoadSnapshot(replica_id="0", state=ReplicaState.STARTING)
    assert (snapshot.kv_cache_usage, snapshot.num_elsewhere, snapshot.measured_at) == (None,) * 3
    assert snapshot.as_stats()["age_s"] is None


def test_reserve_and_release_count():
    tracker = LoadTracker(["0", "1"])
    tracker.reserve("1")
    tracker.reserve("1")
    tracker.release("1")
    assert [s.in_flight for s in tracker.snapshots()] == [0, 1]
    assert (tracker.in_flight("1"), tracker.total_in_flight) == (1, 1)


def test_release_without_reserve_names_the_replica():
    with pytest.raises(RuntimeError, match="replica 0 with 0 in flight"):
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
    assert 0 <= snapshot.as_stats()["age_s"] < 5


def test_report_of_a_removed_replica_is_dropped():
    tracker = LoadTracker(["0", "1"])
    tracker.remove("0")
    tracker.observe(report("0"))
    assert tracker.replica_ids == ["1"]


@pytest.mark.parametrize(
    ("figures", "in_flight_then", "elsewhere"),
    [
        ({}, None, None),
        ({"num_unfinished": 7}, None, 5),
        ({"num_unfinished": 7}, 6, 1),  # four of this process have ended since the question
        ({"num_unfinished": 7}, 1, 5),  # one was sent since, and may be in the report
        ({"num_unfinished": 1}, None, 0),
        ({"num_running": 3, "num_waiting": 4}, None, 5),
        ({"num_running": 9}, None, None),
    ],
)
def test_load_is_what_is_counted_here_and_what_others_had(figures, in_flight_then, elsewhere):
    clock = Clock()
    tracker = LoadTracker(["0"], state=SERVING, clock=clock)
    tracker.reserve("0", 2)
    tracker.observe(report(**figures), in_flight_then=in_flight_then)
    clock.now += 1
    snapshot = snapshot_of(tracker, "0")
    assert snapshot.num_elsewhere == elsewhere
    assert snapshot.load(clock(), max_age_s=5) == 2 + (elsewhere or 0)
    assert snapshot.load(clock(), max_age_s=1) == 2 + (elsewhere or 0)
    assert snapshot.load(clock(), max_age_s=0.5) == 2  # too old to count
    tracker.reserve("0", 3)
    assert snapshot_of(tracker, "0").load(clock(), max_age_s=5) == 5 + (elsewhere or 0)


def test_predicted_usage_is_the_engines_figure_and_what_was_reserved_since():
    clock = Clock()
    tracker = LoadTracker(["0"], state=SERVING, clock=clock)

    def usage(max_age_s=5.0):
        return snapshot_of(tracker, "0").predicted_usage(clock(), max_age_s)

    assert usage() is None
    tracker.reserve("0", 1, tokens=300)
    assert usage() is None
    tracker.describe("0", block_size=10, num_kv_blocks=100)
    assert usage() == 0.3
    tracker.observe(report(kv_cache_usage=0.5))
    assert usage() == 0.5
    tracker.reserve("0", 1, tokens=200)
    assert usage() == 0.7
    tracker.release("0", 1, tokens=300)
    assert usage() == 0.5  # what was given back since is not taken off: others may have it
    clock.now += 10
    assert usage() == 0.2


@pytest.mark.parametrize(
    ("figures", "fits"),
    [
        ({}, True),
        ({"held_tokens": 10**9}, True),
        ({"kv_cache_tokens": 1000, "held_tokens": 800}, True),
        ({"kv_cache_tokens": 1000, "held_tokens": 801}, False),
        ({"kv_cache_tokens": 1000, "kv_cache_usage": 0.79, "measured_at": 0.0}, True),
        ({"kv_cache_tokens": 1000, "kv_cache_usage": 0.81, "measured_at": 0.0}, False),
        ({"kv_cache_tokens": 1000, "kv_cache_usage": 0.81, "measured_at": -9.0}, True),
        ({"kv_cache_usage": 0.89, "measured_at": 0.0}, True),
        ({"kv_cache_usage": 0.91, "measured_at": 0.0}, False),
    ],
)
def test_there_is_room_up_to_nine_tenths_of_the_cache(figures, fits):
    record = snapshot("0", **figures)
    assert record.has_room(100, 0.0, 5.0) is fits


def test_a_cache_is_described_once_for_all_replicas():
    tracker = LoadTracker(["0", "1"], state=SERVING)
    tracker.describe("0", block_size=16, num_kv_blocks=10)
    tracker.describe("1", block_size=16, num_kv_blocks=None)
    assert [(one.block_size, one.kv_cache_tokens) for one in tracker.snapshots()] == [
        (16, 160),
        (16, None),
    ]
    before = tracker.snapshots()
    with pytest.raises(KeyError, match=r"one of \['0', '1'\], got '7'"):
        tracker.describe("7", block_size=16, num_kv_blocks=10)
    assert tracker.snapshots() == before
    tracker.remove("0")
    tracker.describe("1", block_size=32, num_kv_blocks=10)  # the only one left
    assert snapshot_of(tracker, "1").kv_cache_tokens == 320


def test_engines_with_other_block_sizes_are_not_launched():
    def described(replica_id, block_size):
        return EngineDescription(
            replica_id=replica_id, node_ip="", pid=1, max_model_len=1, vocab_size=1,
            block_size=block_size, num_kv_blocks=1, vllm_version="",
        )  # fmt: skip

    _check_block_sizes([])
    _check_block_sizes([described("0", 16), described("1", 16)])
    with pytest.raises(LaunchError) as caught:
        _check_block_sizes([described("0", 16), described("1", 16), described("2", 32)])
    for told in ("0: its KV-cache blocks have 16 tokens", "2: its KV-cache blocks have 32 tokens"):
        assert told in str(caught.value)


def test_what_a_mark_has_checked_cannot_change_before_it_is_made(monkeypatch):
    """Nor can another thread remove the replica meanwhile; ``set_floor`` checks nothing before."""
    tracker, could_others, changing = LoadTracker(["0"], state=SERVING), [], LoadTracker._changing

    def watched(self, replica_id):
        with ThreadPoolExecutor(1) as other:
            could_others.append(other.submit(self.lock.acquire, blocking=False).result(10))
            if could_others[-1]:
                other.submit(self.lock.release).result(10)
        return changing(self, replica_id)

    monkeypatch.setattr(LoadTracker, "_changing", watched)
    assert tracker.mark("0", ReplicaState.FAILED, "gone")
    assert not tracker.mark("7", ReplicaState.FAILED, "never there")
    tracker.set_floor("0", 1)
    assert could_others == [False, True]


def test_a_balancers_interval_is_refused_by_name():
    with pytest.raises(UnsupportedArgumentError, match="monitor_interval_s must be greater than 0"):
        LoadBalancer([object()], monitor_interval_s=0)


def test_failed_mark_sticks_until_a_report_of_serving():
    tracker = LoadTracker(["0"], state=SERVING)
    tracker.mark("0", FAILED, "actor died")
    tracker.observe(report(state=ReplicaState.UPDATING))
    assert snapshot_of(tracker, "0").state is FAILED
    assert snapshot_of(tracker, "0").reason == "actor died"
    tracker.observe(report(state=SERVING))
    assert snapshot_of(tracker, "0").state is SERVING
    assert snapshot_of(tracker, "0").reason == ""


def test_a_failed_replica_that_wakes_and_says_it_is_stale_is_stale():
    tracker = LoadTracker(["0"], state=SERVING)
    tracker.mark("0", FAILED, "silent")
    tracker.observe(report(state=ReplicaState.STALE))
    assert snapshot_of(tracker, "0").state is ReplicaState.STALE


def test_below_its_floor_a_replica_counts_as_stale_whatever_it_says():
    tracker = LoadTracker(["0", "1"], state=SERVING)
    tracker.set_floor("0", 5)
    for state in (SERVING, ReplicaState.UPDATING):
        assert snapshot_of(tracker, "0").state is ReplicaState.STALE
        assert snapshot_of(tracker, "0").reason == "it did not reach version 5"
        tracker.observe(report("0", state=state, weight_version=4))
        tracker.observe(report("1", state=state, weight_version=4))
        assert snapshot_of(tracker, "1").state is state
        with tracker.lock:
            assert [one.replica_id for one in tracker.candidates()] == ["1"]
    tracker.set_floor("0", 3)  # a floor is never lowered
    tracker.observe(report("0", state=SERVING, weight_version=4))
    assert snapshot_of(tracker, "0").state is ReplicaState.STALE
    tracker.observe(report("0", state=FAILED, weight_version=4))
    assert snapshot_of(tracker, "0").state is FAILED
    tracker.observe(report("0", state=SERVING, weight_version=5))
    assert snapshot_of(tracker, "0").state is SERVING
    tracker.observe(report("0", state=SERVING, weight_version=4))  # what it was behind is over
    assert snapshot_of(tracker, "0").state is SERVING


def test_report_asked_for_before_a_mark_does_not_undo_it():
    tracker = LoadTracker(["0"], state=SERVING)
    asked_at = time.monotonic()
    tracker.mark("0", FAILED, "actor died")
    tracker.observe(report(num_unfinished=4), asked_at=asked_at - 1)
    assert snapshot_of(tracker, "0").state is FAILED
    assert snapshot_of(tracker, "0").num_unfinished == 4


def test_report_asked_for_before_the_last_one_is_dropped():
    clock = Clock()
    tracker = LoadTracker(["0"], state=SERVING, clock=clock)
    asked_at = clock()
    tracker.set_floor("0", 5)
    clock.now += 1
    tracker.observe(report(weight_version=5, num_unfinished=1), asked_at=clock())
    late = report(state=ReplicaState.STALE, weight_version=4, num_unfinished=9)
    tracker.observe(late, asked_at=asked_at)  # from before the push that the first is from after
    known = snapshot_of(tracker, "0")
    assert (known.state, known.weight_version, known.num_unfinished) == (SERVING, 5, 1)
    tracker.renew("0", ReplicaState.STARTING)
    tracker.observe(late, asked_at=clock())
    assert snapshot_of(tracker, "0").state is ReplicaState.STALE


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


def test_the_newest_version_outlives_the_replica_that_held_it():
    tracker = LoadTracker(["0", "1"])
    assert tracker.newest_version == 0
    tracker.observe(report("0", weight_version=7))
    tracker.observe(report("1", weight_version=5))
    tracker.mark("0", FAILED)
    tracker.renew("0", ReplicaState.STARTING)
    tracker.observe(report("0", ReplicaState.STARTING))
    tracker.observe(report("0", ReplicaState.STALE, weight_version=0))
    assert tracker.newest_version == 7
    tracker.remove("0")
    assert tracker.newest_version == 7


def test_pickled_copy_keeps_states_and_starts_an_empty_ledger():
    tracker = LoadTracker(["a", "b"], state=SERVING)
    tracker.reserve("a")
    tracker.mark("b", FAILED, "gone")
    tracker.observe(report("a", num_unfinished=3))
    tracker.describe("b", block_size=16, num_kv_blocks=8)
    copy = pickle.loads(pickle.dumps(tracker))
    assert copy.replica_ids == ["a", "b"]
    assert copy.total_in_flight == 0
    assert snapshot_of(copy, "a") == LoadSnapshot(replica_id="a", state=SERVING)
    assert snapshot_of(copy, "b").reason == "gone"
    assert (snapshot_of(copy, "b").block_size, snapshot_of(copy, "b").kv_cache_tokens) == (16, 128)
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


def test_monitor_does_not_keep_its_owner_alive():
    owner = Owner()
    assert owner.monitor._replicas()() == [Replica("0", "handle")]
    gone = owner.monitor
    del owner
    gc.collect()
    assert gone._replicas() is None


@pytest.fixture
def owed():
    """A monitor with a limit of 10 s, and an answer that it is owed since a moment ago."""
    clock, tracker = Clock(), LoadTracker(["0"], state=SERVING)
    monitor = LoadMonitor(tracker, list, unresponsive_after_s=10.0)
    ask = _Ask(Replica("0", "handle"), [], 0.0, 0, Silence(clock))

    def pass_time(seconds):
        for _ in range(seconds):
            clock.now += 1
            monitor._judge(ask)
        return snapshot_of(tracker, "0").state

    return SimpleNamespace(clock=clock, tracker=tracker, monitor=monitor, pass_time=pass_time)


def test_a_silent_actor_is_marked_once(owed):
    assert owed.pass_time(10) is SERVING
    assert owed.pass_time(1) is FAILED
    assert snapshot_of(owed.tracker, "0").reason == "its actor has not answered for 11.0 s"
    owed.tracker.mark("0", SERVING)  # by somebody who knows better
    assert owed.pass_time(100) is SERVING


def test_a_process_that_was_stopped_takes_nobody_for_silent(owed):
    owed.clock.now += 3600
    assert owed.pass_time(5) is SERVING


def test_a_starting_actor_owes_no_answer_until_it_has_started(owed):
    owed.tracker.mark("0", ReplicaState.STARTING)
    assert owed.pass_time(300) is ReplicaState.STARTING
    owed.tracker.mark("0", SERVING)
    assert owed.pass_time(10) is SERVING
    assert owed.pass_time(1) is FAILED


def test_a_replica_that_was_closed_has_not_failed(owed):
    owed.tracker.observe(report(state=ReplicaState.CLOSED))
    assert owed.pass_time(100) is ReplicaState.CLOSED
    owed.monitor._mark_failed("0", "its actor died")
    assert snapshot_of(owed.tracker, "0").state is ReplicaState.CLOSED


def test_readers_tell_an_answer_from_a_failure():
    own, bare = (kind(LoadTracker([]), list) for kind in (LoadMonitor, BareActorMonitor))
    assert own.read("0", [report(num_running=1)]).num_running == 1
    with pytest.raises(ZeroDivisionError):
        own.read("0", [ZeroDivisionError()])
    with pytest.raises(TypeError, match="must return an EngineReport, got 7"):
        own.read("0", [7])
    assert bare.read("0", [3, RuntimeError()]) == report(num_unfinished=3)
    assert bare.read("0", [RuntimeError(), 0.5]) == report(kv_cache_usage=0.5)


def test_the_monitor_outlives_an_error_of_the_cluster(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("torchrl_vllm_sync.routing.monitor._connection", lambda: ("node", "job"))
    rounds, again = [], threading.Event()

    def replicas():
        rounds.append(1)
        if len(rounds) == 1:
            raise RpcError("the head is busy")
        again.set()
        return []

    monitor = LoadMonitor(LoadTracker([]), replicas, interval_s=0.01)
    monitor.start()
    assert again.wait(10)
    monitor.stop()


class HeldLock:
    """A lock that another thread holds for longer than any limit, until it is let go."""

    def __init__(self):
        self.asked, self.free = threading.Event(), threading.Event()

    def acquire(self, blocking=True, timeout=-1):
        self.asked.set()
        return timeout < 0 and self.free.wait(10)

    def release(self):
        pass

    __enter__ = acquire

    def __exit__(self, *error):
        pass


def test_the_monitor_outlives_a_thread_that_keeps_it_waiting(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("torchrl_vllm_sync.routing.monitor._connection", lambda: ("node", "job"))
    begun, again, lock = threading.Event(), threading.Event(), HeldLock()

    def replicas():
        (again if lock.free.is_set() else begun).set()
        return []

    monitor = LoadMonitor(LoadTracker([]), replicas, interval_s=0.01)
    monitor.start()
    assert begun.wait(10)
    monkeypatch.setattr("ray._private.worker._connect_or_shutdown_lock", lock)
    assert lock.asked.wait(10)
    lock.free.set()
    assert again.wait(1)
    monitor.stop()

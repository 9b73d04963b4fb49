"""An actor that falls silent is marked, and can be ended with all that it started."""

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from torchrl_vllm_sync import ReplicaState  # noqa: E402
from torchrl_vllm_sync.engine.args import end_replica, own_processes  # noqa: E402
from torchrl_vllm_sync.replica import (  # noqa: E402
    EngineReport,
    ProcessId,
    Replica,
    ReplicaProcesses,
    Silence,
)
from torchrl_vllm_sync.routing.ledger import LoadTracker  # noqa: E402
from torchrl_vllm_sync.routing.monitor import LoadMonitor  # noqa: E402
from torchrl_vllm_sync.service.launch import MAX_CONCURRENT_CALLS  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SERVING, STARTING, FAILED = ReplicaState.SERVING, ReplicaState.STARTING, ReplicaState.FAILED
INTERVAL_S, LIMIT_S = 0.1, 1.5


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


class Reporting:
    """Reports, and has a child, a grandchild and shared memory."""

    def __init__(self):
        self.memory = SharedMemory(create=True, size=4096)
        self.lock = multiprocessing.get_context("spawn").RLock()  # has a semaphore
        script = "import subprocess; subprocess.run(['sleep', '1000'])"
        self.child = subprocess.Popen([sys.executable, "-c", script])

    def report(self):
        return EngineReport(replica_id="0", state=SERVING, weight_version=3)

    def processes(self):
        return own_processes()

    def shared(self):
        semaphore = self.lock._semlock.name.replace("/", "sem.")
        return [Path("/dev/shm", self.memory.name), Path("/dev/shm", semaphore)]

    async def serve(self):
        await asyncio.sleep(1000)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def actor(cluster):
    actor = ray.remote(num_cpus=0)(Reporting).remote()
    eventually(lambda: len(ray.get(actor.processes.remote()).processes) == 4)
    yield actor
    ray.kill(actor)


def eventually(condition, timeout_s=120.0):  # of actors that import torch on a busy machine
    """Waits until ``condition()`` is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def watched(actor):
    """The actor's process, and the ledger of a monitor that asks it."""
    tracker = LoadTracker(["0"])
    monitor = LoadMonitor(
        tracker,
        lambda: [Replica("0", actor)],
        interval_s=INTERVAL_S,
        unresponsive_after_s=LIMIT_S,
    )
    monitor.start()
    pid = ray.get(actor.processes.remote()).processes[0].pid
    yield psutil.Process(pid), tracker
    monitor.stop()


def state(tracker):
    (snapshot,) = tracker.snapshots()
    return snapshot.state


def test_a_silent_actor_is_marked_and_its_next_report_decides(watched):
    process, tracker = watched
    eventually(lambda: state(tracker) is SERVING)
    process.suspend()
    eventually(lambda: state(tracker) is FAILED)
    (marked,) = tracker.snapshots()
    assert marked.marked_at - marked.asked_at > LIMIT_S  # since the last question that was answered
    assert "its actor has not answered for" in marked.reason
    marked_at = marked.marked_at
    time.sleep(5 * INTERVAL_S)
    assert tracker.snapshots()[0].marked_at == marked_at  # marked once, whatever others mark later
    process.resume()
    eventually(lambda: state(tracker) is SERVING)


def test_a_report_that_was_asked_for_before_the_mark_is_no_news(watched, monkeypatch):
    process, tracker = watched
    eventually(lambda: state(tracker) is SERVING)
    process.suspend()
    eventually(lambda: state(tracker) is FAILED)
    observe, taken = tracker.observe, []

    def watch(report, *, asked_at, in_flight_then):
        observe(report, asked_at=asked_at, in_flight_then=in_flight_then)
        taken.append((asked_at > tracker.snapshots()[0].marked_at, state(tracker)))

    monkeypatch.setattr(tracker, "observe", watch)
    process.resume()
    eventually(lambda: len(taken) >= 2)
    assert taken[:2] == [(False, FAILED), (True, SERVING)]


def test_an_actor_that_starts_may_be_silent(watched, monkeypatch):
    """It builds its engine meanwhile, in the thread that would answer."""
    process, tracker = watched
    eventually(lambda: state(tracker) is SERVING)
    process.suspend()
    tracker.mark("0", STARTING)
    time.sleep(2 * LIMIT_S)
    assert state(tracker) is STARTING
    looked, reset = threading.Event(), Silence.reset
    monkeypatch.setattr(Silence, "reset", lambda silence: (reset(silence), looked.set()))
    begun = time.monotonic()
    assert looked.wait(120)
    tracker.mark("0", SERVING)  # silence counts from the last look before
    eventually(lambda: state(tracker) is FAILED)
    assert tracker.snapshots()[0].marked_at - begun > LIMIT_S
    process.resume()


def test_without_a_limit_a_silent_actor_stays_what_it_was(actor):
    tracker = LoadTracker(["0"])
    monitor = LoadMonitor(tracker, lambda: [Replica("0", actor)], interval_s=INTERVAL_S)
    monitor.start()
    process = psutil.Process(ray.get(actor.processes.remote()).processes[0].pid)
    eventually(lambda: state(tracker) is SERVING)
    process.suspend()
    time.sleep(2 * LIMIT_S)
    assert state(tracker) is SERVING
    process.resume()
    monitor.stop()


def is_running(pid):
    """Whether it has not ended; what has, and was not yet waited for, holds nothing any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_actor_with_thousands_of_requests_is_not_silent(cluster):
    """With fewer calls at a time than requests the report would wait for one of them to end."""
    options = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENT_CALLS}
    actor = ray.remote(Reporting).options(**options).remote()
    requests = [actor.serve.remote() for _ in range(5000)]
    assert ray.get(actor.report.remote(), timeout=50).state is SERVING
    ray.kill(actor)
    del requests


def gone(processes):
    return not any(is_running(one.pid) for one in processes.processes)


@pytest.mark.parametrize("stopped", [(), (0,), (0, 1, 2, 3), (1,)])
def test_everything_of_a_replica_is_ended(actor, stopped):
    processes = ray.get(actor.processes.remote())
    shared = ray.get(actor.shared.remote())
    assert all(one.exists() for one in shared)
    for index in stopped:
        os.kill(processes.processes[index].pid, signal.SIGSTOP)
    end_replica(actor, processes)
    assert gone(processes)
    assert not any(one.exists() for one in shared)  # which nobody else would remove


def test_what_outlived_its_actor_is_ended(actor):
    processes = ray.get(actor.processes.remote())
    orphan = subprocess.Popen(["sleep", "1000"])  # stands for what Ray did not end
    with_orphan = (*processes.processes, *_as_ids(orphan.pid))
    ray.kill(actor)
    eventually(lambda: gone(processes))
    end_replica(actor, ReplicaProcesses(processes.node_id, with_orphan))
    assert orphan.wait(timeout=30) == -signal.SIGKILL


def test_a_later_process_of_the_same_number_is_left_alone(actor):
    processes = ray.get(actor.processes.remote())
    bystander = subprocess.Popen(["sleep", "1000"])
    (found,) = _as_ids(bystander.pid)
    earlier = ProcessId(found.pid, found.began - 1)
    end_replica(actor, ReplicaProcesses(processes.node_id, (*processes.processes, earlier)))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_node_that_is_gone_has_taken_everything_with_it(actor):
    processes = ray.get(actor.processes.remote())
    end_replica(actor, ReplicaProcesses("ab" * 28, processes.processes))


def test_a_replica_of_which_nothing_is_known_is_killed_all_the_same(actor):
    processes = ray.get(actor.processes.remote())
    end_replica(actor, None)
    eventually(lambda: not is_running(processes.processes[0].pid))


def _as_ids(pid):
    from torchrl_vllm_sync.replica import process_began

    return (ProcessId(pid, process_began(pid)),)

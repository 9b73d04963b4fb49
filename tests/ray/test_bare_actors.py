"""A balancer over bare Ray actors: the monitor learns their load, and of their death."""

import gc
import logging
import os
import threading
import time

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from torchrl_vllm_sync import ReplicaState  # noqa: E402
from torchrl_vllm_sync.replica import EngineReport, Replica  # noqa: E402
from torchrl_vllm_sync.routing.balancer import LoadBalancer  # noqa: E402
from torchrl_vllm_sync.routing.ledger import LoadTracker  # noqa: E402
from torchrl_vllm_sync.routing.monitor import (  # noqa: E402
    BareActorMonitor,
    LoadMonitor,
    staying_connected,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

INTERVAL_S = 0.1


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def fake_engine(cluster):
    @ray.remote(num_cpus=0, max_concurrency=2)
    class FakeEngine:
        def __init__(self, unfinished=0, usage=0.0):
            self.unfinished, self.usage, self.calls = unfinished, usage, 0
            self.gate = threading.Event()
            self.gate.set()

        def set(self, unfinished, usage):
            self.unfinished, self.usage = unfinished, usage

        def hang(self):
            self.gate.clear()

        def go_on(self):
            self.gate.set()

        def num_calls(self):
            return self.calls

        def get_num_unfinished_requests(self):
            self.calls += 1
            self.gate.wait()
            return self.unfinished

        def get_cache_usage(self):
            if self.usage is None:
                raise NotImplementedError("no cache figures")
            return self.usage

        def report(self):
            self.gate.wait()
            return EngineReport(
                replica_id="a", state=ReplicaState.SERVING, num_running=self.unfinished
            )

    return FakeEngine


@pytest.fixture
def balancer_of():
    balancers = []

    def make(actors, *args, **kwargs):
        balancers.append(LoadBalancer(actors, *args, monitor_interval_s=INTERVAL_S, **kwargs))
        return balancers[-1]

    yield make
    for balancer in balancers:
        balancer.close()


def eventually(condition, timeout_s=120.0):  # of actors that import torch on a busy machine
    """Waits until ``condition()`` is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


def column(balancer, key):
    return [entry[key] for entry in balancer.get_stats()["actor_stats"]]


def monitor_threads():
    return [t for t in threading.enumerate() if t.name == "load-monitor"]


def test_monitor_learns_and_follows_the_engines_figures(fake_engine, balancer_of):
    actors = [fake_engine.remote(3, 0.25), fake_engine.remote(5, 0.5)]
    balancer = balancer_of(actors, "kv-cache")
    assert balancer.select_actor() in (0, 1)  # decides at once, before any figure is known
    eventually(lambda: column(balancer, "cache_usage") == [0.25, 0.5])
    assert column(balancer, "num_unfinished") == [3, 5]
    assert column(balancer, "pending_requests") == [0, 0]
    assert all(age < 5 for age in column(balancer, "age_s"))
    assert {balancer.select_actor() for _ in range(10)} == {0}
    ray.get(actors[0].set.remote(900, 0.75))
    eventually(lambda: column(balancer, "num_unfinished") == [900, 5])
    assert {balancer.select_actor([i] * 20) for i in range(30)} == {1}


def test_killed_actor_is_excluded(fake_engine, balancer_of):
    actors = [fake_engine.remote() for _ in range(3)]
    balancer = balancer_of(actors)
    eventually(lambda: None not in column(balancer, "age_s"))
    ray.kill(actors[1])
    eventually(lambda: column(balancer, "state") == ["serving", "failed", "serving"])
    assert {balancer.select_actor([i] * 20) for i in range(60)} == {0, 2}
    assert "died" in column(balancer, "reason")[1] or "dead" in column(balancer, "reason")[1]


def test_figure_whose_call_fails_stays_unknown(fake_engine, balancer_of):
    balancer = balancer_of([fake_engine.remote(4, None)])
    eventually(lambda: column(balancer, "num_unfinished") == [4])
    assert column(balancer, "cache_usage") == [None]
    assert column(balancer, "state") == ["serving"]


def test_hung_actor_delays_nobody_and_is_not_asked_twice(fake_engine, caplog):
    actors = [fake_engine.remote(1), fake_engine.remote(2)]
    tracker = LoadTracker(["a", "b"], state=ReplicaState.SERVING)
    monitor = BareActorMonitor(
        tracker,
        lambda: [Replica("a", actors[0]), Replica("b", actors[1])],
        interval_s=INTERVAL_S,
        timeout_s=0.3,
    )

    def told():
        """Of the other one too, where the machine is busy."""
        messages = [one.getMessage() for one in caplog.records]
        return [one[:25] for one in messages if one.startswith("replica a: ")]

    ray.get(actors[0].hang.remote())
    with caplog.at_level(logging.WARNING, "torchrl_vllm_sync"):
        monitor.start()
        eventually(lambda: tracker.snapshots()[1].num_unfinished == 2)
        ray.get(actors[1].set.remote(7, 0.0))
        eventually(lambda: tracker.snapshots()[1].num_unfinished == 7)
        eventually(told)
        time.sleep(5 * INTERVAL_S)
    hung = tracker.snapshots()[0]
    assert (hung.state, hung.num_unfinished) == (ReplicaState.SERVING, None)
    assert told() == ["replica a: no answer for "]
    ray.get(actors[0].go_on.remote())
    eventually(lambda: tracker.snapshots()[0].num_unfinished == 1)
    monitor.stop()
    assert ray.get(actors[0].num_calls.remote()) <= ray.get(actors[1].num_calls.remote())


def test_own_actors_reports_are_taken_and_a_restarted_actor_is_asked_anew(fake_engine):
    replicas = [Replica("a", fake_engine.remote(6))]
    tracker = LoadTracker(["a"])
    monitor = LoadMonitor(tracker, lambda: list(replicas), interval_s=INTERVAL_S)
    monitor.start()
    monitor.start()
    eventually(lambda: tracker.snapshots()[0].num_running == 6)
    assert tracker.snapshots()[0].state is ReplicaState.SERVING
    ray.kill(replicas[0].actor)
    eventually(lambda: tracker.snapshots()[0].state is ReplicaState.FAILED)
    replicas[0] = Replica("a", fake_engine.remote(8))
    eventually(lambda: tracker.snapshots()[0].state is ReplicaState.SERVING)
    assert tracker.snapshots()[0].num_running == 8
    monitor.stop()
    monitor.stop()
    assert monitor._thread is None


def test_copy_in_another_process_has_a_monitor_of_its_own(fake_engine, balancer_of):
    balancer = balancer_of([fake_engine.remote(3, 0.25), fake_engine.remote(5, 0.5)])
    balancer.reserve([1, 2, 3])

    @ray.remote(num_cpus=0)
    def stats_of(copy):
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            stats = [
                (entry["num_unfinished"], entry["pending_requests"])
                for entry in copy.get_stats()["actor_stats"]
            ]
            if stats[0][0] is not None and stats[1][0] is not None:
                break
            time.sleep(0.02)
        copy.close()
        return stats

    assert ray.get(stats_of.remote(balancer), timeout=200) == [(3, 0), (5, 0)]


def test_balancer_that_is_dropped_ends_its_thread(fake_engine):
    eventually(lambda: not monitor_threads())
    actor = fake_engine.remote()
    balancer = LoadBalancer([actor], monitor_interval_s=INTERVAL_S)
    assert len(monitor_threads()) == 1
    del balancer
    gc.collect()
    eventually(lambda: not monitor_threads())


def test_actor_without_the_methods_is_told_of_once(cluster, caplog):
    @ray.remote(num_cpus=0)
    class Bare:
        def get_num_unfinished_requests(self):
            return 0

    with caplog.at_level(logging.WARNING, "torchrl_vllm_sync"):
        balancer = LoadBalancer([Bare.remote()], monitor_interval_s=INTERVAL_S)
        eventually(lambda: caplog.records)
        time.sleep(3 * INTERVAL_S)
    assert balancer.select_actor() == 0
    balancer.close()
    (record,) = caplog.records
    assert "get_cache_usage" in record.getMessage()


def test_monitor_survives_the_end_of_ray_and_leaves_a_new_cluster_alone(fake_engine):
    """Last: it restarts the cluster."""
    balancer = LoadBalancer([fake_engine.remote(1)], monitor_interval_s=INTERVAL_S)
    eventually(lambda: column(balancer, "num_unfinished") == [1])
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    eventually(lambda: not monitor_threads())
    assert balancer.select_actor() == 0
    balancer.close()
    del balancer
    gc.collect()  # Ray ends a process whose other threads drop handles while it shuts down

    balancer = LoadBalancer([object()], monitor_interval_s=INTERVAL_S)
    ray.shutdown()
    eventually(lambda: not monitor_threads())
    assert not ray.is_initialized()
    assert balancer.select_actor() == 0


def test_ray_is_not_shut_down_in_the_middle_of_a_question():
    """Ray ends the process of a thread that calls it after that."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
    begun, connected = threading.Event(), []

    class Slow(LoadMonitor):
        def ask(self, replica):
            begun.set()
            time.sleep(1.0)
            connected.append(ray.is_initialized())
            return [ray.put(replica.replica_id)]

        def read(self, replica_id, answers):
            raise TypeError("no report")

    monitor = Slow(LoadTracker(["0"]), lambda: [Replica("0", None)], interval_s=INTERVAL_S)
    monitor.start()
    assert begun.wait(10)
    ray.shutdown()
    assert connected == [True]
    eventually(lambda: not monitor._thread.is_alive())
    with staying_connected() as is_connected:
        assert not is_connected

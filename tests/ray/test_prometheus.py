"""Metrics as Prometheus gets them from a real Ray node."""

import gc
import logging
import os
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from torchrl_vllm_sync import MetricsExporter, ReplicaState, ReplicaStatus, ServiceStatus  # noqa: E402
from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError  # noqa: E402
from torchrl_vllm_sync.replica import EngineCounters, LoadReport, PushReport  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PUSH = PushReport(
    began_at=0.5,
    seconds=0.5,
    version=3,
    num_bytes=64,
    phases={"send_s": 0.25},
    replicas=[LoadReport(replica_id="0", version=3, load_s=0.02)],
    left_behind={"1": "it died"},
)


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        logging_level=logging.ERROR,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield
    ray.shutdown()


@pytest.fixture
def scrape(cluster):
    """Returns a function: name and tags of each metric of a service to its value, as scraped."""
    for needed in ("aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus"):
        pytest.importorskip(needed, reason="ray[default] is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def scraped(service):
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        return {
            (one.name.removeprefix("ray_torchrl_vllm_sync_"), *tags_of(one.labels)): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.labels.get("service") == service
        }

    return scraped


def tags_of(labels):
    """Values of the tags that are this library's, and of a bucket's bound."""
    ours = ("replica", "state", "phase", "end", "le")
    return [labels[name] for name in ours if name in labels]


class Service:
    """A service that says what it is told to."""

    def __init__(self, name):
        self.name, self.replicas, self.listeners, self.is_closed = name, [], [], False
        self.totals = {"answered": 0, "lost": 0}
        self.weights = SimpleNamespace(log=self)
        self.requests = SimpleNamespace(counts=SimpleNamespace(totals=lambda: self.totals))

    def serve(self, *replicas):
        self.replicas = replicas

    def status(self):
        if self.is_closed:
            raise ServiceClosedError("it was shut down")
        return ServiceStatus(
            name=self.name, time=0.0, weight_version=3, in_flight=2, replicas=tuple(self.replicas)
        )

    def listen(self, listener):
        self.listeners.append(listener)
        return self.listeners.clear


def replica(name="0", tokens=40, **figures):
    counters = None if tokens is None else EngineCounters(num_generated_tokens=tokens)
    return ReplicaStatus(
        replica_id=name,
        **{"state": ReplicaState.SERVING, "in_flight": 2, "counters": counters, **figures},
    )


def eventually(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def threads():
    return [one for one in threading.enumerate() if one.name == "metrics-exporter"]


def test_prometheus_finds_what_the_service_says(scrape):
    service = Service("found")
    service.serve(replica(kv_cache_usage=0.25, weight_version=3), replica("1", num_waiting=4))
    service.totals = {"answered": 7, "lost": 0}
    with MetricsExporter(service, interval_s=0.2):
        service.totals = {"answered": 12, "lost": 1}
        (push,) = service.listeners
        push(PUSH)
        push(PUSH)
        wanted = {
            ("pushes_total", "committed"): 2,
            ("weight_version",): 3,
            ("replica_state", "0", "serving"): 1,
            ("replica_state", "0", "failed"): 0,
            ("replica_in_flight", "0"): 2,
            ("replica_kv_cache_usage", "0"): 0.25,
            ("replica_weight_version", "0"): 3,
            ("replica_waiting", "1"): 4,
            ("replica_generated_tokens_total", "0"): 40,
            ("requests_total", "answered"): 5,
            ("requests_total", "lost"): 1,
            ("left_behind_total", "1"): 2,
            ("pushed_bytes_total",): 128,
            ("push_seconds_total", "send"): 0.5,
            ("push_seconds_count", "whole"): 2,
            ("push_seconds_bucket", "whole", "0.25"): 0,
            ("push_seconds_bucket", "whole", "0.5"): 2,
            ("replica_push_seconds_count", "0", "load"): 2,
        }
        # Ray may pass on what is exported first before the rest is.
        eventually(lambda: wanted.items() <= scrape("found").items())
        assert ("replica_waiting", "0") not in scrape("found")  # which nobody has said

        # An engine that began anew has counted from 0; what becomes unknown disappears.
        service.serve(replica(tokens=10, weight_version=3))
        eventually(lambda: scrape("found").get(("replica_generated_tokens_total", "0")) == 50)
        states = {("replica_state", "1", str(state)) for state in ReplicaState}
        gone = states | {("replica_kv_cache_usage", "0")}
        eventually(lambda: not gone & scrape("found").keys())
        assert scrape("found")["replica_weight_version", "0"] == 3
    assert not threads()
    gauges = {"weight_version", "replica_state", "replica_in_flight", "replica_weight_version"}
    eventually(lambda: not gauges & {name for name, *_ in scrape("found")})
    assert scrape("found")["pushes_total", "committed"] == 2


def test_what_ends_with_the_exporter_is_exported_all_the_same(scrape):
    service = Service("short")
    exporter = MetricsExporter(service, interval_s=1000)
    eventually(lambda: ("weight_version",) in scrape("short"))
    service.listeners[0](PUSH)
    exporter.stop()
    eventually(lambda: scrape("short").get(("pushes_total", "committed")) == 1)
    exporter.stop()
    assert not exporter.is_running


def test_nothing_is_counted_twice_by_two_exporters_one_after_the_other(scrape):
    service = Service("again")
    for tokens in (30, 40):
        service.serve(replica(tokens=tokens))
        with MetricsExporter(service, interval_s=1000):
            service.totals = {"answered": tokens, "lost": 0}
            service.listeners[0](PUSH)
    wanted = {
        ("pushes_total", "committed"): 2,
        ("replica_generated_tokens_total", "0"): 40,
        ("requests_total", "answered"): 40,
    }
    eventually(lambda: wanted.items() <= scrape("again").items())


def test_the_thread_ends_with_the_service(cluster):
    service = Service("closed")
    exporter = MetricsExporter(service, interval_s=0.05)
    assert exporter.is_running
    service.is_closed = True
    eventually(lambda: not exporter.is_running)
    assert not service.listeners


def test_the_exporter_keeps_no_service_alive(cluster):
    exporter = MetricsExporter(Service("forgotten"), interval_s=0.05)

    def has_ended():
        gc.collect()  # again and again: the exporter may have been looking at the service
        return not exporter.is_running

    eventually(has_ended)


@pytest.mark.parametrize("interval_s", [0, -1.0, float("inf"), "5"])
def test_intervals_that_are_none_are_refused(interval_s):
    with pytest.raises(UnsupportedArgumentError, match="interval_s must be"):
        MetricsExporter(Service("refused"), interval_s=interval_s)
    assert not threads()


def test_without_ray_nothing_is_exported():
    ray.shutdown()
    exporter = MetricsExporter(Service("alone"), interval_s=0.05)
    eventually(lambda: not exporter.is_running)

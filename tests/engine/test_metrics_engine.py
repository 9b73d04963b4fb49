"""Metrics, loggers and timelines of a service with real engines."""

import json
import threading
import urllib.request
from pathlib import Path

import pytest
import ray
from torchrl.record.loggers import CSVLogger
from vllm import SamplingParams

from tests.engine.checks import perturbed
from tests.engine.requests import endless, eventually, slowed
from torchrl_vllm_sync import attach, log_pushes, save_timeline
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.metrics import metrics_port

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def ended(service, before):
    """How many requests have ended since, by how they did."""
    now = service.requests.counts.totals()
    return {end: now[end] - before[end] for end in now if now[end] != before[end]}


def test_requests_are_counted_by_how_they_end(service):
    before = service.requests.counts.totals()
    service.generate(["Hello", "Bonjour"], PARAMS)
    for _ in service.generate("Hello", PARAMS, stream=True):
        pass
    assert ended(service, before) == {"answered": 3}
    with slowed(service):
        stream = service.generate("Hello", endless(), stream=True)
        next(stream)
        stream.close()
    eventually(lambda: ended(service, before) == {"answered": 3, "cancelled": 1})


def test_one_push_is_logged_drawn_and_counted(service, model, tmp_path):
    logger, reports, ends = CSVLogger("run", str(tmp_path)), [], []
    stops = [
        log_pushes(service, logger),
        service.register_version_hook(reports.append),
        service.weights.log.listen(ends.append),
    ]
    report = service.push_weights(perturbed(model, seed=5))
    for stop in stops:
        stop()
    scalars = Path(logger.experiment.log_dir) / "scalars" / "push"
    assert (scalars / "seconds.csv").read_text() == f"{report.version},{report.seconds}\n"
    slowest = max(one.phases["whole_pause_s"] for one in report.replicas)
    assert (scalars / "replica/whole_pause_s.csv").read_text() == f"{report.version},{slowest}\n"
    assert reports == [report]
    assert [(one.version, one.error) for one in ends] == [(report.version, "")]

    save_timeline(tmp_path / "push.json", report)
    events = json.loads((tmp_path / "push.json").read_text())["traceEvents"]
    pauses = [one for one in events if one["name"] == "whole_pause"]
    (whole,) = [one for one in events if one["name"] == "push"]
    assert len(pauses) == len(report.replicas) == 2
    for one in pauses:
        assert whole["ts"] < one["ts"] < one["ts"] + one["dur"] < whole["ts"] + whole["dur"]


def test_a_service_exports_until_it_is_left(service, caplog):
    with attach(service.name) as copy:
        exporter = copy.export_metrics(interval_s=0.2)
        served = metrics_port() is not None
        assert ("ray[default] must be installed" in caplog.text) == (not served)
        with pytest.raises(UnsupportedArgumentError, match="exported by this process already"):
            copy.export_metrics()
        assert exporter.is_running
    assert not exporter.is_running
    assert "metrics-exporter" not in {one.name for one in threading.enumerate()}


def test_prometheus_finds_the_engines_figures(service):
    for needed in ("aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus"):
        pytest.importorskip(needed, reason="ray[default] is not installed")
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def scraped(metric):
        with urllib.request.urlopen(address, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [one for one in lines if one.startswith(f"ray_torchrl_vllm_sync_{metric}{{")]
        return [float(one.rpartition(" ")[2]) for one in found if f'"{service.name}"' in one]

    def counted():
        reports = service.replicas.call_replicas("report").values()
        return sum(one.counters.num_generated_tokens for one in reports)

    before = counted()
    service.generate(["Hello"] * 4, PARAMS)
    with service.export_metrics(interval_s=0.5):
        eventually(lambda: sum(scraped("replica_generated_tokens_total")) == counted())
        assert counted() >= before + 32
        eventually(lambda: scraped("weight_version") == [service.weight_version])
        eventually(lambda: len(scraped("replica_kv_cache_usage")) == 2)

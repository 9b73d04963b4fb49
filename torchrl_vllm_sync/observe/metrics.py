"""A service's metrics among Ray's own, which Prometheus scrapes: names, numbers, the exporter."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from torchrl_vllm_sync.checks import check_seconds
from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.observe.status import ServiceStatus
from torchrl_vllm_sync.replica import PushReport, ReplicaState, seconds_of
from torchrl_vllm_sync.routing.monitor import staying_connected

# Names are stable. Prometheus sees them behind the ``ray_`` that Ray puts before all its metrics.
PREFIX = "torchrl_vllm_sync_"
# Upper bounds of the histograms' buckets, in seconds.
SECONDS_BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]
SECONDS_BOUNDS += [10.0, 30.0, 60.0, 300.0]
_JOIN_TIMEOUT_S = 10.0
_GONE = math.nan  # what Ray does not show


class Metric(NamedTuple):
    """One metric; its name, which gives its kind too, stands behind ``PREFIX``."""

    name: str
    unit: str
    tags: tuple[str, ...]
    about: str
    figure: str = ""

    @property
    def kind(self) -> str:
        ends = {"total": "counter", "seconds": "histogram"}
        return ends.get(self.name.rpartition("_")[2], "gauge")

    def instrument(self) -> Any:
        """Makes Ray's object for it, and returns what takes a number and tags."""
        from ray.util import metrics

        name, about = PREFIX + self.name, f"{self.about} ({self.unit})"
        if self.kind == "histogram":
            return metrics.Histogram(name, about, SECONDS_BOUNDS, self.tags).observe
        if self.kind == "gauge":
            return metrics.Gauge(name, about, self.tags).set
        return metrics.Counter(name, about, self.tags).inc


# Name, unit, tags beside "service", and the figure of a replica's status that it shows, if it shows
# one as it is; then what it is.
_TABLE = """
weight_version; policy version;
    Newest version that every serving replica is known to hold
replica_state; 0 or 1; replica state
    1 for the state that the replica is in, and 0 for each other
replica_weight_version; policy version; replica; weight_version
    Version that the replica last said it holds
replica_in_flight; samples; replica; in_flight
    Samples that the exporting process has there, exact
replica_running; requests; replica; num_running
    Requests in the engine's running batch
replica_waiting; requests; replica; num_waiting
    Requests queued in the engine
replica_kv_cache_usage; share, 0 to 1; replica; kv_cache_usage
    KV-cache blocks in use
replica_prefix_cache_hit_rate; share, 0 to 1; replica; prefix_cache_hit_rate
    Prompt tokens found in the prefix cache since the engine's start, of those looked up
replica_time_to_first_token; seconds; replica quantile
    From a request's arrival to its first token, over the last 256 requests
replica_inter_token_latency; seconds; replica quantile
    From one token of a request to its next, over the last 4,096 tokens
replica_prompt_tokens_total; tokens; replica; num_prompt_tokens
    Tokens of prompts whose prefill has ended, cached ones included
replica_generated_tokens_total; tokens; replica; num_generated_tokens
    Tokens sampled
replica_preemptions_total; requests; replica; num_preempted
    Times a request lost its KV-cache blocks to others, to be computed anew
replica_restarts_total; restarts; replica; num_restarts
    How often the replica's actor was replaced
requests_total; requests; end
    Requests of the exporting process that ended: answered, lost, failed or cancelled
requests_retried_total; requests;
    How often a request of the exporting process was sent again, after a replica lost or refused it
pushes_total; pushes; end
    Pushes of the exporting process that ended: committed or failed
pushed_bytes_total; bytes;
    Bytes of all tensors of committed pushes, once a push
left_behind_total; pushes; replica
    Pushes that did not bring the replica to their version
push_seconds_total; seconds; phase
    Time of committed pushes, exact, by phase on the trainer's side, and whole
push_seconds; seconds; phase
    Time of a committed push, by phase on the trainer's side, and whole
replica_push_seconds; seconds; replica phase
    Time of a committed push, by phase in the replica
""".strip().splitlines()

METRICS: dict[str, Metric] = {}
for _head, _about in zip(_TABLE[::2], _TABLE[1::2], strict=True):
    _name, _unit, _tags, *_figure = (part.strip() for part in _head.split(";"))
    METRICS[_name] = Metric(_name, _unit, ("service", *_tags.split()), _about.strip(), *_figure)


class Reading(NamedTuple):
    """One number: of a gauge, to add to a counter or its new total, or for a histogram."""

    name: str
    value: float
    tags: tuple[str, ...] = ()  # values of the metric's, but for ``service``


def status_readings(status: ServiceStatus) -> Iterator[Reading]:
    """Yields gauges, and totals of the replicas; nothing of what is not known."""
    yield Reading("weight_version", status.weight_version)
    for one in status.replicas:
        for state in ReplicaState:
            yield Reading("replica_state", state is one.state, (one.replica_id, state.value))
        known = dataclasses.asdict(one)
        known |= known["counters"] or {}
        for name in ("time_to_first_token", "inter_token_latency"):
            if (latency := getattr(one, name)) is not None:
                for quantile, seconds in (("0.5", latency.p50_s), ("0.99", latency.p99_s)):
                    yield Reading(f"replica_{name}", seconds, (one.replica_id, quantile))
        for metric in METRICS.values():
            if (value := known.get(metric.figure)) is not None:
                yield Reading(metric.name, value, (one.replica_id,))


def request_readings(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Reading]:
    """Yields what requests that have ended in between add to counters."""
    for end, total in now.items():
        tags = () if end == "retried" else (end,)
        name = "requests_total" if tags else "requests_retried_total"
        yield Reading(name, total - before[end], tags)


def push_readings(push: PushReport) -> Iterator[Reading]:
    """Yields what one push adds to counters, and what histograms observe of it."""
    yield Reading("pushes_total", 1, ("failed" if push.error else "committed",))
    for replica_id in push.left_behind:
        yield Reading("left_behind_total", 1, (replica_id,))
    if push.error:
        return  # its times are those of time limits, and say nothing of other pushes
    yield Reading("pushed_bytes_total", push.num_bytes or 0)
    for phase, seconds in {"whole": push.seconds, **seconds_of(push.phases)}.items():
        if seconds:  # what took no time did not happen
            for name in ("push_seconds_total", "push_seconds"):
                yield Reading(name, seconds, (phase,))
    for one in push.replicas:
        for phase, seconds in seconds_of(one.phases).items():
            if seconds:
                yield Reading("replica_push_seconds", seconds, (one.replica_id, phase))


def metrics_port() -> int | None:
    """Returns the port at which Ray serves this node's metrics; ``None`` if it does not."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    ports = (one["MetricsExportPort"] for one in ray.nodes() if one["NodeID"] == own)
    return next((port for port in ports if port > 0), None)


# A series of this process's outlives the exporter, so that its next one must not count twice.
_exported_totals: dict[tuple[str, str, tuple[str, ...]], float] = {}


class MetricsExporter:
    """Exports a service's metrics, listed in ``METRICS``, until it is stopped.

    The service's end, or that of the connection to Ray, ends it too. A gauge whose figure has
    become unknown disappears, and so do all at the end. Counters of replicas begin at what these
    have done since they started, those of this process at 0. Let one process export.

    Example:
        >>> exporter = service.export_metrics(interval_s=5.0)
        >>> exporter.stop()

    Args:
        service: The service; held weakly.
        interval_s: Seconds from one export to the next, greater than 0. Ray passes them on at its
            own interval, 10 s unless it is told otherwise.
    """

    def __init__(self, service: Any, *, interval_s: float = 5.0) -> None:
        check_seconds("interval_s", interval_s)
        self._interval_s, self._name = interval_s, service.name
        self._service = weakref.ref(service)
        self._requests = service.requests.counts.totals()
        self._pushes: deque[PushReport] = deque()
        self._unsubscribe = service.weights.log.listen(self._pushes.append)
        self._instruments: dict[str, Any] = {}
        self._shown: set[tuple[str, tuple[str, ...]]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-exporter", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it exports, in this process."""
        return self._thread.is_alive() and not self._stop.is_set()  # a fork has no such thread

    def stop(self) -> None:
        """Exports once more, withdraws every gauge and ends the thread; idempotent."""
        self._unsubscribe()
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._stop.wait(self._interval_s if self._instruments else 0)
                with staying_connected() as is_connected:
                    if not is_connected:
                        return
                    if not self._instruments:
                        self._instruments = {n: one.instrument() for n, one in METRICS.items()}
                    is_last = not self._export() or is_last
                    if is_last:
                        self._show(())
        finally:
            self._unsubscribe()

    def _export(self) -> bool:
        """Exports what is known now; returns whether the service is still there."""
        while self._pushes:
            self._record(push_readings(self._pushes.popleft()))
        try:
            if (service := self._service()) is None:
                return False
            status, requests = service.status(), service.requests.counts.totals()
        except ServiceClosedError:
            return False
        before, self._requests = self._requests, requests
        self._record(request_readings(before, requests))
        self._show(status_readings(status))
        return True

    def _show(self, readings: Iterable[Reading]) -> None:
        """Exports gauges and totals as they are; gauges that are not among them disappear."""
        before, self._shown = self._shown, set()
        for one in readings:
            if METRICS[one.name].kind == "gauge":
                self._shown.add((one.name, one.tags))
                self._record([one])
            else:
                key = (self._name, one.name, one.tags)
                known, _exported_totals[key] = _exported_totals.get(key, 0.0), one.value
                grown = one.value - known if one.value >= known else one.value  # it began anew
                self._record([one._replace(value=grown)])
        self._record(Reading(name, _GONE, tags) for name, tags in before - self._shown)

    def _record(self, readings: Iterable[Reading]) -> None:
        for one in readings:
            metric = METRICS[one.name]
            if one.value or metric.kind == "gauge":  # Ray refuses to add nothing
                tags = dict(zip(metric.tags, (self._name, *one.tags), strict=True))
                self._instruments[one.name](float(one.value), tags=tags)

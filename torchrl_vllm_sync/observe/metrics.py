"""What of a service is exported as metrics: names, and the numbers at one moment.

Names are stable. Prometheus sees them behind the ``ray_`` that Ray puts before all its metrics.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing.monitor import staying_connected

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from torchrl_vllm_sync.observe.status import ReplicaStatus, ServiceStatus
    from torchrl_vllm_sync.replica import PushStatus


PREFIX = "torchrl_vllm_sync_"
WHOLE = "whole"
"""Stands for the whole push among the phases on the trainer's side."""
SECONDS_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Upper bounds of the histograms' buckets, in seconds."""

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Its name, behind ``PREFIX``.
        kind: ``"gauge"``, ``"counter"`` or ``"histogram"``.
        unit: What it is counted in.
        tags: Names of its tags.
        about: What it is.
    """

    name: str
    kind: Kind
    unit: str
    tags: tuple[str, ...]
    about: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One number.

    Attributes:
        name: Name of the metric, behind ``PREFIX``.
        value: A gauge's value, what is added to a counter, or its new total, or what a histogram
            observes.
        tags: Value of each tag of the metric, but for ``service``.
    """

    name: str
    value: float
    tags: tuple[tuple[str, str], ...] = ()


_SERVICE = ("service",)
_REPLICA = ("service", "replica")

METRICS = {
    one.name: one
    for one in (
        Metric(
            "weight_version",
            "gauge",
            "policy version",
            _SERVICE,
            "Newest version that every serving replica is known to hold",
        ),
        Metric(
            "replica_state",
            "gauge",
            "0 or 1",
            (*_REPLICA, "state"),
            "1 for the state that the replica is in, and 0 for each other",
        ),
        Metric(
            "replica_weight_version",
            "gauge",
            "policy version",
            _REPLICA,
            "Version that the replica last said it holds",
        ),
        Metric(
            "replica_in_flight",
            "gauge",
            "samples",
            _REPLICA,
            "Samples that the exporting process has there, exact",
        ),
        Metric(
            "replica_running",
            "gauge",
            "requests",
            _REPLICA,
            "Requests in the engine's running batch",
        ),
        Metric(
            "replica_waiting",
            "gauge",
            "requests",
            _REPLICA,
            "Requests queued in the engine",
        ),
        Metric(
            "replica_kv_cache_usage",
            "gauge",
            "share, 0 to 1",
            _REPLICA,
            "KV-cache blocks in use",
        ),
        Metric(
            "replica_prefix_cache_hit_rate",
            "gauge",
            "share, 0 to 1",
            _REPLICA,
            "Prompt tokens found in the prefix cache since the engine's start, of those looked up",
        ),
        Metric(
            "replica_prompt_tokens_total",
            "counter",
            "tokens",
            _REPLICA,
            "Tokens of prompts whose prefill has ended, cached ones included",
        ),
        Metric(
            "replica_generated_tokens_total",
            "counter",
            "tokens",
            _REPLICA,
            "Tokens sampled",
        ),
        Metric(
            "replica_restarts_total",
            "counter",
            "restarts",
            _REPLICA,
            "How often the replica's actor was replaced",
        ),
        Metric(
            "requests_total",
            "counter",
            "requests",
            (*_SERVICE, "end"),
            "Requests of the exporting process that ended: answered, lost, failed or cancelled",
        ),
        Metric(
            "pushes_total",
            "counter",
            "pushes",
            (*_SERVICE, "end"),
            "Pushes of the exporting process that ended: committed or failed",
        ),
        Metric(
            "pushed_bytes_total",
            "counter",
            "bytes",
            _SERVICE,
            "Bytes of all tensors of committed pushes, once a push",
        ),
        Metric(
            "left_behind_total",
            "counter",
            "pushes",
            _REPLICA,
            "Pushes that did not bring the replica to their version",
        ),
        Metric(
            "push_seconds_total",
            "counter",
            "seconds",
            (*_SERVICE, "phase"),
            "Time of committed pushes, exact, by phase on the trainer's side, and whole",
        ),
        Metric(
            "push_seconds",
            "histogram",
            "seconds",
            (*_SERVICE, "phase"),
            "Time of a committed push, by phase on the trainer's side, and whole",
        ),
        Metric(
            "replica_push_seconds",
            "histogram",
            "seconds",
            (*_REPLICA, "phase"),
            "Time of a committed push, by phase in the replica",
        ),
    )
}
"""Every metric by its name."""


def status_readings(status: ServiceStatus) -> Iterator[Reading]:
    """Yields gauges, and the replicas' totals, as they are now, without those that are not
    known."""
    yield Reading("weight_version", status.weight_version)
    for one in status.replicas:
        yield from _replica_readings(one)


def request_readings(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Reading]:
    """Yields what requests that have ended in between add to counters."""
    for end, total in now.items():
        yield Reading("requests_total", total - before[end], (("end", end),))


def _replica_readings(one: ReplicaStatus) -> Iterator[Reading]:
    tags = (("replica", one.replica_id),)
    for state in ReplicaState:
        value = float(state is one.state)
        yield Reading("replica_state", value, (*tags, ("state", state.value)))
    counters = one.counters
    figures = {
        "replica_weight_version": one.weight_version,
        "replica_in_flight": one.in_flight,
        "replica_running": one.num_running,
        "replica_waiting": one.num_waiting,
        "replica_kv_cache_usage": one.kv_cache_usage,
        "replica_prefix_cache_hit_rate": one.prefix_cache_hit_rate,
        "replica_prompt_tokens_total": counters and counters.num_prompt_tokens,
        "replica_generated_tokens_total": counters and counters.num_generated_tokens,
        "replica_restarts_total": one.num_restarts,
    }
    for name, value in figures.items():
        if value is not None:
            yield Reading(name, value, tags)


def push_readings(push: PushStatus) -> Iterator[Reading]:
    """Yields what one push adds to counters, and what histograms observe of it.

    A phase that took no time did not happen. Times of pushes that failed are those of time limits
    and say nothing of others, so that they are only counted.
    """
    yield Reading("pushes_total", 1, (("end", "failed" if push.error else "committed"),))
    for replica_id in push.left_behind:
        yield Reading("left_behind_total", 1, (("replica", replica_id),))
    if push.error:
        return
    yield Reading("pushed_bytes_total", push.num_bytes or 0)
    for phase, seconds in {WHOLE: push.seconds, **push.phases}.items():
        if seconds:
            tags = (("phase", phase),)
            yield Reading("push_seconds_total", seconds, tags)
            yield Reading("push_seconds", seconds, tags)
    for replica_id, phases in push.replicas.items():
        for phase, seconds in phases.items():
            if seconds:
                tags = (("replica", replica_id), ("phase", phase))
                yield Reading("replica_push_seconds", seconds, tags)


# Metrics of a service in Ray's own metrics, which Prometheus scrapes.


Tags: TypeAlias = tuple[tuple[str, str], ...]

_JOIN_TIMEOUT_S = 10.0
_GONE = math.nan  # what Ray does not show

# A series of this process's outlives the exporter, so that its next one must not count twice.
_exported_totals: dict[tuple[str, str, Tags], float] = {}
_totals_lock = threading.Lock()


def metrics_port() -> int | None:
    """Returns the port at which Ray serves this node's metrics; ``None`` if it does not."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    ports = (one["MetricsExportPort"] for one in ray.nodes() if one["NodeID"] == own)
    return next((port for port in ports if port > 0), None)


class MetricsExporter:
    """Exports a service's metrics, listed in ``METRICS``, until it is stopped.

    One daemon thread, which the service's end, or that of the connection to Ray, ends too; it does
    not keep the service alive. What is not known is not exported: a gauge whose figure has become
    unknown, or whose replica has left, disappears, and so do all at the end. Counters of replicas
    begin at what these have done since they started, those of this process's requests and pushes at
    0.

    Figures of engines are the same in each process that has the service, and would be there twice
    if two of them exported.

    Example:
        >>> exporter = service.export_metrics(interval_s=5.0)
        >>> exporter.stop()

    Args:
        service: The service; held weakly.
        interval_s: Seconds from one export to the next, greater than 0. Ray passes them on at its
            own interval, 10 s unless it is told otherwise.

    Raises:
        UnsupportedArgumentError: ``interval_s`` is no such number.
    """

    def __init__(self, service: Any, *, interval_s: float = 5.0) -> None:
        if not (isinstance(interval_s, int | float) and 0 < interval_s < math.inf):
            raise UnsupportedArgumentError(
                f"interval_s must be a finite number greater than 0, got {interval_s!r}"
            )
        self._interval_s = interval_s
        self._service = weakref.ref(service)
        self._name = service.name
        self._requests = service.requests.request_totals()
        self._pushes: deque[PushStatus] = deque()
        self._deaf = service.weights.listen_to_pushes(self._pushes.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-exporter", daemon=True)
        self._pid = os.getpid()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it exports, in this process."""
        return self._pid == os.getpid() and self._thread.is_alive() and not self._stop.is_set()

    def stop(self) -> None:
        """Exports once more, withdraws every gauge and ends the thread; idempotent."""
        self._deaf()
        self._stop.set()
        if self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._export_until_stopped()
        finally:
            self._deaf()

    def _export_until_stopped(self) -> None:
        instruments: _Instruments | None = None
        is_last = False
        while not is_last:
            is_last = self._stop.wait(0 if instruments is None else self._interval_s)
            with staying_connected() as is_connected:
                if not is_connected:
                    return
                if instruments is None:
                    instruments = _Instruments(self._name)
                is_last = not self._export(instruments) or is_last
                if is_last:
                    instruments.withdraw()

    def _export(self, instruments: _Instruments) -> bool:
        """Exports what is known now; returns whether the service is still there."""
        while self._pushes:
            instruments.add(push_readings(self._pushes.popleft()))
        service = self._service()
        if service is None:
            return False
        try:
            status, requests = service.status(), service.requests.request_totals()
        except ServiceClosedError:
            return False
        before, self._requests = self._requests, requests
        instruments.add(request_readings(before, requests))
        instruments.show(status_readings(status))
        return True


class _Instruments:
    """Ray's objects for the metrics of one service."""

    def __init__(self, service: str) -> None:
        from ray.util import metrics as ray_metrics

        self._service = service
        self._shown: set[tuple[str, Tags]] = set()
        self._of: dict[str, Any] = {}
        for one in METRICS.values():
            name, about = PREFIX + one.name, f"{one.about} ({one.unit})"
            if one.kind == "gauge":
                self._of[one.name] = ray_metrics.Gauge(name, about, one.tags)
            elif one.kind == "counter":
                self._of[one.name] = ray_metrics.Counter(name, about, one.tags)
            else:
                bounds = list(SECONDS_BOUNDS)
                self._of[one.name] = ray_metrics.Histogram(name, about, bounds, one.tags)

    def show(self, readings: Iterable[Reading]) -> None:
        """Exports gauges and totals as they are; gauges that are not among them disappear."""
        shown: set[tuple[str, Tags]] = set()
        for one in readings:
            if METRICS[one.name].kind == "gauge":
                self._of[one.name].set(one.value, tags=self._tags(one.tags))
                shown.add((one.name, one.tags))
            else:
                self.add([Reading(one.name, _growth(self._service, one), one.tags)])
        self._hide(self._shown - shown)
        self._shown = shown

    def add(self, readings: Iterable[Reading]) -> None:
        """Adds to counters, and has histograms observe."""
        for one in readings:
            if METRICS[one.name].kind == "histogram":
                self._of[one.name].observe(one.value, tags=self._tags(one.tags))
            elif one.value:  # Ray refuses to add nothing
                self._of[one.name].inc(one.value, tags=self._tags(one.tags))

    def withdraw(self) -> None:
        """Has every gauge disappear."""
        self._hide(self._shown)
        self._shown = set()

    def _hide(self, gauges: Iterable[tuple[str, Tags]]) -> None:
        for name, tags in gauges:
            self._of[name].set(_GONE, tags=self._tags(tags))

    def _tags(self, tags: Iterable[tuple[str, str]]) -> dict[str, str]:
        return {"service": self._service, **dict(tags)}


def _growth(service: str, one: Reading) -> float:
    """By how much a total is more than this process has exported of it.

    One that is smaller than before has begun anew.
    """
    key = (service, one.name, one.tags)
    with _totals_lock:
        before = _exported_totals.get(key, 0.0)
        _exported_totals[key] = one.value
    return one.value - before if one.value >= before else one.value

"""Metrics of a service in Ray's own metrics, which Prometheus scrapes."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.metrics import (
    METRICS,
    PREFIX,
    SECONDS_BOUNDS,
    Reading,
    push_readings,
    request_readings,
    status_readings,
)
from torchrl_vllm_sync.ray_connection import staying_connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.status import ServiceStatus

__all__ = ["ExportedService", "MetricsExporter", "metrics_port"]

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


class ExportedService(Protocol):
    """What the exporter needs of a service."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def status(self) -> ServiceStatus:
        """What it is and does now."""
        ...

    def request_totals(self) -> Mapping[str, int]:
        """How the requests of this process have ended."""
        ...

    def listen_to_pushes(self, listener: Callable[[PushStatus], object]) -> Callable[[], None]:
        """Has ``listener`` called with each push that ends; returns what ends that."""
        ...


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

    def __init__(self, service: ExportedService, *, interval_s: float = 5.0) -> None:
        if not (isinstance(interval_s, int | float) and 0 < interval_s < math.inf):
            raise UnsupportedArgumentError(
                f"interval_s must be a finite number greater than 0, got {interval_s!r}"
            )
        self._interval_s = interval_s
        self._service = weakref.ref(service)
        self._name = service.name
        self._requests = service.request_totals()
        self._pushes: deque[PushStatus] = deque()
        self._deaf = service.listen_to_pushes(self._pushes.append)
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
            status, requests = service.status(), service.request_totals()
        except ServiceClosedError:
            return False
        before, self._requests = self._requests, requests
        instruments.add(request_readings(before, requests))
        instruments.show(status_readings(status))
        return True


class _Instruments:
    """Ray's objects for the metrics of one service.

    Args:
        service: Its name, which every metric is tagged with.
    """

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

"""What of a service is exported as metrics: names, and the numbers at one moment.

Names are stable. Prometheus sees them behind the ``ray_`` that Ray puts before all its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.status import ReplicaStatus, ServiceStatus

__all__ = [
    "METRICS",
    "PREFIX",
    "SECONDS_BOUNDS",
    "WHOLE",
    "Metric",
    "Reading",
    "push_readings",
    "request_readings",
    "status_readings",
]

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
    """Yields gauges, and the replicas' totals, as they are now, without those that are not known.

    Args:
        status: What the service is and does.
    """
    yield Reading("weight_version", status.weight_version)
    for one in status.replicas:
        yield from _replica_readings(one)


def request_readings(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Reading]:
    """Yields what requests that have ended in between add to counters.

    Args:
        before: How many requests of this process had ended, by their end.
        now: The same later.
    """
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

    Args:
        push: A push of this process that has ended.
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

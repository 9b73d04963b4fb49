"""What a service is and does at one moment, and the log of its pushes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torchrl_vllm_sync.replica import PushStatus, ReplicaState
from torchrl_vllm_sync.routing.ledger import TokenRates, token_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrl_vllm_sync.replica import EngineCounters, Member
    from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker


# The last few pushes and failures of a service, as one process heard of them.


MAX_PUSHES = 8
MAX_FAILURES = 16
_TROUBLE = (ReplicaState.STALE, ReplicaState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStatus:
    """Something that went wrong.

    Attributes:
        at: When this process heard of it, in seconds since 1970.
        what: ``"push"``, or the state that a replica came to: ``"failed"`` or ``"stale"``.
        replica_id: The replica; ``None`` for a push.
        reason: What is known of the cause.
    """

    at: float
    what: str
    replica_id: str | None = None
    reason: str = ""


class StatusLog:
    """Remembers pushes and failures. Safe for threads.

    It watches a ledger for replicas that fail or go stale; pushes it is told of, by the process
    that pushed or through the replicas' reports.
    """

    def __init__(self, load: LoadTracker, wall_clock: Callable[[], float] = time.time) -> None:
        self._load, self._wall_clock = load, wall_clock
        self._lock = threading.Lock()
        self._pushes: list[PushStatus] = []
        self._failures: deque[FailureStatus] = deque(maxlen=MAX_FAILURES)
        self._states: dict[str, tuple[ReplicaState, str]] = {}
        self._listeners: list[Callable[[PushStatus], object]] = []
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(load.watched(self._look, urgent=False))

    @property
    def pushes(self) -> tuple[PushStatus, ...]:
        """The last pushes, newest first."""
        with self._lock:
            return tuple(self._pushes)

    @property
    def failures(self) -> tuple[FailureStatus, ...]:
        """The last failures, newest first."""
        with self._lock:
            return tuple(sorted(self._failures, key=lambda one: one.at))[::-1]

    def add_pushes(self, pushes: Iterable[PushStatus]) -> None:
        """Adds pushes that are not known yet; one is known by when it ended and its version."""
        with self._lock:
            known = {(one.ended_at, one.version) for one in self._pushes}
            for push in pushes:
                if (push.ended_at, push.version) in known:
                    continue
                known.add((push.ended_at, push.version))
                self._pushes.append(push)
                if push.error:
                    self._failures.append(
                        FailureStatus(at=push.ended_at, what="push", reason=push.error)
                    )
            self._pushes.sort(key=lambda one: one.ended_at, reverse=True)
            del self._pushes[MAX_PUSHES:]

    def listen(self, listener: Callable[[PushStatus], object]) -> Callable[[], None]:
        """Has ``listener`` called with each push of this process that ends, well or not.

        It is called in the thread that pushes, and must not raise.
        """
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop

    def end_push(self, push: PushStatus) -> None:
        """Adds a push of this process, and tells whoever listens."""
        self.add_pushes([push])
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener(push)

    def _look(self) -> None:
        """Notes who is in trouble now and was not before; the ledger is locked meanwhile."""
        now = self._wall_clock()
        states = {one.replica_id: (one.state, one.reason) for one in self._load.snapshots()}
        with self._lock:
            for replica_id, (state, reason) in states.items():
                was, _ = self._states.get(replica_id, (None, ""))
                # One that joins is stale for a moment, and has no reason to be.
                if state in _TROUBLE and state is not was and (reason or state is not _TROUBLE[0]):
                    self._failures.append(
                        FailureStatus(at=now, what=state, replica_id=replica_id, reason=reason)
                    )
            self._states = states


_Number = TypeVar("_Number", int, float)

MAX_AGE_S = 5.0
"""An engine's figures that are older than this many seconds count as unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica at one moment; ``None`` wherever a figure is not known.

    Figures of the engine are those of its last report, which comes once a second, and unknown when
    that is more than 5 s old.

    Attributes:
        replica_id: Stable id of the replica.
        state: Its state.
        reason: Why it is ``STALE`` or ``FAILED``; empty otherwise.
        weight_version: Policy version that it last said it holds.
        in_flight: Samples that this process has there, exact.
        elsewhere: Samples that other processes have there, estimated at the last report.
        num_unfinished: Requests inside its engine.
        num_running: Requests in the engine's running batch.
        num_waiting: Requests queued in the engine.
        kv_cache_usage: Share of KV-cache blocks in use, 0 to 1.
        prefix_cache_hit_rate: Share, 0 to 1, of all prompt tokens since the engine's start that
            were found in its prefix cache, of those looked up.
        generated_tokens_per_s: Tokens sampled, over the last 2 s or so.
        prompt_tokens_per_s: Tokens of prompts whose prefill ended, cached ones included, over the
            same time.
        counters: What the engine has done since it started.
        report_age_s: Seconds since its last report.
        num_restarts: How often its actor was replaced.
        node: Address of its node.
        pid: Process id of its actor on that node.
        device_type: Where its weights are: ``"cpu"`` or ``"cuda"``.
    """

    replica_id: str
    state: ReplicaState
    in_flight: int
    reason: str = ""
    weight_version: int | None = None
    elsewhere: int | None = None
    num_unfinished: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_cache_hit_rate: float | None = None
    generated_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    counters: EngineCounters | None = None
    report_age_s: float | None = None
    num_restarts: int | None = None
    node: str | None = None
    pid: int | None = None
    device_type: str | None = None

    @property
    def samples(self) -> int | None:
        """Samples of all processes that it holds, as well as this one can tell."""
        return None if self.elsewhere is None else self.in_flight + self.elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service at one moment.

    Example:
        >>> status = service.status()
        >>> [one.replica_id for one in status.replicas if one.state != "serving"]
        ['1']
        >>> status.pushes[0].phases  # of the last push, in seconds
        {'prepare': 0.004, 'ready': 0.002, 'transfer': 0.038, ...}

    Attributes:
        name: Name of the service.
        time: When this was so, in seconds since 1970.
        weight_version: Newest policy version that every serving replica is known to hold.
        in_flight: Samples that this process has in flight, those of removed replicas included.
        replicas: Its replicas, in the order of their joining.
        pushes: The last pushes that this process heard of, newest first: its own, and each that was
            the newest one the replicas knew of when it looked.
        failures: What went wrong lately, newest first.
    """

    name: str
    time: float
    weight_version: int
    in_flight: int
    replicas: tuple[ReplicaStatus, ...]
    pushes: tuple[PushStatus, ...] = ()
    failures: tuple[FailureStatus, ...] = ()

    @property
    def num_serving(self) -> int:
        """Replicas that take requests."""
        return sum(one.state.admits_requests for one in self.replicas)

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Tokens that all replicas sample per second; ``None`` if one that serves is not known."""
        return self._total([one.generated_tokens_per_s for one in self._serving])

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """The same of prompts whose prefill ended, cached tokens included."""
        return self._total([one.prompt_tokens_per_s for one in self._serving])

    @property
    def samples(self) -> int | None:
        """Samples of all processes that the replicas hold; ``None`` if one that serves is unknown.

        As well as this process can tell: see ``ReplicaStatus.samples``.
        """
        return self._total([one.samples for one in self._serving])

    @property
    def _serving(self) -> list[ReplicaStatus]:
        return [one for one in self.replicas if one.state.admits_requests]

    @staticmethod
    def _total(figures: Sequence[_Number | None]) -> _Number | None:
        known = [one for one in figures if one is not None]
        return sum(known[1:], known[0]) if known and len(known) == len(figures) else None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and finite numbers, for JSON."""
        told = dataclasses.asdict(self) | {
            "replicas": [
                dataclasses.asdict(one) | {"samples": one.samples} for one in self.replicas
            ],
            "num_serving": self.num_serving,
            "samples": self.samples,
            "generated_tokens_per_s": self.generated_tokens_per_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
        }
        return finite(told)


def finite(value: Any) -> Any:
    """Returns the same with None for figures that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def collect_status(
    name: str,
    weight_version: int,
    in_flight: int,
    snapshots: Sequence[LoadSnapshot],
    members: Sequence[Member],
    log: StatusLog,
    now: float,
) -> ServiceStatus:
    """Puts together what is known of a service; asks nobody."""
    log.add_pushes(one.last_push for one in snapshots if one.last_push is not None)
    known = {one.replica_id: one for one in members}
    return ServiceStatus(
        name=name,
        time=time.time(),
        weight_version=weight_version,
        in_flight=in_flight,
        replicas=tuple(_of_replica(one, known.get(one.replica_id), now) for one in snapshots),
        pushes=log.pushes,
        failures=log.failures,
    )


def _of_replica(known: LoadSnapshot, member: Member | None, now: float) -> ReplicaStatus:
    status = ReplicaStatus(
        replica_id=known.replica_id,
        state=known.state,
        reason=known.reason,
        in_flight=known.in_flight,
        weight_version=known.weight_version,
        report_age_s=None if known.measured_at is None else max(0.0, now - known.measured_at),
    )
    if member is not None:
        status = dataclasses.replace(
            status,
            num_restarts=member.num_restarts,
            node=member.description.node_ip,
            pid=member.description.pid,
            device_type=member.description.device_type,
        )
    if not known.is_fresh(now, MAX_AGE_S):
        return status
    counters = known.counters
    rates: TokenRates = token_rates(known.counted)
    return dataclasses.replace(
        status,
        elsewhere=known.num_elsewhere,
        num_unfinished=known.num_unfinished,
        num_running=known.num_running,
        num_waiting=known.num_waiting,
        kv_cache_usage=known.kv_cache_usage,
        prefix_cache_hit_rate=counters.prefix_cache_hit_rate if counters else None,
        generated_tokens_per_s=rates.generated_tokens_per_s,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        counters=counters,
    )

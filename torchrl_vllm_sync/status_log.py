"""The last few pushes and failures of a service, as one process heard of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import WeightSyncError
from torchrl_vllm_sync.replica import PushStatus, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchrl_vllm_sync.load import LoadTracker
    from torchrl_vllm_sync.weights.transport import PushReport

__all__ = ["FailureStatus", "StatusLog", "failed_push", "finished_push"]

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

    Args:
        load: The ledger.
        wall_clock: Tells the time in seconds since 1970.
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

        Returns:
            A function that ends this; calling it twice does nothing.
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


def finished_push(report: PushReport, ended_at: float) -> PushStatus:
    """Makes the status of a push that was committed.

    Args:
        report: What became of it.
        ended_at: When it ended, in seconds since 1970.
    """
    return PushStatus(
        ended_at=ended_at,
        seconds=report.seconds,
        version=report.version,
        transport=report.transport,
        num_bytes=report.num_bytes,
        phases=_seconds(report.phases),
        replicas={one.replica_id: _seconds(one.phases) for one in report.replicas if not one.error},
        left_behind=dict(report.left_behind),
    )


def failed_push(
    error: Exception, version: int | None, seconds: float, ended_at: float
) -> PushStatus:
    """Makes the status of a push that raised.

    Args:
        error: What it raised.
        version: The version that was asked for; ``None`` if none was.
        seconds: Wall clock until then.
        ended_at: When that was, in seconds since 1970.
    """
    failed = isinstance(error, WeightSyncError)
    return PushStatus(
        ended_at=ended_at,
        seconds=seconds,
        version=error.version if failed else version,
        left_behind=dict(error.failures) if failed else {},
        error=str(error) or type(error).__name__,
    )


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that are seconds, without the unit in their names; the others are counts."""
    return {name.removesuffix("_s"): value for name, value in phases.items() if name.endswith("_s")}

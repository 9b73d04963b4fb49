"""Load of every replica: what this process counted, beside what each engine last reported."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torchrl_vllm_sync.replica import EngineReport

__all__ = ["LoadSnapshot", "LoadTracker", "describe_replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """What is known of one replica's load at one moment.

    Attributes:
        replica_id: Stable id of the replica.
        state: Its state, from its last report or from a caller who saw it change since.
        in_flight: Requests that this process reserved and has not released; exact.
        num_unfinished: Requests inside the engine, from every process; None until reported.
        num_running: Requests in the engine's running batch; None until reported.
        num_waiting: Requests queued in the engine; None until reported.
        kv_cache_usage: Share of KV-cache blocks in use, 0 to 1; None until reported.
        weight_version: Policy version it serves with; None before the first push or report.
        measured_at: ``time.monotonic()`` of the last report; None before it.
        reason: Why it is ``STALE`` or ``FAILED``; empty otherwise.
    """

    replica_id: str
    state: ReplicaState
    in_flight: int = 0
    num_unfinished: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    weight_version: int | None = None
    measured_at: float | None = None
    reason: str = ""

    @property
    def age_s(self) -> float | None:
        """Seconds since the last report; None before the first."""
        return None if self.measured_at is None else time.monotonic() - self.measured_at

    def is_fresh(self, now: float, max_age_s: float) -> bool:
        """Whether the last report is at most ``max_age_s`` older than ``now``, a monotonic time."""
        return self.measured_at is not None and now - self.measured_at <= max_age_s

    def load(self, now: float, max_age_s: float) -> int:
        """Requests that this replica holds, as well as this process can tell.

        The count made here is exact but sees only this process; the engine's own count sees every
        process but is late. The greater of the two is used, and the engine's only while it is
        fresh: ``max(in_flight, num_unfinished)``, with ``num_running + num_waiting`` where the
        engine did not report the sum.
        """
        if not self.is_fresh(now, max_age_s):
            return self.in_flight
        reported = self.num_unfinished
        if reported is None and self.num_running is not None and self.num_waiting is not None:
            reported = self.num_running + self.num_waiting
        return self.in_flight if reported is None else max(self.in_flight, reported)

    def as_stats(self) -> dict[str, Any]:
        """Returns what is known, under the names that TorchRL's statistics of a balancer have."""
        return {
            "replica_id": self.replica_id,
            "state": str(self.state),
            "reason": self.reason,
            "pending_requests": self.in_flight,
            "num_unfinished": self.num_unfinished,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "cache_usage": self.kv_cache_usage,
            "weight_version": self.weight_version,
            "age_s": self.age_s,
        }

    def reaches(self, version: int) -> bool:
        """Whether the replica is known to hold ``version`` or a later one."""
        return self.weight_version is not None and self.weight_version >= version

    def describe(self) -> str:
        """Says in words what the replica holds and is, as far as is known here."""
        if self.weight_version is None:
            return f"has not said what it holds and is {self.state}"
        return f"holds version {self.weight_version} and is {self.state}"


class LoadTracker:
    """Ledger of requests in flight and of the engines' last reports, for one process.

    Every method is safe to call from any thread. A caller that must choose and reserve in one step
    holds ``lock``, which is reentrant. A pickled copy has the same replicas in their last states
    and an empty ledger, because another process has other requests in flight.

    Example:
        >>> tracker = LoadTracker(["0", "1"], state=ReplicaState.SERVING)
        >>> tracker.reserve("1")
        >>> [snapshot.in_flight for snapshot in tracker.snapshots()]
        [0, 1]
        >>> tracker.release("1")

    Args:
        replica_ids: Stable ids, in the order in which replicas are listed.
        state: State of each until a report or a mark says otherwise.

    Raises:
        ValueError: An id occurs twice.

    Attributes:
        lock: Guards the ledger.
    """

    def __init__(
        self, replica_ids: Iterable[str], *, state: ReplicaState = ReplicaState.STARTING
    ) -> None:
        self.lock = threading.RLock()
        self._snapshots: dict[str, LoadSnapshot] = {}
        self._removed: dict[str, int] = {}  # removed replicas whose requests are still in flight
        self._marked_at: dict[str, float] = {}
        self._watchers: dict[object, Callable[[], object]] = {}
        for replica_id in replica_ids:
            self.add(replica_id, state)

    @property
    def replica_ids(self) -> list[str]:
        """Ids of the tracked replicas, in order."""
        with self.lock:
            return list(self._snapshots)

    @property
    def total_in_flight(self) -> int:
        """Requests in flight on all replicas, those of removed replicas included."""
        with self.lock:
            tracked = sum(snapshot.in_flight for snapshot in self._snapshots.values())
            return tracked + sum(self._removed.values())

    def in_flight(self, replica_id: str) -> int:
        """Requests in flight on one replica.

        Raises:
            KeyError: No such replica.
        """
        with self.lock:
            if replica_id in self._removed:
                return self._removed[replica_id]
            return self._tracked(replica_id).in_flight

    def snapshots(self) -> list[LoadSnapshot]:
        """One snapshot a replica, in the order of ``replica_ids``."""
        with self.lock:
            return list(self._snapshots.values())

    @property
    def is_watched(self) -> bool:
        """Whether somebody waits for a replica to change, who is served best by fresh reports."""
        return bool(self._watchers)

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], object]) -> Iterator[None]:
        """Calls ``on_change`` whenever a replica changes its state or version.

        Args:
            on_change: Called in whatever thread learns of the change, with the ledger locked.
        """
        key = object()
        with self.lock:
            self._watchers[key] = on_change
        try:
            yield
        finally:
            with self.lock:
                del self._watchers[key]

    def add(self, replica_id: str, state: ReplicaState = ReplicaState.STARTING) -> None:
        """Tracks one more replica, at the end of the order.

        Raises:
            ValueError: The id is tracked, or belonged to a replica with requests still in flight.
        """
        with self.lock:
            if replica_id in self._snapshots or replica_id in self._removed:
                raise ValueError(f"replica_id must be new, got {replica_id!r}, which is tracked")
            self._snapshots[replica_id] = LoadSnapshot(replica_id=replica_id, state=state)

    def remove(self, replica_id: str) -> None:
        """Stops listing a replica; its requests in flight can still be released.

        Raises:
            KeyError: No such replica.
        """
        with self.lock:
            in_flight = self._tracked(replica_id).in_flight
            del self._snapshots[replica_id]
            self._marked_at.pop(replica_id, None)
            if in_flight:
                self._removed[replica_id] = in_flight

    def reserve(self, replica_id: str) -> None:
        """Counts one request in flight on a replica, whatever its state.

        Raises:
            KeyError: No such replica.
        """
        with self.lock:
            self._count(self._tracked(replica_id), 1)

    def release(self, replica_id: str) -> None:
        """Counts one request of a replica as no longer in flight.

        Raises:
            KeyError: No such replica.
            RuntimeError: None was in flight there.
        """
        with self.lock:
            if replica_id in self._removed:
                self._removed[replica_id] -= 1
                if not self._removed[replica_id]:
                    del self._removed[replica_id]
                return
            snapshot = self._tracked(replica_id)
            if not snapshot.in_flight:
                raise RuntimeError(
                    f"release must follow a reserve, got one for replica {replica_id} "
                    "with none in flight"
                )
            self._count(snapshot, -1)

    def observe(self, report: EngineReport, *, asked_at: float | None = None) -> None:
        """Takes over what an engine said of itself.

        The figures are always taken. The state is not, if the report was asked for before the last
        ``mark``; and a replica marked ``FAILED`` leaves that state only by a report of ``SERVING``.
        A report of a replica that is not tracked (any more) is dropped.

        Args:
            report: The engine's own words.
            asked_at: ``time.monotonic()`` when the report was asked for; None means just now.
        """
        now = time.monotonic()
        with self.lock:
            known = self._snapshots.get(report.replica_id)
            if known is None:
                return
            asked_at = now if asked_at is None else asked_at
            outdated = asked_at < self._marked_at.get(report.replica_id, asked_at)
            buried = known.state is ReplicaState.FAILED and report.state is not ReplicaState.SERVING
            keep = outdated or buried
            self._snapshots[report.replica_id] = LoadSnapshot(
                replica_id=report.replica_id,
                state=known.state if keep else report.state,
                reason=known.reason if keep else report.reason,
                in_flight=known.in_flight,
                num_unfinished=report.num_unfinished,
                num_running=report.num_running,
                num_waiting=report.num_waiting,
                kv_cache_usage=report.kv_cache_usage,
                weight_version=report.weight_version,
                measured_at=now,
            )
            self._tell_watchers(known)

    def mark(self, replica_id: str, state: ReplicaState, reason: str = "") -> None:
        """Records a state seen from outside, such as ``FAILED`` when a call to the actor died.

        Raises:
            KeyError: No such replica.
        """
        with self.lock:
            known = self._tracked(replica_id)
            self._snapshots[replica_id] = replace(known, state=state, reason=reason)
            self._marked_at[replica_id] = time.monotonic()
            self._tell_watchers(known)

    def _tell_watchers(self, before: LoadSnapshot) -> None:
        now = self._snapshots[before.replica_id]
        if (now.state, now.weight_version) != (before.state, before.weight_version):
            for on_change in list(self._watchers.values()):
                on_change()

    def _tracked(self, replica_id: str) -> LoadSnapshot:
        try:
            return self._snapshots[replica_id]
        except KeyError:
            raise KeyError(
                f"replica_id must be one of {list(self._snapshots)}, got {replica_id!r}"
            ) from None

    def _count(self, snapshot: LoadSnapshot, change: int) -> None:
        self._snapshots[snapshot.replica_id] = replace(
            snapshot, in_flight=snapshot.in_flight + change
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"states": [(s.replica_id, s.state, s.reason) for s in self.snapshots()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__([])
        for replica_id, replica_state, reason in state["states"]:
            self._snapshots[replica_id] = LoadSnapshot(
                replica_id=replica_id, state=replica_state, reason=reason
            )


def describe_replicas(snapshots: Sequence[LoadSnapshot], exclude: Collection[str]) -> str:
    """Says in words why each replica can or cannot take a request."""
    if not snapshots:
        return "there is none"
    return ", ".join(
        f"replica {snapshot.replica_id} is {snapshot.state}"
        + (f" ({snapshot.reason})" if snapshot.reason else "")
        + (" and excluded" if snapshot.replica_id in exclude else "")
        for snapshot in snapshots
    )

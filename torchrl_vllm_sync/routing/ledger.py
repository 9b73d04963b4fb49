"""Ledger of every replica's traffic: what this process counted, and the engines' reports."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter, gt
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import Deadline, check_version
from torchrl_vllm_sync.replica import EngineCounters, EngineReport, ReplicaState

# Rates are over at least this many seconds, if the reports reach back as far.
_WINDOW_S = 2.0
# Over less than this, the moments at which reports arrive distort the rates.
_SHORTEST_S = 0.5


class Counted(NamedTuple):
    """An engine's counters, and when they came by the ledger's clock."""

    at: float
    counters: EngineCounters


def _count(
    before: tuple[Counted, ...], counters: EngineCounters | None, now: float
) -> tuple[Counted, ...]:
    """Adds what an engine reported, and drops what rates no longer need."""
    if counters is None:
        return ()
    if before and any(map(gt, astuple(before[-1].counters), astuple(counters))):
        before = ()  # counters that fell are another engine's, of which nothing else is known yet
    while len(before) > 1 and before[1].at <= now - _WINDOW_S:
        before = before[1:]
    return (*before, Counted(now, counters))


def token_rates(counted: Sequence[Counted]) -> dict[str, float]:
    """Rates between the first and the last of ``counted``; none where they are unknown."""
    if not counted or (passed_s := counted[-1].at - counted[0].at) < _SHORTEST_S:
        return {}
    first, last = counted[0].counters, counted[-1].counters
    generated = last.num_generated_tokens - first.num_generated_tokens
    prompt = last.num_prompt_tokens - first.num_prompt_tokens  # cached ones included
    rates = {"prompt_tokens_per_s": prompt, "generated_tokens_per_s": generated}
    return {name: num_tokens / passed_s for name, num_tokens in rates.items()}


# Replicas whose KV cache would be fuller than this get nothing while others would not be.
_MAX_KV_USAGE = 0.9
# What is known before the first report: nothing.
_NOT_REPORTED = EngineReport(replica_id="", state=ReplicaState.STARTING)


def _reported(name: str) -> Any:
    """An attribute that is read from the last report."""
    return property(attrgetter(f"report.{name}"))


@dataclass(slots=True, kw_only=True)
class LoadSnapshot:
    """What is known of one replica's load at one moment, by the ledger's clock.

    Those that a strategy is given are the ledger's own, and change after its decision.

    Attributes:
        replica_id: Stable id of the replica.
        state, reason: Its state, as reported or seen since, and why it is ``STALE`` or ``FAILED``.
        in_flight: Samples that this process reserved and has not released; exact.
        held_tokens: Tokens, of prompts and expected of answers, of these samples.
        report: What its engine last said of itself, whole. Read from it, and None until reported,
            are ``num_unfinished`` (samples inside the engine, from every process), ``num_running``,
            ``num_waiting``, ``kv_cache_usage`` (share of blocks, 0 to 1), ``weight_version``,
            ``membership_epoch``, ``counters`` and ``last_push``.
        measured_at, asked_at: Time of the last report, None before it, and of the question to it.
        num_elsewhere: Samples in its engine beyond those of this process, when the last report
            came; None until reported.
        held_when_measured: ``held_tokens`` at the time of the last report.
        kv_cache_tokens, block_size: Tokens in its KV cache, and in a block of it; None if unknown.
        marked_at: Time when a caller last saw its state change; reports of before do not count.
        floor: Version that it must report before it admits requests again; 0 if it need not.
        away_since: Time since which its actor is out of reach, and may be back; None otherwise.
        counted: The engine's counters of the last few seconds' reports, oldest first.
    """

    replica_id: str
    state: ReplicaState
    in_flight: int = 0
    held_tokens: int = 0
    report: EngineReport = _NOT_REPORTED
    measured_at: float | None = None
    asked_at: float = -math.inf
    num_elsewhere: int | None = None
    held_when_measured: int = 0
    kv_cache_tokens: int | None = None
    block_size: int | None = None
    reason: str = ""
    marked_at: float = -math.inf
    floor: int = 0
    away_since: float | None = None
    counted: tuple[Counted, ...] = ()

    num_unfinished = _reported("num_unfinished")
    num_running = _reported("num_running")
    num_waiting = _reported("num_waiting")
    kv_cache_usage = _reported("kv_cache_usage")
    weight_version = _reported("weight_version")
    membership_epoch = _reported("membership_epoch")
    counters = _reported("counters")
    last_push = _reported("last_push")

    @property
    def cache_version(self) -> int:
        """Version that its cache is of; as long as none is known, that of the first weights."""
        return self.report.weight_version or 0

    def is_fresh(self, now: float, max_age_s: float) -> bool:
        """Whether the last report is at most ``max_age_s`` older than ``now``; else it is unknown.

        Args:
            now, max_age_s: Time by the ledger's clock, and seconds.
        """
        return self.measured_at is not None and now - self.measured_at <= max_age_s

    def load(self, now: float, max_age_s: float) -> int:
        """Returns the samples that this replica holds, as well as this process can tell.

        Those counted here, and those of other processes as long as the last report is fresh.
        Arguments are those of :meth:`is_fresh`.
        """
        if self.num_elsewhere and self.is_fresh(now, max_age_s):
            return self.in_flight + self.num_elsewhere
        return self.in_flight

    def predicted_usage(self, now: float, max_age_s: float) -> float | None:
        """Returns the share of the KV cache that its requests use, or will; above 1 they must wait.

        The engine's own figure while it is fresh, and what this process has reserved since, or all
        that it has; None if neither is known. Arguments are those of :meth:`is_fresh`.
        """
        room = self.kv_cache_tokens
        if self.report.kv_cache_usage is not None and self.is_fresh(now, max_age_s):
            since = max(0, self.held_tokens - self.held_when_measured)
            return self.report.kv_cache_usage + (since / room if room else 0.0)
        return self.held_tokens / room if room else None

    def has_room(self, tokens: int, now: float, max_age_s: float) -> bool:
        """Whether the KV cache would be at most 90 % full, or nothing is known of it.

        Arguments beside ``tokens`` are those of :meth:`is_fresh`.

        Args:
            tokens: Tokens more than now.
        """
        room = self.kv_cache_tokens
        if self.report.kv_cache_usage is None:  # the usual case, without a report: quick
            return room is None or self.held_tokens + tokens <= _MAX_KV_USAGE * room
        usage = self.predicted_usage(now, max_age_s)
        return usage is None or usage + (tokens / room if room else 0.0) <= _MAX_KV_USAGE

    def as_stats(self, now: float | None = None) -> dict[str, Any]:
        """Returns what is known, under TorchRL's names.

        Args:
            now: Time by the ledger's clock; None means ``time.monotonic()``.
        """
        now = time.monotonic() if now is None else now
        same = "replica_id reason num_unfinished num_running num_waiting weight_version"
        return {name: getattr(self, name) for name in same.split()} | {
            "state": str(self.state),
            "pending_requests": self.in_flight,
            "cache_usage": self.kv_cache_usage,
            "age_s": None if self.measured_at is None else now - self.measured_at,
        }

    def describe(self) -> str:
        """Returns in words what the replica holds and is, as far as is known here."""
        version = self.weight_version
        held = "has not said what it holds" if version is None else f"holds version {version}"
        return f"{held} and is {self.state}"


# Replicas among which a request can be placed: the ledger's own records, in its order.
Candidates: TypeAlias = tuple[LoadSnapshot, ...]


def describe_replicas(snapshots: Sequence[LoadSnapshot], exclude: Collection[str]) -> str:
    """Describes why each replica can or cannot take a request."""
    told = [
        f"replica {one.replica_id} is {one.state}"
        + (f" ({one.reason})" if one.reason else "")
        + (" and excluded" if one.replica_id in exclude else "")
        for one in snapshots
    ]
    return ", ".join(told) or "there is none"


def _plausible(report: EngineReport) -> EngineReport:
    """A report in which figures that can be no count and no share are None."""
    figures = ("num_unfinished", "num_running", "num_waiting", "kv_cache_usage")
    odd = {one: None for one in figures if not 0 <= (getattr(report, one) or 0) <= sys.maxsize}
    return dataclasses.replace(report, **odd) if odd else report


_Result = TypeVar("_Result")


class LoadTracker:
    """One process's requests in flight, of which a copy has none, and the engines' last reports."""

    def __init__(
        self,
        replica_ids: Iterable[str],
        *,
        state: ReplicaState = ReplicaState.STARTING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()  # to choose and reserve in one step, hold it
        self.clock = clock
        self.newest_version = 0  # ever reported, also by a replica that is dead or removed now
        self._snapshots: dict[str, LoadSnapshot] = {}
        self._removed: dict[str, LoadSnapshot] = {}  # whose requests are still in flight
        self._candidates: Candidates | None = None
        self.positions: dict[str, int] = {}  # of each replica in the order, as of ``candidates``
        self._watchers: list[tuple[Callable[[], object], bool]] = []  # and whether one is urgent
        for replica_id in replica_ids:
            self.add(replica_id, state)

    @property
    def replica_ids(self) -> list[str]:
        with self.lock:
            return list(self._snapshots)

    @property
    def total_in_flight(self) -> int:
        """Samples in flight on all replicas, those of removed replicas included."""
        with self.lock:
            return sum(one.in_flight for one in (self._snapshots | self._removed).values())

    def in_flight(self, replica_id: str) -> int:
        with self.lock:
            return self._known(replica_id).in_flight

    def snapshots(self) -> list[LoadSnapshot]:
        """Copies of all records, in the order of ``replica_ids``."""
        with self.lock:
            return [copy.copy(snapshot) for snapshot in self._snapshots.values()]

    def admitting(self) -> list[LoadSnapshot]:
        return [one for one in self.snapshots() if one.state.admits_requests]

    def snapshot(self, replica_id: str) -> LoadSnapshot | None:
        """A copy of one record; None if the replica is not tracked."""
        with self.lock:
            return copy.copy(self._snapshots.get(replica_id))

    def candidates(self) -> Candidates:
        """The replicas that admit requests; the same object until one changes. Hold ``lock``."""
        if self._candidates is None:
            everyone = self._snapshots.values()
            self._candidates = tuple(one for one in everyone if one.state.admits_requests)
            self.positions = {name: at for at, name in enumerate(self._snapshots)}
        return self._candidates

    def candidates_for(self, exclude: Collection[str], min_version: int) -> Candidates:
        """The replicas that admit a request, at least one. Hold ``lock``."""
        found = self.candidates()
        if found and not exclude and not min_version:
            return found
        if isinstance(exclude, str):
            raise errors.UnsupportedArgumentError(f"exclude must be several ids, got {exclude!r}")
        check_version("min_version", min_version)
        found = tuple(one for one in found if one.replica_id not in exclude)
        if not found:
            told = describe_replicas(self.snapshots(), exclude)
            raise errors.NoReplicaAvailableError(f"no replica can take a request: {told}")
        found = tuple(one for one in found if one.cache_version >= min_version)
        if not found:
            held = {one.replica_id: one.describe() for one in self._snapshots.values()}
            raise errors.VersionNotReachedError(min_version, held, 0.0)
        return found

    @property
    def is_watched(self) -> bool:
        """Whether a caller waits for a replica to change, so that reports should be fresh."""
        with self.lock:
            return any(urgent for _, urgent in self._watchers)

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], object], *, urgent: bool = True) -> Iterator[None]:
        """Calls ``on_change`` whenever a replica changes its state or version."""
        watcher = on_change, urgent
        with self.lock:
            self._watchers.append(watcher)
        try:
            yield
        finally:
            with self.lock:
                self._watchers.remove(watcher)

    def wait_until(self, test: Callable[[], _Result | None], timeout_s: float) -> _Result | None:
        """Calls ``test`` at each change of a replica until it returns something, or time is up."""
        deadline, changed = Deadline(timeout_s), threading.Event()
        with self.watched(changed.set):
            while (result := test()) is None and not deadline.passed:
                changed.wait(min(deadline.left_s, 1.0))  # a shutdown notifies no watcher
                changed.clear()
        return result

    def add(self, replica_id: str, state: ReplicaState = ReplicaState.STARTING) -> None:
        """Tracks one more replica, at the end of the order."""
        with self.lock:
            if replica_id in self._snapshots or replica_id in self._removed:
                raise ValueError(f"replica_id must be new, got {replica_id!r}, which is tracked")
            self._snapshots[replica_id] = LoadSnapshot(replica_id=replica_id, state=state)
            self._candidates = None

    def describe(self, replica_id: str, *, block_size: int, num_kv_blocks: int | None) -> None:
        """Notes the size of a replica's KV cache."""
        with self.lock:
            known = self._tracked(replica_id)
            known.block_size = block_size
            known.kv_cache_tokens = num_kv_blocks * block_size if num_kv_blocks else None
            self._candidates = None

    def renew(self, replica_id: str, state: ReplicaState) -> None:
        """Resets a replica whose actor was replaced; its requests in flight stay counted."""
        with self.lock:
            former = self._tracked(replica_id)
            kept = {name: getattr(former, name) for name in ("in_flight", "held_tokens", "floor")}
            self._snapshots[replica_id] = LoadSnapshot(
                replica_id=replica_id, state=state, marked_at=self.clock(), **kept
            )
            self._announce()

    def follow(self, replica_ids: Sequence[str]) -> None:
        """Tracks exactly these replicas, in this order; new ones are starting."""
        with self.lock:
            for replica_id in self._snapshots.keys() - set(replica_ids):
                self.remove(replica_id)
            for replica_id in replica_ids:
                if replica_id in self._removed:  # it is back before all its requests had ended
                    self._snapshots[replica_id] = self._removed.pop(replica_id)
                    self.renew(replica_id, ReplicaState.STARTING)
                elif replica_id not in self._snapshots:
                    self.add(replica_id)
            self._snapshots = {one: self._snapshots[one] for one in replica_ids}
            self._announce()

    def remove(self, replica_id: str) -> None:
        """Stops listing a replica; its requests in flight can still be released."""
        with self.lock:
            snapshot = self._tracked(replica_id)
            del self._snapshots[replica_id]
            snapshot.floor = 0
            if snapshot.in_flight:
                self._removed[replica_id] = snapshot
            self._announce()

    def reserve(self, replica_id: str, num_samples: int = 1, tokens: int = 0) -> None:
        """Counts samples in flight on a replica, whatever its state."""
        with self.lock:
            snapshot = self._tracked(replica_id)
            snapshot.in_flight += num_samples
            snapshot.held_tokens += tokens

    def release(self, replica_id: str, num_samples: int = 1, tokens: int = 0) -> None:
        with self.lock:
            snapshot = self._known(replica_id)
            if snapshot.in_flight < num_samples or snapshot.held_tokens < tokens:
                held = f"replica {replica_id} with {snapshot.in_flight} in flight"
                raise RuntimeError(f"release must follow a reserve, got {num_samples} of {held}")
            snapshot.in_flight -= num_samples
            snapshot.held_tokens -= tokens
            if not snapshot.in_flight and replica_id in self._removed:
                del self._removed[replica_id]

    def observe(
        self,
        report: EngineReport,
        *,
        asked_at: float | None = None,
        in_flight_then: int | None = None,
    ) -> None:
        """Records an engine's report; one that was asked for before the last one is dropped."""
        now = self.clock()
        asked_at = now if asked_at is None else asked_at
        with self.lock:
            known = self._snapshots.get(report.replica_id)
            if known is None or asked_at < known.asked_at:
                return
            with self._changing(report.replica_id) as known:
                known.asked_at, outdated = asked_at, asked_at < known.marked_at
                alive = report.state in (ReplicaState.SERVING, ReplicaState.STALE)
                is_away = known.away_since is not None  # and may be back in any state
                stays_failed = known.state is ReplicaState.FAILED and not alive and not is_away
                if not outdated and not stays_failed:
                    known.away_since = None
                    known.state, known.reason = report.state, report.reason
                    if (report.weight_version or 0) >= known.floor:
                        known.floor = 0
                    self._fence(known)
                known.report = report = _plausible(report)
                known.measured_at, known.held_when_measured = now, known.held_tokens
                known.counted = _count(known.counted, report.counters, now)
                self.newest_version = max(self.newest_version, report.weight_version or 0)
                inside = report.num_unfinished
                running, waiting = report.num_running, report.num_waiting
                if inside is None and running is not None and waiting is not None:
                    inside = running + waiting
                own = max(known.in_flight, in_flight_then or 0)
                known.num_elsewhere = None if inside is None else max(0, inside - own)

    def mark(
        self, replica_id: str, state: ReplicaState, reason: str = "", *, may_return: bool = False
    ) -> bool:
        """Records a state seen from outside, such as ``FAILED``; says whether that was news."""
        with self.lock:  # held throughout: it may be removed in another thread
            if replica_id not in self._snapshots:
                return False
            with self._changing(replica_id) as known:
                if known.state is ReplicaState.CLOSED and state is ReplicaState.FAILED:
                    return False  # it was closed, and has not failed
                known.marked_at = self.clock()
                if not may_return:
                    known.away_since = None
                elif known.state is not ReplicaState.FAILED:  # one that failed for good stays away
                    known.away_since = known.marked_at
                known.state, known.reason = state, reason
                return True

    def note_asleep(self, replica_ids: Iterable[str]) -> None:
        """Records that engines were put to sleep, which one that dies at once never reports."""
        with self.lock:
            for known in filter(None, map(self._snapshots.get, replica_ids)):
                known.report = dataclasses.replace(known.report, asleep=True)
                known.asked_at = self.clock()

    def set_floor(self, replica_id: str, version: int) -> None:
        """Excludes a replica, which may not know that it is behind, until it holds ``version``."""
        with self._changing(replica_id) as known:
            known.floor = max(version, known.floor)
            self._fence(known)

    def _fence(self, known: LoadSnapshot) -> None:
        """Counts a replica as stale that would admit requests below its floor."""
        if known.floor and known.state.admits_requests:
            known.state = ReplicaState.STALE
            known.reason = f"it did not reach version {known.floor}"

    @contextlib.contextmanager
    def _changing(self, replica_id: str) -> Iterator[LoadSnapshot]:
        """Yields a record to change under the lock; announces a new state or version."""
        with self.lock:
            known = self._tracked(replica_id)
            before = known.state, known.weight_version
            yield known
            if (known.state, known.weight_version) != before:
                self._announce()

    def _announce(self) -> None:
        self._candidates = None
        for on_change, _ in list(self._watchers):
            on_change()

    def _tracked(self, replica_id: str) -> LoadSnapshot:
        if (known := self._snapshots.get(replica_id)) is None:
            raise KeyError(f"replica_id must be one of {list(self._snapshots)}, got {replica_id!r}")
        return known

    def _known(self, replica_id: str) -> LoadSnapshot:
        return self._removed.get(replica_id) or self._tracked(replica_id)

    def __getstate__(self) -> list[LoadSnapshot]:
        kept = ("replica_id", "state", "reason", "block_size", "kv_cache_tokens")
        known = self.snapshots()
        return [LoadSnapshot(**{name: getattr(one, name) for name in kept}) for one in known]

    def __setstate__(self, snapshots: list[LoadSnapshot]) -> None:
        self.__init__([])
        self._snapshots = {one.replica_id: one for one in snapshots}

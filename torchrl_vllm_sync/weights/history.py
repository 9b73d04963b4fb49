"""Records of earlier pushes: versions, time limits and outcomes."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import StaleVersionError, WeightSyncError
from torchrl_vllm_sync.replica import EngineReport, PushStatus
from torchrl_vllm_sync.weights.transport import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.weights.transport import LoadReport, PauseMode, PushReport


# ---- Time limits of pushes


FIRST_TIMEOUT_S = 300.0
"""Seconds for a push of a kind that was not measured yet: groups form, plans are made."""
SLACK_S = 30.0
MULTIPLE = 3.0
NUM_SAMPLES = 9
MOST_KINDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PushKind:
    """What pushes must have in common for their times to be comparable."""

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    # Replicas and their incarnations: after a change groups are formed anew.
    members: frozenset[tuple[str, str]] = frozenset()


class PushDeadlines:
    """Time limits of pushes: 30 s and three times the median of the last successful ones.

    A watchdog that neither ends slow pushes nor lets a stuck peer hold the others for long. Before
    there is a measurement, and where requests in flight are waited for, 300 s at least: how long
    those take says nothing of the next.
    """

    def __init__(self) -> None:
        self._seconds: dict[PushKind, deque[float]] = {}

    def record(self, kind: PushKind, seconds: float) -> None:
        """Records the time of a push that every replica acknowledged."""
        taken = self._seconds.pop(kind, None) or deque(maxlen=NUM_SAMPLES)
        taken.append(seconds)
        self._seconds[kind] = taken
        while len(self._seconds) > MOST_KINDS:
            del self._seconds[next(iter(self._seconds))]

    def timeout_s(self, kind: PushKind) -> float:
        """Returns the seconds after which a replica that is silent in such a push has failed."""
        taken = self._seconds.get(kind)
        if not taken:
            return FIRST_TIMEOUT_S
        measured = SLACK_S + MULTIPLE * statistics.median(taken)
        return max(measured, FIRST_TIMEOUT_S) if kind.mode == "wait" else measured


class VersionLedger:
    """The versions this trainer knows of: what each replica holds, and which one is committed.

    A version is committed once every replica holds it, or, if pushes are not strict, once one does:
    the others take no requests until they hold it too. A push that fails commits nothing.
    """

    def __init__(self) -> None:
        self.committed = 0  # newest version that was; 0 is what engines launch with
        self.reached = 0  # newest version that a replica took from this process
        self.attempted = 0  # newest version that this process began to send
        self.seen = 0  # newest version that any replica, stale ones included, was at
        # What each replica last acknowledged; ``None`` after a failed update.
        self.held: dict[str, int | None] = {}
        self.is_current = False  # whether ``held`` is up to date, so that no replica need be asked
        self._run: tuple[int, str | None] = 0, None

    @property
    def newest(self) -> int:
        """Newest version that any replica acknowledged."""
        return max([self.committed, self.seen, *filter(None, self.held.values())])

    @property
    def run_id(self) -> str | None:
        """Run that the committed version belongs to; ``None`` if unknown here."""
        version, run_id = self._run
        return run_id if version == self.committed else None

    def take_stock(self, answers: Mapping[str, Any]) -> None:
        """Takes over what the replicas report."""
        reports = {n: one for n, one in answers.items() if isinstance(one, EngineReport)}
        whole = {n for n, one in reports.items() if one.state.admits_requests}
        self.held = {n: reports[n].weight_version if n in whole else None for n in answers}
        self.seen = max([0, *(one.weight_version or 0 for one in reports.values())])
        versions = [-1 if one is None else one for one in self.held.values()]
        self.committed = max(self.committed, min(versions, default=0))
        self.is_current = True

    def next_version(self, wanted: int | None, stored: int) -> int:
        """Returns the version to send, by default an unused one."""
        if wanted is None:
            # A version that failed everywhere may be stored already: its number is used up.
            wanted = max(self.newest, self.attempted, stored) + 1
        elif wanted < max(self.newest, 1):
            raise StaleVersionError(f"version must be at least {max(self.newest, 1)}, got {wanted}")
        self.attempted = max(self.attempted, wanted)
        return wanted

    def record(self, reports: list[LoadReport], version: int, run_id: str, *, strict: bool) -> bool:
        """Records each replica's answer; returns whether that newly commits ``version``."""
        self.held |= {one.replica_id: one.version for one in reports}
        is_news = commits(reports, strict=strict) and version > self.committed
        if is_news:
            self.committed = version
        if self.committed == version:
            self._run = version, run_id
        if reached_some(reports):
            self.reached = max(self.reached, version)
        return is_news


def reached_some(reports: list[LoadReport]) -> bool:
    """Whether at least one replica reached the version of a push."""
    return not reports or not all(one.error for one in reports)


def commits(reports: list[LoadReport], *, strict: bool) -> bool:
    """Whether a version counts as committed: on all expected replicas, or at least on one."""
    is_complete = not any(one.error and one.is_expected for one in reports)
    return reached_some(reports) and (is_complete or not strict)


def errors_of(reports: list[LoadReport]) -> dict[str, str]:
    """Returns the reason of each replica that did not reach the version, by id."""
    return {one.replica_id: one.error for one in reports if one.error}


# ---- Status of pushes, for other processes


def finished_push(report: PushReport, ended_at: float) -> PushStatus:
    """Makes the status of a push that was committed."""
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
    """Makes the status of a push that raised."""
    is_sent = isinstance(error, WeightSyncError)
    return PushStatus(
        ended_at=ended_at,
        seconds=seconds,
        version=error.version if is_sent else version,
        left_behind=dict(error.failures) if is_sent else {},
        error=reason_of(error),
    )


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that are seconds, without the unit in their names; others are counts."""
    return {name.removesuffix("_s"): value for name, value in phases.items() if name.endswith("_s")}

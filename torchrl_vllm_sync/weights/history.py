"""Records of earlier pushes: versions and time limits."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import StaleVersionError
from torchrl_vllm_sync.replica import EngineReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.replica import LoadReport
    from torchrl_vllm_sync.weights.transport import PauseMode


# ---- Time limits of pushes

FIRST_TIMEOUT_S = 300.0
"""Seconds for a push of a kind that was not measured yet: groups form, plans are made."""
SLACK_S, MULTIPLE = 30.0, 3.0
NUM_SAMPLES, MOST_KINDS = 9, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PushKind:
    """What pushes must have in common for their times to be comparable."""

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    members: frozenset[tuple[str, str]] = frozenset()  # replicas and their incarnations


class PushDeadlines:
    """Time limits of pushes: 30 s and three times the median of the last successful ones.

    Before there is a measurement, and where requests in flight are waited for, 300 s at least: how
    long those take says nothing of the next.
    """

    def __init__(self) -> None:
        self._seconds: dict[PushKind, deque[float]] = {}

    def record(self, kind: PushKind, seconds: float) -> None:
        """Records the time of a push that every replica acknowledged."""
        taken = self._seconds.pop(kind, None) or deque(maxlen=NUM_SAMPLES)
        taken.append(seconds)
        self._seconds[kind] = taken
        if len(self._seconds) > MOST_KINDS:
            del self._seconds[next(iter(self._seconds))]

    def timeout_s(self, kind: PushKind) -> float:
        """Returns the seconds after which a replica that is silent in such a push has failed."""
        taken = self._seconds.get(kind)
        if not taken:
            return FIRST_TIMEOUT_S
        measured = SLACK_S + MULTIPLE * statistics.median(taken)
        return max(measured, FIRST_TIMEOUT_S) if kind.mode == "wait" else measured


class VersionLedger:
    """The versions this trainer knows of, and which one is committed.

    A version is committed once every replica holds it, or, if pushes are not strict, once one does:
    the others take no requests until they hold it too. A push that fails commits nothing.
    """

    def __init__(self) -> None:
        self.committed = 0  # newest version that was; 0 is what engines launch with
        self.run_id: str | None = None  # run that it belongs to; ``None`` if unknown here
        self.newest = 0  # that any replica, stale ones included, was at when it last said
        self.reached = 0  # newest version that a replica took from this process
        self.attempted = 0  # newest version that this process began to send
        self.is_current = False  # whether no replica need be asked what it holds

    def take_stock(self, answers: Mapping[str, Any]) -> None:
        """Takes over what the replicas report."""
        reports = [one for one in answers.values() if isinstance(one, EngineReport)]
        whole = [one.weight_version for one in reports if one.state.admits_requests]
        held = [one for one in whole if one is not None]
        oldest = min(held, default=0) if len(held) == len(answers) else 0
        if oldest > self.committed:
            self.committed, self.run_id = oldest, None
        self.newest = max([self.committed, *(one.weight_version or 0 for one in reports)])
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
        """Records the replicas' answers; returns whether they newly commit ``version``."""
        is_news = commits(reports, strict=strict) and version > self.committed
        if is_news or version == self.committed:
            self.committed, self.run_id = version, run_id
        self.newest = max([self.newest, self.committed, *(one.version or 0 for one in reports)])
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

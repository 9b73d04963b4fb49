"""How long a push may take when nobody says: a multiple of what pushes like it have taken."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["FIRST_TIMEOUT_S", "PushDeadlines", "PushKind"]

FIRST_TIMEOUT_S = 300.0
"""Seconds for a push of a kind that was not measured yet: groups form, plans are made."""
SLACK_S = 30.0
MULTIPLE = 3.0
NUM_SAMPLES = 9
MOST_KINDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PushKind:
    """What pushes must have in common for one to tell how long another takes.

    Attributes:
        transport: Name of the transport.
        num_bytes: Bytes of all tensors.
        mode: What becomes of requests in flight.
        clear_cache: Whether their keys and values are computed again.
        crew: Replicas and their incarnations: after a change groups are formed anew.
    """

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    crew: frozenset[tuple[str, str]] = frozenset()


class PushDeadlines:
    """Time limits of pushes, from the times of those that went well.

    30 s and three times the median of the last few, as a watchdog that neither ends slow pushes nor
    lets a wedged peer hold the others for long. Before there is a measurement, and where requests
    in flight are waited for, 300 s at least: how long those take says nothing of the next.

    Example:
        >>> deadlines = PushDeadlines()
        >>> kind = PushKind(transport="memmap", num_bytes=8, mode="keep", clear_cache=False)
        >>> deadlines.timeout_s(kind)
        300.0
        >>> deadlines.record(kind, 2.0)
        >>> deadlines.timeout_s(kind)
        36.0
    """

    def __init__(self) -> None:
        self._seconds: dict[PushKind, deque[float]] = {}

    def record(self, kind: PushKind, seconds: float) -> None:
        """Notes how long a push took that every replica acknowledged.

        Args:
            kind: Its kind; the oldest of many kinds is forgotten.
            seconds: Wall clock of the whole push.
        """
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

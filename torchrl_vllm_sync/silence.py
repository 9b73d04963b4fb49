"""How long somebody has owed an answer, by the time that whoever waits was awake."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_STEP_S", "Silence"]

MAX_STEP_S = 1.0
"""Seconds that count, at most, between two looks."""


class Silence:
    """Seconds for which an answer has been owed.

    Whoever waits must look at least once every ``MAX_STEP_S``. What lies between two looks counts
    for no more than that: a listener that was itself stopped, or starved, does not take its own
    absence for another's silence.

    Example:
        >>> silence = Silence()
        >>> silence.look() < 60
        True

    Args:
        clock: Tells the time in seconds; must never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Begins again at 0 seconds."""
        self._looked_at, self._seconds = self._clock(), 0.0

    def look(self) -> float:
        """Returns the seconds so far."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, MAX_STEP_S)
        self._looked_at = now
        return self._seconds

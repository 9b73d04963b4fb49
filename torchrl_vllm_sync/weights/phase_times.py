"""How long the phases of a push took, and when each began."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PhaseTimes"]


class PhaseTimes:
    """Notes the phases of one push as its transport measures them; a later note replaces one.

    Example:
        >>> times = PhaseTimes()
        >>> with times.measure("join_s"):
        ...     time.sleep(0.001)
        >>> 0.001 < times.seconds["join_s"] < 1.0
        True

    Attributes:
        seconds: Seconds of wall clock by phase; and counts, by names that do not end in ``_s``.
        starts: When each phase began, in seconds of this process's ``time.perf_counter()``. A phase
            that is the sum of many pieces has no start.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    def note(self, phase: str, begin: float, end: float | None = None) -> None:
        """Notes one phase.

        Args:
            phase: Its name.
            begin: When it began, by ``time.perf_counter()``.
            end: When it ended, by the same clock; ``None`` means now.
        """
        self.seconds[phase] = (time.perf_counter() if end is None else end) - begin
        self.starts[phase] = begin

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Notes the time inside ``with`` as one phase, also if that ends with an exception."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.note(phase, begin)

"""How fast an engine generates within a window, from the times at which its tokens came."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


# Begin and end, in seconds of ``time.perf_counter()``.
Window = tuple[float, float]


@dataclass(slots=True)
class TokenLog:
    """What one engine's requests produced, and when; times are ``time.perf_counter()``.

    Attributes:
        requests: For each request, when output came and how many tokens it had by then.
        arrivals: For each staged push, from the trainer's word to begin to the start of the pause.
    """

    requests: list[list[tuple[float, int]]] = field(default_factory=list)
    arrivals: list[Window] = field(default_factory=list)

    def rate(self, window: Window) -> float:
        """Tokens per second of all requests within ``window``.

        A step that only partly falls into the window counts by that part: windows may be as short
        as a few steps.
        """
        begin, end = window
        return sum(_produced(one, end) - _produced(one, begin) for one in self.requests) / (
            end - begin
        )

    def step_s(self) -> float:
        """Median seconds between two outputs of a request."""
        return statistics.median(
            later - sooner
            for one in self.requests
            for (sooner, _), (later, _) in itertools.pairwise(one)
        )

    def longest_gap_s(self, window: Window) -> float:
        """Most seconds between two outputs of a request, of gaps that touch ``window``."""
        begin, end = window
        return max(
            (
                later - sooner
                for one in self.requests
                for (sooner, _), (later, _) in itertools.pairwise(one)
                if later > begin and sooner < end
            ),
            default=0.0,
        )


def _produced(request: Sequence[tuple[float, int]], when: float) -> float:
    """Tokens of ``request`` by then, with a share of those of the step under way."""
    for (sooner, before), (later, after) in itertools.pairwise(request):
        if sooner <= when <= later:
            return before + (after - before) * (when - sooner) / (later - sooner)
    raise ValueError(
        f"a request ran from {request[0][0]:.3f} to {request[-1][0]:.3f} s, not at {when:.3f} s: "
        "run fewer rounds or longer requests"
    )

"""Where the time of a step goes: seconds by phase."""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """Seconds by phase of one thread. Each moment is the innermost phase's, so that they add up."""

    def __init__(self) -> None:
        self.thread = threading.main_thread()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def take(self) -> dict[str, float]:
        """Seconds of all phases since the last call of this method."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def phase(self, name: str, *, settle: bool = False) -> Iterator[None]:
        """Counts what happens inside; with ``settle`` until the GPU has done it, too.

        What other threads do meanwhile is not counted.
        """
        if threading.current_thread() is not self.thread:
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.leave(settle=settle)

    def enter(self, name: str) -> None:
        self._turn()
        self._open.append(name)

    def leave(self, *, settle: bool = False) -> None:
        if settle and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._turn()
        self._open.pop()

    def wrap(
        self, owner: Any, method: str, phase: str, *, then: str | None = None, settle: bool = False
    ) -> None:
        """Counts every call of ``owner``'s method; what its caller does afterwards is ``then``."""
        setattr(owner, method, self.timed(getattr(owner, method), phase, then=then, settle=settle))

    def timed(
        self, run: Callable, phase: str, *, then: str | None = None, settle: bool = False
    ) -> Callable:
        @functools.wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase, settle=settle):
                result = run(*args, **kwargs)
            if then is not None and self._open and threading.current_thread() is self.thread:
                self._open[-1] = then
            return result

        return timed

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

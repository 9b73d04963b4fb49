"""Where the time of a step goes: seconds by phase, and the share in which each GPU is busy."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLL_S = 0.02


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


class GPUUse:
    """Polls NVML for the share of time in which each GPU runs anything.

    NVML itself averages over the last 1/6 s to 1 s, so that only longer times say something.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._polls: list[tuple[float, list[float]]] = []
        self._ended = threading.Event()
        self._nvml: Any = None
        with suppress(ImportError):
            import pynvml  # pyright: ignore[reportMissingImports]

            self._nvml = pynvml
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> GPUUse:
        if self._nvml is not None and torch.cuda.is_available():
            self._nvml.nvmlInit()
            count = torch.cuda.device_count()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(count)]
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            self._ended.set()
            self._thread.join(timeout=10)
            self._nvml.nvmlShutdown()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(one) for one in self._handles]
            self._polls.append((time.perf_counter(), [one.gpu / 100 for one in rates]))

    def between(self, begin: float, end: float) -> list[float] | None:
        """Shares of each GPU between two times of ``time.perf_counter()``; ``None`` if unknown."""
        polls = [shares for when, shares in self._polls if begin <= when <= end]
        return [statistics.fmean(of_one) for of_one in zip(*polls, strict=True)] or None

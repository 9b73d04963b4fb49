"""Checks of what callers set, how a refused value is quoted, time limits, calls that may hang."""

from __future__ import annotations

import math
import reprlib
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from torchrl_vllm_sync.errors import UnsupportedArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Seconds for what a caller of a service waits for, unless told otherwise.
DEFAULT_TIMEOUT_S = 300.0


def check_integer(name: str, value: object, least: int) -> None:
    """Refuses what is no integer, or is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UnsupportedArgumentError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise UnsupportedArgumentError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: object, least: float) -> None:
    """Refuses what is no number, or is less than ``least``; infinity is a number, NaN is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UnsupportedArgumentError(f"{name} must be a number, got {value!r}")
    if not value >= least:
        raise UnsupportedArgumentError(f"{name} must be at least {least}, got {value}")


def check_positive(name: str, value: object) -> None:
    """Refuses what is no number greater than 0; infinity is one."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not (is_number and value > 0):
        raise UnsupportedArgumentError(f"{name} must be greater than 0, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no finite number greater than 0."""
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        wanted = "a finite number greater than 0"
        raise UnsupportedArgumentError(f"{name} must be {wanted}, got {value!r}")


def check_wait(name: str, value: object) -> None:
    """Refuses what is no time to wait: a finite number from 0 on."""
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise UnsupportedArgumentError(f"{name} must be a finite number from 0 on, got {value!r}")


class _Short(reprlib.Repr):
    """Looks at a few items and levels only: ``repr`` fails on deep lists and long integers."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return f"an integer of {bits} bits" if bits > 256 else super().repr_int(x, level)


_short = _Short()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = 12
_short.maxdict, _short.maxlong, _short.maxother, _short.maxstring = 6, 60, 60, 60


def shown(value: object) -> str:
    """Returns at most 60 characters for a value in a message, whatever it is, without failing."""
    text = _short.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """Joins the first five, and says how many more there are."""
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return separator.join(texts[:5]) + more


class Deadline:
    """A moment by which something must have ended, ``timeout_s`` seconds from now."""

    __slots__ = ("_clock", "at")

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.at = clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 when it has passed."""
        return max(self.at - self._clock(), 0.0)

    @property
    def passed(self) -> bool:
        return self._clock() >= self.at

    def min(self, timeout_s: float) -> Deadline:
        """Returns the earlier of this one and ``timeout_s`` seconds from now."""
        return Deadline(min(timeout_s, self.at - self._clock()), clock=self._clock)

    def shorten(self, timeout_s: float) -> None:
        """Moves this one forward to ``timeout_s`` seconds from now, unless it is earlier."""
        self.at = self.min(timeout_s).at


T = TypeVar("T")


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Makes a call that may never return, in a daemon thread that can be left behind with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

"""Checks of what callers set, how values are quoted, time limits, calls that may hang, imports."""

from __future__ import annotations

import contextlib
import gc
import math
import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from torchrl_vllm_sync.errors import UnsupportedArgumentError

# Seconds for what a caller of a service waits for, unless told otherwise.
DEFAULT_TIMEOUT_S = 300.0
# Of new objects, after which a process that only serves looks for garbage; Python's is 700 (3.11).
COLLECT_AFTER = 20_000


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


def check_seconds(name: str, value: object, *, or_zero: bool = False) -> None:
    """Refuses what is no finite number greater than 0, or from 0 on."""
    is_number = isinstance(value, int | float)
    if not (is_number and (0 < value < math.inf or (or_zero and value == 0))):
        wanted = "from 0 on" if or_zero else "greater than 0"
        raise UnsupportedArgumentError(f"{name} must be a finite number {wanted}, got {value!r}")


def is_missing(model: str) -> bool:
    """Whether a model is a path, and there is nothing; others may be names on a hub."""
    return model.startswith(("/", ".", "~")) and not Path(model).exists()


# What the int64 stamps on rows can hold.
MAX_VERSION = 2**63 - 1


def check_version(name: str, version: object) -> None:
    """Refuses what is no policy version."""
    if type(version) is bool or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise UnsupportedArgumentError(
            f"{name} must be a policy version, an integer from 0 on below 2**63, "
            f"got {shown(version)}"
        )


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

    def shorten(self, timeout_s: float) -> None:
        """Moves this one forward to ``timeout_s`` seconds from now, unless it is earlier."""
        self.at = min(self.at, self._clock() + timeout_s)


def url_of(host: str, port: int) -> str:
    """Address of a server that listens there, as it is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """For imports of much that stays: Python looks at none of it for garbage meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_rarely() -> None:
    """For a process that only serves: looks for garbage rarely, and never at what is there now.

    Each request makes hundreds of objects that end by themselves, and lives among those of others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)

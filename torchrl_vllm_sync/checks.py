"""Checks of what callers set, and how a refused value is quoted."""

from __future__ import annotations

import math
import reprlib

import numpy as np

from torchrl_vllm_sync.errors import UnsupportedArgumentError


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


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no finite number greater than 0."""
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise UnsupportedArgumentError(
            f"{name} must be a finite number greater than 0, got {value!r}"
        )


# A value as a message shows it: short, and without failing, whatever a caller passed.


_MAX_LENGTH = 60
_MAX_BITS = 256


class _Short(reprlib.Repr):
    """Looks at a few items and levels only: ``repr`` fails on deep lists and long integers."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MAX_BITS:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


_short = _Short()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = 12
_short.maxdict, _short.maxlong, _short.maxother, _short.maxstring = 6, 60, 60, 60


def shown(value: object) -> str:
    """Returns at most 60 characters for a value."""
    text = _short.repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."

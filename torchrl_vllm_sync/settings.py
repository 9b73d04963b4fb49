"""Checks of numbers that callers set."""

from __future__ import annotations

import numpy as np

from torchrl_vllm_sync.errors import UnsupportedArgumentError

__all__ = ["check_integer", "check_number"]


def check_integer(name: str, value: object, least: int) -> None:
    """Refuses what is no integer, or is less than ``least``.

    Raises:
        UnsupportedArgumentError: It is one of these; truth values are no integers.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UnsupportedArgumentError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise UnsupportedArgumentError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: object, least: float) -> None:
    """Refuses what is no number, or is less than ``least``; infinity is a number, NaN is none.

    Raises:
        UnsupportedArgumentError: It is one of these; truth values are no numbers.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UnsupportedArgumentError(f"{name} must be a number, got {value!r}")
    if not value >= least:
        raise UnsupportedArgumentError(f"{name} must be at least {least}, got {value}")

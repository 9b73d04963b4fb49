"""A value as a message shows it: short, and without failing, whatever a caller passed."""

from __future__ import annotations

import reprlib

__all__ = ["shown"]

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

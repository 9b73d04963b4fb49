"""How many requests of this process have ended, and how."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import RequestLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["REQUEST_ENDS", "RequestCounts"]

REQUEST_ENDS: tuple[str, ...] = ("answered", "lost", "failed", "cancelled")
"""Each request ends in one of these ways; ``lost`` is by a ``RequestLostError``."""


class RequestCounts:
    """Counts requests by their end. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REQUEST_ENDS, 0)

    def totals(self) -> dict[str, int]:
        """Returns how many have ended in each of ``REQUEST_ENDS``."""
        with self._lock:
            return dict(self._counts)

    @contextlib.contextmanager
    def following(self, num_requests: int) -> Iterator[Callable[[Exception | None], None]]:
        """Counts the requests of one call, each once.

        Gives a function to be called with the error of each request as it ends, or with ``None``.
        Those that it was not called for have failed if the block raises, and were cancelled if it
        is cancelled or closed.

        Args:
            num_requests: Requests of the call.
        """
        left = num_requests

        def end(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            lost = isinstance(error, RequestLostError)
            self._add("answered" if error is None else "lost" if lost else "failed", 1)

        try:
            yield end
        except Exception:
            self._add("failed", left)
            raise
        except BaseException:  # asyncio.CancelledError, or the end of a stream that is not read on
            self._add("cancelled", left)
            raise

    def _add(self, end: str, number: int) -> None:
        with self._lock:
            self._counts[end] += number

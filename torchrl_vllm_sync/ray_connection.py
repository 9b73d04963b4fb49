"""This process's connection to Ray, as background threads may use it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["staying_connected"]

# Starting a cluster holds the lock for some seconds.
LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def staying_connected() -> Iterator[bool]:
    """Gives whether this process is connected to Ray, and keeps that from ending meanwhile.

    A thread that calls into Ray (2.60) while another is inside ``ray.shutdown()`` takes the whole
    process with it: a core worker that is called after its end exits. So a thread that nobody waits
    for makes its calls in here, and no long ones. Ray connects and shuts down under a lock, which
    this takes; it gives ``False`` when that is held for longer than five seconds.
    """
    import ray
    from ray._private import worker

    if not worker._connect_or_shutdown_lock.acquire(timeout=LOCK_TIMEOUT_S):
        yield False
        return
    try:
        yield ray.is_initialized()
    finally:
        worker._connect_or_shutdown_lock.release()

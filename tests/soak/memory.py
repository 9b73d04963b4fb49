"""Having Ray's memory monitor kill an actor: it acts early, and the actor fills its memory."""

import time

PIECE = 128 * 2**20


def quick_to_kill():
    """Environment of a Ray whose memory monitor acts when half of what is free now is used.

    It kills the workers that were begun last, as many as must go.
    """
    from ray._private.utils import get_system_memory, get_used_memory

    threshold = (1 + get_used_memory() / get_system_memory()) / 2
    return {
        "RAY_memory_usage_threshold": f"{threshold:.3f}",
        "RAY_memory_monitor_refresh_ms": "50",
        "RAY_max_kill_memory_buffer_bytes": "1",
    }


def eat(_):
    """Fills an actor's memory until it is killed."""
    pieces = []
    while True:
        pieces.append(b"x" * PIECE)
        time.sleep(0.01)

"""One event loop in a background thread, on which blocking calls run the asynchronous code."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

__all__ = ["iterate_blocking", "run_blocking"]

_Result = TypeVar("_Result")
_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """Returns this process's background loop; a forked child gets one of its own."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="torchrl_vllm_sync", daemon=True).start()
            _loops[os.getpid()] = loop
        return loop


def run_blocking(coroutine: Coroutine[object, object, _Result]) -> _Result:
    """Runs ``coroutine`` on the background loop and returns its result.

    Works in any thread, inside a running loop (a notebook) too. An interrupt of the waiting thread
    cancels the coroutine and lets it clean up.

    Args:
        coroutine: What to run; it bounds its own waits.

    Raises:
        BaseException: Whatever the coroutine raises.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def iterate_blocking(stream: AsyncIterator[_Result]) -> Iterator[_Result]:
    """Iterates over ``stream`` from code that is not asynchronous.

    Dropping the iterator closes the stream, which ends whatever feeds it.

    Args:
        stream: An asynchronous generator; it bounds its own waits.
    """
    try:
        while True:
            try:
                item = run_blocking(_next(stream))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_blocking(_close(stream))


async def _next(stream: AsyncIterator[_Result]) -> _Result:
    return await anext(stream)


async def _close(stream: AsyncIterator[_Result]) -> None:
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]  an asynchronous generator

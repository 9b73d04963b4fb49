"""One event loop in a background thread, on which blocking calls run the asynchronous code."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

__all__ = ["iterate_blocking", "run_blocking"]

_Result = TypeVar("_Result")
# An interrupted caller waits this long for its coroutine to clean up, and whoever drops an iterator
# for its stream to close: the garbage collector may do so in a thread that holds a lock which
# closing needs, such as the ledger's.
CLEAN_UP_TIMEOUT_S = 10.0

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_closing: set[asyncio.Task[None]] = set()


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

    Works in any thread but the loop's own, inside a running loop (a notebook) too. An interrupt of
    the waiting thread cancels the coroutine and lets it clean up.

    Args:
        coroutine: What to run; it bounds its own waits.

    Raises:
        BaseException: Whatever the coroutine raises.
    """
    ended = threading.Event()

    async def run() -> _Result:
        try:
            return await coroutine
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), _loop())
    try:
        return future.result()
    except BaseException:
        if future.cancel():  # it had not ended: this thread was interrupted
            ended.wait(CLEAN_UP_TIMEOUT_S)
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
        _close_blocking(stream)


def _close_blocking(stream: AsyncIterator[object]) -> None:
    """Closes ``stream``, and waits for that, but not for ever.

    Iterators are also dropped by the garbage collector, in whatever thread it runs, and at the very
    end of the process, when the background loop no longer does.
    """
    if sys.is_finalizing():
        return
    loop = _loop()
    if asyncio._get_running_loop() is loop:
        task = loop.create_task(_close(stream))
        _closing.add(task)
        task.add_done_callback(_closing.discard)
    else:
        closing = asyncio.run_coroutine_threadsafe(_close(stream), loop)
        wait([closing], timeout=CLEAN_UP_TIMEOUT_S)
        if closing.done():
            closing.result()


async def _next(stream: AsyncIterator[_Result]) -> _Result:
    return await anext(stream)


async def _close(stream: AsyncIterator[object]) -> None:
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]  an asynchronous generator

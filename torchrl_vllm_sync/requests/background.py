"""One event loop in a background thread, on which blocking calls run asynchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

_Result = TypeVar("_Result")
# An interrupted caller waits this long for its coroutine to clean up, and a dropped iterator for
# its stream to close: the garbage collector may drop it in a thread that holds a lock which closing
# needs, such as the ledger's.
CLEAN_UP_TIMEOUT_S = 10.0

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
# Streams that are iterated over. The garbage collector must not find one with its iterator:
# it would finalize the stream while the loop closes it.
_streams: set[AsyncIterator[object]] = set()


def _loop() -> asyncio.AbstractEventLoop:
    """This process's background loop; a forked child gets one of its own."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()

            def run() -> None:
                while True:
                    with contextlib.suppress(SystemExit):  # it comes to who waits for the coroutine
                        loop.run_forever()

            threading.Thread(target=run, name="torchrl_vllm_sync", daemon=True).start()
            _loops[os.getpid()] = loop
        return loop


def start(coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Runs ``coroutine`` on the background loop; cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def run_blocking(coroutine: Awaitable[_Result]) -> _Result:
    """Runs ``coroutine`` on the background loop, from any other thread, a notebook's too."""
    ended = threading.Event()

    async def run() -> _Result:
        try:
            return await coroutine
        finally:
            ended.set()

    future = start(run())
    try:
        return future.result()
    except BaseException:
        if future.cancel():  # this thread was interrupted: the coroutine cleans up
            ended.wait(CLEAN_UP_TIMEOUT_S)
        raise


def iterate_blocking(stream: AsyncIterator[_Result]) -> Iterator[_Result]:
    """Iterates over ``stream`` from synchronous code; dropping the iterator closes it."""
    _streams.add(stream)
    try:
        while True:
            try:
                item = run_blocking(anext(stream))
            except StopAsyncIteration:
                return
            yield item
    finally:
        # Iterators are also dropped by the garbage collector, in whatever thread it runs, and at
        # the end of the process, when the background loop no longer runs.
        if not sys.is_finalizing():
            closing = start(_close(stream))
            if asyncio._get_running_loop() is not _loop():
                wait([closing], timeout=CLEAN_UP_TIMEOUT_S)
                if closing.done():
                    closing.result()


async def _close(stream: AsyncIterator[object]) -> None:
    try:
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]  an async generator
    finally:
        _streams.discard(stream)

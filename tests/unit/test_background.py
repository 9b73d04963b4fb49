"""Blocking calls over the background loop: from any thread, interrupted, dropped at any time."""

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_vllm_sync.requests import background
from torchrl_vllm_sync.requests.background import iterate_blocking, run_blocking, start


async def double(number):
    await asyncio.sleep(0)
    return 2 * number


def test_results_and_errors_come_back():
    async def fail():
        raise KeyError("why")

    assert run_blocking(double(4)) == 8
    with pytest.raises(KeyError, match="why"):
        run_blocking(fail())


def test_an_exit_comes_back_as_an_error_does():
    async def leave():
        sys.exit(3)

    assert isinstance(start(leave()).exception(timeout=10), SystemExit)
    assert start(double(4)).result(timeout=10) == 8


def test_many_threads_share_one_loop():
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: run_blocking(double(i)), range(500))) == [
            2 * i for i in range(500)
        ]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("torchrl_vllm_sync") == 1


async def test_it_works_inside_a_running_loop():
    assert run_blocking(double(1)) == 2


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_clean_up(monkeypatch):
    started, log = threading.Event(), []

    async def work():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            log.append("cleaned up")

    class InterruptedFuture:
        def __init__(self, future):
            self.cancel = future.cancel

        def result(self):
            started.wait()
            raise KeyboardInterrupt

    schedule = asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(
        asyncio,
        "run_coroutine_threadsafe",
        lambda coroutine, loop: InterruptedFuture(schedule(coroutine, loop)),
    )
    with pytest.raises(KeyboardInterrupt):
        run_blocking(work())
    assert log == ["cleaned up"]


class Source:
    """An asynchronous generator that notes when it is closed."""

    def __init__(self):
        self.closed = threading.Event()

    async def items(self):
        try:
            for item in range(100):
                yield item
        finally:
            await asyncio.sleep(0)
            self.closed.set()


def test_a_stream_is_iterated_to_its_end():
    source = Source()
    assert list(iterate_blocking(source.items())) == list(range(100))
    assert source.closed.is_set()


def test_dropping_the_iterator_closes_the_stream():
    source = Source()
    for item in iterate_blocking(source.items()):
        if item == 3:
            break
    gc.collect()
    assert source.closed.is_set()


def test_dropping_it_on_the_loops_own_thread_does_not_lock_up():
    source = Source()
    iterator = iterate_blocking(source.items())
    next(iterator)
    held = [iterator]
    del iterator

    async def drop():
        held.clear()

    run_blocking(drop())
    assert source.closed.wait(10)


def test_an_iterator_left_over_at_exit_does_not_hang_the_process():
    code = (
        "from torchrl_vllm_sync.requests.background import iterate_blocking\n"
        "async def items():\n"
        "    yield 1\n"
        "    yield 2\n"
        "left_over = iterate_blocking(items())\n"
        "print(next(left_over))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "1\n"
    assert not done.stderr


def test_a_stream_that_was_never_begun_needs_no_end():
    source = Source()
    iterator = iterate_blocking(source.items())
    del iterator
    assert not source.closed.is_set()
    assert not background._streams

"""Waiting until what an engine core has sent is taken up, with a slow taker in vLLM's place."""

import asyncio
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.engine import internals


class SlowEngine:
    """Takes outputs up one at a time, each in several steps of the event loop."""

    def __init__(self):
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.errored, self.taken, self.task = False, [], None

    def _run_output_handler(self):
        if self.task is None:
            self.task = asyncio.create_task(self.take())

    async def take(self):
        while True:
            outputs = await self.engine_core.outputs_queue.get()
            for _ in range(5):
                await asyncio.sleep(0)
            self.taken.append(outputs)


@pytest.mark.parametrize("number", [0, 1, 7])
async def test_settling_ends_when_all_that_was_sent_is_taken_up(number):
    engine = SlowEngine()
    engine._run_output_handler()
    for index in range(number):
        engine.engine_core.outputs_queue.put_nowait(index)
    await asyncio.sleep(0)  # the first is half taken up, which an empty queue does not show
    await internals.settle_outputs(engine)
    assert engine.taken[:number] == list(range(number))
    engine.task.cancel()


async def test_an_empty_queue_alone_would_not_do():
    engine = SlowEngine()
    engine._run_output_handler()
    engine.engine_core.outputs_queue.put_nowait(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.engine_core.outputs_queue.empty()
    assert engine.taken == []
    await internals.settle_outputs(engine)
    assert engine.taken == [0]
    engine.task.cancel()


async def test_an_engine_that_died_is_not_waited_for():
    engine = SlowEngine()
    engine._run_output_handler()
    engine.task.cancel()
    asyncio.get_running_loop().call_later(0.01, setattr, engine, "errored", True)
    async with asyncio.timeout(5):
        await internals.settle_outputs(engine)

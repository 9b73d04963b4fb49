"""Agents that are commands: what becomes of their processes."""

import asyncio
import sys
from types import SimpleNamespace

import psutil
import pytest

from torchrl_vllm_sync.rl.agents import AgentCollector

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
async def test_a_command_has_ended_when_its_run_has_however_often_it_is_cancelled(num_cancels):
    """A run that is late is cancelled, and again if another's failure ends all of them."""
    of = SimpleNamespace(agent=SLEEPS, _url="")
    before = psutil.Process().children()
    task = asyncio.create_task(AgentCollector._execute(of, "key", {}))
    async with asyncio.timeout(30):
        while not (  # noqa: ASYNC110  a process that begins tells nobody
            children := [*{*psutil.Process().children()} - {*before}]
        ):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [one for one in children if psutil.pid_exists(one.pid)] == []

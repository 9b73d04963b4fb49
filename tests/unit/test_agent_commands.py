"""Agents that end in unusual ways: what becomes of their processes, and of others' loop."""

import asyncio
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest

from torchrl_vllm_sync.errors import AgentError
from torchrl_vllm_sync.requests.background import start
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


def exits(*_):
    sys.exit("no idea")


async def is_cancelled(*_):
    raise asyncio.CancelledError


@pytest.mark.parametrize("agent", [exits, is_cancelled])
def test_a_function_that_exits_or_is_cancelled_has_failed_and_no_more(agent):
    """It runs for the loop that all requests of the process are on."""
    settings = {"agent": agent, "max_attempts": 2, "timeout_s": 10, "_url": ""}
    of = SimpleNamespace(**settings, _running=asyncio.Semaphore(), _server=MagicMock())
    of._call = partial(AgentCollector._call, of)
    with pytest.raises(AgentError, match=r"attempt 2: RuntimeError: (SystemExit|CancelledError)"):
        start(AgentCollector._session(of, {})).result(20)
    assert start(asyncio.sleep(0, "goes on")).result(10) == "goes on"

"""Each internal of vLLM that ``engine/internals.py`` touches behaves as the library assumes.

When one of these fails after an upgrade of vLLM, the function it names is the one to look at.
"""

import asyncio
import inspect
import sys
import time

import pytest
import ray

from tests.engine.conftest import ENGINE
from tests.engine.faults import own_children
from torchrl_vllm_sync.engine.actor import EngineActor

IDS = [7, 8, 9, 10, 11]


class Probe(EngineActor):
    """Runs a coroutine function of a test beside its engine."""

    async def call(self, function):
        return await function(self)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture(scope="module")
def inside(cluster, checkpoint):
    """Runs a coroutine function, given the actor, in the actor's process."""
    from torchrl_vllm_sync import AsyncVLLM

    with AsyncVLLM.from_pretrained(str(checkpoint), actor_class=Probe, **ENGINE) as service:
        yield lambda function: ray.get(service.actors[0].call.remote(function), timeout=100)


def start(engine, name, max_tokens=240):
    """Starts one request; returns its task and the list its outputs go to."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    outputs = []

    async def run():
        async for output in engine.generate({"prompt_token_ids": IDS}, params, name):
            outputs.append(output)  # noqa: PERF401  others look at it meanwhile

    return asyncio.create_task(run()), outputs


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  vLLM tells nobody
            await asyncio.sleep(0.002)


def num_tokens(outputs):
    return len(outputs[-1].outputs[0].token_ids)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_scheduler_freezes_requests_and_resume_lets_them_finish(inside, clear_cache):
    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        task, outputs = start(actor.engine, f"pause-{clear_cache}")
        await until(lambda: outputs)
        await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=clear_cache)
        await asyncio.sleep(0.2)  # what was on its way has arrived
        frozen = num_tokens(outputs)
        is_paused = await actor.engine.is_paused()
        await asyncio.sleep(0.3)
        still = num_tokens(outputs)
        await actor.engine.resume_generation()
        await task
        return is_paused, frozen, still, num_tokens(outputs), outputs[-1].finished

    is_paused, frozen, still, at_end, finished = inside(check)
    assert is_paused
    assert frozen == still < 240 == at_end
    assert finished


def test_pause_scheduler_returns_when_no_step_runs_without_the_fixed_sleep(inside):
    async def fastest(actor):
        from torchrl_vllm_sync.engine import internals

        times = []
        for _ in range(10):
            begin = time.perf_counter()
            await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=False)
            times.append(time.perf_counter() - begin)
            await actor.engine.resume_generation()
        return min(times)

    from vllm.v1.engine.async_llm import AsyncLLM

    # The day the public call no longer sleeps, the library can use it.
    assert "asyncio.sleep(0.02)" in inspect.getsource(AsyncLLM.pause_generation)
    assert inside(fastest) < 0.02


def test_known_and_prefilling_requests_tell_who_has_a_token(inside):
    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        engine = actor.engine
        empty = (internals.known_requests(engine), internals.prefilling_requests(engine))
        first, outputs = start(engine, "first")
        await until(lambda: outputs)
        await internals.pause_scheduler(engine, mode="keep", clear_cache=False)
        second, _ = start(engine, "second")
        await until(lambda: "second" in internals.known_requests(engine))
        seen = (
            internals.known_requests(engine),
            internals.prefilling_requests(engine),
            internals.num_unfinished_requests(engine),
        )
        await engine.abort(["first", "second"])
        await engine.resume_generation()
        await asyncio.gather(first, second)
        return empty, seen, internals.num_unfinished_requests(engine)

    empty, seen, left = inside(check)
    assert empty == (set(), set())
    assert seen == ({"first", "second"}, {"second"}, 2)
    assert left == 0


def test_stats_recorder_gets_the_schedulers_figures(inside):
    async def check(actor):
        running = [start(actor.engine, f"stats-{i}") for i in range(40)]  # 32 fit at once
        peak = (0, 0, 0.0)
        while not all(task.done() for task, _ in running):
            await asyncio.sleep(0.01)
            if (stats := actor._stats.latest()) is not None:
                figures = (stats.num_running, stats.num_waiting, stats.kv_cache_usage)
                peak = tuple(map(max, peak, figures))
        return peak, actor._stats.latest().measured_at <= time.monotonic(), actor.report()

    (num_running, num_waiting, usage), in_the_past, report = inside(check)
    assert num_running == 32
    assert 1 <= num_waiting <= 40
    assert 0 < usage <= 1
    assert in_the_past
    assert report.num_unfinished == 0
    assert report.stats_age_s >= 0


def test_set_weight_label_marks_the_tokens_that_follow(inside):
    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        await internals.set_weight_label(actor.engine, "old")
        task, outputs = start(actor.engine, "label")
        await until(lambda: outputs and num_tokens(outputs) >= 3)
        await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=False)
        await internals.set_weight_label(actor.engine, "new")
        await actor.engine.resume_generation()
        await task
        return outputs[-1].outputs[0].weight_versions

    spans = inside(check)
    assert [span.version for span in spans] == ["old", "new"]
    assert [spans[0].start, spans[1].end] == [0, 240]
    assert spans[0].end == spans[1].start >= 3


def test_call_workers_hears_each_worker(inside):
    async def compare(actor):
        from torchrl_vllm_sync.engine import internals

        return (
            await actor.engine.collective_rpc("native_engine_name"),
            await internals.call_workers(actor.engine, "native_engine_name", ()),
        )

    theirs, ours = inside(compare)
    assert theirs == ours
    assert len(ours) == 1


def test_an_engine_core_that_is_killed_is_noticed(inside):
    """Last: it ends the engine. ``AsyncLLM.errored`` is what the replica's watch looks at."""

    async def kill(actor):
        import os
        import signal

        (core,) = own_children()
        before = (actor.ready(), actor.engine.errored)
        task, outputs = start(actor.engine, "doomed")
        await until(lambda: outputs)
        os.kill(core, signal.SIGKILL)
        (failure,) = await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not actor.ready())
        return before, type(failure).__name__, actor.engine.errored, actor.report()

    before, failure, errored, report = inside(kill)
    assert before == (True, False)
    assert failure == "EngineDeadError"
    assert errored
    assert str(report.state) == "failed"
    assert "engine core died" in report.reason
    assert report.num_unfinished == 0

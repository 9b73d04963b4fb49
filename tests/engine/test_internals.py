"""Each internal of vLLM that ``engine/internals.py`` touches behaves as the library assumes.

When one of these fails after an upgrade of vLLM, the function it names is the one to look at.
"""

import asyncio
import inspect
import os
import sys
import time

import pytest
import ray

from tests.engine.faults import own_children

IDS = [7, 8, 9, 10, 11]
KILLS = True

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture(scope="module")
def inside(hurt):
    """Runs a coroutine function, given the actor, in the process of one that is not used again."""
    actor = hurt.actors[0]
    yield lambda function: ray.get(actor.call.remote(function), timeout=100)
    ray.kill(actor)  # other tests' samples are not watched there any more


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


def test_log_probabilities_of_a_step_come_in_one_piece(inside):
    async def check(actor):
        from vllm import SamplingParams

        from torchrl_vllm_sync.engine import internals

        unpack, pieces = internals.unpack, []

        def watching(outputs, samples):
            pieces.append(sum(one.new_logprobs is not None for one in outputs))
            unpack(outputs, samples)

        async def one(name):
            params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0, temperature=0.0)
            async for output in actor.engine.generate({"prompt_token_ids": IDS}, params, name):
                last = output
            return len(last.outputs[0].logprobs), len(last.outputs[0].token_ids)

        internals.unpack = watching
        found = await asyncio.gather(*(one(f"packed-{at}") for at in range(4)))
        internals.unpack = unpack
        return found, pieces

    found, pieces = inside(check)
    assert found == [(20, 20)] * 4
    assert set(pieces) == {1} or set(pieces) == {0, 1}  # steps without an output carry none


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


def test_call_between_steps_takes_answers_ahead_of_later_outputs(inside):
    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        task, outputs = start(actor.engine, "between")
        await until(lambda: outputs)
        places, raised = [], None

        def take(answers):
            places.append((answers, num_tokens(outputs)))

        async def call(take):
            args = actor.engine, "sync_sleep", (0.2,), take
            return await internals.call_between_steps(*args), num_tokens(outputs)

        answers, after = await call(take)
        try:
            await call(lambda _: {}["lost"])
        except KeyError as error:
            raised = str(error)
        await task
        return internals.knows_its_steps(actor.engine.vllm_config), places, answers, after, raised

    knows, places, answers, after, raised = inside(check)
    assert knows
    assert answers == [None]
    assert [one for one, _ in places] == [answers]
    assert 0 < places[0][1] <= after < 240
    assert raised == "'lost'"


def test_pause_scheduler_returns_when_no_step_runs_without_the_fixed_sleep(inside):
    async def fastest(actor):
        from torchrl_vllm_sync.engine import internals

        times = [float("inf")]
        while min(times) > 0.02 and len(times) < 200:  # other processes may hold it up
            begin = time.perf_counter()
            await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=False)
            times.append(time.perf_counter() - begin)
            await actor.engine.resume_generation()
        return min(times)

    from vllm.v1.engine.async_llm import AsyncLLM

    # The day the public call no longer sleeps, the library can use it.
    assert "asyncio.sleep(0.02)" in inspect.getsource(AsyncLLM.pause_generation)
    assert inside(fastest) < 0.02


def test_ask_health_reaches_the_workers_which_the_public_call_does_not(inside):
    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        await internals.ask_health(actor.engine)
        await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=False)
        await internals.ask_health(actor.engine)
        await actor.engine.resume_generation()
        return await internals.call_workers(actor.engine, "check_health", ())

    from vllm.v1.engine.async_llm import AsyncLLM

    assert inside(check) == [None]
    # The day the public call asks somebody, the library can use it.
    assert "engine_core" not in inspect.getsource(AsyncLLM.check_health)


def test_watch_samples_tells_of_each_sample_and_what_it_has(inside):
    async def check(actor):
        from vllm import SamplingParams

        from torchrl_vllm_sync.engine import internals

        engine, seen = actor.engine, {}
        internals.watch_samples(engine, lambda one: seen.update({(one.engine_id, one.index): one}))
        first, outputs = start(engine, "first")
        await until(lambda: outputs)
        await internals.pause_scheduler(engine, mode="keep", clear_cache=False)
        second, _ = start(engine, "second")
        params = SamplingParams(n=3, max_tokens=5, ignore_eos=True, temperature=1.0)

        async def several():
            async for _ in engine.generate({"prompt_token_ids": IDS}, params, "several"):
                pass

        third = asyncio.create_task(several())
        await until(lambda: len(seen) == 5)
        paused = {key: (one.num_tokens, one.is_finished) for key, one in seen.items()}
        cached = {key: one.num_cached_tokens for key, one in seen.items()}
        unfinished = internals.num_unfinished_requests(engine)
        had = num_tokens(outputs)
        await engine.abort(["first", "second"])
        await engine.resume_generation()
        await asyncio.gather(first, second, third)
        at_end = {key: (one.num_tokens, one.is_finished) for key, one in seen.items()}
        times = {
            key: (one.queue_s, one.prefill_s, one.decode_s, one.num_cached_tokens)
            for key, one in seen.items()
        }
        return had, paused, cached, unfinished, at_end, times

    had, paused, cached, unfinished, at_end, times = inside(check)
    several = [("several", index) for index in range(3)]
    assert set(paused) == {("first", 0), ("second", 0), *several}
    assert unfinished == 5
    assert paused["first", 0] == (had, False)
    assert had > 0
    assert all(paused[key] == (0, False) for key in [("second", 0), *several])
    assert cached["first", 0] == 0  # shorter than a block
    assert all(cached[key] is None for key in [("second", 0), *several])
    assert at_end["first", 0] == (had, True)
    assert at_end["second", 0] == (0, True)
    assert times["second", 0][1:] == (None, None, None)  # it never had a token
    for key in several:
        assert at_end[key] == (5, True)
        queue_s, prefill_s, decode_s, num_cached = times[key]
        assert min(queue_s, prefill_s, decode_s) >= 0
        assert max(queue_s, prefill_s, decode_s) < 100
        assert num_cached == 0


def test_deliver_to_hands_on_each_output_while_vllm_works_on_its_step(inside):
    async def check(actor):
        from vllm import SamplingParams

        from torchrl_vllm_sync.engine import internals

        engine, taken, has_ended = actor.engine, [], asyncio.Event()

        class Taker:
            def put(self, output):
                taken.append(len(output.outputs[0].token_ids))
                if output.finished:
                    has_ended.set()

        def register(state):
            if state.engine_id == "handed":
                state.deliver_to(Taker())

        internals.watch_samples(engine, register)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        queue = await engine.add_request("handed", {"prompt_token_ids": IDS}, params)
        async with asyncio.timeout(20):
            await has_ended.wait()
        return taken, queue.output

    taken, queued = inside(check)
    assert taken == [1, 2, 3, 4, 5]  # none was put together with another
    assert queued is None


@pytest.mark.slow
def test_settle_outputs_takes_up_all_that_was_sent(inside):
    """The labels of vLLM, which the engine core puts on, are the witness."""

    async def check(actor):
        from torchrl_vllm_sync.engine import internals

        seen = {}
        internals.watch_samples(actor.engine, lambda one: seen.update({one.engine_id: one}))
        differences, counts = [], []
        for attempt in range(20):
            seen.clear()
            label = f"{attempt}-old"
            await internals.set_weight_label(actor.engine, label)
            running = [start(actor.engine, f"settle-{attempt}-{i}", 60) for i in range(24)]
            await until(lambda running=running: all(outputs for _, outputs in running))
            await internals.pause_scheduler(actor.engine, mode="keep", clear_cache=False)
            counted = {name: one.num_tokens for name, one in seen.items()}
            await internals.set_weight_label(actor.engine, f"{attempt}-new")
            await actor.engine.resume_generation()
            await asyncio.gather(*(task for task, _ in running))
            for i, (_, outputs) in enumerate(running):
                first = outputs[-1].outputs[0].weight_versions[0]
                assert first.version == label
                differences.append(first.end - counted[f"settle-{attempt}-{i}"])
                counts.append(first.end)
        return differences, counts

    differences, counts = inside(check)
    assert set(differences) == {0}
    assert len(set(counts)) > 1


def test_stats_recorder_gets_the_schedulers_figures(inside):
    async def check(actor):
        running = [start(actor.engine, f"stats-{i}") for i in range(40)]  # 32 fit at once
        peak = (0, 0, 0.0)
        while not all(task.done() for task, _ in running):
            await asyncio.sleep(0.01)
            if stats := actor._stats.latest():
                figures = (stats["num_running"], stats["num_waiting"], stats["kv_cache_usage"])
                peak = tuple(map(max, peak, figures))
        return peak, actor._stats.latest()["measured_at"] <= time.monotonic(), actor.report()

    (num_running, num_waiting, usage), in_the_past, report = inside(check)
    assert num_running == 32
    assert 1 <= num_waiting <= 40
    assert 0 < usage <= 1
    assert in_the_past
    assert report.num_unfinished == 0
    assert report.stats_age_s >= 0
    for latency in (report.time_to_first_token, report.inter_token_latency):
        assert 0 < latency.p50_s <= latency.p99_s
    assert report.counters.num_generated_tokens >= 40 * 240
    assert report.counters.num_prompt_tokens >= 40 * len(IDS)
    assert report.counters.prefix_cache_queries >= 40 * len(IDS)


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


def test_the_first_cause_is_found_in_what_workers_printed(capfd):
    from torchrl_vllm_sync.engine import internals

    printed = internals.output_sizes()  # pytest captures into files, as Ray does
    os.write(1, b"(Worker pid=7) ERROR 11-22 13:22:13 [a.py:1] ValueError: no room: 3\n")
    os.write(2, b"Process EngineCore:\nTraceback (most recent call last):\n")
    os.write(2, b"Exception: initialization failed. See stack trace for root cause.\n")
    assert internals.startup_failure(printed) == "ValueError: no room: 3"

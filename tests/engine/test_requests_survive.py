"""2,000 requests, and replicas that are killed: nothing is lost, doubled or left behind."""

import asyncio
import functools
import os
import random  # noqa: TID251  seeded below
import signal
import threading

import psutil
import pytest
import ray

from tests.engine.faults import engine_core_pid
from tests.engine.requests import endless, eventually, is_idle, sampling, slowed
from torchrl_vllm_sync.errors import (
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
)

NUM_REQUESTS = 2000
KILLS = True


def make_prompt(i):
    """One of four forms. The first two ids, ``i`` in base 256, say which request it is."""
    ids = [5 + i // 256, 5 + i % 256, 9, 10]
    return (ids, tuple(ids), {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "x"})[
        i % 4
    ]


def identity(output):
    high, low = output.prompt_token_ids[:2]
    return (high - 5) * 256 + low - 5


@pytest.mark.slow
def test_2000_requests_with_timeouts_and_cancellations(service):
    """Callers of several kinds at once; each request is answered once, or was given up."""
    generator = random.Random(0)
    answered, timed_out, cancelled = [], [], []
    waiting = list(range(NUM_REQUESTS))
    batches = []
    while waiting:
        size = min(generator.choice([1, 1, 2, 7, 40, 100]), len(waiting))
        batches.append(waiting[:size])
        del waiting[:size]
    kinds = ("plain", "plain", "timeout", "cancel", "stream")

    async def call(batch, kind, delay_s):
        prompts = [make_prompt(i) for i in batch]
        if kind == "stream":
            for i, prompt in zip(batch, prompts, strict=True):
                stream = service.astream(prompt, sampling())
                outputs = [output async for output in stream]
                assert identity(outputs[-1]) == i
                answered.append(i)
            return
        long = kind in ("timeout", "cancel")
        params = [endless() if long and i % 3 == 0 else sampling() for i in batch]
        task = asyncio.create_task(
            service.agenerate(
                prompts,
                params,
                timeout_seconds=delay_s if kind == "timeout" else 200.0,
                return_exceptions=True,
            )
        )
        if kind == "cancel":
            await asyncio.sleep(delay_s)
            task.cancel()
        try:
            outputs = await task
        except asyncio.CancelledError:
            cancelled.extend(batch)
            return
        assert len(outputs) == len(batch)
        for i, output in zip(batch, outputs, strict=True):
            if isinstance(output, Exception):
                assert isinstance(output, GenerationTimeoutError)
                timed_out.append(i)
            else:
                assert identity(output) == i
                assert output.finished
                answered.append(i)

    async def call_all():
        limit = asyncio.Semaphore(24)

        async def limited(batch, kind, delay_s):
            async with limit:
                await call(batch, kind, delay_s)

        await asyncio.gather(
            *(
                limited(batch, kinds[n % len(kinds)], generator.uniform(0.01, 1.0))
                for n, batch in enumerate(batches)
            )
        )

    asyncio.run(call_all())
    assert sorted(answered + timed_out + cancelled) == list(range(NUM_REQUESTS))
    assert len(answered) > NUM_REQUESTS // 2
    assert timed_out
    assert cancelled
    assert service.load.total_in_flight == 0
    eventually(lambda: is_idle(service))
    assert [
        one["pending_requests"] for one in service.requests.balancer.get_stats()["actor_stats"]
    ] == [
        0,
        0,
    ]


@pytest.fixture(scope="module")
def doomed(hurt):
    """A service of three replicas, of which one survives this module."""
    return hurt


def drawn(seed):
    return sampling(n=3, temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)


def all_token_ids(output):
    return [list(one.token_ids) for one in output.outputs]


def kill_engine_core(service, index):
    """Returns what kills it at once."""
    return functools.partial(os.kill, engine_core_pid(service.actors[index]), signal.SIGKILL)


def kill_actor(service, index):
    return functools.partial(ray.kill, service.actors[index])


@pytest.mark.parametrize(
    ("index", "kill"),
    [(0, kill_engine_core), pytest.param(1, kill_actor, marks=pytest.mark.slow)],
)
def test_requests_of_a_killed_replica_go_to_the_others(doomed, monkeypatch, index, kill):
    """In this order: after the first case two replicas are left, after the second one."""
    prompts = [make_prompt(i) for i in range(120)]
    # In sixes, so that each of three, and of two, replicas gets long and short ones in turn.
    params = [sampling(max_tokens=2) if i // 6 % 2 else endless() for i in range(120)]
    # Several samples each, some of which may have ended when the replica dies; seeds repeat them.
    params[6::12] = [drawn(seed) for seed in range(10)]
    wanted = [all_token_ids(one) for one in doomed.generate(prompts, params, actor_index=2)]
    doomed.create_load_balancer("round-robin")
    dispatcher = doomed.requests._dispatcher
    run, arrived, killers = dispatcher.run, [], []
    kill_now = kill(doomed, index)

    async def run_and_kill(requests, reserve, *, on_result):
        """Kills once the replica has answered some, and holds some more."""

        def watch(result):
            on_result(result)
            arrived.append(result.request_id)
            from_hurt.append(result.replica_id == str(index))
            if sum(from_hurt) >= 5 and not killers:
                killers.append(threading.Thread(target=kill_now))
                killers[0].start()

        from_hurt = []
        return await run(requests, reserve, on_result=watch)

    with monkeypatch.context() as patched, slowed(doomed, 0.02):
        patched.setattr(dispatcher, "run", run_and_kill)
        outputs = doomed.generate(prompts, params)
    killers[0].join()

    assert [all_token_ids(output) for output in outputs] == wanted
    assert len(arrived) == len(set(arrived)) == 120
    kept = [output.replica_id for output in outputs].count(str(index))
    assert 5 <= kept < 120 // (3 - index)  # what had arrived is kept, the rest has moved

    state = doomed.load.snapshots()[index]
    assert str(state.state) == "failed"
    assert state.reason
    outputs = doomed.generate(prompts, params)
    assert str(index) not in {output.replica_id for output in outputs}
    assert [all_token_ids(output) for output in outputs] == wanted
    select_actor = doomed.requests.balancer.select_actor
    assert {select_actor([7, i]) for i in range(100)} <= {0, 1, 2} - {index}
    assert doomed.load.total_in_flight == 0
    figures = doomed.get_num_unfinished_requests()
    assert figures[2] == 0
    assert len(doomed.get_cache_usage()) == 3
    with pytest.raises(NoReplicaAvailableError, match=f"replica {index} is failed"):
        doomed.generate([5, 6], sampling(), actor_index=index)


@pytest.mark.slow
def test_without_any_replica_each_call_says_so_and_shutdown_is_clean(doomed):
    """Last: it ends the service."""
    pids = [ray.get(doomed.actors[2].describe.remote()).pid]
    pids.append(engine_core_pid(doomed.actors[2]))
    with slowed(doomed):
        stream = doomed.generate([5, 6], endless(), stream=True)
        next(stream)
        kill_actor(doomed, 2)()
    with pytest.raises(ReplicaUnavailableError, match="replica 2 is failed"):
        list(stream)
    with pytest.raises(NoReplicaAvailableError, match="replica 2 is failed"):
        doomed.generate([5, 6], sampling())
    assert doomed.get_num_unfinished_requests() == [0, None, None]
    assert doomed.load.total_in_flight == 0
    doomed.shutdown()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))

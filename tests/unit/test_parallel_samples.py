"""Samples of one request as requests of their own, and their outputs together again."""

import asyncio
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.answers import Answers, split_samples
from torchrl_vllm_sync.engine.gate import AdmissionGate
from torchrl_vllm_sync.requests.messages import EngineRequest


def test_samples_have_seeds_of_their_own():
    from vllm import SamplingParams

    params = SamplingParams(n=3, seed=7, temperature=0.5)
    assert [(one.n, one.seed, one.temperature) for one in split_samples(params)] == [
        (1, 7, 0.5),
        (1, 8, 0.5),
        (1, 9, 0.5),
    ]
    assert (params.n, params.seed) == (3, 7)
    assert {one.seed for one in split_samples(SamplingParams(n=2))} == {None}


def test_one_sample_is_the_request_itself():
    from vllm import SamplingParams

    params = SamplingParams()
    assert split_samples(params) == [params]


class Engine:
    """Samples that yield what they are fed, and know whether they were closed."""

    def __init__(self, count):
        self.queues = [asyncio.Queue() for _ in range(count)]
        self.closed = []

    async def sample(self, request, index, params, owner, take):
        try:
            while (item := await self.queues[index].get()) is not None:
                if isinstance(item, Exception):
                    raise item
                take(index, output(item, finished=item == "end"), item)
        finally:
            self.closed.append(index)


def output(text, *, finished):
    return SimpleNamespace(outputs=[SimpleNamespace(index=0, text=text)], finished=finished)


def run(engine, kind, on_step=None):
    """Runs a request of as many samples, none of which an engine answers but as it is fed."""
    from vllm import SamplingParams

    answers = Answers("0", AdmissionGate("0", ReplicaState.SERVING))
    answers._sample = engine.sample
    params = SamplingParams(n=len(engine.queues), output_kind=kind)
    request = EngineRequest(request_id="r", prompt={}, sampling_params=params, timeout_s=9.0)
    return asyncio.create_task(answers._run(request, on_step))


async def test_items_come_in_the_order_of_arrival():
    from vllm.sampling_params import RequestOutputKind

    engine, found = Engine(2), []
    running = run(engine, RequestOutputKind.CUMULATIVE, found.append)
    await asyncio.sleep(0)
    for index, item in ((1, "a"), (0, "b"), (1, "c"), (1, "end"), (0, "d"), (0, "end")):
        engine.queues[index].put_nowait(item)
        await asyncio.sleep(0.01)
    for queue in engine.queues:
        queue.put_nowait(None)
    last = await running
    told = [(one.output.outputs[0].index, *one.samples) for one in [*found, last]]
    assert told == [(1, "a"), (0, "b"), (1, "c"), (1, "end"), (0, "d"), (0, "end")]
    assert [one.finished for one in [*found, last]] == [False] * 5 + [True]
    assert sorted(engine.closed) == [0, 1]


async def test_finished_samples_come_together_in_their_order():
    from vllm.sampling_params import RequestOutputKind

    engine = Engine(2)
    running = run(engine, RequestOutputKind.FINAL_ONLY)
    for index in (1, 0):
        engine.queues[index].put_nowait("end")
        engine.queues[index].put_nowait(None)
        await asyncio.sleep(0.01)
    assert [one.index for one in (await running).output.outputs] == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_failure_ends_the_others(count):
    from vllm.sampling_params import RequestOutputKind

    engine = Engine(count)
    running = run(engine, RequestOutputKind.FINAL_ONLY)
    await asyncio.sleep(0)
    engine.queues[-1].put_nowait(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        await running
    assert sorted(engine.closed) == [*range(count)]


@pytest.mark.parametrize("count", [1, 2])
async def test_cancelling_whoever_waits_closes_all(count):
    from vllm.sampling_params import RequestOutputKind

    engine = Engine(count)
    running = run(engine, RequestOutputKind.FINAL_ONLY)
    await asyncio.sleep(0.01)
    running.cancel()
    running.cancel()  # as a gate does that counts two samples of one request
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(engine.closed) == [*range(count)]

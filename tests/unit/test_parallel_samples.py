"""Samples of one request as requests of their own, and their outputs together again."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.answers import AdmissionGate, Answers, Batch, split_samples
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
    """Samples that yield what they are fed, and know whether they were aborted."""

    def __init__(self, gate):
        model = SimpleNamespace(is_encoder_decoder=False)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.gate, self.aborted = gate, []

    async def add_request(self, engine_id, prompt, params, *, lora_request):
        assert params.n == 1
        self.gate.running[engine_id].sample = SimpleNamespace(
            report=lambda completion, checker: completion.text
        )

    async def abort(self, engine_ids):
        self.aborted += engine_ids

    def feed(self, index, item):
        if not isinstance(item, Exception):
            item = output(item, finished=item == "end")
        self.gate.running[f"r~{index + 1}"].put(item)


def output(text, *, finished):
    return SimpleNamespace(outputs=[SimpleNamespace(index=0, text=text)], finished=finished)


async def start(count, kind, on_step=None):
    """Has an engine begin a request of so many samples; gives the engine, and the result's task."""
    from vllm import SamplingParams

    answers = Answers("0", gate := AdmissionGate("0", ReplicaState.SERVING))
    answers.begin(engine := Engine(gate), SimpleNamespace(salt="", version=0))
    params = SamplingParams(n=count, output_kind=kind)
    prompt = {"prompt_token_ids": [5]}
    request = EngineRequest(request_id="r", prompt=prompt, sampling_params=params, timeout_s=9.0)

    async def run():
        async with contextlib.aclosing(Batch(answers, [request], on_step).run()) as ends:
            ((result,),) = [results async for results in ends]
        return result

    task = asyncio.create_task(run())
    for _ in range(2):  # one for the batch, one for what enters its requests
        await asyncio.sleep(0)
    return engine, task


async def test_items_come_in_the_order_of_arrival():
    from vllm.sampling_params import RequestOutputKind

    found = []
    engine, task = await start(2, RequestOutputKind.CUMULATIVE, found.append)
    fed = [(1, "a"), (0, "b"), (1, "c"), (1, "end"), (0, "d"), (0, "end")]
    for one in fed:
        engine.feed(*one)
    last = await task
    told = [(one.output.outputs[0].index, *one.samples) for one in [*found, last]]
    assert told == fed
    assert [one.finished for one in [*found, last]] == [False] * 5 + [True]
    assert engine.aborted == []


async def test_finished_samples_come_together_in_their_order():
    from vllm.sampling_params import RequestOutputKind

    engine, task = await start(2, RequestOutputKind.FINAL_ONLY)
    for index in (1, 0):
        assert not task.done()
        engine.feed(index, "end")
    assert [one.index for one in (await task).output.outputs] == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_failure_ends_the_others(count):
    from vllm.sampling_params import RequestOutputKind

    engine, task = await start(count, RequestOutputKind.FINAL_ONLY)
    engine.feed(count - 1, KeyError("lost"))
    assert "KeyError: 'lost'" in str((await task).error)
    assert engine.aborted == [f"r~{index + 1}" for index in range(count)]
    assert engine.gate.running == {}


@pytest.mark.parametrize("count", [1, 2])
async def test_cancelling_whoever_waits_ends_all(count):
    from vllm.sampling_params import RequestOutputKind

    engine, task = await start(count, RequestOutputKind.FINAL_ONLY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == [f"r~{index + 1}" for index in range(count)]

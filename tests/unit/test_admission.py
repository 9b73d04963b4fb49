"""The gate of a replica: who passes, waits, is turned away or ended in each state."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.answers import Answers as EngineAnswers
from torchrl_vllm_sync.engine.gate import AdmissionGate, RunningRequest
from torchrl_vllm_sync.errors import GenerationError, ReplicaUnavailableError
from torchrl_vllm_sync.requests.messages import EngineRequest

ENDING = (ReplicaState.STALE, ReplicaState.FAILED, ReplicaState.CLOSED)


@pytest.fixture
async def gate():
    return AdmissionGate("0", ReplicaState.SERVING)


def inside(gate):
    """A request that has passed the gate and is being worked on."""
    task = asyncio.create_task(asyncio.Event().wait())
    gate.running["e"] = RunningRequest("e", task)
    return task


async def test_a_draining_replica_turns_new_requests_away_and_waiting_ones_too(gate):
    gate.set(ReplicaState.UPDATING)
    waiting = asyncio.create_task(gate.enter())
    later = asyncio.create_task(gate.enter(min_version=7))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set(ReplicaState.DRAINING, "it leaves")
    for refused in (waiting, later, gate.enter()):
        with pytest.raises(ReplicaUnavailableError, match="0 is draining: it leaves") as caught:
            await refused
        assert caught.value.state is ReplicaState.DRAINING


@pytest.mark.parametrize("state", list(ReplicaState))
async def test_those_inside_are_ended_in_states_without_whole_weights_only(gate, state):
    task = inside(gate)
    gate.set(state)
    await asyncio.sleep(0)
    assert task.cancelled() is (state in ENDING)
    assert gate.has_ended_requests is (state in ENDING)
    task.cancel()


class Answers(EngineAnswers):
    """The request side of a replica, whose engine never answers."""

    def __init__(self, gate):
        super().__init__("0", gate)
        self.entered = asyncio.Event()

    async def _run(self, request, on_step):
        await self._gate.enter()
        inside = RunningRequest("e", asyncio.current_task())
        self._gate.running["e"] = inside
        self.entered.set()
        await asyncio.Event().wait()


def engine(generate, *, is_encoder_decoder=False):
    model = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    return SimpleNamespace(generate=generate, vllm_config=SimpleNamespace(model_config=model))


@pytest.mark.parametrize(
    ("prompt", "is_encoder_decoder", "salt", "is_rendered"),
    [
        ({"prompt_token_ids": [5, 6]}, False, "v1", True),
        (
            {"prompt_token_ids": [5, 6], "prompt": "text", "cache_salt": "own"},
            False,
            "v1:own",
            True,
        ),
        ({"prompt_token_ids": [5, 6], "multi_modal_data": {}}, False, "v1", False),
        ({"prompt_token_ids": [5, 6]}, True, "v1", False),
    ],
)
async def test_an_engine_gets_token_ids_ready_made_and_parameters_that_it_need_not_copy(
    gate, prompt, is_encoder_decoder, salt, is_rendered
):
    from vllm import SamplingParams

    asked = []

    async def generate(prompt, params, engine_id, lora_request):
        asked.append((prompt, params.clone().skip_clone))
        return
        yield

    answers = EngineAnswers("0", gate)
    answers.begin(
        engine(generate, is_encoder_decoder=is_encoder_decoder), SimpleNamespace(salt="v1")
    )
    params = SamplingParams()
    await answers._answer(dataclasses.replace(request(), prompt=prompt, sampling_params=params))
    kind = {"type": "token"} if is_rendered else {}
    assert asked == [({**prompt, **kind, "cache_salt": salt}, True)]


async def test_what_was_aborted_is_turned_away_until_it_is_sent_again(gate):
    asked, taken = [], []

    async def generate(prompt, params, engine_id, lora_request):
        asked.append(engine_id)
        return
        yield

    answers = Answers(gate)
    answers.begin(engine(generate), SimpleNamespace(salt=""))
    assert await answers.abort([request().abort_id]) == 0
    with pytest.raises(GenerationError, match="its caller gave it up"):
        await answers._sample(request(), 0, None, None, taken.append)
    again = dataclasses.replace(request(), attempt=1)
    await answers._sample(again, 0, None, None, taken.append)
    assert taken == []
    assert asked == ["r~1~1"]


@pytest.fixture
async def answers(gate):
    return Answers(gate)


def request():
    prompt = {"prompt_token_ids": [5, 6]}
    return EngineRequest(request_id="r", prompt=prompt, sampling_params=None, timeout_s=9.0)


async def test_the_answer_of_a_request_inside_outlives_the_draining(answers):
    task = asyncio.create_task(answers._answer(request()))
    await answers.entered.wait()
    answers._gate.set(ReplicaState.DRAINING)
    await asyncio.sleep(0.01)
    assert not task.done()
    refused = await answers._answer(request())
    assert refused.error.state is ReplicaState.DRAINING
    answers._gate.set(ReplicaState.CLOSED)  # what is left at its end is told
    ended = await task
    assert ended.error.state is ReplicaState.CLOSED


async def test_a_caller_that_cancels_at_a_draining_replica_has_cancelled(answers):
    """And was not refused: the gate did not end its request."""
    task = asyncio.create_task(answers._answer(request()))
    await answers.entered.wait()
    answers._gate.set(ReplicaState.DRAINING)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

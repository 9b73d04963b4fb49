"""What becomes of requests while weights are broadcast: modes, caches, and staged weights.

What every transport owes to requests in flight is in ``test_push_in_flight.py``.
"""

import asyncio
import math
import time

import pytest
import ray
from vllm.sampling_params import RequestOutputKind

from tests.engine.checks import assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.requests import token_ids
from tests.engine.salts import freeze_salt, thaw_salt
from tests.engine.test_push_in_flight import (
    NUM_TOKENS,
    greedy,
    paced,
    prompts,
    push_while_running,
    spans,
    until_running,
)
from tests.engine.trainers import Breaking, broadcast
from torchrl_vllm_sync import AsyncVLLM, ReplicaState
from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightSyncError
from torchrl_vllm_sync.testing import greedy_tokens, load_tiny_model, make_tiny_checkpoint
from torchrl_vllm_sync.weights.source import MappingSource


@pytest.fixture(scope="module")
def broadcasting(service):
    """The shared service, pushed to by broadcast."""
    service.use_transport(broadcast())
    return service


@pytest.fixture
def pushed(broadcasting, model):
    """A service that holds a model nobody pushed before, and that model."""
    perturbed(model, seed=time.monotonic_ns() % 2**31)
    broadcasting.push_weights(model)
    return broadcasting, model


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("clear_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_waiting_lets_requests_end_under_the_weights_they_began_with(
    pushed, other_model, clear_cache
):
    service, model = pushed
    old = service.weight_version
    asked = prompts(6)
    outputs, report = await push_while_running(
        service,
        other_model,
        asked,
        greedy(),
        num_running=6,
        step_s=0.01,
        mode="wait",
        clear_cache=clear_cache,
    )
    assert sum(one.phases["num_kept"] for one in report.replicas) == 0
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert spans(output.outputs[0]) == [(old, 0, NUM_TOKENS)]
        assert (output.min_version, output.max_version) == (old, old)
        assert token_ids(output)[:24] == greedy_tokens(model, prompt, max_tokens=24)
    assert_holds(service, other_model)


async def test_aborting_returns_requests_as_they_are(pushed, other_model):
    service, model = pushed
    old = service.weight_version
    asked = prompts(6)
    outputs, _ = await push_while_running(
        service, other_model, asked, greedy(), num_running=6, mode="abort"
    )
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.outputs[0].finish_reason == "abort"
        tokens = token_ids(output)
        assert 0 < len(tokens) < NUM_TOKENS
        assert output.min_version == old
        assert tokens == greedy_tokens(model, prompt, max_tokens=len(tokens))
    assert_holds(service, other_model)
    after = await service.agenerate(asked[0], greedy(8))
    assert token_ids(after) == greedy_tokens(other_model, asked[0], max_tokens=8)


def test_other_modes_are_refused(broadcasting, model):
    version = broadcasting.weight_version
    with pytest.raises(UnsupportedArgumentError, match="mode must be one of"):
        broadcasting.push_weights(model, mode="drain")
    assert broadcasting.weight_version == version


# ---------------------------------------------------------------- keys of old weights


def cached_after_a_push(service, prompt, weights):
    """Fills the cache with ``prompt``, pushes, and asks again; returns the answer."""
    for _ in range(2):
        service.generate(prompt_token_ids=prompt, sampling_params=greedy(1), actor_index=0)
    service.push_weights(weights)
    return service.generate(prompt_token_ids=prompt, sampling_params=greedy(12), actor_index=0)


def test_new_requests_never_see_old_keys(pushed, other_model):
    service, _ = pushed
    (prompt,) = prompts(1, length=100)
    output = cached_after_a_push(service, prompt, other_model)
    assert output.num_cached_tokens == 0
    assert token_ids(output) == greedy_tokens(other_model, prompt, max_tokens=12)


def test_the_check_above_notices_requests_that_are_not_salted(pushed, other_model):
    service, _ = pushed
    (prompt,) = prompts(1, length=100)
    ray.get([one.__ray_call__.remote(freeze_salt) for one in service.actors])
    try:
        output = cached_after_a_push(service, prompt, other_model)
    finally:
        ray.get([one.__ray_call__.remote(thaw_salt) for one in service.actors])
    assert output.num_cached_tokens == 96  # three blocks of 32, of the old weights
    assert token_ids(output) != greedy_tokens(other_model, prompt, max_tokens=12)


async def test_tails_that_are_not_recomputed_differ(pushed, other_model):
    """The twin of the test that recomputed tails are what the new weights continue with."""
    service, _ = pushed
    asked = prompts(4)
    outputs, _ = await push_while_running(service, other_model, asked, greedy(), num_running=4)
    equal = []
    for prompt, output in zip(asked, outputs, strict=True):
        (_, _, switch), _ = spans(output.outputs[0])
        tokens = token_ids(output)
        tail = greedy_tokens(other_model, prompt + tokens[:switch], max_tokens=24)
        equal.append(tokens[switch : switch + 24] == tail)
    assert not all(equal)


# ---------------------------------------------------------------- staged weights


@pytest.fixture(scope="module")
def staging(cluster, tmp_path_factory):
    """One replica with memory for a second set of weights, and its checkpoint.

    The model is wide, so that a push takes much longer than a step, and so does its loading.
    """
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("wide"),
        seed=7,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    with AsyncVLLM.from_pretrained(
        str(path),
        num_replicas=1,
        stage_weights=True,
        worker_extension_cls="tests.engine.faults.FaultyWorker",
        **ENGINE,
    ) as service:
        yield service, path


@pytest.mark.slow
def test_staged_weights_arrive(staging):
    service, path = staging
    model = load_tiny_model(path)
    assert_holds(service, model)
    service.use_transport(broadcast(staged=True, bucket_bytes=2**20))
    for step in range(3):
        perturbed(model, seed=step, scale=0.01)
        assert distance(service, model, 0) > 0.05
        (one,) = service.push_weights(model).replicas
        assert_holds(service, model)
        assert one.path == "layerwise"
        assert 0 < one.phases["ready_s"] < one.phases["stage_s"]


class Slow(MappingSource):
    """A source that keeps its last tensor back until ``enough()``, but no longer than patience.

    It notes when it begins to and when it ends.
    """

    def __init__(self, tensors, enough, patience_s):
        # Without the tied head, which would be compared with its twin in a pass of its own.
        super().__init__({name: one for name, one in tensors.items() if name != "lm_head.weight"})
        self.enough, self.patience_s = enough, patience_s
        self.begin = self.end = math.inf

    def views(self):
        return None

    def __iter__(self):
        *others, last = super().__iter__()
        yield from others
        self.begin, patience = time.monotonic(), Deadline(self.patience_s)
        while not (self.enough() or patience.passed):
            time.sleep(0.01)
        self.end = time.monotonic()
        yield last


async def note_tokens(service, times):
    """Notes when each step of one long request came."""
    params = greedy(200, output_kind=RequestOutputKind.CUMULATIVE)
    async for _ in service.astream(prompts(1)[0], params):
        times.append(time.monotonic())


async def tokens_during_a_push(service, weights, *, patience_s):
    """Pushes slow weights; returns how many steps a request made meanwhile, and the report.

    The trainer keeps its last tensor for 30 steps, as long as its patience lasts; they are counted.
    """
    times = []

    def num_steps():
        return sum(source.begin < when <= source.end for when in times)

    source = Slow(weights, lambda: num_steps() >= 30, patience_s)
    async with paced(service):
        reading = asyncio.ensure_future(note_tokens(service, times))
        await until_running(service, 1)
        report = await asyncio.to_thread(service.push_weights, source, timeout_s=60)
    await reading
    return num_steps(), report.replicas[0].phases


@pytest.mark.slow
async def test_generation_goes_on_while_weights_arrive(staging):
    """The trainer is slow on purpose: steps made meanwhile show whether the engine waited."""
    service, path = staging
    model = load_tiny_model(path)
    during = {}
    for staged in (True, False):
        service.use_transport(broadcast(staged=staged, bucket_bytes=2**20))
        service.push_weights(perturbed(model, seed=3, scale=0.01))  # forms the group
        weights = perturbed(model, seed=4, scale=0.01).state_dict()
        patience_s = 30.0 if staged else 8.0  # while it is paused it makes no step
        during[staged] = await tokens_during_a_push(service, weights, patience_s=patience_s)
        assert_holds(service, model)
    (steps_staged, staged), (steps_paused, paused) = during[True], during[False]
    assert steps_staged >= 30
    assert steps_staged > 3 * steps_paused  # some had been made before, and are read late
    assert staged["stage_s"] > 1 > paused["stage_s"] == 0
    assert staged["whole_pause_s"] < paused["whole_pause_s"] / 2


@pytest.mark.slow
async def test_staged_weights_keep_requests_and_label_their_tokens(staging):
    service, path = staging
    model = load_tiny_model(path)
    service.use_transport(broadcast(staged=True, bucket_bytes=2**20))
    old = service.push_weights(model).version
    other = perturbed(load_tiny_model(path), seed=8, scale=0.02)
    asked = prompts(3)
    slow = Slow(other.state_dict(), lambda: False, patience_s=0.5)
    outputs, report = await push_while_running(
        service, slow, asked, greedy(), num_running=3, clear_cache=True
    )
    for prompt, output in zip(asked, outputs, strict=True):
        tokens = token_ids(output)
        assert len(tokens) == NUM_TOKENS
        (first, _, switch), (second, _, _) = spans(output.outputs[0])
        assert (first, second) == (old, report.version)
        assert tokens[:switch] == greedy_tokens(model, prompt, max_tokens=switch)
        tail = greedy_tokens(other, prompt + tokens[:switch], max_tokens=16)
        assert tokens[switch : switch + 16] == tail


@pytest.mark.slow
@pytest.mark.parametrize("at_fault", ["worker", "source"])
def test_a_stage_that_breaks_off_leaves_the_engine_as_it_was(staging, at_fault):
    service, path = staging
    model = load_tiny_model(path)
    service.use_transport(broadcast(staged=True, bucket_bytes=2**20))
    version = service.push_weights(model).version
    other = perturbed(load_tiny_model(path), seed=9, scale=0.02)
    source = other
    if at_fault == "worker":
        actor = service.actors[0]
        ray.get(actor.collective_rpc.remote("sync_plan", kwargs={"fail_at": 7, "times": 1}))
    else:
        source = Breaking(other.state_dict(), RuntimeError("injected before tensor 7"), at=7)
    with pytest.raises(WeightSyncError, match="injected before tensor 7") as caught:
        service.push_weights(source, timeout_s=30)
    assert "not whole" not in str(caught.value)
    (report,) = service.replicas.call_replicas("report").values()
    assert (report.state, report.weight_version) == (ReplicaState.SERVING, version)
    assert_holds(service, model)
    service.push_weights(other)
    assert_holds(service, other)

"""Pushes while requests run: none is lost, tokens are labelled, keys end with their version."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from vllm import SamplingParams

from tests.engine.checks import TOLERANCE, assert_holds, assert_labelled, perturbed
from tests.engine.requests import STEP_S, slowed
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import MemmapTransport
from torchrl_vllm_sync.testing import greedy_tokens, token_log_probs

NUM_TOKENS = 200


def greedy(num_tokens=NUM_TOKENS, **kwargs):
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, **kwargs)


TRANSPORTS = {"memmap": MemmapTransport, "broadcast": broadcast}


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request, service):
    service.use_transport(TRANSPORTS[request.param]())
    yield request.param
    service.use_transport(MemmapTransport())


@pytest.fixture
def pushed(service, model, transport):
    """A service that holds a model nobody pushed before, and that model."""
    perturbed(model, seed=time.monotonic_ns() % 2**31)
    service.push_weights(model)
    return service, model


@asynccontextmanager
async def paced(service, step_s=STEP_S):
    """Steps last so long that requests of 200 tokens outlast a push by far, on any machine."""

    pace = slowed(service, step_s)
    await asyncio.to_thread(pace.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(pace.__exit__, None, None, None)


async def push_while_running(
    service, weights, prompts, params, *, num_running, step_s=STEP_S, **options
):
    """Pushes once ``num_running`` requests are running; returns outputs and report."""
    async with paced(service, step_s):
        running = asyncio.ensure_future(service.agenerate(prompts, params, timeout_seconds=120))
        await until_running(service, num_running)
        report = await asyncio.to_thread(service.push_weights, weights, **options)
    outputs = await running
    for output in outputs:
        assert_labelled(output)
    return outputs, report


async def until_running(service, number):
    deadline = time.monotonic() + 60
    while True:
        reports = await asyncio.to_thread(service.replicas.call_replicas, "report")
        if sum(report.num_running or 0 for report in reports.values()) >= number:
            return
        assert time.monotonic() < deadline, "the requests never ran side by side"


def spans(completion):
    return [(int(span.version), span.start, span.end) for span in completion.weight_versions]


def prompts(number, length=40):
    return [[(7 * i + j) % 500 + 3 for j in range(length)] for i in range(number)]


async def test_no_request_in_flight_is_lost_and_every_token_is_labelled(pushed, other_model):
    service, _ = pushed
    old = service.weight_version
    outputs, report = await push_while_running(
        service, other_model, prompts(8), greedy(), num_running=8
    )
    new = report.version
    assert new == old + 1
    assert sum(one.phases["num_kept"] for one in report.replicas) == 8
    for output in outputs:
        (completion,) = output.outputs
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == NUM_TOKENS
        (first, start, switch), (second, again, end) = spans(completion)
        assert (first, second, start, end) == (old, new, 0, NUM_TOKENS)
        assert switch == again
        assert 0 < switch < NUM_TOKENS
        assert (output.min_version, output.max_version) == (old, new)
    assert_holds(service, other_model)


async def test_samples_of_one_request_are_kept_together(pushed, other_model):
    service, _ = pushed
    old = service.weight_version
    params = SamplingParams(n=4, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0)
    outputs, report = await push_while_running(
        service, other_model, prompts(2), params, num_running=8
    )
    for output in outputs:
        assert len(output.outputs) == 4
        for completion in output.outputs:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == NUM_TOKENS
            assert [version for version, _, _ in spans(completion)] == [old, report.version]
        assert (output.min_version, output.max_version) == (old, report.version)


async def test_recomputed_tails_are_what_the_new_weights_continue_with(pushed, other_model):
    service, model = pushed
    asked = prompts(4)
    outputs, report = await push_while_running(
        service, other_model, asked, greedy(), num_running=4, clear_cache=True
    )
    for prompt, output in zip(asked, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        (_, _, switch), (second, _, _) = spans(output.outputs[0])
        assert second == report.version
        assert tokens[:switch] == greedy_tokens(model, prompt, max_tokens=switch)
        tail = greedy_tokens(other_model, prompt + tokens[:switch], max_tokens=24)
        assert tokens[switch : switch + 24] == tail


async def test_requests_that_come_during_an_update_get_the_new_version_only(pushed, other_model):
    service, _ = pushed
    late = []
    async with paced(service):
        running = asyncio.ensure_future(
            service.agenerate(prompts(4), greedy(), timeout_seconds=120)
        )
        await until_running(service, 4)
        pushing = asyncio.ensure_future(asyncio.to_thread(service.push_weights, other_model))
        while not pushing.done():
            ask = service.agenerate(prompts(1)[0], greedy(8), timeout_seconds=60)
            late.append(asyncio.ensure_future(ask))
            await asyncio.sleep(0.005)
        version = pushing.result().version
    outputs = await asyncio.gather(*late)
    await running
    assert {output.min_version for output in outputs} <= {version - 1, version}
    fresh = [output for output in outputs if output.min_version == version]
    assert fresh
    wanted = greedy_tokens(other_model, prompts(1)[0], max_tokens=8)
    for output in fresh:
        assert spans(output.outputs[0]) == [(version, 0, 8)]
        assert list(output.outputs[0].token_ids) == wanted
        assert output.max_version == version


async def test_queued_requests_begin_again_under_the_new_weights(pushed, other_model):
    service, _ = pushed
    # Each engine runs 32 requests at a time, so that eight of these wait in each.
    asked = prompts(80)
    outputs, report = await push_while_running(
        service, other_model, asked, greedy(), num_running=64
    )
    assert sum(one.phases["num_restarted"] for one in report.replicas) >= 16
    restarted = [output for output in outputs if output.min_version == report.version]
    assert len(restarted) >= 16
    for output in outputs:
        assert output.outputs[0].finish_reason == "length"
        found = spans(output.outputs[0])
        assert found[0][0] == output.min_version
        assert found[-1][0] == output.max_version
    for output in restarted[:3]:
        wanted = greedy_tokens(other_model, output.prompt_token_ids, max_tokens=12)
        assert list(output.outputs[0].token_ids)[:12] == wanted


def test_cached_prefixes_serve_their_own_version_only(pushed, other_model):
    service, model = pushed
    (prompt,) = prompts(1, length=100)
    params = greedy(16, logprobs=0)

    def ask():
        return service.generate(prompt_token_ids=prompt, sampling_params=params, actor_index=0)

    def check(output, model):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == greedy_tokens(model, prompt, max_tokens=16)
        wanted = token_log_probs(model, prompt + tokens)[-16:]
        for token, entry, value in zip(tokens, output.outputs[0].logprobs, wanted, strict=True):
            assert entry[token].logprob == pytest.approx(value.item(), abs=TOLERANCE)

    first, second = ask(), ask()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96  # three blocks of 32
    check(second, model)

    service.push_weights(other_model)
    after, again = ask(), ask()
    assert after.num_cached_tokens == 0
    check(after, other_model)
    assert again.num_cached_tokens == 96
    check(again, other_model)


def test_a_callers_own_salt_still_separates(pushed):
    service, _ = pushed
    (prompt,) = prompts(1, length=100)

    def cached(salt):
        output = service.generate(
            {"prompt_token_ids": prompt, "cache_salt": salt}, greedy(1), actor_index=0
        )
        return output.num_cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached("a")] == [0, 96, 0, 96]


@pytest.mark.slow
async def test_many_pushes_under_load_lose_nothing(pushed):
    service, model = pushed
    first = service.weight_version
    outputs = []

    async def one_user(seed):
        for turn in range(6):
            prompt = [seed + 3, turn + 3, 9]
            output = await service.agenerate(prompt, greedy(60), timeout_seconds=120)
            outputs.append(output)

    users = [asyncio.ensure_future(one_user(seed)) for seed in range(12)]
    pushes = 0
    while not all(user.done() for user in users):
        perturbed(model, seed=pushes)
        await asyncio.to_thread(service.push_weights, model)
        pushes += 1
    await asyncio.gather(*users)
    assert len(outputs) == 72
    for output in outputs:
        completion = output.outputs[0]
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 60)
        found = spans(completion)
        versions = [version for version, _, _ in found]
        assert versions == list(range(versions[0], versions[-1] + 1))
        assert (output.min_version, output.max_version) == (versions[0], versions[-1])
    assert service.weight_version == first + pushes
    assert service.load.total_in_flight == 0
    assert_holds(service, model)

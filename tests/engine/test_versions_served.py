"""Versions as callers see them: least versions, streams, waiting, hooks, retries, disagreement."""

import asyncio
import contextlib
import threading
import time

import pytest
import ray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.checks import assert_holds, assert_labelled, perturbed
from tests.engine.salts import count_wrongly, restore_counting
from tests.engine.test_native_calls import Trainer
from tests.engine.test_push_in_flight import (
    greedy,
    paced,
    prompts,
    push_while_running,
    until_running,
)
from tests.fakes.versions import check_spans
from torchrl_vllm_sync import attach, expand_spans
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    UnsupportedArgumentError,
    VersionNotReachedError,
    WeightMismatchError,
)
from torchrl_vllm_sync.requests.messages import EngineRequest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pushed(service, model):
    """A service that holds a model nobody pushed before, and that model."""
    perturbed(model, seed=time.monotonic_ns() % 2**31)
    service.push_weights(model)
    return service, model


def in_thread(call):
    """Starts ``call``; returns a function that waits for it and gives its result, or raises."""
    results = []

    def run():
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  handed to the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result(timeout_s=60):
        thread.join(timeout_s)
        assert not thread.is_alive(), "it did not end"
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    result.is_running = thread.is_alive
    return result


# ---------------------------------------------------------------- least versions


async def test_requests_for_a_version_to_come_begin_when_it_has(pushed):
    service, model = pushed
    version = service.weight_version + 1
    blocking = in_thread(
        lambda: service.generate(prompts(6), greedy(8), min_version=version, timeout_seconds=60)
    )
    awaited = asyncio.ensure_future(service.agenerate(prompts(2), greedy(8), min_version=version))

    async def read():
        stream = service.astream(prompts(1)[0], greedy(8), min_version=version)
        return [output async for output in stream]

    streamed = asyncio.ensure_future(read())
    past = await service.agenerate(prompts(4), greedy(8), min_version=version - 1)
    assert {one.min_version for one in past} == {version - 1}
    await asyncio.sleep(0.3)
    assert blocking.is_running()
    assert not awaited.done()
    assert not streamed.done()
    assert sum(service.get_num_unfinished_requests()) == 0  # none was sent
    await asyncio.to_thread(service.push_weights, perturbed(model, seed=1))
    outputs = [*await asyncio.to_thread(blocking), *await awaited, *await streamed]
    assert len(outputs) >= 9
    assert {(one.min_version, one.max_version) for one in outputs} == {(version, version)}
    assert_holds(service, model)


def test_the_engine_itself_holds_requests_back(pushed):
    """What the caller believes does not matter: the gate of the engine is asked last."""
    service, model = pushed
    version = service.weight_version + 1
    request = EngineRequest(
        request_id="direct",
        prompt={"prompt_token_ids": [5, 6, 7]},
        sampling_params=greedy(4),
        timeout_s=60.0,
        min_version=version,
    )
    answers = service.actors[0].run_batch.options(num_returns="streaming").remote([request])
    answer = in_thread(lambda: ray.get(next(iter(answers))))
    time.sleep(0.3)
    assert answer.is_running()
    service.push_weights(perturbed(model, seed=2))
    (result,) = answer()
    assert [one.version for one in result.samples[0].spans] == [version]


def test_waiting_in_vain_says_what_each_replica_holds(pushed):
    service, _ = pushed
    version = service.weight_version
    service.wait_for_version(version, timeout_s=10)
    begin = time.monotonic()
    with pytest.raises(VersionNotReachedError) as caught:
        service.generate([5, 6, 7], greedy(4), min_version=version + 3, timeout_seconds=0.5)
    assert 0.5 <= time.monotonic() - begin < 10
    assert caught.value.held == dict.fromkeys(("0", "1"), f"holds version {version} and is serving")
    results = service.generate(
        prompts(3), greedy(4), min_version=version + 3, timeout_seconds=0.2, return_exceptions=True
    )
    assert {type(one) for one in results} == {VersionNotReachedError}
    with pytest.raises(VersionNotReachedError):
        list(service.generate([5, 6], stream=True, min_version=version + 1, timeout_seconds=0.2))
    with pytest.raises(VersionNotReachedError):
        service.generate([5, 6], actor_index=1, min_version=version + 1, timeout_seconds=0.2)
    service.generate([5, 6], actor_index=1, min_version=version)
    assert service.load.total_in_flight == 0


@pytest.mark.parametrize("bad", [-1, True, 1.5, "3"])
async def test_what_is_no_version_is_refused_before_anything_is_sent(service, bad):
    with pytest.raises(UnsupportedArgumentError, match="min_version must be"):
        service.generate([5, 6], min_version=bad)
    with pytest.raises(UnsupportedArgumentError, match="min_version must be"):
        await service.agenerate([5, 6], min_version=bad)
    with pytest.raises(UnsupportedArgumentError, match="min_version must be"):
        await anext(service.astream([5, 6], min_version=bad))


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
async def test_each_step_of_a_stream_has_the_spans_of_its_tokens(pushed, kind):
    service, model = pushed
    first = service.weight_version
    params = SamplingParams(n=2, max_tokens=200, ignore_eos=True, temperature=1.0, output_kind=kind)
    versions, last, pushing = {0: [], 1: []}, None, None
    pace = contextlib.AsyncExitStack()
    await pace.enter_async_context(paced(service))

    async def push():
        await asyncio.to_thread(service.push_weights, perturbed(model, seed=3))
        await pace.aclose()

    async for output in service.astream(prompts(1)[0], params, timeout_seconds=120):
        for completion, spans in zip(output.outputs, output.version_spans, strict=True):
            check_spans(spans, len(completion.token_ids))
            if kind is RequestOutputKind.CUMULATIVE:
                found = expand_spans(spans)
                seen = versions[completion.index]
                assert found[: len(seen)] == seen  # what was said is not taken back
                versions[completion.index] = found
            else:
                versions[completion.index] += expand_spans(spans)
        if pushing is None and min(map(len, versions.values())) > 10:
            pushing = asyncio.ensure_future(push())
        last = output
    await pushing
    assert last.finished
    for found in versions.values():
        assert len(found) == 200
        assert sorted(set(found)) == [first, first + 1]
        assert found == sorted(found)
    assert all(one.num_span_disagreements == 0 for one in reports(service))


@pytest.mark.slow
async def test_an_update_is_not_kept_waiting_until_many_streams_have_ended(pushed):
    service, model = pushed
    first, has_begun = service.weight_version, asyncio.Event()

    async def follow(prompt):
        async for output in service.astream(prompt, greedy(), actor_index=0, timeout_seconds=120):
            if len(output.outputs[0].token_ids) > 10:
                has_begun.set()
        return {one.version for one in output.version_spans[0]}

    async with paced(service):
        streams = [asyncio.ensure_future(follow(one)) for one in prompts(32)]
        await has_begun.wait()
        await asyncio.to_thread(service.push_weights, perturbed(model, seed=4))
    found = await asyncio.gather(*streams)
    assert {first, first + 1} in found


def reports(service):
    return list(service.replicas.call_replicas("report").values())


# ---------------------------------------------------------------- other ways to new weights


async def test_the_same_version_pushed_again_makes_no_boundary(pushed):
    service, model = pushed
    version = service.weight_version
    outputs, report = await push_while_running(
        service, model, prompts(6), greedy(), num_running=6, version=version
    )
    assert report.version == version
    for output in outputs:
        assert output.version_spans == (((version, 0, 200),),)


async def test_vllms_own_calls_make_boundaries_too(pushed):
    service, model = pushed
    old, trainer = service.weight_version, Trainer(service)
    try:
        trainer.meet()
        async with paced(service):
            running = asyncio.ensure_future(
                service.agenerate(prompts(6), greedy(), timeout_seconds=120)
            )
            await until_running(service, 6)
            await asyncio.to_thread(trainer.update, perturbed(model, seed=4), str(old + 4))
        outputs = await running
    finally:
        service.shutdown_weight_transfer_engine()
        trainer.close()
    for output in outputs:
        assert_labelled(output)
        assert [one.version for one in output.version_spans[0]] == [old, old + 4]
    assert service.weight_version == old + 4


async def test_naming_the_weights_afterwards_makes_a_boundary_there(pushed):
    """vLLM's Ray client names the weights when the engine runs again."""
    service, _ = pushed
    old = service.weight_version
    async with paced(service):
        running = asyncio.ensure_future(
            service.agenerate(prompts(6), greedy(), timeout_seconds=120)
        )
        await until_running(service, 6)
        ray.get([actor.update_weight_version.remote(str(old + 1)) for actor in service.actors])
    for output in await running:
        assert_labelled(output)
        assert [one.version for one in output.version_spans[0]] == [old, old + 1]
    service.weights.learn_versions()
    assert service.weight_version == old + 1


async def test_a_push_that_fails_before_loading_makes_no_boundary(pushed):
    service, model = pushed
    old = service.weight_version
    wrong = {**model.state_dict(), "extra.weight": model.state_dict()["model.norm.weight"]}
    async with paced(service):
        running = asyncio.ensure_future(
            service.agenerate(prompts(4), greedy(), timeout_seconds=120)
        )
        await until_running(service, 4)
        with pytest.raises(WeightMismatchError):
            await asyncio.to_thread(service.push_weights, wrong)
        assert not running.done()
    for output in await running:
        assert output.version_spans == (((old, 0, 200),),)


async def test_counts_that_differ_from_vllms_are_noticed(pushed, other_model):
    """The twin of every test that looks for no disagreement."""
    service, _ = pushed
    old = service.weight_version
    before = [one.num_span_disagreements for one in reports(service)]
    ray.get([one.__ray_call__.remote(count_wrongly) for one in service.actors])
    try:
        outputs, _ = await push_while_running(
            service, other_model, prompts(6), greedy(), num_running=6
        )
        found = [one.num_span_disagreements for one in reports(service)]
    finally:
        ray.get([one.__ray_call__.remote(restore_counting) for one in service.actors])
    assert sum(found) - sum(before) == 6
    for output in outputs:  # vLLM's spans are the ones given out
        assert_labelled(output)
        assert [one.version for one in output.version_spans[0]] == [old, old + 1]


# ---------------------------------------------------------------- waiting, hooks, retries


@ray.remote(num_cpus=0)
class Elsewhere:
    """Another process that has the service."""

    def __init__(self, service):
        self.service = attach(service) if isinstance(service, str) else service

    def known(self):
        return self.service.weight_version, self.service.weight_versions

    def wait(self, version, timeout_s):
        reached = self.service.wait_for_version(version, timeout_s=timeout_s)
        return reached, time.time()

    def generate(self, version):
        return self.service.generate([5, 6, 7], min_version=version).min_version


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pickled", "attached"])
def test_another_process_notices_a_push(pushed, way):
    service, model = pushed
    version = service.weight_version
    other = Elsewhere.remote(service if way == "pickled" else service.name)
    assert ray.get(other.known.remote()) == (version, {"0": version, "1": version})
    assert ray.get(other.wait.remote(version, 0))[0] == version
    with pytest.raises(VersionNotReachedError, match=f"holds version {version} and is serving"):
        ray.get(other.wait.remote(version + 1, 0.3))
    waiting = other.wait.remote(version + 1, 60)
    time.sleep(0.5)
    assert not ray.wait([waiting], timeout=0)[0]
    service.push_weights(perturbed(model, seed=5))
    committed = time.time()
    reached, noticed = ray.get(waiting)
    assert reached == version + 1
    assert noticed - committed < 20  # 0.1 s and a call, on a quiet machine
    assert ray.get(other.generate.remote(version + 1)) == version + 1
    ray.kill(other)


def test_hooks_hear_of_each_committed_version_once(pushed):
    service, model = pushed
    version, heard = service.weight_version, []
    unregister = service.register_version_hook(heard.append)
    report = service.push_weights(perturbed(model, seed=6))
    again = service.push_weights(model, version=report.version)  # a retry after a lost answer
    assert [one.phases["loaded"] for one in again.replicas] == [0, 0]
    with pytest.raises(WeightMismatchError):
        service.push_weights({"nothing": model.state_dict()["model.norm.weight"]})
    with pytest.raises(StaleVersionError):
        service.push_weights(model, version=version)
    with pytest.raises(UnsupportedArgumentError):
        service.push_weights(model, version=True)
    assert heard == [report]
    jump = service.push_weights(model, version=version + 10)
    assert [one.version for one in heard] == [version + 1, version + 10]
    assert service.weight_version == jump.version == service.wait_for_version(version + 10)
    assert service.weight_versions == {"0": version + 10, "1": version + 10}
    unregister()
    service.push_weights(model)
    assert len(heard) == 2
    assert_holds(service, model)

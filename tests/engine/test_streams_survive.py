"""Requests and streams of a replica that falls silent: others take them up."""

import asyncio
import sys

import psutil
import pytest
import ray

from tests.engine.requests import eventually, is_idle, sampling, token_ids
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import RequestLostError
from torchrl_vllm_sync.service.requests import _reserver

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

PROMPT = list(range(40, 90))
LENGTH = 150


@pytest.fixture(scope="module")
def doomed(hurt):
    """Three replicas, of which tests stop some for a while."""
    for actor in hurt.actors:
        ray.get(actor.__ray_call__.remote(listen))
    hurt.create_load_balancer("round-robin")
    yield hurt
    hurt.replicas.call_replicas("__ray_call__", fall_silent)


def listen(actor):
    """Has an actor keep what its engine is asked for: tokens of the prompt, and to sample."""
    actor.asked, add_request = [], actor.engine.add_request

    async def heard(name, prompt, params, **kwargs):
        actor.asked.append((len(prompt["prompt_token_ids"]), params.max_tokens, params.min_tokens))
        return await add_request(name, prompt, params, **kwargs)

    actor.engine.add_request = heard


def fall_silent(actor):
    del actor.engine.add_request


def asked(service, replica_id):
    """What a replica's engine was asked for since the last time."""
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    return ray.get(actor.__ray_call__.remote(taken))


def forget(service):
    for one in alive(service):
        asked(service, one.replica_id)


def taken(actor):
    heard, actor.asked = actor.asked, []
    return heard


def actor_pid(service, replica_id):
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    return ray.get(actor.describe.remote()).pid


def alive(service):
    serving = [one.replica_id for one in service.load.snapshots() if one.state.admits_requests]
    return [one for one in service.replicas if one.replica_id in serving]


def broken_stream(service, kill, params, after=30):
    """Streams, and kills the replica once it has sent some tokens; returns all outputs."""
    outputs, num_tokens, victim = [], 0, None
    for output in service.generate(PROMPT, params, stream=True):
        outputs.append(output)
        new = len(output.outputs[0].token_ids)
        num_tokens = num_tokens + new if is_delta(params) else new
        if num_tokens >= after and victim is None:
            victim = output.replica_id
            kill(service, victim)
    assert victim is not None
    return outputs, victim


def is_delta(params):
    from vllm.sampling_params import RequestOutputKind

    return params.output_kind is RequestOutputKind.DELTA


@pytest.mark.slow
def test_what_a_stopped_replica_holds_is_run_elsewhere_and_its_late_answers_are_dropped(doomed):
    prompts, params = [[5, i] for i in range(30, 90)], sampling(max_tokens=60, ignore_eos=True)
    wanted = [token_ids(output) for output in doomed.generate(prompts, params)]
    arrived, stopped = [], []
    dispatcher = doomed.requests._dispatcher

    def watch(result):
        arrived.append(result.request_id)

    batch = doomed.requests.prepare(prompts, params, None, timeout_seconds=200.0)

    async def run():
        task = asyncio.create_task(
            dispatcher.run(batch.requests, _reserver(doomed.requests.balancer), on_result=watch)
        )
        async with asyncio.timeout(60):
            while "0" not in stopped:
                await asyncio.sleep(0.01)
                if all(one.in_flight >= 15 for one in doomed.load.snapshots()):
                    stopping.suspend()
                    stopped.append("0")
        await asyncio.sleep(0.2)
        doomed.load.mark("0", ReplicaState.FAILED, "silent")
        return await task

    stopping = psutil.Process(actor_pid(doomed, "0"))
    try:
        results = asyncio.run(run())
        assert stopping.status() == psutil.STATUS_STOPPED
        assert doomed.load.total_in_flight == 0
    finally:
        stopping.resume()
    tokens = [list(map(int, one.output.answers[0])) for one in results]
    assert tokens == wanted
    assert {one.replica_id for one in results} <= {"0", "1", "2"}
    assert sum(one.replica_id == "0" for one in results) < 20  # it had twenty
    assert len(arrived) == len(set(arrived)) == len(prompts)
    eventually(lambda: is_idle(doomed), timeout_s=30)
    eventually(lambda: all(one.state.admits_requests for one in doomed.load.snapshots()))
    assert len(arrived) == len(prompts)  # nothing came late


@pytest.mark.slow
def test_a_stream_begins_again_elsewhere_or_says_why_not(doomed):
    from vllm.sampling_params import RequestOutputKind

    params = sampling(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=7)
    wanted = list(doomed.generate(PROMPT, params, stream=True))[-1]
    forget(doomed)
    stopped = []

    def stop_and_fail(service, replica_id):
        stopped.append(psutil.Process(actor_pid(service, replica_id)))
        stopped[-1].suspend()
        service.load.mark(replica_id, ReplicaState.FAILED, "silent")

    def wake():
        stopped.pop().resume()
        eventually(lambda: all(one.state.admits_requests for one in doomed.load.snapshots()))

    try:
        outputs, victim = broken_stream(doomed, stop_and_fail, params)
        last = outputs[-1]
        assert last.replica_id != victim
        assert asked(doomed, last.replica_id) == [(len(PROMPT), LENGTH, 0)]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths != sorted(lengths)  # it started over
        assert token_ids(last) == token_ids(wanted)  # by its seed
        wake()

        params.output_kind = RequestOutputKind.DELTA
        stream = doomed.generate(PROMPT, params, stream=True)
        victim = next(stream).replica_id
        stop_and_fail(doomed, victim)
        with pytest.raises(RequestLostError, match="cannot begin again") as caught:
            list(stream)
        assert [one.replica_id for one in caught.value.attempts] == [victim]
        wake()
    finally:
        for one in stopped:
            one.resume()
    eventually(lambda: is_idle(doomed), timeout_s=30)

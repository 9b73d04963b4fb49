"""Streams whose replica is killed: another takes them up, and nobody can tell by the answer."""

import asyncio
import os
import signal
import sys

import psutil
import pytest
import ray
import torch
from tokenizers.decoders import DecodeStream

from tests.engine.checks import TOLERANCE, assert_labelled
from tests.engine.faults import engine_core_pid
from tests.engine.requests import eventually, is_idle, sampling, slowed, token_ids
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import RequestLostError
from torchrl_vllm_sync.service.requests import _reserver
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

PROMPT = list(range(40, 90))
LENGTH = 150
# Of each step, until a replica is hit: then it has seconds of an answer left to send; and else.
SLOW_S, STEP_S = 0.05, 0.01
KILLS = True


@pytest.fixture(scope="module")
def doomed(hurt):
    """Three replicas, of which tests stop some for a while; the last two tests kill one each."""
    for actor in hurt.actors:
        ray.get(actor.__ray_call__.remote(listen))
    hurt.create_load_balancer("round-robin")
    with slowed(hurt, STEP_S):
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


def shown_text(tokenizer, tokens):
    """What vLLM shows of an answer: it holds back a character whose bytes have not all come."""
    stream = DecodeStream(ids=PROMPT, skip_special_tokens=True)
    return "".join(stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens)


def taken(actor):
    heard, actor.asked = actor.asked, []
    return heard


def actor_pid(service, replica_id):
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    return ray.get(actor.describe.remote()).pid


def core_pid(service, replica_id):
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    return engine_core_pid(actor)


def kill(service, replica_id, pid):
    os.kill(pid, signal.SIGKILL)


def alive(service):
    serving = [one.replica_id for one in service.load.snapshots() if one.state.admits_requests]
    return [one for one in service.replicas if one.replica_id in serving]


def broken_stream(service, pid_of, strike, params, after=30):
    """Streams, and strikes the replica once it has sent some tokens; returns all outputs."""
    outputs, num_tokens, victim = [], 0, None
    # Whoever is hit is hit at once: asking for its pid takes longer than the rest of an answer.
    pids = {one.replica_id: pid_of(service, one.replica_id) for one in alive(service)}
    set_pace(service, SLOW_S)
    for output in service.generate(PROMPT, params, stream=True):
        outputs.append(output)
        new = len(output.outputs[0].token_ids)
        num_tokens = num_tokens + new if is_delta(params) else new
        if num_tokens >= after and victim is None:
            victim = output.replica_id
            strike(service, victim, pids[victim])
            set_pace(service, STEP_S, besides=victim)
    assert victim is not None
    return outputs, victim


def set_pace(service, step_s, besides=None):
    """Has each step of the replicas last that much longer, but for one that was hit."""
    others = [one.actor for one in alive(service) if one.replica_id != besides]
    ray.get([one.collective_rpc.remote("sync_pace", None, (step_s,)) for one in others])


def is_delta(params):
    from vllm.sampling_params import RequestOutputKind

    return params.output_kind is RequestOutputKind.DELTA


def greedy(**fields):
    return sampling(
        max_tokens=LENGTH, min_tokens=100, ignore_eos=True, logprobs=2, prompt_logprobs=1, **fields
    )


def assert_same_logprobs(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        for token in set(one) & set(other):
            assert abs(one[token].logprob - other[token].logprob) < TOLERANCE
            assert one[token].decoded_token == other[token].decoded_token
        assert next(iter(one)) == next(iter(other))


def assert_continued(service, outputs, victim):
    """Another replica sampled the rest, and only that: the prompt was longer by what had come."""
    last = outputs[-1].replica_id
    assert last != victim
    ((num_prompt, max_tokens, min_tokens),) = asked(service, last)
    received = num_prompt - len(PROMPT)
    assert 30 <= received < LENGTH
    assert max_tokens == LENGTH - received
    assert min_tokens == max(0, 100 - received)


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
        await asyncio.to_thread(set_pace, doomed, SLOW_S)
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
        await asyncio.to_thread(set_pace, doomed, STEP_S, besides="0")
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
def test_what_cannot_be_gone_on_with_begins_again_or_says_why(doomed):
    from vllm.sampling_params import RequestOutputKind

    params = sampling(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=7)
    wanted = list(doomed.generate(PROMPT, params, stream=True))[-1]
    forget(doomed)
    stopped = []

    def stop_and_fail(service, replica_id, pid):
        stopped.append(psutil.Process(pid))
        stopped[-1].suspend()
        service.load.mark(replica_id, ReplicaState.FAILED, "silent")

    def wake():
        stopped.pop().resume()
        eventually(lambda: all(one.state.admits_requests for one in doomed.load.snapshots()))
        set_pace(doomed, STEP_S)

    try:
        outputs, victim = broken_stream(doomed, actor_pid, stop_and_fail, params)
        last = outputs[-1]
        assert last.replica_id != victim
        assert asked(doomed, last.replica_id) == [(len(PROMPT), LENGTH, 0)]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths != sorted(lengths)  # it started over
        assert token_ids(last) == token_ids(wanted)  # by its seed
        wake()

        params.output_kind = RequestOutputKind.DELTA
        pids = {one.replica_id: actor_pid(doomed, one.replica_id) for one in doomed.replicas}
        set_pace(doomed, SLOW_S)
        stream = doomed.generate(PROMPT, params, stream=True)
        victim = next(stream).replica_id
        stop_and_fail(doomed, victim, pids[victim])
        with pytest.raises(RequestLostError, match="because of seed") as caught:
            list(stream)
        assert [one.replica_id for one in caught.value.attempts] == [victim]
        wake()
    finally:
        for one in stopped:
            one.resume()
    eventually(lambda: is_idle(doomed), timeout_s=30)


@pytest.mark.slow
def test_a_stream_goes_on_elsewhere_and_equals_an_unbroken_one(doomed):
    wanted = list(doomed.generate(PROMPT, greedy(), stream=True))[-1]
    forget(doomed)
    outputs, victim = broken_stream(doomed, actor_pid, kill, greedy())
    assert_continued(doomed, outputs, victim)

    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)  # it did not start over
    last, found, unbroken = outputs[-1], outputs[-1].outputs[0], wanted.outputs[0]
    assert token_ids(last) == token_ids(wanted)
    assert found.text == unbroken.text
    assert last.prompt_token_ids == PROMPT
    assert_same_logprobs(found.logprobs, unbroken.logprobs)
    assert_same_logprobs(last.prompt_logprobs, wanted.prompt_logprobs)
    assert abs(found.cumulative_logprob - unbroken.cumulative_logprob) < LENGTH * TOLERANCE
    assert (found.finish_reason, found.stop_reason) == ("length", None)
    assert last.num_cached_tokens <= len(PROMPT)
    assert last.sample_reports[0].num_cached_tokens == last.num_cached_tokens
    assert_labelled(last)
    assert doomed.load.total_in_flight == 0


@pytest.mark.slow
def test_deltas_go_on_elsewhere_with_the_log_probabilities_of_the_trainer(
    doomed, untied_checkpoint
):
    """Drawn at random, so that a stream that began again would have other tokens."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling(
        temperature=1.0, max_tokens=LENGTH, min_tokens=100, ignore_eos=True, logprobs=0
    )
    params.output_kind = RequestOutputKind.DELTA
    forget(doomed)
    outputs, victim = broken_stream(doomed, core_pid, kill, params)
    assert_continued(doomed, outputs, victim)

    parts = [output.outputs[0] for output in outputs]
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [entry for part in parts for entry in part.logprobs]
    assert len(tokens) == len(logprobs) == LENGTH
    found = torch.tensor([one[token].logprob for one, token in zip(logprobs, tokens, strict=True)])
    wanted = token_log_probs(load_tiny_model(untied_checkpoint), PROMPT + tokens)[-LENGTH:]
    assert (found - wanted).abs().max() < TOLERANCE
    assert abs(parts[-1].cumulative_logprob - found.sum()) < LENGTH * TOLERANCE
    tokenizer = ray.get(alive(doomed)[0].actor.get_tokenizer.remote())
    assert "".join(part.text for part in parts) == shown_text(tokenizer, tokens)
    for output in outputs:
        (spans,) = output.version_spans
        assert spans == ((doomed.weight_version, 0, len(output.outputs[0].token_ids)),)
    assert (parts[-1].weight_versions[0].start, parts[-1].weight_versions[-1].end) == (0, LENGTH)
    assert all(output.prompt_token_ids == PROMPT for output in outputs)
    assert doomed.load.total_in_flight == 0

"""Streams whose replica is killed: another takes them up, and nobody can tell by the answer."""

import asyncio
import os
import signal
import sys

import pytest
import ray
import torch

from tests.engine.checks import TOLERANCE, assert_labelled
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import eventually, is_idle, sampling, token_ids
from torchrl_vllm_sync.errors import RequestLostError
from torchrl_vllm_sync.testing import token_log_probs

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

PROMPT = list(range(40, 90))
LENGTH = 150


@pytest.fixture(scope="module")
def doomed(cluster, checkpoint):
    """Six replicas, of which the tests kill one each; the last one stays."""
    from torchrl_vllm_sync import AsyncVLLM

    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=6, **ENGINE) as service:
        for actor in service.actors:
            ray.get(actor.__ray_call__.remote(listen))
        service.create_load_balancer("round-robin")
        yield service


def listen(actor):
    """Has an actor keep what its engine is asked for: tokens of the prompt, and to sample."""
    actor.asked, generate = [], actor.engine.generate

    def heard(prompt, params, *args, **kwargs):
        actor.asked.append((len(prompt["prompt_token_ids"]), params.max_tokens, params.min_tokens))
        return generate(prompt, params, *args, **kwargs)

    actor.engine.generate = heard


def asked(service, replica_id):
    """What a replica's engine was asked for since the last time."""
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    return ray.get(actor.__ray_call__.remote(taken))


def taken(actor):
    heard, actor.asked = actor.asked, []
    return heard


def kill_actor(service, replica_id):
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    os.kill(ray.get(actor.describe.remote()).pid, signal.SIGKILL)


def kill_engine_core(service, replica_id):
    (actor,) = [one.actor for one in service.replicas if one.replica_id == replica_id]
    os.kill(engine_core_pid(actor), signal.SIGKILL)


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
@pytest.mark.parametrize("kill", [kill_actor, kill_engine_core])
def test_a_stream_goes_on_elsewhere_and_equals_an_unbroken_one(doomed, kill):
    wanted = list(doomed.generate(PROMPT, greedy(), stream=True, actor_index=5))[-1]
    asked(doomed, "5")
    outputs, victim = broken_stream(doomed, kill, greedy())
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
def test_deltas_go_on_elsewhere_with_the_log_probabilities_of_the_trainer(doomed, model):
    """Drawn at random, so that a stream that began again would have other tokens."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling(
        temperature=1.0, max_tokens=LENGTH, min_tokens=100, ignore_eos=True, logprobs=0
    )
    params.output_kind = RequestOutputKind.DELTA
    outputs, victim = broken_stream(doomed, kill_actor, params)
    assert_continued(doomed, outputs, victim)

    parts = [output.outputs[0] for output in outputs]
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [entry for part in parts for entry in part.logprobs]
    assert len(tokens) == len(logprobs) == LENGTH
    found = torch.tensor([one[token].logprob for one, token in zip(logprobs, tokens, strict=True)])
    wanted = token_log_probs(model, PROMPT + tokens)[-LENGTH:]
    assert (found - wanted).abs().max() < TOLERANCE
    assert abs(parts[-1].cumulative_logprob - found.sum()) < LENGTH * TOLERANCE
    tokenizer = doomed.get_tokenizer() if hasattr(doomed, "get_tokenizer") else None
    if tokenizer is not None:
        assert "".join(part.text for part in parts) == tokenizer.decode(tokens)
    assert [span.version for output in outputs for span in output.version_spans[0]] == [0] * len(
        [part for part in parts if part.token_ids]
    )
    assert (parts[-1].weight_versions[0].start, parts[-1].weight_versions[-1].end) == (0, LENGTH)
    assert all(output.prompt_token_ids == PROMPT for output in outputs)
    assert doomed.load.total_in_flight == 0


@pytest.mark.slow
def test_what_cannot_be_gone_on_with_begins_again_or_says_why(doomed):
    from vllm.sampling_params import RequestOutputKind

    params = sampling(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=7)
    wanted = list(doomed.generate(PROMPT, params, stream=True, actor_index=5))[-1]
    asked(doomed, "5")
    outputs, victim = broken_stream(doomed, kill_actor, params)
    last = outputs[-1]
    assert asked(doomed, last.replica_id) == [(len(PROMPT), LENGTH, 0)]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths != sorted(lengths)  # it started over
    assert token_ids(last) == token_ids(wanted)  # by its seed

    params.output_kind = RequestOutputKind.DELTA
    stream = doomed.generate(PROMPT, params, stream=True)
    victim = next(stream).replica_id
    kill_actor(doomed, victim)
    with pytest.raises(RequestLostError, match="because of seed") as caught:
        list(stream)
    assert [one.replica_id for one in caught.value.attempts] == [victim]
    assert doomed.load.total_in_flight == 0
    survivors = [one for one in doomed.load.snapshots() if one.state.admits_requests]
    assert [one.replica_id for one in survivors] == ["5"] or len(survivors) == 1
    eventually(lambda: doomed.load.total_in_flight == 0)


def test_nothing_is_left_behind(doomed):
    """Last: the one that is left has nothing inside."""
    assert asyncio.run(_last_words(doomed))
    eventually(lambda: doomed.get_num_unfinished_requests()[-1] in (0, None))
    assert is_idle is not None


async def _last_words(service):
    return [output async for output in service.astream(PROMPT, sampling())]

"""Requests in flight and the KV cache, by vLLM's scheduler without a model, and on real engines."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.routing_sim.engine import _config
from tests.engine.checks import TOLERANCE
from tests.engine.conftest import ENGINE
from tests.engine.requests import sampling, token_ids
from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.engine.internals import PackingScheduler

pytestmark = pytest.mark.slow
BLOCK, PROMPT, END, MOST, HELD = 16, 32, 2, 512, 40
# As chat models answer: most are short, and some ten times as long.
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 400).clip(8, MOST).astype(int).tolist()
# As small models answer: many never end by themselves.
CAPPED = [MOST if at % 3 == 0 else one for at, one in enumerate(LENGTHS)]


def scheduler_of(kind, **options):
    config = _config()
    config.scheduler_config.max_num_seqs = 1024
    config.additional_config = options
    config.cache_config.block_size = BLOCK
    blocks = int(HELD * (PROMPT + np.mean(LENGTHS)) / BLOCK)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK)


def answer(scheduler, name, at_once, most=MOST, lengths=LENGTHS):
    """Steps in which all are answered, and how often one was preempted."""
    init_none_hash(sha256)
    prompts = np.random.default_rng(1).integers(5, 30_000, (len(lengths), PROMPT)).tolist()
    left, wanted, steps, preempted = [*enumerate(lengths)][::-1], {}, 0, 0
    while left or scheduler.requests:
        while left and len(scheduler.requests) < at_once:
            at, length = left.pop()
            params = SamplingParams(max_tokens=most, stop_token_ids=[END])
            hasher = get_request_block_hasher(BLOCK, sha256)
            one = Request(f"{name}{at}", prompts[at], params, None, block_hasher=hasher)
            wanted[one.request_id] = length
            scheduler.add_request(one)
        planned = scheduler.schedule()
        steps += 1
        preempted += len(planned.preempted_req_ids or ())
        names, tokens = [*planned.num_scheduled_tokens], []
        for one in map(scheduler.requests.get, names):
            is_last = one.num_output_tokens + 1 >= wanted[one.request_id] < most
            is_decoded = one.num_computed_tokens >= one.num_tokens
            tokens.append([END if is_last else END + 1] if is_decoded else [])
        places = {name: at for at, name in enumerate(names)}
        scheduler.update_from_output(planned, ModelRunnerOutput(names, places, tokens))
    return steps, preempted / len(lengths)


def test_what_fits_when_it_has_grown_runs_and_hardly_any_is_preempted():
    plain = scheduler_of(Scheduler)
    fixed, thrashed = min(answer(plain, f"{num}", num) for num in (HELD, 2 * HELD))
    assert thrashed > 0.2
    ours = scheduler_of(PackingScheduler, fit_kv_cache=True)
    _, preempted = answer(ours, "first", 8 * HELD)  # when it knows of no answer yet
    assert preempted < 0.01
    for load in (2, 8):
        steps, preempted = answer(ours, f"{load} times ", load * HELD)
        assert preempted <= 0.01
        assert steps <= fixed / 0.93


def test_answers_that_all_grow_as_long_as_they_may_are_foreseen():
    ours = scheduler_of(PackingScheduler, fit_kv_cache=True)
    for load in ("first", "then"):
        _, preempted = answer(ours, load, 8 * HELD, lengths=CAPPED)
        assert preempted <= 0.01


def test_one_runs_even_if_it_may_not_fit():
    ours = scheduler_of(PackingScheduler, fit_kv_cache=True)
    room = ours.kv_cache_manager.block_pool.get_num_free_blocks() * BLOCK
    assert max(LENGTHS) <= answer(ours, "", 2, most=room * 2)[0] <= 2 * sum(LENGTHS)


def test_it_is_left_to_vllm_unless_asked_for():
    ours = scheduler_of(PackingScheduler)
    assert answer(ours, "", 2 * HELD) == answer(scheduler_of(Scheduler), "", 2 * HELD)


# On a real engine, whose KV cache holds a quarter of what it is asked for


class Hopeful(PackingScheduler):
    """Takes in whatever fits now, so that some must wait."""

    def _fitting(self):
        return self._most


@pytest.fixture(scope="module", params=[True, False], ids=["fits", "plain"])
def small(request, cluster, checkpoint):
    """An engine that reads prompts in parts, and whether it fits requests into its cache."""
    options = ENGINE | {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 64}
    fits = {"fit_kv_cache": request.param}
    options |= {"additional_config": fits, "scheduler_cls": "tests.engine.test_fitting.Hopeful"}
    with AsyncVLLM.from_pretrained(checkpoint, **options) as service:
        yield service, request.param


def preempted(service):
    (report,) = service.replicas.call_replicas("report").values()
    return report.counters.num_preempted


def test_an_engine_that_took_in_too_many_lets_some_wait_and_preempts_few(small):
    service, fits = small
    prompts = [[5 + at, *range(10, 41)] for at in range(12)]
    params = [sampling(max_tokens=120, ignore_eos=True, logprobs=0, seed=at) for at in range(12)]
    alone = [service.generate(*each) for each in zip(prompts, params, strict=True)]
    before = preempted(service)
    together = service.generate(prompts, params)
    assert (preempted(service) - before < 12) == fits  # 10, and 14 where none waits
    for one, other in zip(alone, together, strict=True):
        assert token_ids(one) == token_ids(other)
        apart = one.outputs[0].cumulative_logprob - other.outputs[0].cumulative_logprob
        assert abs(apart) < TOLERANCE * 120


def test_a_prompt_that_is_read_in_parts_samples_by_its_seed_from_its_end_on(small):
    service, _ = small
    prompt, params = [*range(5, 155)], sampling(temperature=1.0, seed=7, max_tokens=30)
    service.reset_prefix_cache()
    in_parts = service.generate(prompt, params)
    assert in_parts.num_cached_tokens == 0
    whole = service.generate(prompt, params)
    assert whole.num_cached_tokens >= 128
    assert token_ids(in_parts) == token_ids(whole)
    assert (
        token_ids(service.generate(prompt, sampling(temperature=1.0, seed=8)))
        != token_ids(whole)[:4]
    )

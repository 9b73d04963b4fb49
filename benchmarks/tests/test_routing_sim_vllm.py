"""The simulated engine against vLLM's own scheduler: the same requests in the same steps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tests.routing_sim_engines import (
    EXACT,
    run_by_steps,
    run_jumping,
    seconds_of,
    single,
    some_sessions,
)
from torchrl_vllm_sync.testing import make_tiny_checkpoint

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)
    arguments = EngineArgs(
        model=str(checkpoint),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
        async_scheduling=False,
        kv_cache_memory_bytes=2**20,
    )
    return arguments.create_engine_config()


class VllmEngine:
    """vLLM's scheduler without a model: tokens are the trace's, time is the cost model's."""

    def __init__(self, config, costs):
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        self.costs = costs
        config.scheduler_config.max_num_seqs = costs.max_num_seqs
        config.scheduler_config.max_num_batched_tokens = costs.token_budget
        config.cache_config.block_size = costs.block_size
        num_blocks = costs.num_kv_blocks + 1  # vLLM keeps one for itself
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=costs.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            block_size=costs.block_size,
        )
        self.hasher = get_request_block_hasher(costs.block_size, sha256)
        self.requests = {}
        self.steps = 0

    def add(self, request):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        theirs = Request(
            request_id=str(request.name),
            prompt_token_ids=request.session.tokens[: request.prompt_len].tolist(),
            sampling_params=SamplingParams(max_tokens=request.output_len, ignore_eos=True),
            pooling_params=None,
            cache_salt=str(request.salt),
            block_hasher=self.hasher,
        )
        self.requests[theirs.request_id] = request, theirs
        self.scheduler.add_request(theirs)

    def num_requests(self):
        return len(self.requests)

    def num_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def step(self):
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        seconds = self.costs.base_step_s
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request, theirs in self.requests.values():
            if theirs.num_preemptions > request.preemptions:
                request.preemptions = theirs.num_preemptions
                request.decodes = False
        for name, count in scheduled.num_scheduled_tokens.items():
            request, theirs = self.requests[name]
            computed = theirs.num_computed_tokens - count
            if request.hits is None:
                request.hits = computed
            seconds += seconds_of(self.costs, request.decodes, computed, count)
            if theirs.num_computed_tokens < theirs.num_tokens:
                sampled.append([])
            else:
                sampled.append([int(request.session.tokens[theirs.num_tokens])])
                request.decodes = True
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(scheduled, output)
        ended = [name for name in names if self.requests[name][1].is_finished()]
        self.steps += 1
        return seconds, [self.requests.pop(name)[0] for name in ended]


def test_a_full_cache_preempts_the_same_requests(vllm_config):
    sessions = [single(number, 0, list(range(8)), 120) for number in range(4)]
    ours = run_jumping(EXACT, sessions)
    assert ours.preemptions > 0
    assert ours == run_by_steps(VllmEngine(vllm_config, EXACT), EXACT, sessions)


def test_requests_run_in_the_steps_that_vllm_schedules(vllm_config):
    @given(
        some_sessions(full_prompts=False),
        st.integers(1, 6),
        st.sampled_from([8, 16, 64]),
        st.integers(0, 30),
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(sessions, max_num_seqs, token_budget, spare_blocks):
        longest = max(len(session.tokens) for session in sessions)
        costs = replace(
            EXACT,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            num_kv_blocks=-(-longest // EXACT.block_size) + spare_blocks,
        )
        theirs = run_by_steps(VllmEngine(vllm_config, costs), costs, sessions)
        assert run_jumping(costs, sessions) == theirs

    check()

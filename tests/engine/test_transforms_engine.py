"""The transforms on what a real service's wrapper stamps, in environments, collectors, buffers."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.data.llm import History
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.modules.llm.policies import ChatHistory

from tests.engine.checks import perturbed
from tests.engine.requests import eventually, num_running, slowed
from tests.engine.test_torchrl_faces import TOKENIZER, asked, make_env, policy_of
from torchrl_vllm_sync import (
    GenerationStatistics,
    RolloutCorrection,
    StalenessFilter,
    StalenessWeight,
    TrainerPolicy,
    VersionStamp,
    WeightUpdater,
    vLLMWrapper,
)
from torchrl_vllm_sync.rl import rows as keys

# TorchRL 0.14's wrapper builds each single-turn history in a shape that its own class corrects.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    # Its padding builds torch's old nested tensors.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
MODES = pytest.mark.parametrize("mode", ["history", "text", "tokens"])


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def sampled(service, mode="history", shape=(4,), *, padded=False, **kwargs):
    return policy_of(vLLMWrapper, service, mode, pad_output=padded, **kwargs)(asked(mode, shape))


@MODES
@LAYOUTS
def test_statistics_are_those_of_the_wrappers_rows(service, mode, padded):
    rows = sampled(service, mode, padded=padded)
    found = GenerationStatistics()(rows)["statistics"]
    assert found["response_length"].tolist() == [6] * 4
    assert found["truncated"].all()
    assert found["staleness_span"].tolist() == [0] * 4
    if mode == "text":
        assert found["prompt_length"].tolist() == [-1] * 4
    else:
        prompts = [row["tokens", "prompt"].ravel() for row in rows.unbind(0)]
        wanted = [int((ids != TOKENIZER.pad_token_id).sum()) for ids in prompts]
        assert found["prompt_length"].tolist() == wanted
    assert (found["queue_time"] >= 0).all()
    assert (found["decode_time"] > 0).all()
    speed = 5 / rows[keys.DECODE_TIME]
    torch.testing.assert_close(found["tokens_per_second"], speed)


def test_corrections_tell_what_the_engine_rounds_from_what_is_old(service, model):
    service.push_weights(perturbed(model, seed=3))
    rows = sampled(service, padded=True, return_log_probs=True)
    rows["advantage"] = torch.ones(4, 1, 1)
    correct = RolloutCorrection(TrainerPolicy(model), weigh="token", cap=None, version=service)
    found = correct(rows)
    noise = correct.summary()
    assert (noise["noise_tokens"], noise["stale_tokens"]) == (24, 0)
    assert noise["noise_abs_log_ratio_max"] < 1e-3
    weights = found["advantage"][found["advantage"] > 0]
    torch.testing.assert_close(weights, torch.ones(24), atol=1e-3, rtol=0)
    correct.reset_summary()
    service.push_weights(perturbed(model, seed=4))
    correct(rows)
    stale = correct.summary()
    assert (stale["noise_tokens"], stale["stale_tokens"]) == (0, 24)
    assert stale["stale_abs_log_ratio"] > 100 * noise["noise_abs_log_ratio_max"]


def test_prompts_that_were_seen_before_come_from_the_cache(service, model):
    service.push_weights(perturbed(model, seed=3))  # a version of its own: nothing is cached for it
    policy = policy_of(vLLMWrapper, service, "history")
    measure = GenerationStatistics().measure
    shares = [float(measure(policy(long_prompt()))["cached_fraction"]) for _ in range(3)]
    assert shares[0] == 0
    assert max(shares) > 0.5


def long_prompt():
    """One chat of more than two blocks."""
    chats = History.from_chats([[{"role": "user", "content": "Every replica serves. " * 6}]])
    return TensorDict(history=ChatHistory(prompt=chats, batch_size=1), batch_size=1)


@LAYOUTS
def test_rows_age_with_each_push(service, model, padded):
    keep = StalenessFilter(1, service)
    weigh = StalenessWeight(service, half_life=1)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        transform=keep,
        batch_size=4,
    )
    buffer.extend(sampled(service, padded=padded))
    for age, kept in ((0, 4), (1, 4), (2, 0)):
        rows = buffer.sample()
        assert len(rows) == kept
        if kept:
            weighed = weigh(rows)
            assert weighed["staleness"].tolist() == [age] * 4
            assert weighed["staleness_weight"].tolist() == [0.5**age] * 4
        service.push_weights(perturbed(model, seed=age))
    assert keep.dropped_by_staleness == {2: 4}


@LAYOUTS
def test_rows_that_live_through_a_push_are_as_old_as_their_first_token(service, model, padded):
    before = service.weight_version
    with ThreadPoolExecutor(1) as pool, slowed(service):
        sampling = pool.submit(sampled, service, padded=padded, sampling={"max_tokens": 200})
        eventually(lambda: num_running(service) == 4)
        for seed in range(3):
            service.push_weights(perturbed(model, seed=seed))
    rows = sampling.result()
    statistics = GenerationStatistics()
    spans = statistics(rows)["statistics", "staleness_span"]
    assert (spans > 0).any()
    assert (rows["policy_version"] + spans == rows["max_policy_version"]).all()
    assert rows["max_policy_version"].max() <= service.weight_version == before + 3
    oldest = StalenessWeight(service, half_life=1)(rows)["staleness"]
    assert oldest.tolist() == (service.weight_version - rows["policy_version"]).tolist()
    assert statistics.summary()["staleness_span"] > 0


class Overtaken(TensorDictModuleBase):
    """A policy that a push overtakes each time it has sampled."""

    def __init__(self, policy, push):
        super().__init__()
        self.policy, self.push = policy, push
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, tensordict):
        out = self.policy(tensordict)
        self.push()
        return out


@pytest.mark.parametrize("stamp", [VersionStamp, lambda _: True], ids=["ours", "torchrl"])
def test_a_push_between_sampling_and_step_does_not_change_the_stamp(service, model, stamp):
    updater = WeightUpdater(service, source=model)
    policy = policy_of(vLLMWrapper, service, "history")
    collector = LLMCollector(
        make_env(),
        policy=Overtaken(policy, updater.push_weights),
        dialog_turns_per_batch=4,
        total_dialog_turns=12,
        track_policy_version=stamp(service),
    )
    updater.register_collector(collector)
    late = 1 if stamp is not VersionStamp else 0
    for batch in collector:
        sampled_by = batch["policy_version"]
        assert (sampled_by == service.weight_version - 1).all()
        assert (batch["next", "policy_version"] == sampled_by + late).all()
        assert collector.policy_version == service.weight_version
    collector.shutdown()


def test_statistics_of_an_environment(service):
    statistics = GenerationStatistics()
    env = make_env().append_transform(VersionStamp(service)).append_transform(statistics)
    rollout = env.rollout(2, policy_of(vLLMWrapper, service, "history"))
    for name in ("policy_version", "statistics"):
        assert env.observation_spec[name].is_in(rollout[:, 0].get("next").get(name))
    assert rollout["next", "statistics", "response_length"].unique().tolist() == [6]
    assert (rollout["next", "policy_version"] == service.weight_version).all()
    assert statistics.summary()["rows"] == rollout.numel()


def stamped_env():
    env = ChatEnv.from_dataloader(
        dataloader=({"query": ["Hello"]} for _ in range(1000)),
        batch_size=(4,),
        tokenizer=TOKENIZER,
        input_mode="history",
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(GenerationStatistics())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_collector_in_a_ray_actor(service, model):
    collector = RayLLMCollector(
        stamped_env,
        policy=policy_of(vLLMWrapper, service, "history"),
        dialog_turns_per_batch=4,
        total_dialog_turns=12,
        track_policy_version=VersionStamp(service),
        remote_config={
            "num_cpus": 0,
            "num_gpus": 0,
            "runtime_env": {
                "env_vars": {"LIST_TO_STACK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            },
        },
    )
    updater = WeightUpdater(service, source=model)
    try:
        updater.register_collector(collector)
        for seed, batch in enumerate(collector):
            if batch is None:  # how TorchRL 0.14's iterator ends
                break
            assert (batch["policy_version"] == service.weight_version).all()
            assert (batch["next", "policy_version"] == service.weight_version).all()
            assert batch["next", "statistics", "response_length"].flatten().tolist() == [6] * 4
            perturbed(model, seed=seed)
            updater.push_weights()
            assert collector.policy_version == service.weight_version
    finally:
        collector.shutdown()

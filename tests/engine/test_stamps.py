"""What the wrapper stamps on each row, in every layout, and prompts that siblings share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.envs.transforms import PolicyAgeFilter

from tests.engine.checks import TOLERANCE, perturbed
from tests.engine.requests import eventually, num_running, slowed
from tests.engine.test_torchrl_faces import TOKENIZER, asked, flat, policy_of
from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.testing import token_log_probs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
LENGTH = 150
ROWS = 6


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def generate_and_push(service, policy, data, weights, num_rows=ROWS):
    """Pushes while the policy generates, once its rows have tokens."""
    with ThreadPoolExecutor(1) as pool, slowed(service):
        result = pool.submit(policy, data)
        eventually(lambda: num_running(service) >= num_rows)
        service.push_weights(weights)
    return result.result()


def rows_of(tensordict):
    """Every row, whatever the batch's shape."""
    rows = [tensordict]
    for _ in tensordict.shape:
        rows = [one for row in rows for one in row.unbind(0)]
    return rows


@pytest.mark.parametrize(
    ("mode", "pad_output", "num_samples"),
    [("history", False, None), ("text", True, None), ("tokens", False, 2), ("history", True, 2)],
)
def test_each_token_carries_its_version(service, model, mode, pad_output, num_samples):
    service.push_weights(perturbed(model, seed=11))
    old = service.weight_version
    sampling = {"max_tokens": LENGTH, "min_tokens": LENGTH}
    policy = policy_of(
        vLLMWrapper,
        service,
        mode,
        pad_output=pad_output,
        num_samples=num_samples,
        sampling=sampling,
    )
    data = asked(mode, (ROWS,))
    num_rows = ROWS * (num_samples or 1)
    out = generate_and_push(service, policy, data, perturbed(model, seed=12), num_rows)
    rows = rows_of(out)
    assert len(rows) == num_rows
    assert out[keys.POLICY_VERSION].shape == out.shape
    assert out[keys.MAX_POLICY_VERSION].dtype == torch.int64
    switched = 0
    for row in rows:
        tokens, found = row["tokens", "response"], row[keys.RESPONSE_VERSIONS]
        assert found.shape == tokens.shape
        assert found.dtype == torch.int64
        sampled = found[found != keys.NO_VERSION]
        assert len(sampled) == LENGTH
        assert set(sampled.tolist()) <= {old, old + 1}
        assert sampled.tolist() == sorted(sampled.tolist())
        assert (row[keys.POLICY_VERSION], row[keys.MAX_POLICY_VERSION]) == (
            sampled.min(),
            sampled.max(),
        )
        switched += len(set(sampled.tolist())) == 2
        if mode == "text":
            assert keys.FULL_VERSIONS not in row.keys(include_nested=True)
        else:
            full = row[keys.FULL_VERSIONS]
            assert full.shape == row["tokens", "full"].shape
            assert (full[full != keys.NO_VERSION] == sampled).all()
            # Laid out as TorchRL's mask of the response.
            mask = row["masks", "all_assistant_mask"]
            assert ((full != keys.NO_VERSION) == mask).all()
        assert row[keys.NUM_CACHED_TOKENS] >= 0
        for key in (keys.QUEUE_TIME, keys.PREFILL_TIME, keys.DECODE_TIME):
            assert row[key].dtype == torch.float32
            assert 0 <= row[key] < 100
        assert row[keys.DECODE_TIME] > 0
        assert row[keys.REPLICA_ID] in {"0", "1"}
        assert row[keys.FINISH_REASON] == "length"
    assert switched >= len(rows) // 2
    assert flat(out[keys.FINISH_REASON]) == {"length"}


def test_rows_of_unequal_length_are_padded_like_their_tokens(service):
    policy = policy_of(vLLMWrapper, service, "tokens", pad_output=True, sampling={"max_tokens": 64})
    policy.sampling_params.ignore_eos = False
    policy.sampling_params.stop_token_ids = list(range(3, 512, 4))
    policy.sampling_params.__post_init__()
    out = policy(asked("tokens", (8,)))
    tokens, found = out["tokens", "response"], out[keys.RESPONSE_VERSIONS]
    mask = out["masks", "all_assistant_mask"][:, -tokens.shape[-1] :]
    assert tokens.shape == found.shape
    assert len(set(mask.sum(-1).tolist())) > 1
    assert ((found == service.weight_version) == mask).all()
    assert (found[~mask] == keys.NO_VERSION).all()


def test_a_filter_by_age_takes_the_oldest_token(service, model):
    policy = policy_of(
        vLLMWrapper, service, "tokens", sampling={"max_tokens": LENGTH, "min_tokens": LENGTH}
    )
    service.push_weights(perturbed(model, seed=13))
    data = asked("tokens", (ROWS,))
    out = generate_and_push(service, policy, data, perturbed(model, seed=14))
    mixed = [row for row in out.unbind(0) if row["policy_version"] != row["max_policy_version"]]
    assert mixed
    strict = PolicyAgeFilter(lambda: service.weight_version, max_policy_lag=0)
    lenient = PolicyAgeFilter(lambda: service.weight_version, max_policy_lag=1)
    stamps = torch.stack([row["policy_version"] for row in mixed])
    stamps = TensorDict(policy_version=stamps, batch_size=len(mixed))
    assert len(strict(stamps)) == 0
    assert len(lenient(stamps)) == len(mixed)


# ---------------------------------------------------------------- prefixes that siblings share

# Longer than three blocks of 32 tokens with the chat template.
QUESTION = "Why does every sample of a group begin with the same question, {0}? " * 3
GROUP = 4


def groups():
    number = 0
    while True:
        number += 1
        yield {"query": [QUESTION.format(number)]}


def collect(service, **kwargs):
    """One batch of groups from a collector, every group's prompt new to the engines."""
    env = ChatEnv.from_dataloader(
        dataloader=groups(),
        batch_size=(2 * GROUP,),
        repeats=GROUP,
        tokenizer=TOKENIZER,
        input_mode="history",
    ).append_transform(StepCounter(max_steps=1))
    collector = LLMCollector(
        env,
        policy=policy_of(vLLMWrapper, service, "history", **kwargs),
        dialog_turns_per_batch=2 * GROUP,
        total_dialog_turns=-1,
        yield_only_last_steps=False,
    )
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


def cached_by_prompt(batch):
    found = {}
    for row in rows_of(batch):
        prompt = tuple(row["tokens", "prompt"].reshape(-1).tolist())
        found.setdefault(prompt, []).append(int(row[keys.NUM_CACHED_TOKENS]))
    return found


def test_the_samples_of_a_group_share_their_prompts_prefill(service, model):
    service.push_weights(perturbed(model, seed=15))  # no prefix of this version is cached
    found = cached_by_prompt(collect(service))
    assert len(found) == 2
    for prompt, cached in found.items():
        whole = (len(prompt) - 1) // 32 * 32
        assert whole >= 96
        assert len(cached) == GROUP
        assert sorted(cached)[1:] == [whole] * (GROUP - 1), cached


def test_samples_of_one_request_share_it_too(service, model):
    service.push_weights(perturbed(model, seed=16))
    prompt = [(7 * at) % 500 + 3 for at in range(100)]
    from vllm import SamplingParams

    params = SamplingParams(n=GROUP, max_tokens=4, ignore_eos=True, temperature=1.0)
    output = service.generate(prompt_token_ids=prompt, sampling_params=params)
    cached = [one.num_cached_tokens for one in output.sample_reports]
    assert sorted(cached) == [0, 96, 96, 96]


def test_asking_for_prompt_log_probs_gives_that_up(service, model):
    """The twin: TorchRL's default, which makes vLLM pass its cache by."""
    service.push_weights(perturbed(model, seed=17))
    found = cached_by_prompt(collect(service, sampling={"prompt_logprobs": 1}))
    assert {one for cached in found.values() for one in cached} == {0}


def test_after_a_push_no_row_is_answered_from_old_keys(service, model):
    policy = policy_of(vLLMWrapper, service, "tokens")
    data = asked("tokens", (1,)).clone()
    prompt = torch.arange(5, 105)[None]
    data["tokens", "prompt"] = prompt
    data["masks", "all_attention_mask"] = torch.ones_like(prompt, dtype=torch.bool)
    for step in (18, 19):
        service.push_weights(perturbed(model, seed=step))
        session = {"cached": [], "versions": set()}
        for _ in range(6):  # the replicas take turns as they like
            (row,) = policy(data).unbind(0)
            session["cached"].append(int(row[keys.NUM_CACHED_TOKENS]))
            session["versions"].add(int(row[keys.POLICY_VERSION]))
            response = row["tokens", "response"]
            wanted = token_log_probs(model, torch.cat([prompt[0], response]))[-len(response) :]
            found = row["log_probs", "response"]
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
        assert session["versions"] == {service.weight_version}
        assert session["cached"][0] == 0
        assert session["cached"].count(96) >= 4  # one miss for each replica

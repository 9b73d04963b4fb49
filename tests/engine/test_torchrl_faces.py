"""TorchRL's own classes, unmodified, around the service: wrappers, collectors, updaters."""

import copy
import os
import pickle
import sys

import peft
import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from tests.engine.checks import assert_holds, perturbed
from torchrl_vllm_sync import WeightUpdater, vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
TEXTS = ["What else is there?", "Tell me more, please.", "Hello", "Every replica serves"]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}


# TorchRL 0.14's wrapper builds each single-turn history in a shape that its own class corrects.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    # Its padding builds torch's old nested tensors.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def asked(mode, shape):
    """A TensorDict of prompts in one of TorchRL's three modes."""
    number = int(torch.Size(shape).numel())
    texts = [TEXTS[i % 4] for i in range(number)]
    if mode == "history":
        chats = History.from_chats([[{"role": "user", "content": text}] for text in texts])
        data = TensorDict(history=ChatHistory(prompt=chats, batch_size=number), batch_size=number)
    elif mode == "text":
        data = TensorDict(text=Text(prompt=texts, batch_size=number), batch_size=number)
    else:
        encoded = TOKENIZER(texts, padding=True, return_tensors="pt")
        tokens = Tokens(prompt=encoded["input_ids"], batch_size=number)
        masks = {"all_attention_mask": encoded["attention_mask"].bool()}
        data = TensorDict(tokens=tokens, masks=TensorDict(masks, number), batch_size=number)
    return data[0] if shape == () else data.reshape(shape)


def policy_of(kind, service, mode, **kwargs):
    sampling = {**SAMPLING, **kwargs.pop("sampling", {})}
    return kind(
        service,
        tokenizer=TOKENIZER,
        input_mode=mode,
        generate_kwargs=sampling,
        **{"pad_output": False, "return_log_probs": True, **kwargs},
    )


MODES = ["history", "text", "tokens"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("pad_output", [False, True])
def test_each_row_carries_its_version_and_end(service, mode, shape, pad_output):
    policy = policy_of(vLLMWrapper, service, mode, pad_output=pad_output)
    out = policy(asked(mode, shape))
    assert out["policy_version"].shape == torch.Size(shape)
    assert out["policy_version"].dtype == torch.int64
    assert (out["policy_version"] == service.weight_version).all()
    reasons = out["finish_reason"]
    assert {reasons} == {"length"} if shape == () else flat(reasons) == {"length"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_each_of_several_samples_is_a_row(service, mode, shape):
    policy = policy_of(vLLMWrapper, service, mode, num_samples=2)
    out = policy(asked(mode, shape))
    assert out.shape == out["policy_version"].shape
    assert out.numel() == 2 * int(torch.Size(shape).numel())
    assert (out["policy_version"] == service.weight_version).all()
    assert flat(out["finish_reason"]) == {"length"}


def flat(reasons):
    """All entries of a nested list."""
    if isinstance(reasons, str):
        return {reasons}
    found = reasons.tolist() if hasattr(reasons, "tolist") else reasons
    return set().union(*(flat(one) for one in found))


def test_rows_that_ended_by_themselves_say_so(service):
    policy = policy_of(vLLMWrapper, service, "history", sampling={"max_tokens": 64})
    policy.sampling_params.stop_token_ids = list(range(3, 512, 2))
    policy.sampling_params.__post_init__()
    assert flat(policy(asked("history", (8,)))["finish_reason"]) == {"stop"}


def test_batching_across_threads_keeps_rows_apart(service):
    from concurrent.futures import ThreadPoolExecutor

    policy = policy_of(vLLMWrapper, service, "history", batching=True, min_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: policy(asked("history", (1,))), range(8)))
    assert [int(out["policy_version"]) for out in outs] == [service.weight_version] * 8


def test_new_versions_of_the_policy_stamp_too(service):
    policy = policy_of(vLLMWrapper, service, "history").get_new_version(
        num_samples=2, inplace=False
    )
    assert type(policy) is vLLMWrapper
    out = policy(asked("history", (2,)))
    assert out["policy_version"].shape == out.shape == torch.Size([2, 2])


@pytest.mark.parametrize("mode", MODES)
def test_torchrls_own_wrapper_works_and_its_log_probs_are_the_trainers(service, model, mode):
    service.push_weights(model)
    policy = policy_of(TorchRLWrapper, service, mode)

    def has_padding(rows):
        padding = TOKENIZER.pad_token_id
        return any((one["tokens", "response"] == padding).any() for one in rows.unbind(0))

    draws = (policy(asked(mode, (3,))) for _ in range(9))
    out = next(one for one in draws if not has_padding(one))  # which the scorer would leave out
    assert "policy_version" not in out.keys()  # noqa: SIM118  a TensorDict
    scorer = TransformersWrapper(
        model,
        tokenizer=TOKENIZER,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )
    for text, row in zip(TEXTS, out.unbind(0), strict=False):
        response = row["tokens", "response"].reshape(-1)[-6:]
        prompt = row["tokens", "prompt"] if mode != "text" else torch.tensor(TOKENIZER.encode(text))
        full = torch.cat([prompt.reshape(-1), response])
        scored = scorer(TensorDict(tokens=Tokens(full=full[None], batch_size=1), batch_size=1))
        wanted = scored["log_probs", "full"].reshape(-1)[-6:]
        found = row["log_probs", "response"].reshape(-1)[-6:]
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)


# ---------------------------------------------------------------- collectors


def queries():
    while True:
        for text in TEXTS:
            yield {"query": [text]}


def make_env():
    env = ChatEnv.from_dataloader(
        dataloader=queries(), batch_size=(4,), tokenizer=TOKENIZER, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=1))


def make_collector(service, **kwargs):
    return LLMCollector(
        make_env(),
        policy=policy_of(vLLMWrapper, service, "history"),
        dialog_turns_per_batch=4,
        total_dialog_turns=-1,
        yield_only_last_steps=False,
        **{"track_policy_version": True, **kwargs},
    )


@pytest.mark.filterwarnings("ignore:.*weight_updater.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*WeightUpdater.*:DeprecationWarning")
def test_a_collectors_version_moves_once_a_push_whichever_way(service, model):
    updater = WeightUpdater(service, source=model)
    hooks = []
    updater.register_post_hook(lambda: hooks.append(service.weight_version))
    collector = make_collector(service, weight_updater=updater)
    assert updater.collector is collector
    collector.init_updater()
    versions, stamps = [], []
    for step, batch in enumerate(collector):
        stamps.append(batch["policy_version"].unique().tolist())
        versions.append(collector.policy_version)
        if step == 4:
            break
        perturbed(model, seed=step)
        if step == 0:
            updater.push_weights()
        elif step == 1:
            collector.update_policy_weights_(model)
        elif step == 2:
            collector.update_policy_weights_(TensorDict.from_module(model).data)
        else:
            updater.push_weights(model.state_dict())
    assert versions == list(range(versions[0], versions[0] + 5))
    assert stamps == [[one] for one in range(stamps[0][0], stamps[0][0] + 5)]
    assert hooks == [service.weight_version - 3 + i for i in range(4)]
    assert_holds(service, model)
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:.*weight_updater.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*WeightUpdater.*:DeprecationWarning")
def test_two_collectors_share_an_updater(service, model):
    updater = WeightUpdater(service, source=model)
    collectors = [make_collector(service, weight_updater=updater) for _ in range(2)]
    for push in (updater.push_weights, collectors[0].update_policy_weights_):
        before = service.weight_version
        push()
        assert service.weight_version == before + 1
        assert {collector.policy_version for collector in collectors} == {before + 1}
    for collector in collectors:
        collector.shutdown()


def test_a_pickled_updater_pushes(service, other_model):
    updater = pickle.loads(pickle.dumps(WeightUpdater(service, source=other_model)))
    report = updater.push_weights(other_model)
    assert report.version == updater.service.weight_version
    assert_holds(service, other_model)
    updater.service.weights.pusher.close()


def test_torchrls_policy_age_filter_works_on_the_stamp(service, model):
    from torchrl.envs.transforms import PolicyAgeFilter

    policy = policy_of(vLLMWrapper, service, "history")
    rows = []
    for _ in range(4):
        service.push_weights(model)
        rows.append(policy(asked("history", (1,)))[0])
    keep = PolicyAgeFilter(lambda: service.weight_version, max_policy_lag=1)
    kept = keep(torch.stack(rows).select("policy_version"))
    newest = service.weight_version
    assert kept["policy_version"].tolist() == [newest - 1, newest]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchrls_own_updater(service, other_model):
    from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2

    updater = vLLMUpdaterV2(service)
    updater.init()
    before = service.weight_version
    updater.push_weights(iter(other_model.state_dict().items()))
    assert service.weight_version > before
    assert_holds(service, other_model)
    before = service.weight_version
    policy = TransformersWrapper(
        perturbed(other_model, seed=4), tokenizer=TOKENIZER, input_mode="tokens", generate=False
    )
    updater.push_weights_from_transformers(policy)
    assert service.weight_version == before + 1
    assert_holds(service, other_model)


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["all-linear", "modules_to_save"],
)
def test_adapters_reach_the_engines_merged_and_stay_as_they_are(service, model, config):
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, **config)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    wrapped = TransformersWrapper(
        adapted, tokenizer=TOKENIZER, input_mode="tokens", generate=False, return_log_probs=True
    )
    WeightUpdater(service, source=wrapped).push_weights()
    assert_holds(service, adapted)
    assert all(torch.equal(before[name], now) for name, now in adapted.state_dict().items())
    with adapted.disable_adapter():
        service.push_weights(adapted)
    assert_holds(service, model)


# ---------------------------------------------------------------- a collector in an actor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_collector_in_a_ray_actor_follows_pushes_of_the_trainer(service, model):
    from torchrl.collectors.llm import RayLLMCollector

    collector = RayLLMCollector(
        make_env,
        policy=policy_of(vLLMWrapper, service, "history"),
        dialog_turns_per_batch=4,
        total_dialog_turns=12,
        yield_only_last_steps=False,
        track_policy_version=True,
        remote_config={
            "num_cpus": 0,
            "num_gpus": 0,
            "runtime_env": {
                "env_vars": {"LIST_TO_STACK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            },
        },
    )
    try:
        updater = WeightUpdater(service, source=model)
        collector.weight_updater = updater
        before = collector.policy_version
        stamps = []
        for batch in collector:
            if batch is None:  # how TorchRL 0.14's iterator ends
                break
            stamps.append(batch["policy_version"].unique().tolist())
            perturbed(model, seed=len(stamps))
            updater.push_weights()
        assert collector.policy_version == before + len(stamps) == before + 3
        assert all(len(stamp) == 1 for stamp in stamps)
        assert stamps[0] < stamps[1] < stamps[2] or stamps[0] < stamps[2]
        assert_holds(service, model)
    finally:
        collector.shutdown()

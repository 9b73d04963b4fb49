"""TrainerPolicy gives what TorchRL's wrapper gives, without logits of every position."""

import copy
import math

import numpy as np
import peft
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.envs.llm.transforms import RetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.common import Masks, Tokens
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_vllm_sync import as_weight_source
from torchrl_vllm_sync.errors import (
    DivergedError,
    InvalidPromptError,
    SyncError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl import trainer
from torchrl_vllm_sync.rl.trainer import TrainerPolicy
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, make_tiny_tokenizer
from torchrl_vllm_sync.weights.module import ParamMeta
from torchrl_vllm_sync.weights.source import fit_to_model

VOCABULARY = 512
LENGTHS = [(5, 7), (9, 3), (4, 8), (12, 1), (1, 6)]  # of prompts and answers
PATHS = ("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture
def model(checkpoint):
    return load_tiny_model(checkpoint)


@pytest.fixture(scope="module")
def rows(checkpoint):
    """TorchRL's lazy stack of ragged rows, sampled by a policy close to the model's."""
    model, generator = load_tiny_model(checkpoint), torch.Generator().manual_seed(1)
    made = []
    for prompt, answer in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (prompt + answer,), generator=generator)
        log_probs = whole_log_probs(model, ids) + torch.randn(len(ids), generator=generator) / 10
        # As MCAdvantage has it: GRPOLoss pads ragged advantages on the other side than the rest.
        made.append(row(ids, prompt, log_probs, torch.randn(1, 1, generator=generator)))
    return lazy_stack(made)


def whole_log_probs(model, ids, temperature=1.0):
    """Of one row: the plain way."""
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def row(ids, prompt, log_probs, advantage):
    answer = torch.arange(len(ids)) >= prompt
    masks = {"all_attention_mask": torch.ones_like(answer), "all_assistant_mask": answer}
    return TensorDict(
        {
            "tokens": {"full": ids},
            "masks": masks,
            "log_probs": {"full": log_probs.masked_fill(~answer, math.nan)},
            "advantage": advantage,
        }
    )


def dense(rows, side="middle"):
    """The rows in one tensor an entry; "middle" pads prompts on the left, answers on the right."""
    width = 25
    starts = {
        "left": [width - p - a for p, a in LENGTHS],
        "right": [0 for _ in LENGTHS],
        "middle": [12 - p for p, _ in LENGTHS],
        "hole": [0 for _ in LENGTHS],
    }[side]
    out = {}
    for key in [*PATHS, ("log_probs", "full")]:
        values = rows.get(key, as_list=True)
        whole = torch.zeros(len(values), width, dtype=values[0].dtype)
        for i, (value, (prompt, _)) in enumerate(zip(values, LENGTHS, strict=True)):
            columns = torch.arange(len(value)) + starts[i]
            if side == "hole":
                columns[prompt:] += 3
            whole[i, columns] = value
        out[key] = whole
    return TensorDict(out | {"advantage": rows["advantage"]}, [len(LENGTHS)])


def wrapper(model):
    return TransformersWrapper(
        model,
        tokenizer=make_tiny_tokenizer(),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        pad_model_input=True,
    )


def outcome(policy, rows, **options):
    """What GRPOLoss returns, and the gradients of all parameters by the sum of its losses."""
    loss = GRPOLoss(policy, **({"kl_to_inference_coeff": 0.1} | options))
    out = loss(rows).to_tensordict()
    parameters = [one for one in policy.model.parameters() if one.requires_grad]
    total = sum(out[name] for name in out.keys() if name.startswith("loss_"))  # noqa: SIM118
    grads = torch.autograd.grad(total, parameters)
    assert all(one.abs().sum() > 0 for one in grads)
    return {name: value.detach() for name, value in out.items()}, grads


def assert_same(mine, other, names=None):
    for name in names or other[0]:
        torch.testing.assert_close(mine[0][name], other[0][name], rtol=2e-5, atol=2e-6, msg=name)
    scale = max(one.abs().max() for one in other[1])
    for one, another in zip(mine[1], other[1], strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=float(scale) * 1e-5)


# What does not depend on how much padding there is.
OF_TOKENS = "loss_objective", "loss_entropy", "ESS"


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_losses_and_gradients_on_ragged_rows_are_those_of_torchrls_wrapper(model, rows, strategy):
    theirs = outcome(wrapper(model), rows, masking_strategy=strategy)
    policy = TrainerPolicy(model)
    assert_same(outcome(policy, rows, masking_strategy=strategy), theirs)
    assert policy.path == "head"
    assert 0.5 < theirs[0]["ESS"] < 1


@pytest.mark.parametrize("side", ["left", "right", "middle", "hole"])
def test_padding_may_stand_anywhere(model, rows, side):
    theirs = outcome(wrapper(model), rows, kl_to_inference_coeff=None)
    mine = outcome(TrainerPolicy(model), dense(rows, side), kl_to_inference_coeff=None)
    assert_same(mine, theirs, OF_TOKENS)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_tokens": 1},
        {"chunk_tokens": 4},
        {"micro_batch": 1},
        {"micro_batch": 2, "chunk_tokens": 3},
        {"gradient_checkpointing": True, "micro_batch": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["head", "logits"])
def test_chunks_and_micro_batches_change_nothing(model, rows, settings, path):
    whole = outcome(TrainerPolicy(model), rows)
    policy = TrainerPolicy(model, **settings)
    policy.path = path
    policy.train(settings.get("gradient_checkpointing", False))
    assert_same(outcome(policy, rows), whole)


@pytest.fixture(scope="module")
def uneven():
    """Rows of 3 to 62 tokens, padded on both sides."""
    generator, lengths = torch.Generator().manual_seed(2), [(2, 60), (30, 1), (1, 2), (20, 20)]
    made = TensorDict({"advantage": torch.randn(4, 1, 1, generator=generator)}, [4])
    columns = torch.arange(90) - 30
    begins, ends = (torch.tensor(one)[:, None] for one in zip(*lengths, strict=True))
    attended = (columns >= -begins) & (columns < ends)
    made["tokens"] = {"full": torch.randint(3, VOCABULARY, (4, 90), generator=generator)}
    made["masks"] = {
        "all_attention_mask": attended,
        "all_assistant_mask": attended & (columns >= 0),
    }
    made["log_probs"] = {"full": torch.randn(4, 90, generator=generator) / 10 - 6}
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch": 2, "chunk_tokens": 3},
        {"micro_batch": 3, "chunk_tokens": 1000},
        {"gradient_checkpointing": True, "temperature": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["head", "logits"])
def test_packed_rows_are_scored_as_padded_ones(model, rows, uneven, path, settings):
    padded, packed = (TrainerPolicy(model, packed=one, **settings) for one in (False, True))
    padded.path = packed.path = path
    model.train(settings.get("gradient_checkpointing", False))
    for given in (uneven, rows, dense(rows, "hole")):
        assert_same(outcome(packed, given), outcome(padded, given))
        mine, other = (policy(given.clone()) for policy in (packed, padded))
        for one, another in zip(mine.unbind(0), other.unbind(0), strict=True):
            key = "log_probs", "full"
            torch.testing.assert_close(one[key], another[key], rtol=1e-5, atol=1e-5)


def test_packing_without_positions_is_noticed(model, uneven, monkeypatch):
    """The negative control of the above."""
    policy = TrainerPolicy(model, packed=True)
    assert policy._keeps_rows_apart
    monkeypatch.setattr(trainer, "_input", lambda ids, *places: {"input_ids": ids})
    with pytest.raises(AssertionError, match="loss_objective"):
        assert_same(outcome(policy, uneven), outcome(TrainerPolicy(model), uneven))


@pytest.mark.parametrize("path", ["head", "logits"])
def test_rows_of_a_like_length_share_a_pass(model, uneven, path):
    policy = TrainerPolicy(model, micro_batch=2, chunk_tokens=1000)
    policy.path, seen = path, []
    model.model.embed_tokens.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    policy(uneven.clone())
    assert [[*one] for one in seen] == [[2, 61], [2, 30]]  # of 61, 30, 2 and 39 needed columns


@pytest.mark.parametrize(("packed", "shape"), [(False, [4, 61]), (True, [1, 132])])
def test_packed_rows_are_computed_without_padding(model, uneven, packed, shape):
    policy = TrainerPolicy(model, packed=packed)
    seen = []
    policy(uneven.clone())
    model.model.embed_tokens.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    policy._get_sft_dist(uneven).log_prob(uneven["tokens", "full"])
    assert [[*one] for one in seen] == [shape]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"attn_implementation": "eager"}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 1.0, "sliding_window": 4}),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_that_keep_packed_rows_apart(uneven, model_type, options, dtype):
    policy = TrainerPolicy(tiny(model_type, **options).to(dtype), packed=True).train()
    assert policy._keeps_rows_apart
    assert all(one.training for one in policy.model.modules())  # again
    if dtype is torch.float32:
        found = policy.eval()(uneven.clone())["log_probs", "full"]
        each = zip(uneven["tokens", "full"], uneven["masks", "all_attention_mask"], strict=True)
        wanted = torch.cat([whole_log_probs(policy.model, ids[own]) for ids, own in each])
        found = found[uneven["masks", "all_attention_mask"]]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "options", "name"),
    [
        ("qwen3_next", {"head_dim": 16}, "Qwen3NextForCausalLM .*'sdpa'"),  # takes positions
        ("bloom", {}, "BloomForCausalLM"),
        ("llama", {"attention_chunk_size": 64}, "LlamaForCausalLM"),
    ],
)
def test_models_that_do_not_are_refused_by_name(uneven, model_type, options, name):
    policy = TrainerPolicy(tiny(model_type, **options), packed=True)
    for use in (policy, policy._get_sft_dist):
        with pytest.raises(UnsupportedArgumentError, match=f"packed=True, but {name}"):
            use(uneven.clone())


def test_other_answers_have_another_loss(model, rows):
    changed = dense(rows)
    answers = changed["masks", "all_assistant_mask"]
    tokens = changed["tokens", "full"]
    tokens[answers] = tokens[answers].flip(0)
    mine = outcome(TrainerPolicy(model), changed)
    with pytest.raises(AssertionError, match="loss_objective"):
        assert_same(mine, outcome(TrainerPolicy(model), dense(rows)), OF_TOKENS)


def tiny(model_type, **options):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(model_type, **(sizes | heads | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("model_type", "options", "path"),
    [
        ("llama", {}, "head"),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}, "head"),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 1.0}, "logits"),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": None}, "head"),
        ("granite", {"logits_scaling": 0.5}, "logits"),
        ("cohere", {"logit_scale": 4.0, "pad_token_id": 0}, "logits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_model_does_to_logits_is_not_left_out(rows, model_type, options, path):
    other = tiny(model_type, **options)
    policy = TrainerPolicy(other, chunk_tokens=30, micro_batch=2)
    log_probs = policy(rows.clone()).get(("log_probs", "full"), as_list=True)
    assert policy.path == path
    for ids, ours in zip(rows.get(("tokens", "full"), as_list=True), log_probs, strict=True):
        torch.testing.assert_close(ours, whole_log_probs(other, ids), rtol=1e-5, atol=1e-5)
    if model_type != "gpt2":  # theirs counts padding as positions
        names = ["loss_objective", "ESS", "entropy"]
        assert_same(outcome(policy, rows), outcome(wrapper(other), rows), names)


def test_adapters_are_trained_and_nothing_else(model, rows):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    policy = TrainerPolicy(adapted)
    mine = outcome(policy, rows)
    assert policy.path == "head"
    assert len(mine[1]) == 2 * 2 * 2
    assert_same(mine, outcome(wrapper(adapted), rows))


def push(policy, dtype):
    """As far as the policy can tell: its weights are compared with those that engines expect."""
    source = as_weight_source(policy)
    expected = [ParamMeta(one.name, dtype, one.shape) for one in source.metadata()]
    fit_to_model(source, expected)


def test_a_sharded_model_is_called_as_a_whole(model, checkpoint, rows, tmp_path, caplog):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        sharded = load_tiny_model(checkpoint)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for part in [*sharded.model.layers, sharded]:
            fully_shard(part, mesh=mesh)
        policy = TrainerPolicy(sharded, chunk_tokens=30)
        push(policy, torch.bfloat16)  # FSDP2 may compute in that itself
        losses, theirs = GRPOLoss(policy)(rows), GRPOLoss(wrapper(model))(rows)
        assert policy.path == "logits"
        assert "rounding" not in caplog.text
        for one in losses, theirs:
            (one.loss_objective + one.loss_entropy).backward()
        torch.testing.assert_close(losses.ESS, theirs.ESS)
        for mine, other in zip(sharded.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_distributions_are_torchrls(model, rows, strategy):
    name = f"_get_{strategy}_dist"
    theirs, ours = (getattr(one, name)(rows) for one in (wrapper(model), TrainerPolicy(model)))
    tokens = rows.get(
        ("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=-100
    )
    assert torch.equal(ours.mask, theirs.mask)
    # A row's first token follows nothing; theirs has it follow padding there.
    follows = theirs.mask & (theirs.mask.cumsum(1) > (strategy == "generic"))
    for mine, other in [
        (ours.log_prob(tokens), theirs.log_prob(tokens)),
        (ours.entropy(), theirs.entropy()),
    ]:
        torch.testing.assert_close(mine[follows], other[follows])
        assert mine.shape == other.shape
        assert not mine[~follows].any()


def test_prompts_end_where_torchrl_has_them_end(model, rows):
    """With an earlier answer of the assistant inside of the prompt, "sft" is not "rlhf"."""
    made = []
    for one, (prompt, _) in zip(rows.unbind(0), LENGTHS, strict=True):
        one = one.clone()
        one["tokens", "prompt"] = one["tokens", "full"][:prompt]
        one["masks", "all_assistant_mask"][prompt // 2] = True
        made.append(one)
    turns = lazy_stack(made)
    for strategy in ["sft", "rlhf"]:
        theirs, ours = (
            getattr(one, f"_get_{strategy}_dist")(turns)
            for one in (wrapper(model), TrainerPolicy(model))
        )
        assert torch.equal(ours.mask, theirs.mask)
        assert int(ours.mask.sum()) == sum(a for _, a in LENGTHS) + 5 * (strategy == "rlhf")


def test_log_probs_of_no_gradient_do_not_spoil_the_entropy(model, rows):
    dist = TrainerPolicy(model)._get_sft_dist(rows)
    with torch.no_grad():
        dist.log_prob(torch.zeros_like(dist.mask, dtype=torch.long))
        without = dist.entropy()
    assert not without.requires_grad
    assert dist.entropy().requires_grad
    torch.testing.assert_close(dist.entropy(), without)


def test_a_call_writes_what_the_wrapper_writes(model, rows):
    policy = TrainerPolicy(model)
    for given in [rows, lazy_stack([rows[:2], rows[2:4]]), rows[0]]:
        theirs, ours = wrapper(model)(given.clone()), policy(given.clone())
        assert ours.batch_size == given.batch_size
        for mine, other in zip(flat(ours), flat(theirs), strict=True):
            expected = other["log_probs", "full"]
            torch.testing.assert_close(mine["log_probs", "full"], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(mine["tokens", "full"], other["tokens", "full"])
    packed = dense(rows)
    assert policy(packed) is packed
    attended = packed["masks", "all_attention_mask"]
    assert packed["log_probs", "full"].shape == attended.shape
    assert not packed["log_probs", "full"][~attended].any()
    expected = torch.cat(wrapper(model)(rows.clone()).get(("log_probs", "full"), as_list=True))
    torch.testing.assert_close(packed["log_probs", "full"][attended], expected)


def flat(rows):
    if not rows.ndim:
        return [rows]
    return [one for part in rows.unbind(0) for one in flat(part)]


def test_the_reference_model_of_a_kl_term(model, checkpoint, rows):
    reference = load_tiny_model(checkpoint)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.01 * parameter.std() * torch.ones_like(parameter)
    results = []
    for make in (wrapper, TrainerPolicy):
        retrieve = RetrieveLogProb(
            make(reference),
            log_probs_full_key=("next", "ref_log_probs", "full"),
            assistant_only=False,
        )
        with torch.no_grad():
            known = retrieve(rows.clone())
        for one, before in zip(known.unbind(0), rows.unbind(0), strict=True):
            one["log_probs", "full"] = before["log_probs", "full"]
        results.append(outcome(make(model), known, kl_to_ref_coeff=0.5))
    theirs, ours = results
    assert theirs[0]["kl_to_ref"] > 1e-4
    assert_same(ours, theirs)


def test_tensor_classes_of_a_batch(model, rows):
    plain = dense(rows)
    batch = plain.clone()
    size = {"batch_size": plain.batch_size}
    batch["tokens"] = Tokens(full=plain["tokens", "full"], **size)
    batch["masks"] = Masks(**plain["masks"].to_dict(), **size)
    policy = TrainerPolicy(model)
    assert_same(outcome(policy, batch), outcome(policy, plain))


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize("path", ["head", "logits"])
def test_logits_of_one_chunk_exist_at_a_time(checkpoint, rows, path):
    wide = load_tiny_model(checkpoint)
    wide.resize_token_embeddings(4096, mean_resizing=False)
    weights, chunk = 4096 * 64, 100
    batch = lazy_stack([*rows.unbind(0)] * 4)
    positions = 4 * len(LENGTHS) * max(map(sum, LENGTHS))
    policy = TrainerPolicy(wide, chunk_tokens=chunk)
    policy.path = path
    for one, bounded in [(policy, True), (wrapper(wide), False)]:
        with LargestTensor() as largest:
            outcome(one, batch)
        assert (largest.numel <= chunk * 4096) == bounded
        assert (largest.numel >= positions * 4096) != bounded
    assert weights < chunk * 4096 < positions * 4096


def saved_numel(policy, rows):
    """How much of a loss is kept for backward, parameters aside."""
    kept, parameters = {}, {one.data_ptr() for one in policy.model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = GRPOLoss(policy)(rows).loss_objective
    assert loss.requires_grad
    return sum(one.numel() for one in kept.values())


def test_micro_batches_chunks_and_checkpoints_keep_less_for_backward(model, rows):
    rows = dense(rows)
    whole = saved_numel(TrainerPolicy(model), rows)
    chunks = saved_numel(TrainerPolicy(model, chunk_tokens=5), rows)
    parts = saved_numel(TrainerPolicy(model, chunk_tokens=5, micro_batch=2), rows)
    layers = TrainerPolicy(model, chunk_tokens=5, gradient_checkpointing=True).train()
    answers = sum(answer for _, answer in LENGTHS)
    assert whole - chunks > 0.8 * answers * VOCABULARY
    assert parts < chunks / 4
    assert parts < saved_numel(layers, rows) < chunks / 2


def test_a_bfloat16_model_has_float32_log_probs(checkpoint, rows):
    half = load_tiny_model(checkpoint).to(torch.bfloat16)
    rows, logits = dense(rows), []
    half.lm_head.register_forward_hook(lambda _head, _states, made: logits.append(made.detach()))
    tokens, mask = rows["tokens", "full"], rows["masks", "all_assistant_mask"]
    policy = TrainerPolicy(half)
    assert policy.path == "head"
    logits.clear()
    dist = policy._get_sft_dist(rows)
    log_probs = dist.log_prob(tokens)
    assert log_probs.dtype == dist.entropy().dtype == torch.float32
    # Rows alone, or in another batch, round otherwise on some CPUs: these are this call's own.
    made = torch.cat(logits)
    assert made.dtype == torch.bfloat16
    chosen = made.float().log_softmax(-1)
    exact = chosen.gather(-1, tokens[mask][:, None])[:, 0]
    rounding = (exact.bfloat16() - exact).abs().max()
    assert (log_probs[mask] - exact).abs().max() < rounding / 10
    attended = rows["masks", "all_attention_mask"]
    each = zip(tokens, attended, strict=True)
    alone = torch.cat([whole_log_probs(half, ids[own]) for ids, own in each])[mask[attended]]
    assert (log_probs[mask] - alone).abs().max() < 2 * rounding
    log_probs.sum().backward()


def test_log_probs_at_the_sampling_temperature(model, rows):
    policy = TrainerPolicy(model, temperature=0.7)
    ours = policy(rows.clone()).get(("log_probs", "full"), as_list=True)
    for ids, mine in zip(rows.get(("tokens", "full"), as_list=True), ours, strict=True):
        torch.testing.assert_close(mine, whole_log_probs(model, ids, 0.7), rtol=1e-5, atol=1e-5)
    entropy = policy._get_sft_dist(rows).entropy().sum()
    assert entropy < TrainerPolicy(model)._get_sft_dist(rows).entropy().sum()


def test_gradients_at_a_temperature_are_those_of_finite_differences(checkpoint, rows):
    exact = load_tiny_model(checkpoint)
    policy = TrainerPolicy(exact, temperature=0.7, chunk_tokens=4)
    weight = exact.model.norm.weight

    def total():
        dist = policy._get_sft_dist(rows)
        tokens = rows.get(("tokens", "full"), as_padded_tensor=True, padding_side="left")
        return dist.log_prob(tokens).mean() + 0.3 * dist.entropy().mean()

    total().backward()
    direction, step = weight.grad / weight.grad.norm(), 1e-2
    with torch.no_grad():
        weight += step * direction
        above = total()
        weight -= 2 * step * direction
        slope = (above - total()) / (2 * step)
    torch.testing.assert_close(slope, weight.grad.norm(), rtol=5e-3, atol=0)


# ---------------------------------------------------------------- sampling masks

MASK = "sampling_mask", "response"


@pytest.fixture(scope="module")
def masked(rows):
    """The rows, with 1 to 9 tokens that could be sampled in place of each, its own among them."""
    made, generator = rows.clone(), torch.Generator().manual_seed(4)
    for row, (_, answer) in zip(made.unbind(0), LENGTHS, strict=True):
        ids = torch.stack([torch.randperm(500, generator=generator) for _ in range(answer)])[:, :9]
        own = row["tokens", "full"][-answer:, None]
        ids = torch.where(ids == own, 500, ids)
        nums = torch.randint(1, 10, (answer, 1), generator=generator)
        at = torch.rand(answer, 1, generator=generator).mul(nums).long()
        ids.scatter_(1, at, own)
        row["sampling_mask"] = {"response": torch.where(torch.arange(9) < nums, ids, -1).int()}
    return made


def dense_masked(masked):
    width = max(answer for _, answer in LENGTHS) + 5  # as dense() has it
    masks = [row[MASK] for row in masked.unbind(0)]
    masks = [torch.nn.functional.pad(one, (0, 0, 0, width - len(one)), value=-1) for one in masks]
    return dense(masked).set(MASK, torch.stack(masks))


def numpy_scores(model, row, temperature):
    """Of a row's answer: log-probabilities and entropies over the mask, by their definitions."""
    ids, answer = row["tokens", "full"], len(row[MASK])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -answer - 1 : -1].numpy()
    log_probs, entropies = [], []
    for of_all, mask, token in zip(logits, row[MASK].tolist(), ids[-answer:].tolist(), strict=True):
        known = [one for one in mask if one >= 0]
        weights = np.exp(of_all[known].astype(np.float64) / temperature)
        shares = weights / weights.sum()
        log_probs.append(np.log(shares[known.index(token)]))
        entropies.append(-(shares * np.log(shares)).sum())
    return log_probs, entropies


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2, "chunk_tokens": 3}, {"packed": True}])
@pytest.mark.parametrize("path", ["head", "logits"])
@pytest.mark.parametrize("layout", ["ragged", "dense"])
def test_masked_scores_are_those_of_the_definition(model, masked, layout, path, settings):
    policy = TrainerPolicy(model, temperature=0.7, **settings)
    policy.path = path
    given = masked if layout == "ragged" else dense_masked(masked)
    dist = policy._get_sft_dist(given)
    tokens = trainer._padded(given, ("tokens", "full"))
    found = [one[dist.mask].tolist() for one in (dist.log_prob(tokens), dist.entropy())]
    wanted = zip(*(numpy_scores(model, row, 0.7) for row in masked.unbind(0)), strict=True)
    for mine, exact in zip(found, wanted, strict=True):
        exact = [one for of_row in exact for one in of_row]
        assert np.allclose(mine, exact, rtol=0, atol=1e-5)
    # The negative control: without masks these are others.
    plain = policy._get_sft_dist(given.exclude("sampling_mask")).log_prob(tokens)[dist.mask]
    assert (plain - torch.tensor(found[0])).abs().mean() > 1


@pytest.mark.parametrize("path", ["head", "logits"])
def test_prompts_have_no_mask(model, masked, path):
    policy = TrainerPolicy(model)
    policy.path = path
    mine, plain = (
        policy(one.clone()).get(("log_probs", "full"), as_list=True)
        for one in (masked, masked.exclude("sampling_mask"))
    )
    for one, other, row in zip(mine, plain, masked.unbind(0), strict=True):
        answer = len(row[MASK])
        torch.testing.assert_close(one[:-answer], other[:-answer], rtol=1e-5, atol=1e-6)
        exact, _ = numpy_scores(model, row, 1.0)
        assert np.allclose(one[-answer:].numpy(force=True), exact, rtol=0, atol=1e-5)


def test_gradients_of_masked_scores_are_those_of_masked_logits(model, masked):
    weight = model.model.norm.weight

    def gradient(scores):
        log_probs, entropies = scores
        return torch.autograd.grad(log_probs.sum() + 0.3 * entropies.sum(), weight)[0]

    def plainly():
        pairs = []
        for row in masked.unbind(0):
            ids, answer = row["tokens", "full"], len(row[MASK])
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -answer - 1 : -1] / 0.7
            known = torch.zeros_like(logits, dtype=torch.bool)
            for at, mask in enumerate(row[MASK].tolist()):
                known[at, [one for one in mask if one >= 0]] = True
            log_p = logits.masked_fill(~known, -1e9).log_softmax(-1)
            pairs.append((log_p.gather(1, ids[-answer:, None]), -(log_p.exp() * log_p).sum(-1)))
        return [torch.cat([*map(torch.ravel, one)]) for one in zip(*pairs, strict=True)]

    for settings in ({}, {"chunk_tokens": 3, "micro_batch": 2}):
        dist = TrainerPolicy(model, temperature=0.7, **settings)._get_sft_dist(masked)
        tokens = trainer._padded(masked, ("tokens", "full"))
        mine = gradient((dist.log_prob(tokens), dist.entropy()))
        torch.testing.assert_close(mine, gradient(plainly()), rtol=1e-4, atol=1e-5)


def test_a_token_that_could_not_be_sampled_is_refused(model, masked):
    wrong = masked.clone()
    wrong[2][MASK][3] = torch.tensor([5, 6, -1, -1, -1, -1, -1, -1, -1])
    token = int(wrong[2]["tokens", "full"][4 + 3])
    with pytest.raises(InvalidPromptError, match=f"token {token} is outside its sampling mask"):
        TrainerPolicy(model)(wrong)


def with_token(rows, token):
    rows["tokens", "full"][2, 12] = token
    return rows


def unanswered(rows):
    rows["masks", "all_assistant_mask"][[1, 3]] = False
    return rows


def reshaped(rows):
    rows["masks", "all_assistant_mask"] = rows["masks", "all_assistant_mask"][:, 1:]
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: with_token(rows, 512), r"row 2: token 512 .* vocabulary of 512"),
        (lambda rows: with_token(rows, -100), r"row 2: token -100 "),
        (unanswered, r"rows without a token to score: \[1, 3\]"),
        (reshaped, r"\[5, 24\].*\[5, 25\]"),
        (lambda rows: rows.exclude(PATHS[1]), "rows have no .*all_attention_mask"),
        (lambda rows: rows.exclude(PATHS[2]), "rows have no .*all_assistant_mask"),
        (lambda rows: rows.exclude(PATHS[0]), "rows have no .*full"),
        (lambda rows: rows[:0], "no tokens"),
        (lambda rows: rows.unsqueeze(0), r"must be of shape \[B, T\], got \[1, 5, 25\]"),
    ],
)
def test_bad_rows_are_refused_by_name(model, rows, change, message):
    with pytest.raises(InvalidPromptError, match=message):
        TrainerPolicy(model)._get_sft_dist(change(dense(rows)))


def test_rows_beyond_the_models_positions_are_refused(model, rows):
    model.config.max_position_embeddings = 12
    with pytest.raises(InvalidPromptError, match="row 3 has 13 tokens, the model 12 positions"):
        TrainerPolicy(model)._get_sft_dist(dense(rows))
    model.config.max_position_embeddings = 13  # the width is 25
    TrainerPolicy(model)._get_sft_dist(dense(rows))


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_tokens": 0},
        {"micro_batch": 0},
        {"micro_batch": 1.5},
        {"temperature": 0},
        {"temperature": math.inf},
        {"temperature": math.nan},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(model, settings):
    with pytest.raises(UnsupportedArgumentError, match=next(iter(settings))) as caught:
        TrainerPolicy(model, **settings)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SyncError)


def test_gradient_checkpointing_that_would_do_nothing_is_refused(model, rows):
    policy = TrainerPolicy(model, gradient_checkpointing=True).eval()
    with pytest.raises(UnsupportedArgumentError, match=r"gradient_checkpointing .* train mode"):
        policy._get_sft_dist(rows)
    with torch.no_grad():
        policy._get_sft_dist(rows)


def test_calls_with_more_than_rows_are_refused(model, rows):
    with pytest.raises(UnsupportedArgumentError, match="logits_only"):
        TrainerPolicy(model)(rows, logits_only=True)
    with pytest.raises(InvalidPromptError, match=r"shape \[5, 2\]"):
        TrainerPolicy(model)._get_sft_dist(rows).log_prob(torch.zeros(5, 2, dtype=torch.long))


def test_a_push_sends_the_models_own_names(model):
    sent = as_weight_source(TrainerPolicy(model)).metadata()
    assert sent == as_weight_source(model).metadata()
    assert as_weight_source(wrapper(model)).metadata() == sent


def test_a_copy_is_as_good(model, rows):
    policy = TrainerPolicy(model)
    expected = outcome(policy, rows)
    assert_same(outcome(copy.deepcopy(policy), rows), expected)


def test_what_rounding_takes_from_engines_hardly_moves_a_policy_under_autocast(model, rows):
    """Engines have the weights in bfloat16; in float32 the trainer would go on alone."""

    def log_probs(*, autocast):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = TrainerPolicy(model)(dense(rows))["log_probs", "full"]
        return found[dense(rows)[PATHS[2]]]

    def engine():
        return {name: one.bfloat16() for name, one in model.state_dict().items()}

    model.load_state_dict(engine())
    had, before = engine(), [log_probs(autocast=on) for on in (False, True)]
    _, grads = outcome(TrainerPolicy(model), rows)
    with torch.no_grad():
        for one, grad in zip(model.parameters(), grads, strict=True):
            one -= one.abs() * grad.sign() / 1024  # a quarter of what bfloat16 tells apart, or less
    assert all(torch.equal(one, had[name]) for name, one in engine().items())
    after = [log_probs(autocast=on) for on in (False, True)]
    alone, with_engines = ((a - b).abs().mean() for a, b in zip(after, before, strict=True))
    assert alone > 2 * with_engines  # which the norms move, that autocast leaves in float32


@pytest.mark.parametrize(
    ("own", "engines", "autocast", "tells"),
    [
        (torch.float32, torch.bfloat16, False, True),
        (torch.float32, torch.bfloat16, True, False),
        (torch.float32, torch.float32, False, False),
        (torch.bfloat16, torch.bfloat16, False, False),
        (torch.bfloat16, torch.float32, False, False),
    ],
)
def test_a_policy_finer_than_the_engines_it_was_pushed_to_says_so_once(
    model, rows, caplog, own, engines, autocast, tells
):
    policy = TrainerPolicy(model.to(own))

    def score():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            policy(dense(rows))
        return [one.getMessage() for one in caplog.records if "rounding" in one.getMessage()]

    assert not score()  # it was not pushed yet
    push(policy, engines)
    for _ in range(2):
        found = score()
        assert len(found) == tells
    assert not tells or "torch.autocast('cpu', torch.bfloat16)" in found[0]


def test_a_model_that_computes_nan_is_named_by_the_loss(model, rows):
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(DivergedError, match="computes NaN or infinity"):
        GRPOLoss(TrainerPolicy(model), masking_strategy="sft")(rows)

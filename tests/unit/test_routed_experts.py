"""A mixture of experts is scored by the experts that rows name, however the rows are laid out."""

import contextlib
import copy
import types
from functools import partial

import pytest
import torch
from tensordict import lazy_stack
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.test_trainer_policy import LENGTHS, VOCABULARY, dense, outcome, row
from torchrl_vllm_sync.errors import InvalidPromptError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl import trainer
from torchrl_vllm_sync.rl.experts import replay_routed_experts
from torchrl_vllm_sync.rl.trainer import TrainerPolicy
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

LAYERS, NUM, TOP = 3, 8, 3
DEPTH = {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = {"num_experts": NUM, "num_experts_per_tok": TOP, "norm_topk_prob": True}
    path = tmp_path_factory.mktemp("experts")
    return make_tiny_checkpoint(path, architecture="qwen3_moe", **config | DEPTH)


@pytest.fixture
def model(checkpoint):
    return load_tiny_model(checkpoint)


@pytest.fixture(scope="module")
def rows():
    """Ragged rows, each token with experts of its own, drawn by lot; the last with none."""
    made, generator = [], torch.Generator().manual_seed(7)
    for prompt, answer in LENGTHS:
        length = prompt + answer
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        log_probs = torch.randn(length, generator=generator) / 10 - 6
        one = row(ids, prompt, log_probs, torch.randn(1, 1, generator=generator))
        lots = torch.rand(length, LAYERS, NUM, generator=generator).argsort(-1)[..., :TOP]
        lots[:, 1], lots[-1] = 0, keys.NO_EXPERT
        made.append(one.set(keys.ROUTED_EXPERTS, lots.short()))
    return lazy_stack(made)


def laid_out(rows, layout):
    if layout == "ragged":
        return rows.clone()
    made = dense(rows, layout)
    experts = torch.full((*made["tokens", "full"].shape, LAYERS, TOP), keys.NO_EXPERT).short()
    there = made["masks", "all_attention_mask"]
    experts[there] = torch.cat(rows.get(keys.ROUTED_EXPERTS, as_list=True))
    return made.set(keys.ROUTED_EXPERTS, experts)


@contextlib.contextmanager
def routed_by_definition(model, experts):
    """The routers as their paper has them, but for the choice; of one row."""

    def forward(self, states, layer):
        probabilities = torch.nn.functional.linear(states, self.weight).softmax(-1)
        own = probabilities.topk(TOP).indices
        chosen = torch.where(experts[:, layer] < 0, own, experts[:, layer])
        weights = torch.stack([one[at] for one, at in zip(probabilities, chosen, strict=True)])
        return None, weights / weights.sum(-1, keepdim=True), chosen

    gates = {at: one.mlp.gate for at, one in enumerate(model.model.layers) if at != 1}
    for layer, gate in gates.items():
        gate.forward = types.MethodType(lambda self, x, n=layer: forward(self, x, n), gate)
    yield
    for gate in gates.values():
        del gate.forward


def wanted_scores(model, row):
    """Log-probabilities of a row's tokens after the first, by the definition."""
    ids = row["tokens", "full"]
    with routed_by_definition(model, row[keys.ROUTED_EXPERTS].long()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def answers(policy, rows):
    dist = policy._get_sft_dist(rows)
    return dist.log_prob(trainer._padded(rows, ("tokens", "full")))[dist.mask]


def replaying(model, path="head", **settings):
    policy = TrainerPolicy(model, replay_experts=replay_routed_experts, **settings)
    policy.path = path
    return policy


SETTINGS = [
    {},
    {"micro_batch": 2, "chunk_tokens": 3},
    {"packed": True},
    {"packed": True, "micro_batch": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("path", ["head", "logits"])
@pytest.mark.parametrize("layout", ["ragged", "middle", "hole"])
def test_scores_are_those_by_the_experts_of_the_rows(model, rows, layout, path, settings):
    each = zip(rows.unbind(0), LENGTHS, strict=True)
    with torch.no_grad():
        wanted = torch.cat([wanted_scores(model, row)[-answer:] for row, (_, answer) in each])
    policy, given = replaying(model, path, **settings), laid_out(rows, layout)
    found = answers(policy, given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    # The negative controls: experts of the token before, and the router's own.
    other = given.clone()
    moved = [one.roll(1, -3) for one in given.get(keys.ROUTED_EXPERTS, as_list=True)]
    for one, experts in zip(other.unbind(0), moved, strict=True):
        one.set_(keys.ROUTED_EXPERTS, experts)
    assert (answers(policy, other) - wanted).abs().mean() > 0.1
    for plain in (
        answers(TrainerPolicy(model), given),
        answers(policy, given.exclude(keys.ROUTED_EXPERTS[0])),
    ):
        assert (plain - wanted).abs().mean() > 0.1


@pytest.mark.parametrize("path", ["head", "logits"])
@pytest.mark.parametrize("settings", [*SETTINGS, {"gradient_checkpointing": True}], ids=str)
def test_gradients_are_those_by_the_experts_of_the_rows(checkpoint, rows, path, settings):
    model = load_tiny_model(checkpoint).train()
    each = zip(rows.unbind(0), LENGTHS, strict=True)
    total = sum(wanted_scores(model, row)[-answer:].sum() for row, (_, answer) in each)
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(total, parameters)
    for micro_batch in (None, 2):
        policy = replaying(model, path, **{"micro_batch": micro_batch} | settings)
        total = answers(policy, rows).sum()
        for is_first in (True, False):  # a graph may be kept for another backward
            found = torch.autograd.grad(total, parameters, retain_graph=is_first)
            for name, one, other in zip(names, found, wanted, strict=True):
                assert other.abs().sum() > 0, name
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


def test_losses_take_the_experts_too(model, rows):
    """Also by a pass that is made ahead, and whose rows are then the loss's."""
    given, policy = laid_out(rows, "middle"), replaying(model)
    mine, wanted = outcome(replaying(model), given)
    plain, _ = outcome(TrainerPolicy(model), given)
    assert (mine["loss_objective"] - plain["loss_objective"]).abs() > 1e-3
    scores = policy.score_ahead(given)[given["masks", "all_assistant_mask"]]
    torch.testing.assert_close(scores, answers(replaying(model), given).detach())
    _, found = outcome(policy, given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    copy.deepcopy(replaying(model, gradient_checkpointing=True))


def test_a_pass_that_is_made_ahead_is_not_taken_for_rows_of_other_experts(model, rows):
    given, policy = laid_out(rows, "middle"), replaying(model)
    other, experts = given.clone(), given[keys.ROUTED_EXPERTS]
    other[keys.ROUTED_EXPERTS] = torch.where(experts < 0, experts, (experts + 1) % NUM)
    dist = replaying(model).get_dist(other, mask_key=keys.ASSISTANT)
    wanted = dist.log_prob(other[keys.TOKENS])
    ahead = policy.score_ahead(given)
    dist = policy.get_dist(other, mask_key=keys.ASSISTANT)
    torch.testing.assert_close(dist.log_prob(other[keys.TOKENS]), wanted)
    assert (ahead - wanted).abs().max() > 0.01


# ---------------------------------------------------------------- other models

OF_ALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
OTHERS = {
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "qwen3_next": {},
    "granitemoe": {},
    "glm4_moe": GROUPED,
    "deepseek_v3": GROUPED | LATENT | {"v_head_dim": 16},
}


def made(name, **options):
    config = AutoConfig.for_model(name, **OF_ALL | {"pad_token_id": 0} | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def noted(chosen, at, places, _router, _args, output):
    chosen[at] = [output[one] for one in places]


@pytest.mark.parametrize("name", OTHERS)
def test_routers_of_other_models_choose_as_told(name):
    model, ids = made(name, **OTHERS[name]), torch.arange(2, 22).view(2, 10)
    kind = model.can_record_outputs["router_logits"].target_class
    chosen, places = {}, (0, 1) if name == "granitemoe" else (2, 1)  # of indices and weights

    for at, layer in enumerate(model.model.layers):
        for router in layer.modules():
            if isinstance(router, kind):
                router.register_forward_hook(partial(noted, chosen, at, places))

    @torch.no_grad()
    def logits(experts=None):
        hook = replay_routed_experts(model, experts) if experts is not None else None
        with hook or contextlib.nullcontext():
            return model(input_ids=ids, use_cache=False).logits

    def in_order():
        order = {at: index.argsort(-1) for at, (index, _) in chosen.items()}
        return {at: [one.gather(-1, order[at]) for one in chosen[at]] for at in chosen}

    plain, own = logits(), in_order()
    experts = torch.full((2, 10, 2, 3), 7)
    for at, (index, _) in own.items():
        experts[:, :, at] = index.view(2, 10, 3).flip(-1)
    torch.testing.assert_close(logits(experts), plain, rtol=1e-4, atol=1e-4)
    for at, pair in in_order().items():
        for one, other in zip(pair, own[at], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    others = (experts + 1) % 8
    others[:, 4:] = keys.NO_EXPERT
    found = logits(others)
    assert (found - plain)[:, :4].abs().amax(-1).min() > 1e-3
    for at, (index, weights) in in_order().items():
        index, weights = index.view(2, 10, 3), weights.view(2, 10, 3)
        assert torch.equal(index[:, :4], others[:, :4, at].sort(-1).values)
        assert (index[:, 4:].diff() > 0).all()  # its own
        assert (weights > 0).all()


# ---------------------------------------------------------------- refusals


def with_experts(rows, experts):
    given = laid_out(rows, "middle")
    return given.set(keys.ROUTED_EXPERTS, experts(given[keys.ROUTED_EXPERTS]))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (lambda one: one[:, 1:], r"'routed_experts', 'full'.*\[5, 24, 3, 3\].*\[5, 25\]"),
        (lambda one: one[..., 0], r"'routed_experts', 'full'.*\[5, 25, 3\].*\[5, 25\]"),
        (lambda one: one[:, :, 1:], r"'routed_experts', 'full'.* 2, 3\], the model.*\[3, 3\]"),
        (lambda one: one[..., 1:], r"'routed_experts', 'full'.* 3, 2\], the model.*\[3, 3\]"),
        (lambda one: one + 3, r"router of layer 0 has 8 experts, .*'full'\) number 10"),
    ],
)
def test_experts_of_another_model_are_refused_by_name(model, rows, experts, message):
    with pytest.raises(InvalidPromptError, match=message):
        answers(replaying(model), with_experts(rows, experts))
    answers(replaying(model), rows)  # nothing of it is left in the model


def routed(model, top):
    experts = torch.zeros(1, 4, model.config.num_hidden_layers, top, dtype=torch.short)
    with replay_routed_experts(model, experts):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_models_whose_routers_do_not_choose_so_are_refused_by_name(model, monkeypatch):
    with pytest.raises(UnsupportedArgumentError, match="layer 0 made 0 choices"):
        routed(made("phimoe", num_experts_per_tok=2), 2)
    with pytest.raises(UnsupportedArgumentError, match=r"LlamaForCausalLM: .*no router"):
        routed(made("llama"), 3)
    with monkeypatch.context() as patch:  # as Gemma 4 calls it otherwise
        other = type("Other", (), {"num_hidden_layers": LAYERS})
        patch.setattr(type(model.config), "get_text_config", lambda _: other())
        with pytest.raises(UnsupportedArgumentError, match="Other has no num_experts_per_tok"):
            routed(model, TOP)
    with pytest.raises(UnsupportedArgumentError, match="Qwen3MoeForCausalLM: compiled"):
        routed(torch.compile(model), TOP)
    model.model.layers[2].compile()
    with pytest.raises(UnsupportedArgumentError, match="Qwen3MoeForCausalLM: compiled"):
        routed(model, TOP)


def test_backward_that_would_choose_anew_is_refused(model, rows):
    model.gradient_checkpointing_enable()
    answers(replaying(model), rows)  # in evaluation mode it does nothing
    with pytest.raises(UnsupportedArgumentError, match="gradient_checkpointing=True of the policy"):
        answers(replaying(model.train()), rows)
    answers(TrainerPolicy(model), rows)

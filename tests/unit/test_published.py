"""Checkpoint names of a model's tensors: what is a view of what, and what has to be computed."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.weights.module import bundles_of

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "dense": Qwen2Config(**TINY),
    "qwen3_moe": Qwen3MoeConfig(**TINY, num_experts=4, moe_intermediate_size=24, head_dim=16),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4),
    "olmoe": OlmoeConfig(**TINY, num_experts=4),
    "jamba": JambaConfig(**TINY, num_experts=4, use_mamba_kernels=False),
}
VIEWS = {"dense": 0, "qwen3_moe": 4, "mixtral": 4, "olmoe": 4, "jamba": 2}


def random_model(config):
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def tensors_of(model):
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def described(tensors):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def published(model, tensors):
    """Name and value of each tensor that the bundles publish, checked against their metadata."""
    found = {}
    for bundle in bundles_of(model, described(tensors)):
        items = bundle.publish(model, [tensors[name] for name in bundle.sources])
        assert [ParamMeta.of(name, tensor) for name, tensor in items] == list(bundle.metadata)
        assert not found.keys() & dict(items).keys()
        found |= dict(items)
    return found


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def unchanged(bundle, tensors):
    """Whether the one published tensor is the source itself, perhaps renamed."""
    whole, windows = tensors[bundle.sources[0]], bundle.windows or ()
    extents = [(one.shape, one.stride(), one.storage_offset()) for one in windows]
    return extents == [(whole.shape, whole.stride(), 0)]


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_published_is_what_transformers_saves(kind):
    model = random_model(MODELS[kind])
    tensors = tensors_of(model)
    assert_equal(published(model, tensors), revert_weight_conversion(model, dict(tensors)))
    bundles = bundles_of(model, described(tensors))
    assert sum(not unchanged(one, tensors) for one in bundles) == VIEWS[kind]
    assert all(one.windows is not None for one in bundles)


def test_the_comparison_above_notices_two_experts_exchanged():
    model = random_model(MODELS["qwen3_moe"])
    tensors = tensors_of(model)
    wanted = revert_weight_conversion(model, dict(tensors))
    one, other = (f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in (2, 3))
    wanted[one], wanted[other] = wanted[other], wanted[one]
    with pytest.raises(AssertionError, match="up_proj"):
        assert_equal(published(model, tensors), wanted)


def test_views_come_in_the_order_of_their_storage_and_touch():
    model = random_model(MODELS["qwen3_moe"])
    tensors = tensors_of(model)
    for bundle in bundles_of(model, described(tensors)):
        views = bundle.views([tensors[name] for name in bundle.sources])
        end = tensors[bundle.sources[0]].storage_offset()
        for _, view in views:
            assert view.storage_offset() == end
            end += view.numel()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    fused = next(one for one in bundles_of(model, described(tensors)) if one.sources == (name,))
    first = [meta.name.split("experts.")[1] for meta in fused.metadata[:3]]
    assert first == ["0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight"]


def test_views_follow_a_tensor_inside_a_larger_storage():
    model = random_model(MODELS["qwen3_moe"])
    tensors = tensors_of(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    larger = torch.zeros(tensors[name].numel() + 7)
    larger[7:] = tensors[name].flatten()
    inside = {**tensors, name: larger[7:].view(tensors[name].shape)}
    assert_equal(published(model, inside), revert_weight_conversion(model, dict(tensors)))


def test_a_tensor_that_is_not_contiguous_is_converted_each_time():
    model = random_model(MODELS["qwen3_moe"])
    tensors = tensors_of(model)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].mT.contiguous().mT
    assert_equal(published(model, tensors), revert_weight_conversion(model, dict(tensors)))
    bundle = next(one for one in bundles_of(model, described(tensors)) if name in one.sources)
    assert bundle.views([tensors[name]]) is None


class Doubled(Transpose):
    """Transposes a copy, and doubles that copy in place."""

    def convert(self, *args, **kwargs):
        return {key: one.clone().mul_(2) for key, one in super().convert(*args, **kwargs).items()}

    @property
    def reverse_op(self):
        return Doubled(self.dim1, self.dim0)


CONVERSIONS = {
    "transposed": ([WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1)])], True),
    "interleaved": ([WeightConverter("o_proj.weight", "o_proj.weight", [Interleave(0)])], False),
    "cut apart": (
        [WeightConverter(["a.weight", "b.weight"], "o_proj.weight", [Concatenate(dim=1)])],
        True,
    ),
    "joined": (
        [WeightConverter("kv.weight", ["k_proj.weight", "v_proj.weight"], [Chunk(dim=0)])],
        False,
    ),
    "doubled": ([WeightConverter("o_proj.weight", "o_proj.weight", [Doubled(0, 1)])], False),
    "unstacked": (
        [WeightConverter("parts.*.weight", "o_proj.weight", [MergeModulelist(dim=0)])],
        True,
    ),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_other_conversions(kind):
    conversions, is_view = CONVERSIONS[kind]
    model = random_model(MODELS["dense"])
    model._weight_conversions = conversions
    tensors = tensors_of(model)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted = revert_weight_conversion(model, dict(tensors))
    assert wanted.keys() != tensors.keys() or any(
        wanted[name].shape != tensors[name].shape or not torch.equal(wanted[name], tensors[name])
        for name in wanted
    )
    assert_equal(published(model, tensors), wanted)
    assert_equal(tensors, before)
    bundles = bundles_of(model, described(tensors))
    bundles = [one for one in bundles if not unchanged(one, tensors)]
    assert len(bundles) == model.config.num_hidden_layers
    assert all((one.windows is not None) is is_view for one in bundles)
    assert {len(one.sources) for one in bundles} == {2 if kind == "joined" else 1}


def test_other_modules_keep_their_names():
    module = nn.Linear(2, 3)
    tensors = tensors_of(module)
    assert_equal(published(module, tensors), tensors)
    assert all(unchanged(one, tensors) for one in bundles_of(module, described(tensors)))

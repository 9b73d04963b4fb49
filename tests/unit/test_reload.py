"""Which parameters a layerwise reload has filled, by the names that loaders report."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from torchrl_vllm_sync.engine.internals import check_lengths
from torchrl_vllm_sync.engine.plan import _loadable_names, _resolved, _unwrapped

EXPERTS = "model.layers.0.mlp.experts"
EXPECTED = {
    f"{EXPERTS}.routed_experts.w13_weight",
    f"{EXPERTS}.routed_experts.w2_weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.10.mlp.gate.weight",
}


def test_a_name_without_the_part_that_loads_is_found():
    # As vLLM 0.26 reports experts.
    loaded = {f"{EXPERTS}.w13_weight", f"{EXPERTS}.w2_weight"}
    assert _resolved(loaded, EXPECTED) >= {one for one in EXPECTED if "experts" in one}


def test_names_as_the_model_has_them_stay():
    assert _resolved(EXPECTED, EXPECTED) == EXPECTED


@pytest.mark.parametrize("left_out", sorted(EXPECTED))
def test_what_was_left_out_is_still_missing(left_out):
    short = {one.replace(".routed_experts", "") for one in EXPECTED - {left_out}}
    assert EXPECTED - _resolved(short, EXPECTED) == {left_out}


def test_a_name_that_fits_several_resolves_none():
    expected = {"experts.a.weight", "experts.b.weight"}
    assert not expected & _resolved({"experts.weight"}, expected)


def test_scales_of_a_quantised_cache_are_in_no_checkpoint():
    """Every model that is quantised to fp8 has them, as vLLM makes them."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    attention = torch.nn.Linear(2, 2, bias=False)
    attention.quant_method = BaseKVCacheMethod(None)
    attention.quant_method.create_weights(attention)
    model = torch.nn.Sequential(attention, torch.nn.Linear(2, 2))
    assert {"0.k_scale", "0.prob_scale"} < dict(model.named_parameters()).keys()
    assert _loadable_names(model) == {"0.weight", "1.weight", "1.bias"}


def test_layers_that_lora_wraps_are_loaded_in_their_wrappers_place():
    """As vLLM 0.26 needs it, and put back whatever happens."""
    from vllm.lora.layers import BaseLayerWithLoRA

    class Wrapper(BaseLayerWithLoRA):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.base_layer = torch.nn.Linear(2, 2)

    model = torch.nn.ModuleDict({"outer": torch.nn.ModuleDict({"one": Wrapper()})})
    wrapper = model["outer"]["one"]
    with contextlib.suppress(KeyError), _unwrapped(model):
        assert {name for name, _ in model.named_parameters()} == {
            "outer.one.weight",
            "outer.one.bias",
        }
        raise KeyError
    assert model["outer"]["one"] is wrapper
    assert "outer.one.base_layer.weight" in dict(model.named_parameters())


def test_a_minimum_beyond_the_limit_is_refused_before_the_core_hears_of_it():
    """The core of vLLM 0.26 ends of it; later versions refuse it themselves."""
    from vllm import SamplingParams

    params = SamplingParams(min_tokens=5, max_tokens=5)
    check_lengths(SimpleNamespace(sampling_params=params))
    params.max_tokens = 4
    with pytest.raises(ValueError, match="min_tokens must be at most 4, got 5"):
        check_lengths(SimpleNamespace(sampling_params=params))

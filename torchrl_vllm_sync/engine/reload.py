"""vLLM's layerwise reload: a whole checkpoint loaded into a model that is already serving.

It puts layers back into checkpoint format, loads and processes each as at start-up and copies the
result into the storage the kernels use (``vllm/model_executor/model_loader/reload/layerwise.py``).
A plain ``load_weights`` after start-up fails or corrupts wherever weights were repacked.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.module import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig

# Quantised by the loader that reads files, not by the layers.
_QUANTISED_BY_LOADER = ("bitsandbytes", "gguf")


def check_can_be_filled(model_config: ModelConfig) -> None:
    """Refuses models whose layers need packed integers and scales, which no trainer holds."""
    quantization = model_config.quantization
    if getattr(model_config.hf_config, "quantization_config", None) is not None:
        how = f"a checkpoint that is quantised already ({quantization})"
    elif quantization in _QUANTISED_BY_LOADER:
        how = f"quantization={quantization!r}, which happens while files are read"
    else:
        return
    raise UnsupportedArgumentError(
        f"the model must be able to take a trainer's weights, got {model_config.model} with {how}; "
        'start from the unquantised checkpoint, with quantization="fp8" or another method that '
        "vLLM applies to weights as they arrive"
    )


def checkpoint_metadata(model_config: ModelConfig) -> list[ParamMeta]:
    """Returns the tensors of the model's checkpoint, as published, in the engine's dtype."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config.hf_config, trust_remote_code=model_config.trust_remote_code
        )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        tensors.pop(name, None)
    dtype: Any = model_config.dtype
    return [
        ParamMeta(name, dtype if one.is_floating_point() else one.dtype, tuple(one.shape))
        for name, one in revert_weight_conversion(model, tensors).items()
    ]


# Every fp8 model has them, with defaults (``vllm/model_executor/layers/quantization/kv_cache.py``).
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


@torch.no_grad()
def reload_model(
    model: torch.nn.Module, vllm_config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Replaces every parameter of ``model`` by ``weights``; returns the number of tensors."""
    taken = itertools.count()
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        expected = _loadable_names(model)
        try:
            counted = (one for one, _ in zip(weights, taken, strict=False))
            loaded = model.load_weights(counted)  # pyright: ignore[reportCallIssue]  vLLM's, not a Tensor
        finally:
            # An interrupted reload that is not finalised corrupts even a complete next one.
            finalize_layerwise_reload(model, vllm_config.model_config)
        repack_cpu(model)
    missing = set() if loaded is None else expected - _resolved(loaded, expected)
    if missing:
        raise WeightMismatchError(
            f"{len(missing)} of {len(expected)} parameters received no weights: "
            + first_few(sorted(missing))
        )
    return next(taken)


def _loadable_names(model: torch.nn.Module) -> set[str]:
    """Names of the parameters a full checkpoint fills: no tied head, no scales of a KV cache."""
    names = {name for name, _ in model.named_parameters()}
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    for name, module in model.named_modules():
        if is_tied and isinstance(module, ParallelLMHead):
            names.discard(f"{name}.weight")
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            names -= {f"{name}.{scale}" for scale in _CACHE_SCALES}
    return names


def _resolved(loaded: Iterable[str], expected: set[str]) -> set[str]:
    """Adds the full names of parameters with shorter ones, as experts of vLLM 0.26 report."""
    names = set(loaded)
    for module, _, leaf in [one.rpartition(".") for one in names - expected]:
        within = [one for one in expected if one.startswith(f"{module}.")]
        within = [one for one in within if one.endswith(f".{leaf}")]
        names |= set(within) if len(within) == 1 else set()
    return names


def repack_cpu(model: torch.nn.Module) -> None:
    """Redoes the prepacking that a layerwise reload skips on vLLM's CPU backend (0.26 to 0.32).

    That of a tied ``ParallelLMHead``'s copy of the embedding, and of unquantised experts.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if type(experts).__name__.endswith("CPUUnquantizedExperts"):
            experts.process_weights_after_loading(module)
        elif isinstance(module, ParallelLMHead):
            method.process_weights_after_loading(module)

"""Loading a whole checkpoint into a model that is already serving: vLLM's layerwise reload.

Layerwise reload puts every layer back into checkpoint format, runs the model's own
``load_weights`` over the new tensors, processes each layer as at start-up and copies the result
into the storage the kernels use (``vllm/model_executor/model_loader/reload/layerwise.py``, vLLM
0.26 to 0.32). A plain ``load_weights`` after start-up fails or corrupts wherever weights were
repacked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

__all__ = ["reload_model"]

# vllm/model_executor/layers/quantization/kv_cache.py, ``BaseKVCacheMethod.create_weights``
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


@torch.no_grad()
def reload_model(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> int:
    """Replaces every parameter of ``model`` by ``weights``.

    Whatever happens inside, the reload is finalised before this returns or raises: an interrupted
    reload that is not finalised poisons the next one, even a complete one.

    Args:
        model: The worker's model; no step may run meanwhile.
        vllm_config: The worker's configuration.
        weights: ``(Hugging Face name, tensor of full shape)``; the tensors must stay valid until
            this returns, since loaders keep them until a layer's last shard has arrived.

    Returns:
        Number of tensors taken from ``weights``.

    Raises:
        WeightMismatchError: Some parameter of the model received nothing.
    """
    taken = 0

    def counted() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal taken
        for name, tensor in weights:
            taken += 1
            yield name, tensor

    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        expected = _loadable_names(model)
        try:
            loaded = model.load_weights(counted())  # pyright: ignore[reportCallIssue]  vLLM's, not a Tensor
        finally:
            finalize_layerwise_reload(model, vllm_config.model_config)
        repack_cpu(model)
    missing = set() if loaded is None else expected - _resolved(loaded, expected)
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        raise WeightMismatchError(
            f"{len(missing)} of {len(expected)} parameters received no weights: {shown}"
        )
    return taken


def _loadable_names(model: torch.nn.Module) -> set[str]:
    """Names of the parameters a full checkpoint must fill.

    A tied head is filled by its twin. Scales of a quantised KV cache are made with every fp8 model
    and have defaults, so that hardly any checkpoint has them.
    """
    other = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, ParallelLMHead)
        and getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    } | {
        f"{name}.{scale}"
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for scale in _CACHE_SCALES
    }
    return {name for name, _ in model.named_parameters()} - other


def _resolved(loaded: Iterable[str], expected: set[str]) -> set[str]:
    """Gives parameters that a loader reports under a shorter name the name the model has for them.

    A module that hands loading on to a part of itself may leave the part's name out: experts of
    vLLM 0.26 report ``experts.w13_weight`` and are ``experts.routed_experts.w13_weight``
    (``fused_moe/runner/moe_runner.py``, ``load_weights``). A name that fits several stays as it is.

    Args:
        loaded: Names as ``load_weights`` reports them.
        expected: Names of the model's parameters.

    Returns:
        ``loaded``, each under the model's name where that can be told.
    """
    names = set(loaded)
    for name in names - expected:
        module, _, leaf = name.rpartition(".")
        within = [
            one for one in expected if one.startswith(f"{module}.") and one.endswith(f".{leaf}")
        ]
        if len(within) == 1:
            names |= set(within)
    return names


def repack_cpu(model: torch.nn.Module) -> None:
    """Redoes the prepacking that a layerwise reload skips on vLLM's CPU backend.

    A tied ``ParallelLMHead`` keeps a packed copy of the embedding of its own, which a reload never
    refreshes (``vocab_parallel_embedding.py``), and unquantised experts stay in checkpoint layout
    inside packed storage (``fused_moe/unquantized_fused_moe_method.py``). Seen in vLLM 0.26, 0.28,
    0.32 (heads) and 0.32 (experts). On a GPU there is nothing to redo.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if type(experts).__name__.endswith("CPUUnquantizedExperts"):
            _process(experts, module)
        elif isinstance(module, ParallelLMHead):
            _process(method, module)


def _process(method: Any, module: torch.nn.Module) -> None:
    method.process_weights_after_loading(module)

"""Which tensors a complete push to a model holds, and which models pushes cannot fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.weights.metadata import ParamMeta

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["check_can_be_filled", "checkpoint_metadata"]

# Its weights are quantised by the loader that reads files, not by the layers they are loaded into.
_QUANTISED_BY_LOADER = ("bitsandbytes", "gguf")


def check_can_be_filled(model_config: ModelConfig) -> None:
    """Refuses models that a trainer's weights do not fit into.

    vLLM's layers take what a checkpoint has: those of a quantised one want packed integers and
    scales, which no trainer holds. What a layer quantises itself when weights arrive (*online*
    quantisation: ``quantization="fp8"`` and others) is fine.

    Args:
        model_config: The engine's model configuration.

    Raises:
        UnsupportedArgumentError: The checkpoint is quantised, or its loader would quantise it.
    """
    found = getattr(model_config.hf_config, "quantization_config", None)
    if found is not None:
        how = f"a checkpoint that is quantised already ({model_config.quantization})"
    elif model_config.quantization in _QUANTISED_BY_LOADER:
        how = f"quantization={model_config.quantization!r}, which happens while files are read"
    else:
        return
    raise UnsupportedArgumentError(
        f"the model must be able to take a trainer's weights, got {model_config.model} with {how}; "
        'start from the unquantised checkpoint, with quantization="fp8" or another method that '
        "vLLM applies to weights as they arrive"
    )


def checkpoint_metadata(model_config: ModelConfig) -> list[ParamMeta]:
    """Returns one entry for each tensor of the loaded model's checkpoint, in checkpoint order.

    The model is built from the engine's own configuration on the ``meta`` device, which allocates
    nothing, and its names are turned into published checkpoint form (transformers 5 holds experts
    fused in memory). A tied output head is left out. Floating-point tensors carry the dtype the
    engine runs in, whatever the checkpoint was stored in.

    Args:
        model_config: The engine's model configuration.

    Raises:
        ValueError: transformers has no causal language model for this configuration.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config.hf_config, trust_remote_code=model_config.trust_remote_code
        )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        tensors.pop(name, None)
    return [
        ParamMeta(
            name,
            model_config.dtype if tensor.is_floating_point() else tensor.dtype,
            tuple(tensor.shape),
        )
        for name, tensor in revert_weight_conversion(model, tensors).items()
    ]

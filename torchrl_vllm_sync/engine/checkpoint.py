"""Which tensors a complete push to a loaded model holds: names and shapes of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from torchrl_vllm_sync.weights.metadata import ParamMeta

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["checkpoint_metadata"]


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

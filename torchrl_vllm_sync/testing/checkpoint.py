"""Tiny random checkpoints in the format that is published on model hubs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torchrl_vllm_sync.testing.tokenizer import VOCAB_SIZE, make_tiny_tokenizer

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel


Architecture = Literal["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]

_CONFIGS: dict[Architecture, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}

# 0.02, the usual initial spread, makes nearly every greedy token of so small a model the same one.
_DIVERSE_WEIGHT_STD = 0.25
_DIVERSE_BIAS_STD = 0.3


def make_tiny_checkpoint(
    directory: str | os.PathLike[str],
    *,
    architecture: Architecture = "qwen2",
    tied: bool = True,
    seed: int = 0,
    diverse: bool = True,
    **config_overrides: Any,
) -> Path:
    """Writes a random float32 causal language model and its tokenizer to ``directory``.

    There are two flavours. ``diverse=True`` (4 layers, wide initial spread) is for tests of weight
    transfer: greedy outputs differ between prompts and between seeds, so that a wrong weight
    shows. ``diverse=False`` (2 layers, the usual spread) starts close to the uniform distribution
    and learns within seconds, for reinforcement learning on a laptop.

    The head size is 32, the smallest that vLLM's CPU attention supports. Experts are written one
    tensor per projection and expert, as published checkpoints have them, although transformers
    keeps them fused in memory.

    Args:
        directory: Created if absent. Files of an earlier checkpoint in it are replaced.
        architecture: A dense or a mixture-of-experts model.
        tied: Whether the output head shares the embedding's weights.
        seed: Of the weights. The tokenizer does not depend on it.
        diverse: Which of the two flavours.
        **config_overrides: Fields of the transformers config, such as ``num_hidden_layers=1``.

    Returns:
        ``directory``, with ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Raises:
        ValueError: ``architecture`` is not one of those above.

    Example:
        >>> path = make_tiny_checkpoint(tmp_path / "moe", architecture="qwen3_moe", seed=1)
        >>> model = load_tiny_model(path)
    """
    if architecture not in _CONFIGS:
        names = ", ".join(get_args(Architecture))
        raise ValueError(f"architecture must be one of {names}, got {architecture!r}")
    directory = Path(directory)
    tokenizer = make_tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4 if diverse else 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": _DIVERSE_WEIGHT_STD if diverse else 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture.startswith("qwen3"):
        fields["head_dim"] = 32
    if architecture.endswith("_moe"):
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if architecture == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = 64
    config = _CONFIGS[architecture](**(fields | config_overrides))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if diverse:
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    torch.nn.init.normal_(parameter, std=_DIVERSE_BIAS_STD)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def load_tiny_model(checkpoint: str | os.PathLike[str]) -> PreTrainedModel:
    """Loads a checkpoint as the trainer would hold it: float32 on the CPU, in evaluation mode.

    Args:
        checkpoint: Directory of the checkpoint.

    Returns:
        The model.
    """
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

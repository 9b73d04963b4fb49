"""Model shapes for benchmarks: real architectures and sizes, random weights, no downloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PretrainedConfig

from torchrl_vllm_sync.testing import make_tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "rms_norm_eps": 1e-6}
SHAPES = {
    # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    "smollm2": {
        "model_type": "llama",
        "head_dim": 64,
        "vocab_size": 49_152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    # huggingface.co/Qwen/Qwen3-1.7B, -8B and -30B-A3B, config.json
    "1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # What a CPU can hold, in the same form.
    "tiny": {
        **_QWEN3,
        "head_dim": 32,
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
    },
}
SHAPES["tiny-moe"] = {
    **SHAPES["tiny"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
"""Fields of each shape's configuration, by the name of a case."""


def save_shape(
    name: str, directory: Path, *, dtype: str, max_position_embeddings: int = 4096
) -> Path:
    """Saves a shape's configuration and a small tokenizer, for engines with dummy weights."""
    fields: dict[str, Any] = {
        "max_position_embeddings": max_position_embeddings,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config: PretrainedConfig = AutoConfig.for_model(**SHAPES[name], **fields, dtype=dtype)
    config.architectures = [_ARCHITECTURES[config.model_type]]
    target = directory / name
    config.save_pretrained(target)
    make_tiny_tokenizer().save_pretrained(target)
    return target

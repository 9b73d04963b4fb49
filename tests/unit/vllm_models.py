"""vLLM's own model classes, tiny and on the CPU, as one rank of several sees them."""

import contextlib
import math
from unittest.mock import patch

import torch
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torchrl_vllm_sync import ParamMeta

# 100 is no multiple of vLLM's padding of 64, so every vocabulary ends in padding.
COMMON = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": ("LlamaForCausalLM", LlamaConfig, {}),
    "llama-one-kv-head": ("LlamaForCausalLM", LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2-tied": ("Qwen2ForCausalLM", Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config, {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        Gemma3TextConfig,
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 8},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        Gemma4TextConfig,
        {"tie_word_embeddings": True, "hidden_size_per_layer_input": 0, "global_head_dim": 8},
    ),
    "mixtral": ("MixtralForCausalLM", MixtralConfig, {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", Qwen3MoeConfig, EXPERTS),
}


@contextlib.contextmanager
def single_process_group(directory):
    """vLLM's distributed state for one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class VllmModels:
    """Builds and loads one architecture as one rank of a tensor-parallel group.

    vLLM reads rank and size from its group object whenever it builds or loads a layer, so both are
    replaced while it does. ``expert_parallel`` deals whole experts out instead of slices.
    ``quantization`` is vLLM's, of bfloat16.
    """

    def __init__(
        self,
        directory,
        name,
        rank=0,
        size=1,
        *,
        expert_parallel=False,
        quantization=None,
        **overrides,
    ):
        from vllm.config import (
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            VllmConfig,
            set_current_vllm_config,
        )

        architecture, config_class, own = CONFIGS[name]
        _register_here(architecture)
        self.config = config_class(architectures=[architecture], **{**COMMON, **own, **overrides})
        self.config.save_pretrained(directory)
        self.rank, self.size = rank, size
        self._set_current = set_current_vllm_config
        parallel = ParallelConfig(enable_expert_parallel=expert_parallel)
        self.model_config = ModelConfig(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype="bfloat16" if quantization else "float32",
            quantization=quantization,
            enforce_eager=True,
        )
        self.vllm_config = VllmConfig(
            model_config=self.model_config,
            parallel_config=parallel,
            device_config=DeviceConfig(device="cpu"),
        )

    @contextlib.contextmanager
    def active(self):
        """Everything that vLLM does inside is done as this rank."""
        from vllm.distributed import parallel_state

        group = parallel_state.get_tp_group()
        with (
            patch.object(group, "rank_in_group", self.rank),
            patch.object(group, "world_size", self.size),
            self._set_current(self.vllm_config),
        ):
            yield

    def build(self, fill=None):
        """A model in the layout that loaders expect, its parameters filled with one value."""
        from vllm.model_executor.model_loader.utils import initialize_model

        with self.active():
            self._forget_layers()
            model = initialize_model(vllm_config=self.vllm_config)
        if fill is not None:
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.fill_(fill)
        return model

    def load(self, model, checkpoint):
        """vLLM's own loading, which a plan must agree with."""
        with self.active(), torch.no_grad():
            model.load_weights(iter(checkpoint.items()))

    def _forget_layers(self):
        # A second model under one configuration is refused as a duplicate of the first.
        self.vllm_config.compilation_config.static_forward_context.clear()
        self.vllm_config.compilation_config.static_all_moe_layers.clear()


def _register_here(architecture):
    """Registers the class itself: of one known by name vLLM learns in a process of its own."""
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture not in _REGISTERED:
        found = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(architecture, found)
        _REGISTERED.add(architecture)


_REGISTERED = set()


def make_checkpoint(metadata, start=1):
    """Tensors in which no value occurs twice, so that a misplaced one shows."""
    checkpoint = {}
    for meta in metadata:
        count = math.prod(meta.shape)
        # float32 counts exactly up to 2**24.
        assert start + count < 2**24
        values = torch.arange(start, start + count, dtype=torch.float32)
        checkpoint[meta.name] = values.reshape(meta.shape).to(meta.dtype)
        start += count
    return checkpoint


def metadata_of(checkpoint):
    """What a trainer announces of ``checkpoint``."""
    return [ParamMeta.of(name, tensor) for name, tensor in checkpoint.items()]

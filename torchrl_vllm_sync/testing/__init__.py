"""Tiny random checkpoints, made on the spot, and the checks that tests of weight transfer need.

Nothing is downloaded, and neither vLLM nor Ray is imported.
"""

from torchrl_vllm_sync.testing.checkpoint import (
    Architecture,
    load_tiny_model,
    make_tiny_checkpoint,
)
from torchrl_vllm_sync.testing.outputs import assert_diverse, greedy_tokens, token_log_probs
from torchrl_vllm_sync.testing.tokenizer import make_tiny_tokenizer

__all__ = [
    "Architecture",
    "assert_diverse",
    "greedy_tokens",
    "load_tiny_model",
    "make_tiny_checkpoint",
    "make_tiny_tokenizer",
    "token_log_probs",
]

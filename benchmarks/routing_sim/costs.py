"""What a step of an engine costs, and what fits into it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """An engine as the simulation knows it.

    A step that computes ``prefill_tokens`` prompt tokens beside a batch of ``num_decoding``
    requests takes::

        base_step_s
        + per_sequence_s * num_decoding
        + per_context_token_s * (sum of the contexts of the decoding requests)
        + prefill_tokens / prefill_tokens_per_s
        + per_prefill_context_s2 * (sum over chunks of chunk tokens x mean context of its tokens)

    where ``num_decoding`` are the requests that compute one token, and the context of a token is
    the number of tokens before it.

    Attributes:
        base_step_s: Seconds of a step that computes next to nothing.
        per_sequence_s: Seconds for each request that decodes.
        per_context_token_s: Seconds for each token of its context.
        prefill_tokens_per_s: Prompt tokens computed in a second, beside ``base_step_s``.
        per_prefill_context_s2: Seconds for each pair of a prompt token and a token before it;
            0 leaves attention's square out.
        token_budget: Most tokens in a step; vLLM's ``max_num_batched_tokens``.
        max_num_seqs: Most requests in a step; more wait.
        num_kv_blocks: KV-cache blocks that requests can hold.
        block_size: Tokens in a block.
    """

    base_step_s: float
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    prefill_tokens_per_s: float
    per_prefill_context_s2: float = 0.0
    token_budget: int = 2048
    max_num_seqs: int = 256
    num_kv_blocks: int
    block_size: int = 16

    def __post_init__(self) -> None:
        """Refuses numbers that no engine has.

        Raises:
            ValueError: A field is out of its range.
        """
        for name in ("per_sequence_s", "per_context_token_s", "per_prefill_context_s2"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("base_step_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("token_budget", "max_num_seqs", "num_kv_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.token_budget}"
            )


COSTS = EngineCosts(
    base_step_s=0.0052034,
    per_sequence_s=9.3235e-6,
    per_context_token_s=3.19005e-8,
    prefill_tokens_per_s=70_157.0,
    per_prefill_context_s2=2.29418e-9,
    num_kv_blocks=49_671,
    block_size=16,
)
"""Qwen3-8B in bfloat16 with random weights, vLLM 0.26, one H200: fitted to the steps and checked by
the makespans in ``benchmarks/results/routing_calibrate_8b_h200x1_2026-11-21.json``; the program is
in that record's commit."""

"""Going on with an answer that another replica's engine began.

The engine core is given the tokens that were received as the end of the prompt. What vLLM's
``AsyncLLM`` process keeps of the answer, its tokens, text and log-probabilities, begins with them,
so that outputs are those of an unbroken run.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from torchrl_vllm_sync.requests import BegunAnswer

__all__ = ["longer_prompt", "remaining_params", "tell_of_first_replica"]


def longer_prompt(prompt: dict[str, Any], begun: BegunAnswer) -> dict[str, Any]:
    """Returns a vLLM ``TokensPrompt`` that ends in the tokens received.

    Args:
        prompt: The request's own, which is not changed.
        begun: What was received.
    """
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *begun.token_ids]}


def remaining_params(params: SamplingParams, begun: BegunAnswer) -> SamplingParams:
    """Returns parameters for what is left of an answer.

    Args:
        params: The request's own, which are not changed; ``max_tokens`` is greater than the number
            of tokens received.
        begun: What was received, the log-probabilities of the prompt among it.
    """
    num_tokens = len(begun.token_ids)
    remaining = copy.copy(params)
    remaining.min_tokens = max(0, params.min_tokens - num_tokens)
    remaining.prompt_logprobs = None
    if params.max_tokens is not None:
        remaining.max_tokens = params.max_tokens - num_tokens
    return remaining


def tell_of_first_replica(output: RequestOutput, begun: BegunAnswer) -> None:
    """Has an output say of its prompt what the first replica did, and nothing that is half known.

    The prompt's cached tokens are those of the replica that began; which tokens could have been
    sampled (``sampling_mask``) is known of the tokens of the last replica alone.
    """
    output.num_cached_tokens = begun.num_cached_tokens
    for completion in output.outputs:
        masked = getattr(completion, "sampling_mask", None)  # not before vLLM 0.32
        if masked is not None and len(masked.token_ids) != len(completion.token_ids):
            completion.sampling_mask = None

"""What a trainer's model says about tokens, to compare with what an engine says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


@torch.no_grad()
def token_log_probs(model: PreTrainedModel, token_ids: Sequence[int] | Tensor) -> Tensor:
    """Log-probability of each token after the first, given all tokens before it.

    This is what vLLM returns as ``prompt_logprobs``, whose first entry is None.

    Args:
        model: A causal language model. Its mode is left as it is; dropout would blur the result.
        token_ids: One sequence of at least two tokens.

    Returns:
        Float32 on the CPU, of shape ``(len(token_ids) - 1,)``.

    Raises:
        ValueError: There are fewer than two tokens.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if ids.shape[1] < 2:
        raise ValueError(f"token_ids must hold at least 2 tokens, got {ids.shape[1]}")
    log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def greedy_tokens(
    model: PreTrainedModel, token_ids: Sequence[int], *, max_tokens: int = 32
) -> list[int]:
    """The most likely continuation of exactly ``max_tokens`` tokens; no token ends it early.

    Args:
        model: A causal language model.
        token_ids: The prompt, at least one token.
        max_tokens: How many tokens to append.

    Returns:
        The new tokens, without the prompt.
    """
    ids = list(token_ids)
    for _ in range(max_tokens):
        inputs = torch.tensor([ids], device=model.device)
        ids.append(int(model(input_ids=inputs, use_cache=False).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def assert_diverse(outputs: Sequence[Sequence[int]], *, min_distinct: int = 6) -> None:
    """Refuses outputs so uniform that two models might agree on them by chance.

    Args:
        outputs: Token ids sampled from different prompts, or by different models.
        min_distinct: Distinct tokens that each output must hold.

    Raises:
        AssertionError: Two outputs are equal, or one repeats too few tokens.
    """
    for i, output in enumerate(outputs):
        if len(set(output)) < min_distinct:
            raise AssertionError(
                f"output {i} holds {len(set(output))} distinct tokens, fewer than {min_distinct}: "
                f"{list(output)}"
            )
    if len({tuple(output) for output in outputs}) < len(outputs):
        raise AssertionError("two outputs are equal")

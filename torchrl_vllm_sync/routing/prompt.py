"""The part of a prompt that strategies look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torchrl_vllm_sync.errors import InvalidPromptError

__all__ = ["routing_prompt"]


def routing_prompt(prompt: object) -> str | Sequence[int] | None:
    """Returns the part of a prompt that strategies look at, checked as far as costs no time.

    Raises:
        InvalidPromptError: It is empty or of a wrong type.
    """
    if isinstance(prompt, Mapping):
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        prompt = text if ids is None else ids
        if prompt is None:
            raise InvalidPromptError("a prompt dict must have prompt_token_ids or prompt, got none")
    if prompt is None:
        return None
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InvalidPromptError(
                "an array of token ids must have 1 dimension and an integer dtype, "
                f"got shape {prompt.shape} and {prompt.dtype}"
            )
    elif not isinstance(prompt, (str, list, tuple)):
        raise InvalidPromptError(
            f"a prompt must be text, token ids or a dict of these, got {type(prompt).__name__}"
        )
    if not len(prompt):
        raise InvalidPromptError(f"a prompt must not be empty, got {prompt!r}")
    if isinstance(prompt, (list, tuple)) and not isinstance(prompt[0], (int, np.integer)):
        raise InvalidPromptError(f"token ids must be integers, got {type(prompt[0]).__name__}")
    return prompt  # pyright: ignore[reportReturnType] - an integer array is a sequence of ids

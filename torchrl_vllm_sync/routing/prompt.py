"""The part of a prompt that strategies look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_vllm_sync.errors import InvalidPromptError

__all__ = ["routing_prompt"]


def routing_prompt(prompt: object) -> tuple[str | Sequence[int] | None, str | None]:
    """Returns what strategies look at, checked as far as costs no time.

    Returns:
        Text or token ids, None if there is no prompt; and its ``cache_salt``, None if it has none.

    Raises:
        InvalidPromptError: It is empty or of a wrong type.
    """
    kind, salt = type(prompt), None
    if kind is dict or isinstance(prompt, Mapping):
        form: Mapping[str, Any] = prompt  # pyright: ignore[reportAssignmentType]
        ids, salt = form.get("prompt_token_ids"), form.get("cache_salt")
        prompt = form.get("prompt") if ids is None else ids
        if prompt is None:
            raise InvalidPromptError("a prompt dict must have prompt_token_ids or prompt, got none")
        kind = type(prompt)
    if prompt is None:
        return None, None
    if kind is list or kind is tuple or isinstance(prompt, (list, tuple)):
        ids = prompt
        if ids and not isinstance(ids[0], (int, np.integer)):  # pyright: ignore[reportIndexIssue]
            raise InvalidPromptError(f"token ids must be integers, got {type(ids[0]).__name__}")  # pyright: ignore[reportIndexIssue]
    elif isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InvalidPromptError(
                "an array of token ids must have 1 dimension and an integer dtype, "
                f"got shape {prompt.shape} and {prompt.dtype}"
            )
    elif not isinstance(prompt, str):
        raise InvalidPromptError(
            f"a prompt must be text, token ids or a dict of these, got {type(prompt).__name__}"
        )
    if not len(prompt):  # pyright: ignore[reportArgumentType]
        raise InvalidPromptError(f"a prompt must not be empty, got {prompt!r}")
    return prompt, salt  # pyright: ignore[reportReturnType] - an integer array is a sequence of ids

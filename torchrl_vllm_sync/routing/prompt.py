"""The part of a prompt that strategies look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_vllm_sync.errors import InvalidPromptError

__all__ = ["routing_prompt"]

_FLAT = (list, tuple, str, np.ndarray)


def routing_prompt(prompt: object) -> tuple[str | Sequence[int] | None, str | None]:
    """Returns what strategies look at, checked as far as costs no time.

    Returns:
        Text or token ids, None if there is no prompt; and its ``cache_salt``, None if it has none.

    Raises:
        InvalidPromptError: It is empty or of a wrong type.
    """
    salt = None
    if not isinstance(prompt, _FLAT) and isinstance(prompt, Mapping):
        form: Mapping[str, Any] = prompt
        salt, ids = form.get("cache_salt"), form.get("prompt_token_ids")
        prompt = form.get("prompt") if ids is None else ids
        if prompt is None:
            raise InvalidPromptError("a prompt dict must have prompt_token_ids or prompt, got none")
        if salt is not None and not isinstance(salt, str):
            raise InvalidPromptError(f"cache_salt must be text, got {type(salt).__name__}")
    if prompt is None:
        return None, None
    if not isinstance(prompt, _FLAT):
        raise InvalidPromptError(
            f"a prompt must be text, token ids or a dict of these, got {type(prompt).__name__}"
        )
    if isinstance(prompt, np.ndarray) and (prompt.ndim != 1 or prompt.dtype.kind not in "iu"):
        raise InvalidPromptError(
            "an array of token ids must have 1 dimension and an integer dtype, "
            f"got shape {prompt.shape} and {prompt.dtype}"
        )
    if not len(prompt):
        raise InvalidPromptError(f"a prompt must not be empty, got {prompt!r}")
    if isinstance(prompt, (list, tuple)) and (
        isinstance(prompt[0], bool) or not isinstance(prompt[0], (int, np.integer))
    ):
        raise InvalidPromptError(f"token ids must be integers, got {type(prompt[0]).__name__}")
    return prompt, salt  # pyright: ignore[reportReturnType] - an integer array is a sequence of ids

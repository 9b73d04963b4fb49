"""Prompts: every form a caller may write, turned once into a dict with token ids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import InvalidPromptError

# Keys of vLLM's TokensPrompt; all but the first two travel with the ids unread.
_KNOWN_KEYS = (
    *("prompt", "prompt_token_ids"),
    *("multi_modal_data", "media_io_kwargs", "mm_processor_kwargs", "multi_modal_uuids"),
    *("cache_salt", "token_type_ids", "prompt_token_offsets"),
)

# Engines keep ids in 32 bits. One that started without a tokenizer checks no id, and an id outside
# the embedding table ends it.
_NUM_INT32_IDS = 2**31

_INTEGER_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
_FORMS = "text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


def as_requests(
    prompts: object = None,
    prompt_token_ids: object = None,
    *,
    encode: Callable[[str], Sequence[int]] | None,
    max_model_len: int | None,
    vocab_size: int | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Checks what was passed to ``generate``: dicts as ``TokensPrompt``, and whether a batch."""
    if (prompts is None) == (prompt_token_ids is None):
        got = "None for both" if prompts is None else "both"
        raise InvalidPromptError(f"pass prompts or prompt_token_ids, got {got}")
    rules = _Rules(encode, max_model_len, vocab_size)
    if prompts is not None:
        name, given, read = "prompts", prompts, rules.read_prompt
    else:
        name, given, read = "prompt_token_ids", prompt_token_ids, rules.read_ids
    if not isinstance(given, (list, tuple)) or _is_flat(given):
        return [read(given, name)], False
    if not given:
        raise _refused(name, "hold at least one prompt", repr(given))
    return [read(prompt, f"{name}[{position}]") for position, prompt in enumerate(given)], True


def check_sampling_params(given: Any, num_prompts: int) -> list[Any]:
    """Returns one entry a prompt, as vLLM's ``LLM.generate`` pairs them."""
    if given is None:
        return [None] * num_prompts
    is_one = not isinstance(given, Sequence)
    if not is_one and len(given) != num_prompts:
        rule = f"have one entry for each of the {num_prompts} prompts"
        raise _refused("sampling_params", rule, len(given))
    for position, entry in enumerate([given] if is_one else given):
        # What distinguishes vLLM's ``SamplingParams``, whatever its release.
        if not (hasattr(entry, "n") and hasattr(entry, "max_tokens")):
            where = "sampling_params" if is_one else f"sampling_params[{position}]"
            raise _refused(where, "be a SamplingParams", _typed(entry))
    return [given] * num_prompts if is_one else list(given)


def prepared_sampling_params(given: Any, num_prompts: int, *, stream: bool = False) -> list[Any]:
    """Copies each distinct object once; only streams want anything before the end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    checked, copies = check_sampling_params(given, num_prompts), dict[int, Any]()
    for one in checked:
        if id(one) not in copies:
            copies[id(one)] = params = SamplingParams() if one is None else copy.copy(one)
            if not stream:
                params.output_kind = RequestOutputKind.FINAL_ONLY
    return [copies[id(one)] for one in checked]


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of one call. ``where`` names the value in messages, for example ``prompts[3]``."""

    encode: Callable[[str], Sequence[int]] | None
    max_model_len: int | None
    vocab_size: int | None

    def read_prompt(self, prompt: object, where: str) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt_token_ids": self._encoded(prompt, where), "prompt": prompt}
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, where)
        return self.read_ids(prompt, where, _FORMS)

    def read_ids(self, ids: object, where: str, expected: str = "token ids") -> dict[str, Any]:
        return {"prompt_token_ids": self._checked(ids, where, expected)}

    def _read_mapping(self, prompt: Mapping[object, object], where: str) -> dict[str, Any]:
        if unknown := [key for key in prompt if key not in _KNOWN_KEYS]:
            raise InvalidPromptError(
                f"{where} may have the keys {', '.join(_KNOWN_KEYS)}, got {shown(unknown)}"
            )
        read: dict[str, Any] = {
            key: prompt[key] for key in _KNOWN_KEYS if prompt.get(key) is not None
        }
        for key in ("cache_salt", "prompt"):
            _as_text(read.get(key, ""), f"{where}[{key!r}]")
        if "prompt_token_ids" in read:
            return read | self.read_ids(read["prompt_token_ids"], f"{where}['prompt_token_ids']")
        if "prompt" in read:
            text = read["prompt"]
            return read | {"prompt_token_ids": self._encoded(text, f"{where}['prompt']")}
        raise _refused(where, "have 'prompt' or 'prompt_token_ids'", shown(list(prompt)))

    def _encoded(self, text: str, where: str) -> list[int]:
        if not text:
            raise _refused(where, "not be empty", "''")
        _as_text(text, where)
        if self.encode is None:
            no_tokenizer = "is text and there is no tokenizer to encode it: pass token ids"
            raise InvalidPromptError(f"{where} {no_tokenizer}, got {_typed(text)}")
        return self._checked(self.encode(text), f"encode({where})", "token ids")

    def _checked(self, ids: object, where: str, expected: str) -> list[int]:
        if isinstance(ids, (torch.Tensor, np.ndarray)):
            ids = self._from_array(ids, where)
        elif not isinstance(ids, (list, tuple)):
            raise _refused(where, f"be {expected}", _typed(ids))
        if not ids:
            raise _refused(where, "have at least 1 token", 0)
        if set(map(type, ids)) == {int}:
            checked: list[int] = list(ids)
        else:
            checked = [_as_id(each, where, at) for at, each in enumerate(ids)]
        limit = _NUM_INT32_IDS if self.vocab_size is None else self.vocab_size
        if min(checked) < 0 or max(checked) >= limit:
            rule = "2**31" if self.vocab_size is None else f"vocab_size={limit}"
            at, bad = next((at, x) for at, x in enumerate(checked) if not 0 <= x < limit)
            told = f"{shown(bad)} at token {at}"
            raise _refused(where, f"have ids of at least 0 and below {rule}", told)
        self._check_length(len(checked), where)
        return checked

    def _check_length(self, length: int, where: str) -> None:
        if self.max_model_len is not None and length >= self.max_model_len:
            raise InvalidPromptError(
                f"{where} must have fewer tokens than max_model_len={self.max_model_len}, so that "
                f"one more fits, got {length}"
            )

    def _from_array(self, ids: torch.Tensor | np.ndarray, where: str) -> list[int]:
        is_tensor = isinstance(ids, torch.Tensor)
        if not (ids.dtype in _INTEGER_DTYPES if is_tensor else ids.dtype.kind in "iu"):
            raise _refused(where, "have an integer dtype", ids.dtype)
        if ids.ndim != 1:
            remedy = "pass a list of 1-D ones for a batch, as padding would be read as tokens"
            raise _refused(where, "have 1 dimension", f"shape {tuple(ids.shape)}: {remedy}")
        if isinstance(ids, torch.Tensor) and (ids.layout != torch.strided or ids.is_meta):
            told = f"{ids.layout} on {ids.device}"
            raise _refused(where, "be a dense tensor with values", told)
        # Before it is a list: a tensor may be expanded to any length at no cost.
        self._check_length(ids.shape[0], where)
        return ids.tolist()


def _is_flat(given: list[object] | tuple[object, ...]) -> bool:
    """Whether a sequence is one prompt; floats count, to be refused as ids."""
    return bool(given) and isinstance(given[0], (int, float, np.number, np.bool_))


def _as_text(value: object, where: str) -> None:
    """Refuses other than text, and half of a surrogate pair, which no tokenizer can encode."""
    if not isinstance(value, str):
        raise _refused(where, "be text", _typed(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        told = f"{value[error.start]!r} at character {error.start}"
        raise _refused(where, "be Unicode text", told) from error


def _as_id(value: object, where: str, at: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise _refused(where, "have integer ids", f"{_typed(value)} at token {at}")


def _refused(where: str, rule: str, got: object) -> InvalidPromptError:
    return InvalidPromptError(f"{where} must {rule}, got {got}")


def _typed(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"

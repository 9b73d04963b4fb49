"""Wire format: a vLLM ``RequestOutput`` as flat columns, on its way from an engine to the caller.

A ``RequestOutput`` holds one dict and one ``Logprob`` for every token. Pickling those small objects
costs most of the bytes and time, so they cross Ray as a column a field and are rebuilt when read.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.outputs import RequestOutput

_LOGPROB_FIELDS = ("logprob", "rank", "decoded_token")
_INTEGERS = [(name, np.iinfo(name)) for name in ("<u1", "<i1", "<u2", "<i4", "<i8")]


@dataclass(frozen=True, slots=True)
class WireOutput:
    """A packed ``RequestOutput``; cheap to pickle, opaque but for its id."""

    request_id: str  # the engine's
    request: dict[str, Any]  # its attributes, packed; ``outputs`` is None
    completions: list[dict[str, Any]]  # the attributes of each of its ``outputs``, packed
    has_prompt: bool  # whether the prompt travels along

    @property
    def answers(self) -> list[Sequence[int] | np.ndarray]:
        """Token ids of each of its ``outputs``, of shape ``(num_tokens,)``."""
        packed = [completion["token_ids"] for completion in self.completions]
        return [one.array() if isinstance(one, _Column) else one for one in packed]


class _Column(NamedTuple):
    """A list of plain integers or floats. Bytes, as Ray would keep an array's store entry alive."""

    dtype: str
    data: bytes

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype)


class _Positions(NamedTuple):
    """A list of ``dict[int, Logprob] | None``, as columns of all its entries."""

    counts: Any  # entries of each position; -1 is a None
    token_ids: Any
    logprobs: Any
    ranks: Any
    decoded_tokens: list[str | None] | None  # None where no token was decoded


class _Flat(NamedTuple):
    """A ``FlatLogprobs``, whose columns are lists."""

    fields: dict[str, Any]


def pack_output(output: RequestOutput, *, include_prompt: bool) -> WireOutput:
    """Packs an output; what has no known form, such as a newer vLLM's fields, travels as it is."""
    request = {**vars(output), "outputs": None}
    if not include_prompt:
        request["prompt"] = request["prompt_token_ids"] = None
    return WireOutput(
        output.request_id,
        {name: _pack(value) for name, value in request.items()},
        [{name: _pack(value) for name, value in vars(one).items()} for one in output.outputs],
        include_prompt,
    )


def unpack_output(
    wire: WireOutput,
    *,
    prompt_token_ids: Sequence[int] | None = None,
    prompt: str | None = None,
) -> RequestOutput:
    """Builds the ``RequestOutput`` that was packed, equal in every value and type."""
    from vllm.outputs import CompletionOutput, RequestOutput

    request = {name: _unpack(value) for name, value in wire.request.items()}
    if not wire.has_prompt:
        if prompt_token_ids is None:
            raise ValueError(
                f"prompt_token_ids must be given for request {wire.request_id}, which was packed "
                "without its prompt, got None"
            )
        request["prompt"], request["prompt_token_ids"] = prompt, list(prompt_token_ids)

    # Attributes are set as unpickling sets them: past __init__, which differs between releases.
    output = RequestOutput.__new__(RequestOutput)
    completions = [CompletionOutput.__new__(CompletionOutput) for _ in wire.completions]
    for completion, packed in zip(completions, wire.completions, strict=True):
        vars(completion).update({name: _unpack(value) for name, value in packed.items()})
    vars(output).update(request, outputs=completions)
    return output


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        kinds = set(map(type, value))
        if kinds in ({int}, {float}):
            return _pack_numbers(value, kinds.pop())
        return _pack_positions(value) if dict in kinds and kinds <= {dict, type(None)} else value
    if isinstance(value, MutableSequence):
        from vllm.logprobs import FlatLogprobs

        if kind is FlatLogprobs:
            return _Flat({name: _pack(column) for name, column in vars(value).items()})
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, _Column):
        return value.array().tolist()
    if isinstance(value, _Positions):
        return _unpack_positions(value)
    if isinstance(value, _Flat):
        from vllm.logprobs import FlatLogprobs

        flat = FlatLogprobs.__new__(FlatLogprobs)
        vars(flat).update({name: _unpack(column) for name, column in value.fields.items()})
        return flat
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        # Ray's arrays are read-only views that hold their object in the store while they live.
        return value.copy()
    return value


def _pack_numbers(values: list[Any], kind: type) -> _Column | list[Any]:
    """Packs integers only or floats only, in the narrowest type that loses nothing."""
    try:
        column = np.array(values, np.float64 if kind is float else np.int64)
    except OverflowError:
        return values
    if kind is float:
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = column.astype("<f4")
            # Bits are compared, for -0.0 and NaN.
            if narrow.astype("<f8").tobytes() == column.tobytes():
                return _Column("<f4", narrow.tobytes())
        return _Column("<f8", column.tobytes())
    low, high = column.min(), column.max()
    dtype = next(name for name, info in _INTEGERS if info.min <= low and high <= info.max)
    return _Column(dtype, column.astype(dtype).tobytes())


def _pack_positions(positions: list[Any]) -> _Positions | list[Any]:
    from vllm.logprobs import Logprob

    filled = [position for position in positions if position is not None]
    entries = [entry for position in filled for entry in position.values()]
    # A dataclass lists its fields in __match_args__.
    if Logprob.__match_args__ != _LOGPROB_FIELDS or set(map(type, entries)) != {Logprob}:
        return positions
    decoded_tokens = [entry.decoded_token for entry in entries]
    return _Positions(
        counts=_pack([-1 if position is None else len(position) for position in positions]),
        token_ids=_pack([token_id for position in filled for token_id in position]),
        logprobs=_pack([entry.logprob for entry in entries]),
        ranks=_pack([entry.rank for entry in entries]),
        decoded_tokens=None if decoded_tokens.count(None) == len(entries) else decoded_tokens,
    )


def _unpack_positions(packed: _Positions) -> list[Any]:
    from vllm.logprobs import Logprob

    counts, token_ids, logprobs, ranks = map(_unpack, packed[:4])
    decoded_tokens = repeat(None) if packed.decoded_tokens is None else packed.decoded_tokens
    # One iterator over all entries, from which each position takes its share.
    entries = zip(token_ids, map(Logprob, logprobs, ranks, decoded_tokens), strict=True)
    return [None if count < 0 else dict(islice(entries, count)) for count in counts]

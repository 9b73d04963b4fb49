"""Wire format: a vLLM ``RequestOutput`` as flat columns, on its way from an engine to the caller.

A ``RequestOutput`` holds one dict and one ``Logprob`` for every token. Pickled like that, most of
the bytes and of the time go into those small objects, so they cross Ray as one column for each of
their fields and are built again where they are read.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput


_LOGPROB_FIELDS = ("logprob", "rank", "decoded_token")
_INT_DTYPES = {
    name: (np.iinfo(name).min, np.iinfo(name).max) for name in ("<u1", "<i1", "<u2", "<i4", "<i8")
}


@dataclass(frozen=True, slots=True)
class WireOutput:
    """A packed ``RequestOutput``; cheap to pickle, opaque but for its id.

    Attributes:
        request_id: The engine's id of the request.
        request: The attributes of the ``RequestOutput``, packed; ``outputs`` is None.
        completions: The attributes of each of its ``outputs``, packed.
        has_prompt: Whether the prompt travels along.
    """

    request_id: str
    request: dict[str, object]
    completions: list[dict[str, object]]
    has_prompt: bool

    @property
    def answers(self) -> list[Sequence[int] | np.ndarray]:
        """Token ids of each of its ``outputs``, of shape ``(num_tokens,)``."""
        packed = [completion["token_ids"] for completion in self.completions]
        return [_as_ids(one) for one in packed]


class _Column(NamedTuple):
    """A list of plain integers or floats."""

    dtype: str
    data: bytes


class _Positions(NamedTuple):
    """A list of ``dict[int, Logprob] | None``; a count of -1 is a None."""

    counts: _Column | list[int]
    token_ids: _Column | list[int]
    logprobs: _Column | list[float]
    ranks: _Column | list[int | None]
    decoded_tokens: list[str | None] | None  # None where no token was decoded


class _Flat(NamedTuple):
    """A ``FlatLogprobs``."""

    fields: dict[str, Any]


def pack_output(output: RequestOutput, *, include_prompt: bool) -> WireOutput:
    """Packs an output in the engine's process.

    Whatever does not have the expected form, for example an attribute that only a newer vLLM has,
    travels as it is.
    """
    request = {**vars(output), "outputs": None}
    if not include_prompt:
        request["prompt"] = request["prompt_token_ids"] = None
    return WireOutput(
        output.request_id,
        _pack_attributes(request),
        [_pack_attributes(vars(completion)) for completion in output.outputs],
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

    request = _unpack_attributes(wire.request)
    if not wire.has_prompt:
        if prompt_token_ids is None:
            raise ValueError(
                f"prompt_token_ids must be given for request {wire.request_id}, which was packed "
                "without its prompt, got None"
            )
        request["prompt"], request["prompt_token_ids"] = prompt, list(prompt_token_ids)

    # Attributes are set as unpickling sets them: past __init__, which differs between releases.
    completions: list[CompletionOutput] = []
    for attributes in wire.completions:
        completion = CompletionOutput.__new__(CompletionOutput)
        vars(completion).update(_unpack_attributes(attributes))
        completions.append(completion)
    output = RequestOutput.__new__(RequestOutput)
    vars(output).update(request, outputs=completions)
    return output


def _pack_attributes(attributes: dict[str, object]) -> dict[str, object]:
    return {name: _pack(value) for name, value in attributes.items()}


def _unpack_attributes(attributes: dict[str, object]) -> dict[str, object]:
    return {name: _unpack(value) for name, value in attributes.items()}


def _pack(value: object) -> object:
    if type(value) is list:
        return _pack_list(value)
    if not isinstance(value, MutableSequence):
        return value
    from vllm.logprobs import FlatLogprobs

    if type(value) is FlatLogprobs:
        return _Flat({name: _pack_list(column) for name, column in vars(value).items()})
    return value


def _unpack(value: object) -> object:
    if type(value) is _Column:
        return _unpack_list(value)
    if type(value) is _Positions:
        return _unpack_positions(value)
    if type(value) is _Flat:
        from vllm.logprobs import FlatLogprobs

        flat = FlatLogprobs.__new__(FlatLogprobs)
        vars(flat).update({name: _unpack_list(column) for name, column in value.fields.items()})
        return flat
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        # Ray's arrays are read-only views that hold their object in the store while they live.
        return value.copy()
    return value


def _pack_list(values: list[Any]) -> Any:
    types = set(map(type, values))
    if types in ({int}, {float}):
        return _pack_column(values)
    if dict in types and types <= {dict, type(None)}:
        return _pack_positions(values)
    return values


def _as_ids(packed: Any) -> Sequence[int] | np.ndarray:
    return np.frombuffer(packed.data, packed.dtype) if isinstance(packed, _Column) else packed


def _unpack_list(packed: _Column | list[Any]) -> list[Any]:
    if isinstance(packed, _Column):
        return np.frombuffer(packed.data, packed.dtype).tolist()
    return packed


def _pack_column(values: list[Any]) -> _Column | list[Any]:
    """Packs integers only or floats only, in the narrowest type that loses nothing."""
    try:
        column = np.array(values, np.float64 if type(values[0]) is float else np.int64)
    except OverflowError:
        return values
    if column.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = column.astype("<f4")
            # Bits are compared, for -0.0 and NaN.
            if narrow.astype("<f8").tobytes() == column.tobytes():
                return _Column("<f4", narrow.tobytes())
        return _Column("<f8", column.tobytes())
    low, high = column.min(), column.max()
    dtype = next(
        name for name, (least, most) in _INT_DTYPES.items() if least <= low and high <= most
    )
    return _Column(dtype, column.astype(dtype).tobytes())


def _pack_positions(positions: list[dict[int, Logprob] | None]) -> _Positions | list[Any]:
    from vllm.logprobs import Logprob

    filled = [position for position in positions if position is not None]
    entries = [entry for position in filled for entry in position.values()]
    # A dataclass lists its fields in __match_args__.
    if Logprob.__match_args__ != _LOGPROB_FIELDS or set(map(type, entries)) != {Logprob}:
        return positions
    decoded_tokens = [entry.decoded_token for entry in entries]
    return _Positions(
        counts=_pack_list([-1 if position is None else len(position) for position in positions]),
        token_ids=_pack_list([token_id for position in filled for token_id in position]),
        logprobs=_pack_list([entry.logprob for entry in entries]),
        ranks=_pack_list([entry.rank for entry in entries]),
        decoded_tokens=None if decoded_tokens.count(None) == len(entries) else decoded_tokens,
    )


def _unpack_positions(packed: _Positions) -> list[dict[int, Logprob] | None]:
    from vllm.logprobs import Logprob

    counts, token_ids, logprobs, ranks = map(_unpack_list, packed[:4])
    decoded_tokens = repeat(None) if packed.decoded_tokens is None else packed.decoded_tokens
    # One iterator over all entries, from which each position takes its share.
    entries = zip(token_ids, map(Logprob, logprobs, ranks, decoded_tokens), strict=True)
    return [None if count < 0 else dict(islice(entries, count)) for count in counts]

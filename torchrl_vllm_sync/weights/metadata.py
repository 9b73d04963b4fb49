"""The metadata of parameters: name, dtype and shape, in memory, on the wire and as one digest."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]  # the most that torch's loops do


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as the trainer announces it and as the engine receives it.

    Attributes:
        name: Hugging Face parameter name, dots included.
        dtype: Dtype of the transferred values.
        shape: Full shape, never that of a shard.

    Example:
        >>> ParamMeta("lm_head.weight", torch.bfloat16, (32, 8)).num_bytes
        512
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of values; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values, without padding."""
        return self.num_elements * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Returns the metadata of a tensor.

        Args:
            name: Its name.
            tensor: Any tensor; of a sharded one the shape is that of the whole.
        """
        return cls(name, tensor.dtype, tuple(tensor.shape))


def checked(
    source: Iterable[tuple[str, torch.Tensor]], metadata: Iterable[ParamMeta]
) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Yields a source's tensors; refuses those that are not as announced, and surplus ones."""
    items = iter(source)
    for meta in metadata:
        name, tensor = next(items, ("nothing", torch.empty(0)))
        if name != meta.name or tuple(tensor.shape) != meta.shape:
            raise WeightMismatchError(
                f"the source announced {meta.name} {list(meta.shape)} and yielded {name} "
                f"{list(tensor.shape)}"
            )
        yield meta, tensor
    for name, _ in items:
        raise WeightMismatchError(f"the source yielded {name}, which it had not announced")


def to_json(metadata: Iterable[ParamMeta]) -> list[list[Any]]:
    """Returns lists of ``[name, dtype, shape]`` for JSON, dtypes as ``"float32"``."""
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metadata]


def from_json(items: object) -> list[ParamMeta]:
    """Reads what ``to_json`` returned; a ``ValueError`` says what is wrong, and where."""
    rows = msgspec.convert(items, list[tuple[str, str, _Shape]])
    if bad := [dtype for _, dtype, _ in rows if dtype not in _DTYPES]:
        raise ValueError(f"dtype must be one of torch's, such as 'bfloat16', got {bad[0]!r:.60}")
    return [ParamMeta(name, _DTYPES[dtype], shape) for name, dtype, shape in rows]


def metadata_digest(metadata: Iterable[ParamMeta]) -> str:
    """A digest of names, dtypes and shapes, equal in every process; their order counts."""
    text = json.dumps(to_json(metadata), separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The metadata of parameters: name, dtype and shape, in memory, on the wire and as one digest."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_NUM_INT64 = 2**63
_MAX_DIMENSIONS = 64  # of torch's own loops


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as the trainer announces it and as the engine receives it.

    Attributes:
        name: Hugging Face parameter name, dots included.
        dtype: Dtype of the transferred values.
        shape: Full shape, never that of a shard.

    Example:
        >>> meta = ParamMeta("lm_head.weight", torch.bfloat16, (32, 8))
        >>> meta.num_bytes
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


def to_json(metadata: Iterable[ParamMeta]) -> list[list[Any]]:
    """Returns lists of ``[name, dtype, shape]`` for JSON, dtypes as ``"float32"``."""
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metadata]


def from_json(items: Sequence[Sequence[Any]]) -> list[ParamMeta]:
    metadata: list[ParamMeta] = []
    for item in items:
        match item:
            case [str() as name, dtype, [*shape]]:
                pass
            case _:
                raise ValueError(f"a parameter must be [name, dtype, shape], got {item!r:.200}")
        sound = all(type(size) is int and 0 <= size < _NUM_INT64 for size in shape)
        if not sound or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{name:.200}: shape must be sizes from 0 on, got {shape!r:.200}")
        metadata.append(ParamMeta(name, dtype_from_name(dtype), tuple(shape)))
    return metadata


def metadata_digest(metadata: Iterable[ParamMeta]) -> str:
    """A digest of names, dtypes and shapes, equal in every process; their order counts."""
    text = json.dumps(to_json(metadata), separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` to ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"float32"`` to ``torch.float32``."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"dtype must be one of torch's, such as 'bfloat16', got {name!r:.60}")
    return dtype

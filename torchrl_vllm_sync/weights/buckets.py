"""How the tensors of a push are cut into buckets: the same on the trainer and in every engine.

The stream of a push is its tensors one after the other, in the order of the metadata. It is cut
into buckets of bounded size, between rows of a tensor: a row is one index of the first dimension,
so an engine that holds a slice of every row (tensor parallelism) still finds whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["DEFAULT_BUCKET_BYTES", "Bucket", "BucketLayout", "Piece"]

# Three of these on each side keep an NVLink busy and take 384 MiB.
DEFAULT_BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one tensor, in one bucket.

    Attributes:
        meta: The tensor they belong to, with its dtype on the wire.
        index: Position of the tensor in the metadata.
        first_row: First row, along the first dimension; a scalar is one row.
        num_rows: Number of rows.
        byte_offset: Where they begin in the bucket; a multiple of the dtype's size.
    """

    meta: ParamMeta
    index: int
    first_row: int
    num_rows: int
    byte_offset: int

    @property
    def name(self) -> str:
        """Checkpoint name of the tensor."""
        return self.meta.name

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return self.meta.num_elements // max(_num_rows(self.meta), 1)

    @property
    def first_element(self) -> int:
        """Offset of the first element in the full, contiguous tensor."""
        return self.first_row * self.row_elements

    @property
    def num_elements(self) -> int:
        """Elements of all rows."""
        return self.num_rows * self.row_elements

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_elements * self.meta.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one transfer carries.

    Attributes:
        pieces: Rows of tensors, in the order of the stream.
        num_bytes: Bytes to transfer, padding between dtypes included.
    """

    pieces: tuple[Piece, ...]
    num_bytes: int


class BucketLayout:
    """The buckets of a push.

    Args:
        metadata: Every tensor of the push, in order.
        bucket_bytes: Most bytes of one bucket; at least 1.

    Attributes:
        metadata: As given.
        buckets: The buckets in the order of sending.
        bucket_bytes: Bytes that a receive buffer must hold.
        num_bytes: Bytes of all buckets.

    Raises:
        WeightMismatchError: One row of a tensor (named) is larger than a bucket.

    Example:
        >>> import torch
        >>> from torchrl_vllm_sync.weights.metadata import ParamMeta
        >>> layout = BucketLayout([ParamMeta("w", torch.float32, (3, 2))], bucket_bytes=16)
        >>> [(piece.first_row, piece.num_rows) for one in layout.buckets for piece in one.pieces]
        [(0, 2), (2, 1)]
    """

    def __init__(
        self, metadata: Sequence[ParamMeta], bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self.metadata = list(metadata)
        self.buckets = list(_cut(self.metadata, bucket_bytes))
        self.bucket_bytes = max((one.num_bytes for one in self.buckets), default=0)
        self.num_bytes = sum(one.num_bytes for one in self.buckets)


def _num_rows(meta: ParamMeta) -> int:
    return meta.shape[0] if meta.shape else 1


def _cut(metadata: Sequence[ParamMeta], bucket_bytes: int) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    filled = 0
    for index, meta in enumerate(metadata):
        size = meta.dtype.itemsize
        row = 0
        num_rows = _num_rows(meta)
        if not meta.num_elements:
            continue
        row_bytes = meta.num_bytes // num_rows
        if row_bytes > bucket_bytes:
            raise WeightMismatchError(
                f"a bucket of {bucket_bytes} bytes cannot hold one row of {meta.name}, which has "
                f"{row_bytes} bytes"
            )
        while row < num_rows:
            start = -(-filled // size) * size
            fitting = min((bucket_bytes - start) // row_bytes, num_rows - row)
            if fitting <= 0:
                yield Bucket(tuple(pieces), filled)
                pieces, filled = [], 0
                continue
            pieces.append(Piece(meta, index, row, fitting, start))
            filled = start + fitting * row_bytes
            row += fitting
    if pieces:
        yield Bucket(tuple(pieces), filled)

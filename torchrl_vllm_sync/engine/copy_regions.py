"""The geometry of strided copies: fewest dimensions, and cuts at the borders of buckets."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrl_vllm_sync.weights.buckets import Piece

__all__ = ["Dim", "Region", "coalesced", "cut_at", "is_flat", "num_elements"]

Dim = tuple[int, int, int]
"""One dimension of a copy: its size, and its strides in the source and in the target."""


class Region(NamedTuple):
    """A copy between two strided arrays, in elements.

    Attributes:
        source: Where it begins on the source's side.
        target: Where it begins on the target's side.
        dims: Size and both strides of each dimension, outermost first.
    """

    source: int
    target: int
    dims: tuple[Dim, ...]


def coalesced(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The same copy in as few dimensions as possible; a dense one has one, of strides 1 and 1."""
    merged: list[Dim] = []
    for size, source, target in sorted(
        (dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1:], reverse=True
    ):
        if merged and merged[-1][1:] == (source * size, target * size):
            merged[-1] = (merged[-1][0] * size, source, target)
        else:
            merged.append((size, source, target))
    return tuple(merged)


def is_flat(dims: tuple[Dim, ...]) -> bool:
    """Whether a coalesced copy is dense on both sides."""
    return not dims or (len(dims) == 1 and dims[0][1:] == (1, 1))


def num_elements(dims: tuple[Dim, ...]) -> int:
    """Elements that a copy moves."""
    count = 1
    for size, _, _ in dims:
        count *= size
    return count


def cut_at(
    region: Region, starts: Sequence[int], pieces: Sequence[Piece]
) -> Iterator[tuple[int, Region]]:
    """Cuts a region at the borders of pieces; yields positions of pieces and parts within them."""
    if not num_elements(region.dims):
        return
    extent = 1 + sum((size - 1) * stride for size, stride, _ in region.dims)
    position = bisect_right(starts, region.source) - 1
    piece = pieces[position]
    if region.source + extent <= piece.first_element + piece.num_elements:
        yield position, region
        return
    (size, stride, target_stride), *inner_dims = region.dims
    rest = tuple(inner_dims)
    inner = extent - (size - 1) * stride
    index = 0
    while index < size:
        source = region.source + index * stride
        target = region.target + index * target_stride
        position = bisect_right(starts, source) - 1
        room = pieces[position].first_element + pieces[position].num_elements - source
        if room < inner:
            yield from cut_at(Region(source, target, rest), starts, pieces)
            index += 1
            continue
        count = min((room - inner) // stride + 1, size - index)
        dims = ((count, stride, target_stride), *rest) if count > 1 else rest
        yield position, Region(source, target, dims)
        index += count

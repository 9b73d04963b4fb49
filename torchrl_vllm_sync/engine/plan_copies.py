"""The copies that put every slice of a push into a worker's parameters.

vLLM's loaders compute the same slices at every push. A plan holds them once; bound to the receive
buffers it is a list of cached views for each bucket, loaded by a few ``torch._foreach_copy_``.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrl_vllm_sync.engine.plan import (
    PlannedCopy,
    PlannedFill,
    PlanNotPossibleError,
    record_writes,
    storage_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torchrl_vllm_sync.weights.broadcast.buckets import BucketLayout, Piece
    from torchrl_vllm_sync.weights.metadata import ParamMeta

Dim = tuple[int, int, int]
"""One dimension of a copy: its size, and its strides in the source and in the target."""


class Region(NamedTuple):
    """A copy between two strided arrays, in elements; ``dims`` are outermost first."""

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
    return math.prod(size for size, _, _ in dims)


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


def record_load_plan(model: torch.nn.Module, metadata: Sequence[ParamMeta]) -> LoadPlan:
    """Records where each slice of a complete push lands in ``model``.

    Parameters must be in the layout that the loader expects: neither repacked nor quantised after
    loading. vLLM's loaders need the worker's configuration to be current
    (``set_current_vllm_config``).
    """
    writes = record_writes(model, metadata)
    return LoadPlan(
        metadata,
        [one for one in writes if isinstance(one, PlannedCopy)],
        [one for one in writes if isinstance(one, PlannedFill)],
    )


@dataclass(frozen=True, slots=True, eq=False)
class BoundBucket:
    """The copies that load one received bucket: lists of targets and sources by pair of dtypes."""

    groups: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...]

    @property
    def num_copies(self) -> int:
        """Pairs of views, after merging."""
        return sum(len(targets) for targets, _ in self.groups)

    @torch.no_grad()
    def copy(self) -> None:
        """Copies the bucket's buffer into the model, on the current stream."""
        for targets, sources in self.groups:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


class LoadPlan:
    """The copies and constants that make up one complete load of a worker's model.

    ``fills`` are constants that a loaded model holds already and no push changes; ``skipped`` are
    checkpoint tensors of which this worker holds nothing, as with pipeline or expert parallelism.

    Example:
        >>> plan = record_load_plan(model, metadata)
        >>> layout = BucketLayout(metadata)
        >>> slots = [torch.empty(layout.bucket_bytes, dtype=torch.uint8) for _ in range(3)]
        >>> for bucket in plan.bind(layout, slots):  # bucket i arrives in slots[i % 3]
        ...     bucket.copy()
    """

    def __init__(
        self,
        metadata: Iterable[ParamMeta],
        copies: Iterable[PlannedCopy],
        fills: Iterable[PlannedFill] = (),
    ) -> None:
        self.copies, self.fills = list(copies), list(fills)
        self._metadata = {meta.name: meta for meta in metadata}
        written = {copy.name for copy in self.copies}
        self.skipped = [name for name in self._metadata if name not in written]
        self._lacks_constants = True
        self._bound: list[BoundBucket] = []
        self._bound_to: tuple[int, ...] = ()

    @functools.cached_property
    def whole_targets(self) -> list[torch.Tensor] | None:
        """Targets of all checkpoint tensors if each lands whole, unchanged and in one piece.

        They can then be received straight into the model, without buckets.
        """
        found: dict[str, torch.Tensor] = {}
        for copy in self.copies:
            meta, target = self._metadata[copy.name], copy.target
            whole = copy.offset == 0 and target.numel() == meta.num_elements
            straight = target.is_contiguous() and target.dtype == meta.dtype
            in_order = copy.stride == torch.empty(copy.shape, device="meta").stride()
            if copy.name in found or not (whole and straight and in_order):
                return None
            found[copy.name] = target.view(-1)
        wanted = [meta.name for meta in self._metadata.values() if meta.num_elements]
        return [found[name] for name in wanted] if found.keys() == set(wanted) else None

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Sets what loaders set and no push holds, such as padding, once; a load must follow."""
        # A model that was launched with dummy weights lacks them.
        if self._lacks_constants:
            for fill in self.fills:
                fill.target.fill_(fill.value)
            self._lacks_constants = False

    def bound(self, layout: BucketLayout, buckets: Sequence[torch.Tensor]) -> list[BoundBucket]:
        """What :meth:`bind` returns, computed once for the same buffers of the same layout."""
        pointers = tuple(buffer.data_ptr() for buffer in buckets)
        if self._bound_to != pointers:
            self._bound, self._bound_to = self.bind(layout, buckets), pointers
        return self._bound

    def bind(self, layout: BucketLayout, buckets: Sequence[torch.Tensor]) -> list[BoundBucket]:
        """Builds every view that loading the buckets of ``layout`` needs; joins adjacent copies."""
        if not buckets:
            raise ValueError("buckets must hold at least one buffer")
        pieces = self._pieces(layout)
        loads: list[list[_Load]] = [[] for _ in layout.buckets]
        for copy in self.copies:
            if copy.name not in pieces:
                raise PlanNotPossibleError(f"no bucket holds {copy.name}, which the model loads")
            numbers, parts = pieces[copy.name]
            starts = [part.first_element for part in parts]
            dims = coalesced(zip(copy.shape, copy.stride, copy.target.stride(), strict=True))
            region = Region(copy.offset, int(copy.target.storage_offset()), dims)
            dtype = self._metadata[copy.name].dtype
            for position, cut in cut_at(region, starts, parts):
                begin = parts[position].byte_offset
                begin += (cut.source - starts[position]) * dtype.itemsize
                loads[numbers[position]].append(
                    _Load(begin, dtype, copy.target, cut.target, cut.dims)
                )
        return [
            _bound(_merge(loads[number]), buckets[number % len(buckets)], one.num_bytes)
            for number, one in enumerate(layout.buckets)
        ]

    def redirected(self, place: Callable[[torch.Tensor], torch.Tensor]) -> LoadPlan:
        """The same plan with other targets."""
        return LoadPlan(
            self._metadata.values(),
            [replace(copy, target=place(copy.target)) for copy in self.copies],
            [replace(fill, target=place(fill.target)) for fill in self.fills],
        )

    def _pieces(self, layout: BucketLayout) -> dict[str, tuple[list[int], list[Piece]]]:
        """For each tensor, the buckets and pieces of its parts, in order."""
        found: dict[str, tuple[list[int], list[Piece]]] = {}
        for number, bucket in enumerate(layout.buckets):
            for piece in bucket.pieces:
                meta = self._metadata.get(piece.name)
                if meta is not None and meta != piece.meta:
                    raise PlanNotPossibleError(
                        f"{piece.name} was planned as {meta.dtype} {list(meta.shape)}, but arrives "
                        f"as {piece.meta.dtype} {list(piece.meta.shape)}"
                    )
                numbers, pieces = found.setdefault(piece.name, ([], []))
                numbers.append(number)
                pieces.append(piece)
        return found


class _Load(NamedTuple):
    """A copy out of one bucket: from byte ``begin`` to element ``offset`` of a target's storage."""

    begin: int
    dtype: torch.dtype
    target: torch.Tensor
    offset: int
    dims: tuple[Dim, ...]

    def is_followed_by(self, other: _Load) -> bool:
        """Whether ``other`` goes on where this one ends, in the bucket and in one storage."""
        count = num_elements(self.dims)
        return (
            is_flat(self.dims)
            and is_flat(other.dims)
            and (self.dtype, self.target.dtype) == (other.dtype, other.target.dtype)
            and self.begin + count * self.dtype.itemsize == other.begin
            and self.offset + count == other.offset
            and storage_key(self.target) == storage_key(other.target)
        )


def _merge(loads: list[_Load]) -> list[_Load]:
    """Joins flat loads that are neighbours in the bucket and in their target's storage."""
    merged: list[_Load] = []
    for load in sorted(loads, key=lambda one: one.begin):
        if merged and merged[-1].is_followed_by(load):
            count = num_elements(merged[-1].dims) + num_elements(load.dims)
            merged[-1] = merged[-1]._replace(dims=((count, 1, 1),))
        else:
            merged.append(load)
    return merged


def _bound(loads: Iterable[_Load], slot: torch.Tensor, num_bytes: int) -> BoundBucket:
    """Makes the views of one bucket's loads out of its buffer."""
    if slot.dtype != torch.uint8 or slot.ndim != 1 or not slot.is_contiguous():
        raise ValueError(
            f"a buffer must be a contiguous 1-D uint8 tensor, got {slot.dtype} {list(slot.shape)}"
        )
    if slot.numel() < num_bytes:
        raise ValueError(f"a buffer must hold {num_bytes} bytes, got {slot.numel()}")
    typed: dict[torch.dtype, torch.Tensor] = {}
    groups: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    groups = defaultdict(lambda: ([], []))
    for begin, dtype, target, offset, dims in loads:
        if dtype not in typed:
            typed[dtype] = slot[: slot.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        shape = tuple(size for size, _, _ in dims)
        start = typed[dtype].storage_offset() + begin // dtype.itemsize
        # Only lists of one pair of dtypes and dense tensors take the fused kernel.
        targets, sources = groups[dtype, target.dtype, target.device, is_flat(dims)]
        targets.append(target.as_strided(shape, tuple(one for _, _, one in dims), offset))
        sources.append(typed[dtype].as_strided(shape, tuple(one for _, one, _ in dims), start))
    return BoundBucket(tuple(groups.values()))

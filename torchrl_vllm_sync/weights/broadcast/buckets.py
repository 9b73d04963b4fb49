"""Buckets of a push: cut, packed, sent and received alike on the trainer and in every engine.

The stream of its tensors is cut into buckets of bounded size between rows (indices of the first
dimension), so that an engine that holds a slice of every row (tensor parallelism) finds whole rows.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.broadcast.group import NUM_BUFFERS, BroadcastGroup, Watch, left_s
from torchrl_vllm_sync.weights.module import ParamMeta, checked, metadata_digest, storage_key
from torchrl_vllm_sync.weights.p2p.memory import ALIGNMENT

# Three of these on each side keep an NVLink busy and take 384 MiB.
DEFAULT_BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one tensor, in one bucket; a scalar is one row."""

    meta: ParamMeta  # the tensor they belong to, with its dtype on the wire
    byte_offset: int  # where they begin in the bucket; a multiple of the dtype's size
    first_element: int  # offset in the full, contiguous tensor
    num_elements: int

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns them, flat, in the buffer of their bucket."""
        num_bytes = self.num_elements * self.meta.dtype.itemsize
        return buffer[self.byte_offset :][:num_bytes].view(self.meta.dtype)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one transfer carries."""

    pieces: tuple[Piece, ...]  # rows of tensors, in the order of the stream
    num_bytes: int  # bytes to transfer, padding between dtypes included


class BucketLayout:
    """The buckets of a push, in the order of sending; ``digest`` is that of the metadata."""

    def __init__(
        self, metadata: Sequence[ParamMeta], bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self.metadata = list(metadata)
        self.buckets = list(_cut(self.metadata, bucket_bytes))
        # Bytes that a receive buffer must hold.
        self.bucket_bytes = max((one.num_bytes for one in self.buckets), default=0)
        self.digest = metadata_digest(metadata)


def _cut(metadata: Sequence[ParamMeta], bucket_bytes: int) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    filled = 0
    for meta in metadata:
        if not meta.num_elements:
            continue
        row, num_rows = 0, meta.shape[0] if meta.shape else 1
        size, row_elements = meta.dtype.itemsize, meta.num_elements // num_rows
        row_bytes = row_elements * size
        if row_bytes > bucket_bytes:
            raise WeightMismatchError(
                f"a bucket of {bucket_bytes} bytes cannot hold one row of {meta.name}, which has "
                f"{row_bytes} bytes"
            )
        while row < num_rows:
            start = -(-filled // size) * size
            fitting = min((bucket_bytes - start) // row_bytes, num_rows - row)
            if fitting <= 0:  # the bucket is full
                yield Bucket(tuple(pieces), filled)
                pieces, filled = [], 0
                continue
            pieces.append(Piece(meta, start, row * row_elements, fitting * row_elements))
            filled = start + fitting * row_bytes
            row += fitting
    if pieces:
        yield Bucket(tuple(pieces), filled)


# ---- Copies between buckets and tensors: cut at the borders of buckets, and neighbours joined

# One dimension of a copy: its size, and its strides in the tensor of a push and in the model's, or
# the trainer's, own. Those of a copy are outermost first.
Dim = tuple[int, int, int]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorCopy:
    """One slice of a tensor of a push, and the place where it is: of the trainer or of a model."""

    name: str  # of the tensor of the push
    offset: int  # in elements of that tensor, full and contiguous
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; 0 where one element fills several
    target: torch.Tensor  # a view of the place, of the same shape

    @classmethod
    def whole(cls, meta: ParamMeta, tensor: torch.Tensor) -> TensorCopy:
        dense = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, device="meta")
        return cls(meta.name, 0, tensor.shape, dense.stride(), tensor)

    @property
    def dims(self) -> Dims:
        """The copy in as few dimensions as possible; a dense one has one, of strides 1 and 1."""
        if self.stride == self.target.stride() and self.target.is_contiguous():
            return ((self.target.numel(), 1, 1),)  # what the next line finds, sooner
        return merged_dims(zip(self.shape, self.stride, self.target.stride(), strict=True))


def merged_dims(dims: Iterable[Dim]) -> Dims:
    """Joins dimensions that follow each other without gaps at both ends; outermost first."""
    merged: list[Dim] = []
    for size, one, other in sorted(
        (dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1:], reverse=True
    ):
        if merged and merged[-1][1:] == (one * size, other * size):
            merged[-1] = (merged[-1][0] * size, one, other)
        else:
            merged.append((size, one, other))
    return tuple(merged)


def is_flat(dims: Dims) -> bool:
    return not dims or (len(dims) == 1 and dims[0][1:] == (1, 1))


def bound_buckets(
    copies: Iterable[TensorCopy], layout: BucketLayout, buffers: Sequence[torch.Tensor]
) -> list[BoundBucket]:
    """Builds every view that copying takes; ``buffers`` are used in turn."""
    pieces: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for number, bucket in enumerate(layout.buckets):
        for piece in bucket.pieces:
            pieces[piece.meta.name].append((number, piece))
    parts: list[list[_Part]] = [[] for _ in layout.buckets]
    for copy in copies:
        start = int(copy.target.storage_offset())
        for number, part in _cut_copy(copy, copy.offset, start, copy.dims, pieces[copy.name]):
            parts[number].append(part)
    return list(map(BoundBucket, map(_merged, parts), itertools.cycle(buffers)))


def _cut_copy(
    copy: TensorCopy, source: int, offset: int, dims: Dims, pieces: Sequence[tuple[int, Piece]]
) -> Iterator[tuple[int, _Part]]:
    """Yields what each bucket holds of ``copy``, or of a part of it, and the bucket's number.

    It begins at element ``source`` of the push's tensor and ``offset`` of the target's storage.
    """
    (size, stride, target_stride), *others = dims or ((1, 0, 0),)
    inner = tuple(others)
    extent = 1 + sum((count - 1) * step for count, step, _ in inner)
    index = 0
    while index < size:
        begin, to = source + index * stride, offset + index * target_stride
        behind = bisect_right(pieces, begin, key=lambda one: one[1].first_element)
        number, piece = pieces[behind - 1]
        skipped = begin - piece.first_element
        room = piece.num_elements - skipped
        if room < extent:
            yield from _cut_copy(copy, begin, to, inner, pieces)
            index += 1
            continue
        # Of stride 0 only if all are: then each index means the same element.
        count = min((room - extent) // stride + 1, size - index) if stride else size
        fitting = ((count, stride, target_stride), *inner) if count > 1 else inner
        dtype = piece.meta.dtype
        first_byte = piece.byte_offset + skipped * dtype.itemsize
        yield number, _Part(first_byte, dtype, copy.target, to, fitting)
        index += count


class _Part(NamedTuple):
    """A run of a bucket from byte ``begin`` on, and of a target from element ``offset`` on."""

    begin: int
    dtype: torch.dtype
    target: torch.Tensor
    offset: int
    dims: Dims

    @property
    def num_elements(self) -> int:
        return math.prod(size for size, _, _ in self.dims)

    def is_followed_by(self, other: _Part) -> bool:
        """Whether ``other`` goes on where this one ends, in the bucket and in one storage."""
        count = self.num_elements
        end = self.begin + count * self.dtype.itemsize, self.offset + count
        return (
            end == (other.begin, other.offset)
            and (is_flat(self.dims) and is_flat(other.dims))
            and (self.dtype, self.target.dtype) == (other.dtype, other.target.dtype)
            and storage_key(self.target) == storage_key(other.target)
        )


def _merged(parts: list[_Part]) -> list[_Part]:
    """Joins flat parts that are neighbours in the bucket and in their target's storage."""
    merged: list[_Part] = []
    for part in sorted(parts, key=lambda one: one.begin):
        if merged and merged[-1].is_followed_by(part):
            count = merged[-1].num_elements + part.num_elements
            merged[-1] = merged[-1]._replace(dims=((count, 1, 1),))
        else:
            merged.append(part)
    return merged


class BoundBucket:
    """Copies between one bucket and tensors: lists of both ends, by pair of dtypes."""

    def __init__(self, parts: Iterable[_Part], buffer: torch.Tensor) -> None:
        typed: dict[torch.dtype, torch.Tensor] = {}
        groups: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for part in parts:
            dtype, target = part.dtype, part.target
            if dtype not in typed:
                num_bytes = buffer.numel() // dtype.itemsize * dtype.itemsize
                typed[dtype] = buffer[:num_bytes].view(dtype)
            shape, packed_stride, stride = ([dim[i] for dim in part.dims] for i in range(3))
            start = typed[dtype].storage_offset() + part.begin // dtype.itemsize
            # Only lists of one pair of dtypes and dense tensors take the fused kernel.
            targets, packed = groups[dtype, target.dtype, target.device, is_flat(part.dims)]
            targets.append(target.as_strided(shape, stride, part.offset))
            packed.append(typed[dtype].as_strided(shape, packed_stride, start))
        self.groups = list(groups.values())

    @torch.no_grad()
    def unpack(self) -> None:
        for targets, packed in self.groups:
            torch._foreach_copy_(targets, packed)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def pack(self) -> None:
        for targets, packed in self.groups:
            torch._foreach_copy_(packed, targets, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


# ---- Sending and receiving: one bucket is packed while another is on its way
#
# NUM_BUFFERS are used in turn. On CUDA nothing here waits on the host: the order of work on the
# group's stream lets a buffer be packed after its broadcast, and received into after its unpacking.


def room_for(bucket_bytes: int) -> int:
    """Returns how many bytes a memory must have for the buffers of such buckets."""
    return NUM_BUFFERS * _aligned(bucket_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def make_buffers(
    layout: BucketLayout, device: torch.device, memory: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Makes buffers, or finds them in a memory."""
    size, number = layout.bucket_bytes, min(NUM_BUFFERS, len(layout.buckets))
    if memory is not None:
        starts = range(0, number * _aligned(size), _aligned(size) or 1)
        return [memory[start:][:size] for start in starts]
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(number)]


def send_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    packing: Iterator[object],
    **limits: Any,
) -> None:
    """Broadcasts every bucket as it is packed; on CUDA it only queues the work."""
    with group.side_stream():
        deque(receive_buckets(group, layout, buffers, packing, **limits), maxlen=0)
    deque(packing, maxlen=0)  # which refuses surplus tensors


def receive_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    packing: Iterator[object] | None = None,
    *,
    deadline: float,
    watch: Watch = None,
) -> Iterator[int]:
    """Receives, in ``side_stream``, or packs and sends; yields numbers of buffers to be read."""
    works: deque[torch.distributed.Work] = deque()
    for index in range(len(layout.buckets) + len(buffers)):
        if index >= len(buffers):
            group.wait(works.popleft(), watch)
            yield index - len(buffers)
        if index < len(layout.buckets):
            if packing is not None:  # on the trainer
                next(packing)
            sent = buffers[index % len(buffers)][: layout.buckets[index].num_bytes]
            works.append(group.broadcast(sent, timeout_s=left_s(deadline)))


# ---- Sending tensors from where they lie, without buckets
#
# Possible where the trainer's tensors are contiguous in the wire's dtype and land contiguous in
# every worker, as those of an unquantised dense model do without tensor parallelism. Saves the
# copies into and out of the buckets, and their memory.

# Groups of 8 and 32 were as fast as the best buckets on H200s; single broadcasts took up to twice
# as long, and so did all at once.
GROUP_TENSORS = 32
# Beyond this, neighbours in buckets merge into fewer transfers than there are tensors.
MOST_TENSORS = 4096


def sendable_tensors(
    metadata: Sequence[ParamMeta], views: Sequence[tuple[str, torch.Tensor]] | None
) -> list[torch.Tensor] | None:
    """Returns a flat view of each tensor if all can be sent from where they are."""
    if views is None or len(metadata) > MOST_TENSORS:
        return None
    tensors = [tensor.detach() for _, tensor in views]
    pairs = zip(metadata, tensors, strict=True)
    if not all(one.dtype == meta.dtype and one.is_contiguous() for meta, one in pairs):
        return None
    return [tensor.view(-1) for tensor in tensors if tensor.numel()]


def broadcast_tensors(
    group: BroadcastGroup, tensors: Sequence[torch.Tensor], *, deadline: float, watch: Watch = None
) -> None:
    """Broadcasts ``tensors`` in place, on CUDA queued only: the trainer's to all other ranks."""
    with group.side_stream():
        works: list[torch.distributed.Work] = []
        # The first by itself: it is on its way while the others are put together.
        bounds = [*range(1, len(tensors), GROUP_TENSORS), len(tensors)]
        for begin, end in itertools.pairwise([0, *bounds]):
            works += group.broadcast_together(tensors[begin:end], timeout_s=left_s(deadline))
        for work in works:
            group.wait(work, watch)


def bound_views(
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    views: Sequence[tuple[str, torch.Tensor]],
) -> list[BoundBucket]:
    """Plans the packing of tensors that stay in place, adjacent ones merged."""
    pairs = zip(layout.metadata, views, strict=True)
    copies = [TensorCopy.whole(meta, one.detach()) for meta, (_, one) in pairs if one.numel()]
    return bound_buckets(copies, layout, buffers)


@torch.no_grad()
def streamed(
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    source: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
) -> Iterator[None]:
    """Packs tensors as a source yields them (merged adapters, gathered shards): a bucket a step."""
    items, meta, tensor = checked(source, layout.metadata), None, torch.empty(0)
    for index, bucket in enumerate(layout.buckets):
        for piece in bucket.pieces:
            while meta is not piece.meta:
                meta, tensor = next(items)
                check_device(meta.name, tensor, device)
            rows = tensor.detach()
            if rows.dim():
                size = piece.meta.num_elements // len(rows)
                rows = rows.narrow(0, piece.first_element // size, piece.num_elements // size)
            target = piece.within(buffers[index % len(buffers)])
            target.view(rows.shape).copy_(rows, non_blocking=True)
        yield
    yield from (None for _ in items)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuses a tensor from which a push would have to go through the host."""
    if device.type == "cuda" and tensor.device != device:
        raise WeightMismatchError(
            f"{name} is on {tensor.device}, but this transport sends from {device}: move the "
            "weights there, or use the memmap transport"
        )


def whole_tensors(
    layout: BucketLayout, buffers: Sequence[torch.Tensor], arrivals: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor, in memory that vLLM's loaders may keep, when its last row has arrived."""
    for meta in layout.metadata:
        if not meta.num_elements:
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype)
    whole = torch.empty(0)
    for index in arrivals:
        for piece in layout.buckets[index].pieces:
            received, end = piece.within(buffers[index % len(buffers)]), piece.first_element
            if piece.first_element == 0:
                whole = received.new_empty(piece.meta.num_elements)
            end += piece.num_elements
            whole[piece.first_element : end] = received
            if end == piece.meta.num_elements:
                yield piece.meta.name, whole.view(piece.meta.shape)

"""Buckets of a push: cut, packed, sent and received alike on the trainer and in every engine.

A push is a stream of its tensors in the order of the metadata. It is cut into buckets of bounded
size between rows (indices of the first dimension), so that an engine that holds a slice of every
row (tensor parallelism) still finds whole rows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.broadcast.group import left_s
from torchrl_vllm_sync.weights.metadata import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist

    from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup, Watch
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource


# Three of these on each side keep an NVLink busy and take 384 MiB.
DEFAULT_BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one tensor, in one bucket."""

    meta: ParamMeta  # the tensor they belong to, with its dtype on the wire
    index: int  # position of the tensor in the metadata
    first_row: int  # first row, along the first dimension; a scalar is one row
    num_rows: int  # number of rows
    byte_offset: int  # where they begin in the bucket; a multiple of the dtype's size
    first_element: int  # offset in the full, contiguous tensor
    num_elements: int

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.meta.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one transfer carries."""

    pieces: tuple[Piece, ...]  # rows of tensors, in the order of the stream
    num_bytes: int  # bytes to transfer, padding between dtypes included


class BucketLayout:
    """The buckets of a push, in the order of sending."""

    def __init__(
        self, metadata: Sequence[ParamMeta], bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self.metadata = list(metadata)
        self.buckets = list(_cut(self.metadata, bucket_bytes))
        # Bytes that a receive buffer must hold.
        self.bucket_bytes = max((one.num_bytes for one in self.buckets), default=0)


def _cut(metadata: Sequence[ParamMeta], bucket_bytes: int) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    filled = 0
    for index, meta in enumerate(metadata):
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
            elements = row * row_elements, fitting * row_elements
            pieces.append(Piece(meta, index, row, fitting, start, *elements))
            filled = start + fitting * row_bytes
            row += fitting
    if pieces:
        yield Bucket(tuple(pieces), filled)


# ---- Sending and receiving: one bucket is packed while another is on its way
#
# A few buffers are used in turn. On CUDA nothing here waits on the host: a buffer is packed again
# only after its broadcast, and received into again only after its unpacking, by the order of work
# on the group's stream.

NUM_BUFFERS = 3


def make_buffers(layout: BucketLayout, device: torch.device) -> list[torch.Tensor]:
    """Allocates the ``uint8`` buffers that buckets pass through."""
    return [
        torch.empty(layout.bucket_bytes, dtype=torch.uint8, device=device)
        for _ in range(min(NUM_BUFFERS, len(layout.buckets)))
    ]


def send_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    pack: Callable[[int, torch.Tensor], None],
    *,
    deadline: float,
    watch: Watch = None,
) -> None:
    """Packs and broadcasts every bucket; on CUDA it only queues the work."""
    works: deque[dist.Work] = deque()
    with group.side_stream():
        for index, bucket in enumerate(layout.buckets):
            buffer = buffers[index % len(buffers)]
            if len(works) == len(buffers):
                group.wait(works.popleft(), watch)
            pack(index, buffer)
            works.append(group.broadcast(buffer[: bucket.num_bytes], timeout_s=left_s(deadline)))
        for work in works:
            group.wait(work, watch)


def receive_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    *,
    deadline: float,
) -> Iterator[int]:
    """Receives every bucket in turn; yields its number while what reads its buffer may be queued.

    Iterate inside ``group.side_stream()``.
    """
    works: deque[dist.Work] = deque()

    def ask(index: int) -> None:
        if index < len(layout.buckets):
            buffer = buffers[index % len(buffers)][: layout.buckets[index].num_bytes]
            works.append(group.broadcast(buffer, timeout_s=left_s(deadline)))

    for index in range(len(buffers)):
        ask(index)
    for index in range(len(layout.buckets)):
        group.wait(works.popleft())
        yield index
        ask(index + len(buffers))


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
    group: BroadcastGroup,
    tensors: Sequence[torch.Tensor],
    *,
    deadline: float,
    watch: Watch = None,
) -> None:
    """Broadcasts ``tensors`` in place, on CUDA queued only: the trainer's to all other ranks."""
    with group.side_stream():
        works: list[dist.Work] = []
        for first in range(0, len(tensors), GROUP_TENSORS):
            some = tensors[first : first + GROUP_TENSORS]
            works += group.broadcast_together(some, timeout_s=left_s(deadline))
        for work in works:
            group.wait(work, watch)


# ---- Filling buckets: tensors are cast and copied on the trainer's device, not through the host


class ViewPacker:
    """Packs tensors that stay in place: copies are planned once, adjacent ones merged."""

    def __init__(
        self,
        layout: BucketLayout,
        buffers: Sequence[torch.Tensor],
        views: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        tensors = [tensor for _, tensor in views]
        self._copies = [
            _copies(bucket, buffers[index % len(buffers)], tensors)
            for index, bucket in enumerate(layout.buckets)
        ]
        # Copies of one push, after merging.
        self.num_copies = sum(len(targets) for groups in self._copies for targets, _ in groups)

    @torch.no_grad()
    def __call__(self, index: int, buffer: torch.Tensor) -> None:
        del buffer  # the targets are views of it
        for targets, sources in self._copies[index]:
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


class StreamingPacker:
    """Packs tensors as a source yields them: merged adapters, gathered shards."""

    def __init__(self, layout: BucketLayout, source: WeightSource, device: torch.device) -> None:
        self._layout = layout
        self._items, self._device = checked(source, layout.metadata), device
        self._index, self._tensor = -1, torch.empty(0)

    @torch.no_grad()
    def __call__(self, index: int, buffer: torch.Tensor) -> None:
        """Fills ``buffer`` with bucket ``index``; buckets must be asked for in order."""
        for piece in self._layout.buckets[index].pieces:
            while self._index < piece.index:
                meta, self._tensor = next(self._items)
                check_device(meta.name, self._tensor, self._device)
                self._index += 1
            rows = _rows(piece, self._tensor)
            _part(buffer, piece, rows.numel()).view(rows.shape).copy_(rows, non_blocking=True)

    def finish(self) -> None:
        """Exhausts the source, so that ``checked`` refuses surplus tensors; frees the last one."""
        for _ in self._items:
            pass
        self._tensor = torch.empty(0)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuses a tensor from which a push would have to go through the host."""
    if device.type == "cuda" and tensor.device != device:
        raise WeightMismatchError(
            f"{name} is on {tensor.device}, but this transport sends from {device}: move the "
            "weights there, or use the memmap transport"
        )


def _copies(
    bucket: Bucket, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Returns targets and sources that fill one bucket, grouped by what may run as one kernel."""
    runs: list[tuple[Piece, torch.Tensor]] = []  # the first piece of each, and its values
    end = 0
    for piece in bucket.pieces:
        rows = _rows(piece, tensors[piece.index])
        if rows.is_contiguous():
            rows = rows.reshape(-1)
        if runs and piece.byte_offset == end and _follows(*runs[-1], piece, rows):
            first, before = runs[-1]
            runs[-1] = first, before.as_strided((before.numel() + rows.numel(),), (1,))
        else:
            runs.append((piece, rows))
        end = piece.byte_offset + piece.num_bytes
    groups: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    groups = defaultdict(lambda: ([], []))
    for piece, source in runs:
        target = _part(buffer, piece, source.numel()).view(source.shape)
        targets, sources = groups[target.dtype, source.dtype, source.is_contiguous()]
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def _follows(first: Piece, before: torch.Tensor, piece: Piece, rows: torch.Tensor) -> bool:
    """Whether ``rows`` directly follows ``before`` in the same storage."""
    return (
        before.is_contiguous()
        and rows.is_contiguous()
        and rows.dtype == before.dtype
        and first.meta.dtype == piece.meta.dtype
        and rows.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and rows.storage_offset() == before.storage_offset() + before.numel()
    )


def _rows(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.narrow(0, piece.first_row, piece.num_rows) if tensor.dim() else tensor


def _part(buffer: torch.Tensor, piece: Piece, num_elements: int) -> torch.Tensor:
    size = num_elements * piece.meta.dtype.itemsize
    return buffer[piece.byte_offset : piece.byte_offset + size].view(piece.meta.dtype)


Packer = ViewPacker | StreamingPacker


# ---- Whole tensors out of buckets, for loaders that take nothing less


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
            received = _part(buffers[index % len(buffers)], piece, piece.num_elements)
            if piece.first_row == 0:
                whole = received.new_empty(piece.meta.num_elements)
            whole[piece.first_element : piece.first_element + piece.num_elements] = received
            if piece.first_element + piece.num_elements == piece.meta.num_elements:
                yield piece.name, whole.view(piece.meta.shape)

"""Filling buckets from a source: cast and copied on the trainer's device, not through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrl_vllm_sync.weights.buckets import Bucket, BucketLayout, Piece
    from torchrl_vllm_sync.weights.source import WeightSource

__all__ = ["Packer", "StreamingPacker", "ViewPacker", "check_device"]

Copies = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class ViewPacker:
    """Packs tensors that stay where they are; what is copied where is worked out once.

    Neighbours that are adjacent in memory as well as in the bucket become one copy.

    Args:
        layout: The buckets.
        buffers: The buffers; bucket ``i`` is packed into ``buffers[i % len(buffers)]``.
        views: Name and tensor, in the order of the layout's metadata.

    Attributes:
        num_copies: Copies of one push, after merging.
    """

    def __init__(
        self,
        layout: BucketLayout,
        buffers: Sequence[torch.Tensor],
        views: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        tensors = [tensor for _, tensor in views]
        self._copies = [
            _grouped(bucket, buffers[index % len(buffers)], tensors)
            for index, bucket in enumerate(layout.buckets)
        ]
        self.num_copies = sum(len(dst) for groups in self._copies for dst, _ in groups)

    @torch.no_grad()
    def __call__(self, index: int, buffer: torch.Tensor) -> None:
        """Fills ``buffer``, which is the one that bucket ``index`` belongs in."""
        del buffer  # the targets are views of it
        for targets, sources in self._copies[index]:
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


class StreamingPacker:
    """Packs tensors as a source yields them: merged adapters, gathered shards.

    Args:
        layout: The buckets.
        source: Yields tensors in the order of the layout's metadata.
        device: Where its tensors must be.
    """

    def __init__(self, layout: BucketLayout, source: WeightSource, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._items = self._checked(iter(source))
        self._index, self._tensor = -1, torch.empty(0)

    def _checked(
        self, items: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._layout.metadata:
            name, tensor = next(items, ("nothing", torch.empty(0)))
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise WeightMismatchError(
                    f"the source announced {meta.name} {list(meta.shape)} and yielded {name} "
                    f"{list(tensor.shape)}"
                )
            check_device(name, tensor, self._device)
            yield name, tensor
        for name, _ in items:
            raise WeightMismatchError(f"the source yielded {name}, which it had not announced")

    @torch.no_grad()
    def __call__(self, index: int, buffer: torch.Tensor) -> None:
        """Fills ``buffer`` with bucket ``index``; buckets are asked for in order.

        Raises:
            WeightMismatchError: The source yields something else than it announced.
        """
        for piece in self._layout.buckets[index].pieces:
            while self._index < piece.index:
                self._tensor = next(self._items)[1]
                self._index += 1
            _target(piece, buffer).copy_(_rows(piece, self._tensor), non_blocking=True)

    def finish(self) -> None:
        """Asks the source for its end, and lets go of the last tensor.

        Raises:
            WeightMismatchError: It yields more than it announced.
        """
        for _ in self._items:
            pass
        self._tensor = torch.empty(0)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuses a tensor from which a push would have to go through the host.

    Raises:
        WeightMismatchError: ``tensor`` is not on ``device``, which is a GPU.
    """
    if device.type == "cuda" and tensor.device != device:
        raise WeightMismatchError(
            f"{name} is on {tensor.device}, but this transport sends from {device}: move the "
            "weights there, or use the memmap transport"
        )


def _grouped(bucket: Bucket, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Copies:
    """Copies of one bucket, those that may run as one kernel together."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list, list]] = {}
    for piece, rows in _merged(bucket.pieces, tensors):
        if rows.is_contiguous():
            source = rows.reshape(-1)
            target = _flat_target(piece, buffer, source.numel())
        else:
            source, target = rows, _target(piece, buffer)
        key = target.dtype, source.dtype, source.dim() == 1
        targets, sources = groups.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def _merged(
    pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yields the first piece of each run, and the run's values: flat if it is more than one."""
    run: tuple[Piece, torch.Tensor] | None = None
    end = 0
    for piece in pieces:
        rows = _rows(piece, tensors[piece.index])
        if run is not None and piece.byte_offset == end and _follows(run[1], rows, run[0], piece):
            first, before = run
            run = first, before.as_strided((before.numel() + rows.numel(),), (1,))
        else:
            if run is not None:
                yield run
            run = piece, rows.reshape(-1) if rows.is_contiguous() else rows
        end = piece.byte_offset + piece.num_bytes
    if run is not None:
        yield run


def _follows(before: torch.Tensor, rows: torch.Tensor, first: Piece, piece: Piece) -> bool:
    """Whether ``rows`` lies right behind ``before`` in the same storage."""
    return (
        before.dim() == 1
        and before.is_contiguous()
        and rows.is_contiguous()
        and rows.dtype == before.dtype
        and first.meta.dtype == piece.meta.dtype
        and rows.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and rows.storage_offset() == before.storage_offset() + before.numel()
    )


def _rows(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.narrow(0, piece.first_row, piece.num_rows) if tensor.dim() else tensor


def _target(piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
    shape = (piece.num_rows, *piece.meta.shape[1:]) if piece.meta.shape else ()
    return _flat_target(piece, buffer, piece.num_elements).view(shape)


def _flat_target(piece: Piece, buffer: torch.Tensor, num_elements: int) -> torch.Tensor:
    size = num_elements * piece.meta.dtype.itemsize
    return buffer[piece.byte_offset : piece.byte_offset + size].view(piece.meta.dtype)


Packer = ViewPacker | StreamingPacker

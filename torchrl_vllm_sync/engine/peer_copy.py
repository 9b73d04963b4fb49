"""A model's parameters and buffers as they are, copied from a worker to one of the same rank.

Two replicas with the same engine arguments hold the same tensors under the same names in the same
layouts, so nothing is loaded or processed: bytes go from tensor to tensor, in chunks of fixed size.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.engine.checksums import tensor_checksum
from torchrl_vllm_sync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHUNK_BYTES", "PeerCopy", "remove_file"]

CHUNK_BYTES = 64 * 2**20


class PeerCopy:
    """One worker's end: all its tensors as one row of bytes, cut into chunks.

    Args:
        model: The worker's model.
        chunk_bytes: Size of all chunks but the last.

    Raises:
        TransferError: A tensor has gaps, so that its bytes are not all its own.
    """

    def __init__(self, model: torch.nn.Module, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rows: list[tuple[str, torch.Tensor]] = []
        self.layout: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel():
                self._rows.append((name, _row_of(name, tensor.detach())))
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            self.layout.append((name, str(tensor.dtype), shape, stride))
        self.num_bytes = sum(row.numel() for _, row in self._rows)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return -(-self.num_bytes // self._chunk_bytes)

    def give(self, index: int) -> bytes:
        """Returns the bytes of one chunk."""
        pieces = [piece.cpu().numpy().tobytes() for piece in self._pieces(index)]
        return b"".join(pieces)

    def give_file(self, index: int, path: str) -> None:
        """Puts one chunk into a file that only this user can read; replaces what was there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            for piece in self._pieces(index):
                file.write(piece.cpu().numpy().data)

    def take(self, index: int, source: bytes | str) -> None:
        """Overwrites one chunk.

        Args:
            index: Number of the chunk.
            source: Its bytes, or the path of a file that holds them.

        Raises:
            TransferError: It has another size. Nothing was written.
        """
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        pieces = list(self._pieces(index))
        if len(data) != sum(piece.numel() for piece in pieces):
            raise TransferError(f"chunk {index} has {len(data)} bytes, which do not fit")
        offset = 0
        for piece in pieces:
            part = torch.frombuffer(
                bytearray(memoryview(data)[offset : offset + piece.numel()]), dtype=torch.uint8
            )
            piece.copy_(part)
            offset += piece.numel()

    def checksums(self) -> dict[str, int]:
        """Returns a checksum of each tensor, by name."""
        return {name: tensor_checksum(row) for name, row in self._rows}

    def _pieces(self, index: int) -> Iterator[torch.Tensor]:
        """The parts of tensors that make up a chunk, as they lie in the model."""
        begin, offset = index * self._chunk_bytes, 0
        end = begin + self._chunk_bytes
        for _, row in self._rows:
            low, high = max(begin - offset, 0), min(end - offset, row.numel())
            if low < high:
                yield row[low:high]
            offset += row.numel()


def remove_file(path: str) -> None:
    """Removes what :meth:`PeerCopy.give_file` made, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def _row_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order in which they lie, whatever the order of its dimensions.

    Raises:
        TransferError: They do not lie side by side.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        raise TransferError(f"{name} has gaps: strides {tensor.stride()}, shape {tensor.shape}")
    return dense.reshape(-1).view(torch.uint8)

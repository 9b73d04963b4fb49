"""How one tensor becomes bytes in a data file: cast, copied and hashed in cache-sized pieces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from torchrl_vllm_sync.weights.data_file import DataFile
    from torchrl_vllm_sync.weights.metadata import ParamMeta

# Source and destination of one piece stay in a core's cache until the piece is hashed, and the cost
# of a Python call per piece stays below 1 %.
CHUNK_BYTES = 2 << 20


@dataclass
class FillTimes:
    """Seconds spent copying (and casting) and hashing."""

    copy_s: float = 0.0
    hash_s: float = 0.0


class TensorWriter:
    """Copies tensors into a ``DataFile`` piece by piece, and hashes each while it is in cache.

    Only one piece is ever held besides the tensor itself. Tensors of another dtype are cast piece
    by piece; those of a GPU pass through two page-locked pieces, one filling while the other is
    stored.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._staging: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, tensor: torch.Tensor, meta: ParamMeta, file: DataFile, offset: int, times: FillTimes
    ) -> int | None:
        """Stores ``tensor`` as ``meta`` says; returns the xxh3-64 of the stored bytes, if wanted.

        Raises:
            OSError: The file system refuses.
        """
        state = xxhash.xxh3_64() if self._checksums else None
        started = time.perf_counter()
        for piece in self._pieces(tensor.detach(), meta.dtype):
            stored = file.write(piece, offset)
            offset += len(piece)
            copied = time.perf_counter()
            times.copy_s += copied - started
            started = copied
            if state is not None:
                state.update(cast("bytes", stored))
                started = time.perf_counter()
                times.hash_s += started - copied
        return None if state is None else state.intdigest()

    def _pieces(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[NDArray[np.uint8]]:
        # A column of a matrix is flat already, and a view of it, but its bytes lie apart.
        flat = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
        if flat.device.type != "cpu":
            yield from self._device_pieces(flat, dtype)
        elif flat.dtype == dtype:
            content = flat.view(torch.uint8).numpy()
            for start in range(0, len(content), CHUNK_BYTES):
                yield content[start : start + CHUNK_BYTES]
        else:
            staging = self._staging_for("cpu")[0].view(dtype)
            for part in flat.split(staging.numel()):
                converted = staging[: part.numel()]
                converted.copy_(part)
                yield converted.view(torch.uint8).numpy()

    def _device_pieces(self, flat: torch.Tensor, dtype: torch.dtype) -> Iterator[NDArray[np.uint8]]:
        buffers = [piece.view(dtype) for piece in self._staging_for(flat.device.type)]
        accelerator = torch.get_device_module(flat.device)
        waiting: tuple[torch.Tensor, Any] | None = None
        for index, part in enumerate(flat.split(buffers[0].numel())):
            target = buffers[index % 2][: part.numel()]
            target.copy_(part.to(dtype), non_blocking=True)
            arrived = accelerator.Event()
            arrived.record(accelerator.current_stream(flat.device))
            if waiting is not None:
                waiting[1].synchronize()
                yield waiting[0].view(torch.uint8).numpy()
            waiting = (target, arrived)
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0].view(torch.uint8).numpy()

    def _staging_for(self, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        if device_type not in self._staging:
            pinned = device_type != "cpu"
            self._staging[device_type] = (
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned),
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned),
            )
        return self._staging[device_type]

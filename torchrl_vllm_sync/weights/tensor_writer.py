"""How tensors become bytes in a data file: cast, copied and hashed by several threads."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.data_file import num_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchrl_vllm_sync.weights.data_file import DataFile
    from torchrl_vllm_sync.weights.metadata import ParamMeta

# Source and destination of one piece stay in a core's cache until the piece is hashed, and the cost
# of a Python call per piece stays small.
CHUNK_BYTES = 2 << 20
BUFFERS_PER_LANE = 8
# Without a piece that was stored: a disk may be slow, but not that slow.
STORE_TIMEOUT_S = 600.0


@dataclass
class _Lane:
    """One thread, which stores the pieces of each of its tensors in order.

    Attributes:
        thread: Runs what it is given, one after the other.
        last: What it was given last.
        num_bytes: Bytes that it was given in all.
        num_stored: Pieces that it has stored.
        copy_s: Seconds spent copying and casting.
        hash_s: Seconds spent hashing.
        cast: Where it casts a piece; made when first needed.
    """

    thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    last: Future[None] | None = None
    num_bytes: int = 0
    num_stored: int = 0
    copy_s: float = 0.0
    hash_s: float = 0.0
    cast: torch.Tensor | None = None


class TensorWriter:
    """Copies tensors into data files piece by piece, and hashes each piece while it is in cache.

    Each tensor is one thread's, so that several are under way. Tensors of another dtype are cast
    piece by piece; those of a GPU pass through page-locked buffers, which are kept: they are copied
    out by the thread that calls, in the order of its stream, and stored by the others.

    Args:
        checksums: Whether to hash.
        num_lanes: Threads; ``None`` takes the number of cores, eight at most.
    """

    def __init__(self, *, checksums: bool, num_lanes: int | None = None) -> None:
        self._checksums = checksums
        self._num_lanes = num_threads() if num_lanes is None else num_lanes
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def filling(self, file: DataFile) -> Iterator[Filling]:
        """Fills one data file; when ``with`` ends, no thread is at it any more.

        Args:
            file: Open, and not used by others until then.
        """
        filling = Filling(file, self._num_lanes, self._all_buffers, checksums=self._checksums)
        try:
            yield filling
        finally:
            filling.close()

    def _all_buffers(self) -> list[torch.Tensor]:
        if not self._buffers:
            is_pinned = torch.accelerator.is_available()
            self._buffers = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
                for _ in range(BUFFERS_PER_LANE * self._num_lanes)
            ]
        return self._buffers


class Filling:
    """One data file on its way: :meth:`add` every tensor, then :meth:`finish`.

    Args:
        file: Open.
        num_lanes: Threads.
        buffers: Gives the buffers for tensors of a device, of ``CHUNK_BYTES`` each.
        checksums: Whether to hash.
    """

    def __init__(
        self,
        file: DataFile,
        num_lanes: int,
        buffers: Callable[[], list[torch.Tensor]],
        *,
        checksums: bool,
    ) -> None:
        self._file, self._buffers, self._checksums = file, buffers, checksums
        self._lanes = [_Lane() for _ in range(num_lanes)]
        self._here = _Lane()  # for what cannot wait, in the caller's own thread
        self._free: queue.SimpleQueue[torch.Tensor] | None = None
        self._hashes: list[Any] = []
        self._failure: BaseException | None = None

    def add(self, tensor: torch.Tensor, meta: ParamMeta, offset: int, *, stays: bool) -> None:
        """Stores ``tensor`` as ``meta`` says, now or soon.

        Args:
            tensor: Of the shape of ``meta``, on any device.
            meta: Has the dtype to store.
            offset: Where in the file.
            stays: Whether it will hold the same values until :meth:`finish`. If not, it may be
                changed as soon as this returns.

        Raises:
            OSError: The file system refuses, this tensor or one before.
            SnapshotError: Nothing was stored for ``STORE_TIMEOUT_S``.
        """
        self._raise_failure()
        state = xxhash.xxh3_64() if self._checksums else None
        self._hashes.append(state)
        # A column of a matrix is flat already, and a view of it, but its bytes lie apart.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        parts = flat.split(CHUNK_BYTES // meta.dtype.itemsize)
        if is_on_host(flat) and not stays:
            for part in parts:
                self._store(self._here, part, meta.dtype, offset, state)
                offset += part.numel() * meta.dtype.itemsize
            self._raise_failure()
            return
        lane = min(self._lanes, key=lambda one: one.num_bytes)
        lane.num_bytes += meta.num_bytes
        pieces = self._on_host(parts, meta.dtype)
        for piece, buffer in pieces:
            lane.last = lane.thread.submit(
                self._store, lane, piece, meta.dtype, offset, state, buffer
            )
            offset += piece.numel() * meta.dtype.itemsize

    def finish(self) -> tuple[list[int | None], dict[str, float]]:
        """Waits until everything is stored.

        Returns:
            The xxh3-64 of the stored bytes of each tensor, ``None`` if none are wanted; and the
            seconds of ``copy`` and ``hash``, of all threads together.

        Raises:
            OSError: The file system refused.
            SnapshotError: Nothing was stored for ``STORE_TIMEOUT_S``.
        """
        for lane in self._lanes:
            self._wait_for(lane)
        self._raise_failure()
        lanes = [*self._lanes, self._here]
        seconds = {
            "copy": sum(lane.copy_s for lane in lanes),
            "hash": sum(lane.hash_s for lane in lanes),
        }
        return [None if one is None else one.intdigest() for one in self._hashes], seconds

    def close(self) -> None:
        """Waits for the threads, which drop what they have not begun."""
        for lane in self._lanes:
            lane.thread.shutdown(cancel_futures=True)

    def _store(
        self,
        lane: _Lane,
        part: torch.Tensor,
        dtype: torch.dtype,
        offset: int,
        state: Any,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Stores one piece and gives its buffer, if it is in one, back."""
        try:
            if self._failure is not None:
                return
            begin = time.perf_counter()
            if part.dtype != dtype:
                if lane.cast is None:
                    lane.cast = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
                part = lane.cast.view(dtype)[: part.numel()].copy_(part)
            stored = self._file.write(part.view(torch.uint8).numpy(), offset)
            copied = time.perf_counter()
            lane.copy_s += copied - begin
            if state is not None:
                state.update(cast("bytes", stored))
                lane.hash_s += time.perf_counter() - copied
            lane.num_stored += 1
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._failure = self._failure or error
        finally:
            if buffer is not None and self._free is not None:
                self._free.put(buffer)

    def _on_host(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yields the parts of a tensor, each with the buffer it is in, if it was not on the host.

        One part is copied out of a device while the one before is at work.
        """
        if is_on_host(parts[0]):
            yield from ((part, None) for part in parts)
            return
        device = parts[0].device
        accelerator = torch.get_device_module(device)
        waiting: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        for part in parts:
            buffer = self._take()
            target = buffer.view(dtype)[: part.numel()]
            target.copy_(part.to(dtype), non_blocking=True)
            arrived = accelerator.Event()
            arrived.record(accelerator.current_stream(device))
            if waiting is not None:
                waiting[2].synchronize()
                yield waiting[:2]
            waiting = (target, buffer, arrived)
        if waiting is not None:
            waiting[2].synchronize()
            yield waiting[:2]

    def _take(self) -> torch.Tensor:
        """Waits for a free buffer.

        Raises:
            SnapshotError: There was none for ``STORE_TIMEOUT_S``.
        """
        self._raise_failure()
        if self._free is None:
            self._free = queue.SimpleQueue()
            for buffer in self._buffers():
                self._free.put(buffer)
        try:
            return self._free.get(timeout=STORE_TIMEOUT_S)
        except queue.Empty:
            raise self._too_slow() from None

    def _wait_for(self, lane: _Lane) -> None:
        """Returns when a lane has done all that it was given, as long as that goes on.

        Raises:
            SnapshotError: It stored nothing for ``STORE_TIMEOUT_S``.
        """
        while lane.last is not None:
            num_stored = lane.num_stored
            with suppress(TimeoutError):
                lane.last.result(STORE_TIMEOUT_S)
                return
            if lane.num_stored == num_stored:
                raise self._too_slow()

    def _too_slow(self) -> SnapshotError:
        return SnapshotError(
            f"{self._file.path}: nothing was stored within {STORE_TIMEOUT_S:.0f} s"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether threads can read the tensor as it is."""
    return tensor.device.type == "cpu"

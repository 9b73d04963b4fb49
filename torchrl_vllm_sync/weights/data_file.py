"""The data file of one version: a consolidated TensorDict, written in place chunk by chunk.

``TensorDict.from_consolidated`` reads it. Keys are flat: each is a parameter's name, dots included,
so ``flatten_keys(".")`` leaves them as they are and no name can collide with another's prefix.
Tensors begin at multiples of 4 KiB in the order of the metadata; the description that TensorDict
reads (JSON and its length) follows the last one.

TensorDict's other format, a folder with a file for each tensor, was slower in all four cases
(``benchmarks/results/memmap_cpu2_2026-11-21.json``, 300 tensors, 1,022 MiB, medians on two busy
cores). Opening and copying out: folder 2.36 GB/s, consolidated 4.94 GB/s on tmpfs; 2.82 and
9.12 GB/s on ext4. Rewriting: 8.64 and 9.73 GB/s on tmpfs; 0.65 and 2.34 GB/s on ext4, ``fsync``
included.

Dtypes that TensorDict 0.14 has no name for (float8, sub-byte) are stored as integers of the same
size; ``open_tensordict`` views them back, TensorDict's own loader shows the integers.
"""

from __future__ import annotations

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from torchrl_vllm_sync.errors import SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta, dtype_name, metadata_digest
from torchrl_vllm_sync.weights.private_files import TEMPORARY_PREFIX, new_file, open_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

DATA_FILE = "weights.td"
ALIGNMENT_BYTES = 4096
FAULT_BYTES = 64 << 20  # of a mapping are one thread's to fault in, then the next
MAX_THREADS = 8

_QUANTIZED_DTYPES = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)
# What tensordict 0.14 can name in a consolidated file; a unit test compares with its table.
_TENSORDICT_DTYPES = frozenset(
    {
        torch.bfloat16,
        torch.bool,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
_NESTED = "<NJT"
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class DataLayout:
    """Where every parameter lies in a data file.

    Attributes:
        metadata: Parameters in order.
        digest: ``metadata_digest`` of them.
        offsets: First byte of each.
        trailer: TensorDict's description, as it stands at the end of the file.
        num_bytes: Length of the file.
        payload_bytes: Bytes of the parameters alone.
    """

    metadata: tuple[ParamMeta, ...]
    digest: str
    offsets: tuple[int, ...]
    trailer: bytes
    num_bytes: int
    payload_bytes: int

    @classmethod
    def of(cls, metadata: Sequence[ParamMeta]) -> DataLayout:
        """Lays ``metadata`` out.

        Raises:
            WeightMismatchError: A name is empty, twice there or reserved, or a dtype needs a
                quantizer.
        """
        leaves: dict[str, list[Any]] = {}
        offsets: list[int] = []
        end = 0
        for meta in metadata:
            if not meta.name or meta.name in leaves:
                raise WeightMismatchError(
                    f"parameter names must be unique, got {meta.name!r} twice"
                )
            if meta.name.startswith(_NESTED):
                raise WeightMismatchError(
                    f"{meta.name}: TensorDict takes names that begin {_NESTED} for nested tensors"
                )
            if meta.dtype in _QUANTIZED_DTYPES:
                raise WeightMismatchError(
                    f"{meta.name}: dtype {dtype_name(meta.dtype)} has a quantizer, which a "
                    "snapshot does not hold; send its integers and scales as parameters"
                )
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + meta.num_bytes
            offsets.append(start)
            leaves[meta.name] = [str(_stored_dtype(meta.dtype)), list(meta.shape), start, end, 0]
        description = json.dumps(
            {
                "cls": "TensorDict",
                "non_tensors": {},
                "leaves": leaves,
                "cls_metadata": {
                    "device": None,
                    "names": [],
                    "batch_size": [],
                    "is_locked": False,
                },
            },
            separators=(",", ":"),
        ).encode()
        trailer = description + len(description).to_bytes(8, "little")
        return cls(
            tuple(metadata),
            metadata_digest(metadata),
            tuple(offsets),
            trailer,
            end + len(trailer),
            sum(meta.num_bytes for meta in metadata),
        )

    @property
    def trailer_checksum(self) -> int:
        """xxh3-64 of the trailer."""
        return xxhash.xxh3_64_intdigest(self.trailer)


class DataFile:
    """One data file open for writing.

    In memory a reused file is mapped, and the mapping stays for the next version: one copy, no page
    faults. All its blocks are allocated first, since a full tmpfs answers a store with SIGBUS, and
    its pages faulted in by several threads: one took 28 of a push's 60 s for 61 GB
    (``benchmarks/results/fsdp_expert_parallel_shared_h200x2_2026-11-22.json``, ``acquire``).
    Elsewhere ``pwrite`` is faster: flushing a mapped page makes the next store to it fault again.
    """

    def __init__(self, path: Path, layout: DataLayout, handle: int, *, mapped: bool) -> None:
        self.path = path
        self.layout = layout
        self._handle = handle
        self._pages: NDArray[np.uint8] | None = None
        if mapped:
            pages = mmap.mmap(handle, layout.num_bytes, mmap.MAP_SHARED)
            self._pages = np.frombuffer(pages, dtype=np.uint8)
            _fault_in(self._pages[: layout.num_bytes - len(layout.trailer)])

    @classmethod
    def create(cls, path: Path, layout: DataLayout, *, allocate: bool, mapped: bool) -> DataFile:
        """Makes a new file under a temporary name, complete but for the parameters, and renames it.

        A file that had the name keeps its pages for whoever has it mapped.

        Args:
            path: Name of the file.
            layout: What it is to hold.
            allocate: Whether to take all its blocks now.
            mapped: Whether to write through a mapping; needs ``allocate``.

        Raises:
            OSError: The file system refuses, for instance because it is full.
            SnapshotError: Others can write into the folder.
        """
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        path.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        handle = new_file(temporary)
        try:
            if allocate:
                os.posix_fallocate(handle, 0, layout.num_bytes)
            _pwrite(handle, layout.trailer, layout.num_bytes - len(layout.trailer))
            os.rename(temporary, path)
            return cls(path, layout, handle, mapped=mapped)
        except BaseException:
            os.close(handle)
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def reopen(cls, path: Path, layout: DataLayout, *, mapped: bool) -> DataFile | None:
        """Opens a file that an earlier writer left; None if it is not exactly of this layout.

        Its parameters are as good as gone: a mapped file's pages are written to.

        Raises:
            OSError: The file system refuses.
            SnapshotError: Others can have written the file.
        """
        try:
            handle = open_file(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        length = len(layout.trailer)
        same = (
            os.fstat(handle).st_size == layout.num_bytes
            and os.pread(handle, length, layout.num_bytes - length) == layout.trailer
        )
        if not same:
            os.close(handle)
            return None
        try:
            # Blocks may be missing where the file came from a copy that kept holes.
            os.posix_fallocate(handle, 0, layout.num_bytes)
            return cls(path, layout, handle, mapped=mapped)
        except BaseException:
            os.close(handle)
            raise

    def write(self, piece: NDArray[np.uint8], offset: int) -> NDArray[np.uint8]:
        """Stores ``piece`` at ``offset``; returns the bytes to hash, which are still in cache."""
        if self._pages is None:
            _pwrite(self._handle, piece, offset)
            return piece
        stored = self._pages[offset : offset + len(piece)]
        np.copyto(stored, piece)
        return stored

    def flush(self) -> None:
        """Makes everything written durable, stores through the mapping included."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Gives mapping and handle back."""
        self._pages = None
        os.close(self._handle)


def open_tensordict(path: Path, metadata: Sequence[ParamMeta], trailer_checksum: int) -> TensorDict:
    """Opens and maps a data file, copying nothing; see :func:`map_tensordict`.

    Raises:
        OSError: The file is not there or cannot be read.
        SnapshotError: It is not the published one, or others can have written it.
    """
    handle = open_file(path)
    try:
        return map_tensordict(handle, path, metadata, trailer_checksum)
    finally:
        os.close(handle)


def map_tensordict(
    handle: int, path: Path, metadata: Sequence[ParamMeta], trailer_checksum: int
) -> TensorDict:
    """Maps an open data file, copying nothing.

    The mapping is private: a store into one of its tensors stays in this process. TensorDict gets
    to read no description but the one that this module writes for ``metadata``.

    Raises:
        OSError: The file cannot be read.
        SnapshotError: Its description or its length is not the published one.
    """
    size = os.fstat(handle).st_size
    length = int.from_bytes(os.pread(handle, 8, max(size - 8, 0)), "little")
    if length + 8 > size:
        raise SnapshotError(f"{path}: corrupted: no description at its end")
    layout = DataLayout.of(metadata)
    trailer = os.pread(handle, len(layout.trailer), max(size - len(layout.trailer), 0))
    if trailer != layout.trailer or xxhash.xxh3_64_intdigest(trailer) != trailer_checksum:
        raise SnapshotError(f"{path}: corrupted: its description is not the published one")
    if size != layout.num_bytes:
        raise SnapshotError(f"{path}: truncated or replaced: {size} of {layout.num_bytes} bytes")
    # By its handle: by its name another file might be opened than the one that was checked.
    stored = TensorDict.from_consolidated(f"/proc/self/fd/{handle}")
    for meta in metadata:
        if _stored_dtype(meta.dtype) != meta.dtype:
            stored.set(meta.name, stored.get(meta.name).view(meta.dtype))
    return stored.lock_()


def num_threads() -> int:
    """How many threads copy or hash at once: one a core, eight at most."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def checksum(tensor: torch.Tensor) -> int:
    """xxh3-64 of a tensor's bytes, as ``TensorWriter.write`` returns it."""
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(cast("bytes", content))


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _TENSORDICT_DTYPES else _CARRIERS[dtype.itemsize]


def _fault_in(pages: NDArray[np.uint8]) -> None:
    """Writes a byte to every page, from several threads: the kernel zeroes pages one by one."""

    def touch(start: int) -> None:
        pages[start : start + FAULT_BYTES : mmap.PAGESIZE] = 0

    if len(pages) <= FAULT_BYTES:
        touch(0)
        return
    with ThreadPoolExecutor(num_threads()) as threads:
        list(threads.map(touch, range(0, len(pages), FAULT_BYTES)))


def _pwrite(handle: int, content: bytes | NDArray[np.uint8], offset: int) -> None:
    """Writes all of ``content``; one call may write less, for instance near a file-size limit."""
    view = memoryview(cast("bytes", content))
    while view:
        written = os.pwrite(handle, view, offset)
        view = view[written:]
        offset += written

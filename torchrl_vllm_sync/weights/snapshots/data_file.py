"""One version: a consolidated TensorDict, written in place piece by piece; its manifest; readers.

A data file begins with a tag that names the version. Then come the tensors, at multiples of 4 KiB
in the order of the metadata, and the description that ``TensorDict.from_consolidated`` reads (JSON
and its length). Keys are flat: parameter names, dots included. TensorDict's other format, a file
for each tensor, was up to 3.6 times slower (``benchmarks/results/memmap_cpu2_2026-11-21.json``).
Dtypes that TensorDict 0.14 has no name for (float8, sub-byte) are stored as integers of the same
size; ``open_tensordict`` views them back.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import queue
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from tensordict import TensorDict

from torchrl_vllm_sync.checks import Deadline, shown
from torchrl_vllm_sync.errors import SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.module import ParamMeta, dtype_name, from_json, to_json
from torchrl_vllm_sync.weights.snapshots import files

DATA_FILE = "weights.td"
ALIGNMENT_BYTES = 4096
TAG_BYTES = 16
# Folders of versions lie directly in the directory: slot-<epoch>-<number>, v<version>-<epoch>.
FOLDER = re.compile(r"(?:slot-|v[0-9]+-)(?P<epoch>[0-9]+)(?:-[0-9]+)?")
_MAX_MANIFEST_BYTES = 64 << 20  # about 400,000 parameters
FAULT_BYTES = 64 << 20  # of a mapping that one thread faults in at a time
MAX_THREADS = 8

_QUANTIZED_DTYPES = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# What tensordict 0.14 can name in a consolidated file; a unit test compares with its table.
_TENSORDICT_DTYPES = frozenset(
    getattr(torch, name)
    for name in (  # noqa: SIM905  a line for each otherwise
        "bfloat16 bool complex32 complex64 complex128 float16 float32 float64 "
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    ).split()
)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DataLayout:
    metadata: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]  # first byte of each parameter
    trailer: bytes  # TensorDict's description, as it stands at the end of the file
    num_bytes: int  # length of the file

    @classmethod
    def of(cls, metadata: Sequence[ParamMeta], known: DataLayout | None = None) -> DataLayout:
        """Lays the parameters out one after the other; ``known`` is returned if it is the same."""
        metadata = tuple(metadata)
        if known is not None and known.metadata == metadata:
            return known
        leaves: dict[str, list[Any]] = {}
        offsets: list[int] = []
        end = TAG_BYTES
        for meta in metadata:
            if not meta.name or meta.name in leaves:
                raise WeightMismatchError(f"names must be unique and not empty, got {meta.name!r}")
            if meta.name.startswith("<NJT"):
                raise WeightMismatchError(f"{meta.name}: <NJT is TensorDict's, for nested tensors")
            if meta.dtype in _QUANTIZED_DTYPES:
                raise WeightMismatchError(
                    f"{meta.name}: the quantizer of {dtype_name(meta.dtype)} is not stored; send "
                    "integers and scales as parameters"
                )
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + meta.num_bytes
            offsets.append(start)
            leaves[meta.name] = [str(_stored_dtype(meta.dtype)), list(meta.shape), start, end, 0]
        about = {"device": None, "names": [], "batch_size": [], "is_locked": False}
        record = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": about}
        description = json.dumps(record, separators=(",", ":")).encode()
        trailer = description + len(description).to_bytes(8, "little")
        return cls(metadata, tuple(offsets), trailer, end + len(trailer))


@dataclass(frozen=True, slots=True)
class Manifest:
    run_id: str  # run that wrote it; versions are comparable only within one run
    epoch: int  # writer's epoch
    version: int  # policy version
    layout: files.LayoutName  # how the directory stores versions
    path: str  # folder of the data, relative to the snapshot directory
    data: DataLayout  # every parameter in order, and where it lies; follows from the metadata
    checksums: tuple[int, ...]  # xxh3-64 of each parameter's bytes

    @property
    def metadata(self) -> tuple[ParamMeta, ...]:
        return self.data.metadata

    @property
    def tag(self) -> bytes:
        """What the data file must begin with."""
        return xxhash.xxh3_128_digest(f"{self.run_id} {self.epoch} {self.version}".encode())

    def to_record(self) -> dict[str, Any]:
        names = "run_id", "epoch", "version", "layout", "path", "checksums"
        return {one: getattr(self, one) for one in names} | {"metadata": to_json(self.metadata)}

    @classmethod
    def from_record(cls, record: dict[str, Any], path: Path, known: DataLayout | None) -> Manifest:
        run_id, epoch, version = files.fields_of(record, path, run_id=str, epoch=int, version=int)
        layout, folder = files.fields_of(record, path, layout=str, path=str)
        items, checksums = files.fields_of(record, path, metadata=list, checksums=list)
        if layout not in files.LAYOUTS or not FOLDER.fullmatch(folder):
            raise SnapshotError(f"{path}: corrupted: {shown(folder)} is no folder of a version")
        try:
            data = DataLayout.of(from_json(items), known)
        except (ValueError, WeightMismatchError) as error:
            raise SnapshotError(f"{path}: corrupted: {error}") from error
        if len(checksums) != len(items):
            raise SnapshotError(f"{path}: corrupted: parameters and checksums differ in number")
        return cls(run_id, epoch, version, layout, folder, data, tuple(checksums))


class ManifestFile:
    """Reads and replaces ``CURRENT``; parses it only when its content has changed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / files.CURRENT
        self._content: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        with files.storage_errors(f"{self.path.parent}: reading {files.CURRENT}"):
            try:
                content = files.read_file(self.path, max_bytes=_MAX_MANIFEST_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if content != self._content:
            record = files.parse_json(content, self.path)
            known = self._manifest and self._manifest.data
            self._manifest, self._content = Manifest.from_record(record, self.path, known), content
        return self._manifest

    def write(self, manifest: Manifest, *, fsync: bool) -> None:
        files.write_json(self.path, manifest.to_record(), fsync=fsync)


class DataFile:
    """One data file open for writing."""

    # In memory a reused file stays mapped for the next version: one copy, no page faults. Its
    # blocks are allocated first, since a full tmpfs answers a store with SIGBUS, and its pages
    # faulted in by several threads. Elsewhere ``pwrite`` is faster: flushing a mapped page makes
    # the next store to it fault again.

    def __init__(self, path: Path, layout: DataLayout, *, allocate: bool, mapped: bool) -> None:
        self.path, self.layout = path, layout
        self._pages: NDArray[np.uint8] | None = None
        length = layout.num_bytes - len(layout.trailer)
        self._handle = _open_alike(path, layout)
        try:
            _pwrite(self._handle, bytes(TAG_BYTES), 0)  # before any other byte changes
            if allocate:  # blocks may be missing too where a file came from a copy that kept holes
                os.posix_fallocate(self._handle, 0, layout.num_bytes)
            _pwrite(self._handle, layout.trailer, length)
            if mapped:
                pages = mmap.mmap(self._handle, layout.num_bytes, mmap.MAP_SHARED)
                self._pages = np.frombuffer(pages, dtype=np.uint8)
                _fault_in(self._pages[:length])
        except BaseException:
            os.close(self._handle)
            raise

    def write(self, piece: NDArray[np.uint8], offset: int) -> NDArray[np.uint8]:
        """Stores ``piece`` at ``offset``; returns the bytes to hash, which are still in cache."""
        if self._pages is None:
            _pwrite(self._handle, piece, offset)
            return piece
        stored = self._pages[offset : offset + len(piece)]
        np.copyto(stored, piece)
        return stored

    def tag(self, tag: bytes = bytes(TAG_BYTES)) -> None:
        """Marks which version the file holds: none while it is written, so readers see changes."""
        _pwrite(self._handle, tag, 0)
        # Stores through a mapping may leave it as it is, and the file system's clock is coarse.
        now = time.time_ns()
        os.utime(self._handle, ns=(now, now))

    def flush(self) -> None:
        os.fsync(self._handle)

    def close(self) -> None:
        self._pages = None
        os.close(self._handle)


def open_tensordict(path: Path, metadata: Sequence[ParamMeta]) -> TensorDict:
    with files.opened(path) as handle:
        return map_tensordict(handle, path, DataLayout.of(metadata))


def map_tensordict(handle: int, path: Path, layout: DataLayout) -> TensorDict:
    """Maps an open data file privately: a store into one of its tensors stays in this process."""
    size, length = os.fstat(handle).st_size, len(layout.trailer)
    if size != layout.num_bytes:
        raise SnapshotError(f"{path}: truncated or replaced: {size} of {layout.num_bytes} bytes")
    # TensorDict gets to parse only a description that this module wrote for ``layout``.
    if os.pread(handle, length, size - length) != layout.trailer:
        raise SnapshotError(f"{path}: corrupted: its description is not the published one")
    # By its handle: by its name another file might be opened than the one that was checked.
    stored = TensorDict.from_consolidated(f"/proc/self/fd/{handle}")
    for meta in layout.metadata:
        if _stored_dtype(meta.dtype) != meta.dtype:
            stored.set(meta.name, stored.get(meta.name).view(meta.dtype))
    return stored.lock_()


def checksum(tensor: torch.Tensor) -> int:
    """xxh3-64 of the bytes of a tensor's values, as ``TensorWriter.finish`` returns it."""
    return xxhash.xxh3_64_intdigest(cast("bytes", bytes_of(tensor)))


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy()


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def default_num_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _TENSORDICT_DTYPES else _CARRIERS[dtype.itemsize]


def _fault_in(pages: NDArray[np.uint8]) -> None:
    """Writes to every page from several threads: one took 28 of a push's 60 s for 61 GB."""

    def touch(start: int) -> None:
        pages[start : start + FAULT_BYTES : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(default_num_threads()) as threads:
        list(threads.map(touch, range(0, len(pages), FAULT_BYTES)))


def _open_alike(path: Path, layout: DataLayout) -> int:
    """Opens a file of exactly this layout for writing, or makes a new one in its place."""
    with suppress(FileNotFoundError):
        handle = files.open_file(path, os.O_RDWR)
        length = len(layout.trailer)
        # One byte more than there should be.
        if os.pread(handle, length + 1, layout.num_bytes - length) == layout.trailer:
            return handle
        os.close(handle)
        path.unlink()  # processes that have it mapped keep its pages
    return files.new_file(path)


def _pwrite(handle: int, content: bytes | NDArray[np.uint8], offset: int) -> None:
    """Writes all of ``content``; one call may write less, for instance near a file-size limit."""
    view = memoryview(cast("bytes", content))
    while view:
        written = os.pwrite(handle, view, offset)
        view = view[written:]
        offset += written


# Small enough for source and destination of one piece to stay in a core's cache until it is hashed.
CHUNK_BYTES = 2 << 20
BUFFERS_PER_THREAD = 8
# Longest time in which no piece is stored: a disk may be slow, but not that slow.
STORE_TIMEOUT_S = 600.0
# A part of a tensor, and the buffer that it is in.
_Piece = tuple[torch.Tensor, torch.Tensor | None]


class TensorWriter:
    """Copies tensors into a data file piece by piece, and hashes each piece while it is in cache.

    Each tensor is one thread's; none uses the file after the ``with`` block. Those of a GPU pass
    through page-locked ``buffers``, made if that list is empty and left to the next writer: the
    calling thread copies them out, in its stream's order, and the others store them.
    """

    def __init__(
        self, file: DataFile, buffers: list[torch.Tensor], *, num_threads: int = 0
    ) -> None:
        self._file, self._buffers = file, buffers
        self._num_threads = num_threads or default_num_threads()
        self._threads = ThreadPoolExecutor(self._num_threads)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._checksums: list[Future[int]] = []
        self._num_stored = 0  # pieces: shows progress
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._failure = self._failure or CancelledError()  # threads drop what they have not begun
        self._threads.shutdown(cancel_futures=True)

    def add(self, tensor: torch.Tensor, meta: ParamMeta, offset: int, *, stays: bool) -> None:
        """Stores ``tensor`` as ``meta`` says: later if it stays as it is, otherwise now."""
        self._raise_failure()
        # A column of a matrix is flat already, and a view of it, but its bytes lie apart.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        parts = flat.split(CHUNK_BYTES // meta.dtype.itemsize)
        arrived: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        try:
            stored = self._threads.submit(self._store, iter(arrived.get, None), meta.dtype, offset)
            self._checksums.append(stored)
            on_host = is_on_host(flat)
            pieces = ((part, None) for part in parts) if on_host else self._copied_out(parts, meta)
            for piece in pieces:
                arrived.put(piece)
        finally:
            arrived.put(None)
        if on_host and not stays:
            wait([stored])
            self._raise_failure()

    def finish(self) -> tuple[int, ...]:
        num_stored = -1
        while wait(self._checksums, STORE_TIMEOUT_S).not_done:
            if num_stored == self._num_stored:
                raise self._too_slow()
            num_stored = self._num_stored
        self._raise_failure()
        return tuple(one.result() for one in self._checksums)

    def _store(self, pieces: Iterable[_Piece], dtype: torch.dtype, offset: int) -> int:
        state, cast_to = xxhash.xxh3_64(), None
        for piece, buffer in pieces:
            part = piece
            try:
                if self._failure is not None:
                    continue  # pieces that have arrived still return their buffers
                if part.dtype != dtype:
                    if cast_to is None:
                        cast_to = torch.empty(part.numel(), dtype=dtype)
                    part = cast_to[: part.numel()].copy_(part)
                stored = self._file.write(part.view(torch.uint8).numpy(), offset)
                state.update(cast("bytes", stored))
                offset += len(stored)
                self._num_stored += 1
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                self._failure = self._failure or error
            finally:
                if buffer is not None:
                    self._free.put(buffer)
        return state.intdigest()

    def _copied_out(self, parts: Sequence[torch.Tensor], meta: ParamMeta) -> Iterator[_Piece]:
        """Yields a device tensor's parts and their buffers; copies one while the last is stored."""
        device = parts[0].device
        accelerator = torch.get_device_module(device)
        waiting: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        if not self._buffers:
            num, pinned = BUFFERS_PER_THREAD * self._num_threads, torch.accelerator.is_available()
            for buffer in torch.empty(num, CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned):
                self._buffers.append(buffer)
                self._free.put(buffer)
        for part in parts:
            self._raise_failure()
            try:
                buffer = self._free.get(timeout=STORE_TIMEOUT_S)
            except queue.Empty:
                raise self._too_slow() from None
            target = buffer.view(meta.dtype)[: part.numel()]
            target.copy_(part.to(meta.dtype), non_blocking=True)
            arrived = accelerator.Event()
            arrived.record(accelerator.current_stream(device))
            if waiting is not None:
                waiting[2].synchronize()
                yield waiting[:2]
            waiting = (target, buffer, arrived)
        if waiting is not None:
            waiting[2].synchronize()
            yield waiting[:2]

    def _too_slow(self) -> SnapshotError:
        place = self._file.path
        return SnapshotError(f"{place}: nothing was stored within {STORE_TIMEOUT_S:.0f} s")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


# ---- Readers

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version inside ``SnapshotReader.read``: its manifest, and its mapped tensors by name."""

    path: Path
    handle: int
    manifest: Manifest
    # Locked, and in the writer's file: copy what is to outlive the block, and write into none.
    tensordict: TensorDict

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def metadata(self) -> list[ParamMeta]:
        return list(self.manifest.metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` in the order of ``metadata``."""
        for meta in self.manifest.metadata:
            yield meta.name, self.tensordict.get(meta.name)

    def validate(self) -> None:
        """Checks, after the tensors were used, that they were this version all the time."""
        # No writer touches a file that is locked, but locks may not reach other hosts; and the
        # directory may have been removed, or made anew.
        with files.storage_errors(f"{self.path}: validating"):
            same = False
            with suppress(FileNotFoundError), files.opened(self.path) as handle:
                tag = os.pread(handle, TAG_BYTES, 0)
                same = os.path.sameopenfile(handle, self.handle) and tag == self.manifest.tag
        if not same:
            raise SnapshotError(
                f"{self.path}: was recycled while version {self.version} was being read, or "
                "removed; discard what was read"
            )

    def verify(self) -> None:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            found = list(pool.map(checksum, dict(self.tensors()).values()))
        rows = zip(self.manifest.metadata, self.manifest.checksums, found, strict=True)
        if wrong := [meta.name for meta, expected, value in rows if value != expected]:
            self.validate()
            raise SnapshotError(
                f"{self.path}: corrupted: {len(wrong)} of {len(found)} tensors differ from "
                f"their checksums, first {wrong[0]}"
            )


class SnapshotReader:
    """Reads versions that a ``SnapshotWriter`` publishes, in any process that sees the directory.

    Readers never make a writer wait, and one that dies holds nothing any more.

    Args:
        directory: The writer's directory; it need not exist yet.
        verify: Whether ``read`` compares every tensor with its checksum before it yields.
        run_id: The only run to accept; None accepts any.
        timeout_s: Seconds that ``read`` follows a writer that keeps moving on, or waits for a file
            that the manifest names and a shared file system does not show yet.

    Example:
        >>> reader = SnapshotReader("/dev/shm/policy")  # doctest: +SKIP
        >>> with reader.read(newer_than=applied) as snapshot:  # doctest: +SKIP
        ...     if snapshot is not None:
        ...         model.load_weights(snapshot.tensors())
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        verify: bool = True,
        run_id: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.directory = Path(directory)
        self._verify, self._run_id, self._timeout_s = verify, run_id, timeout_s
        self._manifest_file = ManifestFile(self.directory)
        # By folder: device, inode and size of its file, and its mapping, which spares page faults.
        self._mapped: dict[str, tuple[tuple[int, int, int], DataLayout, TensorDict]] = {}

    def current(self) -> Manifest | None:
        """Returns the current manifest, cheap enough to poll; None when nothing has been published.

        Raises:
            SnapshotError: The manifest is damaged, unreadable or of another run.
        """
        manifest = self._manifest_file.read()
        if manifest is not None and self._run_id not in {None, manifest.run_id}:
            raise SnapshotError(
                f"{self._manifest_file.path}: is of run {manifest.run_id}, this reader follows run "
                f"{self._run_id}"
            )
        return manifest

    @contextmanager
    def read(self, newer_than: int | None = None) -> Iterator[Snapshot | None]:
        """Yields the current version, locked and mapped; None if there is none, or nothing newer.

        On leaving the block normally, ``Snapshot.validate`` is called.

        Args:
            newer_than: Version that was applied already; None reads whatever is current.

        Raises:
            SnapshotError: Data or manifest are damaged, or the directory is unusable, or was
                removed or made anew while it was read.
        """
        with ExitStack() as lock:
            snapshot = self._open_current(lock, newer_than)
            if snapshot is not None and self._verify:
                snapshot.verify()
            yield snapshot
            if snapshot is not None:
                snapshot.validate()

    def close(self) -> None:
        """Gives the kept mappings back."""
        self._mapped.clear()

    def _open_current(self, lock: ExitStack, newer_than: int | None) -> Snapshot | None:
        deadline = Deadline(self._timeout_s)
        while True:
            lock.close()
            manifest, is_late = self.current(), deadline.passed
            if manifest is None or (newer_than is not None and manifest.version <= newer_than):
                return None
            path = self.directory / manifest.path / DATA_FILE
            try:
                handle = files.open_file(path)
                lock.callback(os.close, handle)
                # At first, as a child that was forked meanwhile may share the open file.
                lock.callback(fcntl.flock, handle, fcntl.LOCK_UN)
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                # The lock binds the writer only if the file was still current once it was taken.
                if self.current() == manifest:
                    snapshot = Snapshot(path, handle, manifest, self._map(handle, path, manifest))
                    snapshot.validate()
                    return snapshot
            except OSError as error:
                # EAGAIN: a writer is just testing whether the file is locked.
                if is_late or error.errno not in {errno.ENOENT, errno.ESTALE, errno.EAGAIN}:
                    raise SnapshotError(
                        f"{path}: version {manifest.version} cannot be read: {error.strerror}"
                    ) from error
                time.sleep(_POLL_S)
                continue
            if is_late:
                raise SnapshotError(
                    f"{self.directory}: versions moved on faster than they could be locked for "
                    f"{self._timeout_s} s, last version {manifest.version}"
                )

    def _map(self, handle: int, path: Path, manifest: Manifest) -> TensorDict:
        facts, data = os.fstat(handle), manifest.data
        key = (facts.st_dev, facts.st_ino, facts.st_size)
        kept = self._mapped.get(manifest.path)
        if kept is not None and kept[:2] == (key, data):
            return kept[2]
        # The writer has replaced or removed folders: free their pages.
        for name, (_, known, _) in list(self._mapped.items()):
            if known != data or not (self.directory / name).exists():
                del self._mapped[name]
        tensordict = map_tensordict(handle, path, data)
        # Pages of a shared file system may be stale in a mapping that is kept, so none is.
        if manifest.layout == "slots":
            self._mapped[manifest.path] = (key, data, tensordict)
        return tensordict

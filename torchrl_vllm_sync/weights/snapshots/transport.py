"""The ``memmap`` transport, and the writer of snapshots, by which it publishes whole versions.

Each version is one file, named by a manifest that is replaced atomically (``data_file``). A reader
takes a shared ``flock`` on the file and then finds the manifest unmoved. A writer looks for locks
only after it has moved the manifest elsewhere, so it sees those of all who go on to read. The
kernel ends a lock with its holder, however that ends; one that is stopped costs a slot.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import torch

from torchrl_vllm_sync.checks import Deadline, check_integer, check_version
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError, StaleVersionError
from torchrl_vllm_sync.weights.module import ParamMeta, checked
from torchrl_vllm_sync.weights.snapshots import data_file, files
from torchrl_vllm_sync.weights.snapshots.data_file import DataFile, DataLayout, Manifest
from torchrl_vllm_sync.weights.source import WeightSource, views_of
from torchrl_vllm_sync.weights.transport import GRACE_S, Members, PhaseTimes, Push

Tensors = Iterable[tuple[str, torch.Tensor]]
# How long a publish waits when readers hold all slots.
SLOT_TIMEOUT_S = 5.0
_POLL_S = 0.01


class Store:
    """The folders of one directory, each with one version.

    A folder is free if it is neither current nor being read. Layout ``slots``, for one host, writes
    again the oldest free one, whose pages exist already, or makes one more, up to a limit. Layout
    ``versions``, for shared file systems, always makes one, and keeps two: a host may serve a page
    from its cache for ever, so no byte of a visible file changes.
    """

    def __init__(
        self, directory: Path, owner: files.Owner, current: str | None, slots: tuple[int, int]
    ) -> None:
        self._directory, self._epoch, self._current = directory, owner.epoch, current
        self._reuses = owner.layout == "slots"
        self._num_kept, self._limit = slots if self._reuses else (2, math.inf)
        self._is_mapped = self._reuses and files.is_memory_file_system(directory)
        self._num_made = 0
        # An owner that may be alive may have been stopped just after it had checked that it is one.
        names = [name for name, epoch in self._on_disk().items() if epoch >= owner.reusable_from]
        names.sort(key=lambda name: (name == current, self._written_at(name)))
        # Oldest first, each with its file while that is open.
        self._folders: dict[str, DataFile | None] = dict.fromkeys(names)

    def begin(self, version: int, layout: DataLayout) -> tuple[str, DataFile]:
        """Returns a folder to write into, and its file."""
        deadline = Deadline(SLOT_TIMEOUT_S)
        while True:
            free, num = self._free() if self._reuses else [], len(self._folders)
            if num < self._num_kept or (not free and num < self._limit):
                try:
                    return self._new(version, layout)
                except OSError:
                    if not free:  # otherwise two slots still alternate
                        raise
            if free:
                return free[0], self._open(free[0], layout)
            if deadline.passed:
                others = [name for name in self._folders if name != self._current]
                held = [f"{files.lock_holders(self._path(name))} reads {name}" for name in others]
                raise SnapshotError(
                    f"{self._directory}: all {num} slots (max_slots={self._limit}) are current or "
                    f"being read: {'; '.join(held)}"
                )
            time.sleep(_POLL_S)

    def complete(self, name: str) -> None:
        """Notes that a folder holds the newest version, and is current."""
        self._folders[name] = self._folders.pop(name)
        self._current = name
        if not self._reuses:
            self.close()

    def abandon(self, name: str) -> None:
        """Leaves a version unfinished: a slot stays the oldest, another folder is removed."""
        if not self._reuses:
            with suppress(OSError):  # ``collect`` removes it later
                self._remove(name)

    def collect(self) -> None:
        """Removes folders beyond those to keep, and earlier writers', unless being read."""
        for name in self._on_disk().keys() - self._folders.keys():
            if not files.is_locked(self._path(name)):
                self._remove(name)
        excess = max(len(self._folders) - self._num_kept, 0)
        # One free folder stays: the next publish would only have to make it again.
        for name in self._free()[:-1][:excess]:
            self._remove(name)

    def prepare(self, layout: DataLayout) -> None:
        while self._reuses and len(self._folders) < self._num_kept:
            self._new(0, layout)

    def close(self) -> None:
        for name, file in self._folders.items():
            self._folders[name] = None
            if file is not None:
                file.close()

    def _on_disk(self) -> dict[str, int]:
        """Every folder of a version, and the epoch of the writer that made it."""
        matches = map(data_file.FOLDER.fullmatch, files.list_folder(self._directory))
        return {match[0]: int(match["epoch"]) for match in matches if match}

    def _free(self) -> list[str]:
        others = (name for name in self._folders if name != self._current)
        return [name for name in others if not files.is_locked(self._path(name))]

    def _new(self, version: int, layout: DataLayout) -> tuple[str, DataFile]:
        """Makes a folder, if what is to be in it fits."""
        # A writer that was replaced while it was stopped resumes with folders of its own epoch.
        name = f"v{version}-{self._epoch}"
        if self._reuses:
            name = f"slot-{self._epoch}-{self._num_made}"
            self._num_made += 1  # also if this fails: a name is used once
        self._remove(name)  # left behind if it could not be abandoned
        facts = os.statvfs(self._directory)
        free = facts.f_bavail * facts.f_frsize
        # Some network file systems report no size at all.
        if facts.f_blocks and free < layout.num_bytes:
            text = f"No space left: {layout.num_bytes} bytes are needed, {free} are free"
            raise OSError(errno.ENOSPC, text, str(self._directory))
        self._folders = {name: None, **self._folders}
        try:
            return name, self._open(name, layout)
        except BaseException:
            self._remove(name)
            raise

    def _open(self, name: str, layout: DataLayout) -> DataFile:
        path, file = self._path(name), self._folders[name]
        if file is not None:
            if file.layout == layout and path.exists():
                return file
            self._folders[name] = None
            file.close()
        files.require_folder(path.parent)
        file = DataFile(path, layout, allocate=self._reuses, mapped=self._is_mapped)
        self._folders[name] = file
        return file

    def _remove(self, name: str) -> None:
        file = self._folders.pop(name, None)
        if file is not None:
            file.close()
        files.remove_folder(self._directory / name)

    def _path(self, name: str) -> Path:
        return self._directory / name / data_file.DATA_FILE

    def _written_at(self, name: str) -> int:
        """When the file in a folder was last tagged; 0 if there is none."""
        path = self._path(name)
        return path.lstat().st_mtime_ns if path.name in files.list_folder(path.parent) else 0


@dataclass(frozen=True, slots=True)
class PublishReport:
    version: int  # policy version, now current
    path: Path  # folder that holds it
    num_bytes: int  # bytes of the parameters
    seconds: float  # from call to return
    # Seconds of `acquire` (a folder to write into), `fill`, `flush`, `flip` and `collect` (removing
    # old folders).
    phases: Mapping[str, float]
    phase_starts: Mapping[str, float]  # in seconds of `time.perf_counter()`


class SnapshotWriter:
    """The one writer of a snapshot directory: ``publish`` any number of times, then ``close``.

    One thread at a time. A writer that dies leaves the last published version current; the next
    goes on from there. Each tensor is stored with its xxh3-64; where the directory is not in
    memory, a version is made durable before it becomes current.

    Args:
        directory: New, empty, or left by an earlier writer. Made with mode 0700; one that is there
            must be this user's, no symbolic link and writable by no other user.
        layout: ``"slots"``, for one host, rewrites a few folders in turn; ``"versions"``, for
            shared file systems, makes a new folder each time.
        num_slots: Slots in turn; at least 2.
        max_slots: Slots when readers hold the others; if all are held a publish waits five seconds
            and then fails, naming the readers.
        run_id: The training run; None goes on with the directory's, or makes one up.
        takeover: Whether to replace a live writer, which is fenced, or a run, whose versions go.

    Raises:
        SnapshotError: The directory is foreign, unwritable, damaged, another's or another run's.
        ValueError: A setting breaks its rule.

    Example:
        >>> with SnapshotWriter("/dev/shm/policy") as writer:  # doctest: +SKIP
        ...     metadata = [ParamMeta.of(name, p) for name, p in model.named_parameters()]
        ...     writer.publish(model.named_parameters(), metadata, version=1)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        layout: files.LayoutName = "slots",
        num_slots: int = 3,
        max_slots: int = 6,
        run_id: str | None = None,
        takeover: bool = False,
    ) -> None:
        if layout not in files.LAYOUTS:
            raise ValueError(f"layout must be 'slots' or 'versions', got {layout!r}")
        if run_id is not None and not (run_id.isprintable() and run_id.split() == [run_id]):
            raise ValueError(f"run_id must be a printable word without spaces, got {run_id!r}")
        check_integer("num_slots", num_slots, 2)
        if max_slots < num_slots:
            raise ValueError(f"max_slots must be at least num_slots ({num_slots}), got {max_slots}")
        self.directory = Path(directory)
        self._closed = False
        self._buffers: list[torch.Tensor] = []
        self._manifest_file = data_file.ManifestFile(self.directory)
        with files.storage_errors(f"{self.directory}: cannot be opened"), ExitStack() as undo:
            files.Owner.before(self.directory, layout, run_id, takeover=takeover)
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            files.require_folder(self.directory)
            self._fsync = not files.is_memory_file_system(self.directory)
            self._lock = files.WriterLock(self.directory, fsync=self._fsync)
            with self._lock.commit(by_owner=False):  # no successor may remove what the store finds
                self._lock.acquire(layout, run_id, takeover=takeover)
                undo.callback(self._lock.release)
                owner = self._lock.owner
                self._current = self.current()
                if self._current is not None and self._current.run_id != owner.run_id:
                    raise SnapshotError(
                        f"{self._manifest_file.path}: is of run {self._current.run_id}, the "
                        f"directory of run {owner.run_id}"
                    )
                current = self._current and self._current.path
                self._store = Store(self.directory, owner, current, (num_slots, max_slots))
            undo.pop_all()

    @property
    def run_id(self) -> str:
        """The training run."""
        return self._lock.owner.run_id

    @property
    def epoch(self) -> int:
        """This writer's epoch; a later writer has a higher one."""
        return self._lock.owner.epoch

    @property
    def last_version(self) -> int | None:
        """The version that is current as far as this writer knows; None before the first."""
        return self._current and self._current.version

    @property
    def is_removed(self) -> bool:
        """Whether the directory was removed; a ``SnapshotError`` says that it is inaccessible."""
        with files.storage_errors(f"{self.directory}: looking for {files.MARKER}"):
            return not (self.directory / files.MARKER).exists()

    def current(self) -> Manifest | None:
        """Returns the manifest on disk, None before the first; it may raise ``SnapshotError``."""
        return self._manifest_file.read()

    def prepare(self, metadata: Sequence[ParamMeta]) -> None:
        """Makes all slots now, so that no publish pays for new pages; needs no tensors.

        Arguments are those of :meth:`publish`, and so are the errors.
        """
        layout = self._layout_of(metadata)
        with self._storage("preparing slots"):
            self._lock.check()
            self._store.prepare(layout)

    def publish(
        self, tensors: Tensors, metadata: Sequence[ParamMeta], version: int
    ) -> PublishReport:
        """Stores every tensor as ``version`` and makes that current.

        Protocol: a folder that is not being read, data, flush, then under the commit lock the
        manifest by rename. On any error the version before stays current.

        Args:
            tensors: Yields ``(name, tensor of full shape)`` in the order of ``metadata``; each is
                stored, cast to the announced dtype, or copied out of its device, before the next
                is asked for. Those of a list are stored several at a time.
            metadata: Names, dtypes and shapes to store.
            version: Greater than ``last_version``.

        Returns:
            What was stored, and the seconds that each phase took.

        Raises:
            StaleVersionError: ``version`` is not greater than the last one.
            WeightMismatchError: ``tensors`` does not agree with ``metadata``.
            FencedWriterError: Another writer has taken over.
            SnapshotError: No space, not writable, or readers hold every slot (named).
            ValueError: ``version`` is no integer from 0 on, or does not fit into 63 bits.
        """
        started, doing, times = time.perf_counter(), f"publishing version {version}", PhaseTimes()
        check_version("version", version)
        layout = self._layout_of(metadata)
        if self.last_version is not None and version <= self.last_version:
            raise StaleVersionError(
                f"{self.directory}: version must be greater than {self.last_version}, got {version}"
            )
        with ExitStack() as undo:
            with self._storage(doing), times.measure("acquire"):
                self._lock.check()
                name, file = self._store.begin(version, layout)
                undo.callback(self._store.abandon, name)
                file.tag()
            with times.measure("fill"):
                checksums = self._fill(file, tensors, doing)
            owner = self._lock.owner
            manifest = Manifest(
                owner.run_id, owner.epoch, version, owner.layout, name, layout, checksums
            )
            with self._storage(doing), times.measure("flush"):
                file.tag(manifest.tag)
                if self._fsync:
                    file.flush()
                    files.fsync_folder(file.path.parent)
            with self._storage(doing), times.measure("flip"), self._lock.commit():
                if self._fsync:
                    files.fsync_folder(self.directory)
                undo.pop_all()
                self._manifest_file.write(manifest, fsync=self._fsync)
                self._current = manifest
                self._store.complete(name)
                if self._fsync:  # where that fails, the version is current all the same
                    files.fsync_folder(self.directory)
        # Under the lock too: a writer replaced by now would remove its successor's folders.
        doing = f"version {version} is current, but removing old ones failed"
        with self._storage(doing), times.measure("collect"), self._lock.commit():
            self._store.collect()
        num_bytes = sum(meta.num_bytes for meta in layout.metadata)
        seconds, path = time.perf_counter() - started, self.directory / name
        return PublishReport(version, path, num_bytes, seconds, times.seconds, times.starts)

    def first_difference(self, tensors: Tensors, metadata: Sequence[ParamMeta]) -> str | None:
        """Returns the name of the first parameter that is not as it was published last, or None.

        Arguments are those of :meth:`publish`; the tensors are read once.
        """
        stored = self._current
        assert stored is not None
        for meta, known in zip_longest(metadata, stored.metadata):
            if meta != known:
                return (known or meta).name
        for (name, tensor), meta, expected in zip(tensors, metadata, stored.checksums, strict=True):
            if data_file.checksum(tensor.detach().to(meta.dtype)) != expected:
                return name
        return None

    def close(self, *, remove: bool = False) -> None:
        """Gives the directory back; a second call does nothing.

        Args:
            remove: Whether to delete the directory with all versions, unless it is gone.

        Raises:
            FencedWriterError: ``remove`` is asked for and another writer has taken over.
            SnapshotError: The directory cannot be removed.
        """
        if self._closed:
            return
        self._closed = True
        self._store.close()
        with files.storage_errors(f"{self.directory}: closing"):
            self._lock.release(remove=remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, file: DataFile, tensors: Tensors, doing: str) -> tuple[int, ...]:
        layout, stays = file.layout, isinstance(tensors, Sequence)
        items = zip(checked(tensors, layout.metadata), layout.offsets, strict=True)
        with data_file.TensorWriter(file, self._buffers) as writer:
            for (meta, tensor), offset in items:
                with self._storage(doing):
                    writer.add(tensor, meta, offset, stays=stays)
            with self._storage(doing):
                return writer.finish()

    def _layout_of(self, metadata: Sequence[ParamMeta]) -> DataLayout:
        if self._closed:
            raise SnapshotError(f"{self.directory}: this writer is closed")
        return DataLayout.of(metadata, self._current and self._current.data)

    @contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        try:
            with files.storage_errors(f"{self.directory}: {doing}"):
                yield
        except SnapshotError:
            # A successor removes this writer's folders: that is the cause to name, not a lost file.
            with files.storage_errors(f"{self.directory}: {doing}"):
                self._lock.check()
            raise


# ---- The transport

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "torchrl_vllm_sync-"
# Everything that a writer makes in a snapshot directory.
_OWN_NAME = re.compile(
    rf"{files.OWN_FILE.pattern}|{data_file.FOLDER.pattern}(/{re.escape(data_file.DATA_FILE)})?"
)


class MemmapTransport:
    """Publishes each version as a memory-mapped TensorDict, which the replicas then load.

    Args:
        directory: Where versions are stored; must be visible to every replica's node. By default
            a new directory in shared memory, removed by :meth:`close` or with the process.
        layout: As ``SnapshotWriter`` takes it.
        verify: Replicas check the stored checksums before they load.
        takeover: Fence off a writer that another process left in ``directory``.
    """

    name = "memmap"
    is_collective = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        layout: files.LayoutName = "slots",
        verify: bool = True,
        takeover: bool = False,
    ) -> None:
        self._given = None if directory is None else Path(directory)
        self._layout: files.LayoutName = layout
        self._verify, self._takeover = verify, takeover
        self._writer: SnapshotWriter | None = None
        self._pid = 0
        self._finalizer: weakref.finalize[..., MemmapTransport] | None = None

    @property
    def directory(self) -> Path:
        """Directory of the snapshots; a ``SnapshotError`` says that the transport is not open."""
        return self._open_writer().directory

    @property
    def run_id(self) -> str:
        """Id of this writer's run; a ``SnapshotError`` says that the transport is not open."""
        return self._open_writer().run_id

    @property
    def last_version(self) -> int:
        """Newest version in the directory, an earlier process's included; 0 if there is none."""
        return (own.last_version or 0) if (own := self._own_writer()) else 0

    def _own_writer(self) -> SnapshotWriter | None:
        """The writer, if there is one; a forked child does not own its parent's."""
        return self._writer if self._pid == os.getpid() else None

    def _open_writer(self) -> SnapshotWriter:
        if (own := self._own_writer()) is None:
            raise SnapshotError("the memmap transport is not open")
        return own

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Creates the directory, or takes it up, and becomes its only writer.

        Arguments are those of :meth:`WeightTransport.open`. A default directory that was removed
        is made anew.

        Raises:
            SnapshotError: The directory is unusable, foreign or another writer's, or was removed.
        """
        del source  # any device will do
        if (own := self._own_writer()) is not None:
            if not own.is_removed:
                return
            if self._given is not None:
                raise SnapshotError(
                    f"{self._given}: was removed while versions were being stored there: close the "
                    "transport (an updater's disconnect() does) and open it again"
                )
            self.close()
        temporary = self._given is None
        directory = self._given or _new_directory(members.client.service_name)
        try:
            self._writer = SnapshotWriter(directory, layout=self._layout, takeover=self._takeover)
        except BaseException:
            if temporary:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._pid = os.getpid()
        # A process that ends without shutting down must not leave the weights in memory.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._pid, temporary)

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Publishes the version unless that is done, then has every replica load it.

        Arguments and result are those of :meth:`WeightTransport.send`. Weights that are published
        already are compared with the checksums of what is stored.

        Raises:
            StaleVersionError: The version is older than the newest published, or was published with
                other weights.
            SnapshotError: It could not be published; the last one stays in place.
        """
        push.confirm()
        self._publish(push.source, push.version, push.times)
        with push.times.measure("acknowledge_s"):
            return members.start(
                "load_snapshot",
                str(self.directory),
                self.run_id,
                at_least=push.version,
                verify=self._verify,
                timeout_s=push.timeout_s,
                clear_cache=push.clear_cache,
                mode=push.mode,
            ).answers(push.timeout_s + GRACE_S)

    def _publish(self, source: WeightSource, version: int, times: PhaseTimes) -> None:
        writer, metadata, views = self._open_writer(), source.metadata(), views_of(source)
        tensors = source if views is None else views
        if version == writer.last_version:
            if (changed := writer.first_difference(tensors, metadata)) is not None:
                raise StaleVersionError(
                    f"version {version} is stored already, and there {changed} is another: weights "
                    "that differ need a version of their own"
                )
            return
        with times.measure("publish_s"):
            report = writer.publish(tensors, metadata, version)
        times.seconds |= {f"{name}_s": value for name, value in report.phases.items()}
        times.starts |= {f"{name}_s": value for name, value in report.phase_starts.items()}

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process opens its own.
        return {**self.__dict__, "_writer": None, "_finalizer": None}

    def close(self) -> None:
        """Stops writing; removes the directory if this transport made it. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._writer = self._finalizer = None


def _close(writer: SnapshotWriter, pid: int, remove: bool) -> None:
    """Gives the directory back, in the process that took it: a forked child only forgets it."""
    if os.getpid() == pid:
        with suppress(FencedWriterError):  # it is the successor's now
            writer.close(remove=remove)


def _new_directory(service_name: str) -> Path:
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    if root is not None:
        _remove_orphans(root)
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{service_name}-", dir=root))
    os.close(files.new_file(directory / files.TEMPORARY))
    return directory


def _remove_orphans(root: Path) -> None:
    """Frees the memory of trainers killed before they could: directories that no user has named."""
    for path in root.glob(f"{PREFIX}*"):
        # It may be gone by now, or another user's.
        with suppress(OSError, SnapshotError), ExitStack() as stack:
            # In the first one's order: inside its commit its lock may be there, and not be taken.
            locks = (
                stack.enter_context(files.opened(path / name, os.O_RDWR))
                for name in (files.COMMIT, files.LOCK)
            )
            if all(map(files.take_lock, locks)):
                names = [one.relative_to(path).as_posix() for one in path.rglob("*")]
                if files.TEMPORARY in names and all(map(_OWN_NAME.fullmatch, names)):
                    shutil.rmtree(path)

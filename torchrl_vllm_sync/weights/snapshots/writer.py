"""The writer's side of snapshots: publishes whole versions of the weights through a file system.

Each version is a consolidated TensorDict in one file (``data_file``), named by one manifest that is
replaced atomically (``manifest``), so a reader sees exactly one version whatever is killed when.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SnapshotError, StaleVersionError, WeightMismatchError
from torchrl_vllm_sync.weights.snapshots.data_file import (
    DATA_FILE,
    DataFile,
    DataLayout,
    TensorWriter,
    checksum,
)
from torchrl_vllm_sync.weights.snapshots.files import (
    fsync_directory,
    is_memory_file_system,
    list_folder,
    new_folder,
    remove_folder,
    remove_temporary_files,
    require_folder,
    storage_errors,
)
from torchrl_vllm_sync.weights.snapshots.records import (
    CURRENT,
    LAYOUTS,
    READERS,
    TEMPORARY,
    Head,
    HeldLease,
    LayoutName,
    Manifest,
    ManifestFile,
    Marker,
    WriterLock,
    held_leases,
    new_run_id,
    remove_stray_files,
    write_manifest,
)
from torchrl_vllm_sync.weights.transport import PhaseTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    import torch

    from torchrl_vllm_sync.weights.metadata import ParamMeta


# Slots: reusable folders whose pages exist already, so that a version costs one copy.
#
# For one host: shared memory or a local disk. A slot is written again only when it is neither
# current
# nor leased, oldest first; when every slot is taken there is one more, up to a limit.


# The epoch of the writer that made it, and a number.
_SLOT_NAME = re.compile("slot-([0-9]+)-[0-9]+")
_POLL_S = 0.01


@dataclass
class _Slot:
    """A slot of this writer: what it holds (None: nothing whole) and its open file, if any."""

    name: str
    version: int | None
    file: DataFile | None = None


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """How many slots there are and how long readers may keep them.

    Attributes:
        num_slots: Slots in turn; at least 2.
        max_slots: Slots when readers hold the others; at least ``num_slots``.
        lease_timeout_s: Seconds without heartbeat after which a lease may be broken.
        slot_timeout_s: Seconds that a publish waits when all ``max_slots`` are taken.
    """

    num_slots: int = 3
    max_slots: int = 6
    lease_timeout_s: float = 60.0
    slot_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, got {self.num_slots}")
        if self.max_slots < self.num_slots:
            raise ValueError(
                f"max_slots must be at least num_slots ({self.num_slots}), got {self.max_slots}"
            )
        if self.lease_timeout_s <= 0:
            raise ValueError(f"lease_timeout_s must be positive, got {self.lease_timeout_s}")
        if self.slot_timeout_s < 0:
            raise ValueError(f"slot_timeout_s must not be negative, got {self.slot_timeout_s}")


class SlotStore:
    """The slots of one writer.

    A version goes ``begin``, write into the file, ``complete``; after the manifest has moved,
    ``collect``. A version that is not completed leaves a slot whose HEAD says so and that is taken
    first for the next.
    """

    def __init__(
        self,
        directory: Path,
        lock: WriterLock,
        settings: SlotSettings,
        *,
        current: str | None,
        mapped: bool,
        fsync: bool,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._settings = settings
        self._fsync = fsync
        self._current = current
        self._mapped = mapped
        self._created = 0
        self._slots: list[_Slot] = []
        # Slots of an owner that may still be alive are never written by another.
        for name, epoch in _slot_names(directory).items():
            if epoch >= lock.reusable_from:
                remove_temporary_files(directory / name)
                head = _head_or_none(directory / name)
                whole = head is not None and head.complete
                self._slots.append(_Slot(name, head.version if head and whole else None))

    def begin(self, layout: DataLayout, head: Head) -> tuple[str, DataFile]:
        """Takes a slot and marks it as being written."""
        slot = self._acquire(layout)
        folder = self._directory / slot.name
        slot.version = None
        if slot.file is not None and slot.file.layout.digest != layout.digest:
            slot.file.close()
            slot.file = None
        previous = _head_or_none(folder)
        head.write(folder, fsync=False)
        if slot.file is None:
            if previous is not None and previous.digest == layout.digest:
                slot.file = DataFile.reopen(folder / DATA_FILE, layout, mapped=self._mapped)
            if slot.file is None:
                slot.file = DataFile.create(
                    folder / DATA_FILE, layout, allocate=True, mapped=self._mapped
                )
        return slot.name, slot.file

    def complete(self, name: str, head: Head) -> str:
        """Marks a slot as whole, after its data were flushed; returns its name."""
        head.write(self._directory / name, fsync=self._fsync)
        next(slot for slot in self._slots if slot.name == name).version = head.version
        return name

    def flipped(self, name: str) -> None:
        """Learns that the manifest names the folder now."""
        self._current = name

    def abandon(self, name: str) -> None:
        """Leaves a version unfinished; its slot stays marked as being written."""

    def collect(self) -> None:
        """Removes slots beyond ``num_slots``, and those of earlier writers, that nobody reads."""
        own = {slot.name for slot in self._slots}
        surplus = [name for name in _slot_names(self._directory) if name not in own]
        if len(self._slots) > self._settings.num_slots:
            # One free slot stays: the next publish would only have to make it again.
            free = self._free(self._leases())[:-1]
            excess = len(self._slots) - self._settings.num_slots
            surplus += [slot.name for slot in free[:excess]]
        if not surplus:
            return
        held = {lease.folder for lease in self._leases()}
        for name in surplus:
            if name == self._current or name in held or None in held:
                continue
            for slot in [slot for slot in self._slots if slot.name == name]:
                if slot.file is not None:
                    slot.file.close()
                self._slots.remove(slot)
            remove_folder(self._directory / name)

    def prepare(self, layout: DataLayout, head: Head) -> None:
        """Makes all ``num_slots`` now, so that no publish pays for new pages."""
        for _ in range(self._settings.num_slots - len(self._slots)):
            slot = self._new_slot(layout)
            head.write(self._directory / slot.name, fsync=False)

    def close(self) -> None:
        """Gives files and mappings back; the folders stay."""
        for slot in self._slots:
            if slot.file is not None:
                slot.file.close()
                slot.file = None

    def _acquire(self, layout: DataLayout) -> _Slot:
        settings = self._settings
        remove_stray_files(self._directory, self._lock.now(), settings.lease_timeout_s)
        deadline = time.monotonic() + settings.slot_timeout_s
        while True:
            leases = self._leases()
            free = self._free(leases)
            if len(self._slots) < settings.num_slots or (
                not free and len(self._slots) < settings.max_slots
            ):
                try:
                    return self._new_slot(layout)
                except OSError:
                    # No space for one more: two slots still alternate.
                    if not free:
                        raise
            if free:
                return free[0]
            expired = [lease for lease in leases if lease.age_s > settings.lease_timeout_s]
            for lease in expired:
                lease.break_()
            if not expired and time.monotonic() >= deadline:
                held = "; ".join(str(lease) for lease in leases)
                raise SnapshotError(
                    f"{self._directory}: all {len(self._slots)} slots (max_slots="
                    f"{settings.max_slots}) are current or leased: {held}"
                )
            if not expired:
                time.sleep(_POLL_S)

    def _new_slot(self, layout: DataLayout) -> _Slot:
        # The epoch in the name keeps writers apart: one that was replaced while it was stopped
        # wakes up with its own folders, not with those of its successor.
        name = f"slot-{self._lock.epoch}-{self._created}"
        self._created += 1  # also if this fails: a name is used once
        folder = self._directory / name
        require_space(self._directory, layout.num_bytes)
        new_folder(folder)
        try:
            file = DataFile.create(folder / DATA_FILE, layout, allocate=True, mapped=self._mapped)
        except BaseException:
            remove_folder(folder)
            raise
        slot = _Slot(name, None, file)
        self._slots.append(slot)
        return slot

    def _free(self, leases: list[HeldLease]) -> list[_Slot]:
        held = {lease.folder for lease in leases}
        if None in held:
            return []
        free = [
            slot for slot in self._slots if slot.name != self._current and slot.name not in held
        ]
        return sorted(free, key=lambda slot: -1 if slot.version is None else slot.version)

    def _leases(self) -> list[HeldLease]:
        """Leases of readers that may be alive; those of dead ones are removed."""
        alive: list[HeldLease] = []
        for lease in held_leases(self._directory, self._lock.now()):
            if lease.is_dead:
                lease.break_()
            else:
                alive.append(lease)
        return alive


def require_space(directory: Path, num_bytes: int) -> None:
    """Finds out before writing whether ``num_bytes`` fit."""
    facts = os.statvfs(directory)
    free = facts.f_bavail * facts.f_frsize
    # Some network file systems report no size at all.
    if facts.f_blocks and free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"No space left: {num_bytes} bytes are needed, {free} are free",
            str(directory),
        )


def _slot_names(directory: Path) -> dict[str, int]:
    """Every slot in the directory, and the epoch of the writer that made it."""
    names = list_folder(directory)
    return {name: int(match[1]) for name in names if (match := _SLOT_NAME.fullmatch(name))}


def _head_or_none(folder: Path) -> Head | None:
    """A damaged HEAD says as little as none: the slot holds nothing whole."""
    try:
        return Head.read(folder)
    except SnapshotError:
        return None


# Versions: a new folder for each, immutable once it has its name.
#
# For file systems that several hosts share, where a page that was read once may be served from a
# host's cache for ever: no byte of a visible file changes. Folders are collected when they are
# neither current, nor the one before, nor leased.


_BUILDING = ".building-"
_VERSION_NAME = re.compile("v([0-9]+)")


class VersionStore:
    """The folders ``v{N}`` of one writer; same calls as ``SlotStore``."""

    def __init__(
        self,
        directory: Path,
        lock: WriterLock,
        lease_timeout_s: float,
        *,
        current: str | None,
        fsync: bool,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._lease_timeout_s = lease_timeout_s
        self._fsync = fsync
        self._current = current
        self._building: DataFile | None = None
        for name in list_folder(directory):
            if name.startswith(_BUILDING):
                remove_folder(directory / name)

    def begin(self, layout: DataLayout, head: Head) -> tuple[str, DataFile]:
        """Makes a folder that has no visible name yet."""
        name = f"{_BUILDING}{head.epoch}-{head.version}"
        remove_folder(self._directory / name)  # left behind if it could not be abandoned
        require_space(self._directory, layout.num_bytes)
        new_folder(self._directory / name)
        try:
            head.write(self._directory / name, fsync=False)
            self._building = DataFile.create(
                self._directory / name / DATA_FILE, layout, allocate=False, mapped=False
            )
        except BaseException:
            remove_folder(self._directory / name)
            raise
        return name, self._building

    def complete(self, name: str, head: Head) -> str:
        """Gives a flushed folder its visible name ``v{N}``, and returns that.

        A folder that has the name already was never current, since versions only grow: it is what
        a writer left that died between renaming and moving the manifest.
        """
        head.write(self._directory / name, fsync=self._fsync)
        self.close()
        visible = f"v{head.version}"
        if (self._directory / visible).exists():
            remove_folder(self._directory / visible)
        os.rename(self._directory / name, self._directory / visible)
        if self._fsync:
            fsync_directory(self._directory)
        return visible

    def flipped(self, name: str) -> None:
        """Learns that the manifest names the folder now."""
        self._current = name

    def abandon(self, name: str) -> None:
        """Removes an unfinished folder; what cannot be removed goes when a version is collected."""
        self.close()
        with suppress(OSError):
            remove_folder(self._directory / name)

    def collect(self) -> None:
        """Removes folders that are neither current, nor the one before, nor leased."""
        now = self._lock.now()
        remove_stray_files(self._directory, now, self._lease_timeout_s)
        held: set[str | None] = set()
        for lease in held_leases(self._directory, now):
            if lease.is_dead or lease.age_s > self._lease_timeout_s:
                lease.break_()
            else:
                held.add(lease.folder)
        names = list_folder(self._directory)
        numbered = {
            name: int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name))
        }
        last = -1 if self._current is None else numbered[self._current]
        older = [name for name in numbered if numbered[name] < last]
        keep = {self._current, max(older, key=numbered.__getitem__, default=None)} | held
        for name in names:
            unfinished = name.startswith(_BUILDING)
            if unfinished or (name in numbered and name not in keep and None not in held):
                remove_folder(self._directory / name)

    def close(self) -> None:
        """Gives the open file back."""
        if self._building is not None:
            self._building.close()
            self._building = None


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publish did.

    Attributes:
        version: Policy version, now current.
        path: Folder that holds it.
        num_bytes: Bytes of the parameters.
        seconds: From call to return.
        phases: Seconds of ``acquire`` (a folder to write into), ``fill``, ``flush``, ``flip`` and
            ``collect`` (removing old folders), one after the other; and in ``fill`` of ``source``
            (waiting for the next tensor), ``copy`` and ``hash``, of all threads together.
        phase_starts: When each began, in seconds of ``time.perf_counter()``; ``source``, ``copy``
            and ``hash`` are sums of many pieces and have no start.
    """

    version: int
    path: Path
    num_bytes: int
    seconds: float
    phases: Mapping[str, float]
    phase_starts: Mapping[str, float]


class SnapshotWriter:
    """The one writer of a snapshot directory.

    Lifecycle: construct (takes the directory), ``publish`` any number of times, ``close``. One
    thread at a time. A writer that dies leaves the last published version current; the next one
    goes on from there.

    Args:
        directory: New, empty, or left by an earlier writer. Made with mode 0700; one that is there
            must be this user's, no symbolic link and writable by nobody else.
        layout: ``"slots"`` for one host (shared memory, local disk): folders in turn, whose pages
            exist already. ``"versions"`` for shared file systems: a new folder each.
        num_slots: Slots in turn.
        max_slots: Slots when readers hold the others.
        checksums: Whether to store an xxh3-64 of every tensor.
        fsync: Whether to make a version durable before it becomes current; None: except in memory.
        lease_timeout_s: Seconds without heartbeat after which a reader's lease may be broken.
        slot_timeout_s: Seconds that a publish waits when ``max_slots`` slots are taken.
        lock_timeout_s: Seconds to wait for another writer in the middle of a commit.
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
        layout: LayoutName = "slots",
        num_slots: int = 3,
        max_slots: int = 6,
        checksums: bool = True,
        fsync: bool | None = None,
        lease_timeout_s: float = 60.0,
        slot_timeout_s: float = 5.0,
        lock_timeout_s: float = 10.0,
        run_id: str | None = None,
        takeover: bool = False,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be 'slots' or 'versions', got {layout!r}")
        if run_id is not None and not (run_id.isprintable() and run_id.split() == [run_id]):
            raise ValueError(f"run_id must be a printable word without spaces, got {run_id!r}")
        settings = SlotSettings(num_slots, max_slots, lease_timeout_s, slot_timeout_s)
        self.directory = Path(directory)
        self._closed = False
        self._layout: DataLayout | None = None
        self._manifest_file = ManifestFile(self.directory)
        self._tensor_writer = TensorWriter(checksums=checksums)
        with storage_errors(f"{self.directory}: cannot be opened"), ExitStack() as undo:
            marker = self._marker_for(layout, run_id, takeover=takeover)
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            require_folder(self.directory)
            require_folder(self.directory / READERS)
            in_memory = is_memory_file_system(self.directory)
            self._fsync = not in_memory if fsync is None else fsync
            self._lock = WriterLock(self.directory, timeout_s=lock_timeout_s, fsync=self._fsync)
            self._lock.acquire(takeover=takeover)
            undo.callback(self._lock.release)
            # Until the store is made, no successor may remove what it looks at. And no other writer
            # has a temporary file here: each makes them inside its commit.
            with self._lock.commit():
                remove_temporary_files(self.directory)
                if self.epoch > 1:  # it was named by somebody: it is not the first one's alone
                    (self.directory / TEMPORARY).unlink(missing_ok=True)
                # Before the lock was taken another writer may have made the directory its own.
                self._marker = self._marker_for(layout, run_id or marker.run_id, takeover=takeover)
                if Marker.read(self.directory) != self._marker:
                    (self.directory / CURRENT).unlink(missing_ok=True)
                    self._marker.write(self.directory, fsync=self._fsync)
                self._current = self._manifest_file.read()
                if self._current is not None and self._current.run_id != self.run_id:
                    raise SnapshotError(
                        f"{self._manifest_file.path}: is of run {self._current.run_id}, the "
                        f"directory of run {self.run_id}"
                    )
                self._store = self._new_store(settings, mapped=in_memory)
            undo.pop_all()

    @property
    def run_id(self) -> str:
        """The training run."""
        return self._marker.run_id

    @property
    def epoch(self) -> int:
        """This writer's epoch; a later writer has a higher one."""
        return self._lock.epoch

    @property
    def last_version(self) -> int | None:
        """The version that is current as far as this writer knows; None before the first."""
        return None if self._current is None else self._current.version

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the directory, or all that is in it.

        Raises:
            SnapshotError: It cannot be looked at.
        """
        return self._lock.is_removed

    def current(self) -> Manifest | None:
        """Returns the manifest on disk; None before the first publish.

        Raises:
            SnapshotError: It is damaged or unreadable.
        """
        with storage_errors(f"{self.directory}: reading {CURRENT}"):
            return self._manifest_file.read()

    def prepare(self, metadata: Sequence[ParamMeta]) -> None:
        """Makes all slots now, so that no publish pays for new pages; needs no tensors.

        Args:
            metadata: Names, dtypes and shapes of what will be published.

        Raises:
            SnapshotError: No space, or not writable.
            FencedWriterError: Another writer has taken over.
            WeightMismatchError: The metadata cannot be laid out.
        """
        self._require_open()
        layout = self._layout_of(metadata)
        if isinstance(self._store, SlotStore):
            with self._storage("preparing slots"):
                self._lock.check()
                self._store.prepare(layout, self._head(-1, layout, complete=False))

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: Sequence[ParamMeta],
        version: int,
    ) -> PublishReport:
        """Stores every tensor as ``version`` and makes that current.

        Protocol: HEAD "being written", data, flush, then under the commit lock HEAD "complete" and
        the manifest by rename. On any error the version before stays current.

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
            ValueError: ``version`` is negative, or does not fit into 63 bits.
        """
        self._require_open()
        started = time.perf_counter()
        if version < 0:
            raise ValueError(f"version must not be negative, got {version}")
        if version >= 1 << 63:
            raise ValueError(f"version must be below 2**63, got {version}")
        if self.last_version is not None and version <= self.last_version:
            raise StaleVersionError(
                f"{self.directory}: version must be greater than {self.last_version}, got {version}"
            )
        layout = self._layout_of(metadata)
        doing = f"publishing version {version}"
        times = PhaseTimes()
        with ExitStack() as undo:
            with self._storage(doing), times.measure("acquire"):
                self._lock.check()
                folder, file = self._store.begin(
                    layout,
                    self._head(version, layout, complete=False),
                )
            undo.callback(self._store.abandon, folder)
            with times.measure("fill"):
                checksums = self._fill(file, tensors, doing, times.seconds)
            with self._storage(doing), times.measure("flush"):
                if self._fsync:
                    file.flush()
            with self._storage(doing), times.measure("flip"), self._lock.commit():
                folder = self._store.complete(folder, self._head(version, layout, complete=True))
                undo.pop_all()
                manifest = Manifest(
                    run_id=self.run_id,
                    epoch=self.epoch,
                    version=version,
                    layout=self._marker.layout,
                    path=folder,
                    num_bytes=layout.num_bytes,
                    trailer_checksum=layout.trailer_checksum,
                    metadata=layout.metadata,
                    offsets=layout.offsets,
                    checksums=checksums,
                )
                write_manifest(self.directory, manifest, fsync=self._fsync)
                self._current = manifest
                self._store.flipped(folder)
        # Under the lock too: a writer replaced by now would remove its successor's folders.
        doing = f"version {version} is current, but removing old ones failed"
        with self._storage(doing), times.measure("collect"), self._lock.commit():
            self._store.collect()
        return PublishReport(
            version,
            self.directory / folder,
            layout.payload_bytes,
            time.perf_counter() - started,
            times.seconds,
            times.starts,
        )

    def first_difference(
        self, tensors: Iterable[tuple[str, torch.Tensor]], metadata: Sequence[ParamMeta]
    ) -> str | None:
        """Compares weights with what was published last, by its checksums.

        Args:
            tensors: As ``publish`` takes them; they are read once.
            metadata: As ``publish`` takes it.

        Returns:
            Name of the first parameter that is not as it was published; None if all are.
        """
        stored = self._current
        assert stored is not None
        assert stored.checksums is not None
        for meta, known in zip_longest(metadata, stored.metadata):
            if meta != known:
                return (known or meta).name
        for (_, tensor), meta, expected in zip(
            tensors, stored.metadata, stored.checksums, strict=True
        ):
            value = tensor.detach().resolve_conj().resolve_neg().to(meta.dtype)
            if checksum(value.cpu().contiguous()) != expected:
                return meta.name
        return None

    def close(self, *, remove: bool = False) -> None:
        """Gives the directory back; a second call does nothing.

        Args:
            remove: Whether to delete the directory with all versions, if nobody else has.

        Raises:
            FencedWriterError: ``remove`` is asked for and another writer has taken over.
            SnapshotError: The directory cannot be removed.
        """
        if self._closed:
            return
        self._closed = True
        self._store.close()
        try:
            if remove and not self._lock.is_out_of_reach:
                with self._storage("removing it"), self._lock.commit():
                    (self.directory / CURRENT).unlink(missing_ok=True)
                    shutil.rmtree(self.directory)
        finally:
            with storage_errors(f"{self.directory}: closing"):
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _new_store(self, settings: SlotSettings, *, mapped: bool) -> SlotStore | VersionStore:
        current = None if self._current is None else self._current.path
        if self._marker.layout == "slots":
            return SlotStore(
                self.directory,
                self._lock,
                settings,
                current=current,
                mapped=mapped,
                fsync=self._fsync,
            )
        return VersionStore(
            self.directory,
            self._lock,
            settings.lease_timeout_s,
            current=current,
            fsync=self._fsync,
        )

    def _fill(
        self,
        file: DataFile,
        tensors: Iterable[tuple[str, torch.Tensor]],
        doing: str,
        phases: dict[str, float],
    ) -> tuple[int, ...] | None:
        layout = file.layout
        stays = isinstance(tensors, Sequence)
        source_s, iterator = 0.0, iter(tensors)
        with self._tensor_writer.filling(file) as filling:
            for index, (meta, offset) in enumerate(
                zip(layout.metadata, layout.offsets, strict=True)
            ):
                asked = time.perf_counter()
                item = next(iterator, None)
                source_s += time.perf_counter() - asked
                if item is None:
                    raise WeightMismatchError(
                        f"{doing}: tensors end after {index} of {len(layout.metadata)}; "
                        f"{meta.name} is missing"
                    )
                name, tensor = item
                if name != meta.name or tuple(tensor.shape) != meta.shape:
                    raise WeightMismatchError(
                        f"{doing}: tensor {index} must be {meta.name} of shape "
                        f"{meta.shape}, got {name} of shape {tuple(tensor.shape)}"
                    )
                with self._storage(doing):
                    filling.add(tensor, meta, offset, stays=stays)
            surplus = next(iterator, None)
            if surplus is not None:
                raise WeightMismatchError(f"{doing}: {surplus[0]} is not in the metadata")
            with self._storage(doing):
                checksums, seconds = filling.finish()
        phases |= {"source": source_s, **seconds}
        taken = tuple(value for value in checksums if value is not None)
        return taken if len(taken) == len(checksums) else None

    def _head(self, version: int, layout: DataLayout, *, complete: bool) -> Head:
        return Head(self.run_id, self.epoch, version, layout.digest, complete)

    def _layout_of(self, metadata: Sequence[ParamMeta]) -> DataLayout:
        if self._layout is None or self._layout.metadata != tuple(metadata):
            self._layout = DataLayout.of(metadata)
        return self._layout

    def _marker_for(self, layout: LayoutName, run_id: str | None, *, takeover: bool) -> Marker:
        """The marker that the directory should have, after looking at the one that it has."""
        known = Marker.read(self.directory)
        if known is None:
            return Marker(run_id or new_run_id(), layout)
        if known.layout != layout:
            raise SnapshotError(f"{self.directory}: has layout {known.layout!r}, got {layout!r}")
        if run_id is not None and known.run_id != run_id and not takeover:
            raise SnapshotError(
                f"{self.directory}: belongs to run {known.run_id}, this is run {run_id}; name "
                "another directory, or pass takeover=True to drop its versions"
            )
        return Marker(run_id or known.run_id, layout)

    def _require_open(self) -> None:
        if self._closed:
            raise SnapshotError(f"{self.directory}: this writer is closed")

    @contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        try:
            with storage_errors(f"{self.directory}: {doing}"):
                yield
        except SnapshotError:
            # A successor removes this writer's folders: that is the cause to name, not a lost file.
            with storage_errors(f"{self.directory}: {doing}"):
                self._lock.check()
            raise

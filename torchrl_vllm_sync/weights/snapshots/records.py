"""The small records of a snapshot directory: manifest, HEAD, leases, marker, writer's lock."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta, from_json, metadata_digest, to_json
from torchrl_vllm_sync.weights.snapshots.data_file import DataLayout
from torchrl_vllm_sync.weights.snapshots.files import (
    TEMPORARY_PREFIX,
    ProcessIdentity,
    field,
    list_folder,
    new_file,
    open_file,
    read_json,
    replace_file,
    require_length,
    storage_errors,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


CURRENT = "CURRENT"
_MAGIC = "torchrl_vllm_sync-manifest"
_FORMAT = 2
_HEADER_BYTES = 256
# Some 400,000 parameters.
_MAX_BYTES = 64 << 20
_NUMBER = re.compile("[0-9]{1,19}")
# What the stores call their folders, which lie directly in the snapshot directory.
_FOLDERS = {"slots": re.compile("slot-[0-9]+-[0-9]+"), "versions": re.compile("v[0-9]+")}


@dataclass(frozen=True)
class Manifest:
    """One published version.

    Attributes:
        run_id: Run that wrote it; versions are comparable only within one run.
        epoch: Writer's epoch; a higher one fences the lower ones.
        version: Policy version.
        layout: ``"slots"`` or ``"versions"``.
        path: Folder of the data, relative to the snapshot directory.
        num_bytes: Length of the data file.
        trailer_checksum: xxh3-64 of the data file's own description of itself.
        metadata: Every parameter in order.
        offsets: Where each parameter begins in the data file, in bytes.
        checksums: xxh3-64 of each parameter's bytes; None when the writer took none.
    """

    run_id: str
    epoch: int
    version: int
    layout: str
    path: str
    num_bytes: int
    trailer_checksum: int
    metadata: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]
    checksums: tuple[int, ...] | None

    @cached_property
    def digest(self) -> str:
        """Digest of names, dtypes and shapes, as ``metadata_digest`` gives it."""
        return metadata_digest(self.metadata)

    def encode(self) -> bytes:
        """One header line with the length of the JSON body and a checksum of all, then the body."""
        record: dict[str, Any] = {
            "layout": self.layout,
            "path": self.path,
            "num_bytes": self.num_bytes,
            "trailer_checksum": self.trailer_checksum,
            "metadata": to_json(self.metadata),
            "offsets": self.offsets,
            "checksums": self.checksums,
        }
        body = json.dumps(record, separators=(",", ":")).encode()
        head = f"{_MAGIC} {_FORMAT} {self.run_id} {self.epoch} {self.version} {len(body)}"
        return f"{head} {_checksum(head, body)}\n".encode() + body


def write_manifest(directory: Path, manifest: Manifest, *, fsync: bool) -> None:
    """Makes ``manifest`` the current one, in one step."""
    replace_file(directory / CURRENT, manifest.encode(), fsync=fsync)


class ManifestFile:
    """Reads ``CURRENT``, and parses it only when its header line has changed.

    The header holds a checksum of all, so that an equal header means an equal manifest; inode
    and mtime would not do, since both can repeat within one tick of the kernel's clock.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CURRENT
        self._header: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        """The current manifest; None when nothing has been published."""
        try:
            handle = open_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with os.fdopen(handle, "rb", buffering=0) as file:
            content = file.read(_HEADER_BYTES)
            header, newline, _ = content.partition(b"\n")
            if newline and header == self._header:
                return self._manifest
            require_length(handle, self.path, _MAX_BYTES)
            content += file.read()
        manifest = decode(content, self.path, self._manifest)
        self._header, self._manifest = header, manifest
        return manifest


def decode(content: bytes, path: Path, known: Manifest | None = None) -> Manifest:
    """Parses and checks a manifest."""
    header, newline, body = content.partition(b"\n")
    head, _, checksum = header.decode(errors="replace").rpartition(" ")
    fields = head.split(" ")
    if not newline or len(fields) != 6 or fields[0] != _MAGIC:
        raise SnapshotError(f"{path}: truncated or not a manifest: it begins {content[:40]!r}")
    _, number, run_id, epoch, version, length = fields
    if number != str(_FORMAT):
        raise SnapshotError(f"{path}: manifest format must be {_FORMAT}, got {shown(number)}")
    if length != str(len(body)):
        raise SnapshotError(f"{path}: truncated: {len(body)} of {shown(length)} bytes")
    if _checksum(head, body) != checksum:
        raise SnapshotError(f"{path}: corrupted: checksum is not {shown(checksum)}")
    if not _is_int64(epoch) or not _is_int64(version):
        raise SnapshotError(f"{path}: corrupted: epoch {shown(epoch)}, version {shown(version)}")
    try:
        record = json.loads(body)
        metadata = tuple(from_json(_list(record, "metadata", path)))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: corrupted: {error}") from error
    layout, folder = field(record, "layout", str, path), field(record, "path", str, path)
    if layout not in _FOLDERS or not _FOLDERS[layout].fullmatch(folder):
        raise SnapshotError(
            f"{path}: corrupted: {shown(folder)} is no folder of layout {shown(layout)}"
        )
    manifest = Manifest(
        run_id=run_id,
        epoch=int(epoch),
        version=int(version),
        layout=layout,
        path=folder,
        num_bytes=field(record, "num_bytes", int, path),
        trailer_checksum=_unsigned(record.get("trailer_checksum"), path),
        metadata=metadata,
        offsets=tuple(_list(record, "offsets", path)),
        checksums=_checksums(record, path),
    )
    if manifest.checksums is not None and len(manifest.checksums) != len(metadata):
        raise SnapshotError(f"{path}: corrupted: parameters and checksums differ in number")
    _check_layout(manifest, path, known)
    return manifest


def _check_layout(manifest: Manifest, path: Path, known: Manifest | None) -> None:
    """Refuses any place and description of the tensors but the one that a writer gives them."""
    if known is not None and known.metadata == manifest.metadata:
        layout: DataLayout | Manifest = known
    else:
        try:
            layout = DataLayout.of(manifest.metadata)
        except WeightMismatchError as error:
            raise SnapshotError(f"{path}: corrupted: {error}") from error
    for name in ("num_bytes", "offsets", "trailer_checksum"):
        if getattr(manifest, name) != getattr(layout, name):
            raise SnapshotError(f"{path}: corrupted: {name} do not belong to these parameters")


def _is_int64(number: str) -> bool:
    return _NUMBER.fullmatch(number) is not None and int(number) < 1 << 63


def _list(record: object, name: str, path: Path) -> list[Any]:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, list):
        raise SnapshotError(f"{path}: corrupted: {name} must be a list, got {shown(value)}")
    return value


def _checksums(record: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    if record.get("checksums", ()) is None:
        return None
    return tuple(_unsigned(one, path) for one in _list(record, "checksums", path))


def _unsigned(value: object, path: Path) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise SnapshotError(f"{path}: corrupted: {shown(value)} is no checksum")
    return value


def _checksum(head: str, body: bytes) -> str:
    state = xxhash.xxh3_64(head.encode())
    state.update(b"\n")
    state.update(body)
    return state.hexdigest()


# HEAD: what a folder of stored weights holds, written before its data are touched and after.


HEAD = "HEAD"


@dataclass(frozen=True, slots=True)
class Head:
    """State of one folder.

    Attributes:
        run_id: Run of the writer.
        epoch: Epoch of the writer.
        version: Version that the folder holds, or is about to hold.
        digest: ``metadata_digest`` of the parameters that the data file is laid out for.
        complete: False from before the first byte of ``version`` until after the last.
    """

    run_id: str
    epoch: int
    version: int
    digest: str
    complete: bool

    def write(self, folder: Path, *, fsync: bool) -> None:
        """Replaces the folder's HEAD atomically."""
        write_json(folder / HEAD, asdict(self), fsync=fsync)

    @classmethod
    def read(cls, folder: Path) -> Head | None:
        """The folder's HEAD; None if it has none, or is gone."""
        path = folder / HEAD
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        return cls(
            field(record, "run_id", str, path),
            field(record, "epoch", int, path),
            field(record, "version", int, path),
            field(record, "digest", str, path),
            field(record, "complete", bool, path),
        )


# Leases: small files by which readers say which stored version they are reading.
#
# A lease is written before ``CURRENT`` is read a second time. A writer looks for leases only after
# it
# has moved ``CURRENT`` away from a folder, so it sees every lease on that folder whose reader
# found
# ``CURRENT`` unmoved. Heartbeat is the file's mtime, on the clock of the file system.


READERS = "readers"
_counter = itertools.count()


class Lease:
    """A reader's claim on one folder, from ``take`` to ``release``."""

    def __init__(self, directory: Path, reader_id: str) -> None:
        self._reader_id = reader_id
        self._process = ProcessIdentity.current()
        self.path = directory / READERS / f"{reader_id}.{os.getpid()}.{next(_counter)}"

    def take(self, folder: str, version: int) -> None:
        """Claims ``folder``, giving up the one claimed before."""
        record = self._process.to_record() | {
            "reader_id": self._reader_id,
            "folder": folder,
            "version": version,
        }
        # No fsync: a lease that a crash of the host loses had a reader that is lost with it.
        write_json(self.path, record, fsync=False)

    def heartbeat(self) -> None:
        """Shows that the reader is alive."""
        try:
            os.utime(self.path, follow_symlinks=False)
        except FileNotFoundError as error:
            raise SnapshotError(
                f"{self.path}: the writer broke this lease: no heartbeat within its lease_timeout_s"
            ) from error

    def release(self) -> None:
        """Gives the claim back; a lease that the writer has broken is gone already."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as the writer sees it.

    Attributes:
        path: Its file.
        reader: Id of the reader.
        process: Its process; None if the file does not say.
        folder: Folder it claims; None, which means every folder, if the file does not say.
        version: Version it reads, if the file says.
        age_s: Seconds since the last heartbeat.
    """

    path: Path
    reader: str
    process: ProcessIdentity | None
    folder: str | None
    version: int | None
    age_s: float

    @property
    def is_dead(self) -> bool:
        """Whether the reader's process is known to have ended."""
        return self.process is not None and self.process.is_gone() is True

    def break_(self) -> None:
        """Removes the lease; its reader learns of it at its next heartbeat or validation."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def __str__(self) -> str:
        what = "an unreadable lease" if self.folder is None else f"{self.folder} (v{self.version})"
        who = "unknown process" if self.process is None else str(self.process)
        return f"{self.reader} ({who}) holds {what}, {self.age_s:.1f} s old"


def held_leases(directory: Path, now: float) -> list[HeldLease]:
    """Every lease in ``directory``; ``now`` is the file system's time in seconds."""
    leases = [
        _held_lease(directory / READERS / name, now)
        for name in list_folder(directory / READERS)
        if not name.startswith(TEMPORARY_PREFIX)
    ]
    return [lease for lease in leases if lease is not None]


def remove_stray_files(directory: Path, now: float, older_than_s: float) -> None:
    """Removes temporary files that killed readers left between writing and renaming."""
    for name in list_folder(directory / READERS):
        if name.startswith(TEMPORARY_PREFIX):
            path = directory / READERS / name
            with suppress(FileNotFoundError):
                if now - path.lstat().st_mtime > older_than_s:
                    os.unlink(path)


def _held_lease(path: Path, now: float) -> HeldLease | None:
    """Reads one lease; None if it was released in the meantime.

    Leases are written atomically, so an unreadable one was damaged. It counts as claiming every
    folder until its heartbeat has expired.
    """
    try:
        age_s = now - path.lstat().st_mtime
    except FileNotFoundError:
        return None
    try:
        record = read_json(path)
        process = ProcessIdentity.from_record(record, path)
        reader = field(record, "reader_id", str, path)
        folder = field(record, "folder", str, path)
        return HeldLease(path, reader, process, folder, field(record, "version", int, path), age_s)
    except FileNotFoundError:
        return None
    except SnapshotError:
        return HeldLease(path, path.name, None, None, None, age_s)


# Who may publish: one writer a directory, and an epoch that shuts out those that came before.
#
# ``LOCK`` is held by ``flock`` for the writer's life. ``EPOCH`` names the owner and counts up with
# each; a writer moves ``CURRENT`` only inside ``commit()``, which holds ``COMMIT`` and finds its
# own
# epoch still in force. A writer that was stopped, lost its lock or was replaced therefore changes
# nothing visible.
# ``flock`` reaches other hosts only where the file system carries it; the epoch works on all of
# them.


LOCK, COMMIT, EPOCH = "LOCK", "COMMIT", "EPOCH"
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _Owner:
    """What ``EPOCH`` says of the writer that came last."""

    epoch: int
    process: ProcessIdentity
    released: bool
    reusable_from: int


class WriterLock:
    """The right to publish into one directory, from ``acquire`` to ``release``.

    Attributes:
        epoch: This writer's number.
        reusable_from: What writers from this epoch on have made may be written again: those before
            this one have certainly ended. What is older may be in the hands of a writer that was
            replaced while it was stopped, and that writes on into it when it wakes up.
    """

    def __init__(self, directory: Path, *, timeout_s: float, fsync: bool) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._fsync = fsync
        self._process = ProcessIdentity.current()
        self._handle = -1
        self.epoch = 0
        self.reusable_from = 0

    def acquire(self, *, takeover: bool) -> None:
        """Becomes the owner."""
        with self._locked_commit():
            previous = self._owner()
            released = previous is None or previous.released
            gone = True if previous is None or released else previous.process.is_gone()
            if gone is False and not takeover:
                raise self._held_error(previous)
            path = self._directory / LOCK
            handle = open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                # A dead owner's lock lives on in processes that it forked; that is no owner.
                if (released or not gone) and not takeover:
                    raise self._held_error(previous) from error
                os.unlink(path)
                handle = new_file(path)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._handle = handle
            self.epoch = 1 if previous is None else previous.epoch + 1
            # Carried on from writer to writer: one that was replaced while it was alive may wake up
            # long after its successor has ended.
            self.reusable_from = self.epoch
            if previous is not None and gone is True:
                self.reusable_from = previous.reusable_from
            self._write_epoch(released=False)

    @property
    def is_removed(self) -> bool:
        """Whether the directory is gone, or empty."""
        with storage_errors(f"{self._directory}: looking for {EPOCH}"):
            return not (self._directory / EPOCH).exists()

    @property
    def is_out_of_reach(self) -> bool:
        """Whether there is nothing to give back: the directory is gone, or not to be got at."""
        try:
            return self.is_removed
        except SnapshotError:
            return True

    def check(self) -> None:
        """Finds out whether this writer still owns the directory."""
        owner = self._owner()
        if owner is None:
            raise SnapshotError(
                f"{self._directory}: {EPOCH} is gone: the directory was removed or replaced"
            )
        # In a directory that was removed and made anew, epochs begin again.
        if (owner.epoch, owner.process) != (self.epoch, self._process):
            raise FencedWriterError(
                f"{self._directory}: writer of epoch {self.epoch} was replaced by {owner.process}, "
                f"epoch {owner.epoch}"
            )

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Keeps every other writer out of the few file operations that make a version visible."""
        with self._locked_commit():
            self.check()
            yield

    def now(self) -> float:
        """The file system's time in seconds, which hosts that share it agree on."""
        os.utime(self._handle)
        return os.fstat(self._handle).st_mtime

    def release(self) -> None:
        """Gives the right back; what a fenced writer had is another's already."""
        if self._handle < 0:
            return
        try:
            if not self.is_out_of_reach:
                with suppress(FencedWriterError, FileNotFoundError), self.commit():
                    self._write_epoch(released=True)
        finally:
            os.close(self._handle)
            self._handle = -1

    def _held_error(self, owner: _Owner | None) -> SnapshotError:
        who = "an unknown process" if owner is None else str(owner.process)
        return SnapshotError(
            f"{self._directory}: another writer holds it: {who}; end that process, or pass "
            "takeover=True to fence it"
        )

    def _owner(self) -> _Owner | None:
        path = self._directory / EPOCH
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        epoch, released = field(record, "epoch", int, path), field(record, "released", bool, path)
        # Where it is missing an older release wrote, of which only its own number is known.
        record.setdefault("reusable_from", epoch + 1)
        reusable_from = field(record, "reusable_from", int, path)
        return _Owner(epoch, ProcessIdentity.from_record(record, path), released, reusable_from)

    def _write_epoch(self, *, released: bool) -> None:
        record = self._process.to_record() | {
            "epoch": self.epoch,
            "released": released,
            "reusable_from": self.reusable_from,
        }
        write_json(self._directory / EPOCH, record, fsync=self._fsync)

    @contextmanager
    def _locked_commit(self) -> Iterator[None]:
        path = self._directory / COMMIT
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            deadline = time.monotonic() + self._timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        owner = self._owner()
                        who = "unknown" if owner is None else str(owner.process)
                        raise SnapshotError(
                            f"{path}: locked for {self._timeout_s} s; the owner, {who}, may be "
                            "stopped in the middle of a commit"
                        ) from error
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(handle)


# The marker: the file that makes a directory ours, and says whose run it belongs to.


LayoutName = Literal["slots", "versions"]
LAYOUTS = ("slots", "versions")
MARKER = "SNAPSHOTS.json"
# An empty file in a directory that nobody named: it is to go with the process that made it.
TEMPORARY = "TEMPORARY"
_MARKER_FORMAT = 1
# What a writer may have made before it died and before the marker was there.
_BEFORE_MARKER = frozenset({LOCK, COMMIT, EPOCH, READERS, TEMPORARY})


@dataclass(frozen=True, slots=True)
class Marker:
    """What a snapshot directory says of itself.

    Attributes:
        run_id: The training run; versions are comparable only within one.
        layout: ``"slots"`` or ``"versions"``.
        format: Number of the on-disk format.
    """

    run_id: str
    layout: str
    format: int = _MARKER_FORMAT

    @classmethod
    def read(cls, directory: Path) -> Marker | None:
        """The directory's marker; None if it is new: absent, empty, or barely begun."""
        path = directory / MARKER
        try:
            record = read_json(path)
        except FileNotFoundError:
            try:
                names = list_folder(directory)
            except FileNotFoundError:
                return None
            foreign = [
                name
                for name in names
                if name not in _BEFORE_MARKER and not name.startswith(TEMPORARY_PREFIX)
            ]
            if foreign and MARKER not in foreign:
                raise SnapshotError(
                    f"{directory}: holds other files ({', '.join(foreign[:5])}) and no {MARKER}; "
                    "name a new or empty directory"
                ) from None
            return None
        found = field(record, "format", int, path)
        if found != _MARKER_FORMAT:
            raise SnapshotError(f"{path}: format must be {_MARKER_FORMAT}, got {found}")
        layout = field(record, "layout", str, path)
        if layout not in LAYOUTS:
            raise SnapshotError(f"{path}: corrupted: there is no layout {shown(layout)}")
        return cls(field(record, "run_id", str, path), layout)

    def write(self, directory: Path, *, fsync: bool) -> None:
        """Makes ``directory`` ours."""
        write_json(directory / MARKER, asdict(self), fsync=fsync)


def new_run_id() -> str:
    """A run id that no other run has."""
    return uuid.uuid4().hex

"""Records of a snapshot directory, and the lock of its one writer.

``CURRENT`` is the manifest of the current version. ``SNAPSHOTS.json`` marks the directory as this
library's, and names its run and its last writer.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta, from_json, to_json
from torchrl_vllm_sync.weights.snapshots.data_file import DataLayout
from torchrl_vllm_sync.weights.snapshots.files import (
    TEMPORARY_PREFIX,
    ProcessIdentity,
    field,
    list_folder,
    new_file,
    open_file,
    parse_json,
    read_file,
    read_json,
    storage_errors,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LayoutName = Literal["slots", "versions"]
LAYOUTS = ("slots", "versions")
CURRENT = "CURRENT"
MARKER = "SNAPSHOTS.json"
LOCK, COMMIT = "LOCK", "COMMIT"
# An empty file in a directory that no user named: it is to be removed with its process.
TEMPORARY = "TEMPORARY"

# About 400,000 parameters.
_MAX_MANIFEST_BYTES = 64 << 20
# The folders of versions lie directly in the snapshot directory.
FOLDERS = {
    "slots": re.compile("slot-(?P<epoch>[0-9]+)-[0-9]+"),
    "versions": re.compile("v[0-9]+-(?P<epoch>[0-9]+)"),
}
# What a writer that died may have made before the marker.
_BEFORE_MARKER = frozenset({LOCK, COMMIT, TEMPORARY})
# How long another writer's commit may take.
LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version."""

    run_id: str  # run that wrote it; versions are comparable only within one run
    epoch: int  # writer's epoch
    version: int  # policy version
    layout: str  # `"slots"` or `"versions"`
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
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "version": self.version,
            "layout": self.layout,
            "path": self.path,
            "metadata": to_json(self.metadata),
            "checksums": self.checksums,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], path: Path, known: DataLayout | None) -> Manifest:
        """Checks and parses a record; ``known`` may be its layout, to spare computing it."""
        layout, folder = field(record, "layout", str, path), field(record, "path", str, path)
        if layout not in FOLDERS or not FOLDERS[layout].fullmatch(folder):
            raise SnapshotError(
                f"{path}: corrupted: {shown(folder)} is no folder of layout {shown(layout)}"
            )
        try:
            metadata = tuple(from_json(_list(record, "metadata", path)))
            if known is None or known.metadata != metadata:
                known = DataLayout.of(metadata)
        except (ValueError, WeightMismatchError) as error:
            raise SnapshotError(f"{path}: corrupted: {error}") from error
        checksums = _list(record, "checksums", path)
        for value in checksums:
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise SnapshotError(f"{path}: corrupted: {shown(value)} is no checksum")
        if len(checksums) != len(metadata):
            raise SnapshotError(f"{path}: corrupted: parameters and checksums differ in number")
        return cls(
            field(record, "run_id", str, path),
            _natural(record, "epoch", path),
            _natural(record, "version", path),
            layout,
            folder,
            known,
            tuple(checksums),
        )


class ManifestFile:
    """Reads and replaces ``CURRENT``; parses it only when its content has changed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CURRENT
        self._content: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        """The current manifest; None when nothing has been published."""
        try:
            content = read_file(self.path, max_bytes=_MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if content != self._content:
            known = None if self._manifest is None else self._manifest.data
            record = parse_json(content, self.path)
            self._manifest = Manifest.from_record(record, self.path, known)
            self._content = content
        return self._manifest

    def write(self, manifest: Manifest, *, fsync: bool) -> None:
        """Makes ``manifest`` the current one atomically."""
        write_json(self.path, manifest.to_record(), fsync=fsync)


def _natural(record: dict[str, Any], name: str, path: Path) -> int:
    value = field(record, name, int, path)
    if value < 0:
        raise SnapshotError(f"{path}: corrupted: {name} must not be negative, got {value}")
    return value


def _list(record: dict[str, Any], name: str, path: Path) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list):
        raise SnapshotError(f"{path}: corrupted: {name} must be a list, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that a directory belongs to, and its last writer."""

    run_id: str  # the training run; versions are comparable only within one
    layout: LayoutName  # how versions are stored
    epoch: int  # number of the writer; each counts on from the one before
    process: ProcessIdentity  # the writer's
    released: bool  # whether it has given the directory back
    # Folders of writers from this epoch on may be written again: their writers have certainly
    # ended. An older one may be that of a writer that was replaced while it was stopped, and that
    # writes on when it resumes.
    reusable_from: int

    @classmethod
    def read(cls, directory: Path) -> Owner | None:
        """Reads the last owner; None if the directory is new: absent, empty, or barely begun."""
        path = directory / MARKER
        try:
            record = read_json(path)
        except FileNotFoundError:
            try:
                names = list_folder(directory)
            except FileNotFoundError:
                return None
            ours = {MARKER, *_BEFORE_MARKER}
            foreign = [n for n in names if n not in ours and not n.startswith(TEMPORARY_PREFIX)]
            if foreign and MARKER not in names:
                raise SnapshotError(
                    f"{directory}: holds other files ({', '.join(foreign[:5])}) and no {MARKER}; "
                    "name a new or empty directory"
                ) from None
            return None
        layout = field(record, "layout", str, path)
        if layout not in LAYOUTS:
            raise SnapshotError(f"{path}: corrupted: there is no layout {shown(layout)}")
        return cls(
            field(record, "run_id", str, path),
            cast("LayoutName", layout),
            _natural(record, "epoch", path),
            ProcessIdentity.from_record(record, path),
            field(record, "released", bool, path),
            _natural(record, "reusable_from", path),
        )

    def write(self, directory: Path, *, fsync: bool) -> None:
        """Makes this the owner of ``directory``."""
        record = asdict(self)
        write_json(directory / MARKER, record | record.pop("process"), fsync=fsync)

    @classmethod
    def before(
        cls, directory: Path, layout: LayoutName, run_id: str | None, *, takeover: bool
    ) -> Owner | None:
        """Reads the last owner; refuses another layout, or another run without ``takeover``."""
        known = cls.read(directory)
        if known is None:
            return None
        if known.layout != layout:
            raise SnapshotError(f"{directory}: has layout {known.layout!r}, got {layout!r}")
        if run_id not in {None, known.run_id} and not takeover:
            raise SnapshotError(
                f"{directory}: belongs to run {known.run_id}, this is run {run_id}; name "
                "another directory, or pass takeover=True to drop its versions"
            )
        return known


class WriterLock:
    """The right to publish into one directory, from ``acquire`` to ``release``.

    ``LOCK`` is held by ``flock`` for the writer's life; where that does not reach other hosts, the
    epoch still does. A writer moves ``CURRENT`` only inside ``commit()``, which holds ``COMMIT``
    and finds its own epoch in force: one that was stopped, lost its lock or was replaced changes
    nothing visible.
    """

    owner: Owner

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self._directory = directory
        self._fsync = fsync
        self._handle = -1

    def acquire(self, layout: LayoutName, run_id: str | None, *, takeover: bool) -> None:
        """Becomes the owner, inside ``exclusive()``; removes another run's manifest."""
        previous = Owner.before(self._directory, layout, run_id, takeover=takeover)
        gone = previous is None or previous.released or previous.process.is_gone()
        if gone is False and not takeover:
            raise self._held_error(previous)
        path = self._directory / LOCK
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            # A dead owner's lock lives on in processes that it forked; those are no owners.
            if (previous is None or previous.released or not gone) and not takeover:
                raise self._held_error(previous) from error
            os.unlink(path)
            handle = new_file(path)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._handle = handle
        epoch = 1 if previous is None else previous.epoch + 1
        known = None if previous is None else previous.run_id
        run_id = run_id or known or uuid.uuid4().hex
        if run_id != known:
            (self._directory / CURRENT).unlink(missing_ok=True)
        # Carried on from writer to writer: one that was replaced while it was alive may resume long
        # after its successor has ended.
        reusable_from = previous.reusable_from if previous is not None and gone else epoch
        process = ProcessIdentity.current()
        self.owner = Owner(run_id, layout, epoch, process, False, reusable_from)
        self.owner.write(self._directory, fsync=self._fsync)

    @property
    def is_removed(self) -> bool:
        """Whether the directory is gone, or empty."""
        with storage_errors(f"{self._directory}: looking for {MARKER}"):
            return not (self._directory / MARKER).exists()

    @property
    def is_out_of_reach(self) -> bool:
        """Whether there is nothing to release: the directory is gone, or inaccessible."""
        try:
            return self.is_removed
        except SnapshotError:
            return True

    def check(self) -> None:
        """Raises unless this writer still owns the directory."""
        found = Owner.read(self._directory)
        if found is None:
            raise SnapshotError(
                f"{self._directory}: {MARKER} is gone: the directory was removed or replaced"
            )
        # In a directory that was removed and made anew, epochs begin again.
        if (found.epoch, found.process) != (self.owner.epoch, self.owner.process):
            raise FencedWriterError(
                f"{self._directory}: writer of epoch {self.owner.epoch} was replaced by "
                f"{found.process}, epoch {found.epoch}"
            )

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Excludes other writers from the few file operations that make a version visible."""
        with self.exclusive():
            self.check()
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds ``COMMIT``, whichever writer owns the directory."""
        path = self._directory / COMMIT
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        owner = Owner.read(self._directory)
                        who = "unknown" if owner is None else str(owner.process)
                        raise SnapshotError(
                            f"{path}: locked for {LOCK_TIMEOUT_S} s; the owner, {who}, may be "
                            "stopped in the middle of a commit"
                        ) from error
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(handle)

    def release(self) -> None:
        """Gives up the directory, unless a successor owns it already."""
        if self._handle < 0:
            return
        try:
            if not self.is_out_of_reach:
                with suppress(FencedWriterError, FileNotFoundError), self.commit():
                    replace(self.owner, released=True).write(self._directory, fsync=self._fsync)
        finally:
            os.close(self._handle)
            self._handle = -1

    def _held_error(self, owner: Owner | None) -> SnapshotError:
        who = "an unknown process" if owner is None else str(owner.process)
        return SnapshotError(
            f"{self._directory}: another writer holds it: {who}; end that process, or pass "
            "takeover=True to fence it"
        )

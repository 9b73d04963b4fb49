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
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import xxhash

from torchrl_vllm_sync.checks import Deadline, shown
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta, from_json, to_json
from torchrl_vllm_sync.weights.snapshots.data_file import DataLayout
from torchrl_vllm_sync.weights.snapshots.files import (
    TEMPORARY_PREFIX,
    ProcessIdentity,
    fields_of,
    list_folder,
    new_file,
    open_file,
    opened,
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
LAYOUTS = get_args(LayoutName)
CURRENT = "CURRENT"
MARKER = "SNAPSHOTS.json"
LOCK, COMMIT = "LOCK", "COMMIT"
# An empty file in a directory that no user named: it is to be removed with its process.
TEMPORARY = "TEMPORARY"
# Folders of versions lie directly in the directory: slot-<epoch>-<number>, v<version>-<epoch>.
FOLDER = re.compile(r"(?:slot-|v[0-9]+-)(?P<epoch>[0-9]+)(?:-[0-9]+)?")

# About 400,000 parameters.
_MAX_MANIFEST_BYTES = 64 << 20
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
    layout: LayoutName  # how the directory stores versions
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
        record = {one.name: getattr(self, one.name) for one in fields(self)}
        del record["data"]
        return record | {"metadata": to_json(self.metadata)}

    @classmethod
    def from_record(cls, record: dict[str, Any], path: Path, known: DataLayout | None) -> Manifest:
        """Checks and parses a record; ``known`` may be its layout, to spare computing it."""
        run_id, epoch, version = fields_of(record, path, run_id=str, epoch=int, version=int)
        layout, folder = fields_of(record, path, layout=str, path=str)
        items, checksums = fields_of(record, path, metadata=list, checksums=list)
        if layout not in LAYOUTS or not FOLDER.fullmatch(folder):
            raise SnapshotError(
                f"{path}: corrupted: {shown(folder)} is no folder of layout {shown(layout)}"
            )
        try:
            data = DataLayout.of(from_json(items), known)
        except (ValueError, WeightMismatchError) as error:
            raise SnapshotError(f"{path}: corrupted: {error}") from error
        for value in checksums:
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise SnapshotError(f"{path}: corrupted: {shown(value)} is no checksum")
        if len(checksums) != len(items):
            raise SnapshotError(f"{path}: corrupted: parameters and checksums differ in number")
        return cls(run_id, epoch, version, layout, folder, data, tuple(checksums))


class ManifestFile:
    """Reads and replaces ``CURRENT``; parses it only when its content has changed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CURRENT
        self._content: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        """The current manifest; None when nothing has been published."""
        with storage_errors(f"{self.path.parent}: reading {CURRENT}"):
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
        run_id, layout, epoch, released, reusable_from = fields_of(
            record, path, run_id=str, layout=str, epoch=int, released=bool, reusable_from=int
        )
        if layout not in LAYOUTS:
            raise SnapshotError(f"{path}: corrupted: there is no layout {shown(layout)}")
        process = fields_of(record, path, host=str, hostname=str, pid=int, start_time=int)
        return cls(run_id, layout, epoch, ProcessIdentity(*process), released, reusable_from)

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
        self._directory, self._fsync = directory, fsync
        self._handle = -1

    def acquire(self, layout: LayoutName, run_id: str | None, *, takeover: bool) -> None:
        """Becomes the owner, inside ``exclusive()``; removes another run's manifest."""
        found = Owner.before(self._directory, layout, run_id, takeover=takeover)
        me = ProcessIdentity.current()
        last = found or Owner(run_id or uuid.uuid4().hex, layout, 0, me, True, reusable_from=1)
        gone = last.released or last.process.is_gone()
        if gone is False and not takeover:
            raise self._held_error(found)
        path = self._directory / LOCK
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            # A dead owner's lock lives on in processes that it forked; those are no owners.
            if (last.released or not gone) and not takeover:
                raise self._held_error(found) from error
            os.unlink(path)
            handle = new_file(path)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._handle = handle
        if run_id not in {None, last.run_id}:
            (self._directory / CURRENT).unlink(missing_ok=True)
        epoch = last.epoch + 1
        # Carried on from writer to writer: one that was replaced while it was alive may resume long
        # after its successor has ended.
        reusable_from = last.reusable_from if gone else epoch
        self.owner = Owner(run_id or last.run_id, layout, epoch, me, False, reusable_from)
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
        path, deadline = self._directory / COMMIT, Deadline(LOCK_TIMEOUT_S)
        with opened(path, os.O_RDWR | os.O_CREAT) as handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if deadline.passed:
                        owner = Owner.read(self._directory)
                        raise SnapshotError(
                            f"{path}: locked for {LOCK_TIMEOUT_S} s; the owner, {_named(owner)}, "
                            "may be stopped in the middle of a commit"
                        ) from error
                    time.sleep(_POLL_S)
            yield

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
        return SnapshotError(
            f"{self._directory}: another writer holds it: {_named(owner)}; end that process, or "
            "pass takeover=True to fence it"
        )


def _named(owner: Owner | None) -> str:
    return "an unknown process" if owner is None else str(owner.process)

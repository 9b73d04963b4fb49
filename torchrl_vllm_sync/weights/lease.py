"""Leases: small files by which readers say which stored version they are reading.

A lease is written before ``CURRENT`` is read a second time. A writer looks for leases only after it
has moved ``CURRENT`` away from a folder, so it sees every lease on that folder whose reader found
``CURRENT`` unmoved. Heartbeat is the file's mtime, on the clock of the file system.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.private_files import TEMPORARY_PREFIX, list_folder
from torchrl_vllm_sync.weights.storage import ProcessIdentity, field, read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

READERS = "readers"
_counter = itertools.count()


class Lease:
    """A reader's claim on one folder, from ``take`` to ``release``."""

    def __init__(self, directory: Path, reader_id: str) -> None:
        self._reader_id = reader_id
        self._process = ProcessIdentity.current()
        self.path = directory / READERS / f"{reader_id}.{os.getpid()}.{next(_counter)}"

    def take(self, folder: str, version: int) -> None:
        """Claims ``folder``, giving up the one claimed before.

        Raises:
            OSError: The lease cannot be written.
            SnapshotError: Others can write into the folder of leases.
        """
        record = self._process.to_record() | {
            "reader_id": self._reader_id,
            "folder": folder,
            "version": version,
        }
        # No fsync: a lease that a crash of the host loses had a reader that is lost with it.
        write_json(self.path, record, fsync=False)

    def heartbeat(self) -> None:
        """Shows that the reader is alive.

        Raises:
            SnapshotError: The writer has broken the lease.
        """
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

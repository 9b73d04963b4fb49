"""Leases: small files by which readers say which stored version they are reading.

A lease is written before ``CURRENT`` is read a second time. A writer looks for leases only after it
has moved ``CURRENT`` away from a folder, so it sees every lease on that folder whose reader found
``CURRENT`` unmoved. Heartbeat is the file's mtime, on the clock of the file system.
"""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.storage import (
    TEMPORARY_PREFIX,
    ProcessIdentity,
    read_json,
    write_atomically,
)

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
        """
        record = self._process.to_record() | {
            "reader_id": self._reader_id,
            "folder": folder,
            "version": version,
        }
        # No fsync: a lease that a crash of the host loses had a reader that is lost with it.
        write_atomically(self.path, json.dumps(record).encode(), fsync=False)

    def heartbeat(self) -> None:
        """Shows that the reader is alive.

        Raises:
            SnapshotError: The writer has broken the lease.
        """
        try:
            os.utime(self.path)
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
        _held_lease(Path(entry.path), now)
        for entry in os.scandir(directory / READERS)
        if not entry.name.startswith(TEMPORARY_PREFIX)
    ]
    return [lease for lease in leases if lease is not None]


def remove_stray_files(directory: Path, now: float, older_than_s: float) -> None:
    """Removes temporary files that killed readers left between writing and renaming."""
    for entry in os.scandir(directory / READERS):
        if entry.name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):
                if now - entry.stat().st_mtime > older_than_s:
                    os.unlink(entry.path)


def _held_lease(path: Path, now: float) -> HeldLease | None:
    """Reads one lease; None if it was released in the meantime.

    Leases are written atomically, so an unreadable one was damaged. It counts as claiming every
    folder until its heartbeat has expired.
    """
    try:
        age_s = now - path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        record = read_json(path)
        process = ProcessIdentity.from_record(record, path)
        reader, folder = str(record["reader_id"]), str(record["folder"])
        return HeldLease(path, reader, process, folder, int(record["version"]), age_s)
    except FileNotFoundError:
        return None
    except (SnapshotError, KeyError, TypeError, ValueError):
        return HeldLease(path, path.name, None, None, None, age_s)

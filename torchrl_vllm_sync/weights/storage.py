"""What snapshots need of the system: atomic small files, mount types, process identity."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY_PREFIX = ".tmp-"
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns the ``OSError`` of a full, unwritable or vanished directory into ``SnapshotError``."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SnapshotError(f"{doing}: {error.strerror or error}{where}") from error


def write_atomically(path: Path, content: bytes, *, fsync: bool) -> None:
    """Replaces ``path`` in one step: temporary file, ``fsync``, rename, ``fsync`` of the folder.

    Reason for the order: the rename is durable only once the folder is, and must never be durable
    before the content.
    """
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if fsync:
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, record: dict[str, Any], *, fsync: bool) -> None:
    """Writes one small JSON object atomically."""
    write_atomically(path, json.dumps(record).encode(), fsync=fsync)


def read_json(path: Path) -> dict[str, Any]:
    """Reads one small JSON object.

    Raises:
        FileNotFoundError: There is no such file.
        SnapshotError: The content is no JSON object.
    """
    content = path.read_bytes()
    try:
        record = json.loads(content)
    except ValueError as error:
        raise SnapshotError(f"{path}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise SnapshotError(f"{path}: must hold a JSON object, got {type(record).__name__}")
    return record


def remove_folder(path: Path) -> None:
    """Removes a folder; what another process still uses there is left for the next time.

    NFS keeps a file that a process of this host has open under another name in its folder.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EBUSY}:
            raise


def file_system_type(path: Path) -> str:
    """The mount's type as the kernel names it, such as ``"tmpfs"``, ``"ext4"`` or ``"nfs4"``."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == wanted:
            found = tail.split()[0]
    return found


def is_memory_file_system(path: Path) -> bool:
    """Whether ``path`` lives in memory, so that ``fsync`` could protect nothing."""
    return file_system_type(path) in _MEMORY_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told apart from a later one that got the same pid.

    Attributes:
        host: Boot id and pid namespace: pids are comparable only where this is equal.
        hostname: For messages.
        pid: Process id in that namespace.
        start_time: Clock ticks from boot to the process's start.
    """

    host: str
    hostname: str
    pid: int
    start_time: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        pid = os.getpid()
        return cls(_host(), socket.gethostname(), pid, _start_time(pid) or 0)

    @classmethod
    def from_record(cls, record: dict[str, Any], source: Path) -> ProcessIdentity:
        """Reads what ``to_record`` wrote.

        Raises:
            SnapshotError: A field is missing or has a wrong type; names ``source``.
        """
        try:
            return cls(
                str(record["host"]),
                str(record["hostname"]),
                int(record["pid"]),
                int(record["start_time"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"{source}: no process in it: {error!r}") from error

    def to_record(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return asdict(self)

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where that cannot be known from this host."""
        if self.host != _host():
            return None
        return _start_time(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _host() -> str:
    return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat`` (proc(5)); None when the process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in field 2 may itself hold spaces and brackets, so count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    return int(fields[19])

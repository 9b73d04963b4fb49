"""What snapshots need of the system: small records, mount types, process identity."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.private_files import read_file, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# Far more than any of the records takes.
_MAX_JSON_BYTES = 1 << 16
_CHECKSUM = "xxh3_64"
_NUM_INT64 = 2**63
_Value = TypeVar("_Value", str, int, bool)


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns the ``OSError`` of a full, unwritable or vanished directory into ``SnapshotError``."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SnapshotError(f"{doing}: {error.strerror or error}{where}") from error


def write_json(path: Path, record: dict[str, Any], *, fsync: bool) -> None:
    """Writes one small JSON object atomically, with a checksum among its fields."""
    content = json.dumps(record | {_CHECKSUM: _checksum(record)}).encode()
    replace_file(path, content, fsync=fsync)


def read_json(path: Path) -> dict[str, Any]:
    """Reads what ``write_json`` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        SnapshotError: The content is no JSON object, or not the one that was written, or others
            can have written it.
    """
    content = read_file(path, max_bytes=_MAX_JSON_BYTES)
    try:
        record = json.loads(content)
        if not isinstance(record, dict):
            raise SnapshotError(f"{path}: must hold a JSON object, got {type(record).__name__}")
        checksum = record.pop(_CHECKSUM, None)
        expected = _checksum(record)  # fails from a lower depth on than reading does
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: not JSON: {error}") from error
    if checksum != expected:
        raise SnapshotError(f"{path}: corrupted: checksum is not {shown(checksum)}")
    return record


def field(record: dict[str, Any], name: str, kind: type[_Value], source: Path) -> _Value:
    """Returns one field of a record, which must have exactly this type.

    Raises:
        SnapshotError: It is missing, of another type, or an integer of more than 64 bits.
    """
    value = record.get(name)
    if type(value) is not kind or (isinstance(value, int) and abs(value) >= _NUM_INT64):
        raise SnapshotError(
            f"{source}: corrupted: {name} must be {kind.__name__}, got {shown(value)}"
        )
    return cast("_Value", value)


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


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
        return cls(
            field(record, "host", str, source),
            field(record, "hostname", str, source),
            field(record, "pid", int, source),
            field(record, "start_time", int, source),
        )

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
    """Field 22 of ``/proc/<pid>/stat`` (proc(5)); None when the process is gone or a zombie.

    A zombie with other threads (field 20) is none yet: they may still be storing something.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in field 2 may itself hold spaces and brackets, so count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"} and int(fields[17]) <= 1:
        return None
    return int(fields[19])

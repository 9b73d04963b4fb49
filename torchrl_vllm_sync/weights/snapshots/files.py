"""Private files, locks, checksummed records and process identities for snapshots."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import secrets
import shutil
import socket
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.replica import process_began

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# ---- Trust
#
# Any user who can write into a snapshot directory decides what weights the engines get. So folders
# are made with mode 0700 and files with 0600, whatever the umask, and one that is opened must
#
# * be a folder or a regular file, as expected, and no symbolic link;
# * belong to the user who opens it, or to root;
# * be writable by no other user. Readable is fine: a directory that the user made may have 0755.
#
# Each rule is checked on the open handle, so nothing can replace what was checked. Folders above
# the snapshot directory are the user's responsibility; a sticky one, such as ``/dev/shm``, will do.
# Where a file system stores other owners than those who write (NFS with ``root_squash``), the owner
# that a new file gets counts as this user too.

TEMPORARY_PREFIX = ".tmp-"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
# Owner of the files that this process makes, by the file system's device number.
_mapped_owners: dict[int, int] = {}
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_Value = TypeVar("_Value", str, int, bool)


def open_folder(path: Path) -> int:
    """Opens a folder that no other user can write into; the caller closes the handle."""
    handle = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    return _checked(handle, path, handle, stat.S_ISDIR)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that no other user can have written; the caller closes the handle."""
    folder = open_folder(path.parent)
    try:
        return _checked(_open(path, flags, folder), path, folder, stat.S_ISREG)
    finally:
        os.close(folder)


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    # O_NONBLOCK: opening a pipe in the file's place must not block.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path if folder is None else path.name, flags, FILE_MODE, dir_fd=folder)
    except OSError as error:
        if path.is_symlink():
            raise SnapshotError(
                f"{path}: is a symbolic link, which others may have made: name its target"
            ) from error
        error.filename = str(path)
        raise


def _checked(handle: int, path: Path, folder: int, is_right: Callable[[int], bool]) -> int:
    """Returns the handle; closes it if what it opened cannot be trusted."""
    try:
        _check(os.fstat(handle), path, folder, is_right)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(facts: os.stat_result, path: Path, folder: int, is_right: Callable[[int], bool]) -> None:
    """Refuses what is of the wrong kind, or what another user owns or may write."""
    if not is_right(facts.st_mode):
        raise SnapshotError(f"{path}: must be a regular file, and is none")
    if facts.st_uid not in {os.geteuid(), _ROOT} and facts.st_uid != _owner_here(folder):
        raise SnapshotError(
            f"{path}: belongs to user {facts.st_uid}, and this process runs as user "
            f"{os.geteuid()}: trainer and engines must run as one user, who made the directory"
        )
    if facts.st_mode & _OTHERS_WRITE:
        raise SnapshotError(
            f"{path}: others can write it (mode {stat.S_IMODE(facts.st_mode):04o}): whoever can "
            f"decides what the engines load; mend it with chmod go-w {path}"
        )


def _owner_here(folder: int) -> int:
    """The owner that the file system gives to what this process makes in ``folder``."""
    device = os.fstat(folder).st_dev
    if device not in _mapped_owners:
        name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            probe = os.open(name, flags, FILE_MODE, dir_fd=folder)
        except OSError:  # this process cannot have made anything there
            return os.geteuid()
        try:
            _mapped_owners[device] = os.fstat(probe).st_uid
        finally:
            os.close(probe)
            with suppress(FileNotFoundError):  # a new writer removes temporary files
                os.unlink(name, dir_fd=folder)
    return _mapped_owners[device]


def new_file(path: Path) -> int:
    """Makes a file of mode 0600 and opens it for reading and writing."""
    handle = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(handle, FILE_MODE)
    return handle


def require_folder(path: Path) -> None:
    """Makes a folder of mode 0700 unless there is one that can be trusted."""
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        os.close(open_folder(path))
        return
    if stat.S_IMODE(os.lstat(path).st_mode) & FOLDER_MODE != FOLDER_MODE:  # such an umask
        os.chmod(path, FOLDER_MODE)


def list_folder(path: Path) -> list[str]:
    handle = open_folder(path)
    try:
        return sorted(os.listdir(handle))
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Removes a folder; what another process still uses there is left for the next time."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # NFS keeps a file that a process of this host has open under another name in its folder.
        if error.errno not in {errno.ENOTEMPTY, errno.EBUSY}:
            raise


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Reads a whole file; refuses one longer than ``max_bytes`` before reading it."""
    with os.fdopen(open_file(path), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found > max_bytes:
            raise SnapshotError(
                f"{path}: corrupted: must have at most {max_bytes} bytes, has {found}"
            )
        return file.read()


def replace_file(path: Path, content: bytes, *, fsync: bool) -> None:
    """Replaces ``path`` in one step: temporary file, ``fsync``, rename, ``fsync`` of the folder."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with os.fdopen(new_file(temporary), "wb") as file:
            file.write(content)
            file.flush()
            if fsync:  # first: the rename must never be durable before the content
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:  # the rename is durable only once the folder is
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    handle = open_folder(path)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds a ``flock`` on a file; False if there is none."""
    try:
        handle = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked by now would keep it
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def lock_holders(path: Path) -> str:
    """Names who locked a file, as far as this pid namespace shows it, for messages."""
    try:
        inode, text = str(path.lstat().st_ino), Path("/proc/locks").read_text()
    except OSError:  # released since, or a container without such a list
        return "an unknown process"
    rows = map(str.split, text.splitlines())
    pids = {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode}
    names = []
    for pid in sorted(pids):
        try:
            names.append(f"pid {pid} ({psutil.Process(pid).name()})")
        except (psutil.Error, ValueError):  # ended since, or of another namespace
            names.append(f"pid {pid}")
    return ", ".join(names) or "an unknown process"


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns the ``OSError`` of a full, unwritable or vanished directory into ``SnapshotError``."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SnapshotError(f"{doing}: {error.strerror or error}{where}") from error


# ---- Records: JSON objects that begin with a checksum of all bytes after it, and a format
_FORMAT = 3


def write_json(path: Path, record: dict[str, Any], *, fsync: bool) -> None:
    """Replaces ``path`` by ``record`` atomically."""
    rest = json.dumps({"format": _FORMAT} | record, separators=(",", ":"))[1:].encode()
    replace_file(path, _signature(rest) + rest, fsync=fsync)


def read_json(path: Path, *, max_bytes: int = 1 << 16) -> dict[str, Any]:
    return parse_json(read_file(path, max_bytes=max_bytes), path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Checks and parses what ``write_json`` put into ``path``."""
    signature = content[: len(_signature(b""))]
    if signature != _signature(content[len(signature) :]):
        raise SnapshotError(
            f"{path}: truncated, corrupted or of another release: it begins {content[:40]!r}"
        )
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: not JSON: {error}") from error
    found = field(record, "format", int, path)
    if found != _FORMAT:
        raise SnapshotError(f"{path}: format must be {_FORMAT}, got {found}")
    return record


def _signature(rest: bytes) -> bytes:
    return f'{{"xxh3_64":"{xxhash.xxh3_64_hexdigest(rest)}",'.encode()


def field(record: dict[str, Any], name: str, kind: type[_Value], source: Path) -> _Value:
    """Returns one field of a record, which must have exactly this type."""
    value = record.get(name)
    if type(value) is not kind or (isinstance(value, int) and abs(value) >= 1 << 63):
        raise SnapshotError(
            f"{source}: corrupted: {name} must be {kind.__name__}, got {shown(value)}"
        )
    return cast("_Value", value)


def file_system_type(path: Path) -> str:
    """The mount's type as the kernel names it, such as ``"tmpfs"``, ``"ext4"`` or ``"nfs4"``."""
    types = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    place = path.resolve()
    return next(
        (types[str(one)] for one in (place, *place.parents) if str(one) in types), "unknown"
    )


def is_memory_file_system(path: Path) -> bool:
    """Whether ``path`` lives in memory, so that ``fsync`` could protect nothing."""
    return file_system_type(path) in _MEMORY_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, distinct from a later one with the same pid."""

    host: str  # boot id and pid namespace: pids are comparable only where this is equal
    hostname: str  # for messages
    pid: int  # process id in that namespace
    start_time: int  # clock ticks from boot to the process's start

    @classmethod
    def current(cls) -> ProcessIdentity:
        pid = os.getpid()
        return cls(_host(), socket.gethostname(), pid, process_began(pid) or 0)

    @classmethod
    def from_record(cls, record: dict[str, Any], source: Path) -> ProcessIdentity:
        host, hostname = (field(record, name, str, source) for name in ("host", "hostname"))
        pid, start_time = (field(record, name, int, source) for name in ("pid", "start_time"))
        return cls(host, hostname, pid, start_time)

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where that cannot be known from this host."""
        if self.host != _host():
            return None
        return process_began(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _host() -> str:
    return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"

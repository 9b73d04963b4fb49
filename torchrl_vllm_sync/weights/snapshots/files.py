"""Private files, locks, checksummed records and process identities for snapshots."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.replica import process_began

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Opens a folder that no other user can write into, for the length of the ``with`` block."""
    handle = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(handle, path, handle)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file as ``open_file`` does, for the length of the ``with`` block."""
    handle = open_file(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that no other user can have written; the caller closes the handle."""
    with open_folder(path.parent) as folder:
        handle = _open(path, flags, folder)
        try:
            _check(handle, path, folder)
        except BaseException:
            os.close(handle)
            raise
        return handle


def new_file(path: Path) -> int:
    """Makes a file of mode 0600 and opens it for reading and writing."""
    handle = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(handle, FILE_MODE)
    return handle


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


def _check(handle: int, path: Path, folder: int) -> None:
    """Refuses what another user owns or may write, and what is no regular file in ``folder``."""
    facts = os.fstat(handle)
    if handle != folder and not stat.S_ISREG(facts.st_mode):
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
        try:
            place = f"/proc/self/fd/{folder}"
            with tempfile.TemporaryFile(prefix=TEMPORARY_PREFIX, dir=place) as probe:
                _mapped_owners[device] = os.fstat(probe.fileno()).st_uid
        except OSError:  # this process cannot have made anything there
            return os.geteuid()
    return _mapped_owners[device]


# ---- Folders


def require_folder(path: Path) -> None:
    """Makes a folder of mode 0700 unless there is one that can be trusted."""
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        with open_folder(path):
            return
    path.chmod(FOLDER_MODE)  # whatever the umask


def list_folder(path: Path) -> list[str]:
    with open_folder(path) as handle:
        return sorted(os.listdir(handle))


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


def fsync_folder(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    with open_folder(path) as handle:
        os.fsync(handle)


def file_system_type(path: Path) -> str:
    """The mount's type as the kernel names it, such as ``"tmpfs"``, ``"ext4"`` or ``"nfs4"``."""
    types = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    place = path.resolve()
    return next(
        (types[str(one)] for one in (place, *place.parents) if str(one) in types), "unknown"
    )


def is_memory_file_system(path: Path) -> bool:
    """Whether ``path`` lives in memory, so that ``fsync`` could protect nothing."""
    return file_system_type(path) in {"tmpfs", "ramfs", "hugetlbfs"}


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns the ``OSError`` of a full, unwritable or vanished directory into ``SnapshotError``."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SnapshotError(f"{doing}: {error.strerror or error}{where}") from error


# ---- Locks, and who holds them


def is_locked(path: Path) -> bool:
    """Whether a process holds a ``flock`` on a file; False if there is none."""
    with suppress(FileNotFoundError), opened(path, os.O_RDWR) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked by now would keep it
    return False


def lock_holders(path: Path) -> str:
    """Names who locked a file, as far as this pid namespace shows it, for messages."""
    pids: set[int] = set()
    with suppress(OSError):  # released since, or a container without such a list
        inode = str(path.lstat().st_ino)
        rows = map(str.split, Path("/proc/locks").read_text().splitlines())
        pids = {int(row[4]) for row in rows if row[5].rpartition(":")[2] == inode}
    processes = [one for one in psutil.process_iter(["name"]) if one.pid in pids]
    names = [f"pid {one.pid} ({one.info['name']})" for one in processes]
    return ", ".join(names) or "an unknown process"


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

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where that cannot be known from this host."""
        if self.host != _host():
            return None
        return process_began(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


# ---- Records: JSON objects that begin with a checksum of all bytes after it, and a format
_FORMAT = 3


def write_json(path: Path, record: dict[str, Any], *, fsync: bool) -> None:
    """Replaces ``path`` in one step: temporary file, ``fsync``, rename, ``fsync`` of the folder."""
    rest = json.dumps({"format": _FORMAT} | record, separators=(",", ":"))[1:].encode()
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with os.fdopen(new_file(temporary), "wb") as file:
            file.write(_signature(rest) + rest)
            file.flush()
            if fsync:  # first: the rename must never be durable before the content
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:  # the rename is durable only once the folder is
        fsync_folder(path.parent)


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Reads a whole file; refuses one longer than ``max_bytes`` before reading it."""
    with os.fdopen(open_file(path), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found > max_bytes:
            raise SnapshotError(
                f"{path}: corrupted: must have at most {max_bytes} bytes, has {found}"
            )
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    return parse_json(read_file(path, max_bytes=1 << 16), path)


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
    (found,) = fields_of(record, path, format=int)
    if found != _FORMAT:
        raise SnapshotError(f"{path}: format must be {_FORMAT}, got {found}")
    return record


def fields_of(record: dict[str, Any], path: Path, /, **kinds: type) -> list[Any]:
    """Returns the named fields, each of exactly its type; integers from 0 on, below 2**63."""
    for name, kind in kinds.items():
        value = record.get(name)
        if type(value) is not kind or (kind is int and not 0 <= value < 1 << 63):
            raise SnapshotError(
                f"{path}: corrupted: {name} must be {kind.__name__}, got {shown(value)}"
            )
    return [record[name] for name in kinds]


def _signature(rest: bytes) -> bytes:
    return f'{{"xxh3_64":"{xxhash.xxh3_64_hexdigest(rest)}",'.encode()

"""A snapshot directory: private files, locks, checksummed records, and its one writer at a time.

``SNAPSHOTS.json`` marks the directory as this library's, and names its run and its last writer.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import xxhash

from torchrl_vllm_sync.checks import Deadline, shown
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError
from torchrl_vllm_sync.replica import process_began

LayoutName = Literal["slots", "versions"]
LAYOUTS = get_args(LayoutName)
CURRENT, MARKER = "CURRENT", "SNAPSHOTS.json"
LOCK, COMMIT = "LOCK", "COMMIT"
# An empty file in a directory that no user named: it is to be removed with its process.
TEMPORARY = "TEMPORARY"
TEMPORARY_PREFIX = ".tmp-"
# How long another writer's commit may take.
LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.005
# Every file of a snapshot directory itself.
OWN_FILE = re.compile(rf"{CURRENT}|{MARKER}|{LOCK}|{COMMIT}|{TEMPORARY}|{TEMPORARY_PREFIX}[^/]*")
_FORMAT = 3

# Any user who can write into a snapshot directory decides what weights the engines get. So folders
# are made with mode 0700 and files with 0600, whatever the umask, and one that is opened must be a
# folder or a regular file, as expected, and no symbolic link; must belong to the user who opens it,
# or to root; and must be writable by no other user. That is checked on the open handle, so nothing
# can replace what was checked. Folders above the snapshot directory are the user's responsibility;
# a sticky one, such as ``/dev/shm``, will do. Where a file system stores other owners than those
# who write (NFS with ``root_squash``), the owner that a new file gets counts as this user too.
FOLDER_MODE, FILE_MODE = 0o700, 0o600
# Owner of the files that this process makes, by the file system's device number.
_mapped_owners: dict[int, int] = {}


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file as ``open_file`` does, or a folder, for the length of the ``with`` block."""
    handle = _open(path, flags) if flags & os.O_DIRECTORY else open_file(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that no other user can have written; the caller closes the handle."""
    with opened(path.parent, os.O_DIRECTORY) as folder:
        return _open(path, flags, folder)


def new_file(path: Path) -> int:
    """Makes a file of mode 0600 and opens it for reading and writing."""
    handle = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(handle, FILE_MODE)
    return handle


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    """Opens a file in ``folder``, or a folder; refuses what another user owns or may write."""
    name = path if folder is None else path.name
    # O_NONBLOCK: opening a pipe in the file's place must not block.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, FILE_MODE, dir_fd=folder)
    except OSError as error:
        if path.is_symlink():
            raise SnapshotError(f"{path}: is a symbolic link: name its target") from error
        error.filename = str(path)
        raise
    with ExitStack() as undo:
        undo.callback(os.close, handle)
        facts = os.fstat(handle)
        if folder is not None and not stat.S_ISREG(facts.st_mode):
            raise SnapshotError(f"{path}: must be a regular file, and is none")
        place = handle if folder is None else folder
        if facts.st_uid not in {os.geteuid(), 0} and facts.st_uid != _owner_here(place):
            raise SnapshotError(
                f"{path}: belongs to user {facts.st_uid}, and this process runs as user "
                f"{os.geteuid()}: trainer and engines must run as one user, who made the directory"
            )
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SnapshotError(
                f"{path}: others can write it (mode {stat.S_IMODE(facts.st_mode):04o}): whoever "
                f"can decides what the engines load; mend it with chmod go-w {path}"
            )
        undo.pop_all()
    return handle


def _owner_here(folder: int) -> int:
    """The owner that the file system gives to what this process makes in ``folder``."""
    device, place = os.fstat(folder).st_dev, f"/proc/self/fd/{folder}"
    with suppress(OSError):  # then this process cannot have made anything there
        if device not in _mapped_owners:
            with tempfile.TemporaryFile(prefix=TEMPORARY_PREFIX, dir=place) as probe:
                _mapped_owners[device] = os.fstat(probe.fileno()).st_uid
    return _mapped_owners.get(device, os.geteuid())


def require_folder(path: Path) -> None:
    """Makes a folder of mode 0700 unless there is one that can be trusted."""
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        with opened(path, os.O_DIRECTORY):
            return
    path.chmod(FOLDER_MODE)  # whatever the umask


def list_folder(path: Path) -> list[str]:
    with opened(path, os.O_DIRECTORY) as handle:
        return sorted(os.listdir(handle))


def remove_folder(path: Path) -> None:
    """Removes a folder; what another process still uses there is left for the next time."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        # NFS keeps a file that a process of this host has open under another name in its folder.
        if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY}:
            raise


def fsync_folder(path: Path) -> None:
    with opened(path, os.O_DIRECTORY) as handle:
        os.fsync(handle)


def file_system_type(path: Path) -> str:
    """The mount's type as the kernel names it, such as ``"tmpfs"``, ``"ext4"`` or ``"nfs4"``."""
    types = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    place = path.resolve()
    found = [types[str(one)] for one in (place, *place.parents) if str(one) in types]
    return found[0] if found else "unknown"


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


def take_lock(handle: int) -> bool:
    """Takes the ``flock`` of an open file; False if another process has one."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds a ``flock`` on a file; False if there is none."""
    with suppress(FileNotFoundError), opened(path, os.O_RDWR) as handle:
        if not take_lock(handle):
            return True
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked by now would keep it
    return False


def lock_holders(path: Path) -> str:
    """Names who locked a file, as far as this pid namespace shows it, for messages."""
    pids: set[str] = set()
    with suppress(OSError):  # released since, or a container without such a list
        inode = path.lstat().st_ino
        rows = map(str.split, Path("/proc/locks").read_text().splitlines())
        pids = {row[4] for row in rows if row[1] == "FLOCK" and row[5].endswith(f":{inode}")}
    processes = [one for one in psutil.process_iter(["name"]) if str(one.pid) in pids]
    names = [f"pid {one.pid} ({one.info['name']})" for one in processes]
    return ", ".join(names) or "an unknown process"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, distinct from a later one with the same pid."""

    host: str  # boot id and pid namespace: pids are comparable only where this is equal
    hostname: str  # for messages
    pid: int
    start_time: int  # clock ticks from boot to the process's start

    @classmethod
    def current(cls) -> ProcessIdentity:
        return cls._of(os.getpid())

    @classmethod
    @functools.lru_cache(1)
    def _of(cls, pid: int) -> ProcessIdentity:
        return cls(_host(), os.uname().nodename, pid, process_began(pid) or 0)

    def is_gone(self) -> bool | None:
        """Whether the process has ended; None where that cannot be known from this host."""
        return None if self.host != _host() else process_began(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def write_json(path: Path, record: dict[str, Any], *, fsync: bool) -> None:
    """Replaces a JSON object, which begins with a checksum of the bytes after it, in one step.

    That is durable once the folder is.
    """
    rest = json.dumps({"format": _FORMAT} | record, separators=(",", ":"))[1:].encode()
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with os.fdopen(new_file(temporary), "wb") as file:
            file.write(_signature(rest) + rest)
            file.flush()
            if fsync:  # first: the rename must never be durable before the content
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Reads a whole file; refuses one longer than ``max_bytes`` before reading it."""
    with os.fdopen(open_file(path), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found > max_bytes:
            raise SnapshotError(f"{path}: corrupted: has {found} bytes, at most {max_bytes} count")
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
    if fields_of(record, path, format=int) != [_FORMAT]:
        raise SnapshotError(f"{path}: format must be {_FORMAT}, got {record['format']}")
    return record


def fields_of(record: dict[str, Any], path: Path, /, **kinds: type) -> list[Any]:
    """Returns the named fields, each of exactly its type; integers from 0 on, below 2**63."""
    for name, kind in kinds.items():
        value: Any = record.get(name)
        if type(value) is not kind or (kind is int and not 0 <= value < 1 << 63):
            raise SnapshotError(
                f"{path}: corrupted: {name} must be {kind.__name__}, got {shown(value)}"
            )
    return [record[name] for name in kinds]


def _signature(rest: bytes) -> bytes:
    return f'{{"xxh3_64":"{xxhash.xxh3_64_hexdigest(rest)}",'.encode()


@dataclass(frozen=True, slots=True)
class Owner(ProcessIdentity):
    """The run that a directory belongs to, and its last writer, which is this process."""

    run_id: str  # the training run; versions are comparable only within one
    layout: LayoutName  # how versions are stored
    epoch: int  # number of the writer; each counts on from the one before
    released: bool  # whether it has given the directory back
    # Writers from this epoch on have certainly ended: their folders may be written again. An older
    # one may have been replaced while it was stopped, and writes on when it resumes.
    reusable_from: int

    @classmethod
    def read(cls, directory: Path) -> Owner | None:
        path = directory / MARKER
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        types = {"int": int, "bool": bool}  # names and literals are text
        kinds = {one.name: types.get(str(one.type), str) for one in fields(cls)}
        return cls(*fields_of(record, path, **kinds))

    def write(self, directory: Path, *, fsync: bool) -> None:
        write_json(directory / MARKER, asdict(self), fsync=fsync)
        if fsync:
            fsync_folder(directory)

    @classmethod
    def before(
        cls, directory: Path, layout: LayoutName, run_id: str | None, *, takeover: bool
    ) -> Owner | None:
        """Reads the last owner, None in a new directory; refuses what is not for this writer."""
        known = cls.read(directory)
        if known is None:
            names = list_folder(directory) if directory.exists() else []
            foreign = [one for one in names if not OWN_FILE.fullmatch(one)]
            if foreign and MARKER not in names:
                raise SnapshotError(
                    f"{directory}: holds other files ({', '.join(foreign[:5])}) and no {MARKER}; "
                    "name a new or empty directory"
                )
            return None
        if known.layout != layout:
            raise SnapshotError(f"{directory}: has layout {shown(known.layout)}, got {layout!r}")
        if run_id not in {None, known.run_id} and not takeover:
            raise SnapshotError(
                f"{directory}: belongs to run {known.run_id}, this is run {run_id}; name "
                "another directory, or pass takeover=True to drop its versions"
            )
        return known


class WriterLock:
    """The right to publish into one directory.

    ``LOCK`` is held by ``flock`` for the writer's life; where that does not reach other hosts, the
    epoch still does. ``CURRENT`` moves only inside ``commit()``, under ``COMMIT`` and with the own
    epoch in force: a writer that was stopped, or was replaced, changes nothing visible.
    """

    owner: Owner

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self._directory, self._fsync = directory, fsync
        self._handle = -1

    def acquire(self, layout: LayoutName, run_id: str | None, *, takeover: bool) -> None:
        """Becomes the owner, inside a ``commit``; removes what others left to be removed."""
        found = Owner.before(self._directory, layout, run_id, takeover=takeover)
        me: dict[str, Any] = asdict(ProcessIdentity.current()) | {"layout": layout}
        me["run_id"] = run_id or (found.run_id if found else secrets.token_hex(16))
        last = found or Owner(**me, epoch=0, released=True, reusable_from=1)
        gone, path = last.released or last.is_gone(), self._directory / LOCK
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        locked = not take_lock(handle)
        # A dead owner's lock lives on in processes that it forked; those are no owners.
        if (gone is False or (locked and (last.released or not gone))) and not takeover:
            os.close(handle)
            raise SnapshotError(
                f"{self._directory}: another writer holds it: {found or 'an unknown process'}; end "
                "that process, or pass takeover=True to fence it"
            )
        if locked:
            os.close(handle)
            os.unlink(path)
            handle = new_file(path)
            take_lock(handle)
        self._handle = handle
        # No other writer has a temporary file here: each makes them inside its commit.
        left = [n for n in list_folder(self._directory) if n.startswith(TEMPORARY_PREFIX)]
        left += [TEMPORARY] if found else []  # a user named it: it is not the first writer's alone
        left += [] if run_id in {None, last.run_id} else [CURRENT]
        for name in left:
            (self._directory / name).unlink(missing_ok=True)
        epoch = last.epoch + 1
        # Carried on: one that was replaced alive may resume long after its successor has ended.
        reusable_from = last.reusable_from if gone else epoch
        self.owner = Owner(**me, epoch=epoch, released=False, reusable_from=reusable_from)
        self.owner.write(self._directory, fsync=self._fsync)

    def check(self) -> None:
        """Raises unless this writer still owns the directory."""
        found = Owner.read(self._directory)
        if found is None:
            raise SnapshotError(f"{self._directory}: {MARKER} is gone: removed or replaced")
        # A fork that closes its copy of the writer says "released", and replaces nobody.
        if replace(found, released=False) != self.owner:
            raise FencedWriterError(
                f"{self._directory}: writer of epoch {self.owner.epoch} was replaced by {found}, "
                f"epoch {found.epoch}"
            )

    @contextmanager
    def commit(self, *, by_owner: bool = True) -> Iterator[None]:
        """Excludes other writers from the few file operations that make a version visible."""
        path, deadline = self._directory / COMMIT, Deadline(LOCK_TIMEOUT_S)
        with opened(path, os.O_RDWR | os.O_CREAT) as handle:
            while not take_lock(handle):
                if deadline.passed:
                    owner = Owner.read(self._directory) or "an unknown process"
                    raise SnapshotError(
                        f"{path}: locked for {LOCK_TIMEOUT_S} s; the owner, {owner}, may be "
                        "stopped in the middle of a commit"
                    )
                time.sleep(_POLL_S)
            if by_owner:
                self.check()
            yield

    def release(self, *, remove: bool = False) -> None:
        """Gives up the directory, or removes it, unless a successor owns it already."""
        if self._handle < 0:
            return
        try:
            if not os.path.exists(self._directory / MARKER):  # gone, empty or inaccessible
                return
            with self.commit():
                if remove:
                    (self._directory / CURRENT).unlink(missing_ok=True)
                    shutil.rmtree(self._directory)
                else:
                    replace(self.owner, released=True).write(self._directory, fsync=self._fsync)
        except (FencedWriterError, FileNotFoundError):
            if remove:
                raise
        finally:
            os.close(self._handle)
            self._handle = -1

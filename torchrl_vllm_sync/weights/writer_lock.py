"""Who may publish: one writer a directory, and an epoch that shuts out those that came before.

``LOCK`` is held by ``flock`` for the writer's life. ``EPOCH`` names the owner and counts up with
each; a writer moves ``CURRENT`` only inside ``commit()``, which holds ``COMMIT`` and finds its own
epoch still in force. A writer that was stopped, lost its lock or was replaced therefore changes
nothing visible.
``flock`` reaches other hosts only where the file system carries it; the epoch works on all of them.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError
from torchrl_vllm_sync.weights.private_files import new_file, open_file
from torchrl_vllm_sync.weights.storage import ProcessIdentity, field, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        """Becomes the owner.

        Args:
            takeover: Whether to replace an owner that is alive; it is fenced from then on.

        Raises:
            SnapshotError: There is a live owner (named), ``COMMIT`` stays locked, or a file is
                damaged or can have been written by others.
            OSError: The directory is not writable.
        """
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
        return not (self._directory / EPOCH).exists()

    def check(self) -> None:
        """Finds out whether this writer still owns the directory.

        Raises:
            FencedWriterError: Another one has taken over (named).
            SnapshotError: The directory is no longer there.
        """
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
        """Keeps every other writer out of the few file operations that make a version visible.

        Raises:
            FencedWriterError: Another writer has taken over.
            SnapshotError: ``COMMIT`` stays locked beyond the deadline.
        """
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
            if not self.is_removed:
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

"""Slots: reusable folders whose pages exist already, so that a version costs one copy.

For one host: shared memory or a local disk. A slot is written again only when it is neither current
nor leased, oldest first; when every slot is taken there is one more, up to a limit.
"""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.data_file import DATA_FILE, DataFile, DataLayout
from torchrl_vllm_sync.weights.head import Head
from torchrl_vllm_sync.weights.lease import HeldLease, held_leases, remove_stray_files
from torchrl_vllm_sync.weights.private_files import list_folder, new_folder, remove_temporary_files
from torchrl_vllm_sync.weights.storage import remove_folder

if TYPE_CHECKING:
    from pathlib import Path

    from torchrl_vllm_sync.weights.writer_lock import WriterLock

# The epoch of the writer that made it, and a number.
_SLOT_NAME = re.compile("slot-([0-9]+)-[0-9]+")
_POLL_S = 0.01


@dataclass
class _Slot:
    """A slot of this writer: what it holds (None: nothing whole) and its open file, if any."""

    name: str
    version: int | None
    file: DataFile | None = None


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """How many slots there are and how long readers may keep them.

    Attributes:
        num_slots: Slots in turn; at least 2.
        max_slots: Slots when readers hold the others; at least ``num_slots``.
        lease_timeout_s: Seconds without heartbeat after which a lease may be broken.
        slot_timeout_s: Seconds that a publish waits when all ``max_slots`` are taken.
    """

    num_slots: int = 3
    max_slots: int = 6
    lease_timeout_s: float = 60.0
    slot_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, got {self.num_slots}")
        if self.max_slots < self.num_slots:
            raise ValueError(
                f"max_slots must be at least num_slots ({self.num_slots}), got {self.max_slots}"
            )
        if self.lease_timeout_s <= 0:
            raise ValueError(f"lease_timeout_s must be positive, got {self.lease_timeout_s}")
        if self.slot_timeout_s < 0:
            raise ValueError(f"slot_timeout_s must not be negative, got {self.slot_timeout_s}")


class SlotStore:
    """The slots of one writer.

    A version goes ``begin``, write into the file, ``complete``; after the manifest has moved,
    ``collect``. A version that is not completed leaves a slot whose HEAD says so and that is taken
    first for the next.
    """

    def __init__(
        self,
        directory: Path,
        lock: WriterLock,
        settings: SlotSettings,
        *,
        current: str | None,
        mapped: bool,
        fsync: bool,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._settings = settings
        self._fsync = fsync
        self._current = current
        self._mapped = mapped
        self._created = 0
        self._slots: list[_Slot] = []
        # Slots of an owner that may still be alive are never written by another.
        for name, epoch in _slot_names(directory).items():
            if epoch >= lock.reusable_from:
                remove_temporary_files(directory / name)
                head = _head_or_none(directory / name)
                whole = head is not None and head.complete
                self._slots.append(_Slot(name, head.version if head and whole else None))

    def begin(self, layout: DataLayout, head: Head) -> tuple[str, DataFile]:
        """Takes a slot and marks it as being written.

        Returns:
            Name of the slot's folder, and its data file.

        Raises:
            SnapshotError: Every slot is current or leased, and no more may be made; says who holds
                what. Or there is no space for as much as two slots.
            OSError: The file system refuses.
        """
        slot = self._acquire(layout)
        folder = self._directory / slot.name
        slot.version = None
        if slot.file is not None and slot.file.layout.digest != layout.digest:
            slot.file.close()
            slot.file = None
        previous = _head_or_none(folder)
        head.write(folder, fsync=False)
        if slot.file is None:
            if previous is not None and previous.digest == layout.digest:
                slot.file = DataFile.reopen(folder / DATA_FILE, layout, mapped=self._mapped)
            if slot.file is None:
                slot.file = DataFile.create(
                    folder / DATA_FILE, layout, allocate=True, mapped=self._mapped
                )
        return slot.name, slot.file

    def complete(self, name: str, head: Head) -> str:
        """Marks a slot as whole, after its data were flushed; returns its name."""
        head.write(self._directory / name, fsync=self._fsync)
        next(slot for slot in self._slots if slot.name == name).version = head.version
        return name

    def flipped(self, name: str) -> None:
        """Learns that the manifest names the folder now."""
        self._current = name

    def abandon(self, name: str) -> None:
        """Leaves a version unfinished; its slot stays marked as being written."""

    def collect(self) -> None:
        """Removes slots beyond ``num_slots``, and those of earlier writers, that nobody reads."""
        own = {slot.name for slot in self._slots}
        surplus = [name for name in _slot_names(self._directory) if name not in own]
        if len(self._slots) > self._settings.num_slots:
            # One free slot stays: the next publish would only have to make it again.
            free = self._free(self._leases())[:-1]
            excess = len(self._slots) - self._settings.num_slots
            surplus += [slot.name for slot in free[:excess]]
        if not surplus:
            return
        held = {lease.folder for lease in self._leases()}
        for name in surplus:
            if name == self._current or name in held or None in held:
                continue
            for slot in [slot for slot in self._slots if slot.name == name]:
                if slot.file is not None:
                    slot.file.close()
                self._slots.remove(slot)
            remove_folder(self._directory / name)

    def prepare(self, layout: DataLayout, head: Head) -> None:
        """Makes all ``num_slots`` now, so that no publish pays for new pages.

        Raises:
            OSError: The file system refuses, for instance because it is full.
        """
        for _ in range(self._settings.num_slots - len(self._slots)):
            slot = self._new_slot(layout)
            head.write(self._directory / slot.name, fsync=False)

    def close(self) -> None:
        """Gives files and mappings back; the folders stay."""
        for slot in self._slots:
            if slot.file is not None:
                slot.file.close()
                slot.file = None

    def _acquire(self, layout: DataLayout) -> _Slot:
        settings = self._settings
        remove_stray_files(self._directory, self._lock.now(), settings.lease_timeout_s)
        deadline = time.monotonic() + settings.slot_timeout_s
        while True:
            leases = self._leases()
            free = self._free(leases)
            if len(self._slots) < settings.num_slots or (
                not free and len(self._slots) < settings.max_slots
            ):
                try:
                    return self._new_slot(layout)
                except OSError:
                    # No space for one more: two slots still alternate.
                    if not free:
                        raise
            if free:
                return free[0]
            expired = [lease for lease in leases if lease.age_s > settings.lease_timeout_s]
            for lease in expired:
                lease.break_()
            if not expired and time.monotonic() >= deadline:
                held = "; ".join(str(lease) for lease in leases)
                raise SnapshotError(
                    f"{self._directory}: all {len(self._slots)} slots (max_slots="
                    f"{settings.max_slots}) are current or leased: {held}"
                )
            if not expired:
                time.sleep(_POLL_S)

    def _new_slot(self, layout: DataLayout) -> _Slot:
        # The epoch in the name keeps writers apart: one that was replaced while it was stopped
        # wakes up with its own folders, not with those of its successor.
        name = f"slot-{self._lock.epoch}-{self._created}"
        self._created += 1  # also if this fails: a name is used once
        folder = self._directory / name
        require_space(self._directory, layout.num_bytes)
        new_folder(folder)
        try:
            file = DataFile.create(folder / DATA_FILE, layout, allocate=True, mapped=self._mapped)
        except BaseException:
            remove_folder(folder)
            raise
        slot = _Slot(name, None, file)
        self._slots.append(slot)
        return slot

    def _free(self, leases: list[HeldLease]) -> list[_Slot]:
        held = {lease.folder for lease in leases}
        if None in held:
            return []
        free = [
            slot for slot in self._slots if slot.name != self._current and slot.name not in held
        ]
        return sorted(free, key=lambda slot: -1 if slot.version is None else slot.version)

    def _leases(self) -> list[HeldLease]:
        """Leases of readers that may be alive; those of dead ones are removed."""
        alive: list[HeldLease] = []
        for lease in held_leases(self._directory, self._lock.now()):
            if lease.is_dead:
                lease.break_()
            else:
                alive.append(lease)
        return alive


def require_space(directory: Path, num_bytes: int) -> None:
    """Finds out before writing whether ``num_bytes`` fit.

    Raises:
        OSError: They do not.
    """
    facts = os.statvfs(directory)
    free = facts.f_bavail * facts.f_frsize
    # Some network file systems report no size at all.
    if facts.f_blocks and free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"No space left: {num_bytes} bytes are needed, {free} are free",
            str(directory),
        )


def _slot_names(directory: Path) -> dict[str, int]:
    """Every slot in the directory, and the epoch of the writer that made it."""
    names = list_folder(directory)
    return {name: int(match[1]) for name in names if (match := _SLOT_NAME.fullmatch(name))}


def _head_or_none(folder: Path) -> Head | None:
    """A damaged HEAD says as little as none: the slot holds nothing whole."""
    try:
        return Head.read(folder)
    except SnapshotError:
        return None

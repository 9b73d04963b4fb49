"""Versions: a new folder for each, immutable once it has its name.

For file systems that several hosts share, where a page that was read once may be served from a
host's cache for ever: no byte of a visible file changes. Folders are collected when they are
neither current, nor the one before, nor leased.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from torchrl_vllm_sync.weights.data_file import DATA_FILE, DataFile, DataLayout
from torchrl_vllm_sync.weights.lease import held_leases, remove_stray_files
from torchrl_vllm_sync.weights.private_files import fsync_directory, list_folder, new_folder
from torchrl_vllm_sync.weights.slot_store import require_space
from torchrl_vllm_sync.weights.storage import remove_folder

if TYPE_CHECKING:
    from pathlib import Path

    from torchrl_vllm_sync.weights.head import Head
    from torchrl_vllm_sync.weights.writer_lock import WriterLock

_BUILDING = ".building-"
_VERSION_NAME = re.compile("v([0-9]+)")


class VersionStore:
    """The folders ``v{N}`` of one writer; same calls as ``SlotStore``."""

    def __init__(
        self,
        directory: Path,
        lock: WriterLock,
        lease_timeout_s: float,
        *,
        current: str | None,
        fsync: bool,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._lease_timeout_s = lease_timeout_s
        self._fsync = fsync
        self._current = current
        self._building: DataFile | None = None
        for name in list_folder(directory):
            if name.startswith(_BUILDING):
                remove_folder(directory / name)

    def begin(self, layout: DataLayout, head: Head) -> tuple[str, DataFile]:
        """Makes a folder that has no visible name yet.

        Returns:
            Name of the folder, and its data file.

        Raises:
            OSError: The file system refuses, for instance because it is full.
        """
        name = f"{_BUILDING}{head.epoch}-{head.version}"
        remove_folder(self._directory / name)  # left behind if it could not be abandoned
        require_space(self._directory, layout.num_bytes)
        new_folder(self._directory / name)
        try:
            head.write(self._directory / name, fsync=False)
            self._building = DataFile.create(
                self._directory / name / DATA_FILE, layout, allocate=False, mapped=False
            )
        except BaseException:
            remove_folder(self._directory / name)
            raise
        return name, self._building

    def complete(self, name: str, head: Head) -> str:
        """Gives a flushed folder its visible name ``v{N}``, and returns that.

        A folder that has the name already was never current, since versions only grow: it is what
        a writer left that died between renaming and moving the manifest.
        """
        head.write(self._directory / name, fsync=self._fsync)
        self.close()
        visible = f"v{head.version}"
        if (self._directory / visible).exists():
            remove_folder(self._directory / visible)
        os.rename(self._directory / name, self._directory / visible)
        if self._fsync:
            fsync_directory(self._directory)
        return visible

    def flipped(self, name: str) -> None:
        """Learns that the manifest names the folder now."""
        self._current = name

    def abandon(self, name: str) -> None:
        """Removes an unfinished folder; what cannot be removed goes when a version is collected."""
        self.close()
        with suppress(OSError):
            remove_folder(self._directory / name)

    def collect(self) -> None:
        """Removes folders that are neither current, nor the one before, nor leased."""
        now = self._lock.now()
        remove_stray_files(self._directory, now, self._lease_timeout_s)
        held: set[str | None] = set()
        for lease in held_leases(self._directory, now):
            if lease.is_dead or lease.age_s > self._lease_timeout_s:
                lease.break_()
            else:
                held.add(lease.folder)
        names = list_folder(self._directory)
        numbered = {
            name: int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name))
        }
        last = -1 if self._current is None else numbered[self._current]
        older = [name for name in numbered if numbered[name] < last]
        keep = {self._current, max(older, key=numbered.__getitem__, default=None)} | held
        for name in names:
            unfinished = name.startswith(_BUILDING)
            if unfinished or (name in numbered and name not in keep and None not in held):
                remove_folder(self._directory / name)

    def close(self) -> None:
        """Gives the open file back."""
        if self._building is not None:
            self._building.close()
            self._building = None

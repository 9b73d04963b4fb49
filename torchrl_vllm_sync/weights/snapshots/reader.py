"""Reader of snapshots: maps exactly one whole version, and holds it while it is used."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.snapshots import data_file, files

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from tensordict import TensorDict

    from torchrl_vllm_sync.weights.module import ParamMeta
    from torchrl_vllm_sync.weights.snapshots.data_file import DataLayout, Manifest

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version inside ``SnapshotReader.read``: its manifest, and its mapped tensors by name.

    ``tensordict`` is locked and lies in the writer's file: copy what is to outlive the ``with``
    block, and write into none of its tensors.
    """

    path: Path
    handle: int
    manifest: Manifest
    tensordict: TensorDict

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def metadata(self) -> list[ParamMeta]:
        return list(self.manifest.metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` in the order of ``metadata``."""
        for meta in self.manifest.metadata:
            yield meta.name, self.tensordict.get(meta.name)

    def validate(self) -> None:
        """Checks, after the tensors were used, that they were this version all the time.

        No writer touches a file that is locked, but locks may not reach other hosts; and the
        directory may have been removed, or made anew.
        """
        with files.storage_errors(f"{self.path}: validating"):
            same = False
            with suppress(FileNotFoundError), files.opened(self.path) as handle:
                tag = os.pread(handle, data_file.TAG_BYTES, 0)
                same = os.path.sameopenfile(handle, self.handle) and tag == self.manifest.tag
        if not same:
            raise SnapshotError(
                f"{self.path}: was recycled while version {self.version} was being read, or "
                "removed; discard what was read"
            )

    def verify(self) -> None:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            found = list(pool.map(data_file.checksum, dict(self.tensors()).values()))
        rows = zip(self.manifest.metadata, self.manifest.checksums, found, strict=True)
        if wrong := [meta.name for meta, expected, value in rows if value != expected]:
            self.validate()
            raise SnapshotError(
                f"{self.path}: corrupted: {len(wrong)} of {len(found)} tensors differ from "
                f"their checksums, first {wrong[0]}"
            )


class SnapshotReader:
    """Reads versions that a ``SnapshotWriter`` publishes, in any process that sees the directory.

    Readers never make a writer wait, and one that dies holds nothing any more.

    Args:
        directory: The writer's directory; it need not exist yet.
        verify: Whether ``read`` compares every tensor with its checksum before it yields.
        run_id: The only run to accept; None accepts any.
        timeout_s: Seconds that ``read`` follows a writer that keeps moving on, or waits for a file
            that the manifest names and a shared file system does not show yet.

    Example:
        >>> reader = SnapshotReader("/dev/shm/policy")  # doctest: +SKIP
        >>> with reader.read(newer_than=applied) as snapshot:  # doctest: +SKIP
        ...     if snapshot is not None:
        ...         model.load_weights(snapshot.tensors())
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        verify: bool = True,
        run_id: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.directory = Path(directory)
        self._verify, self._run_id, self._timeout_s = verify, run_id, timeout_s
        self._manifest_file = data_file.ManifestFile(self.directory)
        # By folder: device, inode and size of its file, and its mapping, which spares page faults.
        self._mapped: dict[str, tuple[tuple[int, int, int], DataLayout, TensorDict]] = {}

    def current(self) -> Manifest | None:
        """Returns the current manifest, cheap enough to poll; None when nothing has been published.

        Raises:
            SnapshotError: The manifest is damaged, unreadable or of another run.
        """
        manifest = self._manifest_file.read()
        if manifest is not None and self._run_id not in {None, manifest.run_id}:
            raise SnapshotError(
                f"{self._manifest_file.path}: is of run {manifest.run_id}, this reader follows run "
                f"{self._run_id}"
            )
        return manifest

    @contextmanager
    def read(self, newer_than: int | None = None) -> Iterator[Snapshot | None]:
        """Yields the current version, locked and mapped; None if there is none, or nothing newer.

        On leaving the block normally, ``Snapshot.validate`` is called.

        Args:
            newer_than: Version that was applied already; None reads whatever is current.

        Raises:
            SnapshotError: Data or manifest are damaged (named), or the directory is unusable, or
                was removed or made anew while it was read.
        """
        with ExitStack() as lock:
            snapshot = self._open_current(lock, newer_than)
            if snapshot is not None and self._verify:
                snapshot.verify()
            yield snapshot
            if snapshot is not None:
                snapshot.validate()

    def close(self) -> None:
        """Gives the kept mappings back."""
        self._mapped.clear()

    def _open_current(self, lock: ExitStack, newer_than: int | None) -> Snapshot | None:
        deadline = Deadline(self._timeout_s)
        while True:
            lock.close()
            manifest, is_late = self.current(), deadline.passed
            if manifest is None or (newer_than is not None and manifest.version <= newer_than):
                return None
            path = self.directory / manifest.path / data_file.DATA_FILE
            try:
                handle = files.open_file(path)
                lock.callback(_unlock, handle)
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                # The lock binds the writer only if the file was still current once it was taken.
                if self.current() == manifest:
                    snapshot = Snapshot(path, handle, manifest, self._map(handle, path, manifest))
                    snapshot.validate()
                    return snapshot
            except OSError as error:
                # EAGAIN: a writer is just testing whether the file is locked.
                if is_late or error.errno not in {errno.ENOENT, errno.ESTALE, errno.EAGAIN}:
                    raise SnapshotError(
                        f"{path}: version {manifest.version} cannot be read: {error.strerror}"
                    ) from error
                time.sleep(_POLL_S)
                continue
            if is_late:
                raise SnapshotError(
                    f"{self.directory}: versions moved on faster than they could be locked for "
                    f"{self._timeout_s} s, last version {manifest.version}"
                )

    def _map(self, handle: int, path: Path, manifest: Manifest) -> TensorDict:
        facts, data = os.fstat(handle), manifest.data
        key = (facts.st_dev, facts.st_ino, facts.st_size)
        kept = self._mapped.get(manifest.path)
        if kept is not None and kept[:2] == (key, data):
            return kept[2]
        # The writer has replaced or removed folders: free their pages.
        for name, (_, known, _) in list(self._mapped.items()):
            if known != data or not (self.directory / name).exists():
                del self._mapped[name]
        tensordict = data_file.map_tensordict(handle, path, data)
        # Pages of a shared file system may be stale in a mapping that is kept, so none is.
        if manifest.layout == "slots":
            self._mapped[manifest.path] = (key, data, tensordict)
        return tensordict


def _unlock(handle: int) -> None:
    """Ends a lock, also where a child that was forked meanwhile shares the open file."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)

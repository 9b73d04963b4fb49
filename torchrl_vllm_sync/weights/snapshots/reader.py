"""The reader's side of snapshots: maps exactly one whole version, and holds it while it is used."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, checksum, map_tensordict
from torchrl_vllm_sync.weights.snapshots.files import open_file, storage_errors
from torchrl_vllm_sync.weights.snapshots.records import CURRENT, Head, Lease, Manifest, ManifestFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from tensordict import TensorDict

    from torchrl_vllm_sync.weights.metadata import ParamMeta


_HEARTBEAT_S = 5.0
_VERIFY_THREADS = 4
_READER_ID = re.compile(r"[\w:+@-][\w.:+@-]{0,199}", re.ASCII)


class Snapshot:
    """One version, mapped and leased, inside ``SnapshotReader.read``.

    Its tensors lie in the writer's file: copy what is to outlive the ``with`` block, and write into
    none of them.

    Attributes:
        manifest: What was published.
        tensordict: Every parameter under its name; locked.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, tensordict: TensorDict, lease: Lease
    ) -> None:
        self.manifest = manifest
        self.tensordict = tensordict
        self._folder = directory / manifest.path
        self._lease = lease
        self._beaten = time.monotonic()

    @property
    def version(self) -> int:
        """Policy version of every tensor."""
        return self.manifest.version

    @property
    def metadata(self) -> list[ParamMeta]:
        """Every parameter in order."""
        return list(self.manifest.metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)`` in the order of ``metadata``, and keeps the lease alive."""
        for meta in self.manifest.metadata:
            self._keep_alive()
            yield meta.name, self.tensordict.get(meta.name)

    def heartbeat(self) -> None:
        """Tells the writer that this version is still being read.

        ``tensors`` does it on its own. Call it during pauses longer than a few seconds, well within
        the writer's ``lease_timeout_s``.
        """
        with storage_errors(f"{self._folder}: heartbeat"):
            self._lease.heartbeat()
        self._beaten = time.monotonic()

    def validate(self) -> None:
        """Finds out, after the tensors were used, whether they were this version all the time.

        Source of the rule: HEAD changes before the first byte does, so an unchanged HEAD after the
        last read means unchanged bytes.
        """
        with storage_errors(f"{self._folder}: validating"):
            head = Head.read(self._folder)
        manifest = self.manifest
        wanted = Head(manifest.run_id, manifest.epoch, manifest.version, manifest.digest, True)
        if head != wanted:
            raise SnapshotError(
                f"{self._folder}: was recycled while version {self.version} was being read; "
                f"HEAD is now {head}; discard what was read"
            )

    def verify(self) -> None:
        """Compares every tensor with its published checksum, if there are any."""
        if self.manifest.checksums is None:
            return
        metadata, expected = self.manifest.metadata, self.manifest.checksums
        with ThreadPoolExecutor(min(_VERIFY_THREADS, os.cpu_count() or 1)) as pool:
            found = pool.map(checksum, (tensor for _, tensor in self.tensors()))
            wrong = [
                meta.name
                for meta, want, got in zip(metadata, expected, found, strict=True)
                if want != got
            ]
        if wrong:
            self.validate()
            raise SnapshotError(
                f"{self._folder / DATA_FILE}: corrupted: {len(wrong)} of {len(metadata)} tensors "
                f"differ from their checksums, first {wrong[0]}"
            )

    def _keep_alive(self) -> None:
        if time.monotonic() - self._beaten > _HEARTBEAT_S:
            self.heartbeat()


class SnapshotReader:
    """Reads versions that a ``SnapshotWriter`` publishes, in any process that sees the directory.

    Readers never make a writer wait, and one that dies leaves a lease which the writer removes.
    Mappings of slots are kept from read to read, which spares their page faults.

    Args:
        directory: The writer's directory; it need not exist yet.
        reader_id: Name in leases and messages; None: this host's name.
        verify: Whether ``read`` compares every tensor with its checksum before it yields.
        run_id: The only run to accept; None accepts any.
        timeout_s: Seconds that ``read`` follows a writer that keeps moving on, or waits for a file
            that the manifest names and a shared file system does not show yet.

    Example:
        >>> reader = SnapshotReader("/dev/shm/policy")  # doctest: +SKIP
        >>> with reader.read(newer_than=applied) as snapshot:  # doctest: +SKIP
        ...     if snapshot is not None:
        ...         model.load_weights(snapshot.tensors())

    Raises:
        ValueError: ``reader_id`` is no plain file name.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        reader_id: str | None = None,
        verify: bool = True,
        run_id: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.directory = Path(directory)
        self.reader_id = reader_id or socket.gethostname()
        if not _READER_ID.fullmatch(self.reader_id):
            raise ValueError(
                "reader_id must be a plain file name of at most 200 letters, digits and _.:+@-, "
                f"got {reader_id!r}"
            )
        self._verify = verify
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._manifest_file = ManifestFile(self.directory)
        self._mapped: dict[str, tuple[tuple[int, int, str], TensorDict]] = {}

    def current(self) -> Manifest | None:
        """Returns the current manifest, cheap enough to poll; None when nothing has been published.

        Raises:
            SnapshotError: The manifest is damaged, unreadable or of another run.
        """
        with storage_errors(f"{self.directory}: reading {CURRENT}"):
            manifest = self._manifest_file.read()
        if manifest is not None and self._run_id not in {None, manifest.run_id}:
            raise SnapshotError(
                f"{self._manifest_file.path}: is of run {manifest.run_id}, this reader follows run "
                f"{self._run_id}"
            )
        return manifest

    @contextmanager
    def read(self, newer_than: int | None = None) -> Iterator[Snapshot | None]:
        """Leases and maps the current version for the length of the ``with`` block.

        On leaving the block normally, ``Snapshot.validate`` is called.

        Args:
            newer_than: Version that was applied already; None reads whatever is current.

        Yields:
            The snapshot; None when nothing is published, or nothing newer.

        Raises:
            SnapshotError: Data or manifest are damaged (named), the directory is unusable, or the
                folder was written again while it was read.
        """
        lease = Lease(self.directory, self.reader_id)
        try:
            snapshot = self._open_current(lease, newer_than)
            if snapshot is not None and self._verify:
                snapshot.verify()
            yield snapshot
            if snapshot is not None:
                snapshot.validate()
        finally:
            lease.release()

    def close(self) -> None:
        """Gives the kept mappings back."""
        self._mapped.clear()

    def _open_current(self, lease: Lease, newer_than: int | None) -> Snapshot | None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            manifest = self.current()
            if manifest is None or (newer_than is not None and manifest.version <= newer_than):
                return None
            with storage_errors(f"{self.directory}: leasing version {manifest.version}"):
                lease.take(manifest.path, manifest.version)
            late = time.monotonic() > deadline
            # A lease binds the writer only if its folder was still current once it was written.
            if self.current() == manifest:
                snapshot = self._open(manifest, lease, last_try=late)
                if snapshot is not None:
                    return snapshot
            elif late:
                raise SnapshotError(
                    f"{self.directory}: versions moved on faster than they could be leased for "
                    f"{self._timeout_s} s, last version {manifest.version}"
                )

    def _open(self, manifest: Manifest, lease: Lease, *, last_try: bool) -> Snapshot | None:
        """Maps a leased folder; None if it is not there yet and may still appear."""
        path = self.directory / manifest.path / DATA_FILE
        try:
            tensordict = self._map(path, manifest)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ESTALE} and not last_try:
                time.sleep(0.02)
                return None
            raise SnapshotError(
                f"{path}: version {manifest.version} cannot be read: {error.strerror}"
            ) from error
        snapshot = Snapshot(self.directory, manifest, tensordict, lease)
        snapshot.validate()
        return snapshot

    def _map(self, path: Path, manifest: Manifest) -> TensorDict:
        handle = open_file(path)
        try:
            facts = os.fstat(handle)
            if facts.st_size != manifest.num_bytes:
                raise SnapshotError(
                    f"{path}: truncated or replaced: {facts.st_size} of {manifest.num_bytes} bytes"
                )
            identity = (facts.st_dev, facts.st_ino, manifest.digest)
            kept = self._mapped.get(manifest.path)
            if kept is not None and kept[0] == identity:
                return kept[1]
            # The writer has replaced or removed folders: let go of their pages.
            for name, (key, _) in list(self._mapped.items()):
                if not self._is_there(name, key):
                    del self._mapped[name]
            tensordict = map_tensordict(handle, path, manifest.metadata, manifest.trailer_checksum)
        finally:
            os.close(handle)
        # Pages of a shared file system may be stale in a mapping that is kept, so none is.
        if manifest.layout == "slots":
            self._mapped[manifest.path] = (identity, tensordict)
        return tensordict

    def _is_there(self, name: str, key: tuple[int, int, str]) -> bool:
        try:
            facts = (self.directory / name / DATA_FILE).stat()
        except FileNotFoundError:
            return False
        return (facts.st_dev, facts.st_ino) == key[:2]

"""The ``memmap`` transport: versions go through a snapshot directory that replicas read."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError, StaleVersionError
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, FOLDER
from torchrl_vllm_sync.weights.snapshots.writer import SnapshotWriter
from torchrl_vllm_sync.weights.source import views_of
from torchrl_vllm_sync.weights.transport import GRACE_S

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, PhaseTimes, Push

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "torchrl_vllm_sync-"
# Everything that a writer makes in a snapshot directory.
_OWN_NAME = re.compile(rf"{files.OWN_FILE.pattern}|{FOLDER.pattern}(/{re.escape(DATA_FILE)})?")


class MemmapTransport:
    """Publishes each version as a memory-mapped TensorDict, which the replicas then load.

    Args:
        directory: Where versions are stored; must be visible to every replica's node. By default
            a new directory in shared memory, removed by :meth:`close` or with the process.
        layout: As ``SnapshotWriter`` takes it.
        verify: Replicas check the stored checksums before they load.
        takeover: Fence off a writer that another process left in ``directory``.
    """

    name = "memmap"
    is_collective = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        layout: files.LayoutName = "slots",
        verify: bool = True,
        takeover: bool = False,
    ) -> None:
        self._given = None if directory is None else Path(directory)
        self._layout: files.LayoutName = layout
        self._verify, self._takeover = verify, takeover
        self._writer: SnapshotWriter | None = None
        self._pid = 0
        self._finalizer: weakref.finalize[..., MemmapTransport] | None = None

    @property
    def directory(self) -> Path:
        """Directory of the snapshots; a ``SnapshotError`` says that the transport is not open."""
        return self._open_writer().directory

    @property
    def run_id(self) -> str:
        """Id of this writer's run; a ``SnapshotError`` says that the transport is not open."""
        return self._open_writer().run_id

    @property
    def last_version(self) -> int:
        """Newest version in the directory, an earlier process's included; 0 if there is none."""
        return (own.last_version or 0) if (own := self._own_writer()) else 0

    def _own_writer(self) -> SnapshotWriter | None:
        """The writer, if there is one; a forked child does not own its parent's."""
        return self._writer if self._pid == os.getpid() else None

    def _open_writer(self) -> SnapshotWriter:
        if (own := self._own_writer()) is None:
            raise SnapshotError("the memmap transport is not open")
        return own

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Creates the directory, or takes it up, and becomes its only writer.

        Arguments are those of :meth:`WeightTransport.open`. A default directory that was removed
        is made anew.

        Raises:
            SnapshotError: The directory is unusable, foreign or another writer's, or was removed.
        """
        del source  # any device will do
        if (own := self._own_writer()) is not None:
            if not own.is_removed:
                return
            if self._given is not None:
                raise SnapshotError(
                    f"{self._given}: was removed while versions were being stored there: close the "
                    "transport (an updater's disconnect() does) and open it again"
                )
            self.close()
        temporary = self._given is None
        directory = self._given or _new_directory(members.client.service_name)
        try:
            self._writer = SnapshotWriter(directory, layout=self._layout, takeover=self._takeover)
        except BaseException:
            if temporary:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._pid = os.getpid()
        # A process that ends without shutting down must not leave the weights in memory.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._pid, temporary)

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Publishes the version unless that is done, then has every replica load it.

        Arguments and result are those of :meth:`WeightTransport.send`. Weights that are published
        already are compared with the checksums of what is stored.

        Raises:
            StaleVersionError: The version is older than the newest published, or was published with
                other weights.
            SnapshotError: It could not be published; the last one stays in place.
        """
        self._publish(push.source, push.version, push.times)
        with push.times.measure("acknowledge_s"):
            return members.start(
                "load_snapshot",
                str(self.directory),
                self.run_id,
                at_least=push.version,
                verify=self._verify,
                timeout_s=push.timeout_s,
                clear_cache=push.clear_cache,
                mode=push.mode,
            ).answers(push.timeout_s + GRACE_S)

    def _publish(self, source: WeightSource, version: int, times: PhaseTimes) -> None:
        writer, metadata, views = self._open_writer(), source.metadata(), views_of(source)
        tensors = source if views is None else views
        if version == writer.last_version:
            if (changed := writer.first_difference(tensors, metadata)) is not None:
                raise StaleVersionError(
                    f"version {version} is stored already, and there {changed} is another: weights "
                    "that differ need a version of their own"
                )
            return
        with times.measure("publish_s"):
            report = writer.publish(tensors, metadata, version)
        times.seconds |= {f"{name}_s": value for name, value in report.phases.items()}
        times.starts |= {f"{name}_s": value for name, value in report.phase_starts.items()}

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process opens its own.
        return {**self.__dict__, "_writer": None, "_finalizer": None}

    def close(self) -> None:
        """Stops writing; removes the directory if this transport made it. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._writer = self._finalizer = None


def _close(writer: SnapshotWriter, pid: int, remove: bool) -> None:
    """Gives the directory back, in the process that took it: a forked child only forgets it."""
    if os.getpid() == pid:
        with suppress(FencedWriterError):  # it is the successor's now
            writer.close(remove=remove)


def _new_directory(service_name: str) -> Path:
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    if root is not None:
        _remove_orphans(root)
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{service_name}-", dir=root))
    os.close(files.new_file(directory / files.TEMPORARY))
    return directory


def _remove_orphans(root: Path) -> None:
    """Frees the memory of trainers killed before they could: directories that no user has named."""
    for path in root.glob(f"{PREFIX}*"):
        # It may be gone by now, or another user's.
        with suppress(OSError, SnapshotError), files.opened(path / files.LOCK, os.O_RDWR) as lock:
            if files.take_lock(lock):
                names = [one.relative_to(path).as_posix() for one in path.rglob("*")]
                if files.TEMPORARY in names and all(map(_OWN_NAME.fullmatch, names)):
                    shutil.rmtree(path)

"""The ``memmap`` transport: versions go through a snapshot directory that replicas read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.snapshot_writer import SnapshotWriter
from torchrl_vllm_sync.weights.transport import ReplicaOutcome, SendOutcome

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import ReplicaClient

__all__ = ["MemmapTransport"]

# Beside pausing and loading, which the replica bounds itself, it reads and verifies the snapshot.
VERIFY_TIMEOUT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


class MemmapTransport:
    """Publishes each version as a memory-mapped TensorDict and tells the replicas to load it.

    Args:
        directory: Where versions are stored; must be visible to every replica's node. By default
            a new directory in shared memory, removed by :meth:`close`.
        layout: ``"slots"`` rewrites a few directories in turn, for one host; ``"versions"`` writes
            new immutable files each time, for shared filesystems.
        verify: Replicas check the stored checksums before they load.
        takeover: Fence off a writer that another process left in ``directory``.
    """

    name = "memmap"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        layout: str = "slots",
        verify: bool = True,
        takeover: bool = False,
    ) -> None:
        self._given = None if directory is None else Path(directory)
        self._layout, self._verify, self._takeover = layout, verify, takeover
        self._writer: SnapshotWriter | None = None

    @property
    def directory(self) -> Path:
        """Directory of the snapshots.

        Raises:
            SnapshotError: The transport is not open.
        """
        if self._writer is None:
            raise SnapshotError("the memmap transport is not open")
        return self._writer.directory

    @property
    def run_id(self) -> str:
        """Id that marks the snapshots of this writer's run.

        Raises:
            SnapshotError: The transport is not open.
        """
        if self._writer is None:
            raise SnapshotError("the memmap transport is not open")
        return self._writer.run_id

    def open(self, client: ReplicaClient) -> None:
        """Creates the directory, or takes it up, and becomes its only writer.

        Raises:
            SnapshotError: The directory is unusable, foreign or another writer's.
        """
        if self._writer is None:
            directory = self._given or _new_directory(client.service_name)
            self._writer = SnapshotWriter(directory, layout=self._layout, takeover=self._takeover)

    def send(
        self,
        client: ReplicaClient,
        source: WeightSource,
        version: int,
        *,
        timeout_s: float,
        clear_cache: bool,
    ) -> SendOutcome:
        """Publishes ``version`` unless it is published already, then has every replica load it.

        Raises:
            StaleVersionError: ``version`` is older than the newest published.
            SnapshotError: It could not be published; the last one stays in place.
        """
        self.open(client)
        writer = self._writer
        assert writer is not None
        metadata = source.metadata()
        phases: dict[str, float] = {}
        if version != writer.last_version:
            report = writer.publish(source, metadata, version)
            phases = {"publish_s": report.seconds, **report.phases}
        answers = client.call_replicas(
            "load_snapshot",
            str(writer.directory),
            writer.run_id,
            at_least=version,
            verify=self._verify,
            clear_cache=clear_cache,
            timeout_s=timeout_s,
            deadline_s=2 * timeout_s + VERIFY_TIMEOUT_S,
        )
        num_bytes = sum(meta.num_bytes for meta in metadata)
        return SendOutcome(
            num_bytes=num_bytes,
            phases=phases,
            replicas=[_outcome(replica_id, answer) for replica_id, answer in answers.items()],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}  # a copy in another process opens its own

    def close(self) -> None:
        """Stops writing; removes the directory if this transport made it. Idempotent."""
        if self._writer is not None:
            self._writer.close(remove=self._given is None)
            self._writer = None


def _outcome(replica_id: str, answer: Any) -> ReplicaOutcome:  # noqa: ANN401
    if isinstance(answer, BaseException):
        return ReplicaOutcome(
            replica_id=replica_id, version=None, error=str(answer) or type(answer).__name__
        )
    phases = {name: float(value) for name, value in answer.items() if name != "version"}
    return ReplicaOutcome(replica_id=replica_id, version=answer["version"], phases=phases)


def _new_directory(service_name: str) -> Path:
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"torchrl_vllm_sync-{service_name}-", dir=root))

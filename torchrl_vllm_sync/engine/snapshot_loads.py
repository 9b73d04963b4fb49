"""Versions stored in a snapshot directory, loaded into one engine: when told, or on its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine.updates import LoadReport
from torchrl_vllm_sync.errors import SnapshotError, SyncError, WeightMismatchError
from torchrl_vllm_sync.weights.data_file import DATA_FILE
from torchrl_vllm_sync.weights.metadata import to_json
from torchrl_vllm_sync.weights.snapshot_reader import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine import PauseMode

    from torchrl_vllm_sync.engine.updates import WeightUpdates
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.snapshot_reader import Snapshot

__all__ = ["SnapshotLoads"]

logger = logging.getLogger(__name__)


class SnapshotLoads:
    """Applies stored versions to one engine, each at most once.

    Args:
        updates: The engine's weights.
        service_name: Tells this service's readers from those of others in one directory.
        expected: Returns the tensors that the engine's model consists of.
    """

    def __init__(
        self, updates: WeightUpdates, service_name: str, expected: Callable[[], list[ParamMeta]]
    ) -> None:
        self._updates = updates
        self._expected = functools.cache(expected)
        self._follower: asyncio.Task[None] | None = None
        self._load: asyncio.Future[LoadReport] | None = None
        self._readers: dict[tuple[str, str | None, bool], SnapshotReader] = {}
        self._reader_id = f"{service_name}-{updates.replica_id}"
        self._source: dict[str, Any] | None = None

    @property
    def source(self) -> dict[str, Any] | None:
        """``directory``, ``run_id`` and ``version`` of what the engine loaded last.

        ``None`` if its weights came another way since.
        """
        source = self._source
        return source if source and source["version"] == self._updates.version else None

    async def load(
        self,
        directory: str,
        run_id: str | None,
        *,
        at_least: int,
        verify: bool = True,
        compare: bool = False,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        timeout_s: float,
    ) -> LoadReport:
        """Loads the newest version stored in ``directory``, unless the engine holds it already.

        Args:
            directory: Snapshot directory, readable by this replica's workers.
            run_id: Run that the snapshots must belong to; ``None`` accepts any.
            at_least: Oldest acceptable version.
            verify: Check the stored checksums before anything is touched.
            compare: Compare names and shapes with the model's before anything is touched, for
                writers that have not.
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for everything together.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SnapshotError: Nothing acceptable is stored there. The engine is as it was.
            StaleVersionError: Another run brought the engine to this version or a newer one. The
                engine is as it was.
            WeightMismatchError: What is stored does not fit the engine's model. The engine is as it
                was.
            SyncError: The load failed or took too long, or what was loaded was replaced or removed
                meanwhile. The replica is stale: it takes no requests until a later load succeeds.
        """
        updates = self._updates
        deadline = time.perf_counter() + timeout_s
        async with updates.exclusive(timeout_s):
            reader = self._reader(directory, run_id, verify=verify)
            begin = time.perf_counter()
            newer_than = updates.version if updates.whole else None
            reading = contextlib.ExitStack()
            snapshot = await asyncio.to_thread(reading.enter_context, reader.read(newer_than))
            try:
                verified = time.perf_counter()
                if snapshot is None:
                    self._check_held(directory, run_id, at_least)
                    return LoadReport(version=updates.version, loaded=False)
                if snapshot.version < at_least:
                    raise SnapshotError(
                        f"{directory} holds version {snapshot.version}, not yet {at_least}"
                    )
                if compare:
                    await asyncio.to_thread(self._check_fits, snapshot)
                if verified >= deadline:
                    raise SyncError(f"reading {directory} took longer than {timeout_s:g} s")
                report = await updates.apply(
                    lambda timeout_s: self._load_in_workers(reader, snapshot, reading, timeout_s),
                    version=snapshot.version,
                    run_id=snapshot.manifest.run_id,
                    mode=mode,
                    clear_cache=clear_cache,
                    timeout_s=deadline - verified,
                    verify_s=verified - begin,
                )
                run = snapshot.manifest.run_id
                self._source = {"directory": directory, "run_id": run, "version": report.version}
                return report
            finally:
                await asyncio.to_thread(reading.__exit__, *sys.exc_info())

    def _check_held(self, directory: str, run_id: str | None, at_least: int) -> None:
        """Accepts that ``directory`` holds nothing newer, or raises; see :meth:`load`."""
        updates = self._updates
        if updates.version < at_least or not updates.whole:
            raise SnapshotError(
                f"{directory} holds no version {at_least} or later, and replica "
                f"{updates.replica_id} is at {updates.version}"
            )
        if at_least:
            updates.refuse_foreign(at_least, run_id)

    def _check_fits(self, snapshot: Snapshot) -> None:
        """Refuses what a trainer stored that knows nothing of the engines; see :meth:`load`."""
        try:
            expected = self._expected()
        except ValueError:
            return  # transformers has no such model to compare with; vLLM has the last word
        given = {meta.name for meta in snapshot.metadata}
        shapes = {meta.name: meta.shape for meta in expected}
        problems = [
            *(f"{name} is missing" for name in shapes if name not in given),
            *(
                f"{meta.name} has shape {list(meta.shape)} instead of {list(shapes[meta.name])}"
                for meta in snapshot.metadata
                if shapes.get(meta.name, meta.shape) != meta.shape
            ),
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise WeightMismatchError(
                f"version {snapshot.version} does not fit the model of replica "
                f"{self._updates.replica_id}: {'; '.join(problems[:5])}{more}"
            )

    async def _load_in_workers(
        self,
        reader: SnapshotReader,
        snapshot: Snapshot,
        reading: contextlib.ExitStack,
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        """Has every worker load, then ends ``reading``: raises unless it was one version."""
        answers = await self._updates.call_workers(
            "sync_load_snapshot",
            str(reader.directory / snapshot.manifest.path / DATA_FILE),
            to_json(snapshot.metadata),
            snapshot.manifest.trailer_checksum,
            timeout_s=timeout_s,
            heartbeat=snapshot.heartbeat,
        )
        if not any(answer["error"] for answer in answers):
            await asyncio.to_thread(reading.close)
        return answers

    def _reader(self, directory: str, run_id: str | None, *, verify: bool) -> SnapshotReader:
        """Returns the reader of one directory; readers keep mappings from load to load."""
        key = (directory, run_id, verify)
        if key not in self._readers:
            self._readers[key] = SnapshotReader(
                directory, reader_id=self._reader_id, run_id=run_id, verify=verify
            )
        return self._readers[key]

    def follow(
        self,
        directory: str,
        run_id: str | None,
        *,
        interval_s: float,
        timeout_s: float,
        verify: bool = True,
    ) -> None:
        """Loads new versions of ``directory`` as they appear, until :meth:`stop_following`.

        A version that cannot be loaded is tried again at each interval.

        Args:
            directory: Snapshot directory; it need not exist yet.
            run_id: Run that the snapshots must belong to; ``None`` accepts any.
            interval_s: Seconds between looks at the manifest.
            timeout_s: Seconds for each load.
            verify: Check checksums before each load.
        """
        self.stop_following()
        self._follower = asyncio.create_task(
            self._follow(directory, run_id, interval_s, timeout_s, verify)
        )

    async def _follow(
        self, directory: str, run_id: str | None, interval_s: float, timeout_s: float, verify: bool
    ) -> None:
        reader = self._reader(directory, run_id, verify=verify)
        complaint = ""
        updates = self._updates
        while not updates.is_over:
            now = ""
            try:
                manifest = await asyncio.to_thread(reader.current)
                if manifest is None:
                    pass
                elif manifest.version > updates.version or not updates.whole:
                    # Shielded, so that whoever stops this leaves no load half done.
                    self._load = asyncio.ensure_future(
                        self.load(directory, run_id, at_least=0, verify=verify, timeout_s=timeout_s)
                    )
                    await asyncio.shield(self._load)
                elif manifest.version < updates.version:
                    now = (
                        f"version {manifest.version} is older than the replica's {updates.version}"
                    )
            except SyncError as error:
                now = str(error)
            if now and now != complaint:
                logger.warning(
                    "replica %s cannot follow %s: %s", updates.replica_id, directory, now
                )
            complaint = now
            await asyncio.sleep(interval_s)

    def stop_following(self) -> None:
        """Ends :meth:`follow`; a load under way goes on, see ``WeightUpdates.settled``."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

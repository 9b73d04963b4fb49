"""Weight updates of one engine: pause, load, acknowledge, resume, and the version they leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.errors import SnapshotError, SyncError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.weights.data_file import DATA_FILE
from torchrl_vllm_sync.weights.metadata import to_json
from torchrl_vllm_sync.weights.snapshot_reader import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.admission import AdmissionGate
    from torchrl_vllm_sync.weights.snapshot_reader import Snapshot

__all__ = ["LoadReport", "WeightUpdates"]

logger = logging.getLogger(__name__)

# Seconds within which requests without a token must have left a paused engine.
SEND_BACK_TIMEOUT_S = 10.0
# Seconds within which a paused engine must answer the call to resume.
RESUME_TIMEOUT_S = 30.0
# Seconds between signs of life to the writer of a snapshot that is being loaded.
HEARTBEAT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How one replica came to hold a version. Times are seconds of wall clock.

    Attributes:
        version: Policy version the replica now holds.
        loaded: Whether anything was loaded; ``False`` when it held the version already.
        verify_s: Reading and checking the stored tensors, while generation goes on.
        pause_s: From the request to pause until no step is running.
        load_s: Loading into the model, the slowest worker.
        resume_s: Labelling and resuming.
        num_tensors: Tensors loaded by each worker.
        num_kept: Requests that went on with the tokens and keys they had.
        num_restarted: Requests without a token yet, which began again under the new weights.
        attempts: Loads it took, the most of any worker.
    """

    version: int
    loaded: bool
    verify_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    num_tensors: int = 0
    num_kept: int = 0
    num_restarted: int = 0
    attempts: int = 0


class WeightUpdates:
    """Applies stored versions to one engine, one at a time, each at most once.

    Attributes:
        version: Policy version the engine serves with; 0 is what it was launched with.

    Args:
        engine: The replica's engine.
        gate: The gate in front of it.
        service_name: Tells this service's readers from those of others in one directory.
    """

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate, service_name: str) -> None:
        self.version = 0
        self._engine = engine
        self._gate = gate
        self._lock = asyncio.Lock()
        self._whole = True
        self._follower: asyncio.Task[None] | None = None
        self._readers: dict[tuple[str, str, bool], SnapshotReader] = {}
        self._reader_id = f"{service_name}-{gate.replica_id}"

    async def load_snapshot(
        self,
        directory: str,
        run_id: str,
        *,
        at_least: int,
        verify: bool = True,
        mode: str = "keep",
        clear_cache: bool = False,
        timeout_s: float,
    ) -> LoadReport:
        """Loads the newest version stored in ``directory``, unless the engine holds it already.

        Args:
            directory: Snapshot directory, readable by this replica's workers.
            run_id: Run that the snapshots must belong to.
            at_least: Oldest acceptable version.
            verify: Check the stored checksums before anything is touched.
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for pause and load together.

        Raises:
            SnapshotError: Nothing acceptable is stored there. The engine is as it was.
            SyncError: The load failed or took too long. The replica is stale: it takes no
                requests until a later load succeeds.
        """
        async with self._lock:
            reader = self._reader(directory, run_id, verify=verify)
            begin = time.perf_counter()
            lease = reader.read(newer_than=self.version if self._whole else None)
            snapshot = await asyncio.to_thread(lease.__enter__)
            try:
                if snapshot is None:
                    if self.version < at_least or not self._whole:
                        raise SnapshotError(
                            f"{directory} holds no version {at_least} or later, "
                            f"and replica {self._gate.replica_id} is at {self.version}"
                        )
                    return LoadReport(version=self.version, loaded=False)
                if snapshot.version < at_least:
                    raise SnapshotError(
                        f"{directory} holds version {snapshot.version}, not yet {at_least}"
                    )
                verified = time.perf_counter()
                return await self._apply(
                    reader, snapshot, verified - begin, mode, clear_cache, timeout_s
                )
            finally:
                await asyncio.to_thread(lease.__exit__, None, None, None)

    async def _apply(
        self,
        reader: SnapshotReader,
        snapshot: Snapshot,
        verify_s: float,
        mode: str,
        clear_cache: bool,
        timeout_s: float,
    ) -> LoadReport:
        begin = time.perf_counter()
        async with self._paused(mode, clear_cache, timeout_s) as num_restarted:
            paused = time.perf_counter()
            self._whole = False
            answers = await self._load_in_workers(reader, snapshot, timeout_s)
            for rank, answer in enumerate(answers):
                if answer["error"]:
                    raise SyncError(f"worker {rank} could not load: {answer['error']}")
            loaded = time.perf_counter()
            await internals.set_weight_label(self._engine, str(snapshot.version))
            self.version, self._whole = snapshot.version, True
            num_kept = len(self._gate.running)
        return LoadReport(
            version=self.version,
            loaded=True,
            verify_s=verify_s,
            pause_s=paused - begin,
            load_s=loaded - paused,
            resume_s=time.perf_counter() - loaded,
            num_tensors=answers[0]["num_tensors"],
            num_kept=num_kept,
            num_restarted=num_restarted,
            attempts=max(answer["attempts"] for answer in answers),
        )

    async def _load_in_workers(
        self, reader: SnapshotReader, snapshot: Snapshot, timeout_s: float
    ) -> list[dict[str, Any]]:
        """Has every worker load; keeps the lease on the snapshot alive meanwhile."""
        load = asyncio.ensure_future(
            self._engine.collective_rpc(
                "sync_load_snapshot",
                args=(
                    str(reader.directory / snapshot.manifest.path / DATA_FILE),
                    to_json(snapshot.metadata),
                    snapshot.manifest.trailer_checksum,
                ),
            )
        )
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait({load}, timeout=HEARTBEAT_S))[0]:
                snapshot.heartbeat()
        return load.result()

    def _reader(self, directory: str, run_id: str, *, verify: bool) -> SnapshotReader:
        """Returns the reader of one directory; readers keep mappings from load to load."""
        key = (directory, run_id, verify)
        if key not in self._readers:
            self._readers[key] = SnapshotReader(
                directory, reader_id=self._reader_id, run_id=run_id, verify=verify
            )
        return self._readers[key]

    @contextlib.asynccontextmanager
    async def _paused(self, mode: str, clear_cache: bool, timeout_s: float) -> AsyncIterator[int]:
        """Freezes the engine, and on every way out leaves it whole and serving, or out of service.

        Requests in flight outlive a failure before the load began; a failure after that leaves
        weights nobody knows, so the requests are ended and the replica is stale.
        """
        self._gate.set(ReplicaState.UPDATING)
        try:
            async with asyncio.timeout(timeout_s):
                await internals.pause_scheduler(self._engine, mode=mode, clear_cache=clear_cache)
                num_restarted = await self._send_back_unstarted()
            yield num_restarted
        except BaseException as error:
            if not self._whole:
                reason = (str(error) or type(error).__name__).strip()[-500:]
                self._gate.set(ReplicaState.STALE, f"weight update failed: {reason}")
            await self._resume()
            raise
        await self._resume()

    async def _resume(self) -> None:
        """Lets the engine step again, and requests enter if its weights are whole."""
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                await self._engine.resume_generation()
        except TimeoutError:
            self._gate.set(
                ReplicaState.STALE, f"the engine did not resume within {RESUME_TIMEOUT_S:g} s"
            )
            raise
        if self._whole:
            self._gate.set(ReplicaState.SERVING)

    async def _send_back_unstarted(self) -> int:
        """Sends requests without a token back to the gate; they would read old keys otherwise.

        A request that passed the gate just before the pause may not be registered with vLLM yet,
        hence the loop.
        """
        begun = set(self._gate.running) - internals.prefilling_requests(self._engine)
        begun &= internals.known_requests(self._engine)
        pending = {name: one for name, one in self._gate.running.items() if name not in begun}
        for running in pending.values():
            running.restart = True
        async with asyncio.timeout(SEND_BACK_TIMEOUT_S):
            while left := [name for name in pending if name in self._gate.running]:
                await self._engine.abort(left)
                await asyncio.sleep(0.002)
        return len(pending)

    def follow(
        self, directory: str, run_id: str, *, interval_s: float, timeout_s: float, verify: bool
    ) -> None:
        """Loads new versions of ``directory`` as they appear, until :meth:`stop_following`.

        Args:
            directory: Snapshot directory.
            run_id: Run that the snapshots must belong to.
            interval_s: Seconds between looks at the manifest.
            timeout_s: Seconds for each load.
            verify: Check checksums before each load.
        """
        self.stop_following()
        self._follower = asyncio.create_task(
            self._follow(directory, run_id, interval_s, timeout_s, verify)
        )

    async def _follow(
        self, directory: str, run_id: str, interval_s: float, timeout_s: float, verify: bool
    ) -> None:
        reader = self._reader(directory, run_id, verify=verify)
        while True:
            try:
                manifest = await asyncio.to_thread(reader.current)
                if manifest is not None and (manifest.version > self.version or not self._whole):
                    await self.load_snapshot(
                        directory, run_id, at_least=0, verify=verify, timeout_s=timeout_s
                    )
            except (SyncError, TimeoutError):
                logger.exception("replica %s could not follow %s", self._gate.replica_id, directory)
            await asyncio.sleep(interval_s)

    def stop_following(self) -> None:
        """Ends :meth:`follow`; a load under way is given up and leaves the replica stale."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

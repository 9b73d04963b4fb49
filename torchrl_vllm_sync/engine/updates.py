"""Weight updates of one engine: pause, load, acknowledge, resume, and the version they leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.errors import SnapshotError, StaleVersionError, SyncError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.weights.data_file import DATA_FILE
from torchrl_vllm_sync.weights.metadata import to_json
from torchrl_vllm_sync.weights.snapshot_reader import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from vllm.v1.engine import PauseMode
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
# Seconds between looks at whether an engine core that owes an answer is still alive.
POLL_S = 0.5


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

    A replica whose weights are not known to be whole stays paused, so that no step ever runs on
    them, until a load succeeds.

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
        self._floor = 0
        self._run_id: str | None = None
        self._follower: asyncio.Task[None] | None = None
        self._load: asyncio.Future[LoadReport] | None = None
        self._readers: dict[tuple[str, str | None, bool], SnapshotReader] = {}
        self._reader_id = f"{service_name}-{gate.replica_id}"

    async def load_snapshot(
        self,
        directory: str,
        run_id: str | None,
        *,
        at_least: int,
        verify: bool = True,
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
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for everything together.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SnapshotError: Nothing acceptable is stored there. The engine is as it was.
            StaleVersionError: Another run brought the engine to this version or a newer one. The
                engine is as it was.
            SyncError: The load failed or took too long. The replica is stale: it takes no
                requests until a later load succeeds.
        """
        deadline = time.perf_counter() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise SyncError(f"another update was under way for {timeout_s:g} s") from None
        try:
            self._require_alive()
            reader = self._reader(directory, run_id, verify=verify)
            begin = time.perf_counter()
            lease = reader.read(newer_than=self.version if self._whole else None)
            snapshot = await asyncio.to_thread(lease.__enter__)
            try:
                verified = time.perf_counter()
                if snapshot is None:
                    self._check_held(directory, run_id, at_least)
                    return LoadReport(version=self.version, loaded=False)
                if snapshot.version < at_least:
                    raise SnapshotError(
                        f"{directory} holds version {snapshot.version}, not yet {at_least}"
                    )
                if verified >= deadline:
                    raise SyncError(f"reading {directory} took longer than {timeout_s:g} s")
                return await self._apply(
                    reader, snapshot, verified - begin, mode, clear_cache, deadline - verified
                )
            finally:
                await asyncio.to_thread(lease.__exit__, None, None, None)
        finally:
            self._lock.release()

    def _require_alive(self) -> None:
        """Raises unless the engine can be updated.

        Raises:
            ReplicaUnavailableError: It is dead or closed.
        """
        if self._engine.errored:
            self._set(ReplicaState.FAILED, f"engine core died: {self._engine.dead_error}")
        if self._gate.state in (ReplicaState.FAILED, ReplicaState.CLOSED):
            raise self._gate.refusal()

    def _check_held(self, directory: str, run_id: str | None, at_least: int) -> None:
        """Accepts that ``directory`` holds nothing newer, or raises; see :meth:`load_snapshot`."""
        name = f"replica {self._gate.replica_id}"
        if self.version < at_least or not self._whole:
            raise SnapshotError(
                f"{directory} holds no version {at_least} or later, and {name} is at {self.version}"
            )
        foreign = run_id is not None and self._run_id not in (None, run_id)
        if at_least and foreign:
            raise StaleVersionError(
                f"version must be greater than {self.version}, to which run {self._run_id} "
                f"brought {name}, got {at_least} of run {run_id}"
            )

    async def _apply(
        self,
        reader: SnapshotReader,
        snapshot: Snapshot,
        verify_s: float,
        mode: PauseMode,
        clear_cache: bool,
        timeout_s: float,
    ) -> LoadReport:
        begin = time.perf_counter()
        async with self._paused(mode, clear_cache, timeout_s) as num_restarted:
            paused = time.perf_counter()
            self._whole = False
            answers = await self._load_in_workers(reader, snapshot, timeout_s - (paused - begin))
            for rank, answer in enumerate(answers):
                if answer["error"]:
                    raise SyncError(f"worker {rank} could not load: {answer['error']}")
            loaded = time.perf_counter()
            await self._ask(
                "labelling",
                internals.set_weight_label(self._engine, str(snapshot.version)),
                RESUME_TIMEOUT_S,
            )
            self.version, self._whole = snapshot.version, True
            self._run_id = snapshot.manifest.run_id
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
        load = self._engine.collective_rpc(
            "sync_load_snapshot",
            args=(
                str(reader.directory / snapshot.manifest.path / DATA_FILE),
                to_json(snapshot.metadata),
                snapshot.manifest.trailer_checksum,
            ),
        )
        return await self._ask("loading", load, timeout_s, heartbeat=snapshot.heartbeat)

    async def _ask(
        self,
        what: str,
        call: Awaitable[Any],
        timeout_s: float,
        *,
        heartbeat: Callable[[], None] | None = None,
    ) -> Any:  # noqa: ANN401  whatever the engine answers
        """Awaits the engine's answer, and notices if its core dies: vLLM answers no call then.

        Raises:
            ReplicaUnavailableError: The engine core died.
            SyncError: There was no answer in time.
        """
        answer = asyncio.ensure_future(call)
        deadline = time.perf_counter() + timeout_s
        beaten = time.perf_counter()
        try:
            while not (await asyncio.wait({answer}, timeout=min(POLL_S, timeout_s)))[0]:
                self._require_alive()
                now = time.perf_counter()
                if now >= deadline:
                    raise SyncError(f"{what} took longer than {timeout_s:.3g} s")
                if heartbeat is not None and now - beaten > HEARTBEAT_S:
                    heartbeat()
                    beaten = now
        finally:
            answer.cancel()
        try:
            return answer.result()
        except EngineDeadError:
            self._require_alive()
            raise

    def _reader(self, directory: str, run_id: str | None, *, verify: bool) -> SnapshotReader:
        """Returns the reader of one directory; readers keep mappings from load to load."""
        key = (directory, run_id, verify)
        if key not in self._readers:
            self._readers[key] = SnapshotReader(
                directory, reader_id=self._reader_id, run_id=run_id, verify=verify
            )
        return self._readers[key]

    @contextlib.asynccontextmanager
    async def _paused(
        self, mode: PauseMode, clear_cache: bool, timeout_s: float
    ) -> AsyncIterator[int]:
        """Freezes the engine, and on every way out leaves it whole and serving, or out of service.

        Requests in flight outlive a failure before the load began; a failure after that leaves
        weights nobody knows, so the requests are ended and the engine stays paused.
        """
        self._set(ReplicaState.UPDATING)
        try:
            await self._ask(
                "pausing",
                internals.pause_scheduler(self._engine, mode=mode, clear_cache=clear_cache),
                timeout_s,
            )
            num_restarted = await self._send_back_unstarted()
            yield num_restarted
        except BaseException as error:
            if self._whole:
                await self._resume()
            else:
                reason = (str(error) or type(error).__name__).partition("\n")[0]
                self._set(ReplicaState.STALE, f"weight update failed: {reason}")
            raise
        await self._resume()

    async def _resume(self) -> None:
        """Lets the engine step again and requests enter.

        Raises:
            ReplicaUnavailableError: The engine core is dead.
            SyncError: It did not resume in time; the replica is stale.
        """
        try:
            await self._ask("resuming", self._engine.resume_generation(), RESUME_TIMEOUT_S)
        except BaseException as error:
            self._whole = False  # it may be frozen: only a load that ends well makes it serve again
            self._set(ReplicaState.STALE, f"the engine did not resume: {error}")
            raise
        if self.version >= self._floor:
            self._set(ReplicaState.SERVING)
        else:
            self._set(ReplicaState.STALE, f"it did not reach version {self._floor}")

    async def settled(self) -> None:
        """Waits until no load is under way."""
        async with self._lock:
            return

    def hold_back(self, version: int, run_id: str | None) -> None:
        """Takes the replica out of service unless it holds ``version``, or until it does.

        A replica that missed a push which others took is whole, but not current. One that holds
        another run's version of the same number would be taken for current; it must load anew.

        Args:
            version: Oldest version to serve with from now on.
            run_id: Run that ``version`` belongs to; ``None`` accepts any.
        """
        self._floor = max(self._floor, version)
        foreign = self.version == version and run_id not in (None, self._run_id)
        if foreign:
            self._whole = False
        if (foreign or self.version < self._floor) and self._gate.state.admits_requests:
            other = " of this run" if foreign else ""
            self._set(ReplicaState.STALE, f"it did not reach version {self._floor}{other}")

    def _set(self, state: ReplicaState, reason: str = "") -> None:
        """Changes the replica's state; what is dead or closed stays so."""
        if self._gate.state not in (ReplicaState.FAILED, ReplicaState.CLOSED):
            self._gate.set(state, reason)

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
        deadline = time.perf_counter() + SEND_BACK_TIMEOUT_S
        while left := [name for name in pending if name in self._gate.running]:
            self._require_alive()
            if time.perf_counter() > deadline:
                raise SyncError(f"{len(left)} requests did not leave the paused engine")
            await self._engine.abort(left)
            await asyncio.sleep(0.002)
        return len(pending)

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
        while self._gate.state not in (ReplicaState.FAILED, ReplicaState.CLOSED):
            try:
                manifest = await asyncio.to_thread(reader.current)
                if manifest is not None and (manifest.version > self.version or not self._whole):
                    # Shielded, so that whoever stops this leaves no load half done.
                    self._load = asyncio.ensure_future(
                        self.load_snapshot(
                            directory, run_id, at_least=0, verify=verify, timeout_s=timeout_s
                        )
                    )
                    await asyncio.shield(self._load)
                complaint = ""
            except SyncError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    logger.warning(
                        "replica %s cannot follow %s: %s", self._gate.replica_id, directory, error
                    )
            await asyncio.sleep(interval_s)

    def stop_following(self) -> None:
        """Ends :meth:`follow`; a load under way goes on to its end, see :meth:`settled`."""
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None

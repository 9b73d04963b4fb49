"""Versions that arrive in parts, one call each, through vLLM's transfer engine."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine.updates import LoadReport
from torchrl_vllm_sync.errors import SyncError, TransferNotReadyError

if TYPE_CHECKING:
    from torchrl_vllm_sync.engine.native_updates import NativeUpdates
    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["ChunkedLoads"]

logger = logging.getLogger(__name__)


class ChunkedLoads:
    """Takes one version at a time: :meth:`begin`, :meth:`receive` for each part, :meth:`finish`.

    A sender that falls silent in between loses its turn after the time limit it gave.

    Args:
        updates: The engine's weights.
    """

    def __init__(self, updates: NativeUpdates) -> None:
        self._updates = updates
        self._version, self._run_id = 0, ""
        self._begun = self._paused = 0.0
        self._num_tensors = 0
        self._expiry: asyncio.Task[None] | None = None

    async def begin(
        self, version: int, run_id: str, mode: PauseMode, clear_cache: bool, timeout_s: float
    ) -> None:
        """Pauses the engine for a version to come.

        Args:
            version: Policy version.
            run_id: Run that it belongs to.
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for all of it; afterwards it is given up.

        Raises:
            TransferNotReadyError: An update is open, or the transfer engine is not initialised.
            ReplicaUnavailableError: The engine is dead or closed.
            StaleVersionError: The engine holds a newer version, or another run's.
            SyncError: The engine did not pause.
        """
        begun = time.perf_counter()
        self._updates.refuse_stale(version, run_id)
        await self._updates.begin(
            mode=mode, clear_cache=clear_cache, timeout_s=timeout_s, idle_timeout_s=timeout_s
        )
        self._begun, self._paused = begun, time.perf_counter()
        self._version, self._run_id, self._num_tensors = version, run_id, 0
        self._expiry = asyncio.create_task(self._expire(timeout_s))

    async def receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives one part; see ``NativeUpdates.receive``."""
        self._require_begun()
        await self._updates.receive(update_info, timeout_s=timeout_s)
        self._num_tensors += len(update_info["names"])

    async def finish(self) -> LoadReport:
        """Ends the version; see ``NativeUpdates.finish``."""
        self._require_begun()
        self._stop_expiry()
        begin = time.perf_counter()
        num_kept, num_restarted = self._updates.num_kept, self._updates.num_restarted
        await self._updates.finish(str(self._version), run_id=self._run_id)
        done = time.perf_counter()
        return LoadReport(
            version=self._version,
            loaded=True,
            pause_s=self._paused - self._begun,
            load_s=begin - self._paused,
            resume_s=done - begin,
            whole_pause_s=done - self._begun,
            num_tensors=self._num_tensors,
            num_kept=num_kept,
            num_restarted=num_restarted,
            attempts=1,
            path="layerwise",
            path_reason="vLLM's own transfer engines always take it",
            began_at=time.time() - (time.perf_counter() - self._begun),
        )

    async def give_up(self, run_id: str) -> None:
        """Ends what run ``run_id`` has begun; the replica is stale if a part of it had come."""
        if self._expiry is not None and self._run_id == run_id:
            self._stop_expiry()
            if self._updates.is_open:
                await self._updates.abandon()

    async def _expire(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._expiry = None
        if self._updates.is_open:
            logger.warning(
                "replica %s: version %d did not arrive within %g s and is given up",
                self._updates.replica_id,
                self._version,
                timeout_s,
            )
            try:
                await self._updates.abandon()
            except SyncError as error:  # nobody waits for this task
                logger.warning("replica %s: %s", self._updates.replica_id, error)

    def _require_begun(self) -> None:
        if self._expiry is None:
            raise TransferNotReadyError("no version was begun, or its time was up")

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

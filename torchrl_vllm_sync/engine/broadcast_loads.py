"""Versions that a trainer broadcasts, received by one engine's workers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import StaleVersionError, SyncError, TransferError

if TYPE_CHECKING:
    from vllm.v1.engine import PauseMode

    from torchrl_vllm_sync.engine.updates import LoadReport, WeightUpdates

__all__ = ["BroadcastLoads"]

# Seconds between looks at whether staged weights have arrived.
STAGED_POLL_S = 0.005
# A worker that has run out of time is given this much longer to say so, and whether its weights
# are as they were: of one that stays silent that is not known.
LAST_WORDS_S = 5.0
# Seconds for a worker to leave its group.
LEAVE_TIMEOUT_S = 10.0


class BroadcastLoads:
    """Takes part in a trainer's broadcasts.

    Args:
        updates: The engine's weights.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates

    async def join(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Has every worker join the trainer's group.

        Args:
            init_info: Fields of ``BroadcastInitInfo``.
            timeout_s: Seconds within which everybody must have come.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: A worker could not join.
        """
        async with self._updates.exclusive(timeout_s):
            limits = {"timeout_s": timeout_s, "deadline": time.monotonic() + timeout_s}
            await self._call("sync_join", init_info | limits, timeout_s=timeout_s + LAST_WORDS_S)

    async def prepare(
        self, metadata: list[list[Any]], bucket_bytes: int, *, timeout_s: float
    ) -> dict[str, Any]:
        """Tells every worker what all coming pushes consist of.

        Args:
            metadata: Names, dtypes and shapes, in the JSON form of ``ParamMeta``.
            bucket_bytes: Size of the buckets.
            timeout_s: Seconds for it.

        Returns:
            ``path`` and ``path_reason`` of the workers, and ``direct``: whether all of them can
            receive without buckets.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: A worker could not prepare.
        """
        async with self._updates.exclusive(timeout_s):
            answers = await self._call("sync_prepare", metadata, bucket_bytes, timeout_s=timeout_s)
        return {
            "path": " and ".join(sorted({one["path"] for one in answers})),
            "path_reason": next((one["path_reason"] for one in answers if one["path_reason"]), ""),
            "direct": all(one["direct"] for one in answers),
        }

    async def receive(
        self,
        push_id: int,
        digest: str,
        *,
        version: int,
        run_id: str,
        direct: bool = False,
        num_passes: int = 1,
        staged: bool = False,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        timeout_s: float,
    ) -> LoadReport:
        """Receives one version.

        Args:
            push_id: Number of the push in the group.
            digest: Digest of its metadata.
            version: Policy version.
            run_id: Run that it belongs to.
            direct: Whether it comes without buckets.
            num_passes: How often the trainer sends everything.
            staged: Receive into spare memory while generation goes on, then only copy into place.
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for everything.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            StaleVersionError: The engine holds a newer version, or another run's.
            SyncError: It was not received. The engine is as it was if the transfer had not begun;
                otherwise the replica is stale until a later load succeeds.
        """
        deadline = time.perf_counter() + timeout_s
        updates = self._updates
        async with updates.exclusive(timeout_s):
            if version < updates.version:
                raise StaleVersionError(
                    f"version must be at least {updates.version}, which replica "
                    f"{updates.replica_id} holds, got {version}"
                )
            updates.refuse_foreign(version, run_id)
            stage_s = ready_s = 0.0
            if staged:
                begin = time.monotonic()
                ready_s = await self._stage(push_id, digest, direct, timeout_s) - begin
                stage_s = time.monotonic() - begin

            async def load(timeout_s: float) -> list[dict[str, Any]]:
                if staged:
                    return await updates.call_workers("sync_install_staged", timeout_s=timeout_s)
                return await updates.call_workers(
                    "sync_receive",
                    push_id,
                    digest,
                    direct,
                    num_passes,
                    timeout_s,
                    timeout_s=timeout_s + LAST_WORDS_S,
                )

            report = await updates.apply(
                load,
                version=version,
                run_id=run_id,
                mode=mode,
                clear_cache=clear_cache,
                timeout_s=deadline - time.perf_counter(),
                stage_s=stage_s,
            )
            return dataclasses.replace(report, ready_s=ready_s)

    async def leave(self) -> None:
        """Has every worker leave the group; workers whose engine is dead have left it."""
        if not self._updates.is_over:
            await self._updates.call_workers("sync_leave", timeout_s=LEAVE_TIMEOUT_S)

    async def _stage(self, push_id: int, digest: str, direct: bool, timeout_s: float) -> float:
        """Receives into spare memory; returns when it began, by ``time.monotonic()``."""
        deadline = time.perf_counter() + timeout_s
        await self._call("sync_stage", push_id, digest, direct, timeout_s, timeout_s=timeout_s)
        while True:
            left = deadline - time.perf_counter()
            if left <= 0:
                raise TransferError(f"staging took longer than {timeout_s:g} s")
            answers = await self._updates.call_workers("sync_staged", timeout_s=left)
            if all(answers):
                _raise_errors(answers)
                return min(one["began_at"] for one in answers)
            await asyncio.sleep(STAGED_POLL_S)

    async def _call(self, method: str, *args: Any, timeout_s: float) -> list[dict[str, Any]]:
        answers = await self._updates.call_workers(
            method, *args, timeout_s=timeout_s, what="preparing"
        )
        _raise_errors(answers)
        return answers


def _raise_errors(answers: list[dict[str, Any]]) -> None:
    """Raises for the workers that failed.

    Raises:
        SyncError: At least one did.
    """
    failures = [
        f"worker {rank}: {answer['error'].partition(chr(10))[0]}"
        for rank, answer in enumerate(answers)
        if answer["error"]
    ]
    if failures:
        raise SyncError("; ".join(failures))

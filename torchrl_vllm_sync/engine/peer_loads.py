"""One replica's weights given to another of the same service, and taken from one."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any

import ray

from torchrl_vllm_sync.engine.updates import LoadReport
from torchrl_vllm_sync.errors import SilentEngineError, StaleVersionError, SyncError, TransferError
from torchrl_vllm_sync.weights.choice import this_node

if TYPE_CHECKING:
    from torchrl_vllm_sync.engine.updates import WeightUpdates

__all__ = ["PeerLoads"]

CALL_TIMEOUT_S = 60.0
# An offer of which nothing is taken for so long has no taker, and must not keep updates out.
IDLE_TIMEOUT_S = 15.0


class PeerLoads:
    """Gives this engine's weights to another replica, or takes another's.

    Giving: :meth:`offer`, then :meth:`give` for each chunk and :meth:`checksums`, from the replica
    that takes; then :meth:`withdraw`. The engine goes on generating meanwhile; updates wait, so
    that what is given is one version. An offer ends by itself when nothing was taken for 15 s, and
    at the next chunk when an update waits: that is newer.

    Args:
        updates: The engine's weights.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates
        self._token = ""
        self._offered: contextlib.AsyncExitStack | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def offer(self, *, timeout_s: float) -> dict[str, Any]:
        """Keeps updates out and says what there is to take.

        Args:
            timeout_s: Seconds to wait for an update that is under way.

        Returns:
            What :meth:`take` needs.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            TransferError: The weights are not whole, or cannot be copied as they are.
            SyncError: An update was under way all the time.
        """
        updates = self._updates
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(updates.exclusive(timeout_s))
            if not updates.whole:
                raise TransferError(f"replica {updates.replica_id} holds no whole version")
            token = uuid.uuid4().hex
            answers = await self._ask("sync_peer_open", token, True)
            self._token, self._offered = token, stack.pop_all()
        self._stand(token)
        return {
            "actor": ray.get_runtime_context().current_actor,
            "token": token,
            "node_id": this_node(),
            "version": updates.version,
            "run_id": updates.run_id,
            "workers": [{"layout": a["layout"], "num_chunks": a["num_chunks"]} for a in answers],
        }

    async def give(self, token: str, index: int, by_value: bool) -> list[Any]:
        """Returns chunk ``index`` of each worker: its bytes, or the file that holds it now.

        Raises:
            TransferError: The offer does not stand any more, or an update waits for it.
        """
        self._require(token)
        if self._updates.num_waiting:
            await self.withdraw(token)
            raise TransferError("an update came in between, which brings newer weights")
        self._stand(token)
        return [one["source"] for one in await self._ask("sync_peer_give", index, by_value)]

    async def checksums(self, token: str) -> list[dict[str, int]]:
        """Returns the checksums of each worker's tensors.

        Raises:
            TransferError: The offer does not stand any more.
        """
        self._require(token)
        return [one["checksums"] for one in await self._ask("sync_peer_checksums")]

    async def withdraw(self, token: str) -> None:
        """Ends an offer; does nothing if it has ended."""
        if token != self._token or self._offered is None:
            return
        offered, self._offered, self._token = self._offered, None, ""
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            await self._ask("sync_peer_close")
        finally:
            await offered.aclose()

    async def take(self, offer: dict[str, Any], *, timeout_s: float) -> LoadReport:
        """Takes the weights that another replica offers, unless it holds them by now.

        Args:
            offer: What its :meth:`offer` returned.
            timeout_s: Seconds for everything.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            StaleVersionError: The engine holds a newer version. It is as it was.
            TransferError: The two engines' tensors are not alike. The engine is as it was.
            SyncError: The copy broke off. The replica is stale until a later load succeeds.
        """
        updates = self._updates
        deadline = time.monotonic() + timeout_s
        async with updates.exclusive(timeout_s):
            if updates.whole and updates.version > offer["version"]:
                raise StaleVersionError(
                    f"version must be at least {updates.version}, which replica "
                    f"{updates.replica_id} holds, got {offer['version']}"
                )
            offered = offer["version"], offer["run_id"]
            if updates.whole and (updates.version, updates.run_id) == offered:
                return LoadReport(version=updates.version, loaded=False)
            try:
                own = await self._ask("sync_peer_open", offer["token"], False)
                if [a["layout"] for a in own] != [a["layout"] for a in offer["workers"]]:
                    raise TransferError("the two replicas' tensors are not alike")
                return await updates.apply(
                    lambda _: self._copy(offer, deadline),
                    version=offer["version"],
                    run_id=offer["run_id"],
                    mode="keep",
                    clear_cache=False,
                    timeout_s=deadline - time.monotonic(),
                )
            finally:
                await self._ask("sync_peer_close")

    async def _copy(self, offer: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Takes every chunk and compares; returns what ``WeightUpdates.apply`` asks for."""
        actor, token = offer["actor"], offer["token"]
        by_value = offer["node_id"] != this_node()
        for index in range(max(one["num_chunks"] for one in offer["workers"])):
            sources = await _within(actor.give_weights.remote(token, index, by_value), deadline)
            await self._ask("sync_peer_take", index, sources, deadline=deadline)
        theirs = await _within(actor.weight_checksums.remote(token), deadline)
        answers = await self._ask("sync_peer_checksums", deadline=deadline)
        return [
            {
                "error": "" if one["checksums"] == wanted else "the copy differs from the peer",
                "untouched": False,
                "num_tensors": len(wanted),
                "attempts": 1,
                "path": "peer",
                "path_reason": "",
            }
            for one, wanted in zip(answers, theirs, strict=True)
        ]

    def _stand(self, token: str) -> None:
        """Has an offer stand for a while from now on."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(
            IDLE_TIMEOUT_S, lambda: asyncio.ensure_future(self.withdraw(token))
        )

    def _require(self, token: str) -> None:
        if token != self._token or self._offered is None:
            raise TransferError("the offer does not stand any more")

    async def _ask(
        self, method: str, *args: Any, deadline: float | None = None
    ) -> list[dict[str, Any]]:
        left_s = CALL_TIMEOUT_S if deadline is None else max(deadline - time.monotonic(), 1e-3)
        answers = await self._updates.call_workers(
            method, *args, timeout_s=min(left_s, CALL_TIMEOUT_S), what="copying"
        )
        for rank, answer in enumerate(answers):
            if answer["error"]:
                raise SyncError(f"worker {rank}: {answer['error'].partition(chr(10))[0]}")
        return answers


async def _within(call: Any, deadline: float) -> Any:
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 1e-3)):
            return await call
    except TimeoutError:
        raise SilentEngineError("the giving replica did not answer in time") from None

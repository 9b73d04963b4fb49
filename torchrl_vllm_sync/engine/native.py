"""vLLM's own weight-transfer, pause and sleep calls on a replica's actor, under vLLM's names.

TorchRL's ``VLLMWeightSyncScheme`` and vLLM's ``RayVLLMWeightSyncClient`` call them on the actors,
the service on all of them at once. Plain mappings are taken beside vLLM's request classes, so that
a driver need not import vLLM.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine.chunked_loads import ChunkedLoads
from torchrl_vllm_sync.engine.native_updates import IDLE_TIMEOUT_S
from torchrl_vllm_sync.errors import UnsupportedArgumentError

if TYPE_CHECKING:
    from torchrl_vllm_sync.engine.native_updates import NativeUpdates
    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["NativeWeightTransfer"]

DEFAULT_TIMEOUT_S = 300.0


class NativeWeightTransfer:
    """Mixin of the engine actor: vLLM's ``AsyncLLM`` methods of the same names.

    Beyond vLLM each has a time limit, comes in turn or is refused with ``TransferNotReadyError``,
    and an update pauses the engine if nobody has.
    """

    _updates: NativeUpdates

    @cached_property
    def _chunks(self) -> ChunkedLoads:
        return ChunkedLoads(self._updates)

    async def init_weight_transfer_engine(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Initialises the transfer engine; blocks this replica until the trainer has come.

        Args:
            request: vLLM's ``WeightTransferInitRequest``, or a mapping: its ``init_info``, or the
                fields of that.
            timeout_s: Seconds to wait for the workers' answers.

        Raises:
            TransferNotReadyError: A weight update is open.
            TransferError: A worker could not.
        """
        await self._updates.initialise(_payload(request, "init_info"), timeout_s=timeout_s)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leaves the trainer's group; see ``NativeUpdates.leave``."""
        await self._updates.leave()

    async def use_transfer_engine(self, backend: str | None = None) -> None:
        """Has the workers use another transfer engine; see ``NativeUpdates.use``."""
        await self._updates.use(backend)

    async def start_weight_update(
        self, *, timeout_s: float = DEFAULT_TIMEOUT_S, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        """Begins an update; see ``NativeUpdates.begin``."""
        await self._updates.begin(timeout_s=timeout_s, idle_timeout_s=idle_timeout_s)

    async def update_weights(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Receives weights; takes vLLM's ``WeightTransferUpdateRequest``, or its ``update_info``.

        Args:
            request: What is to come, in the words of the transfer engine.
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: No update was begun.
            TransferError: It was not received.
        """
        await self._updates.receive(_payload(request, "update_info"), timeout_s=timeout_s)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Ends an update; see ``NativeUpdates.finish``."""
        label = None if weight_version is None else str(weight_version)
        await self._updates.finish(label, timeout_s=timeout_s)

    async def update_weight_version(self, new_version: str) -> None:
        """Names the weights after an update; vLLM's Ray client calls it when that has ended.

        Raises:
            TransferNotReadyError: A weight update is open.
            StaleVersionError: An integer older than the version held.
        """
        await self._updates.rename(str(new_version))

    async def update_weights_native(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """TorchRL's name for start, update and finish in one call."""
        await self.start_weight_update(timeout_s=timeout_s)
        await self.update_weights(request, timeout_s=timeout_s)
        await self.finish_weight_update(timeout_s=timeout_s)

    async def expect_native(self, version: int, run_id: str) -> None:
        """Says whether :meth:`receive_native` could begin; see ``NativeUpdates.expect``."""
        await self._updates.expect(version, run_id)

    async def receive_native(self, update_info: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Receives a whole version through the transfer engine; see ``NativeUpdates.load``."""
        return dataclasses.asdict(await self._updates.load(update_info, **options))

    async def begin_chunks(self, *args: Any) -> None:
        """Begins a version that comes in parts; see ``ChunkedLoads.begin``."""
        await self._chunks.begin(*args)

    async def receive_chunk(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives a part of a version; see ``ChunkedLoads.receive``."""
        await self._chunks.receive(update_info, timeout_s)

    async def finish_chunks(self) -> dict[str, Any]:
        """Ends a version that came in parts; see ``ChunkedLoads.finish``."""
        return dataclasses.asdict(await self._chunks.finish())

    async def give_up_chunks(self, run_id: str) -> None:
        """Gives a version up that came in parts; see ``ChunkedLoads.give_up``."""
        await self._chunks.give_up(run_id)

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Pauses until :meth:`resume_generation`; vLLM's defaults end requests and drop caches."""
        await self._updates.pause(mode=mode, clear_cache=clear_cache, timeout_s=timeout_s)

    async def resume_generation(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ends a pause; see ``NativeUpdates.resume``."""
        await self._updates.resume(timeout_s=timeout_s)

    async def is_paused(self) -> bool:
        """Returns whether the scheduler is paused."""
        return await self._updates.is_paused()

    async def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Puts the engine to sleep; see ``NativeUpdates.sleep``."""
        await self._updates.sleep(level=level, mode=mode, timeout_s=timeout_s)

    async def wake_up(
        self, tags: list[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Wakes the engine; see ``NativeUpdates.wake_up``."""
        return await self._updates.wake_up(tags, timeout_s=timeout_s)


def _payload(request: Any, field: str) -> Any:
    """Returns the plain payload of one of vLLM's requests, which may be plain itself.

    Raises:
        UnsupportedArgumentError: It is neither.
    """
    if isinstance(request, dict):
        return request.get(field, request)
    if isinstance(request, list):
        return request
    if dataclasses.is_dataclass(request) and field in {
        one.name for one in dataclasses.fields(request)
    }:
        return getattr(request, field)
    raise UnsupportedArgumentError(
        f"expected vLLM's request or a mapping with {field}, got {type(request).__name__}"
    )

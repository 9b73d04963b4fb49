"""vLLM's own weight-transfer and sleep calls, passed through for clients that drive them.

TorchRL's ``VLLMWeightSyncScheme`` and vLLM's ``RayVLLMWeightSyncClient`` call these names on the
actors. Plain dicts are accepted beside vLLM's request classes, so that a driver need not import
vLLM.
"""

from __future__ import annotations

from typing import Any

from torchrl_vllm_sync.engine.internals import set_weight_label

__all__ = ["NativeWeightTransfer"]


class NativeWeightTransfer:
    """Mixin of the engine actor: each method is vLLM's ``AsyncLLM`` method of the same name."""

    engine: Any

    async def init_weight_transfer_engine(self, request: Any) -> None:  # noqa: ANN401
        """Starts vLLM's transfer engine; takes its ``WeightTransferInitRequest`` or a mapping."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if isinstance(request, dict):
            request = WeightTransferInitRequest(init_info=request.get("init_info", request))
        await self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Begins one update."""
        await self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:  # noqa: ANN401
        """Receives weights; takes vLLM's ``WeightTransferUpdateRequest`` or a mapping."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if isinstance(request, dict):
            request = WeightTransferUpdateRequest(update_info=request.get("update_info", request))
        await self.engine.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends one update and labels the tokens sampled from now on."""
        await self.engine.finish_weight_update()
        if weight_version is not None:
            await set_weight_label(self.engine, weight_version)

    async def update_weights_native(self, request: Any) -> None:  # noqa: ANN401
        """TorchRL's name for start, update and finish in one call."""
        await self.start_weight_update()
        await self.update_weights(request)
        await self.finish_weight_update()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pauses the scheduler; vLLM's defaults abort requests and clear caches."""
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Resumes the scheduler."""
        await self.engine.resume_generation()

    async def sleep(self, level: int = 1) -> None:
        """Puts the engine to sleep; see vLLM for the levels."""
        await self.engine.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the engine."""
        await self.engine.wake_up(tags)

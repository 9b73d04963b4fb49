"""Spare memory for a worker's weights: they arrive there while the model goes on serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrl_vllm_sync.engine.load_plan import LoadPlan

__all__ = ["StagingArea"]


class StagingArea:
    """A second set of a model's parameters.

    On a GPU it is reserved at once, when the engine is launched, so that vLLM sizes its KV cache
    for what is left. On a CPU it is taken with the first plan: engines there reload layer by layer
    and keep whole tensors in :attr:`tensors` instead.

    Args:
        model: The worker's model, loaded.
        device: Where its parameters are.

    Attributes:
        tensors: Name and tensor of a staged push that has no plan.

    Raises:
        TransferError: The GPU has not enough free memory; says how much is needed.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._model, self._device = model, device
        self._spare: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if device.type == "cuda":
            self._reserve()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(spare.numel() for _, spare in self._spare.values())

    def stand_in(self, plan: LoadPlan) -> LoadPlan:
        """Returns ``plan`` with targets in spare memory instead of in the model."""
        if not self._spare:
            self._reserve()
        return plan.redirected(self._counterpart)

    @torch.no_grad()
    def install(self) -> None:
        """Copies everything into the model and waits until it is there."""
        for live, spare in self._spare.values():
            live.copy_(spare, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _reserve(self) -> None:
        storages = {storage.data_ptr(): storage for storage in _storages(self._model)}
        needed = sum(storage.nbytes() for storage in storages.values())
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if free < needed:
                raise TransferError(
                    f"staged weights need {needed / 1e9:.2f} GB on {self._device} beside the "
                    f"model, {free / 1e9:.2f} GB are free"
                )
        for pointer, storage in storages.items():
            live = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            self._spare[pointer] = live, live.clone()

    def _counterpart(self, target: torch.Tensor) -> torch.Tensor:
        spare = self._spare[target.untyped_storage().data_ptr()][1]
        return spare.view(target.dtype).as_strided(
            target.shape, target.stride(), target.storage_offset()
        )


def _storages(model: torch.nn.Module) -> Iterator[torch.UntypedStorage]:
    for parameter in model.parameters():
        if parameter.numel():
            yield parameter.untyped_storage()

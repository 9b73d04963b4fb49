"""The parameters of a worker's model in one range of addresses, and a second memory for the next.

Made when the weights are loaded and before graphs are captured, which hold the addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.module import storage_key
from torchrl_vllm_sync.weights.p2p.memory import new_memory, new_range

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.p2p.memory import Memory

# Of each storage's first byte: what torch's allocator gives, and kernels may count on.
ALIGNMENT = 512


class WeightArena:
    """Two memories as large as the model's parameters: one is served, the other free to be written.

    Nobody can keep a process that has begun to write from going on, such as one that was stopped.
    When another run begins, what the first one had is served no more: the arena takes new memory.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device, self.num_bytes, self._writer = device, 0, ""
        places: dict[int, int] = {}
        for parameter in model.parameters():
            num_bytes, key = parameter.untyped_storage().nbytes(), storage_key(parameter)
            if num_bytes and key not in places:
                places[key] = self.num_bytes
                self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._require(self.num_bytes)
        self._numbers: list[int] = [0, 1]
        self._memories: list[Memory] = [new_memory(self.num_bytes, device)]
        self._live, self._spare = (new_range(self.num_bytes, device) for _ in range(2))
        self._live.show(self._memories[0])
        self._move(model, places)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the second memory
        self._memories.append(new_memory(self.num_bytes, device))
        self._spare.show(self._memories[1])
        self._shown = 1  # number of the memory behind the range for the spare one
        # Buffers that pushes load have their own: by storage, served and not.
        self._beside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _move(self, model: torch.nn.Module, places: dict[int, int]) -> None:
        moved: dict[int, torch.Tensor] = {}
        for parameter in model.parameters():
            storage, key = parameter.untyped_storage(), storage_key(parameter)
            if not storage.nbytes():
                continue
            if key not in moved:
                before = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                moved[key] = before  # and thereby kept: its address is not given to another
                self._live.data[places[key] :][: len(before)].copy_(before)
            flat = self._live.data[places[key] :][: storage.nbytes()].view(parameter.dtype)
            begin = flat.storage_offset() + parameter.storage_offset()
            parameter.data = flat.as_strided(parameter.shape, parameter.stride(), begin)

    def _require(self, num_bytes: int) -> None:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if free < num_bytes:
                raise TransferError(
                    f"staged weights need {num_bytes / 1e9:.2f} GB on {self._device} beside the "
                    f"model, {free / 1e9:.2f} GB are free"
                )

    def place(self, tensor: torch.Tensor) -> int | None:
        """Offset in bytes of a tensor of the model; ``None`` if it is not in the arena."""
        if storage_key(tensor) != storage_key(self._live.data):
            return None
        return int(tensor.storage_offset()) * tensor.element_size()

    def counterpart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place in the memory that is not served."""
        flat = self._spare.data
        if self.place(tensor) is None:
            flat = self._beside_of(tensor.untyped_storage())
        flat = flat[: flat.numel() // tensor.element_size() * tensor.element_size()]
        return flat.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    def _beside_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        if (pointer := storage.data_ptr()) not in self._beside:
            live = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            self._beside[pointer] = live, live.clone()
        return self._beside[pointer][1]

    def open(self) -> None:
        """Puts the memory that is not served behind the addresses of :meth:`counterpart`."""
        if self._shown != self._numbers[1]:
            self._spare.show(self._memories[1])
            self._shown = self._numbers[1]

    @torch.no_grad()
    def mirror(self) -> None:
        """Copies what is served into the other memory."""
        self.open()
        self._spare.data.copy_(self._live.data)

    def begin(self, run_id: str) -> int:
        """Lets a run write; returns the number of the memory that it may write to."""
        if self._writer not in ("", run_id):  # whose trainer may be writing still, or again
            before, self._memories[1] = self._memories[1], new_memory(self.num_bytes, self._device)
            self._numbers[1] = max(self._numbers) + 1
            self.open()
            before.close()
        self._writer = run_id
        return self._numbers[1]

    def export(self) -> list[int]:
        """File descriptors of the memory that may be written to."""
        return self._memories[1].export()

    def take(self, run_id: str, number: int) -> None:
        """Serves what a run has written; no step may run meanwhile."""
        if (self._writer, self._numbers[1]) != (run_id, number):
            raise TransferError("another trainer has begun to write since, or nobody had")
        self.swap()
        self._writer = ""

    @torch.no_grad()
    def swap(self) -> None:
        """Serves the other memory; no step may run meanwhile."""
        for live, spare in self._beside.values():
            live.copy_(spare, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._memories.reverse()
        self._numbers.reverse()
        self._live.show(self._memories[0])

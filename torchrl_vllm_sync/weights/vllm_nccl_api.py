"""vLLM's own NCCL weight transfer as its releases have it: payloads by version, and the sender.

Read in vLLM 0.26, 0.28, 0.32 and 0.33 (``vllm/distributed/weight_transfer/nccl_common.py``,
``packed_tensor.py``, ``nccl_engine.py``). Of the trainer's side only the two functions are used
that did not change in all of them; its engine classes come in three generations. Importing vLLM
cannot be avoided here: it costs seconds, and happens at the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from torchrl_vllm_sync.weights.metadata import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["DEFAULT_BUFFER_BYTES", "Packing", "init_info", "open_group", "send", "update_info"]

DEFAULT_BUFFER_BYTES = 2**30
# From this release on the packing is agreed upon once, with the group; before, at each update.
_FIRST_WITH_PACKING_AT_INIT = Version("0.28")
# Before it the receiver does not order its buffers' streams: with two of them, memory of one pack
# can be reused while another stream still reads it.
_FIRST_WITH_ORDERED_STREAMS = Version("0.33")


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors are packed; both sides must agree.

    Attributes:
        buffer_bytes: Bytes after which a pack is sent; its last tensor may go beyond.
        num_buffers: Packs under way at a time.
    """

    buffer_bytes: int
    num_buffers: int

    @classmethod
    def for_version(
        cls, vllm_version: str, buffer_bytes: int, num_buffers: int | None = None
    ) -> Packing:
        """Takes as many buffers as that release of vLLM receives correctly, unless told.

        Args:
            vllm_version: Version that the engines run.
            buffer_bytes: See the attribute.
            num_buffers: See the attribute; ``None`` chooses 1 or 2.
        """
        if num_buffers is None:
            num_buffers = 2 if _release(vllm_version) >= _FIRST_WITH_ORDERED_STREAMS else 1
        return cls(buffer_bytes, num_buffers)

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of vLLM's payloads."""
        return {
            "packed": True,
            "packed_buffer_size_bytes": self.buffer_bytes,
            "packed_num_buffers": self.num_buffers,
        }


def _release(vllm_version: str) -> Version:
    return Version(Version(vllm_version).base_version)


def init_info(
    vllm_version: str, packing: Packing, *, address: str, port: int, world_size: int
) -> dict[str, Any]:
    """Returns the ``init_info`` of an engine's ``nccl`` backend, without its ``rank_offset``.

    Args:
        vllm_version: Version that the engine runs.
        packing: See :class:`Packing`.
        address: The trainer's address.
        port: Port of the rendezvous.
        world_size: The trainer and the workers of all replicas.
    """
    info = {"master_address": address, "master_port": port, "world_size": world_size}
    if _release(vllm_version) >= _FIRST_WITH_PACKING_AT_INIT:
        info |= packing.as_fields()
    return info


def update_info(
    vllm_version: str, packing: Packing, metadata: Sequence[ParamMeta]
) -> dict[str, Any]:
    """Returns the ``update_info`` of one push.

    Args:
        vllm_version: Version that the engine runs.
        packing: See :class:`Packing`.
        metadata: Every tensor, in the order of sending.
    """
    info: dict[str, Any] = {
        "names": [one.name for one in metadata],
        "dtype_names": [dtype_name(one.dtype) for one in metadata],
        "shapes": [list(one.shape) for one in metadata],
    }
    if _release(vllm_version) < _FIRST_WITH_PACKING_AT_INIT:
        info |= packing.as_fields()
    return info


def open_group(address: str, port: int, world_size: int) -> Any:
    """Opens the trainer's end, as rank 0, on the current CUDA device; blocks until all have come.

    Raises:
        RuntimeError: Somebody did not come within the 300 s of vLLM's store, or NCCL failed.
    """
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": address, "master_port": port, "world_size": world_size})


def send(
    pairs: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    packing: Packing,
) -> None:
    """Packs and broadcasts ``pairs`` from the current CUDA device; blocks until it has left.

    Args:
        pairs: Name and tensor, in the order and dtypes of the update's metadata.
        group: From :func:`open_group`.
        packing: The same as the receivers'.
    """
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        iterator=pairs,
        group=group,
        src=0,
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=packing.buffer_bytes,
        num_buffers=packing.num_buffers,
    )
    torch.cuda.synchronize()  # up to 0.27 the producer leaves its last packs on their way

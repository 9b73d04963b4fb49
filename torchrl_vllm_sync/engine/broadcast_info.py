"""What vLLM's calls carry to the receiver of the ``broadcast`` transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from torchrl_vllm_sync.weights.buckets import DEFAULT_BUCKET_BYTES

__all__ = ["BroadcastInitInfo", "BroadcastUpdateInfo"]


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """How a worker joins the group; the words are those of vLLM's own NCCL engine.

    Attributes:
        master_address: The trainer's address.
        master_port: Port of its store.
        rank_offset: Rank of the replica's first worker, at least 1.
        world_size: The trainer and the workers of all replicas.
        timeout_s: Seconds within which everybody must have come.
        interface: Network interface; ``None`` takes the one that reaches the trainer.
        group_id: Tells the group's pushes from those of other groups.
        deadline: ``time.monotonic()`` of this host at which nobody waits for the worker any more;
            a call that an engine comes to later, because it was stopped, is not begun.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 60.0
    interface: str | None = None
    group_id: int = 0
    deadline: float | None = None


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    """One push.

    Attributes:
        push_id: Number of the push, which begins with the group's.
        timeout_s: Seconds for all of it.
        num_passes: How often the trainer sends everything; the second time is a check.
        direct: Whether the first pass comes without buckets.
        metadata: ``ParamMeta`` in JSON form; ``None`` for the same as last time.
        bucket_bytes: Size of the buckets; read together with ``metadata``.
    """

    push_id: int
    timeout_s: float = 300.0
    num_passes: int = 1
    direct: bool = False
    metadata: list[list[Any]] | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

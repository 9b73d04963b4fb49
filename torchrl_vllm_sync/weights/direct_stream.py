"""Sending tensors from where they are to where they belong, with no bucket between.

Possible where the trainer's tensors lie contiguous in the wire's dtype and land contiguous in every
worker, as those of an unquantised dense model do without tensor parallelism. It saves the copies
into and out of the buckets, and their memory. Broadcasts are issued in groups, which cost no more
than buckets of the same size would.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torchrl_vllm_sync.weights.broadcast_group import BroadcastGroup
    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["MOST_TENSORS", "broadcast_tensors", "sendable_tensors"]

# Groups of 8 and 32 were as fast as the best buckets on H200s; single broadcasts took up to twice
# as long, and so did all at once.
GROUP_TENSORS = 32
# Beyond this, neighbours in buckets merge into fewer transfers than there are tensors.
MOST_TENSORS = 4096


def sendable_tensors(
    metadata: Sequence[ParamMeta], views: Sequence[tuple[str, torch.Tensor]] | None
) -> list[torch.Tensor] | None:
    """Returns a flat view of each tensor if all can be sent from where they are.

    Args:
        metadata: What the push consists of.
        views: Name and tensor, in the same order; ``None`` if they do not stay in place.

    Returns:
        One view for each tensor that has elements; ``None`` if one is not contiguous, would have
        to be cast, or if there are too many.
    """
    if views is None or len(metadata) > MOST_TENSORS:
        return None
    tensors = [tensor.detach() for _, tensor in views]
    for meta, tensor in zip(metadata, tensors, strict=True):
        if tensor.dtype != meta.dtype or not tensor.is_contiguous():
            return None
    return [tensor.view(-1) for tensor in tensors if tensor.numel()]


def broadcast_tensors(
    group: BroadcastGroup,
    tensors: Sequence[torch.Tensor],
    *,
    deadline: float,
    watch: Callable[[], None] | None = None,
) -> None:
    """Broadcasts ``tensors`` in place: on the trainer they are sent, elsewhere overwritten.

    On CUDA this only queues the work.

    Args:
        group: The connected group.
        tensors: Contiguous, of the same sizes and dtypes in the same order on every rank.
        deadline: ``time.monotonic()`` at which each transfer must have ended.
        watch: See :meth:`BroadcastGroup.wait`.

    Raises:
        RuntimeError: The communicator failed, or somebody left the group.
    """
    with group.side_stream():
        works = [
            work
            for first in range(0, len(tensors), GROUP_TENSORS)
            for work in group.broadcast_together(
                tensors[first : first + GROUP_TENSORS],
                timeout_s=max(deadline - time.monotonic(), 1e-3),
            )
        ]
        for work in works:
            group.wait(work, watch)

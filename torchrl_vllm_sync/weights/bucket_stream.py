"""Sending and receiving a push bucket by bucket, packing one while another is on its way.

A few buffers are used in turn. On CUDA nothing here waits on the host: a buffer is packed again
only after its broadcast, and received into again only after its unpacking, by the order of work on
the group's stream. (vLLM's own packed consumer, up to 0.32, orders neither across its streams.)
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from torchrl_vllm_sync.weights.broadcast_group import BroadcastGroup
    from torchrl_vllm_sync.weights.buckets import BucketLayout

__all__ = ["DEFAULT_NUM_BUFFERS", "make_buffers", "receive_buckets", "send_buckets"]

DEFAULT_NUM_BUFFERS = 3


def make_buffers(
    layout: BucketLayout, device: torch.device, num_buffers: int = DEFAULT_NUM_BUFFERS
) -> list[torch.Tensor]:
    """Allocates the buffers that buckets pass through, as ``uint8`` tensors.

    Args:
        layout: The buckets.
        device: Where to put them.
        num_buffers: How many; no more than there are buckets are made.
    """
    return [
        torch.empty(layout.bucket_bytes, dtype=torch.uint8, device=device)
        for _ in range(min(num_buffers, len(layout.buckets)))
    ]


def send_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    pack: Callable[[int, torch.Tensor], None],
    *,
    deadline: float,
    watch: Callable[[], None] | None = None,
) -> None:
    """Packs and broadcasts every bucket; on CUDA it only queues the work.

    Args:
        group: The connected group; this process is the trainer.
        layout: The buckets.
        buffers: From :func:`make_buffers`.
        pack: Fills a buffer with the bucket of that number.
        deadline: ``time.monotonic()`` at which each transfer must have ended.
        watch: See :meth:`BroadcastGroup.wait`.

    Raises:
        RuntimeError: The communicator failed, or somebody left the group.
    """
    works: list[dist.Work | None] = [None] * len(buffers)
    with group.side_stream():
        for index, bucket in enumerate(layout.buckets):
            slot = index % len(buffers)
            if (work := works[slot]) is not None:
                group.wait(work, watch)
            pack(index, buffers[slot])
            works[slot] = group.broadcast(
                buffers[slot][: bucket.num_bytes], timeout_s=_left(deadline)
            )
        for work in works:
            if work is not None:
                group.wait(work, watch)


def receive_buckets(
    group: BroadcastGroup,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    *,
    deadline: float,
) -> Iterator[int]:
    """Receives every bucket in turn; yields its number while its buffer may be read.

    To be iterated inside ``group.side_stream()``; what reads the buffer must be queued before the
    next number is asked for.

    Args:
        group: The connected group; this process is a worker.
        layout: The buckets, the same as the trainer's.
        buffers: From :func:`make_buffers`; bucket ``i`` is in ``buffers[i % len(buffers)]``.
        deadline: ``time.monotonic()`` at which each transfer must have ended.

    Yields:
        Numbers of the layout's buckets, in order.

    Raises:
        RuntimeError: The communicator failed, or the trainer gave it up.
    """
    works: deque[dist.Work] = deque()

    def ask(index: int) -> None:
        if index < len(layout.buckets):
            buffer = buffers[index % len(buffers)][: layout.buckets[index].num_bytes]
            works.append(group.broadcast(buffer, timeout_s=_left(deadline)))

    for index in range(len(buffers)):
        ask(index)
    for index in range(len(layout.buckets)):
        group.wait(works.popleft())
        yield index
        ask(index + len(buffers))


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)

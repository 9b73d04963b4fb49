"""Whole tensors out of buckets, for loaders that take nothing less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrl_vllm_sync.weights.buckets import BucketLayout

__all__ = ["whole_tensors"]


def whole_tensors(
    layout: BucketLayout, buffers: Sequence[torch.Tensor], arrivals: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor as soon as its last row has arrived.

    The tensors are fresh: vLLM's loaders keep them until a layer is complete, while the buffers
    are received into again.

    Args:
        layout: The buckets.
        buffers: Bucket ``i`` is in ``buffers[i % len(buffers)]``.
        arrivals: Numbers of the buckets as they arrive, in order; see ``receive_buckets``.

    Yields:
        Name and tensor of full shape, in the order of the layout's metadata.
    """
    for meta in layout.metadata:
        if not meta.num_elements:
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype)
    whole = torch.empty(0)
    for index in arrivals:
        for piece in layout.buckets[index].pieces:
            received = buffers[index % len(buffers)][
                piece.byte_offset : piece.byte_offset + piece.num_bytes
            ].view(piece.meta.dtype)
            if piece.first_row == 0:
                whole = torch.empty(
                    piece.meta.num_elements, dtype=piece.meta.dtype, device=received.device
                )
            whole[piece.first_element : piece.first_element + piece.num_elements] = received
            if piece.first_element + piece.num_elements == piece.meta.num_elements:
                yield piece.name, whole.view(piece.meta.shape)

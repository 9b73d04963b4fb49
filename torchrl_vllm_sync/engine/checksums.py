"""Checksums of parameters, computed where they are: equal bytes give equal numbers on any device.

A tensor's bytes are read as little-endian words of 64 bits, padded with zeros. Each word is mixed
with its position and the results are added up, so that a swapped or moved value shows. Arithmetic
wraps around at 64 bits, so the sum depends neither on its order nor on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["checksum", "tensor_checksum"]

# 32 MiB at a time; with the temporaries of a step about 160 MiB.
CHUNK_WORDS = 2**22
WORD_BYTES = 8
# The mixer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
# 2014), its constants as the signed numbers torch computes with.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_STEPS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def checksum(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Checksums of named tensors, a guard against misplaced or stale weights, not forged ones.

    Args:
        parameters: Such as ``model.named_parameters()``; any dtype, any strides. At most 256 MiB
            beyond them are taken on their device.

    Returns:
        Name to a signed 64-bit number.

    Example:
        >>> checksum([("w", torch.zeros(3))]) == checksum([("w", torch.zeros(3, device="cuda"))])
        True
    """
    return {name: tensor_checksum(tensor) for name, tensor in parameters}


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """The checksum of one tensor's values in row-major order, whatever its shape."""
    total = torch.full((), tensor.nbytes, dtype=torch.int64, device=tensor.device)
    position = 0
    for chunk in _chunks(tensor.detach()):
        words = _words(chunk)
        total += _mixed(words, position).sum()
        position += len(words)
    return int(total.item())


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values in row-major order, a whole number of words at a time but for the last."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(CHUNK_WORDS * WORD_BYTES // tensor.element_size())
        return
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    extent = 1 + sum((size - 1) * stride for size, stride in dims)
    flat = tensor.as_strided((extent,), (1,))
    for start in range(0, tensor.numel(), CHUNK_WORDS):
        end = min(start + CHUNK_WORDS, tensor.numel())
        index = torch.arange(start, end, device=tensor.device)
        place = torch.zeros_like(index)
        for size, stride in reversed(dims):
            place += (index % size).mul_(stride)
            index //= size
        yield flat[place]


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """The bytes of a 1-D tensor as 64-bit words, in new memory."""
    words = torch.zeros(-(-chunk.nbytes // WORD_BYTES), dtype=torch.int64, device=chunk.device)
    words.view(torch.uint8)[: chunk.nbytes].copy_(chunk.view(torch.uint8))
    return words


def _mixed(words: torch.Tensor, position: int) -> torch.Tensor:
    """Mixes each word with its position; changes ``words``."""
    end = position + len(words)
    words ^= torch.arange(position + 1, end + 1, device=words.device).mul_(_GAMMA)
    for shift, factor in _STEPS:
        _fold(words, shift)
        words *= factor
    return _fold(words, 31)


def _fold(words: torch.Tensor, shift: int) -> torch.Tensor:
    """``words ^= words >> shift`` without regard to the sign, which torch would keep."""
    words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
    return words

"""Checksums of many tensors on a GPU in one kernel, which reads them once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # pyright: ignore[reportMissingImports]  which CUDA builds of torch bring
import triton.language as tl  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_WORDS = 4096


@triton.jit
def _add_blocks(pointers, words, owners, begins, totals, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    at = (block - tl.load(begins + owner)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(words + owner)
    begin = tl.load(pointers + owner).to(tl.pointer_type(tl.uint64))
    word = tl.load(begin + at, mask=inside, other=0)
    word ^= (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word ^= word >> 31
    tl.atomic_add(totals + owner, tl.sum(tl.where(inside, word, 0)).to(tl.int64, bitcast=True))


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What ``audit.checksums`` defines, of contiguous tensors of whole words on one GPU."""
    device = tensors[0].device
    pointers = torch.tensor([one.data_ptr() for one in tensors])
    sizes = torch.tensor([one.nbytes for one in tensors])
    words = sizes // 8
    blocks = -(-words // BLOCK_WORDS)
    owners = torch.repeat_interleave(blocks)
    begins = blocks.cumsum(0) - blocks
    totals, *table = (one.to(device) for one in (sizes, pointers, words, owners, begins))
    kernel: Any = _add_blocks
    with torch.cuda.device(device):
        kernel[(len(owners),)](*table, totals, BLOCK=BLOCK_WORDS)
    return totals

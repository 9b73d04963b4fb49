"""Names for prefixes of prompts: one integer for every block, which stands for all before it too.

The routers described here look up prefixes as characters, tokens or blocks. In the simulation they
all work on blocks of tokens whose names are chained, so that two prompts share their first ``n``
blocks exactly if their ``n``-th names are equal: one comparison, or a binary search.
"""

from __future__ import annotations

import numpy as np

__all__ = ["PrefixNames"]

_SEED = 20_251_121
_TAIL = 0x5851F42D4C957F2D


class PrefixNames:
    """Names the blocks of prompts, equally in every process.

    The name of a prefix is a sum of its tokens, each times a random odd number that belongs to the
    token's position, modulo 2**64.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._factors = np.empty(0, np.uint64)

    def __call__(self, tokens: np.ndarray, *, tail: bool = False) -> list[int]:
        """The names of a prompt's full blocks, in order.

        Args:
            tokens: Ids, integers of shape ``(num_tokens,)``.
            tail: The tokens after the last full block, if any, get a name as well.
        """
        num_tokens = len(tokens)
        if num_tokens > len(self._factors):
            self._grow(num_tokens)
        products = (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[:num_tokens]
        num_blocks, rest = divmod(num_tokens, self.block_size)
        full = num_blocks * self.block_size
        sums = products[:full].reshape(num_blocks, self.block_size).sum(axis=1)
        names = np.add.accumulate(sums).tolist()
        if tail and rest:
            names.append((int(products.sum()) ^ _TAIL) & 0xFFFFFFFFFFFFFFFF)
        return names

    def _grow(self, num_tokens: int) -> None:
        generator = np.random.default_rng(_SEED)  # the same factors again, and more of them
        size = max(1024, 1 << (num_tokens - 1).bit_length())
        self._factors = generator.integers(0, 1 << 63, size, np.uint64) * np.uint64(2) + np.uint64(
            1
        )


def shared_length(names: list[int], start: int, other: list[int]) -> int:
    """How many names ``names[start:]`` and ``other`` have in common at their beginning.

    Both are chained names of the same positions, so agreement at one place implies it before.
    """
    length = min(len(names) - start, len(other))
    if length <= 0 or names[start] != other[0]:
        return 0
    if names[start + length - 1] == other[length - 1]:
        return length
    low, high = 1, length - 1  # at least one agrees, the last one of `length` does not
    while low < high:
        middle = (low + high + 1) // 2
        if names[start + middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

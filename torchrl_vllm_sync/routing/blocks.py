"""Prompts as chains of block digests, by which two prompts that begin alike are recognised."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from torchrl_vllm_sync.errors import InvalidPromptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BYTES_PER_TOKEN", "PromptChain"]

BYTES_PER_TOKEN = 4
"""Bytes of a token id; as many bytes of text, which is not tokenised here, count as one token."""

_TEXT, _IDS = 1, 2  # seeds: text and ids with the same bytes are different prompts


class PromptChain:
    """Stable digests of a prompt's beginnings, 64 bits each, the same in every process.

    As in vLLM's prefix cache (``vllm/v1/core/kv_cache_utils.py``), a block's digest covers the
    digest of the block before, so equal digests mean equal beginnings. What is left behind the last
    whole block has a digest too, which recognises the whole prompt.

    Attributes:
        block_tokens: Tokens in a block.
        num_tokens: Tokens of the prompt.
        digests: One for each whole block, and one for the rest if there is any.
        num_blocks: How many of the digests are those of whole blocks.
    """

    __slots__ = ("_rest", "block_tokens", "digests", "num_blocks", "num_tokens")

    def __init__(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        block_tokens: int,
        salt: str | None = None,
    ) -> None:
        """Digests a prompt.

        Args:
            prompt: Text or token ids.
            block_tokens: Tokens in a block.
            salt: Prompts with different salts have nothing in common, like vLLM's ``cache_salt``.

        Raises:
            InvalidPromptError: An id is not an integer of 32 bits.
        """
        if isinstance(prompt, str):
            seed, data = _TEXT, prompt.encode("utf-8", "surrogatepass")
        else:
            seed, data = _IDS, _pack_ids(prompt)
        if salt is not None:
            seed = xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), seed)
        self.block_tokens = block_tokens
        self._chain([], seed, data)

    @property
    def whole(self) -> int:
        """Digest of all of it."""
        return self.digests[-1]

    def followed_by(self, ids: Sequence[int] | np.ndarray) -> PromptChain:
        """The chain of this prompt with ``ids`` behind it, without digesting its blocks again.

        Raises:
            InvalidPromptError: An id is not an integer of 32 bits.
        """
        longer: Self = object.__new__(type(self))
        longer.block_tokens = self.block_tokens
        seed, rest = self._rest
        longer._chain(self.digests[: self.num_blocks], seed, rest + _pack_ids(ids))
        return longer

    def _chain(self, digests: list[int], seed: int, data: bytes) -> None:
        """Appends the digests of ``data`` to those of the blocks before."""
        digest, size = xxhash.xxh3_64_intdigest, self.block_tokens * BYTES_PER_TOKEN
        end = len(data) - len(data) % size
        done = len(digests) * size
        for start in range(0, end, size):
            seed = digest(data[start : start + size], seed)
            digests.append(seed)
        self.num_blocks = len(digests)
        rest = data[end:]
        if rest:
            digests.append(digest(rest, seed))
        self.digests, self._rest = digests, (seed, rest)
        self.num_tokens = -(-(done + len(data)) // BYTES_PER_TOKEN)


@lru_cache(maxsize=4096)
def _packer(num_ids: int) -> Callable[..., bytes]:
    """Packs so many ids; ``struct.pack`` itself copies its arguments once more."""
    return struct.Struct(f"<{num_ids}i").pack


def _pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    if isinstance(ids, np.ndarray):
        packed = ids.astype("<i4", copy=False)
        if packed is not ids and (ids.dtype.kind not in "iu" or (packed != ids).any()):
            raise InvalidPromptError(f"token ids must be integers of 32 bits, got {ids!r}")
        return packed.tobytes()
    try:
        return _packer(len(ids))(*ids)
    except struct.error as error:
        raise InvalidPromptError(f"token ids must be integers of 32 bits: {error}") from error

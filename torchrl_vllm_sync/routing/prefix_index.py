"""Estimate of what the replicas' prefix caches hold, from the prompts that were sent there."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from torchrl_vllm_sync.errors import InvalidPromptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BYTES_PER_TOKEN = 4
"""Bytes of a token id; as many bytes of text, which is not tokenised here, count as one token."""

_TEXT, _IDS = 1, 2  # seeds: text and ids with the same bytes are different prompts


class PromptChain:
    """Stable digests of a prompt's prefixes, 64 bits each, the same in every process.

    A block's digest covers the one before; ``digests`` has one for each whole block and the rest.
    """

    __slots__ = ("_rest", "block_tokens", "digests", "num_blocks", "num_tokens")

    def __init__(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        block_tokens: int,
        salt: str | None = None,
    ) -> None:
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
        return self.digests[-1]

    def followed_by(self, ids: Sequence[int] | np.ndarray) -> PromptChain:
        """The chain of this prompt with ``ids`` behind it; digests no block again."""
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
    """Packs ``num_ids`` ids; ``struct.pack`` itself copies its arguments once more."""
    return struct.Struct(f"<{num_ids}i").pack


def _pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    if isinstance(ids, np.ndarray):
        packed = ids.astype("<i4", copy=False)
        narrower = ids.itemsize < BYTES_PER_TOKEN or packed is ids
        if ids.dtype.kind not in "iu" or not (narrower or (packed == ids).all()):
            raise InvalidPromptError(f"token ids must be integers of 32 bits, got {ids!r}")
        return packed.tobytes()
    try:
        return _packer(len(ids))(*ids)
    except struct.error as error:
        raise InvalidPromptError(f"token ids must be integers of 32 bits: {error}") from error


INDEX_BLOCK_TOKENS = 128
"""Tokens in a block of the index, at least: finer would cost time and memory and save no work."""

# Blocks of a replica that does not report their number: 4 million tokens in blocks of 128.
_DEFAULT_CAPACITY = 32768


class PrefixIndex:
    """Block digests that each replica has, by weight version; used with the ledger locked.

    As in an engine (``vllm/v1/core/block_pool.py``) the oldest blocks go first, of one prompt the
    last. So if a block is present all before it are, and bisection finds the longest prefix.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        # By replica: version and digest of each block, the least recently used first.
        self._blocks = defaultdict[str, OrderedDict[tuple[int, int], None]](OrderedDict)
        self._capacities: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def chain(
        self, prompt: str | Sequence[int] | np.ndarray, salt: str | None = None
    ) -> PromptChain:
        return PromptChain(prompt, self.block_tokens, salt)

    def cached_tokens(self, prompt: PromptChain, replica_id: str, version: int) -> int:
        """Tokens of the prompt's longest prefix that the replica probably has in its cache."""
        blocks, digests = self._blocks.get(replica_id), prompt.digests
        if not blocks or not digests or (version, digests[0]) not in blocks:
            return 0
        if (version, digests[-1]) in blocks:
            return prompt.num_tokens
        first_absent = 1 + bisect_left(
            range(1, len(digests)), True, key=lambda at: (version, digests[at]) not in blocks
        )
        return first_absent * self.block_tokens

    def insert(self, prompt: PromptChain, replica_id: str, version: int) -> None:
        """Notes that a prompt is, or soon will be, in a replica's cache."""
        blocks = self._blocks[replica_id]
        for digest in reversed(prompt.digests):
            blocks[version, digest] = None
            blocks.move_to_end((version, digest))
        self._evict(replica_id)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Changes the size of a block, which makes all that was noted useless."""
        if block_tokens != self.block_tokens:
            self.block_tokens = block_tokens
            self._blocks.clear()
            self._capacities.clear()

    def set_capacity(self, replica_id: str, num_tokens: int) -> None:
        """Bounds what is remembered of a replica by the size of its KV cache, in tokens."""
        self._capacities[replica_id] = max(1, num_tokens // self.block_tokens)
        self._evict(replica_id)

    def remove(self, replica_id: str) -> None:
        """Forgets a replica and its capacity: its cache is gone."""
        self._blocks.pop(replica_id, None)
        self._capacities.pop(replica_id, None)

    def _evict(self, replica_id: str) -> None:
        """Forgets the least recently used digests beyond the capacity."""
        blocks = self._blocks[replica_id]
        capacity = self._capacities.get(replica_id, _DEFAULT_CAPACITY)
        while len(blocks) > capacity:
            blocks.popitem(last=False)


def index_block_tokens(block_size: int) -> int:
    """The smallest multiple of an engine's block size that is a block of the index."""
    return -(-INDEX_BLOCK_TOKENS // block_size) * block_size

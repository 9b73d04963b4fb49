"""Estimate of what the replicas' prefix caches hold, from the prompts that were sent there."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
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

    As in vLLM's prefix cache (``vllm/v1/core/kv_cache_utils.py``), a block's digest covers the
    digest of the block before, so equal digests mean equal prefixes. ``digests`` has one for each
    whole block, and one for the rest if there is any, which identifies the whole prompt.
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
        if packed is not ids and (ids.dtype.kind not in "iu" or (packed != ids).any()):
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
# Uses that are logged before it is worth looking for those that later ones replaced.
_LOG_SLACK = 4096


class PrefixIndex:
    """One set of block digests for each replica, the least recently used forgotten first.

    It follows what an engine does with the prompts that it is sent: a prompt's blocks become the
    most recently used ones, and beyond the replica's number of KV blocks the oldest go, of one
    prompt the last block first (``vllm/v1/core/block_pool.py`` evicts in this order). So whenever a
    block is present, all before it are, and the longest prefix is found by bisection.

    Digests are kept by the weight version that served them, so a new version needs no work: older
    ones' are not found any more, and are forgotten as engines forget them.

    Not safe for threads; a balancer uses it with its ledger locked.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._replicas: dict[str, _BlockSet] = {}

    def __len__(self) -> int:
        return sum(blocks.size for blocks in self._replicas.values())

    def chain(
        self, prompt: str | Sequence[int] | np.ndarray, salt: str | None = None
    ) -> PromptChain:
        return PromptChain(prompt, self.block_tokens, salt)

    def cached_tokens(self, prompt: PromptChain, replica_id: str, version: int) -> int:
        """Tokens of the prompt's longest prefix that the replica probably has in its cache."""
        blocks = self._replicas.get(replica_id)
        if blocks is None:
            return 0
        stamps, digests = blocks.stamps.get(version), prompt.digests
        if not stamps or not digests or digests[0] not in stamps:
            return 0
        if digests[-1] in stamps:
            return prompt.num_tokens
        present, absent = 1, len(digests) - 1
        while present < absent:
            middle = (present + absent + 1) // 2
            if digests[middle - 1] in stamps:
                present = middle
            else:
                absent = middle - 1
        return present * self.block_tokens

    def insert(self, prompt: PromptChain, replica_id: str, version: int) -> None:
        """Notes that a prompt is, or soon will be, in a replica's cache."""
        blocks = self._replicas.get(replica_id)
        if blocks is None:
            blocks = self._replicas[replica_id] = _BlockSet(_DEFAULT_CAPACITY)
        blocks.touch(prompt.digests, version)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Changes the size of a block, which makes all that was noted useless."""
        if block_tokens != self.block_tokens:
            self.block_tokens = block_tokens
            self._replicas.clear()

    def set_capacity(self, replica_id: str, num_tokens: int) -> None:
        """Bounds what is remembered of a replica by the size of its KV cache, in tokens."""
        capacity = max(1, num_tokens // self.block_tokens)
        blocks = self._replicas.get(replica_id)
        if blocks is None:
            self._replicas[replica_id] = _BlockSet(capacity)
        else:
            blocks.capacity = capacity
            blocks.evict()

    def remove(self, replica_id: str) -> None:
        """Forgets a replica and its capacity: its cache is gone."""
        self._replicas.pop(replica_id, None)


class _BlockSet:
    """Digests of one replica, in order of their last use.

    ``stamps`` has for each version the number of the last use of each digest. ``_uses`` has all
    uses that still matter, oldest first: number, version, digests, and how many of these are not
    forgotten yet. A digest whose stamp is younger than its use has been used again since.
    """

    __slots__ = ("_num_logged", "_num_uses", "_uses", "capacity", "size", "stamps")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.stamps: dict[int, dict[int, int]] = {}
        self._uses: deque[_Use] = deque()
        self._num_uses = self._num_logged = 0

    def touch(self, digests: list[int], version: int) -> None:
        """Makes digests, those of shorter beginnings first, the most recently used ones."""
        number = self._num_uses = self._num_uses + 1
        stamps = self.stamps.get(version)
        if stamps is None:
            stamps = self.stamps[version] = {}
        self.size -= len(stamps)
        stamps.update(dict.fromkeys(digests, number))
        self.size += len(stamps)
        self._uses.append(_Use(number, version, digests, len(digests)))
        self._num_logged += len(digests)
        if self.size > self.capacity:
            self.evict()
        if self._num_logged > 2 * self.size + _LOG_SLACK:
            self._compact()

    def evict(self) -> None:
        """Forgets the least recently used digests beyond the capacity."""
        while self.size > self.capacity:
            use = self._uses[0]
            stamps = self.stamps.get(use.version, {})
            while use.num_left and self.size > self.capacity:
                use.num_left -= 1
                self._num_logged -= 1
                digest = use.digests[use.num_left]
                if stamps.get(digest) == use.number:
                    del stamps[digest]
                    self.size -= 1
            if not use.num_left:
                self._uses.popleft()
            if not stamps:
                self.stamps.pop(use.version, None)

    def _compact(self) -> None:
        """Drops uses that later ones replaced; costs as much as was logged since the last time."""
        kept: deque[_Use] = deque()
        for use in self._uses:
            stamps = self.stamps.get(use.version, {})
            left = use.digests[: use.num_left]
            still = [digest for digest in left if stamps.get(digest) == use.number]
            if still:
                kept.append(_Use(use.number, use.version, still, len(still)))
        self._uses = kept
        self._num_logged = sum(use.num_left for use in kept)


@dataclass(slots=True)
class _Use:
    """One use of the digests of one prompt; ``digests[:num_left]`` are not forgotten yet."""

    number: int
    version: int
    digests: list[int]
    num_left: int


def index_block_tokens(block_size: int) -> int:
    """The smallest multiple of an engine's block size that is a block of the index."""
    return -(-INDEX_BLOCK_TOKENS // block_size) * block_size

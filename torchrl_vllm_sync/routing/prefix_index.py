"""What the replicas' prefix caches probably hold, from the prompts that were sent there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.routing.blocks import PromptChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["INDEX_BLOCK_TOKENS", "PrefixIndex", "index_block_tokens"]

INDEX_BLOCK_TOKENS = 128
"""Tokens in a block of the index, at least: finer would cost time and memory and save no work."""

# Blocks of a replica that does not say how many it has: 4 million tokens in blocks of 128.
_DEFAULT_CAPACITY = 32768
# Uses that are logged before it is worth looking for those that later ones replaced.
_LOG_SLACK = 4096


class PrefixIndex:
    """One set of block digests for each replica, the least recently used forgotten first.

    It follows what an engine does with the prompts that it is sent: a prompt's blocks become the
    most recently used ones, and beyond the replica's number of KV blocks the oldest go, of one
    prompt the last block first (``vllm/v1/core/block_pool.py`` evicts in this order). So whenever a
    block is present, all before it are, and the longest beginning is found by bisection.

    Digests are kept by the weight version that served them. A new version needs no work: what older
    ones left is not found any more, and is forgotten as engines forget it.

    Not safe for threads; a balancer uses it with its ledger locked.

    Example:
        >>> index = PrefixIndex(block_tokens=128)
        >>> prompt = index.chain(range(400))
        >>> index.insert(prompt, "0", version=3)
        >>> index.cached_tokens(index.chain(range(300)), "0", version=3)
        256

    Args:
        block_tokens: Tokens in a block, at least 1.

    Attributes:
        block_tokens: Tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._replicas: dict[str, _BlockSet] = {}

    def __len__(self) -> int:
        """Digests remembered, of all replicas together."""
        return sum(blocks.size for blocks in self._replicas.values())

    def chain(
        self, prompt: str | Sequence[int] | np.ndarray, salt: str | None = None
    ) -> PromptChain:
        """A prompt's digests in this index's blocks; see ``PromptChain``."""
        return PromptChain(prompt, self.block_tokens, salt)

    def cached_tokens(self, prompt: PromptChain, replica_id: str, version: int) -> int:
        """Tokens of the prompt's beginning that the replica probably has in its cache.

        Args:
            prompt: What :meth:`chain` made of it.
            replica_id: The replica.
            version: Weight version that it serves with.
        """
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
        """Notes that a prompt is, or is about to be, in a replica's cache.

        Args:
            prompt: What :meth:`chain` made of it.
            replica_id: The replica.
            version: Weight version that it serves this prompt with.
        """
        blocks = self._replicas.get(replica_id)
        if blocks is None:
            blocks = self._replicas[replica_id] = _BlockSet(_DEFAULT_CAPACITY)
        blocks.touch(prompt.digests, version)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Changes the size of a block, after which nothing that was noted can be recognised."""
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
        """Forgets a replica, whose cache is gone; its capacity too."""
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
    """The smallest multiple of an engine's block size that is a block of the index.

    Args:
        block_size: Tokens in a KV-cache block of the engines.
    """
    return -(-INDEX_BLOCK_TOKENS // block_size) * block_size

"""Memory of earlier prompts: which of them a prompt repeats or continues, and where they went."""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from torchrl_vllm_sync.errors import InvalidPromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PrefixMemory", "PromptDigest", "Recollection", "digest_prompt"]

_BYTES_PER_TOKEN = 4
_TEXT, _IDS = 1, 2  # seeds: text and ids with the same bytes are different prompts
# The block ends at which digests are taken lie ever further apart, by a 16th of their depth: a
# prompt of 256 blocks costs 69 digests, one of 4096 about 115.
_GROWTH_BITS = 4
_CAPACITY = 65536
# A beginning after which prompts end at more places than this is a template's; a conversation whose
# end was pushed out keeps its replica from its next turn on.
_MAX_TAILS = 64


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """A prompt as stable digests of 64 bits: the same in every process.

    Attributes:
        data: The prompt's bytes; token ids take four each, text its UTF-8.
        whole: Digest of all of it.
        anchors: ``(length, digest)`` of some of its beginnings, in bytes, shortest first. Which
            lengths depends on the block size alone, so two prompts that begin alike share them.
    """

    data: bytes
    whole: int
    anchors: list[tuple[int, int]]


def digest_prompt(prompt: str | Sequence[int], prefix_length: int) -> PromptDigest:
    """Digests a prompt in blocks of ``prefix_length`` tokens.

    Text is not tokenised: four of its bytes count as one token.

    Raises:
        InvalidPromptError: An id is not an integer of 32 bits.
    """
    if isinstance(prompt, str):
        digest, data = _TEXT, prompt.encode("utf-8", "surrogatepass")
    else:
        digest, data = _IDS, _pack_ids(prompt)
    block = prefix_length * _BYTES_PER_TOKEN
    num_blocks = len(data) // block
    anchors: list[tuple[int, int]] = []
    done, depth = 0, 1
    while depth <= num_blocks:
        end = depth * block
        digest = _extend(digest, data[done:end])
        anchors.append((end, digest))
        done = end
        depth += (depth >> _GROWTH_BITS) or 1
    return PromptDigest(data, _extend(digest, data[done:]), anchors)


def _extend(digest: int, more: bytes) -> int:
    """Digest of a beginning and of ``more`` after it."""
    return xxhash.xxh3_64_intdigest(more, digest)


def _pack_ids(ids: Sequence[int]) -> bytes:
    if isinstance(ids, np.ndarray):
        return ids.astype("<i4").tobytes()
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise InvalidPromptError(f"token ids must be integers of 32 bits: {error}") from error


@dataclass(slots=True)
class _Turn:
    """One prompt that was seen: where it went, how often it was asked and then continued."""

    replica_id: str
    num_asked: int = 0
    num_continued: int = 0


@dataclass(frozen=True, slots=True)
class Recollection:
    """What ``PrefixMemory`` knows of a prompt.

    Attributes:
        replica_id: Where it, or the prompt that it continues, was served; None if unknown.
        turn: This very prompt, if it was seen.
        continued: The prompt that it continues, if this one is new.
    """

    replica_id: str | None
    turn: _Turn | None = None
    continued: _Turn | None = None


class PrefixMemory:
    """Bounded memory of prompts and of the replicas that served them.

    A conversation's next turn begins with the whole of an earlier prompt. So does a prompt behind a
    system prompt that was once sent alone, and what tells the two apart is how often it happens:
    each asking of a prompt can be continued once. A prompt with more different continuations than
    askings is a template, and says nothing about where its continuations belong. Prompts that
    merely share a beginning, neither being the whole beginning of the other, are strangers.

    Args:
        prefix_length: Tokens in a block. An earlier prompt shorter than one block is recognised
            when it is repeated, not when it is continued.
        capacity: Prompts remembered; the least recently used are forgotten.
    """

    def __init__(self, prefix_length: int, capacity: int = _CAPACITY) -> None:
        self._prefix_length = prefix_length
        self._capacity = capacity
        self._turns: OrderedDict[int, _Turn] = OrderedDict()
        # Lengths in bytes, past an anchor, at which remembered prompts end; latest last. A prompt
        # that was forgotten may leave its length behind: looking there finds nothing.
        self._tails: OrderedDict[int, dict[int, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def digest(self, prompt: str | Sequence[int]) -> PromptDigest:
        """Digests a prompt in this memory's blocks; see ``digest_prompt``."""
        return digest_prompt(prompt, self._prefix_length)

    def recall(self, prompt: PromptDigest) -> Recollection:
        """Looks up where this prompt, or the one that it continues, was served."""
        turn = self._turns.get(prompt.whole)
        if turn is not None:
            self._turns.move_to_end(prompt.whole)
            return Recollection(turn.replica_id, turn=turn)
        earlier = self._longest_beginning(prompt)
        if earlier is None or earlier.num_continued >= earlier.num_asked:
            return Recollection(None, continued=earlier)
        return Recollection(earlier.replica_id, continued=earlier)

    def record(
        self,
        prompt: PromptDigest,
        recollection: Recollection,
        replica_id: str,
        *,
        moved: bool = False,
    ) -> None:
        """Remembers that ``prompt``, of which ``recollection`` was just recalled, was served.

        A prompt seen before keeps its first replica, where its cache is, unless ``moved``.
        """
        turn = recollection.turn
        if turn is None:
            if recollection.continued is not None:
                recollection.continued.num_continued += 1
            turn = self._turns[prompt.whole] = _Turn(replica_id)
            self._remember_end(prompt)
            if len(self._turns) > self._capacity:
                self._turns.popitem(last=False)
        elif moved:
            turn.replica_id = replica_id
        turn.num_asked += 1

    def _remember_end(self, prompt: PromptDigest) -> None:
        if not prompt.anchors:
            return
        length, anchor = prompt.anchors[-1]
        tail = len(prompt.data) - length
        tails = self._tails.setdefault(anchor, {})
        self._tails.move_to_end(anchor)
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > _MAX_TAILS:
            del tails[next(iter(tails))]
        if len(self._tails) > self._capacity:
            self._tails.popitem(last=False)

    def _longest_beginning(self, prompt: PromptDigest) -> _Turn | None:
        """The longest remembered prompt, other than this one, that this one begins with."""
        for length, anchor in reversed(prompt.anchors):
            tails = self._tails.get(anchor)
            if tails is None:
                continue
            for tail in sorted(tails, reverse=True):
                end = length + tail
                if end >= len(prompt.data):
                    continue
                whole = _extend(anchor, prompt.data[length:end])
                turn = self._turns.get(whole)
                if turn is not None:
                    self._turns.move_to_end(whole)
                    return turn
        return None

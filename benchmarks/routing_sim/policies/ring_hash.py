"""Hashes of keys and addresses, so that routers break ties as the real ones do."""

from __future__ import annotations

import blake3

__all__ = ["default_address", "mcrouter_hash", "request_key", "ring_position"]

_MASK = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995  # MurmurHash64A, Austin Appleby, public domain
_SEED = 4193360111  # of mcrouter's hashes
_STEP = 23  # bits between two draws of a furc hash
_BUCKETS = (1 << 23) - 1


def default_address(replica_id: int) -> str:
    """The address that a replica of the simulation has."""
    return f"http://replica-{replica_id}:8000"


def request_key(session_id: int, group_id: int) -> str | None:
    """The key of a request: its session, else its group; None if it has neither."""
    if session_id != -1:
        return f"session-{session_id}"
    return None if group_id == -1 else f"group-{group_id}"


def ring_position(text: str) -> int:
    """Place on the ring of SGLang's consistent hashing: the first eight bytes of BLAKE3."""
    return int.from_bytes(blake3.blake3(text.encode()).digest(8), "little")


def mcrouter_hash(text: str) -> int:
    """The hash of vllm-project/router: a furc hash to 2**23 - 1 buckets, hashed again by Murmur.

    Furc hashing is mcrouter's consistent hash (facebook/mcrouter, ``lib/fbi/hash.c``).
    """
    return _murmur(_furc(text.encode()).to_bytes(4, "little"))


def _furc(key: bytes) -> int:
    """Walks down a binary tree of buckets along pseudo-random bits of the key."""
    words = [_murmur(key)]

    def bit(index: int) -> int:
        while index >> 6 >= len(words):
            words.append(_murmur(words[-1].to_bytes(8, "little")))
        return words[index >> 6] >> (index & 63) & 1

    depth = (_BUCKETS - 1).bit_length()
    index = depth
    for _ in range(32):
        while not bit(index):
            if not depth:
                return 0
            depth -= 1
            index = depth
        index += _STEP
        bucket = 1
        for _ in range(depth - 1):
            bucket = bucket << 1 | bit(index)
            index += _STEP
        if bucket < _BUCKETS:
            return bucket
    return 0


def _murmur(key: bytes) -> int:
    state = _SEED ^ (len(key) * _FACTOR & _MASK)
    whole = len(key) & ~7
    for start in range(0, whole, 8):
        word = int.from_bytes(key[start : start + 8], "little") * _FACTOR & _MASK
        word = (word ^ word >> 47) * _FACTOR & _MASK
        state = (state ^ word) * _FACTOR & _MASK
    if whole < len(key):
        state = (state ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _MASK
    state = (state ^ state >> 47) * _FACTOR & _MASK
    return state ^ state >> 47

"""Chains of digests and the index of what caches hold, against a model that knows whole prompts."""

import os
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchrl_vllm_sync.errors import InvalidPromptError
from torchrl_vllm_sync.routing.strategies import (
    INDEX_BLOCK_TOKENS,
    PrefixIndex,
    PromptChain,
    index_block_tokens,
)

BLOCK = 4

# Three tokens only, so that many prompts begin alike.
ids = st.lists(st.integers(0, 2), min_size=1, max_size=26)
any_ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)
sizes = st.integers(1, 9)


# Chains


@given(any_ids, sizes)
def test_one_digest_for_each_whole_block_and_one_for_the_rest(prompt, size):
    chain = PromptChain(prompt, size)
    assert chain.num_tokens == len(prompt)
    assert chain.num_blocks == len(prompt) // size
    assert len(chain.digests) == -(-len(prompt) // size)
    assert all(0 <= digest < 2**64 for digest in chain.digests)


@given(ids, ids, sizes)
def test_digests_are_equal_exactly_as_long_as_prompts_are(one, other, size):
    left, right = PromptChain(one, size), PromptChain(other, size)
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    for at in range(min(left.num_blocks, right.num_blocks)):
        assert (left.digests[at] == right.digests[at]) == ((at + 1) * size <= common)
    assert (left.digests[-1] == right.digests[-1]) == (one == other)


@given(any_ids, st.lists(st.integers(0, 9), max_size=20), sizes)
def test_a_chain_goes_on_as_if_the_prompt_had_been_longer(prompt, answer, size):
    longer = PromptChain(prompt, size).followed_by(answer)
    whole = PromptChain([*prompt, *answer], size)
    assert longer.digests == whole.digests
    assert (longer.num_tokens, longer.num_blocks) == (whole.num_tokens, whole.num_blocks)


@given(any_ids, sizes, st.data())
def test_a_chain_goes_on_from_every_split(prompt, size, data):
    whole = PromptChain(prompt, size, "salt")
    for first in range(1, len(prompt)):
        second = data.draw(st.integers(first, len(prompt)))
        begun = PromptChain(prompt[:first], size, "salt")
        before = list(begun.digests)
        grown = begun.followed_by(prompt[first:second]).followed_by(np.array(prompt[second:], int))
        assert grown.digests == whole.digests
        assert grown.num_tokens == len(prompt)
        assert begun.digests == before  # as it was


@given(any_ids, sizes)
def test_list_tuple_and_arrays_are_one_prompt(prompt, size):
    forms = [tuple(prompt), np.array(prompt, np.int64), np.array(prompt, np.int32)]
    chains = [PromptChain(form, size) for form in (prompt, *forms)]
    assert len({tuple(chain.digests) for chain in chains}) == 1


@given(st.text(st.characters(exclude_categories=[]), min_size=1, max_size=60), sizes)
def test_text_is_no_ids_and_salts_part_prompts(text, size):
    data = text.encode("utf-8", "surrogatepass")
    digests = PromptChain(text, size).digests
    assert len(digests) == -(-len(data) // (4 * size))
    if len(data) % 4 == 0:
        same_bytes = np.frombuffer(data, "<i4")
        assert not set(digests) & set(PromptChain(same_bytes, size).digests)
    chains = [digests, *(PromptChain(text, size, salt).digests for salt in ("", "a", "b"))]
    assert len({digest for chain in chains for digest in chain}) == 4 * len(digests)
    assert PromptChain(text, size, "a").digests == chains[2]


@pytest.mark.parametrize("prompt", [[1, "two"], [1, 2**31], [-(2**31) - 1], [1.5], [None]])
def test_ids_that_are_none_are_refused(prompt):
    with pytest.raises(InvalidPromptError, match="token ids must be integers of 32 bits"):
        PromptChain(prompt, 2)
    with pytest.raises(InvalidPromptError, match="token ids must be integers of 32 bits"):
        PromptChain([1], 2).followed_by(prompt)


_DIGESTS = """
from torchrl_vllm_sync.routing.strategies import PromptChain
for prompt in ("a text " * 9, [1, 2, 3] * 9, [2**31 - 1, -5]):
    for salt in (None, "", "salt"):
        chain = PromptChain(prompt, 4, salt)
        print(chain.digests, chain.followed_by([7, 8, 9]).digests)
"""


def test_every_process_has_the_same_digests():
    told = [
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert str(PromptChain([1, 2, 3] * 9, 4, "salt").digests) in told[0]


# The index


@pytest.mark.parametrize(
    ("block_size", "tokens"), [(1, 128), (16, 128), (128, 128), (256, 256), (48, 144), (100, 200)]
)
def test_blocks_of_the_index_are_whole_blocks_of_the_engine(block_size, tokens):
    assert index_block_tokens(block_size) == tokens
    assert tokens % block_size == 0
    assert tokens >= INDEX_BLOCK_TOKENS


@dataclass
class Cache:
    """A replica's prefixes, whole, the least recently used first, as vLLM would evict them."""

    capacity: int = 32768
    prefixes: dict[tuple[object, tuple[int, ...]], None] = field(default_factory=dict)

    def insert(self, prompt, version):
        ends = [*range(BLOCK, len(prompt) + 1, BLOCK), len(prompt)]
        for end in sorted(set(ends), reverse=True):  # the last block goes first
            self.prefixes.pop((version, prompt[:end]), None)
            self.prefixes[version, prompt[:end]] = None
        self.evict()

    def evict(self):
        while len(self.prefixes) > self.capacity:
            del self.prefixes[next(iter(self.prefixes))]

    def cached(self, prompt, version):
        for end in range(len(prompt), 0, -1):
            known = (version, prompt[:end]) in self.prefixes
            if known and (end % BLOCK == 0 or end == len(prompt)):
                return end
        return 0


class IndexAgainstModel(RuleBasedStateMachine):
    """The same calls on the index and on caches that remember whole prompts."""

    replicas = st.sampled_from(["r0", "r1"])
    versions = st.sampled_from([None, 1, 2])

    def __init__(self):
        super().__init__()
        self.index, self.caches, self.seen = PrefixIndex(BLOCK), {}, [((1,), None)]

    @rule(prompt=ids, replica_id=replicas, version=versions)
    def insert(self, prompt, replica_id, version):
        self.index.insert(self.index.chain(prompt), replica_id, version)
        self.caches.setdefault(replica_id, Cache()).insert(tuple(prompt), version)
        self.seen.append((tuple(prompt), version))

    @rule(data=st.data(), answer=ids, replica_id=replicas)
    def insert_what_follows(self, data, answer, replica_id):
        prompt, version = data.draw(st.sampled_from(self.seen))
        self.index.insert(self.index.chain(prompt).followed_by(answer), replica_id, version)
        self.caches.setdefault(replica_id, Cache()).insert((*prompt, *answer), version)

    @rule(replica_id=replicas, capacity=st.integers(0, 12), more=st.integers(0, BLOCK - 1))
    def set_capacity(self, replica_id, capacity, more):
        self.index.set_capacity(replica_id, capacity * BLOCK + more)
        cache = self.caches.setdefault(replica_id, Cache())
        cache.capacity = max(1, capacity)
        cache.evict()

    @rule(replica_id=replicas)
    def remove(self, replica_id):
        self.index.remove(replica_id)
        self.caches.pop(replica_id, None)

    @rule(block_tokens=st.sampled_from([BLOCK, BLOCK, 7]))
    def set_block_tokens(self, block_tokens):
        self.index.set_block_tokens(block_tokens)
        if block_tokens != BLOCK:
            self.index.set_block_tokens(BLOCK)
            self.caches.clear()

    @rule(prompt=ids, replica_id=replicas, version=versions)
    def look_up(self, prompt, replica_id, version):
        cache = self.caches.get(replica_id, Cache())
        found = self.index.cached_tokens(self.index.chain(prompt), replica_id, version)
        assert found == cache.cached(tuple(prompt), version)

    @invariant()
    def the_same_is_known(self):
        assert len(self.index) == sum(len(cache.prefixes) for cache in self.caches.values())
        for replica_id, cache in self.caches.items():
            for prompt, version in self.seen[-6:]:
                chain = self.index.chain(prompt)
                found = self.index.cached_tokens(chain, replica_id, version)
                assert found == cache.cached(prompt, version)

    @invariant()
    def whatever_is_present_all_before_it_is(self):
        """Without this, bisection would be wrong."""
        for prompt, version in self.seen[-6:]:
            digests = self.index.chain(prompt).digests
            for blocks in self.index._blocks.values():
                present = [(version, digest) in blocks for digest in digests]
                assert present == sorted(present, reverse=True)

    @invariant()
    def no_replica_has_more_than_its_capacity(self):
        for replica_id, blocks in self.index._blocks.items():
            assert len(blocks) <= self.caches.get(replica_id, Cache()).capacity


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, print_blob=True
)


def test_a_new_version_finds_nothing_and_the_old_one_is_forgotten_in_turn():
    index = PrefixIndex(BLOCK)
    index.set_capacity("0", 10 * BLOCK)
    prompt = index.chain(range(8 * BLOCK))
    index.insert(prompt, "0", version=1)
    assert index.cached_tokens(prompt, "0", version=2) == 0
    assert index.cached_tokens(prompt, "0", version=1) == 8 * BLOCK
    index.insert(index.chain(range(100, 100 + 6 * BLOCK)), "0", version=2)
    assert index.cached_tokens(prompt, "0", version=1) == 4 * BLOCK
    assert len(index) == 10


def test_replicas_are_apart():
    index = PrefixIndex(BLOCK)
    prompt = index.chain(range(20))
    index.insert(prompt, "0", version=None)
    assert index.cached_tokens(prompt, "1", version=None) == 0
    index.remove("0")
    assert index.cached_tokens(prompt, "0", version=None) == 0
    assert len(index) == 0


def test_another_block_size_makes_everything_unknown_and_the_same_one_nothing():
    index = PrefixIndex(BLOCK)
    index.insert(index.chain(range(20)), "0", version=None)
    index.set_block_tokens(BLOCK)
    assert len(index) == 5
    index.set_block_tokens(2 * BLOCK)
    assert len(index) == 0
    assert index.chain(range(20)).num_blocks == 2


@pytest.mark.parametrize("num_prompts", [1, 3, 150])
def test_what_is_used_again_and_again_is_remembered_once(num_prompts):
    index = PrefixIndex(BLOCK)
    index.set_capacity("0", 1000 * BLOCK)
    prompts = [index.chain(range(at, at + 6 * BLOCK)) for at in range(num_prompts)]
    for at in range(20_000):
        index.insert(prompts[at % num_prompts], "0", version=at // 5000)
    assert len(index) <= 1000
    assert index.cached_tokens(prompts[-1], "0", version=3) == 6 * BLOCK


def test_a_prompt_longer_than_the_cache_leaves_its_beginning():
    index = PrefixIndex(BLOCK)
    index.set_capacity("0", 5 * BLOCK)
    index.insert(index.chain(range(100)), "0", version=None)
    assert index.cached_tokens(index.chain(range(100)), "0", version=None) == 5 * BLOCK


def test_a_million_blocks_take_less_than_200_megabytes():
    tracemalloc.start()
    try:
        index = PrefixIndex(1)
        index.set_capacity("0", 10**9)
        before, _ = tracemalloc.get_traced_memory()
        for begin in range(0, 250_000, 1000):
            index.insert(index.chain(range(begin, begin + 1000)), "0", version=0)
        assert len(index) == 250_000
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 4 * (after - before) < 200e6

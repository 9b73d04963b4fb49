"""Routing strategies, and the estimate of what the replicas' prefix caches hold that they ask."""

from __future__ import annotations

import random  # noqa: TID251 - only seeded instances, so every tie can be replayed
import struct
import time
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import xxhash

from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.routing.ledger import LoadSnapshot

BYTES_PER_TOKEN = 4
"""Bytes of a token id; as many bytes of text, which is not tokenised here, count as one token."""

_TEXT, _IDS = 1, 2  # seeds: text and ids with the same bytes are different prompts


class PromptChain:
    """Stable digests of a prompt's prefixes, 64 bits each, the same in every process.

    A block's digest covers the one before; ``digests`` has one for each whole block and the rest.
    """

    __slots__ = ("_rest", "block_tokens", "digests", "num_blocks", "num_tokens")

    def __init__(
        self, prompt: str | Sequence[int] | np.ndarray, block_tokens: int, salt: str | None = None
    ) -> None:
        if isinstance(prompt, str):
            seed, data = _TEXT, prompt.encode("utf-8", "surrogatepass")
        else:
            seed, data = _IDS, _pack_ids(prompt)
        if salt is not None:
            seed = xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), seed)
        self.block_tokens = block_tokens
        self._chain([], seed, data)

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


_FLAT = (list, tuple, str, np.ndarray)


def routing_prompt(prompt: object) -> tuple[str | Sequence[int] | None, str | None]:
    """Returns a prompt's text or ids and its cache salt, checked in constant time."""
    salt = None
    if not isinstance(prompt, _FLAT) and isinstance(prompt, Mapping):
        form: Mapping[str, Any] = prompt
        salt, ids = form.get("cache_salt"), form.get("prompt_token_ids")
        prompt = form.get("prompt") if ids is None else ids
        if prompt is None:
            raise InvalidPromptError("a prompt dict must have prompt_token_ids or prompt, got none")
        if salt is not None and not isinstance(salt, str):
            raise InvalidPromptError(f"cache_salt must be text, got {type(salt).__name__}")
    if prompt is None:
        return None, None
    if not isinstance(prompt, _FLAT):
        raise InvalidPromptError(
            f"a prompt must be text, token ids or a dict of these, got {type(prompt).__name__}"
        )
    if isinstance(prompt, np.ndarray) and (prompt.ndim != 1 or prompt.dtype.kind not in "iu"):
        raise InvalidPromptError(
            "an array of token ids must have 1 dimension and an integer dtype, "
            f"got shape {prompt.shape} and {prompt.dtype}"
        )
    if not len(prompt):
        raise InvalidPromptError(f"a prompt must not be empty, got {prompt!r}")
    if isinstance(prompt, (list, tuple)) and (
        isinstance(prompt[0], bool) or not isinstance(prompt[0], (int, np.integer))
    ):
        raise InvalidPromptError(f"token ids must be integers, got {type(prompt[0]).__name__}")
    return prompt, salt  # pyright: ignore[reportReturnType] - an integer array is a sequence of ids


@dataclass(slots=True)
class RoutingRequest:
    """What a strategy may know of a request; None where the caller did not say.

    Attributes:
        prompt: Text, or token ids, not empty.
        context: What else the caller said; this library's strategies do not read it.
        session_id, group_id: Its conversation, and its group of requests with the same prompt.
        salt: Requests with different salts share no cache; vLLM's ``cache_salt``.
        num_samples: Samples that it asks for; each counts as one request in flight.
        max_tokens: Most tokens that each sample can have.
        num_coming: Samples that are being placed together and are not counted in any snapshot yet.
        known_chain: The prompt's digests, if a strategy has asked for them.
    """

    prompt: str | Sequence[int] | None = None
    context: Mapping[str, Any] | None = None
    session_id: str | int | None = None
    group_id: str | int | None = None
    salt: str | None = None
    num_samples: int = 1
    max_tokens: int | None = None
    num_coming: int = 1
    known_chain: PromptChain | None = field(default=None, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt as far as is known, 0 without one, a guess for text."""
        length = 0 if self.prompt is None else len(self.prompt)
        return length // BYTES_PER_TOKEN if isinstance(self.prompt, str) else length

    def chain(self, index: PrefixIndex) -> PromptChain:
        """Returns the prompt's digests, computed once. There must be a prompt.

        Args:
            index: Whose blocks are digested.

        Raises:
            InvalidPromptError: An id is not an integer of 32 bits.
        """
        if self.known_chain is None:
            assert self.prompt is not None, "a request without a prompt has no digests"
            self.known_chain = index.chain(self.prompt, self.salt)
        return self.known_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """Settings and shared parts that every strategy of a balancer is built with.

    Attributes:
        overload_threshold: Share of the mean load that one replica may reach, at least 1.
        max_report_age_s: Older figures of an engine count as unknown.
        seed, first_turn: Seed of ties, and the position at which ``round-robin`` begins.
        clock: Tells the time of the snapshots, in seconds.
        index: What the replicas' caches hold; the balancer keeps it up to date.
    """

    overload_threshold: float = 1.5
    max_report_age_s: float = 5.0
    seed: int = 0
    first_turn: int = 0
    clock: Callable[[], float] = time.monotonic
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(INDEX_BLOCK_TOKENS))


class RoutingStrategy(Protocol):
    """Chooses a replica for a request, with the ledger locked; never does I/O."""

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        """Position in ``snapshots`` of the replica to use; None if this strategy cannot tell.

        Args:
            request: The request.
            snapshots: Replicas that may take it, at least one.
        """
        ...


StrategyFactory: TypeAlias = Callable[[StrategySettings], RoutingStrategy]


class _Lowest:
    """Chooses the lowest figure; ties at random, or an idle service would use one replica only."""

    def __init__(self, settings: StrategySettings) -> None:
        self._settings = settings
        self._ties = random.Random(settings.seed)

    def _lowest(self, figures: Mapping[int, float]) -> int:
        lowest = min(figures.values())
        return self._ties.choice([at for at, figure in figures.items() if figure == lowest])


class LeastRequests(_Lowest):
    """Strategy ``"requests"``: the replica with the lowest ``LoadSnapshot.load``."""

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int:
        del request
        return self._lowest(dict(enumerate(loads_of(snapshots, self._settings))))


class KVCache(_Lowest):
    """Strategy ``"kv-cache"``: the lowest ``predicted_usage`` of those not overloaded, if known."""

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        now, max_age_s = self._settings.clock(), self._settings.max_report_age_s
        found = [one.predicted_usage(now, max_age_s) for one in snapshots]
        usages = [usage for usage in found if usage is not None]
        if len(usages) < len(snapshots):
            return None
        chosen = not_overloaded(loads_of(snapshots, self._settings), request, self._settings)
        return self._lowest({at: usages[at] for at in chosen})


class RoundRobin:
    """Strategy ``"round-robin"``: the replica whose last turn, by its id, is longest ago."""

    def __init__(self, settings: StrategySettings) -> None:
        self._first_turn = settings.first_turn
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    def peek(self, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position that ``choose`` would return now."""
        num, last = len(snapshots), self._last_turns
        turns = [last.get(one.replica_id, -1) for one in snapshots]
        return min(range(num), key=lambda at: (turns[at], (at - self._first_turn) % num))

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int:
        del request
        position = self.peek(snapshots)
        self._last_turns[snapshots[position].replica_id] = self._num_turns
        self._num_turns += 1
        return position


# What a request costs beside its uncached tokens, in tokens: without it a replica that has all of a
# prompt would cost nothing however much it has to do.
_OWN_TOKENS = 64


class PrefixAware:
    """Strategy ``"prefix-aware"``: where the least work is left for the most idle replica.

    The replica with the smallest product wins: uncached tokens of the prompt (``PrefixIndex``) and
    64 more for the request itself, times the samples that it would hold with this one, as in
    SGLang's ``lmetric`` (sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs``). Ties
    are broken by rendezvous hashing of the prompt, so that every process decides alike. It passes
    over replicas that are overloaded, or whose KV cache would be more than 90 % full while others'
    would not be.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._settings = settings

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        if request.prompt is None:
            return None
        settings, index = self._settings, self._settings.index
        chain = request.chain(index)
        now, max_age_s = settings.clock(), settings.max_report_age_s
        loads = loads_of(snapshots, settings)
        roomy: dict[int, int] = {}  # what it costs, by position
        full: dict[int, int] = {}
        for at in not_overloaded(loads, request, settings):
            one = snapshots[at]
            cached = index.cached_tokens(chain, one.replica_id, one.cache_version)
            left = chain.num_tokens - cached
            costs = roomy if one.has_room(left, now, max_age_s) else full
            costs[at] = (left + _OWN_TOKENS) * (loads[at] + 1)
        costs = roomy or full
        least = min(costs.values())
        equals = [at for at, cost in costs.items() if cost == least]
        if len(equals) == 1:
            return equals[0]
        key = chain.digests[-1].to_bytes(8, "little")
        weigh = xxhash.xxh3_64_intdigest
        return max(equals, key=lambda at: weigh(key + snapshots[at].replica_id.encode()))


def loads_of(snapshots: Sequence[LoadSnapshot], settings: StrategySettings) -> list[int]:
    now, max_age_s = settings.clock(), settings.max_report_age_s
    return [snapshot.load(now, max_age_s) for snapshot in snapshots]


def not_overloaded(
    loads: Sequence[int], request: RoutingRequest, settings: StrategySettings
) -> list[int]:
    """Positions of the replicas that may take the request; at least one.

    With ``n`` candidates and ``total`` samples, those that are coming included, none may come to
    hold more than ``overload_threshold * total / n + num_samples``. The least loaded never does.
    The bound is that of "Consistent Hashing with Bounded Loads" (Mirrokni et al., SODA 2018).
    """
    total = sum(loads) + max(request.num_coming, request.num_samples)
    bound = settings.overload_threshold * total / len(loads)
    return [at for at, load in enumerate(loads) if load <= bound]


_FACTORIES: dict[str, StrategyFactory] = {
    "prefix-aware": PrefixAware,
    "requests": LeastRequests,
    "kv-cache": KVCache,
    "round-robin": RoundRobin,
}


def register_strategy(name: str, factory: StrategyFactory) -> None:
    """Makes a strategy known by name to every balancer built in this process from now on.

    Example:
        >>> class FewestTokens:
        ...     def __init__(self, settings):
        ...         self.threshold = settings.overload_threshold
        ...
        ...     def choose(self, request, snapshots):
        ...         held = [one.held_tokens for one in snapshots]
        ...         even = max(held) <= self.threshold * min(held)
        ...         return None if even else held.index(min(held))
        >>> register_strategy("fewest-tokens", FewestTokens)
        >>> balancer = LoadBalancer(service, ["fewest-tokens", "requests"])

    Args:
        name: Not taken yet.
        factory: Builds one instance for one balancer, and is pickled along with it.

    Raises:
        UnsupportedArgumentError: The name is taken, or no text, or ``factory`` cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise UnsupportedArgumentError(f"name must be text that is not empty, got {name!r}")
    if not callable(factory):
        raise UnsupportedArgumentError(f"factory must be callable, got {factory!r}")
    if name in _FACTORIES:
        raise UnsupportedArgumentError(f"name must be new, got {name!r}, which is registered")
    _FACTORIES[name] = factory


def known_strategies() -> list[str]:
    """Returns the names of the registered strategies, in order of registration."""
    return list(_FACTORIES)


def strategy_factory(name: str) -> StrategyFactory:
    if not isinstance(name, str) or name not in _FACTORIES:
        raise UnknownStrategyError(f"strategy must be one of {', '.join(_FACTORIES)}, got {name!r}")
    return _FACTORIES[name]

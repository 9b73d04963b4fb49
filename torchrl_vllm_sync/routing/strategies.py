"""Routing strategies: each chooses one of the replicas that may take a request."""

from __future__ import annotations

import random  # noqa: TID251 - only seeded instances, so every tie can be replayed
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import xxhash

from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.routing.prefix_index import (
    BYTES_PER_TOKEN,
    INDEX_BLOCK_TOKENS,
    PrefixIndex,
    PromptChain,
)

if TYPE_CHECKING:
    from torchrl_vllm_sync.routing.ledger import LoadSnapshot

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
        key = chain.whole.to_bytes(8, "little")
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

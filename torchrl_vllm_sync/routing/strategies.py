"""Routing strategies: each chooses one of the replicas that may take a request."""

from __future__ import annotations

import math
import random  # noqa: TID251 - only seeded instances, so every tie can be replayed
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import xxhash

from torchrl_vllm_sync.errors import UnknownStrategyError, UnsupportedArgumentError
from torchrl_vllm_sync.routing.prefix import PrefixMemory

if TYPE_CHECKING:
    from torchrl_vllm_sync.load import LoadSnapshot

__all__ = [
    "KVCache",
    "LeastRequests",
    "PrefixAware",
    "RoundRobin",
    "RoutingRequest",
    "RoutingStrategy",
    "StrategyFactory",
    "StrategySettings",
    "affinity",
    "known_strategies",
    "not_overloaded",
    "register_strategy",
    "strategy_factory",
]

# No replica counts as overloaded while it holds fewer requests than this: a GRPO group of 8
# siblings is worth one prefill, however idle the other replicas are.
_MIN_CAPACITY = 8


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a strategy may know of a request.

    Attributes:
        prompt: Text, or token ids, not empty; None if the caller did not say.
        context: What else the caller said; the strategies of this module do not read it.
        session_id: The conversation it belongs to; None if the caller did not say.
        group_id: The group of requests with the same prompt it belongs to, likewise.
    """

    prompt: str | Sequence[int] | None = None
    context: Mapping[str, Any] | None = None
    session_id: str | int | None = None
    group_id: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """Settings that every strategy is built with.

    Attributes:
        prefix_length: Tokens in a block of a prompt, at least 1.
        overload_threshold: Share of the mean load that one replica may reach, at least 1.
        max_report_age_s: Older figures of an engine count as unknown.
        seed: Seeds ties.
        first_turn: Position at which ``round-robin`` begins.
    """

    prefix_length: int = 8
    overload_threshold: float = 1.5
    max_report_age_s: float = 5.0
    seed: int = 0
    first_turn: int = 0


class RoutingStrategy(Protocol):
    """Chooses a replica for a request; pure apart from its own memory, and never does I/O.

    A balancer calls it with its ledger locked, so one instance is never entered twice at a time.
    """

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        """Position in ``snapshots`` of the replica to use; None if this strategy cannot tell.

        Args:
            request: The request.
            snapshots: Replicas that may take it, at least one.
        """
        ...


StrategyFactory: TypeAlias = Callable[[StrategySettings], RoutingStrategy]


class LeastRequests:
    """Strategy ``"requests"``: the replica that holds the fewest requests.

    What a replica holds is ``LoadSnapshot.load``. Ties go to any of the equals, at random, so that
    an idle service does not send everything to its first replica.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._max_age_s = settings.max_report_age_s
        self._ties = random.Random(settings.seed)

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position of the least loaded replica."""
        del request
        loads = _loads(snapshots, self._max_age_s)
        least = min(loads)
        return self._ties.choice([at for at, load in enumerate(loads) if load == least])


class KVCache:
    """Strategy ``"kv-cache"``: the replica with the lowest reported use of its KV cache.

    Cannot tell while the figure of any candidate is unknown or too old. Figures are as late as the
    last report, so overloaded replicas are passed over: otherwise all requests between two reports
    would go to one replica.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._settings = settings
        self._ties = random.Random(settings.seed)

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        """Position of the replica with the emptiest cache; None if a figure is missing."""
        del request
        now, max_age_s = time.monotonic(), self._settings.max_report_age_s
        usages: list[float] = []
        for snapshot in snapshots:
            if snapshot.kv_cache_usage is None or not snapshot.is_fresh(now, max_age_s):
                return None
            usages.append(snapshot.kv_cache_usage)
        open_positions = not_overloaded(snapshots, self._settings)
        lowest = min(usages[at] for at in open_positions)
        return self._ties.choice([at for at in open_positions if usages[at] == lowest])


class RoundRobin:
    """Strategy ``"round-robin"``: the replica whose last turn is longest ago.

    Turns are remembered by replica id: when replicas come, go or are left out for a while, the
    others neither lose a turn nor get a second one.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._first_turn = settings.first_turn
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    def peek(self, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position that ``choose`` would return now."""
        num = len(snapshots)
        return min(
            range(num),
            key=lambda at: (
                self._last_turns.get(snapshots[at].replica_id, -1),
                (at - self._first_turn) % num,
            ),
        )

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position of the replica whose turn it is."""
        del request
        position = self.peek(snapshots)
        self._last_turns[snapshots[position].replica_id] = self._num_turns
        self._num_turns += 1
        return position


class PrefixAware:
    """Strategy ``"prefix-aware"``: where the prompt's keys and values probably are.

    A prompt prefers, first of all, the replica that served the same prompt, or the earlier turn
    that it continues (``PrefixMemory`` tells turns from templates). A prompt that is new here is
    placed by rendezvous hashing of all of it over the replica ids: every process places it alike,
    prompts that merely share a system prompt spread, and when a replica goes only its own share
    moves.

    No replica takes more than its bounded share. With ``n`` candidates that hold ``total`` requests
    together, a replica is overloaded if one more would bring it above
    ``max(8, ceil(overload_threshold * (total + 1) / n))``. Then the next replica in the prompt's
    rendezvous order that is not overloaded takes the request; there is always one. Cannot tell
    without a prompt.

    Reference for the bound: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded
    Loads", SODA 2018.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._settings = settings
        self._memory = PrefixMemory(settings.prefix_length)

    def choose(self, request: RoutingRequest, snapshots: Sequence[LoadSnapshot]) -> int | None:
        """Position of the preferred replica that is not overloaded; None without a prompt."""
        if request.prompt is None:
            return None
        prompt = self._memory.digest(request.prompt)
        recalled = self._memory.recall(prompt)
        open_positions = not_overloaded(snapshots, self._settings)
        home = next(
            (at for at, each in enumerate(snapshots) if each.replica_id == recalled.replica_id),
            None,
        )
        if home in open_positions:
            position = home
        else:
            key = prompt.whole.to_bytes(8, "little")
            position = max(open_positions, key=lambda at: affinity(key, snapshots[at].replica_id))
        self._memory.record(prompt, recalled, snapshots[position].replica_id, moved=home is None)
        return position


def affinity(key: bytes, replica_id: str) -> int:
    """Weight of a replica for a key in rendezvous hashing; the same in every process."""
    return xxhash.xxh3_64_intdigest(key + replica_id.encode())


def _loads(snapshots: Sequence[LoadSnapshot], max_age_s: float) -> list[int]:
    now = time.monotonic()
    return [snapshot.load(now, max_age_s) for snapshot in snapshots]


def not_overloaded(snapshots: Sequence[LoadSnapshot], settings: StrategySettings) -> list[int]:
    """Positions of the replicas that may take one more request; at least one.

    The least loaded replica is always among them: it holds at most the mean, and the threshold is
    at least 1.
    """
    loads = _loads(snapshots, settings.max_report_age_s)
    share = settings.overload_threshold * (sum(loads) + 1) / len(loads)
    capacity = max(_MIN_CAPACITY, math.ceil(share))
    return [at for at, load in enumerate(loads) if load < capacity]


_FACTORIES: dict[str, StrategyFactory] = {
    "prefix-aware": PrefixAware,
    "requests": LeastRequests,
    "kv-cache": KVCache,
    "round-robin": RoundRobin,
}


def register_strategy(name: str, factory: StrategyFactory) -> None:
    """Makes a strategy known by name to every balancer built in this process from now on.

    Example:
        >>> class First:
        ...     def __init__(self, settings): ...
        ...     def choose(self, request, snapshots):
        ...         return 0
        >>> register_strategy("first", First)

    Args:
        name: Not taken yet.
        factory: Builds one instance for one balancer. A balancer that is pickled takes it along.

    Raises:
        UnsupportedArgumentError: The name is taken.
    """
    if name in _FACTORIES:
        raise UnsupportedArgumentError(f"name must be new, got {name!r}, which is registered")
    _FACTORIES[name] = factory


def known_strategies() -> list[str]:
    """Names of the registered strategies, in order of registration."""
    return list(_FACTORIES)


def strategy_factory(name: str) -> StrategyFactory:
    """The factory of a registered strategy.

    Raises:
        UnknownStrategyError: No strategy has this name.
    """
    try:
        return _FACTORIES[name]
    except KeyError:
        raise UnknownStrategyError(
            f"strategy must be one of {', '.join(_FACTORIES)}, got {name!r}"
        ) from None

"""Load balancer: admits requests, keeps the ledger of those in flight, asks the strategies."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torchrl_vllm_sync.checks import check_integer, check_number, check_positive, shown
from torchrl_vllm_sync.errors import InvalidPromptError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import Replica, ReplicaState
from torchrl_vllm_sync.routing import strategies
from torchrl_vllm_sync.routing.ledger import Candidates, LoadSnapshot, LoadTracker
from torchrl_vllm_sync.routing.monitor import BareActorMonitor

RequestKey: TypeAlias = str | int
"""Names a session or a group; ``1`` and ``"1"`` are different keys."""


def key_per_prompt(
    name: str, given: RequestKey | Sequence[RequestKey | None] | None, num_prompts: int
) -> list[RequestKey | None]:
    """Checks what a caller passed as ``session_id`` or ``group_id`` and spreads it over prompts."""
    if given is None:
        return [None] * num_prompts
    if not isinstance(given, (list, tuple)):
        return [as_key(name, given)] * num_prompts
    if len(given) != num_prompts:
        raise UnsupportedArgumentError(
            f"{name} must be one key, or a list with one for each of {num_prompts} prompts, "
            f"got {len(given)}"
        )
    return [None if one is None else as_key(name, one) for one in given]


def as_keys(name: str, given: RequestKey | Iterable[RequestKey]) -> list[RequestKey]:
    """Checks one key, or several, that a caller names."""
    no_sequence = (str, bytes, bytearray, memoryview)
    if isinstance(given, no_sequence) or not isinstance(given, Iterable):
        return [as_key(name, given)]
    return [as_key(name, one) for one in given]


def as_key(name: str, key: object) -> RequestKey:
    if type(key) is int or (isinstance(key, str) and key):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise UnsupportedArgumentError(
        f"{name} must be an integer or text that is not empty, got {shown(key)}"
    )


class CachedAt(NamedTuple):
    """Replica and weight version that served a session or group last: the cache fits no other."""

    replica_id: str
    version: int = 0


class KeyLedger(OrderedDict[RequestKey, CachedAt]):
    """Where keys were served last; beyond its capacity the least recently noted are forgotten."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        check_integer("max_sessions", capacity, 1)
        self._capacity = capacity

    def note(self, key: RequestKey, where: CachedAt) -> None:
        """Notes where a key is from now on; it becomes the most recent one."""
        self[key] = where
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)

    def release(self, keys: Iterable[RequestKey]) -> int:
        """Forgets keys; returns how many of them were known."""
        return sum(self.pop(one, None) is not None for one in keys)


# A group stays together on a replica that holds fewer samples than this, however idle the others
# are: its prompt is computed once, and an engine with so few samples decodes as fast as with one.
_GROUP_SAMPLES = 8
# Weight of the latest answer in the mean length of answers.
_LATEST = 1 / 64


@dataclass(slots=True, eq=False, repr=False)
class Reservation(AbstractContextManager[Any], AbstractAsyncContextManager[Any]):
    """A request that counts as in flight on a replica until ``release``, or the end of ``with``."""

    replica_id: str
    index: int  # position that the replica had in the balancer's ``actors``
    _tracker: LoadTracker
    _balancer: LoadBalancer
    _request: strategies.RoutingRequest
    _version: int
    _tokens: int
    _released: bool = False

    def release(
        self, answers: Sequence[Sequence[int] | np.ndarray] = (), version: int | None = None
    ) -> None:
        """Releases it, once; what continues from the answers goes where these are cached."""
        with self._tracker.lock:
            if self._released:
                return
            self._released = True
            self._tracker.release(self.replica_id, self._request.num_samples, self._tokens)
            if answers:
                begun = self._version if version is None else version
                self._balancer._finish(self._request, self.replica_id, begun, answers)

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aexit__(self, *_: object) -> None:
        self.release()


# Attributes of a balancer that :meth:`LoadBalancer._build` makes anew for a copy.
_OF_ONE_PROCESS = {"_settings", "_index", "_chosen_by", "_last_resort", "_replicas", "_monitor"}
_OF_ONE_PROCESS |= {"sessions", "groups", "mean_output"}


class LoadBalancer:
    """Distributes requests over replicas; no decision costs an actor call.

    A session stays with the replica that served it last while that has the weights it had then, but
    moves when the KV cache there is more than 90 % full and others' would not be with all of it. A
    first request goes where its group is, unless that is overloaded. For all others strategies are
    asked in order, and the first that can decides; where none can, the fewest requests do. Names,
    arguments and results are those of TorchRL's ``LoadBalancer``.

    A service feeds its own ledger. For a list of actors with TorchRL's methods the balancer keeps
    one, with the ids ``"0"``, ``"1"``, ..., and asks them in the background until ``close``.

    Safe for threads and event loops. A pickled copy has an empty ledger and draws another seed.

    Example:
        >>> balancer = LoadBalancer(actors, ["prefix-aware", "requests"])
        >>> with balancer.reserve("Hello world") as reservation:
        ...     ray.get(actors[reservation.index].generate.remote("Hello world"))

    Args:
        actors_or_service: A service, or a list of actors.
        strategy: One name or several in fallback order: ``"prefix-aware"``, ``"requests"``,
            ``"kv-cache"``, ``"round-robin"``, or what ``register_strategy`` added. None means
            ``["prefix-aware", "requests"]``.
        prefix_length: Tokens in a KV-cache block of engines that do not report it; at least 1.
        overload_threshold: Multiple of the mean load, at least 1. What would make a replica hold
            more than that and one request goes elsewhere under ``"prefix-aware"`` and
            ``"kv-cache"``, and leaves its group of more than 8 samples.
        seed: Seeds ties.
        tracker: A ledger fed elsewhere, with one replica an actor, instead of the service's or own.
        monitor_interval_s: Seconds between two questions to each actor of a list. Figures older
            than 5 s, or 3 intervals if that is longer, count as unknown.
        max_sessions: Sessions, and groups, that are remembered, the most recently used ones.

    Raises:
        UnsupportedArgumentError: A setting is out of range, or there are no actors.
        UnknownStrategyError: A strategy's name is not registered.

    Attributes:
        strategies, strategy: Names of the strategies in fallback order, and the first of them.
    """

    def __init__(
        self,
        actors_or_service: Any,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
        *,
        seed: int = 0,
        tracker: LoadTracker | None = None,
        monitor_interval_s: float = 1.0,
        max_sessions: int = 65536,
    ) -> None:
        if strategy is None:
            strategy = ("prefix-aware", "requests")
        names = [strategy] if isinstance(strategy, str) else strategy
        if not isinstance(names, Collection) or not names:
            raise UnsupportedArgumentError(f"strategy must name at least one, got {strategy!r}")
        check_integer("prefix_length", prefix_length, 1)
        check_number("overload_threshold", overload_threshold, 1)
        check_positive("monitor_interval_s", monitor_interval_s)
        check_integer("seed", seed, 0)
        self.strategies = list(names)
        self.strategy = self.strategies[0]
        self._factories = {name: strategies.strategy_factory(name) for name in self.strategies}
        self.prefix_length, self.overload_threshold = prefix_length, overload_threshold
        self.seed, self._max_sessions = int(seed), max_sessions
        self._monitor_interval_s = monitor_interval_s
        service, is_list = actors_or_service, isinstance(actors_or_service, (list, tuple))
        if is_list:  # as good as a service, whose ledger is fed here unless another is given
            load = LoadTracker(map(str, range(len(service))), state=ReplicaState.SERVING)
            service = SimpleNamespace(actors=[*service], load=load)
        elif not all(hasattr(service, one) for one in ("actors", "load")):
            raise UnsupportedArgumentError(
                "actors_or_service must be a service with actors and load, or a list of actors, "
                f"got {service!r}"
            )
        self._service, self._tracker = service, tracker
        self._asks_actors = is_list and tracker is None
        num_actors = len(self.actors)
        if not num_actors:
            raise UnsupportedArgumentError("actors_or_service must have at least 1 actor, got none")
        if tracker is not None and len(tracker.replica_ids) != num_actors:
            raise UnsupportedArgumentError(
                f"tracker must have one replica for each of the {num_actors} actors, "
                f"got {tracker.replica_ids}"
            )
        self._build(first_turn=0, clock=self.load.clock)
        self._ready()

    @property
    def actors(self) -> list[Any]:
        """The current actors; ``select_actor`` returns positions in this list."""
        return self._service.actors

    @property
    def load(self) -> LoadTracker:
        """The ledger."""
        return self._service.load if self._tracker is None else self._tracker

    def select_actor(
        self, prompt: object = None, request_context: Mapping[str, Any] | None = None
    ) -> int:
        """Returns the position in ``actors`` of the actor to use for a request; reserves nothing.

        Args:
            prompt, request_context: As ``reserve``'s ``prompt`` and ``context``.
        """
        seen, salt = strategies.routing_prompt(prompt)
        request = strategies.RoutingRequest(seen, request_context, salt=salt)
        with (tracker := self._ready()).lock:
            chosen = self._choose(request, (), 0)[1]
            return tracker.positions[chosen.replica_id]

    def reserve(
        self,
        prompt: object = None,
        *,
        context: Mapping[str, Any] | None = None,
        exclude: Collection[str] = (),
        min_version: int = 0,
        session_id: RequestKey | None = None,
        group_id: RequestKey | None = None,
    ) -> Reservation:
        """Chooses a replica for a request and counts it there, in one step.

        Args:
            prompt: Text, token ids (list, tuple or 1-D integer array), or vLLM's ``TokensPrompt``
                or ``TextPrompt``. None if unknown.
            context: Passed on to the strategies.
            exclude: Ids of replicas not to use, such as one that has just lost this request.
            min_version: Use only replicas known to hold this policy version or a later one.
            session_id, group_id: Its conversation, and its group of requests with the same prompt.

        Returns:
            The reservation, which counts until it is released; use it in ``with``.

        Raises:
            InvalidPromptError: The prompt is empty or of a wrong type.
            NoReplicaAvailableError: No replica can take a request.
            UnsupportedArgumentError: Another argument is not what it must be.
            VersionNotReachedError: Some can, but none is known to hold ``min_version``.
        """
        session = None if session_id is None else as_key("session_id", session_id)
        group = None if group_id is None else as_key("group_id", group_id)
        seen, salt = strategies.routing_prompt(prompt)
        request = strategies.RoutingRequest(seen, context, session, group, salt)
        with self._ready().lock:
            return self._reserve(request, exclude, min_version)

    def reserve_batch(
        self,
        prompts: Sequence[object],
        *,
        context: Mapping[str, Any] | None = None,
        exclude: Collection[str] = (),
        min_version: int = 0,
        session_id: RequestKey | Sequence[RequestKey | None] | None = None,
        group_id: RequestKey | Sequence[RequestKey | None] | None = None,
        sampling_params: Sequence[Any] | None = None,
    ) -> list[Reservation]:
        """Reserves for every prompt of a batch in one step: for all of them, or for none.

        Arguments not listed here, results in order, and errors are those of :meth:`reserve`.

        Args:
            prompts: At least one.
            session_id, group_id: One for all prompts, or a list with one, or None, for each.
            sampling_params: For each prompt; None means one sample of unknown length.
        """
        is_one = isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sized)
        if is_one or not len(prompts):
            raise InvalidPromptError(f"prompts must be a sequence of prompts, got {prompts!r}")
        sessions = key_per_prompt("session_id", session_id, len(prompts))
        groups = key_per_prompt("group_id", group_id, len(prompts))
        requests: list[strategies.RoutingRequest] = []
        for prompt, session, group in zip(prompts, sessions, groups, strict=True):
            seen, salt = strategies.routing_prompt(prompt)
            requests.append(strategies.RoutingRequest(seen, context, session, group, salt))
        if sampling_params is not None:
            given = len(sampling_params) if isinstance(sampling_params, Sized) else sampling_params
            if given != len(requests):
                raise UnsupportedArgumentError(
                    f"sampling_params must be one for each of {len(requests)} prompts, got {given}"
                )
            for request, params in zip(requests, sampling_params, strict=True):
                request.num_samples, request.max_tokens = _sampled_as(params)
        num_coming = sum(request.num_samples for request in requests)
        reservations: list[Reservation] = []
        with self._ready().lock, ExitStack() as undo:
            for request in requests:
                request.num_coming = num_coming
                num_coming -= request.num_samples
                place = undo.enter_context(self._reserve(request, exclude, min_version))
                reservations.append(place)
            undo.pop_all()
        return reservations

    def release_sessions(self, session_ids: RequestKey | Iterable[RequestKey]) -> int:
        """Returns how many of the sessions, which are over, were known and are forgotten now.

        Args:
            session_ids: One, or several.

        Raises:
            UnsupportedArgumentError: One is neither an integer nor text that is not empty.
        """
        released = as_keys("session_ids", session_ids)
        with self._ready().lock:
            return self.sessions.release(released)

    def get_stats(self) -> dict[str, Any]:
        """Returns settings and counts of the balancer under TorchRL's keys; None is unknown."""
        tracker = self._ready()
        with tracker.lock:
            snapshots, now = tracker.snapshots(), tracker.clock()
            round_robin_index = self._turn(snapshots)
        return {
            "strategies": list(self.strategies),
            "primary_strategy": self.strategy,
            "num_actors": len(snapshots),
            "prefix_length": self.prefix_length,
            "overload_threshold": self.overload_threshold,
            "round_robin_index": round_robin_index,
            "actor_stats": [
                {"actor_index": index, **snapshot.as_stats(now)}
                for index, snapshot in enumerate(snapshots)
            ],
        }

    def close(self) -> None:
        """Stops asking the actors of a list; the balancer goes on with what it counts itself."""
        self._asks_actors = False
        if self._monitor is not None:
            self._monitor.stop()

    def _ready(self) -> LoadTracker:
        """Returns the ledger, with its monitor started, also in a copy or a forked child."""
        if self._asks_actors and self._monitor is not None:
            self._monitor.start()
        return self.load

    def _build(self, first_turn: int, clock: Callable[[], float]) -> None:
        """Makes what a copy does not take along."""
        settings = strategies.StrategySettings(
            overload_threshold=self.overload_threshold,
            max_report_age_s=max(5.0, 3 * self._monitor_interval_s),
            seed=self.seed,
            first_turn=first_turn,
            clock=clock,
            index=strategies.PrefixIndex(strategies.index_block_tokens(self.prefix_length)),
        )
        self._settings, self._index = settings, settings.index
        self._chosen_by = {name: factory(settings) for name, factory in self._factories.items()}
        self._last_resort = strategies.LeastRequests(settings)
        self.sessions, self.groups = KeyLedger(self._max_sessions), KeyLedger(self._max_sessions)
        self.mean_output: float | None = None  # tokens of an answer, the latest weighing most
        self._replicas: Candidates = ()  # whose caches are followed
        self._monitor: BareActorMonitor | None = None
        if self._asks_actors:
            self._monitor = BareActorMonitor(
                self.load, self._bare_replicas, interval_s=self._monitor_interval_s
            )

    def _bare_replicas(self) -> list[Replica]:
        return [Replica(str(index), actor) for index, actor in enumerate(self.actors)]

    def _choose(
        self, request: strategies.RoutingRequest, exclude: Collection[str], min_version: int
    ) -> tuple[Candidates, LoadSnapshot]:
        """Candidates, and the one to use. The ledger must be locked, as in all that follow."""
        self._sync(self.load.candidates())
        candidates = self.load.candidates_for(exclude, min_version)
        if request.session_id is not None and (session := self.sessions.get(request.session_id)):
            if here := _where(candidates, session):
                return candidates, self._with_session(request, candidates, here)
        elif request.group_id is not None and (group := self.groups.get(request.group_id)):
            here = _where(candidates, group)
            if here and self._may_join(request, candidates, here):
                return candidates, here
        return candidates, self._by_strategies(request, candidates)

    def _reserve(
        self, request: strategies.RoutingRequest, exclude: Collection[str], min_version: int
    ) -> Reservation:
        """Chooses, counts the tokens that the request will hold, and notes where it goes."""
        candidates, one = self._choose(request, exclude, min_version)
        num_tokens, name, version = request.num_tokens, one.replica_id, one.cache_version
        if request.session_id is not None:
            session = self.sessions.get(request.session_id)
            if session is None or session.replica_id != name or session.version < version:
                session = CachedAt(name, version)
            self.sessions.note(request.session_id, session)
        if request.group_id is not None:
            group = self.groups.get(request.group_id)
            # Not if it went past its group, which is overloaded, or stayed with its session.
            if group is None or _where(candidates, group) is None:
                group = CachedAt(name, version)
            self.groups.note(request.group_id, group)
        if (chain := request.known_chain) is not None:
            # What is cached is in use already, as a rule: by requests that begin alike.
            num_tokens = chain.num_tokens - self._index.cached_tokens(chain, name, version)
            self._index.insert(chain, name, version)
        expected = self.mean_output or 0.0
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        tracker, tokens = self.load, num_tokens + int(request.num_samples * expected)
        tracker.reserve(name, request.num_samples, tokens)
        return Reservation(name, tracker.positions[name], tracker, self, request, version, tokens)

    def _sync(self, replicas: Candidates) -> None:
        """Notes which replicas there are; the caches of those that left are forgotten."""
        if replicas is self._replicas:
            return
        now = {id(snapshot) for snapshot in replicas}
        for snapshot in self._replicas:
            if id(snapshot) not in now:  # it left, though another may have its id by now
                self._index.remove(snapshot.replica_id)
        for snapshot in replicas:
            if snapshot.block_size is not None:
                self._index.set_block_tokens(strategies.index_block_tokens(snapshot.block_size))
            if snapshot.kv_cache_tokens is not None:
                self._index.set_capacity(snapshot.replica_id, snapshot.kv_cache_tokens)
        self._replicas = replicas

    def _by_strategies(
        self, request: strategies.RoutingRequest, choices: Sequence[LoadSnapshot]
    ) -> LoadSnapshot:
        """Asks the strategies in order; where none decides, the fewest requests do."""
        for name, strategy in self._chosen_by.items():
            position = strategy.choose(request, choices)
            if position is None:
                continue
            is_integer = isinstance(position, (int, np.integer)) and not isinstance(position, bool)
            if not is_integer or not 0 <= position < len(choices):
                raise IndexError(
                    f"strategy {name!r} must choose one of {len(choices)} positions, "
                    f"got {position!r}"
                )
            return choices[position]
        return choices[self._last_resort.choose(request, choices)]

    def _turn(self, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position among all replicas whose turn is next; 0 if none, or without ``round-robin``."""
        admitting = [at for at, one in enumerate(snapshots) if one.state.admits_requests]
        for strategy in self._chosen_by.values():
            if isinstance(strategy, strategies.RoundRobin) and admitting:
                return admitting[strategy.peek([snapshots[at] for at in admitting])]
        return 0

    def _finish(
        self,
        request: strategies.RoutingRequest,
        replica_id: str,
        version: int,
        answers: Sequence[Sequence[int] | np.ndarray],
    ) -> None:
        """Learns from a request's answers: their length, and what is cached where."""
        for length in map(len, answers):
            mean = float(length) if self.mean_output is None else self.mean_output
            self.mean_output = mean + (length - mean) * _LATEST
        if request.session_id is not None:
            session = self.sessions.get(request.session_id)
            if session and session.replica_id == replica_id and session.version < version:
                self.sessions.note(request.session_id, CachedAt(replica_id, version))
        chain = request.known_chain
        if chain is None or chain.block_tokens != self._index.block_tokens:
            return
        if any(one.replica_id == replica_id for one in self._replicas):  # else it is not followed
            for answer in answers:
                self._index.insert(chain.followed_by(answer), replica_id, version)

    def _with_session(
        self, request: strategies.RoutingRequest, candidates: Candidates, here: LoadSnapshot
    ) -> LoadSnapshot:
        """The replica that has the request's session, or one that costs less."""
        now, max_age_s = self._settings.clock(), self._settings.max_report_age_s
        if here.kv_cache_tokens is None or here.has_room(0, now, max_age_s):
            return here
        tokens = request.num_tokens
        roomy = [one for one in candidates if one.has_room(tokens, now, max_age_s)]
        return self._by_strategies(request, roomy) if roomy else here

    def _may_join(
        self, request: strategies.RoutingRequest, candidates: Candidates, here: LoadSnapshot
    ) -> bool:
        """Whether the replica that has the request's group may take it."""
        loads = strategies.loads_of(candidates, self._settings)
        position = next(at for at, one in enumerate(candidates) if one is here)
        may_grow = loads[position] + request.num_samples <= _GROUP_SAMPLES
        return may_grow or position in strategies.not_overloaded(loads, request, self._settings)

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A service that holds this balancer may not be whole yet: leave it alone. A copied ledger
        # has the usual clock.
        self.__dict__.update(state)
        self._become_a_copy()

    def _become_a_copy(self) -> None:
        """Takes a seed and a first turn of its own, so that copies do not all choose alike."""
        self.seed = secrets.randbits(63)
        self._build(first_turn=self.seed, clock=time.monotonic)


def _sampled_as(params: Any) -> tuple[int, int | None]:
    """Number of samples and their length at most, as the ledger can count them."""
    n, max_tokens = (getattr(params, name, None) for name in ("n", "max_tokens"))
    if not isinstance(n, int) or n < 1 or not (max_tokens is None or max_tokens >= 0):
        raise UnsupportedArgumentError(
            "sampling_params must have n of at least 1 and max_tokens of at least 0 or None, "
            f"got n={n!r} and max_tokens={max_tokens!r}"
        )
    return n, max_tokens


def _where(candidates: Candidates, cached: CachedAt) -> LoadSnapshot | None:
    """The candidate that still has it cached; None if that is none, or has newer weights."""
    here = next((one for one in candidates if one.replica_id == cached.replica_id), None)
    return here if here and here.cache_version <= cached.version else None

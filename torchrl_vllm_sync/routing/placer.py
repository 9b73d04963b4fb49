"""Placement of requests: by session and group first, then by the strategies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from torchrl_vllm_sync.checks import check_integer, shown
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.routing import strategies
from torchrl_vllm_sync.routing.prefix_index import index_block_tokens

if TYPE_CHECKING:
    from torchrl_vllm_sync.routing.ledger import Candidates, LoadSnapshot

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


class RequestPlacer:
    """Places requests, and records what is known from them for later ones; the ledger is locked.

    A session stays with the replica that served it last while that has the weights it had then, but
    moves when the KV cache there is more than 90 % full and others' would not be with all of it. A
    first request goes where its group is, unless that is overloaded. All else is for strategies.
    """

    def __init__(
        self,
        factories: Mapping[str, strategies.StrategyFactory],
        settings: strategies.StrategySettings,
        max_sessions: int,
    ) -> None:
        self._settings, self._index = settings, settings.index
        self._strategies = {name: factory(settings) for name, factory in factories.items()}
        self._last_resort = strategies.LeastRequests(settings)
        self.sessions, self.groups = KeyLedger(max_sessions), KeyLedger(max_sessions)
        # Mean tokens of an answer, the latest weighing most.
        self.mean_output: float | None = None
        self._replicas: Candidates = ()

    def sync(self, replicas: Candidates) -> None:
        """Notes which replicas there are; the caches of those that left are forgotten."""
        if replicas is self._replicas:
            return
        now = {id(snapshot) for snapshot in replicas}
        for snapshot in self._replicas:
            if id(snapshot) not in now:  # it left, though another may have its id by now
                self._index.remove(snapshot.replica_id)
        for snapshot in replicas:
            if snapshot.block_size is not None:
                self._index.set_block_tokens(index_block_tokens(snapshot.block_size))
            if snapshot.kv_cache_tokens is not None:
                self._index.set_capacity(snapshot.replica_id, snapshot.kv_cache_tokens)
        self._replicas = replicas

    def choose(self, request: strategies.RoutingRequest, candidates: Candidates) -> LoadSnapshot:
        """The replica to use of ``candidates``, at least one."""
        if request.session_id is not None and (session := self.sessions.get(request.session_id)):
            if here := _where(candidates, session):
                return self._with_session(request, candidates, here)
        elif request.group_id is not None and (group := self.groups.get(request.group_id)):
            here = _where(candidates, group)
            if here and self._may_join(request, candidates, here):
                return here
        return self._by_strategies(request, candidates)

    def _by_strategies(
        self, request: strategies.RoutingRequest, choices: Sequence[LoadSnapshot]
    ) -> LoadSnapshot:
        """Asks the strategies in order; where none decides, the fewest requests do."""
        for name, strategy in self._strategies.items():
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

    def turn(self, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position among all replicas whose turn is next; 0 if none, or without ``round-robin``."""
        admitting = [at for at, one in enumerate(snapshots) if one.state.admits_requests]
        for strategy in self._strategies.values():
            if isinstance(strategy, strategies.RoundRobin) and admitting:
                return admitting[strategy.peek([snapshots[at] for at in admitting])]
        return 0

    def place(
        self, request: strategies.RoutingRequest, snapshot: LoadSnapshot, candidates: Candidates
    ) -> int:
        """Notes that a request goes to a replica; returns the tokens that it will hold there."""
        num_tokens, replica_id = request.num_tokens, snapshot.replica_id
        version = snapshot.cache_version
        if request.session_id is not None:
            session = self.sessions.get(request.session_id)
            if session is None or session.replica_id != replica_id or session.version < version:
                session = CachedAt(replica_id, version)
            self.sessions.note(request.session_id, session)
        if request.group_id is not None:
            group = self.groups.get(request.group_id)
            # Not if it went past its group, which is overloaded, or stayed with its session.
            if group is None or _where(candidates, group) is None:
                group = CachedAt(replica_id, version)
            self.groups.note(request.group_id, group)
        chain = request.known_chain
        if chain is not None:
            # What is cached is in use already, as a rule: by requests that begin alike.
            cached = self._index.cached_tokens(chain, replica_id, version)
            num_tokens = chain.num_tokens - cached
            self._index.insert(chain, replica_id, version)
        expected = self.mean_output or 0.0
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        return num_tokens + int(request.num_samples * expected)

    def finish(
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


def _where(candidates: Candidates, cached: CachedAt) -> LoadSnapshot | None:
    """The candidate that still has it cached; None if that is none, or has newer weights."""
    here = next((one for one in candidates if one.replica_id == cached.replica_id), None)
    return here if here and here.cache_version <= cached.version else None

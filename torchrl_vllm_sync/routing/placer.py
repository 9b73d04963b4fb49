"""Where a request goes: its keys first, then the strategies; and what is learned from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from torchrl_vllm_sync.checks import check_integer, shown
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.routing.prefix_index import index_block_tokens
from torchrl_vllm_sync.routing.strategies import StrategyChain, loads_of, not_overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.routing.ledger import Candidates, LoadSnapshot
    from torchrl_vllm_sync.routing.strategies import (
        RoutingRequest,
        StrategyFactory,
        StrategySettings,
    )


# Sessions and groups: the keys of requests, and the replicas that hold what they name.


RequestKey: TypeAlias = str | int
"""Names a session or a group; ``1`` and ``"1"`` are different keys."""

_CAPACITY = 65536


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
    """Checks one key that a caller names."""
    if type(key) is int or (isinstance(key, str) and key):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise UnsupportedArgumentError(
        f"{name} must be an integer or text that is not empty, got {shown(key)}"
    )


@dataclass(frozen=True, slots=True)
class Home:
    """Where a session or a group is.

    Attributes:
        replica_id: The replica that served it last.
        version: Weight version that it was served with; its cache is worth nothing under another.
    """

    replica_id: str
    version: int = 0


class SessionLedger:
    """Remembers where sessions and groups went last.

    A ledger is not locked: a balancer calls it while it holds the lock of its load tracker.

    Example:
        >>> ledger = SessionLedger()
        >>> ledger.put_session("chat 7", Home("0"))
        >>> ledger.session("chat 7").replica_id
        '0'
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        check_integer("max_sessions", capacity, 1)
        self._capacity = capacity
        self._sessions: OrderedDict[RequestKey, Home] = OrderedDict()
        self._groups: OrderedDict[RequestKey, Home] = OrderedDict()

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    def session(self, session_id: RequestKey) -> Home | None:
        """Where a session is; None if it is new."""
        return self._sessions.get(session_id)

    def group(self, group_id: RequestKey) -> Home | None:
        """Where a group is; None if it is new."""
        return self._groups.get(group_id)

    def put_session(self, session_id: RequestKey, home: Home) -> None:
        """Notes where a session is from now on; it counts as used."""
        self._put(self._sessions, session_id, home)

    def put_group(self, group_id: RequestKey, home: Home) -> None:
        """Notes where a group is from now on; it counts as used."""
        self._put(self._groups, group_id, home)

    def release(self, session_ids: Iterable[RequestKey]) -> int:
        """Forgets sessions that are over; returns how many of them were remembered."""
        return sum(self._sessions.pop(one, None) is not None for one in session_ids)

    def _put(self, homes: OrderedDict[RequestKey, Home], key: RequestKey, home: Home) -> None:
        homes[key] = home
        homes.move_to_end(key)
        if len(homes) > self._capacity:
            homes.popitem(last=False)


# A group stays together on a replica that holds fewer samples than this, however idle the others
# are: its prompt is computed once, and an engine with so few samples decodes as fast as with one.
_GROUP_SAMPLES = 8
# Weight of the latest answer in the mean length of answers.
_LATEST = 1 / 64


class RequestPlacer:
    """Places requests, and remembers what that tells about the next ones.

    A session stays with the replica that served it last, whose cache has it, while that one is a
    candidate and has the weights that it had then. It moves when that one's KV cache is more than
    90 % full and others' would not be with all of it: these have less to do by more tokens than
    there are to compute anew, so a move costs less than to wait. The strategies choose among these.

    What begins, a session's first request or one without a session, goes where its group is while
    that replica is not overloaded. Everything else is for the strategies: also a session whose
    replica died, drains, went stale or got other weights, for then it is cached nowhere.

    Not safe for threads; a balancer uses it with its ledger locked.

    Attributes:
        chain: The strategies.
        sessions: The ledger of sessions and groups.
        mean_output: Mean tokens of an answer, the latest weighing most; None before the first.
    """

    def __init__(
        self,
        factories: Mapping[str, StrategyFactory],
        settings: StrategySettings,
        max_sessions: int,
    ) -> None:
        self._settings, self._index = settings, settings.index
        self.chain = StrategyChain(factories, settings)
        self.sessions = SessionLedger(max_sessions)
        self.mean_output: float | None = None
        self._replicas: Candidates | None = None

    def sync(self, replicas: Candidates) -> None:
        """Notes which replicas there are; the caches of those that left are forgotten."""
        if replicas is self._replicas:
            return
        now = {id(snapshot) for snapshot in replicas.snapshots}
        for snapshot in () if self._replicas is None else self._replicas.snapshots:
            if id(snapshot) not in now:  # it left, though another may have its id by now
                self._index.remove(snapshot.replica_id)
        for snapshot in replicas.snapshots:
            if snapshot.block_size is not None:
                self._index.set_block_tokens(index_block_tokens(snapshot.block_size))
            if snapshot.kv_cache_tokens is not None:
                self._index.set_capacity(snapshot.replica_id, snapshot.kv_cache_tokens)
        self._replicas = replicas

    def choose(self, request: RoutingRequest, candidates: Candidates) -> int:
        """Position among ``candidates`` of the replica to use; at least one is there."""
        home = None
        if request.session_id is not None:
            home = self.sessions.session(request.session_id)
            if home is not None:
                position = _where(candidates, home)
                if position is not None:
                    return self._with_session(request, candidates, position)
        if request.group_id is not None and home is None:
            position = self._with_group(request, candidates)
            if position is not None:
                return position
        return self.chain.choose(request, candidates.snapshots)

    def place(self, request: RoutingRequest, snapshot: LoadSnapshot, candidates: Candidates) -> int:
        """Takes note that a request goes to a replica."""
        num_tokens, replica_id = request.num_tokens, snapshot.replica_id
        if request.session_id is not None:
            home = self.sessions.session(request.session_id)
            version = snapshot.cache_version
            if home is None or home.replica_id != replica_id or home.version < version:
                home = Home(replica_id, version)
            self.sessions.put_session(request.session_id, home)
        if request.group_id is not None:
            home = self.sessions.group(request.group_id)
            # Not if it went past its group, which is overloaded, or stayed with its session.
            if home is None or _where(candidates, home) is None:
                home = Home(replica_id, snapshot.cache_version)
            self.sessions.put_group(request.group_id, home)
        chain = request.known_chain
        if chain is not None:
            # What is cached is in use already, as a rule: by requests that begin alike.
            cached = self._index.cached_tokens(chain, replica_id, snapshot.cache_version)
            num_tokens = chain.num_tokens - cached
            self._index.insert(chain, replica_id, snapshot.cache_version)
        expected = self.mean_output
        if expected is None:
            return num_tokens
        if request.max_tokens is not None and request.max_tokens < expected:
            expected = request.max_tokens
        return num_tokens + int(request.num_samples * expected)

    def finish(
        self,
        request: RoutingRequest,
        replica_id: str,
        version: int,
        answers: Sequence[Sequence[int] | np.ndarray],
    ) -> None:
        """Takes note of a request's answers."""
        for answer in answers:
            length = len(answer)
            if self.mean_output is None:
                self.mean_output = float(length)
            else:
                self.mean_output += (length - self.mean_output) * _LATEST
        if request.session_id is not None:
            home = self.sessions.session(request.session_id)
            if home is not None and home.replica_id == replica_id and home.version < version:
                self.sessions.put_session(request.session_id, Home(replica_id, version))
        chain = request.known_chain
        if chain is not None and self._remembers(replica_id, chain.block_tokens):
            for answer in answers:
                self._index.insert(chain.followed_by(answer), replica_id, version)

    def _remembers(self, replica_id: str, block_tokens: int) -> bool:
        """Whether the index follows this replica, in blocks of this size, as when it was asked."""
        there = self._replicas is not None and replica_id in self._replicas.positions
        return there and block_tokens == self._index.block_tokens

    def _with_session(self, request: RoutingRequest, candidates: Candidates, position: int) -> int:
        """Position of the replica that has the request's session, or of one that costs less."""
        snapshots = candidates.snapshots
        here = snapshots[position]
        now, max_age_s = self._settings.clock(), self._settings.max_report_age_s
        if here.kv_cache_tokens is None or here.has_room(0, now, max_age_s):
            return position
        tokens = request.num_tokens
        roomy = [at for at, one in enumerate(snapshots) if one.has_room(tokens, now, max_age_s)]
        if not roomy:
            return position
        return roomy[self.chain.choose(request, [snapshots[at] for at in roomy])]

    def _with_group(self, request: RoutingRequest, candidates: Candidates) -> int | None:
        """Position of the replica that has the request's group; None if there is none."""
        assert request.group_id is not None, "the caller has looked"
        home = self.sessions.group(request.group_id)
        position = None if home is None else _where(candidates, home)
        if position is None:
            return None
        loads = loads_of(candidates.snapshots, self._settings)
        if loads[position] + request.num_samples <= _GROUP_SAMPLES:
            return position
        return position if position in not_overloaded(loads, request, self._settings) else None


def _where(candidates: Candidates, home: Home) -> int | None:
    """Position of the candidate that has what ``home`` says in its cache; None if there is none."""
    position = candidates.positions.get(home.replica_id)
    if position is None or candidates.snapshots[position].cache_version > home.version:
        return None  # it is no candidate, or has newer weights than then
    return position

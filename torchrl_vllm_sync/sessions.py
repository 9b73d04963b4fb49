"""Sessions and groups: which replica holds the conversation, or the prompt, of a keyed request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.routing.strategies import affinity, not_overloaded

if TYPE_CHECKING:
    from torchrl_vllm_sync.load import LoadSnapshot
    from torchrl_vllm_sync.routing import StrategySettings

__all__ = ["RequestKey", "SessionLedger", "as_keys", "key_per_prompt"]

RequestKey: TypeAlias = str | int
"""Names a session or a group; ``1`` and ``"1"`` are different keys."""

_CAPACITY = 65536


def key_per_prompt(
    name: str, given: RequestKey | Sequence[RequestKey | None] | None, num_prompts: int
) -> list[RequestKey | None]:
    """Checks what a caller passed as ``session_id`` or ``group_id`` and spreads it over prompts.

    Args:
        name: The argument's name, for the message.
        given: One key for all prompts; a list or tuple with one for each, where ``None`` means
            that this prompt has none; or ``None``.
        num_prompts: Length of the result.

    Raises:
        UnsupportedArgumentError: A key is neither an integer nor text with at least one character,
            or there is not one for each prompt.
    """
    if given is None:
        return [None] * num_prompts
    if not isinstance(given, (list, tuple)):
        return [_as_key(name, given)] * num_prompts
    if len(given) != num_prompts:
        raise UnsupportedArgumentError(
            f"{name} must be one key, or a list with one for each of {num_prompts} prompts, "
            f"got {len(given)}"
        )
    return [None if one is None else _as_key(name, one) for one in given]


def as_keys(name: str, given: RequestKey | Iterable[RequestKey]) -> list[RequestKey]:
    """Checks one key, or several, that a caller names.

    Raises:
        UnsupportedArgumentError: A key is neither an integer nor text with at least one character.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    return [_as_key(name, one) for one in given]


def _as_key(name: str, key: object) -> RequestKey:
    if isinstance(key, str) and key:
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise UnsupportedArgumentError(
        f"{name} must be an integer or text that is not empty, got {key!r}"
    )


class SessionLedger:
    """Remembers where sessions and groups went, and says where their next request goes.

    A session stays with the replica that served it last while that one is a candidate: its prefix
    cache holds the conversation. A session without such a replica, because it is new or its replica
    died, drains or went stale, goes where its group is while that replica is not overloaded (the
    bound is that of ``"prefix-aware"``), and else to the least loaded replica. Equal loads are
    decided by a stable hash of the group's or session's key, so that processes with ledgers of
    their own agree on where a new session goes while they see equal loads.

    A ledger is not locked: a balancer calls it while it holds the lock of its load tracker.

    Example:
        >>> ledger = SessionLedger()
        >>> at = ledger.choose("chat 7", None, snapshots, settings)
        >>> ledger.record("chat 7", None, snapshots[at].replica_id)

    Args:
        capacity: Sessions, and groups, remembered; of each the least recently used are forgotten.

    Raises:
        UnsupportedArgumentError: ``capacity`` is less than 1.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        if capacity < 1:
            raise UnsupportedArgumentError(f"max_sessions must be at least 1, got {capacity}")
        self._capacity = capacity
        self._sessions: OrderedDict[RequestKey, str] = OrderedDict()
        self._groups: OrderedDict[RequestKey, str] = OrderedDict()

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    def choose(
        self,
        session_id: RequestKey | None,
        group_id: RequestKey | None,
        snapshots: Sequence[LoadSnapshot],
        settings: StrategySettings,
    ) -> int:
        """Position in ``snapshots`` of the replica for a request with at least one key.

        Args:
            session_id: The request's session, if it has one.
            group_id: The request's group, if it has one.
            snapshots: Replicas that may take it, at least one.
            settings: The bound of load, and the age at which reports stop counting.
        """
        home = None if session_id is None else self._sessions.get(session_id)
        if home is not None:
            for position, snapshot in enumerate(snapshots):
                if snapshot.replica_id == home:
                    return position
        group_home = None if group_id is None else self._groups.get(group_id)
        if group_home is not None:
            for position in not_overloaded(snapshots, settings):
                if snapshots[position].replica_id == group_home:
                    return position
        now, max_age_s = time.monotonic(), settings.max_report_age_s
        key = _as_bytes(session_id if group_id is None else group_id)
        return min(
            range(len(snapshots)),
            key=lambda at: (
                snapshots[at].load(now, max_age_s),
                -affinity(key, snapshots[at].replica_id),
            ),
        )

    def record(
        self,
        session_id: RequestKey | None,
        group_id: RequestKey | None,
        replica_id: str,
        *,
        candidates: Iterable[str] = (),
    ) -> None:
        """Notes that a request was sent to ``replica_id``.

        Args:
            session_id: Its session, which is there from now on.
            group_id: Its group. One that is still at one of ``candidates`` stays there: this
                request went past it because it was overloaded, or belongs to an older session.
            replica_id: Where it went.
            candidates: Ids of the replicas that could have taken it.
        """
        if session_id is not None:
            self._remember(self._sessions, session_id, replica_id)
        if group_id is not None:
            home = self._groups.get(group_id)
            if home is None or home not in candidates:
                home = replica_id
            self._remember(self._groups, group_id, home)

    def release(self, session_ids: Iterable[RequestKey]) -> int:
        """Forgets sessions that are over; returns how many of them were remembered."""
        return sum(self._sessions.pop(one, None) is not None for one in session_ids)

    def _remember(
        self, homes: OrderedDict[RequestKey, str], key: RequestKey, replica_id: str
    ) -> None:
        homes[key] = replica_id
        homes.move_to_end(key)
        if len(homes) > self._capacity:
            homes.popitem(last=False)


def _as_bytes(key: RequestKey | None) -> bytes:
    """Bytes of a key that are the same in every process, and other for ``1`` than for ``"1"``."""
    return repr(key).encode("utf-8", "surrogatepass")

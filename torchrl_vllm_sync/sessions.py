"""Sessions and groups: the keys of requests, and the replicas that hold what they name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from torchrl_vllm_sync.checks import check_integer, shown
from torchrl_vllm_sync.errors import UnsupportedArgumentError

__all__ = ["Home", "RequestKey", "SessionLedger", "as_key", "as_keys", "key_per_prompt"]

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
        return [as_key(name, given)] * num_prompts
    if len(given) != num_prompts:
        raise UnsupportedArgumentError(
            f"{name} must be one key, or a list with one for each of {num_prompts} prompts, "
            f"got {len(given)}"
        )
    return [None if one is None else as_key(name, one) for one in given]


def as_keys(name: str, given: RequestKey | Iterable[RequestKey]) -> list[RequestKey]:
    """Checks one key, or several, that a caller names.

    Raises:
        UnsupportedArgumentError: A key is neither an integer nor text with at least one character.
    """
    no_sequence = (str, bytes, bytearray, memoryview)
    if isinstance(given, no_sequence) or not isinstance(given, Iterable):
        return [as_key(name, given)]
    return [as_key(name, one) for one in given]


def as_key(name: str, key: object) -> RequestKey:
    """Checks one key that a caller names.

    Raises:
        UnsupportedArgumentError: It is neither an integer nor text with at least one character.
    """
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

    Args:
        capacity: Sessions, and groups, remembered; of each the least recently used are forgotten.

    Raises:
        UnsupportedArgumentError: ``capacity`` is no integer of at least 1.
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

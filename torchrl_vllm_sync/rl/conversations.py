"""Which conversation a row belongs to, and its last turn, for the next one to begin with it.

The rows themselves carry that from one call of the policy to the next, as TorchRL's environments
leave the entries of a policy in place.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from tensordict import NestedKey, TensorDictBase

from torchrl_vllm_sync.requests.turns import Turn
from torchrl_vllm_sync.rl import rows as keys

# Where TorchRL's collectors and its TrajCounter write the number of a row's trajectory.
TRAJECTORY_KEYS: tuple[NestedKey, ...] = (("collector", "traj_ids"), "traj_ids", "traj_count")
# Where AsyncEnvPool writes which of its environments a row is of.
ENVIRONMENT_KEYS: tuple[NestedKey, ...] = ("env_index",)
_CAPACITY = 16384


class Conversation(NamedTuple):
    """The conversation that one row of a policy call belongs to."""

    session_id: str  # the same at every turn
    group_id: str  # of all that began with the same prompt; the same in every process


class ConversationFinder:
    """Finds the conversations of a policy's rows, turn by turn; thread-safe.

    A trajectory's number names its conversation, in a pool with its environment's. A row without a
    number continues that whose last prompt and answer its prompt begins with, message by message,
    where equal siblings are told apart by counting. Other rows begin a conversation.

    Rows are also places: an environment's index in a pool, or else the position in the batch. What
    begins in a place ends the conversation there. A pickled copy begins anew, with its own names.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._name = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Least recently continued first, each with the ends at which it may go on.
        self._known: OrderedDict[str, tuple[Conversation, list[int]]] = OrderedDict()
        self._waiting: dict[int, deque[str]] = {}  # sessions by what was said up to their ends
        self._places: OrderedDict[object, str] = OrderedDict()
        self._ended: list[str] = []

    def __reduce__(self) -> tuple[type[ConversationFinder], tuple[int]]:
        return type(self), (self._capacity,)

    def find(
        self,
        rows: TensorDictBase,
        prompts: Sequence[Sequence[str | bytes]],
        *,
        by_content: bool = True,
        by_position: bool = True,
    ) -> list[Conversation] | None:
        """Returns the conversation of each row; ``None`` if nothing identifies them."""
        numbers, environments = _numbers(rows, TRAJECTORY_KEYS), _numbers(rows, ENVIRONMENT_KEYS)
        if numbers is None and not by_content:
            return None
        found: list[Conversation] = []
        over: list[str] = []
        with self._lock:
            for at, prompt in enumerate(prompts):
                digests = list(_digests(prompt))
                environment = None if environments is None else environments[at]
                end = None
                if numbers is not None:
                    name = f"{self._name}:{environment}.{numbers[at]}"
                else:
                    end = next((one for one in reversed(digests) if one in self._waiting), None)
                    fresh = f"{self._name}-{next(self._numbers)}"
                    name = fresh if end is None else self._waiting[end][0]
                known = self._go_on(name, end)
                one = known or self._begin(name, prompt)
                place = ("row", len(prompts), at) if environment is None else ("pool", environment)
                if by_position or environment is not None:
                    before = self._places.pop(place, None)
                    self._places[place] = one.session_id
                    if len(self._places) > self._capacity:
                        self._places.popitem(last=False)
                    if known is None and before is not None:
                        over.append(before)
                found.append(one)
            for session_id in {*over}.difference(one.session_id for one in found):
                self._forget(session_id)
        return found

    def answered(
        self, conversations: Sequence[Conversation], said: Sequence[Sequence[str | bytes]]
    ) -> None:
        """Notes what was said up to and with the answers, so that the next turns are recognised."""
        each = len(said) // len(conversations)
        with self._lock:
            for at, messages in enumerate(said):
                session_id = conversations[at // each].session_id
                if session_id in self._known:  # not if another call has pushed it out
                    *_, end = _digests(messages)
                    self._known[session_id][1].append(end)
                    self._waiting.setdefault(end, deque()).append(session_id)

    def ended(self) -> list[str]:
        """Returns the sessions that ended since the last call of this method."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _go_on(self, session_id: str, end: int | None) -> Conversation | None:
        """The conversation, which goes on from this end, or from all that it has."""
        if session_id not in self._known:
            return None
        self._known.move_to_end(session_id)
        one, ends = self._known[session_id]
        for each in [*ends] if end is None else [end]:
            ends.remove(each)
            self._unwait(session_id, each)
        return one

    def _begin(self, session_id: str, prompt: Sequence[str | bytes]) -> Conversation:
        one = Conversation(session_id, group_name(prompt))
        self._known[session_id] = one, []
        if len(self._known) > self._capacity:
            self._forget(next(iter(self._known)))
        return one

    def _forget(self, session_id: str) -> None:
        if session_id in self._known:
            for end in self._known.pop(session_id)[1]:
                self._unwait(session_id, end)
            self._ended.append(session_id)

    def _unwait(self, session_id: str, end: int) -> None:
        waiting = self._waiting[end]
        waiting.remove(session_id)
        if not waiting:
            del self._waiting[end]


def _digests(messages: Sequence[str | bytes]) -> Iterator[int]:
    """Digest of what was said up to each message, the same in every process."""
    digest = xxhash.xxh3_64()
    for message in messages:
        data = message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        yield digest.intdigest()


def group_name(prompt: Sequence[str | bytes]) -> str:
    """Of all that begin with the same prompt; 0 is where nothing was said."""
    *_, digest = 0, *_digests(prompt)
    return f"prompt-{digest:016x}"


def said_in(chat: Sequence[dict[str, Any]]) -> list[str]:
    """The messages of a chat, each with who said it."""
    return [f"{one['role']}:{one['content']}" for one in chat]


def _numbers(rows: TensorDictBase, names: Sequence[NestedKey]) -> list[int] | None:
    """The first of ``names`` that holds one number a row, however they are nested."""
    for name in names:
        entry: Any = rows.get(name, None)
        if entry is not None:
            flat = np.ravel(entry.tolist() if hasattr(entry, "tolist") else entry).tolist()
            if len(flat) == rows.numel():
                return flat
    return None


def carried(rows: TensorDictBase, text: Any, tokens: Any, masks: Any) -> list[Turn | None]:
    """The last turn of each row, perhaps of a conversation that has ended; ``None`` without one."""

    def turn(row: TensorDictBase) -> Turn | None:
        if (number := row.get(keys.NUM_MESSAGES, None)) is None:
            return None
        ids = row[tokens, "full"][row[masks, "all_attention_mask"]]
        return Turn(int(number), row[text, "prompt"], row[text, "response"], ids.tolist())

    return [turn(row) for row in rows.unbind(0)] if rows.ndim == 1 else [None] * len(rows)


def stamps(*columns: Sequence[int]) -> dict[str, torch.Tensor]:
    """The entry of rows: messages, tokens kept, and whether it forked, a value for each row."""
    names = keys.NUM_MESSAGES, keys.KEPT, keys.FORKED
    return {name[-1]: torch.tensor(one) for name, one in zip(names, columns, strict=True)}

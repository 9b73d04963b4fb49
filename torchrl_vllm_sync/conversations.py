"""Which conversation each row of a policy call belongs to, from what TorchRL's data tell."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensordict import TensorDictBase
    from tensordict.utils import NestedKey

__all__ = ["Conversation", "ConversationFinder"]

# Where TorchRL's collectors and its TrajCounter write the number of a row's trajectory.
TRAJECTORY_KEYS: tuple[NestedKey, ...] = (("collector", "traj_ids"), "traj_ids", "traj_count")
# Where AsyncEnvPool writes which of its environments a row is of.
ENVIRONMENT_KEY = "env_index"
_CAPACITY = 16384


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that one row of a policy call belongs to.

    Attributes:
        session_id: Its own name, the same at every turn.
        group_id: The name of all conversations that began with the same prompt, the samples of one
            GRPO group among them; the same in every process.
    """

    session_id: str
    group_id: str


class ConversationFinder:
    """Finds the conversations of a policy's rows, turn by turn.

    A trajectory's number names its conversation, together with the number of its environment where
    there is a pool of them, each of which counts for itself. Where the data have no number, a row
    belongs to the conversation that it continues: its prompt begins with what an earlier call's
    prompt and answer were together, message by message. Siblings that said the same so far are told
    apart by counting them. A row that continues nothing begins a conversation.

    Rows are also places: an environment's index in a pool, or else the position in the batch. Where
    a conversation begins in a place, the one that was there before is over.

    Safe to call from any thread. A pickled copy begins anew, with session names of its own.

    Args:
        capacity: Conversations remembered; the least recently continued are forgotten, and count
            as over.
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
        """Returns the conversation of each row; ``None`` if nothing tells.

        Args:
            rows: The policy's input, of one dimension.
            prompts: For each row what was said so far, message by message.
            by_content: Whether ``answered`` is told what is said, so that rows without a number can
                be recognised.
            by_position: Whether a row's position in the batch means anything.
        """
        numbers, environments = _trajectories(rows), _environments(rows)
        if numbers is None and not by_content:
            return None
        found: list[Conversation] = []
        over: list[str] = []
        with self._lock:
            for at, prompt in enumerate(prompts):
                digests = list(_digests(prompt))
                environment = None if environments is None else environments[at]
                if numbers is None:
                    one = self._continued(digests)
                    name = f"{self._name}-{next(self._numbers)}" if one is None else ""
                else:
                    name = f"{self._name}:{environment}.{numbers[at]}"
                    one = self._named(name)
                place = ("row", len(prompts), at) if environment is None else ("pool", environment)
                begins = one is None
                if one is None:
                    one = self._begin(name, digests)
                if by_position or environment is not None:
                    before = self._settle(place, one.session_id)
                    if begins and before is not None:
                        over.append(before)
                found.append(one)
            for session_id in {*over}.difference(one.session_id for one in found):
                self._forget(session_id)
        return found

    def answered(
        self, conversations: Sequence[Conversation], said: Sequence[Sequence[str | bytes]]
    ) -> None:
        """Notes what was said up to and with the answers, so that the next turns are recognised.

        Args:
            conversations: What ``find`` returned.
            said: One entry for each, message by message; several in a row for each where a prompt
                had several answers.
        """
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

    def _continued(self, digests: list[int]) -> Conversation | None:
        for digest in reversed(digests):
            if digest in self._waiting:
                session_id = self._waiting[digest][0]
                self._known.move_to_end(session_id)
                one, ends = self._known[session_id]
                ends.remove(digest)
                self._unwait(session_id, digest)
                return one
        return None

    def _named(self, session_id: str) -> Conversation | None:
        if session_id not in self._known:
            return None
        self._known.move_to_end(session_id)
        one, ends = self._known[session_id]
        while ends:
            self._unwait(session_id, ends.pop())
        return one

    def _begin(self, session_id: str, digests: list[int]) -> Conversation:
        start = digests[-1] if digests else 0  # nothing was said yet
        one = Conversation(session_id, f"prompt-{start:016x}")
        self._known[session_id] = one, []
        if len(self._known) > self._capacity:
            self._forget(next(iter(self._known)))
        return one

    def _settle(self, place: object, session_id: str) -> str | None:
        """Puts a conversation in its place; returns the one that was there before."""
        before = self._places.pop(place, None)
        self._places[place] = session_id
        if len(self._places) > self._capacity:
            self._places.popitem(last=False)
        return before

    def _forget(self, session_id: str) -> None:
        known = self._known.pop(session_id, None)
        if known is not None:
            for end in known[1]:
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


def _trajectories(rows: TensorDictBase) -> list[int] | None:
    """Number of each row's trajectory; ``None`` if the data have none."""
    for key in TRAJECTORY_KEYS:
        numbers = rows.get(key, None)
        if isinstance(numbers, torch.Tensor) and numbers.numel() == rows.numel():
            return numbers.flatten().tolist()
    return None


def _environments(rows: TensorDictBase) -> list[int] | None:
    """Index of each row's environment; ``None`` outside a pool."""
    given: Any = rows.get(ENVIRONMENT_KEY, None)
    if isinstance(given, (NonTensorData, NonTensorStack)):
        given = given.tolist()
    elif isinstance(given, torch.Tensor):
        given = given.flatten().tolist()
    if not isinstance(given, list):
        return None
    flat = list(_flat(given))
    return flat if len(flat) == rows.numel() else None


def _flat(nested: list[Any]) -> Iterator[Any]:
    for one in nested:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one

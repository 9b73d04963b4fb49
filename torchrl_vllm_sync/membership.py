"""Which replicas a service has, as one process knows it."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrl_vllm_sync.replica import EngineDescription

__all__ = ["Member", "Membership"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of a service.

    Attributes:
        replica: Its id and actor.
        description: What does not change while its actor lives.
        group: Placement group that holds its resources; ``None`` where it claims none.
        joined: Whether it may be called. It may not from its actor's end until another has taken
            that one's place.
        num_restarts: How often its actor was replaced.
    """

    replica: Replica
    description: EngineDescription
    group: Any = None
    joined: bool = True
    num_restarts: int = 0

    @property
    def replica_id(self) -> str:
        """Stable id of the replica."""
        return self.replica.replica_id


class Membership:
    """The replicas of a service, in the order of their joining. Safe for threads.

    A restarted replica keeps its id and its place in the order. A pickled copy has the same
    members, and goes its own way from then on.

    Args:
        members: The first ones.
        next_id: Number for the id of the next new replica; by default what follows theirs.
        epoch: Number of changes so far.
    """

    def __init__(
        self, members: Iterable[Member] = (), *, next_id: int | None = None, epoch: int = 0
    ) -> None:
        self._lock = threading.Lock()
        self._members = {one.replica_id: one for one in members}
        self._next_id = 1 + max(map(int, self._members), default=-1) if next_id is None else next_id
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        """Number of changes since the service was launched; tells whose knowledge is newer."""
        return self._epoch

    @property
    def members(self) -> list[Member]:
        """All of them, in order."""
        with self._lock:
            return list(self._members.values())

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, in order; the actor of one that is being restarted may be dead."""
        return [one.replica for one in self.members]

    @property
    def joined(self) -> list[Replica]:
        """The replicas that may be called, in order."""
        return [one.replica for one in self.members if one.joined]

    def find(self, replica_id: str) -> Member | None:
        """Returns a member, or ``None`` if there is none of this id."""
        with self._lock:
            return self._members.get(replica_id)

    def new_id(self) -> str:
        """Returns an id that no replica of the service ever had."""
        with self._lock:
            self._next_id += 1
            return str(self._next_id - 1)

    def put(self, member: Member) -> None:
        """Adds a member, or replaces the one of its id, which keeps its place in the order."""
        with self._lock:
            self._members[member.replica_id] = member
            self._next_id = max(self._next_id, 1 + int(member.replica_id))
            self._epoch += 1

    def suspend(self, replica_id: str) -> Member:
        """Says that a member may not be called until another is put in its place.

        Raises:
            KeyError: There is none of this id.
        """
        with self._lock:
            member = self._members[replica_id]
            self._members[replica_id] = dataclasses.replace(member, joined=False)
            self._epoch += 1
            return member

    def remove(self, replica_id: str) -> Member:
        """Takes a member out, and returns it.

        Raises:
            KeyError: There is none of this id.
        """
        with self._lock:
            member = self._members.pop(replica_id)
            self._epoch += 1
            return member

    def follow(self, newer: Membership) -> None:
        """Takes over what another process knows."""
        members, next_id, epoch = newer.members, newer._next_id, newer._epoch
        with self._lock:
            self._members = {one.replica_id: one for one in members}
            self._next_id, self._epoch = next_id, epoch

    def of(self, members: Iterable[Member]) -> Membership:
        """Returns a copy that is as new, with these members instead."""
        return Membership(members, next_id=self._next_id, epoch=self._epoch)

    def without_actors(self) -> Membership:
        """Returns a copy without actor handles, which an actor may keep of its own service."""
        return self.of(
            dataclasses.replace(one, replica=Replica(one.replica_id, None)) for one in self.members
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "next_id": self._next_id, "epoch": self._epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

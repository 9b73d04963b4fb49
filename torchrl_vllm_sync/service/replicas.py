"""Which replicas a service has, as one process knows it, and calling all of them at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.ray_errors import loss
from torchrl_vllm_sync.replica import Member, Replica, ReplicaState
from torchrl_vllm_sync.weights.transport import Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torchrl_vllm_sync.errors import ReplicaUnavailableError
    from torchrl_vllm_sync.routing.ledger import LoadTracker


class Membership:
    """The replicas of a service, in the order of their joining. Safe for threads.

    A restarted replica keeps its id and its place in the order. A pickled copy has the same
    members, and goes its own way from then on.
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
        """Says that a member may not be called until another is put in its place."""
        with self._lock:
            member = self._members[replica_id]
            self._members[replica_id] = dataclasses.replace(member, joined=False)
            self._epoch += 1
            return member

    def remove(self, replica_id: str) -> Member:
        """Takes a member out, and returns it."""
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


# One call to several replicas at once, and what each of them ends with.


class ReplicaCalls:
    """Calls under way."""

    def __init__(
        self, refs: Mapping[str, Any], on_death: Callable[[ReplicaUnavailableError], None]
    ) -> None:
        self._refs, self._on_death = dict(refs), on_death

    def failures(self) -> dict[str, BaseException]:
        """Returns those that have ended with an exception by now, without waiting."""
        if not self._refs:
            return {}
        ready, _ = ray.wait(list(self._refs.values()), num_returns=len(self._refs), timeout=0)
        answers = {name: self._answer(name) for name, ref in self._refs.items() if ref in ready}
        return {name: one for name, one in answers.items() if isinstance(one, BaseException)}

    def answers(self, deadline_s: float) -> dict[str, Any]:
        """Waits for all of them."""
        if not self._refs:
            return {}
        ready, _ = ray.wait(
            list(self._refs.values()), num_returns=len(self._refs), timeout=deadline_s
        )
        return {
            name: self._answer(name)
            if ref in ready
            else TimeoutError(f"no answer within {deadline_s:g} s")
            for name, ref in self._refs.items()
        }

    def first_answer(self, deadline_s: float) -> Any:
        """Waits for one of them to succeed."""
        deadline = time.monotonic() + deadline_s
        names = {ref: name for name, ref in self._refs.items()}
        left = list(names)
        while left:
            ready, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            answer = self._answer(names[ready[0]])
            if not isinstance(answer, BaseException):
                return answer
        return None

    def _answer(self, replica_id: str) -> Any:
        try:
            return ray.get(self._refs[replica_id])
        except RayTaskError as error:
            return error.cause
        except RayError as error:
            lost = loss(replica_id, error)
            if lost is None:
                return error
            self._on_death(lost)
            return lost


# A service's replicas, and calling all of them at once.


RPC_TIMEOUT_S = 60.0
FIGURE_TIMEOUT_S = 10.0


class ServiceReplicas:
    """The part of a service that knows its replicas.

    Attributes:
        name: Name of the service.
        load: This process's ledger of requests in flight and of the engines' reports.
    """

    name: str
    load: LoadTracker
    _membership: Membership | None

    @property
    def actors(self) -> list[Any]:
        """Ray actor handles of the current replicas; empty when the service is not launched.

        The actor of a replica that is being restarted is the former one, which is dead.
        """
        return [one.actor for one in self.replicas]

    @property
    def replicas(self) -> list[Replica]:
        """The current replicas, in the order of their joining."""
        return [] if self._membership is None else self._membership.replicas

    @property
    def service_name(self) -> str:
        """The same as ``name``."""
        return self.name

    @property
    def _launched(self) -> bool:
        return self._membership is not None

    def _current_replicas(self) -> list[Replica]:
        """The replicas that may be called: all but those that are being restarted."""
        return [] if self._membership is None else self._membership.joined

    def call_replicas(
        self, method: str, *args: Any, deadline_s: float = RPC_TIMEOUT_S, **kwargs: Any
    ) -> dict[str, Any]:
        """Calls an engine actor's method on every replica at once.

        Args:
            method: Name of a method of ``EngineActor``.
            *args: Its arguments.
            deadline_s: Seconds to wait for all of them.
            **kwargs: Its keyword arguments.

        Returns:
            Replica id to the answer, or to the exception with which that call ended.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        everyone = {one.replica_id: args for one in self._current_replicas()}
        return self.start_calls(method, everyone, **kwargs).answers(deadline_s)

    def start_calls(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **kwargs: Any
    ) -> ReplicaCalls:
        """Calls an engine actor's method on some replicas and does not wait for them.

        Args:
            method: Name of a method of ``EngineActor``.
            calls: Replica id to its positional arguments.
            **kwargs: Keyword arguments for all of them.

        Returns:
            The calls under way, whose ``answers(deadline_s)`` waits for them.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        called = {
            one.replica_id: one.actor for one in self._current_replicas() if one.replica_id in calls
        }
        refs = {
            name: getattr(actor, method).remote(*calls[name], **kwargs)
            for name, actor in called.items()
        }
        return ReplicaCalls(refs, lambda death: self._note_death(death, called[death.replica_id]))

    def standings(self) -> dict[str, Standing]:
        """Returns what this process knows of every current replica, by id; asks nobody.

        The ``incarnation`` is the id of its Ray actor, which is another one after a restart.
        """
        known = {one.replica_id: one for one in self.load.snapshots()}
        return {
            one.replica_id: Standing(
                state=known[one.replica_id].state
                if one.replica_id in known
                else ReplicaState.STARTING,
                reason=known[one.replica_id].reason if one.replica_id in known else "",
                incarnation=one.actor._actor_id.hex(),
            )
            for one in self._current_replicas()
        }

    def note_left_behind(self, version: int, replica_ids: Collection[str]) -> None:
        """Keeps this process's requests from replicas until they report ``version``.

        Args:
            version: The version that they must report.
            replica_ids: Ids of the replicas; unknown ones are passed over.
        """
        with self.load.lock:
            for replica_id in set(replica_ids).intersection(self.load.replica_ids):
                self.load.set_floor(replica_id, version)

    def _note_death(self, death: ReplicaUnavailableError, actor: Any) -> None:
        now = {one.replica_id: one.actor for one in self._current_replicas()}
        if now.get(death.replica_id) != actor:
            return  # told late, when another actor has taken its place
        with self.load.lock:
            if death.replica_id in self.load.replica_ids:  # it may have been removed meanwhile
                self.load.mark(
                    death.replica_id, death.state, death.reason, may_return=death.may_return
                )

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Calls every replica and returns the answers in order; the first failure is raised."""
        answers = list(self.call_replicas(method, *args).values())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _figure(self, method: str, actor_index: int | None) -> Any:
        """TorchRL's convention: one replica's figure by position, or the list of all.

        What a replica that is dead or silent would have said is unknown: ``None``.
        """
        chosen = None if actor_index is None else self._at(actor_index).replica_id
        answers = self.call_replicas(method, deadline_s=FIGURE_TIMEOUT_S)
        figures = {
            replica_id: None if isinstance(answer, BaseException) else answer
            for replica_id, answer in answers.items()
        }
        if chosen is not None:
            return figures.get(chosen)
        return [figures.get(one.replica_id) for one in self.replicas]

    def _at(self, actor_index: int) -> Replica:
        self._require_launched()
        replicas = self.replicas
        if not 0 <= actor_index < len(replicas):
            raise IndexError(f"actor_index must be in [0, {len(replicas)}), got {actor_index}")
        return replicas[actor_index]

    def _require_launched(self) -> None:
        """Raises unless there are replicas."""
        if not self._launched:
            raise ServiceClosedError(f"service {self.name} is not launched, or was shut down")

"""A service's replicas, and calling all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.replica_calls import ReplicaCalls
from torchrl_vllm_sync.weights.transport import Standing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrl_vllm_sync.errors import ReplicaUnavailableError
    from torchrl_vllm_sync.membership import Membership
    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.routing.ledger import LoadTracker

__all__ = ["FIGURE_TIMEOUT_S", "RPC_TIMEOUT_S", "ServiceReplicas"]

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
        """Raises unless there are replicas.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        if not self._launched:
            raise ServiceClosedError(f"service {self.name} is not launched, or was shut down")

"""The replicas of a service coming and going: added, removed, restarted."""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ServiceClosedError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.fleet import Fleet
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing.ledger import describe_replicas
from torchrl_vllm_sync.service_replicas import ServiceReplicas
from torchrl_vllm_sync.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrl_vllm_sync.launch import LaunchPlan
    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.scaling import ScalingPolicy
    from torchrl_vllm_sync.weights.push import WeightPusher

__all__ = ["ServiceMembers"]

DEFAULT_DRAIN_S = 300.0


class ServiceMembers(ServiceReplicas):
    """The part of a service that changes its replicas.

    The process that launched a service supervises it: it restarts replicas that fail, and it alone
    may add and remove some. For a detached service another process can take that over, see
    ``attach``. All processes that have the service follow within about two seconds.

    Attributes:
        max_restarts: How often within an hour a replica that failed is started anew.
        scaling: Says how many replicas there should be; ``None`` if nobody does.
    """

    max_restarts: int
    scaling: ScalingPolicy | None
    _detached: bool
    _is_copy: bool
    _supervises: bool
    _num_wanted: int
    _pusher: WeightPusher
    _fleet: Fleet | None
    _supervisor: Supervisor | None

    @property
    def num_replicas(self) -> int:
        """The replicas there are; before the launch, those that it will start."""
        return self._num_wanted if self._membership is None else len(self._membership.members)

    def add_replicas(self, num_replicas: int = 1) -> list[str]:
        """Starts more replicas, while requests run and between or during pushes.

        Each serves as soon as it holds the version that the others serve with: from the stored
        snapshot, from another replica, or with the next push.

        Args:
            num_replicas: How many, at least 1.

        Returns:
            Their ids.

        Raises:
            UnsupportedArgumentError: ``num_replicas`` is no such number, or another process
                supervises the service.
            PlacementError: The cluster cannot hold them; the service is as it was.
            LaunchError: Some did not start; the service is as it was.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        check_integer("num_replicas", num_replicas, 1)
        return self._supervised_fleet().add(num_replicas)

    def remove_replicas(
        self,
        replicas: int | str | Iterable[str] = 1,
        *,
        drain_timeout_s: float = DEFAULT_DRAIN_S,
    ) -> list[str]:
        """Ends replicas after they have finished what they are doing.

        They get no new requests at once. What still runs after the time limit goes on elsewhere.

        Args:
            replicas: How many, of which those go first that do not serve, and then those with the
                fewest requests of this process; or an id, or several.
            drain_timeout_s: Seconds that they have for what they are doing; 0 does not wait.

        Returns:
            Ids of those removed.

        Raises:
            UnsupportedArgumentError: There is no such replica, none would be left, the time is
                none, or another process supervises the service.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        fleet = self._supervised_fleet()
        if not (isinstance(drain_timeout_s, int | float) and 0 <= drain_timeout_s < math.inf):
            raise UnsupportedArgumentError(
                f"drain_timeout_s must be a finite number from 0 on, got {drain_timeout_s!r}"
            )
        leaving = self._leaving(replicas)
        fleet.remove(leaving, drain_timeout_s=drain_timeout_s)
        return leaving

    def wait_until_serving(
        self, num_replicas: int | None = None, *, timeout_s: float = 300.0
    ) -> None:
        """Waits until replicas serve, such as after one had to be restarted.

        Args:
            num_replicas: How many; ``None`` for all that the service has.
            timeout_s: Seconds to wait; 0 only looks.

        Raises:
            NoReplicaAvailableError: Fewer serve after that time; it says what each is.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        deadline = time.monotonic() + timeout_s
        changed = threading.Event()
        with self.load.watched(changed.set):
            while True:
                self._require_launched()
                changed.clear()
                snapshots = self.load.snapshots()
                wanted = len(snapshots) if num_replicas is None else num_replicas
                serving = sum(one.state is ReplicaState.SERVING for one in snapshots)
                if serving >= wanted:
                    return
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    told = describe_replicas(snapshots, ())
                    raise NoReplicaAvailableError(
                        f"{serving} of {wanted} replicas serve after {timeout_s:g} s: {told}"
                    )
                changed.wait(min(left_s, 1.0))  # a shutdown tells nobody

    def _leaving(self, replicas: int | str | Iterable[str]) -> list[str]:
        """Ids of the replicas to remove, at least one, and not all.

        Raises:
            UnsupportedArgumentError: See :meth:`remove_replicas`.
        """
        snapshots = self.load.snapshots()
        known = [one.replica_id for one in snapshots]
        if isinstance(replicas, str):
            leaving = [replicas]
        elif isinstance(replicas, int):
            check_integer("replicas", replicas, 1)
            idlest = sorted(snapshots, key=lambda one: (one.state.admits_requests, one.in_flight))
            leaving = [one.replica_id for one in idlest[:replicas]]
        else:
            leaving = list(dict.fromkeys(replicas))
        unknown = [one for one in leaving if one not in known]
        if unknown or not leaving:
            raise UnsupportedArgumentError(f"replicas must be among {known}, got {replicas!r}")
        if len(leaving) == len(known):
            raise UnsupportedArgumentError(
                f"replicas must leave at least 1 of {len(known)}, got {replicas!r}; "
                "shutdown() ends them all"
            )
        return leaving

    def _supervised_fleet(self) -> Fleet:
        """Returns the replicas, for changing them.

        Raises:
            UnsupportedArgumentError: Another process supervises the service.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        if self._fleet is None:
            raise ServiceClosedError(f"service {self.name} is not launched, or was shut down")
        if not self._supervises:
            raise UnsupportedArgumentError(
                f"the replicas of service {self.name} are added and removed by the process that "
                "launched it; attach(name, supervise=True) takes a detached service over"
            )
        return self._fleet

    def _take_over(self) -> None:
        """Supervises the service from now on; see ``attach``.

        Raises:
            UnsupportedArgumentError: It is not detached.
        """
        if not self._detached:
            raise UnsupportedArgumentError(
                f"supervise must be False: service {self.name} is not detached, so that its "
                "replicas end with the process that launched it"
            )
        self._supervises = True
        self._begin_supervision()

    def _begin_supervision(self) -> None:
        """Makes what changes the replicas, and has it watch over them if that is our part."""
        assert self._membership is not None, "there are replicas"
        me: weakref.ref[ServiceMembers] = weakref.ref(self)
        fleet = self._fleet = Fleet(
            self.name,
            lambda: _alive(me)._plan(),
            self._membership,
            self.load,
            self._pusher,
            lambda: _alive(me)._card(),
        )
        if self._supervises and (self.max_restarts or self.scaling is not None):
            self._supervisor = Supervisor(
                self._fleet,
                self.load,
                max_restarts=self.max_restarts,
                scaling=self.scaling,
                is_wanted=lambda: me() is not None and fleet.is_open,
            )
            self._supervisor.start()

    def _recovers(self) -> bool:
        """Whether a replica is on its way, as far as this process knows.

        Another process than the one that restarts replicas cannot know whether that goes on.
        """
        if self._supervisor is not None:
            return self._supervisor.is_at_work
        coming = (ReplicaState.STARTING, ReplicaState.FAILED)
        followed = not self._supervises and self.max_restarts > 0
        return followed and any(one.state in coming for one in self.load.snapshots())

    def _end_supervision(self) -> None:
        """Lets nothing join or be restarted any more; idempotent."""
        if self._fleet is not None:
            self._fleet.close()
        if self._supervisor is not None:
            self._supervisor.stop()

    def _replicas_to_ask(self) -> Sequence[Replica]:
        """Whom the monitor asks; it also is when this process hears of changes by others."""
        if self._follows is not None:
            self._follows.look()
        return self._current_replicas()

    def refresh_members(self) -> None:
        """Follows changes that another process has made by now; see ``ReplicaClient``."""
        if self._follows is not None:
            self._follows.refresh()

    @property
    def _follows(self) -> Fleet | None:
        """The fleet, if another process may change it."""
        return self._fleet if self._detached or not self._supervises else None

    def _card(self) -> dict[str, Any]:
        """What a process needs to attach, and an actor may keep: without actor handles."""
        assert self._membership is not None, "only a service with replicas has a card"
        return {**self.__getstate__(), "_membership": self._membership.without_actors()}

    def _plan(self) -> LaunchPlan:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        raise NotImplementedError


def _alive(me: weakref.ref[ServiceMembers]) -> ServiceMembers:
    """The service, unless nobody has it any more.

    Raises:
        ServiceClosedError: Nobody has.
    """
    service = me()
    if service is None:
        raise ServiceClosedError("the service is gone")
    return service

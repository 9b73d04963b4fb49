"""Changing a service's replicas while it serves: joining, leaving, restarting, learning of it."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.engine.processes import end_replica
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    ServiceClosedError,
    SyncError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.routing.ledger import describe_replicas
from torchrl_vllm_sync.service import launch
from torchrl_vllm_sync.service.launch import (
    close_replicas,
    find_service,
    launch_replicas,
    living_ids,
)
from torchrl_vllm_sync.service.replicas import ReplicaCalls, ServiceReplicas
from torchrl_vllm_sync.service.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrl_vllm_sync.replica import Member, Replica
    from torchrl_vllm_sync.routing.ledger import LoadTracker
    from torchrl_vllm_sync.service.launch import LaunchPlan
    from torchrl_vllm_sync.service.replicas import Membership
    from torchrl_vllm_sync.service.supervisor import ScalingPolicy
    from torchrl_vllm_sync.weights.push import WeightPusher

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
# Others must not push for longer than this while a replica waits to join or to leave.
PUSH_TIMEOUT_S = 600.0
CATCH_UP_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 20.0
# Seconds within which Ray must have ended an actor that was killed.
END_TIMEOUT_S = 30.0
# Other processes hear of a new member from the replicas' reports, which come once a second.
PROPAGATION_S = 2.0
# How often a replica that joins looks whether others have moved on while it was brought along.
MAX_LOOKS = 3
DRAIN_POLL_S = 0.1
# A process that is not told of changes looks itself, at most this often, while a replica is dead.
LOOK_INTERVAL_S = 1.0
LOOK_TIMEOUT_S = 2.0


class Fleet:
    """A service's replicas, and how they come and go.

    Changes can be made in several threads at once, each to other replicas. They reach the other
    processes that have the service through the replicas: each keeps a card with the membership,
    and its reports say how new that is.
    """

    def __init__(
        self,
        name: str,
        plan: Callable[[], LaunchPlan],
        membership: Membership,
        load: LoadTracker,
        pusher: WeightPusher,
        card: Callable[[], dict[str, Any]],
    ) -> None:
        self._name, self._plan, self._membership, self._load = name, plan, membership, load
        self._pusher_of_service, self._card = weakref.ref(pusher), card
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._leaving: set[str] = set()
        self._closed = False
        self._job_id = _job_id()
        self._looked_at = 0.0

    @property
    def _pusher(self) -> WeightPusher:
        """The pusher."""
        pusher = self._pusher_of_service()
        if pusher is None:
            raise ServiceClosedError(f"service {self._name} is gone")
        return pusher

    @property
    def is_open(self) -> bool:
        """Whether replicas may be started: neither :meth:`close` nor Ray's end came before.

        Ray's functions would start another Ray, for which these replicas never were.
        """
        return not self._closed and self._job_id == _job_id()

    def close(self) -> None:
        """Lets nothing join any more; what is being started ends as soon as it would join."""
        with self._lock:
            self._closed = True

    # ---------------------------------------------------------------- coming

    def add(self, num_replicas: int) -> list[str]:
        """Starts new replicas, which serve as soon as they hold the committed version."""
        self._require_open()
        ids = [self._membership.new_id() for _ in range(num_replicas)]
        beside = self._membership.members
        self._join(launch_replicas(self._plan(), ids, beside=beside, join_later=True))
        return ids

    def restart(self, replica_id: str) -> None:
        """Ends what is left of a replica, and starts it anew on whatever node has room."""
        self._require_open()
        member = self._membership.suspend(replica_id)
        self._load.mark(replica_id, ReplicaState.STARTING, "it is being restarted")
        self._end(member)
        with self._lock:
            self._require_open()
            self._member(replica_id)  # it may have been removed meanwhile
        beside = [one for one in self._membership.members if one.replica_id != replica_id]
        self._join(
            launch_replicas(
                self._plan(),
                [replica_id],
                beside=beside,
                join_later=True,
                num_restarts=member.num_restarts + 1,
            )
        )

    def _join(self, members: Sequence[Member]) -> None:
        """Makes started replicas members: pushes reach them first, then requests."""
        ids = [one.replica_id for one in members]
        try:
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                self._require_open()
                for one in members:
                    if one.num_restarts:
                        self._member(one.replica_id)  # it may have been removed meanwhile
                for one in members:
                    self._membership.put(one)
                self._load.follow([one.replica_id for one in self._membership.members])
                for one in members:  # pushes wait for it from now on, requests do not go there yet
                    self._load.renew(one.replica_id, ReplicaState.STALE)
                    describe(self._load, one)
                self.share_card()
        except BaseException:
            close_replicas(
                [one.replica for one in members],
                [one.group for one in members if one.group is not None],
                timeout_s=0.0,
            )
            raise
        newest = self._newest_version(ids)
        if newest:
            time.sleep(PROPAGATION_S)  # from now on others' pushes reach them too
        for _ in range(MAX_LOOKS):
            newest = self._newest_version(ids)
            run_id = self._pusher.committed_run_id if newest == self._pusher.committed else None
            self._call(members, "admit", newest, run_id)
            if newest:
                self.catch_up(ids)
            else:
                self.learn(ids)
            if self._newest_version(ids) == newest:
                return

    def _require_open(self) -> None:
        """Raises once the fleet was closed."""
        if not self.is_open:
            raise ServiceClosedError(f"service {self._name} was shut down")

    def catch_up(self, replica_ids: Sequence[str]) -> dict[str, str]:
        """Brings replicas to the version that the others serve with."""
        self.learn(replica_ids)
        serving = {one.replica_id for one in self._load.snapshots() if one.state.admits_requests}
        behind = [one for one in replica_ids if one not in serving]
        if not behind:
            return {}
        failures = self._pusher.catch_up(behind, timeout_s=CATCH_UP_TIMEOUT_S)
        for replica_id, reason in failures.items():
            logger.info("replica %s waits for the next push: %s", replica_id, reason)
        self.learn(behind)
        return failures

    def _newest_version(self, but: Sequence[str]) -> int:
        """Newest version that another replica serves with, or that this process committed.

        While none serves, it is the newest that any ever held: trainers of other processes have
        committed up to that, and the launched weights must not come back.
        """
        served = [
            one.weight_version or 0
            for one in self._load.snapshots()
            if one.replica_id not in but and one.state.admits_requests
        ]
        return max([self._pusher.committed, *(served or [self._load.newest_version])])

    # ---------------------------------------------------------------- leaving

    def remove(self, replica_ids: Sequence[str], *, drain_timeout_s: float) -> None:
        """Lets replicas finish what they have, and ends them.

        What is still running after ``drain_timeout_s`` seconds goes on elsewhere.
        """
        with self._lock:
            members = [self._member(one) for one in replica_ids]
            known = {one.replica_id for one in self._membership.members}
            if not known - self._leaving - set(replica_ids):
                raise UnsupportedArgumentError(
                    f"replicas must leave at least 1 of {sorted(known)}, got {list(replica_ids)}, "
                    f"while {sorted(self._leaving)} are leaving; shutdown() ends them all"
                )
            self._leaving |= set(replica_ids)
        try:
            gone = self._leave(members, drain_timeout_s)
        finally:
            with self._lock:
                self._leaving -= set(replica_ids)
        close_replicas(
            [one.replica for one in gone],
            [one.group for one in gone if one.group is not None],
            timeout_s=CLOSE_TIMEOUT_S,
        )

    def _leave(self, members: Sequence[Member], drain_timeout_s: float) -> list[Member]:
        """Drains replicas and takes them out of the service; returns what they were at last."""
        for one in members:
            self._load.mark(one.replica_id, ReplicaState.DRAINING, "it is being removed")
        self._call(members, "drain")
        try:
            self._await_idle(members, drain_timeout_s)
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                self._require_open()  # who shut the service down has ended them all
                # One may have been restarted meanwhile, or removed by somebody else.
                gone = [
                    self._membership.remove(one.replica_id)
                    for one in members
                    if self._membership.find(one.replica_id) is not None
                ]
                self._load.follow([one.replica_id for one in self._membership.members])
                self.share_card()
        except SyncError:
            if self.is_open:
                self._call(members, "undrain")
            raise
        return gone

    def _await_idle(self, members: Sequence[Member], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        busy = list(members)
        while busy and time.monotonic() < deadline:
            reports = self._call(busy, "report")
            busy = [
                one
                for one in busy
                if isinstance(report := reports[one.replica_id], EngineReport)
                and (report.num_unfinished or self._load.in_flight(one.replica_id))
            ]
            time.sleep(DRAIN_POLL_S if busy else 0.0)
        for one in busy:
            logger.warning(
                "replica %s had not finished after %g s; its requests go on elsewhere",
                one.replica_id,
                timeout_s,
            )

    def _end(self, member: Member) -> None:
        """Ends an actor that is dead or hung, and waits until its name is free again."""
        end_replica(member.replica.actor, member.description.processes)
        if member.group is not None:
            launch.remove([member.group])
        deadline = time.monotonic() + END_TIMEOUT_S
        while member.replica_id in living_ids(self._name):
            if time.monotonic() > deadline:
                raise ReplicaUnavailableError(
                    member.replica_id,
                    ReplicaState.FAILED,
                    f"Ray did not end its actor within {END_TIMEOUT_S:g} s",
                )
            time.sleep(DRAIN_POLL_S)

    # ---------------------------------------------------------------- telling and hearing

    def share_card(self) -> None:
        """Has every replica know who the members are, for processes that attach or ask."""
        joined = [one for one in self._membership.members if one.joined]
        self._call(joined, "keep_card", self._card())

    def learn(self, replica_ids: Sequence[str]) -> None:
        """Asks replicas what they are and hold now, ahead of the monitor's next look."""
        members = [one for one in map(self._membership.find, replica_ids) if one is not None]
        asked_at = self._load.clock()
        for report in self._call(members, "report").values():
            if isinstance(report, EngineReport):
                self._load.observe(report, asked_at=asked_at)

    def look(self) -> None:
        """Follows changes that another process made, if the replicas' reports tell of any.

        Asks nobody as long as all is as it was; while a replica is dead, once a second. What fails
        for the moment is tried again a second later.
        """
        if not ray.is_initialized():
            return  # looking would join a cluster again that was left
        snapshots = self._load.snapshots()
        told = max((one.membership_epoch for one in snapshots), default=0)
        lost = any(one.state in (ReplicaState.FAILED, ReplicaState.CLOSED) for one in snapshots)
        now = time.monotonic()
        if told <= self._membership.epoch and not lost:
            return
        if now < self._looked_at + LOOK_INTERVAL_S:
            return
        self._looked_at = now
        self._ask_who_is_there()

    def refresh(self) -> None:
        """Follows all changes that another process has made by now, if any replica knows of them.

        One that joins is known to all others before it serves. So a push that begins with this
        reaches whoever serves, however late this process's monitor is.
        """
        refs = {
            one.replica_id: one.replica.actor.report.remote()
            for one in self._membership.members
            if one.joined
        }
        report = ReplicaCalls(refs, lambda _: None).first_answer(LOOK_TIMEOUT_S)
        if report is None or report.membership_epoch > self._membership.epoch:
            self._ask_who_is_there()

    def _ask_who_is_there(self) -> None:
        try:
            found = find_service(self._name, timeout_s=LOOK_TIMEOUT_S)["_membership"]
        except ServiceClosedError:
            return  # nobody is there to tell
        except RayError as error:
            logger.debug("could not ask who is in service %s: %s", self._name, error)
            return
        with self._following:
            self._follow(found)

    def _follow(self, newer: Membership) -> None:
        if newer.epoch <= self._membership.epoch:
            return
        former = {one.replica_id: one for one in self._membership.members}
        self._membership.follow(newer)
        members = self._membership.members
        self._load.follow([one.replica_id for one in members])
        for one in members:
            before = former.get(one.replica_id)
            if before is None or before.num_restarts != one.num_restarts:
                self._load.renew(one.replica_id, ReplicaState.STARTING)
                describe(self._load, one)
            elif not one.joined:
                self._load.mark(one.replica_id, ReplicaState.STARTING, "it is being restarted")

    def _member(self, replica_id: str) -> Member:
        member = self._membership.find(replica_id)
        if member is None:
            raise KeyError(f"no replica {replica_id!r} in service {self._name}")
        return member

    def _call(self, members: Sequence[Member], method: str, *args: Any) -> dict[str, Any]:
        """Calls a method of each member's actor; an error is the answer of the one that failed."""
        refs = {one.replica_id: getattr(one.replica.actor, method).remote(*args) for one in members}
        if not refs:
            return {}
        called = {one.replica_id: one.replica.actor for one in members}
        return ReplicaCalls(
            refs, lambda death: self._note_death(death, called[death.replica_id])
        ).answers(CALL_TIMEOUT_S)

    def _note_death(self, death: ReplicaUnavailableError, actor: Any) -> None:
        now = self._membership.find(death.replica_id)
        if now is None or not now.joined or now.replica.actor != actor:
            return  # told late, when another actor has taken its place
        with self._load.lock:
            if death.replica_id in self._load.replica_ids:
                self._load.mark(
                    death.replica_id, death.state, death.reason, may_return=death.may_return
                )


def _job_id() -> str | None:
    """Tells this process's connection to Ray from an earlier one; ``None`` if there is none."""
    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else None


def describe(load: LoadTracker, member: Member) -> None:
    """Tells a ledger the size of a member's KV cache."""
    load.describe(
        member.replica_id,
        block_size=member.description.block_size,
        num_kv_blocks=member.description.num_kv_blocks,
    )


# The replicas of a service coming and going: added, removed, restarted.


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
        """Ids of the replicas to remove, at least one, and not all."""
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
        """Returns the replicas, for changing them."""
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
        """Supervises the service from now on; see ``attach``."""
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
    """The service, unless nobody has it any more."""
    service = me()
    if service is None:
        raise ServiceClosedError("the service is gone")
    return service

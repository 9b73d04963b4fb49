"""Changing a service's replicas while it serves: joining, leaving, restarting, learning of it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from torchrl_vllm_sync import placement
from torchrl_vllm_sync.engine.processes import end_replica
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    ServiceClosedError,
    SyncError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.launch import close_replicas, launch_replicas
from torchrl_vllm_sync.registry import find_service, living_ids
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.replica_calls import ReplicaCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrl_vllm_sync.launch import LaunchPlan
    from torchrl_vllm_sync.membership import Member, Membership
    from torchrl_vllm_sync.routing.ledger import LoadTracker
    from torchrl_vllm_sync.weights.push import WeightPusher

__all__ = ["Fleet"]

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

    Args:
        name: Name of the service.
        plan: Returns what to start.
        membership: The replicas; changed in place.
        load: Ledger of the replicas, which follows the membership.
        pusher: Pushes weights to them, and brings along the ones that join. It knows the service,
            which nobody else has any more once it is gone.
        card: Returns what a process needs to attach to the service.
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
        """The pusher.

        Raises:
            ServiceClosedError: It is gone, and the service with it.
        """
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
        """Starts new replicas, which serve as soon as they hold the committed version.

        Returns:
            Their ids.

        Raises:
            PlacementError: The cluster cannot hold them.
            LaunchError: Some did not start. Nothing is left behind.
            ServiceClosedError: The service was shut down meanwhile. Nothing is left behind.
        """
        self._require_open()
        ids = [self._membership.new_id() for _ in range(num_replicas)]
        beside = self._membership.members
        self._join(launch_replicas(self._plan(), ids, beside=beside, join_later=True))
        return ids

    def restart(self, replica_id: str) -> None:
        """Ends what is left of a replica, and starts it anew on whatever node has room.

        Raises:
            KeyError: It is no member.
            PlacementError: The cluster cannot hold it.
            LaunchError: It did not start. Nothing is left behind.
            ServiceClosedError: The service was shut down meanwhile. Nothing is left behind.
        """
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
        """Raises once the fleet was closed.

        Raises:
            ServiceClosedError: It was.
        """
        if not self.is_open:
            raise ServiceClosedError(f"service {self._name} was shut down")

    def catch_up(self, replica_ids: Sequence[str]) -> dict[str, str]:
        """Brings replicas to the version that the others serve with.

        Returns:
            Replica id to the reason, for those that have to wait for the next push.
        """
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

        Raises:
            KeyError: One is no member.
            UnsupportedArgumentError: None would be left.
            ServiceClosedError: The service was shut down meanwhile.
            SyncError: Pushes kept them from leaving; they stay.
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
            placement.remove([member.group])
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

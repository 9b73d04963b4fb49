"""Changing a service's replicas while it serves: joining, leaving, restarting."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import ray

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.engine.processes import end_replica
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    ServiceClosedError,
    SyncError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.service.launch import (
    CLOSE_TIMEOUT_S,
    close_members,
    launch_replicas,
    remove,
)
from torchrl_vllm_sync.service.members import living_ids
from torchrl_vllm_sync.service.supervisor import Supervisor, idlest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrl_vllm_sync.replica import Member
    from torchrl_vllm_sync.service.members import Membership
    from torchrl_vllm_sync.service.replicas import Answers, Replicas
    from torchrl_vllm_sync.service.supervisor import ScalingPolicy
    from torchrl_vllm_sync.weights.push import WeightPusher

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
# Others must not push for longer than this while a replica waits to join or to leave.
PUSH_TIMEOUT_S = 600.0
CATCH_UP_TIMEOUT_S = 300.0
# Seconds within which Ray must have ended an actor that was killed.
END_TIMEOUT_S = 30.0
# Other processes learn of a new member from the replicas' reports, which come once a second.
PROPAGATION_S = 2.0
# How often a replica that joins checks whether others have moved on while it caught up.
MAX_LOOKS = 3
DRAIN_POLL_S = 0.1


class Fleet:
    """Adds, removes and restarts a service's replicas.

    Several threads may change different replicas at once. One process supervises a service: it
    restarts replicas that fail, and it alone may add and remove some.
    """

    def __init__(self, replicas: Replicas, pusher: WeightPusher) -> None:
        self._replicas, self._load = replicas, replicas.load
        self._weak_pusher = weakref.ref(pusher)  # whose hooks may hold the service
        self._lock = threading.Lock()
        self._leaving: set[str] = set()
        self._closed = False
        self._job_id = _job_id()
        self.supervises = False  # whether this process does
        self.supervisor: Supervisor | None = None  # none where neither restarts nor scaling are on

    def supervise(self, scaling: ScalingPolicy | None, is_wanted: Callable[[], bool]) -> None:
        """Supervises the service from now on, until it is closed or not wanted any more."""
        settings = self._replicas.settings
        self.supervises, self._replicas.follows = True, settings.detached
        if settings.max_restarts or scaling is not None:
            self.supervisor = Supervisor(
                self,
                self._load,
                max_restarts=settings.max_restarts,
                scaling=scaling,
                is_wanted=lambda: is_wanted() and self.is_open,
            )
            self.supervisor.start()

    @property
    def _pusher(self) -> WeightPusher:
        pusher = self._weak_pusher()
        if pusher is None:
            raise ServiceClosedError(f"service {self._replicas.service_name} is gone")
        return pusher

    @property
    def is_open(self) -> bool:
        """Whether replicas may be started: not closed, and still on the same Ray cluster."""
        # After Ray's end its functions would start another Ray, which never had these replicas.
        return not self._closed and self._job_id == _job_id()

    def close(self) -> None:
        """Ends joining and restarting; what is being started ends when it joins."""
        with self._lock:
            self._closed = True
        if self.supervisor is not None:
            self.supervisor.stop()

    def recovers(self) -> bool:
        """Whether a replica is on its way, as far as this process knows."""
        if self.supervisor is not None:
            return self.supervisor.is_at_work
        if self.supervises or not self._replicas.settings.max_restarts:
            return False
        # Only the supervising process knows whether restarts go on; others see states alone.
        coming = (ReplicaState.STARTING, ReplicaState.FAILED)
        return any(one.state in coming for one in self._load.snapshots())

    def require_supervision(self) -> None:
        """Refuses changes where another process makes them."""
        self._replicas.require()
        if not self.supervises:
            raise UnsupportedArgumentError(
                f"the replicas of service {self._replicas.service_name} are added and removed by "
                "the process that launched it; attach(name, supervise=True) takes a detached "
                "service over"
            )

    # ---------------------------------------------------------------- coming

    def add(self, num_replicas: int) -> list[str]:
        """Starts new replicas, which serve as soon as they hold the committed version."""
        membership = self._require_open()
        ids = [membership.new_id() for _ in range(num_replicas)]
        self._join(ids)
        return ids

    def restart(self, replica_id: str) -> None:
        """Ends what is left of a replica, and starts it anew on whatever node has room."""
        member = self._require_open().suspend(replica_id)
        self._load.mark(replica_id, ReplicaState.STARTING, "it is being restarted")
        self._end(member)
        with self._lock:
            self._require_open()
            self._member(replica_id)  # it may have been removed meanwhile
        self._join([replica_id], member.num_restarts + 1)

    def _join(self, ids: Sequence[str], num_restarts: int = 0) -> None:
        """Starts replicas and makes them members: pushes reach them first, then requests."""
        members = launch_replicas(
            self._replicas.settings,
            ids,
            beside=[one for one in self._replicas.members if one.replica_id not in ids],
            join_later=True,
            num_restarts=num_restarts,
        )
        try:
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                membership = self._require_open()
                for one in members:
                    if num_restarts:
                        self._member(one.replica_id)  # it may have been removed meanwhile
                    membership.put(one)
                self._load.follow([one.replica_id for one in membership.members])
                for one in members:  # pushes wait for it from now on, requests do not go there yet
                    self._load.renew(one.replica_id, ReplicaState.STALE)
                    self._replicas.describe(one)
                self.share_membership()
        except BaseException:
            close_members(members, timeout_s=0.0)
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
                self._learn(ids)
            if self._newest_version(ids) == newest:
                return

    def catch_up(self, replica_ids: Sequence[str]) -> dict[str, str]:
        """Brings replicas to the version that the others serve; returns the failures' reasons."""
        self._learn(replica_ids)
        serving = {one.replica_id for one in self._load.snapshots() if one.state.admits_requests}
        behind = [one for one in replica_ids if one not in serving]
        if not behind:
            return {}
        failures = self._pusher.catch_up(behind, timeout_s=CATCH_UP_TIMEOUT_S)
        for replica_id, reason in failures.items():
            logger.info("replica %s waits for the next push: %s", replica_id, reason)
        self._learn(behind)
        return failures

    def _newest_version(self, but: Sequence[str]) -> int:
        """Newest version that another replica serves with, or that this process committed."""
        served = [
            one.weight_version or 0
            for one in self._load.snapshots()
            if one.replica_id not in but and one.state.admits_requests
        ]
        # While none serves, the newest that any ever held: trainers of other processes have
        # committed up to that, and the launched weights must not come back.
        return max([self._pusher.committed, *(served or [self._load.newest_version])])

    # ---------------------------------------------------------------- leaving

    def choose_leaving(self, replicas: int | str | Iterable[str]) -> list[str]:
        """Returns the ids of the replicas to remove, at least one, and not all."""
        snapshots = self._load.snapshots()
        known = [one.replica_id for one in snapshots]
        if isinstance(replicas, str):
            leaving = [replicas]
        elif isinstance(replicas, int):
            check_integer("replicas", replicas, 1)
            leaving = idlest(snapshots)[:replicas]
        else:
            leaving = list(dict.fromkeys(replicas))
        if not leaving or any(one not in known for one in leaving):
            raise UnsupportedArgumentError(f"replicas must be among {known}, got {replicas!r}")
        if len(leaving) == len(known):
            raise UnsupportedArgumentError(
                f"replicas must leave at least 1 of {len(known)}, got {replicas!r}; "
                "shutdown() ends them all"
            )
        return leaving

    def remove(self, replica_ids: Sequence[str], *, drain_timeout_s: float) -> None:
        """Drains replicas and ends them; what then still runs goes on elsewhere."""
        with self._lock:
            members = [self._member(one) for one in replica_ids]
            known = {one.replica_id for one in self._replicas}
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
        close_members(gone, timeout_s=CLOSE_TIMEOUT_S)

    def _leave(self, members: Sequence[Member], drain_timeout_s: float) -> list[Member]:
        """Drains replicas and takes them out of the service; returns their last members."""
        for one in members:
            self._load.mark(one.replica_id, ReplicaState.DRAINING, "it is being removed")
        self._call(members, "drain")
        try:
            self._await_idle(members, drain_timeout_s)
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                membership = self._require_open()  # a shutdown has ended them all
                # One may have been restarted meanwhile, or removed by another thread.
                gone = [
                    membership.remove(one.replica_id)
                    for one in members
                    if membership.find(one.replica_id) is not None
                ]
                self._load.follow([one.replica_id for one in membership.members])
                self.share_membership()
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
        remove([member.group])
        deadline = time.monotonic() + END_TIMEOUT_S
        while member.replica_id in living_ids(self._replicas.service_name):
            if time.monotonic() > deadline:
                raise ReplicaUnavailableError(
                    member.replica_id,
                    ReplicaState.FAILED,
                    f"Ray did not end its actor within {END_TIMEOUT_S:g} s",
                )
            time.sleep(DRAIN_POLL_S)

    # ---------------------------------------------------------------- calling

    def share_membership(self) -> Answers:
        """Stores the membership in every replica, for processes that attach or ask."""
        state = self._replicas.shared_state()
        return self._replicas.call_replicas("keep_card", state, deadline_s=CALL_TIMEOUT_S)

    def _learn(self, replica_ids: Sequence[str]) -> None:
        self._replicas.learn(replica_ids, timeout_s=CALL_TIMEOUT_S)

    def _call(self, members: Sequence[Member], method: str, *args: Any) -> Answers:
        """Calls the actors that these members had, even if they have been replaced since."""
        calls = dict.fromkeys([one.replica_id for one in members], args)
        replicas = [one.replica for one in members]
        return self._replicas.start(replicas, method, calls).answers(CALL_TIMEOUT_S)

    def _require_open(self) -> Membership:
        """Returns the membership; raises once the fleet was closed."""
        if not self.is_open or self._replicas.membership is None:
            raise ServiceClosedError(f"service {self._replicas.service_name} was shut down")
        return self._replicas.membership

    def _member(self, replica_id: str) -> Member:
        member = self._replicas.require().find(replica_id)
        if member is None:
            raise KeyError(f"no replica {replica_id!r} in service {self._replicas.service_name}")
        return member


def _job_id() -> str | None:
    """Identifies this process's connection to Ray; ``None`` if there is none."""
    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else None

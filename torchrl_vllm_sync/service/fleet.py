"""A service's replicas while it serves: joining, leaving, restarting, and how many are wanted."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from torchrl_vllm_sync import checks, errors
from torchrl_vllm_sync.engine.args import END_TIMEOUT_S, end_replica
from torchrl_vllm_sync.replica import Member, ReplicaState
from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker, describe_replicas
from torchrl_vllm_sync.service.launch import close_members, launch_replicas, remove
from torchrl_vllm_sync.service.replicas import Answers, Membership, Replicas, living_ids
from torchrl_vllm_sync.weights.push import HOLD_BACK_TIMEOUT_S, WeightPusher
from torchrl_vllm_sync.weights.transport import reason_of

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
# Others must not push for longer than this while a replica waits to join or to leave.
PUSH_TIMEOUT_S = 600.0
CATCH_UP_TIMEOUT_S = 300.0
# Other processes learn of a new member from the replicas' reports, which come once a second.
PROPAGATION_S = 2.0
# How often a replica that joins checks whether others have moved on while it caught up.
MAX_LOOKS = 3
DRAIN_POLL_S = 0.1


class Fleet:
    """Adds, removes and restarts replicas, in the one process that supervises; safe for threads."""

    def __init__(self, replicas: Replicas, pusher: WeightPusher) -> None:
        self._replicas, self._load = replicas, replicas.load
        self._weak_pusher = weakref.ref(pusher)  # whose hooks may hold the service
        self._lock = threading.Lock()
        self._leaving: set[str] = set()  # or held: not to be removed by number
        self._job_id = _job_id()
        self.supervises = False  # whether this process does
        self.supervisor: Supervisor | None = None  # none where neither restarts nor scaling are on

    def supervise(self, scaling: ScalingPolicy | None, is_wanted: Callable[[], bool]) -> None:
        """Supervises the service from now on, until it is closed or not wanted any more."""
        settings, wanted = self._replicas.settings, lambda: is_wanted() and self.is_open
        self.supervises, self._replicas.follows = True, settings.detached
        if (limit := settings.max_restarts) or scaling is not None:
            self.supervisor = Supervisor(
                self, self._load, max_restarts=limit, scaling=scaling, is_wanted=wanted
            )
            self.supervisor.start()

    @property
    def _pusher(self) -> WeightPusher:
        if (pusher := self._weak_pusher()) is None:
            raise errors.ServiceClosedError(f"service {self._replicas.service_name} is gone")
        return pusher

    @property
    def is_open(self) -> bool:
        """Whether replicas may be started: not closed, and still on the same Ray cluster."""
        # After Ray's end its functions would start another Ray, which never had these replicas.
        return self._replicas.membership is not None and self._job_id == _job_id()

    def close(self) -> list[Member]:
        """Lists no replica any more, and returns all; what is being started ends when it joins."""
        with self._lock:
            members = self._replicas.members
            self._replicas.close()
        if self.supervisor is not None:
            self.supervisor.stop()
        return members

    def recovers(self) -> bool:
        """Whether a replica is on its way, as far as this process knows."""
        if self.supervisor is not None:
            return self.supervisor.is_at_work
        # Only the supervising process knows whether restarts go on; others see states alone.
        may_be = not self.supervises and self._replicas.settings.max_restarts > 0
        coming = (ReplicaState.STARTING, ReplicaState.FAILED)
        return may_be and any(one.state in coming for one in self._load.snapshots())

    def _require_supervision(self) -> None:
        """Refuses changes where another process makes them."""
        self._replicas.require()
        if not self.supervises:
            raise errors.UnsupportedArgumentError(
                f"replicas of service {self._replicas.service_name} are added and removed by the "
                "process that launched it; attach(name, supervise=True) takes a detached one over"
            )

    def add_replicas(self, num_replicas: int = 1) -> list[str]:
        """Returns the ids of new replicas, started while requests run and pushes go on.

        Each serves as soon as it holds the others' version. The process that launched the service
        may do this, or one that called ``attach(name, supervise=True)``.

        Args:
            num_replicas: How many, at least 1.

        Raises:
            PlacementError: The cluster cannot hold them; the service is as it was.
            LaunchError: Some did not start; the service is as it was.
        """
        checks.check_integer("num_replicas", num_replicas, 1)
        self._require_supervision()
        self._require_open()
        self._join(ids := self._replicas.new_ids(num_replicas))
        return ids

    def restart(self, replica_id: str) -> None:
        """Ends what is left of a replica, and starts it anew on whatever node has room."""
        self._require_open()
        member = self._replicas.suspend(replica_id)
        self._load.mark(replica_id, ReplicaState.STARTING, "it is being restarted")
        self._end(member)
        self._member(replica_id)  # it may have been removed meanwhile
        self._join([replica_id], member.num_restarts + 1)

    def _join(self, ids: Sequence[str], num_restarts: int = 0) -> None:
        """Starts replicas and makes them members: pushes reach them first, then requests."""
        beside = [one for one in self._replicas.members if one.replica_id not in ids]
        members = launch_replicas(
            self._replicas.settings, ids, beside=beside, join_later=True, num_restarts=num_restarts
        )
        try:
            with self._pusher.exclusive(PUSH_TIMEOUT_S):
                if are_asleep := self._replicas.settings.colocated and self._are_asleep():
                    self._call(members, "sleep", 2, "keep").raise_failures()
                with self._lock:
                    for one in members if num_restarts else ():
                        self._member(one.replica_id)  # it may have been removed meanwhile
                    self._put(members)
                self._load.note_asleep(ids if are_asleep else ())
        except BaseException:
            close_members(members, timeout_s=0.0)
            raise
        self._admit(members)

    def _are_asleep(self) -> bool:
        """Whether a trainer has the engines' memory: as others say now, or as all last said."""
        self._replicas.learn(timeout_s=CALL_TIMEOUT_S)
        known = self._load.snapshots()
        return any(one.report.asleep for one in self._load.admitting() or known)

    def _put(self, members: Sequence[Member]) -> None:
        """Makes them members: pushes wait for them from now on, requests do not go there yet."""
        self._require_open()
        self._replicas.put(*members)
        self._load.follow([one.replica_id for one in self._replicas])
        for one in members:
            self._load.renew(one.replica_id, ReplicaState.STALE)
            self._replicas.describe(one)

    def _admit(self, members: Sequence[Member]) -> None:
        """Has new members serve once they hold what the others do."""
        ids = [one.replica_id for one in members]
        self.share_membership()  # pushes need not wait until one that hangs is given up
        if self._newest(ids)[0]:
            time.sleep(PROPAGATION_S)  # from now on others' pushes reach them too
        for _ in range(MAX_LOOKS):
            newest, run_id = self._newest(ids)
            self._call(members, "admit", newest, run_id)
            if newest:
                self.catch_up(ids)
            else:
                self._replicas.learn(ids, timeout_s=CALL_TIMEOUT_S)
            if self._newest(ids)[0] == newest:
                return

    @contextlib.contextmanager
    def held(self, version: int | None, timeout_s: float, *, allow_last: bool) -> Iterator[Member]:
        """Keeps requests and pushes from a replica, which then joins again like a new one."""
        self._require_supervision()
        with contextlib.ExitStack() as ending:
            with self._pusher.quiet(timeout_s):
                self._replicas.learn()
                with self._lock:
                    one = self._holdable(version, allow_last=allow_last)
                    self._require_open()
                    member = self._replicas.suspend(one.replica_id, held=True)
                    self._leaving.add(one.replica_id)
                    ending.callback(self._hand_back, member)
                    self._replicas.describe(self._member(one.replica_id))
                self._call([member], "pin", version).raise_failures()
                self.share_membership(member)  # for other processes' pushes, whomever they ask
            yield member

    def _holdable(self, version: int | None, *, allow_last: bool) -> LoadSnapshot:
        """Returns the least busy replica that serves ``version``, by default the newest."""
        known = self._load.snapshots()
        serving = [one for one in known if one.state is ReplicaState.SERVING]
        if len(serving) < (1 if allow_last else 2):
            least = "1" if allow_last else "2, so that others serve meanwhile (see allow_last)"
            told = describe_replicas(known, ())
            raise errors.NoReplicaAvailableError(f"replicas that serve must be {least}: {told}")
        wanted = max(one.cache_version for one in serving) if version is None else version
        if not (fitting := [one for one in serving if one.cache_version == wanted]):
            held = {one.replica_id: one.describe() for one in known}
            raise errors.VersionNotReachedError(wanted, held, 0.0)
        return min(fitting, key=lambda one: one.in_flight)

    def _hand_back(self, member: Member) -> None:
        """Ends the hold; a replica that died meanwhile is restarted like any other."""
        replica_id = member.replica_id
        try:
            if not self.is_open:
                return
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                membership = self._replicas.membership if self.is_open else None
                known = membership.find(replica_id) if membership else None
                if known is None or not known.held:  # it was removed, restarted or shut down
                    return
                # Before anybody asks it, or it would say that it serves, as it did all the while.
                newest, run_id = self._newest([replica_id])
                told = newest, run_id, True
                answers = self._call([member], "hold_back", *told, limit_s=HOLD_BACK_TIMEOUT_S)
                self._put([member])
                for failure in answers.failures.values():  # it is restarted, as one that died
                    self._load.mark(replica_id, ReplicaState.FAILED, reason_of(failure))
                self._replicas.note_left_behind(newest, [replica_id])
        except BaseException as error:  # an interrupt from the keyboard, too
            why = str(error) or type(error).__name__
            self._load.mark(replica_id, ReplicaState.FAILED, why)  # so that it is restarted
            raise
        finally:
            with self._lock:
                self._leaving.discard(replica_id)
        self._admit([member])

    def catch_up(self, replica_ids: Sequence[str]) -> dict[str, str]:
        """Brings replicas to the version that the others serve; returns the failures' reasons."""
        self._replicas.learn(replica_ids, timeout_s=CALL_TIMEOUT_S)
        serving = {one.replica_id for one in self._load.admitting()}
        if not (behind := [one for one in replica_ids if one not in serving]):
            return {}
        failures = self._pusher.catch_up(behind, timeout_s=CATCH_UP_TIMEOUT_S)
        for replica_id, reason in failures.items():
            logger.info("replica %s waits for the next push: %s", replica_id, reason)
        self._replicas.learn(behind, timeout_s=CALL_TIMEOUT_S)
        return failures

    def _newest(self, but: Sequence[str]) -> tuple[int, str | None]:
        """Newest version another replica serves, or this process committed, and its known run."""
        others = [one for one in self._load.admitting() if one.replica_id not in but]
        # While none serves, the newest that any ever held: trainers of other processes have
        # committed up to that, and the launched weights must not come back.
        served = [one.cache_version for one in others] or [self._load.newest_version]
        newest, pusher = max([self._pusher.committed, *served]), self._pusher
        return newest, pusher.committed_run_id if newest == pusher.committed else None

    def remove_replicas(
        self,
        replicas: int | str | Iterable[str] = 1,
        *,
        drain_timeout_s: float = checks.DEFAULT_TIMEOUT_S,
    ) -> list[str]:
        """Returns the ids of replicas that were ended; the last one never is.

        The same processes may do it as :meth:`add_replicas`.

        Args:
            replicas: How many, of which those go first that do not serve, and then those with the
                fewest requests of this process; or an id, or several.
            drain_timeout_s: Seconds that they have for what they are doing, which then goes on
                elsewhere; 0 does not wait.

        Raises:
            UnsupportedArgumentError: There is no such replica, or none would be left.
        """
        self._require_supervision()
        checks.check_seconds("drain_timeout_s", drain_timeout_s, or_zero=True)
        if isinstance(replicas, int):
            checks.check_integer("replicas", replicas, 1)
        with self._lock:
            known = [one.replica_id for one in self._replicas]
            if isinstance(replicas, int):
                idle = idlest(self._load.snapshots())
                replicas = [one for one in idle if one not in self._leaving][:replicas]
            ids = [replicas] if isinstance(replicas, str) else list(dict.fromkeys(replicas))
            if not ids or not {*ids} <= {*known}:
                raise errors.UnsupportedArgumentError(f"replicas must be among {known}, got {ids}")
            members = [self._member(one) for one in ids]
            if not {*known} - self._leaving - {*ids}:
                others = f", while {sorted(self._leaving)} are leaving" if self._leaving else ""
                raise errors.UnsupportedArgumentError(
                    f"replicas must leave at least 1 of {known}, got {ids}{others}; "
                    "shutdown() ends them all"
                )
            self._leaving.update(ids)
        try:
            gone = self._leave(members, drain_timeout_s)
        finally:
            with self._lock:
                self._leaving.difference_update(ids)
        self.share_membership()
        close_members(gone)
        return ids

    def _leave(self, members: Sequence[Member], drain_timeout_s: float) -> list[Member]:
        """Drains replicas and takes them out of the service; returns them as they are then."""
        for one in members:
            self._load.mark(one.replica_id, ReplicaState.DRAINING, "it is being removed")
        limit_s = min(drain_timeout_s, CALL_TIMEOUT_S)  # one that hangs hears of it when it wakes
        self._call(members, "drain", limit_s=limit_s)
        try:
            self._await_idle(members, drain_timeout_s)
            with self._pusher.exclusive(PUSH_TIMEOUT_S), self._lock:
                # A shutdown has ended them all; one may have been restarted meanwhile, or removed.
                there, ids = self._require_open().members, {one.replica_id for one in members}
                gone = [one for one in there if one.replica_id in ids]
                self._replicas.put(without=ids)
                self._load.follow([one.replica_id for one in self._replicas])
        except BaseException:  # an interrupt from the keyboard too
            if self.is_open:
                self._call(members, "undrain")
            raise
        return gone

    def _await_idle(self, members: Sequence[Member], timeout_s: float) -> None:
        deadline, busy = checks.Deadline(timeout_s), list(members)
        while busy and not deadline.passed:
            limit_s = min(deadline.left_s, CALL_TIMEOUT_S)
            reports = self._call(busy, "report", limit_s=limit_s).good
            busy = [
                one
                for one in busy
                if (report := reports.get(one.replica_id))
                and (known := self._load.snapshot(one.replica_id))  # else it has left meanwhile
                and (report.num_unfinished or known.in_flight)
            ]
            time.sleep(DRAIN_POLL_S if busy else 0.0)
        late = "replica %s had not finished after %g s; its requests go on elsewhere"
        for one in busy:
            logger.warning(late, one.replica_id, timeout_s)

    def _end(self, member: Member) -> None:
        """Ends an actor that is dead or hung, and waits until its name is free again."""
        end_replica(member.actor, member.description.processes)
        remove([member.group])
        deadline, replica_id = checks.Deadline(END_TIMEOUT_S), member.replica_id
        while replica_id in living_ids(self._replicas.service_name):
            if deadline.passed:
                why = f"Ray did not end its actor within {END_TIMEOUT_S:g} s"
                raise errors.ReplicaUnavailableError(replica_id, ReplicaState.FAILED, why)
            time.sleep(DRAIN_POLL_S)

    def share_membership(self, *held: Member) -> Answers:
        """Stores the membership in every replica, for processes that attach or ask."""
        bare = self._replicas.require().with_actors(None)  # an actor must not hold itself
        card = {"settings": self._replicas.settings, "membership": bare}
        if held:
            self._call(held, "keep_card", card)
        return self._replicas.call_replicas("keep_card", card, deadline_s=CALL_TIMEOUT_S)

    def _call(
        self, members: Sequence[Member], method: str, *args: Any, limit_s: float = CALL_TIMEOUT_S
    ) -> Answers:
        """Calls the actors that these members had, even if they have been replaced since."""
        calls = dict.fromkeys([one.replica_id for one in members], args)
        return self._replicas.start_calls(method, calls, among=members).answers(limit_s)

    def _require_open(self) -> Membership:
        """Returns the membership; raises once the fleet was closed."""
        if not self.is_open:
            raise errors.ServiceClosedError(f"service {self._replicas.service_name} was shut down")
        return self._replicas.require()

    def _member(self, replica_id: str) -> Member:
        if (member := self._require_open().find(replica_id)) is None:
            raise KeyError(f"no replica {replica_id!r} in service {self._replicas.service_name}")
        return member


def _job_id() -> str | None:
    """Identifies this process's connection to Ray; ``None`` if there is none."""
    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else None


class ScalingPolicy(Protocol):
    """Says once a second how many replicas there should be; write your own, or take ours."""

    drain_timeout_s: float  # seconds that a replica which is removed has for what it is doing

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted, at least 1."""
        ...


@dataclass
class QueueLengthScaling:
    """Adds a replica while requests queue in the engines, removes one while engines are idle.

    One at a time, after either has lasted without a break; none while one is starting.

    Example:
        >>> AsyncVLLM.from_pretrained(model, scaling=QueueLengthScaling(2, 8))

    Args:
        min_replicas, max_replicas: Never fewer, at least 1, or more than these.
        long_queue: Waiting requests an engine, on average, above which the queue is long.
        idle_load: Samples an engine, on average of those that would be left, up to which they idle.
        patience_s: Seconds for which either must have lasted.
        drain_timeout_s: Seconds that a replica which is removed has for what it is doing.

    Raises:
        UnsupportedArgumentError: A number is out of range.
    """

    min_replicas: int
    max_replicas: int
    _: KW_ONLY
    long_queue: float = 4.0
    idle_load: float = 1.0
    patience_s: float = 30.0
    drain_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        checks.check_integer("min_replicas", self.min_replicas, 1)
        checks.check_integer("max_replicas", self.max_replicas, self.min_replicas)
        for name in ("long_queue", "idle_load", "patience_s"):
            checks.check_number(name, getattr(self, name), 0)
        checks.check_seconds("drain_timeout_s", self.drain_timeout_s, or_zero=True)
        self._long_since = self._idle_since = math.inf

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted."""
        num = len(snapshots)
        if num < self.min_replicas or num > self.max_replicas:
            return min(max(num, self.min_replicas), self.max_replicas)
        serving = [one for one in snapshots if one.state.admits_requests]
        queued = sum(one.num_waiting or 0 for one in serving)
        inside = sum(max(one.num_unfinished or 0, one.in_flight) for one in serving)
        is_settled = serving and ReplicaState.STARTING not in [one.state for one in snapshots]
        is_long = is_settled and queued > self.long_queue * len(serving)
        is_idle = is_settled and inside <= self.idle_load * (len(serving) - 1)
        self._long_since = min(self._long_since, now) if is_long else math.inf
        self._idle_since = min(self._idle_since, now) if is_idle else math.inf
        if now - self._long_since >= self.patience_s and num < self.max_replicas:
            self._long_since = math.inf
            return num + 1
        if now - self._idle_since >= self.patience_s and num > self.min_replicas:
            self._idle_since = math.inf
            return num - 1
        return num


def idlest(snapshots: Sequence[LoadSnapshot]) -> list[str]:
    """Returns the ids of replicas in the order in which they should leave."""
    order = sorted(snapshots, key=lambda one: (one.state.admits_requests, one.in_flight))
    return [one.replica_id for one in order]


# Seconds for which an actor may be out of reach before it is restarted. Ray takes about 62 s to
# know that a silent node is dead: by its defaults 5 health checks that each time out after 10 s,
# with pauses of 3 s. A restart before that would be tried on the node that is gone.
RETURN_S = 70.0
# Restarts of one replica are counted over this many seconds.
RESTART_WINDOW_S = 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Seconds between looks; a replica that changes its state is looked at once.
INTERVAL_S = 0.5
SCALING_INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 5.0
SCALING = "scaling"


class RestartBudget:
    """Tries per replica, ``limit`` within an hour, after pauses that double from 1 s to 60 s."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._tries: dict[str, deque[float]] = {}

    def is_due(self, replica_id: str, now: float) -> bool:
        tries = self._recent(replica_id, now)
        pause_s = min(FIRST_PAUSE_S * 2 ** (len(tries) - 1), LONGEST_PAUSE_S)
        return len(tries) < self._limit and (not tries or now >= tries[-1] + pause_s)

    def is_spent(self, replica_id: str, now: float) -> bool:
        return len(self._recent(replica_id, now)) >= self._limit

    def spend(self, replica_id: str, now: float) -> None:
        self._recent(replica_id, now).append(now)

    def refund(self, replica_id: str) -> None:
        """Forgets a replica's tries: it is well, or gone."""
        self._tries.pop(replica_id, None)

    def _recent(self, replica_id: str, now: float) -> deque[float]:
        tries = self._tries.setdefault(replica_id, deque())  # other threads have it too
        while tries and tries[0] <= now - RESTART_WINDOW_S:
            tries.popleft()
        return tries


class Supervisor:
    """Restarts, catches up and scales, each in a thread of its own, and again as budgets allow."""

    def __init__(
        self,
        fleet: Any,  # a ``Fleet``, which tests pretend
        load: LoadTracker,
        *,
        max_restarts: int,
        scaling: ScalingPolicy | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fleet, self._load, self._scaling = fleet, load, scaling
        self._restarts, self._catch_ups = RestartBudget(max_restarts), RestartBudget()
        self._scalings, self._scaled_at = RestartBudget(), -math.inf
        self._is_wanted, self._lock = is_wanted, threading.Lock()
        self._busy: set[str] = set()
        self._warned: set[str] = set()  # of replicas, and of a scaling policy that fails
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a restart under way ends by itself. Idempotent."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def is_at_work(self) -> bool:
        """Whether a replica is being restarted, or about to be."""
        if self._stopped.is_set():
            return False
        with self._lock:
            now, snapshots = self._load.clock(), self._load.snapshots()
            failed = [one.replica_id for one in snapshots if one.state is ReplicaState.FAILED]
            left = [one for one in failed if not self._restarts.is_spent(one, now)]
            return bool(self._busy) or (bool(left) and not _is_over(snapshots))

    def _run(self) -> None:
        with self._load.watched(self._wake.set, urgent=False):
            while not self._stopped.is_set() and self._is_wanted():
                self.look()
                self._wake.wait(INTERVAL_S)
                self._wake.clear()

    def look(self) -> None:
        """Begins whatever is due."""
        now, snapshots = self._load.clock(), self._load.snapshots()
        if _is_over(snapshots):
            return
        for one in snapshots:
            name = one.replica_id
            if one.away_since is not None and now < one.away_since + RETURN_S:
                continue
            match one.state:
                case ReplicaState.FAILED if self._restarts.is_due(name, now):
                    self._begin(name, self._restarts, self._fleet.restart, name)
                case ReplicaState.FAILED if self._restarts.is_spent(name, now):
                    if name not in self._warned:
                        spent = "replica %s has used up its restarts and stays failed: %s"
                        logger.error(spent, name, one.reason)
                    self._warned.add(name)
                case ReplicaState.STALE if self._catch_ups.is_due(name, now):
                    self._begin(name, self._catch_ups, self._fleet.catch_up, [name])
                case ReplicaState.SERVING:
                    self._catch_ups.refund(name)
                    self._warned.discard(name)
                case _:
                    pass
        if self._scaling is not None and now >= self._scaled_at + SCALING_INTERVAL_S:
            self._scaled_at = now
            there = [one for one in snapshots if one.state is not ReplicaState.DRAINING]
            self._scale(self._scaling, there, now)

    def _scale(self, scaling: ScalingPolicy, there: Sequence[LoadSnapshot], now: float) -> None:
        """Brings the number of replicas nearer to what the policy wants."""
        try:
            wanted, limit_s = scaling(there, now), scaling.drain_timeout_s
            checks.check_integer("the number of replicas wanted", wanted, 1)
        except Exception:  # whatever the user's own code raises must not end the restarts
            if SCALING not in self._warned:
                logger.exception("the scaling policy failed; the replicas stay as many as they are")
            self._warned.add(SCALING)
            return
        self._warned.discard(SCALING)
        if wanted == len(there) or not self._scalings.is_due(SCALING, now):
            return
        if wanted > len(there):
            self._begin(SCALING, self._scalings, self._fleet.add_replicas, wanted - len(there))
        else:
            remove = functools.partial(self._fleet.remove_replicas, drain_timeout_s=limit_s)
            self._begin(SCALING, self._scalings, remove, len(there) - wanted)

    def _begin(
        self, name: str, budget: RestartBudget, work: Callable[[Any], object], arg: Any
    ) -> None:
        """Runs ``work(arg)`` in a thread, unless something is under way for this name."""
        with self._lock:
            if name in self._busy:
                return
            self._busy.add(name)
        budget.spend(name, self._load.clock())
        threading.Thread(
            target=self._work, args=(name, work, arg), name=f"supervisor-{name}", daemon=True
        ).start()

    def _work(self, name: str, work: Callable[[Any], object], arg: Any) -> None:
        begin = time.monotonic()
        try:
            work(arg)
            if name == SCALING:
                self._scalings.refund(name)
            logger.info("replica %s: done in %.1f s", name, time.monotonic() - begin)
        except (errors.ServiceClosedError, KeyError) as error:  # it was removed meanwhile
            logger.debug("replica %s is not needed any more: %s", name, error)
        except BaseException as error:
            logger.warning("replica %s: %s", name, error)
            with self._load.lock:  # a restart that failed is tried again
                known = self._load.snapshot(name)
                if known is not None and known.state is ReplicaState.STARTING:
                    self._load.mark(name, ReplicaState.FAILED, str(error))
            if not isinstance(error, errors.SyncError | RayError):
                raise
        finally:
            with self._lock:
                self._busy.discard(name)
            self._wake.set()


def _is_over(snapshots: Sequence[LoadSnapshot]) -> bool:
    """Whether another process ended the service: a replica that leaves alone is not listed."""
    return any(one.state is ReplicaState.CLOSED for one in snapshots)

"""A service's replicas: what its processes share of them, how they are found, and called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import ReplicaUnavailableError, ServiceClosedError, loss
from torchrl_vllm_sync.observe.status import ServiceStatus, StatusLog
from torchrl_vllm_sync.replica import (
    UNRESPONSIVE_AFTER_S,
    EngineReport,
    Member,
    PushReport,
    ReplicaState,
)
from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.weights.transport import Standing, failed

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

logger = logging.getLogger(__name__)

DEFAULT_REQUEST_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What a service is launched with; beside the members this is all that copies of it need."""

    name: str  # unique on the cluster
    engine_args: AsyncEngineArgs | Any  # prepared; None in bare settings
    claims: Mapping[str, float] = field(default_factory=dict)  # of a replica: "GPU", "CPU", or less
    environment: Mapping[str, str] = field(default_factory=dict)  # of its processes
    actor_class: Any = None  # decorated by ``ray.remote`` or not; ``None`` for ``EngineActor``
    launched_at: float | None = None  # in seconds since 1970
    detached: bool = False  # whether replicas outlive the process that starts them
    colocated: bool = False  # whether engines sleep while a trainer uses their memory
    shares_weights: bool = False  # whether they keep it, and the trainer's parameters are in it
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    unresponsive_after_s: float = UNRESPONSIVE_AFTER_S
    max_restarts: int = 0  # of each replica within an hour
    balancing: Mapping[str, Any] = field(default_factory=dict)  # arguments of the balancer


class Membership:
    """The replicas of a service, in the order of joining, which restarts keep; immutable."""

    def __init__(self, members: Iterable[Member] = (), next_id: int = 0, epoch: int = 0) -> None:
        self.members = [*members]  # the actor of one that is being restarted may be dead
        self.next_id = max([next_id, *(1 + int(one.replica_id) for one in self.members)])
        self.epoch = epoch  # changes since the launch: of two memberships the greater is newer

    def find(self, replica_id: str) -> Member | None:
        return next((one for one in self.members if one.replica_id == replica_id), None)

    def with_actors(self, actors: Mapping[str, Any] | None) -> Membership:
        """Returns a copy of the same epoch: the members with these actors, or all without any."""
        # Without, for an actor to keep: it must not hold handles of its own service.
        members = [
            dataclasses.replace(one, actor=actors and actors[one.replica_id])
            for one in self.members
            if actors is None or one.replica_id in actors
        ]
        return Membership(members, self.next_id, self.epoch)


NAMESPACE = "torchrl_vllm"
ATTACH_TIMEOUT_S = 30.0
# Of the replicas' answers within this many seconds of the first, the newest counts.
NEWER_WITHIN_S = 1.0


def ensure_ray(default: str) -> None:
    """Joins the cluster named by ``RAY_ADDRESS``, or else by ``default``, unless one is joined."""
    if not ray.is_initialized():
        # What engines print is in Ray's own log files, unless the user has asked for it.
        init_ray(
            address=os.environ.get("RAY_ADDRESS", default),
            logging_level=logging.ERROR,
            log_to_driver=None if "RAY_LOG_TO_DRIVER" in os.environ else False,
        )


def init_ray(**options: Any) -> None:
    """Calls ``ray.init``, after which SIGTERM leaves every ``with`` of the main thread."""
    sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(**options)
    # Ray's C++ handler would print a trace and abort.
    if threading.current_thread() is threading.main_thread():
        is_default = sigterm in (signal.SIG_DFL, None)
        signal.signal(signal.SIGTERM, _exit_on_signal if is_default else sigterm)


def _exit_on_signal(number: int, _: object) -> None:
    sys.exit(128 + number)  # as shells tell it


def actor_name(service_name: str, replica_id: str) -> str:
    return f"async-vllm-replica-{service_name}-{replica_id}"


def living_ids(service_name: str) -> list[str]:
    """Returns the ids of a service's replicas whose actors are alive."""
    return sorted((one for name, one in _living() if name == service_name), key=int)


def running_services() -> dict[str, int]:
    """Returns the names of the cluster's services, each with the number of its living actors."""
    return dict(sorted(Counter(name for name, _ in _living()).items()))


def _living() -> Iterator[tuple[str, str]]:
    """Service name and id of each replica on the cluster whose actor is alive."""
    named: Any = ray.util.list_named_actors(all_namespaces=True)  # dicts, whatever its type says
    prefix = actor_name("", "").removesuffix("-")
    for one in named:
        name, dash, replica_id = one["name"].removeprefix(prefix).rpartition("-")
        ours = one["namespace"] == NAMESPACE and one["name"].startswith(prefix)
        if ours and dash and replica_id.isdecimal():
            yield name, replica_id


def named_actors(service_name: str) -> dict[str, Any]:
    """Returns the actors of a service that are alive, by replica id."""
    actors: dict[str, Any] = {}
    for replica_id in living_ids(service_name):
        try:
            actors[replica_id] = ray.get_actor(actor_name(service_name, replica_id), NAMESPACE)
        except ValueError:  # it ended since it was listed
            logger.debug("replica %s of service %s is gone", replica_id, service_name)
    return actors


def find_service(
    service_name: str, *, timeout_s: float = ATTACH_TIMEOUT_S, bare: bool = False
) -> tuple[ServiceSettings, Membership]:
    """Returns a service's settings, without what needs vLLM if bare, and living replicas."""
    try:
        ensure_ray("auto")
    except ConnectionError as error:
        raise ServiceClosedError(
            f"no service named {service_name!r}: no Ray cluster was found on this machine; "
            "set RAY_ADDRESS, or call ray.init(address=...) first"
        ) from error
    if not (actors := named_actors(service_name)):
        raise ServiceClosedError(
            f"no service named {service_name!r} runs on the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}; RAY_ADDRESS names another, of which this "
            "machine may have several"
        )
    cards = Cards(actors, timeout_s, bare=bare)
    while waited := cards.waited_for():
        wait(waited, timeout=cards.deadline.left_s, return_when=FIRST_COMPLETED)
    if (found := cards.newest()) is None:
        why = f"no replica of service {service_name!r} answered within {timeout_s:g} s"
        raise ServiceClosedError(why)
    return found


class Cards:
    """What replicas say of their service, asked for without waiting."""

    def __init__(self, actors: Mapping[str, Any], timeout_s: float, *, bare: bool) -> None:
        self._actors, self.deadline = actors, Deadline(timeout_s)
        # By keyword: where Ray has only the methods' names, it takes no positional arguments.
        self._calls = [one.card.remote(bare=bare).future() for one in actors.values()]

    def _answers(self) -> list[dict[str, Any]]:
        ended = [one for one in self._calls if one.done() and one.exception() is None]
        return [card for one in ended if (card := one.result())]  # one that joins has none yet

    def waited_for(self) -> list[Future[Any]]:
        """Those that have not answered, as long as they have time."""
        if self._answers():
            self.deadline.shorten(NEWER_WITHIN_S)
        return [] if self.deadline.passed else [one for one in self._calls if not one.done()]

    def newest(self) -> tuple[ServiceSettings, Membership] | None:
        """The service's settings and living replicas, of the newest answer there is."""
        for one in self._calls:
            if one.done() and (error := one.exception()):
                logger.warning("a replica is dead, or cannot say who is in its service: %s", error)
        if not (cards := self._answers()):
            return None
        newest = max(cards, key=lambda one: one["membership"].epoch)
        return newest["settings"], newest["membership"].with_actors(self._actors)


@contextlib.contextmanager
def observed(service_name: str) -> Iterator[Callable[[], ServiceStatus]]:
    """Gives what returns a running service's status, without importing vLLM or PyTorch."""
    settings, membership = find_service(service_name, bare=True)
    replicas = Replicas(settings, membership, is_copy=True)
    log, limit_s = StatusLog(replicas.load), settings.unresponsive_after_s
    monitor = LoadMonitor(replicas.load, replicas.to_ask, unresponsive_after_s=limit_s)
    monitor.start()
    about = {"launched_at": settings.launched_at}
    try:
        yield lambda: log.status(service_name, replicas.served_version(), replicas.members, **about)
    finally:
        monitor.stop()


def as_they_end(
    refs: Iterable[Any], deadline: Deadline, look: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Yields refs as they end, until a deadline that may move; calls ``look`` twice a second."""
    left = list(refs)
    while left:
        ready, left = ray.wait(left, timeout=min(deadline.left_s, 0.5))
        if ready:
            yield ready[0]
        elif deadline.passed:
            return
        look()


class Answers(dict[str, Any]):
    """What each replica answered to one call, or the exception with which its call ended."""

    @property
    def failures(self) -> dict[str, BaseException]:
        return failed(self)

    @property
    def good(self) -> dict[str, Any]:
        return {name: one for name, one in self.items() if not isinstance(one, BaseException)}

    def raise_failures(self) -> Self:
        """Raises the first exception, if there is any."""
        for failure in self.failures.values():
            raise failure
        return self


class ReplicaCalls:
    """One call to several replicas, under way."""

    def __init__(
        self,
        futures: Mapping[str, Future[Any]],
        on_death: Callable[[ReplicaUnavailableError], object],
    ) -> None:
        self._futures, self._on_death = futures, on_death

    def failures(self) -> dict[str, BaseException]:
        """Returns those that have ended with an exception by now, without waiting."""
        done = [name for name, one in self._futures.items() if one.done()]
        return Answers({name: self._answer(name) for name in done}).failures

    def answers(self, deadline_s: float) -> Answers:
        """Waits for all of them."""
        done = wait(self._futures.values(), timeout=deadline_s).done
        late = TimeoutError(f"no answer within {deadline_s:g} s")
        pairs = self._futures.items()
        return Answers({name: self._answer(name) if one in done else late for name, one in pairs})

    def first_answer(self, deadline_s: float) -> Any:
        """Waits for one of them to succeed."""
        names = {future: name for name, future in self._futures.items()}
        with contextlib.suppress(TimeoutError):
            answers = (self._answer(names[one]) for one in as_completed(names, deadline_s))
            return next((one for one in answers if not isinstance(one, BaseException)), None)

    def _answer(self, replica_id: str) -> Any:
        future = self._futures[replica_id]
        error = future.exception()
        if isinstance(error, RayTaskError):
            return error.cause
        if not isinstance(error, RayError):
            return error or future.result()
        if (lost := loss(replica_id, error)) is None:
            return error
        self._on_death(lost)
        return lost


RPC_TIMEOUT_S = 60.0
FIGURE_TIMEOUT_S = 10.0
REPORT_TIMEOUT_S = 5.0
DOUBTFUL_TIMEOUT_S = 0.5
# A process that does not make the changes looks for them, at most this often, while one is dead.
LOOK_INTERVAL_S = 1.0
LOOK_TIMEOUT_S = 2.0


class Replicas(Sequence[Member]):
    """A launched service's replicas in the order of joining; the transports' ``ReplicaClient``."""

    def __init__(
        self, settings: ServiceSettings, membership: Membership | None = None, is_copy: bool = False
    ) -> None:
        self.settings = settings  # replaced by a new balancer
        self._met_at: tuple[str, int | None] | None = None  # once that was named or asked for
        self.membership = membership  # ``None`` unless the service is launched
        self.is_copy = is_copy  # of a service that another process launched
        self.follows = is_copy or settings.detached  # others may change the membership
        self._has_asked, self._looked_at, self._lock = False, 0.0, threading.RLock()
        self._look: Cards | None = None  # under way, of :meth:`to_ask`
        self._last_served = 0
        self.load = LoadTracker([one.replica_id for one in self], state=ReplicaState.SERVING)
        for one in self.members:
            self.describe(one)

    def describe(self, member: Member) -> None:
        """Enters a member's KV-cache size, and whether it may be called, in the ledger."""
        facts = member.description
        self.load.describe(
            member.replica_id, block_size=facts.block_size, num_kv_blocks=facts.num_kv_blocks
        )
        if not member.joined:
            why = "it is held at its version" if member.held else "it is being restarted"
            self.load.mark(member.replica_id, ReplicaState.STARTING, why)

    def close(self) -> None:
        """Lists none any more; the ledger stays for requests that are still in flight."""
        with self._lock:
            self.membership = None

    def new_ids(self, number: int) -> list[str]:
        """Returns ids that no replica of the service ever had."""
        with self._lock:
            known = self.require()
            end = known.next_id + number
            self.membership = Membership(known.members, end, known.epoch)
            return [str(one) for one in range(known.next_id, end)]

    def put(self, *members: Member, without: Collection[str] = ()) -> None:
        """Adds members, or replaces those of their ids in their places; others leave."""
        with self._lock:
            known = self.require()
            left = {one.replica_id: one for one in (*known.members, *members)}
            kept = [one for name, one in left.items() if name not in without]
            self.membership = Membership(kept, known.next_id, known.epoch + 1)

    def suspend(self, replica_id: str, *, held: bool = False) -> Member:
        """Marks a member as not to be called until another is put in its place, or it again."""
        with self._lock:
            if (member := self.require().find(replica_id)) is None:
                raise KeyError(f"no replica {replica_id!r} in service {self.service_name}")
            self.put(dataclasses.replace(member, joined=False, held=held))
            return member

    @property
    def members(self) -> list[Member]:
        membership = self.membership  # another thread may close the service
        return [*membership.members] if membership else []

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        return self.members[index]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.members,)

    def __repr__(self) -> str:
        return repr(self.members)

    def current(self) -> list[Member]:
        """Those that may be called: all but those that are held, or being restarted."""
        return [one for one in self.members if one.joined]

    def answering(self) -> list[Member]:
        """Those whose requests in flight go on: all but those that are being restarted."""
        return [one for one in self.members if one.joined or one.held]

    def at(self, actor_index: int) -> Member:
        """Returns the one at a position, which must not be negative."""
        members = self.require().members
        if not 0 <= actor_index < len(members):
            raise IndexError(f"actor_index must be in [0, {len(members)}), got {actor_index}")
        return members[actor_index]

    def require(self) -> Membership:
        """Returns the membership; raises unless the service is launched."""
        if (membership := self.membership) is None:
            raise ServiceClosedError(
                f"service {self.settings.name} is not launched, or was shut down"
            )
        return membership

    @property
    def service_name(self) -> str:
        return self.settings.name

    def call_replicas(
        self,
        method: str,
        *args: Any,
        calls: Mapping[str, tuple[Any, ...]] | None = None,
        deadline_s: float = RPC_TIMEOUT_S,
        **kwargs: Any,
    ) -> Answers:
        """Calls an engine actor's method on all, with ``args`` or what each has in ``calls``."""
        calls = self.everyone(*args) if calls is None else calls
        return self.start_calls(method, calls, **kwargs).answers(deadline_s)

    def everyone(self, *args: Any) -> dict[str, tuple[Any, ...]]:
        """The same arguments for each replica that may be called."""
        self.require()
        return {one.replica_id: args for one in self.current()}

    def start_calls(
        self,
        method: str,
        calls: Mapping[str, tuple[Any, ...]],
        *,
        among: Iterable[Member] | None = None,  # the current ones; or these, current or not
        **kwargs: Any,
    ) -> ReplicaCalls:
        """Calls a method on some replicas, each with arguments of its own, and does not wait."""
        if among is None:
            self.require()
            among = self.current()
        actors = {one.replica_id: one.actor for one in among if one.replica_id in calls}
        futures = {
            name: getattr(actor, method).remote(*calls[name], **kwargs).future()
            for name, actor in actors.items()
        }
        return ReplicaCalls(futures, functools.partial(self._note_death, actors))

    def _note_death(self, called: Mapping[str, Any], death: ReplicaUnavailableError) -> None:
        name, now = death.replica_id, {one.replica_id: one.actor for one in self.current()}
        if now.get(name) == called[name]:  # else another took its place, or it was removed
            self.load.mark(name, death.state, death.reason, may_return=death.may_return)

    def figure(self, method: str, actor_index: int | None) -> Any:
        """One replica's figure by position, or all in a list, as TorchRL; ``None`` if unknown."""
        chosen = self.require().members if actor_index is None else [self.at(actor_index)]
        calls = {one.replica_id: () for one in chosen}
        known = self.call_replicas(method, calls=calls, deadline_s=FIGURE_TIMEOUT_S).good
        figures = [known.get(name) for name in calls]
        return figures if actor_index is None else figures[0]

    def standings(self) -> dict[str, Standing]:
        """Returns what this process knows of every current replica, by id, without actor calls."""
        found: dict[str, Standing] = {}
        for one in self.current():
            known = self.load.snapshot(one.replica_id)
            state, reason = (known.state, known.reason) if known else (ReplicaState.STARTING, "")
            incarnation = one.actor._actor_id.hex()
            found[one.replica_id] = Standing(state=state, reason=reason, incarnation=incarnation)
        return found

    def note_left_behind(self, version: int, replica_ids: Collection[str]) -> None:
        """Keeps this process's requests from replicas until they report ``version``."""
        with self.load.lock:
            for replica_id in set(replica_ids).intersection(self.load.replica_ids):
                self.load.set_floor(replica_id, version)

    def known(self) -> list[LoadSnapshot]:
        """Returns what is known of each replica; a new copy knows nothing and asks."""
        known = self.load.snapshots()
        reported = [one.measured_at is not None for one in known]
        # The monitor may know some already. One that never answers is asked once.
        unknown = not any(reported) or not (all(reported) or self._has_asked)
        if unknown and self.is_copy and self.membership is not None and ray.is_initialized():
            self._has_asked = True
            self.learn()
            known = self.load.snapshots()
        return known

    def served_version(self) -> int:
        """Returns the newest version that all serving replicas hold; kept while none serves."""
        known = [one.weight_version for one in self.known() if one.state.admits_requests]
        held = [one for one in known if one is not None]
        self._last_served = min(held, default=self._last_served)
        return self._last_served

    def learn(
        self,
        replica_ids: Collection[str] | None = None,
        *,
        doubtful: Collection[str] = (),
        pushed: PushReport | None = None,
        timeout_s: float = REPORT_TIMEOUT_S,
    ) -> None:
        """Asks replicas for reports ahead of the monitor's next look, and passes on a push."""
        asked_at, standings = self.load.clock(), self.standings()
        asked = standings.keys() if replica_ids is None else standings.keys() & set(replica_ids)
        doubted = {name for name in asked if name in doubtful or standings[name].absence}
        method, args = ("report", ()) if pushed is None else ("note_push", (pushed,))
        late = self.start_calls(method, dict.fromkeys(doubted, args))
        sure = self.start_calls(method, dict.fromkeys(asked - doubted, args))
        # Those that may not answer are not waited for long.
        for report in (sure.answers(timeout_s) | late.answers(DOUBTFUL_TIMEOUT_S)).values():
            if isinstance(report, EngineReport):
                self.load.observe(report, asked_at=asked_at)

    def to_ask(self) -> list[Member]:
        """Returns the replicas the monitor asks, after following changes by other processes."""
        # The replicas report the epoch of the newest membership: no actor calls while all is as it
        # was, and once a second while a replica is dead, or the last look failed. Nothing is waited
        # for, as the monitor keeps Ray from ending meanwhile: a later round finds the answers.
        membership = self.membership
        if self.follows and membership is not None and ray.is_initialized():
            snapshots, now = self.load.snapshots(), time.monotonic()
            newest = max((one.membership_epoch for one in snapshots), default=0)
            lost = any(one.state in (ReplicaState.FAILED, ReplicaState.CLOSED) for one in snapshots)
            is_due = now >= self._looked_at + LOOK_INTERVAL_S
            if self._look is None and is_due and (lost or newest > membership.epoch):
                self._looked_at = now
                try:
                    actors = named_actors(self.service_name)
                    self._look = Cards(actors, LOOK_TIMEOUT_S, bare=True)
                except RayError as error:
                    logger.debug("could not ask who is in %s: %s", self.service_name, error)
            if self._look is not None and not self._look.waited_for():
                (look, self._look) = self._look, None
                if found := look.newest():
                    self._follow(found[1])
        return self.current()

    def refresh_members(self) -> None:
        """Follows changes by other processes, so that a push reaches every serving replica."""
        self.look_for_members()()

    def look_for_members(self) -> Callable[[], None]:
        """Begins :meth:`refresh_members`, and returns what ends it."""
        membership = self.membership  # one that joins is known to all others before it serves
        if not self.follows or membership is None:
            return lambda: None
        asked = self.start_calls("report", self.everyone())

        def follow() -> None:
            report = asked.first_answer(LOOK_TIMEOUT_S)
            if report is None or report.membership_epoch > membership.epoch:
                self._follow_found()

        return follow

    def _follow_found(self) -> None:
        try:
            _, newer = find_service(self.service_name, timeout_s=LOOK_TIMEOUT_S, bare=True)
        except (ServiceClosedError, RayError) as error:  # no replica may be left to ask
            logger.debug("could not ask who is in service %s: %s", self.service_name, error)
            return
        self._follow(newer)

    def _follow(self, newer: Membership) -> None:
        with self._lock:
            if self.membership is None or newer.epoch <= self.membership.epoch:
                return
            restarts = {one.replica_id: one.num_restarts for one in self}
            self.membership = newer
            self.load.follow([one.replica_id for one in newer.members])
            for one in newer.members:
                if restarts.get(one.replica_id) != one.num_restarts:
                    self.load.renew(one.replica_id, ReplicaState.STARTING)
                self.describe(one)

    @property
    def rendezvous(self) -> tuple[str, int | None]:
        """This node's address, where transports meet the engines, and a port if one was named."""
        return self._met_at or (ray.util.get_node_ip_address(), None)

    def meeting_point(
        self, address: str | None = None, port: int | str | None = None
    ) -> tuple[str, int]:
        """Returns an address and a port of this node, the same until others are given."""
        from torchrl_vllm_sync.weights.broadcast.group import free_port  # needs PyTorch

        known_address, known_port = self.rendezvous
        if port is None:
            port = free_port(known_address) if known_port is None else known_port
        self._met_at = point = known_address if address is None else address, int(port)
        return point

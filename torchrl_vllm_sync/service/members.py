"""What all processes that have a service share: its settings, its members, and finding both."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from ray.exceptions import RayError

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, Member, Replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm import AsyncEngineArgs

logger = logging.getLogger(__name__)

DEFAULT_REQUEST_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What one replica claims of its node."""

    num_gpus: int  # one for each worker: tensor x pipeline x data parallel size
    num_cpus: float  # 0 claims none, which leaves them to collectors on a small machine

    def bundle(self) -> dict[str, float]:
        """Returns the placement-group bundle of one replica, without zero entries."""
        claims = {"GPU": float(self.num_gpus), "CPU": float(self.num_cpus)}
        return {name: amount for name, amount in claims.items() if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What a service is launched with; beside the members this is all that copies of it need."""

    name: str  # unique on the cluster
    engine_args: AsyncEngineArgs  # prepared
    resources: ReplicaResources = ReplicaResources(0, 0)  # of each replica
    environment: Mapping[str, str] = field(default_factory=dict)  # of its processes
    actor_class: Any = None  # decorated by ``ray.remote`` or not; ``None`` for ``EngineActor``
    detached: bool = False  # whether replicas outlive the process that starts them
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    unresponsive_after_s: float = UNRESPONSIVE_AFTER_S
    max_restarts: int = 0  # of each replica within an hour
    balancing: Mapping[str, Any] = field(default_factory=dict)  # arguments of the balancer
    rendezvous: tuple[str, int | None] | None = None  # once that was named or asked for


class Membership:
    """The replicas of a service, in the order of joining; thread-safe.

    A restarted replica keeps its id and its place. A pickled copy goes its own way from then on.
    """

    def __init__(
        self, members: Iterable[Member] = (), next_id: int | None = None, epoch: int = 0
    ) -> None:
        self._lock = threading.Lock()
        self._members = {one.replica_id: one for one in members}
        self._next_id = 1 + max(map(int, self._members), default=-1) if next_id is None else next_id
        self.epoch = epoch  # changes since the launch: of two memberships the greater is newer

    @property
    def members(self) -> list[Member]:
        """All of them, in order; the actor of one that is being restarted may be dead."""
        with self._lock:
            return list(self._members.values())

    def find(self, replica_id: str) -> Member | None:
        with self._lock:
            return self._members.get(replica_id)

    def new_id(self) -> str:
        """Returns an id that no replica of the service ever had."""
        with self._lock:
            self._next_id += 1
            return str(self._next_id - 1)

    def put(self, member: Member) -> None:
        """Adds a member, or replaces the one of its id in its place."""
        with self._lock:
            self._members[member.replica_id] = member
            self._next_id = max(self._next_id, 1 + int(member.replica_id))
            self.epoch += 1

    def suspend(self, replica_id: str) -> Member:
        """Marks a member as not to be called until another is put in its place."""
        with self._lock:
            member = self._members[replica_id]
            self._members[replica_id] = dataclasses.replace(member, joined=False)
            self.epoch += 1
            return member

    def remove(self, replica_id: str) -> Member:
        with self._lock:
            member = self._members.pop(replica_id)
            self.epoch += 1
            return member

    def follow(self, newer: Membership) -> None:
        """Takes over what another process knows."""
        members, next_id, epoch = newer.members, newer._next_id, newer.epoch
        with self._lock:
            self._members = {one.replica_id: one for one in members}
            self._next_id, self.epoch = next_id, epoch

    def with_actors(self, actors: Mapping[str, Any] | None) -> Membership:
        """Returns a copy of the same epoch: the members with these actors, or all without any."""
        # Without, for an actor to keep: it must not hold handles of its own service.
        members = [
            dataclasses.replace(
                one, replica=Replica(one.replica_id, actors and actors[one.replica_id])
            )
            for one in self.members
            if actors is None or one.replica_id in actors
        ]
        return Membership(members, next_id=self._next_id, epoch=self.epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        return Membership, (self.members, self._next_id, self.epoch)


# ---- Finding a running service, through the names of its replicas' actors
NAMESPACE = "torchrl_vllm"
ATTACH_TIMEOUT_S = 30.0
# Of the replicas' answers within this many seconds of the first, the newest counts.
NEWER_WITHIN_S = 1.0


def ensure_ray(default: str) -> None:
    """Joins the cluster named by ``RAY_ADDRESS``, or else by ``default``, unless one is joined."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", default))


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
    service_name: str, *, timeout_s: float = ATTACH_TIMEOUT_S
) -> tuple[ServiceSettings, Membership]:
    """Returns the settings of a running service, and its living replicas as its members."""
    try:
        ensure_ray("auto")
    except ConnectionError as error:
        raise ServiceClosedError(
            f"no service named {service_name!r}: no Ray cluster was found on this machine; "
            "set RAY_ADDRESS, or call ray.init(address=...) first"
        ) from error
    actors = named_actors(service_name)
    if not actors:
        address = ray.get_runtime_context().gcs_address
        raise ServiceClosedError(
            f"no service named {service_name!r} runs on the Ray cluster at {address}; RAY_ADDRESS "
            "names another, of which this machine may have several"
        )
    deadline, states = Deadline(timeout_s), []
    for ref in as_they_end([actor.card.remote() for actor in actors.values()], deadline):
        try:
            state = ray.get(ref)
        except RayError as error:
            logger.warning("a replica is dead, or cannot say who is in its service: %s", error)
            continue
        if state:  # one that joins has none yet
            states.append(state)
            deadline.shorten(NEWER_WITHIN_S)
    if not states:
        raise ServiceClosedError(
            f"no replica of service {service_name!r} answered within {timeout_s:g} s"
        )
    newest = max(states, key=lambda one: one["membership"].epoch)
    return newest["settings"], newest["membership"].with_actors(actors)


def as_they_end(refs: Iterable[Any], deadline: Deadline) -> Iterator[Any]:
    """Yields object refs as they end, until the deadline, which may be shortened meanwhile."""
    left = list(refs)
    while left:
        ready, left = ray.wait(left, timeout=deadline.left_s)
        if not ready:
            return
        yield ready[0]

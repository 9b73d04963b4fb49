"""Starting and ending replicas: placement, names, and nothing left behind by a failed launch."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError

from torchrl_vllm_sync.engine.args import for_replica
from torchrl_vllm_sync.errors import (
    LaunchError,
    PlacementError,
    ServiceClosedError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, Member, Replica

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.service.replicas import Membership

logger = logging.getLogger(__name__)

# Where replicas go: what each one claims of the Ray cluster, and refusing what cannot fit.


# Resources of actors that were just ended come back within about this many seconds.
SETTLE_S = 3.0
# Where every node's share is free, placement groups are ready within about this many seconds.
PLACE_TIMEOUT_S = 6.0
NO_NODE = "no single node holds one replica's share"


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What one replica claims.

    Attributes:
        num_gpus: GPUs, one for each worker: tensor x pipeline x data parallel size.
        num_cpus: CPUs; 0 claims none, which leaves them to collectors on a small machine.
    """

    num_gpus: int
    num_cpus: float

    def bundle(self) -> dict[str, float]:
        """Returns the placement-group bundle of one replica, without zero entries."""
        claims = {"GPU": float(self.num_gpus), "CPU": float(self.num_cpus)}
        return {name: amount for name, amount in claims.items() if amount}


def spread(
    resources: ReplicaResources, num_replicas: int, taken: Mapping[str, int]
) -> list[str | None]:
    """Chooses a node for each replica, so that as few as can be are on one."""
    import ray

    bundle = resources.bundle()
    counts = {
        node["NodeID"]: taken.get(node["NodeID"], 0)
        for node in ray.nodes()
        if node["Alive"] and not _missing(bundle, 1, node["Resources"])
    }
    chosen: list[str | None] = []
    for _ in range(num_replicas):
        best = min(counts, key=lambda node_id: counts[node_id], default=None)
        chosen.append(best)
        if best is not None:
            counts[best] += 1
    return chosen


def place(
    resources: ReplicaResources,
    num_replicas: int,
    *,
    detached: bool,
    preferred_nodes: Sequence[str | None] = (),
) -> list[Any]:
    """Reserves one placement group for each replica, each on a single node."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = resources.bundle()
    if not bundle:
        return []
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    deadline = time.monotonic() + SETTLE_S
    while why := _missing(bundle, num_replicas, ray.available_resources()):
        if time.monotonic() > deadline or _missing(bundle, num_replicas, ray.cluster_resources()):
            raise PlacementError(_refusal(bundle, num_replicas, why))
        time.sleep(0.1)
    if not any(not _missing(bundle, 1, node) for node in nodes):
        raise PlacementError(_refusal(bundle, num_replicas, NO_NODE))
    groups: list[Any] = []
    try:
        for at in range(num_replicas):
            groups.append(  # noqa: PERF401  those made so far are removed when one fails
                placement_group(
                    [bundle],
                    strategy="STRICT_PACK",
                    lifetime="detached" if detached else None,
                    # A wish; bundle_label_selector, which Ray documents, would insist.
                    _soft_target_node_id=preferred_nodes[at] if preferred_nodes else None,
                )
            )
        deadline = time.monotonic() + PLACE_TIMEOUT_S
        for group in groups:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise PlacementError(_refusal(bundle, num_replicas, NO_NODE))  # noqa: TRY301
    except BaseException:
        remove(groups)
        raise
    return groups


def remove(groups: Sequence[Any]) -> None:
    """Gives placement groups back; those that are gone already do no harm."""
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def actor_options(
    resources: ReplicaResources,
    group: Any | None,
    preferred_node: str | None = None,
) -> dict[str, Any]:
    """Returns the Ray options that put an actor into its replica's placement group."""
    options: dict[str, Any] = {"num_gpus": resources.num_gpus, "num_cpus": resources.num_cpus}
    if group is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=0,
            placement_group_capture_child_tasks=True,
        )
    elif preferred_node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(preferred_node, soft=True)
    return options


def _missing(bundle: dict[str, float], num_replicas: int, free: Mapping[str, float]) -> str:
    lacking = [
        f"{name}: {amount * num_replicas:g} needed, {free.get(name, 0.0):g} free"
        for name, amount in bundle.items()
        if amount * num_replicas > free.get(name, 0.0) + 1e-9
    ]
    return ", ".join(lacking)


def _refusal(bundle: dict[str, float], num_replicas: int, why: str) -> str:
    import ray

    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    free, total = ray.available_resources(), ray.cluster_resources()
    state = ", ".join(
        f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in ("GPU", "CPU")
    )
    remedy = "; num_cpus_per_replica=0 asks for no CPU" if "CPU" in bundle else ""
    return (
        f"{num_replicas} replica(s) of {asked} each do not fit: {why}; free in the cluster: "
        f"{state}{remedy}"
    )


# Finding a running service by its name, through the names of its replicas' actors.


NAMESPACE = "torchrl_vllm"
ATTACH_TIMEOUT_S = 30.0


def actor_name(service_name: str, replica_id: str) -> str:
    """Returns the name of one replica's actor in :data:`NAMESPACE`."""
    return f"async-vllm-replica-{service_name}-{replica_id}"


def living_ids(service_name: str) -> list[str]:
    """Returns the ids of a service's replicas whose actors are alive."""
    return sorted((one for name, one in _living() if name == service_name), key=int)


def running_services() -> dict[str, int]:
    """Returns the names of all services, and how many of each one's replicas have a living actor.

    Of the Ray cluster that this process is connected to.
    """
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


def find_service(service_name: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> dict[str, Any]:
    """Returns the shared state of a running service, with its living replicas as its members."""
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
    state = _newest_card([actor.card.remote() for actor in actors.values()], timeout_s)
    if state is None:
        raise ServiceClosedError(
            f"no replica of service {service_name!r} answered within {timeout_s:g} s"
        )
    return {**state, "_membership": _with_actors(state["_membership"], actors)}


def _with_actors(membership: Membership, actors: Mapping[str, Any]) -> Membership:
    """Fills actor handles in; members whose actor is gone are left out."""
    members = [
        dataclasses.replace(one, replica=Replica(one.replica_id, actors[one.replica_id]))
        for one in membership.members
        if one.replica_id in actors
    ]
    return membership.of(members)


def _newest_card(refs: list[Any], timeout_s: float) -> dict[str, Any] | None:
    """Returns the card that knows most, of those that come within a moment of the first.

    Replicas that are about to join have none.
    """
    deadline = time.monotonic() + timeout_s
    best: dict[str, Any] | None = None
    while refs:
        ready, refs = ray.wait(refs, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        try:
            card = ray.get(ready[0])
        except RayError as error:
            logger.warning("a replica is dead, or cannot say who is in its service: %s", error)
            continue
        if card and (best is None or card["_membership"].epoch > best["_membership"].epoch):
            best = card
            deadline = min(deadline, time.monotonic() + 1.0)
    return best


def ensure_ray(default: str) -> None:
    """Joins the cluster named by ``RAY_ADDRESS``, or else by ``default``, unless one is joined."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", default))


LAUNCH_TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"
CLOSE_TIMEOUT_S = 20.0
# Other processes ask each actor once a second. One that restarts replicas must hear that they were
# closed before it sees them dead.
CLOSE_LINGER_S = 2.0
# Replicas often fail for the same reason at about the same time: all of them are named.
FAILURE_GRACE_S = 2.0
# Questions about an actor must not queue behind its requests: it would be taken for silent.
MAX_CONCURRENT_CALLS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything needed to start replicas.

    Attributes:
        name: Name of the service, unique on the cluster.
        engine_args: Prepared engine arguments.
        resources: What each claims.
        environment: Environment variables of the replicas' processes.
        actor_class: ``EngineActor`` or a subclass of it, decorated by ``ray.remote`` or not.
        detached: Whether replicas outlive the process that starts them.
        timeout_s: Seconds until all must have started.
        unresponsive_after_s: Seconds of silence after which an engine has failed.
    """

    name: str
    engine_args: AsyncEngineArgs
    resources: ReplicaResources
    environment: dict[str, str]
    actor_class: Any
    detached: bool
    timeout_s: float
    unresponsive_after_s: float = UNRESPONSIVE_AFTER_S


def launch_timeout_s() -> float:
    """Returns the launch limit in seconds: the environment's, or 300 as in TorchRL."""
    given = os.environ.get(LAUNCH_TIMEOUT_VARIABLE, "300")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UnsupportedArgumentError(
            f"{LAUNCH_TIMEOUT_VARIABLE} must be a positive number of seconds, got {given!r}"
        )
    return seconds


def launch_replicas(
    plan: LaunchPlan,
    replica_ids: Sequence[str],
    *,
    beside: Collection[Member] = (),
    join_later: bool = False,
    num_restarts: int = 0,
) -> list[Member]:
    """Starts replicas, spread over the nodes, and waits until all have started."""
    ensure_ray("local")
    taken = Counter(
        one.description.processes.node_id
        for one in beside
        if one.joined and one.description.processes is not None
    )
    nodes = spread(plan.resources, len(replica_ids), taken)
    groups = place(plan.resources, len(replica_ids), detached=plan.detached, preferred_nodes=nodes)
    replicas: list[Replica] = []
    try:
        actor_class = _as_remote(plan.actor_class)
        for at, replica_id in enumerate(replica_ids):
            actor = actor_class.options(
                name=actor_name(plan.name, replica_id),
                namespace=NAMESPACE,
                lifetime="detached" if plan.detached else None,
                max_concurrency=MAX_CONCURRENT_CALLS,
                **actor_options(
                    plan.resources, groups[at] if groups else None, preferred_node=nodes[at]
                ),
            ).remote(
                replica_id=replica_id,
                engine_args=for_replica(plan.engine_args, int(replica_id), num_restarts),
                environment=plan.environment,
                service_name=plan.name,
                unresponsive_after_s=plan.unresponsive_after_s,
            )
            replicas.append(Replica(replica_id, actor))
            if join_later:
                actor.join_later.remote()
        descriptions = _await_start(replicas, plan.timeout_s)
        _check_block_sizes([*(one.description for one in beside), *descriptions])
    except BaseException:
        close_replicas(replicas, groups, timeout_s=0.0)
        raise
    return [
        Member(
            replica=replica,
            description=description,
            group=groups[at] if groups else None,
            num_restarts=num_restarts,
        )
        for at, (replica, description) in enumerate(zip(replicas, descriptions, strict=True))
    ]


def _check_block_sizes(descriptions: list[EngineDescription]) -> None:
    """Refuses engines whose caches cannot be compared block by block."""
    sizes = {one.replica_id: one.block_size for one in descriptions}
    if len(set(sizes.values())) > 1:
        told = {key: f"its KV-cache blocks have {size} tokens" for key, size in sizes.items()}
        raise LaunchError(told)


def _await_start(replicas: Sequence[Replica], timeout_s: float) -> list[EngineDescription]:
    """Starts the engines side by side; the first failure ends the wait for the others."""
    starting = {replica.actor.start.remote(): replica.replica_id for replica in replicas}
    deadline = time.monotonic() + timeout_s
    failures: dict[str, str] = {}
    started: dict[str, EngineDescription] = {}
    waiting = list(starting)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        replica_id = starting[done[0]]
        try:
            started[replica_id] = ray.get(done[0])
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            why = f"{type(cause).__name__}: {str(cause).strip()}"
            told = cause.failures if isinstance(cause, LaunchError) else {}
            failures[replica_id] = told.get(replica_id, why)
            logger.debug("replica %s did not start", replica_id, exc_info=error)
            deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if failures:
        raise LaunchError(failures)
    if waiting:
        raise LaunchError({starting[ref]: f"not serving after {timeout_s:g} s" for ref in waiting})
    return [started[replica.replica_id] for replica in replicas]


def close_replicas(
    replicas: Sequence[Replica], groups: Sequence[Any], *, timeout_s: float, linger_s: float = 0.0
) -> None:
    """Ends replicas and frees their resources.

    A replica that is dead already, or does not answer, is ended all the same.
    """
    deadline = time.monotonic() + timeout_s
    if timeout_s > 0:
        closing = [replica.actor.close.remote() for replica in replicas]
        if closing:
            ray.wait(
                closing, num_returns=len(closing), timeout=max(0.0, deadline - time.monotonic())
            )
    time.sleep(linger_s)
    for replica in replicas:
        ray.kill(replica.actor)
    remove(groups)


def _as_remote(actor_class: Any) -> Any:
    if inspect.isclass(actor_class):
        return ray.remote(actor_class)
    return actor_class

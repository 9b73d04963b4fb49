"""Starting and ending replicas: placement, names, and nothing left behind by a failed launch."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from tqdm import tqdm

from torchrl_vllm_sync.checks import Deadline, is_missing
from torchrl_vllm_sync.engine.args import for_replica
from torchrl_vllm_sync.errors import LaunchError, PlacementError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineDescription, Member
from torchrl_vllm_sync.service.replicas import (
    NAMESPACE,
    ServiceSettings,
    actor_name,
    as_they_end,
    ensure_ray,
)

logger = logging.getLogger(__name__)

LAUNCH_TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"
# Resources of actors that were just ended come back within about this many seconds.
SETTLE_S = 3.0
# Where every node's share is free, placement groups are ready within about this many seconds.
PLACE_TIMEOUT_S = 6.0
# Replicas often fail for the same reason at about the same time: all of them are named.
FAILURE_GRACE_S = 2.0
CLOSE_TIMEOUT_S = 20.0
# Other processes ask each actor once a second. One that restarts replicas must learn that they were
# closed before it sees them dead.
CLOSE_LINGER_S = 2.0
# Questions about an actor must not queue behind its requests: it would be taken for silent.
MAX_CONCURRENT_CALLS = 65536


def spread(
    claims: Mapping[str, float], num_replicas: int, taken: Mapping[str, int]
) -> list[str | None]:
    """Chooses a node for each replica, so that few share one; ``None`` if none fits."""
    # A group of Ray's own strategy ``SPREAD`` could not give the bundle of one replica back alone.
    fitting = (one for one in ray.nodes() if one["Alive"])
    fitting = [one["NodeID"] for one in fitting if not _missing(claims, 1, one["Resources"])]
    counts, chosen = {one: taken.get(one, 0) for one in fitting}, list[str | None]()
    for _ in range(num_replicas):
        chosen.append(node := min(counts, key=counts.__getitem__, default=None))
        if node is not None:
            counts[node] += 1
    return chosen


def place(
    claims: Mapping[str, float],
    num_replicas: int,
    *,
    detached: bool,
    preferred_nodes: Sequence[str | None] = (),
) -> list[Any]:
    """Reserves one placement group for each replica, each on a single node."""
    if not claims:
        return []
    deadline = Deadline(SETTLE_S)
    while why := _missing(claims, num_replicas, ray.available_resources()):
        if deadline.passed or _missing(claims, num_replicas, ray.cluster_resources()):
            raise _refusal(claims, num_replicas, why)
        time.sleep(0.1)
    scattered = "no single node holds one replica's share"
    nodes = preferred_nodes or spread(claims, num_replicas, {})
    if None in nodes:
        raise _refusal(claims, num_replicas, scattered)
    groups: list[Any] = []
    options: Any = {"strategy": "STRICT_PACK", "lifetime": "detached" if detached else None}
    with contextlib.ExitStack() as undo:
        undo.callback(remove, groups)
        groups.extend(  # the node is a wish; bundle_label_selector would insist
            placement_group([dict(claims)], _soft_target_node_id=node, **options) for node in nodes
        )
        deadline = Deadline(PLACE_TIMEOUT_S)
        if not all(group.wait(deadline.left_s) for group in groups):
            raise _refusal(claims, num_replicas, scattered)
        undo.pop_all()
    return groups


def remove(groups: Sequence[Any]) -> None:
    """Gives placement groups back; those that are gone already do no harm."""
    for group in filter(None, groups):
        remove_placement_group(group)


def actor_options(
    claims: Mapping[str, float], group: Any | None, preferred_node: str | None = None
) -> dict[str, Any]:
    """Returns the Ray options that put an actor into its replica's placement group."""
    options: dict[str, Any] = {"num_gpus": claims.get("GPU", 0), "num_cpus": claims.get("CPU", 0)}
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0, True)
    elif preferred_node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(preferred_node, soft=True)
    return options


def _missing(claims: Mapping[str, float], num_replicas: int, free: Mapping[str, float]) -> str:
    lacking = [
        f"{name}: {amount * num_replicas:g} needed, {free.get(name, 0.0):g} free"
        for name, amount in claims.items()
        if amount * num_replicas > free.get(name, 0.0) + 1e-9
    ]
    return ", ".join(lacking)


def _refusal(claims: Mapping[str, float], num_replicas: int, why: str) -> PlacementError:
    asked = ", ".join(f"{amount:g} {name}" for name, amount in claims.items())
    free, total = ray.available_resources(), ray.cluster_resources()
    state = [f"{free.get(one, 0.0):g} of {total.get(one, 0.0):g} {one}" for one in ("GPU", "CPU")]
    remedy = "; num_cpus_per_replica=0 asks for no CPU" if "CPU" in claims else ""
    return PlacementError(
        f"{num_replicas} replica(s) of {asked} each do not fit: {why}; free in the cluster: "
        f"{', '.join(state)}{remedy}"
    )


def launch_timeout_s() -> float:
    """Returns the launch limit in seconds: the environment's, or 300 as in TorchRL."""
    given = os.environ.get(LAUNCH_TIMEOUT_VARIABLE, "300")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(given)) < math.inf:
            return seconds
    raise UnsupportedArgumentError(
        f"{LAUNCH_TIMEOUT_VARIABLE} must be a positive number of seconds, got {given!r}"
    )


def engines_start_here() -> bool:
    """Whether this is the cluster's only node, or will be."""
    if not ray.is_initialized():
        return "RAY_ADDRESS" not in os.environ
    alive = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
    return alive == [ray.get_runtime_context().get_node_id()]


def launch_replicas(
    settings: ServiceSettings,
    replica_ids: Sequence[str],
    *,
    beside: Collection[Member] = (),
    join_later: bool = False,
    num_restarts: int = 0,
    progress: tqdm[Any] | None = None,
) -> list[Member]:
    """Starts replicas, spread over the nodes, and waits until all have started."""
    timeout_s = launch_timeout_s()
    if engines_start_here() and is_missing(model := settings.engine_args.model):
        raise UnsupportedArgumentError(f"model must be a checkpoint, and there is none at {model}")
    if not ray.is_initialized():
        ensure_ray("local")
    known = [one.description.processes for one in beside if one.joined]
    taken = Counter(one.node_id for one in known if one is not None)
    claims, detached = settings.claims, settings.detached
    nodes = spread(claims, len(replica_ids), taken)
    groups = place(claims, len(replica_ids), detached=detached, preferred_nodes=nodes)
    groups = groups or [None] * len(replica_ids)
    actors: dict[str, Any] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(remove, groups)
        actor_class: Any = settings.actor_class
        if actor_class is None:
            from torchrl_vllm_sync.engine.actor import EngineActor

            actor_class = EngineActor
        if inspect.isclass(actor_class):
            actor_class = ray.remote(actor_class)
        for replica_id, group, node in zip(replica_ids, groups, nodes, strict=True):
            actor = actor_class.options(
                name=actor_name(settings.name, replica_id),
                namespace=NAMESPACE,
                lifetime="detached" if detached else None,
                max_concurrency=MAX_CONCURRENT_CALLS,
                **actor_options(claims, group, preferred_node=node),
            ).remote(
                replica_id=replica_id,
                engine_args=for_replica(settings.engine_args, int(replica_id), num_restarts),
                environment=dict(settings.environment),
                unresponsive_after_s=settings.unresponsive_after_s,
            )
            undo.callback(ray.kill, actor)
            actors[replica_id] = actor
            if join_later:
                actor.join_later.remote()
        descriptions = _await_start(actors, timeout_s, progress or tqdm(disable=True))
        _check_block_sizes([*(one.description for one in beside), *descriptions.values()])
        undo.pop_all()
    return [
        Member(name, actor, description=descriptions[name], group=group, num_restarts=num_restarts)
        for (name, actor), group in zip(actors.items(), groups, strict=True)
    ]


def _await_start(
    actors: Mapping[str, Any], timeout_s: float, progress: tqdm[Any]
) -> dict[str, EngineDescription]:
    """Starts the engines side by side; the first failure ends the wait for the others."""
    starting = {actor.start.remote(): replica_id for replica_id, actor in actors.items()}
    failures, started = dict[str, str](), dict[str, EngineDescription]()
    deadline = Deadline(timeout_s)
    # A terminal's line is rewritten; elsewhere each would be a new one.
    look = progress.refresh if os.isatty(2) else lambda: None
    for ref in as_they_end(starting, deadline, look):
        replica_id = starting[ref]
        try:
            started[replica_id] = ray.get(ref)
            progress.update()
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            why = f"{type(cause).__name__}: {str(cause).strip()}"
            told = cause.failures if isinstance(cause, LaunchError) else {}
            failures[replica_id] = told.get(replica_id, why)
            logger.debug("replica %s did not start", replica_id, exc_info=error)
            deadline.shorten(FAILURE_GRACE_S)
    late = [] if failures else [one for one in starting.values() if one not in started]
    failures |= dict.fromkeys(late, f"not serving after {timeout_s:g} s")
    if failures:
        raise LaunchError(failures)
    return {name: started[name] for name in actors}


def _check_block_sizes(descriptions: list[EngineDescription]) -> None:
    """Refuses engines whose caches cannot be compared block by block."""
    if len({one.block_size for one in descriptions}) > 1:
        told = "its KV-cache blocks have {} tokens"
        raise LaunchError({one.replica_id: told.format(one.block_size) for one in descriptions})


def close_members(
    members: Sequence[Member], *, timeout_s: float = CLOSE_TIMEOUT_S, linger_s: float = 0.0
) -> None:
    """Ends replicas and frees their resources; one that does not answer is ended all the same."""
    try:
        if timeout_s > 0 and (closing := [one.actor.close.remote() for one in members]):
            ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
        time.sleep(linger_s)
    finally:  # also after an interrupt: nothing lists them any more
        for one in members:
            ray.kill(one.actor)
        remove([one.group for one in members])

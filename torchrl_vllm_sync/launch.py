"""Starting and ending replicas, so that a launch that fails leaves nothing behind."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from torchrl_vllm_sync import placement
from torchrl_vllm_sync.engine.args import for_replica
from torchrl_vllm_sync.errors import LaunchError, UnsupportedArgumentError
from torchrl_vllm_sync.membership import Member
from torchrl_vllm_sync.registry import NAMESPACE, actor_name, ensure_ray
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, Replica

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.replica import EngineDescription

__all__ = [
    "LaunchPlan",
    "close_replicas",
    "launch_replicas",
    "launch_timeout_s",
]

logger = logging.getLogger(__name__)

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
    resources: placement.ReplicaResources
    environment: dict[str, str]
    actor_class: Any
    detached: bool
    timeout_s: float
    unresponsive_after_s: float = UNRESPONSIVE_AFTER_S


def launch_timeout_s() -> float:
    """Returns the launch limit in seconds: the environment's, or 300 as in TorchRL.

    Raises:
        UnsupportedArgumentError: The variable does not hold a positive number.
    """
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
    """Starts replicas, spread over the nodes, and waits until all have started.

    Args:
        plan: What to start.
        replica_ids: Ids of the new replicas.
        beside: Members of the service that run already.
        join_later: Let them take no requests before they are admitted; see ``EngineActor.admit``.
        num_restarts: How often these ids were started before.

    Returns:
        The new members, in order.

    Raises:
        PlacementError: The cluster cannot hold them.
        LaunchError: Some did not start in time, with a reason for each. Nothing is left behind.
    """
    ensure_ray("local")
    taken = Counter(
        one.description.processes.node_id
        for one in beside
        if one.joined and one.description.processes is not None
    )
    nodes = placement.spread(plan.resources, len(replica_ids), taken)
    groups = placement.place(
        plan.resources, len(replica_ids), detached=plan.detached, preferred_nodes=nodes
    )
    replicas: list[Replica] = []
    try:
        actor_class = _as_remote(plan.actor_class)
        for at, replica_id in enumerate(replica_ids):
            actor = actor_class.options(
                name=actor_name(plan.name, replica_id),
                namespace=NAMESPACE,
                lifetime="detached" if plan.detached else None,
                max_concurrency=MAX_CONCURRENT_CALLS,
                **placement.actor_options(
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
    """Refuses engines whose caches cannot be compared block by block.

    Raises:
        LaunchError: Block sizes differ.
    """
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

    Args:
        replicas: The replicas.
        groups: Their placement groups.
        timeout_s: Seconds for engines to end by themselves.
        linger_s: Seconds for which the actors then go on to say that they are closed.
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
    placement.remove(groups)


def _as_remote(actor_class: Any) -> Any:
    if inspect.isclass(actor_class):
        return ray.remote(actor_class)
    return actor_class

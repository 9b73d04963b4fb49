"""Starting and ending a service's replicas, so that a launch that fails leaves nothing behind."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from ray.exceptions import RayActorError, RayError, RayTaskError

from torchrl_vllm_sync import placement
from torchrl_vllm_sync.engine_args import for_replica
from torchrl_vllm_sync.errors import LaunchError, ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, Replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.replica import EngineDescription

__all__ = [
    "LaunchPlan",
    "LaunchedReplicas",
    "close_replicas",
    "find_replicas",
    "launch_replicas",
    "launch_timeout_s",
]

logger = logging.getLogger(__name__)

NAMESPACE = "torchrl_vllm"
LAUNCH_TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"
CLOSE_TIMEOUT_S = 20.0
ATTACH_TIMEOUT_S = 30.0
# Replicas often fail for the same reason at about the same time: all of them are named.
FAILURE_GRACE_S = 2.0
# Requests run on an actor's default group; questions about it must not queue behind them.
MAX_CONCURRENT_CALLS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything needed to start replicas.

    Attributes:
        name: Name of the service, unique on the cluster.
        engine_args: Prepared engine arguments.
        num_replicas: How many to start.
        resources: What each claims.
        environment: Environment variables of the replicas' processes.
        actor_class: ``EngineActor`` or a subclass of it, decorated by ``ray.remote`` or not.
        detached: Whether replicas outlive the process that starts them.
        timeout_s: Seconds until all must serve.
        unresponsive_after_s: Seconds of silence after which an engine has failed.
    """

    name: str
    engine_args: AsyncEngineArgs
    num_replicas: int
    resources: placement.ReplicaResources
    environment: dict[str, str]
    actor_class: Any
    detached: bool
    timeout_s: float
    unresponsive_after_s: float = UNRESPONSIVE_AFTER_S


@dataclass(slots=True)
class LaunchedReplicas:
    """Replicas that serve, and the placement groups that hold their resources."""

    replicas: list[Replica] = field(default_factory=list)
    descriptions: list[EngineDescription] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)

    def without_actors(self) -> LaunchedReplicas:
        """Returns a copy without actor handles, which an actor may keep of its own service."""
        return LaunchedReplicas([], self.descriptions, self.groups)


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


def launch_replicas(plan: LaunchPlan) -> LaunchedReplicas:
    """Starts every replica and waits until all serve.

    Raises:
        PlacementError: The cluster cannot hold them.
        LaunchError: Some did not start in time, with a reason for each. Nothing is left behind.
    """
    _ensure_ray("local")
    launched = LaunchedReplicas(
        groups=placement.place(plan.resources, plan.num_replicas, detached=plan.detached)
    )
    try:
        actor_class = _as_remote(plan.actor_class)
        for index in range(plan.num_replicas):
            group = launched.groups[index] if launched.groups else None
            actor = actor_class.options(
                name=actor_name(plan.name, index),
                namespace=NAMESPACE,
                lifetime="detached" if plan.detached else None,
                max_concurrency=MAX_CONCURRENT_CALLS,
                **placement.actor_options(plan.resources, group),
            ).remote(
                replica_id=str(index),
                engine_args=for_replica(plan.engine_args, index),
                environment=plan.environment,
                service_name=plan.name,
                unresponsive_after_s=plan.unresponsive_after_s,
            )
            launched.replicas.append(Replica(str(index), actor))
        launched.descriptions = _await_start(launched.replicas, plan.timeout_s)
        _check_block_sizes(launched.descriptions)
    except BaseException:
        close_replicas(launched.replicas, launched.groups, timeout_s=0.0)
        raise
    return launched


def _check_block_sizes(descriptions: list[EngineDescription]) -> None:
    """Refuses engines whose caches cannot be compared block by block.

    Raises:
        LaunchError: Block sizes differ.
    """
    sizes = {one.replica_id: one.block_size for one in descriptions}
    if len(set(sizes.values())) > 1:
        told = {key: f"its KV-cache blocks have {size} tokens" for key, size in sizes.items()}
        raise LaunchError(told)


def actor_name(service_name: str, index: int | str) -> str:
    """Returns the name of one replica's actor in :data:`NAMESPACE`."""
    return f"async-vllm-replica-{service_name}-{index}"


def find_replicas(service_name: str) -> dict[str, Any]:
    """Returns the shared state of a running service, its replicas filled in.

    Raises:
        ServiceClosedError: No replica of a service of this name runs on the cluster.
    """
    try:
        _ensure_ray("auto")
    except ConnectionError as error:
        raise ServiceClosedError(
            f"no service named {service_name!r}: no Ray cluster was found on this machine; "
            "set RAY_ADDRESS, or call ray.init(address=...) first"
        ) from error
    prefix = actor_name(service_name, "")
    named: Any = ray.util.list_named_actors(all_namespaces=True)  # dicts, whatever its type says
    names = sorted(
        one["name"]
        for one in named
        if one["namespace"] == NAMESPACE
        and one["name"].startswith(prefix)
        and one["name"].removeprefix(prefix).isdecimal()  # not service "a-b" for "a"
    )
    if not names:
        raise ServiceClosedError(f"no service named {service_name!r} runs on this Ray cluster")
    actors = {name.removeprefix(prefix): ray.get_actor(name, NAMESPACE) for name in names}
    state = _first_answer([actor.card.remote() for actor in actors.values()])
    if state is None:
        raise ServiceClosedError(
            f"no replica of service {service_name!r} answered within {ATTACH_TIMEOUT_S:g} s"
        )
    launched: LaunchedReplicas = state["_launched_replicas"]
    launched.replicas = [
        Replica(one.replica_id, actors[one.replica_id])
        for one in launched.descriptions
        if one.replica_id in actors
    ]
    return state


def _first_answer(refs: list[Any]) -> dict[str, Any] | None:
    """Returns the first answer of a live replica that is not empty, as it is during launch."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while refs:
        ready, refs = ray.wait(refs, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        try:
            answer = ray.get(ready[0])
        except RayActorError as error:
            logger.warning("a replica is dead: %s", error)
        else:
            if answer:
                return answer
    return None


def _ensure_ray(default: str) -> None:
    """Joins the cluster named by ``RAY_ADDRESS``, or else by ``default``, unless one is joined."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", default))


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
            failures[replica_id] = f"{type(cause).__name__}: {str(cause).strip()}"
            logger.debug("replica %s did not start", replica_id, exc_info=error)
            deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if failures:
        raise LaunchError(failures)
    if waiting:
        raise LaunchError({starting[ref]: f"not serving after {timeout_s:g} s" for ref in waiting})
    return [started[replica.replica_id] for replica in replicas]


def close_replicas(replicas: Sequence[Replica], groups: Sequence[Any], *, timeout_s: float) -> None:
    """Ends replicas, giving engines ``timeout_s`` to end by themselves, and frees their resources.

    A replica that is dead already, or does not answer, is ended all the same.
    """
    deadline = time.monotonic() + timeout_s
    if timeout_s > 0:
        closing = [replica.actor.close.remote() for replica in replicas]
        if closing:
            ray.wait(
                closing, num_returns=len(closing), timeout=max(0.0, deadline - time.monotonic())
            )
    for replica in replicas:
        ray.kill(replica.actor)
    placement.remove(groups)


def _as_remote(actor_class: Any) -> Any:  # noqa: ANN401  a class, or a Ray actor class
    if inspect.isclass(actor_class):
        return ray.remote(actor_class)
    return actor_class

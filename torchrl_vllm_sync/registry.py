"""Finding a running service by its name, through the names of its replicas' actors."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from ray.exceptions import RayError

from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrl_vllm_sync.membership import Membership

__all__ = [
    "NAMESPACE",
    "actor_name",
    "ensure_ray",
    "find_service",
    "living_ids",
    "named_actors",
    "running_services",
]

logger = logging.getLogger(__name__)

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
    """Returns the shared state of a running service, with its living replicas as its members.

    Args:
        service_name: Name of the service.
        timeout_s: Seconds within which one of its replicas must answer.

    Raises:
        ServiceClosedError: No replica of a service of this name runs on the cluster, or none
            answers.
    """
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

"""Where replicas go: what each one claims of the Ray cluster, and refusing what cannot fit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import PlacementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ReplicaResources", "actor_options", "place", "remove", "spread"]

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
    """Chooses a node for each replica, so that as few as can be are on one.

    Args:
        resources: What each replica claims.
        num_replicas: How many to place.
        taken: Ray's id of a node to the number of the service's replicas there already.

    Returns:
        Ray's id of the node that each had best run on; ``None`` if no node holds one.
    """
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
    """Reserves one placement group for each replica, each on a single node.

    Args:
        resources: What each replica claims.
        num_replicas: How many to place.
        detached: Whether the groups outlive the process that reserves them.
        preferred_nodes: Where each had best be, see :func:`spread`; elsewhere if there is no room.

    Returns:
        Placement groups in replica order; an empty list when replicas claim nothing.

    Raises:
        PlacementError: The cluster cannot hold them; nothing stays reserved.
    """
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
    """Returns the Ray options that put an actor into its replica's placement group.

    Args:
        resources: What the replica claims.
        group: Its placement group; ``None`` if it claims nothing.
        preferred_node: Where it had best be if it claims nothing.
    """
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

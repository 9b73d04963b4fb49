"""This library's own balancer, with the simulated clock in place of the real one."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from benchmarks.routing_sim.interface import Cluster, EngineFigures, SimRequest
    from torchrl_vllm_sync import Reservation

__all__ = ["OwnBalancer"]


class OwnBalancer:
    """``LoadBalancer`` as a service makes it, with no change but its clock.

    Args:
        cluster: What is known of the engines.
        seed: The balancer's.
        **settings: Its other settings.
    """

    def __init__(self, cluster: Cluster, seed: int, **settings: Any) -> None:
        self._cluster, self._now = cluster, 0.0
        self.load = LoadTracker([], clock=lambda: self._now)
        for replica_id in cluster.replica_ids:
            self._add(replica_id)
        self._balancer = LoadBalancer(self, seed=seed, **settings)
        self._places: dict[int, Reservation] = {}

    @property
    def actors(self) -> list[object]:
        """Stand-ins: a balancer calls none of them."""
        return list(self.load.replica_ids)

    def choose(self, request: SimRequest, now: float) -> int:
        """Reserves a place, as a service does for each request."""
        self._now = now
        place = self._balancer.reserve(
            request.tokens,
            session_id=None if request.session_id < 0 else request.session_id,
            group_id=None if request.group_id < 0 else request.group_id,
        )
        self._places[request.request_id] = place
        return int(place.replica_id)

    def finish(
        self, request: SimRequest, replica_id: int, output: np.ndarray | None, now: float
    ) -> None:
        """Gives the place back, with the answer if there is one."""
        self._now = now
        self._places.pop(request.request_id).release([] if output is None else [output])

    def end_session(self, session_id: int, now: float) -> None:
        """Releases the session, as ``vLLMWrapper`` does."""
        self._balancer.release_sessions(session_id)

    def report(self, replica_id: int, figures: EngineFigures, asked_at: float, now: float) -> None:
        """Takes what the background monitor would bring."""
        self._now = now
        report = EngineReport(
            replica_id=str(replica_id),
            state=ReplicaState.SERVING,
            weight_version=figures.weight_version,
            num_unfinished=figures.num_running + figures.num_waiting,
            num_running=figures.num_running,
            num_waiting=figures.num_waiting,
            kv_cache_usage=figures.kv_cache_usage,
        )
        self.load.observe(report, asked_at=asked_at)

    def set_replicas(self, replica_ids: Sequence[int], now: float) -> None:
        """Marks the dead and adds the new, as a service would."""
        self._now = now
        known = set(self.load.replica_ids)
        for replica_id in replica_ids:
            if str(replica_id) not in known:
                self._add(replica_id)
        for name in known.difference(map(str, replica_ids)):
            self.load.mark(name, ReplicaState.FAILED, "died")

    def _add(self, replica_id: int) -> None:
        self.load.add(str(replica_id), ReplicaState.SERVING)
        self.load.describe(
            str(replica_id),
            block_size=self._cluster.block_size,
            num_kv_blocks=self._cluster.num_kv_blocks,
        )

"""Routers to compare.

A policy stands for one router. It learns nothing but what a router in its place would: the requests
that pass through it, their answers, and what engines report now and then. This library's balancer
is the real one; the others are described in words and code of their own, from the public sources
that they name.
"""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.routing_sim.traces import BlockKeys
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.routing_sim.engine import EngineCosts
    from torchrl_vllm_sync.replica import EngineReport
    from torchrl_vllm_sync.routing.balancer import Reservation


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request as its router sees it; a trace may have no sessions or groups."""

    request_id: int
    tokens: np.ndarray
    session_id: int | None = None
    group_id: int | None = None


class Policy:
    """One router, which counts its requests in flight.

    ``now`` is the simulated time in seconds, and never decreases.
    """

    def __init__(self, num_replicas: int, costs: EngineCosts, seed: int) -> None:
        self.in_flight = [0] * num_replicas

    def choose(self, request: SimRequest, now: float) -> int:
        """Id of the replica for a request, which is sent there at once."""
        replica_id = self.pick(request)
        self.in_flight[replica_id] += 1
        return replica_id

    def pick(self, request: SimRequest) -> int:
        raise NotImplementedError

    def finish(self, request: SimRequest, replica_id: int, output: np.ndarray, now: float) -> None:
        """A request has ended; ``output`` has its tokens (int32)."""
        self.in_flight[replica_id] -= 1

    def end_session(self, session_id: int) -> None:
        """A session sends no more requests."""

    def report(self, report: EngineReport, now: float) -> None:
        """An engine's figures have arrived."""


class OwnBalancer(Policy):
    """``LoadBalancer`` as a service makes it, with no change but its clock."""

    def __init__(self, num_replicas: int, costs: EngineCosts, seed: int) -> None:
        self._now = 0.0
        self.load = LoadTracker([], clock=lambda: self._now)
        for replica_id in map(str, range(num_replicas)):
            self.load.add(replica_id, ReplicaState.SERVING)
            self.load.describe(
                replica_id, block_size=costs.block_size, num_kv_blocks=costs.num_kv_blocks
            )
        self._balancer = LoadBalancer(self, seed=seed)
        self._places: dict[int, Reservation] = {}

    @property
    def actors(self) -> list[object]:
        """Stand-ins: a balancer calls none of them."""
        return list(self.load.replica_ids)

    def choose(self, request: SimRequest, now: float) -> int:
        self._now = now
        place = self._balancer.reserve(
            request.tokens, session_id=request.session_id, group_id=request.group_id
        )
        self._places[request.request_id] = place
        return int(place.replica_id)

    def finish(self, request: SimRequest, replica_id: int, output: np.ndarray, now: float) -> None:
        self._now = now
        self._places.pop(request.request_id).release([output])

    def end_session(self, session_id: int) -> None:
        self._balancer.release_sessions(session_id)

    def report(self, report: EngineReport, now: float) -> None:
        self._now = now
        self.load.observe(report, asked_at=now)


class RoundRobin(Policy):
    """The next replica, whoever asks."""

    _turn = -1

    def pick(self, request: SimRequest) -> int:
        self._turn += 1
        return self._turn % len(self.in_flight)


class TorchRLRule(Policy):
    """The hash of the first eight tokens, modulo the number of replicas.

    Source: ``torchrl/modules/llm/backends/vllm/vllm_async.py`` of TorchRL 0.14.1, ``LoadBalancer``
    with its default strategies ``["prefix-aware", "requests"]``. The check that would send a
    request elsewhere when the preferred actor is overloaded reads an undefined name in a balancer
    that was built from the service, catches the error, and answers "not overloaded"; so
    ``"requests"`` is reached only by a request without tokens, which no trace has.

    Simplified: its blocking call to all actors per decision costs no simulated time.
    """

    def pick(self, request: SimRequest) -> int:
        prefix = tuple(request.tokens[:8].tolist())
        return hash(prefix) % len(self.in_flight)  # of ints: no salt


class LMetric(Policy):
    """The least product of the tokens that a replica has not seen and its requests plus one.

    Source: sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs`` at acaa759, which
    ports the Blitz router's rule. Of equal products fewer requests win, then fewer unseen tokens,
    then the first replica. A prompt is inserted for whoever was chosen; answers are not. No
    release that was tried has this policy, so it is not checked against a real router.

    Simplified: blocks of tokens instead of characters; no evictions, since no trace here reaches
    the limit of 2**26 characters a replica.
    """

    def __init__(self, num_replicas: int, costs: EngineCosts, seed: int) -> None:
        super().__init__(num_replicas, costs, seed)
        self._block_size = costs.block_size
        self._keys = BlockKeys(costs.block_size)
        self._seen: list[set[object]] = [set() for _ in range(num_replicas)]

    def pick(self, request: SimRequest) -> int:
        num_tokens = len(request.tokens)
        names: list[object] = list(self._keys.of(request.tokens))
        if rest := num_tokens % self._block_size:  # counts as a block
            names.append((names[-1] if names else -1, request.tokens[-rest:].tobytes()))

        def cost(replica_id: int) -> tuple[int, int, int]:
            seen, load = self._seen[replica_id], self.in_flight[replica_id]
            known = next((at for at, name in enumerate(names) if name not in seen), len(names))
            unseen = num_tokens - min(known * self._block_size, num_tokens)
            return unseen * (load + 1), load, unseen

        best = min(range(len(self._seen)), key=cost)
        self._seen[best].update(names)
        return best


POLICIES: dict[str, type[Policy]] = {
    "ours": OwnBalancer,
    "round-robin": RoundRobin,
    "lmetric": LMetric,
    "torchrl": TorchRLRule,
}

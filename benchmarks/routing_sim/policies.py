"""Routers to compare, and what the simulated cluster and a router know of each other.

A policy stands for one router. It learns nothing but what a router in its place would: the requests
that pass through it, their answers, and what engines report now and then. This library's balancer
is the real one; the others are described in words and code of their own, from the public sources
that they name.
"""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from benchmarks.routing_sim.scenario import BlockKeys
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from torchrl_vllm_sync import Reservation


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is known of the engines from the start.

    Attributes:
        replica_ids: Ids of the replicas at the start.
        block_size: Tokens in a KV-cache block.
        num_kv_blocks: KV-cache blocks of each replica.
    """

    replica_ids: tuple[int, ...]
    block_size: int
    num_kv_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request as its router sees it.

    Attributes:
        request_id: Unique in a trace.
        tokens: The prompt's ids: int32 of shape ``(num_tokens,)``, not to be written to.
        session_id: Conversation; -1 if the trace has none.
        group_id: Group of requests with the same prompt; -1 if the trace has none.
    """

    request_id: int
    tokens: np.ndarray
    session_id: int = -1
    group_id: int = -1


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What an engine reports of itself.

    Attributes:
        num_running: Requests in its batch.
        num_waiting: Requests that wait.
        kv_cache_usage: Share of its KV blocks that requests hold, 0 to 1.
        weight_version: Version of its weights.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    weight_version: int


class Policy(Protocol):
    """One router. ``now`` is the simulated time in seconds, and never decreases."""

    def choose(self, request: SimRequest, now: float) -> int:
        """Id of the replica for a request, which is sent there at once."""
        ...

    def finish(self, request: SimRequest, replica_id: int, output: np.ndarray, now: float) -> None:
        """A request has ended; ``output`` has its tokens (int32)."""
        ...

    def end_session(self, session_id: int, now: float) -> None:
        """A session sends no more requests."""
        ...

    def report(self, replica_id: int, figures: EngineFigures, asked_at: float, now: float) -> None:
        """An engine's figures of the time ``asked_at`` have arrived."""
        ...


PolicyFactory: TypeAlias = "Callable[[Cluster, int], Policy]"
"""Makes a policy from what is known of the cluster and a seed."""


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

    def finish(self, request: SimRequest, replica_id: int, output: np.ndarray, now: float) -> None:
        """Gives the place back, with the answer."""
        self._now = now
        self._places.pop(request.request_id).release([output])

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

    def _add(self, replica_id: int) -> None:
        self.load.add(str(replica_id), ReplicaState.SERVING)
        self.load.describe(
            str(replica_id),
            block_size=self._cluster.block_size,
            num_kv_blocks=self._cluster.num_kv_blocks,
        )


class CountingPolicy:
    """A router that counts its requests in flight, in the order in which replicas were named."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.in_flight = dict.fromkeys(cluster.replica_ids, 0)

    def choose(self, request: SimRequest, now: float) -> int:
        """Id of the replica for a request; the request counts from here on."""
        replica_id = self.pick(request)
        self.in_flight[replica_id] += 1
        return replica_id

    def pick(self, request: SimRequest) -> int:
        """Id of the replica for a request."""
        raise NotImplementedError

    def finish(self, request: SimRequest, replica_id: int, output: np.ndarray, now: float) -> None:
        """A request has ended."""
        self.in_flight[replica_id] -= 1

    def end_session(self, session_id: int, now: float) -> None:
        """A session sends no more requests."""

    def report(self, replica_id: int, figures: EngineFigures, asked_at: float, now: float) -> None:
        """An engine's figures, which none of these routers reads."""


class RoundRobin(CountingPolicy):
    """The next replica, whoever asks."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster, seed)
        self._turn = 0

    def pick(self, request: SimRequest) -> int:
        """The next replica."""
        self._turn += 1
        return list(self.in_flight)[(self._turn - 1) % len(self.in_flight)]


class TorchRLRule(CountingPolicy):
    """The hash of the first eight tokens, modulo the number of replicas.

    Source: ``torchrl/modules/llm/backends/vllm/vllm_async.py`` of TorchRL 0.14.1, ``LoadBalancer``
    with its default strategies ``["prefix-aware", "requests"]``. The check that would send a
    request elsewhere when the preferred actor is overloaded reads an undefined name in a balancer
    that was built from the service, catches the error, and answers "not overloaded"; so
    ``"requests"`` is reached only by a request without tokens, which no trace has.

    Simplified: its blocking call to all actors per decision costs no simulated time.
    """

    def pick(self, request: SimRequest) -> int:
        """The replica that the prompt's beginning belongs to."""
        prefix = tuple(request.tokens[:8].tolist())
        return list(self.in_flight)[hash(prefix) % len(self.in_flight)]  # of ints: no salt


class LMetric(CountingPolicy):
    """The least product of the tokens that a replica has not seen and its requests plus one.

    Source: sgl-project/sglang, ``sgl-model-gateway/src/policies/lmetric.rs`` at acaa759, which
    ports the Blitz router's rule. Of equal products fewer requests win, then fewer unseen tokens,
    then the first replica. A prompt is inserted for whoever was chosen; answers are not. No
    release that was tried has this policy, so it is not checked against a real router.

    Simplified: blocks of tokens instead of characters; no evictions, since no trace here reaches
    the limit of 2**26 characters a replica.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster, seed)
        self._block_size = cluster.block_size
        self._names = BlockKeys(cluster.block_size)
        self._seen: dict[int, set[object]] = {one: set() for one in cluster.replica_ids}

    def pick(self, request: SimRequest) -> int:
        """The least product."""
        num_tokens = len(request.tokens)
        names: list[object] = list(self._names.of(request.tokens))
        if rest := num_tokens % self._block_size:  # counts as a block
            names.append((names[-1] if names else -1, request.tokens[-rest:].tobytes()))
        best = None
        for order, (replica_id, load) in enumerate(self.in_flight.items()):
            seen = self._seen[replica_id]
            known = next((at for at, name in enumerate(names) if name not in seen), len(names))
            unseen = num_tokens - min(known * self._block_size, num_tokens)
            key = (unseen * (load + 1), load, unseen, order, replica_id)
            best = key if best is None else min(best, key)
        assert best is not None
        self._seen[best[-1]].update(names)
        return best[-1]


POLICIES: dict[str, PolicyFactory] = {
    "ours": OwnBalancer,
    "round-robin": RoundRobin,
    "lmetric": LMetric,
    "torchrl": TorchRLRule,
}

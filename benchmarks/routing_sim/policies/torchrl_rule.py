"""TorchRL's ``LoadBalancer`` as its ``AsyncVLLM`` service makes it."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.in_flight import CountingPolicy

if TYPE_CHECKING:
    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["TorchRLRule"]


class TorchRLRule(CountingPolicy):
    """The hash of the first eight tokens, modulo the number of replicas.

    Source: ``torchrl/modules/llm/backends/vllm/vllm_async.py`` of TorchRL 0.14.1, ``LoadBalancer``
    with its default strategies ``["prefix-aware", "requests"]``. The check that would send a
    request elsewhere when the preferred actor is overloaded reads an undefined name in a balancer
    that was built from the service, catches the error, and answers "not overloaded"; so
    ``"requests"`` is reached only by a request without tokens.

    Simplified: TorchRL never learns of a death and would go on choosing dead actors; here it is
    given the living ones. Its blocking call to all actors per decision costs no simulated time.
    ``"requests"`` counts this router's requests, TorchRL asks the actors.

    Args:
        cluster: What is known of the engines.
        seed: Of the ties.
        prefix_length: Tokens that are hashed.
    """

    def __init__(self, cluster: Cluster, seed: int, *, prefix_length: int = 8) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._prefix_length = prefix_length

    def pick(self, request: SimRequest, now: float) -> int:
        """The replica that the prompt's beginning belongs to."""
        prefix = tuple(request.tokens[: self._prefix_length].tolist())
        if not prefix:
            return self.ties.one_of(self.in_flight.fewest())
        replica_ids = list(self.in_flight.counts)
        return replica_ids[hash(prefix) % len(replica_ids)]  # a tuple of ints: no salt

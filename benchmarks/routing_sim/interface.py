"""What the simulated cluster and a routing policy know of each other.

A policy stands for one router. It learns nothing but what a router in its place would: the requests
that pass through it, their answers, and what engines report now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

__all__ = ["Cluster", "EngineFigures", "Policy", "PolicyFactory", "SimRequest"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is known of the engines from the start.

    Attributes:
        replica_ids: Ids of the replicas at the start.
        block_size: Tokens in a KV-cache block.
        num_kv_blocks: KV-cache blocks of each replica.
        max_num_seqs: Requests that an engine runs at a time; more wait.
        prefill_tokens_per_s: Prompt tokens that an otherwise idle engine computes in a second.
    """

    replica_ids: tuple[int, ...]
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    prefill_tokens_per_s: float


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

    def finish(
        self, request: SimRequest, replica_id: int, output: np.ndarray | None, now: float
    ) -> None:
        """A request has ended; ``output`` has its tokens (int32), or is None if it was lost."""
        ...

    def end_session(self, session_id: int, now: float) -> None:
        """A session sends no more requests."""
        ...

    def report(self, replica_id: int, figures: EngineFigures, asked_at: float, now: float) -> None:
        """An engine's figures of the time ``asked_at`` have arrived."""
        ...

    def set_replicas(self, replica_ids: Sequence[int], now: float) -> None:
        """Replicas have joined, or were found dead; these take requests now."""
        ...


PolicyFactory: TypeAlias = "Callable[[Cluster, int], Policy]"
"""Makes a policy from what is known of the cluster and a seed."""

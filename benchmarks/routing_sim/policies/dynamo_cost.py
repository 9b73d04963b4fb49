"""NVIDIA Dynamo's KV router: blocks to prefill plus blocks in use."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.policies.blocks import PrefixNames
from benchmarks.routing_sim.policies.in_flight import CountingPolicy

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["DynamoCost"]

_LEAST_BLOCK = 64


@dataclass(slots=True)
class _Booking:
    """One request that a replica works on."""

    names: list[int]
    prefill_tokens: int
    prefilled_at: float


@dataclass(slots=True)
class _Worker:
    """What the router keeps of one replica."""

    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    active_blocks: dict[int, int] = field(default_factory=dict)
    bookings: dict[int, _Booking] = field(default_factory=dict)
    busy_until: float = 0.0

    def overlap(self, names: list[int]) -> int:
        """Leading blocks of a prompt that are cached."""
        return _leading(names, self.cached)

    def decode_blocks(self, names: list[int]) -> int:
        """Different blocks in use if a prompt came on top."""
        return len(self.active_blocks) + len(names) - _leading(names, self.active_blocks)

    def prefill_tokens(self, now: float) -> int:
        """Tokens of prompts that are being computed."""
        return sum(one.prefill_tokens for one in self.bookings.values() if one.prefilled_at > now)


def _leading(names: list[int], known: Container[int]) -> int:
    """How many names are known, of which each is only known with all before it."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] in known:
            low = middle
        else:
            high = middle - 1
    return low


class DynamoCost(CountingPolicy):
    """The least sum of prompt blocks to compute and of blocks in use.

    Source: ai-dynamo/dynamo, ``lib/kv-router/src/scheduling/selector`` (``DefaultWorkerSelector``)
    and ``sequences``, as of November 2026, with the default settings, and the choices of the
    selection core in ai-dynamo-runtime 1.6.1 (``benchmarks.routing_peers``). A replica's cost is
    ``max(0, (active prefill tokens + prompt tokens) / block_size - overlap) + decode blocks``:
    *active prefill tokens* are the uncached tokens of its requests that have no answer yet,
    *overlap* the prompt's leading blocks that it holds, and *decode blocks* the different full
    blocks of the prompts that it works on, with this one's. Of equal costs one is taken at random.

    Simplified: Dynamo hears of the blocks that engines store and drop; here its index is told of a
    prompt when it is sent and of the answer when it ends, and holds as many blocks a replica as the
    KV cache, least recently used out first, in blocks of 64 tokens at least. It does not learn of
    weight updates. A prompt counts as
    computed when a queue at the engine's prefill rate would have done it, as no first token is
    reported. Queueing in the router and temperature are off, as by default.

    Args:
        cluster: What is known of the engines.
        seed: Of the ties.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._cluster = cluster
        self.block_size = -(-_LEAST_BLOCK // cluster.block_size) * cluster.block_size
        self._max_cached = cluster.num_kv_blocks * cluster.block_size // self.block_size
        self._names = PrefixNames(self.block_size)
        self.workers = {replica_id: _Worker() for replica_id in cluster.replica_ids}

    def pick(self, request: SimRequest, now: float) -> int:
        """The least cost."""
        names = self._names(request.tokens)
        costs, overlaps = {}, {}
        for replica_id, worker in self.workers.items():
            overlaps[replica_id] = worker.overlap(names)
            costs[replica_id] = self.cost(worker, names, len(request.tokens), now)
        least = min(costs.values())
        candidates = [replica_id for replica_id, cost in costs.items() if cost == least]
        replica_id = self.ties.one_of(candidates)
        self._book(request, replica_id, names, overlaps[replica_id], now)
        return replica_id

    def cost(self, worker: _Worker, names: list[int], num_tokens: int, now: float) -> float:
        """What one more request would cost a replica, in blocks."""
        prefill = (worker.prefill_tokens(now) + num_tokens) / self.block_size - worker.overlap(
            names
        )
        return max(0.0, prefill) + worker.decode_blocks(names)

    def _book(
        self, request: SimRequest, replica_id: int, names: list[int], overlap: int, now: float
    ) -> None:
        worker = self.workers[replica_id]
        uncached = max(0, len(request.tokens) - overlap * self.block_size)
        start = max(now, worker.busy_until)
        worker.busy_until = start + uncached / self._cluster.prefill_tokens_per_s
        worker.bookings[request.request_id] = _Booking(names, uncached, worker.busy_until)
        for name in names:
            worker.active_blocks[name] = worker.active_blocks.get(name, 0) + 1
        self._store(worker, names)

    def _store(self, worker: _Worker, names: list[int]) -> None:
        """Notes blocks as cached, the last one as the oldest, as engines free them."""
        for name in reversed(names):
            worker.cached[name] = None
            worker.cached.move_to_end(name)
        while len(worker.cached) > self._max_cached:
            worker.cached.popitem(last=False)

    def finish(
        self, request: SimRequest, replica_id: int, output: np.ndarray | None, now: float
    ) -> None:
        """Frees what the request held, and notes its answer as cached."""
        if not self.in_flight.end(request.request_id, replica_id):
            return
        worker = self.workers[replica_id]
        booking = worker.bookings.pop(request.request_id)
        for name in booking.names:
            if worker.active_blocks[name] == 1:
                del worker.active_blocks[name]
            else:
                worker.active_blocks[name] -= 1
        if output is not None:
            self._store(worker, self._names(np.concatenate([request.tokens, output])))

    def set_replicas(self, replica_ids: Sequence[int], now: float) -> None:
        """Forgets who left; who joined holds nothing."""
        super().set_replicas(replica_ids, now)
        self.workers = {one: self.workers.get(one) or _Worker() for one in replica_ids}

"""Dynamo's selection core in process, told by events which blocks its workers hold.

``SelectionService`` of ``ai-dynamo-runtime`` holds the index, the bookings and the selector of
Dynamo's KV router. Workers are made up: what one stores is published as vLLM publishes it, by
ZeroMQ, and each request waits until the index has heard of the one before.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.peers.script import BLOCK_SIZE, End, Send

if TYPE_CHECKING:
    from benchmarks.peers.script import Script

__all__ = ["dynamo_choices"]

_HEARD_S = 10.0


@dataclass(slots=True)
class _Publisher:
    """What one made-up worker stores and says."""

    socket: Any
    endpoint: str
    stored: set[tuple[int, ...]] = field(default_factory=set)
    number: int = 0

    def store(self, blocks: list[int]) -> None:
        """Publishes the blocks of a prompt that are new."""
        import msgpack

        known = 0
        while known < len(blocks) and tuple(blocks[: known + 1]) in self.stored:
            known += 1
        if known == len(blocks):
            return
        hashes = [_hash(blocks[: length + 1]) for length in range(len(blocks))]
        parent = hashes[known - 1] if known else None
        tokens = [block + 1 for block in blocks[known:] for _ in range(BLOCK_SIZE)]
        event = ["BlockStored", hashes[known:], parent, tokens, BLOCK_SIZE, None]
        payload = msgpack.packb([time.time(), [event], 0])
        self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1
        for length in range(known, len(blocks)):
            self.stored.add(tuple(blocks[: length + 1]))


def _hash(blocks: list[int]) -> int:
    return hash(tuple(blocks)) & 0x7FFFFFFFFFFFFFFF


def dynamo_choices(
    script: Script, num_workers: int, *, prefill_at_once: bool
) -> tuple[list[int], list[float]]:
    """What Dynamo chooses for the requests of a script, and the seconds of each decision.

    Args:
        script: What happens; sessions, groups and waiting are not part of it.
        num_workers: Workers.
        prefill_at_once: Prompts count as computed as soon as they are sent; otherwise not until
            their request ends.
    """
    return asyncio.run(_run(script, num_workers, prefill_at_once))


async def _run(
    script: Script, num_workers: int, prefill_at_once: bool
) -> tuple[list[int], list[float]]:
    import zmq
    from dynamo._core import SelectionService  # pyright: ignore[reportMissingImports]

    service = SelectionService(indexer_threads=1)
    context = zmq.Context()
    publishers: list[_Publisher] = []
    try:
        for worker in range(num_workers):
            socket = context.socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            publishers.append(_Publisher(socket, f"tcp://127.0.0.1:{port}"))
            await service.upsert_worker(
                {
                    "worker_id": worker,
                    "endpoint": f"http://127.0.0.1:{port}",
                    "block_size": BLOCK_SIZE,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1_000_000,
                    "kv_events_endpoint": publishers[worker].endpoint,
                }
            )
        await asyncio.sleep(1)  # a subscriber that joins late misses what was said before
        chosen: list[int] = []
        seconds: list[float] = []
        for step in script.steps:
            match step:
                case Send():
                    request = len(chosen)
                    tokens = script.tokens(request).tolist()
                    query = {"token_ids": tokens, "selection_id": str(request)}
                    begin = time.perf_counter()
                    answer = await service.select_and_reserve(query)
                    seconds.append(time.perf_counter() - begin)
                    worker = answer["worker_id"]
                    chosen.append(worker)
                    if prefill_at_once:
                        await service.prefill_complete(str(request))
                    publishers[worker].store(script.prompts[request])
                    await _heard(service, tokens, worker, len(script.prompts[request]))
                case End(request):
                    await service.free_reservation(str(request))
                case _:
                    pass
        return chosen, seconds
    finally:
        service.shutdown()
        for publisher in publishers:
            publisher.socket.close()
        context.term()


async def _heard(service: Any, tokens: list[int], worker: int, num_blocks: int) -> None:
    """Waits until the index knows that a worker holds all blocks of a prompt."""
    deadline = time.monotonic() + _HEARD_S
    while time.monotonic() < deadline:
        scores = await service.overlap_scores({"token_ids": tokens})
        for row in scores["workers"]:
            if row["worker_id"] == worker and row["device_blocks"] == num_blocks:
                return
        await asyncio.sleep(0.001)
    raise TimeoutError(f"Dynamo's index did not hear of {num_blocks} blocks of worker {worker}")

"""The samples of one request as engine requests of their own, and their outputs together again.

vLLM can make ``n`` samples of a request by itself. A weight update may then find some of them begun
and others not, and could send back neither those alone, which must not start on keys of the old
weights, nor the whole request, which would lose tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from vllm import SamplingParams

__all__ = ["merged", "split_samples"]

T = TypeVar("T")


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each sample, with seeds as vLLM gives them.

    See ``ParentRequest`` in ``vllm/v1/engine/parallel_sampling.py``: sample ``i`` has the request's
    seed plus ``i``.

    Args:
        params: The request's, which are not changed.
    """
    if params.n == 1:
        return [params]
    samples: list[SamplingParams] = []
    for index in range(params.n):
        sample = copy.copy(params)
        sample.n = 1
        if params.seed is not None:
            sample.seed = params.seed + index
        samples.append(sample)
    return samples


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Runs ``streams`` side by side and yields their items as they come, each with its position.

    When one fails the others are closed, and its error is raised; so are all when this is closed.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def follow(index: int, stream: AsyncGenerator[T]) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                arrivals.put_nowait((index, item))

    tasks = [asyncio.create_task(follow(index, one)) for index, one in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrivals.put_nowait)
    left = len(tasks)
    try:
        while left:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                arrival.result()
                left -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Samples of one request as requests of their own, and their outputs together again."""

import asyncio

import pytest

from torchrl_vllm_sync.engine.answers import merged, split_samples


def test_samples_have_seeds_of_their_own():
    from vllm import SamplingParams

    params = SamplingParams(n=3, seed=7, temperature=0.5)
    assert [(one.n, one.seed, one.temperature) for one in split_samples(params)] == [
        (1, 7, 0.5),
        (1, 8, 0.5),
        (1, 9, 0.5),
    ]
    assert (params.n, params.seed) == (3, 7)
    assert {one.seed for one in split_samples(SamplingParams(n=2))} == {None}


def test_one_sample_is_the_request_itself():
    from vllm import SamplingParams

    params = SamplingParams()
    assert split_samples(params) == [params]


class Stream:
    """Yields what it is fed, and knows whether it was closed."""

    def __init__(self):
        self.queue, self.closed = asyncio.Queue(), False

    async def items(self):
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def test_items_come_in_the_order_of_arrival():
    streams = [Stream(), Stream()]
    together = merged([one.items() for one in streams])
    found = []
    for index, item in ((1, "a"), (0, "b"), (1, "c")):
        streams[index].queue.put_nowait(item)
        found.append(await anext(together))
    assert found == [(1, "a"), (0, "b"), (1, "c")]
    for one in streams:
        one.queue.put_nowait(None)
    assert [one async for one in together] == []
    assert all(one.closed for one in streams)


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_failure_ends_the_others(count):
    streams = [Stream() for _ in range(count)]
    together = merged([one.items() for one in streams])
    streams[0].queue.put_nowait("a")
    assert await anext(together) == (0, "a")
    streams[-1].queue.put_nowait(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        await anext(together)
    assert all(one.closed for one in streams)


@pytest.mark.parametrize("count", [1, 2])
async def test_closing_closes_all(count):
    streams = [Stream() for _ in range(count)]
    together = merged([one.items() for one in streams])
    streams[0].queue.put_nowait("a")
    await anext(together)
    await together.aclose()
    assert all(one.closed for one in streams)


async def test_cancelling_whoever_waits_closes_all():
    streams = [Stream(), Stream()]

    async def read():
        return [one async for one in merged([one.items() for one in streams])]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    streams[0].queue.put_nowait("a")
    await asyncio.sleep(0.01)
    reader.cancel()
    reader.cancel()  # as a gate does that counts two samples of one request
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert all(one.closed for one in streams)

"""Fake engine actors, and a dispatcher over them."""

import asyncio
from types import SimpleNamespace

import numpy as np
import ray

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import Replica
from torchrl_vllm_sync.requests.dispatch import Dispatcher
from torchrl_vllm_sync.requests.messages import (
    EngineRequest,
    EngineResult,
    SampleReport,
    framed,
    received,
)
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker


class Method:
    def __init__(self, function):
        self.remote = function

    def options(self, **options):
        assert options == {"num_returns": "streaming"}
        return self


class FakeActor:
    """Answers the first ``num_answers`` requests of each call, then does what ``then`` does."""

    def __init__(self, replica_id, num_answers=10**6, then=None, answer=None):
        self.replica_id, self.num_answers, self.then = replica_id, num_answers, then
        self.calls, self.aborted, self.answer = [], [], answer or self.result
        self.run_batch, self.streams_at = Method(self._run_batch), Method(self._streams_at)
        self.abort, self.items = Method(self._abort), asyncio.Queue()
        self.server, self.connections, self.failure = None, 0, None
        self.taken = asyncio.Semaphore(0)

    def result(self, request, **fields):
        return EngineResult(request_id=request.request_id, replica_id=self.replica_id, **fields)

    async def _run_batch(self, requests):
        self.calls.append([request.request_id for request in requests])
        for request in list(reversed(requests))[: self.num_answers]:
            await asyncio.sleep(0)
            yield ready([self.answer(request)])
        if self.then is not None:
            await self.then()

    async def _streams_at(self):
        if self.failure is not None:
            raise self.failure
        if self.server is None:
            self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return (*self.server.sockets[0].getsockname(), b"key")

    async def _serve(self, reader, writer):
        assert await reader.readexactly(3) == b"key"
        self.server.close()  # there is one for each connection
        self.server, self.connections = None, self.connections + 1
        sending = None
        try:
            while True:
                if not (requests := await received(reader)):
                    self.taken.release()
                    continue
                self._stream(requests)
                sending = sending or asyncio.create_task(self._send(writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # nobody wants any more
        finally:
            if sending is not None:
                sending.cancel()
            writer.close()
            self.connections -= 1

    async def _send(self, writer):
        try:
            while True:
                writer.write(framed(ray.cloudpickle.dumps(await self._next())))
                await self.taken.acquire()
        except Exception as error:  # noqa: BLE001
            self.failure = error
            writer.close()

    def _stream(self, requests):
        self.calls.append([request.request_id for request in requests])
        for step in range(min(self.num_answers, 3)):
            steps = [self.answer(request, finished=step == 2) for request in requests]
            self.items.put_nowait(([request.abort_id for request in requests], steps))

    async def _next(self):
        await asyncio.sleep(0.01)  # meanwhile the last one is read
        if self.items.empty() and self.then is not None:
            await self.then()
        return await self.items.get()

    def _abort(self, request_ids):
        self.aborted += request_ids
        return ready(len(request_ids))


def step(*token_ids):
    """What a result has that holds these tokens of one sample, without log-probabilities."""
    made = SimpleNamespace(outputs=[SimpleNamespace(logprobs=None)])
    output = SimpleNamespace(answers=[np.array(token_ids)], make=lambda: made)
    return {"output": output, "samples": (SampleReport(),)}


def ready(value):
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def raises(error):
    async def fail():
        raise error

    return fail


async def hang():
    await asyncio.Event().wait()


class Rig:
    def __init__(self, *actors, strategy="round-robin"):
        ids = [actor.replica_id for actor in actors]
        self.actors = list(actors)
        self.load = LoadTracker(ids, state=ReplicaState.SERVING)
        self.replicas = [Replica(actor.replica_id, actor) for actor in actors]
        self.balancer = LoadBalancer(self.actors, strategy, tracker=self.load)
        self.dispatcher = Dispatcher(lambda: self.replicas, self.load)

    def reserve(self, requests, avoid):
        return self.balancer.reserve_batch([one.prompt for one in requests], exclude=avoid)

    async def run(self, requests, **kwargs):
        return await self.dispatcher.run(requests, self.reserve, **kwargs)

    def stream(self, request):
        return self.dispatcher.stream(request, self.reserve)

    def states(self):
        return [str(one.state) for one in self.load.snapshots()]


async def read(stream, results):
    """Appends what a stream yields as it comes."""
    async for result in stream:
        results.append(result)


def make_requests(num, timeout_s=60.0, **params):
    from vllm import SamplingParams

    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt={"prompt_token_ids": [i + 1, i + 2]},
            sampling_params=SamplingParams(**params),
            timeout_s=timeout_s,
        )
        for i in range(num)
    ]


def ids(requests_or_results):
    return [one.request_id for one in requests_or_results]

"""Dispatcher over fake actors: every request answered once, every place given back."""

import asyncio
import contextlib
import gc
import random  # noqa: TID251  seeded below
import socket
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from tests.fakes.requests import (
    FakeActor,
    Method,
    Rig,
    hang,
    ids,
    make_requests,
    raises,
    read,
    ready,
    step,
)
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    RequestLostError,
    ServiceClosedError,
)
from torchrl_vllm_sync.requests import dispatch
from torchrl_vllm_sync.requests.messages import EngineResult, SampleReport, VersionSpan


async def test_results_come_in_order_with_one_call_a_replica():
    rig = Rig(FakeActor("a"), FakeActor("b"), FakeActor("c"))
    requests, seen = make_requests(50), []
    results = await rig.run(requests, on_result=seen.append)
    assert ids(results) == ids(requests)
    assert sorted(ids(seen)) == sorted(ids(requests))
    assert ids(seen) != ids(requests)  # answered in another order
    assert [len(actor.calls) for actor in rig.actors] == [1, 1, 1]
    assert sorted(one for actor in rig.actors for one in actor.calls[0]) == sorted(ids(requests))
    assert rig.load.total_in_flight == 0
    assert not any(actor.aborted for actor in rig.actors)


async def test_places_are_given_back_as_results_arrive():
    rig = Rig(FakeActor("a"))
    counts = []
    await rig.run(make_requests(5), on_result=lambda _: counts.append(rig.load.total_in_flight))
    assert counts == [4, 3, 2, 1, 0]


async def test_what_a_dead_replica_lost_goes_to_the_others_and_the_rest_is_kept():
    dying = FakeActor("a", num_answers=3, then=raises(ActorDiedError()))
    rig = Rig(dying, FakeActor("b"), FakeActor("c"))
    requests = make_requests(30)
    results = await rig.run(requests)
    assert ids(results) == ids(requests)
    assert all(result.error is None for result in results)
    assert [one.replica_id for one in results].count("a") == 3
    assert len(dying.calls) == 1
    assert sum(len(call) for actor in rig.actors[1:] for call in actor.calls) == 27
    assert rig.states() == ["failed", "serving", "serving"]
    assert rig.load.total_in_flight == 0
    assert not dying.aborted


async def test_what_a_stale_replica_refuses_goes_elsewhere():
    refusal = ReplicaUnavailableError("a", ReplicaState.STALE, "update failed")
    stale = FakeActor("a")
    stale.answer = lambda request: stale.result(request, error=refusal)
    rig = Rig(stale, FakeActor("b"))
    results = await rig.run(make_requests(10))
    assert {result.replica_id for result in results} == {"b"}
    assert rig.states() == ["stale", "serving"]
    assert rig.load.total_in_flight == 0


async def test_when_every_replica_dies_each_request_says_which_one_lost_it():
    actors = [FakeActor(name, 2, raises(ActorDiedError())) for name in "abcde"]
    rig = Rig(*actors)
    results = await rig.run(make_requests(60))
    errors = [result.error for result in results if result.error is not None]
    assert errors
    assert all(isinstance(error, ReplicaUnavailableError) for error in errors)
    assert all("its actor died" in str(error) for error in errors)
    assert rig.load.total_in_flight == 0
    with pytest.raises(NoReplicaAvailableError, match="a is failed"):
        await rig.run(make_requests(1))


async def test_attempts_are_bounded():
    """Replicas that refuse but are not marked down, as if they recovered at once."""
    rig = Rig(*[FakeActor(name) for name in "abcdef"])
    for actor in rig.actors:
        refusal = ReplicaUnavailableError(actor.replica_id, ReplicaState.SERVING, "odd")
        actor.answer = lambda request, actor=actor, refusal=refusal: actor.result(
            request, error=refusal
        )
    (result,) = await rig.run(make_requests(1))
    assert isinstance(result.error, ReplicaUnavailableError)
    assert sum(len(actor.calls) for actor in rig.actors) == dispatch.MAX_ATTEMPTS


async def test_a_replica_that_left_between_choice_and_call_costs_an_attempt_only():
    rig = Rig(FakeActor("a"), FakeActor("b"))
    del rig.replicas[0]
    results = await rig.run(make_requests(6))
    assert {result.replica_id for result in results} == {"b"}
    rig.replicas.clear()
    results = await rig.run(make_requests(2))
    assert all("left the service" in str(result.error) for result in results)
    assert rig.load.total_in_flight == 0


async def test_cancelling_ends_the_engines_work_and_gives_every_place_back():
    rig = Rig(FakeActor("a", 3, hang), FakeActor("b", 2, hang))
    answered = asyncio.Queue()
    requests = make_requests(20)
    task = asyncio.create_task(rig.run(requests, on_result=answered.put_nowait))
    done = [(await answered.get()).request_id for _ in range(5)]
    assert rig.load.total_in_flight == 15
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.load.total_in_flight == 0
    aborted = sorted(rig.actors[0].aborted + rig.actors[1].aborted)
    assert aborted == sorted(set(ids(requests)) - set(done))


async def test_a_silent_replica_times_out_and_is_avoided(monkeypatch):
    monkeypatch.setattr(dispatch, "GRACE_S", 0.05)
    silent = FakeActor("a", 1, hang)
    rig = Rig(silent, FakeActor("b"))
    results = await rig.run(make_requests(10, timeout_s=0.05))
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == 4
    assert all(isinstance(error, GenerationTimeoutError) for error in errors)
    assert rig.states() == ["failed", "serving"]
    assert len(silent.aborted) == 4
    assert rig.load.total_in_flight == 0


async def test_an_unexpected_failure_of_a_call_fails_its_requests_alone():
    error = RayTaskError("run_batch", "ValueError: surprise", ValueError("surprise"))
    broken = FakeActor("a", 1, raises(error))
    rig = Rig(broken, FakeActor("b"))
    results = await rig.run(make_requests(10))
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == 4
    assert all(isinstance(one, GenerationError) and "surprise" in str(one) for one in errors)
    assert len(broken.aborted) == 4
    assert rig.load.total_in_flight == 0


async def test_what_cannot_be_sent_is_raised_as_it_is():
    rig = Rig(FakeActor("a"))

    def refuse(*_, **__):
        raise TypeError("cannot pickle")

    rig.actors[0].run_batch = Method(refuse)
    with pytest.raises(TypeError, match="cannot pickle"):
        await rig.run(make_requests(2))
    assert rig.load.total_in_flight == 0


async def test_an_abort_that_fails_hides_nothing(monkeypatch):
    monkeypatch.setattr(dispatch, "ABORT_TIMEOUT_S", 0.05)
    for failing in (raises(ActorDiedError()), hang):
        actor = FakeActor("a", 0, hang)
        actor.abort = Method(lambda _, failing=failing: failing())
        rig = Rig(actor)
        task = asyncio.create_task(rig.run(make_requests(3)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert actor.calls
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.load.total_in_flight == 0


async def test_cancelled_at_any_moment_the_ledger_ends_at_zero():
    generator = random.Random(0)
    for _ in range(200):
        rig = Rig(FakeActor("a"), FakeActor("b", 4, raises(ActorDiedError())), FakeActor("c"))
        task = asyncio.create_task(rig.run(make_requests(20)))
        for _ in range(generator.randrange(60)):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert len(await task) == 20
        assert rig.load.total_in_flight == 0
        assert [one.held_tokens for one in rig.load.snapshots()] == [0, 0, 0]


async def test_what_was_answered_tells_the_balancer_how_long_answers_are():
    def answered(request):
        output = SimpleNamespace(answers=[[1] * 40, [2] * 40])
        return EngineResult(request_id=request.request_id, replica_id="a", output=output)

    rig = Rig(FakeActor("a", answer=answered))
    seen = []
    await rig.run(
        make_requests(3), on_result=lambda _: seen.append(rig.load.snapshots()[0].held_tokens)
    )
    assert seen == [4, 2, 0]  # two tokens of each prompt, and nothing known of answers
    seen.clear()
    await rig.run(
        make_requests(3), on_result=lambda _: seen.append(rig.load.snapshots()[0].held_tokens)
    )
    assert seen == [84, 42, 0]


async def test_a_cache_is_noted_under_the_oldest_version_that_sampled_an_answer():
    spans = [(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), (VersionSpan(4, 0, 2),)]

    def answered(request):
        return EngineResult(
            request_id=request.request_id,
            replica_id="a",
            output=SimpleNamespace(answers=[[5, 6], [7, 8]]),
            samples=tuple(SampleReport(spans=one) for one in spans),
        )

    rig = Rig(FakeActor("a", answer=answered), strategy="prefix-aware")
    await rig.run(make_requests(1))
    index = rig.balancer._index
    for answer in ([5, 6], [7, 8]):
        whole = index.chain([1, 2, *answer])
        assert [index.cached_tokens(whole, "a", version) for version in (3, 4)] == [4, 0]


@pytest.mark.parametrize(("params", "mean"), [({}, 3.0), ({"n": 2}, None), ({"delta": True}, None)])
async def test_only_a_stream_whose_last_output_is_whole_tells_how_long_answers_are(params, mean):
    from vllm.sampling_params import RequestOutputKind

    def answered(request, finished):
        return EngineResult(
            request_id=request.request_id, replica_id="a", finished=finished, **step(1, 2, 3)
        )

    rig = Rig(FakeActor("a", answer=answered))
    (request,) = make_requests(1, n=params.get("n", 1))
    if params.get("delta"):
        request.sampling_params.output_kind = RequestOutputKind.DELTA
    assert len([one async for one in rig.stream(request)]) == 3
    assert rig.balancer.mean_output == mean
    assert rig.load.total_in_flight == 0


async def test_failed_requests_tell_nothing_of_how_long_answers_are():
    rig = Rig(FakeActor("a", 0, raises(ActorDiedError())), FakeActor("b"))
    await rig.run(make_requests(4))
    assert rig.balancer.reserve([1, 2, 3]).replica_id == "b"
    assert [one.held_tokens for one in rig.load.snapshots()] == [0, 3]


async def test_a_stream_yields_its_steps_and_then_leaves_nothing():
    rig = Rig(FakeActor("a"))
    (request,) = make_requests(1)
    assert [result.finished async for result in rig.stream(request)] == [False, False, True]
    assert not rig.actors[0].aborted
    assert rig.load.total_in_flight == 0


class SharingActor(FakeActor):
    """Streams what the test says."""

    def _stream(self, requests):
        self.calls.append([request.request_id for request in requests])

    async def _next(self):
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def put(self, *requests, finished=False):
        results = [self.answer(one, finished=finished) for one in requests]
        self.items.put_nowait(([one.abort_id for one in requests], results))


def of_new_tokens(num, **fields):
    """Requests whose steps are all read."""
    from vllm.sampling_params import RequestOutputKind

    return make_requests(num, output_kind=RequestOutputKind.DELTA, **fields)


async def begin(rig, requests):
    """Their answers, and the tasks that read them."""
    answers = [[] for _ in requests]
    streams = map(rig.stream, requests)
    reading = [asyncio.create_task(read(*one)) for one in zip(streams, answers, strict=True)]
    actor = rig.actors[0]
    calls = len(actor.calls)
    async with asyncio.timeout(10):
        while len(actor.calls) == calls:  # noqa: ASYNC110  fakes tell nobody
            await asyncio.sleep(0)
    return answers, reading


async def test_streams_at_the_same_time_share_a_connection(monkeypatch):
    monkeypatch.setattr(dispatch, "IDLE_S", 0.05)
    actor = SharingActor("a")
    rig, requests = Rig(actor), of_new_tokens(4)
    answers, reading = await begin(rig, requests[:2])
    later, more = await begin(rig, requests[2:])
    answers, reading = answers + later, reading + more
    assert actor.calls == [["r0", "r1"], ["r2", "r3"]]
    actor.put(requests[2], requests[0])
    actor.put(*requests, finished=True)
    await asyncio.gather(*reading)
    assert [[one.finished for one in each] for each in answers] == [
        [False, True],
        [True],
        [False, True],
        [True],
    ]
    assert [ids(each)[0] for each in answers] == ids(requests)
    assert actor.connections == 1
    await asyncio.sleep(0.2)
    assert actor.connections == 0  # nobody asked any more
    (answer,), (task,) = await begin(rig, make_requests(1))
    actor.put(*make_requests(1), finished=True)
    await task
    assert [one.finished for one in answer] == [True]
    assert rig.load.total_in_flight == 0
    assert not actor.aborted


@pytest.mark.parametrize(("kind", "num_read"), [("CUMULATIVE", 2), ("DELTA", 3)])
async def test_a_slow_reader_gets_the_newest_of_outputs_that_hold_all(kind, num_read):
    from vllm.sampling_params import RequestOutputKind

    actor = SharingActor("a")
    rig, (request,) = Rig(actor), make_requests(1)
    request.sampling_params.output_kind = RequestOutputKind[kind]
    stream = rig.stream(request)
    first = asyncio.create_task(anext(stream))
    actor.put(request)
    results = [await first]
    actor.put(request)
    actor.put(request, finished=True)
    await asyncio.sleep(0.05)
    results += [one async for one in stream]
    assert len(results) == num_read
    assert results[-1].finished


async def test_a_stream_that_cannot_be_sent_fails_alone():
    actor = SharingActor("a")
    rig, (one, other) = Rig(actor), of_new_tokens(2)
    answers, reading = await begin(rig, [one])
    other.prompt["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        await anext(rig.stream(other))
    actor.put(one, finished=True)
    await asyncio.gather(*reading)
    assert [[each.finished for each in some] for some in answers] == [[True]]
    assert rig.load.total_in_flight == 0


async def test_what_ends_a_call_ends_all_streams_that_wait_for_it():
    actor = SharingActor("a")
    rig = Rig(actor, FakeActor("b"))
    rig.load.mark("b", ReplicaState.DRAINING)
    answers, reading = await begin(rig, requests := make_requests(3))
    actor.put(requests[1], finished=True)
    rig.load.mark("b", ReplicaState.SERVING)
    actor.items.put_nowait(ActorDiedError())
    await asyncio.gather(*reading)
    assert [each[-1].replica_id for each in answers] == ["b", "a", "b"]
    assert not any(one.error for each in answers for one in each)
    assert rig.load.total_in_flight == 0


async def give_up(rig, request):
    _, (task,) = await begin(rig, [request])
    task.cancel()
    await asyncio.wait([task])


async def test_a_connection_whose_streams_were_given_up_waits_for_others(monkeypatch):
    monkeypatch.setattr(dispatch, "IDLE_S", 3.0)
    actor = SharingActor("a")
    rig, (first, second) = Rig(actor), of_new_tokens(2)
    await give_up(rig, first)
    for _ in range(3):
        await asyncio.sleep(0.01)
        gc.collect()
    assert actor.connections == 1
    _, (task,) = await begin(rig, [second])
    actor.put(second, finished=True)
    await task
    assert actor.connections == 1


async def test_a_connection_whose_streams_were_given_up_ends(monkeypatch):
    monkeypatch.setattr(dispatch, "IDLE_S", 0.05)
    actor = SharingActor("a")
    rig = Rig(actor)
    await give_up(rig, *make_requests(1))
    async with asyncio.timeout(10):
        while actor.connections:  # noqa: ASYNC110  fakes tell nobody
            await asyncio.sleep(0.01)


async def test_a_connection_that_ends_while_its_replica_lives_costs_an_attempt():
    class Cut(FakeActor):
        async def _send(self, writer):
            if len(self.calls) == 1:
                writer.close()
            else:
                await super()._send(writer)

    actor = Cut("a")
    rig = Rig(actor)
    results = [one async for one in rig.stream(make_requests(1)[0])]
    assert [one.finished for one in results] == [False, False, True]
    assert actor.calls == [["r0"], ["r0"]]
    assert rig.states() == ["serving"]
    assert rig.load.total_in_flight == 0


async def test_a_replica_whose_address_nobody_answers_costs_attempts_and_then_says_so():
    actor = FakeActor("a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    actor.streams_at = Method(lambda: ready((*address, b"key")))
    rig = Rig(actor)
    (last,) = [one async for one in rig.stream(make_requests(1)[0])]
    assert isinstance(last.error, RequestLostError)
    assert len(last.error.attempts) == dispatch.MAX_ATTEMPTS
    assert "Connect call failed" in str(last.error)
    assert rig.load.total_in_flight == 0


def connected(look):
    return lambda: contextlib.nullcontext(look())


@pytest.mark.parametrize("is_up", [False, True])
async def test_only_while_ray_is_up_it_is_asked_why_a_connection_ended(monkeypatch, is_up):
    """Asking would start a cluster; nor is it asked about a connection that nobody uses."""
    actor, asked = SharingActor("a"), []
    rig, requests = Rig(actor, FakeActor("b")), make_requests(2)
    rig.load.mark("b", ReplicaState.DRAINING)
    answers, reading = await begin(rig, requests)
    rig.load.mark("b", ReplicaState.SERVING)
    rig.load.mark("a", ReplicaState.DRAINING)  # nobody connects again
    looks = iter([is_up])  # it is up again for the other replica
    monkeypatch.setattr(dispatch, "staying_connected", connected(lambda: next(looks, True)))
    streams_at = actor.streams_at.remote
    monkeypatch.setattr(actor, "streams_at", Method(lambda: asked.append(1) or streams_at()))
    actor.items.put_nowait(ActorDiedError())
    async with asyncio.timeout(10):
        await asyncio.gather(*reading)
    assert [each[-1].replica_id for each in answers] == ["b", "b"]
    assert len(asked) == is_up


class Untouched(Method):
    """A method of an actor that must not be called after the end of Ray, which its actor notes."""

    def __init__(self, actor, function):
        super().__init__(self.call)
        self.actor, self.function = actor, function

    def call(self, *args, **options):
        assert self.actor.ray["is_up"]
        return self.function(*args, **options)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("", b"a" * 16), None])
async def test_after_the_end_of_ray_no_actor_is_called(monkeypatch, is_stream, error):
    """That would start another cluster, or end this process."""
    ray = {"is_up": True}

    async def end():
        ray["is_up"] = False
        await (hang() if error is None else raises(error)())

    rig = Rig(*(FakeActor(name, num_answers=0, then=end) for name in "ab"))
    for actor in rig.actors:
        actor.ray = ray
        for name in ("run_batch", "streams_at", "abort"):
            setattr(actor, name, Untouched(actor, getattr(actor, name).remote))
    monkeypatch.setattr(dispatch, "GRACE_S", 0.0)
    monkeypatch.setattr(dispatch, "staying_connected", connected(lambda: ray["is_up"]))
    requests, results = make_requests(1, timeout_s=0.5), []
    async with asyncio.timeout(10):
        if error is not None:
            with pytest.raises(ServiceClosedError, match="Ray was shut down"):
                await (read(rig.stream(*requests), results) if is_stream else rig.run(requests))
        elif is_stream:
            await read(rig.stream(*requests), results)
        else:
            results = await rig.run(requests)
    assert [type(one.error) for one in results] == [GenerationTimeoutError] * (error is None)
    assert rig.load.total_in_flight == 0


async def test_a_stream_that_is_dropped_ends_the_engines_work():
    rig = Rig(FakeActor("a"))
    (request,) = make_requests(1)
    async with contextlib.aclosing(rig.stream(request)) as stream:
        async for _ in stream:
            assert rig.load.total_in_flight == 1
            break
    assert rig.actors[0].aborted == ["r0"]
    assert rig.load.total_in_flight == 0


@pytest.mark.parametrize(
    ("then", "error", "aborts"),
    [
        (raises(ActorDiedError()), ReplicaUnavailableError, []),
        (raises(RayTaskError("stream", "trace", ValueError("odd"))), GenerationError, ["r0"]),
        (hang, GenerationTimeoutError, ["r0"]),
    ],
)
async def test_a_stream_ends_with_its_replicas_error(monkeypatch, then, error, aborts):
    monkeypatch.setattr(dispatch, "GRACE_S", 0.05)
    rig = Rig(FakeActor("a", 2, then))
    (request,) = make_requests(1, timeout_s=1.0)
    *steps, last = [result async for result in rig.stream(request)]
    assert len(steps) == 2
    assert isinstance(last.error, error)
    assert rig.actors[0].aborted == aborts
    assert rig.load.total_in_flight == 0


async def test_a_stream_read_slowly_does_not_time_out(monkeypatch):
    """Each step in a task of its own, as a blocking iterator reads it."""
    monkeypatch.setattr(dispatch, "GRACE_S", 0.0)
    rig = Rig(FakeActor("a"))
    stream = rig.stream(of_new_tokens(1, timeout_s=0.5)[0])
    steps = []
    for _ in range(3):
        steps.append(await asyncio.create_task(anext(stream)))
        await asyncio.sleep(0.6)
    await stream.aclose()
    assert [step.error for step in steps] == [None] * 3

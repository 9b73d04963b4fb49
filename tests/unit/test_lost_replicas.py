"""Dispatcher over fake actors that fail, hang, drain, leave or come back in mid-request."""

import asyncio
import pickle
import random  # noqa: TID251  seeded below
import threading
import time

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

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
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    RequestLostError,
    SyncError,
)
from torchrl_vllm_sync.replica import EngineReport, Replica
from torchrl_vllm_sync.requests import dispatch
from torchrl_vllm_sync.requests.dispatch import Dispatcher, ReplicaWatch

FAILED, SERVING = ReplicaState.FAILED, ReplicaState.SERVING


class RecoveringRig(Rig):
    """One whose dispatcher is told that a replica is on its way, as long as ``is_coming``."""

    def __init__(self, *actors, **kwargs):
        super().__init__(*actors, **kwargs)
        self.is_coming, self.looks = True, 0
        self.dispatcher = Dispatcher(lambda: self.replicas, self.load, self.recovers)

    def recovers(self):
        self.looks += 1
        return self.is_coming

    def replace(self, index, actor):
        """Puts a restarted replica in the place of another, under the same id."""
        self.replicas[index] = Replica(actor.replica_id, actor)
        self.actors[index] = actor


def refusing(actor, state, reason="odd"):
    refusal = ReplicaUnavailableError(actor.replica_id, state, reason)
    actor.answer = lambda request, **_: actor.result(request, error=refusal)
    return actor


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  fakes tell nobody
            await asyncio.sleep(0)


async def called(*actors):
    """Waits until each of these has been called."""
    await until(lambda: all(actor.calls for actor in actors))


def test_the_error_names_every_attempt_and_survives_pickling():
    losses = (
        ReplicaUnavailableError("a", FAILED, "its actor died"),
        ReplicaUnavailableError("b", ReplicaState.STALE),
    )
    error = RequestLostError("r7", losses, "and 2 attempts are the limit")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, (GenerationError, ReplicaUnavailableError, SyncError))
        assert isinstance(one, GenerationError)
        assert (one.request_id, one.replica_id, one.state) == ("r7", "b", ReplicaState.STALE)
        assert [str(loss) for loss in one.attempts] == list(map(str, losses))
        assert str(one) == (
            "request r7: lost by every replica that had it (attempt 1: replica a is failed: its "
            "actor died; attempt 2: replica b is stale), and 2 attempts are the limit"
        )


async def test_each_request_that_is_sent_again_is_counted():
    retried = []
    dead, other = FakeActor("a", 1, raises(ActorDiedError())), FakeActor("b")
    rig = Rig(dead, other)
    rig.dispatcher._on_retry = retried.append
    results = await rig.run(make_requests(6))
    assert {one.error for one in results} == {None}
    assert retried == [len(dead.calls[0]) - 1]


async def test_after_the_last_attempt_a_request_says_what_each_replica_did():
    actors = [FakeActor(name, 0, raises(ActorDiedError())) for name in "abcd"]
    rig = Rig(*actors)
    (result,) = await rig.run(make_requests(1))
    assert isinstance(result.error, RequestLostError)
    assert result.error.request_id == "r0"
    lost_by = [one.replica_id for one in result.error.attempts]
    assert len(set(lost_by)) == len(lost_by) == dispatch.MAX_ATTEMPTS
    assert "3 attempts are the limit" in str(result.error)


@pytest.mark.parametrize("how", ["marked", "removed", "replaced"])
async def test_a_call_is_given_up_when_its_replica_is_known_to_have_failed(how):
    hanging, other = FakeActor("a", 2, hang), FakeActor("b")
    rig = RecoveringRig(hanging, other)
    requests, results = make_requests(10), []
    task = asyncio.create_task(rig.run(requests, on_result=results.append))
    await called(hanging, other)
    await until(lambda: len(results) == 7)
    if how == "marked":  # by another thread, as the monitor does
        marking = threading.Thread(target=rig.load.mark, args=("a", FAILED, "silent"))
        marking.start()
        marking.join()
    elif how == "removed":
        del rig.replicas[0]
        rig.load.remove("a")
        rig.load.mark("b", ReplicaState.UPDATING)  # whatever changes has it look
    else:
        rig.replace(0, FakeActor("a"))
        rig.load.mark("a", SERVING)
        rig.load.mark("b", FAILED)
        rig.load.mark("b", SERVING)
    async with asyncio.timeout(10):
        assert ids(await task) == ids(requests)
    assert all(result.error is None for result in results)
    assert sorted(ids(results)) == sorted(ids(requests))  # each once
    assert len(hanging.aborted) == 3  # should it come back to life
    assert len(hanging.calls) == 1
    assert rig.load.total_in_flight == 0


@pytest.mark.parametrize("how", ["the call said so", "the monitor said so"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_who_was_out_of_reach_and_is_back_gets_its_requests_again(how, is_stream):
    away = ActorUnavailableError("no route", None)
    actor = FakeActor("a", 0, raises(away) if how == "the call said so" else hang)
    rig, steps = RecoveringRig(actor), []
    (request,) = make_requests(1, seed=1)
    results = []
    if is_stream:
        task = asyncio.create_task(read(rig.stream(request), results))
    else:
        task = asyncio.create_task(rig.run([request], on_result=results.append))
    await called(actor)
    if how == "the monitor said so":
        rig.load.mark("a", FAILED, "its actor cannot be reached", may_return=True)
    await until(lambda: rig.looks)
    assert actor.aborted == ["r0"]

    def answer(request, **fields):
        steps.append((request.abort_id, list(actor.aborted)))
        return actor.result(request, **fields)

    actor.num_answers, actor.then, actor.failure, actor.answer = 3, None, None, answer
    rig.load.observe(EngineReport(replica_id="a", state=SERVING))
    async with asyncio.timeout(10):
        await task
    assert results[-1].error is None
    assert len(actor.calls) == 2
    # Ended once more before it is asked again, under a name that it was not told to turn away.
    assert steps[0] == ("r0~1", ["r0", "r0"])
    assert actor.aborted == ["r0", "r0"]
    assert rig.load.total_in_flight == 0


async def test_a_lost_request_holds_a_place_only_where_it_is_sent_again():
    dead, other = FakeActor("a", 0, raises(ActorDiedError())), FakeActor("b", 0, hang)
    rig = Rig(dead, other)
    task = asyncio.create_task(rig.run(make_requests(6)))
    await until(lambda: len(other.calls) == 2)
    assert [one.in_flight for one in rig.load.snapshots()] == [0, 6]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.load.total_in_flight == 0


async def test_who_is_out_of_reach_again_and_again_costs_an_attempt_each_time():
    actor = FakeActor("a", 0, raises(ActorUnavailableError("no route", None)))
    rig = RecoveringRig(actor)
    task = asyncio.create_task(rig.run(make_requests(1)))
    for num in range(1, dispatch.MAX_ATTEMPTS):
        await until(lambda num=num: len(actor.calls) == num and rig.looks >= num)
        rig.load.observe(EngineReport(replica_id="a", state=SERVING))
    async with asyncio.timeout(10):
        (result,) = await task
    assert isinstance(result.error, RequestLostError)
    assert len(result.error.attempts) == len(actor.calls) == dispatch.MAX_ATTEMPTS


async def test_a_late_answer_of_a_replica_that_was_given_up_is_dropped():
    gate = asyncio.Event()
    zombie, other = FakeActor("a", 0), FakeActor("b")

    async def wake():
        await gate.wait()

    zombie.then = wake
    rig = Rig(zombie, other)
    seen = []
    task = asyncio.create_task(rig.run(make_requests(2), on_result=seen.append))
    await called(zombie)
    rig.load.mark("a", FAILED, "silent")
    results = await task
    gate.set()
    await asyncio.sleep(0)
    assert ids(seen).count("r0") == ids(seen).count("r1") == 1
    assert {one.replica_id for one in results} == {"b"}
    assert rig.load.total_in_flight == 0


async def test_what_a_failed_replica_had_sent_still_counts(monkeypatch):
    monkeypatch.setattr(dispatch, "LINGER_S", 10.0)  # it comes at once
    arrived = asyncio.Event()
    dying, other = FakeActor("a", 10**6), FakeActor("b")
    batch = dying._run_batch

    async def slow(requests):
        dying.calls.append([])
        await arrived.wait()
        async for ref in batch(requests):
            yield ref

    dying.run_batch = Method(slow)
    rig = Rig(dying, other)
    task = asyncio.create_task(rig.run(make_requests(4)))
    await called(dying)
    rig.load.mark("a", FAILED)
    arrived.set()
    assert [one.replica_id for one in await task].count("a") == 2


@pytest.mark.parametrize("state", [ReplicaState.STALE, ReplicaState.DRAINING, SERVING])
async def test_a_replica_in_any_other_state_is_waited_for(state):
    gate = asyncio.Event()
    slow = FakeActor("a", 0)

    async def _run_batch(requests):
        slow.calls.append(ids(requests))
        await gate.wait()
        async for one in FakeActor("a")._run_batch(requests):
            yield one

    slow.run_batch = Method(_run_batch)
    rig = Rig(slow, FakeActor("b"))
    task = asyncio.create_task(rig.run(make_requests(2)))
    await called(slow)
    rig.load.mark("a", state)
    await asyncio.sleep(0.3)
    gate.set()
    assert sorted(one.replica_id for one in await task) == ["a", "b"]


async def test_a_death_that_is_told_late_does_not_mark_the_successor():
    first, other = FakeActor("a", 0), FakeActor("b")
    rig = RecoveringRig(first, other)

    async def die():
        rig.replace(0, FakeActor("a"))
        raise ActorDiedError

    first.then = die
    results = await rig.run(make_requests(4))
    assert all(one.error is None for one in results)
    assert rig.states() == ["serving", "serving"]


async def test_a_replica_that_was_restarted_may_be_used_again():
    dead = FakeActor("a", 0, raises(ActorDiedError()))
    rig = RecoveringRig(dead)
    task = asyncio.create_task(rig.run(make_requests(3)))
    await called(dead)
    await asyncio.sleep(0.1)
    assert not task.done()
    rig.replace(0, FakeActor("a"))
    rig.load.mark("a", SERVING)
    results = await task
    assert all(one.error is None for one in results)
    assert [one.replica_id for one in results] == ["a"] * 3


async def test_the_same_actor_is_not_asked_again_after_it_lost_a_request():
    odd = refusing(FakeActor("a"), SERVING)
    rig = RecoveringRig(odd)
    task = asyncio.create_task(rig.run(make_requests(1)))
    await called(odd)
    await asyncio.sleep(0.1)
    rig.is_coming = False
    rig.load.mark("a", FAILED)
    (result,) = await task
    assert isinstance(result.error, RequestLostError)
    assert len(odd.calls) == 1


async def test_while_a_replica_is_on_its_way_requests_wait_for_it_without_a_busy_loop():
    actor = FakeActor("a")
    rig = RecoveringRig(actor)
    rig.load.mark("a", FAILED)
    begin = time.monotonic()
    task = asyncio.create_task(rig.run(make_requests(2)))
    steps = rig.stream(make_requests(1)[0])
    stream = asyncio.create_task(anext(steps))
    await asyncio.sleep(0.2)
    assert not task.done()
    assert not stream.done()
    polls = (time.monotonic() - begin) / dispatch.RECOVERY_POLL_S
    assert rig.looks <= 2 * (2 + polls)  # of the batch and of the stream
    assert rig.load.is_watched  # reports are asked for often
    rig.load.mark("a", SERVING)
    assert all(one.error is None for one in await task)
    assert (await stream).error is None
    await steps.aclose()
    assert not rig.load.is_watched
    assert sorted(actor.calls) == [["r0"], ["r0", "r1"]]


async def test_nobody_waits_longer_than_its_time_limit_or_than_there_is_hope():
    rig = RecoveringRig(FakeActor("a"))
    rig.load.mark("a", FAILED, "burnt")
    with pytest.raises(NoReplicaAvailableError, match="burnt"):
        await rig.run(make_requests(2, timeout_s=0.1))
    rig.is_coming = False
    with pytest.raises(NoReplicaAvailableError, match="burnt"):
        await rig.run(make_requests(2, timeout_s=60))
    rig.is_coming = True
    task = asyncio.create_task(rig.run(make_requests(2, timeout_s=60)))
    await asyncio.sleep(0.05)
    rig.is_coming = False  # it was given up, which the ledger does not tell
    async with asyncio.timeout(dispatch.RECOVERY_POLL_S * 10):
        with pytest.raises(NoReplicaAvailableError, match="burnt"):
            await task
    assert not rig.load.is_watched


async def test_who_waits_for_a_version_does_not_outlive_the_service():
    rig = Rig(FakeActor("a"))
    waiting = rig.dispatcher.run(
        make_requests(1), lambda _, avoid: rig.load.candidates_for(avoid, min_version=5)
    )
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0.05)
    assert not task.done()
    rig.replicas.clear()  # which the ledger does not tell
    async with asyncio.timeout(dispatch.RECOVERY_POLL_S * 10):
        with pytest.raises(NoReplicaAvailableError, match="shut down"):
            await task
    assert not rig.load.is_watched


async def test_a_replica_that_fails_while_a_wait_for_it_runs_out_breaks_nothing():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    rig = Rig(FakeActor("a"))
    watch = ReplicaWatch(lambda: rig.replicas, rig.load, rig.replicas[0])

    async def hang_and_fail():
        try:
            await hang()
        finally:
            rig.load.mark("a", FAILED)
            await asyncio.sleep(0.01)

    with watch.active(), pytest.raises(ReplicaUnavailableError):
        await watch.wait(hang_and_fail(), 0.01)
    assert not complaints


async def test_time_limits_count_from_the_first_start():
    given = []
    dead, other = FakeActor("a", 0), FakeActor("b")

    async def die():
        await asyncio.sleep(0.3)
        raise ActorDiedError

    dead.then = die
    other.answer = lambda request: given.append(request.timeout_s) or other.result(request)
    rig = Rig(dead, other)
    await rig.run(make_requests(2, timeout_s=60.0))
    assert max(given) == 60.0
    assert 50 < min(given) < 59.8


async def test_a_request_whose_time_is_over_is_not_sent_again():
    dead, other = FakeActor("a", 0), FakeActor("b")

    async def die():
        await asyncio.sleep(0.2)
        raise ActorDiedError

    dead.then = die
    rig = Rig(dead, other)
    results = await rig.run(make_requests(2, timeout_s=0.1))
    (lost,) = [one.error for one in results if one.error is not None]
    assert isinstance(lost, RequestLostError)
    assert "its time limit of 0.1 s is over" in str(lost)
    assert len(other.calls) == 1


async def test_what_a_draining_replica_turns_away_costs_no_attempt():
    actors = [refusing(FakeActor(name), ReplicaState.DRAINING, "leaves") for name in "abcde"]
    rig = Rig(*actors, FakeActor("f"))
    results = await rig.run(make_requests(12))
    assert {one.replica_id for one in results} == {"f"}
    assert rig.states() == ["draining"] * 5 + ["serving"]
    rig.load.mark("f", FAILED)
    with pytest.raises(NoReplicaAvailableError, match="draining"):
        await rig.run(make_requests(1))
    assert rig.load.total_in_flight == 0


async def test_a_stale_replica_that_was_repaired_meanwhile_is_asked_again():
    stale = refusing(FakeActor("a"), ReplicaState.STALE)
    rig = RecoveringRig(stale)
    task = asyncio.create_task(rig.run(make_requests(1)))
    await called(stale)
    await asyncio.sleep(0.05)
    stale.answer = stale.result
    rig.load.mark("a", SERVING)
    (result,) = await task
    assert result.error is None
    assert len(stale.calls) == 2


async def test_what_one_replica_lost_does_not_wait_for_the_others():
    dead, slow = FakeActor("a", 0, raises(ActorDiedError())), FakeActor("b")

    async def run_batch(requests):
        slow.calls.append(ids(requests))
        for request in requests:
            if request.request_id == "r1":
                await hang()
            yield ready([slow.result(request)])

    slow.run_batch = Method(run_batch)
    rig = Rig(dead, slow)
    arrived = asyncio.Queue()
    task = asyncio.create_task(rig.run(make_requests(2), on_result=arrived.put_nowait))
    async with asyncio.timeout(10):
        assert (await arrived.get()).request_id == "r0"
    assert slow.calls == [["r1"], ["r0"]]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.load.total_in_flight == 0


async def test_whatever_fails_at_any_moment_each_request_is_answered_once(monkeypatch):
    monkeypatch.setattr(dispatch, "LINGER_S", 0.002)  # a hundred times
    generator = random.Random(0)
    for _ in range(100):
        rig = Rig(FakeActor("a", 4, hang), FakeActor("b", 6, hang), FakeActor("c"))
        seen, requests = [], make_requests(24)
        task = asyncio.create_task(rig.run(requests, on_result=seen.append))
        for _ in range(generator.randrange(30)):
            await asyncio.sleep(0)
        for victim in generator.sample("ab", 2):
            rig.load.mark(victim, FAILED)
            for _ in range(generator.randrange(10)):
                await asyncio.sleep(0)
        results = await task
        assert ids(results) == ids(requests)
        assert sorted(ids(seen)) == sorted(ids(requests))
        assert all(one.error is None for one in results)
        assert rig.load.total_in_flight == 0


# ------------------------------------------------------------------ streams


def stepping(replica_id, num_steps, then=None, **kwargs):
    """An actor whose streams have three steps of a token each, of which it sends some."""
    actor = FakeActor(replica_id, num_steps, then, **kwargs)
    actor.asked = []

    def stream(requests):
        actor.asked += requests
        FakeActor._stream(actor, requests)

    actor._stream = stream
    actor.answer = lambda request, finished: actor.result(request, finished=finished, **step(1))
    return actor


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("then", [raises(ActorDiedError()), hang])
async def test_a_stream_is_taken_up_by_another_replica(num_steps, then):
    dying, other = stepping("a", num_steps, then), stepping("b", 3)
    rig = Rig(dying, other)
    (request,) = make_requests(1, seed=1)  # begins again
    results = []
    task = asyncio.create_task(read(rig.stream(request), results))
    await called(dying)
    await until(lambda: len(results) >= num_steps)
    if then is hang:
        rig.load.mark("a", FAILED, "silent")
    async with asyncio.timeout(10):
        await task
    assert [one.replica_id for one in results] == ["a"] * num_steps + ["b"] * 3
    assert [one.finished for one in results] == [False] * num_steps + [False, False, True]
    assert all(one.error is None for one in results)
    assert dying.aborted == (["r0"] if then is hang else [])
    assert rig.load.total_in_flight == 0


async def test_what_was_finished_is_not_asked_for_again():
    """Its replica dies between the last result and the end of the stream."""
    dying, other = stepping("a", 3, raises(ActorDiedError())), stepping("b", 3)
    rig = Rig(dying, other)
    results = [one async for one in rig.stream(make_requests(1)[0])]
    assert [one.finished for one in results] == [False, False, True]
    assert not other.asked
    assert rig.load.total_in_flight == 0


async def test_a_stream_ends_after_as_many_attempts_as_a_batch():
    actors = [stepping(name, 1, raises(ActorDiedError())) for name in "abcd"]
    rig = Rig(*actors)
    *steps, last = [one async for one in rig.stream(make_requests(1, seed=1)[0])]
    assert len(steps) == dispatch.MAX_ATTEMPTS
    assert isinstance(last.error, RequestLostError)
    assert len(last.error.attempts) == dispatch.MAX_ATTEMPTS
    assert rig.load.total_in_flight == 0


async def test_deltas_that_cannot_be_gone_on_with_end_with_an_error_that_says_why():
    from vllm.sampling_params import RequestOutputKind

    actors = [stepping("a", 0, raises(ActorDiedError())), stepping("b", 1, hang), stepping("c", 3)]
    rig = Rig(*actors)
    (request,) = make_requests(1, seed=1, presence_penalty=0.5)
    request.sampling_params.output_kind = RequestOutputKind.DELTA
    results = []
    task = asyncio.create_task(read(rig.stream(request), results))
    await until(lambda: results)
    rig.load.mark("b", FAILED, "silent")
    await task
    assert len(results) == 2  # what had yielded nothing began again, what had did not
    assert isinstance(results[-1].error, RequestLostError)
    assert "presence_penalty, seed" in str(results[-1].error)
    assert [one.replica_id for one in results[-1].error.attempts] == ["a", "b"]
    assert not actors[2].asked
    assert rig.load.total_in_flight == 0


async def test_a_stream_waits_for_a_replica_that_is_on_its_way():
    dying = stepping("a", 1, raises(ActorDiedError()))
    rig = RecoveringRig(dying)
    results = []
    task = asyncio.create_task(read(rig.stream(make_requests(1, seed=1)[0]), results))
    await until(lambda: results)
    await asyncio.sleep(0.1)
    assert not task.done()
    rig.replace(0, stepping("a", 3))
    rig.load.mark("a", SERVING)
    await task
    assert [one.finished for one in results] == [False, False, False, True]


async def test_a_stream_that_is_dropped_between_two_replicas_leaves_nothing():
    dying = stepping("a", 1, raises(ActorDiedError()))
    rig = RecoveringRig(dying)
    stream = rig.stream(make_requests(1, seed=1)[0])
    await anext(stream)
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stream.aclose()
    assert rig.load.total_in_flight == 0
    assert not rig.load.is_watched


def test_a_replica_that_is_being_restarted_is_not_taken_for_one_that_left():
    rig = Rig(FakeActor("a"), FakeActor("b"))
    dispatcher = Dispatcher(lambda: rig.replicas[1:], rig.load)
    rig.load.mark("a", ReplicaState.STARTING, "it is being restarted")
    dispatcher._mark(dispatch._gone("a"), None)
    assert rig.load.snapshot("a").state is ReplicaState.STARTING
    rig.load.mark("a", SERVING)
    dispatcher._mark(dispatch._gone("a"), None)
    assert rig.load.snapshot("a").state is ReplicaState.CLOSED

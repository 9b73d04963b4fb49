"""Silence counts while the listener is awake; an engine that owes an answer too long has failed."""

import asyncio
import types

import pytest

pytest.importorskip("vllm")

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine import actor, internals
from torchrl_vllm_sync.engine.actor import BLOCKING_CALL_S, EngineHealth
from torchrl_vllm_sync.engine.answers import AdmissionGate
from torchrl_vllm_sync.engine.updates import Updates
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    SilentEngineError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import Silence

LIMIT_S = 8.0


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_silence_counts_what_lies_between_looks():
    clock = Clock()
    silence = Silence(clock)
    for _ in range(10):
        clock.now += 0.5
        silence.look()
    assert silence.look() == 5.0
    silence.reset()
    assert silence.look() == 0.0


def test_the_listeners_own_absence_is_not_silence():
    clock = Clock()
    silence = Silence(clock)
    clock.now += 3600
    assert silence.look() == 1.0


class Engine:
    """Answers, fails to, or is dead, as a test says."""

    errored = False
    dead_error = "it died"

    def __init__(self):
        self.asked = []


@pytest.fixture
def watch(monkeypatch):
    """An engine that is watched by a clock that the test moves; ``updating`` excuses it."""
    engine, clock, gate = Engine(), Clock(), AdmissionGate("7")
    gate.set(ReplicaState.SERVING)
    watched = types.SimpleNamespace(engine=engine, clock=clock, gate=gate, updating=False)

    def ask_health(asked):
        assert asked is engine
        engine.asked.append(asyncio.get_running_loop().create_future())
        return engine.asked[-1]

    monkeypatch.setattr(internals, "ask_health", ask_health)
    watched.health = EngineHealth(
        engine,
        gate,
        unresponsive_after_s=LIMIT_S,
        is_updating=lambda: watched.updating,
        clock=clock,
    )

    async def pass_time(seconds):
        """Looks as often as the watch would; returns whether it would look again."""
        for _ in range(round(seconds / actor.LOOK_S)):
            clock.now += actor.LOOK_S
            await asyncio.sleep(0)
            if not watched.health.look():
                return False
        return True

    watched.pass_time = pass_time
    return watched


async def test_an_engine_that_answers_is_asked_again_after_a_quarter_of_the_limit(watch):
    for count in range(1, 4):
        assert await watch.pass_time(2.5)
        assert len(watch.engine.asked) == count
        watch.engine.asked[-1].set_result(None)
    assert await watch.pass_time(0.5)
    assert watch.clock.now - watch.health._answered_at < 1
    assert watch.gate.state is ReplicaState.SERVING


async def test_one_that_owes_an_answer_for_the_limit_has_failed_for_good(watch):
    assert await watch.pass_time(2 + LIMIT_S - 0.5)
    assert watch.gate.state is ReplicaState.SERVING
    assert not await watch.pass_time(0.5)
    assert watch.gate.state is ReplicaState.FAILED
    assert watch.gate.reason == "its engine core, or a worker of it, was silent for 8.0 s"
    (question,) = watch.engine.asked  # one at a time
    await asyncio.sleep(0)
    assert question.cancelled()
    assert not watch.health.look()


async def test_a_late_answer_is_an_answer(watch):
    for _ in range(3):
        assert await watch.pass_time(2 + LIMIT_S - 0.5)
        watch.engine.asked[-1].set_result(None)
        assert await watch.pass_time(0.5)
    assert len(watch.engine.asked) == 3


async def test_a_dead_core_is_noticed_at_the_next_look(watch):
    watch.engine.errored = True
    assert not await watch.pass_time(0.5)
    assert watch.gate.reason == "engine core died: it died"


async def test_a_worker_that_is_not_well_is_named(watch):
    assert await watch.pass_time(2)
    watch.engine.asked[0].set_exception(RuntimeError("no GPU"))
    assert not await watch.pass_time(0.5)
    assert watch.gate.state is ReplicaState.FAILED
    assert "a worker is not well: no GPU" in watch.gate.reason


async def test_an_update_may_block_the_engine_and_silence_counts_from_its_end(watch):
    assert await watch.pass_time(2 + LIMIT_S / 2)  # a question is open
    watch.updating = True
    assert await watch.pass_time(10 * LIMIT_S)
    assert len(watch.engine.asked) == 1
    watch.updating = False
    assert await watch.pass_time(LIMIT_S - 0.5)
    assert not await watch.pass_time(0.5)


async def test_during_an_update_no_question_is_asked(watch):
    watch.updating = True
    assert await watch.pass_time(10 * LIMIT_S)
    assert watch.engine.asked == []


@pytest.mark.parametrize(("timeout_s", "allowed_s"), [(40.0, 40.0), (None, BLOCKING_CALL_S)])
async def test_a_callers_call_may_block_it_for_its_own_limit(watch, timeout_s, allowed_s):
    assert await watch.pass_time(2)  # a question is open
    with watch.health.blocking(timeout_s):
        assert await watch.pass_time(allowed_s + LIMIT_S - 1)
        assert not await watch.pass_time(1)


async def test_after_a_callers_call_it_owes_answers_again(watch):
    with watch.health.blocking(), watch.health.blocking(1.0):
        assert await watch.pass_time(3 * LIMIT_S)
        assert watch.engine.asked == []
    assert not await watch.pass_time(LIMIT_S + 0.5)


@pytest.mark.parametrize(
    ("dies", "error"), [(False, SilentEngineError), (True, ReplicaUnavailableError)]
)
async def test_a_callers_call_ends_in_time_and_leaves_vllm_no_answer_to_mistake(watch, dies, error):
    asked = []

    async def never(*args, engine):
        asked.append(args)
        watch.engine.errored = dies
        await asyncio.Event().wait()

    watch.engine.engine_core = types.SimpleNamespace(core_engines=[0], _call_utility_async=never)
    replica = actor.EngineActor(replica_id="7", engine_args=None, environment={})
    replica.engine, replica._health = watch.engine, watch.health
    replica._updates = Updates(watch.engine, watch.gate)
    with pytest.raises(error, match=r"dig took longer than 0\.01 s|engine core died: it died"):
        await replica.collective_rpc("dig", None if dies else 0.01, (3,))
    assert asked == [("collective_rpc", "dig", None, (3,), None)]


@pytest.mark.parametrize("state", [ReplicaState.FAILED, ReplicaState.CLOSED])
async def test_a_replica_that_is_over_is_left_alone(watch, state):
    assert await watch.pass_time(2)
    watch.gate.set(state, "for a reason of its own")
    assert not await watch.pass_time(0.5)
    assert watch.gate.reason == "for a reason of its own"


async def test_an_actor_that_was_stopped_does_not_take_its_engine_for_silent(watch):
    assert await watch.pass_time(2)
    watch.clock.now += 3600
    assert watch.health.look()
    watch.engine.asked[0].set_result(None)
    assert await watch.pass_time(0.5)
    assert watch.gate.state is ReplicaState.SERVING


@pytest.mark.parametrize("answering", [(0,), (1,), (0, 1)])
async def test_every_data_parallel_engine_must_answer(answering):
    answers = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def call(method, *args, engine):
        assert (method, args) == ("collective_rpc", ("check_health", None, (), None))
        return await answers[engine]

    client = types.SimpleNamespace(core_engines=[0, 1], _call_utility_async=call)
    question = asyncio.ensure_future(
        internals.ask_health(types.SimpleNamespace(engine_core=client))
    )
    for engine in answering:
        answers[engine].set_result([None, None])
    done, _ = await asyncio.wait({question}, timeout=0.05)
    assert bool(done) == (answering == (0, 1))
    question.cancel()


@pytest.mark.parametrize("value", [0.5, 0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(value):
    from torchrl_vllm_sync import AsyncVLLM

    with pytest.raises(UnsupportedArgumentError, match="unresponsive_after_s must be finite and"):
        AsyncVLLM(None, unresponsive_after_s=value)


async def test_the_watch_looks_by_itself_until_it_is_stopped(watch, monkeypatch):
    monkeypatch.setattr(actor, "LOOK_S", 0.001)
    watch.health.start()
    async with asyncio.timeout(20):
        watch.clock.now += 2
        while not watch.engine.asked:  # noqa: ASYNC110  the watch tells nobody
            await asyncio.sleep(0.001)
    watch.health.stop()
    await asyncio.sleep(0.01)
    assert watch.engine.asked[0].cancelled()
    watch.engine.errored = True
    await asyncio.sleep(0.01)
    assert watch.gate.state is ReplicaState.SERVING

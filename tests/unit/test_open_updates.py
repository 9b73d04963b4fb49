"""Updates that are driven call by call: whose turn it is, how they end, and what they leave."""

import asyncio
import inspect

import pytest

pytest.importorskip("vllm")

from tests.fakes.engine import BareUpdates
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.arrivals import NativeCalls
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    SyncError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
)

SERVING, UPDATING, STALE = ReplicaState.SERVING, ReplicaState.UPDATING, ReplicaState.STALE
PART = {"names": ["a", "b"]}


class Worker:
    """Answers as ``SyncWorkerExtension`` does; ``fails`` names methods that fail."""

    def __init__(self):
        self.called, self.fails, self.untouched = [], {}, False

    def __getattr__(self, method):
        def answer(*args):
            self.called.append(method)
            error = self.fails.get(method, "")
            return {"error": error, "error_type": "TransferError", "untouched": self.untouched}

        return answer


class Native(NativeCalls):
    def __init__(self):
        self.worker = Worker()
        updates = BareUpdates([self.worker])
        updates._gate.set(SERVING)
        super().__init__(updates, updates._engine, updates._gate)

    @property
    def state(self):
        return self._gate.state


@pytest.fixture
async def native():
    return Native()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the watchdog tells nobody
            await asyncio.sleep(0.005)


async def test_an_update_from_start_to_finish(native):
    await native.start_weight_update()
    assert native.state is UPDATING
    await native.update_weights({"update_info": PART})
    await native.finish_weight_update("7")
    assert (native.state, native._updates.version, native._updates.whole) == (SERVING, 7, True)
    assert native.worker.called == [
        "native_check",
        "native_start",
        "native_update",
        "native_finish",
    ]
    await native.update_weights_native(PART)
    assert (native.state, native._updates.salt) == (SERVING, "v7.1")


async def test_what_is_refused_leaves_the_update_open(native):
    with pytest.raises(TransferNotReadyError, match="no weight update is open"):
        await native.finish_weight_update()
    with pytest.raises(UnsupportedArgumentError, match="idle_timeout_s must be a finite number"):
        await native.start_weight_update(idle_timeout_s=0)
    native._gate.switch(5)
    await native.start_weight_update()
    for call in (native.start_weight_update, native.pause_generation, native.sleep):
        with pytest.raises(TransferNotReadyError, match="has to wait: a weight update is open"):
            await call()
    with pytest.raises(StaleVersionError, match=r"weight_version must be at least 5, .* got 4"):
        await native.finish_weight_update("4")
    with pytest.raises(SyncError, match=r"another update was under way for 0\.01 s"):
        async with native._updates.exclusive(0.01):
            pass
    await native.finish_weight_update("6")
    assert (native.state, native._updates.version) == (SERVING, 6)


async def test_a_second_call_has_to_wait_for_the_first(native):
    await native.start_weight_update()
    first = asyncio.create_task(native.update_weights(PART))
    await asyncio.sleep(0)
    with pytest.raises(TransferNotReadyError, match=r"another call .* is under way"):
        await native.update_weights(PART)
    await first
    await native.finish_weight_update()


@pytest.mark.parametrize("untouched", [True, False])
async def test_a_part_that_fails_ends_the_update_and_puts_the_model_together(native, untouched):
    await native.start_weight_update()
    native.worker.fails, native.worker.untouched = {"native_update": "it broke off"}, untouched
    with pytest.raises(TransferError, match="replica 0: worker 0: it broke off"):
        await native.update_weights(PART)
    assert native.state is (SERVING if untouched else STALE)
    assert native.worker.called[-1] == "native_abandon"
    assert not native._updates.apart
    native.worker.fails = {}
    await native.update_weights_native(PART)  # nothing is open, and nobody holds the turn
    assert native.state is SERVING


async def test_a_model_that_could_not_be_put_together_is_mended_by_the_next_update(native):
    await native.start_weight_update()
    native.worker.fails = dict.fromkeys(("native_update", "native_abandon"), "it hangs")
    with pytest.raises(TransferError, match="it hangs"):
        await native.update_weights(PART)
    assert (native.state, native._updates.apart) == (STALE, True)
    native.worker.fails = {}

    async def load(left):
        return [{"error": "", "num_tensors": 1, "attempts": 1, "path": "", "path_reason": ""}]

    async with native._updates.exclusive(1.0):
        await native._updates.apply(load, version=3, run_id="r", timeout_s=5.0)
    assert native.worker.called[-1] == "native_abandon"
    assert (native.state, native._updates.apart) == (SERVING, False)


@pytest.mark.parametrize("received", [True, False])
async def test_a_driver_that_falls_silent_loses_its_turn(native, received, caplog):
    await native.start_weight_update(idle_timeout_s=0.05)
    if received:
        await native.update_weights(PART)
    await until(lambda: native._open is None and not native._updates.is_busy)
    assert native.state is (STALE if received else SERVING)
    assert "a weight update is given up: no call came for 0.05 s" in caplog.text
    if received:
        assert "given up half-way: no call came for 0.05 s" in native._gate.reason


async def test_a_call_under_way_does_not_count_as_silence(native):
    await native.start_weight_update(idle_timeout_s=60)
    going_on = asyncio.Event()

    async def slow(*args, **kwargs):
        await going_on.wait()
        return [{"error": "", "untouched": False}]

    native._updates.call_workers, ask = slow, native._updates.call_workers
    part = asyncio.create_task(native.update_weights(PART))
    await asyncio.sleep(0)
    assert native._open.steps.ag_running
    assert native._watchdog._waiting.cancelling() or native._watchdog._waiting.cancelled()
    going_on.set()
    await part
    native._updates.call_workers = ask
    await native.finish_weight_update()
    assert native.state is SERVING


PUSH = {"run_id": "run", "mode": "keep", "clear_cache": False}


async def test_a_push_in_parts_has_its_time_for_all_of_them(native):
    await native.start_weight_update(version=4, timeout_s=60.0, **PUSH)
    for _ in range(2):
        await native.update_weights(PART, timeout_s=5.0)
    report = await native.finish_weight_update()
    assert (report.version, report.num_tensors, report.path) == (4, 4, "layerwise")
    assert (native._updates.version, native._updates.run_id) == (4, "run")
    assert report.whole_pause_s >= report.load_s >= 0
    with pytest.raises(StaleVersionError, match="got 3"):
        await native.start_weight_update(version=3, timeout_s=60.0, **PUSH)
    await native.start_weight_update(version=5, timeout_s=0.1, **PUSH)

    async def send_on():
        while True:
            await native.update_weights(PART, timeout_s=5.0)
            await asyncio.sleep(0.01)

    with pytest.raises(TransferNotReadyError):
        await send_on()
    await until(lambda: native._open is None and not native._updates.is_busy)
    assert native.state is STALE
    with pytest.raises(TransferNotReadyError, match="no weight update is open"):
        await native.finish_weight_update()


async def test_a_pause_outlives_an_update_and_sleep_wants_its_weights_back(native):
    await native.pause_generation(mode="keep")
    await native.update_weights_native(PART)
    assert (native.state, native._updates.held) == (UPDATING, True)
    await native.resume_generation()
    assert native.state is SERVING
    native._engine.sleep = native._engine.wake_up = native._engine.resume_generation
    await native.sleep(level=2)
    for tags, why in ((None, "has no weights to serve with"), (["curtains"], "tags must be among")):
        with pytest.raises((TransferNotReadyError, UnsupportedArgumentError), match=why):
            await native.wake_up(tags)
    with pytest.raises(TransferNotReadyError, match="the weights of replica 0 are asleep"):
        await native.start_weight_update()
    assert not await native.wake_up(["weights"])
    await native.update_weights_native(PART)
    assert await native.wake_up(["kv_cache"])
    assert native.state is SERVING


@pytest.mark.parametrize(("fails_at", "state"), [(0, SERVING), (1, STALE), (2, STALE)])
async def test_an_engine_that_may_be_half_asleep_serves_no_more(native, fails_at, state):
    """Unlike one that could not even stop, until an update brings all of the weights."""

    async def sleep(level, mode):
        assert mode == ("wait" if level == 0 else "keep")
        if level == fails_at:
            raise TransferError("it does not sleep")

    native._engine.sleep = sleep
    with pytest.raises(TransferError, match="it does not sleep"):
        await native.sleep(fails_at or 2, "wait")
    assert (native.state, native._updates.held) == (state, False)
    assert native._updates.whole == (state is SERVING)
    await native.update_weights_native(PART)
    assert (native.state, native._updates.whole) == (SERVING, True)


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_shared_weights_rest_once_the_last_step_has_ended(native, level):
    """Memory is kept, and a step that does not end leaves the engine serving."""
    levels = []

    async def sleep(level, mode):
        levels.append((level, mode, native.worker.called))

    native._updates.is_shared, native._engine.sleep = True, sleep
    native.worker.fails = {"sync_settle": "it hangs"}
    with pytest.raises(TransferError, match="it hangs"):
        await native.sleep(level, "keep")
    assert (native.state, native._updates.held, native._updates.asleep) == (SERVING, False, set())
    native.worker.fails, native.worker.called = {}, []
    await native.sleep(level, "keep")
    assert [one[:2] for one in levels] == [(0, "keep")] * 2
    assert native.worker.called == ["sync_settle"]
    assert native.state is UPDATING
    assert native._updates.whole == (level == 0)
    assert bool(native._updates.asleep) == (level > 0)


async def test_a_push_wakes_what_is_falling_asleep_and_no_cache_without_weights(native):
    begun, slept = asyncio.Event(), asyncio.Event()

    async def sleep(*_):
        begun.set()
        await slept.wait()

    native._engine.sleep, native._engine.wake_up = sleep, native._engine.resume_generation
    falling = asyncio.create_task(native.sleep(2, "keep"))
    await begun.wait()
    waking = asyncio.create_task(native.rouse("weights"))
    await asyncio.sleep(0)
    slept.set()
    await asyncio.gather(falling, waking)
    assert native._updates.asleep == {"kv_cache"}
    await native.update_weights_native(PART)
    await native.rouse("kv_cache")
    assert native.state is SERVING
    await native.sleep(2, "keep")
    await native.rouse("kv_cache")  # of a push that missed it
    assert native._updates.asleep == {"kv_cache", "weights"}


@pytest.mark.parametrize("drains", [False, True])
async def test_weights_are_labelled_while_no_request_gets_tokens(native, drains):
    called = []

    async def pause(**_):
        called.append("pause")

    async def label(_):
        called.append("label")

    native._engine.engine_core.pause_scheduler_async = pause
    native._engine.update_weight_version = label
    if drains:  # those inside go on
        native._updates.drain()
    before = native.state
    await native.update_weight_version("3")
    assert (called, native._updates.version, native.state) == (["pause", "label"], 3, before)


def test_the_actor_has_its_parts_methods_under_their_signatures():
    assert inspect.isasyncgenfunction(EngineActor.run_batch)
    assert inspect.iscoroutinefunction(EngineActor.load_snapshot)
    assert "at_least" in inspect.signature(EngineActor.load_snapshot).parameters
    wanted = inspect.signature(NativeCalls.pause_generation)
    assert inspect.signature(EngineActor.pause_generation) == wanted

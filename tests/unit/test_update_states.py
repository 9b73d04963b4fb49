"""In which state an update leaves a replica, and whose push it lets in."""

import asyncio
import dataclasses
import shutil
import time
from unittest.mock import AsyncMock

import pytest
import torch

from tests.fakes.engine import BareUpdates, nothing, quiet_engine
from torchrl_vllm_sync import ReplicaState, SnapshotWriter
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.answers import AdmissionGate
from torchrl_vllm_sync.engine.arrivals import Arrivals, NativeCalls
from torchrl_vllm_sync.engine.updates import PUSH_SILENCE_S, TORN_SILENCE_S, Updates
from torchrl_vllm_sync.errors import (
    PushUnderWayError,
    ReplicaUnavailableError,
    SilentEngineError,
    SnapshotError,
    StaleVersionError,
    SyncError,
    TransferNotReadyError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity, is_locked
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import is_lost

STARTING, SERVING, STALE = ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.STALE
FAILED = ReplicaState.FAILED


@pytest.fixture
def updates():
    return Updates(quiet_engine(), AdmissionGate("0"))


async def load(updates, version, error="", before=lambda: None, untouched=True):
    async def answers(timeout_s):
        del timeout_s
        before()
        told = {"error": error, "untouched": untouched, "num_tensors": 1, "attempts": 1}
        return [{**told, "path": "plan", "path_reason": ""}]

    async with updates.exclusive(1.0):
        await updates.apply(
            answers, version=version, run_id="r", mode="keep", clear_cache=False, timeout_s=5.0
        )


async def swap(updates, version, error="", untouched=False):
    async def call(engine, method, args, take):
        told = {"error": error, "untouched": untouched, "num_tensors": 0, "seconds": 0.25}
        answers = [{**told, "path": "plan", "path_reason": "", "computed": {}}]
        take(answers)
        at_once.append(updates._gate.state)
        return answers

    at_once = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "call_between_steps", call)
        patch.setattr(internals, "pause_scheduler", None)  # neither is called
        patch.setattr(updates._engine, "resume_generation", None)
        async with updates.exclusive(1.0):
            return await updates.swap("m", version=version, run_id="r", timeout_s=5.0), at_once


async def test_a_swap_pauses_nothing_and_says_how_long_workers_stood_still(updates):
    updates._gate.set(SERVING)
    report, at_once = await swap(updates, 3)
    assert (report.version, updates.version, updates.run_id) == (3, 3, "r")
    assert at_once == [ReplicaState.UPDATING]
    assert updates._gate.state is SERVING
    assert report.load_s == report.whole_pause_s == pytest.approx(0.25)
    assert (report.pause_s, report.resume_s) == (0.0, 0.0)


async def test_a_swap_that_fails_serves_what_it_did_or_nothing(updates):
    updates._gate.set(SERVING)
    with pytest.raises(SyncError, match="no swap"):
        await swap(updates, 3, "no swap", untouched=True)
    assert (updates._gate.state, updates.version, updates.whole) == (SERVING, 0, True)
    with pytest.raises(SyncError, match="half a swap"):
        await swap(updates, 3, "half a swap")
    assert (updates._gate.state, updates.version) == (STALE, 0)
    assert not updates.can_swap("keep", False)  # the next one freezes it


@pytest.mark.parametrize("are_gone", [True, False])
async def test_an_engine_whose_workers_died_in_a_load_is_lost_to_the_push(
    updates, monkeypatch, are_gone
):
    """Its core answers before it dies: a push must know, to go on without it."""
    failure = Exception("Call to collective_rpc method failed: cancelled")  # as vLLM has it
    monkeypatch.setattr(internals, "call_workers", AsyncMock(side_effect=failure))
    health = AsyncMock(side_effect=failure) if are_gone else nothing
    monkeypatch.setattr(internals, "ask_health", health)
    updates._gate.set(SERVING)
    with pytest.raises(ReplicaUnavailableError if are_gone else Exception, match="cancelled") as it:
        await Arrivals(updates, list).receive_broadcast(
            1, "", version=1, run_id="r", timeout_s=1.0, mode="keep", clear_cache=True
        )
    assert is_lost(it.value) == are_gone
    assert updates._gate.state is (FAILED if are_gone else STALE)


class SlowWorker:
    """Answers after a while."""

    def sync_plan_writes(self, metadata):
        time.sleep(0.3)
        return {"error": ""}


async def test_one_that_waits_for_its_turn_is_not_silent():
    """Its workers have all of the time afterwards; those that need more are named."""
    updates = BareUpdates([SlowWorker()])
    asked = asyncio.create_task(Arrivals(updates, list).plan_writes([], timeout_s=1.0))
    async with updates.exclusive(1.0):
        await asyncio.sleep(0.85)
    assert await asked == [{"error": ""}]
    with pytest.raises(SilentEngineError, match="planning took longer than"):
        await Arrivals(updates, list).plan_writes([], timeout_s=0.1)


async def test_an_update_that_fails_does_not_let_it_serve(updates):
    with pytest.raises(SyncError, match="disk"):
        await load(updates, 3, "the disk is gone")
    assert updates._gate.state is STARTING
    updates.admit(3, None)
    assert updates._gate.state is STALE
    await load(updates, 3)
    assert updates._gate.state is SERVING


@pytest.mark.parametrize(("floor", "state"), [(0, SERVING), (3, STALE)])
async def test_admitted_during_an_update_that_fails(updates, floor, state):
    with pytest.raises(SyncError, match="disk"):
        await load(updates, 3, "the disk is gone", lambda: updates.admit(floor, None))
    assert updates._gate.state is state


async def test_one_that_serves_goes_on_after_an_update_that_failed(updates):
    updates._gate.set(SERVING)
    with pytest.raises(SyncError, match="disk"):
        await load(updates, 3, "the disk is gone")
    assert updates._gate.state is SERVING


@pytest.mark.parametrize("untouched", [True, False])
async def test_a_load_that_broke_off_says_whether_the_weights_are_whole(updates, untouched):
    updates._gate.set(SERVING)
    with pytest.raises(SyncError) as caught:
        await load(updates, 3, "the trainer is gone", untouched=untouched)
    told = "its weights are not whole, and it is stale until the next push repairs it"
    assert (told in str(caught.value)) is not untouched
    assert "worker 0 could not load: the trainer is gone" in str(caught.value)
    assert updates._gate.state is (SERVING if untouched else STALE)
    await load(updates, 4)
    assert updates._gate.state is SERVING


async def test_another_runs_version_of_the_same_number_is_not_current(updates):
    updates._gate.set(SERVING)
    await load(updates, 3)
    for run_id in ("r", None):
        updates.hold_back(3, run_id)
        assert (updates._gate.state, updates.whole) == (SERVING, True)
    updates.hold_back(3, "another run")
    assert (updates._gate.state, updates.whole) == (STALE, False)
    assert updates._gate.reason == "it did not reach version 3 of this run"
    await load(updates, 3)
    assert (updates._gate.state, updates.salt) == (SERVING, "v3.1")


@pytest.mark.parametrize("version", [2, 3])
async def test_a_version_that_another_run_has_overtaken_is_refused(updates, version):
    await load(updates, 3)
    with pytest.raises(StaleVersionError, match=f"to which run r .*, got {version} of run s"):
        updates.refuse_foreign(version, "s")
    for taken in [(4, "s"), (version, "r"), (version, None)]:
        updates.refuse_foreign(*taken)


async def test_one_that_is_being_removed_is_not_admitted(updates):
    updates.drain()
    updates.admit(0, None)
    assert updates._gate.state is ReplicaState.DRAINING


ME = ProcessIdentity.current()
DEAD = dataclasses.replace(ME, start_time=ME.start_time - 1)
ELSEWHERE = dataclasses.replace(ME, host="another", hostname="far-away", pid=7)


def test_a_push_keeps_others_out_until_it_ends(updates):
    assert not updates.begin_push(ELSEWHERE, "a", 1), "nobody pushed before"
    for trainer, sender in [(ME, "b"), (ME, "a"), (ELSEWHERE, "b")]:
        with pytest.raises(PushUnderWayError, match="pid 7 on far-away; push again") as caught:
            updates.begin_push(trainer, sender, 1)
        assert (caught.value.host, caught.value.pid) == ("far-away", 7)
    updates.end_push("b", 1)
    with pytest.raises(PushUnderWayError):
        updates.begin_push(ME, "b", 1)
    updates.end_push("a", 1)
    assert not updates.begin_push(ME, "b", 1)
    updates.end_push("b", 1)
    assert updates.begin_push(ME, "b", 2)


def test_the_end_of_a_push_that_comes_late_does_not_end_the_next(updates):
    updates.begin_push(ME, "a", 1)
    assert updates.begin_push(ME, "a", 2)
    updates.end_push("a", 1)
    with pytest.raises(PushUnderWayError):
        updates.begin_push(ME, "b", 1)


def test_a_trainer_that_died_keeps_nobody_out(updates):
    updates.begin_push(DEAD, "a", 1)
    assert not updates.begin_push(ME, "b", 1)


def test_a_trainer_elsewhere_keeps_others_out_as_long_as_it_gives_signs_of_life(
    updates, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr("torchrl_vllm_sync.engine.updates.time.monotonic", lambda: now[0])
    updates.begin_push(ELSEWHERE, "a", 1)
    now[0] += PUSH_SILENCE_S - 1
    updates.keep_push("a", 1)
    updates.keep_push("a", 2)
    updates.keep_push("b", 1)
    now[0] += PUSH_SILENCE_S - 1
    with pytest.raises(PushUnderWayError):
        updates.begin_push(ME, "b", 1)
    now[0] += 2
    assert not updates.begin_push(ME, "b", 1)
    updates.keep_push("a", 1)
    updates.end_push("a", 1)
    with pytest.raises(PushUnderWayError):
        updates.begin_push(ELSEWHERE, "a", 2)


@pytest.mark.parametrize("whole", [True, False])
def test_a_stopped_trainer_that_left_weights_in_pieces_keeps_others_out_less_long(
    updates, monkeypatch, whole
):
    now = [0.0]
    monkeypatch.setattr("torchrl_vllm_sync.engine.updates.time.monotonic", lambda: now[0])
    updates.begin_push(ME, "a", 1)
    updates.whole = whole
    now[0] += TORN_SILENCE_S + 1
    if whole:
        with pytest.raises(PushUnderWayError):
            updates.begin_push(ME, "b", 1)
    else:
        assert not updates.begin_push(ME, "b", 1)


async def test_one_that_was_not_removed_after_all_serves_again(updates):
    updates._gate.set(SERVING)
    updates.drain()
    assert updates._gate.state is ReplicaState.DRAINING
    updates.undrain()
    assert updates._gate.state is SERVING
    updates._gate.set(STALE, "it missed a version")
    updates.drain()
    updates.undrain()
    assert updates._gate.state is STALE


@pytest.mark.parametrize("missed", [(4, "a run"), (3, "another run")])
async def test_one_that_was_not_removed_and_missed_a_push_serves_nothing_old(updates, missed):
    updates._switch(3)
    updates.run_id = "a run"
    updates._gate.set(SERVING)
    updates.drain()
    updates.hold_back(*missed)
    updates.undrain()
    assert updates._gate.state is STALE


class Stored:
    """A directory with version 1, of which the engine's one worker loads as it is told."""

    def __init__(self, updates, directory, monkeypatch):
        self.updates, self.directory, self.done = updates, directory, []
        self.during, self.error = lambda: None, ""
        self.loads = Arrivals(updates, list)
        self.writer = SnapshotWriter(directory, num_slots=2, max_slots=2)
        self.publish(1)
        monkeypatch.setattr(internals, "call_workers", self.call_workers)
        monkeypatch.setattr(internals, "set_weight_label", self.step("label"))
        updates._engine.resume_generation = self.step("resume")
        updates._gate.set(SERVING)

    def publish(self, *versions):
        for version in versions:
            source = MappingSource({"a": torch.full((9,), float(version))})
            self.writer.publish(source, source.metadata(), version)

    def step(self, name):
        async def taken(*_):
            locked = [is_locked(path) for path in self.directory.glob(f"*/{DATA_FILE}")]
            self.done.append((name, sum(locked)))

        return taken

    async def call_workers(self, *_):
        self.during()
        return [
            {"error": self.error, "num_tensors": 1, "attempts": 1, "path": "", "path_reason": ""}
        ]

    async def load(self):
        return await self.loads.load_snapshot(str(self.directory), None, at_least=1, timeout_s=5.0)


@pytest.fixture
def stored(updates, tmp_path, monkeypatch):
    stored = Stored(updates, tmp_path / "weights", monkeypatch)
    yield stored
    if stored.directory.exists():
        stored.writer.close()


async def test_what_was_read_is_proved_whole_before_it_is_labelled(stored):
    assert (await stored.load()).version == 1
    assert stored.done == [("label", 0), ("resume", 0)], "with no lock held any more"
    assert stored.updates._gate.state is SERVING


@pytest.mark.parametrize("fault", ["recycled", "removed"])
async def test_what_was_torn_while_it_was_read_is_not_served(stored, fault, monkeypatch):
    monkeypatch.setattr(files, "is_locked", lambda path: False)  # locks do not reach
    stored.during = {
        "recycled": lambda: stored.publish(2, 3),  # the slot is 3's now
        "removed": lambda: shutil.rmtree(stored.directory),
    }[fault]
    with pytest.raises(SnapshotError, match="discard what was read"):
        await stored.load()
    assert stored.done == []
    assert (stored.updates._gate.state, stored.updates.whole) == (STALE, False)
    assert (stored.updates.version, stored.loads.snapshot_source()) == (0, None)


@pytest.mark.parametrize("version", [0, 1])  # a second run's 0 may be other weights
async def test_a_pinned_replica_takes_no_update_until_it_is_handed_back(stored, version):
    updates, engine = stored.updates, stored.updates._engine
    updates.begin_push(ME, "a", 1)
    with pytest.raises(VersionNotReachedError, match=r"version 4 .* replica 0 moved on"):
        await updates.pin(4)
    await updates.pin(0)
    native = NativeCalls(updates, engine, updates._gate)
    for call in (
        stored.load(),
        stored.loads.receive_broadcast(1, "", version=version, run_id="r", timeout_s=1.0),
        stored.loads.take_written([0], version=version, run_id="r", timeout_s=1.0),
        stored.loads.take_weights({"version": version, "run_id": "r"}, timeout_s=1.0),
        native.start_weight_update(timeout_s=1.0),
        native.update_weight_version(str(version)),
    ):
        with pytest.raises(TransferNotReadyError, match="replica 0 is pinned at version 0, until"):
            await call
    updates.hold_back(1, "r")  # by a push that found it
    assert (updates._gate.state, updates.version, updates.whole) == (SERVING, 0, True)
    updates.begin_push(ELSEWHERE, "b", 1)  # its turn, as the one it was pinned in is over
    assert not updates.begin_push(ME, "c", 1)  # and is not told of its end
    updates.hold_back(1, "r", let_go=True)
    updates.begin_push(ME, "c", 2)
    assert updates._gate.state is STALE
    assert (await stored.load()).version == 1


async def test_a_load_that_failed_is_told_of_and_not_what_became_of_the_snapshot(stored):
    stored.during, stored.error = lambda: shutil.rmtree(stored.directory), "the disk is gone"
    with pytest.raises(SyncError, match="worker 0 could not load: the disk is gone"):
        await stored.load()
    assert stored.updates._gate.state is STALE


async def test_a_directory_removed_once_all_is_loaded_does_no_harm(stored):
    async def remove(*_):
        shutil.rmtree(stored.directory)

    stored.updates._engine.resume_generation = remove
    assert (await stored.load()).version == 1
    assert stored.updates._gate.state is SERVING

"""In which state an update leaves a replica that has not joined its service yet."""

from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.admission import AdmissionGate
from torchrl_vllm_sync.engine.updates import WeightUpdates
from torchrl_vllm_sync.errors import SyncError
from torchrl_vllm_sync.replica import ReplicaState

STARTING, SERVING, STALE = ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.STALE


@pytest.fixture
def updates(monkeypatch):
    async def nothing(*_, **__):
        return None

    monkeypatch.setattr(internals, "pause_scheduler", nothing)
    monkeypatch.setattr(internals, "set_weight_label", nothing)
    engine = SimpleNamespace(errored=False, resume_generation=nothing, abort=nothing)
    return WeightUpdates(engine, AdmissionGate("0"))


async def load(updates, version, error="", before=lambda: None):
    async def answers(timeout_s):
        del timeout_s
        before()
        told = {"error": error, "untouched": True, "num_tensors": 1, "attempts": 1}
        return [{**told, "path": "plan", "path_reason": ""}]

    async with updates.exclusive(1.0):
        await updates.apply(
            answers, version=version, run_id="r", mode="keep", clear_cache=False, timeout_s=5.0
        )


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


async def test_one_that_is_being_removed_is_not_admitted(updates):
    updates.drain()
    updates.admit(0, None)
    assert updates._gate.state is ReplicaState.DRAINING


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

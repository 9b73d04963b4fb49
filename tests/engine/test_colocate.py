"""Engines that sleep while a trainer uses their memory: order, waits and deaths, on CPUs.

What is put to sleep there is the scheduler; memory stays where it is.
"""

import os
import signal
import threading
from typing import Any

import pytest
import ray
import torch
from tensordict import set_list_to_stack
from vllm import AsyncEngineArgs

from tests.engine.checks import assert_holds, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import DozingActor, engine_core_pid
from tests.engine.requests import endless, eventually, num_running, sampling
from tests.engine.test_rollouts import ROWS, length, make_collector
from tests.engine.trainers import Trainer
from torchrl_vllm_sync import AsyncVLLM, IPCTransport, QueueLengthScaling, ReplicaState
from torchrl_vllm_sync.errors import (
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.replica import process_began
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def shared(cluster, checkpoint):
    how = {**ENGINE, "max_restarts": 9, "actor_class": DozingActor}
    how["worker_extension_cls"] = "tests.engine.plain_worker.PlainWorker"  # others copy from it
    with AsyncVLLM.from_pretrained(checkpoint, num_replicas=3, colocate=True, **how) as service:
        yield service


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_tiny_model(checkpoint)


def test_a_push_wakes_engines_and_leaving_has_them_sleep(shared, model, monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(shared.is_paused()))
    for seed in range(3):
        with shared.awake(perturbed(model, seed=seed)) as report:
            assert_holds(shared, model)
            assert not shared.is_paused()
        assert shared.is_paused()
        told = report.phase_starts
        others = [told[name] for name in told if name not in ("open_s", "wake_s", "wake_cache_s")]
        assert told["open_s"] < told["wake_s"] < min(others) < max(others) < told["wake_cache_s"]
        assert (report.phases["sleep_s"] > 0) == (seed > 0)
    assert given_back == [False, True, True]  # before engines wake


def test_engines_that_never_held_a_version_are_audited_as_they_wake(checkpoint, model):
    how = {**ENGINE, "worker_extension_cls": "tests.engine.plain_worker.PlainWorker"}
    with AsyncVLLM.from_pretrained(checkpoint, colocate=True, **how) as service:
        service.sleep(2, "keep")
        for seed in range(2):
            with service.awake(perturbed(model, seed=seed), audit=True) as report:
                assert report.phases["audit_s"] > 0
                assert_holds(service, model)


def test_requests_in_flight_wait_and_go_on_under_the_weights_that_wake_them(shared, model):
    found = []
    with shared.awake(perturbed(model, seed=10)) as before:
        prompts = [[5, 6, at] for at in range(4)]
        call = threading.Thread(
            target=lambda: found.extend(shared.generate(prompts, endless(logprobs=0)))
        )
        call.start()
        eventually(lambda: num_running(shared) == len(prompts))
    held = sum(shared.get_num_unfinished_requests())
    assert held == len(prompts)
    late = threading.Thread(target=lambda: found.append(shared.generate([7, 8], sampling())))
    late.start()
    late.join(0.5)
    assert late.is_alive()
    assert sum(shared.get_num_unfinished_requests()) == held
    with shared.awake(perturbed(model, seed=11)) as after:
        call.join(60)
        late.join(60)
    kept = [one for one in found if len(one.prompt_token_ids) == 3]
    assert {(one.min_version, one.max_version) for one in kept} == {(before.version, after.version)}
    assert [len(one.outputs[0].token_ids) for one in kept] == [250] * 4
    (other,) = [one for one in found if len(one.prompt_token_ids) == 2]
    assert (other.min_version, other.max_version) == (after.version, after.version)


def test_no_weights_no_waking(shared, model):
    shared.push_weights(perturbed(model, seed=20))
    shared.sleep(2, "keep")
    with pytest.raises(TransferNotReadyError, match="no weights to serve with"):
        shared.wake_up()
    wrong = {name: one for name, one in model.state_dict().items() if "layers.1" not in name}
    with pytest.raises(WeightMismatchError):
        shared.push_weights(wrong)
    assert shared.is_paused()
    shared.push_weights(model)
    assert_holds(shared, model)


def hold(actors, point, files):
    """Has each actor wait at ``point`` once, until its file is gone; returns what waits for all."""
    for actor, file in zip(actors, files, strict=False):
        ray.get(actor.hold_at.remote(point, str(file)))
    return lambda: eventually(lambda: all(file.exists() for file in files))


@pytest.fixture(scope="module")
def trainer(shared, checkpoint):
    """One in a process of its own, not that which restarts replicas; and a model like its own."""
    return Trainer.remote(shared, checkpoint, transport=IPCTransport()), load_tiny_model(checkpoint)


@pytest.mark.parametrize("phase", ["asleep", "weights", "label", "kv_cache", "sleep"])
def test_what_is_killed_comes_back_as_the_others_are(shared, trainer, tmp_path, phase):
    """An actor and another's engine: asleep or about to, or in a push that wakes them."""
    other, twin = trainer
    seed = 100 + 2 * sum(one.num_restarts for one in shared.replicas.members)
    assert ray.get(other.push_to_some.remote(seed)) == {}
    perturbed(twin, seed=seed)
    actors, core, num = shared.actors, engine_core_pid(shared.actors[1]), num_restarts(shared)
    wakes = phase in ("weights", "label", "kv_cache")
    if wakes:
        shared.sleep(2, "keep")
    if phase == "asleep":
        ray.get(other.sleep.remote())
        step = None
    else:
        reached = hold(actors, phase, files := [tmp_path / "0", tmp_path / "1"])
        step = other.push_to_some.remote(seed + 1) if wakes else other.sleep.remote()
        reached()
    ray.kill(actors[0])
    os.kill(core, signal.SIGKILL)
    if step is not None:
        for file in files:
            file.unlink()
        left_behind = ray.get(step, timeout=120)
        assert not wakes or left_behind.keys() == {"0", "1"}
    if not wakes:  # their memory is the trainer's
        eventually(lambda: all_asleep(shared, [num[0] + 1, num[1] + 1, num[2]]), timeout_s=120)
        assert ray.get(other.push_to_some.remote(seed + 1)) == {}
    shared.wait_until_serving(timeout_s=120)  # by what the others serve
    assert_holds(shared, perturbed(twin, seed=seed + 1))


def num_restarts(service):
    return [one.num_restarts for one in service.replicas.members]


def all_asleep(service, restarts):
    """Whether replicas were restarted as often, sleep, and know it of each other."""
    reports = service.replicas.call_replicas("report").good.values()
    told = {(one.membership_epoch, one.asleep) for one in reports}
    return num_restarts(service) == restarts and told == {(service.replicas.membership.epoch, True)}


@pytest.mark.parametrize("phase", ["weights", "sleep"])
def test_engines_that_a_killed_trainer_leaves_are_the_next_ones(
    shared, checkpoint, model, tmp_path, phase
):
    shared.push_weights(model)
    if phase != "sleep":
        shared.sleep(2, "keep")
    other, file = Trainer.remote(shared, checkpoint), tmp_path / "held"
    pid = ray.get(other.pid.remote())
    reached = hold(shared.actors, phase, [file])
    _ = other.sleep.remote() if phase == "sleep" else other.push.remote(30)
    reached()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: process_began(pid) is None)
    file.unlink()
    with shared.awake(perturbed(model, seed=31)) as report:
        assert report.left_behind == {}
        assert_holds(shared, model)
    assert shared.is_paused()


def test_one_that_sleeps_while_others_serve_wakes_as_it_catches_up(shared, model):
    version = shared.push_weights(perturbed(model, seed=32)).version
    calls = shared.replicas.call_replicas
    calls("sleep", calls={"0": (2, "keep")}).raise_failures()
    calls("hold_back", calls={"0": (version, "unknown")}).raise_failures()  # as if it began anew
    shared.weights.learn_versions()
    assert shared.load.snapshots()[0].state is ReplicaState.STALE
    shared.wait_until_serving()
    assert_holds(shared, model)


def test_a_collector_hands_batches_on_while_engines_sleep(shared, model):
    shared.push_weights(model)
    seen = []
    with set_list_to_stack(True):
        for rows in make_collector(shared, length, total_dialog_turns=3 * ROWS):
            assert shared.is_paused()
            version = shared.push_weights(perturbed(model, seed=40 + len(seen))).version
            seen.append((rows["policy_version"].unique().tolist(), version))
        assert len(seen) == 3
        assert [own for own, _ in seen[1:]] == [[version] for _, version in seen[:-1]]
        with pytest.raises(TransferNotReadyError, match="no weights to serve with"):
            [*make_collector(shared, length, total_dialog_turns=2 * ROWS)]  # nobody pushes
        with pytest.raises(UnsupportedArgumentError, match="max_staleness must be 0"):
            make_collector(shared, length, max_staleness=1)
    shared.push_weights(model)


def test_what_cannot_sleep_is_refused(checkpoint):
    how = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 256}
    refused: list[dict[str, Any]] = [{"stage_weights": True}, {"scaling": QueueLengthScaling(1, 2)}]
    for given in refused:
        with pytest.raises(UnsupportedArgumentError, match="would be awake"):
            AsyncVLLM(AsyncEngineArgs(**how), colocate=True, **given)
    service = AsyncVLLM(AsyncEngineArgs(**how))
    with pytest.raises(UnsupportedArgumentError, match="only a service with colocate=True"):
        service.awake({}).__enter__()

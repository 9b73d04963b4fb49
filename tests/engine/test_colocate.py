"""Engines that sleep while a trainer uses their memory: order, waits and deaths, on CPUs.

What is put to sleep there is the scheduler; memory stays where it is.
"""

import threading
from typing import Any

import pytest
import ray
from tensordict import set_list_to_stack
from vllm import AsyncEngineArgs

from tests.engine.checks import assert_holds, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.requests import endless, eventually, num_running, sampling
from tests.engine.test_rollouts import ROWS, length, make_collector
from torchrl_vllm_sync import AsyncVLLM, MemmapTransport, QueueLengthScaling, ReplicaState
from torchrl_vllm_sync.errors import (
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def shared(cluster, checkpoint):
    how = {**ENGINE, "max_restarts": 3}
    with AsyncVLLM.from_pretrained(checkpoint, num_replicas=2, colocate=True, **how) as service:
        yield service


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_tiny_model(checkpoint)


def test_a_push_wakes_engines_and_leaving_has_them_sleep(shared, model):
    for seed in range(3):
        with shared.awake(perturbed(model, seed=seed)) as report:
            assert_holds(shared, model)
            assert not shared.is_paused()
        assert shared.is_paused()
        told = report.phase_starts
        others = [told[name] for name in told if name not in ("open_s", "wake_s", "wake_cache_s")]
        assert told["open_s"] < told["wake_s"] < min(others) < max(others) < told["wake_cache_s"]
        assert (report.phases["sleep_s"] > 0) == (seed > 0)


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


def test_a_replica_that_is_killed_asleep_comes_back_by_the_next_push(shared, model):
    shared.push_weights(perturbed(model, seed=30), transport=MemmapTransport())
    shared.sleep(2, "keep")
    ray.kill(shared.actors[0])
    eventually(lambda: shared.load.snapshots()[0].state is not ReplicaState.UPDATING)
    # It comes back asleep: the trainer uses the memory.
    eventually(lambda: shared.load.snapshots()[0].state is ReplicaState.STALE, timeout_s=120)
    eventually(lambda: shared.replicas.call_replicas("is_paused").good == {"0": True, "1": True})
    report = shared.push_weights(perturbed(model, seed=31))
    assert "1" not in report.left_behind
    shared.wait_until_serving(timeout_s=200)
    assert shared.weight_versions == dict.fromkeys("01", report.version)
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

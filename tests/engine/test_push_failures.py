"""Pushes that go wrong in a replica, and the twins without which the other tests prove nothing."""

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from vllm import SamplingParams

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.requests import eventually, num_running, slowed
from torchrl_vllm_sync import MemmapTransport, ReplicaState, SnapshotWriter
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    SnapshotError,
    WeightSyncError,
)
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE
from torchrl_vllm_sync.weights.source import MappingSource

KILLS = True
SERVING, STALE, FAILED = ReplicaState.SERVING, ReplicaState.STALE, ReplicaState.FAILED
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def faulty(hurt):
    """Replicas whose loads fail on demand."""
    return hurt


@pytest.fixture
def trained(faulty, untied_checkpoint):
    """What all replicas hold, with no fault left over from another test."""
    model = load_tiny_model(untied_checkpoint)
    plan(faulty)
    faulty.push_weights(model)
    assert_holds(faulty, model)
    return model


def plan(service, *replicas, **faults):
    """Plans ``faults`` for these replicas, by position, and none for the others; returns pids."""
    return [
        ray.get(actor.collective_rpc.remote("sync_plan", kwargs=faults if i in replicas else {}))[0]
        for i, actor in enumerate(service.actors)
    ]


def reports(service):
    return list(service.replicas.call_replicas("report").values())


def states(service):
    return [report.state for report in reports(service)]


# ---------------------------------------------------------------- twins that must fail


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.3.self_attn.v_proj.weight",
    ],
)
def test_the_check_notices_one_tensor_lost_at_the_receiver(faulty, trained, name):
    perturbed(trained, seed=1)
    plan(faulty, 1, zero=name)
    faulty.push_weights(trained)
    assert_holds(faulty, trained, [0, 2])
    assert distance(faulty, trained, 1) > 100 * TOLERANCE
    with pytest.raises(AssertionError, match=r"replica 1 differs by"):
        assert_holds(faulty, trained)


def test_the_check_notices_a_load_that_was_skipped(faulty, trained):
    perturbed(trained, seed=2)
    ray.get(faulty.actors[1].skip_loads.remote(1))
    report = faulty.push_weights(trained)  # says that all went well
    assert [one.version for one in report.replicas] == [report.version] * 3
    with pytest.raises(AssertionError, match=r"replica 1 differs by"):
        assert_holds(faulty, trained)


# ---------------------------------------------------------------- loads that fail


@pytest.mark.parametrize("fail_at", [0, 8, 46])
def test_a_load_that_failed_half_way_is_repaired_by_the_second_attempt(faulty, trained, fail_at):
    perturbed(trained, seed=fail_at)
    plan(faulty, 0, 1, 2, fail_at=fail_at, times=1)
    report = faulty.push_weights(trained)
    assert [one.phases["attempts"] for one in report.replicas] == [2, 2, 2]
    assert_holds(faulty, trained)


@pytest.mark.parametrize("fail_at", [4, 21])
def test_a_replica_whose_loads_fail_is_named_and_serves_nobody_until_repaired(
    faulty, trained, fail_at
):
    before = faulty.weight_version
    perturbed(trained, seed=fail_at)
    plan(faulty, 1, fail_at=fail_at, times=2)
    with pytest.raises(WeightSyncError, match=r"replica 1: .*injected before tensor") as caught:
        faulty.push_weights(trained)
    version = before + 1
    assert caught.value.version == version
    assert set(caught.value.failures) == {"1"}
    assert states(faulty) == [SERVING, STALE, SERVING]
    assert "injected" in reports(faulty)[1].reason

    outputs = faulty.generate([[i, 5, 6] for i in range(20)], SamplingParams(max_tokens=2))
    assert {output.replica_id for output in outputs} == {"0", "2"}
    assert {output.min_version for output in outputs} == {version}
    with pytest.raises(NoReplicaAvailableError):
        faulty.generate(prompt_token_ids=[5, 6], actor_index=1)
    assert_holds(faulty, trained, [0, 2])

    again = faulty.push_weights(trained, version=version)
    assert [one.phases["loaded"] for one in again.replicas] == [0, 1, 0]
    assert states(faulty) == [SERVING] * 3
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)
    assert faulty.weight_version == version


def test_requests_in_flight_on_a_replica_that_fails_finish_elsewhere(faulty, trained):
    perturbed(trained, seed=5)
    plan(faulty, 1, fail_at=10, times=2)
    prompts = [[i, 7, 8] for i in range(8)]
    generate = ray.remote(num_cpus=0)(lambda service: service.generate(prompts, LONG))
    with slowed(faulty):
        running = generate.remote(faulty)
        eventually(lambda: num_running(faulty) >= 8)
        with pytest.raises(WeightSyncError):
            faulty.push_weights(trained)
    outputs = ray.get(running, timeout=60)
    assert [one.finish_reason for output in outputs for one in output.outputs] == ["length"] * 8
    assert {output.replica_id for output in outputs} == {"0", "2"}
    faulty.push_weights(trained)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_the_next_push_after_one_that_failed_everywhere_sends_the_new_weights(faulty, trained):
    perturbed(trained, seed=6)
    plan(faulty, 0, 1, 2, fail_at=3, times=2)
    with pytest.raises(WeightSyncError) as caught:
        faulty.push_weights(trained)
    assert set(caught.value.failures) == {"0", "1", "2"}
    assert states(faulty) == [STALE] * 3
    perturbed(trained, seed=7)
    assert faulty.push_weights(trained).version > caught.value.version
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_a_load_that_hangs_runs_into_the_time_limit_and_is_repaired(faulty, trained, tmp_path):
    marker = tmp_path / "marker"
    perturbed(trained, seed=8)
    plan(faulty, 1, at=0, touch=str(marker))
    with pytest.raises(WeightSyncError, match=r"replica 1: loading took longer than \d") as caught:
        faulty.push_weights(trained, timeout_s=10)
    assert marker.exists()  # it still hangs
    marker.unlink()
    assert states(faulty) == [SERVING, STALE, SERVING]
    faulty.push_weights(trained, version=caught.value.version)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_a_pause_that_fails_everywhere_leaves_all_serving_what_they_held(faulty, trained):
    version = faulty.weight_version
    for actor in faulty.actors:
        ray.get(actor.fail_pauses.remote(1))
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=9)
    with pytest.raises(WeightSyncError, match=r"replica 0: injected at the pause; replica 1: inj"):
        faulty.push_weights(other)
    assert states(faulty) == [SERVING] * 3
    assert {report.weight_version for report in reports(faulty)} == {version}
    assert_holds(faulty, trained)
    faulty.push_weights(other)
    assert_holds(faulty, other)


def test_a_replica_that_missed_what_others_took_is_held_back_until_it_has_it(faulty, trained):
    ray.get(faulty.actors[0].fail_pauses.remote(1))
    perturbed(trained, seed=10)
    with pytest.raises(WeightSyncError, match=r"replica 0: injected at the pause") as caught:
        faulty.push_weights(trained)
    version = caught.value.version
    assert states(faulty) == [STALE, SERVING, SERVING]
    assert reports(faulty)[0].reason == f"it did not reach version {version}"
    outputs = faulty.generate([[i, 5] for i in range(20)], SamplingParams(max_tokens=1))
    assert {output.min_version for output in outputs} == {version}
    faulty.push_weights(trained, version=version)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_another_runs_version_of_the_same_number_is_not_served(faulty, trained):
    version = faulty.push_weights(trained).version
    ray.get(faulty.actors[0].hold_back.remote(version, "another run"))
    assert states(faulty) == [STALE, SERVING, SERVING]

    perturbed(trained, seed=17)
    faulty.push_weights(trained)

    faulty.generate([7, 5], SamplingParams(max_tokens=1), actor_index=0)  # at once, no waiting
    assert_holds(faulty, trained)


def test_a_damaged_snapshot_is_not_loaded(faulty, trained, tmp_path):
    class Damaging(MemmapTransport):
        def _publish(self, *args):
            super()._publish(*args)
            for path in self.directory.rglob(DATA_FILE):
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 3)
                    file.write(b"\xff" * 64)

    version = faulty.weight_version
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=11)
    with pytest.raises(WeightSyncError, match=r"replica 1: .*corrupted: 1 of 47 tensors"):
        faulty.push_weights(other, transport=Damaging(tmp_path / "damaged"))
    assert {report.weight_version for report in reports(faulty)} == {version}
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)
    faulty.push_weights(other, transport=MemmapTransport())
    assert_holds(faulty, other)


def test_a_slot_rewritten_in_mid_load_is_not_served(faulty, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "is_locked", lambda path: False)  # locks do not reach
    directory, marker = tmp_path / "slots", tmp_path / "marker"
    version = faulty.weight_version

    def publish(writer, number):
        source = MappingSource(perturbed(trained, seed=number).state_dict())
        writer.publish(source, source.metadata(), version + number)

    plan(faulty, 1, at=20, touch=str(marker))
    with SnapshotWriter(directory, num_slots=2, max_slots=2) as writer:
        publish(writer, 1)
        load = faulty.actors[1].load_snapshot.remote(str(directory), None, at_least=1, timeout_s=60)
        eventually(marker.exists)
        publish(writer, 2)
        publish(writer, 3)  # in the slot that is being read
        marker.unlink()
        with pytest.raises(SnapshotError, match="recycled while version"):
            ray.get(load, timeout=60)
    assert states(faulty) == [SERVING, STALE, SERVING]
    assert reports(faulty)[1].weight_version == version
    with pytest.raises(ReplicaUnavailableError, match="recycled while"):  # whoever does not know
        ray.get(faulty.actors[1].generate.remote([5, 6], SamplingParams(max_tokens=1)))
    faulty.push_weights(trained)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_a_directory_removed_in_mid_push_leaves_stale_who_had_not_finished(
    faulty, trained, tmp_path
):
    directory, marker = tmp_path / "removed", tmp_path / "marker"
    version = faulty.weight_version + 1
    plan(faulty, 1, at=20, touch=str(marker))
    perturbed(trained, seed=18)
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(
            faulty.push_weights, trained, transport=MemmapTransport(directory), timeout_s=60
        )
        eventually(marker.exists)
        eventually(lambda: {reports(faulty)[i].weight_version for i in (0, 2)} == {version})
        shutil.rmtree(directory)
        marker.unlink()
        with pytest.raises(WeightSyncError, match=r"replica 1: .*discard what was read") as caught:
            pushing.result(timeout=60)
    assert set(caught.value.failures) == {"1"}
    assert states(faulty) == [SERVING, STALE, SERVING]
    assert_holds(faulty, trained, [0, 2])
    faulty.push_weights(trained, transport=MemmapTransport())
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


@pytest.mark.slow
def test_an_actor_that_does_not_answer_is_named_in_time(faulty, trained):
    pid = ray.get(faulty.actors[1].describe.remote()).pid
    perturbed(trained, seed=12)
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"replica 1: no answer within 1[0-9] s"):
            faulty.push_weights(trained, timeout_s=2)
        assert time.monotonic() - begin < 40  # 17 s on a quiet machine
    finally:
        os.kill(pid, signal.SIGCONT)
    faulty.push_weights(trained)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


# The last test of this module: it leaves one replica dead.
def test_an_engine_that_dies_while_loading_is_named_and_the_others_go_on(faulty, trained):
    perturbed(trained, seed=13)
    plan(faulty, 1, die=True)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"replica 1: .*engine core died") as caught:
        faulty.push_weights(trained)
    assert time.monotonic() - begin < 20
    assert set(caught.value.failures) == {"1"}
    assert states(faulty) == [SERVING, FAILED, SERVING]
    assert_holds(faulty, trained, [0, 2])

    perturbed(trained, seed=14)
    with pytest.raises(WeightSyncError, match=r"replica 1: it is failed: engine core died"):
        faulty.push_weights(trained)
    assert states(faulty) == [SERVING, FAILED, SERVING]
    assert_holds(faulty, trained, [0, 2])

    ray.kill(faulty.actors[1])
    perturbed(trained, seed=15)
    with pytest.raises(WeightSyncError, match=r"replica 1: it is failed") as caught:
        faulty.push_weights(trained)
    assert set(caught.value.failures) == {"1"}
    assert_holds(faulty, trained, [0, 2])
    outputs = faulty.generate([[i, 5] for i in range(10)], SamplingParams(max_tokens=1))
    assert {output.min_version for output in outputs} == {faulty.weight_version}


# ---------------------------------------------------------------- helpers


def wait_until_admitted(service):
    """Waits until this process has heard that every replica serves."""
    deadline = time.monotonic() + 60
    while not all(one.state.admits_requests for one in service.load.snapshots()):
        assert time.monotonic() < deadline
        time.sleep(0.01)

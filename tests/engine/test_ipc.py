"""Weights that engines read in the trainer's memory, on CPUs: what arrives, and who dies meanwhile.

Some of the tests are those of broadcasts, over this transport.
"""

import os
import signal

import pytest
import ray

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.faults import memory_files
from tests.engine.requests import eventually
from tests.engine.test_broadcast_failures import (
    STALE,
    Within,
    plan,
    states,
    test_a_source_that_breaks_off_is_named_and_repaired,  # noqa: F401
    test_a_worker_that_fails_in_mid_load_is_stale_and_the_others_go_on,  # noqa: F401
    test_an_engine_that_stops_in_mid_load_is_left_behind_and_the_others_go_on,  # noqa: F401
    test_an_older_version_than_replicas_hold_touches_nothing,  # noqa: F401
    trained,  # noqa: F401
    wait_until_admitted,
)
from tests.engine.trainers import Trainer
from torchrl_vllm_sync import IPCTransport, ReplicaState
from torchrl_vllm_sync.errors import WeightSyncError

KILLS = True
# So small that a push of the tiny models is some fifty fillings.
BUFFER_BYTES = 3 * 2**14
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def faulty(hurt):
    """Replicas that read the trainer's memory."""
    hurt.use_transport(IPCTransport(buffer_bytes=BUFFER_BYTES))
    return hurt


def test_pushes_reach_every_replica_and_no_memory_is_left(faulty, trained):  # noqa: F811
    def held():
        return [sum(ray.get(one.__ray_call__.remote(memory_files))) for one in faulty.actors]

    before = held()
    assert all(before)
    for seed in range(3):
        perturbed(trained, seed=seed)
        assert min(distance(faulty, trained, index) for index in range(3)) > 100 * TOLERANCE
        report = faulty.push_weights(trained)
        assert (report.transport, report.left_behind) == ("ipc", {})
        assert_holds(faulty, trained)
    faulty.push_weights({name: one.bfloat16() for name, one in trained.state_dict().items()})
    assert before == held()
    faulty.push_weights(trained, transport=IPCTransport(buffer_bytes=BUFFER_BYTES))
    assert_holds(faulty, trained)
    assert before == held()  # what the first one shared was given back


@pytest.mark.parametrize("at", ["ready", 4])
def test_a_trainer_killed_in_mid_push_leaves_no_mixture(
    faulty,
    trained,  # noqa: F811
    untied_checkpoint,
    tmp_path,
    at,
):
    marker, before = tmp_path / "marker", faulty.weight_version
    trainer = Trainer.remote(
        faulty, untied_checkpoint, transport=IPCTransport(buffer_bytes=3 * 2**12)
    )
    pid = ray.get(trainer.pid.remote())
    plan(faulty, 0, 1, 2, at=at, touch=str(marker))
    pushing = trainer.push.remote(21, timeout_s=60)
    eventually(marker.exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pushing, timeout=30)

    def has_ended():
        marker.unlink(missing_ok=True)
        return ReplicaState.UPDATING not in states(faulty)

    with Within(20):
        eventually(has_ended)
    assert (STALE in states(faulty)) == (at != "ready")
    plan(faulty)
    faulty.push_weights(perturbed(trained, seed=23), version=before + 20)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_an_engine_killed_in_mid_load_is_named_and_the_others_get_the_version(
    faulty,
    trained,  # noqa: F811
):
    plan(faulty, 2, at=10, signal="kill")
    perturbed(trained, seed=24)
    with Within(40), pytest.raises(WeightSyncError, match="engine core died") as caught:
        faulty.push_weights(trained)
    assert set(caught.value.failures) == {"2"}
    assert_holds(faulty, trained, [0, 1])


@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, 2**24])
def test_a_plan_copies_out_of_the_trainers_memory(plain, model, buffer_bytes):
    transport = IPCTransport(buffer_bytes=buffer_bytes)
    for seed in range(2):
        weights = perturbed(model, seed=seed)
        report = plain.push_weights(weights, transport=transport, audit=True)
        assert {(one.path, one.path_reason) for one in report.replicas} == {("plan", "")}
        assert_holds(plain, weights)

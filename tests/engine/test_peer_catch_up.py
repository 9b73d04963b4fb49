"""A replica copies the weights of another that serves, while that one goes on serving."""

import sys

import cloudpickle
import pytest
import ray
from vllm import SamplingParams

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import WeightSyncError
from torchrl_vllm_sync.testing import load_tiny_model

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def transport(plain):
    plain.use_transport(broadcast())


def fault(service, index, **faults):
    ray.get(service.actors[index].collective_rpc.remote("sync_peer_fault", kwargs=faults))


def left_behind(service, model, seed):
    """Pushes so that replica 1 fails half way; returns the version that replica 0 holds."""
    ray.get(service.actors[1].collective_rpc.remote("sync_plan", kwargs={"fail_at": 9, "times": 1}))
    with pytest.raises(WeightSyncError) as caught:
        service.push_weights(perturbed(model, seed=seed), strict=True)
    assert set(caught.value.failures) == {"1"}
    assert service.replicas.call_replicas("report")["1"].state is ReplicaState.STALE
    return caught.value.version


def test_who_was_left_behind_takes_the_weights_of_who_was_not(plain, checkpoint):
    model = load_tiny_model(checkpoint)
    version = left_behind(plain, model, seed=1)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    running = ray.remote(num_cpus=0)(lambda one: one.generate([[5, 6]] * 4, long)).remote(plain)
    assert plain.weights.pusher.catch_up(["1"], timeout_s=60) == {}
    reports = plain.replicas.call_replicas("report")
    assert {one.weight_version for one in reports.values()} == {version}
    assert {one.state for one in reports.values()} == {ReplicaState.SERVING}
    plain.replicas.learn()
    assert_holds(plain, model)
    assert {len(one.outputs[0].token_ids) for one in ray.get(running, timeout=60)} == {200}
    assert plain.push_weights(perturbed(model, seed=2)).version == version + 1  # updates go on
    assert_holds(plain, model)


def test_a_copy_that_differs_is_not_served(plain, checkpoint):
    model = perturbed(load_tiny_model(checkpoint), seed=3)
    left_behind(plain, model, seed=3)
    fault(plain, 1, damages=True)
    reasons = plain.weights.pusher.catch_up(["1"], timeout_s=60)
    assert "the copy differs from the peer" in reasons["1"]
    assert plain.replicas.call_replicas("report")["1"].state is ReplicaState.STALE
    fault(plain, 1, damages=False)
    assert plain.weights.pusher.catch_up(["1"], timeout_s=60) == {}
    plain.replicas.learn()
    assert_holds(plain, model)


def test_packed_weights_are_not_copied_and_the_next_push_helps(plain, checkpoint):
    model = perturbed(load_tiny_model(checkpoint), seed=4)
    version = left_behind(plain, model, seed=4)
    fault(plain, 0, packs=True)
    reasons = plain.weights.pusher.catch_up(["1"], timeout_s=60)
    assert "vLLM's CPU backend repacks weights after loading" in reasons["1"]
    fault(plain, 0, packs=False)
    assert plain.push_weights(model, version=version).left_behind == {}
    plain.replicas.learn()
    assert_holds(plain, model)
    perturbed(model, seed=5)
    assert distance(plain, model, 1) > 100 * TOLERANCE

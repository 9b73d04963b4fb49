"""Engines that take the model apart, as vLLM's own do: in parts, given up, broken off."""

import pickle
import time

import pytest
import ray
from vllm import SamplingParams

from tests.engine.checks import assert_holds, perturbed
from tests.engine.layerwise_engine import BACKEND
from tests.engine.requests import slowed
from torchrl_vllm_sync import LoadReport
from torchrl_vllm_sync.errors import StaleVersionError, TransferError, TransferNotReadyError
from torchrl_vllm_sync.testing import load_tiny_model


@pytest.fixture(scope="module")
def layerwise(hurt):
    """Replicas whose workers use the test's engine."""
    hurt.use_transfer_engine(BACKEND)
    hurt.init_weight_transfer_engine({"packed": True})
    yield hurt
    hurt.use_transfer_engine()


@pytest.fixture
def model(untied_checkpoint):
    """The trainer's copy of what they were launched with."""
    return load_tiny_model(untied_checkpoint)


def parts(model, size=7, **extra):
    """The model in updates of ``size`` tensors each, so that fused modules are torn."""
    items = list(model.named_parameters())
    for start in range(0, len(items), size):
        some = {name: one.detach().clone() for name, one in items[start : start + size]}
        yield {"names": list(some), "pickled": pickle.dumps(some), **extra}


def state(service):
    """The state that all replicas have."""
    found = {report.state for report in service.replicas.call_replicas("report").values()}
    return found.pop() if len(found) == 1 else found


def next_version(service):
    """One more than replicas hold: what is called past the service it learns only later."""
    (found,) = {
        report.weight_version for report in service.replicas.call_replicas("report").values()
    }
    return found + 1


def call(service, method, *args, **kwargs):
    """Calls every replica; the answer of the first, where the requests are, if none raises."""
    answers = service.replicas.call_replicas(method, *args, deadline_s=60, **kwargs)
    for answer in answers.values():
        if isinstance(answer, BaseException):
            raise answer
    return answers["0"]


def as_push(version, run_id):
    return {"version": version, "run_id": run_id, "mode": "keep", "clear_cache": False}


@pytest.mark.slow
def test_an_update_in_parts(layerwise, model):
    layerwise.start_weight_update()
    for part in parts(perturbed(model, seed=300)):
        layerwise.update_weights({"update_info": part})
    layerwise.finish_weight_update(str(layerwise.weight_version + 1))
    assert state(layerwise) == "serving"
    assert_holds(layerwise, model)


def test_a_push_in_parts_reports_as_others_do(layerwise, model):
    version = next_version(layerwise)
    params = SamplingParams(temperature=0.0, max_tokens=220, min_tokens=220)
    generate = ray.remote(num_cpus=0)(
        lambda service: service.generate(
            prompt_token_ids=[5, 6], sampling_params=params, actor_index=0
        )
    )
    with slowed(layerwise):
        running = generate.remote(layerwise)
        while not layerwise.replicas.call_replicas("report")["0"].num_running:
            assert not ray.wait([running], timeout=0.01)[0]
        call(layerwise, "start_weight_update", timeout_s=60.0, **as_push(version, "run"))
    assert state(layerwise) == "updating"
    for part in parts(perturbed(model, seed=310)):
        call(layerwise, "update_weights", part, timeout_s=30.0)
    answer = call(layerwise, "finish_weight_update")
    outcome = LoadReport(**answer)
    assert (outcome.version, outcome.path, outcome.phases["num_tensors"]) == (
        version,
        "layerwise",
        len(list(model.parameters())),
    )
    assert outcome.phases["num_kept"] == 1
    output = ray.get(running, timeout=60)
    assert len(output.outputs[0].token_ids) == 220
    assert_holds(layerwise, model)
    with pytest.raises(StaleVersionError):
        call(layerwise, "start_weight_update", timeout_s=60.0, **as_push(version, "another run"))
    assert state(layerwise) == "serving"


def test_a_whole_push_in_one_call(layerwise, model):
    version = next_version(layerwise)
    (update,) = parts(perturbed(model, seed=320), size=1000)
    push = as_push(version, "run 2")
    answer = call(layerwise, "update_weights_native", update, timeout_s=30.0, **push)
    assert (answer["version"], answer["path"]) == (version, "layerwise")
    assert_holds(layerwise, model)


def test_an_update_given_up_before_its_first_part_leaves_the_weights(layerwise, model):
    layerwise.push_weights(perturbed(model, seed=330))
    layerwise.start_weight_update()
    layerwise.shutdown_weight_transfer_engine()
    assert state(layerwise) == "serving"
    assert_holds(layerwise, model)
    layerwise.init_weight_transfer_engine({})


@pytest.mark.parametrize("mend", ["memmap", "native"])
def test_an_update_that_breaks_off_does_not_poison_the_next(layerwise, model, mend):
    layerwise.start_weight_update()
    some = list(parts(perturbed(model, seed=340)))
    layerwise.update_weights({"update_info": some[0]})
    broken = {**some[1], "fail_at": some[1]["names"][4]}
    with pytest.raises(TransferError, match="injected at"):
        layerwise.update_weights({"update_info": broken})
    assert state(layerwise) == "stale"
    if mend == "memmap":
        layerwise.push_weights(perturbed(model, seed=341))
    else:
        layerwise.start_weight_update()
        for part in parts(perturbed(model, seed=342)):
            layerwise.update_weights({"update_info": part})
        layerwise.finish_weight_update()
    assert state(layerwise) == "serving"
    assert_holds(layerwise, model)


def test_a_sender_that_falls_silent_loses_its_turn(layerwise, model):
    version = next_version(layerwise)
    part = next(parts(model))
    call(layerwise, "start_weight_update", timeout_s=4.0, **as_push(version, "silent"))
    call(layerwise, "update_weights", part, timeout_s=4.0)
    deadline = time.monotonic() + 20
    while state(layerwise) != "stale":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(TransferNotReadyError, match="no weight update is open"):
        call(layerwise, "finish_weight_update")
    layerwise.push_weights(perturbed(model, seed=350))
    assert state(layerwise) == "serving"
    assert_holds(layerwise, model)

"""A trainer whose parameters are in the engine's memory: nothing is sent, and all arrives.

On CPUs, where that memory is a file.
"""

import copy
import gc
import os
import pickle
import signal
import threading
import weakref

import pytest
import ray
import torch
from tensordict import set_list_to_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.checks import assert_holds, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import DozingActor, engine_core_pid
from tests.engine.requests import endless, eventually, num_running
from tests.engine.test_rollouts import ROWS, length, make_collector
from tests.engine.trainers import Trainer
from torchrl_vllm_sync import AsyncVLLM, AutoTransport, MasterWeights, MemmapTransport
from torchrl_vllm_sync.errors import (
    NonFiniteWeightsError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightSyncError,
)
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights import push

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOW = {
    **ENGINE,
    "colocate": True,
    "share_weights": True,
    "max_restarts": 9,
    "actor_class": DozingActor,
    "worker_extension_cls": "tests.engine.plain_worker.PlainWorker",
}


@pytest.fixture(scope="module")
def shared(cluster, checkpoint):
    with AsyncVLLM.from_pretrained(checkpoint, **HOW) as service:
        yield service


@pytest.fixture
def model(checkpoint):
    return load_tiny_model(checkpoint)


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied into tensors."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.num_bytes += args[0].nbytes
        return func(*args, **kwargs or {})


def inside(service):
    return {id(one) for one in service.weights.pusher.transport.inside()}


def values(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def is_as(model, wanted):
    return all(torch.equal(one, wanted[name]) for name, one in model.named_parameters())


def test_parameters_move_and_later_pushes_send_nothing(shared, model):
    num_bytes = sum(one.nbytes for one in model.parameters())
    for seed in range(3):
        perturbed(model, seed=seed)
        places, wanted = [one.data_ptr() for one in model.parameters()], values(model)
        with Copies() as copies:
            report = shared.push_weights(model)
        assert report.transport == "p2p"
        assert copies.num_bytes == (0 if seed else num_bytes)
        assert (places == [one.data_ptr() for one in model.parameters()]) == (seed > 0)
        assert inside(shared) == {*map(id, model.parameters())}
        assert is_as(model, wanted)
        shared.weights.audit(model)
        assert_holds(shared, model)
        shared.sleep(2, "keep")


def test_no_step_while_engines_compute_with_what_it_changes(shared, model):
    shared.push_weights(model)
    optimizers = torch.optim.SGD(model.parameters(), 0.1), MasterWeights(model.parameters(), lr=0.1)
    wanted = values(model)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.logsumexp(-1).sum().backward()
    for one in optimizers:
        with pytest.raises(TransferNotReadyError, match="have the service sleep"):
            one.step()
        assert is_as(model, wanted)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    other.step()  # is nobody's
    shared.sleep(2, "keep")
    optimizers[1].step()
    assert not is_as(model, wanted)
    with pytest.raises(TransferNotReadyError, match="no weights to serve with"):
        shared.wake_up()
    shared.push_weights(model, audit=True)
    assert_holds(shared, model)


def test_no_step_after_a_push_that_could_not_stop_the_engine(shared, model, tmp_path, monkeypatch):
    shared.push_weights(perturbed(model, seed=5))
    wanted = values(model)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    monkeypatch.setattr(push, "FIRST_TIMEOUT_S", 1.0)
    ray.get(shared.actors[0].hold_at.remote("sleep", str(file := tmp_path / "held")))
    with pytest.raises(WeightSyncError, match="serves the weights that are about to be written"):
        shared.push_weights(model, timeout_s=30)
    file.unlink()
    with pytest.raises(TransferNotReadyError, match="have the service sleep"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert is_as(model, wanted)
    shared.push_weights(model)
    assert_holds(shared, model)


def test_no_step_while_nobody_says_whether_they_sleep(shared, model, monkeypatch):
    shared.push_weights(model)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    monkeypatch.setattr(push, "STOCK_TIMEOUT_S", 1.0)
    (engine,) = shared.replicas.call_replicas("describe").values()
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransferNotReadyError, match="have the service sleep"):
            torch.optim.SGD(model.parameters(), 0.1).step()
    finally:
        os.kill(engine.pid, signal.SIGCONT)


def test_weights_that_are_refused_are_not_served(shared, model):
    shared.push_weights(model)
    shared.sleep(2, "keep")
    good = values(model)
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    with pytest.raises(NonFiniteWeightsError):
        shared.push_weights(model)
    assert shared.is_paused()
    with pytest.raises(TransferNotReadyError, match="no weights to serve with"):
        shared.wake_up()
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(good[name])
    shared.push_weights(model)
    assert_holds(shared, model)


def test_requests_in_flight_go_on_under_the_weights_that_came_in_place(shared, model):
    shared.push_weights(perturbed(model, seed=10))
    found = []
    call = threading.Thread(target=lambda: found.append(shared.generate([5, 6], endless())))
    call.start()
    eventually(lambda: num_running(shared) == 1)
    shared.sleep(2, "keep")
    with shared.awake(perturbed(model, seed=11)) as after:
        call.join(60)
    assert (found[0].min_version, found[0].max_version) == (after.version - 1, after.version)
    assert len(found[0].outputs[0].token_ids) == 250


@pytest.mark.parametrize("phase", ["asleep", "awake", "label"])
def test_the_trainer_keeps_its_parameters_when_the_engine_is_killed(shared, model, tmp_path, phase):
    shared.push_weights(perturbed(model, seed=20))
    if phase != "awake":
        shared.sleep(2, "keep")
    core, wanted, failures = engine_core_pid(shared.actors[0]), values(model), []
    (before,) = shared.replicas.members
    if phase == "label":
        ray.get(shared.actors[0].hold_at.remote(phase, str(file := tmp_path / "held")))

        def step():
            try:
                shared.push_weights(model)
            except WeightSyncError as error:
                failures.append(str(error))  # its traceback holds views

        pushing = threading.Thread(target=step)
        pushing.start()
        eventually(file.exists)
    os.kill(core, signal.SIGKILL)
    if phase == "label":
        file.unlink()
        pushing.join(120)
        assert failures

    def is_back():
        (now,) = shared.replicas.members
        calls = shared.replicas.call_replicas
        return now.num_restarts > before.num_restarts and calls("report").good

    eventually(is_back, timeout_s=120)
    assert is_as(model, wanted)
    for seed in (21, 22):
        shared.push_weights(perturbed(model, seed=seed), audit=True)
        assert inside(shared) == {*map(id, model.parameters())}
        assert_holds(shared, model)
        shared.sleep(2, "keep")


def test_one_model_after_another(shared, model):
    other = copy.deepcopy(model)
    shared.push_weights(perturbed(model, seed=30))
    mine = values(model)
    shared.push_weights(perturbed(other, seed=31), audit=True)
    assert_holds(shared, other)
    assert inside(shared) == {*map(id, other.parameters())}
    assert is_as(model, mine)
    shared.push_weights(other.double(), audit=True)  # is written, since it has other dtypes
    assert not inside(shared)
    assert_holds(shared, other.float())
    shared.push_weights(model)
    assert inside(shared) == {*map(id, model.parameters())}


@pytest.mark.parametrize("how", ["p2p", "memmap"])
def test_what_another_trainer_sends_stays_out_of_this_ones_parameters(
    shared, checkpoint, model, tmp_path, how
):
    shared.push_weights(perturbed(model, seed=40))
    mine = values(model)
    transport = {} if how == "p2p" else {"transport": MemmapTransport(tmp_path)}
    other = Trainer.remote(shared, checkpoint, **transport)
    ray.get(other.push.remote(41))
    assert is_as(model, mine)
    assert_holds(shared, perturbed(load_tiny_model(checkpoint), seed=41))
    if how == "p2p":  # it is gone in the middle of a step, maybe
        os.kill(pid := ray.get(other.pid.remote()), signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    shared.push_weights(perturbed(model, seed=42), audit=True)
    assert_holds(shared, model)
    assert inside(shared) == {*map(id, model.parameters())}


def test_a_collector_needs_no_other_change(shared, model):
    shared.push_weights(model)
    optimizer, versions = MasterWeights(model.parameters(), lr=1e-3), []
    with set_list_to_stack(True):
        for rows in make_collector(shared, length, total_dialog_turns=3 * ROWS):
            assert shared.is_paused()
            model(input_ids=torch.tensor([[5, 6, 7]])).logits.logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            versions.append(rows["policy_version"].unique().tolist())
            shared.push_weights(model)
            assert_holds(shared, model)
    assert [one for [one] in versions] == sorted({one for [one] in versions})


def test_what_is_kept_of_parameters_is_not_written_over(shared, model):
    """Averages that take their place, layers that change places, and models that are gone."""
    shared.push_weights(perturbed(model, seed=60))
    shared.sleep(2, "keep")
    kept, wanted = {n: one.data for n, one in model.named_parameters()}, values(model)
    for one in model.parameters():
        one.data = one.data + 0.1
    shared.push_weights(model, audit=True)
    assert_holds(shared, model)
    assert all(torch.equal(kept[name], one) for name, one in wanted.items())
    shared.sleep(2, "keep")
    for name, one in model.named_parameters():
        one.data = kept[name]
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    wanted = values(model)
    shared.push_weights(model, audit=True)
    assert is_as(model, wanted)
    assert inside(shared) == {*map(id, model.parameters())}
    states, other = model.state_dict(), copy.deepcopy(model)
    wanted = {name: one.clone() for name, one in states.items()}
    shared.push_weights(perturbed(other, seed=61), audit=True)
    assert all(torch.equal(states[name], one) for name, one in wanted.items())
    assert_holds(shared, other)
    shared.push_weights(other.share_memory(), audit=True)  # elsewhere, without its knowing
    assert_holds(shared, other)


def test_a_parameter_is_saved_without_the_others(shared, model):
    before = len(pickle.dumps(model))
    shared.push_weights(model)
    assert inside(shared)
    assert len(pickle.dumps(model)) < 1.1 * before


def test_a_transport_that_is_exchanged_leaves_nothing_that_an_engine_computes_with(
    shared, model, tmp_path
):
    shared.push_weights(perturbed(model, seed=70))
    wanted = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(TransferNotReadyError):
        optimizer.step()
    shared.use_transport(MemmapTransport(tmp_path))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert_holds(shared, wanted)  # what it computed with before
    shared.push_weights(model, audit=True)
    assert_holds(shared, model)
    shared.use_transport(AutoTransport())
    shared.push_weights(perturbed(model, seed=71), audit=True)
    assert inside(shared) == {*map(id, model.parameters())}


@pytest.mark.parametrize("level", [1, 2])
def test_whoever_wakes_them_has_to_bring_weights(shared, model, level):
    shared.push_weights(model)
    shared.sleep(level, "keep")
    with pytest.raises(TransferNotReadyError, match="no weights to serve with"):
        shared.wake_up()
    shared.push_weights(model)
    assert_holds(shared, model)


def test_parameters_and_views_of_them_outlive_the_service(checkpoint, tmp_path):
    model = load_tiny_model(checkpoint)
    with AsyncVLLM.from_pretrained(checkpoint, **HOW) as service:
        service.push_weights(perturbed(model, seed=50))
        assert inside(service)
        [[worker]] = service.weights.pusher.transport._workers.values()
        memory = weakref.ref(worker.used._within)
        del worker
        wanted, views = values(model), model.state_dict()
        model.save_pretrained(tmp_path)
    assert is_as(model, wanted)
    assert is_as(load_tiny_model(tmp_path), wanted)
    perturbed(model, seed=51)
    assert all(torch.equal(views[name], one) for name, one in wanted.items())
    del model
    gc.collect()
    assert memory() is not None
    del views
    gc.collect()
    assert memory() is None


def test_of_two_engines_one_has_the_parameters_and_both_the_weights(cluster, checkpoint, model):
    with AsyncVLLM.from_pretrained(checkpoint, **HOW, num_replicas=2) as service:
        for seed in range(2):
            with service.awake(perturbed(model, seed=80 + seed), audit=True):
                assert inside(service) == {*map(id, model.parameters())}
                assert_holds(service, model)


def test_what_cannot_be_shared_is_refused(checkpoint):
    given = {"weight_transfer_config": {"backend": "nccl"}}
    with pytest.raises(UnsupportedArgumentError, match="share_weights needs weight_transfer_con"):
        AsyncVLLM.from_pretrained(checkpoint, **HOW, **given)
    with pytest.raises(UnsupportedArgumentError, match="share_weights is for colocate=True"):
        AsyncVLLM.from_pretrained(checkpoint, **{**HOW, "colocate": False})

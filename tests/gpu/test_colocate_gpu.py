"""Trainer and engine on one GPU, one of them asleep: who is killed leaves no memory behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch

from tests.engine.faults import DozingActor, engine_core_pid
from tests.engine.requests import eventually
from tests.gpu.test_ipc_gpu import (
    TOKEN_IDS,
    TOLERANCE,
    engine_log_probs,
    mean_difference,
    service_beside,
)
from torchrl_vllm_sync import MasterWeights
from torchrl_vllm_sync.errors import SyncError, TransferNotReadyError
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs

SLACK_MIB = 64
# A trainer in a process of its own, on the same GPU: it is ready, and goes on when it is told to.
TRAINER = """
import sys, ray
from torchrl_vllm_sync import attach
from torchrl_vllm_sync.testing import load_tiny_model
address, name, checkpoint, phase = sys.argv[1:]
ray.init(address, log_to_driver=False)
service, model = attach(name), load_tiny_model(checkpoint).cuda()
if phase == "sleep":
    service.push_weights(model)
print("ready", flush=True)
input()
service.sleep(2, "keep") if phase == "sleep" else service.push_weights(model)
"""


@pytest.fixture(scope="module")
def service(cluster, checkpoints):
    how = {"actor_class": DozingActor, "max_restarts": 20}
    with service_beside(checkpoints[0], colocate=True, **how) as service:
        yield service


@pytest.fixture(scope="module")
def model(checkpoints):
    return load_tiny_model(checkpoints[1]).cuda()


@pytest.mark.gpu
def test_parameters_in_the_engines_memory(cluster, checkpoints):
    """Steps of an optimizer are what the engine computes with, also after it was killed."""
    model = load_tiny_model(checkpoints[1]).bfloat16().cuda()
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=1.0)
    how = {"actor_class": DozingActor, "max_restarts": 20, "share_weights": True}
    with service_beside(checkpoints[0], colocate=True, **how) as service:
        memories = []
        for step in range(4):
            report = service.push_weights(model, audit=True)
            assert report.transport == "p2p"
            transport = service.weights.pusher.transport
            [[worker]] = transport._workers.values()
            memories.append(worker.used.token)
            inside = {id(one) for one in transport.inside()}
            assert inside == {id(one) for one in model.parameters()}
            wanted = token_log_probs(model, TOKEN_IDS)
            assert (engine_log_probs(service) - wanted).abs().mean() < TOLERANCE
            for one in model.parameters():
                one.grad = torch.randn_like(one) * 0.05
            with pytest.raises(TransferNotReadyError, match="have the service sleep"):
                optimizer.step()
            service.sleep(2, "keep")
            optimizer.step()
            changed = token_log_probs(model, TOKEN_IDS)
            assert (changed - wanted).abs().mean() > 2 * TOLERANCE
            if step == 2:
                (before,) = service.replicas.members
                os.kill(engine_core_pid(service.actors[0]), signal.SIGKILL)
                eventually(lambda n=before.num_restarts: is_restarted(service, n), timeout_s=150)
                assert torch.equal(token_log_probs(model, TOKEN_IDS), changed)
        assert [memories.count(one) for one in memories] == [3, 3, 3, 1]
    assert torch.isfinite(token_log_probs(model, TOKEN_IDS)).all()


def is_restarted(service, num_before):
    (now,) = service.replicas.members
    return now.num_restarts > num_before and service.replicas.call_replicas("report").good


@pytest.fixture
def asleep_mib(service, model):
    """What is taken of the GPU while the engine sleeps."""
    service.push_weights(model)
    awake = used_mib()
    service.sleep(2, "keep")
    assert used_mib() < awake - 1000
    return used_mib()


def used_mib():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def held_at(service, phase, file):
    """Has the engine wait at a phase; returns what waits until it does."""
    (actor,) = service.actors
    ray.get(actor.hold_at.remote(phase, str(file)))
    return lambda: eventually(file.exists)


def check_that_it_goes_on(service, model, checkpoints, asleep_mib):
    """The next step reaches an engine, which has these weights, and sleeps as before."""
    deadline, report = time.monotonic() + 150, None
    while report is None:
        try:
            report = service.push_weights(model)
        except SyncError:  # it is starting
            assert time.monotonic() < deadline
            time.sleep(1)
    assert report.transport == "ipc"
    service.wait_until_serving(timeout_s=60)
    assert mean_difference(service, checkpoints[1]) < TOLERANCE
    assert mean_difference(service, checkpoints[0]) > 2
    service.sleep(2, "keep")
    eventually(lambda: used_mib() < asleep_mib + SLACK_MIB, timeout_s=10)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("phase", "victim"),
    [("weights", "actor"), ("kv_cache", "core"), ("asleep", "core"), ("sleep", "actor")],
)
def test_an_engine_that_is_killed(service, model, checkpoints, asleep_mib, tmp_path, phase, victim):
    if phase == "sleep":
        service.push_weights(model)
    (actor,), failures = service.actors, []

    def step():
        try:
            if phase == "sleep":
                service.sleep(2, "keep")
            else:
                service.push_weights(model)
        except SyncError as error:
            failures.append(error)

    working = threading.Thread(target=step)
    core = engine_core_pid(actor)
    if phase != "asleep":
        reached = held_at(service, phase, tmp_path / "held")
        working.start()
        reached()
    if victim == "actor":
        ray.kill(actor)
    else:
        os.kill(core, signal.SIGKILL)
    if phase != "asleep":
        (tmp_path / "held").unlink()
        working.join(120)
        assert not working.is_alive()
    check_that_it_goes_on(service, model, checkpoints, asleep_mib)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["weights", "kv_cache", "sleep"])
def test_a_trainer_that_is_killed(service, model, checkpoints, asleep_mib, tmp_path, phase):
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", TRAINER, address, service.name, str(checkpoints[0]), phase]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout.readline() == "ready\n"
        reached = held_at(service, phase, tmp_path / "held")
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        reached()
        trainer.kill()
    (tmp_path / "held").unlink()
    check_that_it_goes_on(service, model, checkpoints, asleep_mib)

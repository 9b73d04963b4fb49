"""Trainer and engine on one GPU, weights written by the trainer into the engine's spare memory."""

import asyncio
import itertools
import multiprocessing
import os

import pytest
import ray
import torch

from tests.engine.test_version_spans import Weights, compare, pushes_under_load, scored_spans
from tests.fakes.weights import mapped_memory
from tests.gpu.test_ipc_gpu import (
    TOKEN_IDS,
    TOLERANCE,
    Trainer,
    check_that_requests_are_kept,
    mean_difference,
    service_beside,
)
from torchrl_vllm_sync import P2PTransport, attach
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs
from torchrl_vllm_sync.weights.p2p import writes
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory
from torchrl_vllm_sync.weights.p2p.writes import Places

LIMIT_S, NUM_PUSHES = 120.0, 30
# Between log-probabilities of one token by two versions, which mostly are further apart.
FAR = 1.0


@pytest.fixture(scope="module")
def service(cluster, checkpoints):
    # Decoding by CUDA graphs, which hold the addresses that the memories take turns behind.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    options = {"enforce_eager": False, "compilation_config": graphs, "stage_weights": True}
    with service_beside(checkpoints[0], **options) as service:
        yield service


def decoded_difference(service, checkpoint):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0)
    (one,) = service.generate(prompt_token_ids=TOKEN_IDS, sampling_params=params).outputs
    pairs = zip(one.logprobs, one.token_ids, strict=True)
    found = torch.tensor([entry[token].logprob for entry, token in pairs])
    wanted = token_log_probs(load_tiny_model(checkpoint), [*TOKEN_IDS, *one.token_ids])
    return (found - wanted.flatten()[-len(found) :]).abs().mean().item()


@pytest.mark.gpu
def test_the_engine_computes_what_was_written(service, checkpoints):
    trainer = Trainer(service, "p2p")
    for checkpoint, other in (checkpoints[::-1], checkpoints) * 2:  # two memories take turns
        before = service.weight_version
        report = trainer.push(checkpoint)
        (replica,) = report.replicas
        assert (report.transport, replica.path, replica.path_reason) == ("p2p", "plan", "")
        assert report.version == service.weight_version > before
        assert mean_difference(service, checkpoint) < TOLERANCE
        assert mean_difference(service, other) > 2
        assert decoded_difference(service, checkpoint) < TOLERANCE
        assert decoded_difference(service, other) > 2


@pytest.mark.gpu
def test_the_comparison_above_notices_tensors_that_are_not_written(
    service, checkpoints, monkeypatch
):
    trainer = Trainer(service, "p2p")
    for _ in range(2):  # both memories
        trainer.push(checkpoints[0])
    assert mean_difference(service, checkpoints[0]) < TOLERANCE
    whole = Places.bound

    def half(places):
        return itertools.islice(whole(places), len(places._pairs) // 2)

    monkeypatch.setattr(Places, "bound", half)
    trainer.push(checkpoints[1])
    assert mean_difference(service, checkpoints[1]) > 2 * TOLERANCE


def push_from_here(pipe, ray_address, service_name, checkpoint):
    os.environ["RAY_ADDRESS"] = ray_address
    service = attach(service_name)
    report = Trainer(service, "p2p").push(checkpoint)
    pipe.send((report.version, report.transport))
    service._let_go()


@pytest.mark.gpu
def test_another_trainer_takes_over(service, checkpoints):
    """Another process: the engine takes new memory if the first one might still write to it."""
    first = Trainer(service, "p2p")
    version = first.push(checkpoints[0]).version
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    address = ray.get_runtime_context().gcs_address
    args = theirs, address, service.name, checkpoints[1]
    second = processes.Process(target=push_from_here, args=args, daemon=True)
    second.start()
    try:
        assert ours.poll(LIMIT_S), "the second trainer does not answer"
        assert ours.recv() == (version + 1, "p2p")
    finally:
        second.join(LIMIT_S / 4)
        second.kill()
    assert mean_difference(service, checkpoints[1]) < TOLERANCE
    assert first.push(checkpoints[0]).version == version + 2
    assert mean_difference(service, checkpoints[0]) < TOLERANCE


@pytest.mark.gpu
def test_requests_in_flight_are_kept(service, checkpoints):
    check_that_requests_are_kept(service, P2PTransport(), checkpoints[1])


@pytest.mark.gpu
def test_spans_are_exact_where_the_scheduler_is_a_step_ahead(service, checkpoints):
    """Each token has the log-probability of its version, and of no other."""
    weights = Weights(checkpoints[0])
    weights.model.cuda()
    service.use_transport(P2PTransport())
    service.push_weights(weights.at(service.weight_version + 1))  # pauses, and compares
    outputs = asyncio.run(pushes_under_load(service, weights, num_pushes=NUM_PUSHES, seed=1))
    assert sum(len(one) - 1 for output in outputs for one in output.version_spans) > NUM_PUSHES
    weights.model.cpu()
    own, after = [], []
    for version, spans in scored_spans(outputs, first_only=True).items():
        model = weights.at(version)
        for one in spans:
            worst, later = compare(model, [one])
            own.append(worst)
            after += later
    own, after = torch.tensor(own), torch.tensor(after)
    assert len(after) > NUM_PUSHES
    assert (own > FAR).float().mean() < 0.05  # no boundary is late
    assert (after > FAR).float().mean() > 0.7  # nor early


@pytest.mark.gpu
def test_a_push_that_breaks_off_leaves_what_is_served(service, checkpoints, monkeypatch):
    trainer, whole = Trainer(service, "p2p"), Places.bound
    trainer.push(checkpoints[0])

    def half(places):
        yield from itertools.islice(whole(places), len(places._pairs) // 2)
        raise RuntimeError("the source broke off")

    monkeypatch.setattr(Places, "bound", half)
    with pytest.raises(RuntimeError, match="broke off"):
        trainer.push(checkpoints[1])
    assert mean_difference(service, checkpoints[0]) < TOLERANCE
    monkeypatch.undo()
    trainer.push(checkpoints[1])
    assert mean_difference(service, checkpoints[1]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("after", [2**20, 2**28])
def test_gpus_hand_on_what_is_written(monkeypatch, after):
    """Over all GPUs there are, the trainer's among them; one that does not is left behind."""
    monkeypatch.setattr(writes, "HANDED_ON_BYTES", after)
    count, device = torch.cuda.device_count(), torch.device("cuda", 0)
    shapes = {f"t{at}": (1024, 256 * (at + 1)) for at in range(8)}
    rows, num_bytes = [], 0
    for name, shape in shapes.items():
        rows.append([name, 0, shape, (shape[1], 1), "bfloat16", num_bytes, (shape[1], 1)])
        num_bytes += 2 * shape[0] * shape[1]
    places = []
    for at in range(4):
        where = torch.device("cuda", (at + 1) % count)
        memory = mapped_memory(num_bytes, where, where=where, device=device)
        places.append(writes.Places(rows, memory))
    for is_whole in (True, True, False):
        tensors = [(name, torch.randn(shape, device=device)) for name, shape in shapes.items()]
        if not is_whole:
            monkeypatch.setattr(MappedMemory, "hand_on", lambda *args: None)
        writes.write(tensors, places, device)
        writes.finish(device)
        wanted = torch.cat([one.bfloat16().flatten() for _, one in tensors]).cpu()
        found = [one.memory.data[:num_bytes].cpu().view(torch.bfloat16) for one in places]
        assert [torch.equal(one, wanted) for one in found] == [True, *[is_whole] * 3]

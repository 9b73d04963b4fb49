"""Trainer and engine on one GPU, weights out of memory that they share."""

import contextlib

import pytest
import ray
import torch

from torchrl_vllm_sync import AsyncVLLM, IPCTransport, WeightUpdater
from torchrl_vllm_sync.errors import SyncError
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs

ENGINE = {
    "compile": False,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    "verbose": False,
}
TOKEN_IDS = list(range(5, 69))
# See test_service_gpu.py.
TOLERANCE = 0.5


class Trainer:
    """Runs in the test's own process, which Ray gives no GPU: it uses the engine's."""

    def __init__(self, service, transport):
        self.updater = WeightUpdater(service, transport=transport, timeout_s=60)

    def push(self, checkpoint):
        return self.updater.push_weights(load_tiny_model(checkpoint).cuda())


def engine_log_probs(service):
    from vllm import SamplingParams

    output = service.generate(
        prompt_token_ids=TOKEN_IDS,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    pairs = zip(output.prompt_logprobs[1:], TOKEN_IDS[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def mean_difference(service, checkpoint):
    wanted = token_log_probs(load_tiny_model(checkpoint), TOKEN_IDS)
    return (engine_log_probs(service) - wanted).abs().mean().item()


@contextlib.contextmanager
def service_beside(checkpoint, **options):
    """A replica on the GPU that this process uses."""
    with AsyncVLLM.from_pretrained(str(checkpoint), **{**ENGINE, **options}) as service:
        (engine,) = service.replicas.call_replicas("describe").values()
        assert len(engine.device_uuids) == 1
        own = str(torch.cuda.get_device_properties(0).uuid)
        if engine.device_uuids != (own,):
            pytest.fail(f"the engine is on {engine.device_uuids}, this process on {own}")
        yield service


@pytest.fixture(scope="module")
def service(cluster, checkpoints):
    with service_beside(checkpoints[0]) as service:
        yield service


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [1 << 16, 1 << 28])
def test_the_engine_computes_what_was_shown(service, checkpoints, buffer_bytes):
    transport = IPCTransport(buffer_bytes=buffer_bytes)
    trainer = Trainer(service, transport)
    for checkpoint, other in (checkpoints[::-1], checkpoints):
        before = service.weight_version
        report = trainer.push(checkpoint)
        (replica,) = report.replicas
        assert (report.transport, replica.path, replica.path_reason) == ("ipc", "plan", "")
        assert report.version == service.weight_version > before
        assert mean_difference(service, checkpoint) < TOLERANCE
        assert mean_difference(service, other) > 2
    assert 0 < transport.num_buffer_bytes <= buffer_bytes
    transport.close()


@pytest.mark.gpu
def test_one_gpu_for_both_is_recognised(service, checkpoints):
    report = Trainer(service, "auto").push(checkpoints[1])
    assert report.transport == "ipc"
    assert mean_difference(service, checkpoints[1]) < TOLERANCE


def check_that_requests_are_kept(service, transport, checkpoint):
    from vllm import SamplingParams

    @ray.remote(num_cpus=0)
    def generate(service):
        params = SamplingParams(max_tokens=900, min_tokens=900, ignore_eos=True)
        outputs = service.generate([TOKEN_IDS] * 4, params)
        return [(len(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in outputs]

    running = generate.remote(service)
    while service.get_num_unfinished_requests(0) < 4:
        assert not ray.wait([running], timeout=0.01)[0]
    report = Trainer(service, transport).push(checkpoint)
    assert report.replicas[0].phases["num_kept"] == 4
    assert ray.get(running, timeout=100) == [(900, "length")] * 4
    assert mean_difference(service, checkpoint) < TOLERANCE


@pytest.mark.gpu
def test_requests_in_flight_are_kept(service, checkpoints):
    check_that_requests_are_kept(service, IPCTransport(), checkpoints[0])


@pytest.mark.gpu
def test_tensors_elsewhere_are_refused_before_anything_is_sent(service, checkpoints):
    service.use_transport(IPCTransport())
    service.push_weights(load_tiny_model(checkpoints[1]).cuda())
    with pytest.raises(SyncError, match="is on cpu"):
        service.push_weights(load_tiny_model(checkpoints[0]))
    assert mean_difference(service, checkpoints[1]) < TOLERANCE

"""vLLM's own NCCL engine behind our updater: a trainer on one GPU, an engine on another."""

import sys

import pytest
import ray
import torch
from ray import cloudpickle

from benchmarks.peers.vllm_nccl import VLLMNCCLTransport
from torchrl_vllm_sync import AsyncVLLM, ParamMeta, WeightUpdater
from torchrl_vllm_sync.errors import SyncError
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs
from torchrl_vllm_sync.weights.source import WeightSource

ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    "verbose": False,
}
TOKEN_IDS = list(range(5, 69))
# See test_service_gpu.py.
TOLERANCE = 0.5
# Ray's workers cannot import test modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Breaking(WeightSource):
    """Announces a model and yields half of it."""

    def __init__(self, model):
        self.items = list(model.named_parameters())

    def metadata(self):
        return [ParamMeta.of(name, tensor) for name, tensor in self.items]

    def __iter__(self):
        yield from self.items[: len(self.items) // 2]
        raise RuntimeError("the trainer broke off")


@ray.remote(num_gpus=1, num_cpus=1)
class Trainer:
    """Pushes checkpoints that it holds on its own GPU."""

    def __init__(self, service, buffer_bytes):
        transport = VLLMNCCLTransport(buffer_bytes=buffer_bytes, join_timeout_s=60)
        self.updater = WeightUpdater(service, transport=transport, timeout_s=60)

    def push(self, checkpoint):
        return self.updater.push_weights(load_tiny_model(checkpoint).cuda())

    def push_from_two_places(self, checkpoint):
        """One tensor is not on the GPU."""
        weights = dict(load_tiny_model(checkpoint).cuda().named_parameters())
        name = list(weights)[len(weights) // 2]
        weights[name] = weights[name].cpu()
        return self.failure_of(weights)

    def push_half(self, checkpoint):
        """The source breaks off when workers are inside NCCL already."""
        return self.failure_of(Breaking(load_tiny_model(checkpoint).cuda()))

    def failure_of(self, weights):
        try:
            self.updater.push_weights(weights)
        except SyncError as error:
            return type(error).__name__, str(error)
        return None

    def close(self):
        self.updater.service.weights.pusher.close()


def engine_log_probs(service, actor_index=0):
    from vllm import SamplingParams

    output = service.generate(
        prompt_token_ids=TOKEN_IDS,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        actor_index=actor_index,
    )
    pairs = zip(output.prompt_logprobs[1:], TOKEN_IDS[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def mean_difference(service, checkpoint, actor_index=0):
    wanted = token_log_probs(load_tiny_model(checkpoint), TOKEN_IDS)
    return (engine_log_probs(service, actor_index) - wanted).abs().mean().item()


@pytest.fixture(scope="module")
def service(cluster, checkpoints):
    with AsyncVLLM.from_pretrained(str(checkpoints[0]), compile=False, **ENGINE) as service:
        yield service


@pytest.mark.multigpu
@pytest.mark.parametrize("buffer_bytes", [1 << 14, 1 << 30])
def test_the_engine_computes_what_was_sent(service, checkpoints, buffer_bytes):
    trainer = Trainer.remote(service, buffer_bytes)
    for checkpoint, other in (checkpoints[::-1], checkpoints):
        before = service.weight_version
        report = ray.get(trainer.push.remote(checkpoint), timeout=120)
        assert report.transport == "vllm-nccl"
        assert report.version > before
        (replica,) = report.replicas
        assert (replica.path, replica.version) == ("layerwise", report.version)
        assert mean_difference(service, checkpoint) < TOLERANCE
        assert mean_difference(service, other) > 2
    ray.get(trainer.close.remote(), timeout=60)
    ray.kill(trainer)


@pytest.mark.multigpu
def test_the_launched_engine_is_back_afterwards(service, checkpoints):
    trainer = Trainer.remote(service, 1 << 30)
    ray.get(trainer.push.remote(checkpoints[1]), timeout=120)
    assert [*service.replicas.call_replicas("collective_rpc", "native_engine_name").values()] == [
        ["NCCLWeightTransferEngine"]
    ]
    ray.get(trainer.close.remote(), timeout=60)
    ray.kill(trainer)
    assert [*service.replicas.call_replicas("collective_rpc", "native_engine_name").values()] == [
        ["BroadcastReceiver"]
    ]
    service.push_weights(load_tiny_model(checkpoints[0]))  # memmap
    assert mean_difference(service, checkpoints[0]) < TOLERANCE


@pytest.mark.multigpu
def test_tensors_elsewhere_are_refused_before_anything_is_sent(service, checkpoints):
    trainer = Trainer.remote(service, 1 << 30)
    ray.get(trainer.push.remote(checkpoints[1]), timeout=120)
    kind, message = ray.get(trainer.push_from_two_places.remote(checkpoints[0]), timeout=120)
    assert kind == "WeightMismatchError"
    assert "is on cpu" in message
    assert mean_difference(service, checkpoints[1]) < TOLERANCE
    ray.get(trainer.push.remote(checkpoints[0]), timeout=120)
    assert mean_difference(service, checkpoints[0]) < TOLERANCE
    ray.get(trainer.close.remote(), timeout=60)
    ray.kill(trainer)


@pytest.mark.multigpu
def test_a_source_that_breaks_off_does_not_hang_the_trainer(service, checkpoints):
    """The last test: vLLM's NCCL has no time limit, and the engine may be lost with it."""
    trainer = Trainer.remote(service, 1 << 14)
    ray.get(trainer.push.remote(checkpoints[1]), timeout=120)
    kind, message = ray.get(trainer.push_half.remote(checkpoints[0]), timeout=100)
    assert kind == "WeightSyncError"
    assert "the trainer broke off" in message
    ray.kill(trainer)

"""The service on real GPUs: placement, tensor parallel, memmap pushes under load."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from torchrl_vllm_sync import AsyncVLLM, WeightUpdater
from torchrl_vllm_sync.errors import PlacementError
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs

ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.3,
    "verbose": False,
}
TOKEN_IDS = list(range(5, 69))
# bfloat16 carries 8 bits: log-probabilities of magnitude 10 differ by some hundredths, and those of
# the other checkpoint by several units.
TOLERANCE = 0.5


def engine_log_probs(service, actor_index=0):
    from vllm import SamplingParams

    output = service.generate(
        prompt_token_ids=TOKEN_IDS,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        actor_index=actor_index,
    )
    pairs = zip(output.prompt_logprobs[1:], TOKEN_IDS[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def trainer_log_probs(model):
    return token_log_probs(model, TOKEN_IDS).flatten()[1 - len(TOKEN_IDS) :]


def mean_difference(one, other):
    return (one - other).abs().mean().item()


def check_push(service, checkpoints):
    old, new = (load_tiny_model(one) for one in checkpoints)
    count = len(service.actors)
    for index in range(count):
        found = engine_log_probs(service, index)
        assert mean_difference(found, trainer_log_probs(old)) < TOLERANCE
        assert mean_difference(found, trainer_log_probs(new)) > 2
    report = service.push_weights(new)
    for index in range(count):
        found = engine_log_probs(service, index)
        assert mean_difference(found, trainer_log_probs(new)) < TOLERANCE
        assert mean_difference(found, trainer_log_probs(old)) > 2
    return report


@pytest.mark.gpu
def test_push_on_one_gpu_with_requests_in_flight(cluster, checkpoints):
    from vllm import SamplingParams

    with AsyncVLLM.from_pretrained(
        str(checkpoints[0]), num_devices=1, compile=False, **ENGINE
    ) as service:
        check_push(service, checkpoints)
        model, outputs = load_tiny_model(checkpoints[0]), []
        params = SamplingParams(max_tokens=800, min_tokens=800, ignore_eos=True)
        running = threading.Thread(
            target=lambda: outputs.extend(service.generate([TOKEN_IDS] * 8, params))
        )
        running.start()
        while service.get_num_unfinished_requests(0) < 8:
            time.sleep(0.01)
        time.sleep(0.5)
        report = service.push_weights(model)
        running.join(120)
        assert report.replicas[0].phases["num_kept"] == 8
        assert [len(one.outputs[0].token_ids) for one in outputs] == [800] * 8
        assert {one.outputs[0].finish_reason for one in outputs} == {"length"}
        assert {(one.min_version, one.max_version) for one in outputs} == {(1, 2)}
        fresh = engine_log_probs(service)
        assert mean_difference(fresh, trainer_log_probs(model)) < TOLERANCE


@pytest.mark.multigpu
def test_push_to_two_replicas(cluster, checkpoints):
    with AsyncVLLM.from_pretrained(
        str(checkpoints[0]), num_replicas=2, compile=False, **ENGINE
    ) as service:
        check_push(service, checkpoints)
        free = ray.available_resources().get("GPU", 0)
        assert free == ray.cluster_resources()["GPU"] - 2


@pytest.mark.multigpu
def test_push_with_tensor_parallel_two(cluster, checkpoints):
    # One key-value head cannot be split over two GPUs, but vLLM replicates it.
    with AsyncVLLM.from_pretrained(
        str(checkpoints[0]), num_devices=2, compile=False, **ENGINE
    ) as service:
        assert service.get_world_size() == 2
        check_push(service, checkpoints)


@pytest.mark.gpu
def test_more_gpus_than_there_are_are_refused_at_once(cluster, checkpoints):
    begin = time.monotonic()
    with pytest.raises(PlacementError, match="GPU"):
        AsyncVLLM.from_pretrained(str(checkpoints[0]), num_replicas=64, **ENGINE)
    assert time.monotonic() - begin < 30


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_weights_need_not_be_on_the_current_device(cluster, checkpoints, transport):
    """In a thread the current device is 0, which is the engine's, wherever the model is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    new = load_tiny_model(checkpoints[1]).to("cuda:1", torch.bfloat16)
    expected = trainer_log_probs(load_tiny_model(checkpoints[1]))
    assert torch.cuda.current_device() == 0
    with (
        AsyncVLLM.from_pretrained(
            str(checkpoints[0]), num_devices=1, compile=False, **ENGINE
        ) as service,
        ThreadPoolExecutor(1) as thread,
    ):
        assert mean_difference(engine_log_probs(service), expected) > 2
        push = thread.submit(WeightUpdater(service, new, transport=transport).push_weights)
        assert push.result(120).transport == ("broadcast" if transport == "auto" else transport)
        assert mean_difference(engine_log_probs(service), expected) < TOLERANCE

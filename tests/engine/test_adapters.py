"""LoRA adapters beside the base weights: what engines compute, for whom, and what is refused."""

import copy

import peft
import pytest
import torch

from tests.engine.checks import TOLERANCE, assert_holds, distance
from tests.engine.conftest import ENGINE
from tests.engine.requests import sampling
from torchrl_vllm_sync import AsyncVLLM, WeightUpdater
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tuned(cluster, checkpoint):
    """Two replicas that can hold adapters of rank 8."""
    service = AsyncVLLM.from_pretrained(
        str(checkpoint),
        num_replicas=2,
        enable_lora=True,
        max_lora_rank=8,
        worker_extension_cls="tests.engine.faults.PacedWorker",
        **{**ENGINE, "max_restarts": 3},
    )
    yield service
    service.shutdown()


def adapted(checkpoint, seed=0, **config):
    """The launched model with an adapter whose outputs differ from it."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 12, "target_modules": LINEAR, **config}
    model = peft.get_peft_model(
        load_tiny_model(checkpoint), peft.LoraConfig(init_lora_weights=False, **config)
    ).eval()
    return changed(model, seed)


@torch.no_grad()
def changed(model, seed):
    """Changes the adapter in place, as an optimizer step does."""
    torch.manual_seed(seed)
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.normal_(std=0.1)
    return model


def merged(model):
    return copy.deepcopy(model).merge_and_unload()


def test_engines_compute_what_the_model_with_its_adapter_does(tuned, checkpoint):
    model = adapted(checkpoint)
    assert distance(tuned, model, 0) > 100 * TOLERANCE  # of the base alone
    updater = WeightUpdater(tuned, source=model, adapters="keep")
    report = updater.push_weights()
    assert report.transport == "adapters"
    assert report.num_bytes == sum(
        one.nbytes for name, one in model.named_parameters() if "lora_" in name
    )
    assert tuned.weight_version == report.version
    assert_holds(tuned, model)
    assert_holds(tuned, merged(model))
    (output,) = tuned.generate([[5, 6, 7]], sampling())
    assert [one.version for one in output.version_spans[0]] == [report.version]
    ids = [5, 6, 7]
    output = tuned.generate(ids, sampling(prompt_logprobs=0, max_tokens=1), adapter="")
    assert output.version_spans[0][0].version == 0

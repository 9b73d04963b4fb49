"""TorchRL's collectors over a service, for tests of what their batches carry."""

import os
import sys

import pytest
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv

from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
TEXTS = ["What else is there?", "Tell me more, please.", "Hello", "Every replica serves"]
ROWS = 4
QUIET = [
    # TorchRL 0.14's wrapper builds each single-turn history in a shape that its own class corrects.
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    # Its padding builds torch's old nested tensors.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    # Its LLMCollector takes no schemes, and is told to take no updater.
    pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase is deprecated:DeprecationWarning"),
]


def queries():
    while True:
        for text in TEXTS:
            yield {"query": [text]}


def make_env():
    env = ChatEnv.from_dataloader(
        dataloader=queries(), batch_size=(ROWS,), tokenizer=TOKENIZER, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=1))


def make_policy(service):
    return vLLMWrapper(
        service,
        tokenizer=TOKENIZER,
        input_mode="history",
        generate_kwargs=SAMPLING,
        pad_output=False,
        return_log_probs=True,
    )


def scheme_collector(service, scheme):
    """TorchRL's ``Collector``, which takes schemes."""
    return Collector(
        make_env(),
        make_policy(service),
        frames_per_batch=ROWS,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
        auto_register_policy_transforms=True,
        trust_policy=True,
        use_buffers=False,
    )


def llm_collector(service, **kwargs):
    """TorchRL's ``LLMCollector``, in this process."""
    options = {"track_policy_version": True, **kwargs}
    return LLMCollector(
        make_env(), policy=make_policy(service), dialog_turns_per_batch=ROWS, **options
    )


def ray_collector(service, **kwargs):
    """TorchRL's ``RayLLMCollector``: the same in an actor."""
    path = os.pathsep.join(sys.path)
    return RayLLMCollector(
        make_env,
        policy=make_policy(service),
        dialog_turns_per_batch=ROWS,
        total_dialog_turns=-1,
        track_policy_version=True,
        remote_config={
            "num_cpus": 0,
            "num_gpus": 0,
            "runtime_env": {"env_vars": {"LIST_TO_STACK": "1", "PYTHONPATH": path}},
        },
        **kwargs,
    )


def stamps(collector):
    """The versions that stamp the collector's next batch."""
    return set(next(iter(collector))["policy_version"].flatten().tolist())


def agree(service, *collectors, sampled=True):
    """The version that the collectors, the service and fresh samples say alike."""
    found = {collector.policy_version for collector in collectors}
    if sampled:
        found = found.union(*map(stamps, collectors))
    assert found == {service.weight_version}
    return service.weight_version

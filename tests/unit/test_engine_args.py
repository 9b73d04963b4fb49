"""Engine arguments of single replicas."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper

from torchrl_vllm_sync import AsyncVLLM, vLLMWrapper
from torchrl_vllm_sync.engine import args
from torchrl_vllm_sync.engine.args import for_replica, make_engine_args
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.testing import make_tiny_tokenizer


def test_each_replica_samples_with_a_seed_of_its_own():
    given = SimpleNamespace(seed=3)

    assert [for_replica(given, index).seed for index in range(3)] == [3, 4, 5]
    assert given.seed == 3


def test_what_torchrls_grpo_scripts_configure_is_taken(caplog):
    """``_get_vllm_inference_model`` passes on whatever of these its configuration has."""
    args = make_engine_args(
        "a/model",
        num_devices=1,
        compile=False,
        gpu_memory_utilization=0.9,
        enforce_eager=False,
        enable_prefix_caching=False,
        max_model_len=128,
        dtype=torch.bfloat16,
        trust_remote_code=True,
        seed=7,
        swap_space=4,
        cpu_offload_gb=1,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (2, 2)
    assert (args.dtype, args.max_model_len, args.seed) == (torch.bfloat16, 128, 7)
    assert (args.trust_remote_code, args.cpu_offload_gb) == (True, 1)
    assert (args.enforce_eager, args.enable_prefix_caching) == (False, False)
    assert args.gpu_memory_utilization == 0.9
    if not hasattr(args, "swap_space"):
        assert "swap_space is passed over" in caplog.text


def test_a_checkpoint_may_be_a_path(tmp_path):
    assert make_engine_args(tmp_path).model == str(tmp_path)


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(UnsupportedArgumentError, match="must agree, got 2 and 4"):
        make_engine_args("a/model", num_devices=2, tensor_parallel_size=4)
    with pytest.raises(UnsupportedArgumentError, match="has the argument swap_spaces"):
        make_engine_args("a/model", swap_spaces=4)


def test_arguments_of_another_kind_are_refused_by_name():
    with pytest.raises(UnsupportedArgumentError, match=r"engine_args must be .*Args, got dict"):
        AsyncVLLM.launch({"model": "a/model"})


class ElsewhereUnknown(AsyncVLLM):
    """As defined in a notebook: another process cannot import it."""


ElsewhereUnknown.__module__ = "__main__"

# Says which type was read, and has both wrappers take it.
READ = """
import pickle, sys
service = pickle.load(sys.stdin.buffer)
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper
from torchrl_vllm_sync import AsyncVLLM, vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_tokenizer
assert isinstance(service, AsyncVLLM)
for wrapper in TorchRLWrapper, vLLMWrapper:
    wrapper(service, tokenizer=make_tiny_tokenizer(), input_mode="tokens")
print(type(service).__mro__[1].__name__)
"""


@pytest.mark.slow
def test_wrappers_take_subclasses_pickled_ones_too():
    from vllm import AsyncEngineArgs

    service = ElsewhereUnknown(AsyncEngineArgs(model="a/model"))
    assert isinstance(service, ElsewhereUnknown)
    for wrapper in TorchRLWrapper, vLLMWrapper:
        policy = wrapper(service, tokenizer=make_tiny_tokenizer(), input_mode="tokens")
        assert policy.model is service
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=cloudpickle.dumps(service),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.decode().strip() == "ElsewhereUnknown", done.stderr.decode()


class WithArguments(AsyncVLLM):
    """A subclass that cannot be made without arguments."""

    def __new__(cls, engine_args, label):
        made = super().__new__(cls)
        made.label = label
        return made

    def __init__(self, engine_args, label):
        super().__init__(engine_args)


def test_a_subclass_that_is_made_with_arguments_is_pickled_too():
    from vllm import AsyncEngineArgs

    service = WithArguments(AsyncEngineArgs(model="a/model"), "mine")
    copy = pickle.loads(pickle.dumps(service))
    assert isinstance(copy, WithArguments)
    assert copy._is_recognised
    assert copy.name == service.name


def test_the_service_itself_is_pickled_as_what_can_be_imported():
    assert cloudpickle.loads(cloudpickle.dumps(AsyncVLLM)) is AsyncVLLM
    assert pickle.loads(pickle.dumps(AsyncVLLM)) is AsyncVLLM


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("num_replica", r"num_replica \(did you mean num_replicas\?\)"),
        ("max_model_length", r"max_model_length \(did you mean max_model_len\?\)"),
        ("num_device", r"num_device \(did you mean num_devices\?\)"),
        ("strategy", r"strategy \(routing is for service.create_load_balancer\)"),
        ("transport", r"transport \(weights are pushed by WeightUpdater\(service, source, transpo"),
        ("xyz", "xyz$"),
    ],
)
def test_what_was_perhaps_meant_is_named(given, hint):
    with pytest.raises(UnsupportedArgumentError, match=hint):
        AsyncVLLM.from_pretrained("a/model", **{given: 1})


def test_engines_that_run_eagerly_on_a_cpu_compile_nothing(monkeypatch):
    """vLLM would, while the first request that asks for log-probabilities waits."""
    from vllm import AsyncEngineArgs

    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(args, "on_cpu", lambda: True)
    quiet = {"verbose": False, "enable_fp32_output": False}
    eager, compiled = AsyncEngineArgs("a/model", enforce_eager=True), AsyncEngineArgs("a/model")
    assert args.engine_environment(eager, **quiet)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in args.engine_environment(compiled, **quiet)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")  # the user's own setting stays
    assert args.engine_environment(eager, **quiet)["TORCH_COMPILE_DISABLE"] == "0"
    monkeypatch.setattr(args, "on_cpu", lambda: False)
    assert "TORCH_COMPILE_DISABLE" not in args.engine_environment(eager, **quiet)

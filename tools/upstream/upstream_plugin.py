"""A pytest plugin that has TorchRL's own tests exercise this library's engine, without a GPU.

``make upstream-tests SRC=<checkout of pytorch/rl>`` loads it. No file of TorchRL is changed:

- ``AsyncVLLM`` is this library's wherever TorchRL's tests import it from, and ``vllm.LLM`` is a
  service of it in ``test_llm_collectors.py``, whose tests construct their engine there;
- the names of published checkpoints resolve to tiny random ones, through a Hugging Face cache made
  for the run, with the network switched off;
- ``torch.cuda`` says that there is a GPU, to callers in TorchRL's test files only, and models that
  they load onto it stay on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

CHECKPOINTS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B")
REVISION = "0" * 40
CONTEXT = 32768  # what the tests of the wrapper ask for
# What a GPU's settings mean on a CPU.
CPU_ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 * 2**20,
    "num_cpus_per_replica": 0,
    "verbose": False,
}
GPU_ONLY = ("gpu_memory_utilization", "max_num_seqs")
HOME = "UPSTREAM_TESTS_HOME"


def pytest_configure() -> None:
    """Prepares checkpoints and swaps the engine, before any test file is imported."""
    home = Path(tempfile.mkdtemp(prefix="upstream-tests-"))
    os.environ.update(
        {HOME: str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
    )
    os.environ.setdefault("LIST_TO_STACK", "1")
    make_cache(home)
    swap_engine()
    pretend_gpu()


def pytest_unconfigure() -> None:
    """Removes the checkpoints."""
    shutil.rmtree(os.environ.pop(HOME), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests of collectors a service in the place of the ``vllm.LLM`` that they make."""
    for item in items:
        module: Any = getattr(item, "module", None)
        if module is not None and module.__name__.endswith("test_llm_collectors"):
            module.vllm = SimpleNamespace(LLM=shared_service)


def make_cache(home: Path) -> None:
    """Makes a Hugging Face cache that has a tiny checkpoint under each published name."""
    from transformers import AutoTokenizer

    from torchrl_vllm_sync.testing import make_tiny_checkpoint

    for name in CHECKPOINTS:
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        snapshot = repository / "snapshots" / REVISION
        make_tiny_checkpoint(snapshot, diverse=False, max_position_embeddings=CONTEXT)
        # As in the published one. Tests pad with it, and what a chat template holds is no padding.
        tokenizer = AutoTokenizer.from_pretrained(snapshot)
        tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
        tokenizer.save_pretrained(snapshot)


def swap_engine() -> None:
    """Sets ``AsyncVLLM`` to this library's in the packages that TorchRL's tests import it from."""
    from torchrl_vllm_sync import AsyncVLLM

    service_class: Any = AsyncVLLM
    launch: Any = AsyncVLLM.__dict__["from_pretrained"].__func__

    @functools.wraps(launch)
    def on_cpu(cls: type[AsyncVLLM], *args: Any, **kwargs: Any) -> AsyncVLLM:
        kept = {name: value for name, value in kwargs.items() if name not in GPU_ONLY}
        return launch(cls, *args, **{**kept, **CPU_ENGINE})

    service_class.from_pretrained = classmethod(on_cpu)
    for package in ("llm.backends.vllm", "llm.backends", "llm"):
        module: Any = importlib.import_module(f"torchrl.modules.{package}")
        module.AsyncVLLM = AsyncVLLM


@functools.cache
def shared_service(model: str, **kwargs: Any) -> Any:
    """Returns the one service that stands for every ``vllm.LLM`` of the tests of collectors."""
    from torchrl_vllm_sync import AsyncVLLM

    return AsyncVLLM.from_pretrained(model, num_replicas=1, max_model_len=2048, **kwargs)


def pretend_gpu() -> None:
    """Has ``torch.cuda`` report one GPU to callers in test files; the rest hears the truth."""
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    load = loader.from_pretrained

    @functools.wraps(load)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        placed = ("device_map", "attn_implementation")
        return load(*args, **{name: one for name, one in kwargs.items() if name not in placed})

    loader.from_pretrained = on_cpu
    for name, pretended in (("is_available", True), ("device_count", 1)):
        setattr(torch.cuda, name, _told_by_caller(getattr(torch.cuda, name), pretended))


def _told_by_caller(truth: Callable[[], Any], pretended: object) -> Callable[[], Any]:
    @functools.wraps(truth)
    def answer() -> Any:
        caller = Path(sys._getframe(1).f_code.co_filename)
        return pretended if caller.name.startswith("test_") else truth()

    return answer

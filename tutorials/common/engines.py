"""Starts Ray and the engines for a tutorial, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from transformers import AutoTokenizer

from common.quiet import keep_quiet
from common.settings import TINY
from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

# From 256 tokens of a step on, a kernel of vLLM 0.26 adds up in another order, batch-invariant or
# not, and a random model's tokens soon differ (csrc/layernorm_kernels.cu, fused_add_rms_norm).
BATCH_INVARIANT_TOKENS = 240
SHARED_GPU_UTILIZATION = 0.42  # of a GPU's memory is the engine's, where a trainer is on it too


@contextlib.contextmanager
def ray_running(num_gpus: int | None = None, *, address: str = "local") -> Iterator[None]:
    """Starts Ray on this machine and ends it, or joins and leaves the cluster of ``address``."""
    end_on_sigterm()
    ray.init(
        address=address,
        num_gpus=num_gpus,
        include_dashboard=False if address == "local" else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    end_on_sigterm()  # Ray has set its own
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def scenario(name: str, cluster: contextlib.AbstractContextManager[None]) -> Iterator[Path]:
    """Gives a directory for checkpoints beside a cluster, and says in the end how long it took.

    On GPUs engines compute batch-invariantly, unless the environment says otherwise already.
    """
    keep_quiet()
    if torch.cuda.is_available():
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory, cluster:
        yield Path(directory)
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


def end_on_sigterm() -> None:
    """Has SIGTERM end this process as Ctrl-C does, which cleans up; Ray lets it abort."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def small_service(
    checkpoint: str | Path, dtype: torch.dtype, *, shared: bool = False, **engine: Any
) -> AsyncVLLM:
    """Starts engines for some short answers, ``shared`` is with a trainer on the same GPU."""
    if shared:
        engine["gpu_memory_utilization"] = SHARED_GPU_UTILIZATION
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        engine.setdefault("max_num_batched_tokens", BATCH_INVARIANT_TOKENS)
    sizes = {"num_cpus_per_replica": 0, "max_model_len": 2048, "max_num_seqs": 64}
    how = {"dtype": str(dtype).removeprefix("torch."), "compile": False, "enforce_eager": True}
    return AsyncVLLM.from_pretrained(str(checkpoint), **sizes | how | engine)


@contextlib.contextmanager
def prepared(
    args: argparse.Namespace, name: str, *, diverse: bool = False
) -> Iterator[tuple[str, Any]]:
    """Gives a checkpoint and its tokenizer, with Ray running; ends Ray and removes what it made."""
    keep_quiet()
    torch.manual_seed(args.seed)
    args.began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
        checkpoint = args.model
        if args.model == TINY:
            checkpoint = str(make_tiny_checkpoint(directory, seed=args.seed, diverse=diverse))
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        where = "GPUs" if args.engine_gpus else "the CPU"
        print(f"Starting Ray and {args.replicas} engines on {where}, a minute or so", flush=True)
        with ray_running(args.engine_gpus):
            yield checkpoint, tokenizer

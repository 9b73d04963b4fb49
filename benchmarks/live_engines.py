"""Engines for routing benchmarks: launched with random weights, read by vLLM's own counters."""

from __future__ import annotations

import logging
import operator
import os
import re
import time
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch

from benchmarks.shapes import save_shape
from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


RESET_TIMEOUT_S = 20.0
# As vLLM does unasked; with CUDA graphs for decoding alone, which starts sooner; without any.
EXECUTIONS = ("compiled", "graphs", "eager")


@dataclass(slots=True)
class PrefillCounts:
    """Prompt tokens of one engine since its launch, or of a time, as vLLM counts them."""

    prompt: int = 0
    computed: int = 0
    cached: int = 0
    hits: int = 0
    preempted: int = 0

    def __add__(self, other: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(*map(operator.sub, astuple(self), astuple(other)))


def counted_actor() -> type:
    """The replica's class, which also adds up vLLM's counters of prompt tokens."""
    from torchrl_vllm_sync.engine.actor import EngineActor
    from torchrl_vllm_sync.engine.internals import StatsRecorder

    class CountingRecorder(StatsRecorder):
        counts = PrefillCounts()

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            if iteration_stats is not None:
                prompts = iteration_stats.prompt_token_stats
                self.counts.prompt += prompts.total
                self.counts.computed += prompts.computed
                self.counts.cached += prompts.local_cache_hit
                self.counts.preempted += iteration_stats.num_preempted_reqs
            if scheduler_stats is not None:
                self.counts.hits += scheduler_stats.prefix_cache_stats.hits

    class CountedActor(EngineActor):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._stats = CountingRecorder()

        def prefill_counts(self) -> PrefillCounts:
            return self._stats.counts

    return CountedActor


def record_name(benchmark: str, shape: str | None) -> str:
    """Name of a benchmark's record: with the shape, if there is one, in letters of file names."""
    return benchmark if shape is None else f"{benchmark}_{re.sub(r'[^a-z0-9]', '_', shape)}"


def engine_options(*, execution: str, max_model_len: int, max_num_seqs: int) -> dict[str, Any]:
    """VLLM's engine arguments for random weights on this machine."""
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    if not torch.cuda.is_available():
        return options | {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 96 * 2**20}
    options |= {"dtype": "bfloat16", "load_format": "dummy", "gpu_memory_utilization": 0.9}
    if execution == "eager":
        return options | {"enforce_eager": True}
    if execution == "graphs":
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 1, 32)]
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    return options


def random_options(dtype: str, kv_gib: int) -> dict[str, Any]:
    """The same for pushes: engines that decode eagerly, with so much cache on a GPU."""
    options: dict[str, Any] = {"load_format": "dummy", "dtype": dtype, "enforce_eager": True}
    if torch.cuda.is_available():
        cache = {"kv_cache_memory_bytes": kv_gib * 2**30}
    else:
        cache = {"kv_cache_memory_bytes": 64 * 2**20, "block_size": 32}
    return options | cache | {"max_model_len": 2048}


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray cluster of this process alone."""
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.ERROR,
        num_cpus=max(2, os.cpu_count() or 2),
    )
    try:
        yield
    finally:
        ray.shutdown()


def start(checkpoint: Path | str, **options: Any) -> AsyncVLLM:
    """Launches a service and says how long that took."""
    begin = time.perf_counter()
    service = AsyncVLLM.from_pretrained(
        str(checkpoint), num_cpus_per_replica=0, verbose=False, **options
    )
    print(f"launched in {time.perf_counter() - begin:.1f} s", flush=True)
    return service


def launch(
    directory: Path, shape: str | None, num_replicas: int, options: dict[str, Any]
) -> AsyncVLLM:
    """Starts replicas that count: a tiny checkpoint's, or on GPUs random weights of a shape."""
    most = {"max_position_embeddings": options["max_model_len"]}
    if shape is None:
        model = make_tiny_checkpoint(directory, **most)
    else:
        model = save_shape(shape, directory, dtype="bfloat16", **most)
    return start(model, num_replicas=num_replicas, actor_class=counted_actor(), **options)


def counts(service: AsyncVLLM) -> PrefillCounts:
    """VLLM's counters, summed over the replicas."""
    each = ray.get([one.prefill_counts.remote() for one in service.actors], timeout=60)
    return sum(each, PrefillCounts())


def block_size(service: AsyncVLLM) -> int:
    description: Any = ray.get(service.actors[0].describe.remote(), timeout=60)
    return description.block_size


def reset(service: AsyncVLLM) -> None:
    """Empties every replica's prefix cache, as soon as no request holds any of it."""
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while not all(ray.get([one.reset_prefix_cache.remote() for one in service.actors], timeout=60)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests held KV blocks for {RESET_TIMEOUT_S:g} s")
        time.sleep(0.05)


def new_weights(service: AsyncVLLM) -> dict[str, torch.Tensor]:
    """Random weights of the engines' model, for a push: every tensor repeats the same numbers."""
    metas = ray.get(service.actors[0].model_metadata.remote(), timeout=120)
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    weights = {}
    for name, dtype, shape, *_ in metas:
        size = torch.Size(shape)
        whole = noise.to(getattr(torch, dtype.removeprefix("torch.")))
        weights[name] = whole.repeat(-(-size.numel() // len(noise)))[: size.numel()].view(size)
    return weights

"""What one push costs the host, beside vLLM's reload: real tensor counts, almost no bytes.

Everything a push does in Python and in kernel launches is done here in one process on the CPU, on
vLLM's own model classes before they repack their weights: reading the trainer's module, packing
buckets, and copying them into the parameters by the load plan. vLLM's side is its model's
``load_weights`` alone, and within a layerwise reload, as its own transfer engines run it. The
hidden sizes are tiny, so that the bytes weigh next to nothing; nothing is sent.

``python -m benchmarks.host_work`` takes a minute, ``--smoke`` seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.record import Recorder
from tests.unit.vllm_models import VllmModels, single_process_group
from torchrl_vllm_sync import as_weight_source
from torchrl_vllm_sync.engine.plan import checkpoint_metadata, record_load_plan
from torchrl_vllm_sync.weights.broadcast.buckets import (
    BucketLayout,
    ViewPacker,
    bound_buckets,
    make_buffers,
)
from torchrl_vllm_sync.weights.source import fit_to_model

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 128}
CASES = {
    # The layers of Qwen3-1.7B, tied, and of Qwen3-30B-A3B.
    "dense": ("qwen3", {"num_hidden_layers": 28, "tie_word_embeddings": True}),
    "moe": (
        "qwen3-moe",
        {
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 16,
        },
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="seconds, meaning nothing")
    args = parser.parse_args(argv)
    recorder = Recorder("host_work")
    with tempfile.TemporaryDirectory() as directory, single_process_group(directory):
        for case, (name, overrides) in CASES.items():
            if args.smoke:
                overrides = overrides | {"num_hidden_layers": 2}
            models = VllmModels(Path(directory) / case, name, **TINY, **overrides)
            run(recorder, case, models, 2 if args.smoke else args.rounds)
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 0


def run(recorder: Recorder, case: str, models: VllmModels, rounds: int) -> None:
    """Measures one architecture."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    expected = checkpoint_metadata(models.model_config)
    trainer = AutoModelForCausalLM.from_config(models.config)
    model, other = models.build(fill=0.0), models.build(fill=0.0)
    record_metadata_for_reloading(other)
    for module in other.modules():
        # On a GPU unquantised weights stay as loaded; only vLLM's CPU backend repacks them.
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading = lambda layer: None  # noqa: ARG005

    def source() -> Any:
        return fit_to_model(as_weight_source(trainer), expected)

    metadata = source().metadata()
    layout = BucketLayout(metadata)
    sending, receiving = (make_buffers(layout, torch.device("cpu")) for _ in range(2))
    packer = ViewPacker(layout, sending, source().views())
    begin = time.perf_counter()
    with models.active():
        plan = record_load_plan(model, metadata)
    recorded = time.perf_counter()
    bound = bound_buckets(plan.copies, layout, receiving)
    once = {"recording": recorded - begin, "binding": time.perf_counter() - recorded}
    num_copies = sum(len(targets) for bucket in bound for targets, _ in bucket.groups)

    def read() -> None:
        assert source().views() is not None

    def pack() -> None:
        for index in range(len(layout.buckets)):
            packer(index, sending[index % len(sending)])

    def copy() -> None:
        for bucket in bound:
            bucket.unpack()

    def load() -> None:
        models.load(other, dict(source().views()))

    def reload() -> None:
        layerwise(models, other, source().views())

    for system, parts in {
        "broadcast": {"read": read, "pack": pack, "copy": copy},
        "vLLM": {"load_weights": load, "layerwise reload": reload},
    }.items():
        samples = measure(parts, rounds)
        for metric, seconds in samples.items():
            add(recorder, case, system, metric, seconds, len(metadata))
        if system == "broadcast":
            whole = [sum(one) for one in zip(*samples.values(), strict=True)]
            add(recorder, case, system, "whole", whole, len(metadata), num_copies=num_copies)
    for metric, seconds in once.items():
        add(recorder, case, "broadcast", f"{metric}, once", [seconds], len(metadata))


def layerwise(models: VllmModels, model: torch.nn.Module, views: Any) -> None:
    """One layerwise reload, as vLLM's transfer engines run it."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with models.active(), torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(iter(views))  # pyright: ignore[reportCallIssue]  vLLM's, not a Tensor
        finalize_layerwise_reload(model, models.model_config)


def measure(parts: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each part, all parts in turn, after two rounds to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 2):
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            if number >= 2:
                samples[name].append(time.perf_counter() - begin)
    return samples


def add(
    recorder: Recorder,
    case: str,
    system: str,
    metric: str,
    seconds: list[float],
    num_tensors: int,
    **extra: int,
) -> None:
    """Adds one measurement, in milliseconds."""
    samples = [1e3 * one for one in seconds]
    case = f"{case}, {num_tensors} tensors"
    print(f"{case} {system} {metric}: {min(samples):.3f} to {max(samples):.3f} ms", flush=True)
    recorder.add(case=case, system=system, metric=metric, unit="ms", samples=samples, **extra)


if __name__ == "__main__":
    sys.exit(main())

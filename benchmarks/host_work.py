"""What one push costs the host, beside vLLM's reload: real tensor counts, almost no bytes.

Everything a push does in Python and in kernel launches is done here in one process on the CPU, on
vLLM's own model classes before they repack their weights: reading the trainer's module, packing
buckets, and copying them into the parameters by the load plan. vLLM's side is its model's
``load_weights`` alone, and within a layerwise reload, as its own transfer engines run it. The
hidden sizes are tiny, so that the bytes weigh next to nothing; nothing is sent.

``python -m benchmarks.host_work`` takes a minute, ``--smoke`` seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.record import Recorder, parser_of, take_turns
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
    parser = parser_of(__doc__, "seconds, meaning nothing")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    recorder = Recorder("host_work")
    with tempfile.TemporaryDirectory() as directory, single_process_group(directory):
        for case, (name, overrides) in CASES.items():
            if args.smoke:
                overrides = overrides | {"num_hidden_layers": 2}
            models = VllmModels(Path(directory) / case, name, **TINY, **overrides)
            run(recorder, case, models, 2 if args.smoke else args.rounds)
    recorder.write(smoke=args.smoke, directory=args.out)
    return 0


def run(recorder: Recorder, case: str, models: VllmModels, rounds: int) -> None:
    """Measures one architecture."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

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
        with models.active(), torch.no_grad():  # as vLLM's transfer engines do
            initialize_layerwise_reload(other)
            other.load_weights(iter(source().views()))  # pyright: ignore[reportCallIssue]
            finalize_layerwise_reload(other, models.model_config)

    def add(system: str, metric: str, seconds: list[float], **extra: int) -> None:
        what: Any = {"case": f"{case}, {len(metadata)} tensors", "system": system, "unit": "ms"}
        recorder.add(**what, metric=metric, samples=[1e3 * one for one in seconds], **extra)

    for system, parts in {
        "broadcast": {"read": read, "pack": pack, "copy": copy},
        "vLLM": {"load_weights": load, "layerwise reload": reload},
    }.items():
        samples = take_turns(parts, rounds, warm_up=2)
        for metric, seconds in samples.items():
            add(system, metric, seconds)
        if system == "broadcast":
            whole = [sum(one) for one in zip(*samples.values(), strict=True)]
            add(system, "whole", whole, num_copies=num_copies)
    for metric, seconds in once.items():
        add("broadcast", f"{metric}, once", [seconds])


if __name__ == "__main__":
    sys.exit(main())

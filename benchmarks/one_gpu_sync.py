"""Weights from a trainer into an engine on the same GPU, by ``p2p`` and by ``ipc``.

The trainer is this process. The engine decodes by CUDA graphs, and has memory for a second set of
weights, which only ``p2p`` uses. For each system: pushes to the idle engine, then some beside
running requests, whose tokens are timed in the engine's actor. First the engine must come to
compute what the trainer does.

- ``push``: the whole call. ``whole pause``: how long the engine stands still.
- ``gap beyond a step``: the longest time without a token around a push, less the usual one.
- ``speed while weights arrive``: tokens per second from a push's beginning to its end, the pause
  included, in per cent of those just before.

``--smoke`` runs a tiny model on CPUs, with ``memmap`` in place of ``ipc``. A record for each case.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch

from benchmarks.grpo_systems import options_of
from benchmarks.live_engines import local_ray, record_name, start
from benchmarks.record import Recorder, parser_of
from benchmarks.shapes import save_shape
from benchmarks.sync_actors import Trainer, loaded_actor
from benchmarks.weight_sync import MOST_DIFFERENCE, PROBE, answers

if TYPE_CHECKING:
    import argparse

    from torchrl_vllm_sync import AsyncVLLM

# Shape, dtypes of trainer and engine, and the engine's share of a GPU.
CASES = {
    "smollm2-1": ("smollm2", "float32", "bfloat16", 0.3),
    "8b-1": ("8b", "bfloat16", "bfloat16", 0.45),
    "smoke": ("tiny", "float32", "float32", None),
}
SYSTEMS = ("p2p", "ipc", "memmap")
# Seconds of running requests before a push, with which its own are compared, and after it.
BEFORE_S, AFTER_S = 0.25, 0.15
MAX_TOKENS = 900

Sample = dict[tuple[str, str], float]  # by metric and unit


def check(service: AsyncVLLM, trainer: Trainer, system: str, tolerance: float) -> None:
    """Warms up, and checks that the engine computes what the trainer does, which it did not."""

    def off_by() -> float:
        wanted = torch.tensor(trainer.log_probs(PROBE))
        return (answers(service, 0)[0] - wanted).abs().mean().item()

    pushed(service, trainer, system)
    trainer.train(SYSTEMS.index(system))
    before = off_by()
    pushed(service, trainer, system)
    after = off_by()
    print(f"{system}: off by {before:.3g}, and after a push by {after:.3g}", flush=True)
    assert after < tolerance < before


def pushed(service: AsyncVLLM, trainer: Trainer, system: str, rounds: int = 1) -> list[Sample]:
    """Pushes one after the other."""
    times = {"push": "push_s", "whole pause": "whole_pause_s"}
    reports = trainer.push(service, system, {}, rounds)
    return [{(name, "ms"): 1e3 * one[key] for name, key in times.items()} for one in reports]


def beside(service: AsyncVLLM, trainer: Trainer, system: str, num_requests: int) -> Sample:
    """One push while requests run; trainer and engine read the same clock."""
    (actor,) = service.actors
    ray.get(actor.begin_load.remote(num_requests, MAX_TOKENS), timeout=60)
    time.sleep(BEFORE_S)
    begin = time.perf_counter()
    (sample,) = pushed(service, trainer, system)
    end = time.perf_counter()
    time.sleep(AFTER_S)
    log = ray.get(actor.end_load.remote(), timeout=60)
    speed = log.rate((begin, end)) / log.rate((begin - BEFORE_S, begin))
    sample["gap beyond a step", "ms"] = 1e3 * (log.longest_gap_s((begin, end)) - log.step_s())
    return sample | {("speed while weights arrive", "%"): 100 * speed}


def measure(recorder: Recorder, name: str, checkpoint: Path, args: argparse.Namespace) -> None:
    """Launches a case's engine, and pushes by each system in turn."""
    _, own_dtype, dtype, share = CASES[name]
    options = options_of(checkpoint, 64) | {"stage_weights": True}
    # On a CPU it computes with its parameters as they are.
    plain = {"worker_extension_cls": "tests.engine.plain_worker.PlainWorker"}
    options |= {"gpu_memory_utilization": share} if share else plain
    with start(checkpoint, actor_class=loaded_actor(), **options) as service:
        trainer = Trainer(str(checkpoint), own_dtype)
        for system in args.systems:
            check(service, trainer, system, MOST_DIFFERENCE[dtype])
            idle, turns = pushed(service, trainer, system, args.rounds), range(args.rounds)
            loaded = [beside(service, trainer, system, args.requests) for _ in turns]
            for case, found in ((name, idle), (f"{name}, {args.requests} running", loaded)):
                for metric, unit in found[0]:
                    samples = [one[metric, unit] for one in found]
                    what = {"case": case, "system": system, "metric": metric, "unit": unit}
                    recorder.add(**what, samples=samples)
            trainer.end(system)


def main(argv: list[str] | None = None) -> list[Path]:
    parser = parser_of(__doc__, "a tiny model on CPUs")
    parser.add_argument("--model", type=Path, help="a checkpoint of SmolLM2's shape; else random")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES)[:2])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["p2p", "ipc"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=32, help="running beside a push")
    args = parser.parse_args(argv)
    if args.smoke:
        args.cases, args.systems, args.rounds, args.requests = ["smoke"], ["p2p", "memmap"], 2, 4
    Recorder("one_gpu_sync").check(smoke=args.smoke)
    paths = []
    with local_ray():
        for name in args.cases:
            recorder, shape = Recorder(record_name("one_gpu_sync", name)), CASES[name][0]
            with tempfile.TemporaryDirectory() as directory:
                given = args.model if shape == "smollm2" else None
                made = given or save_shape(shape, Path(directory), dtype=CASES[name][2])
                measure(recorder, name, made, args)
            paths.append(recorder.write(smoke=args.smoke, directory=args.out))
    return paths


if __name__ == "__main__":
    main(sys.argv[1:])

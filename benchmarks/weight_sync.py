"""Weights from one trainer into one or more replicas: ours beside raw NCCL and vLLM's own.

``python -m benchmarks.weight_sync --model 8b --replicas 3`` runs every system on the same machine
in one go: a bare broadcast of as many bytes, vLLM's packed NCCL engine, the broadcast transport,
the same with staged weights, p2p, and p2p with every push audited. Engines and trainer hold random
weights of the named shape. After the last push of each system the engine's log-probabilities are
compared with the trainer's; at last one push is checked parameter by parameter against vLLM's own
reload.

- ``push``: the whole call. ``whole pause``: how long an engine stands still.
- ``gap beyond a step``: the longest time without a token around a push, less the usual one.
- ``speed while weights arrive``: tokens per second, in per cent of those before the push: of staged
  weights from the first byte to the pause, of others from the push's beginning to its end.

``--smoke`` takes a tiny model, Gloo and CPUs. Cases are named ``<model>-<replicas>``, and
``<model>-<replicas>-graphs`` where engines decode by CUDA graphs.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.record import Recorder
from benchmarks.shapes import SHAPES, save_shape
from benchmarks.sync_actors import Trainer, loaded_actor, raw_broadcast, spawn
from torchrl_vllm_sync import AsyncVLLM

if TYPE_CHECKING:
    from benchmarks.token_rates import TokenLog

SYSTEMS = ("raw-nccl", "vllm-nccl", "broadcast", "broadcast-staged", "p2p", "p2p-audited")
# What people run who do not wait for a compiler.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
}
PROBE = list(range(5, 69))
# Seconds for which loaded engines are left alone before each push.
QUIET_S = 0.3
# bfloat16 carries 8 bits; the values compared are about -12 and differ by units between models.
MOST_DIFFERENCE = {"bfloat16": 0.3, "float32": 1e-3}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and writes the records; returns the number of systems that failed."""
    args = parse(argv)
    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.ERROR,
        num_cpus=max(2, os.cpu_count() or 2),
    )
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = save_shape(args.model, Path(directory), dtype=dtype)
        num_bytes, raw = size_of(checkpoint), []
        if "raw-nccl" in args.systems:
            receivers = args.replicas * args.tensor_parallel
            raw = raw_broadcast(num_bytes, receivers, args.rounds, int(cuda))
            say(args.model, "raw-nccl", "whole", raw)
        trainer = spawn(Trainer, str(checkpoint), dtype, num_gpus=int(cuda))
        for decode in args.decode:
            case = case_of(args, decode)
            recorder = Recorder("weight_sync_" + re.sub(r"\W", "_", case))
            if raw:
                what = {"system": "raw-nccl", "metric": "whole", "unit": "ms"}
                samples = [1e3 * one for one in raw]
                recorder.add(case=case, **what, samples=samples, num_bytes=num_bytes)
            with launch(args, decode, checkpoint, dtype) as service:
                for system in args.systems:
                    if system == "raw-nccl":
                        continue
                    try:
                        measure(recorder, service, trainer, case, system, args)
                    except Exception:  # noqa: BLE001  the other systems are measured all the same
                        traceback.print_exc()
                        failed += 1
                check(service, trainer, args)
            print(recorder.write(smoke=args.smoke, directory=args.out), flush=True)
    ray.shutdown()
    return failed


def case_of(args: argparse.Namespace, decode: str) -> str:
    """The name of a case in records."""
    sharded = f"-tp{args.tensor_parallel}" if args.tensor_parallel > 1 else ""
    graphs = "-graphs" if decode == "graphs" else ""
    return f"{args.model}-{args.replicas}{sharded}{graphs}"


def size_of(checkpoint: Path) -> int:
    """Bytes of all parameters of a model of this shape."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    return sum(one.nbytes for one in model.parameters())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one replica")
    parser.add_argument("--decode", nargs="+", choices=("eager", "graphs"), default=["eager"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32, help="in flight per replica under load")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="seconds, on CPUs, meaning nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.rounds, args.requests = "tiny", 3, 4
        args.systems = [one for one in args.systems if one != "vllm-nccl"]
    return args


def launch(args: argparse.Namespace, decode: str, checkpoint: Path, dtype: str) -> AsyncVLLM:
    """Starts the replicas with random weights."""
    engine: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": dtype,
        "enforce_eager": decode == "eager",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "actor_class": loaded_actor(),
        "stage_weights": bool({*SYSTEMS[3:]} & {*args.systems}),
        "verbose": False,
        "num_cpus_per_replica": 0,
    }
    if torch.cuda.is_available():
        engine |= {"kv_cache_memory_bytes": 8 * 2**30}
        if decode == "graphs":
            engine |= {"compilation_config": GRAPHS}
    else:
        engine |= {"kv_cache_memory_bytes": 64 * 2**20, "block_size": 32}
        engine |= {"worker_extension_cls": "tests.engine.plain_worker.PlainWorker"}
    begin = time.perf_counter()
    service = AsyncVLLM.from_pretrained(
        str(checkpoint), args.tensor_parallel, num_replicas=args.replicas, **engine
    )
    print(f"launched {args.replicas} replicas in {time.perf_counter() - begin:.1f} s", flush=True)
    return service


def measure(
    recorder: Recorder,
    service: AsyncVLLM,
    trainer: Any,
    case: str,
    system: str,
    args: argparse.Namespace,
) -> None:
    """Pushes to idle engines, then under load."""
    options: dict[str, Any] = {}
    if system.startswith("broadcast"):
        options = {
            "staged": system.endswith("staged"),
            "bucket_bytes": args.bucket_mib * 2**20,
            "verify": "never",
        }
    elif system == "vllm-nccl":
        options = {"num_buffers": 2}  # vLLM's default; up to 0.32 it can mix packs up
    begin = time.perf_counter()
    ray.get(trainer.push.remote(service, system, options, 2), timeout=100)  # to warm up
    print(f"{system}: the first two pushes took {time.perf_counter() - begin:.2f} s", flush=True)
    idle = ray.get(trainer.push.remote(service, system, options, args.rounds), timeout=100)
    record(recorder, case, system, "", idle)
    memory = ray.get(trainer.memory.remote(), timeout=60)
    print(case, system, memory, flush=True)
    running = f"{case}, {args.requests} running"
    loaded, found = under_load(service, trainer, system, options, args)
    record(recorder, running, system, "", loaded)
    for (metric, unit), samples in found.items():
        print(f"{case} {system} {metric}: {statistics.median(samples):.2f} {unit}", flush=True)
        recorder.add(case=running, system=system, metric=metric, unit=unit, samples=samples)
    compare(service, trainer, system, options, args)
    ray.get(trainer.end.remote(system), timeout=60)


def under_load(
    service: AsyncVLLM,
    trainer: Any,
    system: str,
    options: dict[str, Any],
    args: argparse.Namespace,
) -> tuple[list[dict[str, float]], dict[tuple[str, str], list[float]]]:
    """Pushes while every replica runs requests; returns reports, and samples by metric and unit.

    Before each push the engines are left alone for a while. What they do then is what the same
    requests get while that push's weights arrive is compared with. The worst replica counts.
    """
    rounds = max(args.rounds // 2, 2)
    ray.get([one.begin_load.remote(args.requests, 1900) for one in service.actors], timeout=100)
    time.sleep(QUIET_S)
    reports, marks = [], []
    for _ in range(rounds):
        quiet = mark(service)
        time.sleep(QUIET_S)
        begin = mark(service)
        reports += ray.get(trainer.push.remote(service, system, options, 1), timeout=100)
        marks.append((quiet, begin, mark(service)))
        time.sleep(0.1)
    logs: list[TokenLog] = ray.get([one.end_load.remote() for one in service.actors], timeout=60)
    found: dict[tuple[str, str], list[float]] = {}
    for number, (quiet, begin, end) in enumerate(marks):
        of_replicas = []
        for index, log in enumerate(logs):
            push = begin[index], end[index]
            window = log.arrivals[number] if log.arrivals else push
            alone, arriving = log.rate((quiet[index], begin[index])), log.rate(window)
            sample = {
                ("longest gap", "ms"): 1e3 * log.longest_gap_s(push),
                ("normal step", "ms"): 1e3 * log.step_s(),
                ("gap beyond a step", "ms"): 1e3 * (log.longest_gap_s(push) - log.step_s()),
                ("throughput undisturbed", "tokens/s"): alone,
                ("throughput while weights arrive", "tokens/s"): arriving,
                ("speed while weights arrive", "%"): 100 * arriving / alone,
            }
            of_replicas.append(sample)
        for key in of_replicas[0]:
            values = [one[key] for one in of_replicas]
            found.setdefault(key, []).append((max if key[1] == "ms" else min)(values))
    return reports, found


def mark(service: AsyncVLLM) -> list[float]:
    """The time now, by each replica's clock."""
    return ray.get([one.mark.remote() for one in service.actors], timeout=30)


def record(
    recorder: Recorder, case: str, system: str, prefix: str, reports: list[dict[str, float]]
) -> None:
    """Adds every phase that took any time."""
    for name in reports[0]:
        samples = [one[name] for one in reports]
        if name == "plan":
            print(case, system, "by plan" if all(samples) else "layerwise", flush=True)
        elif any(samples):
            metric = prefix + name.removesuffix("_s")
            if name in ("whole_pause_s", "load_s", "push_s", "stage_s", "pause_s", "resume_s"):
                say(case, system, metric, samples)
            recorder.add(
                case=case,
                system=system,
                metric=metric,
                unit="ms",
                samples=[1e3 * one for one in samples],
            )


def say(case: str, system: str, metric: str, samples: list[float]) -> None:
    """Prints one measurement; samples are in seconds."""
    low, middle, high = min(samples), statistics.median(samples), max(samples)
    print(
        f"{case} {system} {metric}: {1e3 * middle:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})",
        flush=True,
    )


def compare(
    service: AsyncVLLM,
    trainer: Any,
    system: str,
    options: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Trains, pushes, and compares what the engines compute with the trainer."""
    ray.get(trainer.train.remote(args.systems.index(system)), timeout=100)
    ray.get(trainer.push.remote(service, system, options, 1), timeout=100)
    wanted = torch.tensor(ray.get(trainer.log_probs.remote(PROBE), timeout=100))
    for index in range(args.replicas):
        difference = (answers(service, index)[0] - wanted).abs().mean().item()
        print(f"{system}, replica {index}: log-probabilities differ by {difference:.4g}")
        most = MOST_DIFFERENCE[str(service.engine_args.dtype)]
        assert difference < most, f"replica {index} differs by {difference}"


def check(service: AsyncVLLM, trainer: Any, args: argparse.Namespace) -> None:
    """Compares the parameters and tokens of the last system's push with those of a reload."""
    before = [answers(service, index)[1] for index in range(args.replicas)]
    options = {"verify": "always", "bucket_bytes": args.bucket_mib * 2**20}
    (report,) = ray.get(trainer.push.remote(service, "broadcast", options, 1), timeout=200)
    if torch.cuda.is_available():
        assert report["plan"], "the plan's parameters are not those of a reload"
    for index, tokens in enumerate(before):
        assert answers(service, index)[1] == tokens, f"replica {index}: other tokens after a reload"
    print("log-probabilities, parameters and tokens agree", flush=True)


def answers(service: AsyncVLLM, index: int) -> tuple[torch.Tensor, list[int]]:
    """A replica's log-probabilities of the probe, and the tokens it continues it with."""
    from vllm import SamplingParams

    probe = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output = service.generate(prompt_token_ids=PROBE, sampling_params=probe, actor_index=index)
    pairs = zip(output.prompt_logprobs[1:], PROBE[1:], strict=True)
    log_probs = torch.tensor([entry[token].logprob for entry, token in pairs])
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    output = service.generate(prompt_token_ids=PROBE, sampling_params=greedy, actor_index=index)
    return log_probs, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(main())

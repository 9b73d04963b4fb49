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
- ``requests ended``: by one push.
- ``tokens around a push``: of the push with the median gap, every 5 ms from 50 ms before it on.

Two more systems have engines of their own. With ``adapter`` among ``--systems`` the trainer has a
LoRA adapter of rank 16, which that system pushes alone, and the others merged. ``torchrl`` is
TorchRL's own service and updater, see ``peers/torchrl_vllm.py``.

``--smoke`` takes a tiny model, Gloo and CPUs. Cases are named ``<model>-<replicas>``, and
``<model>-<replicas>-graphs`` where engines decode by CUDA graphs. With ``--quantization fp8`` the
last push is compared by its tokens with vLLM's own quantisation. With ``--beside`` trainers have
the GPUs of the engines, one each.
"""

from __future__ import annotations

import os
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

from benchmarks.live_engines import local_ray, random_options, record_name, start
from benchmarks.peers import torchrl_vllm
from benchmarks.record import Recorder, parser_of
from benchmarks.shapes import SHAPES, save_shape
from benchmarks.sync_actors import (
    LORA_RANK,
    Trainers,
    loaded_actor,
    raw_broadcast,
    torchrl_actor,
)

if TYPE_CHECKING:
    import argparse
    from contextlib import AbstractContextManager

    from benchmarks.sync_actors import TokenLog
    from torchrl_vllm_sync import AsyncVLLM

SYSTEMS = ("raw-nccl", "vllm-nccl", "broadcast", "broadcast-staged", "p2p", "p2p-audited")
ALONE = "adapter", "torchrl"
MORE_SYSTEMS = ("p2p-handed-on", *ALONE)
# What people run who do not wait for a compiler.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
}
PROBE = list(range(5, 69))
# Seconds for which loaded engines are left alone before each push.
QUIET_S = 0.3
# Milliseconds from a push's beginning in which tokens per second are noted, and of each figure.
AROUND_MS = range(-50, 300, 5)
# bfloat16 carries 8 bits; the values compared are about -12 and differ by units between models.
MOST_DIFFERENCE = {"bfloat16": 0.3, "float32": 1e-3, "fp8": 1.0}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    Recorder("weight_sync").check(smoke=args.smoke)
    cuda, failed = torch.cuda.is_available(), 0
    dtype = "bfloat16" if cuda else "float32"
    with local_ray(), tempfile.TemporaryDirectory() as directory:
        checkpoint = save_shape(args.model, Path(directory), dtype=dtype)
        num_bytes, raw = size_of(checkpoint), []
        if "raw-nccl" in args.systems:
            receivers = args.replicas * args.tensor_parallel
            raw = raw_broadcast(num_bytes, receivers, args.rounds, int(cuda))
        alone = [[one] for one in args.systems if one in ALONE]
        systems = [one for one in args.systems if one not in (*ALONE, "raw-nccl")]
        given = args.ranks, str(checkpoint), dtype, "adapter" in args.systems
        trainer = Trainers(*given, num_gpus=int(cuda and not args.beside))
        for decode in args.decode:
            ranks, size = args.ranks, args.tensor_parallel
            sharded = (
                f"fsdp{ranks}" * (ranks > 1),
                f"{'te'[args.expert_parallel]}p{size}" * (size > 1),
            )
            how = args.quantization, "beside" * args.beside, decode.removeprefix("eager")
            case = "-".join([args.model, str(args.replicas), *filter(None, (*sharded, *how))])
            recorder = Recorder(record_name("weight_sync", case))
            if raw:
                what = {"system": "raw-nccl", "metric": "whole", "unit": "ms"}
                samples = [1e3 * one for one in raw]
                recorder.add(case=case, **what, samples=samples, num_bytes=num_bytes)
            for some in filter(None, (systems, *alone)):
                with launch(args, decode, checkpoint, dtype, some) as service:
                    for system in some:
                        try:
                            measure(recorder, service, trainer, case, system, args)
                        except Exception:  # noqa: BLE001  the others are measured all the same
                            traceback.print_exc()
                            failed += 1
                    if some is systems:
                        check(service, trainer, args)
            recorder.write(smoke=args.smoke, directory=args.out)
    return failed


def size_of(checkpoint: Path) -> int:
    """Bytes of all parameters of a model of this shape."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    return sum(one.nbytes for one in model.parameters())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "seconds, on CPUs, meaning nothing")
    parser.add_argument("--model", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, sharded by FSDP2")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one replica")
    parser.add_argument("--expert-parallel", action="store_true", help="and data parallel instead")
    parser.add_argument("--quantization", choices=("fp8",), help="of the engines, online")
    parser.add_argument("--beside", action="store_true", help="the trainer, on the engines' GPUs")
    parser.add_argument("--decode", nargs="+", choices=("eager", "graphs"), default=["eager"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32, help="in flight per replica under load")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS + MORE_SYSTEMS)
    parser.add_argument("--bucket-mib", type=int, default=128)
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.rounds, args.requests = "tiny", 3, 4
        args.systems = [one for one in args.systems if one != "vllm-nccl"]
    return args


def launch(
    args: argparse.Namespace, decode: str, checkpoint: Path, dtype: str, systems: list[str]
) -> AbstractContextManager[AsyncVLLM]:
    """Starts the replicas with random weights."""
    has_adapters = "adapter" in systems
    engine = random_options(dtype, kv_gib=8) | {
        "num_replicas": args.replicas,
        "max_num_seqs": 64,
        "enable_lora": has_adapters,
        "max_lora_rank": LORA_RANK,
        "quantization": args.quantization,
        "gpu_memory_utilization": 0.6,  # of which the cache above is less
        "enforce_eager": decode == "eager",
    }
    if decode == "graphs" and torch.cuda.is_available():
        engine["compilation_config"] = GRAPHS
    if args.expert_parallel:
        engine |= {"data_parallel_size": args.tensor_parallel, "enable_expert_parallel": True}
    elif systems == ["torchrl"]:
        engine["tensor_parallel_size"] = args.tensor_parallel
    else:
        engine["num_devices"] = args.tensor_parallel
    if systems == ["torchrl"]:
        return torchrl_vllm.running(checkpoint, torchrl_actor(), **engine)
    if not torch.cuda.is_available():
        engine["worker_extension_cls"] = "tests.engine.plain_worker.PlainWorker"
    spare = any(one.startswith("p2p") or one.endswith("-staged") for one in systems)
    return start(checkpoint, actor_class=loaded_actor(), stage_weights=spare, **engine)


def measure(
    recorder: Recorder, service: AsyncVLLM, trainer: Any, case: str, system: str, args: Any
) -> None:
    """Pushes to idle engines, then under load."""
    options: dict[str, Any] = {}
    if system.startswith("broadcast"):
        options = {"staged": system.endswith("staged"), "verify": "never"}
        options["bucket_bytes"] = args.bucket_mib * 2**20
    elif system == "vllm-nccl":
        options = {"num_buffers": 2}  # vLLM's default; up to 0.32 it can mix packs up
    begin = time.perf_counter()
    trainer.call("push", service, system, options, 2)  # to warm up
    print(f"{system}: the first two pushes took {time.perf_counter() - begin:.2f} s", flush=True)
    idle = trainer.call("push", service, system, options, args.rounds)
    record(recorder, case, system, idle)
    running = f"{case}, {args.requests} running"
    loaded, found = under_load(service, trainer, system, options, args)
    record(recorder, running, system, loaded)
    for (metric, unit), samples in found.items():
        recorder.add(case=running, system=system, metric=metric, unit=unit, samples=samples)
    compare(service, trainer, system, options, args)
    trainer.call("end", system, timeout=60)


def under_load(
    service: AsyncVLLM, trainer: Any, system: str, options: Any, args: argparse.Namespace
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
        reports += trainer.call("push", service, system, options, 1)
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
            still = quiet[index], quiet[index] + end[index] - begin[index]  # as long as the push
            sample = {
                ("longest gap", "ms"): 1e3 * log.longest_gap_s(push),
                ("normal step", "ms"): 1e3 * log.step_s(),
                ("gap beyond a step", "ms"): 1e3 * (log.longest_gap_s(push) - log.step_s()),
                ("longest gap undisturbed", "ms"): 1e3 * log.longest_gap_s(still),
                ("throughput undisturbed", "tokens/s"): alone,
                ("throughput while weights arrive", "tokens/s"): arriving,
                ("speed while weights arrive", "%"): 100 * arriving / alone,
                ("requests ended", "requests"): log.ended(push),
            }
            of_replicas.append(sample)
        for key in of_replicas[0]:
            values = [one[key] for one in of_replicas]
            found.setdefault(key, []).append((min if key[1] in ("tokens/s", "%") else max)(values))
    gaps = found["longest gap", "ms"][:-1]  # behind the last push requests end too early
    _, begin, _ = marks[gaps.index(statistics.median_low(gaps))]
    found["tokens around a push", "tokens/s"] = logs[0].rates(begin[0], AROUND_MS)
    return reports, found


def mark(service: AsyncVLLM) -> list[float]:
    """The time now, by each replica's clock."""
    return ray.get([one.mark.remote() for one in service.actors], timeout=30)


def record(recorder: Recorder, case: str, system: str, reports: list[dict[str, float]]) -> None:
    """Adds every phase that took any time."""
    for name in reports[0]:
        samples = [1e3 * one[name] for one in reports]
        if name == "plan":
            print(case, system, "by plan" if all(samples) else "layerwise", flush=True)
        elif any(samples):
            metric = name.removesuffix("_s")
            recorder.add(case=case, system=system, metric=metric, unit="ms", samples=samples)


def compare(
    service: AsyncVLLM, trainer: Any, system: str, options: Any, args: argparse.Namespace
) -> None:
    """Trains, pushes, and compares what the engines compute with the trainer."""
    trainer.call("train", args.systems.index(system))
    trainer.call("push", service, system, options, 1)
    wanted = torch.tensor(trainer.call("log_probs", PROBE))
    for index in range(args.replicas):
        difference = (answers(service, index)[0] - wanted).abs().mean().item()
        print(f"{system}, replica {index}: log-probabilities differ by {difference:.4g}")
        most = MOST_DIFFERENCE[args.quantization or str(service.engine_args.dtype)]
        assert difference < most, f"replica {index} differs by {difference}"


def check(service: AsyncVLLM, trainer: Any, args: argparse.Namespace) -> None:
    """Compares the parameters and tokens of the last system's push with those of a reload."""
    before = [answers(service, index)[1] for index in range(args.replicas)]
    options: dict[str, Any] = {"verify": "always", "bucket_bytes": args.bucket_mib * 2**20}
    other, options = ("memmap", {}) if args.beside else ("broadcast", options)  # NCCL needs its own
    (report,) = trainer.call("push", service, other, options, 1, timeout=200)
    if torch.cuda.is_available() and other == "broadcast" and not args.quantization:
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

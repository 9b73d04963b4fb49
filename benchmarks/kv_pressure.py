"""Answers that outgrow the KV cache: how many requests to run, and how often one is preempted.

All requests are there at once, their answers 16 to 1,024 tokens long (log-normal), and the KV cache
holds a part of them. ``vllm`` admits what fits at the moment, its default; ``watermark`` leaves a
twentieth of the blocks to those that run; the others run a fixed number of requests at once, as one
would by hand. Tokens per second, and preemptions per request. One engine after another; the same
requests for all.

``python -m benchmarks.kv_pressure`` takes minutes, ``--smoke`` half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.live_engines import counts, engine_options, launch, record_name
from benchmarks.record import Recorder

MAX_TOKENS, PROMPT_TOKENS, BLOCK_TOKENS = 1024, 60, 32


def workload(num_requests: int, max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Random prompts, and the lengths of their answers."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(5, 250, (num_requests, PROMPT_TOKENS)).tolist()
    lengths = np.clip(generator.lognormal(5, 0.8, num_requests), 16, max_tokens)
    return prompts, lengths.astype(int).tolist()


def main(argv: list[str] | None = None) -> Path:
    """Runs the benchmark and returns the path of its record."""
    from vllm import SamplingParams

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few short requests")
    parser.add_argument("--shape", help="of the model on GPUs", default="1.7b" if on_gpu else None)
    parser.add_argument("--requests", type=int, default=1500 if on_gpu else 192)
    parser.add_argument("--fits", type=int, help="whole answers", default=64 if on_gpu else 8)
    parser.add_argument("--at-once", type=int, nargs="*", help="fixed numbers; around what fits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="directory of the record")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.requests, arguments.at_once, arguments.rounds = 24, [], 1
    fixed = arguments.at_once
    if fixed is None:
        fixed = [arguments.fits * more // 2 for more in (3, 6, 10)]
    max_tokens = 128 if arguments.smoke else MAX_TOKENS
    blocks = arguments.fits * -(-(PROMPT_TOKENS + max_tokens) // BLOCK_TOKENS)
    max_model_len = PROMPT_TOKENS + max_tokens + BLOCK_TOKENS
    prompts, lengths = workload(arguments.requests, max_tokens)
    params = [SamplingParams(max_tokens=one, ignore_eos=True) for one in lengths]
    recorder = Recorder(record_name("kv_pressure", arguments.shape))
    recorder.check(smoke=arguments.smoke)
    case = f"{arguments.requests} requests, {arguments.fits} whole ones fit"
    ray.init(address="local", include_dashboard=False, logging_level="error")
    systems: dict[str, dict[str, Any]] = {"vllm": {}, "watermark": {"watermark": 0.05}}
    systems |= {f"{one} at once": {"max_num_seqs": one} for one in fixed}
    for system, own in systems.items():
        options = engine_options(
            execution="graphs", max_model_len=max_model_len, max_num_seqs=arguments.requests
        )
        options |= {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": blocks, **own}
        with (
            tempfile.TemporaryDirectory() as directory,
            launch(Path(directory), arguments.shape, 1, options) as service,
        ):
            rates, preempted = list[float](), list[float]()
            for _ in range(arguments.rounds + 1):
                before, begin = counts(service), time.perf_counter()
                outputs = service.generate(prompts, params, use_tqdm=False)
                rates.append(sum(lengths) / (time.perf_counter() - begin))
                preempted.append((counts(service) - before).preempted / len(prompts))
                assert [len(one.outputs[0].token_ids) for one in outputs] == lengths
        for metric, unit, samples in (
            ("throughput", "tokens/s", rates[1:]),
            ("preemptions", "a request", preempted[1:]),
        ):
            recorder.add(case=case, system=system, metric=metric, unit=unit, samples=samples)
            print(f"{system:16} {metric:12} {statistics.median(samples):10.4g} {unit}", flush=True)
    ray.shutdown()
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    print(main(sys.argv[1:]))

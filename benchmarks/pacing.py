"""Rollouts at the pace of training, and requests at the pace of the KV cache: what both keep.

Three systems train on as many rows of the same prompts, one after the other over one service:
``synchronous``, ``paced`` (``max_staleness=2``), and ``discarding``, which keeps as many rows under
way but trains on what ends first and drops what is too old by then. Each batch is followed by a
push of weights that are a thousandth off. No row of the first two may be too old, each prompt must
come once, and the lengths of paced rows must be those of synchronous ones (Kolmogorov and Smirnov's
test, p > 0.01), which those of ``discarding`` must not be.

``--kv`` offers an engine with a small cache 1, 2, 4 and 8 times what it holds. Of that ``ours``
takes in what will fit when it has grown; ``vllm`` takes in what fits at the moment, with a fixed
number of requests in flight. At most 1 % may be preempted, at 0.97 of the speed of the best fixed
number that is no more than what is offered, by medians. What does not hold is an error at the end.
``python -m benchmarks.pacing --model FOLDER`` takes six minutes on a GPU, ``--smoke`` half a one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import Bench, Case, Learner, Task
from benchmarks.live_engines import counted_actor, counts, engine_options, local_ray, start
from benchmarks.phases import Clock
from benchmarks.record import Recorder, parser_of, refuse_less
from tests.engine.paced import Trained, discard, in_order, same, train
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

# Requests in flight, of what the cache holds: those that are offered, and fixed numbers.
LOADS, FIXED = (1.0, 2.0, 4.0, 8.0), (0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
PROMPT_TOKENS, BLOCK_TOKENS = 128, 32


def ask(number: int) -> str:
    return f"{number}. Tell me of the number {number} in {1 + 7 * number % 40} sentences."


@torch.no_grad()
def change(model: Any) -> None:
    for one in model.parameters():
        one.mul_(1 + 1e-3 * torch.randn_like(one))


def rollouts(arguments: argparse.Namespace, recorder: Recorder) -> Iterator[tuple[str, bool]]:
    """Measures the systems; yields promises, and whether they were kept."""
    rows, lengths = arguments.batch, dict[str, list[int]]()
    num_batches = -(-arguments.rows // rows)
    case = Case("", rows, arguments.max_tokens, group=1)
    with start(arguments.checkpoint, **arguments.options) as service:
        for system, staleness in {"synchronous": 0, "paced": 2, "discarding": 2}.items():
            torch.manual_seed(0)
            learner, discards = Learner(arguments.checkpoint, Clock()), system == "discarding"
            bench = Bench(service, learner, case, Task(iter(()), arguments.sampling))
            trained = Trained(service, bench.updater, partial(change, learner.model))
            trained.updater.push_weights()
            begin, way = time.perf_counter(), discard if discards else train
            dropped = way(trained, bench.policy(), num_batches, rows, staleness, ask=ask) or 0
            found = lengths[system] = trained.lengths
            ages = Counter(one for each in trained.ages for one in each)
            p_value = same(lengths["synchronous"], found)
            told = f"{len(found)} rows of up to {case.tokens} tokens"
            for metric, unit, samples in (
                ("length", "tokens", found),
                ("rows of each age, from 0", "rows", [ages[one] for one in range(max(ages) + 1)]),
                ("rows discarded", "rows", [dropped]),
                ("lengths are the synchronous ones", "p", [p_value]),
                ("trained", "tokens/s", [sum(found) / (time.perf_counter() - begin)]),
            ):
                recorder.add(case=told, system=system, metric=metric, unit=unit, samples=samples)
            trained.updater.disconnect()
            if discards:
                yield f"{system}: other lengths", p_value < 0.01
                continue
            yield f"{system}: none too old", max(ages) <= staleness
            yield f"{system}: each prompt once", trained.asked == in_order(num_batches, rows)
            yield f"{system}: the same lengths", p_value > 0.01


async def answered(service: Any, prompts: Any, params: Any, at_once: int) -> int:
    """Tokens of the answers, with so many requests in flight."""
    door = asyncio.Semaphore(at_once)

    async def one(ids: list[int], own: Any) -> int:
        async with door:
            output = await service.agenerate(prompt_token_ids=ids, sampling_params=own)
        return len(output.outputs[0].token_ids)

    return sum(await asyncio.gather(*map(one, prompts, params)))


def fitting(arguments: argparse.Namespace, recorder: Recorder) -> Iterator[tuple[str, bool]]:
    """Measures what is preempted at each load; yields promises, and whether they were kept."""
    from vllm import SamplingParams

    learner, num = Learner(arguments.checkpoint, Clock()), arguments.rows
    seeds = range(num) if arguments.model is None else [None] * num
    params = [SamplingParams(**arguments.sampling | {"seed": one}) for one in seeds]
    cache = arguments.holds * arguments.tokens // BLOCK_TOKENS
    options = arguments.options | {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": cache}
    found = defaultdict[tuple[str, float, str, str], list[float]](list)
    for system, loads in (("vllm", FIXED), ("ours", LOADS)) * arguments.rounds:
        options["additional_config"] = {"fit_kv_cache": system == "ours"}
        with start(arguments.checkpoint, actor_class=counted_actor(), **options) as service:
            task = Task(({"query": [ask(at)]} for at in range(num)), {})
            prompts = Bench(service, learner, Case("", num, 0, group=1), task).asked()
            asyncio.run(answered(service, prompts[: 2 * arguments.holds], params, len(prompts)))
            for load in loads[1:3] if arguments.smoke else loads:
                before, begin = counts(service), time.perf_counter()
                at_once = int(load * arguments.holds)
                num_tokens = asyncio.run(answered(service, prompts, params, at_once))
                speed = num_tokens / (time.perf_counter() - begin)
                share = (counts(service) - before).preempted / len(prompts)
                print(f"{system} {load:g}: {speed:.0f} tokens/s, {share:.4f} preempted", flush=True)
                found[system, load, "throughput", "tokens/s"].append(speed)
                found[system, load, "preempted", "a request"].append(share)
                found[system, load, "length", "tokens"].append(num_tokens / len(prompts))
    for (system, load, metric, unit), samples in found.items():
        case = f"{load:g} times what the cache holds"
        recorder.add(case=case, system=system, metric=metric, unit=unit, samples=samples)
        if system == "vllm":
            continue
        if metric == "preempted":
            yield f"{case}: at most 1 % preempted", max(samples) <= 0.01
        if metric == "throughput":
            fixed = [found["vllm", fewer, metric, unit] for fewer in FIXED if fewer <= load]
            best = max(median(one) for one in fixed if one)
            yield f"{case}: at 0.97 of the best speed", median(samples) >= 0.97 * best


def main(argv: list[str] | None = None) -> Path:
    real = torch.cuda.is_available()
    parser = parser_of(__doc__, "few and short rows of the tiny model, whose promises are not kept")
    parser.add_argument("--kv", action="store_true", help="requests in flight and the KV cache")
    parser.add_argument("--rounds", type=int, default=3, help="of --kv, with each system in turn")
    parser.add_argument("--model", type=Path, help="a checkpoint; else a tiny random model")
    parser.add_argument("--rows", type=int, help="of each system; 10,240, or 480 of the tiny one")
    parser.add_argument("--batch", type=int, default=640 if real else 16, help="rows of a step")
    parser.add_argument("--max-tokens", type=int, default=1024 if real else 200)
    parser.add_argument("--holds", type=int, default=256 if real else 32, help="requests")
    parser.add_argument("--tokens", type=int, default=320 if real else 120, help="of each")
    arguments = parser.parse_args(argv)
    refuse_less(parser, arguments, rounds=1)
    if arguments.smoke:
        arguments.rows, arguments.max_tokens, arguments.holds, arguments.tokens = 64, 60, 4, 80
        arguments.rounds = 1
    elif arguments.rows is None:
        arguments.rows = 8 * arguments.holds if arguments.kv else 10_240 if real else 480
    most = 8 * arguments.holds if arguments.kv else 3 * arguments.batch
    room = arguments.max_tokens + PROMPT_TOKENS
    options = engine_options(execution="graphs", max_model_len=room, max_num_seqs=most)
    arguments.options = options | {"load_format": "auto"}
    if real:
        arguments.options["gpu_memory_utilization"] = 0.6  # the trainer has the rest
    arguments.sampling = {"max_tokens": arguments.max_tokens, "temperature": 1.0, "min_tokens": 16}
    if arguments.model is None:  # some tokens end an answer
        ends = [*range(40, 46 if arguments.kv else 56)]
        arguments.sampling |= {"seed": 0, "min_tokens": 0, "stop_token_ids": ends}
    recorder = Recorder("pacing_kv" if arguments.kv else "pacing")
    recorder.check(smoke=arguments.smoke)
    set_list_to_stack(True).set()
    with local_ray(), tempfile.TemporaryDirectory() as directory:
        tiny = make_tiny_checkpoint(directory, diverse=not arguments.kv)
        arguments.checkpoint = arguments.model or tiny
        kept = dict((fitting if arguments.kv else rollouts)(arguments, recorder))
    recorder.notes += [f"{name}: {holds}" for name, holds in kept.items()]
    path = recorder.write(smoke=arguments.smoke, directory=arguments.out)
    if not arguments.smoke and not all(kept.values()):
        sys.exit("; ".join(name for name, holds in kept.items() if not holds))
    return path


if __name__ == "__main__":
    main(sys.argv[1:])

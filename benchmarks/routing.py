"""Which replica gets a request: routing policies on simulated clusters, paired over seeds.

Every policy gets the same requests, byte for byte, of each trace and seed
(``routing_sim.traces``); engines are vLLM's scheduler in simulated time (``routing_sim.engine``).
The record has one sample a seed, in the same order for all policies, so differences are paired;
``python -m benchmarks.routing_report`` makes a table and a plot of it. Numbers are explained in
``routing_sim.simulate``, policies in ``routing_sim.policies``.

``python -m benchmarks.routing`` runs everything, ``--smoke`` small traces in seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.record import Recorder, add_choice, parser_of, refuse_less
from benchmarks.routing_sim.engine import COSTS
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import UNITS, simulate
from benchmarks.routing_sim.traces import TRACES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SMOKE_SEEDS = 2

Task: TypeAlias = tuple[str, str, int, bool]  # trace, policy, seed, and whether it is small


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    recorder = Recorder("routing")
    recorder.check(smoke=args.smoke)
    begin = time.perf_counter()
    tasks = list(product(args.traces, args.policies, range(args.seeds), [args.smoke]))
    results = dict(zip(tasks, run_all(tasks, args.workers), strict=True))
    for trace, policy in product(args.traces, args.policies):
        by_seed = [results[trace, policy, seed, args.smoke] for seed in range(args.seeds)]
        for metric, unit in UNITS.items():
            samples = [float(f"{numbers[metric]:.6g}") for numbers in by_seed]
            recorder.add(case=trace, system=policy, metric=metric, unit=unit, samples=samples)
    print(f"{len(tasks)} runs simulated in {time.perf_counter() - begin:.1f} s")
    recorder.write(smoke=args.smoke, directory=args.out)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "small traces, meaning little")
    add_choice(parser, "--traces", TRACES)
    add_choice(parser, "--policies", POLICIES)
    parser.add_argument(
        "--seeds", type=int, help=f"how many; 5 unless given, {SMOKE_SEEDS} with --smoke"
    )
    parser.add_argument("--workers", type=int, help="processes, one for each core if not given")
    args = parser.parse_args(argv)
    if args.seeds is None:
        args.seeds = SMOKE_SEEDS if args.smoke else 5
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0))
    refuse_less(parser, args, seeds=1, workers=1)
    return args


def run_all(tasks: Sequence[Task], workers: int) -> list[dict[str, float]]:
    """The results of :func:`run_task` for each of them, in order."""
    if workers == 1:
        return [run_task(task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(run_task, tasks))


def run_task(task: Task) -> dict[str, float]:
    """The numbers of one policy on one trace of one seed."""
    trace, policy, seed, smoke = task
    return simulate(TRACES[trace](seed, smoke), COSTS, POLICIES[policy], seed).metrics


if __name__ == "__main__":
    raise SystemExit(main())

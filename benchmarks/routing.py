"""Which replica gets a request: routing policies on simulated clusters, paired over seeds.

Every policy gets the same requests, byte for byte, of each trace and seed
(``routing_sim.traces``); engines are simulated by vLLM's scheduling rules (``routing_sim.engine``).
The record has one sample a seed, in the same order for all policies, so differences are paired;
``python -m benchmarks.routing_report`` makes a table and a plot of it. Numbers are explained in
``routing_sim.simulate``, policies in ``routing_sim.policies``.

``python -m benchmarks.routing`` runs everything, ``--smoke`` small traces in seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.record import Recorder
from benchmarks.routing_sim.costs import COSTS
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import UNITS, Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, make_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

SMOKE_SEEDS = 2

Task: TypeAlias = tuple[str, int, tuple[str, ...], bool]
"""A trace's name, a seed, the policies, and whether the trace is to be small."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and writes the record."""
    args = parse(argv)
    recorder = Recorder("routing")
    recorder.check(smoke=args.smoke)
    begin = time.perf_counter()
    policies = tuple(args.policies)
    tasks = [
        (trace, seed, policies, args.smoke) for trace in args.traces for seed in range(args.seeds)
    ]
    results = run_all(tasks, args.workers)
    for number, trace in enumerate(args.traces):
        by_seed = results[number * args.seeds : (number + 1) * args.seeds]
        for policy in policies:
            for metric, unit in UNITS.items():
                samples = [float(f"{numbers[policy][metric]:.6g}") for numbers in by_seed]
                recorder.add(case=trace, system=policy, metric=metric, unit=unit, samples=samples)
        print_trace(trace, policies, by_seed)
    print(
        f"\n{len(args.traces)} traces x {args.seeds} seeds x {len(policies)} policies simulated "
        f"in {time.perf_counter() - begin:.1f} s\n"
    )
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, known in (("--traces", TRACES), ("--policies", POLICIES)):
        parser.add_argument(
            option,
            nargs="+",
            default=list(known),
            choices=list(known),
            metavar=option[2:-1].upper(),
            help=f"of {', '.join(known)}; all unless named",
        )
    parser.add_argument(
        "--seeds", type=int, help=f"how many; 10 unless given, {SMOKE_SEEDS} with --smoke"
    )
    parser.add_argument("--workers", type=int, help="processes, one for each core if not given")
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="small traces, meaning little")
    args = parser.parse_args(argv)
    if args.seeds is None:
        args.seeds = SMOKE_SEEDS if args.smoke else 10
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0))
    for name in ("seeds", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def run_all(tasks: Sequence[Task], workers: int) -> list[dict[str, dict[str, float]]]:
    """The results of :func:`run_task` for each of them, in order."""
    if workers == 1:
        return [run_task(task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(run_task, tasks))


def run_task(task: Task) -> dict[str, dict[str, float]]:
    """All policies on one trace of one seed: the numbers of each."""
    trace, seed, policies, smoke = task
    prepared = Prepared(make_trace(trace, seed, smoke=smoke), COSTS)
    return {one: simulate(prepared, POLICIES[one], seed).metrics for one in policies}


def print_trace(
    trace: str, policies: Sequence[str], by_seed: Sequence[dict[str, dict[str, float]]]
) -> None:
    """Prints means over the seeds of one trace."""
    print(f"\n{trace}: means of {len(by_seed)} seeds")
    columns = ("makespan", "hit_rate", "latency_p99", "imbalance")
    print(f"  {'':14}" + "".join(f"{name:>14}" for name in columns))
    print(f"  {'':14}" + "".join(f"{UNITS[name]:>14}" for name in columns))
    for policy in policies:
        means = [fmean(numbers[policy][name] for numbers in by_seed) for name in columns]
        print(f"  {policy:14}" + "".join(f"{mean:14.3f}" for mean in means))


if __name__ == "__main__":
    raise SystemExit(main())

"""Which replica gets a request: routing policies on simulated clusters, paired over seeds.

Every policy gets the same requests, byte for byte, of each trace and seed
(``routing_sim.traces``); engines are simulated by vLLM's scheduling rules with the costs of
``--costs`` (``routing_sim.model``). The record has one sample a seed, in the same order for all
policies, so differences are paired; ``python -m benchmarks.routing_report`` makes tables and plots
of it.

``python -m benchmarks.routing`` runs everything, ``--smoke`` small traces in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.record import Recorder
from benchmarks.routing_sim.costs import PRESETS, costs_named
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.results import UNITS
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, make_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SMOKE_SEEDS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and writes the record."""
    args = parse(argv)
    recorder = Recorder("routing")
    begin = time.perf_counter()
    tasks = list(itertools.product(args.traces, range(args.seeds)))
    arguments = [(trace, seed, args.policies, args.costs, args.smoke) for trace, seed in tasks]
    results = dict(zip(tasks, run_all(arguments, args.workers), strict=True))
    for trace in args.traces:
        by_seed = [results[trace, seed] for seed in range(args.seeds)]
        for policy in args.policies:
            for metric, unit in UNITS.items():
                samples = [numbers[policy][metric] for numbers in by_seed]
                recorder.add(case=trace, system=policy, metric=metric, unit=unit, samples=samples)
        print_trace(trace, args.policies, by_seed)
    print(f"\n{len(tasks) * len(args.policies)} runs in {time.perf_counter() - begin:.1f} s")
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--seeds", type=int, help=f"how many, 10 if not --smoke: {SMOKE_SEEDS}")
    parser.add_argument("--workers", type=int, help="processes, one for each core if not given")
    parser.add_argument("--costs", default="facts-8b-h200", choices=list(PRESETS))
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="seconds, meaning little")
    args = parser.parse_args(argv)
    if args.seeds is None:
        args.seeds = SMOKE_SEEDS if args.smoke else 10
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0))
    for name in ("seeds", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def run_all(
    arguments: Sequence[tuple[str, int, Sequence[str], str, bool]], workers: int
) -> Iterable[dict[str, dict[str, float]]]:
    """The results of :func:`run_trace` for each of the arguments, in order."""
    if workers == 1:
        return itertools.starmap(run_trace, arguments)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(run_trace, *zip(*arguments, strict=True)))


def run_trace(
    trace: str, seed: int, policies: Sequence[str], costs: str, smoke: bool
) -> dict[str, dict[str, float]]:
    """All policies on one trace of one seed: the numbers of each."""
    prepared = Prepared(make_trace(trace, seed, smoke=smoke), costs_named(costs))
    numbers = {}
    for policy in policies:
        result = simulate(prepared, POLICIES[policy], seed)
        p50, p99 = result.decisions_us
        numbers[policy] = result.metrics | {"decision_p50": p50, "decision_p99": p99}
    return numbers


def print_trace(
    trace: str, policies: Sequence[str], by_seed: Sequence[dict[str, dict[str, float]]]
) -> None:
    """Means over the seeds of one trace."""
    print(f"\n{trace}: means of {len(by_seed)} seeds")
    columns = ("makespan", "bound_ratio", "hit_rate", "latency_p99", "imbalance", "decision_p50")
    print(f"  {'':26}" + "".join(f"{name:>14}" for name in columns))
    for policy in policies:
        means = [fmean(numbers[policy][name] for numbers in by_seed) for name in columns]
        print(f"  {policy:26}" + "".join(f"{mean:14.3f}" for mean in means))


if __name__ == "__main__":
    raise SystemExit(main())

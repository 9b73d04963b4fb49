"""Which replica gets a request: routing policies on simulated clusters, paired over seeds.

Every policy gets the same requests, byte for byte, of each trace and seed
(``routing_sim.traces``); engines are simulated by vLLM's scheduling rules with the costs of
``--costs`` (``routing_sim.model``). The record has one sample a seed, in the same order for all
policies, so differences are paired; ``python -m benchmarks.routing_report`` makes tables and plots
of it. Numbers are explained in ``routing_sim.results``, traces in ``routing_sim.traces``, policies
in ``routing_sim.policies``.

At the end the policies' decisions are timed by the real clock, one policy after the other. The time
of ``ours`` is that of this library's own balancer; ``routing_decisions`` has it as callers see it.

``python -m benchmarks.routing`` runs everything, ``--smoke`` small traces in seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.record import Recorder
from benchmarks.routing_sim.costs import PRESETS, costs_named
from benchmarks.routing_sim.decisions import DECISION_CASES, MIN_DECISIONS, decision_times
from benchmarks.routing_sim.mooncake import read_mooncake
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.results import UNITS
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, make_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.scenario import Scenario

SMOKE_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One trace of one seed, for all policies: the share of a worker."""

    trace: str
    seed: int
    policies: tuple[str, ...]
    costs: str
    smoke: bool
    mooncake: Path | None  # the file, if the trace is one
    mooncake_requests: int

    def scenario(self) -> Scenario:
        """The trace. Of a file each seed takes the next requests."""
        if self.mooncake is None:
            return make_trace(self.trace, self.seed, smoke=self.smoke)
        count = self.mooncake_requests
        return read_mooncake(self.mooncake, first=self.seed * count, count=count)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and writes the record."""
    args = parse(argv)
    recorder = Recorder("routing")
    recorder.check(smoke=args.smoke)
    begin = time.perf_counter()
    traces: dict[str, Path | None] = dict.fromkeys(args.traces)
    traces |= {path.stem: path for path in args.mooncake}
    tasks = [
        Task(
            trace, seed, tuple(args.policies), args.costs, args.smoke, path, args.mooncake_requests
        )
        for trace, path in traces.items()
        for seed in range(args.seeds)
    ]
    results = run_all(tasks, args.workers)
    for number, trace in enumerate(traces):
        by_seed = results[number * args.seeds : (number + 1) * args.seeds]
        for policy in args.policies:
            for metric, unit in UNITS.items():
                samples = [float(f"{numbers[policy][metric]:.6g}") for numbers in by_seed]
                recorder.add(
                    case=trace,
                    system=policy,
                    metric=metric,
                    unit=unit,
                    samples=samples,
                    costs=args.costs,
                )
        print_trace(trace, args.policies, by_seed)
    print(
        f"\n{len(traces)} traces x {args.seeds} seeds x {len(args.policies)} policies simulated "
        f"in {time.perf_counter() - begin:.1f} s\n"
    )
    add_decisions(recorder, args.policies, 1 if args.smoke else 5)
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces",
        nargs="*",
        default=list(TRACES),
        choices=list(TRACES),
        metavar="TRACE",
        help=f"of {', '.join(TRACES)}; all unless named; none with --traces alone",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        choices=list(POLICIES),
        metavar="POLICY",
        help=f"of {', '.join(POLICIES)}; all unless named",
    )
    parser.add_argument(
        "--seeds", type=int, help=f"how many; 10 unless given, {SMOKE_SEEDS} with --smoke"
    )
    parser.add_argument("--workers", type=int, help="processes, one for each core if not given")
    parser.add_argument(
        "--costs",
        default="fitted-8b-h200",
        choices=list(PRESETS),
        help="what an engine's steps take, by default %(default)s",
    )
    parser.add_argument(
        "--mooncake", nargs="+", type=Path, default=[], help="more traces, in Mooncake's JSONL"
    )
    parser.add_argument(
        "--mooncake-requests",
        type=int,
        default=1000,
        help="requests of a file for each seed, by default %(default)s",
    )
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="small traces, meaning little")
    args = parser.parse_args(argv)
    if args.seeds is None:
        args.seeds = SMOKE_SEEDS if args.smoke else 10
    if args.workers is None:
        args.workers = len(os.sched_getaffinity(0))
    for name in ("seeds", "workers", "mooncake_requests"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least 1, got {getattr(args, name)}")
    if not args.traces and not args.mooncake:
        parser.error("there is no trace to run")
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
    prepared = Prepared(task.scenario(), costs_named(task.costs))
    numbers = {}
    for policy in task.policies:
        result = simulate(prepared, POLICIES[policy], task.seed)
        p50, p99 = result.decisions_us
        numbers[policy] = result.metrics | {"decision_p50": p50, "decision_p99": p99}
    return numbers


def add_decisions(recorder: Recorder, policies: Sequence[str], repetitions: int) -> None:
    """Times the decisions of each policy, one after the other, when nothing else runs."""
    for case in DECISION_CASES:
        for policy in policies:
            times = [
                decision_times(POLICIES[policy], case, MIN_DECISIONS, seed)
                for seed in range(repetitions)
            ]
            for metric, samples in zip(
                ("decision_p50", "decision_p99"), zip(*times, strict=True), strict=True
            ):
                recorder.add(case=case, system=policy, metric=metric, unit="µs", samples=samples)
            print(f"{case}: {policy} decides in {times[0][0]:.1f} µs (p99 {times[0][1]:.1f})")


def print_trace(
    trace: str, policies: Sequence[str], by_seed: Sequence[dict[str, dict[str, float]]]
) -> None:
    """Prints means over the seeds of one trace; ``routing_sim.results`` explains them."""
    print(f"\n{trace}: means of {len(by_seed)} seeds")
    columns = ("makespan", "bound_ratio", "hit_rate", "latency_p99", "imbalance", "decision_p50")
    print(f"  {'':26}" + "".join(f"{name:>14}" for name in columns))
    print(f"  {'':26}" + "".join(f"{UNITS[name]:>14}" for name in columns))
    for policy in policies:
        means = [fmean(numbers[policy][name] for numbers in by_seed) for name in columns]
        print(f"  {policy:26}" + "".join(f"{mean:14.3f}" for mean in means))


if __name__ == "__main__":
    raise SystemExit(main())

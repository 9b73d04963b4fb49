"""Fits the routing simulation's engine to a real one, and says how far off it is.

``python -m benchmarks.routing_calibrate --shape 8b`` starts one engine with random weights in this
process, times its steps over batch sizes, context lengths and prompt lengths (``decode``,
``prefill`` on an idle engine, ``mixed`` beside requests that decode), and fits
``benchmarks.routing_sim.costs.EngineCosts`` to them. Then single-turn GRPO and multi-turn agents
run on the engine and in the simulation; how much makespan, hit rate and latency differ is the error
of the calibration.

Without ``--shape``, a tiny checkpoint on a CPU. ``--smoke`` is that in a minute, and means nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import live_engines
from benchmarks.live_probe import Probe
from benchmarks.live_traffic import FIRST_ID
from benchmarks.record import Recorder
from benchmarks.routing_sim import calibration, traces
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.workload import Session
from benchmarks.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.routing_sim.calibration import Fit, Limits, Measurement
    from benchmarks.routing_sim.costs import EngineCosts
    from benchmarks.routing_sim.scenario import Scenario

MEASURE_TIMEOUT_S = 600.0
FREE_TOKENS = (0, 32, 64, 128, 256)
UNITS = {
    "makespan": "s",
    "hit_rate": "fraction",
    "latency_p50": "s",
    "latency_p99": "s",
    "num_steps": "steps",
}
"""What is compared between engine and simulation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and the traces that check it.

    Attributes:
        max_model_len: Most tokens of a request.
        max_num_seqs: Most requests in a step.
        decode: Batch sizes and context lengths.
        prefill: Prompt lengths.
        mixed: Batch sizes, context lengths and prompt lengths.
        grpo: Arguments of ``traces.grpo``.
        agents: Arguments of ``traces.agents``.
        passes: How often each step is measured: other work on the machine only slows it down.
    """

    max_model_len: int
    max_num_seqs: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    mixed: tuple[tuple[int, int, int], ...]
    grpo: dict[str, Any]
    agents: dict[str, Any]
    passes: int = 1


SMOKE = Plan(
    max_model_len=2048,
    max_num_seqs=32,
    decode=((1, 64), (8, 64), (8, 512), (32, 64)),
    prefill=(64, 512, 1500),
    mixed=((8, 64, 256), (8, 64, 1024)),
    grpo={
        "num_groups": 4,
        "group_size": 4,
        "concurrency": 12,
        "prompt_median": 200.0,
        "output_median": 20.0,
        "max_output": 100,
    },
    agents={
        "num_groups": 2,
        "group_size": 2,
        "concurrency": 4,
        "system_len": 300,
        "task_median": 60.0,
        "mean_turns": 2.0,
        "output_median": 10.0,
        "tool_median": 30.0,
        "tool_s_median": 0.02,
        "max_context": 1500,
    },
)
CPU = Plan(
    passes=3,
    max_model_len=2048,
    max_num_seqs=32,
    decode=tuple((batch, context) for batch in (1, 4, 16, 32) for context in (32, 512, 1500)),
    prefill=(32, 128, 512, 1024, 1500, 1900),
    mixed=tuple((batch, 128, length) for batch in (4, 16, 31) for length in (64, 512, 1800)),
    grpo={
        "num_groups": 24,
        "concurrency": 64,
        "prompt_median": 300.0,
        "output_median": 60.0,
        "max_output": 500,
    },
    agents={
        "num_groups": 8,
        "group_size": 4,
        "concurrency": 12,
        "system_len": 500,
        "task_median": 100.0,
        "mean_turns": 4.0,
        "output_median": 40.0,
        "tool_median": 60.0,
        "tool_s_median": 0.1,
        "max_context": 1900,
    },
)
GPU = Plan(
    max_model_len=16_384,
    max_num_seqs=256,
    decode=(
        (1, 128),
        (8, 128),
        (32, 128),
        (64, 128),
        (128, 128),
        (256, 128),
        (1, 8000),
        (8, 4000),
        (32, 1500),
        (32, 5000),
        (128, 1000),
    ),
    prefill=(32, 128, 256, 512, 1024, 2048, 4096, 8192, 15_000),
    mixed=((32, 500, 128), (32, 500, 512), (32, 500, 1800), (128, 250, 512), (128, 250, 1800)),
    grpo={"num_groups": 32, "concurrency": 192, "output_median": 250.0, "max_output": 1200},
    agents={
        "num_groups": 4,
        "concurrency": 24,
        "mean_turns": 6.0,
        "output_median": 150.0,
        "tool_s_median": 0.5,
        "max_context": 12_000,
    },
)


async def measure(probe: Probe, plan: Plan) -> list[Measurement]:
    """Times the plan's steps, after a few that do not count; of several passes the fastest."""
    await probe.decode(4, 32)
    await probe.prefill(max(plan.prefill), rounds=1)
    passes = []
    for _ in range(plan.passes):
        found = [await probe.decode(*one) for one in plan.decode]
        found += [await probe.prefill(one) for one in plan.prefill]
        found += [await probe.mixed(*one) for one in plan.mixed]
        passes.append(found)
    return [min(same, key=lambda one: one.seconds) for same in zip(*passes, strict=True)]


def checks(plan: Plan, vocab_size: int) -> list[Scenario]:
    """The traces that check the model, on one replica and in the engine's words."""
    made = (
        traces.grpo(0, num_replicas=1, **plan.grpo),
        traces.agents(0, num_replicas=1, **plan.agents),
    )
    return [in_words(one, vocab_size, plan.max_model_len) for one in made]


def in_words(scenario: Scenario, vocab_size: int, max_model_len: int) -> Scenario:
    """The trace with ids of the vocabulary and answers of one token; what is too long is left out.

    A real engine can be made to give such an answer, so that the next turn finds it in the cache.
    """
    sessions = []
    for session in scenario.sessions:
        last = session.turns[-1]
        if last.prompt_len + last.output_len > max_model_len:
            continue
        tokens = FIRST_ID + session.tokens % (vocab_size - FIRST_ID)
        for turn in session.turns:
            tokens[turn.prompt_len : turn.prompt_len + turn.output_len] = tokens[turn.prompt_len]
        sessions.append(
            Session(session.session_id, session.group_id, tokens.astype(np.int32), session.turns)
        )
    return dataclasses.replace(scenario, sessions=tuple(sessions))


def record_fit(recorder: Recorder, found: list[Measurement], fitted: Fit, limits: Limits) -> None:
    """Adds the measurements and what the model says of them, and prints how well they agree."""
    order = {kind: iter(errors) for kind, errors in fitted.residuals.items()}
    for one in found:
        error = next(order[one.kind])
        amounts = {
            name: value
            for name, value in dataclasses.asdict(one).items()
            if name not in ("kind", "seconds")
        }
        for system, seconds in (("engine", one.seconds), ("model", one.seconds * (1 + error))):
            recorder.add(
                case=f"{one.kind} {one.decoding:g} x {one.context / max(one.decoding, 1):.0f}"
                f" + {one.prefill_tokens}",
                system=system,
                metric="step_time",
                unit="s",
                samples=[seconds],
                **amounts,
            )
        print(
            f"{one.kind:8} decoding {one.decoding:4g} context {one.context:9.0f} "
            f"prompt {one.prefill_tokens:6d}: {1e3 * one.seconds:8.2f} ms, model {error:+.1%}"
        )
    for kind, errors in fitted.residuals.items():
        worst = max(errors, key=abs)
        print(
            f"{kind:8} mean error {statistics.mean(map(abs, errors)):.1%}, worst {worst:+.1%}",
            flush=True,
        )
    for free_tokens in FREE_TOKENS:
        fewer = calibration.without_free(found, free_tokens)
        other = calibration.fit(fewer, limits)
        print(
            f"if {free_tokens} prompt tokens of each step cost nothing: "
            f"mean error {other.mean_error:.1%}"
        )
    for name, value in dataclasses.asdict(fitted.costs).items():
        if name != "origin":
            recorder.add(case="costs", system="model", metric=name, unit="-", samples=[value])
    print(fitted.costs)


async def compare(
    recorder: Recorder, probe: Probe, costs: EngineCosts, scenarios: list[Scenario], passes: int
) -> None:
    """Runs each trace on the engine and in the simulation, records both, prints the errors."""
    for scenario in scenarios:
        runs = [(await probe.run(scenario)).metrics for _ in range(passes)]
        result = simulate(Prepared(scenario, costs), POLICIES["round-robin"])
        simulated = {**result.metrics, "num_steps": result.num_steps}
        for metric, unit in UNITS.items():
            for system, found in (("engine", runs), ("simulation", [simulated])):
                recorder.add(
                    case=scenario.name,
                    system=system,
                    metric=metric,
                    unit=unit,
                    samples=[one[metric] for one in found],
                )
        real = min(runs, key=lambda one: one["makespan"])
        for metric in UNITS:
            error = simulated[metric] / real[metric] - 1
            print(
                f"{scenario.name:8} {metric:12} engine {real[metric]:8.3f}  "
                f"simulation {simulated[metric]:8.3f}  {error:+.1%}",
                flush=True,
            )


async def calibrate(
    recorder: Recorder, model: str, options: dict[str, Any], plan: Plan, name: str
) -> None:
    """Starts an engine, measures, fits and checks; an engine belongs to one event loop."""
    begin = time.perf_counter()
    probe = Probe(model, options)
    try:
        print(f"engine started in {time.perf_counter() - begin:.1f} s: {probe.limits}", flush=True)
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            found = await measure(probe, plan)
            print(f"measured after {time.perf_counter() - begin:.1f} s", flush=True)
            fitted = calibration.fit(found, probe.limits, f"{recorder.benchmark}, {name}")
            record_fit(recorder, found, fitted, probe.limits)
            scenarios = checks(plan, probe.vocab_size)
            await compare(recorder, probe, fitted.costs, scenarios, plan.passes)
    finally:
        probe.close()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape, on a GPU")
    parser.add_argument(
        "--execution",
        default="compiled",
        choices=live_engines.EXECUTIONS,
        help="how a GPU runs the model, by default %(default)s",
    )
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="a minute, on a CPU, meaning nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Calibrates, checks and writes the record."""
    args = parse(argv)
    recorder = Recorder(live_engines.record_name("routing_calibrate", args.shape))
    recorder.check(smoke=args.smoke)
    plan = GPU if args.shape else SMOKE if args.smoke else CPU
    options = live_engines.engine_options(
        execution=args.execution,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = live_engines.checkpoint(Path(directory), args.shape, plan.max_model_len)
        asyncio.run(calibrate(recorder, model, options, plan, args.shape or "tiny"))
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

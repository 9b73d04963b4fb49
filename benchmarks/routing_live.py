"""Routing on real engines: this library beside TorchRL's rule and round robin, in one run.

``python -m benchmarks.routing_live --shape 1.7b --replicas 4`` launches one service of replicas
with random weights, and sends it the same requests once for each system: GRPO groups of 8 samples,
conversations with several turns, strangers that share a long system prompt, and groups before and
after a weight update. Prefix caches are emptied in between, and each repetition begins with another
system. What was computed and what came from a prefix cache is read from vLLM's own counters.

``hit_rate`` is the share of prompt tokens that came from a prefix cache. ``prefilled_over_once``
are the computed ones over those of all prompts with common beginnings counted once; since vLLM
caches whole blocks only, ``prefilled_over_least`` compares with what one engine with an endless
cache would compute. ``imbalance`` is the most answers of one replica over the mean (the
simulation's is of loads over time). ``decision_p50`` is the time until a replica is chosen. The
case ``grpo-wrapper`` goes through ``vLLMWrapper``, which finds the groups in TorchRL's data; what
TorchRL's rule makes of a wrapper's prompts is the system ``torchrl, wrapper`` of the other cases.

Without ``--shape``, a tiny checkpoint on CPUs, which means nothing; ``--smoke`` is one repetition.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import live_engines
from benchmarks.live_systems import SYSTEMS, WRAPPED, group_rows, run_wrapped
from benchmarks.live_traffic import CASES, FORCING_BIAS, Scale, least_tokens, once_tokens
from benchmarks.record import Recorder, add_choice, parser_of, refuse_less
from benchmarks.shapes import SHAPES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.live_systems import System
    from benchmarks.live_traffic import Case, Conversation
    from torchrl_vllm_sync import AsyncVLLM

PUSH_TIMEOUT_S = 120.0
WRAPPED_CASE = "grpo-wrapper"
UPDATE_CASE = "grpo-update"
SMOKE = Scale(
    vocab_size=320,
    max_model_len=1024,
    groups=3,
    sessions=4,
    turns=2,
    concurrent=3,
    strangers=8,
    prompt=(600, 900),
    opening=200,
    reply=60,
    answer=(4, 8),
)
GPU = Scale(
    vocab_size=150_000,
    max_model_len=12_288,
    groups=48,
    sessions=64,
    turns=5,
    concurrent=48,
    strangers=512,
    prompt=(900, 2100),
    opening=6000,
    reply=600,
    answer=(64, 256),
)
UNITS = {
    "wall_time": "s",
    "hit_rate": "fraction",
    "prefilled_over_once": "ratio",
    "prefilled_over_least": "ratio",
    "latency_p50": "s",
    "latency_p99": "s",
    "imbalance": "ratio",
    "preemptions": "requests",
    "decision_p50": "µs",
    "decision_p99": "µs",
}


@dataclass(slots=True)
class Answers:
    """What came of one run."""

    outputs: list[Any] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0


async def ask(service: AsyncVLLM, system: System, case: Case) -> Answers:
    """Runs all conversations of a case, in each of its rounds."""
    from vllm import SamplingParams

    answers = Answers()
    door = asyncio.Semaphore(case.concurrent or len(case.conversations))

    async def converse(one: Conversation) -> None:
        async with door:
            for turn, length in enumerate(one.answers):
                params = SamplingParams(
                    max_tokens=length,
                    ignore_eos=True,
                    temperature=0.0,
                    logit_bias={one.token: FORCING_BIAS},
                    detokenize=False,
                )
                begin = time.perf_counter()
                answers.outputs.append(await system.answer(one, one.prompt(turn), params))
                answers.latencies_s.append(time.perf_counter() - begin)
            system.end(one)

    for number in range(case.rounds):
        if number:
            weights = live_engines.new_weights(service)
            await asyncio.to_thread(service.push_weights, weights, timeout_s=PUSH_TIMEOUT_S)
        begin = time.perf_counter()
        await asyncio.gather(*(converse(one) for one in case.conversations))
        answers.wall_s += time.perf_counter() - begin
    return answers


def run_case(service: AsyncVLLM, system: System, case: Case) -> dict[str, float]:
    """One system's figures of one case, by the names in ``UNITS``."""
    live_engines.reset(service)
    before = live_engines.counts(service)
    answers = asyncio.run(ask(service, system, case))
    counted = live_engines.counts(service) - before
    check(case, answers.outputs, counted)
    prompts = [
        (one, one.prompt(turn)) for one in case.conversations for turn in range(len(one.answers))
    ]
    decisions = system.time_decisions(prompts)
    served = Counter(output.replica_id for output in answers.outputs)
    return {
        "wall_time": answers.wall_s,
        "hit_rate": counted.cached / counted.prompt,
        "prefilled_over_once": counted.computed / (case.rounds * once_tokens(case.conversations)),
        "prefilled_over_least": counted.computed
        / (case.rounds * least_tokens(case.conversations, live_engines.block_size(service))),
        "latency_p50": quantile(answers.latencies_s, 0.5),
        "latency_p99": quantile(answers.latencies_s, 0.99),
        "imbalance": max(served.values()) * service.num_replicas / len(answers.outputs),
        "preemptions": counted.preempted,
        "decision_p50": 1e6 * quantile(decisions, 0.5),
        "decision_p99": 1e6 * quantile(decisions, 0.99),
    }


def run_named(service: AsyncVLLM, system: str, case: Case) -> dict[str, float]:
    """The same for a system that begins with nothing remembered."""
    return run_case(service, SYSTEMS[system](service), case)


def check(case: Case, outputs: list[Any], counted: live_engines.PrefillCounts) -> None:
    """Compares answers with the case, and vLLM's counters with its outputs."""
    asked = sum(
        len(one.prompt(turn)) for one in case.conversations for turn in range(len(one.answers))
    )
    made = sum(sum(one.answers) for one in case.conversations)
    found = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert found == case.rounds * made, f"{found} tokens in answers, not {case.rounds * made}"
    assert counted.prompt == case.rounds * asked, f"{counted} for {case.rounds * asked} tokens"
    cached = sum(output.num_cached_tokens for output in outputs)
    assert counted.cached == cached, f"{counted}, but outputs say {cached} tokens were cached"


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of all lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def measure(
    recorder: Recorder,
    runs: dict[str, dict[str, Callable[[], dict[str, float]]]],
    repetitions: int,
    deadline: float,
) -> None:
    """Runs every system on every case, in another order each time, and records all figures.

    A repetition that would hardly end before ``deadline``, by ``time.perf_counter()``, is not
    begun; the first always is.
    """
    figures: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    taken_s = 0.0
    for number in range(repetitions):
        begin = time.perf_counter()
        if begin + taken_s > deadline:
            print(f"{number} of {repetitions} repetitions fit into the time")
            break
        for case, systems in runs.items():
            order = [*systems]
            first = number % len(order)
            for name in order[first:] + order[:first]:
                figures[case, name].append(systems[name]())
        taken_s = time.perf_counter() - begin
    for (case, name), found in figures.items():
        for metric in found[0]:
            what = {"case": case, "system": name, "metric": metric, "unit": UNITS[metric]}
            recorder.add(**what, samples=[one[metric] for one in found])


def wrapped_runs(service: AsyncVLLM, scale: Scale) -> dict[str, Callable[[], dict[str, float]]]:
    """Calls of ``vLLMWrapper``, which finds groups in TorchRL's data, by system."""
    rows = group_rows(scale.groups, scale.prompt[1])
    run_wrapped(service, rows, 1, strategy=None, find_sessions=True)  # to warm TorchRL up
    call = partial(run_wrapped, service, rows, scale.answer[0])
    return {
        name: partial(call, strategy=strategy, find_sessions=find_sessions)
        for name, (strategy, find_sessions) in WRAPPED.items()
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "a minute, on CPUs, meaning nothing")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape, on GPUs")
    parser.add_argument("--replicas", type=int, default=2, help="by default %(default)s")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="by default %(default)s; with --smoke always 1"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[*CASES, WRAPPED_CASE],
        metavar="CASE",
        help=f"of {', '.join((*CASES, WRAPPED_CASE))}; all if left out, but on GPUs not "
        f"{UPDATE_CASE}, whose pushes go through the CPU",
    )
    add_choice(parser, "--systems", SYSTEMS)
    parser.add_argument(
        "--execution",
        default="compiled",
        choices=live_engines.EXECUTIONS,
        help="how a GPU runs the model, by default %(default)s",
    )
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, help="begin no repetition that would end later"
    )
    args = parser.parse_args(argv)
    refuse_less(parser, args, replicas=1, repetitions=1)
    if args.smoke:
        args.repetitions = 1
    if args.cases is None:
        args.cases = [one for one in (*CASES, WRAPPED_CASE) if not args.shape or one != UPDATE_CASE]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.perf_counter() + args.limit_s
    recorder = Recorder(live_engines.record_name("routing_live", args.shape))
    recorder.check(smoke=args.smoke)
    scale = GPU if args.shape else SMOKE
    options = live_engines.engine_options(
        execution=args.execution,
        max_model_len=scale.max_model_len,
        max_num_seqs=256 if args.shape else 32,
    )
    with live_engines.local_ray(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with live_engines.launch(path, args.shape, args.replicas, options) as service:
            runs = {}
            for name in args.cases:
                if name == WRAPPED_CASE:
                    runs[name] = wrapped_runs(service, scale)
                    continue
                case = CASES[name](scale)
                runs[name] = {one: partial(run_named, service, one, case) for one in args.systems}
            measure(recorder, runs, args.repetitions, deadline)
    recorder.write(smoke=args.smoke, directory=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

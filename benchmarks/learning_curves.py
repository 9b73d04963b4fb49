"""Held-out accuracy over seconds of training: GRPO by this library, TorchRL's classes, and TRL.

Set-ups differ in their systems alone. They begin with the same weights, get the same problems in
the same order, and have the sizes, learning rate and clipping of ``tutorials/01_grpo_sync.py``:

- ``ours``: ``RolloutCollector``, ``GroupAdvantage``, ``RolloutStorage``, ``TrainerPolicy``, push.
- ``one-off``, ``four-off``: the same with ``max_staleness=1``, and ``4``.
- ``discarding``: as many rows under way as ``one-off``, and what is older when it ends dropped.
- ``torchrl-classes``: ``LLMCollector``, ``MCAdvantage``, ``LazyStackStorage`` and
  ``TransformersWrapper``; on two GPUs vLLM's own NCCL push, see ``peers/vllm_nccl.py``. Service,
  policy and ``TextReward`` are this library's.
- ``trl``: ``GRPOTrainer`` with its vLLM in the trainer's process, see ``peers/trl_grpo.py``: on one
  GPU, whose memory and time all set-ups' trainers and engines share where there is no other.

The clock stands still while engines start and while held-out problems are answered, greedily and by
the set-up's own engine, before the first step, every ``--every`` seconds, and after the last step.
What the systems do for the first time (kernels, memory) counts. Of a set-up's parallel samples each
is one evaluation; ``mean reward``, ``throughput`` and how busy GPUs were are of the time since the
one before it, and have one sample fewer. A step's phases are means of all steps. Accuracy is the
mean score of the task's scorer; reasoning-gym's gives a part for what is nearly right.

``python -m benchmarks.learning_curves --model FOLDER`` takes five minutes a set-up on GPUs,
and each set-up leaves a record of its own; ``--smoke`` takes half a minute.
``benchmarks.learning_curves_report`` draws the records in one picture.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import SYSTEMS, Bench, Case, Learner, Task, options_of
from benchmarks.live_engines import local_ray, record_name, start
from benchmarks.peers.trl_grpo import TRL
from benchmarks.peers.vllm_nccl import VLLMNCCLTransport
from benchmarks.phases import Clock
from benchmarks.record import Recorder, parser_of
from torchrl_vllm_sync.rl.statistics import GPUUse
from torchrl_vllm_sync.rl.tasks import Prompts, held_out, missing, prompts, reward, scorer
from torchrl_vllm_sync.testing import make_tiny_checkpoint
from tutorials.common.settings import PRESETS
from tutorials.common.task import evaluate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torchrl_vllm_sync import AsyncVLLM

SETUPS = ("ours", "one-off", "four-off", "discarding", "torchrl-classes", "trl")
MAX_NORM = 1.0
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "include_stop_str_in_output": True}
NUM_TRL_STEPS = 2000  # whose problems are made before it begins


class OverService:
    """A system over this library's service, and a trainer in this process."""

    sampling: ClassVar = SAMPLING

    def __init__(self, name: str, arguments: argparse.Namespace, service: AsyncVLLM) -> None:
        case, dataset = arguments.case, arguments.dataset
        learner = Learner(arguments.checkpoint, Clock(), arguments.lr, MAX_NORM)
        questions = prompts(dataset, arguments.seed, arguments.held_out)
        transport = "auto"
        if name == "torchrl-classes" and torch.cuda.device_count() > 1:  # NCCL needs one a rank
            transport = VLLMNCCLTransport()
        self.bench = Bench(
            service,
            learner,
            case,
            Task(
                Prompts(questions, case.rows // case.group),
                self.sampling,
                partial(reward, dataset),
                transport,
            ),
        )
        self.bench.updater.push_weights()  # those that training begins with
        self.system = SYSTEMS[name](self.bench)
        self.arguments, self.service, self.generate = arguments, service, service.generate
        self.num_tokens, self.rewards, self.agenerate = 0, [], service.agenerate
        service.generate, service.agenerate = self.counted, self.acounted  # what the policy calls

    def counted(self, *args: Any, **kwargs: Any) -> Any:
        return self.count(self.generate(*args, **kwargs))

    async def acounted(self, *args: Any, **kwargs: Any) -> Any:
        return self.count(await self.agenerate(*args, **kwargs))

    def count(self, outputs: Any) -> Any:
        self.num_tokens += sum(len(one.token_ids) for of in outputs for one in of.outputs)
        return outputs

    def step(self) -> dict[str, float]:
        phases = self.system.advance()
        self.rewards += map(float, self.system.rewards)
        return phases

    def settle(self) -> None:
        self.system.settle()

    def sampled(self) -> tuple[float, int]:
        found = statistics.fmean(self.rewards), self.num_tokens
        self.num_tokens, self.rewards = 0, []
        return found

    def evaluate(self) -> float:
        greedy = partial(self.bench.policy, temperature=0.0)
        (found,) = evaluate(self.arguments, self.service, greedy)
        self.num_tokens = 0
        return found

    def old(self) -> dict[Any, list[float]]:
        """How old rows were when they were trained, and how many were dropped."""
        ages = self.system.ages
        return {
            ("rows of each age, from 0", "rows"): [ages[one] for one in range(max(ages) + 1)],
            ("rows discarded", "rows"): [getattr(self.system.collecting, "num_dropped", 0)],
        }

    def close(self) -> None:
        self.settle()
        self.system.close()
        self.bench.updater.disconnect()
        self.service.generate, self.service.agenerate = self.generate, self.agenerate


class OverTRL:
    """TRL's trainer, told the same."""

    def __init__(self, name: str, arguments: argparse.Namespace, service: Any) -> None:
        del name
        case, dataset = arguments.case, arguments.dataset
        scored = scorer(dataset)
        num_problems = NUM_TRL_STEPS * case.rows // case.group
        problems = prompts(dataset, arguments.seed, arguments.held_out)
        self.held_out = held_out(dataset, arguments.held_out)
        self.trl = TRL(
            str(arguments.checkpoint),
            [*itertools.islice(problems, num_problems)],
            first_step=False,
            alone=service is None,
            case=case,
            learning_rate=arguments.lr,
            max_norm=MAX_NORM,
            engine=options_of(arguments.checkpoint, case.rows),
            sampling={},
            score=scored["fn"],
            over=scored.get("over", "text"),
        )
        self.step, self.sampled, self.close = self.trl.step, self.trl.sampled, self.trl.close

    def settle(self) -> None:
        """It samples nothing ahead."""

    def evaluate(self) -> float:
        return self.trl.evaluate(self.held_out)


def curve(
    setup: Any, use: GPUUse, *, seconds: float, every_s: float, deadline: float
) -> dict[Any, list[float]]:
    """Trains for so many seconds; returns what each evaluation found, by metric and unit.

    It ends earlier at a time of ``time.monotonic()``, though not before a step.
    """
    trained, steps, counted_from, phases = 0.0, 0, 0.0, Counter[str]()
    busy: dict[Any, list[float]] = defaultdict(list)
    found: dict[Any, list[float]] = {
        ("seconds of training", "s"): [trained],
        ("held-out accuracy", "share"): [setup.evaluate()],
        ("steps", "steps"): [steps],
        ("mean reward", "reward"): [],
        ("throughput", "tokens/s"): [],
    }
    is_over, since = False, time.perf_counter()
    while not is_over:
        phases.update(step := setup.step())
        trained += sum(step.values())
        steps += 1
        is_over = trained >= seconds or time.monotonic() >= deadline
        if is_over or trained >= counted_from + every_s:
            begin = time.perf_counter()
            setup.settle()  # or it would sample while the clock stands still
            trained += time.perf_counter() - begin
            for at, share in enumerate(use.between(since, time.perf_counter()) or ()):
                busy[f"GPU {at} busy", "share"].append(share)
            mean_reward, num_tokens = setup.sampled()
            values = (trained, setup.evaluate(), steps, mean_reward)
            for samples, value in zip(
                found.values(), (*values, num_tokens / (trained - counted_from)), strict=True
            ):
                samples.append(value)
            counted_from, since = trained, time.perf_counter()
            print(f"{trained:7.1f} s {steps:5} steps, held out {values[1]:.3f}", flush=True)
    means = {(f"{name}, mean of steps", "s"): [all_s / steps] for name, all_s in phases.items()}
    return found | busy | means


def run(name: str, arguments: argparse.Namespace, service: Any, deadline: float) -> Path:
    """Makes a set-up, trains it, and writes its record; returns the path."""
    recorder = Recorder(record_name("learning_curves", f"{arguments.dataset}_{name}"))
    make: Callable[..., Any] = OverTRL if name == "trl" else OverService
    torch.manual_seed(arguments.seed)
    print(name, flush=True)
    with contextlib.closing(make(name, arguments, service)) as setup, GPUUse() as use:
        found = curve(
            setup, use, seconds=60 * arguments.minutes, every_s=arguments.every, deadline=deadline
        )
        if name != "trl":
            found |= setup.old()
    for (metric, unit), samples in found.items():
        recorder.add(case=arguments.dataset, system=name, metric=metric, unit=unit, samples=samples)
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The command line, with sizes and learning rate of the data set's preset."""
    parser = parser_of(__doc__, "seconds of the tiny model's training")
    parser.add_argument("--model", type=Path, help="a checkpoint; else a tiny random model")
    parser.add_argument("--dataset", help="as in tutorial 01; chain_sum, for the tiny one low-ids")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, help="all that are installed")
    parser.add_argument("--minutes", type=float, default=4, help="of training, a set-up")
    parser.add_argument("--every", type=float, default=24, help="seconds between evaluations")
    parser.add_argument("--held-out", type=int, default=256, help="problems to evaluate on")
    parser.add_argument("--lr", type=float, help="learning rate; the preset's if left out")
    parser.add_argument("--rows-per-pass", type=int, help="of the trainer's; the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3600, help="of all set-ups together")
    arguments = parser.parse_args(argv)
    if arguments.setups is None:
        arguments.setups = [
            one for one in SETUPS if one != "trl" or importlib.util.find_spec("trl") is not None
        ]
    if arguments.smoke:
        arguments.minutes, arguments.every, arguments.held_out = 0.03, 1, 16
    arguments.dataset = arguments.dataset or ("chain_sum" if arguments.model else "low-ids")
    if why := missing(arguments.dataset):
        parser.error(why)
    preset = PRESETS.get(arguments.dataset, PRESETS["reasoning-gym"])
    group = preset["group_size"]
    arguments.lr = preset["lr"] if arguments.lr is None else arguments.lr
    per_pass = arguments.rows_per_pass or preset["rows_per_pass"]
    rows = group * preset["groups"]
    if per_pass < 1 or rows % per_pass:  # the rest would not be trained
        parser.error(f"--rows-per-pass must divide {rows}, got {per_pass}")
    arguments.case = Case("", rows, preset["max_tokens"], per_pass, group)
    return arguments


def main(argv: list[str] | None = None) -> list[Path]:
    begin = time.monotonic()
    arguments = parsed(argv)
    end = begin + arguments.limit_s
    Recorder("learning_curves").check(smoke=arguments.smoke)
    set_list_to_stack(True).set()
    paths = []
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(local_ray())
        arguments.checkpoint = arguments.model or make_tiny_checkpoint(
            cleanup.enter_context(tempfile.TemporaryDirectory()), seed=arguments.seed, diverse=False
        )
        service = None
        if set(arguments.setups) != {"trl"}:
            options = options_of(arguments.checkpoint, max(arguments.case.rows, arguments.held_out))
            service = start(arguments.checkpoint, seed=arguments.seed, **options)
            cleanup.enter_context(service)
        for at, name in enumerate(arguments.setups):
            now = time.monotonic()
            share = (end - now) / (len(arguments.setups) - at)
            paths.append(run(name, arguments, service, now + share))
    return paths


if __name__ == "__main__":
    main(sys.argv[1:])

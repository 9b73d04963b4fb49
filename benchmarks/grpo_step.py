"""Where the seconds of a GRPO step go: this library, TorchRL's classes, TRL, and the bound of all.

A step asks prompts in groups of 16, rewards the answers, compares them within their groups, and
takes one optimizer step in minibatches; then the engine gets the weights. The systems take turns:

- ``bound``: what the two models take. The bare engine in its own process, of which nothing but a
  number of tokens comes back, without log-probabilities; then the plain padded model's forward
  pass, log-softmax and backward pass on rows of the same lengths. Nothing is rewarded or pushed.
- ``ours``: ``RolloutCollector``, ``TextReward``, ``GroupAdvantage``, ``RolloutStorage`` and
  ``TrainerPolicy``, and TorchRL's ``GRPOLoss``.
- ``one-off``, ``four-off``: with ``max_staleness=1`` or 4; a step is the mean of three in a row.
- ``checked``: ``ours`` with statistics, ``RolloutCorrection`` and audited pushes.
- ``torchrl-classes``: as ``ours`` by ``LLMCollector``, a transform, ``MCAdvantage``,
  ``LazyStackStorage`` and ``TransformersWrapper``. Policy, service and push are this library's.
- ``trl``: see ``peers/trl_grpo.py``. What stopped it stands in the record's notes.

Phases are timed from outside and add up to ``step``; ``collect`` and ``loss`` are sums of them.
The calls that a step is built of are timed by themselves, too: ``bare``, ``service``, ``wrapper``.
On GPUs the engine has the first, and the trainer, in bfloat16 autocast, the last. With
``--colocate`` engines of equal cache ``sleep`` while it steps. ``push`` wakes this library's, which
is awake in others' turns; TRL's is woken when its next step begins, and has a phase ``wake``.

``python -m benchmarks.grpo_step`` takes minutes, ``--smoke`` half a minute. A record for each case.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import set_list_to_stack

from benchmarks.dispatch import own_actor
from benchmarks.grpo_systems import GROUP, SYSTEMS, Bench, Case, Learner, TorchRLClasses, options_of
from benchmarks.live_engines import local_ray, record_name, start
from benchmarks.peers.trl_grpo import KV_CACHE_BYTES
from benchmarks.phases import Clock
from benchmarks.record import Recorder, parser_of, refuse_less
from benchmarks.shapes import save_shape
from torchrl_vllm_sync.rl.statistics import GPUUse
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    import argparse

    from torchrl_vllm_sync import AsyncVLLM

COLLECT = ("wait", "encode", "generate", "rows", "environment", "reward", "advantage", "buffer")
LOSS = ("sample", "correct", "log-probabilities", "backward", "optimizer")

CASES = {
    "smollm2-256": Case("smollm2", 256, 64),
    "smollm2-1024": Case("smollm2", 1024, 64),
    "smollm2-3072": Case("smollm2", 3072, 64),  # for three replicas, as the next but one
    "1.7b-256": Case("1.7b", 256, 256, minibatch=8),  # the plain model keeps 152k logits a token
    "1.7b-768": Case("1.7b", 768, 256, minibatch=8),
    "tiny-256": Case("tiny", 256, 64),
    "smoke": Case("tiny", 2 * GROUP, 4, minibatch=GROUP),
}


def take_turns(
    bench: Bench, systems: list[Any], repetitions: int, limit_s: float, parts: int = 1
) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Samples of each system by metric and unit, after a first round that does not count.

    In each of its turns a system runs its parts by themselves, ``parts`` times, then a step.
    """
    samples: dict[str, Any] = {one.name: defaultdict(list) for one in systems}
    begin, round_s = time.monotonic(), 0.0
    with GPUUse() as use:
        for repetition in range(repetitions + 1):
            begin_round = time.monotonic()
            if repetition > 1 and begin_round + round_s > begin + limit_s:
                print(f"no time is left for round {repetition + 1}", flush=True)
                break
            systems = systems[1:] + systems[:1]  # nobody always follows the same one
            for system in systems:
                found = [
                    *(one_of_each(bench, system) for _ in range(parts)),
                    one_step(bench, system, use),
                ]
                if repetition:
                    for key, value in itertools.chain.from_iterable(one.items() for one in found):
                        samples[system.name][key].append(value)
            round_s = time.monotonic() - begin_round
    return samples


def one_of_each(bench: Bench, system: Any) -> dict[tuple[str, str], float]:
    """Seconds of a system's parts by themselves."""
    found: dict[tuple[str, str], float] = {}
    for name, run in system.parts().items():
        asked = bench.asked()
        begin = time.perf_counter()
        run(asked)
        found[name, "s"] = time.perf_counter() - begin
    return found


def one_step(bench: Bench, system: Any, use: GPUUse) -> dict[tuple[str, str], float]:
    """Seconds of a system's step and of its phases."""
    bench.clock.take()
    begin = time.perf_counter()
    phases = system.step()
    shares = use.between(begin, time.perf_counter())
    step_s = sum(phases.values())
    found = {(name, "s"): seconds for name, seconds in phases.items()}
    for name, of in (("collect", COLLECT), ("loss", LOSS)):
        if parts := [phases[one] for one in of if one in phases]:
            found[name, "s"] = sum(parts)
    found["step", "s"] = step_s
    found["throughput", "tokens/s"] = bench.case.rows * bench.case.tokens / step_s
    if isinstance(system, TorchRLClasses):
        found["ESS", "share"] = float(torch.stack(system.ess).mean())
    for at, share in enumerate(shares or ()):
        found[f"GPU {at} busy", "share"] = share
    return found


def report(recorder: Recorder, name: str, samples: dict[str, Any]) -> None:
    """Adds the samples of one case to the record."""
    for system, found in samples.items():
        for (metric, unit), values in found.items():
            recorder.add(case=name, system=system, metric=metric, unit=unit, samples=values)
    print(*recorder.notes, sep="\n")


def run(
    name: str, service: AsyncVLLM, learner: Learner, arguments: argparse.Namespace
) -> tuple[Recorder, dict[str, Any]]:
    """Makes a case's systems, and lets them take turns."""
    label = name if arguments.replicas == 1 else f"{name}-{arguments.replicas}-replicas"
    label += "-colocated" if arguments.colocate else ""
    recorder = Recorder(record_name("grpo_step", label))
    bench, systems = Bench(service, learner, CASES[name]), []
    for system in arguments.systems:
        try:
            systems.append(SYSTEMS[system](bench))
        except Exception as error:
            if system != "trl":
                raise
            traceback.print_exc()
            recorder.notes.append(f"trl did not run: {type(error).__name__}: {error}")
    # A collection of what was imported takes half a second, in a step of whichever system it hits.
    gc.collect()
    gc.freeze()
    repetitions = 1 if arguments.smoke else arguments.repetitions
    samples = take_turns(bench, systems, repetitions, arguments.limit_s, arguments.parts)
    for system in systems:
        system.close()
    return recorder, samples


def main(argv: list[str] | None = None) -> list[Path]:
    parser = parser_of(__doc__, "two groups of short answers")
    parser.add_argument("--model", type=Path, help="a checkpoint of SmolLM2's shape; else random")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="those of the hardware")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="engines sleep in between")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--parts", type=int, default=1, help="how often a turn runs a step's parts")
    parser.add_argument("--limit-s", type=float, default=3600, help="of a case's rounds")
    arguments = parser.parse_args(argv)
    refuse_less(parser, arguments, replicas=1, repetitions=1, parts=1)
    on_gpus = ["smollm2-256", "smollm2-1024", "1.7b-256"]
    usual = on_gpus if torch.cuda.is_available() else ["tiny-256"]
    cases = ["smoke"] if arguments.smoke else arguments.cases or usual
    Recorder("grpo_step").check(smoke=arguments.smoke)
    set_list_to_stack(True).set()
    clock, paths = Clock(), list[Path]()
    for model, names in itertools.groupby(cases, lambda name: CASES[name].model):
        of_model = list(names)
        with local_ray(), tempfile.TemporaryDirectory() as directory:
            if model == "tiny":
                checkpoint = make_tiny_checkpoint(directory)
            elif model == "smollm2" and arguments.model:
                checkpoint = arguments.model
            else:
                checkpoint = save_shape(model, Path(directory), dtype="bfloat16")
            rows, n = max(CASES[one].rows for one in of_model), arguments.replicas
            most = rows if n == 1 else 5 * rows // (4 * n)  # they are balanced, but not to the row
            options = options_of(checkpoint, most)
            options |= {"num_replicas": n, "colocate": arguments.colocate}
            if arguments.colocate and torch.cuda.is_available():
                options["kv_cache_memory_bytes"] = KV_CACHE_BYTES  # as TRL's
            with start(checkpoint, actor_class=own_actor(), **options) as service:
                clock.wrap(service, "generate", "generate", then="rows")
                clock.wrap(service, "sleep", "sleep")
                learner = Learner(checkpoint, clock)
                for name in of_model:
                    recorder, samples = run(name, service, learner, arguments)
                    report(recorder, name, samples)
                    paths.append(recorder.write(smoke=arguments.smoke, directory=arguments.out))
    return paths


if __name__ == "__main__":
    main(sys.argv[1:])

"""Replicas are killed at random moments of a training run, and what it computes stays the same.

Two runs of the set-up ``ours`` of ``learning_curves`` from the same weights, on two engines of the
tiny model: ``undisturbed``, and ``killed``, where the actor or the engine core of a replica gets
SIGKILL while rows are in flight there, again and again when all replicas have served for a while.
Nobody helps: the other replica gets the rows, and the service restarts the lost one.

Each row has a seed of its own, and engines compute it alike whoever answers: one row at a time,
without a prefix cache. So tokens, log-probabilities, versions, rewards, advantages and losses of
both runs are compared to the last bit, and the benchmark fails at the first that differs. A third
run, ``ordinary``, with kills, has neither seeds nor such engines.

Each series has the seconds of its samples (``at_s``), from the beginning of the first step: reward
and loss of each step; the number of replicas that serve, at each change; and for each kill how many
rows were begun again, since a collector does not stream.

``python -m benchmarks.kill_in_run`` takes some minutes on two cores; ``--smoke`` takes a few steps.
``benchmarks.kill_in_run_report`` draws the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random  # noqa: TID251  seeded below
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import Case, options_of
from benchmarks.learning_curves import SAMPLING, OverService
from benchmarks.live_engines import local_ray, start
from benchmarks.record import Recorder, parser_of
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.requests.background import run_blocking
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from torchrl_vllm_sync import AsyncVLLM

SYSTEMS = ("undisturbed", "killed", "ordinary")
BEGUN_AGAIN = "rows begun again"
NUM_REPLICAS, LIMIT_S = 2, 120.0
CASE = Case("tiny", rows=16, tokens=16, minibatch=16, group=8)
TRAINING = {"case": CASE, "dataset": "low-ids", "held_out": 0, "lr": 1e-3}
# A row is computed alike by every replica, whatever else it computes.
ALIKE = {"max_num_seqs": 1, "enable_prefix_caching": False}
# At the moment of a kill so many rows at least are with the replica: the last one takes a while.
LEAST_ROWS = 2
POLL_S = 0.002
ARRIVAL_S = 0.1  # for what a process has sent before it was stopped
# Entries of a batch, as it is trained on.
COMPARED = {
    "tokens": ("tokens", "full"),
    "log-probabilities": ("log_probs", "response"),
    "versions": ("policy_versions", "response"),
    "reward": ("next", "reward"),
    "advantage": "advantage",
}
Series = dict[tuple[str, str], list[tuple[float, ...]]]
Batch = dict[str, torch.Tensor]


class Compared(OverService):
    """The set-up, which keeps what it has trained on; a seed for each row."""

    def __init__(self, arguments: argparse.Namespace, service: Any, *, seeded: bool) -> None:
        self.sampling = SAMPLING | ({"seed": arguments.seed} if seeded else {})
        super().__init__("ours", arguments, service)
        self.batches, self._began_at = list[Batch](), service.weight_version
        self._loss, self.system.loss = self.system.loss, self._noted

    def _noted(self, rows: Any) -> Any:
        loss = self._loss(rows)
        batch = {name: rows[key].detach().clone() for name, key in COMPARED.items()}
        batch["versions"] -= self._began_at * (batch["versions"] >= 0)  # not of padding
        self.batches.append(batch | {"loss": loss.detach()[None]})
        return loss


def differences(one: list[Batch], other: list[Batch]) -> Iterator[str]:
    """Says where what two runs have trained on differs in any bit, in their order."""
    if len(one) != len(other):
        yield f"{len(one)} batches and {len(other)}"
    for at, (mine, its) in enumerate(zip(one, other, strict=False)):
        for name, values in mine.items():
            if values.shape != its[name].shape:
                yield f"batch {at}: {name} of {[*values.shape]} and of {[*its[name].shape]}"
                continue
            for row, (a, b) in enumerate(zip(values.numpy(), its[name].numpy(), strict=True)):
                if a.tobytes() != b.tobytes():
                    yield f"batch {at}: {name} of row {row}"


def own_children(_: object) -> list[Any]:
    """Process ids of the engine that an actor started."""
    return [one.pid for one in multiprocessing.active_children()]


def num_serving(service: Any) -> int:
    states = [one.state for one in service.load.snapshots()]
    return sum(one in (ReplicaState.SERVING, ReplicaState.UPDATING) for one in states)


class Killer:
    """Sends SIGKILL to a replica's actor or engine core, whenever all have served for a while."""

    def __init__(self, service: Any, seed: int, pause_s: float) -> None:
        self._service, self._random, self._pause_s = service, random.Random(seed), pause_s
        self.kills = list[tuple[float, int, str]]()  # when, rows begun again, which process

    def run(self, ended: threading.Event) -> None:
        """Kills at random moments until told to end."""
        while not ended.wait(self._random.uniform(0, self._pause_s) + POLL_S):
            if num_serving(self._service) == NUM_REPLICAS:  # one that restarts is no member
                self._strike(ended)

    def _strike(self, ended: threading.Event) -> None:
        """Waits until a replica has rows, kills it, and waits until others have them."""
        victim = self._random.choice([*self._service.replicas])
        (core,) = ray.get(victim.actor.__ray_call__.remote(own_children), timeout=60)
        described: Any = ray.get(victim.actor.describe.remote(), timeout=60)
        word, pid = self._random.choice([("actor", described.pid), ("engine core", core)])
        held, counts = self._service.load.in_flight, self._service.requests.counts
        while not self._stopped_with_rows(victim.replica_id, pid):
            if ended.wait(POLL_S):
                return
        before, deadline = counts.totals()["retried"], time.monotonic() + LIMIT_S
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        while (again := counts.totals()["retried"] - before) == 0 or held(victim.replica_id):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rows of replica {victim.replica_id}, killed by its {word}")
            time.sleep(POLL_S)
        self.kills.append((killed_at, again, word))

    def _stopped_with_rows(self, replica_id: str, pid: int) -> bool:
        """Stops a process; lets it go on if its rows were answered before it stood."""
        held = self._service.load.in_flight
        if held(replica_id) < LEAST_ROWS:
            return False
        os.kill(pid, signal.SIGSTOP)
        run_blocking(asyncio.sleep(ARRIVAL_S))  # in the loop where answers arrive, which may lag
        if held(replica_id) < LEAST_ROWS:
            os.kill(pid, signal.SIGCONT)
            return False
        return True


def train(setup: Any, service: Any, *, steps: int, killer: Killer | None = None) -> Series:
    """Trains for so many steps; returns times and samples by metric and unit."""
    begin = time.monotonic()
    found: Series = defaultdict(list)
    serving, ended = found["replicas serving", "replicas"], threading.Event()

    def note() -> None:
        number = num_serving(service)
        if not serving or serving[-1][1] != number:
            serving.append((time.monotonic() - begin, number))

    with ThreadPoolExecutor(1) as pool, service.load.watched(note):
        note()
        killing = None if killer is None else pool.submit(killer.run, ended)
        try:
            for _ in range(steps):
                setup.step()
                now = time.monotonic() - begin
                found["reward", "reward"].append((now, setup.sampled()[0]))
                found["loss", "loss"].append((now, setup.batches[-1]["loss"].item()))
        finally:
            ended.set()
    if killing is not None and killer is not None:
        killing.result()
        if not killer.kills:
            raise RuntimeError(f"nothing was killed in {steps} steps")
        found[BEGUN_AGAIN, "rows"] = [(at - begin, again) for at, again, _ in killer.kills]
    return found


def launch(checkpoint: Path, seed: int, **options: Any) -> AsyncVLLM:
    """Engines of the tiny model, which are restarted as often as they are killed."""
    options = options_of(checkpoint, CASE.rows) | options
    return start(checkpoint, num_replicas=NUM_REPLICAS, max_restarts=1000, seed=seed, **options)


def run(
    service: AsyncVLLM, arguments: argparse.Namespace, *, seeded: bool, killed: bool
) -> tuple[Series, list[Batch]]:
    """Trains from the beginning; returns the series, and what was trained on."""
    torch.manual_seed(arguments.seed)
    killer = Killer(service, arguments.seed, arguments.pause_s) if killed else None
    with contextlib.closing(Compared(arguments, service, seeded=seeded)) as setup:
        found = train(setup, service, steps=arguments.steps, killer=killer)
        return found, setup.batches


def main(argv: list[str] | None = None) -> Path:
    parser = parser_of(__doc__, "a pair of two steps")
    parser.add_argument("--pair", action="store_true", help="no ordinary run")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--pause-s", type=float, default=5, help="at most, from all serve to kill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    vars(arguments).update(TRAINING)
    if arguments.smoke:
        arguments.steps, arguments.pause_s = 2, 0
    recorder = Recorder("kill_in_run")
    recorder.check(smoke=arguments.smoke)
    set_list_to_stack(True).set()
    batches: dict[str, list[Batch]] = {}

    def keep(service: AsyncVLLM, system: str) -> None:
        how = {"seeded": system != "ordinary", "killed": system != "undisturbed"}
        found, batches[system] = run(service, arguments, **how)
        for (metric, unit), points in found.items():
            at_s, samples = zip(*points, strict=True)
            what: Any = {"case": arguments.dataset, "system": system, "metric": metric}
            recorder.add(**what, unit=unit, samples=samples, at_s=at_s)

    with tempfile.TemporaryDirectory() as folder, local_ray():
        arguments.checkpoint = make_tiny_checkpoint(folder, seed=arguments.seed, diverse=False)
        with launch(arguments.checkpoint, arguments.seed, **ALIKE) as service:
            for system in SYSTEMS[:2]:
                keep(service, system)
        if not (arguments.smoke or arguments.pair):
            with launch(arguments.checkpoint, arguments.seed) as service:
                keep(service, SYSTEMS[2])
    if found := [*differences(batches["undisturbed"], batches["killed"])]:
        raise RuntimeError(f"{len(found)} differences, the first in {found[0]}")
    rows = arguments.steps * CASE.rows
    recorder.notes.append(f"{rows} rows and {arguments.steps} losses are equal to the last bit")
    print(recorder.notes[-1])
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])

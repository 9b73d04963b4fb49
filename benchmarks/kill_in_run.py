"""A replica is killed in the middle of training: reward, version and rows go on.

Two runs of the set-up ``ours`` of ``learning_curves`` with the same seeds, each on two new engines
of the tiny model: ``undisturbed``, and ``killed``, where the engine process of one replica gets
SIGKILL in step ``--kill-at``, from another thread, when the service has said for ``STRIKE_AFTER_S``
that rows are in flight there. Nobody helps: the other replica gets its rows, and the service
restarts it.

Each series has the seconds of its samples (``at_s``), from the beginning of the first step: reward,
version and number of rows of each step, and the number of replicas that serve, at each change.
Rows that were begun again are those that the killed replica got in that step and did not answer:
a collector does not stream, so their first tokens are lost and sampled anew. A run ends after
``--seconds``, or later, when all replicas have served again for a while.

``python -m benchmarks.kill_in_run`` takes some minutes on two cores; ``--smoke`` only kills, and
ends when the replica is back. ``benchmarks.kill_in_run_report`` draws the records.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import Case, options_of
from benchmarks.learning_curves import OverService
from benchmarks.record import Recorder
from torchrl_vllm_sync import AsyncVLLM, ReplicaState
from torchrl_vllm_sync.testing import make_tiny_checkpoint

SYSTEMS = ("undisturbed", "killed")
BEGUN_AGAIN = "rows begun again on the other replica"
NUM_REPLICAS, LIMIT_S = 2, 300.0
CASE = Case("tiny", rows=32, tokens=64, minibatch=32, group=8)
TRAINING = {"case": CASE, "dataset": "low-ids", "held_out": 0, "seed": 0, "lr": 1e-3}
STRIKE_AFTER_S, POLL_S = 0.1, 0.002
Series = dict[tuple[str, str], list[tuple[float, float]]]


class Answers(OverService):
    """The set-up, with the rows that each replica answered in this step, and their versions."""

    def step(self) -> float:
        self.rows, self.versions = Counter[str](), set[int]()
        return super().step()

    def counted(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().counted(*args, **kwargs)
        for of in outputs:
            self.rows[of.replica_id] += len(of.outputs)
            self.versions |= {of.min_version, of.max_version}
        return outputs


def own_children(_: object) -> list[Any]:
    """Process ids of the engine that an actor started."""
    return [one.pid for one in multiprocessing.active_children()]


def strike(service: Any, pid: int, deadline: float) -> tuple[float, int]:
    """Kills the last replica's engine at work; returns when, and how many rows it had got."""
    while time.monotonic() < deadline:
        if held := service.status().replicas[-1].in_flight:
            time.sleep(STRIKE_AFTER_S)
            if service.status().replicas[-1].in_flight:
                os.kill(pid, signal.SIGKILL)
                return time.monotonic(), held
        time.sleep(POLL_S)
    raise TimeoutError("the last replica was never seen with rows in flight")


def train(setup: Any, service: Any, *, seconds: float, kill_at: int | None) -> Series:
    """Trains until all replicas serve at the end; returns times and samples by metric and unit."""
    (pid,) = ray.get(service.actors[-1].__ray_call__.remote(own_children), timeout=60)
    begin = time.monotonic()
    found: Series = defaultdict(list)
    serving = found["replicas serving", "replicas"]

    def note() -> None:
        states = [one.state for one in service.load.snapshots()]
        number = sum(one in (ReplicaState.SERVING, ReplicaState.UPDATING) for one in states)
        if not serving or serving[-1][1] != number:
            serving.append((time.monotonic() - begin, number))

    steps, now = 0, 0.0
    with ThreadPoolExecutor(1) as pool, service.load.watched(note):
        note()
        while (
            steps <= (kill_at or 0)
            or serving[-1][1] < NUM_REPLICAS
            or now < max(seconds, serving[-1][0] + seconds / 8)
        ):
            if now > LIMIT_S:
                raise TimeoutError(f"{serving[-1][1]} replicas serve after {LIMIT_S:g} s")
            steps += 1
            struck = None
            if steps == kill_at:
                struck = pool.submit(strike, service, pid, begin + LIMIT_S)
            setup.step()
            now = time.monotonic() - begin
            (version,) = setup.versions
            found["reward", "reward"].append((now, setup.sampled()[0]))
            found["version", "version"].append((now, version))
            found["rows", "rows"].append((now, setup.rows.total()))
            if struck is not None:
                killed_at, held = struck.result(timeout=LIMIT_S)
                lost = held - setup.rows[service.status().replicas[-1].replica_id]
                found[BEGUN_AGAIN, "rows"].append((killed_at - begin, lost))
    return found


def run(arguments: argparse.Namespace, kill_at: int | None) -> Series:
    """Launches engines, and trains on them."""
    torch.manual_seed(arguments.seed)
    with contextlib.ExitStack() as cleanup:
        service = AsyncVLLM.from_pretrained(
            str(arguments.checkpoint),
            num_replicas=NUM_REPLICAS,
            num_cpus_per_replica=0,
            verbose=False,
            seed=arguments.seed,
            **options_of(True, CASE.rows),
        )
        cleanup.enter_context(service)
        setup = cleanup.enter_context(contextlib.closing(Answers("ours", arguments, service)))
        return train(setup, service, seconds=arguments.seconds, kill_at=kill_at)


def main(argv: list[str] | None = None) -> Path:
    """Runs the benchmark and returns the path of its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="no longer than the restart takes")
    parser.add_argument("--seconds", type=float, default=110, help="of a run, at least")
    parser.add_argument("--kill-at", type=int, default=20, help="step")
    parser.add_argument("--out", type=Path, help="directory of the record")
    arguments = parser.parse_args(argv)
    vars(arguments).update(TRAINING)
    if arguments.smoke:
        arguments.seconds, arguments.kill_at = 2, 2
    recorder = Recorder("kill_in_run")
    recorder.check(smoke=arguments.smoke)
    set_list_to_stack(True).set()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        arguments.checkpoint = make_tiny_checkpoint(folder, seed=arguments.seed, diverse=False)
        ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)
        cleanup.callback(ray.shutdown)
        for system in SYSTEMS[1:] if arguments.smoke else SYSTEMS:
            found = run(arguments, arguments.kill_at if system == "killed" else None)
            for (metric, unit), points in found.items():
                at_s, samples = zip(*points, strict=True)
                what: Any = {"case": arguments.dataset, "system": system, "metric": metric}
                recorder.add(**what, unit=unit, samples=samples, at_s=at_s)
                print(f"{system}: {metric} {samples[0]:g} to {samples[-1]:g}", flush=True)
    path = recorder.write(smoke=arguments.smoke, directory=arguments.out)
    print(path)
    return path


if __name__ == "__main__":
    main(sys.argv[1:])

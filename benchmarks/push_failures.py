"""What a push costs when a replica fails in the middle of it: stopped, then killed.

``python -m benchmarks.push_failures --model 8b`` runs a trainer and three replicas, on NCCL where
there are four GPUs. After some normal pushes the last replica's engine stops itself (SIGSTOP) half
way through one; after it was woken, and a push took it back, it kills itself (SIGKILL) half way
through another. Recorded, in milliseconds:

* ``normal push``: pushes to three replicas;
* ``given up``: from the signal until the first attempt was over on all sides;
* ``sent again``: the second attempt, to the two others, a new group included;
* ``whole push``: from ``push_weights`` to its return;
* ``first answer``: a request of 8 tokens, sent at once, answered under the new weights;
* ``next push``: to the two that are left;
* ``push that takes it back``: after SIGCONT, to all three;
* ``restart``: from the signal until a new engine serves the newest version (``--restarts``).

``--smoke`` takes a tiny model, Gloo and CPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import torch

from benchmarks.live_engines import local_ray, random_options, record_name, start
from benchmarks.record import Recorder, parser_of
from benchmarks.shapes import SHAPES, save_shape
from benchmarks.sync_actors import Trainer, spawn
from torchrl_vllm_sync import BroadcastTransport
from torchrl_vllm_sync.errors import SyncError

if TYPE_CHECKING:
    import argparse

    from torchrl_vllm_sync import AsyncVLLM
    from torchrl_vllm_sync.weights.transport import Members, Push

NUM_REPLICAS = 3
VICTIM = NUM_REPLICAS - 1
REPAIR_TIMEOUT_S = 120.0
RESTART_TIMEOUT_S = 300.0
# Seconds from one push to the next while a replica restarts.
STEP_S = 5.0
SYSTEM = "broadcast"


class NotingTransport(BroadcastTransport):
    """Notes when it began to send, by ``time.time()``."""

    began = 0.0

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        self.began = time.time()
        return super().send(members, push)


class FailureTrainer(Trainer):
    """The trainer, which pushes without strictness and asks for an answer afterwards."""

    _service: AsyncVLLM | None = None
    _transport: NotingTransport | None = None

    def push_and_ask(
        self, service: AsyncVLLM, options: dict[str, Any], timeout_s: float | None
    ) -> dict[str, Any]:
        """Changes the weights, pushes them and has one request answered."""
        from vllm import SamplingParams

        # Each call brings another copy of the service, of which only the first has pushed.
        service = self._service = self._service or service
        transport = self._transport = self._transport or NotingTransport(**options)
        self.train(1)
        begin = time.perf_counter()
        report = service.push_weights(
            self.model, transport=transport, timeout_s=timeout_s, strict=False
        )
        seconds = time.perf_counter() - begin
        ask = time.perf_counter()
        output = service.generate(
            prompt_token_ids=[5, 7, 9], sampling_params=SamplingParams(max_tokens=8)
        )
        assert output.min_version == report.version, (output.min_version, report)
        return {
            "began": transport.began,
            "seconds": seconds,
            "phases": report.phases,
            "version": report.version,
            "left_behind": report.left_behind,
            "answer_s": time.perf_counter() - ask,
        }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    case = f"{args.model}-{NUM_REPLICAS}"
    recorder = Recorder(record_name("push_failures", case))
    recorder.check(smoke=args.smoke)
    with local_ray(), tempfile.TemporaryDirectory() as directory:
        checkpoint = save_shape(args.model, Path(directory), dtype=dtype)
        trainer = spawn(FailureTrainer, str(checkpoint), dtype, num_gpus=int(cuda))
        ray.get(trainer.__ray_ready__.remote(), timeout=300)
        engine = random_options(dtype, kv_gib=4) | {
            "max_num_seqs": 16,
            "max_restarts": args.restarts,
            "num_replicas": NUM_REPLICAS,
            "worker_extension_cls": "benchmarks.failing_worker.FailingWorker",
        }
        with start(checkpoint, **engine) as service:
            run = Run(recorder, service, trainer, case, args, Path(directory))
            run.normal("normal push", args.rounds)
            pid = run.fail("stop")
            run.normal("next push", args.rounds, ", after SIGSTOP")
            os.kill(pid, signal.SIGCONT)
            run.take_back()
            run.fail("kill")
            run.normal("next push", args.rounds, ", after SIGKILL")
            if args.restarts:
                run.restart()
    recorder.write(smoke=args.smoke, directory=args.out)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "on CPUs, meaning nothing")
    parser.add_argument("--model", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=10, help="normal pushes of each kind")
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument(
        "--timeout-s", type=float, help="of the pushes that fail; measured if unset"
    )
    parser.add_argument("--restarts", type=int, default=0, help="max_restarts of the service")
    args = parser.parse_args(argv)
    if args.smoke:
        args.model, args.rounds, args.timeout_s = "tiny", 2, 5.0
    return args


class Run:
    """One service, one trainer, and what happens to them in turn."""

    def __init__(
        self,
        recorder: Recorder,
        service: AsyncVLLM,
        trainer: Any,
        case: str,
        args: argparse.Namespace,
        directory: Path,
    ) -> None:
        self.recorder, self.service, self.trainer = recorder, service, trainer
        self.case, self.args, self.directory = case, args, directory
        self.killed_at, self.version = 0.0, 0
        self.victim = service.replicas[VICTIM].replica_id
        buckets = 2**14 if args.model == "tiny" else args.bucket_mib * 2**20
        self.options = {"verify": "never", "bucket_bytes": buckets}

    def push(self, timeout_s: float | None = None) -> dict[str, Any]:
        call = self.trainer.push_and_ask.remote(self.service, self.options, timeout_s)
        found: dict[str, Any] = ray.get(call, timeout=600)
        self.version = found["version"]
        return found

    def normal(self, metric: str, rounds: int, after: str = "") -> None:
        """Pushes where nothing happens; the first one, which forms the group, is not counted."""
        self.push()
        found = [self.push() for _ in range(rounds)]
        self.add(metric, [one["seconds"] for one in found], after)
        self.add("first answer", [one["answer_s"] for one in found], after or ", no failure")

    def fail(self, how: str) -> int:
        """Pushes while the victim fails half way; returns its process id."""
        note = self.directory / f"{how}.txt"
        actor = self.service.actors[VICTIM]
        call = actor.collective_rpc.remote("fail_in_mid_push", args=(how, str(note)))
        (pid,) = ray.get(call, timeout=60)
        found = self.push(self.args.timeout_s)
        assert set(found["left_behind"]) == {self.victim}, found
        signalled = float(note.read_text())
        if how == "kill":
            self.killed_at = signalled
        phases, after = found["phases"], f", SIG{how.upper()} in mid-push"
        self.add("given up", [found["began"] + phases["lost_s"] - signalled], after)
        self.add("sent again", [found["seconds"] - phases["lost_s"]], after)
        self.add("join", [phases["join_s"]], after)
        self.add("whole push", [found["seconds"]], after)
        self.add("first answer", [found["answer_s"]], after)
        print(found["left_behind"], flush=True)
        return pid

    def take_back(self) -> None:
        """Pushes until the victim, which runs again, is part of it."""
        deadline = time.monotonic() + REPAIR_TIMEOUT_S
        while (found := self.push())["left_behind"]:
            if time.monotonic() > deadline:
                raise SyncError(f"the replica did not come back: {found['left_behind']}")
            time.sleep(0.2)
        self.add("push that takes it back", [found["seconds"]], ", after SIGCONT")

    def restart(self) -> None:
        """Waits until the victim serves the newest version again; training goes on meanwhile."""
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        next_push = time.monotonic() + STEP_S
        while not self._is_back():
            if time.monotonic() > deadline:
                raise SyncError("the replica was not restarted")
            if time.monotonic() > next_push:
                self.push()
                next_push = time.monotonic() + STEP_S
            time.sleep(0.05)
        self.add("restart", [time.time() - self.killed_at], ", after SIGKILL")

    def _is_back(self) -> bool:
        return any(
            one.replica_id == self.victim
            and one.state.admits_requests
            and one.weight_version == self.version
            for one in self.service.load.snapshots()
        )

    def add(self, metric: str, seconds: list[float], after: str = "") -> None:
        """Records samples given in seconds."""
        what = {"case": self.case + after, "system": SYSTEM, "metric": metric, "unit": "ms"}
        self.recorder.add(**what, samples=[1e3 * one for one in seconds])


if __name__ == "__main__":
    sys.exit(main())

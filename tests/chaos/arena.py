"""One service, one trainer, never-ending requests; and one cell of the matrix after the other."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from tests.chaos.audit import Auditor
from tests.chaos.cells import RELOADING, UNPAUSED
from tests.chaos.processes import (
    TrainerProcess,
    is_alive,
    replica_pids,
    strike,
    wake,
    weight_memories,
)
from tests.chaos.traffic import Traffic
from tests.chaos.watch import Patience, Watch, wait_until
from tests.engine.conftest import ENGINE
from tests.engine.faults import HeldActor
from tests.warm import warm_cluster
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.testing import make_tiny_checkpoint

# Seconds after which an engine or an actor that is silent counts as failed. With 5 s two replicas
# that were well were taken for failed, once, on two cores with forty processes that wanted to run.
UNRESPONSIVE_S = 12.0
# Seconds that each of the two attempts of a push is given.
PUSH_TIMEOUT_S = 20.0

# The bounds, in seconds, on a machine of two cores that has other things to do.
REACH_S = 60.0  # until a push comes to the point where it is hit
NOTICED_S = {"kill": 15.0, "stop": UNRESPONSIVE_S + 20.0}
# An update has a deadline of its own, and meanwhile an engine owes no other sign of life.
NOTICED_IN_PUSH_S = PUSH_TIMEOUT_S + 20.0
PUSHED_S = 2 * PUSH_TIMEOUT_S + 50.0  # of which a fresh engine has 30 to join
REPAIRED_S = 240.0
DRAINED_S = 60.0
# Seconds that a replica gets to find the newest version by itself, before the next push brings it.
CATCH_UP_S = 4.0


@dataclass(slots=True)
class Verdict:
    """How a cell went.

    Attributes:
        cell: The cell.
        noticed_s: From the signal until no request went to the victim; of a trainer, until no
            replica waited for it.
        pushed_s: From the signal, or from its own beginning if that was later, to the end of the
            push.
        repaired_s: From the signal until all replicas served the newest version.
        push: What the push ended with.
        num_answered: Prompts that were answered.
        num_errors: Prompts that ended in an error while no replica served.
        notes: What else is worth knowing.
        failure: Why the cell failed; empty if it did not.
    """

    cell: object
    noticed_s: float | None = None
    pushed_s: float | None = None
    repaired_s: float | None = None
    push: str = ""
    num_answered: int = 0
    num_errors: int = 0
    notes: list[str] = field(default_factory=list)
    failure: str = ""


class Arena:
    """Everything that a run of the matrix shares.

    Args:
        directory: For checkpoints, stored versions and markers.
        num_replicas: Replicas of the service.
        engines: What the cells need of engines.
    """

    def __init__(self, directory, num_replicas=2, *, engines=RELOADING):
        from torchrl_vllm_sync import AsyncVLLM

        self.engines = engines
        self.directory = Path(directory)
        self.checkpoint = make_tiny_checkpoint(self.directory / "checkpoint", seed=0)
        self._auditor = Auditor(self.checkpoint)
        self._cluster = warm_cluster(
            num_cpus=2, include_dashboard=False, logging_level=logging.ERROR
        )
        self._cluster.__enter__()
        self._trainer = self._new_trainer()
        self.service = AsyncVLLM.from_pretrained(
            str(self.checkpoint),
            num_replicas=num_replicas,
            name="chaos",
            detached=True,
            actor_class=HeldActor,
            worker_extension_cls=engines.worker,
            stage_weights=engines.stage_weights,
            distributed_executor_backend="mp",  # workers are processes of their own
            unresponsive_after_s=UNRESPONSIVE_S,
            **{**ENGINE, "max_restarts": 10_000},
        )
        self._watch = Watch(self.service)
        self._watch.__enter__()
        self.traffic = Traffic(self.service, lambda: self._committed)
        self._turn = 0
        self._sent, self._kept, self._committed = {0}, set[int](), 0
        self._newest = 0
        self._trainer.attach(self.service.name)
        self.push(engines.transport)

    def close(self):
        """Ends everything that was started."""
        self._watch.__exit__()
        self._trainer.end()
        self.service.shutdown()
        self._cluster.__exit__(None, None, None)

    def run(self, cell):
        """Runs one cell; the next one may follow, whether it failed or not."""
        verdict = Verdict(cell)
        try:
            self._prepare(cell)
            if cell.victim == "trainer":
                self._hit_trainer(cell, verdict)
            else:
                self._hit_replica(cell, verdict)
            self._conclude(cell, verdict)
        except AssertionError as error:
            verdict.failure = f"{error} [{self._watch.told()}]"
            self._recover()
        return verdict

    # ---------------------------------------------------------------- the two kinds of cells

    def _hit_replica(self, cell, verdict):
        replica = self.service.replicas[self._turn % len(self.service.replicas)]
        pids = replica_pids(replica.actor)
        victim, name = pids[cell.victim], replica.replica_id
        marker = self._hold(cell, [replica])
        version = self._begin_push(cell, marker)
        if cell.phase == "generating":
            wait_until(lambda: self.service.load.in_flight(name), 30, lambda: f"requests on {name}")
        struck_at = time.monotonic()
        strike(victim, cell.signal)
        marker.unlink(missing_ok=True)
        limit_s = NOTICED_IN_PUSH_S if cell.is_during_push else NOTICED_S[cell.signal]
        noticed_at = self._await_out_of_service(name, struck_at, limit_s)
        verdict.noticed_s = noticed_at - struck_at
        is_awake = cell.signal == "stop" and wake(victim)  # before the supervisor ends it
        if cell.phase == "idle":
            self.traffic.start()
        begin = struck_at if cell.is_during_push else time.monotonic()
        self._end_push(version or self._begin_push(cell), verdict, begin)
        if is_awake:
            verdict.notes.append(f"awake: {self._fenced(replica.actor)}")
        self._await_repair(cell, struck_at, verdict)
        now = next(one for one in self.service.replicas if one.replica_id == name)
        if now.actor == replica.actor:  # a stale one that woke up takes the next push
            assert is_awake, f"replica {name} was hit, and is still the same"
            verdict.notes.append("not restarted")
        else:
            left = [kind for kind, pid in pids.items() if is_alive(pid)]
            assert not left, f"replica {name} was restarted, and its old processes live: {left}"

    def _hit_trainer(self, cell, verdict):
        old, self._trainer = self._trainer, self._new_trainer()
        try:
            self._trainer.attach(self.service.name)  # before: it takes longer than a push
            replicas = self.service.replicas
            marker = self._hold(cell, [replicas[self._turn % len(replicas)]])
            self._begin_push(cell, marker, old)
            struck_at = time.monotonic()
            strike(old.pid, cell.signal)
            marker.unlink(missing_ok=True)
            if cell.phase == "idle":
                self.traffic.start()
            released_at = wait_until(self._none_updating, NOTICED_IN_PUSH_S, self._told)
            verdict.noticed_s = released_at - struck_at
            begin = time.monotonic()
            self._end_push(self._begin_push(cell), verdict, begin)
            self._await_repair(cell, struck_at, verdict)
            if cell.signal == "stop":
                wake(old.pid)
                if cell.is_during_push:  # it hears that others have gone on
                    _, answer = old.answer(PUSHED_S)
                    verdict.notes.append(f"the old trainer: {_brief(answer)}")
        finally:
            old.end()

    def _none_updating(self):
        states = [getattr(one, "state", None) for one in self._reports().values()]
        return ReplicaState.UPDATING not in states and time.monotonic()

    # ---------------------------------------------------------------- steps of a cell

    def _prepare(self, cell):
        self._turn += 1
        self._watch.forget()
        self._trainer.attach(self.service.name)
        if cell.transport in UNPAUSED:
            self.push(cell.transport)  # the first one by a trainer, or to an engine, pauses
            self.push(cell.transport, pauses=False)  # and so the cell's own does not
        if cell.phase != "idle":
            self.traffic.start()

    def _hold(self, cell, replicas):
        """Has the coming push wait where the cell says; returns the file that holds it up."""
        marker = self.directory / f"held-{self._turn}"
        if cell.is_during_push and cell.point.where != "trainer":
            for replica in replicas:
                if cell.point.where == "actor":
                    ref = replica.actor.hold_at.remote(cell.point.at, str(marker))
                else:
                    plan = {"at": cell.point.at, "touch": str(marker)}
                    ref = replica.actor.collective_rpc.remote("sync_plan", kwargs=plan)
                ray.get(ref, timeout=30)
        return marker

    def _begin_push(self, cell, marker=None, trainer=None):
        """Has the trainer push the next version; with a marker, waits until it is held up there."""
        if marker is not None and not cell.is_during_push:
            return None
        held = {}
        if marker is not None and cell.point.where == "trainer":
            held = {"at": cell.point.at, "path": str(marker)}
        self._tell_push(trainer or self._trainer, cell.transport, **held)
        if marker is not None:
            wait_until(marker.exists, REACH_S, lambda: f"{cell.point} was not reached")
        return self._newest

    def _tell_push(self, trainer, transport, **held):
        self._newest += 1
        self._sent.add(self._newest)
        if transport in UNPAUSED:
            self._kept.add(self._newest)
        trainer.tell(
            "push", version=self._newest, transport=transport, timeout_s=PUSH_TIMEOUT_S, **held
        )

    def _end_push(self, version, verdict, since):
        """Takes the trainer's answer, a report or an error that it can go on after."""
        came_at, answer = self._trainer.answer(PUSHED_S)
        verdict.pushed_s = came_at - since
        verdict.push = _brief(answer)
        if "error" not in answer:
            assert answer["holders"], f"nobody holds what was pushed: {answer}"
            self._committed = max(self._committed, version)

    def _await_out_of_service(self, name, since, seconds):
        return wait_until(
            lambda: self._watch.out_of_service_at(name, since),
            seconds - (time.monotonic() - since),
            lambda: f"requests still go to replica {name}",
        )

    def _fenced(self, actor):
        """Raises if a replica that missed a push would serve again as it is; says what it does.

        One that is still in the update may serve when that has ended, if it has the version then.
        """
        deadline = time.monotonic() + PUSH_TIMEOUT_S
        while True:
            try:
                report = ray.get(actor.report.remote(), timeout=5)
            except (RayActorError, GetTimeoutError) as error:
                return type(error).__name__
            if report.state is not ReplicaState.UPDATING:
                break
            assert time.monotonic() < deadline, f"the update does not end: {report}"
            time.sleep(0.1)
        late = report.weight_version is None or report.weight_version < self._committed
        assert not (late and report.state.admits_requests), f"it is not fenced: {report}"
        return str(report.state)

    def _await_repair(self, cell, since, verdict):
        """Waits until every replica serves, and the newest version.

        One that was restarted, or whose update broke off, may have to wait for the next push.
        """
        left_s = REPAIRED_S - (time.monotonic() - since)
        patience = Patience(self._all_alive, CATCH_UP_S)
        wait_until(lambda: self._all_serve() or patience(), left_s, self._told, poll_s=0.2)
        if not self._all_serve():
            verdict.notes.append("repaired by the next push")
            self.push(cell.transport)
            wait_until(self._all_serve, REACH_S, self._told)
        verdict.repaired_s = time.monotonic() - since

    def _all_serve(self):
        held = [
            one.weight_version if one.state is ReplicaState.SERVING else None
            for one in self._reports().values()
            if isinstance(one, EngineReport)
        ]
        known = [one.state.admits_requests for one in self.service.load.snapshots()]
        whole = len(held) == len(known) == self.service.num_replicas and all(known)
        return whole and None not in held and min(held) == max(held) >= self._committed

    def _all_alive(self):
        """Whether every replica has an engine that takes pushes."""
        states = [getattr(one, "state", None) for one in self._reports().values()]
        alive = (ReplicaState.SERVING, ReplicaState.STALE)
        return len(states) == self.service.num_replicas and all(one in alive for one in states)

    def _conclude(self, cell, verdict):
        """A last push must reach everybody; then all that was answered is looked at."""
        for replica in self.service.replicas:  # what was planned may not have happened
            ray.get(replica.actor.hold_at.remote(), timeout=30)
            ray.get(replica.actor.collective_rpc.remote("sync_plan"), timeout=30)
        version = self.push(cell.transport)
        time.sleep(0.5)  # some more requests, under the last version
        verdict.num_answered, verdict.num_errors = self.check_answers()
        self.check_parameters(version)
        if cell.transport == "p2p":
            self.check_memory()

    def check_memory(self):
        """Raises unless what dead processes had is given back: each worker has two memories."""
        pids = [replica_pids(one.actor) for one in self.service.replicas]
        workers = [weight_memories(one["worker"]) for one in pids]
        memories = set.union(*(inodes for inodes, _ in workers))
        assert [num for _, num in workers] == [2] * len(pids), f"the workers hold {workers}"
        assert len(memories) == 2 * len(pids), f"the workers hold {workers}"
        held, num = weight_memories(self._trainer.pid)
        assert held <= memories, f"the trainer holds {held}, the workers {memories}"
        assert num <= len(memories), f"the trainer has {num} descriptors of {held}"
        others = [weight_memories(one[kind]) for one in pids for kind in ("actor", "core")]
        assert others == [(set(), 0)] * len(others), f"actors and cores hold {others}"

    def push(self, transport, *, pauses=True):
        """Pushes the next version, which every replica must take, maybe unpaused; returns it."""
        self._tell_push(self._trainer, transport)
        _, answer = self._trainer.answer(PUSHED_S)
        everybody = {one.replica_id for one in self.service.replicas}
        assert set(answer.get("holders", ())) == everybody, f"an undisturbed push: {answer}"
        assert pauses or not answer["paused"], f"an engine was paused: {answer}"
        self._committed = self._newest
        return self._newest

    def check_answers(self):
        """Ends the requests and raises unless all went well; how many were answered, and not."""
        asked = self.traffic.stop(DRAINED_S)
        counts = self._auditor.check(asked, self._sent, self._watch.outages(), self._kept)
        assert counts[0], "nobody was answered"
        assert not self._watch.bad_choices, f"chosen: {self._watch.bad_choices}"
        left = self.service.load.total_in_flight
        assert not left, f"{left} samples count as in flight, and nothing is"
        return counts

    def check_parameters(self, version):
        """Raises unless every replica computes with the parameters of ``version``, bit by bit."""
        calls = {
            one.replica_id: one.actor.collective_rpc.remote("sync_checksums")
            for one in self.service.replicas
        }
        assert len(calls) == self.service.num_replicas, f"only replicas {list(calls)} are left"
        found = {name: ray.get(call, timeout=30)[0] for name, call in calls.items()}
        self._auditor.check_parameters(version, found)

    def _recover(self):
        """After a cell that failed: what a new trainer, and time, can put right."""
        try:
            self.traffic.stop(DRAINED_S)
        except AssertionError:
            self.traffic.asked.clear()
        for marker in self.directory.glob("held-*"):
            marker.unlink()
        self._trainer.end()
        self._trainer = self._new_trainer()
        try:
            self._trainer.attach(self.service.name)
            wait_until(self._all_alive, REPAIRED_S, self._told, poll_s=0.5)
            self.push(self.engines.transport)
        except AssertionError as error:
            raise RuntimeError("the service cannot be used any more") from error

    # ---------------------------------------------------------------- helpers

    def _new_trainer(self):
        return TrainerProcess(
            self.checkpoint,
            self.directory / "stored",
            ray.get_runtime_context().gcs_address,
            self.directory / "trainers.log",
        )

    def _reports(self):
        return self.service.replicas.call_replicas("report", deadline_s=3.0)

    def _told(self):
        return "; ".join(
            f"replica {name} {getattr(one, 'state', one)!s} {getattr(one, 'weight_version', '')} "
            f"{getattr(one, 'reason', '')}"
            for name, one in self._reports().items()
        )


def _brief(answer):
    if "error" in answer:
        return f"error: {answer['error']}"[:300]
    return f"version {answer['version']} on {','.join(answer['holders'])}"

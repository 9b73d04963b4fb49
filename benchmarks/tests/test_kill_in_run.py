"""A run with kills: what is counted and compared, and its picture; engines are left out."""

import contextlib
import json
import threading
from signal import SIGCONT, SIGKILL, SIGSTOP
from types import SimpleNamespace

import pytest
import torch

from benchmarks import kill_in_run, kill_in_run_report, record
from benchmarks.kill_in_run import BEGUN_AGAIN, SYSTEMS, Killer, differences, train
from benchmarks.kill_in_run_report import LINES, step_of
from torchrl_vllm_sync import ReplicaState

SERVING, STARTING = ReplicaState.SERVING, ReplicaState.STARTING


class Scripted:
    """Service and set-up in one: of two replicas one is killed, and is away from then on."""

    def __init__(self):
        self.steps, self.retried, self.rows = 0, 0, 0
        self.states = [SERVING, SERVING]
        self.load = self.counts = self
        self.requests = self
        self.batches, self.sent, self.num_late = [], [], 0
        call = SimpleNamespace(remote=lambda *_: [4711])
        described = SimpleNamespace(remote=lambda: SimpleNamespace(pid=4712))
        actor = SimpleNamespace(__ray_call__=call, describe=described)
        self.replicas = [SimpleNamespace(replica_id="1", actor=actor)]
        self.free = threading.Event()

    def snapshots(self):
        return [SimpleNamespace(state=one) for one in self.states]

    def in_flight(self, _):
        return self.rows

    def totals(self):
        return {"retried": self.retried}

    @contextlib.contextmanager
    def watched(self, note):
        self.note = note
        yield

    def step(self):
        self.steps += 1
        self.rows = 16
        self.batches.append({"loss": torch.tensor([float(self.steps)])})
        assert self.steps != 2 or self.free.wait(20)

    def kill(self, *killed):
        self.sent.append(killed[1])
        if killed[1] is not SIGKILL:  # rows that are answered late are others once it goes on
            self.rows = 0 if killed[1] is SIGSTOP and self.num_late else 16
            self.num_late -= killed[1] is SIGSTOP and self.num_late > 0
            return
        self.killed = killed
        self.states[1], self.rows, self.retried = STARTING, 0, 16
        self.note()
        self.free.set()

    def sampled(self):
        return self.steps / 10, 0


@pytest.fixture
def scripted(monkeypatch):
    made = Scripted()
    monkeypatch.setattr(kill_in_run, "ray", SimpleNamespace(get=lambda found, timeout: found))
    monkeypatch.setattr(kill_in_run.os, "kill", made.kill)
    return made


def test_a_replica_is_killed_when_it_has_rows_and_all_serve(scripted):
    killer = Killer(scripted, 0, 0)
    found = train(scripted, scripted, steps=3, killer=killer)
    values = {name: [one for _, one in points] for (name, _), points in found.items()}
    assert values == {
        "replicas serving": [2, 1],
        "reward": [0.1, 0.2, 0.3],
        "loss": [1, 2, 3],
        BEGUN_AGAIN: [16],
    }
    assert scripted.sent == [SIGSTOP, SIGKILL]
    assert [(word, rows) for _, rows, word in killer.kills] == [
        ({4711: "engine core", 4712: "actor"}[scripted.killed[0]], 16)
    ]


def test_a_replica_whose_rows_are_answered_before_it_stands_goes_on(scripted):
    scripted.num_late = 2
    train(scripted, scripted, steps=3, killer=Killer(scripted, 0, 0))
    assert scripted.sent == [SIGSTOP, SIGCONT] * 2 + [SIGSTOP, SIGKILL]


def test_a_run_in_which_nothing_could_be_killed_says_so(scripted):
    scripted.free.set()
    scripted.states[1] = STARTING
    with pytest.raises(RuntimeError, match="nothing was killed in 3 steps"):
        train(scripted, scripted, steps=3, killer=Killer(scripted, 0, 0))
    assert BEGUN_AGAIN not in dict(train(scripted, scripted, steps=1))


def test_every_bit_of_every_row_is_compared():
    def batches():
        values = {"tokens": torch.arange(12).view(3, 4), "loss": torch.zeros(1)}
        return [{name: one.clone() for name, one in values.items()} for _ in range(2)]

    assert [*differences(batches(), batches())] == []
    assert [*differences(batches(), batches()[:1])] == ["2 batches and 1"]
    other = batches()
    other[1]["tokens"][2, 3] += 1
    other[0]["loss"][0] = -0.0
    wanted = ["batch 0: loss of row 0", "batch 1: tokens of row 2"]
    assert [*differences(batches(), other)] == wanted
    other[1]["tokens"] = other[1]["tokens"][:2]
    assert [*differences(batches(), other)][1] == "batch 1: tokens of [3, 4] and of [2, 4]"


def test_a_picture_lies_beside_its_record(tmp_path, monkeypatch):
    def made(system, metric, at_s, samples):
        return {
            "case": "a", "system": system, "metric": metric, "at_s": at_s, "samples": samples
        }  # fmt: skip

    metrics = ("reward", "loss")
    records = [made(one, of, [1.0, 9.0], [0.1, 0.5]) for one in SYSTEMS for of in metrics]
    records.append(made("killed", "replicas serving", [0.0, 2.1, 7.0], [2.0, 1.0, 2.0]))
    records.append(made("killed", BEGUN_AGAIN, [2.0], [16.0]))
    run = {"hardware": "cpu2", "records": records}
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / "kill_in_run_a.json").write_text(json.dumps(run))
    assert kill_in_run_report.main() == 0
    assert (tmp_path / "kill_in_run_a.png").read_bytes().startswith(b"\x89PNG")


def test_moments_are_shown_among_steps():
    assert [step_of(at, [2.0, 6.0]) for at in (0.0, 1.0, 2.0, 5.0, 9.0)] == [0, 0.5, 1, 1.75, 2]


def test_every_system_has_a_line():
    assert tuple(LINES) == SYSTEMS

"""A run with a kill: when it ends, what is counted, and its picture; engines are left out."""

import contextlib
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import kill_in_run, kill_in_run_report
from benchmarks.kill_in_run import BEGUN_AGAIN, SYSTEMS, Answers, OverService, strike, train
from benchmarks.kill_in_run_report import LINES, returned_at
from torchrl_vllm_sync import ReplicaState

SERVING, STARTING = ReplicaState.SERVING, ReplicaState.STARTING


class Scripted:
    """Service and set-up in one: steps take 10 s, and what is killed is away for three of them."""

    def __init__(self, now):
        self.now, self.steps = now, 0
        self.away_from: int | None = None
        self.states = [SERVING, SERVING]
        self.load = self
        self.actors = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _: [4711]))]

    def snapshots(self):
        return [SimpleNamespace(state=one) for one in self.states]

    def status(self):
        return SimpleNamespace(
            replicas=[SimpleNamespace(replica_id=one, in_flight=16) for one in "01"]
        )

    @contextlib.contextmanager
    def watched(self, note):
        self.note = note
        yield

    def become(self, state):
        self.states[1] = state
        self.note()

    def step(self):
        self.steps += 1
        self.now[0] += 10
        self.rows, self.versions = Counter({"0": 16, "1": 16}), {self.steps}
        if self.steps == self.away_from:
            self.rows = Counter({"0": 30, "1": 2})
            self.become(STARTING)
        elif self.away_from and self.steps == self.away_from + 3:
            self.become(SERVING)

    def sampled(self):
        return self.steps / 10, 0


@pytest.fixture
def now(monkeypatch):
    """The time, which only passes where a script says so."""
    at = [100.0]

    def sleep(seconds):
        at[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: at[0], sleep=sleep)
    monkeypatch.setattr(kill_in_run, "time", clock)
    monkeypatch.setattr(kill_in_run, "ray", SimpleNamespace(get=lambda found, timeout: found))
    return at


def test_a_run_without_a_kill_ends_when_its_time_is_over(now):
    scripted = Scripted(now)
    found = train(scripted, scripted, seconds=25, kill_at=None)
    assert dict(found) == {
        ("replicas serving", "replicas"): [(0, 2)],
        ("reward", "reward"): [(10, 0.1), (20, 0.2), (30, 0.3)],
        ("version", "version"): [(10, 1), (20, 2), (30, 3)],
        ("rows", "rows"): [(10, 32), (20, 32), (30, 32)],
    }


def test_a_run_with_a_kill_goes_on_until_all_serve_for_a_while(now, monkeypatch):
    monkeypatch.setattr(kill_in_run, "strike", lambda service, pid, deadline: (115.0, 16))
    scripted = Scripted(now)
    scripted.away_from = 2
    found = train(scripted, scripted, seconds=25, kill_at=2)
    assert found["replicas serving", "replicas"] == [(0, 2), (20, 1), (50, 2)]
    assert found[BEGUN_AGAIN, "rows"] == [(15, 14)]
    assert scripted.steps == 6  # 3.125 s after the return at least
    scripted = Scripted(now)
    scripted.states[1] = STARTING
    with pytest.raises(TimeoutError, match="1 replicas serve after 300 s"):
        train(scripted, scripted, seconds=25, kill_at=None)


def test_a_replica_is_killed_when_it_is_still_at_work_after_a_moment(now, monkeypatch):
    killed, held = [], iter([0, 16, 0, 8, 5])

    def status():
        return SimpleNamespace(replicas=[SimpleNamespace(in_flight=next(held))])

    monkeypatch.setattr(kill_in_run.os, "kill", lambda *told: killed.append(told))
    assert strike(SimpleNamespace(status=status), 4711, 200.0)[1] == 8
    assert killed == [(4711, kill_in_run.signal.SIGKILL)]
    idle = SimpleNamespace(status=lambda: SimpleNamespace(replicas=[SimpleNamespace(in_flight=0)]))
    with pytest.raises(TimeoutError, match="never seen"):
        strike(idle, 4711, now[0] + 1)


def test_rows_are_counted_by_the_replica_that_answered(monkeypatch):
    def step(setup):
        setup.counted()
        return 1.0

    def answer(name, number):
        return SimpleNamespace(
            replica_id=name, outputs=[None] * number, min_version=3, max_version=3
        )

    outputs = [answer("0", 8), answer("1", 4), answer("0", 8)]
    monkeypatch.setattr(OverService, "step", step)
    monkeypatch.setattr(OverService, "counted", lambda _: outputs)
    setup = object.__new__(Answers)
    for _ in range(2):
        setup.step()
        assert (setup.rows, setup.versions) == ({"0": 16, "1": 4}, {3})


def test_a_picture_lies_beside_its_record(tmp_path, monkeypatch):
    def record(system, metric, at_s, samples):
        return {
            "case": "a", "system": system, "metric": metric, "at_s": at_s, "samples": samples
        }  # fmt: skip

    records = [record(one, "reward", [1.0, 9.0], [0.1, 0.5]) for one in SYSTEMS]
    records.append(record("killed", "replicas serving", [0.0, 2.1, 7.0], [2.0, 1.0, 2.0]))
    records.append(record("killed", BEGUN_AGAIN, [2.0], [16.0]))
    run = {"hardware": "cpu2", "records": records}
    monkeypatch.setattr(kill_in_run_report, "RESULTS", tmp_path)
    (tmp_path / "kill_in_run_a.json").write_text(json.dumps(run))
    assert kill_in_run_report.main() == 0
    assert (tmp_path / "kill_in_run_a.png").read_bytes().startswith(b"\x89PNG")


def test_the_return_is_the_first_moment_after_the_kill_with_as_many_replicas_as_before():
    at_s, numbers = [0.0, 5.0, 6.0, 11.0, 30.0, 40.0], [2.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    assert returned_at((at_s, numbers), 10.0) == 30
    with pytest.raises(ValueError, match="did not return"):
        returned_at((at_s, numbers), 35.0)


def test_every_system_has_a_line():
    assert tuple(LINES) == SYSTEMS

"""Rewards, limits and records of the GRPO benchmark; systems and engines are left out."""

import argparse
import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import grpo_step
from benchmarks.grpo_step import CASES
from benchmarks.grpo_systems import Bound, Learner
from benchmarks.peers import trl_grpo
from benchmarks.peers.trl_grpo import TRL, questions, score
from benchmarks.phases import Clock
from torchrl_vllm_sync.testing import make_tiny_checkpoint, token_log_probs


class Steady:
    """A system whose every step takes the same, and whose first one a hundred times that."""

    def __init__(self, name, turns):
        self.name, self.turns, self.closed = name, turns, False

    def parts(self):
        return {"service": lambda asked: self.turns.append((self.name, len(asked)))}

    def step(self):
        self.turns.append(self.name)
        size = 100.0 if self.turns.count(self.name) == 1 else 1.0
        return {"generate": size, "reward": size, "backward": size / 2, "push": size / 2}

    def close(self):
        self.closed = True


@pytest.fixture
def bench():
    case = CASES["smoke"]
    asked = lambda: [[1]] * case.rows  # noqa: E731
    return SimpleNamespace(case=case, clock=Clock(), asked=asked)


def test_systems_take_turns_and_the_first_round_does_not_count(bench):
    turns = []
    systems = [Steady(name, turns) for name in ("bound", "ours", "trl")]
    samples = grpo_step.take_turns(bench, systems, 3, limit_s=3600)
    steps = [one for one in turns if isinstance(one, str)]
    assert [sorted(steps[at : at + 3]) for at in range(0, 12, 3)] == [["bound", "ours", "trl"]] * 4
    assert len({steps[at] for at in range(0, 12, 3)}) == 3  # each was first
    assert turns.count(("ours", bench.case.rows)) == 4
    for found in samples.values():
        assert found["step", "s"] == [3.0] * 3
        assert found["collect", "s"] == [2.0] * 3
        assert found["loss", "s"] == [0.5] * 3
        assert found["throughput", "tokens/s"] == [bench.case.rows * bench.case.tokens / 3] * 3
        assert len(found["service", "s"]) == 3


def test_parts_may_be_run_more_often_than_steps(bench):
    turns = []
    samples = grpo_step.take_turns(bench, [Steady("ours", turns)], 2, limit_s=3600, parts=3)
    assert len(samples["ours"]["service", "s"]) == 6
    assert len(samples["ours"]["step", "s"]) == 2


def test_a_round_that_would_pass_the_limit_is_not_begun(bench, monkeypatch):
    times = itertools.count(0, 10)
    monkeypatch.setattr(grpo_step.time, "monotonic", lambda: float(next(times)))
    turns = []
    samples = grpo_step.take_turns(bench, [Steady("ours", turns)], 9, limit_s=45)
    assert 1 <= len(samples["ours"]["step", "s"]) < 9
    samples = grpo_step.take_turns(bench, [Steady("ours", turns)], 9, limit_s=0)
    assert len(samples["ours"]["step", "s"]) == 1  # the first that counts is always made


def test_the_record_says_what_stopped_trl_and_what_stops_others_is_raised(
    bench, monkeypatch, tmp_path, capsys
):
    def fails(_):
        raise ImportError("no module of that name")

    ours = Steady("ours", [])
    monkeypatch.setattr(grpo_step, "Bench", lambda *_: bench)
    monkeypatch.setattr(grpo_step, "SYSTEMS", {"ours": lambda _: ours, "trl": fails})
    sizes = {"parts": 1, "replicas": 1, "colocate": False, "repetitions": 1, "limit_s": 3600.0}
    arguments = argparse.Namespace(systems=["trl", "ours"], smoke=True, **sizes)
    recorder, samples = grpo_step.run("smoke", None, None, arguments)
    assert ours.closed
    grpo_step.report(recorder, "smoke", samples)
    assert "no module of that name" in capsys.readouterr().out
    run = json.loads(recorder.write(smoke=True, directory=tmp_path).read_text())
    assert run["benchmark"] == "grpo_step_smoke"
    assert run["notes"] == ["trl did not run: ImportError: no module of that name"]
    assert {one["system"] for one in run["records"]} == {"ours"}

    monkeypatch.setitem(grpo_step.SYSTEMS, "ours", fails)
    with pytest.raises(ImportError, match="no module of that name"):
        grpo_step.run("smoke", None, None, arguments)


@pytest.mark.parametrize(
    ("num_gpus", "where", "asked"),
    [(0, {}, 0), (1, {"alone": True}, 0), (1, {"sleeps": True}, 0), (2, {}, 1)],
)
def test_trl_asks_for_a_gpu_of_its_own_or_shares_the_only_one(monkeypatch, num_gpus, where, asked):
    given = {}
    begin = SimpleNamespace(remote=lambda *_, **settings: given.update(settings))

    def spawn(_, **about):
        given.update(about)
        return SimpleNamespace(begin=begin)

    monkeypatch.setattr(trl_grpo, "spawn", spawn)
    monkeypatch.setattr(trl_grpo.metadata, "version", lambda _: "1.16.0")
    monkeypatch.setattr(trl_grpo.ray, "get", lambda *_, **__: None)
    monkeypatch.setattr(trl_grpo.torch.cuda, "device_count", lambda: num_gpus)
    TRL("", [], first_step=False, case=CASES["smoke"], **where)
    gpus = {"num_gpus": asked, "sees_all": not asked}  # it refuses to see several
    assert given == {**gpus, "case": CASES["smoke"], "sleeps": "sleeps" in where}


def test_trl_does_not_share_the_only_gpu_with_an_engine_that_stays_awake(monkeypatch):
    monkeypatch.setattr(trl_grpo.metadata, "version", lambda _: "1.16.0")
    monkeypatch.setattr(trl_grpo.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="another GPU"):
        TRL("", [])


def test_the_bound_computes_log_probabilities_of_the_answers_alone(tmp_path, bench):
    case = dataclasses.replace(CASES["smoke"], tokens=3)
    learner = Learner(make_tiny_checkpoint(tmp_path, num_hidden_layers=1), bench.clock)
    one = SimpleNamespace(case=case, clock=bench.clock, learner=learner)
    bound = Bound(one)
    batch = bound.batch([[7, 8, 9, 10], [7, 8]])
    assert batch["input_ids"].shape == (2, 7)
    assert batch["attention_mask"].tolist() == [[1] * 7, [0, 0, *[1] * 5]]
    loss = bound.loss(batch)
    log_probs = token_log_probs(learner.model, batch["input_ids"][0].tolist()).flatten()[-3:]
    alone = bound.loss({name: value[:1] for name, value in batch.items()})
    assert alone.item() == pytest.approx(-log_probs.mean().item(), rel=1e-4)
    before = [one.clone() for one in learner.model.parameters()]
    learner.step([batch, batch], bound.loss)
    assert not all(map(torch.equal, before, learner.model.parameters()))
    assert {"log-probabilities", "backward", "optimizer"} <= bench.clock.take().keys()
    assert loss.item() > 0


def test_the_right_sum_is_rewarded_more_and_the_shorter_of_two_answers(capsys):
    query = next(itertools.islice(questions(), 99, None))["query"][0]
    assert query == "What is 100 + 11?"
    long, right, short = score([query] * 3, ["it is 112, I say", "111", "112"])
    assert right > 0.9 > short > long

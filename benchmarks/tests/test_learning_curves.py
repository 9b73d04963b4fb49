"""Curves, their pictures, and that set-ups are asked the same; engines are left out."""

import argparse
import itertools
import json
from types import SimpleNamespace

import pytest
from tensordict import set_list_to_stack

from benchmarks import grpo_systems, learning_curves, learning_curves_report, record
from benchmarks.grpo_systems import Case
from benchmarks.learning_curves import SETUPS, OverService, OverTRL, curve, parsed
from tests.unit.test_policy import CannedService
from torchrl_vllm_sync import TextReward
from torchrl_vllm_sync.rl.statistics import GPUUse
from torchrl_vllm_sync.testing import make_tiny_checkpoint

CASE = Case("", 8, 9, minibatch=4, group=4)


class Scripted:
    """A set-up whose steps take 3 s, and which samples ahead for 1 s more."""

    def __init__(self, now):
        self.now, self.steps = now, 0

    def step(self):
        self.steps += 1
        return {"sample": 1.0, "loss": 2.0}

    def settle(self):
        self.now[0] += 1

    def sampled(self):
        return 0.5, 100

    def evaluate(self):
        self.now[0] += 1000
        return self.steps / 100


@pytest.fixture
def now(monkeypatch):
    """The time, which only passes where a set-up says so."""
    at = [0.0]
    clock = SimpleNamespace(monotonic=lambda: at[0], perf_counter=lambda: at[0])
    monkeypatch.setattr(learning_curves, "time", clock)
    return at


def test_the_clock_stands_still_during_evaluations_and_counts_what_is_sampled_ahead(now):
    found = curve(Scripted(now), GPUUse(), seconds=12, every_s=5, deadline=1e9)
    assert {name: samples for (name, _), samples in found.items()} == {
        "seconds of training": [0, 7, 14],
        "held-out accuracy": [0, 0.02, 0.04],
        "steps": [0, 2, 4],
        "mean reward": [0.5, 0.5],
        "throughput": [100 / 7, 100 / 7],
        "sample, mean of steps": [1],
        "loss, mean of steps": [2],
    }


def test_a_curve_ends_at_its_deadline_after_a_step_and_an_evaluation(now):
    found = curve(Scripted(now), GPUUse(), seconds=1e9, every_s=1e9, deadline=1000)
    assert found["steps", "steps"] == [0, 1]
    assert found["held-out accuracy", "share"] == [0, 0.01]


class Service(CannedService):
    """Answers of another length each, and nobody to call by itself."""

    actors = (None,)
    weight_version = 3


class Updater:
    """Pushes nothing."""

    def __init__(self, service, **_):
        pass

    def push_weights(self):
        pass

    def disconnect(self):
        pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_set_ups_train_on_the_same_problems_in_the_same_order(tmp_path, monkeypatch):
    asked, given = [], {}

    def reward(dataset):
        def spy(queries, answers):
            asked.extend(key for key, _ in itertools.groupby(queries))
            return [float(len(one)) for one in answers]

        return TextReward(spy, over="ids")

    monkeypatch.setattr(learning_curves, "reward", reward)
    monkeypatch.setattr(grpo_systems, "WeightUpdater", Updater)
    trl = SimpleNamespace(step=None, sampled=None, close=None)
    monkeypatch.setattr(
        learning_curves, "TRL", lambda _, problems, **options: given.update(asked=problems) or trl
    )
    checkpoint = make_tiny_checkpoint(tmp_path, num_hidden_layers=1)
    arguments = argparse.Namespace(
        case=CASE, dataset="low-ids", seed=0, held_out=2, lr=1e-3, checkpoint=checkpoint
    )
    OverTRL("trl", arguments, None)
    wanted = [one["query"][0] for one in given["asked"][:6]]
    assert len({*wanted}) > 3
    for name in SETUPS[:3]:
        asked.clear()
        with set_list_to_stack(True):
            setup = OverService(name, arguments, Service())
            seconds = [sum(setup.step().values()) for _ in range(3)]
            mean_reward, num_tokens = setup.sampled()
            old = setup.old()
            setup.close()
        assert asked[:6] == wanted, name
        assert min(seconds) > 0
        assert sum(old["rows of each age, from 0", "rows"]) == 3 * CASE.rows
        assert mean_reward * 3 * CASE.rows <= num_tokens  # one step off has sampled more


def test_the_preset_of_the_task_is_tutorial_ones():
    arguments = parsed([])
    assert arguments.dataset == "low-ids"
    assert (arguments.case.rows, arguments.case.group, arguments.lr) == (32, 8, 5e-3)
    assert parsed(["--lr", "0"]).lr == 0
    assert parsed(["--rows-per-pass", "16"]).case.minibatch == 16
    with pytest.raises(SystemExit):
        parsed(["--rows-per-pass", "20"])


def run_of(setup, accuracies, hour=10, commit="new"):
    records = [
        {"case": "sums", "system": setup, "metric": metric, "samples": samples}
        for metric, samples in {
            "seconds of training": [0.0, 20.0],
            "held-out accuracy": accuracies,
        }.items()
    ]
    finished_at = f"2026-11-23T{hour}:00:00+00:00"
    return {"hardware": "h200x2", "finished_at": finished_at, "commit": commit, "records": records}


def test_a_picture_shows_each_set_ups_last_record_of_the_newest_commit(tmp_path, monkeypatch):
    older = [run_of(one, [0.1, 0.4], hour=11, commit="old") for one in ("ours", "one-off")]
    newest = [run_of("ours", [0.1, 0.5], hour=14), run_of("trl", [0.1, 0.3], hour=13)]
    runs = [*newest, run_of("ours", [0.1, 0.2], hour=12), *older]
    assert learning_curves_report.lines(runs) == {
        ("sums", "h200x2"): {"ours": ([0.0, 20.0], [0.1, 0.5]), "trl": ([0.0, 20.0], [0.1, 0.3])}
    }
    for one in (record, learning_curves_report):
        monkeypatch.setattr(one, "RESULTS", tmp_path)
    for at, run in enumerate(runs):
        (tmp_path / f"learning_curves_{at}.json").write_text(json.dumps(run))
    assert learning_curves_report.main() == 0
    assert (tmp_path / "learning_curves_sums_h200x2.png").read_bytes().startswith(b"\x89PNG")


def test_seconds_are_those_at_which_an_accuracy_was_first_reached():
    line = [0.0, 10.0, 20.0, 30.0], [0.1, 0.1, 0.3, 0.2]
    assert learning_curves_report.seconds_to(0.2, line) == pytest.approx(15)
    assert learning_curves_report.seconds_to(0.1, line) == 0


def test_every_set_up_has_a_line():
    assert tuple(learning_curves_report.SETUPS) == SETUPS

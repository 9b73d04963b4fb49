"""The tutorials' tasks: what answers are worth, what is held out, what PASS claims of steps."""

import contextlib
import importlib
import sys
import types
from itertools import islice
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack

from tests.unit.test_policy import TOKENIZER, CannedService
from torchrl_vllm_sync import PushReport, TextReward
from torchrl_vllm_sync.errors import VersionSpanError
from torchrl_vllm_sync.rl import grpo, tasks

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


class MadeUp:
    """Sums of a problem's number and one, whose scores are those of exact answers."""

    def __init__(self, seed, size):
        self.seed, self.size = seed, size

    def __getitem__(self, index):
        number = (self.seed + index) % 7
        answer = str(number + 1) if self.size > 1 else "in words"
        return {"question": f"What is {number} + 1?", "answer": answer}

    def score_answer(self, answer, entry):
        return 1 if answer == entry["answer"] else 0.25 if answer else 0


@pytest.fixture
def tutorial(monkeypatch):
    """Imports a module of the tutorials, beside a package that makes problems up."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    gym, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    gym.create_dataset = lambda name, *, size, seed, **settings: MadeUp(
        seed, 1 if name == "words" else size
    )
    gym.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)
    factory.DATASETS = {"chain_sum": None, "words": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    with set_list_to_stack(True):
        yield importlib.import_module


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 17.", "17"),
        ("42 - 25 = 17", "17"),
        ("42-25", "25"),
        ("It is -30, of course", "-30"),
        ("1,234 dollars", "1234"),
        ("about 2.50", "2.50"),
        ("#### 72", "72"),
        ("none", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_what_counts(text, number):
    assert tasks.last_number(text) == number


@pytest.mark.usefixtures("tutorial")
def test_answers_are_scored_by_the_data_set():
    said = ["3 + 1 is 4", "5", "I see", "4 is it, not 9"]
    problems = ["3 0", "3 0", "0 3", "0 10"]
    assert tasks.solved("chain_sum", [], said, problem=problems) == [1, 0.25, 0, 0.25]
    assert tasks.solved("words", [], [" in words\n", "in 3 words"], problem=["0 0", "0 0"]) == [
        1,
        0.25,
    ]
    right = ["6 * 7 is 42\n#### 42", "#### 1,000", "#### 5"]
    assert tasks.right_number([], ["so 42.", "1000", "no"], answer=right) == [1, 1, 0]
    assert tasks.right_number([], ["$42.00", "999", "5.5"], answer=right) == [1, 0, 0]
    assert tasks.low_ids([], [[1, 127, 128, 400], [], [5]]) == [0.5, 0, 1]


@pytest.mark.usefixtures("tutorial")
def test_no_problem_that_is_held_out_is_trained_on():
    kept = {one["query"][0] for one in tasks.held_out("chain_sum", 3)}
    trained = [one["query"][0] for one in islice(tasks.prompts("chain_sum", 5, 3), 40)]
    assert len(kept) == 3
    assert len({*trained}) == 4
    assert not kept & {*trained}
    assert kept & {one["query"][0] for one in islice(tasks.prompts("chain_sum", 5), 40)}


def test_each_problem_held_out_is_asked_once(tutorial, monkeypatch):
    task = tutorial("common.task")
    seen = []

    def reward(dataset):
        def spy(questions, answers, *, problem):
            seen.extend(problem)
            return [one.split()[1] == "2" for one in problem]

        return TextReward(spy)

    monkeypatch.setattr(tasks, "reward", reward)
    args = tutorial("01_grpo_sync").parse_args(["--dataset", "chain_sum", "--held-out", "5"])
    used, engines = [], CannedService(lengths=(1, 1))  # each token of version 4

    class Service:
        weight_version = 4

        def pinned(self, version, *, allow_last):
            assert (version, allow_last) == (None, True)
            return contextlib.nullcontext(self)

    def greedy(service):
        used.append(service)
        return grpo.make_policy(args.config, engines, TOKENIZER, temperature=0)

    assert greedy(None).sampling_params.temperature == 0
    service = Service()
    assert task.evaluate(args, service, greedy) == [pytest.approx(0.2)]
    assert used[-1] is service
    assert seen == [f"{tasks.HELD_OUT_SEED} {at}" for at in range(5)]
    engines = CannedService(lengths=(2, 2))
    with pytest.raises(VersionSpanError, match=r"version 4 was evaluated, .* are of \[3, 5\]"):
        task.evaluate(args, service, greedy)


DEFAULTS = {
    "a laptop": (0, [], ("low-ids", "tiny", 2, 40, 0.9)),
    "a laptop, a real model": (0, ["--model", "x"], ("chain_sum", "x", 2, 100, None)),
    "two GPUs": (2, [], ("chain_sum", "HuggingFaceTB/SmolLM2-135M-Instruct", 1, 100, None)),
    "GPUs, the tiny model": (4, ["--model", "tiny"], ("low-ids", "tiny", 2, 40, 0.9)),
    "by time": (3, ["--minutes", "2", "--model", "x"], ("chain_sum", "x", 2, sys.maxsize, None)),
}


@pytest.mark.parametrize("machine", DEFAULTS)
def test_the_task_is_one_for_the_machine_and_the_model(tutorial, monkeypatch, machine):
    num_gpus, argv, wanted = DEFAULTS[machine]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    args = tutorial("01_grpo_sync").parse_args(argv)
    found = (args.dataset, args.model, args.replicas, args.steps, args.reward_target)
    assert found == wanted
    assert args.lr == (5e-3 if args.model == "tiny" else 2e-5)
    assert bool(args.held_out) == (args.dataset != "low-ids")


REAL = [("01_grpo_sync", "--dataset=gsm8k"), ("02_grpo_async", "--dataset=gsm8k")]
REAL += [("03_multi_turn", "--model=x")]


@pytest.mark.parametrize(("name", "option"), REAL)
def test_real_models_run_without_a_gpu_and_say_that_it_takes_long(
    tutorial, monkeypatch, capsys, name, option
):
    datasets = types.ModuleType("datasets")
    datasets.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    parse_args = tutorial(name).parse_args
    args = parse_args([option])
    assert (args.engine_gpus, args.device, args.dtype) == (0, torch.device("cpu"), torch.float32)
    assert args.model != "tiny"
    assert "no GPU" in capsys.readouterr().out
    parse_args([])
    assert not capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        parse_args([option, "--replicas=2"])
    assert "--replicas 2 needs 3 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "installed", "why"),
    [
        (["--dataset", "sudoku"], False, "pip install reasoning-gym"),
        (["--dataset", "sudoku"], True, "must be one of low-ids, gsm8k, chain_sum, words"),
        (["--dataset", "low-ids", "--model", "x"], True, "is for --model tiny"),
    ],
)
def test_what_is_missing_is_named(tutorial, monkeypatch, capsys, argv, installed, why):
    module = tutorial("01_grpo_sync")
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        module.parse_args(argv)
    assert why in capsys.readouterr().err


def test_steps_end_by_their_number_or_by_time(tutorial):
    counted = tutorial("common.results").counted
    parse_args = tutorial("01_grpo_sync").parse_args
    assert [*counted(parse_args(["--steps", "3"]))] == [0, 1, 2]
    assert [*counted(parse_args(["--minutes", "0"]))] == []


@pytest.mark.parametrize("after", [0.2, float("nan")])
def test_a_step_that_made_another_model_is_no_pass(tutorial, after):
    claims = tutorial("common.claims")
    args = tutorial("01_grpo_sync").parse_args([])
    figures = {"version": 0, "reward": 0.95, "ess": 1.0, "truncated": 0, "seconds": 1.0}
    figures |= {"sample_s": 0.0, "train_s": 0.0, "push_ms": 1.0}
    good = claims.SyncStep(step=0, ess_without_push=0.9, **figures)
    bad = claims.SyncStep(step=1, ess_without_push=after, **figures)
    stale = claims.SyncStep(step=2, ess_without_push=0.9, **figures | {"ess": 0.99})
    assert claims.sync_shortcomings([good], args) == []
    assert len(claims.sync_shortcomings([good, bad], args)) == 1
    assert "step 1 " in claims.sync_shortcomings([good, bad], args)[0]
    assert "step 2: effective sample size 0.99" in claims.sync_shortcomings([good, stale], args)[0]


def test_rows_that_are_lost_late_or_too_old_are_no_pass(tutorial):
    claims = tutorial("common.claims")
    args = tutorial("02_grpo_async").parse_args(["--staleness", "1", "--groups", "2"])
    source = tasks.prompts(args.dataset, args.seed)
    asked = [[*next(source)["query"], *next(source)["query"]] * args.group_size for _ in range(3)]
    figures = {"reward": 0.5, "staleness": 1.0, "across": 0, "ess": 0.9, "wait_s": 0.0}
    figures |= {"train_s": 0.0, "push_ms": 1.0, "seconds": 1.0}

    def found(queries, *ages):
        steps = [
            claims.AsyncStep(step=at, version=at, max_staleness=age, **figures)
            for at, age in enumerate(ages)
        ]
        return claims.async_shortcomings(claims.AsyncRun(steps, queries), args)

    assert found(asked, 0, 1, 1) == []
    assert found(asked, 0, 1, 2) == ["a row was trained at age 2, above 1"]
    assert len(found([asked[0], asked[2], asked[1]], 0, 1, 1)) == 2
    assert len(found([asked[0], asked[1], asked[2][1:]], 0, 1, 1)) == 1
    args.staleness = 0
    assert found(asked, 0, 0, 0) == ["effective sample size 0.9000"]


def answers(*sampled_by):
    """Rows whose answers have so many tokens, of these versions, padded on the right."""
    longest = max(map(len, sampled_by))
    versions = [[*one, *[-1] * (longest - len(one))] for one in sampled_by]
    return TensorDict(
        {("policy_versions", "response"): torch.tensor(versions)}, batch_size=len(versions)
    )


def test_rows_that_were_thrown_away_are_no_pass(tutorial):
    work = tutorial("common.work").Work()
    batches = [answers([0, 0, 0], [0]), answers([0, 1], [1, 1, 1])]
    assert all(work.keep(batch) for batch in batches)
    work.train(batches[0], torch.zeros(2, 1, dtype=torch.int64))
    assert (work.generated, work.trained, work.ages) == ([3, 1, 2, 3], [3, 1], [0, 0])
    assert work.shortcomings(2) == []
    assert work.shortcomings(1) == ["2 rows were generated and not trained, above 1"]
    work.trained.append(4)
    assert work.shortcomings(2) == ["1 trained rows have lengths that no engine generated"]


def test_the_picture_shows_who_worked_when(tutorial):
    from matplotlib import pyplot as plt

    tutorial("common.claims")
    work = tutorial("common.work").Work(generated=[1, 2, 2, 60], trained=[2, 60], ages=[0, 2, 2])
    for step in range(3):
        work.trainer += [("wait_s", step, step + 0.25), ("train_s", step + 0.25, step + 0.5)]
        work.pushes.append(PushReport(began_at=step + 0.5, seconds=0.5, version=step, replicas=[]))
    work.in_flight = [(at / 4, {"0": at % 2, "1": 0}) for at in range(12)]
    figure = plt.figure()
    work.draw(figure)
    when, ages, lengths = figure.axes
    shown = {}
    for one in when.collections:
        spans = [path.get_extents() for path in one.get_paths()]
        shown[one.get_label()] = [(round(box.x0, 3), round(box.x1, 3)) for box in spans]
    plt.close(figure)
    assert [one.get_text() for one in when.get_yticklabels()] == [
        "trainer",
        "replica 0",
        "replica 1",
    ]
    assert shown["wait"] == [(0, 0.25), (1, 1.25), (2, 2.25)]
    assert shown["train"] == [(0.25, 0.5), (1.25, 1.5), (2.25, 2.5)]
    assert shown["push"] == [(0.5, 1), (1.5, 2)]  # the window ends with the last part
    assert shown["generate"][0] == (0.25, 0.5)
    assert [one.get_height() for one in ages.patches] == [1, 0, 2]
    assert sum(one.get_height() for one in lengths.patches[:-1]) == 4

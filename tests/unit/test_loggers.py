"""Pushes, rollouts and whole runs in TorchRL's own loggers."""

import csv as csv_module
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, pad_sequence
from torchrl.record.loggers import (
    CSVLogger,
    MLFlowLogger,
    ProcessLogger,
    TensorboardLogger,
    WandbLogger,
)

from tests.fakes.rl import Service, stamped_rows
from torchrl_vllm_sync import (
    DashboardLogger,
    LoadReport,
    PushReport,
    RunLog,
    log_pushes,
    log_rollouts,
)
from torchrl_vllm_sync.errors import RowLayoutError, UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import statistics as statistics_module
from torchrl_vllm_sync.weights.push import VersionHooks

LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])


class Pushes:
    """What is needed of a service that pushes."""

    def __init__(self):
        self.hooks = VersionHooks()
        self.register_version_hook = self.hooks.register

    def push(self, version, *replicas, **options):
        report = {
            "began_at": 1.0,
            "version": version,
            "transport": "memmap",
            "num_bytes": 64,
            "seconds": 0.5,
            "phases": {"publish_s": 0.2, "attempts": 2},
            "replicas": list(replicas),
        }
        self.hooks.announce(PushReport(**report | options))


def loaded(name, load_s, **counts):
    phases = {"load_s": load_s, "whole_pause_s": 2 * load_s, "num_kept": 3, **counts}
    return LoadReport(replica_id=name, version=1, **phases)


@pytest.fixture
def csv(tmp_path):
    return CSVLogger("run", str(tmp_path))


def scalars(logger):
    """Name to the pairs of step and value that the logger has written."""
    root = Path(logger.experiment.log_dir) / "scalars"
    return {
        path.relative_to(root).with_suffix("").as_posix(): [
            (int(step), float(value))
            for step, value in (line.split(",") for line in path.read_text().splitlines())
        ]
        for path in root.rglob("*.csv")
    }


def test_each_push_is_logged_at_its_version(csv):
    service = Pushes()
    stop = log_pushes(service, csv)
    held = LoadReport(replica_id="c", version=3, loaded=False, load_s=9.0)
    dead = LoadReport(replica_id="d", version=None, error="it died")
    service.push(3, loaded("a", 0.1), loaded("b", 0.25), held, dead, left_behind={"d": "it died"})
    service.push(5, loaded("a", 0.125), seconds=0.75)
    stop()
    service.push(6)
    logged = {name: found for name, found in scalars(csv).items() if any(one for _, one in found)}
    assert logged == {
        "push/seconds": [(3, 0.5), (5, 0.75)],
        "push/bytes": [(3, 64), (5, 64)],
        "push/left_behind": [(3, 1), (5, 0)],
        "push/publish_s": [(3, 0.2), (5, 0.2)],
        "push/attempts": [(3, 2), (5, 2)],
        "push/replica/load_s": [(3, 0.25), (5, 0.125)],
        "push/replica/whole_pause_s": [(3, 0.5), (5, 0.25)],
        "push/replica/num_kept": [(3, 6), (5, 3)],
    }


def test_two_loggers_hear_of_the_same_push(csv, tmp_path):
    service, other = Pushes(), CSVLogger("other", str(tmp_path))
    stops = [log_pushes(service, csv), log_pushes(service, other, prefix="weights")]
    service.push(1)
    assert scalars(csv)["push/seconds"] == scalars(other)["weights/seconds"] == [(1, 0.5)]
    for stop in stops:
        stop()


def test_what_a_logger_raises_leaves_the_push():
    class Full:
        def log_metrics(self, metrics, step=None):
            raise OSError("no space")

    service = Pushes()
    log_pushes(service, Full())
    with pytest.raises(OSError, match="no space"):
        service.push(1)


@LAYOUTS
def test_rollouts_say_lengths_ages_and_rewards(padded, csv):
    batch = stamped_rows(
        [1, 1, 4],
        [4],
        padded=padded,
        prompts=[4, 2],
        reasons=["length", "stop"],
        cached=[1, 2],
        queue_time=[0.5, math.nan],
        decode_time=[2.0, math.nan],
    )
    batch["next", "reward"] = torch.tensor([[[1.0]], [[0.5]]])
    wanted = {
        "rows": 2,
        "tokens": 4,
        "prompt_length": 3,
        "response_length": 2,
        "truncated": 0.5,
        "cached_fraction": 0.625,
        "queue_time": 0.5,
        "decode_time": 2,
        "tokens_per_second": 1,
        "staleness_span": 1.5,
        "staleness": 2.5,
        "staleness_max": 4,
        "reward": 0.75,
    }
    found = log_rollouts(csv, batch, 7, version=Service(5))
    assert found == wanted
    assert scalars(csv) == {f"rollout/{name}": [(7, value)] for name, value in wanted.items()}


def test_batches_that_carry_statistics_already_are_measured_all_the_same(csv):
    from torchrl_vllm_sync import GenerationStatistics

    batch = GenerationStatistics()(stamped_rows([1, 1], [1]))
    assert log_rollouts(csv, batch)["tokens"] == 3


def test_rows_of_several_steps_count_one_by_one(csv):
    steps = [stamped_rows([1, 2], [2, 2, 2], padded=True), stamped_rows([3], [3], padded=True)]
    batch = LazyStackedTensorDict(*steps, stack_dim=1)
    found = log_rollouts(csv, batch, version=3)
    assert (found["rows"], found["tokens"], found["staleness"]) == (4, 7, 0.75)


def test_what_is_unknown_is_not_logged(csv):
    rewards = [TensorDict({"next": {"reward": torch.ones(n, 1)}}) for n in (1, 3)]
    batch = LazyStackedTensorDict(*rewards, stack_dim=0)
    assert log_rollouts(csv, batch, 0, version=3) == {"rows": 2, "reward": 1}
    assert log_rollouts(csv, TensorDict({}, batch_size=3), 1) == {"rows": 3}
    assert log_rollouts(csv, stamped_rows([1], padded=True)[:0], 2) == {"rows": 0}
    assert set(scalars(csv)) == {"rollout/rows", "rollout/reward"}


def test_rows_that_are_stamped_by_halves_are_refused(csv):
    batch = stamped_rows([1], [2], padded=True)
    del batch["finish_reason"]
    with pytest.raises(UnstampedRowsError, match="finish_reason"):
        log_rollouts(csv, batch)
    with pytest.raises(UnsupportedArgumentError, match="version"):
        log_rollouts(csv, stamped_rows([1], padded=True), version="newest")
    with pytest.raises(UnsupportedArgumentError, match=r"got None; .* log rows of the buffer"):
        log_rollouts(csv, None)
    assert scalars(csv) == {}


def test_tensorboard_gets_the_same(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, service = TensorboardLogger("run", str(tmp_path)), Pushes()
    log_pushes(service, logger)
    service.push(3, loaded("a", 0.25))
    log_rollouts(logger, stamped_rows([1, 1, 4], [4]), 9, version=5)
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    found = {
        name: [(one.step, one.value) for one in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert found["push/replica/load_s"] == [(3, 0.25)]
    assert found["rollout/staleness"] == [(9, 2.5)]


# ---------------------------------------------------------------- on the dashboard


class Board:
    """A dashboard that keeps what is logged to it."""

    def __init__(self):
        self.shown = {}
        self.log = self.shown.__setitem__


def test_the_dashboard_shows_what_is_logged_and_another_logger_gets_it_too(csv):
    board = Board()
    logger = DashboardLogger(board, csv)
    logger.log_metrics({"loss": torch.tensor(0.5, dtype=torch.bfloat16), "ESS": 0.75}, step=3)
    logger.log_scalar("reward", torch.ones(1, 1), step=4)
    assert board.shown == {"loss": 0.5, "ESS": 0.75, "reward": 1.0}
    assert scalars(csv) == {"loss": [(3, 0.5)], "ESS": [(3, 0.75)], "reward": [(4, 1.0)]}
    with pytest.raises(NotImplementedError):  # of CSVLogger's
        logger.log_histogram("length", torch.arange(3))
    assert board.shown["length"] == [0.0, 1.0, 2.0]
    assert (logger.exp_name, logger.experiment) == (csv.exp_name, csv.experiment)


def test_a_logger_of_the_dashboard_alone_takes_all_that_loggers_take():
    board = Board()
    logger = DashboardLogger(board)
    logger.log_hparams({"lr": 1.0})
    logger.log_video("video", torch.zeros(1, 1, 3, 2, 2))
    logger.log_metrics({"a": torch.arange(3), "loss": [torch.ones((), requires_grad=True), 2.0]})
    logger.log_metrics(TensorDict({"b": {"c": torch.tensor(2)}}))
    logger.close()
    assert board.shown == {"a": [0.0, 1.0, 2.0], "loss": [1.0, 2.0], "b/c": 2.0}


@pytest.mark.parametrize("value", ["text", "5", None, ["5"], [[1.0], [1.0, 2.0]]])
def test_what_is_no_number_is_refused_before_anybody_gets_it(csv, value):
    board = Board()
    with pytest.raises(UnsupportedArgumentError, match="'name' must be a number or several"):
        DashboardLogger(board, csv).log_scalar("name", value)
    assert (board.shown, scalars(csv)) == ({}, {})


@LAYOUTS
def test_the_dashboard_gets_figures_of_single_rows_and_other_loggers_do_not(csv, padded):
    rows, board = stamped_rows([1, 1, 4], [4], padded=padded), Board()
    rows["next", "reward"] = torch.tensor([[[1.0]], [[0.5]]])
    found = log_rollouts(DashboardLogger(board, csv), rows, 1, version=Service(5))
    assert {f"rollout/{name}" for name in found} == scalars(csv).keys()
    by_row = {name: shown for name, shown in board.shown.items() if name.endswith(" by row")}
    assert by_row == {
        "rollout/staleness by row": [4, 1],
        "rollout/reward by row": [1.0, 0.5],
        "rollout/response_length by row": [3, 1],
    }


# ---------------------------------------------------------------- a whole run by one call


class Training(Pushes):
    """A service that trains: its version is that of its last push."""

    weight_version = 5


def told(rows, trainer, engine=None):
    """Rows of a prompt and two tokens, with texts and with log-probabilities of both sides."""
    number = len(rows)
    engine = engine or [[math.nan, -1.0, -2.0]] * number
    rows["log_probs", "full"] = torch.tensor(engine)
    rows["trainer_log_probs", "full"] = torch.tensor(trainer)
    rows["masks", "all_assistant_mask"] = torch.tensor([[False, True, True]] * number)
    return with_texts(rows)


def with_texts(rows):
    rows["text", "prompt"] = NonTensorStack(*[f"question {at}" for at in range(len(rows))])
    rows["text", "response"] = NonTensorStack(*[f'a|b\n"{at}", <i>' for at in range(len(rows))])
    rows["next", "reward"] = torch.arange(len(rows), dtype=torch.float32).view(-1, 1, 1)
    return rows


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by ``clock.append(seconds)`` alone."""
    passed = [100.0]
    monkeypatch.setattr(statistics_module.time, "perf_counter", lambda: sum(passed))
    return passed


@pytest.fixture
def no_gpus(monkeypatch):
    """As on a machine without: NVML is not asked."""
    monkeypatch.setattr(statistics_module.GPUUse, "between", lambda *_: None)


@pytest.mark.usefixtures("no_gpus")
def test_times_are_known_inside_with_only(csv, clock):
    log, rows = RunLog(csv), stamped_rows([1, 1], [4, 4], padded=True)
    clock.append(2.0)
    assert not [one for one in log(rows, 0) if one.startswith("step/")]
    with log:
        clock.append(2.0)
        assert log(rows, 1)["step/seconds"] == 2.0
    assert not [one for one in log(rows, 2) if one.startswith("step/")]


@pytest.mark.usefixtures("no_gpus")
def test_rows_are_as_old_as_a_version_says_and_not_the_service(csv):
    rows, service = stamped_rows([1, 1], [4, 4], padded=True), Training()
    with RunLog(csv, service) as log:
        ages = [log(rows, at, version=4 + at)["rollout/staleness"] for at in range(2)]
        own = log(rows, 2)["rollout/staleness"]
    assert ages[1] == ages[0] + 1
    assert own - ages[0] == service.weight_version - 4


@pytest.mark.usefixtures("no_gpus")
def test_one_call_logs_a_step_and_pushes_are_logged_as_they_commit(csv, clock):
    service = Training()
    rows = told(stamped_rows([1, 1], [4, 4], padded=True), [[0.0, -1.5, -2.0], [0.0, -1.0, -1.0]])
    with RunLog(csv, service) as log:
        clock.append(2.0)
        loss = TensorDict({"ESS": torch.tensor(0.75), "parts": {"kl": torch.tensor([1.0, 2.0])}})
        correction = {"ess": None, "kl": 0.5}
        found = log(rows, 7, loss=loss, mismatch=correction, lr=1e-3)
        service.push(6)
        clock.append(4.0)
        assert log(rows, 8)["step/tokens_per_s"] == 1.0
    service.push(7)
    written = scalars(csv)
    assert {name: dict(value)[7] for name, value in written.items() if 7 in dict(value)} == {
        name: pytest.approx(value) for name, value in found.items()
    }
    assert written["push/seconds"] == [(6, 0.5)]
    assert written["step/seconds"] == [(7, 2.0), (8, 4.0)]
    assert {name: found[name] for name in found if not name.startswith("rollout")} == {
        "step/seconds": 2.0,
        "step/tokens_per_s": 2.0,
        "loss/ESS": 0.75,
        "loss/parts/kl": 1.5,
        "mismatch/kl": 0.5,
        "lr": 1e-3,
    }
    assert (found["rollout/staleness"], found["rollout/reward"]) == (2.5, 0.5)


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_mismatch_and_ess_are_those_of_numpy(csv, padded):
    draw = np.random.default_rng(0)
    engine, trainer = -draw.exponential(size=(2, 5, 9)).astype(np.float32)
    engine[:, :4] = np.nan
    lengths = [9, 8, 7, 6, 5]
    rows = [
        TensorDict(
            {
                "log_probs": {"full": torch.tensor(one[:width])},
                "trainer_log_probs": {"full": torch.tensor(other[:width])},
                "masks": {"all_assistant_mask": torch.arange(width) >= 4},
            }
        )
        for one, other, width in zip(engine, trainer, lengths, strict=True)
    ]
    batch = LazyStackedTensorDict(*rows, stack_dim=0)
    if padded:
        batch = pad_sequence(rows)  # with zeros, which no mask counts
    taken = np.arange(9)[None] < np.array(lengths)[:, None]
    taken[:, :4] = False
    d = (trainer.astype(float) - engine)[taken]
    weights = np.exp(d)
    found = log_rollouts(csv, batch)
    assert found == {
        "rows": 5,
        "abs_log_ratio": pytest.approx(np.abs(d).mean()),
        "abs_log_ratio_max": pytest.approx(np.abs(d).max()),
        "kl": pytest.approx((np.exp(d) - 1 - d).mean()),
        "ess": pytest.approx(weights.sum() ** 2 / (d.size * (weights**2).sum())),
    }
    for row in batch.unbind(0):
        row["masks", "all_assistant_mask"][:] = True  # what the engine did not sample is left out
    if padded:
        batch["masks", "all_assistant_mask"] &= torch.tensor(taken)
    assert log_rollouts(csv, batch)["ess"] == found["ess"]
    del batch["trainer_log_probs"]
    assert log_rollouts(csv, batch) == {"rows": 5}


def test_weights_too_great_for_a_float_have_an_effective_sample_size(csv):
    rows = told(stamped_rows([1, 1], padded=True), [[0.0, 999.0, 999.0]])
    rows["log_probs", "full"] = torch.tensor([[math.nan, -1.0, -1.0]])
    assert log_rollouts(csv, rows)["ess"] == pytest.approx(1.0)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("change", "figures", "error", "names"),
    [
        ({"trainer_log_probs": [[0.0, math.nan, -1.0]]}, {}, RowLayoutError, "trainer_log_probs"),
        ({"trainer_log_probs": [[0.0, -1.0]]}, {}, RowLayoutError, "trainer_log_probs"),
        ({"log_probs": [[-1.0]]}, {}, RowLayoutError, "'log_probs'"),
        ({}, {"loss": {"ESS": "high"}}, UnsupportedArgumentError, "loss/ESS"),
        ({}, {"lr": object()}, UnsupportedArgumentError, "lr"),
        ({("text", "response"): torch.ones(1)}, {}, UnsupportedArgumentError, "response"),
        ({"step": -1}, {}, UnsupportedArgumentError, "step"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_logged(csv, change, figures, error, names):
    rows, step = told(stamped_rows([1, 1], padded=True), [[0.0, -1.0, -1.0]]), 0
    for key, value in change.items():
        if key == "step":
            step = value
        elif isinstance(value, list):
            rows[key, "full"] = torch.tensor(value)
        else:
            rows[key] = value
    with RunLog(csv, Training()) as log, pytest.raises(error, match=names):
        log(rows, step, **figures)
    assert scalars(csv) == {}
    assert not [*Path(csv.experiment.log_dir).glob("texts/*")]
    with pytest.raises(UnsupportedArgumentError, match="samples"):
        RunLog(csv, samples=-1)


def table(logger):
    with (Path(logger.experiment.log_dir) / "texts/rollout/samples.csv").open(newline="") as file:
        return list(csv_module.DictReader(file))


def test_samples_are_a_file_for_csv(csv):
    rows = with_texts(stamped_rows([3], [1, 2], [4], [5], [5], padded=True))
    with RunLog(csv, samples=3) as log:
        log(rows, 0)
        log(rows[:1], 1)
    lines = table(csv)
    assert [(one["step"], one["version"], one["reward"], one["prompt"]) for one in lines] == [
        ("0", "3", "0.0", "question 0"),
        ("0", "4", "2.0", "question 2"),
        ("0", "5", "4.0", "question 4"),
        ("1", "3", "0.0", "question 0"),
    ]
    assert [one["answer"] for one in lines[:2]] == ['a|b\n"0", <i>', 'a|b\n"2", <i>']


def test_of_samples_too_what_is_unknown_is_left_out(csv):
    rows = TensorDict({"text": {"response": NonTensorStack("yes")}}, batch_size=1)
    with RunLog(csv) as log:
        assert set(log(rows, 0)) >= {"rollout/rows", "step/seconds"}
    assert table(csv) == [{"step": "0", "version": "", "reward": "", "prompt": "", "answer": "yes"}]


def test_no_samples_where_none_are_asked_for_or_there_are_no_texts(csv):
    with RunLog(csv, samples=0) as none, RunLog(csv) as log:
        none(with_texts(stamped_rows([1], padded=True)), 0)
        log(stamped_rows([1], padded=True), 0)
        log(with_texts(stamped_rows([1], padded=True))[:0], 0)
    assert not [*Path(csv.experiment.log_dir).glob("texts/*")]


def test_samples_are_text_for_tensorboard_behind_the_dashboard_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorboardLogger("run", str(tmp_path))
    with RunLog(DashboardLogger(Board(), logger)) as log:
        log(with_texts(stamped_rows([3], padded=True)), 9)
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (found,) = events.Tensors("rollout/samples/text_summary")
    head, _, line = found.tensor_proto.string_val[0].decode().splitlines()
    assert (found.step, head) == (9, "| step | version | reward | prompt | answer |")
    assert line == '| 9 | 3 | 0.0 | question 0 | a\\|b<br>"0", &lt;i&gt; |'


def test_samples_are_text_for_loggers_that_take_it():
    class Texts:
        def __init__(self):
            self.texts = []

        def log_metrics(self, metrics, step=None):
            pass

        def log_str(self, name, value, step=None):
            self.texts.append((name, value.count("\n"), step))

    rows, texts = with_texts(stamped_rows([3], [3], padded=True)), Texts()
    with RunLog(texts) as log:
        log(rows, 1)
    assert texts.texts == [("rollout/samples", 3, 1)]


@pytest.mark.slow
def test_a_logger_in_another_process_gets_the_figures_and_no_table(csv):
    there = Path(csv.log_dir) / "there"
    logger = ProcessLogger(CSVLogger, exp_name="run", log_dir=str(there))
    try:
        with RunLog(logger) as log:
            log(with_texts(stamped_rows([3], padded=True)), 1)
    finally:
        logger.shutdown()
    assert (there / "run/scalars/rollout/reward.csv").read_text() == "1,0.0\n"
    assert not [*there.glob("run/texts/*")]


def test_samples_are_a_table_for_wandb(monkeypatch):
    table = SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=table))
    logger, logged = object.__new__(WandbLogger), {}
    monkeypatch.setattr(logger, "log_metrics", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(
        logger, "log_scalar", lambda name, value, step: logged.update({name: (value, step)})
    )
    with RunLog(logger) as log:
        log(with_texts(stamped_rows([3], padded=True)), 2)
    shown, step = logged["rollout/samples"]
    assert (shown.columns, step) == (["step", "version", "reward", "prompt", "answer"], 2)
    assert shown.data == [[2, 3, 0.0, "question 0", 'a|b\n"0", <i>']]


def test_samples_are_an_artifact_of_mlflow_for_each_step(monkeypatch):
    texts = {}
    module = SimpleNamespace(log_text=lambda text, artifact: texts.update({artifact: text}))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    logger = object.__new__(MLFlowLogger)
    monkeypatch.setattr(logger, "log_metrics", lambda *_, **__: None, raising=False)
    with RunLog(logger) as log:
        log(with_texts(stamped_rows([3], padded=True)), 2)
    ((artifact, text),) = texts.items()
    assert artifact == "rollout/samples/step-2.md"
    assert text.startswith("| step | version |")


def test_gpus_are_logged_where_they_are_known(monkeypatch, csv, clock):
    monkeypatch.setattr(
        statistics_module.GPUUse,
        "between",
        lambda _, *window: [0.25, 0.75] * (window == (100, 102)),
    )
    with RunLog(csv) as log:
        clock.append(2.0)
        found = log(TensorDict({}, batch_size=1), 0)
        later = log(TensorDict({}, batch_size=1), 1)
    assert found == {
        "rollout/rows": 1,
        "step/seconds": 2.0,
        "step/gpu_0_busy": 0.25,
        "step/gpu_1_busy": 0.75,
        "step/gpu_busy": 0.5,
    }
    assert set(later) == {"rollout/rows", "step/seconds"}


def test_nothing_stays_behind_a_run(csv):
    service = Training()
    for _ in range(2):
        with RunLog(csv, service):
            pass
        assert "gpu-use" not in [one.name for one in threading.enumerate()]
    service.push(1)
    assert scalars(csv) == {}

"""Pushes and rollouts in TorchRL's own loggers."""

import math
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.record.loggers import CSVLogger, TensorboardLogger

from tests.fakes.rl import Service, stamped_rows
from torchrl_vllm_sync import (
    DashboardLogger,
    LoadReport,
    PushReport,
    log_pushes,
    log_rollouts,
)
from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
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
    logger.log_metrics({"a": torch.arange(3)})
    logger.log_metrics(TensorDict({"b": {"c": torch.tensor(2)}}))
    logger.close()
    assert board.shown == {"a": [0.0, 1.0, 2.0], "b/c": 2.0}


def test_what_is_no_number_is_refused_before_anybody_gets_it(csv):
    board = Board()
    with pytest.raises(UnsupportedArgumentError, match="'name' must be a number or several"):
        DashboardLogger(board, csv).log_scalar("name", "text")
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

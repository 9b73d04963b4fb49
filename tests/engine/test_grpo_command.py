"""``torchrl-vllm-sync grpo`` trains a policy, because its weights reach the engine."""

import csv
from statistics import fmean

import pytest

from torchrl_vllm_sync import GRPOConfig, cli, train_grpo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
BATCHES = 20
SETTINGS = [f"train.total_dialog_turns={32 * BATCHES}", "inference_model.num_devices=1"]
SETTINGS += ["inference_model.max_model_len=256", "inference_model.engine_args.max_restarts=0"]
RISE = 0.2  # of the mean reward from the first four batches to the last four


def logged(directory, name):
    """What the run's logger wrote of a figure, by batch."""
    (file,) = directory.rglob(f"{name}.csv")
    return [float(value) for _, value in csv.reader(file.read_text().splitlines())]


def rise(rewards):
    return fmean(rewards[-4:]) - fmean(rewards[:4])


def test_a_policy_learns_and_is_saved(cluster, tmp_path, capfd):
    file = tmp_path / "run.yaml"
    file.write_text(f"logging: {{log_dir: {tmp_path}/log, checkpoint_dir: {tmp_path}/saved}}")
    more = ["train.sync=false", "train.max_staleness=1"]
    assert cli.main(["grpo", "--config", str(file), *SETTINGS, *more]) == 0, capfd.readouterr().err
    rewards = logged(tmp_path / "log", "reward")
    assert len(rewards) == BATCHES
    assert rise(rewards) > RISE
    assert logged(tmp_path / "log", "staleness_max") == [0.0] + [1.0] * (BATCHES - 1)
    assert [one.name for one in (tmp_path / "saved").iterdir()] == [f"step-{BATCHES}"]
    assert (tmp_path / "saved" / f"step-{BATCHES}" / "model.safetensors").exists()


def test_a_policy_whose_weights_stay_behind_does_not(cluster, tmp_path):
    """The control: the trainer learns, but the engine samples from the first weights."""
    more = [f"logging.log_dir={tmp_path}", "train.weight_update_frequency=99"]
    found = train_grpo(GRPOConfig.load(overrides=[*SETTINGS, *more]))
    assert [one["version"] for one in found] == [0] * BATCHES
    assert found[-1]["training/ESS"] < found[0]["training/ESS"] == pytest.approx(1, abs=1e-4)
    assert abs(rise([one["rollout/reward"] for one in found])) < RISE / 2

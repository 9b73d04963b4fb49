"""``torchrl-vllm-sync grpo`` trains a policy, because its weights reach the engine."""

import csv
import os
import re
import shutil
import subprocess
from statistics import fmean

import pytest
import ray

from tests.engine.requests import eventually
from tests.warm import warm_python
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
    assert "GRPO: engines start" in capfd.readouterr().err
    rewards = logged(tmp_path / "log", "reward")
    assert len(rewards) == BATCHES
    assert rise(rewards) > RISE
    assert logged(tmp_path / "log", "staleness_max") == [0.0] + [1.0] * (BATCHES - 1)
    left = {one.name for one in (tmp_path / "saved").iterdir()}
    assert left == {".writer", "run", f"step-{BATCHES}"}
    assert (tmp_path / "saved" / f"step-{BATCHES}" / "model.safetensors").exists()


def test_a_policy_whose_weights_stay_behind_does_not(cluster, tmp_path):
    """The control: the trainer learns, but the engine samples from the first weights."""
    more = [f"logging.log_dir={tmp_path}", "train.weight_update_frequency=99"]
    found = train_grpo(GRPOConfig.load(overrides=[*SETTINGS, *more]))
    assert [one["version"] for one in found] == [0] * BATCHES
    assert found[-1]["training/ESS"] < found[0]["training/ESS"] == pytest.approx(1, abs=1e-4)
    assert abs(rise([one["rollout/reward"] for one in found])) < RISE / 2
    (folder,) = tmp_path.iterdir()
    assert re.search(r"-\d{8}-\d{6}$", folder.name)  # another run's logs stay apart


# Engines that compute a row alike, whatever they did before; a save after three batches.
ALIKE = ["inference_model.seed=0", "inference_model.enable_prefix_caching=false"]
ALIKE += ["inference_model.engine_args.max_num_seqs=1", "inference_model.max_tokens=8"]
ALIKE += ["env.num_envs=8", "env.repeats=4", "train.dialog_turns_per_batch=8"]
ALIKE += ["train.optim_batch_size=4", "logging.checkpoint_frequency=3"]


def command(directory, name, num_batches):
    """The same but for how long it is, and for where it logs."""
    place = [f"logging.log_dir={directory}/{name}", f"logging.checkpoint_dir={directory}/saved"]
    return ["grpo", *SETTINGS, *ALIKE, *place, f"train.total_dialog_turns={8 * num_batches}"]


def samples(directory):
    """The sampled answers that were logged of each batch, with reward and version."""
    found = {}
    for path in directory.rglob("samples.csv"):
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                found.setdefault(line.pop("step"), []).append(line)
    return found


def test_a_run_that_is_killed_is_resumed_with_the_same_rows(cluster, tmp_path, capfd):
    """It is killed two batches or more after a save, and two are what the resumed one's must be."""
    run = [warm_python(), "-m", "torchrl_vllm_sync.cli", *command(tmp_path, "killed", 10**6)]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(run, env=environment) as process:
        eventually(lambda: process.poll() is not None or "4" in samples(tmp_path / "killed"), 200)
        process.kill()
    wanted = samples(tmp_path / "killed")
    saves = tmp_path / "saved" / "run"
    steps = sorted(int(one.name.removeprefix("step-")) for one in saves.glob("step-*"))
    first, last = steps[0], max(map(int, wanted))
    assert first % 3 == 0 < first
    assert steps == [*range(first, steps[-1] + 1, 3)]
    assert steps[-1] in (last // 3 * 3, last + 1)  # the newest that there can be
    for one in steps[1:]:  # it may have gone on for a while
        shutil.rmtree(saves / f"step-{one:08}")
    again = command(tmp_path, "resumed", first + 2)
    assert cli.main([*again, "--resume"]) == 0, capfd.readouterr().err
    found = samples(tmp_path / "resumed")
    assert found == {str(at): wanted[str(at)] for at in (first, first + 1)}
    assert [one["version"] for one in found[str(first)]] == [str(first)] * 4
    for figure in ("loss_objective", "grad_norm", "reward"):
        before, after = (logged(tmp_path / one, figure) for one in ("killed", "resumed"))
        assert before[first : first + 2] == after
    assert len({*map(str, wanted.values())}) == len(wanted)  # else any rows would do

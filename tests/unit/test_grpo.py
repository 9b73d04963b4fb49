"""Settings of a GRPO run are merged and refused by key; a run does what they say."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.envs import RewardSum

from tests.unit.test_policy import TOKENIZER, CannedService, lists_are_stacks  # noqa: F401
from torchrl_vllm_sync import GRPOConfig, GRPORun, TextReward, cli, train_grpo
from torchrl_vllm_sync.errors import ConfigError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import grpo, run_state
from torchrl_vllm_sync.rl.grpo import Learner
from torchrl_vllm_sync.rl.rows import ASSISTANT, ATTENTION, LOG_PROBS
from torchrl_vllm_sync.rl.tasks import Prompts, make_env
from torchrl_vllm_sync.testing import make_tiny_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
# In the form of TorchRL's sota-implementations/grpo: Hydra's directives, SGLang's switches, actors.
RECIPE = """
defaults: [{mode: "${mode:async}"}, _self_]
env: {dataset: gsm8k, num_envs: 16, repeats: 4, reasoning: false, max_steps: 2}
model: {name: Qwen/Qwen2.5-3B, compile: false}
train: {total_dialog_turns: 100_000, dialog_turns_per_batch: 32, kl_to_inference_coeff: 1e-2}
train_model: {lora: {enabled: true, r: 8, alpha: 16, dropout: 0.1}, quantization: {enabled: false}}
inference_model: {backend: vllm, num_devices: 1, max_tokens: 1024, disable_cuda_graph: false}
ref_model: {num_devices: 1, lora: {enabled: true}}
ray: {init_config: {num_cpus: 96, runtime_env: {working_dir: .}}, collector_config: {num_cpus: 4}}
hydra: {run: {dir: "outputs/${now:%Y}"}}
"""
ASYNC = "train: {sync: false, buffer_size: 128, weight_update_frequency: 10, sync_iter: }"


@pytest.fixture
def files(tmp_path):
    for name, text in {"recipe": RECIPE, "async": ASYNC}.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "async", tmp_path / "recipe"


def test_overrides_lie_over_files_and_files_over_defaults(files):
    overrides = ["train.max_staleness=4", "optimizer.lr=1e-6", "ray.init_config.num_cpus=8"]
    config = GRPOConfig.load(*files, overrides=overrides)
    assert (config.env.num_envs, config.env.repeats, config.train.epochs) == (16, 4, 1)
    assert config.train.kl_to_inference_coeff == 0.01  # which YAML 1.1 takes for text
    assert (config.staleness, config.train.weight_update_frequency) == (4, 10)
    assert config.optimizer == replace(GRPOConfig().optimizer, lr=1e-6)
    assert config.ray.init_config == {"num_cpus": 8, "runtime_env": {"working_dir": "."}}
    assert config.train_model.lora.enabled
    assert config.num_batches == 3125
    config.train.sync = True
    assert config.staleness == 0


WRONG = {
    "unknown": ("train.max_stalenes=3", "train.max_stalenes", "did you mean train.max_staleness"),
    "like none": ("optimizer.learning_rate=3", "optimizer.learning_rate", "there are name, lr"),
    "nested": ("train_model.lora.rnk=3", "train_model.lora.rnk", "there are enabled, r, alpha"),
    "no section": ("trane.lr=3", "trane", "no such setting: did you mean train"),
    "inside a value": ("model.name.x=3", "model.name", "must be a valid string"),
    "a section": ("train=5", "train", "must be a section, got 5"),
    "no value": ("train.sync", "train.sync", "must be section.key=value"),
    "no YAML": ("train.sync=[", "train.sync", "cannot be read"),
    "text": ("optimizer.lr=fast", "optimizer.lr", "must be a valid number, got 'fast'"),
    "not a number": ("optimizer.lr=.nan", "optimizer.lr", "must be a finite number, got nan"),
    "truth": ("env.repeats=true", "env.repeats", "must be a valid integer, got True"),
    "a number": ("model.name=3", "model.name", "must be a valid string, got 3"),
    "nothing": ("train.epochs=null", "train.epochs", "must be a valid integer, got None"),
    "too small": ("env.repeats=1", "env.repeats", "must be greater than or equal to 2, got 1"),
    "zero": ("optimizer.lr=0", "optimizer.lr", "must be greater than 0, got 0"),
    "too much": (
        "inference_model.gpu_memory_utilization=2",
        "inference_model.gpu_memory_utilization",
        "must be less than or equal to 1, got 2",
    ),
    "a choice": ("logging.backend=disk", "logging.backend", "csv|tensorboard"),
    "theirs": ("train.use_kl_to_ref=true", "train.use_kl_to_ref", "must be False, got True"),
    "groups": ("env.repeats=5", "env.num_envs", "multiple of env.repeats, which is 5, got 32"),
    "steps": ("train.optim_batch_size=64", "train.optim_batch_size", "must divide"),
    "passes by two": (
        "train={max_tokens_per_pass: 9, gradient_accumulation_steps: 2}",
        "train.gradient_accumulation_steps",
        "must be 1 with train.max_tokens_per_pass, got 2",
    ),
    "no batch": ("train.total_dialog_turns=9", "train.total_dialog_turns", "must be 32 at least"),
    "saves of nothing": (
        "logging.checkpoint_frequency=9",
        "logging.checkpoint_frequency",
        "needs logging.checkpoint_dir",
    ),
    "resumed from nowhere": (
        "logging.resume=must",
        "logging.resume",
        "needs logging.checkpoint_dir",
    ),
    "no way to resume": ("logging.resume=true", "logging.resume", "must be a valid string"),
    "no room": ("inference_model.max_model_len=16", "inference_model.max_model_len", "above"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_refused_by_its_key(case):
    override, key, why = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.load(overrides=[override])
    assert [*caught.value.problems] == [key]
    assert why in str(caught.value)


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "list").write_text("[1]")
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.load(missing, tmp_path / "list", overrides=["optimizer.lr=-1", "env.repeats=x"])
    wanted = {missing, str(tmp_path / "list"), "optimizer.lr", "env.repeats"}
    assert {*caught.value.problems} == wanted
    config = GRPOConfig()
    config.train.epochs, config.inference_model = 0, None
    with pytest.raises(
        ConfigError, match=r"train.epochs must be greater than or equal to 1.*must be a section"
    ):
        config.check()


def task(config):
    return TASKS[config.logging.experiment_name]


def right(prompts, answers):
    return [float(bool(one)) for one in answers]


ROWS = [{"query": [f"{number}?"]} for number in range(3)]
TASKS = {"rewarded": (ROWS, TextReward(right)), "function": (ROWS, right)}
TASKS |= {"transform": (ROWS, RewardSum())}  # of TorchRL's; a module, and so a function, too
TASKS |= {"prompts alone": ROWS, "text": (ROWS, "right"), "nothing": None}
TASKS |= {f"prompts: {one}": (one, right) for one in (None, 5, "4?", [], [{"q": ["4?"]}])}
TASKS |= {f"a query: {one}": ([{"query": one}], right) for one in ("", [], [5], None)}
TASKS["a text"] = [{"query": "4?"}], right
TASKS["tensordicts"] = [TensorDict({"query": ["4?"]}), TensorDict({"query": "4?"})], right


def test_a_checkpoint_that_is_not_there_is_named_before_ray_starts(monkeypatch):
    monkeypatch.setattr(grpo.ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match=r"model.name must be a checkpoint.* none at /no/such"):
        train_grpo(GRPOConfig.load(overrides=["model.name=/no/such"]))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_of_ones_own_is_prompts_and_a_reward(name):
    config = GRPOConfig.load(overrides=[f"env.dataset={__name__}:task"])
    config.logging.experiment_name = name
    if name in ("rewarded", "function", "transform", "a text", "tensordicts"):
        prompts, reward = grpo.load_task(config)
        wanted = RewardSum if name == "transform" else TextReward
        assert prompts is TASKS[name][0]
        assert type(reward) is wanted
    else:
        with pytest.raises(
            ConfigError, match=rf"env.dataset.*{__name__}:task' must return prompts"
        ):
            grpo.load_task(config)


def test_looking_at_the_first_prompt_takes_none_away(monkeypatch):
    monkeypatch.setitem(TASKS, "generator", (iter(ROWS), right))
    config = GRPOConfig.load(overrides=[f"env.dataset={__name__}:task"])
    config.logging.experiment_name = "generator"
    assert [*grpo.load_task(config)[0]] == ROWS


def test_a_sequence_of_prompts_is_begun_again_and_an_iterator_must_not_end():
    """The first of them come twice, since TorchRL's collector drops what it got at first."""
    prompts = Prompts(ROWS, 2)
    assert [*prompts] == [*ROWS[:2], *ROWS]
    assert [*prompts] == ROWS
    env = make_env(TOKENIZER, ROWS, TextReward(right), num_envs=4, repeats=2)
    seen = [{one["query"] for one in env.reset().unbind(0)} for _ in range(6)]
    assert set.union(*map(set, seen)) == {f"{number}?" for number in range(3)}
    env = make_env(TOKENIZER, iter(ROWS), TextReward(right), num_envs=4, repeats=2)
    with pytest.raises(UnsupportedArgumentError, match="prompts must go on"):
        [env.reset() for _ in range(6)]


COMMAND = """
import sys
from torchrl_vllm_sync import cli
print(cli.main(["grpo", "optimizer.lrr=1"]), sorted({"ray", "torch", "vllm"} & {*sys.modules}))
"""


def test_the_command_refuses_before_it_imports_much():
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "2 []\n"
    assert "optimizer.lrr" in done.stderr


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"env.dataset": "no.such.module:task"}, "env.dataset"),
        ({"env.dataset": "sudoku_of_nobody"}, "env.dataset"),
        ({"inference_model.num_devices": 4}, "inference_model.num_devices"),
        ({"model.name": "/no/such/model"}, "model.name"),
        ({"train_model.lora.enabled": "true"}, "train_model.lora.enabled"),
        ({"logging.backend": "wandb"}, "logging.backend"),
    ],
)
def test_what_the_machine_lacks_is_told_before_ray_starts(monkeypatch, capsys, given, key):
    def start(**_):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(grpo.ray, "init", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("peft", "wandb") else find(name)
    )
    overrides = [f"{name}={value}" for name, value in given.items()]
    with pytest.raises(ConfigError, match=key):
        train_grpo(GRPOConfig.load(overrides=overrides))
    assert cli.main(["grpo", *overrides]) == 2
    assert key in capsys.readouterr().err


def saved_run(directory, config):
    """What a command that was killed left, but for the tensors."""
    folder = directory / grpo.RUN / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "rank-0.pt").write_text("all else")
    about = {"step": 2, "settings": config._of_rows, "files": run_state._sums(folder)}
    (folder / run_state.ABOUT).write_text(json.dumps(about))
    return folder


def test_only_a_whole_save_of_the_same_run_is_gone_on_from(tmp_path, capsys):
    def asked(resume, *more):
        logging = [f"logging.checkpoint_dir={tmp_path}", f"logging.resume={resume}"]
        return GRPOConfig.load(overrides=[*logging, *more])

    def refused(key, why, *more, resume="must"):
        with pytest.raises(ConfigError) as caught:
            train_grpo(asked(resume, *more))
        assert [*caught.value.problems] == [key]
        assert why in str(caught.value)
        assert str(tmp_path) in str(caught.value)

    assert grpo._saved(asked("allow")) is None
    refused("logging.resume", "there is no saved run")
    folder = saved_run(tmp_path, GRPOConfig())
    free = ["train.total_dialog_turns=64", "inference_model.num_devices=1", "logging.log_dir=logs"]
    for resume in ("must", "allow"):
        assert grpo._saved(asked(resume, *free)) == folder
    refused("logging.resume", "is never, and there is a saved run in", resume="never")
    refused("optimizer.lr", "lr was 0.005 in the run saved in", "optimizer.lr=1e-3")
    refused("inference_model.seed", "was None", "inference_model.seed=7")
    assert cli.main(["grpo", "--resume", f"logging.checkpoint_dir={tmp_path}", "train.seed=1"]) == 2
    told = capsys.readouterr().err.replace("\n", " ")
    assert "train.seed was 0" in told
    (folder / "rank-0.pt").write_text("al1 else")
    refused("logging.resume", "rank-0.pt has 8 bytes")


@pytest.mark.parametrize("resume", ["never", "allow"])
def test_a_folder_that_another_run_has_or_that_is_none_is_refused(tmp_path, monkeypatch, resume):
    monkeypatch.setattr(grpo, "ENDING_S", 0.1)

    def refused(folder, why):
        logging = [f"logging.checkpoint_dir={folder}", f"logging.resume={resume}"]
        with pytest.raises(
            ConfigError, match=f"logging.checkpoint_dir {folder} cannot be used: .*{why}"
        ):
            train_grpo(GRPOConfig.load(overrides=[*logging, "model.name=/no/such"]))

    with run_state.only_writer(tmp_path / "ours"):
        refused(tmp_path / "ours", f"pid {os.getpid()} .* saves there")
    (tmp_path / "a file").touch()
    refused(tmp_path / "a file", "File exists")


def test_two_saves_are_kept_each_of_weights_that_engines_have(tmp_path):
    def save(root, *, step):
        (root / f"step-{step:08d}").mkdir(parents=True)

    config = GRPOConfig.load(
        overrides=[f"logging.checkpoint_dir={tmp_path}", "logging.checkpoint_frequency=2"]
    )
    nothing = SimpleNamespace(save_pretrained=lambda folder: folder.mkdir())
    run = SimpleNamespace(config=config, learner=SimpleNamespace(model=nothing))
    state = SimpleNamespace(save=save)
    tokenizer, is_late = SimpleNamespace(save_pretrained=lambda _: None), False
    for number in range(10):
        step = SimpleNamespace(number=number, push=None if number in (3, 4) else "a report")
        is_late = grpo._save(run, step, tokenizer, state, is_late=is_late)
        assert is_late is (number in (3, 4))
        if number == 5:
            assert names(tmp_path / grpo.RUN) == ["step-00000002", "step-00000006"]
    assert names(tmp_path / grpo.RUN) == ["step-00000008", "step-00000010"]
    assert names(tmp_path) == [grpo.RUN, *(f"step-{one}" for one in (10, 2, 4, 6, 8))]


def names(folder):
    return sorted(one.name for one in folder.iterdir())


class Canned(CannedService):
    """Holds the version that was pushed last."""

    weight_version = 6


def length(_, answers):
    return [float(len(one)) for one in answers]


def my_task(config):
    """What ``env.dataset`` names."""
    start = config.train.seed
    questions = ({"query": [f"What is {at} + 1?"]} for at in range(start, start + 99))
    return questions, TextReward(length)


@pytest.mark.parametrize(("frequency", "pushed"), [(None, [0, 1, 2]), (5, [1, 2]), (99, [2])])
def test_steps_passes_and_pushes_are_as_many_as_asked_for(monkeypatch, tmp_path, frequency, pushed):
    """Of 8 rows twice, in steps of 4 and passes of 2; also adapters, and with checkpointing."""
    service = Canned()

    def push():
        service.weight_version += 1
        return SimpleNamespace(version=service.weight_version)

    monkeypatch.setattr(grpo, "WeightUpdater", lambda *_, **__: SimpleNamespace(push_weights=push))
    config = GRPOConfig()
    config.env.num_envs, config.env.repeats = 4, 2
    train = config.train
    train.total_dialog_turns, train.dialog_turns_per_batch, train.epochs = 25, 8, 2
    train.optim_batch_size, train.gradient_accumulation_steps = 4, 2
    train.weight_update_frequency = frequency
    config.train_model.lora.enabled = frequency == 5
    config.train_model.gradient_checkpointing = frequency == 99
    checkpoint = str(make_tiny_checkpoint(tmp_path))
    config.env.dataset, passes, steps = f"{__name__}:my_task", [], []
    with GRPORun(config, service, TOKENIZER, checkpoint=checkpoint) as run:
        step = run.learner.optimizer.step
        run.learner.loss.register_forward_pre_hook(lambda _, given: passes.append(len(given[0])))
        run.learner.optimizer.step = lambda: steps.append(len(passes)) or step()
        learned = {name: one.clone() for name, one in run.learner.model.named_parameters()}
        found = [*run]
    assert [one.number for one in found if one.push] == pushed
    assert [one.version for one in found] == [6 + sum(at < n for at in pushed) for n in range(3)]
    assert passes == [2] * 24
    assert run.learner.optimizer.defaults["fused"]
    assert steps == [2 * at for at in range(1, 13)]
    assert [len(one.rows) for one in found] == [8, 8, 8]
    asked = [sorted(one.rows["query"]) for one in found]
    wanted = [[f"What is {at} + 1?" for at in range(4 * n, 4 * n + 4)] * 2 for n in range(3)]
    assert asked == [*map(sorted, wanted)]
    after = dict(run.learner.model.named_parameters())
    learned = {name for name, one in learned.items() if (one != after[name]).any()}
    assert learned
    assert all(("lora_" in name) == (frequency == 5) for name in learned)
    assert all({"ESS", "grad_norm", "loss_objective"} <= one.figures.keys() for one in found)


@pytest.fixture(scope="module")
def ragged():
    """Rows with 2 to 40 tokens of answers, the second with an earlier one that is not trained."""
    generator, answers = torch.Generator().manual_seed(0), torch.tensor([40, 5, 2, 20])[:, None]
    columns = (torch.arange(50) - 10).expand(4, 50)
    rows = TensorDict({"advantage": torch.tensor([1.0, -2, 3, -1]).view(4, 1, 1)}, [4])
    rows["tokens", "full"] = torch.randint(3, 500, (4, 50), generator=generator)
    rows[ATTENTION] = columns < answers
    rows[ASSISTANT] = rows[ATTENTION] & (columns >= 0)
    log_probs = torch.randn(4, 50, generator=generator) / 10 - 6
    rows[LOG_PROBS] = log_probs.where(columns >= 0, torch.nan)
    rows[ASSISTANT][1, :4] = True
    return rows


def test_a_step_is_the_same_in_however_many_passes(ragged, tmp_path):
    """Also by a coefficient of each kind, lazily stacked, and in any order."""
    config = GRPOConfig()
    config.train.entropy_coeff, config.train.kl_to_inference_coeff = 0.1, 0.2
    checkpoint, found = str(make_tiny_checkpoint(tmp_path)), []
    lazy = LazyStackedTensorDict(*ragged.unbind(0), stack_dim=0)
    for passes in ([ragged], ragged.split(1), ragged[[2, 1, 3, 0]].split(2), lazy.split(2)):
        learner = Learner(config, checkpoint)
        learner.optimizer.step = learner.optimizer.zero_grad = lambda: None
        found.append((learner.step(iter(passes)), gradients(learner)))
    learner = Learner(config, checkpoint)
    loss = learner.loss(ragged)
    (loss.loss_objective + loss.loss_entropy + loss.loss_kl_to_inference).backward()
    grads = gradients(learner)
    for figures, clipped in found:
        assert figures["grad_norm"] == pytest.approx(float(grads.norm()), rel=1e-4)
        off = (clipped * max(1, figures["grad_norm"]) - grads).norm()
        assert off <= 1e-5 * grads.norm()
        for name in ("loss_objective", "clip_fraction", "kl_approx"):
            assert figures[name] == pytest.approx(float(loss.get(name).detach()), rel=1e-4)


def gradients(learner):
    return torch.cat([one.grad.flatten() for one in learner.model.parameters()])


@pytest.mark.parametrize(
    ("packing", "most", "sizes"),
    [
        (False, 1, [1, 1, 1, 1]),
        (False, 99, [1, 3]),
        (False, 89, [1, 2, 1]),
        (False, 100, [2, 2]),
        (False, 199, [3, 1]),
        (False, 200, [4]),
        (True, 49, [1, 2, 1]),
        (True, 95, [3, 1]),
        (True, 107, [4]),
    ],
)
def test_passes_have_so_many_tokens_at_most(ragged, packing, most, sizes):
    """Of rows of 50, 30, 15 and 12 tokens."""
    run = GRPORun.__new__(GRPORun)
    run.config, run.learner = GRPOConfig(), SimpleNamespace(step=list)
    train = run.config.train
    train.optim_batch_size, train.max_tokens_per_pass, train.packing = 4, most, packing
    (passes,) = run._learn(ragged)
    assert [len(rows) for rows in passes] == sizes
    lengths = torch.cat([rows[ATTENTION].sum(1) for rows in passes])
    assert lengths.tolist() == [50, 30, 15, 12]


@pytest.mark.parametrize("packing", [False, True])
def test_passes_are_of_rows_of_a_like_length(ragged, packing):
    run, orders = GRPORun.__new__(GRPORun), set()
    run.config, run.learner = GRPOConfig(), SimpleNamespace(step=list)
    train = run.config.train
    train.optim_batch_size, train.gradient_accumulation_steps, train.packing = 4, 2, packing
    for _ in range(20):
        (passes,) = run._learn(ragged)
        orders.add(tuple(rows[ATTENTION].sum(1).max().item() for rows in passes))
    assert orders == ({(50, 15), (50, 30), (30, 50), (15, 50)} if packing else {(50, 15)})


def test_a_run_that_is_resumed_counts_its_batches_from_there(monkeypatch, tmp_path):
    updater = SimpleNamespace(push_weights=lambda: None)
    monkeypatch.setattr(grpo, "WeightUpdater", lambda *_, **__: updater)
    config = GRPOConfig()
    config.env.num_envs, config.env.repeats, config.env.dataset = 8, 2, f"{__name__}:my_task"
    train = config.train
    train.total_dialog_turns, train.dialog_turns_per_batch, train.optim_batch_size = 24, 8, 8
    checkpoint = str(make_tiny_checkpoint(tmp_path))
    with GRPORun(config, Canned(), TOKENIZER, checkpoint=checkpoint) as run:
        run.collector._frames = 16  # as a state has it
        assert [one.number for one in run] == [2]


@pytest.mark.parametrize(
    ("variable", "own", "expected"),
    [
        (None, {}, {"address": "local", "num_gpus": 0}),
        ("head:6379", {}, {"address": "head:6379"}),
        ("head:6379", {"address": "local"}, {"address": "local", "num_gpus": 0}),
    ],
)
def test_no_cluster_is_joined_that_nobody_named(monkeypatch, variable, own, expected):
    given = {}
    monkeypatch.setattr(grpo.ray, "init", lambda **kwargs: given.update(kwargs))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    config = GRPOConfig()
    config.ray.init_config = own
    with grpo._ray_of(config):
        assert {name: given.get(name) for name in expected} == expected
        assert ("num_gpus" in given) == ("num_gpus" in expected)

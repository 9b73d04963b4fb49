"""What a GRPO run is made of: one tree of dataclasses, filled from YAML files and overrides.

Sections and keys are those of TorchRL's ``sota-implementations/grpo/config`` where they mean the
same. Neither torch nor vLLM is imported: whatever is wrong is told at once, by pydantic.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import ConfigError

TINY = "tiny"
# Other keys of TorchRL's recipes (0.14), each with the only value that is taken.
_THEIRS: dict[str, Any] = {
    "env.reasoning": False,
    "model.compile": False,
    "train.use_kl_to_ref": False,
    "train.empty_replay_buffer": True,
    "train_model.num_devices": 1,
    "train_model.quantization": {"enabled": False},
    "inference_model.quantization": {"enabled": False},
    "inference_model.backend": "vllm",
    "inference_model.top_p": 1.0,
    "inference_model.include_stop_str_in_output": True,
    "inference_model.compile": False,
}
# Those that may be anything: Hydra's own, SGLang's, about actors that this program has not, or of
# no effect there or here.
_IGNORED = """
defaults hydra ref_model env.max_steps train.exp_name train.buffer_size train.sync_iter
train.checkpoint_frequency train.logging_frequency train.kl_coef_in_loss train.kl_to_ref_coeff
train_model.lora.dropout inference_model.attn_implementation inference_model.enable_fp32_lm_head
inference_model.disable_cuda_graph inference_model.disable_piecewise_cuda_graph
inference_model.disable_overlap_schedule ray.collector_config ray.train_handler_config
ray.replay_buffer_config
"""

Flag = Annotated[bool, Strict()]
Natural = Annotated[int, Strict(), Field(ge=0)]
Count = Annotated[int, Strict(), Field(ge=1)]
Several = Annotated[int, Strict(), Field(ge=2)]
Share = Annotated[float, Strict(), Field(gt=0, le=1)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Coefficient = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]


@dataclass
class EnvConfig:
    """What is asked."""

    # low-ids, which a random model can learn; gsm8k; a data set of the package reasoning-gym; or
    # module:function, which is called with the configuration and returns prompts, {"query": [text],
    # ...} each, and a TextReward or its function. A sequence of prompts is begun again at its end.
    dataset: str = "low-ids"
    num_envs: Count = 32  # rows that are sampled at a time: whole groups
    repeats: Several = 8  # answers to each prompt, which are a group


@dataclass
class ModelConfig:
    """Which model is trained."""

    name: str = TINY  # on Hugging Face, or a path; the tiny one is random, made for the run


@dataclass
class TrainConfig:
    """How it is trained."""

    total_dialog_turns: Count = 1280  # rows of all batches; whole batches count
    dialog_turns_per_batch: Count = 32  # a multiple of num_envs
    optim_batch_size: Count = 32  # rows of an optimizer step
    gradient_accumulation_steps: Count = 1  # its passes, of equally many rows
    # Instead, passes of so many tokens at most, with their padding; a longer row is alone in one.
    max_tokens_per_pass: Count | None = None
    epochs: Count = 1  # how often a batch is gone through
    sync: Flag = True  # no row is of older weights than the trainer's: sampling waits for it
    max_staleness: Natural = 2  # without sync: how many versions older it may be
    # Optimizer steps after which weights are pushed, once their batch is done.
    weight_update_frequency: Count | None = None
    mixed_precision: Flag = True  # the loss is computed in bfloat16 on a GPU
    packing: Flag = False  # rows of a pass one after the other, without padding
    kl_to_inference_coeff: Coefficient = 0.0
    entropy_coeff: Coefficient = 0.0
    # Of the prompts' order, the tiny model and the engines.
    seed: Annotated[int, Strict(), Field(ge=0, lt=2**63)] = 0


@dataclass
class LoraConfig:
    """Adapters of all linear layers, made by the package peft; what else there is stays."""

    enabled: Flag = False
    r: Natural = 8
    alpha: Natural = 16


@dataclass
class TrainModelConfig:
    """The trainer's copy of the model, on the last GPU if there are any."""

    gradient_checkpointing: Flag = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    attn_implementation: str | None = None  # on a GPU
    torch_dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"  # not adapters


@dataclass
class InferenceModelConfig:
    """The engines."""

    num_devices: Count = 2  # replicas, with an engine each
    tensor_parallel_size: Count = 1  # GPUs of each
    torch_dtype: Annotated[str, Field(pattern="^(auto|float32|bfloat16|float16)$")] = "auto"
    gpu_memory_utilization: Share = 0.9
    temperature: Positive = 1.0  # the loss's, too
    max_tokens: Count = 16  # of an answer
    max_model_len: Several | None = None  # the model's own otherwise
    enforce_eager: Flag = False  # no CUDA graphs
    enable_prefix_caching: Flag = True
    seed: Natural | None = None  # of each row, made of it; engines that compute alike sample alike
    verbose: Flag = False  # vLLM's logs
    engine_args: dict[str, Any] = field(default_factory=dict)  # others of from_pretrained


@dataclass
class OptimizerConfig:
    """The optimizer, of torch.optim."""

    name: Annotated[str, Field(pattern="^(Adam|AdamW)$")] = "AdamW"
    lr: Positive = 5e-3
    eps: Positive = 1e-8
    weight_decay: Coefficient = 0.01
    clip_grad_norm: Positive = 1.0


@dataclass
class RayConfig:
    """Ray, unless the process has joined a cluster."""

    # Of ray.init. As in TorchRL's scripts, GPUs are counted and names with a first _ left out.
    init_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggingConfig:
    """What a run leaves."""

    # Otherwise of data set and model, and of the date, or of checkpoint_dir if there is one.
    experiment_name: str | None = None
    backend: Annotated[str, Field(pattern="^(csv|tensorboard|wandb|mlflow|trackio)$")] = "csv"
    log_dir: str = "outputs/grpo"
    checkpoint_dir: str | None = None  # for weights, as transformers saves them, and RunStates: run
    checkpoint_frequency: Count | None = None  # in batches; in the end otherwise
    # As W&B's: go on from the newest save (must), if there is one (allow), or have none (never).
    resume: Annotated[str, Field(pattern="^(never|allow|must)$")] = "never"


@dataclass
class GRPOConfig:
    """A GRPO run, in the form of TorchRL's recipes. What nothing is said of suits a CPU.

    Hydra takes it as a structured config, and ``OmegaConf.to_object`` gives one back.

    Example:
        >>> config = GRPOConfig.load(overrides=["optimizer.lr=1e-3", "train.sync=false"])
        >>> config.optimizer.lr, config.train.sync, config.staleness
        (0.001, False, 2)

    Attributes:
        env, model, train, train_model, inference_model, optimizer, ray, logging: Its sections.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of its sections, too

    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def staleness(self) -> int:
        """How many versions old a row may be."""
        return 0 if self.train.sync else self.train.max_staleness

    @property
    def num_batches(self) -> int:
        """Batches of the whole run."""
        return self.train.total_dialog_turns // self.train.dialog_turns_per_batch

    @classmethod
    def load(cls, *files: str | os.PathLike[str], overrides: Sequence[str] = ()) -> GRPOConfig:
        """Returns the defaults with files, one after the other, and then overrides over them.

        Args:
            *files: YAML, also TorchRL's own: what its other keys ask for is refused, unless it
                is nothing. ``defaults`` are not followed; name those files before it.
            overrides: ``section.key=value`` each, as for Hydra; values are YAML.

        Raises:
            ConfigError: Files or values cannot be read, keys are unknown, or values are of a wrong
                type or out of range: all of them, by key.
        """
        tree, problems = dataclasses.asdict(cls()), dict[str, str]()
        sources: list[tuple[Any, Any, str]] = [(_file, one, f"{one}") for one in files]
        sources += [(_override, one, one.partition("=")[0]) for one in overrides]
        for read, source, key in sources:
            try:
                _merge(tree, read(source))
            except (OSError, ValueError, yaml.YAMLError) as error:
                problems[key] = f"cannot be read: {error}"
        for key in (*_THEIRS, *_IGNORED.split()):
            *path, name = key.split(".")
            owner = functools.reduce(_section, path, tree)
            if name in owner and (value := owner.pop(name)) != (only := _THEIRS.get(key, value)):
                problems[key] = f"must be {only}, got {shown(value)}"
        config, wrong = _validated(tree)
        if wrong or problems:
            raise ConfigError(wrong | problems)
        return config

    @property
    def _of_rows(self) -> dict[str, Any]:
        """The settings, by key, that rows and losses come from: a run goes on with the same."""
        how = ("torch_dtype", "temperature", "max_tokens", "max_model_len", "seed")
        tree = dataclasses.asdict(self)
        tree["inference_model"] = {name: tree["inference_model"][name] for name in how}
        del tree["ray"], tree["logging"], tree["train"]["total_dialog_turns"]
        return {f"{one}.{key}": value for one, of in tree.items() for key, value in of.items()}

    def check(self) -> None:
        """Refuses settings that are no such, or do not go together.

        Raises:
            ConfigError: All of them, by key.
        """
        if problems := _validated(dataclasses.asdict(self))[1]:
            raise ConfigError(problems)

    def _conflicts(self) -> dict[str, str]:
        """What does not go together, by key."""
        env, train, engine = self.env, self.train, self.inference_model
        rows, step = train.dialog_turns_per_batch, train.optim_batch_size
        passes, lora = train.gradient_accumulation_steps, self.train_model.lora
        room, of = engine.max_model_len, "must be a multiple of"
        often, resume = self.logging.checkpoint_frequency, self.logging.resume
        rules = [
            ("env.num_envs", env.num_envs, env.num_envs % env.repeats,
             f"{of} env.repeats, which is {env.repeats}"),
            ("train.dialog_turns_per_batch", rows, rows % env.num_envs,
             f"{of} env.num_envs, which is {env.num_envs}"),
            ("train.optim_batch_size", step, step % passes,
             f"{of} train.gradient_accumulation_steps, which is {passes}"),
            ("train.gradient_accumulation_steps", passes, train.max_tokens_per_pass and passes > 1,
             "must be 1 with train.max_tokens_per_pass"),
            ("train.optim_batch_size", step, rows % step,
             f"must divide train.dialog_turns_per_batch, which is {rows}"),
            ("train.total_dialog_turns", train.total_dialog_turns, not self.num_batches,
             f"must be {rows} at least, which are a batch"),
            ("logging.checkpoint_frequency", often, often and self.logging.checkpoint_dir is None,
             "needs logging.checkpoint_dir"),
            ("logging.resume", resume, resume != "never" and self.logging.checkpoint_dir is None,
             "needs logging.checkpoint_dir"),
            ("train_model.lora.r", lora.r, lora.enabled and not lora.r, "must be at least 1"),
            ("inference_model.max_model_len", room, room is not None and room <= engine.max_tokens,
             f"must be above max_tokens, which is {engine.max_tokens}"),
        ]  # fmt: skip
        return {key: f"{why}, got {value}" for key, value, wrong, why in rules if wrong}


class _Loader(yaml.SafeLoader):
    """Takes ``1e-5`` for a number, which is text in YAML 1.1."""


_number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _number, [*"-+0123456789"])


def _file(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    tree = yaml.load(Path(path).read_text(), _Loader)
    if not isinstance(tree, Mapping | None):
        raise ValueError(f"must hold sections, got {shown(tree)}")  # noqa: TRY004
    return tree or {}


def _override(text: str) -> Mapping[Any, Any]:
    keys, equals, value = text.partition("=")
    if not equals:
        raise ValueError("must be section.key=value")
    tree = yaml.load(value, _Loader)
    for name in reversed(keys.split(".")):
        tree = {name: tree}
    return tree


def _merge(tree: dict[Any, Any], over: Mapping[Any, Any]) -> None:
    """Puts settings over others; a section of which nothing is said stays."""
    for name, value in over.items():
        if not isinstance(tree.get(name), dict) or not isinstance(value, Mapping | None):
            tree[name] = value
        elif value is not None:
            _merge(tree[name], value)


def _section(tree: dict[Any, Any], name: str) -> dict[Any, Any]:
    return inner if isinstance(inner := tree.get(name), dict) else {}


def _validated(tree: dict[str, Any]) -> tuple[GRPOConfig, dict[str, str]]:
    """Returns the configuration, and what is wrong with it by key."""
    try:
        config = TypeAdapter(GRPOConfig).validate_python(tree)
    except ValidationError as error:
        return GRPOConfig(), {".".join(map(str, one["loc"])): _why(one) for one in error.errors()}
    return config, config._conflicts()


def _why(error: Any) -> str:
    """What pydantic found, in our words."""
    if error["type"] == "unexpected_keyword_argument":
        *sections, name = map(str, error["loc"])
        known = functools.reduce(operator.getitem, sections, dataclasses.asdict(GRPOConfig()))
        close = difflib.get_close_matches(name, known, n=1)
        told = f"did you mean {'.'.join([*sections, *close])}?"
        return f"is no such setting: {told if close else 'there are ' + ', '.join(known)}"
    is_section = error["type"] == "dataclass_type"
    told = "must be a section" if is_section else re.sub(r"^\w+ should", "must", error["msg"])
    return f"{told}, got {shown(error['input'])}"

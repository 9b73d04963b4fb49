"""What a GRPO run is made of: one tree of dataclasses, filled from YAML files and overrides.

Sections and keys are those of TorchRL's ``sota-implementations/grpo/config`` where they mean the
same. Neither torch nor vLLM is imported: whatever is wrong is told at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

TINY = "tiny"
_ANY = object()
# Other keys of TorchRL's recipes (0.14), each with the only value that is taken. What may be
# anything is Hydra's own, SGLang's, about actors that this program has not, or of no effect there.
_THEIRS: dict[str, Any] = {
    "env.reasoning": False,
    "model.compile": False,
    "train.use_kl_to_ref": False,
    "train.empty_replay_buffer": True,
    "train_model.num_devices": 1,
    "train_model.quantization.enabled": False,
    "inference_model.quantization.enabled": False,
    "inference_model.backend": "vllm",
    "inference_model.top_p": 1.0,
    "inference_model.include_stop_str_in_output": True,
    "inference_model.compile": False,
    **dict.fromkeys(("defaults", "hydra", "ref_model", "env.max_steps", "train.exp_name"), _ANY),
    **dict.fromkeys(("train.buffer_size", "train.sync_iter", "train.checkpoint_frequency"), _ANY),
    **dict.fromkeys(("train.kl_coef_in_loss", "train.kl_to_ref_coeff"), _ANY),
    **dict.fromkeys(("train_model.lora.dropout", "inference_model.attn_implementation"), _ANY),
    **{f"inference_model.{one}": _ANY for one in ("enable_fp32_lm_head", "disable_cuda_graph")},
    "inference_model.disable_piecewise_cuda_graph": _ANY,
    "inference_model.disable_overlap_schedule": _ANY,
    **{f"ray.{one}_config": _ANY for one in ("collector", "train_handler", "replay_buffer")},
}

_TYPES = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
_TYPES[dict] = "a mapping"


def _setting(default: Any, **limits: Any) -> Any:
    """A field with limits: ``least``, ``above`` (greater than), ``most`` and ``choices``."""
    return field(default=default, metadata=limits)


@dataclass
class EnvConfig:
    """What is asked."""

    # low-ids, which a random model can learn; gsm8k; a data set of the package reasoning-gym; or
    # module:function, which is called with the configuration and returns prompts, an iterable of
    # {"query": [text], ...}, and a TextReward.
    dataset: str = "low-ids"
    num_envs: int = _setting(32, least=1)  # rows that are sampled at a time: whole groups
    repeats: int = _setting(8, least=2)  # answers to each prompt, which are a group


@dataclass
class ModelConfig:
    """Which model is trained."""

    name: str = TINY  # on Hugging Face, or a path; the tiny one is random, made for the run


@dataclass
class TrainConfig:
    """How it is trained."""

    total_dialog_turns: int = _setting(1280, least=1)  # rows of all batches; whole batches count
    dialog_turns_per_batch: int = _setting(32, least=1)  # a multiple of num_envs
    optim_batch_size: int = _setting(32, least=1)  # rows of an optimizer step
    gradient_accumulation_steps: int = _setting(1, least=1)  # its passes, of equal size
    epochs: int = _setting(1, least=1)  # how often a batch is gone through
    sync: bool = True  # no row is of older weights than the trainer's: sampling waits for it
    max_staleness: int = _setting(2, least=0)  # without sync: how many versions older it may be
    # Optimizer steps after which weights are pushed, once their batch is done.
    weight_update_frequency: int | None = _setting(None, least=1)
    mixed_precision: bool = True  # the loss is computed in bfloat16 on a GPU
    packing: bool = False  # rows of a pass one after the other, without padding
    kl_to_inference_coeff: float = _setting(0.0, least=0)
    entropy_coeff: float = _setting(0.0, least=0)
    logging_frequency: int = _setting(1, least=1)  # in batches
    seed: int = _setting(0, least=0)  # of the prompts' order, the tiny model and the engines


@dataclass
class LoraConfig:
    """Adapters of all linear layers, made by the package peft; what else there is stays."""

    enabled: bool = False
    r: int = _setting(8, least=0)
    alpha: int = _setting(16, least=0)


@dataclass
class TrainModelConfig:
    """The trainer's copy of the model, on the last GPU if there are any."""

    gradient_checkpointing: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    attn_implementation: str | None = None  # on a GPU
    torch_dtype: str = _setting("float32", choices=("float32", "bfloat16"))  # adapters: float32


@dataclass
class InferenceModelConfig:
    """The engines."""

    num_devices: int = _setting(2, least=1)  # replicas, with an engine each
    tensor_parallel_size: int = _setting(1, least=1)  # GPUs of each
    torch_dtype: str = _setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    gpu_memory_utilization: float = _setting(0.9, above=0, most=1)
    temperature: float = _setting(1.0, above=0)  # the loss's, too
    max_tokens: int = _setting(16, least=1)  # of an answer
    max_model_len: int | None = _setting(None, least=2)  # the model's own otherwise
    enforce_eager: bool = False  # no CUDA graphs
    enable_prefix_caching: bool = True
    verbose: bool = False  # vLLM's logs
    engine_args: dict[str, Any] = field(default_factory=dict)  # others of from_pretrained


@dataclass
class OptimizerConfig:
    """The optimizer, of torch.optim."""

    name: str = _setting("AdamW", choices=("Adam", "AdamW"))
    lr: float = _setting(5e-3, above=0)
    eps: float = _setting(1e-8, above=0)
    weight_decay: float = _setting(0.01, least=0)
    clip_grad_norm: float = _setting(1.0, above=0)


@dataclass
class RayConfig:
    """Ray, unless the process has joined a cluster."""

    # Of ray.init. As in TorchRL's scripts, GPUs are counted and names with a first _ left out.
    init_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggingConfig:
    """What a run leaves."""

    experiment_name: str | None = None  # of data set and model otherwise
    backend: str = _setting("csv", choices=("csv", "tensorboard", "wandb", "mlflow", "trackio"))
    log_dir: str = "outputs/grpo"
    checkpoint_dir: str | None = None  # for the trained weights, as transformers saves them
    checkpoint_frequency: int | None = _setting(None, least=1)  # in batches; in the end otherwise


@dataclass
class GRPOConfig:
    """A GRPO run, in the form of TorchRL's recipes. What nothing is said of suits a CPU.

    Hydra takes it as a structured config, and ``OmegaConf.to_object`` gives one back.

    Example:
        >>> config = GRPOConfig.load(overrides=["optimizer.lr=1e-3", "train.sync=false"])
        >>> config.optimizer.lr, config.train.sync, config.staleness
        (0.001, False, 2)

    Attributes:
        env, model, train, train_model, inference_model, optimizer, ray, logging: Its sections, see
            ``torchrl_vllm_sync.rl.config``.
    """

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
        config, problems = cls(), dict[str, str]()
        for key, value in _given(files, overrides, problems):
            if why := config._put(key, value):
                problems[key] = why
        problems = config._problems() | problems
        if problems:
            raise ConfigError(problems)
        return config

    def check(self) -> None:
        """Refuses settings that are no such, or do not go together.

        Raises:
            ConfigError: All of them, by key.
        """
        if problems := self._problems():
            raise ConfigError(problems)

    def _put(self, key: str, value: Any) -> str | None:
        """Sets one value; returns what is wrong with its key."""
        for theirs, only in _THEIRS.items():
            if key == theirs or key.startswith(f"{theirs}."):
                return None if only in (_ANY, value) else f"must be {only}, got {shown(value)}"
        *path, name = key.split(".")
        owner: Any = self
        for one in path:
            owner = owner.setdefault(one, {}) if isinstance(owner, dict) else vars(owner).get(one)
            if not isinstance(owner, dict) and not is_dataclass(owner):
                break
        if isinstance(owner, dict):
            owner[name] = value
        elif not is_dataclass(owner) or name not in vars(owner):
            known = [one for one, *_ in _settings(self)]
            close = difflib.get_close_matches(key, known, n=1)
            return "there is no such setting" + (f": did you mean {close[0]}?" if close else "")
        elif is_dataclass(getattr(owner, name)):
            return None if value is None else f"is a section, got {shown(value)}"
        else:
            setattr(owner, name, _as_number(value, get_type_hints(type(owner))[name]))
        return None

    def _problems(self) -> dict[str, str]:
        """What is wrong, by key."""
        found = {key: why for key, *one in _settings(self) if (why := _problem(*one))}
        if found:
            return found  # nothing else can be said
        env, train, engine = self.env, self.train, self.inference_model
        multiples = {
            "env.num_envs": (env.num_envs, "env.repeats", env.repeats),
            "train.dialog_turns_per_batch": (
                (rows := train.dialog_turns_per_batch), "env.num_envs", env.num_envs
            ),
            "train.optim_batch_size": (
                train.optim_batch_size,
                "train.gradient_accumulation_steps", train.gradient_accumulation_steps,
            ),
        }  # fmt: skip
        for key, (value, other, of) in multiples.items():
            if value % of:
                found[key] = f"must be a multiple of {other}, which is {of}, got {value}"
        if rows % train.optim_batch_size:
            told = f"train.dialog_turns_per_batch, which is {rows}"
            found["train.optim_batch_size"] = f"must divide {told}, got {train.optim_batch_size}"
        if not self.num_batches:
            found["train.total_dialog_turns"] = f"must be {rows} at least, which are a batch"
        if self.train_model.lora.enabled and not self.train_model.lora.r:
            found["train_model.lora.r"] = "must be at least 1 for adapters, got 0"
        if engine.max_model_len is not None and engine.max_model_len <= engine.max_tokens:
            told = f"above max_tokens, which is {engine.max_tokens}"
            found["inference_model.max_model_len"] = f"must be {told}, got {engine.max_model_len}"
        return found


def _given(
    files: Sequence[str | os.PathLike[str]], overrides: Sequence[str], problems: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys with their values; notes what cannot be read."""
    import yaml

    for file in files:
        try:
            tree = yaml.safe_load(Path(file).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            problems[f"{file}"] = f"cannot be read: {error}"
            continue
        if isinstance(tree, Mapping):
            yield from _leaves(tree)
        elif tree is not None:
            problems[f"{file}"] = f"must hold sections, got {shown(tree)}"
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            problems[key] = f"cannot be read: {error}"
            continue
        if not equals:
            problems[override] = "must be section.key=value"
        else:
            yield from _leaves({key: value})


def _leaves(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _settings(section: Any, path: str = "") -> Iterator[tuple[str, Any, Any, Mapping[str, Any]]]:
    """Each setting's key, value, type and limits."""
    kinds = get_type_hints(type(section))
    for one in dataclasses.fields(section):
        key, value = f"{path}{one.name}", getattr(section, one.name)
        if is_dataclass(kinds[one.name]) and isinstance(value, kinds[one.name]):
            yield from _settings(value, f"{key}.")
        else:
            yield key, value, kinds[one.name], one.metadata


def _as_number(value: Any, kind: Any) -> Any:
    """A number that YAML 1.1 takes for text, as ``1e-5``, where one is wanted."""
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _problem(value: Any, kind: Any, limits: Mapping[str, Any]) -> str | None:
    """What is wrong with a value, if anything is."""
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return None
    wanted = get_origin(kinds[0]) or kinds[0]
    fits = type(value) is wanted or (wanted is float and type(value) is int)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        return f"must be {_TYPES.get(wanted, 'a section')}, got {shown(value)}"
    if "least" in limits and value < limits["least"]:
        return f"must be at least {limits['least']}, got {value}"
    if "above" in limits and value <= limits["above"]:
        return f"must be above {limits['above']}, got {value}"
    if "most" in limits and value > limits["most"]:
        return f"must be at most {limits['most']}, got {value}"
    if value not in limits.get("choices", (value,)):
        return f"must be one of {', '.join(limits['choices'])}, got {shown(value)}"
    return None

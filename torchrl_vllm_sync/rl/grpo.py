"""GRPO as a program: a configuration, and this library's parts put together as it says."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import xxhash
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.envs import Transform
from torchrl.objectives.llm.grpo import GRPOLoss
from torchrl.record.loggers.utils import get_logger
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_vllm_sync.checks import is_missing, shown
from torchrl_vllm_sync.errors import ConfigError, RunStateError
from torchrl_vllm_sync.replica import PushReport
from torchrl_vllm_sync.rl import tasks
from torchrl_vllm_sync.rl.config import TINY, GRPOConfig
from torchrl_vllm_sync.rl.groups import GroupAdvantage
from torchrl_vllm_sync.rl.policy import vLLMWrapper
from torchrl_vllm_sync.rl.rollouts import RolloutCollector, TextReward
from torchrl_vllm_sync.rl.rows import ATTENTION, num_trained
from torchrl_vllm_sync.rl.run_state import SAVED, RunState, newest_save, only_writer
from torchrl_vllm_sync.rl.statistics import RunLog
from torchrl_vllm_sync.rl.trainer import TrainerPolicy
from torchrl_vllm_sync.rl.updater import WeightUpdater
from torchrl_vllm_sync.service.replicas import init_ray
from torchrl_vllm_sync.service.service import AsyncVLLM
from torchrl_vllm_sync.testing import make_tiny_checkpoint
from torchrl_vllm_sync.weights.snapshots.files import remove_folder

# Decoding in CUDA graphs, without the minute that compiling takes at each start.
_CUDA_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Seconds that a run which was killed has to end, where another goes on from it.
ENDING_S = 10.0
RUN = "run"  # the folder of saved runs, beside those of weights
_FIGURES = ("loss_objective", "clip_fraction", "kl_approx")
# What TorchRL's loss averages over trained tokens; all else it does over rows with their padding.
_OF_TOKENS = ("loss_objective", "loss_entropy")


def trainer_device() -> torch.device:
    """Returns the last GPU, which the engines leave to the trainer, or the CPU."""
    number = torch.cuda.device_count()
    return torch.device("cuda", number - 1) if number else torch.device("cpu")


def engine_args(config: GRPOConfig) -> dict[str, Any]:
    """Returns arguments of ``AsyncVLLM.from_pretrained``, all but the model."""
    engine, on_gpus = config.inference_model, torch.cuda.is_available()
    dtype = engine.torch_dtype
    given = {
        "num_replicas": engine.num_devices,
        "num_devices": engine.tensor_parallel_size,
        "num_cpus_per_replica": 0,
        "dtype": ("bfloat16" if on_gpus else "float32") if dtype == "auto" else dtype,
        "max_num_seqs": max(64, config.train.dialog_turns_per_batch),
        "enable_prefix_caching": engine.enable_prefix_caching,
        "seed": config.train.seed,
        "compile": False,
        "enforce_eager": engine.enforce_eager or not on_gpus,
        "verbose": engine.verbose,
    }
    if engine.max_model_len is not None:
        given["max_model_len"] = engine.max_model_len
    if on_gpus:
        given["gpu_memory_utilization"] = engine.gpu_memory_utilization
        if not engine.enforce_eager:
            given["compilation_config"] = _CUDA_GRAPHS
    return given | engine.engine_args


def make_policy(
    config: GRPOConfig, service: AsyncVLLM, tokenizer: Any, *, trainer: Any = None, **sampling: Any
) -> vLLMWrapper:
    """Returns the policy that samples: no token is cut off, and each has its version."""
    engine = config.inference_model
    settings = {"max_tokens": engine.max_tokens, "temperature": engine.temperature, "top_p": 1.0}
    settings |= {} if engine.seed is None else {"seed": engine.seed}
    template: dict[str, Any] = {"chat_template": tokenizer.chat_template}
    if "qwen" in config.model.name.lower():
        template = {"chat_template_name": "qwen"}  # TorchRL has one that marks the answer
    return vLLMWrapper(
        service,
        tokenizer=tokenizer,
        input_mode="history",
        **template,
        return_log_probs=True,
        pad_output=False,
        trainer=trainer,
        generate_kwargs={**settings, "include_stop_str_in_output": True, **sampling},
    )


def load_task(config: GRPOConfig) -> tuple[Iterable[dict[str, Any]], Transform]:
    """Returns the prompts and the reward of ``env.dataset``, or says what is missing."""
    name = config.env.dataset
    module, colon, function = name.partition(":")
    if not colon:
        if why := tasks.missing(name):
            raise ConfigError({"env.dataset": why})
        return tasks.prompts(name, config.train.seed), tasks.reward(name)
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError({"env.dataset": f"{name!r} cannot be imported: {error}"}) from error
    if not callable(make):
        raise ConfigError({"env.dataset": f"{name!r} must be a function, got {shown(make)}"})
    match make(config):
        case (prompts, Transform() as reward):  # a TextReward, or whatever else rewards
            return _checked(prompts, name), reward
        case (prompts, reward) if callable(reward):
            return _checked(prompts, name), TextReward(reward)
        case other:
            told = f"{name!r} must return prompts and a TextReward, got {type(other).__name__}"
            raise ConfigError({"env.dataset": told})


def _checked(prompts: Any, name: str) -> Iterable[dict[str, Any]]:
    """The prompts, of which the first is one."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | Mapping):
        told = f"{name!r} must return prompts that can be iterated over, got {shown(prompts)}"
        raise ConfigError({"env.dataset": told})
    again = iter(prompts)
    first: Any = next(again, None)
    asked = first["query"] if isinstance(first, Mapping) and "query" in first else None
    if asked and isinstance(asked, Iterable) and all(isinstance(one, str) for one in asked):
        return itertools.chain([first], again) if again is prompts else prompts
    told = f'{name!r} must return prompts as {{"query": ["text"]}}, got {shown(first)}'
    raise ConfigError({"env.dataset": told})


class Learner:
    """The trainer's half of GRPO: a model, TorchRL's loss on it, and optimizer steps."""

    def __init__(self, config: GRPOConfig, checkpoint: str) -> None:
        settings, train = config.train_model, config.train
        self.device = trainer_device()
        on_gpu = self.device.type == "cuda"
        how = {"attn_implementation": settings.attn_implementation} if on_gpu else {}
        dtype = getattr(torch, settings.torch_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **how)
        if settings.lora.enabled:
            from peft import LoraConfig, get_peft_model

            adapters: Any = {"r": settings.lora.r, "lora_alpha": settings.lora.alpha}
            adapters |= {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
            # In float32, whatever the model is in.
            model = get_peft_model(model, LoraConfig(**adapters))
        # Dropout would make it another model than the engines'; checkpointing needs train mode.
        self.model = model.train(settings.gradient_checkpointing).to(self.device)
        self.policy = TrainerPolicy(
            self.model,
            gradient_checkpointing=settings.gradient_checkpointing,
            temperature=config.inference_model.temperature,
            packed=train.packing,
        )
        self.loss = GRPOLoss(
            self.policy,
            entropy_coeff=train.entropy_coeff,
            kl_to_inference_coeff=train.kl_to_inference_coeff or None,
            masking_strategy="sft",
        ).to(self.device)
        self._parameters = [one for one in self.model.parameters() if one.requires_grad]
        chosen = config.optimizer
        how = {"lr": chosen.lr, "eps": chosen.eps, "weight_decay": chosen.weight_decay}
        # Fused: each value is read and written once, also on a CPU.
        make: Any = getattr(torch.optim, chosen.name)
        self.optimizer: torch.optim.Optimizer = make(self._parameters, **how, fused=True)
        self._max_norm, self._autocast = chosen.clip_grad_norm, on_gpu and train.mixed_precision

    def step(self, passes: Iterable[TensorDictBase]) -> dict[str, float]:
        """Makes one optimizer step, the same in however many passes; returns ESS and means."""
        passes, ess, found = [*passes], [], dict.fromkeys(_FIGURES, 0.0)
        sizes = torch.tensor([[len(rows), num_trained(rows)] for rows in passes]).double()
        shares = (sizes / sizes.sum(0)).tolist()
        for rows, (of_rows, of_tokens) in zip(passes, shares, strict=True):
            with torch.autocast("cuda", torch.bfloat16, enabled=self._autocast):
                loss: Any = self.loss(rows.to(self.device))
            parts: dict[str, Any] = {
                name: value * (of_tokens if name in _OF_TOKENS else of_rows)
                for name, value in loss.items()
            }
            # Not loss.mean(reduce=True), which is of figures without gradients, too.
            torch.stack([parts[one] for one in parts if one.startswith("loss_")]).sum().backward()
            ess.append(float(loss.ESS))
            for name in found:
                found[name] += float(parts[name].detach().mean())
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"ESS": min(ess), "grad_norm": float(norm), **found}


@dataclass(frozen=True, kw_only=True)
class GRPOStep:
    """One batch that was trained on."""

    number: int  # from 0 on
    rows: TensorDictBase  # with their advantages
    version: int  # the trainer's when it began: rows of it were 0 versions old
    figures: dict[str, float]  # of its optimizer steps: the least ESS, and means
    push: PushReport | None  # of the weights after it
    began_at: float  # Unix seconds
    wait_s: float  # until the rows were there
    train_s: float  # of all optimizer steps

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """What the trainer did, from when to when, in Unix seconds."""
        sampled = self.began_at + self.wait_s
        return [("wait_s", self.began_at, sampled), ("train_s", sampled, sampled + self.train_s)]


class GRPORun:
    """GRPO on a running service: iterating trains, and yields a step for each batch.

    Of a step: its ``number``, ``rows`` with their advantages, the ``version`` that was trained,
    ``figures`` of the optimizer steps, the report of the ``push``, ``wait_s`` and ``train_s``.

    Example:
        >>> from torchrl_vllm_sync.rl.grpo import engine_args
        >>> tensordict.set_list_to_stack(True).set()  # TorchRL's ChatEnv asks for it
        >>> with AsyncVLLM.from_pretrained(name, **engine_args(config)) as service:
        ...     with GRPORun(config, service, tokenizer) as run:
        ...         for step in run:
        ...             log_rollouts(logger, step.rows, step.number, version=step.version)

    Attributes:
        learner: Model, loss and optimizer.
        updater: What pushes its weights.
        policy, collector: What samples with the engines, and collects batches.

    Args:
        config: All of the run but Ray and logging; checked.
        service: Engines that hold the same checkpoint.
        tokenizer: The checkpoint's.
        task: Prompts and the reward of their answers, instead of those of ``env.dataset``.
        checkpoint: What the trainer loads, if it is not ``model.name``.
        keep: ``RolloutCollector``'s.

    Raises:
        ConfigError: Settings are no such or do not go together.
        SyncError: While iterating, see ``RolloutCollector`` and ``WeightUpdater``.
    """

    def __init__(
        self,
        config: GRPOConfig,
        service: AsyncVLLM,
        tokenizer: Any,
        *,
        task: tuple[Iterable[dict[str, Any]], Transform] | None = None,
        checkpoint: str | None = None,
        keep: Callable[[TensorDict], bool] | None = None,
    ) -> None:
        config.check()
        prompts, reward = task or load_task(config)
        self.config, self.service = config, service
        self.learner = Learner(config, checkpoint or config.model.name)
        self.updater = WeightUpdater(service, source=self.learner.model)
        self.policy = make_policy(config, service, tokenizer, trainer=self.learner.policy)
        env, num_rows = config.env, config.train.dialog_turns_per_batch
        self.collector = RolloutCollector(
            tasks.make_env(tokenizer, prompts, reward, num_envs=env.num_envs, repeats=env.repeats),
            policy=self.policy,
            dialog_turns_per_batch=num_rows,
            total_dialog_turns=config.num_batches * num_rows,
            max_staleness=config.staleness,
            keep=keep,
        )
        self._advantage = GroupAdvantage(grpo_size=env.repeats)

    def __iter__(self) -> Iterator[GRPOStep]:
        train, unpushed = self.config.train, 0
        sampling = iter(self.collector)
        begin = self.collector._frames // train.dialog_turns_per_batch  # of a run that is resumed
        for number in range(begin, self.config.num_batches):
            began_at, began = time.time(), time.perf_counter()
            rows: Any = self._advantage.inv(next(sampling))
            sampled, version = time.perf_counter(), self.service.weight_version
            figures = self._learn(rows)
            trained, push = time.perf_counter(), None
            unpushed += len(figures)
            is_last = number + 1 == self.config.num_batches
            if unpushed >= (train.weight_update_frequency or 1) or is_last:
                push, unpushed = self.updater.push_weights(), 0  # with requests running
            yield GRPOStep(
                number=number,
                rows=rows,
                version=version,
                figures={
                    name: (min if name == "ESS" else statistics.fmean)(one[name] for one in figures)
                    for name in figures[0]
                },
                push=push,
                began_at=began_at,
                wait_s=sampled - began,
                train_s=trained - sampled,
            )

    def _learn(self, rows: Any) -> list[dict[str, float]]:
        """Makes all optimizer steps of a batch."""
        train = self.config.train
        chosen = (
            some
            for _ in range(train.epochs)
            for some in rows[torch.randperm(len(rows))].split(train.optim_batch_size)
        )
        return [self.learner.step(self._passes(some)) for some in chosen]

    def _passes(self, rows: Any) -> Sequence[TensorDictBase]:
        """Cuts the rows of an optimizer step into passes of a like length, the longest first."""
        train, lengths = self.config.train, rows[ATTENTION].sum(1)
        most, size = train.max_tokens_per_pass, len(rows) // train.gradient_accumulation_steps
        if most is None and train.packing:
            return rows.split(size)  # of whatever is next, so that none has all of the longest
        order = lengths.argsort(descending=True)
        if most is None:
            return rows[order].split(size)
        num_tokens: Any = sum if train.packing else lambda some: len(some) * some[0]
        passes: list[list[int]] = [[]]
        for length in lengths[order].tolist():
            if passes[-1] and num_tokens([*passes[-1], length]) > most:
                passes.append([])
            passes[-1].append(length)
        return rows[order].split([*map(len, passes)])

    def close(self) -> None:
        """Ends sampling, and what of it has begun."""
        self.collector.shutdown()

    def __enter__(self) -> GRPORun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _ray_of(config: GRPOConfig) -> Iterator[None]:
    """Starts Ray and ends it, unless this process has joined a cluster."""
    if ray.is_initialized():
        yield
        return
    engine, on_gpus = config.inference_model, torch.cuda.is_available()
    given: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    given |= {one: of for one, of in config.ray.init_config.items() if not one.startswith("_")}
    given.setdefault("address", os.environ.get("RAY_ADDRESS", "local"))
    if given["address"] == "local":
        given["num_gpus"] = engine.num_devices * engine.tensor_parallel_size * on_gpus
    init_ray(**given)
    try:
        yield
    finally:
        ray.shutdown()


def _check_machine(config: GRPOConfig) -> None:
    """Refuses what wants GPUs or a package that this machine has not."""
    adapters, backend = config.train_model.lora.enabled and "peft", config.logging.backend
    for key, package in {"train_model.lora.enabled": adapters, "logging.backend": backend}.items():
        if package and package != "csv" and importlib.util.find_spec(package) is None:
            raise ConfigError({key: f"needs a package: pip install {package}"})
    engine, there = config.inference_model, torch.cuda.device_count()
    needed = engine.num_devices * engine.tensor_parallel_size + 1
    if there and needed > there and not ray.is_initialized():
        why = f"needs {needed} GPUs, one of them for the trainer, and there are {there}"
        raise ConfigError({"inference_model.num_devices": f"{engine.num_devices} {why}"})


def _saved(config: GRPOConfig) -> Path | None:
    """The save to go on from, if any; one that is not this run's, or whole, is refused at once."""
    root, resume = Path(config.logging.checkpoint_dir or "") / RUN, config.logging.resume
    if resume != "must" and not (config.logging.checkpoint_dir and any(root.glob(f"{SAVED}*"))):
        return None
    if resume == "never":
        raise ConfigError({"logging.resume": f"is {resume}, and there is a saved run in {root}"})
    try:
        folder, about = newest_save(root)
    except RunStateError as error:
        raise ConfigError({"logging.resume": f"finds no save to go on from: {error}"}) from error
    was, now = about["settings"], config._of_rows
    told = {one: f"was {was.get(one)!r} in the run saved in {folder}" for one in now}
    if wrong := {one: f"{told[one]}, got {now[one]!r}" for one in now if was.get(one) != now[one]}:
        raise ConfigError(wrong)
    return folder


def train_grpo(config: GRPOConfig) -> list[dict[str, float]]:
    """Trains as ``torchrl-vllm-sync grpo`` does: starts Ray and engines, trains, logs and saves.

    Args:
        config: The run.

    Returns:
        What :class:`RunLog` has logged of each batch, the optimizer steps' figures as
        ``training/...``, and the ``version`` that was trained.

    Raises:
        ConfigError: At once, of settings that are none, or do not go together, fit here or a save.
        SyncError: Engines do not start, see ``AsyncVLLM``, or a run failed, see :class:`GRPORun`.
    """
    config = copy.deepcopy(config)
    config.check()
    _check_machine(config)
    with _own_folder(config):
        return _train(config)


@contextlib.contextmanager
def _own_folder(config: GRPOConfig) -> Iterator[None]:
    """Keeps other runs out of ``checkpoint_dir``, and finds at once that it cannot be written."""
    with contextlib.ExitStack() as kept:
        if (folder := config.logging.checkpoint_dir) is not None:
            try:
                kept.enter_context(only_writer(Path(folder), ENDING_S))
            except (OSError, RunStateError) as error:
                why = f"{folder} cannot be used: {error}"
                raise ConfigError({"logging.checkpoint_dir": why}) from error
        yield


def _train(config: GRPOConfig) -> list[dict[str, float]]:
    begun, settings = _saved(config), config._of_rows
    task, found = load_task(config), []
    torch.manual_seed(config.train.seed)
    logging, dataset = config.logging, config.env.dataset
    name = logging.experiment_name or f"grpo-{dataset}-{config.model.name}"
    if logging.experiment_name is None:  # no other run's figures are added to
        kept = logging.checkpoint_dir
        folder = kept and xxhash.xxh3_64_hexdigest(os.path.realpath(kept).encode())[:8]
        name += f"-{folder}" if folder else time.strftime("-%Y%m%d-%H%M%S")
    with contextlib.ExitStack() as running:
        running.enter_context(set_list_to_stack(True))  # TorchRL's chat environments ask for it
        if config.model.name == TINY:
            directory = running.enter_context(tempfile.TemporaryDirectory(prefix="grpo-"))
            seed = config.train.seed
            config.model.name = str(make_tiny_checkpoint(directory, seed=seed, diverse=False))
        if is_missing(config.model.name):
            told = f"must be a checkpoint, and there is none at {config.model.name}"
            raise ConfigError({"model.name": told})
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model.name, padding_side="left")
        except (OSError, ValueError) as error:
            why = f"{config.model.name} cannot be loaded: {error}"
            raise ConfigError({"model.name": why}) from error
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # as get_logger has no other
        backend: Any = logging.backend
        logger: Any = get_logger(backend, logging.log_dir, name.replace("/", "-"))
        bar = tqdm(total=config.num_batches, desc="GRPO: engines start", file=sys.stderr)
        running.enter_context(bar)
        running.enter_context(_ray_of(config))
        engines = engine_args(config)
        service = running.enter_context(AsyncVLLM.from_pretrained(config.model.name, **engines))
        log = running.enter_context(RunLog(logger, service))
        run = running.enter_context(GRPORun(config, service, tokenizer, task=task))
        bar.set_description("GRPO", refresh=False)
        bar.reset()  # its clock, too
        parts = {"collector": run.collector, "updater": run.updater, "settings": settings}
        state = RunState(run.learner.model, run.learner.optimizer, **parts)
        if begun is not None:
            bar.update(state.load(begun, audit=False))  # not every engine can be audited
        is_late = False
        for step in run:
            # Whoever evaluates beside training does so here: the service has what was pushed.
            said = log(step.rows, step.number, version=step.version, training=step.figures)
            found.append({**said, "version": step.version})
            bar.set_postfix_str(f"reward {said['rollout/reward']:.3f}", refresh=False)
            is_late = _save(run, step, tokenizer, state, is_late=is_late)
            bar.update()
    return found


def _save(
    run: GRPORun, step: GRPOStep, tokenizer: Any, state: RunState, *, is_late: bool = False
) -> bool:
    """Saves weights where it is time, and the run after a push; returns whether that is late."""
    logging, done, last = run.config.logging, step.number + 1, run.config.num_batches
    is_due = done == last or done % (logging.checkpoint_frequency or last) == 0
    if logging.checkpoint_dir is None or not (is_due or is_late):
        return False
    root = Path(logging.checkpoint_dir)
    for one in (run.learner.model, tokenizer) if is_due else ():
        one.save_pretrained(root / f"step-{done}")
    if step.push is None:
        return True
    state.save(root / RUN, step=done)
    for old in sorted((root / RUN).glob(f"{SAVED}*"))[:-2]:
        remove_folder(old)
    return False

"""Command-line settings that the GRPO tutorials share, and what each task prefers."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync import GRPOConfig
from torchrl_vllm_sync.rl.grpo import trainer_device
from torchrl_vllm_sync.rl.tasks import missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TINY = "tiny"
REWARD_TARGET, TURNS_REWARD_TARGET = 0.9, 0.8
# By how much the effective sample size of fresh rows may be below 1. bfloat16 rounds coarsely, and
# trainer and engines round in different places: 0.003 to 0.06 below on an H200.
ESS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# What it must be after the step that learned from these rows: one that changes the model more than
# that, by a learning rate that is too high for it, destroys what it knew.
ESS_AFTER_STEP = 0.5
# Measured by 03_multi_turn.py --groups 1 --group-size 2 --max-tokens 32, in SmolLM2-135M's shape.
ON_CPU = (
    "There is no GPU: on two cores a step on six answers of 32 tokens took half a minute with 135 "
    "million weights. --groups, --group-size and --max-tokens make steps shorter."
)
# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "low-ids": {
        "model": TINY, "steps": 40, "lr": 5e-3, "group_size": 8, "groups": 4, "rows_per_pass": 32,
        "max_tokens": 16, "max_model_len": 256,
    },
    "gsm8k": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct", "steps": 100, "lr": 1e-6, "group_size": 16,
        "groups": 8, "rows_per_pass": 8, "max_tokens": 512, "max_model_len": 1024,
    },
    "reasoning-gym": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "steps": 100, "lr": 2e-5, "group_size": 16,
        "groups": 16, "rows_per_pass": 64, "max_tokens": 64, "max_model_len": 1024,
    },
}
# fmt: on
TURNS_PRESETS: dict[bool, dict[str, Any]] = {  # by whether the model is the tiny one
    True: PRESETS["low-ids"]
    | {"steps": 45, "max_model_len": 512, "groups": 2, "rows_per_pass": 48},
    False: PRESETS["gsm8k"] | {"max_tokens": 256, "max_model_len": 2048, "group_size": 8},
}


def make_parser(doc: str, output: str, *, has_dataset: bool = True) -> argparse.ArgumentParser:
    """Returns a parser that knows the shared settings."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", help=f"a Hugging Face name or path, or {TINY!r}")
    parser.add_argument("--replicas", type=int, help="vLLM engines; two, where there is room")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    seeded = "of the tiny model, the prompts and the engines; not of which engine answers what"
    parser.add_argument("--seed", type=int, default=0, help=seeded)
    parser.add_argument("--minutes", type=float, default=math.inf, help="ends the run by time")
    parser.add_argument("--lr", type=float, help="learning rate of AdamW")
    parser.add_argument("--group-size", type=int, help="answers to each prompt")
    parser.add_argument("--groups", type=int, help="prompts in each step")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--output", type=Path, default=Path("tutorials/output") / output)
    parser.add_argument("--smoke", action="store_true", help="a few steps, weaker claim")
    if has_dataset:
        known = "low-ids, gsm8k or a data set of the package reasoning-gym"
        parser.add_argument("--dataset", help=f"{known}; chain_sum on GPUs, low-ids without")
    return parser


def finish(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    preset: dict[str, Any],
    *,
    smoke_steps: int,
    min_replicas: int = 1,
    turns: int = 1,
) -> argparse.Namespace:
    """Fills in what was not given from a preset, checks it, and finds devices.

    ``args`` gets ``batch_size``, the rows of a step; ``engine_gpus``, the GPUs that Ray may use;
    the trainer's ``device``; the engines' ``dtype``; and all of it as the library's ``config``.
    """
    num_gpus = torch.cuda.device_count()
    if args.minutes < math.inf and args.steps is None:
        args.steps = sys.maxsize
    if args.replicas is None:
        args.replicas = 1 if num_gpus == 2 and min_replicas == 1 else 2
    for name, value in (preset | ({"steps": smoke_steps} if args.smoke else {})).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    least = {"replicas": min_replicas, "steps": 1, "group_size": 2, "groups": 1}
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}")
    # Whole groups and whole passes of equal size.
    args.batch_size = args.group_size * args.groups * turns
    args.rows_per_pass = min(args.rows_per_pass, args.batch_size)
    while args.batch_size % args.rows_per_pass:
        args.rows_per_pass -= 1
    if 0 < num_gpus <= args.replicas:
        parser.error(
            f"--replicas {args.replicas} needs {args.replicas + 1} GPUs, one of them for the "
            f"trainer, and there are {num_gpus}"
        )
    if not num_gpus and args.model != TINY:
        print(ON_CPU)
    args.engine_gpus = max(0, num_gpus - 1)
    args.device = trainer_device()
    args.dtype = torch.bfloat16 if num_gpus else torch.float32  # the engines'
    args.config = config = GRPOConfig()
    env, train, engine = config.env, config.train, config.inference_model
    env.dataset = getattr(args, "dataset", env.dataset)
    env.repeats, config.model.name, config.optimizer.lr = args.group_size, args.model, args.lr
    env.num_envs = train.dialog_turns_per_batch = train.optim_batch_size = args.batch_size
    train.total_dialog_turns, train.seed = args.steps * args.batch_size, args.seed
    train.gradient_accumulation_steps = args.batch_size // args.rows_per_pass
    engine.num_devices, engine.max_tokens = args.replicas, args.max_tokens
    engine.max_model_len = args.max_model_len
    return args


def finish_dataset(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, steps: int, smoke_steps: int
) -> argparse.Namespace:
    """The same by the preset of ``--dataset``; the tiny model takes ``steps`` to learn its own."""
    args = parser.parse_args(argv)
    if args.dataset is None:
        is_tiny = args.model == TINY or not (args.model or torch.cuda.device_count())
        args.dataset = "low-ids" if is_tiny else "chain_sum"
    if args.dataset == "low-ids" and args.model not in (None, TINY):
        parser.error(f"--dataset low-ids is for --model {TINY}")
    if why := missing(args.dataset):
        parser.error(f"--dataset {why}")
    preset = PRESETS.get(args.dataset, PRESETS["reasoning-gym"])
    args.reward_target = None  # what PASS asks of the reward
    if args.dataset == "low-ids":
        preset, args.reward_target = preset | {"steps": steps}, REWARD_TARGET
        args.held_out = 0  # it has nothing to hold out
    return finish(parser, args, preset, smoke_steps=smoke_steps)


def finish_turns(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, turns: int, smoke_steps: int
) -> argparse.Namespace:
    """The same for conversations of several turns, on two replicas at least."""
    parser.set_defaults(model=TINY)
    args = parser.parse_args(argv)
    args.is_tiny = args.model == TINY
    args.reward_target = TURNS_REWARD_TARGET if args.is_tiny else None
    least = {"min_replicas": 2, "turns": turns}
    return finish(parser, args, TURNS_PRESETS[args.is_tiny], smoke_steps=smoke_steps, **least)


# The tutorials that compare an engine's tokens after a push with what they should be.
def make_push_parser(doc: str, shapes: Iterable[str], shape: str = TINY) -> argparse.ArgumentParser:
    """Returns a parser that knows what these tutorials share."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(shapes), default=shape, help="random weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="fewer tokens, no record")
    return parser


def finish_push(parser: argparse.ArgumentParser, args: argparse.Namespace, *counts: str) -> int:
    """Checks counts and finds devices: the trainer has the last GPU; returns how many there are.

    ``args`` gets ``on_gpus``, ``device`` and ``dtype``, the trainer's, and ``num_tokens`` of an
    answer.
    """
    counts = ("prompts", *counts)
    if any(getattr(args, name) < 1 for name in counts):
        options = " and ".join(f"--{name.replace('_', '-')}" for name in counts)
        parser.error(f"{options} must be at least 1")
    num_gpus = torch.cuda.device_count()
    args.on_gpus = num_gpus > 0
    args.device = torch.device("cuda", num_gpus - 1) if num_gpus else torch.device("cpu")
    args.dtype = torch.bfloat16 if num_gpus else torch.float32
    args.num_tokens = 24 if args.smoke else 64
    return num_gpus

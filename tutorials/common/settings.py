"""Command-line settings that the GRPO tutorials share, and what each task prefers."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch

TINY = "tiny"
PRESETS: dict[str, dict[str, Any]] = {
    "low-ids": {
        "model": TINY,
        "steps": 40,
        "lr": 5e-3,
        "group_size": 8,
        "groups": 4,
        "max_tokens": 16,
        "max_model_len": 256,
        "rows_per_pass": 32,
    },
    "gsm8k": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "steps": 100,
        "lr": 1e-6,
        "group_size": 16,
        "groups": 8,
        "max_tokens": 512,
        "max_model_len": 1024,
        "rows_per_pass": 8,
    },
}


def make_parser(description: str, *, output: str, smoke_steps: int) -> argparse.ArgumentParser:
    """Returns a parser that knows the shared settings."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help=f"a Hugging Face name or path, or {TINY!r}")
    parser.add_argument("--dataset", choices=sorted(PRESETS), default="low-ids")
    parser.add_argument("--replicas", type=int, default=2, help="vLLM engines")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="learning rate of Adam")
    parser.add_argument("--group-size", type=int, help="answers to each prompt")
    parser.add_argument("--groups", type=int, help="prompts in each step")
    parser.add_argument("--output", type=Path, default=Path("tutorials/output") / output)
    parser.add_argument("--smoke", action="store_true", help=f"{smoke_steps} steps, weaker claim")
    return parser


def finish(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *, smoke_steps: int
) -> argparse.Namespace:
    """Fills in what was not given from the dataset's preset, checks it, and finds devices.

    ``args`` gets ``batch_size``, the rows of a step; ``engine_gpus``, the GPUs that Ray may use;
    the trainer's ``device``; and the engines' ``dtype``.
    """
    preset = PRESETS[args.dataset] | ({"steps": smoke_steps} if args.smoke else {})
    for name, value in preset.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    for name in ("replicas", "steps", "group_size", "groups"):
        least = 2 if name == "group_size" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    # Whole groups and whole passes of equal size.
    args.batch_size = args.group_size * args.groups
    args.rows_per_pass = min(args.rows_per_pass, args.batch_size)
    while args.batch_size % args.rows_per_pass:
        args.rows_per_pass -= 1

    num_gpus = torch.cuda.device_count()
    if num_gpus <= args.replicas and (num_gpus or args.dataset == "gsm8k"):
        parser.error(
            f"--replicas {args.replicas} needs {args.replicas + 1} GPUs, one of them for the "
            f"trainer, and there are {num_gpus}"
        )
    if args.dataset == "gsm8k" and importlib.util.find_spec("datasets") is None:
        parser.error("--dataset gsm8k needs another package: pip install datasets")
    args.engine_gpus = max(0, num_gpus - 1)
    args.device = torch.device("cuda", num_gpus - 1) if num_gpus else torch.device("cpu")
    args.dtype = torch.bfloat16 if num_gpus else torch.float32  # the engines'
    return args

"""Calculations for conversations with a tool, and the reward on problems that are held out."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync import RolloutCollector
from torchrl_vllm_sync.rl import tasks
from torchrl_vllm_sync.rl.grpo import make_env
from torchrl_vllm_sync.rl.tasks import held_out

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

    from torchrl_vllm_sync import vLLMWrapper


def calculations(seed: int, *, high: int) -> Iterator[dict[str, list[str]]]:
    """Yields prompts for ever, no two of them equal, with numbers below ``high``."""
    generator = torch.Generator().manual_seed(seed)
    for number in itertools.count():
        a, b, c = torch.randint(1, high, (3,), generator=generator).tolist()
        yield {"query": [f"Question {seed}.{number}: What is {a} * {b} + {c}?"]}


def calculate(expression: str) -> int:
    """Returns the value of sums, differences and products of whole numbers."""
    if not re.fullmatch(r"-?\d{1,9}( *[-+*] *\d{1,9})*", expression.strip()):
        raise ValueError(f"not a sum, difference or product: {expression!r}")
    return eval(expression.strip())  # numbers and signs, as was just seen


def names_result(questions: list[str], answers: list[str]) -> list[float]:
    """1 for an answer with the right number of a calculation in it, 0 for another."""
    results = [str(calculate(one.split("What is ")[1].rstrip("?"))) for one in questions]
    named = [re.findall(r"-?\d+", one.replace(",", "")) for one in answers]
    return [float(one in those) for one, those in zip(results, named, strict=True)]


def evaluate(args: argparse.Namespace, tokenizer: Any, policy: vLLMWrapper) -> list[float]:
    """The mean reward of one answer to each problem held out; nothing where none are."""
    if not (number := args.held_out):
        return []
    problems = held_out(args.dataset, number)
    env = make_env(tokenizer, problems, tasks.reward(args.dataset), num_envs=number)
    collector = RolloutCollector(env, policy=policy, dialog_turns_per_batch=number)
    mean = float(next(iter(collector))["next", "reward"].mean())
    collector.shutdown()
    print(f"{number} problems held out: {mean:.3f}", flush=True)
    return [mean]

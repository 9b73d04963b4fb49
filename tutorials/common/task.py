"""Calculations for conversations with a tool, and the reward on problems that are held out."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync import Evaluator
from torchrl_vllm_sync.rl import tasks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from torchrl_vllm_sync import AsyncVLLM, vLLMWrapper


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


SYSTEM = """You solve problems step by step. To calculate, write <tool>12 * 7 + 5</tool>, and the \
next message has the value. Then say the result."""


def calculator(text: str) -> str:
    """Calculates what an answer has between ``<tool>`` and ``</tool>``."""
    calls = re.findall(r"<tool>(.{1,80}?)</tool>", text)
    try:
        return str(calculate(calls[-1])) if calls else "There was no <tool>...</tool> in this."
    except (SyntaxError, ValueError) as error:
        return f"Error: {error}"


def names_result(questions: list[str], answers: list[str]) -> list[float]:
    """1 for an answer with the right number of a calculation in it, 0 for another."""
    results = [str(calculate(one.split("What is ")[1].rstrip("?"))) for one in questions]
    named = [re.findall(r"-?\d+", one.replace(",", "")) for one in answers]
    return [float(one in those) for one, those in zip(results, named, strict=True)]


def evaluate(
    args: argparse.Namespace, service: AsyncVLLM, make_policy: Callable[[AsyncVLLM], vLLMWrapper]
) -> list[float]:
    """The mean reward of one answer to each problem held out; nothing where none are."""
    if not args.held_out:
        return []
    problems = tasks.held_out(args.dataset, args.held_out)
    scored = tasks.reward(args.dataset)
    found = Evaluator(service, problems, scored, make_policy, allow_last=True).evaluate()
    print(f"{found.num_rows} problems held out: {found.reward:.3f}", flush=True)
    return [found.reward]

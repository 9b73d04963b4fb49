"""The task of the GRPO benchmark: sums of two numbers, rewarded by a glance at the answer."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def questions() -> Iterator[dict[str, list[str]]]:
    """Endless, each another, as ``ChatEnv`` takes them."""
    for number in itertools.count(1):
        yield {"query": [f"What is {number} + {number % 89}?"]}


def score(prompts: Iterable[str], answers: Iterable[str], **_: Any) -> list[float]:
    """1 for the right sum, and less for a long answer, so that the rows of a group differ."""
    scores = []
    for prompt, answer in zip(prompts, answers, strict=True):
        numbers = re.search(r"What is (\d+) \+ (\d+)", prompt)
        assert numbers is not None, prompt
        right = str(sum(map(int, numbers.groups())))
        scores.append(float(right in answer) - len(answer) / 1000)
    return scores

"""Prompts and rewards: a task that a tiny random model can learn, and GSM8K for real ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, GSM8KEnv
from torchrl.envs.llm.datasets.gsm8k import GSM8KRewardParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from tensordict import TensorDictBase


class RowReward(Transform):
    """Reward: what a function says of each row, which is one answer."""

    def __init__(self, of: Callable[[TensorDictBase], float]) -> None:
        super().__init__()
        self._of = of

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = torch.tensor([float(self._of(row)) for row in tensordict.view(-1).unbind(0)])
        next_tensordict["reward"] = rewards.view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Announces the reward's shape."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1), dtype=torch.float32)
        return reward_spec


def low_ids(row: TensorDictBase) -> float:
    """Share of the answer's tokens whose id is below 128."""
    ids = row["tokens", "response"]
    return float((ids < 128).float().mean()) if len(ids) else 0.0


def additions(seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields prompts for ever. The default reward does not care what they ask."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        a, b = torch.randint(0, 10, (2,), generator=generator).tolist()
        yield {"query": [f"What is {a} + {b}?"]}


def school_problems(seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields the training questions of GSM8K with their answers, for ever, shuffled anew."""
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    problems = load_dataset("openai/gsm8k", "main")["train"]
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(problems), generator=generator).tolist():
            one = problems[index]
            yield {"query": [one["question"]], "answer": [one["answer"]]}


def prompts(dataset: str, seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields a dataset's prompts for ever, in an order that the seed fixes."""
    return {"low-ids": additions, "gsm8k": school_problems}[dataset](seed)


def first_twice(items: Iterable[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    """Yields the first ``number`` of ``items`` a second time, and goes on with the others.

    TorchRL's collector (0.14) resets its environment once while it is built and throws away what it
    got: without this the prompts of the first batch would be lost.
    """
    rest = iter(items)
    first = list(itertools.islice(rest, number))
    yield from first
    yield from first
    yield from rest


def make_env(
    args: argparse.Namespace, tokenizer: Any, dataloader: Iterable[dict[str, Any]]
) -> TransformedEnv:
    """Returns the environment: each prompt ``group_size`` times, one answer to each."""
    dataloader = first_twice(dataloader, args.groups)
    kind, reward = {
        "low-ids": (ChatEnv, lambda: RowReward(low_ids)),
        "gsm8k": (GSM8KEnv, lambda: GSM8KRewardParser(tokenizer=tokenizer)),
    }[args.dataset]
    env = kind.from_dataloader(
        dataloader=dataloader,
        batch_size=(args.batch_size,),
        repeats=args.group_size,
        tokenizer=tokenizer,
        input_mode="history",
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(reward())

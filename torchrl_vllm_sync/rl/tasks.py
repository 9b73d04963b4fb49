"""Tasks: prompts, what answers are worth, and problems that are kept for evaluation.

``low-ids`` is one that a tiny random model can learn; ``gsm8k`` is school problems; every other
name is a data set of the package reasoning-gym, which makes problems up and scores answers to them.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv

from torchrl_vllm_sync.rl.rollouts import TextReward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchrl.envs import TransformedEnv

# Other settings than reasoning-gym's own: sums and differences of two numbers of two digits.
SETTINGS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}}
NUM_PROBLEMS = 1_000_000  # of a data set; then they come again
HELD_OUT_SEED = 10**9  # a problem is made from its number plus the seed: far from those of training


def low_ids(_: Any, answers: list[list[int]]) -> list[float]:
    """Share of each answer's tokens whose id is below 128."""
    return [sum(one < 128 for one in ids) / max(1, len(ids)) for ids in answers]


def last_number(text: str) -> str:
    """The last number in a text, without thousands' commas; "" if there is none."""
    return (re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?", text.replace(",", "")) or [""])[-1]


def right_number(_: Any, answers: list[str], *, answer: list[str]) -> list[float]:
    """1 for an answer that ends in the same number as the data set's, 0 for another."""
    pairs = zip(answers, answer, strict=True)
    return [float(last_number(said) == last_number(right)) for said, right in pairs]


def solved(dataset: str, _: Any, answers: list[str], *, problem: list[str]) -> list[float]:
    """What reasoning-gym scores: of an answer its last number, where the right one is a number."""
    scores = []
    which = [tuple(map(int, one.split())) for one in problem]
    made = {seed: made_up(dataset, seed) for seed in {seed for seed, _ in which}}
    for said, (seed, index) in zip(answers, which, strict=True):
        problems, entry = made[seed], made[seed][index]
        is_number = entry["answer"] and entry["answer"] == last_number(entry["answer"])
        told = last_number(said) if is_number else said.strip()
        scores.append(float(problems.score_answer(told, entry)))
    return scores


def scorer(dataset: str) -> dict[str, Any]:
    """What scores a data set's answers, and over what: arguments of ``TextReward``."""
    if dataset == "low-ids":
        return {"fn": low_ids, "over": "ids"}
    return {"fn": right_number if dataset == "gsm8k" else functools.partial(solved, dataset)}


def reward(dataset: str) -> TextReward:
    """The reward of a data set's answers."""
    return TextReward(**scorer(dataset))


def made_up(dataset: str, seed: int) -> Any:
    """A data set of reasoning-gym, which makes a problem when it is asked for it."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    settings = SETTINGS.get(dataset, {})
    return reasoning_gym.create_dataset(dataset, size=NUM_PROBLEMS, seed=seed, **settings)


def missing(dataset: str) -> str | None:
    """Says what a data set lacks on this machine: a package, or such a name."""
    needs = {"low-ids": "torch", "gsm8k": "datasets"}.get(dataset, "reasoning_gym")
    if importlib.util.find_spec(needs) is None:
        return f"{dataset!r} needs a package: pip install {needs.replace('_', '-')}"
    if needs == "reasoning_gym":
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

        if dataset not in DATASETS:
            return f"{dataset!r} must be one of low-ids, gsm8k, {', '.join(DATASETS)}"
    return None


def additions(seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields prompts for ever. The reward does not care what they ask."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        a, b = torch.randint(0, 10, (2,), generator=generator).tolist()
        yield {"query": [f"What is {a} + {b}?"]}


def school_problems(split: str, seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields questions of GSM8K with their answers, for ever, shuffled anew."""
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    problems = load_dataset("openai/gsm8k", "main")[split]
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(problems), generator=generator).tolist():
            one = problems[index]
            yield {"query": [one["question"]], "answer": [one["answer"]]}


def made_up_problems(dataset: str, seed: int) -> Iterator[dict[str, list[str]]]:
    """Yields problems of reasoning-gym for ever, with their seeds and numbers."""
    made = made_up(dataset, seed)
    for index in itertools.cycle(range(NUM_PROBLEMS)):
        yield {"query": [made[index]["question"]], "problem": [f"{seed} {index}"]}


def prompts(dataset: str, seed: int, num_held_out: int = 0) -> Iterator[dict[str, list[str]]]:
    """Yields a dataset's prompts for ever, in an order that the seed fixes; none is held out."""
    if dataset == "low-ids":
        return additions(seed)
    if dataset == "gsm8k":
        return school_problems("train", seed)
    kept = {one["query"][0] for one in held_out(dataset, num_held_out)}
    return (one for one in made_up_problems(dataset, seed) if one["query"][0] not in kept)


def held_out(dataset: str, number: int) -> list[dict[str, list[str]]]:
    """The same problems in each run, which training never sees, but for ``low-ids``'s hundred."""
    if dataset == "low-ids":
        made = additions(HELD_OUT_SEED)
    elif dataset == "gsm8k":
        made = school_problems("test", 0)
    else:
        made = made_up_problems(dataset, HELD_OUT_SEED)
    return [*itertools.islice(made, number)]


def first_twice(items: Iterable[Mapping[str, Any]], number: int) -> Iterator[Any]:
    """Yields the first ``number`` of ``items`` a second time, and goes on with the others.

    TorchRL's collector (0.14) resets its environment once while it is built and throws away what it
    got: without this the prompts of the first batch would be lost.
    """
    rest = iter(items)
    first = list(itertools.islice(rest, number))
    return itertools.chain(first, first, rest)


def make_env(
    tokenizer: Any,
    prompts: Iterable[Mapping[str, Any]],
    reward: TextReward,
    *,
    num_envs: int,
    repeats: int = 1,
) -> TransformedEnv:
    """Returns the environment of a collector: an episode is one prompt and one answer."""
    loader: Any = first_twice(prompts, num_envs // repeats)
    env = ChatEnv.from_dataloader(
        dataloader=loader,
        batch_size=(num_envs,),
        repeats=repeats,
        tokenizer=tokenizer,
        input_mode="history",
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(reward)

"""Tasks: prompts, what answers are worth, and evaluation of problems that are kept for it.

``low-ids`` is one that a tiny random model can learn; ``gsm8k`` is school problems; every other
name is a data set of the package reasoning-gym, which makes problems up and scores answers to them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_vllm_sync.checks import DEFAULT_TIMEOUT_S, check_integer, check_seconds
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionSpanError
from torchrl_vllm_sync.rl.policy import vLLMWrapper
from torchrl_vllm_sync.rl.rollouts import RolloutCollector, TextReward
from torchrl_vllm_sync.rl.rows import NO_VERSION
from torchrl_vllm_sync.service.service import AsyncVLLM

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
    found, wanted = (
        [float(last_number(one) or "nan") for one in texts] for texts in (answers, answer)
    )
    return [float(one == other) for one, other in zip(found, wanted, strict=True)]


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


def problems(dataset: str, seed: int | None) -> Iterator[dict[str, list[str]]]:
    """Yields prompts for ever, in an order that the seed fixes; without one, those held out."""
    if dataset == "low-ids":  # the reward does not care what they ask
        generator = torch.Generator().manual_seed(HELD_OUT_SEED if seed is None else seed)
        while True:
            a, b = torch.randint(0, 10, (2,), generator=generator).tolist()
            yield {"query": [f"What is {a} + {b}?"]}
    if dataset == "gsm8k":
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        rows = load_dataset("openai/gsm8k", "main")["test" if seed is None else "train"]
        generator = torch.Generator().manual_seed(seed or 0)
        while True:
            for index in torch.randperm(len(rows), generator=generator).tolist():
                yield {"query": [rows[index]["question"]], "answer": [rows[index]["answer"]]}
    seed = HELD_OUT_SEED if seed is None else seed
    made = made_up(dataset, seed)
    for index in itertools.cycle(range(NUM_PROBLEMS)):
        yield {"query": [made[index]["question"]], "problem": [f"{seed} {index}"]}


def prompts(dataset: str, seed: int, num_held_out: int = 0) -> Iterator[dict[str, list[str]]]:
    """Yields a dataset's prompts for ever, in an order that the seed fixes; none is held out."""
    if dataset in ("low-ids", "gsm8k"):
        return problems(dataset, seed)
    kept = {one["query"][0] for one in held_out(dataset, num_held_out)}
    return (one for one in problems(dataset, seed) if one["query"][0] not in kept)


def held_out(dataset: str, number: int) -> list[dict[str, list[str]]]:
    """The same problems in each run, which training never sees, but for ``low-ids``'s hundred."""
    return [*itertools.islice(problems(dataset, None), number)]


class Prompts:
    """The rows of a data set: the first ``number`` twice, and all once more where they end."""

    # TorchRL's collector (0.14) resets its environment while it is built, and drops what it got.
    def __init__(self, rows: Iterable[Mapping[str, Any]], number: int) -> None:
        self._rows, self._twice = rows, number

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        twice, self._twice, rest = self._twice, 0, iter(self._rows)
        if not (first := list(itertools.islice(rest, twice or 1))):
            raise UnsupportedArgumentError(
                "prompts must go on as long as the run, or be a sequence, which is begun again: "
                "there are no more"
            )
        yield from itertools.chain(first[:twice], first, rest)


def make_env(
    tokenizer: Any,
    prompts: Iterable[Mapping[str, Any]],
    reward: Transform,
    *,
    num_envs: int,
    repeats: int = 1,
) -> TransformedEnv:
    """Returns the environment of a collector: an episode is one prompt and one answer."""
    loader: Any = Prompts(prompts, num_envs // repeats)
    env = ChatEnv.from_dataloader(
        dataloader=loader,
        batch_size=(num_envs,),
        repeats=repeats,
        tokenizer=tokenizer,
        input_mode="history",
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one version of the weights is worth.

    Attributes:
        version: Policy version that sampled every answer.
        reward: Mean reward of the rows.
        num_rows, seconds: Answers, and how long they took, with the replica pinned already.
        rows: As a :class:`RolloutCollector` gives them, of batch size ``(num_rows,)``.
    """

    version: int
    reward: float
    num_rows: int
    seconds: float
    rows: TensorDictBase


class Evaluator:
    """Evaluates versions of a policy on a held-out set while training goes on.

    On a replica that is pinned (:meth:`AsyncVLLM.pinned`): pushes and rollouts use the others.

    Example:
        >>> greedy = functools.partial(vLLMWrapper, tokenizer=tokenizer, input_mode="history")
        >>> evaluator = Evaluator(service, problems, right, greedy, logger=logger)
        >>> evaluator.start()       # with the weights that are served now
        >>> train_on(next(batches)); updater.push_weights()
        >>> evaluator.result(timeout_s=300).reward

    Args:
        service: Whose replicas are evaluated, in the process that launched it.
        problems: Rows of a data set, as ``ChatEnv.from_dataloader`` takes them one at a time, such
            as ``{"query": ["What is 2 + 3?"], "answer": ["5"]}``.
        reward: A :class:`TextReward`, or the function for one.
        make_policy: Makes the policy of the pinned service, with its sampling parameters and
            tokenizer and ``input_mode="history"``.
        repeats: Answers to each problem, at least 1.
        logger: A TorchRL logger, which gets the mean reward as ``name`` with the version as step.
        name: What the logger gets it as.
        **pinning: ``timeout_s`` and ``allow_last`` of :meth:`AsyncVLLM.pinned`.

    Raises:
        UnsupportedArgumentError: There are no problems, or ``repeats`` is less than 1.
    """

    def __init__(
        self,
        service: AsyncVLLM,
        problems: Iterable[Mapping[str, Any]],
        reward: TextReward | Callable[..., Any],
        make_policy: Callable[[AsyncVLLM], vLLMWrapper],
        *,
        repeats: int = 1,
        logger: Any = None,
        name: str = "evaluation/reward",
        **pinning: Any,
    ) -> None:
        self._service, self._problems, self._make_policy = service, [*problems], make_policy
        check_integer("repeats", repeats, 1)
        if not self._problems:
            raise UnsupportedArgumentError("problems must be at least one, got none")
        self._reward = reward if isinstance(reward, TextReward) else TextReward(reward)
        self._repeats, self._logger, self._name, self._pinning = repeats, logger, name, pinning
        self._running: Future[Evaluation] | None = None

    def start(self, version: int | None = None) -> int:
        """Pins a replica, and goes on in a thread.

        Args:
            version: That of :meth:`AsyncVLLM.pinned`, whose errors this raises.

        Returns:
            The version that is evaluated.

        Raises:
            UnsupportedArgumentError: An evaluation is under way, or its result was not taken.
        """
        if self._running is not None:
            raise UnsupportedArgumentError("start() must follow the result() of the one before")
        with contextlib.ExitStack() as stack:
            pinned = stack.enter_context(self._service.pinned(version, **self._pinning))
            held = pinned.weight_version
            thread = ThreadPoolExecutor(1, "evaluation")
            self._running = thread.submit(self._evaluate, pinned, stack.pop_all())
            thread.shutdown(wait=False)
        return held

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Evaluation:
        """Returns what :meth:`start` began, once the replica is handed back.

        Args:
            timeout_s: Seconds to wait; after a ``TimeoutError`` it may be asked for again.

        Raises:
            UnsupportedArgumentError: Nothing was started.
            TimeoutError: It has not ended within that time.
            RequestLostError, NoReplicaAvailableError: The pinned replica died.
            RewardError: See :class:`TextReward`.
            VersionSpanError: The replica has taken other weights from a folder that it follows.
        """
        check_seconds("timeout_s", timeout_s, or_zero=True)
        if (running := self._running) is None:
            raise UnsupportedArgumentError("result() must follow start()")
        running.exception(timeout_s)
        self._running = None
        return self._log(running.result())

    def evaluate(self, version: int | None = None) -> Evaluation:
        """Evaluates in this thread; requests have the service's time limit.

        Arguments and errors are those of :meth:`start` and :meth:`result`.

        Returns:
            What the version is worth.
        """
        with contextlib.ExitStack() as stack:
            pinned = stack.enter_context(self._service.pinned(version, **self._pinning))
            return self._log(self._evaluate(pinned, stack))

    def _log(self, found: Evaluation) -> Evaluation:
        """In the caller's thread, as loggers need not be safe for several."""
        if self._logger is not None:
            self._logger.log_scalar(self._name, found.reward, step=found.version)
        return found

    @set_list_to_stack(True)  # as TorchRL's ChatEnv asks for
    def _evaluate(self, pinned: AsyncVLLM, stack: contextlib.ExitStack) -> Evaluation:
        """Hands the replica back, which ``stack`` does, before the result is there."""
        with stack:
            began, version = time.perf_counter(), pinned.weight_version
            policy, num_rows = self._make_policy(pinned), len(self._problems) * self._repeats
            how = {"num_envs": num_rows, "repeats": self._repeats}
            env = make_env(policy.tokenizer, self._problems, self._reward.clone(), **how)
            collector = RolloutCollector(env, policy=policy, dialog_turns_per_batch=num_rows)
            stack.callback(collector.shutdown)
            rows: Any = next(iter(collector))
            names = ("policy_version", "max_policy_version")
            sampled_by = {int(one) for name in names for one in rows[name].flatten()}
            if sampled_by - {version, NO_VERSION}:
                told = f"rows are of {sorted(sampled_by - {NO_VERSION})}"
                raise VersionSpanError(f"version {version} was evaluated, and its {told}")
            return Evaluation(
                version=version,
                reward=float(rows["next", "reward"].mean()),
                num_rows=num_rows,
                seconds=time.perf_counter() - began,
                rows=rows,
            )

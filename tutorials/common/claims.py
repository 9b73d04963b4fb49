"""What the GRPO tutorials note of each step, and whether it bears out what they claim."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from common import results
from common.results import shown
from common.settings import ESS_AFTER_STEP, ESS_TOLERANCE
from common.work import Work
from torchrl_vllm_sync import GroupAdvantage, RolloutStorage
from torchrl_vllm_sync.rl.tasks import prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from tensordict import TensorDictBase

    from common.results import Clock
    from torchrl_vllm_sync import WeightUpdater
    from torchrl_vllm_sync.rl.grpo import GRPOStep, Learner


class BadRowsError(RuntimeError):
    """Sampled rows that must not be trained on."""


def check_rows(rows: TensorDictBase, *, version: int, expected_rows: int) -> None:
    """Refuses rows that are missing, of another version, or cut off by an engine."""
    if len(rows) != expected_rows:
        raise BadRowsError(f"{len(rows)} rows instead of {expected_rows}")
    versions = sorted(set(rows["policy_version"].flatten().tolist()))
    if versions != [version]:
        raise BadRowsError(f"rows of versions {versions}, though {version} was pushed last")
    reasons = set(rows["finish_reason"])
    if not reasons <= {"stop", "length"}:
        raise BadRowsError(f"rows ended by {sorted(map(str, reasons))}, not by stop or length")


# 01_grpo_sync.py


@dataclass
class SyncStep:
    """What is noted of one step; times are in seconds unless they say ``ms``."""

    step: int = shown("step", "d")
    version: int = shown("version", "d")  # policy version that sampled the rows
    reward: float = shown("reward", ".3f")  # mean over the rows
    ess: float = shown("ESS", ".4f")  # of the fresh rows; the smallest of several passes
    ess_without_push: float = shown("ESS, no push", ".4f")  # of the last pass, after the step
    truncated: int = shown("truncated", "d")  # rows that ended because ``max_tokens`` was reached
    sample_s: float = shown("sample s", ".2f")
    train_s: float = shown("train s", ".2f")
    push_ms: float = shown("push ms", ".1f")
    seconds: float  # from the begin of the loop to the end of this step

    @classmethod
    def of(cls, rows: TensorDictBase, clock: Clock, **noted: Any) -> SyncStep:
        """Of the rows that were trained."""
        truncated = list(rows["finish_reason"]).count("length")
        return cls(
            reward=float(rows["next", "reward"].mean()),
            truncated=truncated,
            **clock.read(),
            **noted,
        )


def sync_steps(
    args: argparse.Namespace,
    make_collector: Callable[..., Any],
    learner: Learner,
    updater: WeightUpdater,
    check: Callable[[TensorDictBase], None] = lambda _: None,
) -> Iterator[SyncStep]:
    """The loop of ``01_grpo_sync.py`` for another collector or updater; ``check`` refuses rows."""
    buffer = ReplayBuffer(
        storage=RolloutStorage(args.batch_size),
        sampler=SamplerWithoutReplacement(),
        transform=GroupAdvantage(grpo_size=args.group_size),
        batch_size=args.rows_per_pass,
    )
    collector = make_collector(
        replay_buffer=buffer, dialog_turns_per_batch=args.batch_size, weight_updater=updater
    )
    sampling, version, clock = iter(collector), 0, results.Clock()
    for step in results.counted(args):
        with clock("sample_s"):
            next(sampling)  # fills the buffer
        rows = buffer[:]
        check_rows(rows, version=version, expected_rows=args.batch_size)
        check(rows)
        with clock("train_s"):
            ess = learner.step(buffer)["ESS"]
        push = updater.push_weights()
        with torch.no_grad():
            missed = float(learner.loss(rows[: args.rows_per_pass].to(learner.device)).ESS)
        buffer.empty()
        noted = {"ess": ess, "ess_without_push": missed, "push_ms": 1e3 * push.seconds}
        yield SyncStep.of(rows, clock, step=step, version=version, **noted)
        version = push.version
    collector.shutdown()
    updater.disconnect()


def sync_shortcomings(steps: Sequence[SyncStep], args: argparse.Namespace) -> list[str]:
    """Returns which of the claims of ``01_grpo_sync.py`` the steps do not bear out."""
    found, floor = [], 1 - ESS_TOLERANCE[args.dtype]
    for step in steps:
        if not step.ess >= floor:
            found.append(f"step {step.step}: effective sample size {step.ess:.4f}")
        if not step.ess_without_push >= ESS_AFTER_STEP:
            found.append(
                f"step {step.step} left {step.ess_without_push:.4f} of it: too long a step"
            )
    return found + results.reward_problems(args, steps[0].reward, steps[-1].reward)


def conclude_sync(
    args: argparse.Namespace,
    steps: Sequence[SyncStep],
    problems: list[str],
    held_out: Sequence[float],
) -> int:
    """Draws and writes down the run, prints PASS or FAIL; returns the exit status."""
    if not steps:
        return results.verdict(problems, "no step was finished")
    title = (
        f"GRPO, {args.model} model, {args.replicas} replicas, "
        f"{args.group_size} answers to each of {args.groups} prompts"
    )
    missed = "the next step's, had the push been missed"
    panels = {
        "effective sample size": {"ess": "fresh rows", "ess_without_push": missed},
        "push, ms": {"push_ms": ""},
    }
    results.write(args, title, steps, panels, held_out=held_out)
    push_ms = statistics.median(one.push_ms for one in steps)
    before_and_after = " -> ".join(f"{one:.3f}" for one in held_out)
    return results.verdict(
        problems + sync_shortcomings(steps, args),
        f"reward {steps[0].reward:.3f} -> {steps[-1].reward:.3f} "
        f"ess {min(one.ess for one in steps):.3f} push_ms {push_ms:.1f} "
        f"seconds {steps[-1].seconds:.1f}" + (f" held_out {before_and_after}" if held_out else ""),
    )


# 02_grpo_async.py


@dataclass
class AsyncStep:
    """What is noted of one step; times are in seconds unless they say ``ms``."""

    step: int = shown("step", "d")
    version: int = shown("version", "d")  # the trainer's, whose rows would be 0 versions old
    reward: float = shown("reward", ".3f")  # mean over the rows
    staleness: float = shown("age", ".2f")  # mean over the rows, in versions
    max_staleness: int = shown("oldest", "d")
    across: int = shown("across", "d")  # rows during whose sampling a push took place
    ess: float = shown("ESS", ".3f")  # of the rows before the optimizer step
    wait_s: float = shown("wait s", ".2f")  # until the rows were there
    train_s: float = shown("train s", ".2f")
    push_ms: float = shown("push ms", ".1f")
    seconds: float  # from the begin of the loop to the end of this step


@dataclass
class AsyncRun:
    """What happened: the steps, and what the claims are checked against."""

    steps: list[AsyncStep] = field(default_factory=list)
    queries: list[list[str]] = field(default_factory=list)  # of each step, one for each row
    work: Work = field(default_factory=Work)

    def add(self, step: GRPOStep, clock: Clock) -> AsyncStep:
        """Notes a step, and returns what is noted."""
        rows, push = step.rows, step.push
        staleness = step.version - rows["policy_version"]
        self.queries.append(list(rows["query"]))
        self.work.train(rows, staleness)
        self.work.trainer += step.parts
        self.steps.append(
            AsyncStep(
                step=step.number,
                version=step.version,
                reward=float(rows["next", "reward"].mean()),
                staleness=float(staleness.float().mean()),
                max_staleness=int(staleness.max()),
                across=int((rows["max_policy_version"] > rows["policy_version"]).sum()),
                ess=step.figures["ESS"],
                wait_s=step.wait_s,
                train_s=step.train_s,
                push_ms=1e3 * push.seconds if push else 0.0,
                **clock.read(),
            )
        )
        return self.steps[-1]


def async_shortcomings(run: AsyncRun, args: argparse.Namespace) -> list[str]:
    """Returns what is wrong with the rows: their prompts, their number, their age."""
    found, source = [], prompts(args.dataset, args.seed)
    for step, queries in enumerate(run.queries):
        items = itertools.islice(source, args.groups)
        wanted = Counter(query for item in items for query in item["query"] * args.group_size)
        if Counter(queries) != wanted:
            found.append(f"step {step} has other prompts than the synchronous program")
    oldest = max(one.max_staleness for one in run.steps)
    ess = min(one.ess for one in run.steps)
    if oldest > args.staleness:
        found.append(f"a row was trained at age {oldest}, above {args.staleness}")
    if args.staleness == 0 and not ess >= 1 - ESS_TOLERANCE[args.dtype]:
        found.append(f"effective sample size {ess:.4f}")
    return found + run.work.shortcomings(args.staleness * args.batch_size)


def conclude_async(args: argparse.Namespace, run: AsyncRun, problems: list[str]) -> int:
    """Draws and writes down the run, prints PASS or FAIL; returns the exit status."""
    if not run.steps:
        return results.verdict(problems, "no step was finished")
    title = (
        f"Asynchronous GRPO, {args.model} model, {args.replicas} replicas, "
        f"staleness up to {args.staleness}"
    )
    ages = {"staleness": "mean", "max_staleness": "oldest", args.staleness: "bound"}
    panels = {"sample age, versions": ages, "rows across a push": {"across": ""}}
    results.write(args, title, run.steps, panels, below=run.work.draw)
    first, last = run.steps[0].reward, last_reward(run.steps)
    problems = problems + async_shortcomings(run, args)
    age = statistics.fmean(one.staleness for one in run.steps)
    return results.verdict(
        problems + results.reward_problems(args, first, last),
        f"reward {first:.3f} -> {last:.3f} staleness {age:.2f} "
        f"across {sum(one.across for one in run.steps)} seconds {run.steps[-1].seconds:.1f}",
    )


def last_reward(steps: Sequence[Any]) -> float:
    """The mean reward of the last five steps, where one's own says little."""
    return statistics.fmean(one.reward for one in steps[-5:])


# 03_multi_turn.py

ROUTINGS = ("sessions", "round-robin")


@dataclass
class Turn:
    """One turn of one conversation."""

    routing: str  # "sessions", "round-robin" or "training"
    conversation: int
    turn: int  # from 1
    replica: str
    prompt_tokens: int
    cached_tokens: int  # those of the prompt that came from the replica's prefix cache
    first_version: int  # oldest policy version that sampled one of the answer's tokens
    last_version: int


@dataclass
class TurnsStep:
    """What is noted of one step."""

    step: int = shown("step", "d")
    reward: float = shown("reward", ".3f")  # mean over all turns
    age: float = shown("age", ".2f")  # mean of the trainer's version minus the oldest of a turn
    spanning: float = shown("across a push", ".2f")  # share of conversations of several versions
    moved: int = shown("moved", "d")  # conversations that did not stay on one replica
    rows: int = shown("rows", "d")  # turns trained
    seconds: float  # from the begin of the loop to the end of this step

    @classmethod
    def of(
        cls, step: int, rows: TensorDictBase, talks: Sequence[list[Turn]], clock: Clock
    ) -> TurnsStep:
        """Of the turns that were trained, and the conversations that ended since the last step."""
        return cls(
            step=step,
            reward=float(rows["next", "reward"].mean()),
            age=float((step - rows["policy_version"]).float().mean()),
            spanning=statistics.mean(len(versions(one)) > 1 for one in talks),
            moved=sum(map(has_moved, talks)),
            rows=len(rows),
            **clock.read(),
        )


def turns_of(conversation: TensorDictBase, routing: str, number: int) -> list[Turn]:
    """Returns the turns of a conversation, a row each, as ``vLLMWrapper`` stamped them."""
    return [
        Turn(
            routing=routing,
            conversation=number,
            turn=at,
            replica=row["generation", "replica_id"],
            prompt_tokens=len(row["tokens", "prompt"]),
            cached_tokens=int(row["generation", "num_cached_tokens"]),
            first_version=int(row["policy_version"]),
            last_version=int(row["max_policy_version"]),
        )
        for at, row in enumerate(conversation.unbind(0), 1)
    ]


def cached_share(turns: Sequence[Turn], routing: str) -> float:
    """Returns the share of later turns' prompt tokens that came from a cache."""
    later = [one for one in turns if one.routing == routing and one.turn > 1]
    return sum(one.cached_tokens for one in later) / sum(one.prompt_tokens for one in later)


def versions(conversation: Sequence[Turn]) -> list[int]:
    """Returns the distinct versions of a conversation's turns, in order of time."""
    seen = [one for turn in conversation for one in (turn.first_version, turn.last_version)]
    return [version for version, _ in itertools.groupby(seen)]


def has_moved(conversation: Sequence[Turn]) -> bool:
    """Whether it did not stay on one replica."""
    return len({turn.replica for turn in conversation}) > 1


def conversations(turns: Sequence[Turn], routing: str) -> list[list[Turn]]:
    """Returns the turns of each conversation."""
    key = attrgetter("conversation")
    some = sorted((one for one in turns if one.routing == routing), key=key)
    return [list(of) for _, of in itertools.groupby(some, key)]


def turns_shortcomings(
    steps: Sequence[TurnsStep], turns: Sequence[Turn], args: argparse.Namespace
) -> list[str]:
    """Returns which of the claims of ``03_multi_turn.py`` are not borne out."""
    found = []
    moved = {one: sum(map(has_moved, conversations(turns, one))) for one in ROUTINGS}
    if moved["sessions"]:
        found.append(f"{moved['sessions']} conversations did not stay on one replica")
    if not moved["round-robin"]:
        found.append("no conversation moved under round-robin: the comparison shows nothing")
    trained = conversations(turns, "training")
    pairs = [pair for one in trained for pair in itertools.pairwise(one)]
    if left := sum(a.replica != b.replica and a.first_version == b.first_version for a, b in pairs):
        found.append(f"training: {left} turns left their replica though its weights were the same")
    cold = [t for t in turns if t.routing == "sessions" and t.turn > 1 and t.cached_tokens <= 0]
    if cold:
        found.append(f"{len(cold)} later turns of sessions found nothing in their replica's cache")
    pinned, loose = cached_share(turns, "sessions"), cached_share(turns, "round-robin")
    if not pinned > loose:
        found.append(f"sessions had {pinned:.3f} of their prompts cached, round-robin {loose:.3f}")
    sampled_by = [versions(one) for one in trained]
    if not any(len(one) > 1 for one in sampled_by):
        found.append("no conversation went on across a push")
    if any(one != sorted(one) for one in sampled_by):
        found.append("a conversation's versions went back")
    return found + results.reward_problems(args, steps[0].reward, last_reward(steps))


def conclude_turns(
    args: argparse.Namespace,
    steps: Sequence[TurnsStep],
    turns: Sequence[Turn],
    problems: list[str],
    *,
    seconds: float,
) -> int:
    """Draws and writes down the run, prints PASS or FAIL; returns the exit status."""
    if not steps:
        return results.verdict(problems, "no step was finished")
    title = (
        f"GRPO over conversations of {max(one.turn for one in turns)} turns, {args.model} model, "
        f"{args.replicas} replicas, {args.group_size} conversations of each prompt"
    )
    lines = {"age": "mean age, versions", "spanning": "share of conversations across a push"}
    results.write(args, title, steps, {"pushes": lines}, turns=turns)
    pinned, loose = (cached_share(turns, one) for one in ROUTINGS)
    return results.verdict(
        problems + turns_shortcomings(steps, turns, args),
        f"reward {steps[0].reward:.3f} -> {last_reward(steps):.3f} cached {pinned:.3f} "
        f"round-robin {loose:.3f} seconds {seconds:.1f}",
    )

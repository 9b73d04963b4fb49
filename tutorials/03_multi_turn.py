"""GRPO on conversations with a tool, each kept on the engine that remembers it.

Usage:
    python tutorials/03_multi_turn.py                # tiny random model, no GPU, a few minutes
    python tutorials/03_multi_turn.py --smoke        # the same for a few steps, as CI runs it
    python tutorials/03_multi_turn.py --model Qwen/Qwen2.5-1.5B-Instruct   # a calculator, GPUs

The last line is ``PASS reward <first> -> <last> cached <pinned> round-robin <share> seconds
<total>``, or ``FAIL`` and the same figures, with the reasons above it and a non-zero exit status.
The two shares are of the prompt tokens of all turns after the first that came from a prefix cache.

What PASS claims:

- in the measurement every conversation stayed on one replica for all its turns; in training one
  moved only after a push, when no cache holds it any more;
- in the measurement, every turn after the first found cached tokens, and all of them together more
  than without sessions, where at least one conversation did move;
- in training, at least one conversation went on across a push; versions of its turns never go back;
- by default also: the mean reward of the last five steps is above 0.8;
- with ``--smoke`` instead: it is no lower than that of the first step, to within 0.1;
- with another model: nothing about the reward.

On GPUs each replica has one GPU to itself and the trainer has the last one.
"""

# %% [markdown]
# # Conversations of several turns, and a tool
#
# In the other tutorials an episode is one prompt and one answer. Here the model answers, a *tool*
# replies, and the conversation goes on, for three turns. Each turn's prompt is everything said so
# far. An engine that has answered the earlier turns still has their keys and values in its *prefix
# cache*, so that it has to read only what is new; another engine must read everything again.
#
# You will see
#
# - a `ChatEnv` with a tool, and an `AsyncEnvPool` of such environments whose tools take time;
# - that `vLLMWrapper` finds out which rows are turns of one conversation, and that the service
#   keeps each conversation, a *session*, on one replica: what that saves, measured;
# - GRPO over whole conversations, with pushes while they are going on.

# %%
import contextlib
import itertools
import re
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import common.quiet  # noqa: F401  sets what the libraries below read

# isort: split
import torch
from common import results
from common.engines import make_policy, started
from common.results import shown
from common.settings import PRESETS as SINGLE
from common.settings import TINY, finish, make_parser
from common.task import low_ids
from common.training import Learner
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import AsyncEnvPool, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms.tools import ToolTransformBase
from torchrl.objectives.llm.grpo import MCAdvantage

from torchrl_vllm_sync import TextReward, WeightUpdater, errors

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it before any is made

TURNS = 3
REWARD_TARGET = 0.8
ROUTINGS = ("sessions", "round-robin")
TOOL_TIME_S = 0.03  # what a call of the tool takes on average, in the pool
TINY_PRESET = {"steps": 45, "max_model_len": 512, "groups": 2, "rows_per_pass": 48}
REAL_PRESET = {"max_tokens": 256, "max_model_len": 2048, "group_size": 8}
PRESETS = {"tiny": SINGLE["low-ids"] | TINY_PRESET, "real": SINGLE["gsm8k"] | REAL_PRESET}
SMOKE_STEPS = 4


def parse_args(argv=None):
    """Reads the command line; what is not given depends on the model."""
    parser = make_parser(__doc__, "03_multi_turn", SMOKE_STEPS)
    parser.set_defaults(model=TINY)
    args = parser.parse_args(argv)
    args.kind = "tiny" if args.model == TINY else "real"
    args.reward_target = REWARD_TARGET if args.kind == "tiny" else None
    least = {"min_replicas": 2, "turns": TURNS}
    return finish(parser, args, PRESETS[args.kind], smoke_steps=SMOKE_STEPS, **least)


# %% [markdown]
# ## Tools and rewards
#
# A tool is a transform that reads the model's last answer and adds a message to the conversation.
# TorchRL's `ToolTransformBase` does everything but the tool itself. Both tools here reply to every
# answer with one message: where some conversations of a batch get more messages than others,
# TorchRL 0.14 fills up the others with empty ones.
#
# A random model cannot write a tool call, so its tool looks at whatever it wrote and says how long
# that was. The reward of a turn is the share of its tokens with an id below 128, as in the first
# tutorial. A real model gets a calculator, and is rewarded in each turn that names the result.


# %%
class Tool(ToolTransformBase):
    """A tool that takes its time, a little longer or shorter with each call."""

    def __init__(self, mean_s, seed):
        super().__init__()
        self._mean_s = mean_s
        self._generator = torch.Generator().manual_seed(seed)

    def _process_batch_item(self, content, index):
        del index
        time.sleep(2 * self._mean_s * float(torch.rand((), generator=self._generator)))
        return [self.reply(content)]


class Counter(Tool):
    """Says how long the answer is."""

    def reply(self, answer):
        shown = sum(one.isprintable() for one in answer)
        return f"The answer has {len(answer)} characters, of which {shown} are shown. Go on."


def calculate(expression):
    """Returns the value of sums, differences and products of whole numbers."""
    if not re.fullmatch(r"-?\d{1,9}( *[-+*] *\d{1,9})*", expression.strip()):
        raise ValueError(f"not a sum, difference or product: {expression!r}")
    return eval(expression.strip())  # numbers and signs, as was just seen


class Calculator(Tool):
    """Calculates what the answer has between ``<tool>`` and ``</tool>``."""

    def reply(self, answer):
        calls = re.findall(r"<tool>(.{1,80}?)</tool>", answer)
        if not calls:
            return "There was no <tool>...</tool> in this answer."
        try:
            return str(calculate(calls[-1]))
        except (SyntaxError, ValueError) as error:
            return f"Error: {error}"


def names_result(questions, answers):
    """1 for an answer with the right number in it, 0 for another."""
    results = [str(calculate(one.split("What is ")[1].rstrip("?"))) for one in questions]
    named = [re.findall(r"-?\d+", one.replace(",", "")) for one in answers]
    return [float(one in those) for one, those in zip(results, named, strict=True)]


SYSTEM = {
    "tiny": "You are a helpful assistant.",
    "real": "You solve problems step by step. To calculate, write <tool>12 * 7 + 5</tool>, and the "
    "next message has the value. Then say the result.",
}


def questions(args, seed):
    """Yields prompts for ever, no two of them equal, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    high = 10 if args.kind == "tiny" else 1000
    for number in itertools.count():
        a, b, c = torch.randint(1, high, (3,), generator=generator).tolist()
        yield {"query": [f"Question {seed}.{number}: What is {a} * {b} + {c}?"]}


def make_env(args, tokenizer, *, conversations, seed, tool_time_s=0.0):
    """Returns an environment of conversations with a tool, ``group_size`` of each prompt."""
    env = ChatEnv.from_dataloader(
        dataloader=questions(args, seed),
        batch_size=(conversations,),
        repeats=args.group_size if conversations > 1 else 1,
        tokenizer=tokenizer,
        input_mode="history",
        system_prompt=SYSTEM[args.kind],
    )
    reward, tool = TextReward(names_result), Calculator
    if args.kind == "tiny":
        reward, tool = TextReward(low_ids, over="ids"), Counter
    env = env.append_transform(StepCounter(max_steps=TURNS)).append_transform(reward)
    return env.append_transform(tool(tool_time_s, seed))


# %% [markdown]
# ## What a session saves
#
# `service.generate(prompts, session_id=...)` keeps all requests of a session on one replica, and
# `group_id` keeps the first turns of a GRPO group together, so that their common prompt is read
# once. `vLLMWrapper` passes both by itself: a row whose prompt begins with everything that was said
# in an earlier call, answer included, is the next turn of that conversation.
#
# We let one batch of conversations run twice over the same engines, from empty caches: with
# sessions, and with a round-robin balancer and a wrapper told not to look for them. This is the
# *synchronous* form: one `ChatEnv` with all conversations, which take their turns together. There
# are as many that round robin does not happen to send each row to the same replica again.


# %%
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


def turns_of(conversation, routing, number):
    """Returns the turns of a conversation, a row each, as the wrapper stamped them."""
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


def measure(args, service, policy, tokenizer, routing):
    """Runs one batch of conversations from empty caches; returns all turns."""
    number = args.group_size * max(2, args.groups)
    number += next(extra for extra in itertools.count() if (number + extra) % args.replicas)
    service.reset_prefix_cache()
    env = make_env(args, tokenizer, conversations=number, seed=args.seed)
    conversations = enumerate(env.rollout(TURNS, policy).unbind(0))
    return [turn for at, one in conversations for turn in turns_of(one, routing, at)]


def compare(args, service, tokenizer):
    """Measures with sessions and without."""
    policy = make_policy(args, service, tokenizer)
    service.create_load_balancer("round-robin")
    loose = policy.get_new_version(find_sessions=False)
    turns = measure(args, service, loose, tokenizer, "round-robin")
    service.create_load_balancer()
    return turns + measure(args, service, policy, tokenizer, "sessions")


def cached_share(turns, routing):
    """Returns the share of later turns' prompt tokens that came from a cache."""
    later = [one for one in turns if one.routing == routing and one.turn > 1]
    return sum(one.cached_tokens for one in later) / sum(one.prompt_tokens for one in later)


# %% [markdown]
# ## Training
#
# The *asynchronous* form: an `AsyncEnvPool` of one environment for each conversation, in threads of
# their own, because tools take time. The collector asks the policy for whichever conversations are
# ready and yields each one when it is complete, while the others are somewhere in the middle.
# Environments of one group have the same prompts in the same order.
#
# `MCAdvantage(trajectory_return="sum")` adds up a conversation's rewards and compares the sums
# within its group; all turns of a conversation get its advantage.
#
# Pushes run in a thread while conversations go on. Requests that are running are paused, kept, and
# go on with the new weights, so that a conversation, and even a single answer, can have tokens of
# several versions, each labelled. What was cached under older weights is not used for a new turn:
# the first turn after a push reads its prompt again.


# %%
@dataclass
class Step:
    """What is noted of one step."""

    step: int = shown("step", "d")
    reward: float = shown("reward", ".3f")  # mean over all turns
    age: float = shown("age", ".2f")  # mean of the trainer's version minus the oldest of a turn
    spanning: float = shown("across a push", ".2f")  # share of conversations of several versions
    moved: int = shown("moved", "d")  # conversations that did not stay on one replica
    rows: int = shown("rows", "d")  # turns trained
    seconds: float  # from the begin of the loop to the end of this step


def make_pool(args, tokenizer):
    """Returns one environment for each conversation; those of a group share their seed."""
    make = partial(make_env, args, tokenizer, conversations=1, tool_time_s=TOOL_TIME_S)
    seeds = [1 + args.seed + group for group in range(args.groups) for _ in range(args.group_size)]
    envs = [partial(make, seed=seed) for seed in seeds]
    return AsyncEnvPool(envs, backend="threading", stack="lazy")


def train(args, service, tokenizer, checkpoint, turns):
    """Runs the loop, yields each step, and adds every turn to ``turns``."""
    learner = Learner(args, checkpoint)
    updater = WeightUpdater(service, source=learner.model)
    wanted = args.batch_size
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4 * wanted),
        sampler=SamplerWithoutReplacement(drop_last=False),
        transform=MCAdvantage(grpo_size=args.group_size, trajectory_return="sum"),
        batch_size=args.rows_per_pass,
    )
    start = time.perf_counter()
    with contextlib.ExitStack() as cleanup:
        collector = LLMCollector(
            make_pool(args, tokenizer),
            policy=make_policy(args, service, tokenizer),
            dialog_turns_per_batch=args.group_size * args.groups,  # else TorchRL warns; no effect
            yield_completed_trajectories=True,
        )
        cleanup.callback(collector.shutdown)
        pusher = cleanup.enter_context(ThreadPoolExecutor(max_workers=1))
        numbered = enumerate(iter(collector))
        push: Future[Any] | None = None
        for step in results.counted(args):
            conversations: list[list[Turn]] = []
            while len(buffer) < wanted:  # whole groups arrive there; the rest waits in MCAdvantage
                number, conversation = next(numbered)
                conversations.append(turns_of(conversation, "training", number))
                buffer.extend(conversation)
            if push is not None:
                push.result()  # it reads the weights that are about to change, or it raises
            rows = buffer[:]
            learner.step(buffer, len(rows))
            push = pusher.submit(updater.push_weights)
            buffer.empty()
            turns.extend(itertools.chain(*conversations))
            done = Step(
                step=step,
                reward=float(rows["next", "reward"].mean()),
                age=float((step - rows["policy_version"]).float().mean()),
                spanning=statistics.mean(len(versions(one)) > 1 for one in conversations),
                moved=sum(map(has_moved, conversations)),
                rows=len(rows),
                seconds=time.perf_counter() - start,
            )
            yield done
        if push is not None:
            push.result()


def versions(conversation):
    """Returns the distinct versions of a conversation's turns, in order of time."""
    seen = [one for turn in conversation for one in (turn.first_version, turn.last_version)]
    return [version for version, _ in itertools.groupby(seen)]


# %% Results
# A picture, a table, and the raw figures of every turn and step, in `--output`.
def cache_table(turns):
    """Returns cached tokens by routing and turn as text."""
    lines = [f"{'routing':<12} {'turn':>4} {'prompt':>7} {'cached':>7} {'moved':>6}"]
    for routing in ROUTINGS:
        conversations = by_conversation(turns, routing)
        for at, some in enumerate(zip(*conversations, strict=True)):
            moved = sum(one[at].replica != one[max(0, at - 1)].replica for one in conversations)
            prompt = statistics.mean(one.prompt_tokens for one in some)
            cached = statistics.mean(one.cached_tokens for one in some)
            lines.append(f"{routing:<12} {at + 1:>4} {prompt:>7.1f} {cached:>7.1f} {moved:>6}")
    return "\n".join(lines)


def has_moved(conversation):
    """Whether it did not stay on one replica."""
    return len({turn.replica for turn in conversation}) > 1


def by_conversation(turns, routing):
    """Returns the turns of each conversation."""
    found: defaultdict[int, list[Turn]] = defaultdict(list)
    for one in turns:
        if one.routing == routing:
            found[one.conversation].append(one)
    return list(found.values())


def save(steps, turns, args):
    """Writes pictures, tables and figures to the output directory, and prints the tables."""
    title = (
        f"GRPO over conversations of {TURNS} turns, {args.model} model, {args.replicas} "
        f"replicas, {args.group_size} conversations of each prompt"
    )
    lines = {"age": "mean age, versions", "spanning": "share of conversations across a push"}
    text = cache_table([one for one in turns if one.routing != "training"])
    results.write(args, title, steps, {"pushes": lines}, text, turns=turns)


def shortcomings(steps, turns, args):
    """Returns which of the claims at the top of this file are not borne out."""
    found = []
    moved = {one: sum(map(has_moved, by_conversation(turns, one))) for one in ROUTINGS}
    if moved["sessions"]:
        found.append(f"{moved['sessions']} conversations did not stay on one replica")
    if not moved["round-robin"]:
        found.append("no conversation moved under round-robin: the comparison shows nothing")
    trained = by_conversation(turns, "training")
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
    last = statistics.mean(one.reward for one in steps[-5:])
    return found + results.reward_problems(args, steps[0].reward, last)


# %% All together
# Blocks of 32 tokens: prefixes are cached in whole blocks, and these conversations are short.
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args = parse_args(argv)
    problems: list[str] = []
    with started(args, "03_multi_turn", block_size=32) as (service, tokenizer, checkpoint):
        began = time.perf_counter()
        turns = compare(args, service, tokenizer)
        training = train(args, service, tokenizer, checkpoint, turns)
        steps = results.drive(training, args, problems, errors.SyncError)
        seconds = time.perf_counter() - began
    if not steps:
        return results.verdict(problems, "no step was finished")
    save(steps, turns, args)
    problems += shortcomings(steps, turns, args)
    last = statistics.mean(one.reward for one in steps[-5:])
    pinned, loose = (cached_share(turns, one) for one in ROUTINGS)
    return results.verdict(
        problems,
        f"reward {steps[0].reward:.3f} -> {last:.3f} cached {pinned:.3f} "
        f"round-robin {loose:.3f} seconds {seconds:.1f}",
    )


# %%
if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

"""GRPO on several vLLM engines that get the trainer's weights after every step.

Usage:
    python tutorials/01_grpo_sync.py                 # without GPUs: a tiny random model, minutes
    python tutorials/01_grpo_sync.py --smoke         # the same for six steps, as CI runs it
    python tutorials/01_grpo_sync.py --minutes 10    # on GPUs: SmolLM2-135M-Instruct learns to add
    python tutorials/01_grpo_sync.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k --replicas 3

The last line is ``PASS reward <first> -> <last> ess <min> push_ms <median> seconds <total>`` of the
training loop, or ``FAIL`` and the same figures, with the reasons above it and a non-zero exit
status. With a real data set ``held_out <before> -> <after>`` follows: the mean reward of greedy
answers to problems that are not trained on.

What PASS claims:

- always: every sampled row carries the version pushed last before it; the effective sample size of
  each step's data is 1, to the tolerance below, before the optimizer touches it, and at least a
  half after that: no step has made another model of this one;
- with the tiny model also: the reward ends above 0.9;
- with ``--smoke``: the reward ends no lower than it began, to within 0.1;
- with a real data set: nothing about the reward. Steps are so small there that a single missed push
  need not show in the effective sample size; the labels are what counts.

``--dataset`` is ``low-ids``, ``gsm8k`` (``pip install datasets``), or any data set of reasoning-gym
(``pip install reasoning-gym``), such as ``chain_sum``: sums and differences of two numbers of two
digits. Where the right answer is a number, the last number of the model's answer is what counts.

``--seed`` fixes the tiny model, the prompts and the engines' random numbers, but not which engine
samples which answer: two runs with one seed begin alike and then differ a little.

On GPUs each replica has one to itself and the trainer has the last one: ``--replicas 3`` needs
four. Engines run in bfloat16; the trainer keeps float32 weights, which lose no small update, and
computes in bfloat16.
"""

# %% [markdown]
# # GRPO with weights in the engines after every step
#
# Reinforcement learning of a language model is a loop of two halves. An *engine* samples answers
# to prompts, and a *trainer* changes the model so that good answers become more likely. The two
# hold copies of the same model, and here the copies are kept equal: after each optimizer step the
# trainer *pushes* its weights into the engines.
#
# You will see
#
# - two vLLM engines behind one object, `AsyncVLLM`;
# - that object as the policy of a `RolloutCollector`, which is TorchRL's `LLMCollector` with rows
#   that are tensors of the whole batch;
# - `WeightUpdater.push_weights()` after each step;
# - how to tell that the push has worked.
#
# What this tutorial shares with the others is in `common`.

# %%
import statistics
import sys
import time
from dataclasses import dataclass

import common.quiet  # noqa: F401  sets what the libraries below read

# isort: split
import torch
from common import results, settings
from common.engines import make_policy, started
from common.results import shown
from common.task import evaluate, make_env, prompts
from common.training import Learner
from tensordict import set_list_to_stack
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

import torchrl_vllm_sync as tvs

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it before any is made


# %% Settings
# GRPO compares several answers to one prompt with each other: a *group*. One step samples
# `groups` prompts with `group_size` answers each.
SMOKE_STEPS = 6


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = settings.make_parser(__doc__, "01_grpo_sync", SMOKE_STEPS)
    parser.add_argument("--held-out", type=int, default=256, help="problems to evaluate on")
    settings.add_dataset(parser)
    args = parser.parse_args(argv)
    settings.finish_dataset(parser, args, steps=40, smoke_steps=SMOKE_STEPS)
    args.held_out *= args.dataset != "low-ids"  # which has none
    return args


# %% [markdown]
# ## Prompts and rewards
#
# TorchRL's `ChatEnv` hands out prompts and takes answers. `TextReward`, a transform appended to it,
# asks a function what the answers of a batch are worth. Without GPUs the task is one that a random
# model of 100,000 parameters can learn: use tokens from the first quarter of the vocabulary. The
# reward is the share of an answer's tokens with an id below 128. There are 512 ids, so that the
# first answers score about 0.25. This and other tasks are in `common/task.py`.
#
# ## Engines
#
# `AsyncVLLM` starts each engine in a Ray actor and spreads requests over them. Without a GPU this
# is vLLM's CPU build. `num_cpus_per_replica=0` has the engines claim no CPU of Ray's, so that two
# of them fit on any laptop.
#
# `vLLMWrapper` makes the service a TorchRL policy. It notes for each answer which version of the
# weights sampled it, and why it ended.
#
# The sampling parameters say "sample from the model as it is": GRPO weighs each token by how likely
# trainer and engine say it is, and that is only the same distribution at temperature 1 and with no
# token cut off. All that is in `common/engines.py`: `started` and `make_policy`.
#
# ## How to tell that a push has worked
#
# Two signs, checked at every step.
#
# *Labels.* Each row of the data carries `policy_version`, written where it was sampled. It must be
# the version pushed last.
#
# *Effective sample size (ESS).* For each sampled token the trainer computes the probability that
# it gives to the token, and divides by the engine's. On fresh data, before the optimizer has
# touched the trainer's copy, the two models are the same, every ratio is 1, and so is the ESS. If
# the engines have other weights, ratios scatter and the ESS falls: for log-ratios with standard
# deviation s it is about 1 - s². In float32 two programs that compute the same model differ by
# rounding only: in default runs with three seeds every step was within 0.000002 of 1. We ask for
# 0.9999.
#
# What a missed push would look like, the program shows by the ESS of the same rows right after the
# optimizer step, when the trainer's weights are no longer the engines': 0.9995 or less in those
# runs, mostly near 0.98. It also tells a learning rate that is too high for a model, and is then
# near 0.


# %%
@dataclass
class Step:
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


class BadRowsError(RuntimeError):
    """Sampled rows that must not be trained on."""


def check_rows(rows, *, version, expected_rows):
    """Refuses rows that are missing, of another version, or cut off by an engine."""
    if len(rows) != expected_rows:
        raise BadRowsError(f"{len(rows)} rows instead of {expected_rows}")
    versions = sorted(set(rows["policy_version"].flatten().tolist()))
    if versions != [version]:
        raise BadRowsError(f"rows of versions {versions}, though {version} was pushed last")
    reasons = set(rows["finish_reason"])
    if not reasons <= {"stop", "length"}:
        raise BadRowsError(f"rows ended by {sorted(map(str, reasons))}, not by stop or length")


# %% The loop
# The collector samples `batch_size` rows into the replay buffer, where `GroupAdvantage` compares
# the answers of each group. Then come the loss and AdamW, in `common/training.py`, and the push.
# The buffer is emptied each time: every row is used once, by the weights that sampled it.
def train(args, service, tokenizer, checkpoint):
    """Runs the loop and yields each step."""
    learner = Learner(args, checkpoint)
    buffer = ReplayBuffer(
        storage=tvs.RolloutStorage(args.batch_size),
        sampler=SamplerWithoutReplacement(),
        transform=tvs.GroupAdvantage(grpo_size=args.group_size),
        batch_size=args.rows_per_pass,
    )
    updater = tvs.WeightUpdater(service, source=learner.model)
    collector = tvs.RolloutCollector(
        make_env(args, tokenizer, prompts(args.dataset, args.seed, args.held_out)),
        policy=make_policy(args, service, tokenizer),
        weight_updater=updater,
        replay_buffer=buffer,
        dialog_turns_per_batch=args.batch_size,
        track_policy_version=True,
    )
    start = time.perf_counter()
    try:
        sampling = iter(collector)
        version = 0  # what engines launch with: the weights that the trainer begins with
        for step in results.counted(args):
            begin = time.perf_counter()
            next(sampling)  # fills the buffer
            sampled = time.perf_counter()

            rows = buffer[:]
            check_rows(rows, version=version, expected_rows=args.batch_size)

            batches = list(buffer)
            ess = learner.step(batches, args.batch_size)
            trained = time.perf_counter()

            report = updater.push_weights()  # to every engine, or it raises

            with torch.no_grad():
                ess_without_push = float(learner.loss(batches[-1]).ESS)
            buffer.empty()
            done = Step(
                step=step,
                version=version,
                reward=float(rows["next", "reward"].mean()),
                ess=ess,
                ess_without_push=ess_without_push,
                truncated=list(rows["finish_reason"]).count("length"),
                sample_s=sampled - begin,
                train_s=trained - sampled,
                push_ms=1e3 * report.seconds,
                seconds=time.perf_counter() - start,
            )
            version = report.version
            yield done
    finally:
        collector.shutdown()


# %% Results
# A picture, a table and the raw figures of every step, in `--output`.
def save(steps, args, held_out):
    """Writes picture, table and figures to the output directory, and prints the table."""
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


def shortcomings(steps, args):
    """Returns which of the claims at the top of this file the steps do not bear out."""
    found, floor = [], 1 - settings.ESS_TOLERANCE[args.dtype]
    for step in steps:
        if not step.ess >= floor:
            found.append(f"step {step.step}: effective sample size {step.ess:.4f}")
        if not step.ess_without_push >= settings.ESS_AFTER_STEP:
            found.append(
                f"step {step.step} left {step.ess_without_push:.4f} of it: too long a step"
            )
    return found + results.reward_problems(args, steps[0].reward, steps[-1].reward)


# %% All together
# `started` starts Ray and the engines. What is started is ended in reverse order, also on Ctrl-C:
# engines, Ray, temporary files. Guard the call with `if __name__ == "__main__"`: processes that
# vLLM spawns import this file again.
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args = parse_args(argv)

    problems: list[str] = []
    held_out: list[float] = []
    with started(args, "01_grpo_sync") as (service, tokenizer, checkpoint):
        greedy = make_policy(args, service, tokenizer, temperature=0.0)
        if args.held_out:
            held_out.append(evaluate(args, tokenizer, greedy))
            print(f"{args.held_out} problems held out: {held_out[0]:.3f}", flush=True)
        training = train(args, service, tokenizer, checkpoint)
        steps = results.drive(training, args, problems, BadRowsError, tvs.errors.SyncError)
        if args.held_out and not problems:
            held_out.append(evaluate(args, tokenizer, greedy))
    if not steps:
        return results.verdict(problems, "no step was finished")
    save(steps, args, held_out)
    problems += shortcomings(steps, args)
    push_ms = statistics.median(one.push_ms for one in steps)
    before_and_after = " -> ".join(f"{one:.3f}" for one in held_out)
    return results.verdict(
        problems,
        f"reward {steps[0].reward:.3f} -> {steps[-1].reward:.3f} "
        f"ess {min(one.ess for one in steps):.3f} push_ms {push_ms:.1f} "
        f"seconds {steps[-1].seconds:.1f}" + (f" held_out {before_and_after}" if held_out else ""),
    )


# %%
if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

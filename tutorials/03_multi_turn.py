"""GRPO on conversations with a tool, each kept on the engine that remembers it.

Usage:
    python tutorials/03_multi_turn.py                # tiny random model, no GPU, a few minutes
    python tutorials/03_multi_turn.py --smoke        # the same for a few steps, as CI runs it
    python tutorials/03_multi_turn.py --model Qwen/Qwen2.5-1.5B-Instruct   # a calculator, GPUs

The last line is ``PASS reward <first> -> <last> cached <pinned> round-robin <share> seconds
<total>``, or ``FAIL`` with the reasons above it and a non-zero exit status. The two shares are of
the prompt tokens of all turns after the first that came from a prefix cache. PASS claims that

- in the measurement every conversation stayed on one replica for all its turns; every turn after
  the first found cached tokens, and all of them together more than without sessions, where at
  least one conversation did move;
- in training a conversation moved only after a push, when no cache holds it any more; at least one
  went on across a push; versions of its turns never go back;
- the mean reward of the tiny model's last five steps is above 0.8, or with ``--smoke``, any
  model's at most 0.1 below the first. Nothing of another model's in a full run.
"""

# %% [markdown]
# # Conversations of several turns, and a tool
#
# In the other tutorials an episode is one prompt and one answer. Here the model answers, a *tool*
# replies, and the conversation goes on, for three turns. Each turn's prompt is everything said so
# far. An engine that has answered the earlier turns still has their keys and values in its *prefix
# cache*, so that it has to read only what is new; another engine must read everything again.

# %%
import contextlib
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from common import claims, results, settings
from common.engines import prepared
from common.task import SYSTEM, calculations, calculator, names_result
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import AsyncEnvPool, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms.tools import ToolTransformBase
from torchrl.objectives.llm.grpo import MCAdvantage

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.rl.grpo import Learner, engine_args, make_policy
from torchrl_vllm_sync.rl.tasks import low_ids

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it before any is made

TURNS = 3
TOOL_TIME_S = 0.03  # what a call of the tool takes on average, in the pool


def parse_args(argv=None):
    """Reads the command line; what is not given depends on the model."""
    parser = settings.make_parser(__doc__, "03_multi_turn", has_dataset=False)
    return settings.finish_turns(parser, argv, turns=TURNS, smoke_steps=4)


# %% [markdown]
# ## Tools and rewards
#
# A tool is a transform that reads the model's last answer and adds a message to the conversation.
# TorchRL's `ToolTransformBase` does everything but the tool itself. Both tools here reply to every
# answer: where some conversations of a batch get more messages, TorchRL 0.14 fills up the others.
#
# A random model cannot write a tool call, so its tool looks at whatever it wrote and says how long
# that was. The reward of a turn is the share of its tokens with an id below 128, as in the first
# tutorial. A real model gets a calculator, and is rewarded in each turn that names the result.


# %%
class Tool(ToolTransformBase):
    """Replies by a function of the answer; takes a little longer or shorter with each call."""

    def __init__(self, reply, mean_s, seed):
        super().__init__()
        self._reply, self._mean_s = reply, mean_s
        self._generator = torch.Generator().manual_seed(seed)

    def _process_batch_item(self, content, index):
        del index
        time.sleep(2 * self._mean_s * float(torch.rand((), generator=self._generator)))
        return [self._reply(content)]


def count(answer):
    """Says how long the answer is."""
    shown = sum(one.isprintable() for one in answer)
    return f"The answer has {len(answer)} characters, of which {shown} are shown. Go on."


def make_env(args, tokenizer, *, conversations, seed, tool_time_s=0.0):
    """Returns an environment of conversations with a tool, ``group_size`` of each prompt."""
    env = ChatEnv.from_dataloader(
        calculations(seed, high=10 if args.is_tiny else 1000),
        batch_size=(conversations,), repeats=args.group_size if conversations > 1 else 1,
        tokenizer=tokenizer, input_mode="history",
        system_prompt="You are a helpful assistant." if args.is_tiny else SYSTEM,
    )  # fmt: skip
    reward, reply = tvs.TextReward(names_result), calculator
    if args.is_tiny:
        reward, reply = tvs.TextReward(low_ids, over="ids"), count
    env = env.append_transform(StepCounter(max_steps=TURNS)).append_transform(reward)
    return env.append_transform(Tool(reply, tool_time_s, seed))


# %% [markdown]
# ## What a session saves
#
# `service.generate(prompts, session_id=...)` keeps all requests of a session on one replica, and
# `group_id` keeps the first turns of a GRPO group together, so that their common prompt is read
# once. `vLLMWrapper` passes both by itself: a row whose prompt begins with everything that was said
# in an earlier call, answer included, is the next turn of that conversation.
#
# One batch of conversations runs twice over the same engines, from empty caches: with sessions, and
# with a round-robin balancer and a wrapper told not to look for them. This is the *synchronous*
# form: one `ChatEnv` with all conversations, which take their turns together.


# %%
def measure(args, service, policy, tokenizer, routing):
    """Runs one batch of conversations from empty caches; returns all turns."""
    number = args.group_size * max(2, args.groups)
    while number % args.replicas == 0:  # round robin would send each row to the same replica again
        number += 1
    service.reset_prefix_cache()
    env = make_env(args, tokenizer, conversations=number, seed=args.seed)
    conversations = enumerate(env.rollout(TURNS, policy).unbind(0))
    return [turn for at, one in conversations for turn in claims.turns_of(one, routing, at)]


def compare(args, service, tokenizer):
    """Measures with sessions and without."""
    policy = make_policy(args.config, service, tokenizer)
    service.create_load_balancer("round-robin")
    loose = policy.get_new_version(find_sessions=False)
    turns = measure(args, service, loose, tokenizer, "round-robin")
    service.create_load_balancer()
    return turns + measure(args, service, policy, tokenizer, "sessions")


# %% [markdown]
# ## Training
#
# The *asynchronous* form: an `AsyncEnvPool` of one environment for each conversation, in threads of
# their own, because tools take time. The collector asks the policy for whichever conversations are
# ready and yields each one when it is complete, while the others are somewhere in the middle.
# Environments of one group have the same prompts in the same order.
#
# `MCAdvantage(trajectory_return="sum")` adds up a conversation's rewards and compares the sums
# within its group; all turns of a conversation get its advantage. Pushes run in a thread while
# conversations go on. Requests that are running are paused and kept, and go on with the new
# weights, so that a single answer can have tokens of several versions, each labelled. What was
# cached under older weights is not used for a new turn.


# %%
def make_pool(args, tokenizer):
    """Returns one environment for each conversation; those of a group share their seed."""
    make = partial(make_env, args, tokenizer, conversations=1, tool_time_s=TOOL_TIME_S)
    seeds = [1 + args.seed + group for group in range(args.groups) for _ in range(args.group_size)]
    envs = [partial(make, seed=seed) for seed in seeds]
    return AsyncEnvPool(envs, backend="threading", stack="lazy")


def train(args, service, tokenizer, checkpoint, turns):
    """Compares, trains, yields each step, and adds every turn to ``turns``."""
    turns += compare(args, service, tokenizer)
    learner = Learner(args.config, checkpoint)
    updater = tvs.WeightUpdater(service, source=learner.model)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4 * args.batch_size), sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=args.group_size, trajectory_return="sum"),
        batch_size=args.rows_per_pass,
    )  # fmt: skip
    clock = results.Clock()
    with contextlib.ExitStack() as cleanup:
        collector = LLMCollector(
            make_pool(args, tokenizer), policy=make_policy(args.config, service, tokenizer),
            dialog_turns_per_batch=args.group_size * args.groups,  # else TorchRL warns; no effect
            yield_completed_trajectories=True,
        )  # fmt: skip
        cleanup.callback(collector.shutdown)
        pusher = cleanup.enter_context(ThreadPoolExecutor(max_workers=1))
        completed, push = enumerate(collector), pusher.submit(int)  # nothing to wait for yet
        for step in results.counted(args):
            conversations = []
            while len(buffer) < args.batch_size:  # whole groups; the rest waits in MCAdvantage
                number, conversation = next(completed)
                conversations.append(claims.turns_of(conversation, "training", number))
                buffer.extend(conversation)
            push.result()  # it reads the weights that are about to change, or it raises
            rows = buffer[:]
            learner.step(buffer)
            push = pusher.submit(updater.push_weights)
            buffer.empty()
            turns.extend(itertools.chain(*conversations))
            yield claims.TurnsStep.of(step, rows, conversations, clock)
        push.result()


# %% All together
# Blocks of 32 tokens: prefixes are cached in whole blocks, and these conversations are short.
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, problems, turns = parse_args(argv), [], []
    args.config.inference_model.engine_args["block_size"] = 32
    with (
        prepared(args, "03_multi_turn") as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine_args(args.config)) as service,
    ):
        began, training = time.perf_counter(), train(args, service, tokenizer, checkpoint, turns)
        steps = results.drive(training, args, problems, tvs.errors.SyncError)
        seconds = time.perf_counter() - began
    return claims.conclude_turns(args, steps, turns, problems, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

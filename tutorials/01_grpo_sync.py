"""GRPO on several vLLM engines that get the trainer's weights after every step.

Usage:
    python tutorials/01_grpo_sync.py                   # a tiny random model, no GPU, a minute
    python tutorials/01_grpo_sync.py --smoke           # six steps, as CI runs it
    python tutorials/01_grpo_sync.py --minutes 10      # on GPUs: SmolLM2-135M-Instruct learns sums
    python tutorials/01_grpo_sync.py --dataset gsm8k   # or a data set of reasoning-gym

The last line is ``PASS reward <first> -> <last> ess <min> push_ms <median> seconds <total>``, or
``FAIL`` with the reasons above it and a non-zero exit status. With a real data set ``held_out
<before> -> <after>`` follows: the mean reward of greedy answers to problems not trained on. PASS
claims of each step that its rows carry the version pushed last, and that their effective sample
size (ESS) is 1 before the optimizer step, to within 0.0001 (0.1 in bfloat16), and at least 0.5
after it; that the tiny model's reward ends above 0.9, or with ``--smoke``, any model's at most 0.1
below its beginning; and of the reward on a real data set nothing.
"""

# %% [markdown]
# # GRPO with weights in the engines after every step
#
# Reinforcement learning of a language model is a loop of two halves: *engines* sample answers to
# prompts, and a *trainer* changes the model so that good answers become more likely. Both hold a
# copy of the model. Synchronous training keeps the copies equal: after each optimizer step the
# trainer *pushes* its weights into the engines, and only then are the next answers sampled.

# %%
import sys
from functools import partial

import torch
from common import claims, results, settings
from common.engines import prepared
from common.task import evaluate
from tensordict import set_list_to_stack
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm.grpo import GRPOLoss
from transformers import AutoModelForCausalLM

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.rl.grpo import engine_args, make_policy
from torchrl_vllm_sync.rl.tasks import make_env, prompts, reward

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = settings.make_parser(__doc__, "01_grpo_sync")
    parser.add_argument("--held-out", type=int, default=256, help="problems to evaluate on")
    return settings.finish_dataset(parser, argv, steps=40, smoke_steps=6)


# %% [markdown]
# ## The loop
#
# `make_env` gives each prompt `group_size` times; an episode is one answer, and `TextReward` asks a
# function what the answers of a batch are worth. The tiny model's task is to use tokens from the
# first quarter of its vocabulary; for others see `torchrl_vllm_sync/rl/tasks.py`.
#
# `make_policy` wraps the service in a `vLLMWrapper`, TorchRL's policy: it samples at temperature 1
# with no token cut off, and labels each token with the version of the weights that sampled it.
# `GroupAdvantage` compares the answers to each prompt; the buffer is emptied after each step, so
# that every row is used once. `push_weights` returns when every engine has the weights, or raises.
#
# Two signs tell that a push has worked. The rows carry its version; and trainer and engines find
# each token equally likely: all importance ratios are 1, and so is the effective sample size. After
# the optimizer step that of the same rows shows what a missed push would look like, and a learning
# rate that is too high.


# %%
def train(args, service, checkpoint, tokenizer, held_out):
    """Yields each step; adds the reward on problems held out, before and after, to ``held_out``."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = model.eval().to(args.device)  # dropout would make it another model than the engines'
    grpo = GRPOLoss(tvs.TrainerPolicy(model), entropy_coeff=0.0, masking_strategy="sft")
    grpo, on_gpu = grpo.to(args.device), args.device.type == "cuda"

    def loss_fn(batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            return grpo(batch.to(args.device))

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    buffer = ReplayBuffer(
        storage=tvs.RolloutStorage(args.batch_size), sampler=SamplerWithoutReplacement(),
        transform=tvs.GroupAdvantage(grpo_size=args.group_size), batch_size=args.rows_per_pass,
    )  # fmt: skip
    updater = tvs.WeightUpdater(service, source=model)
    questions, rated = prompts(args.dataset, args.seed, args.held_out), reward(args.dataset)
    env = make_env(tokenizer, questions, rated, num_envs=args.batch_size, repeats=args.group_size)
    collector = tvs.RolloutCollector(
        env, policy=make_policy(args.config, service, tokenizer),
        replay_buffer=buffer, dialog_turns_per_batch=args.batch_size,
        weight_updater=updater, track_policy_version=True,
    )  # fmt: skip
    greedy = partial(make_policy, args.config, tokenizer=tokenizer, temperature=0.0)
    held_out += evaluate(args, service, greedy)
    sampling, version, clock = iter(collector), 0, results.Clock()
    for step in results.counted(args):
        with clock("sample_s"):
            next(sampling)  # fills the buffer
        rows, ess = buffer[:], []
        claims.check_rows(rows, version=version, expected_rows=args.batch_size)
        with clock("train_s"):
            for batch in buffer:
                loss = loss_fn(batch)
                (loss.loss_objective * len(batch) / len(rows)).backward()
                ess.append(float(loss.ESS))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        push = updater.push_weights()
        with torch.no_grad():
            missed = float(loss_fn(batch).ESS)
        buffer.empty()
        noted = {"ess": min(ess), "ess_without_push": missed, "push_ms": 1e3 * push.seconds}
        yield claims.SyncStep.of(rows, clock, step=step, version=version, **noted)
        version = push.version
    collector.shutdown()
    held_out += evaluate(args, service, greedy)


# %% Engines
# `AsyncVLLM` starts each engine in a Ray actor and spreads requests over them. Without a GPU these
# are of vLLM's CPU build. vLLM's processes import this file again: hence the guard around `main`.
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, problems, held_out = parse_args(argv), [], []
    with (
        prepared(args, "01_grpo_sync") as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine_args(args.config)) as service,
    ):
        training = train(args, service, checkpoint, tokenizer, held_out)
        steps = results.drive(training, args, problems, claims.BadRowsError, tvs.errors.SyncError)
    return claims.conclude_sync(args, steps, problems, held_out)


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

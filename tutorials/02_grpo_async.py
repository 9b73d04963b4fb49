"""GRPO whose engines go on sampling while the trainer learns and pushes.

Usage:
    python tutorials/02_grpo_async.py                     # tiny random model, no GPU, minutes
    python tutorials/02_grpo_async.py --staleness 0       # nothing runs ahead: like 01_grpo_sync.py
    python tutorials/02_grpo_async.py --smoke             # a few steps, as CI runs it
    python tutorials/02_grpo_async.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k  # on GPUs

The last line is ``PASS reward <first> -> <last> staleness <mean> across <rows> seconds <total>``,
or ``FAIL`` with the reasons above it and a non-zero exit status; ``across`` counts rows during
whose sampling a push took place, and ``seconds`` is the training loop.

What PASS claims:

- each step was trained on the prompts of the synchronous program's, so that no row is missing, and
  none came twice, however far ahead it was sampled;
- no row that was trained is more than ``--staleness`` versions old;
- none was discarded: of the rows generated, those not trained are the batches ahead at the end;
- with ``--staleness 0`` each step's ESS is 1, as it is in the synchronous program;
- of the tiny model: the mean reward of the last five steps is above 0.9; with ``--smoke``, of any:
  it is at most 0.1 below the first. Nothing of the reward on a real data set in a full run.
"""

# %% [markdown]
# # Asynchronous GRPO with a bound on staleness
#
# In `01_grpo_sync.py` engines and trainer take turns: while one works, the other waits. Here
# neither waits for the other, up to a bound. The trainer pushes its weights in the middle of
# requests, whose next tokens are then of the new weights.
#
# The price is *staleness*: when a row is trained, the trainer may be some versions further than
# the weights that sampled it. Each token carries its version, so staleness is known exactly.

# %%
import sys

from common import claims, results, settings
from common.engines import prepared
from tensordict import set_list_to_stack

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.rl.grpo import engine_args

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = settings.make_parser(__doc__, "02_grpo_async")
    parser.add_argument("--staleness", type=int, default=2, help="how many versions old a row is")
    # Ten more steps than the synchronous program: old rows teach a little less.
    args = settings.finish_dataset(parser, argv, steps=50, smoke_steps=8)
    if args.staleness < 0:
        parser.error("--staleness must be at least 0")
    args.config.train.sync, args.config.train.max_staleness = False, args.staleness
    return args


# %% [markdown]
# ## When a batch may begin
#
# Batches are numbered in the order of the data set, and are trained in that order, a push after
# each. With a bound of `k` versions, batch `n` may begin when
#
#     n <= trained + k
#
# so that at most `k` pushes come between its first token and its training. That is AReaL's rule
# (arXiv:2505.24298), with the order that makes it a bound of all rows. Nothing is ever too old, and
# nothing need be discarded; discarding would cost what it throws away, and it throws away long
# answers first. A long answer goes on across pushes instead, and is waited for when its batch is
# due. With `k = 0` batch `n` begins when all before it are trained *and pushed*.
#
# All of this is one argument of `RolloutCollector`. For several collectors, in threads or in
# processes of their own, make one `Pacer` and give it to each; see the guide on staleness.
#
# ## The loop
#
# It is that of the synchronous program, which the library has as `GRPORun`, put together as a
# configuration says: `torchrl-vllm-sync grpo train.sync=false train.max_staleness=2` runs the same
# from a terminal. The loss corrects for staleness: it weighs each token by how likely trainer and
# engine say it is, and clips. `run.work` notes for the picture who works when, how old rows are,
# and how long those are that engines generate and those that are trained: the same ones.


# %%
def train(args, service, tokenizer, checkpoint, run):
    """Runs the loop, notes it in ``run``, and yields each step."""
    clock, keep = results.Clock(), run.work.keep  # which only notes how long the answers are
    with (
        run.work.watching(service),
        tvs.GRPORun(args.config, service, tokenizer, checkpoint=checkpoint, keep=keep) as training,
    ):
        for _, step in zip(results.counted(args), training, strict=False):
            yield run.add(step, clock)


# %% All together
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, run, problems = parse_args(argv), claims.AsyncRun(), []
    with (
        prepared(args, "02_grpo_async") as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine_args(args.config)) as service,
    ):
        training = train(args, service, tokenizer, checkpoint, run)
        results.drive(training, args, problems, tvs.errors.SyncError)
    return claims.conclude_async(args, run, problems)


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

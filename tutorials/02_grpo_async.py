"""GRPO whose collectors go on generating while the trainer learns and pushes.

Usage:
    python tutorials/02_grpo_async.py                     # tiny random model, no GPU, minutes
    python tutorials/02_grpo_async.py --staleness 0       # nothing runs ahead: like 01_grpo_sync.py
    python tutorials/02_grpo_async.py --stale reweight    # old rows count less, none is dropped
    python tutorials/02_grpo_async.py --smoke             # a few steps, as CI runs it
    python tutorials/02_grpo_async.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k  # on GPUs

The last line is ``PASS reward <first> -> <last> staleness <mean> dropped <rows> seconds <total>``,
or ``FAIL`` with the reasons above it and a non-zero exit status; ``seconds`` is the training loop.

What PASS claims:

- each row that was sampled was trained once, dropped once, or is left over in the buffer, and no
  prompt has more answers than it should;
- no row that was trained is more than ``--staleness`` versions old, or with ``--stale reweight``,
  none was dropped;
- with ``--staleness 0`` and ``--ahead 0``: prompts come in the order of the synchronous program,
  every row is of the newest version, none is dropped, and each step's ESS is 1 as it is there;
- of the tiny model: the mean reward of the last five steps is above 0.9; with ``--smoke``, of any:
  it is at most 0.1 below the first. Nothing of the reward on a real data set in a full run.
"""

# %% [markdown]
# # Asynchronous GRPO with a bound on staleness
#
# In `01_grpo_sync.py` engines and trainer take turns: while one works, the other waits. Here
# neither waits for the other, up to a bound. Collectors sample in threads of their own and write
# into a replay buffer. The trainer takes rows out, learns, and pushes its weights in the middle of
# requests, whose next tokens are then of the new weights.
#
# The price is *staleness*: when a row is trained, the trainer may be some versions further than
# the weights that sampled it. Each token carries its version, so staleness is known exactly, and is
# bounded in two places: collectors begin a batch only when they are not too far ahead of the
# trainer, and rows that are too old all the same are dropped, or count less. For a bound of one
# version `RolloutCollector(max_staleness=1)` is enough.

# %%
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from queue import SimpleQueue

from common import claims, results, settings
from common.engines import engine_args, make_policy, prepared
from common.task import Shared, make_env, prompts
from common.training import Learner
from tensordict import set_list_to_stack
from torchrl.data import ConsumingSampler, ReplayBuffer

import torchrl_vllm_sync as tvs

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it

WAIT_S = 300.0  # for the next batch


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = settings.make_parser(__doc__, "02_grpo_async")
    parser.add_argument("--staleness", type=int, default=2, help="how many versions old is fresh")
    parser.add_argument("--stale", choices=["drop", "reweight"], default="drop", help="older rows")
    parser.add_argument("--ahead", type=int, help="batches to be ahead (default: --staleness)")
    parser.add_argument("--collectors", type=int, default=2)
    # Ten more steps than the synchronous program: old rows teach a little less.
    args = settings.finish_dataset(parser, argv, steps=50, smoke_steps=8)
    args.ahead = args.staleness if args.ahead is None else args.ahead
    for name, least in (("staleness", 0), ("ahead", 0), ("collectors", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return args


# %% [markdown]
# ## When a batch may begin
#
# Batches are numbered in the order in which they begin, whichever collector samples them. Batch `n`
# may begin when no more than `ahead` of the batches before it are unfinished:
#
#     n <= finished + ahead
#
# where a batch is finished once the trainer has trained or dropped as many rows as it has. AReaL
# (arXiv:2505.24298) does so by versions, which is the same as long as no row is dropped. With
# `ahead = 0` batch `n` begins when the trainer has finished all before it *and pushed*.


# %%
class Sampling:
    """Has collectors fill their buffer, at most ``ahead`` batches ahead of the trainer."""

    def __init__(self, collectors, ahead):
        self.idle, self.ahead = SimpleQueue(), ahead
        for collector in collectors:
            self.idle.put(iter(collector))
        self.threads = ThreadPoolExecutor(len(collectors))
        self.batches, self.num_begun = set(), 0

    def sample(self):
        """Has an idle collector sample a batch; there are as many as threads."""
        batches = self.idle.get()
        try:
            next(batches)  # writes it into the buffer
        finally:
            self.idle.put(batches)

    def begin(self, num_finished):
        """Begins whatever may begin now that so many batches are finished."""
        while self.num_begun <= num_finished + self.ahead:
            self.batches.add(self.threads.submit(self.sample))
            self.num_begun += 1

    def wait(self):
        """Returns when another batch is in the buffer; raises what failed in a collector."""
        done, self.batches = wait(self.batches, WAIT_S, FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"no row came for {WAIT_S:.0f} s")
        for batch in done:
            batch.result()


# %% [markdown]
# ## Collectors and buffer
#
# `GroupAdvantage` compares the answers of each group when they are written, and `ConsumingSampler`
# gives each row out once. For collectors in processes of their own, take TorchRL's
# `RayLLMCollector` and this library's `RayReplayBuffer`.


# %%
def make_buffer(args):
    """Returns the buffer, with room for whatever sampling may be ahead."""
    return ReplayBuffer(
        storage=tvs.RolloutStorage((args.ahead + 2) * args.batch_size), sampler=ConsumingSampler(),
        transform=tvs.GroupAdvantage(grpo_size=args.group_size), batch_size=args.batch_size,
    )  # fmt: skip


def make_collectors(args, service, tokenizer, buffer):
    """Returns the collectors, which do not collect yet."""
    shared = Shared(prompts(args.dataset, args.seed))
    return [
        tvs.RolloutCollector(
            make_env(args, tokenizer, shared), policy=make_policy(args, service, tokenizer),
            replay_buffer=buffer, dialog_turns_per_batch=args.batch_size,
        )
        for _ in range(args.collectors)
    ]  # fmt: skip


# %% [markdown]
# ## The loop
#
# `StalenessFilter` drops what is more than `--staleness` versions old; `StalenessWeight` multiplies
# advantages by `0.5 ** (staleness / half_life)` instead. The loss corrects for the rest: it weighs
# each token by how likely trainer and engine say it is, and clips.


# %%
def train(args, service, tokenizer, checkpoint, run):
    """Runs the loop, notes it in ``run``, and yields each step."""
    learner, buffer = Learner(args, checkpoint), make_buffer(args)
    updater = tvs.WeightUpdater(service, source=learner.model)
    bound, half_life = args.staleness, None  # what is not dropped counts in full
    if args.stale == "reweight":
        bound, half_life = sys.maxsize, max(1, args.staleness)
    fresh, measure = tvs.StalenessFilter(bound, updater), tvs.GenerationStatistics()
    weigh = tvs.StalenessWeight(
        updater, half_life=half_life, max_staleness=bound, multiply="advantage"
    )
    sampling = Sampling(make_collectors(args, service, tokenizer, buffer), args.ahead)

    def take(missing):
        """Takes so many rows, in parts, which are fresh by what the trainer's version is now."""
        parts, trained = [], run.num_taken - fresh.num_dropped
        while missing:
            while len(buffer) < missing:
                sampling.wait()
            run.num_taken += missing
            rows = fresh(buffer.sample(missing))
            if len(rows):
                parts.append(weigh(measure(rows)))
                missing -= len(rows)
            sampling.begin((trained + fresh.num_dropped) // args.batch_size)
        return parts

    clock = results.Clock()
    try:
        sampling.begin(0)
        for step in results.counted(args):
            with clock("wait_s"):
                parts = take(args.batch_size)
            with clock("train_s"):
                passes = (one for part in parts for one in part.split(args.rows_per_pass))
                ess = learner.step(passes, args.batch_size)
            version = service.weight_version
            push = updater.push_weights()  # to every engine, with requests running
            sampling.begin(run.num_taken // args.batch_size)
            noted = {"version": version, "dropped": fresh.num_dropped, "ess": ess}
            yield run.add(parts, clock, step=step, push_ms=1e3 * push.seconds, **noted)
    finally:  # ends what has begun
        sampling.threads.shutdown(cancel_futures=True)
    run.num_dropped, run.summary = fresh.num_dropped, measure.summary()
    run.num_left, run.num_written = len(buffer), buffer.write_count


# %% All together
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, run, problems = parse_args(argv), claims.AsyncRun(), []
    with (
        prepared(args, "02_grpo_async") as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine_args(args)) as service,
    ):
        training = train(args, service, tokenizer, checkpoint, run)
        results.drive(training, args, problems, TimeoutError, tvs.errors.SyncError)
    return claims.conclude_async(args, run, problems)


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

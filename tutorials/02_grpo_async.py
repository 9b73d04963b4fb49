"""GRPO whose collectors go on generating while the trainer learns and pushes.

Usage:
    python tutorials/02_grpo_async.py                     # tiny random model, no GPU, minutes
    python tutorials/02_grpo_async.py --staleness 0       # nothing runs ahead: like 01_grpo_sync.py
    python tutorials/02_grpo_async.py --stale reweight    # old rows count less, none is dropped
    python tutorials/02_grpo_async.py --smoke             # a few steps, as CI runs it
    python tutorials/02_grpo_async.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k  # on GPUs

The last line is ``PASS reward <first> -> <last> staleness <mean> dropped <rows> seconds <total>``,
or ``FAIL`` and the same figures, with the reasons above it and a non-zero exit status. ``seconds``
is the training loop; starting Ray, engines and collectors comes before it.

What PASS claims:

- always: each row that was sampled was trained once, dropped once, or is left over in the buffer;
  no prompt has more answers than it should;
- with ``--stale drop``, the default: no row that was trained is more than ``--staleness`` versions
  old; with ``--stale reweight``: none was dropped;
- with ``--staleness 0`` and ``--ahead 0``: prompts come in the order of the synchronous program,
  every row is of the newest version, none is dropped, and the effective sample size of each step
  is 1 as it is there;
- by default also: the mean reward of the last five steps is above 0.9;
- with ``--smoke``: the reward ends no lower than it began, to within 0.1;
- with a real data set, as in ``01_grpo_sync.py``: nothing about the reward.
"""

# %% [markdown]
# # Asynchronous GRPO with a bound on staleness
#
# In `01_grpo_sync.py` engines and trainer take turns: while one works, the other waits. Here
# neither waits for the other, up to a bound.
#
# - Two `RayLLMCollector`s, each in a process of its own, sample answers and write them into
#   a `RayReplayBuffer`.
# - The trainer takes rows out, learns, and pushes its weights, whatever requests are running. The
#   tokens they have by then are of the old weights, those that follow of the new ones.
#
# The price is *staleness*: when a row is trained, the trainer may be some versions further than
# the weights that sampled it. Each token carries its version, so staleness is known exactly, and
# can be bounded in two places:
#
# 1. Collectors do not run ahead of the trainer for ever. They wait for their turn.
# 2. Rows that are too old all the same are dropped, or count less.

# %%
import asyncio
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import common.quiet  # noqa: F401  sets what the libraries below read

# isort: split
import ray
from common import results
from common.engines import make_policy, started
from common.results import shown
from common.settings import ESS_TOLERANCE, add_dataset, finish_dataset, make_parser
from common.task import make_env, prompts
from common.training import Learner
from ray.exceptions import RayError
from tensordict import TensorDictBase, lazy_stack, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import ConsumingSampler, LazyStackStorage
from torchrl.objectives.llm.grpo import MCAdvantage

import torchrl_vllm_sync as tvs

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it before any is made

SMOKE_STEPS = 8
WAIT_S = 300.0  # nobody waits longer for anybody
LOOK_S = 5.0  # how often the trainer looks after collectors while it waits


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = make_parser(__doc__, "02_grpo_async", SMOKE_STEPS)
    add_dataset(parser)
    parser.add_argument("--staleness", type=int, default=2, help="how many versions old is fresh")
    parser.add_argument(
        "--stale", choices=["drop", "reweight"], default="drop", help="what becomes of older rows"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        help="batches that generation may be ahead of training (default: as many as --staleness); "
        "with more than --staleness, some rows are too old when their time comes",
    )
    parser.add_argument("--collectors", type=int, default=2)
    args = parser.parse_args(argv)
    if args.ahead is None:
        args.ahead = args.staleness
    for name, least in (("staleness", 0), ("ahead", 0), ("collectors", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    # Ten more than the synchronous program: old rows teach a little less.
    return finish_dataset(parser, args, steps=50, smoke_steps=SMOKE_STEPS)


# %% [markdown]
# ## Whose turn it is
#
# One small Ray actor hands out the prompts. What it hands out at a time, the prompts of one batch,
# is a *turn*; turns are numbered in the order of the data set, whoever takes them.
#
# A collector may begin turn `n` when no more than `ahead` of the turns before it are unfinished:
#
#     n <= finished + ahead
#
# where a turn is finished once the trainer has trained or dropped as many rows as it has. AReaL
# (arXiv:2505.24298) bounds staleness like that; it counts versions instead of finished turns, which
# is the same as long as no row is dropped. With `ahead = 0` turn `n` waits until the trainer has
# finished all turns before it *and pushed*, so that prompts are answered one batch after the other,
# each by the newest weights: the synchronous program.


# %%
@ray.remote(num_cpus=0)
class Turns:
    """Hands out prompts in order, and says when their turn is."""

    def __init__(self, source, groups, ahead):
        self.source, self.groups, self.ahead = source(), groups, ahead
        self.taken = self.finished = 0
        self.changed = asyncio.Condition()

    async def take(self):
        """Returns the prompts of the next turn, each with its number in the data set."""
        first = self.taken * self.groups
        self.taken += 1
        items = itertools.islice(self.source, self.groups)
        return [item | {"group": [first + i]} for i, item in enumerate(items)]

    async def wait(self, turn):
        """Returns when ``turn`` may begin."""
        async with self.changed:
            await self.changed.wait_for(lambda: turn <= self.finished + self.ahead)

    async def finish(self, turns):
        """Notes how many turns the trainer has finished, all told."""
        async with self.changed:
            self.finished = turns
            self.changed.notify_all()


class Dataloader:
    """What a collector's environment reads: the prompts of one turn after the other."""

    def __init__(self, turns):
        self.turns = turns

    def __iter__(self):
        while True:
            yield from ray.get(self.turns.take.remote(), timeout=WAIT_S)


class InTurn(TensorDictModuleBase):
    """The policy, which waits for the turn of its prompts."""

    def __init__(self, policy, turns, groups):
        super().__init__()
        self.policy, self.turns, self.groups = policy, turns, groups
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, tensordict):
        """Waits, and samples."""
        turn = int(tensordict["group"].min()) // self.groups
        ray.get(self.turns.wait.remote(turn), timeout=WAIT_S)
        return self.policy(tensordict)


# %% [markdown]
# ## Collectors and buffer
#
# Each collector runs in a Ray actor, and so does the buffer. All are given the service itself: a
# copy of it works in any process of the cluster.
#
# `MCAdvantage` sits in the buffer and compares the answers of each group when they are written.
# `ConsumingSampler` gives each row out once: a row that was trained twice would count double.
#
# `VersionStamp(service)` writes into `("next", "policy_version")` the version that sampled the row.
# TorchRL's own counter says what the version was when the environment stepped, and a push in
# between makes that one too new.


# %%
QUIET = {"env_vars": {"LIST_TO_STACK": "1", "RL_LOGGING_LEVEL": "ERROR"}}
IN_ACTORS = {"num_cpus": 0, "num_gpus": 0, "runtime_env": QUIET}


def make_buffer(args):
    """Starts the buffer: room for whatever generation may be ahead."""
    return tvs.RayReplayBuffer(
        storage=partial(LazyStackStorage, (args.ahead + 2 * args.collectors + 2) * args.batch_size),
        sampler=ConsumingSampler,
        transform_factory=partial(MCAdvantage, grpo_size=args.group_size),
        remote_config=IN_ACTORS,
    )


def make_collectors(args, service, tokenizer, buffer, turns):
    """Starts the collectors' actors, which do not collect yet."""
    policy = make_policy(args, service, tokenizer)
    return [
        RayLLMCollector(
            partial(make_env, args, tokenizer, Dataloader(turns)),
            policy=InTurn(policy, turns, args.groups),
            replay_buffer=buffer,
            dialog_turns_per_batch=args.batch_size,
            total_dialog_turns=-1,
            track_policy_version=tvs.VersionStamp(service),
            remote_config=IN_ACTORS,
        )
        for _ in range(args.collectors)
    ]


class CollectorStoppedError(RuntimeError):
    """A collector has stopped, or none has sampled anything for too long."""


class Intake:
    """Takes rows out of the buffer as they come, and drops those that are too old."""

    def __init__(self, args, buffer, collectors, turns, fresh):
        self.args, self.buffer, self.collectors, self.turns = args, buffer, collectors, turns
        self.fresh = fresh
        self.taken = 0  # rows, dropped ones included

    def finished(self, rows):
        """Tells the collectors how many rows were trained or dropped."""
        ray.get(self.turns.finish.remote(rows // self.args.batch_size), timeout=WAIT_S)

    def take(self, number):
        """Returns ``number`` rows, fresh by what the trainer's version is now."""
        rows: list[TensorDictBase] = []
        looked = waited = time.monotonic()
        while len(rows) < number:
            # Whatever is there is taken, so that rows which are dropped make room at once.
            there = min(len(self.buffer), number - len(rows))
            now = time.monotonic()
            if there:
                kept = self.fresh(self.buffer.sample(there))
                rows += kept.unbind(0) if len(kept) else []
                self.taken += there
                self.finished(self.taken - len(rows))  # the others are still to be trained
                waited = now
                continue
            if now - waited > WAIT_S:
                raise CollectorStoppedError(f"no row came for {WAIT_S:.0f} s")
            if now - looked > LOOK_S:
                looked = now
                if not all(one.is_running() for one in self.collectors):
                    raise CollectorStoppedError("a collector has stopped")
            time.sleep(0.05)
        return lazy_stack(rows)


# %% The loop
# As in the first tutorial, except where the rows come from. `StalenessFilter` asks the updater for
# the newest version, and drops what is more than `--staleness` versions older. `StalenessWeight`
# multiplies advantages by `0.5 ** (staleness / half_life)` instead.
#
# The loss needs nothing else to learn from old rows: it weighs each token by how likely trainer and
# engine say it is, and clips.
@dataclass
class Step:
    """What is noted of one step; times are in seconds unless they say ``ms``."""

    step: int = shown("step", "d")
    version: int = shown("version", "d")  # the trainer's, whose rows would be 0 versions old
    reward: float = shown("reward", ".3f")  # mean over the rows
    staleness: float = shown("age", ".2f")  # mean over the rows, in versions
    max_staleness: int = shown("oldest", "d")
    lived_through: int = shown("through", "d")  # rows during whose sampling a push took place
    dropped: int = shown("dropped", "d")  # rows dropped so far
    ess: float = shown("ESS", ".3f")  # of the rows before the optimizer step
    wait_s: float = shown("wait s", ".2f")  # until the rows were there
    train_s: float = shown("train s", ".2f")
    push_ms: float = shown("push ms", ".1f")
    seconds: float  # from the begin of the loop to the end of this step


class Run:
    """What happened: the steps, and what the claims are checked against."""

    def __init__(self):
        self.steps: list[Step] = []
        self.answers: Counter[int] = Counter()  # rows trained, by the number of their prompt
        self.queries: list[list[str]] = []  # of each step, one for each row
        self.num_dropped = self.num_taken = self.num_left = self.num_written = 0
        self.summary: dict[str, float | None] = {}


def train(args, service, tokenizer, checkpoint, run):
    """Runs the loop, notes it in ``run``, and yields each step."""
    turns = Turns.remote(partial(prompts, args.dataset, args.seed), args.groups, args.ahead)
    buffer = make_buffer(args)
    collectors = make_collectors(args, service, tokenizer, buffer, turns)
    learner = Learner(args, checkpoint)
    updater = tvs.WeightUpdater(service, source=learner.model)

    stale, fresh = tvs.StalenessFilter(args.staleness, updater), lambda rows: rows
    how = {"half_life": max(1, args.staleness), "multiply": "advantage"}
    if args.stale == "drop":  # then the weight is 1, and how old rows are is noted
        fresh, how = stale, {"max_staleness": args.staleness}
    weigh, measure = tvs.StalenessWeight(updater, **how), tvs.GenerationStatistics()
    intake = Intake(args, buffer, collectors, turns, fresh)

    with contextlib.ExitStack() as cleanup:
        cleanup.callback(buffer.close)
        cleanup.callback(end, collectors, turns, buffer, run)
        ray.get([one._collector.is_initialized.remote() for one in collectors], timeout=WAIT_S)
        start = time.perf_counter()
        for collector in collectors:
            collector.start()
        for step in results.counted(args):
            begin = time.perf_counter()
            rows = intake.take(args.batch_size)
            rows = weigh(measure(rows))
            sampled = time.perf_counter()

            ess = learner.step(rows.split(args.rows_per_pass), args.batch_size)
            trained = time.perf_counter()

            version = service.weight_version
            report = updater.push_weights()  # to every engine, with requests running
            pushed = time.perf_counter()
            intake.finished(intake.taken)

            done = Step(
                step=step,
                version=version,
                reward=float(rows["next", "reward"].mean()),
                staleness=float(rows["staleness"].float().mean()),
                max_staleness=int(rows["staleness"].max()),
                lived_through=int((rows["statistics", "staleness_span"] > 0).sum()),
                dropped=stale.num_dropped,
                ess=ess,
                wait_s=sampled - begin,
                train_s=trained - sampled,
                push_ms=1e3 * report.seconds,
                seconds=pushed - start,
            )
            run.steps.append(done)
            run.answers.update(rows["group"].flatten().tolist())
            run.queries.append(list(rows["query"]))
            yield done
        run.num_dropped, run.num_taken = stale.num_dropped, intake.taken
        run.summary = measure.summary()


def end(collectors, turns, buffer, run):
    """Lets the collectors finish what they are at, ends them, and counts what is left over."""
    with contextlib.suppress(RayError):  # what has died already needs no end
        ends = [one._collector.async_shutdown.remote(timeout=30) for one in collectors]
        turns.finish.remote(math.inf)  # nobody waits for a turn any more
        ray.get(ends, timeout=60)
        run.num_left, run.num_written = len(buffer), buffer.write_count


# %% Results
# A picture of reward and staleness over the steps, a table, and the raw figures, in `--output`.
def save(run, args):
    """Writes pictures, tables and figures to the output directory, and prints the table."""
    title = (
        f"Asynchronous GRPO, {args.model} model, {args.replicas} replicas, "
        f"{args.collectors} collectors, staleness {args.staleness}, ahead {args.ahead}"
    )
    ages = {"staleness": "mean", "max_staleness": "oldest", args.staleness: "bound"}
    panels = {"sample age, versions": ages, "rows dropped": {"dropped": ""}}
    means = ", ".join(f"{name} {one:.3g}" for name, one in run.summary.items() if one is not None)
    results.write(args, title, run.steps, panels, f"Means over all rows trained: {means}")


def unaccounted(run, args):
    """Returns what is wrong with the rows: their number, their age, their order."""
    steps, found = run.steps, []
    trained = len(steps) * args.batch_size
    accounted = trained + run.num_dropped + run.num_left
    if run.num_taken != trained + run.num_dropped or run.num_written != accounted:
        found.append(
            f"{run.num_written} rows were written, but {trained} trained, {run.num_dropped} "
            f"dropped and {run.num_left} left over"
        )
    most = max(run.answers.values())
    if most > args.group_size:
        found.append(f"a prompt has {most} answers, not {args.group_size}")
    oldest = max(one.max_staleness for one in steps)
    if args.stale == "drop" and oldest > args.staleness:
        found.append(f"a row was trained at age {oldest}, above {args.staleness}")
    if args.stale == "reweight" and run.num_dropped:
        found.append(f"{run.num_dropped} rows were dropped")
    if args.staleness == args.ahead == 0:
        found += unlike_the_synchronous_program(run, args)
    return found


def unlike_the_synchronous_program(run, args):
    """Returns in what the run differs from one whose collector waits for each push."""
    source, ess = prompts(args.dataset, args.seed), min(one.ess for one in run.steps)
    found = []
    for step, queries in enumerate(run.queries):
        items = itertools.islice(source, args.groups)
        wanted = Counter(query for item in items for query in item["query"] * args.group_size)
        if Counter(queries) != wanted:
            found.append(f"step {step} has other prompts than the synchronous program")
    if run.num_dropped or any(one.max_staleness for one in run.steps):
        found.append(f"{run.num_dropped} rows were dropped, or not all were of the newest version")
    if not ess >= 1 - ESS_TOLERANCE[args.dtype]:
        found.append(f"effective sample size {ess:.4f}")
    return found


# %% All together
def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args = parse_args(argv)

    run, problems = Run(), []
    with started(args, "02_grpo_async") as (service, tokenizer, checkpoint):
        training = train(args, service, tokenizer, checkpoint, run)
        failures = CollectorStoppedError, RayError, tvs.errors.SyncError
        results.drive(training, args, problems, *failures)
    if not run.steps:
        return results.verdict(problems, "no step was finished")
    save(run, args)
    first, last = run.steps[0].reward, statistics.fmean(one.reward for one in run.steps[-5:])
    problems += unaccounted(run, args) + results.reward_problems(args, first, last)
    age = statistics.fmean(one.staleness for one in run.steps)
    return results.verdict(
        problems,
        f"reward {first:.3f} -> {last:.3f} staleness {age:.2f} dropped {run.num_dropped} "
        f"seconds {run.steps[-1].seconds:.1f}",
    )


# %%
if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

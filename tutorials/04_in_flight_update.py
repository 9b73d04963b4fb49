"""New weights in the middle of an answer, and every token after them checked.

Usage:
    python tutorials/04_in_flight_update.py                 # tiny random model, no GPU, a minute
    python tutorials/04_in_flight_update.py --smoke         # the same, as CI runs it
    python tutorials/04_in_flight_update.py --shape 1.7b    # Qwen3-1.7B's shape, two GPUs
    python tutorials/04_in_flight_update.py --model Qwen/Qwen3-1.7B-Base --trained Qwen/Qwen3-1.7B

The last line is ``PASS tokens_equal <fraction> push_ms <milliseconds>``, or ``FAIL`` with the first
token that differs, and a non-zero exit status.

What PASS claims: of every prompt, each token that was sampled after the switch is the one that an
engine which was started with the new weights gives behind the same beginning. That is promised
for ``push_weights(clear_cache=True)``. Without it, the second setting, nothing is claimed: the
fraction of equal answers is printed beside the first.
"""

# %% [markdown]
# # New weights in the middle of an answer
#
# A long answer takes longer than a training step. Waiting for the last answer of a batch leaves
# engines idle; ending answers throws tokens away. So the weights are replaced *in flight*: the
# engine pauses with its requests kept, takes the new weights, and goes on in the middle of each
# answer.
#
# An answer then has two parts, sampled by two models. This library says where one ends: each
# output carries `version_spans`. You will see
#
# - sixteen answers under way, and one push that begins as soon as one of them has ten tokens;
# - what each answer was before and after;
# - that the tokens after the switch are exactly those of the new model, if cached keys and values
#   are computed anew, and that they are not if they are kept.

# %%
import asyncio
import contextlib
import sys
from dataclasses import dataclass

from common.checkpoints import SHAPES, load_trainer, make_checkpoint
from common.engines import ray_running, scenario, small_service
from common.equality import compare, conclude, greedy, random_prompts
from common.settings import finish_push, make_push_parser

# %% Settings
# Both checkpoints are random by default, and nothing is downloaded. `--model` and `--trained` take
# real ones of one architecture: what the engine starts with, and what the trainer holds.
#
# On GPUs the engine computes *batch-invariantly*: a request's tokens do not depend on what else is
# in its batch. vLLM reads that from the environment when it is imported.
START_AT = 10  # tokens of one answer with which the push begins
TOKENS_AFTER = 100  # of each answer after the switch
SMOKE_TOKENS_AFTER = 40


def parse_args(argv=None):
    """Reads the command line and finds the devices."""
    parser = make_push_parser(__doc__, SHAPES)
    parser.add_argument("--model", help="checkpoint that the engine starts with, instead")
    parser.add_argument("--trained", help="checkpoint that the trainer holds, with --model")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.trained):
        parser.error("--model and --trained belong together")
    num_gpus = finish_push(parser, args)
    if num_gpus == 1 or (not num_gpus and (args.model or args.shape != "tiny")):
        parser.error(f"one GPU for the engine and one for the trainer are needed, got {num_gpus}")
    args.engine_gpus = max(0, num_gpus - 1)
    args.tokens_after = SMOKE_TOKENS_AFTER if args.smoke else TOKENS_AFTER
    return args


# %% The answers
# Each prompt is a stream. It ends when it has enough tokens after the switch, and closing it ends
# the request in the engine. `version_spans` has one tuple for each sample of a request, of which
# there is one here: two spans, the old version's and the new one's.
@dataclass
class Answer:
    """One answer, in two parts."""

    prompt: list[int]
    before: list[int]  # tokens that the old weights sampled
    after: list[int]  # tokens that the new weights sampled


async def follow(service, prompt, *, version, num_after, has_begun):
    """Streams one answer until it has ``num_after`` tokens of ``version``."""
    most = service.engine_args.max_model_len - len(prompt)
    stream = service.astream(prompt, greedy(most))
    async with contextlib.aclosing(stream) as outputs:
        async for output in outputs:
            tokens, last = output.outputs[0].token_ids, output.version_spans[0][-1]
            if len(tokens) >= START_AT:
                has_begun.set()
            if last.version == version and last.end - last.start >= num_after:
                end = last.start + num_after
                return Answer(prompt, list(tokens[: last.start]), list(tokens[last.start : end]))
    raise RuntimeError(f"an answer ended after {most} tokens, before it had enough of the new ones")


async def update_in_flight(service, model, prompts, *, clear_cache, num_after):
    """Starts all answers, and pushes as soon as one of them has begun."""
    version = service.weight_version + 1
    has_begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        how = {"version": version, "num_after": num_after, "has_begun": has_begun}
        answers = [group.create_task(follow(service, one, **how)) for one in prompts]
        await has_begun.wait()
        how = {"version": version, "clear_cache": clear_cache}
        report = await asyncio.to_thread(service.push_weights, model, **how)
    return [one.result() for one in answers], report


# %% What is right
# The new checkpoint goes to disk, and an engine that never saw the old one is started with it.
# Given a prompt and the tokens from before the switch, it must go on as the first engine did.
def continuations(service, answers):
    """What the engine says behind each answer's first part."""
    prompts = [one.prompt + one.before for one in answers]
    params = [greedy(len(one.after)) for one in answers]
    outputs = service.generate(prompts, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


# %% Both settings, side by side
# `clear_cache=True` has the engine compute keys and values of the requests under way anew, with the
# new weights: one prefill of what each has so far. `clear_cache=False` keeps those of the old
# weights, and later tokens attend to them: cheaper, and no model's exact answer. Which one to take
# is a question of training; only the first one can be checked.
SETTINGS = {"cache cleared": True, "cache kept": False}


def run(args, directory):
    """Everything in order; returns whether all was as it should be."""
    old, new = args.model, args.trained
    if old is None:
        old, new = (
            make_checkpoint(args.shape, directory, seed=seed, dtype=args.dtype, device=args.device)
            for seed in (args.seed, args.seed + 1)
        )
    trained = load_trainer(new, dtype=args.dtype, device=args.device)
    launched = load_trainer(old, dtype=args.dtype, device=args.device)
    prompts = random_prompts(args.prompts, args.seed)
    answers, reports = {}, {}
    print("Starting an engine with the old weights", flush=True)
    with small_service(old, args.dtype) as service:
        for setting, clear_cache in SETTINGS.items():
            if service.weight_version:
                service.push_weights(launched)  # back to the old ones, with nobody waiting
            print(f"{setting}: {args.prompts} answers, and a push into them", flush=True)
            answers[setting], reports[setting] = asyncio.run(
                update_in_flight(
                    service, trained, prompts, clear_cache=clear_cache, num_after=args.tokens_after
                )
            )
    print("Starting an engine with the new weights", flush=True)
    with small_service(new, args.dtype) as service:
        expected = {setting: continuations(service, some) for setting, some in answers.items()}

    comparisons = {}
    for setting, some in answers.items():
        comparisons |= compare({setting: [one.after for one in some]}, expected[setting])
    case = f"{args.model or args.shape}, {args.prompts} prompts, {args.tokens_after} tokens after"
    return conclude("in_flight_update", case, comparisons, reports, smoke=args.smoke)


def main(argv=None):
    """Runs the tutorial; what was started is ended, also on Ctrl-C."""
    args = parse_args(argv)
    with scenario("in-flight", ray_running(args.engine_gpus)) as directory:
        return 0 if run(args, directory) else 1


if __name__ == "__main__":
    sys.exit(main())

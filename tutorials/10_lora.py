"""GRPO with a LoRA adapter that is pushed alone: engines keep it beside the weights they have.

Usage:
    python tutorials/10_lora.py                 # tiny random model, no GPU, two minutes
    python tutorials/10_lora.py --smoke         # fewer steps, as CI runs it
    python tutorials/10_lora.py --model HuggingFaceTB/SmolLM2-135M-Instruct    # on GPUs

The last line is ``PASS reward <first> -> <last> ...``, or ``FAIL`` and why. PASS claims of every
step what that of ``01_grpo_sync.py`` does: rows are of the version pushed last, and trainer and
engines find their tokens equally likely (ESS). And after the last step: the engines' answers are as
likely by the trainer's model as the engines said, with the adapter beside the weights and merged
into them, and less so by the model without it; and the reward has grown. The tiny model's must end
above 0.9, but for a smoke run's.
"""

# %% [markdown]
# # An adapter by itself
#
# LoRA leaves a model's weights as they are, and trains a pair of small matrices for each layer.
# Merged, they are a whole model, which a push sends in full and loads while engines stand still.
# Kept apart, a push is the matrices alone. Engines take them between two steps, and go on.
#
# Answers under way end with the adapter that they began with, so that each has one version. Those
# that begin later take the new one, and cached prefixes are not shared between the two.

# %%
import sys
from functools import partial

import torch
from common import claims, results, settings
from common.engines import prepared
from tensordict import set_list_to_stack

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.rl.grpo import Learner, engine_args, make_policy
from torchrl_vllm_sync.rl.tasks import make_env, prompts, reward

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it
# Of the tiny model, and of a real one: a few numbers of each layer move it less than all of them.
TINY_LR, OTHER_LR = 3e-3, 2e-4
# Of the mean difference of log-probabilities, by the engines' dtype.
MOST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def parse_args(argv=None):
    """Reads the command line; what is not given comes from the dataset's preset."""
    parser = settings.make_parser(__doc__, "10_lora")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.set_defaults(held_out=0)
    args = settings.finish_dataset(parser, argv, steps=90, smoke_steps=40)
    if parser.parse_args(argv).lr is None:
        args.config.optimizer.lr = TINY_LR if args.model == settings.TINY else OTHER_LR
    lora = args.config.train_model.lora
    lora.enabled, lora.r, lora.alpha = True, args.rank, args.rank
    return args


# %% The loop
# It is that of `01_grpo_sync.py`. All there is to `adapters="keep"` is this word at the updater,
# and `enable_lora` at the engines; the policy asks for the only adapter that there is.
def train(args, service, learner, tokenizer):
    """Yields each step."""
    warmup = torch.optim.lr_scheduler.LinearLR(learner.optimizer, 0.25, total_iters=4)
    updater = tvs.WeightUpdater(service, source=learner.model, adapters="keep")
    questions, rated = prompts(args.dataset, args.seed), reward(args.dataset)
    env = make_env(tokenizer, questions, rated, num_envs=args.batch_size, repeats=args.group_size)
    policy = make_policy(args.config, service, tokenizer)
    collector = partial(tvs.RolloutCollector, env, policy=policy, track_policy_version=True)
    for step in claims.sync_steps(args, collector, learner, updater):
        warmup.step()
        yield step


# %% Beside a merged push
# The same model once more, merged: then `adapter=""` asks for the weights alone. What was pushed
# as an adapter stays one, on top of what are now other weights: do not go on with both.
def difference(args, service, model, tokenizer, adapter):
    """How far the engines' log-probabilities of new answers are from the model's, in the mean."""
    policy = make_policy(args.config, service, tokenizer)
    policy.adapter = adapter
    rows = policy.answer_chats(
        [[{"role": "user", "content": f"Count from {one} to 9."}] for one in range(8)], [*range(8)]
    ).to(args.device)
    rows["advantage"] = torch.ones(len(rows), 1, 1, device=args.device)
    (correct := tvs.RolloutCorrection(tvs.TrainerPolicy(model), weigh="token", cap=None))(rows)
    return correct.summary()["abs_log_ratio"]


def compare(args, service, model, tokenizer):
    """Pushes both ways, three times each, prints what that takes; returns what is wrong."""
    problems, most = [], MOST_DIFFERENCE[args.dtype]
    for adapters, asked in (("keep", None), ("merge", "")):
        updater = tvs.WeightUpdater(service, source=model, adapters=adapters)
        push = min((updater.push_weights() for _ in range(3)), key=lambda one: one.seconds)
        found = difference(args, service, model, tokenizer, asked)
        with model.disable_adapter():
            without = difference(args, service, model, tokenizer, asked)
        pause = max(one.whole_pause_s for one in push.replicas)
        took = f"{1e3 * push.seconds:.1f} ms, of which engines stood {1e3 * pause:.1f}"
        print(f"{adapters}: {push.num_bytes / 1e6:.2f} MB in {took}")
        print(f"  |Δ log p| {found:.6f}, of the model without its adapter {without:.4f}")
        if not found < min(most, without):
            problems.append(f"{adapters}: engines and trainer differ by {found}")
    return problems


def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, problems = parse_args(argv), []
    engine = {"enable_lora": True, "max_lora_rank": args.rank, **engine_args(args.config)}
    with (
        prepared(args, "10_lora", diverse=True) as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine) as service,
    ):
        learner = Learner(args.config, checkpoint)
        training = train(args, service, learner, tokenizer)
        steps = results.drive(training, args, problems, claims.BadRowsError, tvs.errors.SyncError)
        problems += compare(args, service, learner.model, tokenizer)
    if not problems and not claims.last_reward(steps) > steps[0].reward:
        problems.append("the reward has not grown")
    return claims.conclude_sync(args, steps, problems, [])


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

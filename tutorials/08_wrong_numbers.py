"""Six ways to train on wrong numbers without a word, each with its guard off and on.

Usage:
    python tutorials/08_wrong_numbers.py               # tiny random model, no GPU, a minute
    python tutorials/08_wrong_numbers.py --smoke       # fewer answers, as CI runs it
    python tutorials/08_wrong_numbers.py --model PATH  # any chat model's checkpoint or name

The last line is ``PASS ess <least, guards on> off <greatest, guards off>``, or ``FAIL`` and why.
PASS claims of each scene: with its guard on engine and trainer agree as far as rounding goes (ESS),
with its guard off they are at least twice as far apart, and the mistake was noticed.
"""

# %% [markdown]
# # Wrong numbers
#
# A loss divides the trainer's probability of each sampled token by the engine's. For equal weights
# the ratio is 1. If it is not, training goes on all the same: the reward rises a little less, or
# falls a hundred steps later. Each scene makes one such mistake, then does the same with the guard
# against it, and prints how far the trainer's log-probability of a token is from the engine's
# (`|Δ log p|`), and what is left of the batch (ESS, as a share of its tokens).

# %%
import copy
import sys

import ray
import torch
from common.engines import ray_running, scenario
from common.results import STYLE, verdict
from common.settings import ESS_TOLERANCE, TINY, finish, make_parser
from matplotlib import pyplot as plt
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_vllm_sync import AsyncVLLM, RolloutCorrection, TrainerPolicy, vLLMWrapper
from torchrl_vllm_sync.errors import TransferError, UncorrectableSamplingError, WeightAuditError
from torchrl_vllm_sync.rl.grpo import engine_args
from torchrl_vllm_sync.testing import make_tiny_checkpoint

# %%
PRESET = {
    "model": TINY, "steps": 1, "lr": 0.0, "group_size": 8, "groups": 8, "rows_per_pass": 32,
    "max_tokens": 24, "max_model_len": 256,
}  # fmt: skip
# More than a block of the cache, which keeps keys and values of whole blocks.
SYSTEM = "You are a careful clerk: add the two numbers, and answer with their sum and nothing else."
BLOCK_TOKENS = 32


# %% What every scene does: the engine answers some questions, and the trainer scores the answers.
class Stage:
    def __init__(self, args, service, checkpoint):
        self.args, self.service, self.checkpoint = args, service, checkpoint
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")

    def model(self):
        loaded = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
        return loaded.eval().to(self.args.device)

    def changed_model(self):
        model = self.model()
        with torch.no_grad():  # in place of an optimizer step
            for one in model.parameters():
                one += 0.1 * one.std(correction=0) * torch.randn_like(one)
        return model

    def sample(self, sampling=None, **guards):
        policy = vLLMWrapper(
            self.service, tokenizer=self.tokenizer, input_mode="history",
            chat_template=self.tokenizer.chat_template, return_log_probs=True,
            generate_kwargs={"max_tokens": self.args.max_tokens, **(sampling or {})}, **guards,
        )  # fmt: skip
        args = self.args
        turns = [{"role": "user", "content": f"{at} + {at} = ?"} for at in range(args.groups)]
        chats = [[{"role": "system", "content": SYSTEM}, turn] for turn in turns]
        of_row = [at for at in range(args.groups) for _ in range(args.group_size)]
        return policy.answer_chats(chats, of_row).to(args.device)


# %% `RolloutCorrection` knows of every batch how far trainer and engine are apart.
def mismatch(rows, trainer):
    rows["advantage"] = torch.ones(len(rows), 1, 1, device=rows.device)
    (correct := RolloutCorrection(trainer, weigh="token", cap=None))(rows)
    return [correct.summary()[name] for name in ("abs_log_ratio", "ess")]


# %% A push is missed
# An exception swallowed, a rank that returned early: the engine goes on with the weights of the
# step before. Each row says which version sampled it, and the trainer knows its own.
def push_missed(stage):
    model = stage.changed_model()
    rows, step = stage.sample(), stage.service.weight_version + 1
    sampled = int(rows["policy_version"].min())
    noticed = f"rows of version {sampled} at step {step}" if sampled < step else ""
    off = mismatch(rows, TrainerPolicy(model))
    stage.service.push_weights(model)
    return off, mismatch(stage.sample(), TrainerPolicy(model)), noticed


# %% An adapter is not merged
# The push went well and the version is right, but it sent the base model. An audit compares the
# trainer's weights with what the workers compute with, and names tensors. vLLM's CPU backend has
# repacked them; there the distance itself tells, since nothing else can be wrong with fresh rows.
def adapter_not_merged(stage):
    base = stage.model()
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(base), lora).eval()
    stage.service.push_weights(base)
    off = mismatch(stage.sample(), TrainerPolicy(model))
    try:
        stage.service.audit(model)
        noticed = ""
    except WeightAuditError as error:
        noticed = str(error)
    except TransferError:
        noticed = f"fresh rows are off by {off[0]:.3f}" if off[0] > 0.01 else ""
    stage.service.push_weights(model)  # merges
    return off, mismatch(stage.sample(), TrainerPolicy(model)), noticed


# %% A turn is tokenised again
# Text is decoded, kept, and encoded again for the trainer. The tokens are not those that were
# sampled: one that is missing moves all behind it. Rows keep the engine's tokens; use them.
def tokenised_again(stage):
    model = stage.model()
    stage.service.push_weights(model)
    rows = stage.sample()
    again, width = rows.clone(), rows["tokens", "response"].shape[1]
    texts = stage.tokenizer.batch_decode(rows["tokens", "response"], skip_special_tokens=True)
    encoded = stage.tokenizer(texts, add_special_tokens=False)["input_ids"]
    for answer, ids in zip(again["tokens", "full"][:, -width:], encoded, strict=True):
        answer[: len(ids)] = torch.tensor(ids[:width])
    others = int((again["tokens", "full"] != rows["tokens", "full"]).any(1).sum())
    noticed = f"{others} of {len(rows)} answers have other tokens" if others else ""
    return *(mismatch(one, TrainerPolicy(model)) for one in (again, rows)), noticed


# %% Sampling that the loss does not know of
# The engine sharpens its distribution, or cuts its tail off, and says how likely each token was
# then. The trainer computes without: `vLLMWrapper` refuses, unless `allow` has it go on. Told of
# the trainer's temperature, or asked for masks of what could be sampled, it has no reason to.
def unknown_sampling(stage, settings, **guards):
    trainer = TrainerPolicy(stage.model(), temperature=settings["temperature"])
    stage.service.push_weights(trainer.model)
    try:
        stage.sample(settings)
        noticed, allow = "", ()
    except UncorrectableSamplingError as error:
        noticed, allow = str(error), [*error.settings]
    off = mismatch(stage.sample(settings, allow=allow), TrainerPolicy(trainer.model))
    return off, mismatch(stage.sample(settings, trainer=trainer, **guards), trainer), noticed


NUCLEUS = {"temperature": 1.0, "top_p": 0.9, "top_k": 50}


# %% Keys of old weights
# The push went well, but a prompt begins with blocks that the engine has cached, and the weights
# before computed their keys. Replicas keep versions apart there, and have no switch for it: here
# something is done to them, so this scene is the last. Neither versions nor an audit of weights
# tell; the distance does.
def mix_versions(replica):
    kind = type(replica._updates)
    replica._updates.__class__ = type("Mixed", (kind,), {"salt": "any version"})


def keys_of_old_weights(stage):
    found = []
    for _ in ("on", "off"):
        stage.service.push_weights(stage.model())
        stage.sample()
        stage.service.push_weights(model := stage.changed_model())
        found.append(mismatch(stage.sample(), TrainerPolicy(model)))
        ray.get([actor.__ray_call__.remote(mix_versions) for actor in stage.service.actors])
    on, off = found
    return off, on, f"fresh rows are off by {off[0]:.3f}" if off[0] > 2 * on[0] else ""


SCENES = {
    "a push missed": push_missed, "an adapter not merged": adapter_not_merged,
    "a turn tokenised again": tokenised_again,
    "temperature 0.7": lambda stage: unknown_sampling(stage, {"temperature": 0.7}),
    "top-p 0.9": lambda stage: unknown_sampling(stage, NUCLEUS, return_sampling_mask=True),
    "keys of old weights": keys_of_old_weights,
}  # fmt: skip


# %% All of them, and a picture
def draw(found, output):
    output.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
        for at, axis in enumerate(axes):
            axis.set_xlabel(("mean |Δ log p|", "ESS")[at])
            for side, (name, color) in enumerate({"off": "tab:red", "on": "tab:green"}.items()):
                places = [place + 0.4 * side - 0.2 for place in range(len(found))]
                values = [scene[side][at] for scene in found.values()]
                axis.barh(places, values, 0.38, color=color, label=f"guard {name}")
        axes[0].legend(frameon=False, loc="lower right")
        axis.set_yticks(range(len(found)), found)
        axis.invert_yaxis()
        figure.savefig(output / "curve.png", dpi=150)


def run(args, directory):
    checkpoint = args.model if args.model != TINY else str(make_tiny_checkpoint(directory))
    least, found, problems = 1 - ESS_TOLERANCE[args.dtype], {}, []
    with AsyncVLLM.from_pretrained(checkpoint, **engine_args(args.config)) as service:
        for name, scene in SCENES.items():
            off, on, noticed = found[name] = scene(Stage(args, service, checkpoint))
            print(f"{name}: {noticed or 'not noticed'}")
            for side, (mean, ess) in {"off": off, "on": on}.items():
                print(f"  guard {side:3}  |Δ log p| {mean:.6f}  ESS {ess:.4f}", flush=True)
            if not (noticed and least <= on[1] and on[0] < off[0] / 2):
                problems.append(
                    f"{name}: not noticed, or ESS below {least}, or not half as far off"
                )
    draw(found, args.output)
    off, on = ([scene[side][1] for scene in found.values()] for side in (0, 1))
    return problems, f"ess {min(on):.4f} off {max(off):.4f}"


def main():
    parser = make_parser(__doc__, "08_wrong_numbers", has_dataset=False)
    parser.set_defaults(replicas=1)
    args = parser.parse_args()
    preset = PRESET | ({"groups": 2} if args.smoke else {})
    finish(parser, args, preset, smoke_steps=1)
    args.config.inference_model.engine_args["block_size"] = BLOCK_TOKENS
    with scenario("wrong-numbers", ray_running(args.engine_gpus)) as directory:
        problems, figures = run(args, directory)
    return verdict(problems, figures)


if __name__ == "__main__":
    sys.exit(main())

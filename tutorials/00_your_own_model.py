"""The whole loop in one file, to be changed into your own: model, prompts, reward, GRPO, pushes.

Usage:
    python tutorials/00_your_own_model.py                  # tiny random model, no GPU, a minute
    python tutorials/00_your_own_model.py --smoke          # fewer steps, as CI runs it
    python tutorials/00_your_own_model.py --model PATH     # any chat model; where GPUs are, on two

The last line is ``PASS ess <least> reward <first> -> <last>``, or ``FAIL`` and why. PASS claims
nothing of the reward, but of every step: each row was sampled by the weights pushed last; the
trainer finds it as likely as the engine did (ESS, see ``01_grpo_sync.py``); and the step leaves it
likely (ESS above a half). A learning rate that is too high does not: 5e-3, right for the tiny
model, ruins a real one at once.
"""

# %%
import argparse
import itertools
import tempfile
import time

from common.quiet import keep_quiet  # hides other libraries' notes; leave it out if you like

# isort: split
import ray
import torch
from tensordict import set_list_to_stack
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.objectives.llm.grpo import GRPOLoss
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.testing import make_tiny_checkpoint

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it
ROWS, GROUP = 32, 8  # rows of a step, answers to each prompt
GPUS = torch.cuda.device_count()
DTYPE, LEAST_ESS = ("bfloat16", 0.9) if GPUS else ("float32", 0.9999)  # what rounding leaves
DEVICE = f"cuda:{GPUS - 1}" if GPUS else "cpu"  # the trainer's; the engines have the other GPUs


# %% Prompts are dicts with a `query`, for ever, and what else the reward names as an argument.
def share_of_digits(_prompts, answers):
    """What is wanted here are short answers: replace it by what you want of yours."""
    return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in answers]


def make_env(tokenizer):
    questions = ({"query": [f"What is {one} + {one}?"]} for one in itertools.count())
    env = ChatEnv.from_dataloader(
        questions, batch_size=(ROWS,), repeats=GROUP, tokenizer=tokenizer, input_mode="history"
    ).append_transform(StepCounter(max_steps=1))
    return env.append_transform(tvs.TextReward(share_of_digits))


# %% Sampling parameters say: from the model as it is. With others the trainer's probabilities are
# not the engine's, and importance weights are off. Engines have the weights in bfloat16 on GPUs: so
# does the trainer's forward pass, by autocast. In float32 it would see what rounding takes from the
# engines, more with each step. Each step prints what it cost, by phase: sampling and training grow
# with rows, tokens and the model, the push with the model alone.
def train(service, checkpoint, steps, lr):
    """Yields the policy versions, the ESS before and after, and the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().to(DEVICE)
    policy = tvs.vLLMWrapper(
        service, tokenizer=tokenizer, input_mode="history", chat_template=tokenizer.chat_template,
        return_log_probs=True, generate_kwargs={"max_tokens": 16, "temperature": 1.0, "top_p": 1.0},
    )  # fmt: skip
    loss_fn = GRPOLoss(tvs.TrainerPolicy(model), entropy_coeff=0.0, masking_strategy="sft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    buffer = ReplayBuffer(
        storage=tvs.RolloutStorage(ROWS), sampler=SamplerWithoutReplacement(),
        transform=tvs.GroupAdvantage(grpo_size=GROUP), batch_size=ROWS,
    )  # fmt: skip
    updater = tvs.WeightUpdater(service, source=model)
    collector = tvs.RolloutCollector(
        make_env(tokenizer), policy=policy, weight_updater=updater, replay_buffer=buffer,
        dialog_turns_per_batch=ROWS, track_policy_version=True,
    )  # fmt: skip
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=GPUS > 0)
    began = time.perf_counter()
    for _ in itertools.islice(collector, steps):  # fills the buffer
        sampled = time.perf_counter()
        rows = buffer.sample().to(DEVICE)
        with autocast:
            loss = loss_fn(rows)
        loss.loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        learned = time.perf_counter()
        push = updater.push_weights()
        with torch.no_grad(), autocast:
            ess, after = float(loss.ESS), float(loss_fn(rows).ESS)
        reward = float(rows["next", "reward"].mean())
        answer = tokenizer.decode(rows["tokens", "response"][0], skip_special_tokens=True)
        print(f"ess {ess:.6f}, after {after:.3f}  reward {reward:.3f}  sample", end="")
        print(f" {sampled - began:.2f} s, train {learned - sampled:.2f}, push {push.seconds:.3f}")
        print(f"  {answer!a:.90}", flush=True)
        yield set(rows["policy_version"].tolist()), ess, after, reward
        buffer.empty()
        began = time.perf_counter()
    collector.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint or name; a tiny random one if not given")
    parser.add_argument("--lr", type=float, help="5e-3 for the tiny model, 2e-5 for another")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_const", const=3, dest="steps", help="3 steps")
    args = parser.parse_args()
    keep_quiet()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = args.model or str(make_tiny_checkpoint(directory, diverse=False))
        lr = args.lr or (2e-5 if args.model else 5e-3)
        ray.init("local", num_gpus=max(0, GPUS - 1), log_to_driver=False, logging_level="ERROR")
        with tvs.AsyncVLLM.from_pretrained(
            checkpoint, num_replicas=min(2, GPUS - 1) if GPUS > 1 else 2, num_cpus_per_replica=0,
            max_model_len=256, dtype=DTYPE,
        ) as service:  # fmt: skip
            found = [*train(service, checkpoint, args.steps, lr)]
        ray.shutdown()
    versions, ess, after, rewards = zip(*found, strict=True)
    figures = f"ess {min(ess):.6f} reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
    alike = all(one >= LEAST_ESS for one in ess) and all(one >= 0.5 for one in after)
    if alike and [*versions] == [{at} for at in range(args.steps)]:
        print(f"PASS {figures}")
        return 0
    print(f"FAIL {figures}, versions {versions}, least ess after a step {min(after):.3f}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

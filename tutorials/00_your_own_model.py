"""The whole loop in one file, to be changed into your own: model, prompts, reward, GRPO, pushes.

Usage:
    python tutorials/00_your_own_model.py                  # tiny random model, no GPU, a minute
    python tutorials/00_your_own_model.py --smoke          # fewer steps, as CI runs it
    python tutorials/00_your_own_model.py --model PATH     # any chat model's checkpoint

The last line is ``PASS ess <least> reward <first> -> <last>``, or ``FAIL`` and why, with a non-zero
exit status. What PASS claims: at every step each row was sampled by the weights pushed last, and
the trainer finds it exactly as likely as the engine did (ESS, see ``01_grpo_sync.py``).
"""

# %%
import argparse
import itertools
import logging
import sys
import tempfile

from common.quiet import keep_quiet  # hides other libraries' notes; leave it out if you like

# isort: split
import ray
import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_vllm_sync import AsyncVLLM, WeightUpdater, vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_checkpoint

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it
ROWS, GROUP = 32, 8  # rows of a step, answers to each prompt
ON_GPU = torch.cuda.is_available()
LEAST_ESS = 0.95 if ON_GPU else 0.9999  # bfloat16 rounds in different places
DEVICE = torch.device("cuda", torch.cuda.device_count() - 1) if ON_GPU else torch.device("cpu")


# %% [markdown]
# Your prompts are dicts with a `query`, for ever. Your reward is a transform of the environment.


# %%
class Reward(Transform):
    """Share of the answer's token ids below 128: replace it by what you want of an answer."""

    def _step(self, tensordict, next_tensordict):
        answers = tensordict.view(-1).get(("tokens", "response"), as_list=True)
        rewards = torch.stack([(ids < 128).sum() / max(1, len(ids)) for ids in answers])
        next_tensordict["reward"] = rewards.view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        """Announces the reward's shape."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1), dtype=torch.float32)
        return reward_spec


def make_env(tokenizer):
    """One question, one answer; each question goes to ``GROUP`` rows."""
    questions = ({"query": [f"What is {one} + {one}?"]} for one in itertools.count())
    env = ChatEnv.from_dataloader(
        questions, batch_size=(ROWS,), repeats=GROUP, tokenizer=tokenizer, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(Reward())


# %% [markdown]
# Sampling parameters say: from the model as it is. With others the trainer's probabilities are not
# the engine's, and importance weights are off.


# %%
def train(service, checkpoint, steps):
    """Yields the policy version, the ESS and the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().to(DEVICE)
    sampling = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0}
    policy = vLLMWrapper(
        service, tokenizer=tokenizer, input_mode="history", chat_template=tokenizer.chat_template,
        return_log_probs=True, pad_output=False, generate_kwargs=sampling,
    )  # fmt: skip
    trained = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True,
        pad_output=False, pad_model_input=True, device=DEVICE,
    )  # fmt: skip
    loss_fn = GRPOLoss(trained, entropy_coeff=0.0, masking_strategy="sft", device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6 if ON_GPU else 5e-3)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(ROWS), sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP), batch_size=ROWS,
    )  # fmt: skip
    updater = WeightUpdater(service, source=model)
    collector = LLMCollector(
        make_env(tokenizer), policy=policy, weight_updater=updater, replay_buffer=buffer,
        dialog_turns_per_batch=ROWS, track_policy_version=True,
    )  # fmt: skip
    for _ in itertools.islice(collector, steps):  # fills the buffer
        rows = buffer[:]
        loss = loss_fn(buffer.sample().to(DEVICE))
        loss.mean(reduce=True).backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.push_weights()
        buffer.empty()
        versions = set(rows["policy_version"].flatten().tolist())
        yield versions, float(loss.ESS), float(rows["next", "reward"].mean())
    collector.shutdown()


def main() -> int:
    """Starts Ray and two engines, trains, and ends them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; a tiny random one if not given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="3 steps")
    args = parser.parse_args()
    keep_quiet()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = args.model or str(make_tiny_checkpoint(directory, diverse=False))
        # The last GPU is the trainer's.
        num_gpus = max(0, torch.cuda.device_count() - 1)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_gpus=num_gpus, **quiet)
        found = []
        with AsyncVLLM.from_pretrained(
            checkpoint, num_replicas=2, num_cpus_per_replica=0, max_model_len=256, verbose=False
        ) as service:
            for step in train(service, checkpoint, 3 if args.smoke else args.steps):
                print("versions {}  ess {:.6f}  reward {:.3f}".format(*step), flush=True)
                found.append(step)
        ray.shutdown()
    least = min(ess for _, ess, _ in found)
    if any(versions != {at} for at, (versions, _, _) in enumerate(found)) or least < LEAST_ESS:
        print(f"FAIL versions {[one for one, _, _ in found]}, least ess {least:.6f}")
        return 1
    print(f"PASS ess {least:.6f} reward {found[0][2]:.3f} -> {found[-1][2]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

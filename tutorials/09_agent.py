"""GRPO on an agent that only knows an address: plain OpenAI client code with a calculator.

Usage:
    python tutorials/09_agent.py                # tiny random model, no GPU, two minutes
    python tutorials/09_agent.py --smoke        # a few steps, as CI runs it
    python tutorials/09_agent.py --model HuggingFaceTB/SmolLM2-135M-Instruct    # on GPUs

The last line is ``PASS reward <first> -> <last> ...``, or ``FAIL`` and why. PASS claims of every
step that the rows hold, token by token, what the agent's client was given and nothing else, that
they are of the version pushed last, and that trainer and engines find their tokens equally likely
(ESS). The tiny model's reward must end above 0.8, but for a smoke run's.
"""

# %% [markdown]
# # An agent behind an address
#
# Agents are written against OpenAI's protocol: a loop that asks, calls tools, and asks again. This
# one does not import the library. It gets an address and a key, and returns a reward. What it asked
# and got is known by its key, at the server: the tokens as they were sampled, not its text encoded
# anew.

# %%
import sys
from functools import partial

import openai
from common import claims, results, settings
from common.engines import prepared
from common.task import SYSTEM, calculations, calculator, names_result
from tensordict import set_list_to_stack

import torchrl_vllm_sync as tvs
from torchrl_vllm_sync.rl.grpo import Learner, engine_args, make_policy
from torchrl_vllm_sync.rl.tasks import low_ids

set_list_to_stack(True).set()  # TorchRL's chat environments ask for it
TURNS = 2


def parse_args(argv=None):
    """Reads the command line; what is not given depends on the model."""
    parser = settings.make_parser(__doc__, "09_agent", has_dataset=False)
    return settings.finish_turns(parser, argv, turns=1, smoke_steps=4)


# %% The agent
# A random model cannot write a call of a tool, so the tool answers every turn, and the reward is
# the share of tokens with an id below 128. A real model is rewarded if it names the result.
def make_agent(args, model, seen):
    """Returns the agent, which also notes the token ids that it was given."""
    shared = openai.OpenAI(base_url="http://localhost", api_key="none")  # its connections

    def agent(base_url, api_key, problem):
        client, ids = shared.with_options(base_url=base_url, api_key=api_key), []
        chat = [{"role": "user", "content": problem["query"]}]
        if not args.is_tiny:
            chat.insert(0, {"role": "system", "content": SYSTEM})
        for _ in range(TURNS):
            answer = client.chat.completions.create(
                model=model, messages=chat, max_completion_tokens=args.max_tokens,
                extra_body={"return_token_ids": True},
            ).choices[0]  # fmt: skip
            said = answer.message.content
            ids += answer.token_ids
            chat.append({"role": "assistant", "content": said})
            chat.append({"role": "user", "content": calculator(said)})
        seen.append(ids)
        rewards = low_ids(None, [ids]) if args.is_tiny else names_result([problem["query"]], [said])
        return rewards[0]

    return agent


# %% The loop
# It is that of `01_grpo_sync.py`, but for the collector, which has an agent for an environment.
def train(args, service, checkpoint, tokenizer):
    """Yields each step."""
    learner, seen = Learner(args.config, checkpoint), []
    updater = tvs.WeightUpdater(service, source=learner.model)
    make_collector = partial(
        tvs.AgentCollector, service, make_agent(args, checkpoint, seen),
        calculations(args.seed, high=10 if args.is_tiny else 1000),
        policy=make_policy(args.config, service, tokenizer), num_samples=args.group_size,
    )  # fmt: skip

    def check(rows):
        sampled, of_row = rows["tokens", "full"], rows["masks", "all_assistant_mask"]
        trained = [row[mask].tolist() for row, mask in zip(sampled, of_row, strict=True)]
        if sorted(trained) != sorted(seen):
            raise claims.BadRowsError("rows have other tokens than the agent was given")
        seen.clear()

    yield from claims.sync_steps(args, make_collector, learner, updater, check)


def main(argv=None):
    """Runs the tutorial; the exit status is 0 if all claims hold."""
    args, problems = parse_args(argv), []
    with (
        prepared(args, "09_agent") as (checkpoint, tokenizer),
        tvs.AsyncVLLM.from_pretrained(checkpoint, **engine_args(args.config)) as service,
    ):
        training = train(args, service, checkpoint, tokenizer)
        steps = results.drive(training, args, problems, claims.BadRowsError, tvs.errors.SyncError)
    return claims.conclude_sync(args, steps, problems, [])


if __name__ == "__main__":
    sys.exit(main([] if "ipykernel" in sys.modules else None))  # a notebook has others

"""GRPO groups through ``vLLMWrapper``, which finds in TorchRL's data which rows belong together."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import set_list_to_stack
from torchrl.envs.llm.chat import ChatEnv

from benchmarks import live_engines
from benchmarks.live_traffic import FORCING_BIAS, Conversation, least_tokens, once_tokens
from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict import TensorDictBase

    from torchrl_vllm_sync import AsyncVLLM


SAMPLES = 8
WRAPPED: dict[str, tuple[str | None, bool]] = {
    "ours": (None, True),
    "ours, no keys": (None, False),
    "round-robin": ("round-robin", False),
}
"""Strategy, and whether the wrapper names sessions and groups, of each system."""


def group_rows(num_groups: int, characters: int) -> TensorDictBase:
    """What a collector's policy gets: each group's question 8 times, one after the other."""

    def questions() -> Iterator[dict[str, list[str]]]:
        letters = np.array([*"abcdefghijklmnopqrstuvwxyz "])
        generator = np.random.default_rng(1)
        while True:
            yield {"query": ["".join(generator.choice(letters, characters))]}

    tokenizer: Any = make_tiny_tokenizer()
    dataloader: Any = questions()
    env = ChatEnv.from_dataloader(
        dataloader=dataloader,
        batch_size=(SAMPLES * num_groups,),
        repeats=SAMPLES,
        tokenizer=tokenizer,
        input_mode="history",
    )
    with set_list_to_stack(True):
        return env.reset()


def run_wrapped(
    service: AsyncVLLM,
    rows: TensorDictBase,
    num_tokens: int,
    *,
    strategy: str | None,
    find_sessions: bool,
) -> dict[str, float]:
    """Figures of one call of the policy: a subset of those of the other cases."""
    tokenizer: Any = make_tiny_tokenizer()
    service.create_load_balancer(strategy)
    policy = vLLMWrapper(
        service,
        tokenizer=tokenizer,
        input_mode="history",
        chat_template=tokenizer.chat_template,
        generate_kwargs={
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "logit_bias": {tokenizer.encode("a")[0]: FORCING_BIAS},
        },
        pad_output=False,
        find_sessions=find_sessions,
    )
    live_engines.reset(service)
    before = live_engines.counts(service)
    begin = time.perf_counter()
    with set_list_to_stack(True):
        answered = policy(rows.clone())
        wall_s = time.perf_counter() - begin
        prompts = [one.tolist() for one in answered.get(("tokens", "prompt"), as_list=True)]
        served = Counter(answered["generation", "replica_id"])
    counted = live_engines.counts(service) - before
    asked = [
        Conversation(at, at // SAMPLES, tuple(prompt), (), (num_tokens,), 0)
        for at, prompt in enumerate(prompts)
    ]
    return {
        "wall_time": wall_s,
        "hit_rate": counted.cached / counted.prompt,
        "prefilled_over_once": counted.computed / once_tokens(asked),
        "prefilled_over_least": counted.computed
        / least_tokens(asked, live_engines.block_size(service)),
        "imbalance": max(served.values()) * service.num_replicas / len(prompts),
        "preemptions": counted.preempted,
    }

"""Who routes in the live benchmark: this library, TorchRL's rule as shipped, and taking turns.

Every system sends each request through ``AsyncVLLM.agenerate`` of one and the same service, so that
nothing differs but the replica that was chosen. :func:`run_wrapped` goes through ``vLLMWrapper``,
which finds in TorchRL's data which rows belong together.
"""

from __future__ import annotations

import asyncio
import logging
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
    from collections.abc import Callable, Iterator

    from tensordict import TensorDictBase

    from torchrl_vllm_sync import AsyncVLLM

# How long a request may take from its call to the ledger, before the next decision is made anyway.
MOST_SENDING_S = 0.02


class System:
    """One way to route, over a service whose balancer it may replace."""

    def __init__(self, service: AsyncVLLM) -> None:
        self.service = service
        self.decision_s: list[float] = []

    async def answer(self, conversation: Conversation, prompt: list[int], params: Any) -> Any:
        """VLLM's output for one turn of a conversation."""
        raise NotImplementedError

    def end(self, conversation: Conversation) -> None:
        """A conversation has had its last turn."""

    def time_decisions(self, prompts: list[tuple[Conversation, list[int]]]) -> list[float]:
        """Seconds of each decision; those of the run, or of another pass over idle replicas."""
        del prompts
        return self.decision_s


class Balanced(System):
    """This library's own balancer."""

    def __init__(
        self, service: AsyncVLLM, strategy: str | None = None, *, keyed: bool = False
    ) -> None:
        super().__init__(service)
        self._strategy, self._keyed = strategy, keyed
        service.create_load_balancer(strategy)

    def _keys(self, conversation: Conversation) -> dict[str, Any]:
        if not self._keyed:
            return {}
        return {"session_id": conversation.session, "group_id": conversation.group}

    async def answer(self, conversation: Conversation, prompt: list[int], params: Any) -> Any:
        return await self.service.agenerate(prompt, params, **self._keys(conversation))

    def end(self, conversation: Conversation) -> None:
        if self._keyed:
            self.service.release_sessions(conversation.session)

    def time_decisions(self, prompts: list[tuple[Conversation, list[int]]]) -> list[float]:
        """Decides and gives back once more for each prompt, with a balancer of its own."""
        balancer = self.service.create_load_balancer(self._strategy)
        for conversation, prompt in prompts:
            keys = self._keys(conversation)
            begin = time.perf_counter()
            reservation = balancer.reserve(prompt, **keys)
            self.decision_s.append(time.perf_counter() - begin)
            with reservation:
                pass
        return self.decision_s


class TorchRLRule(System):
    """The ``LoadBalancer`` of the installed TorchRL, asked in line with the requests.

    It is made from the service as ``create_load_balancer`` does there, so that each decision asks
    all replicas for their requests, and its check for overload fails by itself and says "no" (it
    reads a name that is not set). Its methods to ask are TorchRL's own.
    """

    def __init__(self, service: AsyncVLLM, *, wrapped: bool = False) -> None:
        from torchrl.modules.llm.backends.vllm.vllm_async import AsyncVLLM as TorchRLService
        from torchrl.modules.llm.backends.vllm.vllm_async import LoadBalancer

        super().__init__(service)
        service.create_load_balancer()  # counts only
        # TorchRL warns at each failed check.
        logging.getLogger("torchrl").setLevel(logging.ERROR)
        face: Any = object.__new__(TorchRLService)
        face.actors, face._launched = service.actors, True
        self._face, self._wrapped = face, wrapped
        self._balancer = LoadBalancer(face)
        self._sending = asyncio.Lock()

    def choose(self, prompt: list[int]) -> int:
        begin = time.perf_counter()
        key: Any = prompt
        if self._wrapped:
            key = self._face._extract_single_prompt_for_routing({"prompt_token_ids": prompt})
        index = self._balancer.select_actor(prompt=key)
        self.decision_s.append(time.perf_counter() - begin)
        return index

    async def answer(self, conversation: Conversation, prompt: list[int], params: Any) -> Any:
        """Decides and sends; the next decision is made when the request is on its way."""
        del conversation
        async with self._sending:
            index = self.choose(prompt)
            sent = self.service.load.total_in_flight + 1
            answer = asyncio.ensure_future(
                self.service.agenerate(prompt, params, actor_index=index)
            )
            if self._wrapped:  # which reads the engines' own counts
                deadline, load = time.perf_counter() + MOST_SENDING_S, self.service.load
                while load.total_in_flight < sent and time.perf_counter() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        return await answer


SYSTEMS: dict[str, Callable[[AsyncVLLM], System]] = {
    "ours": lambda service: Balanced(service, keyed=True),
    "ours, no keys": lambda service: Balanced(service),
    "torchrl": TorchRLRule,
    "torchrl, wrapper": lambda service: TorchRLRule(service, wrapped=True),
    "round-robin": lambda service: Balanced(service, "round-robin"),
}
"""Makers of each system, by its name in the record; each begins with nothing remembered."""

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

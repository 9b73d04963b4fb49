"""AsyncVLLM beside the engine behind it, and beside one Ray call for each prompt.

All systems use one and the same engine, one after the other in every repetition, on prompts that
it has not seen. The bare engine is called inside its own process, by as many coroutines as there
are prompts, and nothing of its outputs leaves that process; ``AsyncVLLM`` and the calls for each
prompt bring every output to this one as vLLM's ``RequestOutput``, and ``vLLMWrapper`` brings them
as TorchRL's rows.

``python -m benchmarks.dispatch`` takes minutes, ``--smoke`` seconds; without ``--model`` the engine
runs a tiny random checkpoint, so that everything but the model itself weighs most.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.modules.llm.policies import Tokens

from benchmarks.live_engines import local_ray, start
from benchmarks.record import Recorder, parser_of, take_turns
from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm import SamplingParams

    from torchrl_vllm_sync import AsyncVLLM

PROMPT_TOKENS = 32


def own_actor() -> type:
    """The replica's class with one more method: the bare engine, called where it lives."""
    from torchrl_vllm_sync.engine.actor import EngineActor

    class BareActor(EngineActor):
        async def bare(self, prompts: list[list[int]], params: SamplingParams, name: str) -> int:
            async def run(index: int, ids: list[int]) -> int:
                last = None
                outputs = self.engine.generate({"prompt_token_ids": ids}, params, f"{name}-{index}")
                async for output in outputs:
                    last = output
                assert last is not None
                return len(last.outputs[0].token_ids)

            return sum(await asyncio.gather(*(run(*one) for one in enumerate(prompts))))

    return BareActor


class Bench:
    """The systems over one service of one replica."""

    def __init__(self, service: AsyncVLLM, vocab_size: int) -> None:
        self.service, self.actor = service, service.actors[0]
        self.generator = np.random.default_rng(0)
        self.vocab_size, self.tokenizer = vocab_size, ray.get(self.actor.get_tokenizer.remote())
        self.round = 0

    def prompts(self, num: int) -> list[list[int]]:
        """Random ids, so that no prefix is cached."""
        return self.generator.integers(5, self.vocab_size, (num, PROMPT_TOKENS)).tolist()

    def async_vllm(self, prompts: list[list[int]], params: SamplingParams) -> int:
        outputs = self.service.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def wrapper(self, prompts: list[list[int]], params: SamplingParams) -> int:
        """The same as a TorchRL policy's rows, of unequal length."""
        policy = vLLMWrapper(
            self.service,
            tokenizer=self.tokenizer,
            input_mode="tokens",
            pad_output=False,
            return_log_probs=params.logprobs is not None,
            generate_kwargs={"max_tokens": params.max_tokens, "ignore_eos": True},
        )
        tokens = Tokens(prompt=torch.tensor(prompts), batch_size=len(prompts))
        rows = policy(TensorDict(tokens=tokens, batch_size=len(prompts)))
        return sum(len(one) for one in rows.get(("tokens", "response"), as_list=True))

    def bare(self, prompts: list[list[int]], params: SamplingParams) -> int:
        """The engine alone; only the number of tokens comes back."""
        self.round += 1
        return ray.get(self.actor.bare.remote(prompts, params, f"bare-{self.round}"))

    def bare_final(self, prompts: list[list[int]], params: SamplingParams) -> int:
        """The same with vLLM's cheapest kind of output."""
        from vllm.sampling_params import RequestOutputKind

        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return self.bare(prompts, params)

    def call_a_prompt(self, prompts: list[list[int]], params: SamplingParams) -> int:
        """As TorchRL's AsyncVLLM sends a batch."""
        outputs = ray.get([self.actor.generate.remote(ids, params) for ids in prompts])
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def seconds(
        self, num_prompts: int, params: SamplingParams, repetitions: int
    ) -> dict[str, list[float]]:
        """Seconds of each system in each repetition."""
        calls = {
            "AsyncVLLM": self.async_vllm,
            "vLLMWrapper over AsyncVLLM": self.wrapper,
            "bare AsyncLLM, every step": self.bare,
            "bare AsyncLLM, final output only": self.bare_final,
            "one Ray call a prompt": self.call_a_prompt,
        }
        prompts: list[list[int]] = []

        def ask() -> None:
            prompts[:] = self.prompts(num_prompts)

        def run(call: Callable[[list[list[int]], SamplingParams], int]) -> None:
            assert call(prompts, params) == num_prompts * params.max_tokens

        systems = {name: partial(run, call) for name, call in calls.items()}
        return take_turns(systems, repetitions, between=ask)


def main(argv: list[str] | None = None) -> Path:
    from vllm import SamplingParams

    parser = parser_of(__doc__, "a few short requests")
    parser.add_argument("--model", help="a checkpoint; a tiny random one if left out")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--max-num-seqs", type=int, help="of the engine; vLLM's if left out")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args(argv)
    sizes, num_tokens = ([8], 4) if arguments.smoke else (arguments.prompts, arguments.tokens)
    recorder = Recorder("dispatch")
    set_list_to_stack(True).set()
    with local_ray(), tempfile.TemporaryDirectory() as directory:
        model = arguments.model or str(make_tiny_checkpoint(directory))
        engine = {"max_num_seqs": arguments.max_num_seqs} if arguments.max_num_seqs else {}
        with start(model, actor_class=own_actor(), max_model_len=1024, **engine) as service:
            vocab_size = ray.get(service.actors[0].describe.remote()).vocab_size
            bench = Bench(service, vocab_size)
            for num_prompts, log_probs in itertools.product(sizes, (None, 1)):
                params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=log_probs)
                case = f"{num_prompts} prompts x {num_tokens} tokens" + (
                    ", log-probs" if log_probs else ""
                )
                samples = bench.seconds(
                    num_prompts, params, 1 if arguments.smoke else arguments.repetitions
                )
                amounts = {"tokens": num_prompts * num_tokens, "requests": num_prompts}
                for system, (of, amount) in itertools.product(samples, amounts.items()):
                    recorder.add(
                        case=case,
                        system=system,
                        metric=f"throughput in {of}",
                        unit=f"{of}/s",
                        samples=[amount / one for one in samples[system]],
                    )
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])

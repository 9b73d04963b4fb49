"""Where the seconds of a GRPO step go: engine, service, policy, collector, advantage, push.

Each system does what the one before does and something more, on the same engine: the engine by
itself, in its own process; ``AsyncVLLM.generate``; ``vLLMWrapper``, histories in and TorchRL's rows
out; ``LLMCollector`` into a replay buffer; the same with ``MCAdvantage``. The push comes after.

``python -m benchmarks.grpo_step`` takes minutes, ``--smoke`` half a minute; without ``--model``
the engine runs a tiny random checkpoint, so that everything but the model itself weighs most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.envs.transforms import Transform
from torchrl.objectives.llm.grpo import MCAdvantage

from benchmarks.dispatch import own_actor
from benchmarks.record import Recorder
from torchrl_vllm_sync import AsyncVLLM, vLLMWrapper
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tensordict import TensorDictBase

GROUP = 16


class Length(Transform):
    """Rewards each answer by its number, so that the rows of a group differ."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = [float(row["tokens", "response"][0]) for row in tensordict.unbind(0)]
        shape = (*next_tensordict.batch_size, 1, 1)
        next_tensordict["reward"] = next_tensordict["done"].new_tensor(rewards).float().view(shape)
        return next_tensordict


def questions() -> Iterator[dict[str, list[str]]]:
    """Endless, each another."""
    number = 0
    while True:
        number += 1
        yield {"query": [f"What is {number} + {number % 89}?"]}


class Steps:
    """The systems over one service of one replica."""

    def __init__(self, service: AsyncVLLM, num_rows: int, num_tokens: int) -> None:
        from vllm import SamplingParams

        self.service, self.actor, self.num_rows = service, service.actors[0], num_rows
        self.tokenizer: Any = ray.get(self.actor.get_tokenizer.remote())
        self.params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=1)
        self.round, self.asked = 0, list[list[int]]()
        self.env = self.make_env()
        self.policy = vLLMWrapper(
            service,
            tokenizer=self.tokenizer,
            input_mode="history",
            chat_template=self.tokenizer.chat_template,
            generate_kwargs={"max_tokens": num_tokens, "ignore_eos": True},
            pad_output=False,
            return_log_probs=True,
        )

    def make_env(self) -> ChatEnv:
        """Chats of one turn, in groups."""
        return ChatEnv.from_dataloader(
            dataloader=questions(),
            batch_size=(self.num_rows,),
            repeats=GROUP,
            tokenizer=self.tokenizer,
            input_mode="history",
        )

    def prompts(self) -> list[list[int]]:
        texts = [f"What is {self.round} + {at // GROUP}?" for at in range(self.num_rows)]
        return [self.tokenizer.encode(one) for one in texts]

    def bare(self) -> None:
        """The engine by itself."""
        from vllm.sampling_params import RequestOutputKind

        params = self.params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        ray.get(self.actor.bare.remote(self.asked, params, f"bare-{self.round}"))

    def generate(self) -> None:
        """Requests and outputs."""
        outputs = self.service.generate(self.asked, self.params, use_tqdm=False)
        assert all(output.finished for output in outputs)

    def wrapper(self) -> None:
        """Histories in, rows out."""
        assert len(self.policy(self.env.reset())) == self.num_rows

    def collect(self, transform: Transform | None = None) -> Callable[[], None]:
        """A collector into a buffer."""
        buffer = ReplayBuffer(
            storage=LazyStackStorage(self.num_rows),
            sampler=SamplerWithoutReplacement(),
            transform=transform,
            batch_size=self.num_rows,
        )
        env = self.make_env().append_transform(Length()).append_transform(StepCounter(max_steps=1))
        rows = iter(
            LLMCollector(
                env,
                policy=self.policy,
                replay_buffer=buffer,
                dialog_turns_per_batch=self.num_rows,
                total_dialog_turns=-1,
            )
        )

        def step() -> None:
            next(rows)
            assert len(buffer) == self.num_rows
            buffer.empty()

        return step

    def seconds(self, repetitions: int, push: Callable[[], object]) -> dict[str, list[float]]:
        """Seconds of each system in each repetition, after one that does not count."""
        systems: dict[str, Callable[[], object]] = {
            "bare AsyncLLM": self.bare,
            "AsyncVLLM.generate": self.generate,
            "vLLMWrapper": self.wrapper,
            "LLMCollector": self.collect(),
            "LLMCollector, MCAdvantage": self.collect(MCAdvantage(grpo_size=GROUP)),
            "push_weights": push,
        }
        samples: dict[str, list[float]] = {name: [] for name in systems}
        for repetition in range(repetitions + 1):
            for name, run in systems.items():
                self.round += 1
                self.asked = self.prompts()
                begin = time.perf_counter()
                run()
                if repetition:
                    samples[name].append(time.perf_counter() - begin)
        return samples


def main(argv: list[str] | None = None) -> Path:
    """Runs the benchmark and returns the path of its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one group of short answers")
    parser.add_argument("--model", help="a checkpoint; a tiny random one if left out")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    arguments = parser.parse_args(argv)
    sizes, num_tokens = ([GROUP], 4) if arguments.smoke else (arguments.rows, arguments.tokens)
    recorder = Recorder("grpo_step")
    set_list_to_stack(True).set()
    ray.init(address="local", include_dashboard=False, logging_level="error")
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or str(make_tiny_checkpoint(directory))
        engine = {"max_model_len": 1024, "max_num_seqs": arguments.max_num_seqs, "verbose": False}
        with AsyncVLLM.from_pretrained(
            model, actor_class=own_actor(), num_cpus_per_replica=0, **engine
        ) as service:
            trained = load_tiny_model(model)
            for num_rows in sizes:
                steps = Steps(service, num_rows, num_tokens)
                samples = steps.seconds(
                    1 if arguments.smoke else arguments.repetitions,
                    lambda: service.push_weights(trained),
                )
                report(recorder, f"{num_rows} rows x {num_tokens} tokens", samples, num_rows)
    ray.shutdown()
    path = recorder.write(smoke=arguments.smoke)
    print(path)
    return path


def report(recorder: Recorder, case: str, samples: dict[str, list[float]], num_rows: int) -> None:
    """Adds the samples of one case to the record, and prints their medians."""
    for system, seconds in samples.items():
        recorder.add(case=case, system=system, metric="time", unit="s", samples=seconds)
        median = statistics.median(seconds)
        print(f"{case:24} {system:28} {median:8.3f} s, {1e3 * median / num_rows:8.3f} ms a row")


if __name__ == "__main__":
    main(sys.argv[1:])

"""TRL's ``GRPOTrainer`` with vLLM in its own process, one step at a time: a peer of the whole step.

Read in TRL 1.16 (``trl/trainer/grpo_trainer.py``, ``trl/generation/vllm_generation.py``). It gets
the model, prompts, reward and sizes of the others, and their engine's options. What it does by
default beyond their work is switched off: gradient checkpointing, clipping, and a second forward
pass of all rows, which corrects for the engine's probabilities. Its sleep mode is switched on where
engines sleep: a step begins asleep, and TRL has its engine sleep again after sampling.
"""

from __future__ import annotations

import itertools
import queue
import re
import statistics
import tempfile
import threading
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayTaskError

from benchmarks.phases import Clock
from benchmarks.sync_actors import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.grpo_systems import Case

TIMEOUT_S = 240  # of a launch, and of a step
KV_CACHE_BYTES = 12 * 2**30


def questions() -> Iterator[dict[str, list[str]]]:
    """Endless, each another, as ``ChatEnv`` takes them."""
    for number in itertools.count(1):
        yield {"query": [f"What is {number} + {number % 89}?"]}


def score(prompts: Iterable[str], answers: Iterable[str], **_: Any) -> list[float]:
    """1 for the right sum, and less for a long answer, so that the rows of a group differ."""
    scores = []
    for prompt, answer in zip(prompts, answers, strict=True):
        numbers = re.search(r"What is (\d+) \+ (\d+)", prompt)
        assert numbers is not None, prompt
        right = str(sum(map(int, numbers.groups())))
        scores.append(float(right in answer) - len(answer) / 1000)
    return scores


class TRL:
    """The trainer in a process with a GPU of its own; the only one, if ``alone``.

    If its engine ``sleeps``, it shares the only one: an actor that asks Ray for none sees it.
    """

    name = "trl"

    def __init__(
        self,
        checkpoint: str,
        problems: list[dict[str, list[str]]],
        *,
        first_step: bool = True,
        alone: bool = False,
        sleeps: bool = False,
        **settings: Any,
    ) -> None:
        self.version = metadata.version("trl")  # raises where there is none
        num_gpus = torch.cuda.device_count()
        if num_gpus == 1 and not (alone or sleeps):
            raise RuntimeError("the trainer needs another GPU than the engine's")
        # Of several it sees its own alone: it refuses more.
        self.trainer: Any = spawn(Trainer, num_gpus=int(num_gpus > 1), sees_all=num_gpus < 2)
        try:
            beginning = self.trainer.begin.remote(checkpoint, problems, sleeps=sleeps, **settings)
            ray.get(beginning, timeout=TIMEOUT_S)
            if first_step:  # if it fails, then now, rather than among measurements of others
                self.step()
        except RayTaskError as error:
            self.close()
            raise error.cause from error
        except BaseException:
            self.close()
            raise

    def parts(self) -> dict[str, Any]:
        return {}

    def step(self) -> dict[str, float]:
        return ray.get(self.trainer.step.remote(), timeout=TIMEOUT_S)

    def sampled(self) -> tuple[float, int]:
        """Mean reward and number of tokens since the last call of this method."""
        return ray.get(self.trainer.sampled.remote(), timeout=TIMEOUT_S)

    def evaluate(self, problems: list[dict[str, list[str]]]) -> float:
        """Mean score of greedy answers, by the engine with the trainer's weights."""
        return ray.get(self.trainer.evaluate.remote(problems), timeout=TIMEOUT_S)

    def close(self) -> None:
        ray.kill(self.trainer)


class Trainer:
    """Its process: ``train`` runs in a thread, and waits before each optimizer step to be asked."""

    def __init__(self) -> None:
        self.clock, self.asked, self.found = Clock(), queue.Queue(), queue.Queue()
        self.rewards: list[float] = []
        self.num_tokens = 0

    def begin(
        self,
        checkpoint: str,
        problems: list[dict[str, list[str]]],
        *,
        case: Case,
        learning_rate: float,
        engine: dict[str, Any],
        sampling: dict[str, Any],
        sleeps: bool,
        max_norm: float = 0.0,
        score: Callable[..., list[float]] = score,
        over: str = "text",
    ) -> None:
        """Makes the trainer, and has it wait for the first step.

        ``score`` gets questions, answers (their token ids, if ``over="ids"``) and what else the
        problems have.
        """
        import pyarrow as pa  # pyright: ignore[reportMissingImports]
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
        from trl.generation import vllm_generation  # pyright: ignore[reportMissingImports]

        from benchmarks.grpo_systems import model_of  # which imports this file

        cuda = torch.cuda.is_available()
        # GRPOConfig has no way to say how the engine runs the model.
        shared = ("load_format", "compilation_config", "block_size", "dtype")
        ours = {name: engine[name] for name in shared if name in engine}
        ours["kv_cache_memory_bytes"] = engine.get("kv_cache_memory_bytes", KV_CACHE_BYTES)
        vllm_generation.LLM = partial(vllm_generation.LLM, **ours)

        clock, asked, found = self.clock, self.asked, self.found

        class OneByOne(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                while (job := asked.get()) is not None:
                    found.put(job())
                clock.take()
                clock.enter("other")

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                clock.enter("optimizer")

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                clock.leave(settle=True)

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.leave(settle=True)
                found.put(clock.take())

        columns = [name for name in problems[0] if name != "query"]

        def rated(queries: list[str], answers: list[str], ids: list[Any], of: Any) -> list[float]:
            given = ids if over == "ids" else answers
            return score(queries, given, **{name: of[name] for name in columns})

        def reward(
            prompts: list[Any], completions: list[Any], completion_ids: list[Any], **of: Any
        ) -> list[float]:
            said = [[chat[-1]["content"] for chat in chats] for chats in (prompts, completions)]
            rewards = rated(*said, completion_ids, of)
            self.rewards += rewards
            self.num_tokens += sum(map(len, completion_ids))
            return rewards

        def greedy(problems: list[dict[str, list[str]]]) -> float:
            from vllm import SamplingParams

            self.trainer.vllm_generation.sync_weights()
            queries = [one["query"][0] for one in problems]
            answers = self.trainer.vllm_generation.llm.chat(
                [[{"role": "user", "content": one}] for one in queries],
                SamplingParams(max_tokens=case.tokens, temperature=0.0),
                use_tqdm=False,
            )
            firsts = [one.outputs[0] for one in answers]
            of = {name: [one[name][0] for one in problems] for name in columns}
            ids = [list(one.token_ids) for one in firsts]
            return statistics.fmean(rated(queries, [one.text for one in firsts], ids, of))

        self.greedy = greedy
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=100_000,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=case.minibatch,
            gradient_accumulation_steps=case.rows // case.minibatch,
            num_generations=case.group,
            max_completion_length=case.tokens,
            generation_kwargs=sampling,
            shuffle_dataset=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=engine["max_model_len"],
            vllm_gpu_memory_utilization=0.1,  # the cache's size is given
            vllm_enable_sleep_mode=sleeps and cuda,
            vllm_importance_sampling_correction=False,
            gradient_checkpointing=False,
            max_grad_norm=max_norm,
            weight_decay=0.01,  # torch's
            bf16=cuda,
            use_cpu=not cuda,
            report_to="none",
            save_strategy="no",
            logging_steps=1_000_000,
            disable_tqdm=True,
        )
        self.trainer: Any = GRPOTrainer(
            model=model_of(checkpoint),
            reward_funcs=reward,
            args=config,
            # Without a name of ours it pickles the table's type, which not every pyarrow allows.
            train_dataset=Dataset(
                pa.Table.from_pylist(
                    [
                        {"prompt": [{"role": "user", "content": one["query"][0]}]}
                        | {name: one[name][0] for name in columns}
                        for one in problems
                    ]
                ),
                fingerprint="sums",
            ),
            processing_class=AutoTokenizer.from_pretrained(checkpoint, padding_side="left"),
            callbacks=[OneByOne()],
        )
        trainer = self.trainer
        clock.wrap(trainer, "_tokenize_prompts", "encode")
        clock.wrap(trainer.vllm_generation, "generate", "generate")
        clock.wrap(trainer.vllm_generation, "sync_weights", "push", settle=True)
        clock.wrap(trainer.vllm_generation.llm, "wake_up", "wake", settle=True)  # within these two
        clock.wrap(trainer.vllm_generation.llm, "sleep", "sleep", settle=True)
        clock.wrap(trainer, "_generate", "rows")
        clock.wrap(trainer, "_calculate_rewards", "reward")
        clock.wrap(trainer, "_generate_and_score_completions", "advantage", settle=True)
        clock.wrap(trainer, "compute_loss", "log-probabilities", settle=True)
        clock.wrap(trainer.accelerator, "backward", "backward", settle=True)
        clock.thread = threading.Thread(target=self.train, daemon=True)
        clock.thread.start()

    def train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:  # noqa: BLE001  whoever waits for the step gets it
            self.found.put(error)

    def step(self) -> dict[str, float]:
        return self.ask(None)

    def evaluate(self, problems: list[dict[str, list[str]]]) -> float:
        """Mean score of greedy answers."""
        return self.ask(partial(self.greedy, problems))

    def sampled(self) -> tuple[float, int]:
        """Mean reward and number of tokens since the last call."""
        found = statistics.fmean(self.rewards), self.num_tokens
        self.rewards, self.num_tokens = [], 0
        return found

    def ask(self, job: Callable[[], Any] | None) -> Any:
        """Has the trainer's thread do something between two steps, or take one."""
        self.asked.put(job)
        found = self.found.get(timeout=TIMEOUT_S)
        if isinstance(found, BaseException):
            raise found
        return found

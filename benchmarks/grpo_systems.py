"""The systems of ``grpo_step`` and ``learning_curves``, and what they share; a class for each."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import ray
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.envs.transforms import Transform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.live_engines import engine_options
from benchmarks.peers.trl_grpo import TRL, questions, score
from tests.engine.paced import DiscardingCollector
from torchrl_vllm_sync import (
    AsyncVLLM,
    GenerationStatistics,
    GroupAdvantage,
    RolloutCollector,
    RolloutCorrection,
    RolloutStorage,
    TextReward,
    TrainerPolicy,
    WeightUpdater,
    vLLMWrapper,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tensordict import TensorDictBase

    from benchmarks.phases import Clock
    from torchrl_vllm_sync import WeightTransport
    from torchrl_vllm_sync.weights.auto import TransportName

GROUP = 16
LEARNING_RATE = 1e-6
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A step's size."""

    model: str  # a shape, or tiny
    rows: int
    tokens: int  # of each answer
    minibatch: int = 64
    group: int = GROUP


def has_weights(checkpoint: Path | str) -> bool:
    return any(Path(checkpoint).glob("*.safetensors"))


def model_of(checkpoint: Path | str) -> Any:
    """The model in float32, with random weights if there are no others."""
    if has_weights(checkpoint):
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint)).float()


def options_of(checkpoint: Path | str, num_rows: int) -> dict[str, Any]:
    """The engine's arguments."""
    options = engine_options(
        execution="graphs", max_model_len=MAX_MODEL_LEN, max_num_seqs=max(num_rows, 64)
    )
    if torch.cuda.device_count() == 1:
        options["gpu_memory_utilization"] = 0.3  # the trainer has the rest
    return options | {"load_format": "auto" if has_weights(checkpoint) else "dummy"}


class Learner:
    """The trainer's model: float32, one optimizer step for all minibatches.

    Gradients are clipped to ``max_norm``, if there is one.
    """

    def __init__(
        self,
        checkpoint: Path,
        clock: Clock,
        learning_rate: float = LEARNING_RATE,
        max_norm: float | None = None,
    ) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if cuda:
            self.device = torch.device("cuda", torch.cuda.device_count() - 1)
            torch.cuda.set_device(self.device)
        self.checkpoint, self.clock, self.max_norm = checkpoint, clock, max_norm
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        with torch.device(self.device):
            self.model: Any = model_of(checkpoint).to(self.device).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, fused=cuda)
        self.autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=cuda)

    def step(self, batches: Iterable[Any], loss_of: Callable[[Any], torch.Tensor]) -> None:
        """Takes one optimizer step on the mean of the minibatches' losses."""
        num_batches = 0
        for batch in batches:
            num_batches += 1
            with self.clock.phase("log-probabilities", settle=True), self.autocast():
                loss = loss_of(batch)
            with self.clock.phase("backward", settle=True):
                loss.backward()
        with self.clock.phase("optimizer", settle=True):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= num_batches
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, sampled and pushed how, and rewarded by what."""

    questions: Iterator[dict[str, list[str]]]
    sampling: dict[str, Any]
    reward: Callable[[], Transform] | None = None  # None: each system's own
    transport: TransportName | WeightTransport = "auto"


class Bench:
    """What the systems of one case share: service, learner, task, push.

    Without a task it is sums for ever, answered by as many tokens as there may be, and each system
    rewards them by its own means.
    """

    def __init__(
        self, service: AsyncVLLM, learner: Learner, case: Case, task: Task | None = None
    ) -> None:
        self.service, self.actor, self.case = service, service.actors[0], case
        self.learner, self.clock, self.tokenizer = learner, learner.clock, learner.tokenizer
        self.task = task or Task(questions(), {"ignore_eos": True})
        # One for all: a service meets every new one, which takes more than a second.
        self.updater = WeightUpdater(service, source=learner.model, transport=self.task.transport)

    def asked(self) -> list[list[int]]:
        """Token ids of prompts that the engine has not seen."""
        case = self.case
        texts = [next(self.task.questions)["query"][0] for _ in range(case.rows // case.group)]
        chats = [[{"role": "user", "content": one}] for one in texts for _ in range(case.group)]
        rendered = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def params(self, logprobs: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=self.case.tokens, ignore_eos=True, logprobs=logprobs)

    def policy(self, service: AsyncVLLM | None = None, **sampling: Any) -> vLLMWrapper:
        """The service, or another, as a policy that samples as the task says, or otherwise."""
        return vLLMWrapper(
            service or self.service,
            tokenizer=self.tokenizer,
            input_mode="history",
            chat_template=self.tokenizer.chat_template,
            generate_kwargs={"max_tokens": self.case.tokens} | self.task.sampling | sampling,
            pad_output=False,
            return_log_probs=True,
        )


class System:
    """One of those that take turns."""

    name: str

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def parts(self) -> dict[str, Callable[[list[list[int]]], object]]:
        """Calls to be timed by themselves, given prompts."""
        return {}

    def step(self) -> dict[str, float]:
        """Takes a step; returns its seconds by phase."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what it started."""


class Bound(System):
    """What the models take."""

    name = "bound"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.names = itertools.count()

    def parts(self) -> dict[str, Callable[[list[list[int]]], object]]:
        return {
            "bare": partial(self.generate, logprobs=0),
            "bare, no log-probabilities": partial(self.generate, logprobs=None),
        }

    def generate(self, asked: list[list[int]], *, logprobs: int | None) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = self.bench.params(logprobs)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        name = f"bare-{id(self)}-{next(self.names)}"
        count = ray.get(self.bench.actor.bare.remote(asked, params, name), timeout=600)
        assert count == len(asked) * self.bench.case.tokens

    def step(self) -> dict[str, float]:
        clock, case, asked = self.bench.clock, self.bench.case, self.bench.asked()
        clock.take()
        with clock.phase("other"):
            with clock.phase("generate"):
                self.generate(asked, logprobs=None)
            starts = range(0, len(asked), case.minibatch)
            batches = (self.batch(asked[at : at + case.minibatch]) for at in starts)
            self.bench.learner.step(batches, self.loss)
        return clock.take()

    def batch(self, asked: list[list[int]]) -> dict[str, torch.Tensor]:
        """Padded prompts, and any answers."""
        learner = self.bench.learner
        padded = learner.tokenizer.pad(
            {"input_ids": asked}, padding_side="left", return_tensors="pt"
        )
        ids, mask = padded["input_ids"], padded["attention_mask"]
        size = (len(asked), self.bench.case.tokens)
        answers = torch.randint(5, len(learner.tokenizer), size)
        return {
            "input_ids": torch.cat([ids, answers], 1).to(learner.device),
            "attention_mask": torch.cat([mask, torch.ones_like(answers)], 1).to(learner.device),
        }

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.bench.learner.model(**batch, use_cache=False).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1)
        tokens = batch["input_ids"][:, 1:, None]
        return -log_probs.gather(-1, tokens)[:, -self.bench.case.tokens :].mean()


class Reward(Transform):
    """The rewards, as a transform of TorchRL's writes them."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict.unbind(0)
        scores = score([row["query"] for row in rows], [row["text", "response"] for row in rows])
        shape = (*next_tensordict.batch_size, 1, 1)
        next_tensordict["reward"] = torch.tensor(scores).view(shape)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded(
            shape=torch.Size((*reward_spec.shape, 1, 1)), dtype=torch.float32
        )
        return reward_spec


class TorchRLClasses(System):
    """TorchRL's classes over this library's service, policy and push."""

    name = "torchrl-classes"
    collector: ClassVar[Any] = LLMCollector
    advantage: ClassVar[Any] = MCAdvantage
    storage: ClassVar[Any] = LazyStackStorage
    reward: ClassVar[Any] = Reward

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        case, clock, self.updater = bench.case, bench.clock, bench.updater
        self.policy = bench.policy()
        clock.wrap(self.policy, "forward", "encode")  # which generate turns into rows
        advantage = self.advantage(grpo_size=case.group)
        reward = (bench.task.reward or self.reward)()
        self.buffer = ReplayBuffer(
            storage=self.storage(case.rows),
            sampler=SamplerWithoutReplacement(),
            transform=advantage,
            batch_size=case.minibatch,
        )
        clock.wrap(self.buffer, "extend", "buffer")
        clock.wrap(advantage, "_inv_call", "advantage")
        clock.wrap(reward, "_step", "reward")
        self.collecting = self.collector(
            self.make_env().append_transform(reward).append_transform(StepCounter(max_steps=1)),
            policy=self.policy,
            replay_buffer=self.buffer,
            dialog_turns_per_batch=case.rows,
            total_dialog_turns=-1,
        )
        self.rollouts = iter(self.collecting)
        self.loss_fn = GRPOLoss(
            self.actor(), entropy_bonus=False, masking_strategy="sft", device=bench.learner.device
        )
        self.ess: list[torch.Tensor] = []
        self.rewards: list[torch.Tensor] = []
        self.ages = Counter[int]()  # rows by versions between sampling and training

    def make_env(self) -> ChatEnv:
        """Chats of one turn, in groups."""
        return ChatEnv.from_dataloader(
            dataloader=cast("Any", self.bench.task.questions),
            batch_size=(self.bench.case.rows,),
            repeats=self.bench.case.group,
            tokenizer=self.bench.tokenizer,
            input_mode="history",
        )

    def actor(self) -> Any:
        return TransformersWrapper(
            self.bench.learner.model,
            tokenizer=self.bench.tokenizer,
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            pad_output=False,
            pad_model_input=True,
            device=self.bench.learner.device,
        )

    def step(self) -> dict[str, float]:
        return self.advance()

    def advance(self) -> dict[str, float]:
        """Takes one step of training; returns its seconds by phase."""
        clock, case = self.bench.clock, self.bench.case
        self.ess.clear()
        self.rewards.clear()
        clock.take()
        with clock.phase("other"):
            with clock.phase("environment"):
                next(self.rollouts)
            assert len(self.buffer) == case.rows
            self.bench.learner.step(self.minibatches(), self.loss)
            with clock.phase("push", settle=True):
                self.updater.push_weights()
        self.buffer.empty()
        return clock.take()

    def settle(self) -> None:
        """Waits until nothing is sampled any more."""

    def close(self) -> None:
        self.collecting.shutdown()

    def minibatches(self) -> Iterator[Any]:
        for _ in range(self.bench.case.rows // self.bench.case.minibatch):
            with self.bench.clock.phase("sample", settle=True):
                batch = self.buffer.sample().to(self.bench.learner.device)
            yield batch

    def loss(self, batch: Any) -> torch.Tensor:
        found = self.loss_fn(batch)
        self.ess.append(found.ESS.detach())
        self.rewards.append(batch["next", "reward"].mean())
        self.ages.update((self.bench.service.weight_version - batch["policy_version"]).tolist())
        return found.loss_objective


class Ours(TorchRLClasses):
    """This library's classes in the places of TorchRL's."""

    name = "ours"
    collector: ClassVar[Any] = RolloutCollector
    advantage: ClassVar[Any] = GroupAdvantage
    storage: ClassVar[Any] = RolloutStorage
    reward: ClassVar[Any] = partial(TextReward, score)

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        assert self.collecting.path == "columns", self.collecting.path
        bench.clock.wrap(self.policy, "answer_chats", "encode")

    def actor(self) -> Any:
        return TrainerPolicy(self.bench.learner.model)

    def parts(self) -> dict[str, Callable[[list[list[int]]], object]]:
        return {
            "service": partial(self.generate, logprobs=0),
            "service, no log-probabilities": partial(self.generate, logprobs=None),
            "wrapper": self.wrapper,
        }

    def generate(self, asked: list[list[int]], *, logprobs: int | None) -> None:
        params = self.bench.params(logprobs)
        outputs = self.bench.service.generate(asked, params, use_tqdm=False)
        assert all(output.finished for output in outputs)

    @cached_property
    def env(self) -> ChatEnv:
        """Another one, for the wrapper alone; it takes a question when it is made."""
        return self.make_env()

    def wrapper(self, _: list[list[int]]) -> None:
        assert len(self.policy(self.env.reset())) == self.bench.case.rows


class OneOff(Ours):
    """The same, where the next rows are sampled while the trainer works on these."""

    name = "ours, one step off"
    collector: ClassVar[Any] = partial(RolloutCollector, max_staleness=1)
    num_steps = 3

    def step(self) -> dict[str, float]:
        """The mean of several steps in a row; the one before them finds its rows sampled.

        Phases are the trainer's: ``wait`` is what it waits for rows.
        """
        self.advance()
        steps = [self.advance() for _ in range(self.num_steps)]
        self.settle()  # the engine is free for the next system
        phases = {name: statistics.fmean(one[name] for one in steps) for name in steps[0]}
        return {"wait": phases.pop("environment"), **phases}

    def settle(self) -> None:
        for _, rows in self.collecting._ahead:
            rows()

    parts = System.parts


class FourOff(OneOff):
    """The same, up to four batches ahead."""

    name = "ours, four steps off"
    collector: ClassVar[Any] = partial(RolloutCollector, max_staleness=4)


class Discarding(OneOff):
    """As many rows under way as one step off, of which what is older when it ends is dropped."""

    name = "ours, discarding"
    collector: ClassVar[Any] = partial(DiscardingCollector, max_staleness=1)

    def settle(self) -> None:
        wait(self.collecting._groups, timeout=600)


class Checked(Ours):
    """The same with all that notices wrong numbers: statistics, corrections, audited pushes.

    Phase ``correct`` is the correction, with the forward pass that the loss takes from it;
    statistics lie in ``buffer``, the audit in ``push``. Guards are on anyway.
    """

    name = "ours, checked"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        model, transport = bench.learner.model, bench.updater._transport
        self.buffer.append_transform(GenerationStatistics())
        self.correct = RolloutCorrection(
            self.loss_fn.actor_network, weigh="token", shared_pass=True, version=bench.service
        )
        audit = torch.cuda.is_available()  # vLLM repacks weights on CPUs
        self.updater = WeightUpdater(bench.service, model, transport=transport, audit=audit)

    def minibatches(self) -> Iterator[Any]:
        for batch in super().minibatches():
            with self.bench.clock.phase("correct", settle=True), self.bench.learner.autocast():
                corrected = self.correct(batch)
            yield corrected

    parts = System.parts


def trl(bench: Bench) -> TRL:
    """TRL's trainer, on the same sizes."""
    return TRL(
        str(bench.learner.checkpoint),
        [next(bench.task.questions) for _ in range(4096)],
        case=bench.case,
        learning_rate=LEARNING_RATE,
        engine=options_of(bench.learner.checkpoint, bench.case.rows),
        sampling=bench.task.sampling,
        sleeps=bench.service.colocated,
    )


SYSTEMS: dict[str, Callable[[Bench], Any]] = {
    "bound": Bound,
    "ours": Ours,
    "one-off": OneOff,
    "four-off": FourOff,
    "discarding": Discarding,
    "checked": Checked,
    "torchrl-classes": TorchRLClasses,
    "trl": trl,
}

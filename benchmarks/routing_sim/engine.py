"""One simulated engine: vLLM's own scheduler and prefix cache, without a model.

``Scheduler`` says which request computes how many tokens in a step, :class:`EngineCosts` how long
the step takes, and the trace which tokens come out of it. Steps between two events in which
requests only decode are all alike and taken at once: their time has a closed form, and the
scheduler catches up on their tokens in one go.

What is simplified: a step's effects appear when it ends (vLLM can schedule a step ahead), outputs
have the length the trace says, and there is neither speculation nor sliding-window attention.
"""

# ruff: noqa: TID253  vLLM is what this file runs

from __future__ import annotations

import functools
import math
import tempfile
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from benchmarks.routing_sim.policies import SimRequest
    from benchmarks.routing_sim.traces import Session, Turn

IDLE = math.inf  # when the step of an engine without requests ends

_MAX_MODEL_LEN = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What a step of an engine costs, and what fits into it.

    A step that computes ``prefill_tokens`` prompt tokens beside a batch of ``num_decoding``
    requests takes::

        base_step_s
        + per_sequence_s * num_decoding
        + per_context_token_s * (sum of the contexts of the decoding requests)
        + prefill_tokens / prefill_tokens_per_s
        + per_prefill_context_s2 * (sum over chunks of chunk tokens x mean context of its tokens)

    where ``num_decoding`` are the requests that compute one token, and the context of a token is
    the number of tokens before it.
    """

    base_step_s: float
    per_sequence_s: float
    per_context_token_s: float
    prefill_tokens_per_s: float
    per_prefill_context_s2: float
    token_budget: int = 2048
    max_num_seqs: int = 256
    num_kv_blocks: int
    block_size: int = 16


COSTS = EngineCosts(
    base_step_s=0.0052034,
    per_sequence_s=9.3235e-6,
    per_context_token_s=3.19005e-8,
    prefill_tokens_per_s=70_157.0,
    per_prefill_context_s2=2.29418e-9,
    num_kv_blocks=49_671,
)
"""Qwen3-8B in bfloat16 with random weights, vLLM 0.26, one H200: fitted to the steps and checked by
the makespans in ``benchmarks/results/routing_calibrate_8b_h200x1_2026-11-21.json``; the program is
in that record's commit."""


@dataclass(slots=True, eq=False)
class Job:
    """One request in an engine."""

    request: SimRequest
    session: Session
    turn: Turn
    keys: Sequence[bytes]  # of all full blocks of the session
    ready_s: float = 0.0  # when it could be sent
    hit_tokens: int | None = None  # prompt tokens found in the cache when it first started
    decodes: bool = False  # its prompt is computed
    state: Request = field(init=False)  # vLLM's own record of it


class Engine:
    """An engine, driven from event to event.

    The caller alternates :meth:`begin`, which starts a step or a run of equal steps, and
    :meth:`settle` at :attr:`end`, which returns the requests that have ended. Between the two
    :meth:`add`, :meth:`update` and :meth:`report` may be called; the first two may bring
    :attr:`end` forward, to the end of the step under way.
    """

    def __init__(self, costs: EngineCosts, replica_id: str = "0", *, jump: bool = True) -> None:
        self.costs = costs
        self.replica_id = replica_id
        self.jump = jump
        self.end = IDLE  # of the present step, or run of equal steps
        self.stepping = False  # between begin() and settle()
        self.num_steps = 0
        config = _config()
        config.scheduler_config.max_num_seqs = costs.max_num_seqs
        config.cache_config.block_size = costs.block_size
        num_blocks = costs.num_kv_blocks + 1  # vLLM keeps one for itself
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=costs.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            block_size=costs.block_size,
        )
        self._version = 0
        self._paused_until = -math.inf
        self._arrived: list[Job] = []
        self._jobs: dict[str, Job] = {}  # what vLLM knows of
        self._scheduled: SchedulerOutput | None = None
        self._begun = 0.0
        self._steps = 0  # until end
        self._num_decoding = self._context = 0  # of the scheduled step

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, job: Job, now: float) -> None:
        """Queues a request, for the next step."""
        size, salt = self.costs.block_size, self._version.to_bytes(4, "big")

        def new_hashes(request: Request) -> list[BlockHash]:
            keys = job.keys[len(request.block_hashes) : request.num_tokens // size]
            return [BlockHash(salt + key) for key in keys]

        job.state = Request(
            request_id=str(job.request.request_id),
            prompt_token_ids=job.session.tokens[: job.turn.prompt_len].tolist(),
            sampling_params=SamplingParams(max_tokens=job.turn.output_len, ignore_eos=True),
            pooling_params=None,
            block_hasher=new_hashes,
        )
        self._arrived.append(job)
        self._cut(now)

    def update(self, now: float, until: float) -> None:
        """New weights: after the step under way none starts before ``until``.

        What runs keeps its keys and values; what is added from now on finds none of them.
        """
        self._version += 1
        self._paused_until = until
        self._cut(now)

    def report(self, now: float) -> EngineReport:
        """What the engine tells of itself."""
        self._catch_up(now)
        num_running, num_waiting = self.scheduler.get_request_counts()
        num_waiting += len(self._arrived)
        return EngineReport(
            replica_id=self.replica_id,
            state=ReplicaState.SERVING,
            weight_version=self._version,
            num_unfinished=num_running + num_waiting,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=self.scheduler.get_kv_cache_usage(),
        )

    def begin(self, now: float) -> None:
        """Starts the next step, or as many as are alike; sets :attr:`end`."""
        self._begun, self._steps = now, 0
        self.stepping = True
        if now < self._paused_until:
            self.end = self._paused_until
            return
        for job in self._arrived:
            self._jobs[job.state.request_id] = job
            self.scheduler.add_request(job.state)
        self._arrived.clear()
        if not self._jobs:
            self.end, self.stepping = IDLE, False
            return
        prefill_s = self._schedule()
        self._steps = 1 if prefill_s else self._steps_alike()
        self.end = now + prefill_s + self._decode_s(self._steps)

    def settle(self) -> list[Job]:
        """Ends what :meth:`begin` started, at :attr:`end`; returns the requests that have ended."""
        self.stepping = False
        return self._take(self._steps) if self._steps else []

    def _plan(self, token_budget: int) -> SchedulerOutput:
        self.scheduler.max_num_scheduled_tokens = token_budget
        self.scheduler.scheduler_config.max_num_batched_tokens = token_budget
        self._scheduled = self.scheduler.schedule()
        return self._scheduled

    def _schedule(self) -> float:
        """Has the next step scheduled; returns the seconds that prompts add to it."""
        scheduled = self._plan(self.costs.token_budget)
        if not scheduled.total_num_scheduled_tokens:
            raise RuntimeError("an engine has requests, yet none of them can run")
        for name in scheduled.preempted_req_ids or ():
            self._jobs[name].decodes = False
        self._num_decoding = self._context = 0
        tokens = pairs = 0.0
        for name, count in scheduled.num_scheduled_tokens.items():
            job = self._jobs[name]
            computed = job.state.num_computed_tokens - count
            if job.decodes:
                self._num_decoding += 1
                self._context += computed
                continue
            if job.hit_tokens is None:
                job.hit_tokens = computed
            tokens += count
            pairs += count * (computed + (count - 1) / 2)
        return tokens / self.costs.prefill_tokens_per_s + pairs * self.costs.per_prefill_context_s2

    def _steps_alike(self) -> int:
        """Steps until a request ends, or as many of them as certainly find free blocks."""
        running = self.scheduler.running
        num_waiting = self.scheduler.get_request_counts()[1]
        if (
            not self.jump
            or self._num_decoding < len(running)
            or (num_waiting and len(running) < self.costs.max_num_seqs)
        ):
            return 1
        steps = min(request.max_tokens - request.num_output_tokens for request in running)
        blocks_each = self.num_free_blocks // len(running)
        return max(1, min(steps, blocks_each * self.costs.block_size))

    def _decode_s(self, steps: int) -> float:
        """Seconds of so many steps like the scheduled one, apart from prompts."""
        costs, count = self.costs, self._num_decoding
        return steps * (
            costs.base_step_s
            + costs.per_sequence_s * count
            + costs.per_context_token_s * (self._context + count * (steps - 1) / 2)
        )

    def _catch_up(self, now: float) -> None:
        """Takes the steps of the present run that are over, so that it begins with the next one."""
        if not self.stepping or self._steps <= 1:
            return
        elapsed = now - self._begun
        done = bisect_left(range(self._steps), elapsed, key=self._decode_s) - 1
        if done > 0:
            self._begun += self._decode_s(done)
            self._steps -= done
            self._take(done)
            self._schedule()

    def _cut(self, now: float) -> None:
        """Ends the present run with the step under way at ``now``."""
        self._catch_up(now)
        if self.stepping and self._steps > 1:
            self._steps = 1
            self.end = self._begun + self._decode_s(1)

    def _take(self, steps: int) -> list[Job]:
        """The scheduled step is over, and as many more like it; returns what has ended."""
        self.num_steps += steps
        if steps > 1:
            self._answer({})
            for request in self.scheduler.running:
                request.append_output_token_ids(self._next_tokens(request, steps - 1))
            self._plan((steps - 1) * self._num_decoding)
        assert self._scheduled is not None
        sampled = {}
        for name in self._scheduled.num_scheduled_tokens:
            job = self._jobs[name]
            job.decodes = job.state.num_computed_tokens == job.state.num_tokens
            if job.decodes:
                sampled[name] = self._next_tokens(job.state, 1)
        self._answer(sampled)
        return [self._jobs.pop(name) for name in sampled if self._jobs[name].state.is_finished()]

    def _answer(self, sampled: dict[str, list[int]]) -> None:
        """Gives the scheduler what a model would, which may be nothing."""
        assert self._scheduled is not None
        names = list(self._scheduled.num_scheduled_tokens)
        indices = {name: index for index, name in enumerate(names)}
        tokens = [sampled.get(name, []) for name in names]
        self.scheduler.update_from_output(
            self._scheduled, ModelRunnerOutput(names, indices, tokens)
        )

    def _next_tokens(self, request: Request, count: int) -> list[int]:
        tokens = self._jobs[request.request_id].session.tokens
        return tokens[request.num_tokens : request.num_tokens + count].tolist()


@functools.cache
def _config() -> VllmConfig:
    """What a scheduler asks for beside the costs; one for all, as their schedulers come and go."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = EngineArgs(
            model=str(make_tiny_checkpoint(Path(directory) / "checkpoint", seed=0)),
            skip_tokenizer_init=True,
            max_model_len=_MAX_MODEL_LEN,
            hf_overrides={"max_position_embeddings": _MAX_MODEL_LEN},
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_cache_memory_bytes=2**20,
        )
        return arguments.create_engine_config()

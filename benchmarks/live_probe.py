"""One real engine under known load: what its steps take, and how it fares on a simulated trace."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.live_traffic import FIRST_ID, FORCING_BIAS
from benchmarks.routing_sim.calibration import CalibrationError, Limits, Measurement, prefill
from torchrl_vllm_sync.engine.args import engine_environment, make_engine_args, prepare_engine_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.scenario import Scenario
    from benchmarks.routing_sim.workload import Session

__all__ = ["Probe", "RealRun"]

# Steps of a full batch that a decoding measurement is the median of, at least.
STEADY_STEPS = 24


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch of outputs: tokens of running requests, and prompts that were completed."""

    gap_s: float | None
    decoded: int
    prompts: int
    computed: int
    waiting: int


@dataclass(slots=True)
class RealRun:
    """A trace on the real engine.

    Attributes:
        makespan_s: From the first request to the last answer.
        latencies_s: Of each request.
        prompt_tokens: Of all requests.
        cached_tokens: Of these, from the prefix cache.
        num_steps: Steps of the engine that gave out a token.
    """

    makespan_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_steps: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """By the simulation's names."""
        low, high = np.percentile(self.latencies_s, (50, 99))
        return {
            "makespan": self.makespan_s,
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "latency_p50": float(low),
            "latency_p99": float(high),
            "num_steps": self.num_steps,
        }


class Probe:
    """An ``AsyncLLM`` of this process that notes every step; :meth:`close` ends it.

    It belongs to the event loop that asks it first.

    Args:
        model: A checkpoint.
        options: vLLM's engine arguments.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        engine_args = prepare_engine_args(make_engine_args(model, **options))
        engine_args.use_tqdm_on_load = False
        environment = engine_environment(engine_args, verbose=False, enable_fp32_output=False)
        os.environ.update(environment)
        from vllm.v1.engine.async_llm import AsyncLLM

        from torchrl_vllm_sync.engine.internals import StatsRecorder

        self.steps: list[_Step] = []
        self.prefill_s: list[float] = []
        probe = self

        class StepRecorder(StatsRecorder):
            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
                if iteration_stats is not None:
                    probe.note(iteration_stats, scheduler_stats)

        self.engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[StepRecorder()])
        config = self.engine.vllm_config
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_model_len = config.model_config.max_model_len
        self.limits = Limits(
            token_budget=config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            num_kv_blocks=config.cache_config.num_gpu_blocks or 0,
            block_size=config.cache_config.block_size,
        )
        self._random = np.random.default_rng(0)
        self._names = itertools.count()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.shutdown()

    def note(self, iteration: Any, scheduler: Any) -> None:
        """Takes vLLM's figures of one batch of outputs; gaps are by the engine core's clock."""
        gaps = iteration.inter_token_latencies_iter
        self.steps.append(
            _Step(
                gap_s=statistics.median(gaps) if gaps else None,
                decoded=len(gaps),
                prompts=len(iteration.time_to_first_tokens_iter),
                computed=iteration.prompt_token_stats.computed,
                waiting=scheduler.num_waiting_reqs if scheduler is not None else 0,
            )
        )
        self.prefill_s += [one.prefill_time for one in iteration.finished_requests]

    # ---------------------------------------------------------------- requests

    def words(self, num: int) -> list[int]:
        """Random tokens."""
        return self._random.integers(FIRST_ID, self.vocab_size, num).tolist()

    async def ask(self, prompt: Sequence[int], num_tokens: int, token: int) -> Any:
        """One request of known length, whose answer consists of ``token``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            logit_bias={token: FORCING_BIAS},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last: Any = None
        given: Any = {"prompt_token_ids": list(prompt)}
        async for output in self.engine.generate(given, params, f"probe-{next(self._names)}"):
            last = output
        return last

    # ---------------------------------------------------------------- steps

    async def decode(self, batch: int, context: int) -> Measurement:
        """The step of ``batch`` requests that decode, of ``context`` tokens each and more."""
        begin = len(self.steps)
        filling = -(-batch * context // (self.limits.token_budget - batch)) + 4
        length = filling + 2 * STEADY_STEPS
        await asyncio.gather(
            *(self.ask(self.words(context), length, FIRST_ID) for _ in range(batch))
        )
        generated, gaps, contexts = 0, [], []
        for step in self.steps[begin:]:
            if step.decoded == batch and not step.prompts and step.gap_s is not None:
                gaps.append(step.gap_s)
                contexts.append(batch * (context - 1) + generated)
            generated += step.decoded + step.prompts
        return Measurement(
            kind="decode",
            seconds=_median(gaps[2:], f"{batch} requests never decoded together for long"),
            decoding=batch,
            context=statistics.median(contexts[2:]),
        )

    async def prefill(self, length: int, rounds: int = 3) -> Measurement:
        """The steps of one prompt on an idle engine; the median of some rounds."""
        seconds = []
        for _ in range(rounds):
            await self.ask(self.words(length), 1, FIRST_ID)
            seconds.append(self.prefill_s[-1])
        return prefill("prefill", statistics.median(seconds), length, self.limits.token_budget)

    async def mixed(self, batch: int, context: int, length: int, rounds: int = 5) -> Measurement:
        """The step that computes a prompt of ``length`` beside ``batch`` requests that decode."""
        begin = len(self.steps)
        filling = -(-batch * context // (self.limits.token_budget - batch)) + 4
        most = min(filling + 400, self.max_model_len - context)
        running = [
            asyncio.ensure_future(self.ask(self.words(context), most, FIRST_ID))
            for _ in range(batch)
        ]
        while sum(step.prompts for step in self.steps[begin:]) < batch:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for _ in range(rounds):
            await self.ask(self.words(length), 1, FIRST_ID)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        generated, gaps, contexts = 0, [], []
        for step in self.steps[begin:]:
            alone = step.prompts == 1 and step.computed == length
            if alone and step.decoded == batch and step.gap_s is not None:
                gaps.append(step.gap_s)
                contexts.append(batch * (context - 1) + generated)
            generated += step.decoded + step.prompts
        return Measurement(
            kind="mixed",
            seconds=_median(gaps, f"no prompt was computed beside {batch} requests alone"),
            decoding=batch,
            context=statistics.median(contexts),
            prefill_tokens=length,
            prefill_pairs=length * (length - 1) / 2,
        )

    # ---------------------------------------------------------------- traces

    async def run(self, scenario: Scenario) -> RealRun:
        """Runs a trace of one replica as the simulation would: closed loop, tools as sleep."""
        while not await self.engine.reset_prefix_cache():  # noqa: ASYNC110  vLLM tells nobody
            await asyncio.sleep(0.02)
        run = RealRun()
        door = asyncio.Semaphore(scenario.concurrency or len(scenario.sessions))

        async def converse(session: Session) -> None:
            async with door:
                for turn in session.turns:
                    begin = time.perf_counter()
                    token = int(session.tokens[turn.prompt_len])
                    prompt = session.tokens[: turn.prompt_len].tolist()
                    output = await self.ask(prompt, turn.output_len, token)
                    run.latencies_s.append(time.perf_counter() - begin)
                    answer = list(output.outputs[0].token_ids)
                    if answer != [token] * turn.output_len:
                        raise RuntimeError(f"an answer was to be {token} alone, got {answer}")
                    run.prompt_tokens += turn.prompt_len
                    run.cached_tokens += output.num_cached_tokens
                    if turn is not session.turns[-1]:
                        await asyncio.sleep(turn.tool_s)

        begin, before = time.perf_counter(), len(self.steps)
        await asyncio.gather(*(converse(one) for one in scenario.sessions))
        run.makespan_s = time.perf_counter() - begin
        run.num_steps = len(self.steps) - before
        return run


def _median(seconds: list[float], otherwise: str) -> float:
    """The median.

    Raises:
        CalibrationError: There is nothing, and ``otherwise`` says why.
    """
    if not seconds:
        raise CalibrationError(otherwise)
    return statistics.median(seconds)

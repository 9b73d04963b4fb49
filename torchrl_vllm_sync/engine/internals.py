"""Every internal of vLLM (0.26 to 0.32) that is used; tests/engine/test_internals.py names each.

``tests/unit/test_resumption.py`` names those that continue an answer, ``tests/engine/test_fitting``
those that admit requests and spare generators. Log-probabilities of a step travel from the engine
core as three arrays, not as three a row, which is most of what they cost
(``vllm/v1/core/sched/scheduler.py``, ``v1/engine/logprobs.py``).
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import stat
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from packaging.version import Version
from vllm.logprobs import append_logprobs_for_next_position
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    PauseMode,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import NONES
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackEncoder

from torchrl_vllm_sync.replica import EngineCounters, Latency

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.request import Request

    _Base = Scheduler
else:
    _Base = object

Take = Callable[[list[Any]], object]  # takes the workers' answers
# vLLM's label for weights without one: those of the launch.
UNLABELLED = "default"
INSTALLED_VLLM = Version(Version(vllm.__version__).base_version)
_FIRST_WITH_WEIGHT_LABEL, _FIRST_WITH_LABEL_SPANS = Version("0.27"), Version("0.32")
# The last line of a traceback, as Python or vLLM's logger prints it.
_EXCEPTION = re.compile(
    r"^(?:\([^)]* pid=\d+\) )?(?:ERROR .*?\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE
)
# The last of these, of which the quantiles of latencies are.
MAX_FIRST_TOKENS, MAX_TOKEN_GAPS = 256, 4096
# How requests are fitted into the cache: answers remembered, moments looked at, standard deviations
# of their needs that are kept free, and steps after which it is worked out again.
RECENT_ANSWERS, NUM_MOMENTS, DEVIATIONS, STEPS_BETWEEN = 4096, 16, 1.25, 4
LIMITS = "max_num_active_reqs", "max_num_running_reqs"  # of vLLM 0.32, and of earlier ones


class StatsRecorder(StatLoggerBase):
    """A vLLM stat logger in the ``AsyncLLM`` process (``vllm/v1/metrics/loggers.py``)."""

    def __init__(self) -> None:
        self._by_engine: dict[int, tuple[int, int, float, float]] = {}
        self._totals = Counter[str]()  # by the names of EngineCounters
        self._first_token_s = deque[float](maxlen=MAX_FIRST_TOKENS)
        self._between_tokens_s = deque[float](maxlen=MAX_TOKEN_GAPS)

    def __call__(self, *_: Any, **__: Any) -> StatsRecorder:
        """Serves as its own factory, as ``AsyncLLM(stat_loggers=[...])`` expects."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._totals["num_prompt_tokens"] += iteration_stats.num_prompt_tokens
            self._totals["num_generated_tokens"] += iteration_stats.num_generation_tokens
            self._totals["num_preempted"] += iteration_stats.num_preempted_reqs
            self._first_token_s.extend(iteration_stats.time_to_first_tokens_iter)
            self._between_tokens_s.extend(iteration_stats.inter_token_latencies_iter)
        if (now := scheduler_stats) is not None:
            self._totals["prefix_cache_queries"] += now.prefix_cache_stats.queries
            self._totals["prefix_cache_hits"] += now.prefix_cache_stats.hits
            figures = now.num_running_reqs, now.num_waiting_reqs, now.kv_cache_usage
            self._by_engine[engine_idx] = *figures, time.monotonic()

    def log_engine_initialized(self) -> None:
        """Does nothing; the interface asks for it."""

    def latest(self) -> dict[str, Any]:
        """Figures of all data-parallel engines, ``EngineReport``'s and when; none before a step."""
        if not self._by_engine:
            return {}
        running, waiting, usage, measured_at = zip(*self._by_engine.values(), strict=True)
        figures = {"num_running": sum(running), "num_waiting": sum(waiting)}
        return {**figures, "kv_cache_usage": max(usage), "measured_at": min(measured_at)}

    def counters(self) -> EngineCounters:
        return EngineCounters(**self._totals)

    def latencies(self) -> dict[str, Latency | None]:
        """Quantiles over the last requests and tokens, by the names of ``EngineReport``."""
        first, between = _latency(self._first_token_s), _latency(self._between_tokens_s)
        return {"time_to_first_token": first, "inter_token_latency": between}


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    p50, p99 = np.quantile(np.fromiter(seconds, float, len(seconds)), (0.5, 0.99)).tolist()
    return Latency(p50_s=p50, p99_s=p99)


def pack(outputs: Sequence[EngineCoreOutput]) -> None:
    """Moves the log-probabilities of a step's outputs to the first, with where each's begin."""
    given = [one.new_logprobs for one in outputs if one.new_logprobs is not None]
    if not given:
        return
    lengths = (0 if (of := one.new_logprobs) is None else len(of.logprobs) for one in outputs)
    starts = [*accumulate(lengths, initial=0)]
    for one in outputs:
        one.new_logprobs = None
    ids, logprobs, ranks, _ = zip(*given, strict=True)
    outputs[0].new_logprobs = LogprobsLists(
        np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), starts
    )


def unpack(outputs: Sequence[EngineCoreOutput], samples: Mapping[str, Any]) -> None:
    """Hands each of ``samples`` its own; those that are to be decoded are left to vLLM."""
    packed = outputs[0].new_logprobs if outputs else None
    if packed is None or packed.cu_num_generated_tokens is None:
        return
    outputs[0].new_logprobs = None
    ids, logprobs, ranks = (one.tolist() for one in packed[:3])
    for at, (one, (start, end)) in enumerate(
        zip(outputs, pairwise(packed.cu_num_generated_tokens), strict=True)
    ):
        sample = samples.get(one.request_id)  # none if it was aborted meanwhile
        if sample is None or start == end:
            continue
        processor = sample.logprobs_processor
        if processor.tokenizer is not None:
            one.new_logprobs = packed.slice_request(at, end - start)
            continue
        for row in range(start, end):
            processor.cumulative_logprob += logprobs[row][0]
            append_logprobs_for_next_position(
                processor.logprobs,
                ids[row],
                logprobs[row],
                NONES,
                ranks[row],
                processor.num_logprobs,
            )


def _encode_anew(self: MsgpackEncoder, obj: Any, buf: bytearray) -> Sequence[Any]:
    del buf
    return self.encode(obj)


def leave_sent_buffers_alone() -> None:
    """In an engine core whose vLLM may write to a message that is being sent, has it not do so."""
    # Of messages of several parts, as packed outputs are, vLLM 0.26 waits until the last part is
    # sent, and writes the next message over the first (vllm-project/vllm, issue 24655).
    if "_send_msg_tracking_payload" not in vars(EngineCoreProc):
        MsgpackEncoder.encode_into = _encode_anew


class _Own(_Base):
    """Packs outputs; may run as many requests as the KV cache will hold when they have grown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        leave_sent_buffers_alone()
        self._ended, self._capped = np.zeros((2, self.max_model_len + 1))  # answers by length
        self._limit_name = next(one for one in LIMITS if one in vars(self))
        self._most = self._limit = getattr(self, self._limit_name)
        self._steps_left, options = 0, self.vllm_config.additional_config
        wanted = isinstance(options, dict) and options.get("fit_kv_cache", False)
        self._fits = wanted and len(self.kv_cache_config.kv_cache_groups) == 1

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        limit, everyone = self._most, self.running
        going = self._going() if self._fits else []
        if going:
            self.running, limit = going, 0
        elif self._fits and self.waiting:
            if self._steps_left == 0 or not everyone:
                self._limit, self._steps_left = self._fitting(), STEPS_BETWEEN
            self._steps_left -= 1
            limit = self._limit
        # vLLM asserts that not more run than may, and counts sessions that wait for input.
        limit = max(1, limit, len(self.running)) + self.num_waiting_for_streaming_input
        setattr(self, self._limit_name, min(limit, self._most))
        planned = super().schedule(*args, **kwargs)
        if going:
            self.running = [one for one in everyone if one.status is RequestStatus.RUNNING]
        return planned

    def _going(self) -> list[Request]:
        """Those for whose next tokens there is room, if not for all; vLLM would preempt others."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if free >= len(self.running):
            return []
        going: list[Request] = []
        size = self.block_size
        for one in self.running:  # the oldest first: what they free lets the others go on
            last = one.num_tokens_with_spec + one.num_output_placeholders
            new = -(-last // size) - -(-one.num_computed_tokens // size)
            if new <= free:
                free -= new
                going.append(one)
        return going if len(going) < len(self.running) else []

    def _fitting(self) -> int:
        """How many may run, if those that join are as the first that waits."""
        # Answers get as long as others did, by Kaplan and Meier's estimate: those that run count,
        # too, so that short ones, which end first, mislead nobody.
        if self._ended.sum() > RECENT_ANSWERS:  # training changes them
            self._ended, self._capped = self._ended / 2, self._capped / 2
        first, size = self.waiting.peek_request(), len(self._ended)
        requests = [*self.running, first]
        lengths = np.array([one.num_output_tokens for one in requests])
        known = self._ended + self._capped + np.bincount(lengths, minlength=size)
        lasts = np.cumprod(1 - self._ended / (known[::-1].cumsum()[::-1] + 1))  # one never ends
        lengths = lengths[:, None]
        left = np.maximum(1, np.array([one.max_tokens for one in requests])[:, None] - lengths)
        # Most is held just before those end that are as long as they may be.
        ends = np.quantile(left, np.linspace(0, 1, NUM_MOMENTS))
        steps = np.unique([*np.geomspace(1, left.max(), NUM_MOMENTS), *ends]).astype(int)
        shares = lasts[np.minimum(lengths + steps, size - 1)] / lasts[lengths]
        shares = np.where(steps <= left, shares, 0.0)  # of each that still runs then
        grown = shares * steps - (1 - shares) * lengths
        spread = shares * (1 - shares) * (lengths + steps) ** 2
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        unread = sum(max(0, one.num_tokens - one.num_computed_tokens) for one in self.running)
        free = blocks * self.block_size - unread - grown[:-1].sum(0)
        each = np.maximum(first.num_tokens + self.block_size + grown[-1], 1.0)
        spread = spread[:-1].sum(0) + np.maximum(0.0, free / each) * spread[-1]
        free -= DEVIATIONS * np.sqrt(spread)
        return len(self.running) + int((free / each).min() // 1)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self._steps_left = 0  # to be worked out before it is back
        return super()._preempt_request(*args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fits:  # what stops at a text, or is given up, is said to be aborted
            has_ended = request.status is RequestStatus.FINISHED_STOPPED
            (self._ended if has_ended else self._capped)[request.num_output_tokens] += 1
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        by_client = super().update_from_output(*args, **kwargs)
        for one in by_client.values():
            pack(one.outputs)
        return by_client


class PackingScheduler(_Own, Scheduler): ...


class PackingAsyncScheduler(_Own, AsyncScheduler): ...


def pack_on_the_way(config: VllmConfig) -> None:
    """Has the engine core pack, unless it is to have a scheduler of another kind."""
    scheduler = config.scheduler_config
    packing: dict[Any, Any] = {Scheduler: PackingScheduler, AsyncScheduler: PackingAsyncScheduler}
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = packing.get(scheduler.get_scheduler_cls())


def spare_generators(runner: Any) -> None:
    """Has a prompt that goes on sample without its generator: a CPU's cannot be set back."""
    # VLLM 0.32 samples after each part of a prompt, drops the token, and sets the generator back:
    # "CPU Generator does not use offset", and the engine core ends (v1/worker/gpu_model_runner.py).
    sample_tokens = runner.sample_tokens

    def sample(*args: Any) -> Any:
        batch = runner.input_batch
        goes_on = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        spared = {at: batch.generators.pop(at) for at in goes_on if at in batch.generators}
        try:
            return sample_tokens(*args)
        finally:
            batch.generators.update(spared)

    runner.sample_tokens = sample


def unpack_on_arrival(engine: AsyncLLM) -> None:
    """Unpacks what the engine core sends before ``engine`` looks at it."""
    client: Any = engine.engine_core
    get = client.get_output_async

    async def get_unpacked() -> Any:
        await asyncio.sleep(0)  # a fast core would else keep all others, updates too, from running
        outputs = await get()
        unpack(outputs.outputs, engine.output_processor.request_states)
        return outputs

    client.get_output_async = get_unpacked


def engine_over(core: EngineCoreClient, config: VllmConfig, stats: StatsRecorder) -> AsyncLLM:
    """An ``AsyncLLM`` whose engine core is called through ``core``, and is not started."""
    from unittest import mock  # all of these engine cores would import, too

    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    with mock.patch.object(EngineCoreClient, "make_async_mp_client", return_value=core):
        engine = AsyncLLM.from_vllm_config(config, stat_loggers=[stats])
    manager: Any = engine.logger_manager
    # Others count what the core, which has its own, may not have told.
    del manager.stat_loggers[1:]
    return engine


async def call_workers(
    engine: AsyncLLM, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> list[Any]:
    """Calls every worker of every engine; ``AsyncLLM.collective_rpc`` returns one engine's only."""
    client: Any = engine.engine_core
    # Without a time limit: the multiprocessing executor would take a late answer for the next one.
    call = "collective_rpc", method, None, args, kwargs
    calls = (client._call_utility_async(*call, engine=one) for one in client.core_engines)
    return [answer for of_one_engine in await asyncio.gather(*calls) for answer in of_one_engine]


def loras_in_use(engine: AsyncLLM) -> set[int]:
    """Ids of the adapters of requests that its core may hold: those leave here behind it."""
    states = engine.output_processor.request_states.values()
    return {one.lora_request.lora_int_id for one in states if one.lora_request is not None}


def knows_its_steps(config: VllmConfig) -> bool:
    """Whether it is known which tokens come of steps that workers began before a call."""
    # All workers come to a call behind the steps that the core has begun, of which one at most
    # (async scheduling) has not shown its tokens yet.
    parallel, model = config.parallel_config, config.model_config
    return (
        # Ray's executors may give a call to workers ahead of steps.
        parallel.distributed_executor_backend in ("uni", "mp")
        # Several steps are on their way; and data-parallel engines share experts in each step.
        and parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        # A step that has not ended may yield any number of tokens, or is repeated.
        and config.speculative_config is None
        and config.kv_transfer_config is None
        # Requests in the middle of their prompt read encodings, which go with the weights.
        and not model.is_multimodal_model
    )


class _Reply(list[Any]):
    """The future of a call, which vLLM sets when it has read the answer; and outputs of a step.

    As those it waits in the queue of the task that takes outputs up, and calls ``take`` when asked.
    """

    def __init__(self, queue: asyncio.Queue[Any], take: Take) -> None:
        super().__init__()
        self.taken: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue, self._take, self._answers = queue, take, list[Any]()

    def set_result(self, answers: list[Any]) -> None:
        self._answers = answers
        self._queue.put_nowait(EngineCoreOutputs(outputs=self))

    def set_exception(self, error: Exception) -> None:
        if not self.taken.done():
            self.taken.set_exception(error)

    def __len__(self) -> int:
        if not self.taken.done():  # nobody may wait any more
            try:
                self._take(self._answers)
                self.taken.set_result(self._answers)
            except Exception as error:  # noqa: BLE001  raised where it is awaited
                self.taken.set_exception(error)
        return 0


async def call_between_steps(engine: AsyncLLM, method: str, args: Any, take: Take) -> list[Any]:
    """Calls every worker, and ``take`` with the answers ahead of all outputs of later steps."""
    client: Any = engine.engine_core
    reply, call_id = _Reply(client.outputs_queue, take), uuid.uuid1().int >> 64
    client.utility_results[call_id] = reply
    call = client.client_index, call_id, "collective_rpc", (method, None, args)
    await client._send_input(EngineCoreRequestType.UTILITY, call)
    engine._run_output_handler()
    return await reply.taken


async def ask_health(engine: AsyncLLM) -> None:
    """Returns when every worker has answered; ``AsyncLLM.check_health`` asks the process only."""
    await call_workers(engine, "check_health")


def num_unfinished_requests(engine: AsyncLLM) -> int:
    """Returns how many requests are inside, exactly and without an RPC; public since vLLM 0.29."""
    return engine.output_processor.get_num_unfinished_requests()


class SampleState:
    """A sample as the ``AsyncLLM`` process knows it (``vllm/v1/engine/output_processor.py``)."""

    __slots__ = ("_processor", "_request", "_state", "engine_id", "index")

    def __init__(self, processor: Any, state: Any, request: Any) -> None:
        self._processor, self._state, self._request = processor, state, request
        self.engine_id: str = state.external_req_id
        self.index: int = state.request_index

    @property
    def yields_only_new(self) -> bool:
        return self._state.output_kind is RequestOutputKind.DELTA

    @property
    def num_tokens(self) -> int:
        return self._state.detokenizer.num_output_tokens()

    def num_sampled(self, computed: Mapping[str, int]) -> int:
        """How many tokens it has, given of how many, by request, there are keys after a step."""
        in_engine = computed.get(self._state.request_id, 0) - self._state.prompt_len + 1
        return max(in_engine, 0)

    @property
    def is_finished(self) -> bool:
        """Whether vLLM has made its last output."""
        return self._processor.request_states.get(self._state.request_id) is not self._state

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; ``None`` before its prefill."""
        return None if self._state.is_prefilling else self._state.num_cached_tokens

    # From vLLM's queue to the first batch, from there to the first token, and on to the newest.
    queue_s = property(lambda self: self._between("queued_ts", "scheduled_ts"))
    prefill_s = property(lambda self: self._between("scheduled_ts", "first_token_ts"))
    decode_s = property(lambda self: self._between("first_token_ts", "last_token_ts"))

    def deliver_to(self, taker: Any) -> None:
        """Has vLLM call ``taker.put``, which must not fail or use the engine, with all outputs."""
        self._state.queue = taker

    def resume(self, begun: Any, params: SamplingParams) -> None:
        """Makes the answer begin with another replica's tokens, which end the prompt until now."""
        state, tokens = self._state, list(begun.token_ids)
        whole = copy.copy(self._request)
        whole.prompt_token_ids = self._request.prompt_token_ids[: -len(tokens)]
        whole.sampling_params = params
        tokenizer = self._processor.tokenizer if params.detokenize else None
        state.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, whole)
        state.detokenizer.update(tokens, False)
        if self.yields_only_new:  # what was sent is not new
            state.detokenizer.get_next_output_text(False, True)
            state.sent_tokens_offset = len(tokens)
        logprobs = state.logprobs_processor
        logprobs.logprobs = copy.deepcopy(begun.logprobs)  # vLLM adds to them
        logprobs.cumulative_logprob = begun.cumulative_logprob
        logprobs.prompt_logprobs = begun.prompt_logprobs
        if INSTALLED_VLLM >= _FIRST_WITH_LABEL_SPANS:
            state.weight_version_starts[:] = [
                (label_of(one.version), one.start) for one in begun.spans
            ]

    def _between(self, begin: str, end: str) -> float | None:
        # An engine may keep no statistics; 0 means never.
        times = [getattr(self._state.stats, name, 0.0) for name in (begin, end)]
        return times[1] - times[0] if all(times) else None


def check_lengths(request: EngineCoreRequest) -> None:
    """Refuses what a core of vLLM 0.26, which has not looked after setting the limit, ends of."""
    params: Any = request.sampling_params
    if params.min_tokens > params.max_tokens:
        told = f"min_tokens must be at most {params.max_tokens}, got {params.min_tokens}"
        raise ValueError(told)


def watch_samples(engine: Any, on_sample: Callable[[SampleState], None]) -> None:
    """Calls ``on_sample`` for every sample that ``engine`` registers; vLLM has no hook there."""
    processor = engine.output_processor
    add_request = processor.add_request

    def add_and_tell(request: Any, *args: Any, **kwargs: Any) -> None:
        check_lengths(request)
        add_request(request, *args, **kwargs)
        on_sample(SampleState(processor, processor.request_states[request.request_id], request))

    processor.add_request = add_and_tell


def label_of(version: int) -> str:
    return str(version) if version else UNLABELLED


def relabel(completion: CompletionOutput, spans: Sequence[Any]) -> None:
    """Has vLLM's spans of a finished sample say what ``spans`` do."""
    if label_spans(completion):
        kind = type(completion.weight_versions[0])  # pyright: ignore[reportOptionalSubscript]
        completion.weight_versions = [kind(label_of(one.version), *one[1:]) for one in spans]


def label_spans(completion: CompletionOutput) -> list[tuple[str, int, int]] | None:
    """Returns vLLM's ``(label, start, end)`` spans; since 0.32, on a sample's last output only."""
    if INSTALLED_VLLM < _FIRST_WITH_LABEL_SPANS or completion.weight_versions is None:
        return None
    return [(one.version, one.start, one.end) for one in completion.weight_versions]


async def settle_outputs(engine: AsyncLLM) -> None:
    """Waits, for as long as the caller allows, until all that a paused core sent is taken up."""
    # ``AsyncLLM`` queues outputs for a task; the empty one is taken after all before it.
    client: Any = engine.engine_core
    engine._run_output_handler()
    client.outputs_queue.put_nowait(EngineCoreOutputs())
    while not client.outputs_queue.empty() and not engine.errored:  # noqa: ASYNC110  vLLM has no event
        await asyncio.sleep(0)


async def pause_scheduler(engine: AsyncLLM, *, mode: PauseMode, clear_cache: bool) -> None:
    """Pauses without the 20 ms sleep in ``AsyncLLM.pause_generation``; all outputs are settled."""
    # The public call also clears the multimodal cache.
    if clear_cache:
        await engine.pause_generation(mode=mode, clear_cache=True)
    else:
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
    await settle_outputs(engine)


async def set_weight_label(engine: AsyncLLM, label: str) -> None:
    """Labels the tokens sampled from now on; vLLM 0.26 has no labels."""
    if INSTALLED_VLLM >= _FIRST_WITH_WEIGHT_LABEL:
        await engine.update_weight_version(label)


def output_sizes() -> dict[int, int]:
    """Returns the size of this actor's output files, which its children share."""
    return {fd: os.fstat(fd).st_size for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode)}


def startup_failure(since: dict[int, int]) -> str:
    """Returns the first and last exception printed since; vLLM only says "see root cause above"."""
    printed: list[str] = []
    try:
        for fd, size in since.items():  # Ray's files of this actor, shared by its children
            with Path(f"/proc/self/fd/{fd}").open("rb") as file:
                file.seek(size)
                printed += _EXCEPTION.findall(file.read().decode(errors="replace"))
    except OSError:  # the failure itself is raised all the same
        return ""
    causes = [one for one in printed if "root cause" not in one]
    return "; and at last ".join(dict.fromkeys([*causes[:1], *causes[-1:]]))

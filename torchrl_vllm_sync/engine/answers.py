"""The requests of one engine: admitted, run, streamed and given up."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync.engine.gate import AdmissionGate, RunningRequest, SpanChecker
from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    SyncError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.requests.columns import PackedResults, as_dicts
from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult
from torchrl_vllm_sync.requests.prompts import as_requests, check_sampling_params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from vllm import RequestOutput
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.updates import Updates
    from torchrl_vllm_sync.requests.messages import BegunAnswer, SampleReport


logger = logging.getLogger(__name__)

# What a prompt may hold that vLLM need not render.
_OF_TOKENS = {"prompt_token_ids", "prompt", "cache_salt"}
# Seconds that finished outputs of a batch wait at most, to be sent back together.
BATCH_LINGER_S = 0.05
# How many ids are remembered of requests that were given up before they arrived.
MAX_GIVEN_UP = 10_000
# Seconds between checks that requests that were given up have left the engine.
ABORT_POLL_S = 0.005


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each sample, with seeds as vLLM gives them (``ParentRequest``).

    Samples are separate requests, as an update may find only some begun: of a request with ``n``
    samples vLLM can send back neither the others alone, which must not start on keys of the old
    weights, nor all, which would lose tokens.
    """
    params.skip_clone = True  # nobody else has it: vLLM need not copy each field for each request
    if params.n == 1 and params.logprobs is None and params.prompt_logprobs is None:
        return [params]
    samples = [copy.copy(params) for _ in range(params.n)]
    for index, sample in enumerate(samples):
        sample.n, sample.flat_logprobs = 1, True  # log-probabilities are made and sent as columns
        if params.seed is not None:
            sample.seed = params.seed + index
    return samples


def longer_prompt(prompt: dict[str, Any], begun: BegunAnswer) -> dict[str, Any]:
    """Returns a ``TokensPrompt`` extended by another replica's tokens; see ``SampleState``."""
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *begun.token_ids]}


def remaining_params(params: SamplingParams, begun: BegunAnswer) -> SamplingParams:
    num_tokens = len(begun.token_ids)
    remaining = copy.copy(params)
    remaining.min_tokens = max(0, params.min_tokens - num_tokens)
    remaining.prompt_logprobs = None
    if params.max_tokens is not None:
        remaining.max_tokens = params.max_tokens - num_tokens
    return remaining


def tell_of_first_replica(output: RequestOutput, begun: BegunAnswer) -> None:
    """Sets an output's prompt facts to the first replica's; drops a partial ``sampling_mask``."""
    output.num_cached_tokens = begun.num_cached_tokens
    for completion in output.outputs:
        masked = getattr(completion, "sampling_mask", None)  # vLLM 0.32; of the last replica alone
        if masked is not None and len(masked.token_ids) != len(completion.token_ids):
            completion.sampling_mask = None


class Answers:
    """The part of a replica that runs requests."""

    engine: AsyncLLM
    _updates: Updates

    def __init__(self, replica_id: str, gate: AdmissionGate) -> None:
        self.replica_id, self._gate = replica_id, gate
        self.checker = SpanChecker(replica_id)
        self._given_up: dict[str, None] = {}
        self._restarts = 0

    def begin(self, engine: AsyncLLM, updates: Updates) -> None:
        """Runs requests with ``engine`` from now on; until then the gate refuses them."""
        self.engine, self._updates = engine, updates
        self._renders = engine.vllm_config.model_config.is_encoder_decoder

    async def run_batch(
        self, requests: list[EngineRequest], *, want_prompt: bool
    ) -> AsyncIterator[PackedResults]:
        """Runs ``requests`` side by side and yields results as they finish, several at a time.

        Every request gets exactly one result, an output or an error, within its own ``timeout_s``.
        """
        ended: list[asyncio.Task[EngineResult]] = []
        some, every = asyncio.Event(), asyncio.Event()

        def end(task: asyncio.Task[EngineResult]) -> None:
            nonlocal num_left
            num_left -= 1
            ended.append(task)
            some.set()
            if not num_left:
                every.set()

        tasks = [asyncio.create_task(self._answer(one)) for one in requests]
        num_left = len(tasks)
        for task in tasks:
            task.add_done_callback(end)
        try:
            while ended or num_left:
                await some.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BATCH_LINGER_S):
                        await every.wait()
                results = [task.result() for task in ended]
                ended.clear()
                some.clear()
                yield PackedResults(results, want_prompt=want_prompt)
        finally:
            for task in tasks:
                task.cancel()

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineResult]:
        """Yields every partial output of one request as vLLM makes it, the last one finished."""
        steps: asyncio.Queue[EngineResult | None] = asyncio.Queue()

        def keep(step: EngineResult) -> None:
            (packed,) = PackedResults([step], want_prompt=False)  # at once: vLLM adds to its lists
            steps.put_nowait(packed)

        # In a task of its own: Ray would take the cancellation of its task for the caller's.
        task = asyncio.create_task(self._answer(request, on_step=keep))
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield step
            (last,) = PackedResults([task.result()], want_prompt=False)
            yield last
        finally:
            task.cancel()

    async def _answer(
        self,
        request: EngineRequest,
        on_step: Callable[[EngineResult], None] | None = None,
    ) -> EngineResult:
        """Runs one request to its end; a failure is a result, so that its batch goes on."""
        try:
            async with asyncio.timeout(request.timeout_s):
                result = await self._run(request, on_step)
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001  a result, too
            return self._failure(request, failure)
        finally:
            self._given_up.pop(request.abort_id, None)
        if result is None:
            nothing = GenerationError(request.request_id, "the engine returned nothing")
            return self._failure(request, nothing)
        return result

    async def _run(
        self, request: EngineRequest, on_step: Callable[[EngineResult], None] | None
    ) -> EngineResult | None:
        """Gives outputs as vLLM does to ``on_step``, and returns the last, of all samples."""
        owner = asyncio.current_task()
        samples = split_samples(request.sampling_params)
        final_only = request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        finished: dict[int, tuple[CompletionOutput, SampleReport]] = {}
        last: EngineResult | None = None

        def take(index: int, output: RequestOutput, report: SampleReport) -> None:
            nonlocal last
            (completion,) = output.outputs
            completion.index = index
            if output.finished:
                finished[index] = completion, report
            output.finished = len(finished) == len(samples)
            reports = (report,)
            if final_only:
                if not output.finished:
                    return
                together = [finished[one] for one in range(len(samples))]
                output.outputs = [one for one, _ in together]
                reports = tuple(one for _, one in together)
            last = self._result(request, output, reports)
            if on_step is not None and not output.finished:
                on_step(last)

        if len(samples) == 1:
            await self._sample(request, 0, samples[0], owner, take)
            return last
        try:
            async with asyncio.TaskGroup() as group:
                for index, params in enumerate(samples):
                    group.create_task(self._sample(request, index, params, owner, take))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return last

    async def _sample(
        self,
        request: EngineRequest,
        index: int,
        params: SamplingParams,
        owner: asyncio.Task[object] | None,
        take: Callable[[int, RequestOutput, SampleReport], None],
    ) -> None:
        """Runs one sample and gives its outputs to ``take``.

        One that an update finds before its first token begins again at the gate: it must not start
        on cached keys of the old weights.
        """
        while True:
            await self._gate.enter(request.min_version)
            if request.abort_id in self._given_up:
                raise GenerationError(request.request_id, "its caller gave it up")
            self._restarts += 1
            begun, engine_id = request.begun, f"{request.abort_id}~{self._restarts}"
            running = RunningRequest(engine_id, owner, request=request if begun else None)
            prompt: Any = request.prompt
            asked = params
            if begun is not None:
                prompt, asked = longer_prompt(prompt, begun), remaining_params(params, begun)
            prompt = self._rendered(prompt)
            self._gate.running[engine_id] = running
            try:
                outputs = self.engine.generate(
                    prompt, asked, engine_id, lora_request=request.lora_request
                )
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        if running.restart and _was_aborted(output):
                            break
                        output.request_id = request.request_id
                        if begun is not None:
                            tell_of_first_replica(output, begun)
                        assert running.sample is not None, "vLLM registers it before any output"
                        take(index, output, running.sample.report(output.outputs[0], self.checker))
                    else:
                        return
            finally:
                del self._gate.running[engine_id]

    def _rendered(self, prompt: dict[str, Any]) -> Any:
        """A prompt as the engine takes it; its salt allows for hits on the same weights alone."""
        own = prompt.get("cache_salt")
        salt = self._updates.salt if own is None else f"{self._updates.salt}:{own}"
        if self._renders or not prompt.keys() <= _OF_TOKENS:
            return {**prompt, "cache_salt": salt}
        # As vLLM's renderer makes it, which it is slow at, and some versions do in a thread.
        ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
        return tokens_input(ids, prompt=text, cache_salt=salt)

    def _result(
        self,
        request: EngineRequest,
        output: RequestOutput,
        samples: tuple[SampleReport, ...],
    ) -> EngineResult:
        return EngineResult(
            request_id=request.request_id,
            replica_id=self.replica_id,
            output=output,
            finished=output.finished,
            samples=samples,
            version=self._gate.version,
        )

    def _failure(self, request: EngineRequest, failure: BaseException) -> EngineResult:
        """Returns the error that the caller of ``request`` gets for ``failure``."""
        error: Exception
        if isinstance(failure, asyncio.CancelledError):
            if not self._gate.has_ended_requests:
                raise failure
            error = self._gate.refusal()  # the gate ended it: stale, failed or closed
        elif isinstance(failure, EngineDeadError):
            self._gate.set(ReplicaState.FAILED, f"engine core died: {failure}")
            error = self._gate.refusal()
        elif isinstance(failure, SyncError):
            error = failure
        elif isinstance(failure, TimeoutError) and request.min_version > self._updates.version:
            held = {self.replica_id: self._gate.describe()}
            error = VersionNotReachedError(request.min_version, held, request.timeout_s)
        elif isinstance(failure, TimeoutError):
            error = GenerationTimeoutError(
                f"request {request.request_id} did not finish within {request.timeout_s:g} s; "
                "its work in the engine was ended"
            )
        else:
            cause = failure.__cause__ or failure
            if not isinstance(cause, (ValueError, TypeError)):  # these are the caller's fault
                logger.error("request %s failed", request.request_id, exc_info=failure)
            error = GenerationError(request.request_id, f"{type(cause).__name__}: {cause}")
        return EngineResult(request_id=request.request_id, replica_id=self.replica_id, error=error)

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests by ``abort_id`` and waits for it; those that have not begun never will."""
        wanted = set(request_ids)
        self._given_up.update(dict.fromkeys(wanted))
        for _ in range(len(self._given_up) - MAX_GIVEN_UP):
            del self._given_up[next(iter(self._given_up))]
        ended: set[str] = set()
        # A request that has just passed the gate may not be known to vLLM yet, hence the loop.
        while left := [
            engine_id for engine_id in self._gate.running if engine_id.rpartition("~")[0] in wanted
        ]:
            ended.update(left)
            await self.engine.abort(left)
            await asyncio.sleep(ABORT_POLL_S)
        return len(ended)

    async def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Any = None,
        timeout_seconds: float = 3600.0,
        lora_request: Any = None,
    ) -> Any:
        """TorchRL's actor surface: generates on this replica and returns vLLM's own outputs."""
        normalised = as_requests(
            prompts,
            prompt_token_ids,
            encode=self.engine.get_tokenizer().encode,
            max_model_len=self.engine.vllm_config.model_config.max_model_len,
            vocab_size=self.engine.vllm_config.model_config.get_vocab_size(),
        )
        given = check_sampling_params(sampling_params, len(normalised.prompts))
        requests: list[EngineRequest] = []
        for record, params in zip(normalised.prompts, given, strict=True):
            final_only = SamplingParams() if params is None else copy.copy(params)
            final_only.output_kind = RequestOutputKind.FINAL_ONLY
            request = EngineRequest(
                request_id=f"direct-{id(record)}-{time.monotonic_ns()}",
                prompt=record.as_tokens_prompt(),
                sampling_params=final_only,
                timeout_s=timeout_seconds,
                lora_request=lora_request,
            )
            requests.append(request)
        results = await asyncio.gather(*map(self._answer, requests))
        for request, result in zip(requests, results, strict=True):
            if result.error is not None:
                raise result.error
            if not request.sampling_params.flat_logprobs:
                result.output.prompt_logprobs = as_dicts(result.output.prompt_logprobs)
                for one in result.output.outputs:
                    one.logprobs = as_dicts(one.logprobs)
        outputs = [result.output for result in results]
        return outputs if normalised.is_batch else outputs[0]


def _was_aborted(output: RequestOutput) -> bool:
    return output.finished and any(one.finish_reason == "abort" for one in output.outputs)

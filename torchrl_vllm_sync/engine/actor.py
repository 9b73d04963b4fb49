"""One replica: a Ray actor that owns one vLLM engine, its state and its policy version."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import ray.util
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.admission import AdmissionGate, RunningRequest
from torchrl_vllm_sync.engine.broadcast_loads import BroadcastLoads
from torchrl_vllm_sync.engine.checkpoint import checkpoint_metadata
from torchrl_vllm_sync.engine.native import NativeWeightTransfer
from torchrl_vllm_sync.engine.native_updates import NativeUpdates
from torchrl_vllm_sync.engine.snapshot_loads import SnapshotLoads
from torchrl_vllm_sync.engine_args import num_workers
from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    SyncError,
    TransferError,
)
from torchrl_vllm_sync.prompts import as_requests, check_sampling_params
from torchrl_vllm_sync.replica import EngineDescription, EngineReport, ReplicaState
from torchrl_vllm_sync.requests import EngineRequest, EngineResult
from torchrl_vllm_sync.weights.choice import this_node
from torchrl_vllm_sync.weights.metadata import to_json
from torchrl_vllm_sync.wire import pack_output, unpack_output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

    from vllm import AsyncEngineArgs, RequestOutput

__all__ = ["EngineActor"]

logger = logging.getLogger(__name__)

# Finished outputs of a batch are sent back together, at most this much later than they finished.
BATCH_LINGER_S = 0.05
# Ids of requests given up before they arrived, of which at most this many are remembered.
MAX_GIVEN_UP = 10_000
# Seconds between looks at whether requests that were given up have left the engine.
ABORT_POLL_S = 0.005


class EngineActor(NativeWeightTransfer):
    """The class behind each replica's Ray actor; subclass it for an ``actor_class`` of your own.

    Lifecycle: constructed (``STARTING``), :meth:`start` builds the engine (``SERVING``), weight
    updates pass through ``UPDATING``, :meth:`close` ends the engine (``CLOSED``). An update that
    fails leaves ``STALE``, a dead engine core ``FAILED``; neither takes requests.

    Args:
        replica_id: Stable id within the service.
        engine_args: vLLM engine arguments of this replica.
        environment: Environment variables to set before the engine's processes start.
        service_name: Name of the service it belongs to.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        engine_args: AsyncEngineArgs,
        environment: dict[str, str],
        service_name: str = "alone",
    ) -> None:
        self.replica_id = replica_id
        self._service_name = service_name
        self._engine_args = engine_args
        self._environment = environment
        self._gate = AdmissionGate(replica_id)
        self._stats = internals.StatsRecorder()
        self._given_up: dict[str, None] = {}
        self._restarts = 0
        self._card: dict[str, Any] = {}
        self._device_uuids: tuple[str, ...] = ()

    # ---------------------------------------------------------------- lifecycle

    async def start(self) -> EngineDescription:
        """Builds the engine and begins to serve.

        Returns:
            What the service needs to know of the engine.

        Raises:
            TransferError: There is no memory for staged weights, which were asked for.
            Exception: Whatever vLLM raises when it cannot start with these arguments.
        """
        os.environ.update(self._environment)
        self.engine = AsyncLLM.from_engine_args(self._engine_args, stat_loggers=[self._stats])
        for refusal in await internals.call_workers(self.engine, "sync_staging_refusal", ()):
            if refusal:
                await asyncio.to_thread(self.engine.shutdown)
                raise TransferError(refusal)
        self._updates = NativeUpdates(self.engine, self._gate)
        self._snapshots = SnapshotLoads(self._updates, self._service_name)
        self._broadcasts = BroadcastLoads(self._updates)
        self._gate.set(ReplicaState.SERVING)
        self._health = asyncio.create_task(self._watch_health())
        found = await internals.call_workers(self.engine, "native_device_uuid", ())
        self._device_uuids = tuple(uuid for uuid in found if uuid)
        return self.describe()

    def describe(self) -> EngineDescription:
        """Returns the facts about the engine that do not change while it lives."""
        config = self.engine.vllm_config
        return EngineDescription(
            replica_id=self.replica_id,
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=config.cache_config.block_size,
            num_kv_blocks=config.cache_config.num_gpu_blocks,
            vllm_version=str(internals.installed_vllm()),
            device_type=current_platform.device_type,
            num_workers=num_workers(self._engine_args),
            node_id=this_node(),
            device_uuids=self._device_uuids,
        )

    def ready(self) -> bool:
        """Returns whether the replica serves requests."""
        return self._gate.state is ReplicaState.SERVING

    async def close(self) -> None:
        """Ends the engine and its processes; later requests are refused. Idempotent."""
        if self._gate.state is ReplicaState.CLOSED:
            return
        self._gate.set(ReplicaState.CLOSED, "the service was shut down")
        self._health.cancel()
        self._snapshots.stop_following()
        await asyncio.to_thread(self.engine.shutdown)

    async def _watch_health(self) -> None:
        """Notices a dead engine core within a second, requests or not."""
        while True:
            await asyncio.sleep(1.0)
            if self.engine.errored:
                self._gate.set(ReplicaState.FAILED, f"engine core died: {self.engine.dead_error}")
                return

    def report(self) -> EngineReport:
        """Returns state, version and load as they are now."""
        stats = self._stats.latest()
        started = self._gate.state is not ReplicaState.STARTING
        return EngineReport(
            replica_id=self.replica_id,
            state=self._gate.state,
            weight_version=self._updates.version if started else None,
            num_unfinished=self.get_num_unfinished_requests() if started else None,
            num_running=stats.num_running if stats else None,
            num_waiting=stats.num_waiting if stats else None,
            kv_cache_usage=stats.kv_cache_usage if stats else None,
            stats_age_s=time.monotonic() - stats.measured_at if stats else None,
            reason=self._gate.reason,
        )

    def keep_card(self, card: dict[str, Any]) -> None:
        """Keeps what a process needs to attach to the service."""
        self._card = card

    def card(self) -> dict[str, Any]:
        """Returns what :meth:`keep_card` was given."""
        return self._card

    # ---------------------------------------------------------------- requests

    async def run_batch(
        self, requests: list[EngineRequest], *, want_prompt: bool
    ) -> AsyncIterator[list[EngineResult]]:
        """Runs ``requests`` side by side and yields results as they finish, several at a time.

        Every request is answered exactly once, with an output or with an error, each within its
        own ``timeout_s``.

        Args:
            requests: Requests of one caller.
            want_prompt: Send the prompts back too, for callers that did not keep them.

        Yields:
            Results that finished since the last yield.
        """
        tasks = {
            asyncio.create_task(self._answer(one, want_prompt=want_prompt)) for one in requests
        }
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if tasks:
                    late, tasks = await asyncio.wait(tasks, timeout=BATCH_LINGER_S)
                    done |= late
                yield [task.result() for task in done]
        finally:
            for task in tasks:
                task.cancel()

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineResult]:
        """Yields every partial output of one request as vLLM produces it, the last one finished."""
        steps: asyncio.Queue[EngineResult | None] = asyncio.Queue()
        # A task of its own: Ray takes the cancelling of its task for a caller's wish.
        task = asyncio.create_task(
            self._answer(request, want_prompt=False, on_step=steps.put_nowait)
        )
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield step
            yield task.result()
        finally:
            task.cancel()

    async def _answer(
        self,
        request: EngineRequest,
        *,
        want_prompt: bool,
        on_step: Callable[[EngineResult], None] | None = None,
    ) -> EngineResult:
        """Runs one request to its end; failures are results, so that siblings are kept."""
        last: tuple[RequestOutput, int] | None = None
        try:
            async with asyncio.timeout(request.timeout_s):
                async for step in self._outputs(request):
                    last = step
                    if on_step is not None and not step[0].finished:
                        on_step(self._result(request, *step, want_prompt=want_prompt))
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001  a result, too
            return self._failure(request, failure)
        finally:
            self._given_up.pop(request.request_id, None)
        if last is None:
            nothing = GenerationError(request.request_id, "the engine returned nothing")
            return self._failure(request, nothing)
        return self._result(request, *last, want_prompt=want_prompt)

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[tuple[RequestOutput, int]]:
        """Yields outputs with the version under which the request began.

        A request that an update finds before its first token goes back to the gate and begins
        again under the new weights: it must not start on cached keys of the old ones.
        """
        while True:
            await self._gate.enter()
            if request.request_id in self._given_up:
                raise GenerationError(request.request_id, "its caller gave it up")
            version = self._updates.version
            self._restarts += 1
            running = RunningRequest(
                f"{request.request_id}~{self._restarts}", asyncio.current_task(), version
            )
            prompt: Any = {**request.prompt, "cache_salt": self._salt(request)}
            self._gate.running[running.engine_id] = running
            try:
                outputs = self.engine.generate(
                    prompt,
                    request.sampling_params,
                    running.engine_id,
                    lora_request=request.lora_request,
                )
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        if running.restart and _was_aborted(output):
                            break
                        output.request_id = request.request_id
                        yield output, version
                    else:
                        return
            finally:
                del self._gate.running[running.engine_id]

    def _salt(self, request: EngineRequest) -> str:
        """Keeps prefix-cache hits within the same weights, and within the caller's own salt."""
        own = request.prompt.get("cache_salt")
        return self._updates.salt if own is None else f"{self._updates.salt}:{own}"

    def _result(
        self, request: EngineRequest, output: RequestOutput, version: int, *, want_prompt: bool
    ) -> EngineResult:
        return EngineResult(
            request_id=request.request_id,
            replica_id=self.replica_id,
            output=pack_output(output, include_prompt=want_prompt),
            finished=output.finished,
            min_version=version,
            max_version=self._updates.version,
        )

    def _failure(self, request: EngineRequest, failure: BaseException) -> EngineResult:
        """Turns what ended ``request`` into the error its caller sees.

        Raises:
            asyncio.CancelledError: The caller itself cancelled.
        """
        error: Exception
        if isinstance(failure, asyncio.CancelledError):
            if not self._gate.refuses:
                raise failure
            error = self._gate.refusal()  # the gate ended it: stale, failed or closed
        elif isinstance(failure, EngineDeadError):
            self._gate.set(ReplicaState.FAILED, f"engine core died: {failure}")
            error = self._gate.refusal()
        elif isinstance(failure, SyncError):
            error = failure
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
        """Ends the named requests' work in the engine, and waits until it has ended.

        A request that has yet to arrive, or waits at the gate, will not begin.

        Returns:
            How many of them were inside the engine.
        """
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
        prompts: Any = None,  # noqa: ANN401  every prompt form of the service
        sampling_params: Any = None,  # noqa: ANN401
        *,
        prompt_token_ids: Any = None,  # noqa: ANN401
        timeout_seconds: float = 3600.0,
        lora_request: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """TorchRL's actor surface: generates on this replica and returns vLLM's own outputs.

        Args:
            prompts: Text, token ids, ``TokensPrompt`` or a list of these.
            sampling_params: For all prompts, or one for each; vLLM's defaults when ``None``.
            prompt_token_ids: Token ids, flat or nested, instead of ``prompts``.
            timeout_seconds: Limit for each request, in seconds.
            lora_request: vLLM ``LoRARequest``.

        Returns:
            One ``RequestOutput``, or a list of them for a batch.

        Raises:
            InvalidPromptError: The prompts are not valid.
            SyncError: The first failure among the requests.
        """
        normalised = as_requests(
            prompts,
            prompt_token_ids,
            encode=self.engine.get_tokenizer().encode,
            max_model_len=self.engine.vllm_config.model_config.max_model_len,
            vocab_size=self.engine.vllm_config.model_config.get_vocab_size(),
        )
        given = check_sampling_params(sampling_params, len(normalised.prompts))
        results = await asyncio.gather(
            *(
                self._answer(
                    EngineRequest(
                        request_id=f"direct-{id(record)}-{time.monotonic_ns()}",
                        prompt=record.as_tokens_prompt(),
                        sampling_params=SamplingParams() if params is None else params,
                        timeout_s=timeout_seconds,
                        lora_request=lora_request,
                    ),
                    want_prompt=True,
                )
                for record, params in zip(normalised.prompts, given, strict=True)
            )
        )
        for result in results:
            if result.error is not None:
                raise result.error
        outputs = [unpack_output(result.output) for result in results if result.output is not None]
        return outputs if normalised.is_batch else outputs[0]

    # ---------------------------------------------------------------- weights

    async def model_metadata(self) -> list[list[Any]]:
        """Returns the tensors that a complete push must hold, as ``ParamMeta`` in JSON form."""
        metas = await asyncio.to_thread(checkpoint_metadata, self.engine.vllm_config.model_config)
        return to_json(metas)

    async def load_snapshot(
        self,
        directory: str,
        run_id: str | None,
        **options: Any,
    ) -> dict[str, Any]:
        """Loads the newest version stored in ``directory``; see ``SnapshotLoads.load``."""
        report = await self._snapshots.load(directory, run_id, **options)
        return dataclasses.asdict(report)

    async def follow_snapshots(self, directory: str, run_id: str | None, **options: Any) -> None:
        """Loads new versions of ``directory`` as they appear, without being told."""
        self._snapshots.follow(directory, run_id, **options)

    async def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self._snapshots.stop_following()
        await self._updates.settled()

    async def join_broadcast(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Joins a trainer's group; see ``BroadcastLoads.join``."""
        await self._broadcasts.join(init_info, timeout_s=timeout_s)

    async def prepare_broadcast(
        self, metadata: list[list[Any]], bucket_bytes: int, *, timeout_s: float
    ) -> dict[str, Any]:
        """Learns what coming pushes consist of; see ``BroadcastLoads.prepare``."""
        return await self._broadcasts.prepare(metadata, bucket_bytes, timeout_s=timeout_s)

    async def receive_broadcast(self, push_id: int, digest: str, **options: Any) -> dict[str, Any]:
        """Receives one version; see ``BroadcastLoads.receive``."""
        return dataclasses.asdict(await self._broadcasts.receive(push_id, digest, **options))

    async def leave_broadcast(self) -> None:
        """Leaves the trainer's group."""
        await self._broadcasts.leave()

    def hold_back(self, version: int, run_id: str | None) -> None:
        """Takes the replica out of service until it holds ``version`` of run ``run_id``."""
        self._updates.hold_back(version, run_id)

    # ---------------------------------------------------------------- TorchRL's and vLLM's surface

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests inside the engine, exactly; a dead engine has none."""
        return 0 if self.engine.errored else internals.num_unfinished_requests(self.engine)

    def get_cache_usage(self) -> float | None:
        """Returns the share of KV-cache blocks in use, 0 to 1; ``None`` until it is known."""
        stats = self._stats.latest()
        return stats.kv_cache_usage if stats else None

    def get_tokenizer(self) -> Any:  # noqa: ANN401  a transformers tokenizer
        """Returns the engine's tokenizer."""
        return self.engine.get_tokenizer()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  TorchRL's and vLLM's argument
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on every vLLM worker of this replica and returns their answers."""
        return await self.engine.collective_rpc(method, timeout, args, kwargs)

    collective_rpc_v1 = collective_rpc

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drops cached prefixes.

        Returns:
            ``False`` when running requests hold blocks, in which case vLLM clears nothing.
        """
        return await self.engine.reset_prefix_cache(reset_running_requests)

    def free_port(self) -> tuple[str, int]:
        """Returns this node's address and a port that is free on it now."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]


def _was_aborted(output: RequestOutput) -> bool:
    return output.finished and any(one.finish_reason == "abort" for one in output.outputs)

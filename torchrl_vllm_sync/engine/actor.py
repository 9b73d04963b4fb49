"""One replica: a Ray actor that owns one vLLM engine, and watches whether it is alive."""

from __future__ import annotations

from torchrl_vllm_sync.engine import preload  # before all that imports vLLM

# isort: split
import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ray.util
from vllm import AsyncEngineArgs
from vllm.config import CompilationConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from torchrl_vllm_sync.checks import Deadline, collect_rarely
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.adapters import Adapters
from torchrl_vllm_sync.engine.answers import AdmissionGate, Answers
from torchrl_vllm_sync.engine.args import SHARED_BACKEND, own_processes
from torchrl_vllm_sync.engine.arrivals import Arrivals, NativeCalls
from torchrl_vllm_sync.engine.plan import check_can_be_filled, checkpoint_metadata
from torchrl_vllm_sync.engine.updates import Updates
from torchrl_vllm_sync.errors import LaunchError, SyncError, TransferError
from torchrl_vllm_sync.replica import (
    UNRESPONSIVE_AFTER_S,
    EngineDescription,
    EngineReport,
    LoadReport,
    PushReport,
    ReplicaProcesses,
    ReplicaState,
    Silence,
)
from torchrl_vllm_sync.weights.p2p.memory import this_node

# Seconds between checks: a dead engine core is noticed at the next one.
LOOK_S = 0.5
# Seconds from an answer to the next question: at most these, and at most this part of the limit.
MAX_BEAT_S = 5.0
BEATS_PER_LIMIT = 4
# Seconds for which a caller's own call may block the engine by default.
BLOCKING_CALL_S = 300.0


class EngineHealth:
    """Asks an engine for a sign of life periodically; marks its replica failed when none comes."""

    def __init__(
        self,
        engine: AsyncLLM,
        gate: AdmissionGate,
        *,
        unresponsive_after_s: float,
        is_updating: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._gate, self._clock = engine, gate, clock
        self._limit_s, self._is_updating = unresponsive_after_s, is_updating
        self._beat_s = min(MAX_BEAT_S, unresponsive_after_s / BEATS_PER_LIMIT)
        self._silence, self._answered_at = Silence(clock), clock()
        self._question: asyncio.Task[None] | None = None
        self._blocking: list[Deadline] = []
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        async def look_again() -> None:
            while self.look():  # noqa: ASYNC110  silence raises no event
                await asyncio.sleep(LOOK_S)

        self._watch = asyncio.create_task(look_again())

    def stop(self) -> None:
        for task in filter(None, (self._watch, self._question)):
            task.cancel()  # vLLM ignores an answer that nothing waits for
        self._question = None

    @contextlib.contextmanager
    def blocking(self, timeout_s: float | None = None) -> Iterator[None]:
        """Excuses silence while inside: a caller's call may keep the engine busy."""
        limit = Deadline(BLOCKING_CALL_S if timeout_s is None else timeout_s, clock=self._clock)
        self._blocking.append(limit)
        try:
            yield
        finally:
            self._blocking.remove(limit)

    @property
    def _is_excused(self) -> bool:
        """Calls may block an engine by design: updates, which have limits, and :meth:`blocking`."""
        return self._is_updating() or not all(one.passed for one in self._blocking)

    def look(self) -> bool:
        """Checks once: asks if it is time to, and marks the replica if an answer is overdue."""
        if not self._gate.is_over:
            if not (reason := self._failure()):
                is_time = self._clock() - self._answered_at >= self._beat_s and not self._is_excused
                if self._question is None and is_time:
                    self._question = asyncio.ensure_future(internals.ask_health(self._engine))
                return True
            self._gate.set(ReplicaState.FAILED, reason)
        self.stop()
        return False

    def _failure(self) -> str:
        """Takes an answer that has come; returns why the engine has failed, or nothing."""
        if self._engine.errored:
            return f"engine core died: {self._engine.dead_error}"
        if self._question is not None and self._question.done():
            failure, self._question = self._question.exception(), None
            if failure is not None:  # a dead core shows in ``errored`` before that
                return f"a worker is not well: {failure}"
            self._answered_at = self._clock()
        silent_s = self._silence.look()
        if self._is_excused or self._question is None:
            self._silence.reset()
        elif silent_s >= self._limit_s:
            return f"its engine core, or a worker of it, was silent for {silent_s:.1f} s"
        return ""


def of_part(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of the actor that calls ``method`` of one of its parts."""
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(method(getattr(self, part), *args, **kwargs)) as items:
                async for item in items:
                    yield item

        return stream

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(getattr(self, part), *args, **kwargs)
        if inspect.isawaitable(answer):
            answer = await answer
        return dataclasses.asdict(answer) if isinstance(answer, LoadReport) else answer

    return call


class EngineActor:
    """The class behind each replica's Ray actor; subclass it for an ``actor_class`` of your own.

    Lifecycle: constructed (``STARTING``), :meth:`start` builds the engine (``SERVING``), updates
    pass through ``UPDATING``, :meth:`drain` lets requests end (``DRAINING``), :meth:`close` ends
    the engine (``CLOSED``). A failed update leaves ``STALE``, a dead or silent engine ``FAILED``.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        engine_args: AsyncEngineArgs,
        environment: dict[str, str],
        unresponsive_after_s: float = UNRESPONSIVE_AFTER_S,
    ) -> None:
        self.replica_id = replica_id
        self._engine_args = engine_args
        self._environment = environment
        self._unresponsive_after_s = unresponsive_after_s
        self._gate = AdmissionGate(replica_id)
        self._stats = internals.StatsRecorder()
        self._answers = Answers(replica_id, self._gate)
        self._card: dict[str, Any] = {}
        self._membership_epoch = 0
        self._last_push: PushReport | None = None
        self._joins_later = self._started = False

    async def start(self) -> EngineDescription:
        """Builds the engine and begins to serve."""
        printed = internals.output_sizes()
        try:
            await self._launch()
        except SyncError:
            raise
        except Exception as error:
            # Some, such as pydantic's, cannot be pickled: Ray would raise that error instead.
            why = f"{type(error).__name__}: {error}"
            if "root cause" in why and (cause := internals.startup_failure(printed)):
                why = f"{why}: {cause}"
            raise LaunchError({self.replica_id: why}) from error
        self._health.start()
        collect_rarely()  # meanwhile no token is handed out
        return self.describe()

    async def _launch(self) -> None:
        os.environ.update(self._environment)
        check_can_be_filled(self._engine_args.create_model_config())
        config = self._engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        internals.pack_on_the_way(config)
        with preload.first_in_children():
            self.engine = AsyncLLM.from_vllm_config(config, stat_loggers=[self._stats])
        internals.unpack_on_arrival(self.engine)
        for refusal in await internals.call_workers(self.engine, "sync_staging_refusal"):
            if refusal:
                await asyncio.to_thread(self.engine.shutdown, timeout=0.0)
                raise TransferError(refusal)
        await self._begin()

    async def _begin(self) -> None:
        internals.watch_samples(self.engine, self._gate.register)
        self._workers = await internals.call_workers(self.engine, "sync_describe")
        self._updates = updates = Updates(self.engine, self._gate)
        config = self.engine.vllm_config.weight_transfer_config
        updates.is_shared = config is not None and config.backend == SHARED_BACKEND
        self._adapters = Adapters(updates, self._gate)
        self._answers.begin(self.engine, updates, self._adapters.choose)
        self._native = NativeCalls(updates, self.engine, self._gate)
        config = self.engine.vllm_config.model_config
        self._arrivals = Arrivals(updates, lambda: checkpoint_metadata(config))
        self._health = EngineHealth(
            self.engine,
            self._gate,
            unresponsive_after_s=self._unresponsive_after_s,
            is_updating=lambda: updates.is_busy,
        )
        self._started = True
        if not self._joins_later:
            self._gate.set(ReplicaState.SERVING)

    def join_later(self) -> None:
        """Makes :meth:`start` leave the replica ``STARTING`` until it is admitted."""
        self._joins_later = True

    def describe(self) -> EngineDescription:
        """Returns the facts about the engine that do not change while it lives."""
        return self._description(ray.util.get_node_ip_address(), own_processes())

    def _description(self, node_ip: str, processes: ReplicaProcesses | None) -> EngineDescription:
        config = self.engine.vllm_config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        return EngineDescription(
            replica_id=self.replica_id,
            node_ip=node_ip,
            pid=os.getpid(),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            block_size=cache.block_size,
            num_kv_blocks=cache.num_gpu_blocks,
            vllm_version=str(internals.INSTALLED_VLLM),
            device_type=current_platform.device_type,
            num_workers=parallel.world_size * parallel.data_parallel_size,
            node_id=this_node(),
            device_uuids=tuple(uuid for uuid, _, _ in self._workers if uuid),
            model=model.model,
            device_name=self._workers[0][1],
            why_not_written=next((why for _, _, why in self._workers if why), ""),
            processes=processes,
        )

    def ready(self) -> bool:
        return self._gate.state is ReplicaState.SERVING

    async def close(self) -> None:
        """Ends the engine and its processes; idempotent.

        They are killed: asked to end, they tidy up for five seconds, and vLLM kills them then. What
        they share is the actor's to free. Only a connector of KV caches may have something to save.
        """
        if self._gate.state is ReplicaState.CLOSED:
            return
        self._gate.set(ReplicaState.CLOSED, "the service was shut down")
        self._health.stop()
        self._arrivals._stop()
        self._answers.close()
        grace_s = 0.0 if self.engine.vllm_config.kv_transfer_config is None else None
        await asyncio.to_thread(self.engine.shutdown, timeout=grace_s)

    def report(self) -> EngineReport:
        """Returns state, version and load as they are now."""
        figures = self._stats.latest()
        if figures:
            figures["stats_age_s"] = time.monotonic() - figures.pop("measured_at")
        if self._started:
            figures["weight_version"] = self._updates.version
            figures["base_version"] = self._updates.base
            figures["adapters"] = self._adapters.newest()
            figures["asleep"] = bool(self._updates.asleep)
            figures["num_unfinished"] = self.get_num_unfinished_requests()
            figures |= {"counters": self._stats.counters(), **self._stats.latencies()}
        return EngineReport(
            replica_id=self.replica_id,
            state=self._gate.state,
            reason=self._gate.reason,
            num_span_disagreements=self._answers.checker.num_disagreements,
            membership_epoch=self._membership_epoch,
            last_push=self._last_push,
            **figures,
        )

    def note_push(self, push: PushReport) -> EngineReport:
        """Keeps the outcome of a push, for processes that ask; returns :meth:`report`."""
        self._last_push = push
        return self.report()

    def keep_card(self, card: dict[str, Any]) -> None:
        """Keeps what a process needs to attach to the service, unless it has a newer one."""
        epoch = card["membership"].epoch
        if epoch >= self._membership_epoch:
            self._card, self._membership_epoch = card, epoch

    def card(self, bare: bool = False) -> dict[str, Any]:  # see find_service
        if not bare or not self._card:
            return self._card
        settings = dataclasses.replace(self._card["settings"], engine_args=None, actor_class=None)
        return {**self._card, "settings": settings}

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests inside the engine, exactly; a dead engine has none."""
        return 0 if self.engine.errored else internals.num_unfinished_requests(self.engine)

    def get_cache_usage(self) -> float | None:
        """Returns the share of KV-cache blocks in use, 0 to 1; ``None`` until it is known."""
        return self._stats.latest().get("kv_cache_usage")

    def get_tokenizer(self) -> Any:
        return self.engine.get_tokenizer()

    def get_config(self) -> Any:
        config = copy.copy(self.engine.vllm_config)
        config.compilation_config = CompilationConfig()  # the engine's knows the model's layers
        return config

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  TorchRL's and vLLM's argument
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on the workers of all data-parallel engines, one engine at a time."""
        # For as long as ``timeout``, or 300 s, a silent engine is not marked failed.
        call = internals.call_workers(self.engine, method, args, kwargs)
        with self._health.blocking(timeout):
            return await self._updates.ask(method, call, math.inf if timeout is None else timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self.engine.reset_prefix_cache(reset_running_requests)


# Calls that its parts have under the same names: these, or all.
for _part, _kind, _names in (
    ("_answers", Answers, "run_batch streams_at generate abort"),
    ("_updates", Updates, "begin_push keep_push end_push probe_workers"),
    ("_updates", Updates, "hold_back admit drain undrain pin"),
    ("_adapters", Adapters, "prepare_adapter put_adapter give_adapters take_adapters"),
    ("_native", NativeCalls, ""),
    ("_arrivals", Arrivals, ""),
):
    for _name in _names.split() or [one for one in vars(_kind) if not one.startswith("_")]:
        setattr(EngineActor, _name, of_part(_part, getattr(_kind, _name)))

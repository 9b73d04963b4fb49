"""vLLM's own weight-transfer, pause and sleep calls on one engine, with time limits and in turn."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import MAX_VERSION, Deadline, check_seconds
from torchrl_vllm_sync.engine.args import payload_of
from torchrl_vllm_sync.engine.updates import (
    SHORT_TIMEOUT_S,
    Pause,
    Updates,
    Watchdog,
    raise_failures,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.weights.transport import check_mode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.gate import AdmissionGate
    from torchrl_vllm_sync.replica import LoadReport
    from torchrl_vllm_sync.weights.transport import PauseMode

logger = logging.getLogger(__name__)

# Seconds for a call by default.
TIMEOUT_S = 300.0
# Seconds without a call after which the process that drives an update counts as gone.
IDLE_TIMEOUT_S = 300.0
SLEEP_LEVELS = (0, 1, 2)
MEMORY_TAGS = frozenset({"weights", "kv_cache"})
# What workers' own failures are raised as; one that did not answer in time is a plain SyncError.
WORKERS_ANSWERED = (errors.TransferError, errors.TransferNotReadyError, errors.WeightMismatchError)


@dataclass(slots=True)
class _OpenUpdate:
    limit_s: float  # between calls; of a push, for all of it
    version: int | None = None  # of a push
    run_id: str = "vLLM's own calls"
    mode: PauseMode = "keep"
    clear_cache: bool = False
    pause: Pause = field(default_factory=Pause)
    num_tensors: int = 0
    deadline: Deadline = field(default_factory=lambda: Deadline(math.inf))
    steps: Any = None  # the generator NativeCalls._run, to which each call of the update is sent


class NativeCalls:
    """Pauses of one engine and its updates, driven from outside: start, any parts, finish."""

    def __init__(self, updates: Updates, engine: AsyncLLM, gate: AdmissionGate) -> None:
        self._updates, self._engine, self._gate = updates, engine, gate
        self._open: _OpenUpdate | None = None
        self._watchdog = Watchdog(self._give_up_silent)

    def _not_ready(self, why: str) -> errors.TransferNotReadyError:
        return errors.TransferNotReadyError(f"replica {self._updates.replica_id}: {why}")

    def _refuse_open(self, what: str) -> None:
        if self._open is not None:
            raise self._not_ready(
                f"{what} has to wait: a weight update is open; finish_weight_update, or "
                "shutdown_weight_transfer_engine, ends it"
            )

    @contextlib.asynccontextmanager
    async def _turn(self, what: str, timeout_s: float = SHORT_TIMEOUT_S) -> AsyncIterator[None]:
        """Keeps other updates out; refused at once while an update is open."""
        self._refuse_open(what)
        async with self._updates.exclusive(timeout_s):
            yield

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Pauses until :meth:`resume_generation`; vLLM's defaults end requests and drop caches."""
        check_mode(mode)
        async with self._turn("pause_generation", timeout_s):
            call = self._engine.pause_generation(mode=mode, clear_cache=clear_cache)
            await self._hold("pausing", call, timeout_s)

    async def resume_generation(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Ends :meth:`pause_generation`; does nothing to an engine that is not paused."""
        async with self._turn("resume_generation", timeout_s):
            if self._updates.asleep:
                raise self._not_ready("it is asleep: wake_up, not resume_generation, ends it")
            await self._let_go()

    async def is_paused(self) -> bool:
        """Returns whether vLLM's scheduler is paused; waits while a transfer blocks the engine."""
        return await self._updates.ask("asking", self._engine.is_paused(), SHORT_TIMEOUT_S)

    async def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Puts the engine to sleep; new requests wait at the gate until :meth:`wake_up`."""
        check_mode(mode)
        if level not in SLEEP_LEVELS:
            raise errors.UnsupportedArgumentError(
                f"level must be one of {SLEEP_LEVELS}, got {level!r}"
            )
        able = current_platform.is_cpu() or self._engine.vllm_config.model_config.enable_sleep_mode
        if level > 0 and not able:
            raise errors.UnsupportedArgumentError(
                f"sleep(level={level}) needs enable_sleep_mode=True at launch"
            )
        async with self._turn("sleep", timeout_s):
            await self._hold("falling asleep", self._engine.sleep(level, mode), timeout_s)
            if level > 0:
                self._updates.asleep = MEMORY_TAGS
            if level > 1:
                self._updates.whole = False

    async def wake_up(self, tags: list[str] | None = None, *, timeout_s: float = TIMEOUT_S) -> bool:
        """Wakes the engine, or the memory that ``tags`` name; fully awake it takes requests."""
        wanted = MEMORY_TAGS if tags is None else frozenset(tags)
        if unknown := sorted(wanted - MEMORY_TAGS - {"scheduling"}):
            raise errors.UnsupportedArgumentError(
                f"tags must be among {sorted(MEMORY_TAGS)} and 'scheduling', got {unknown}"
            )
        async with self._turn("wake_up", timeout_s):
            left = self._updates.asleep - wanted
            if not left and not self._updates.whole:
                raise self._not_ready(
                    "it has no weights to serve with: wake_up(['weights']), then an update, then "
                    "wake_up(['kv_cache'])"
                )
            await self._updates.ask("waking up", self._engine.wake_up(tags), timeout_s)
            self._updates.asleep = left
            if not left:
                await self._let_go()
        return not left

    async def _hold(self, what: str, call: Awaitable[None], timeout_s: float) -> None:
        """Keeps the engine from stepping by ``call``; undone if that fails."""
        before = self._updates.held
        if self._gate.state is ReplicaState.SERVING:
            self._updates.set_state(ReplicaState.UPDATING)
        self._updates.held = True
        try:
            await self._updates.ask(what, call, timeout_s)
        except BaseException:
            self._updates.held = before
            if self._updates.whole:
                await self._updates.resume()
            raise

    async def _let_go(self) -> None:
        """Undoes :meth:`_hold`."""
        if not self._updates.whole:
            raise self._gate.refusal()
        self._updates.held = False
        await self._updates.resume()

    async def init_weight_transfer_engine(
        self, request: Any, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Initialises every worker's transfer engine; most wait for the trainer in it."""
        info = payload_of(request, "init_info")
        async with self._turn("init_weight_transfer_engine", timeout_s):
            await self._updates.ask_workers(
                "native_init", info, timeout_s=timeout_s, what="initialising"
            )

    async def use_transfer_engine(self, backend: str | None = None) -> None:
        """Switches every worker to another transfer engine; ``None`` means that of the launch."""
        async with self._turn("use_transfer_engine"):
            await self._updates.ask_workers("native_use", backend, what="changing")

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leaves the trainer's group; gives an open update up first."""
        if self._open is not None:
            await self._abandon()
        async with self._updates.exclusive(SHORT_TIMEOUT_S):
            await self._updates.ask_workers("native_shutdown", what="leaving")

    async def start_weight_update(
        self, *, timeout_s: float = TIMEOUT_S, idle_timeout_s: float = IDLE_TIMEOUT_S, **push: Any
    ) -> None:
        """Keeps other updates out, and the engine paused; a ``push`` has a version already."""
        check_seconds("idle_timeout_s", idle_timeout_s)
        self._refuse_open("start_weight_update")
        update = _OpenUpdate(timeout_s if push else idle_timeout_s, **push)
        if update.version is not None:
            self._updates.refuse_older(update.version)
            self._updates.refuse_foreign(update.version, update.run_id)
        update.steps = self._run(update, timeout_s)
        self._open = update
        await self._step("start_weight_update")

    async def update_weights(self, request: Any, *, timeout_s: float = TIMEOUT_S) -> None:
        update, updates = self._require_idle("update_weights"), self._updates
        info = payload_of(request, "update_info")

        async def receive() -> None:
            was_whole, updates.whole = updates.whole, False
            answers = await updates.call_workers("native_update", info, timeout_s=timeout_s)
            updates.whole = was_whole and all(one["untouched"] for one in answers)
            raise_failures(updates.replica_id, answers)
            update.num_tensors += len(info["names"]) if "names" in info else 0

        await self._step("update_weights", receive)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> LoadReport | None:
        """Ends the update: the engine goes on, unless its user had paused it; reports on a push."""
        update, updates = self._require_idle("finish_weight_update"), self._updates
        given = weight_version if update.version is None else update.version
        label = None if given is None else str(given)
        version = self._version_of(label)  # one that is refused leaves the update open

        async def finish() -> None:
            updates.whole = False
            await updates.ask_workers("native_finish", timeout_s=timeout_s, what="finishing")
            updates.apart = False
            await updates.commit(update.pause, version, label, update.run_id)

        await self._step("finish_weight_update", finish)
        if update.version is None:
            return None
        path = {"path": "layerwise", "path_reason": "vLLM's own transfer engines always take it"}
        return update.pause.report(version, num_tensors=update.num_tensors, attempts=1, **path)

    async def update_weights_native(
        self, request: Any, *, timeout_s: float = TIMEOUT_S, **push: Any
    ) -> LoadReport | None:
        """TorchRL's name for start, update and finish in one call."""
        await self.start_weight_update(timeout_s=timeout_s, **push)
        await self.update_weights(request, timeout_s=timeout_s)
        return await self.finish_weight_update(timeout_s=timeout_s)

    async def give_up_update(self, run_id: str) -> None:
        """Ends what run ``run_id`` has begun; the replica is stale if a part of it had come."""
        if self._open is not None and self._open.run_id == run_id:
            await self._abandon()

    async def update_weight_version(self, new_version: str) -> None:
        """Labels weights that are in place; requests in flight freeze, so each token has one."""
        async with self._turn("update_weight_version"), contextlib.AsyncExitStack() as stack:
            version = self._version_of(str(new_version))
            if self._updates.whole and self._gate.state is not ReplicaState.STALE:
                pause = self._updates.paused("keep", clear_cache=False, timeout_s=SHORT_TIMEOUT_S)
                await stack.enter_async_context(pause)
            await self._updates.label(str(new_version))
            self._gate.switch(version)

    def _version_of(self, label: str | None) -> int:
        """Returns the policy version of a label; of one that is no integer, the present version."""
        try:
            version = self._updates.version if label is None else int(label)
        except ValueError:
            return self._updates.version
        self._updates.refuse_older(version, "weight_version")
        if version > MAX_VERSION:
            raise errors.UnsupportedArgumentError(
                f"weight_version must be at most {MAX_VERSION}, or no integer, got {label}"
            )
        return version

    async def _run(
        self, update: _OpenUpdate, timeout_s: float
    ) -> AsyncGenerator[None, Callable[[], Awaitable[None]] | None]:
        """An open update from its start to its end: a step that finishes it, or a failure."""
        updates = self._updates
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(setattr, self, "_open", None)
            await stack.enter_async_context(updates.exclusive(timeout_s))
            updates.require_weights()
            await updates.ask_workers("native_check", what="checking")
            pause = updates.paused(update.mode, update.clear_cache, timeout_s)
            update.pause = await stack.enter_async_context(pause)
            updates.apart = True
            try:
                await updates.ask_workers("native_start", timeout_s=timeout_s, what="starting")
                if update.version is not None:
                    update.deadline = Deadline(update.limit_s)
                while updates.apart:
                    if take := (yield):
                        await take()
            except WORKERS_ANSWERED:
                # Those that did not are busy: the next update puts their models together.
                if updates.apart and not self._engine.errored:
                    await updates.put_together()
                raise

    def _require_idle(self, what: str) -> _OpenUpdate:
        if self._open is None:
            raise self._not_ready(
                f"{what}: no weight update is open: start_weight_update comes first"
            )
        if self._open.steps.ag_running:
            raise self._not_ready(
                f"{what} has to wait: another call of the weight update is under way"
            )
        return self._open

    async def _step(self, what: str, take: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes a step of the open update: a second one meanwhile is refused, a failure ends it."""
        update = self._require_idle(what)
        self._watchdog.stop()
        with contextlib.suppress(StopAsyncIteration):
            await update.steps.asend(take)
            self._watchdog.start(min(update.limit_s, update.deadline.left_s))

    async def _abandon(self, reason: str = "") -> None:
        """Gives the open update up; a replica that had received part of it is stale then."""
        given_up = errors.TransferError(f"an update was given up half-way{reason}")
        self._watchdog.stop()
        try:
            await self._require_idle("giving up").steps.athrow(given_up)
        except errors.TransferError as error:
            if error is not given_up:
                raise

    async def _give_up_silent(self) -> None:
        if update := self._open:
            version, within = update.version, f"{update.limit_s:g} s"
            late = f"version {version} did not arrive within {within}"
            reason = f"no call came for {within}" if version is None else late
            what = "replica %s: a weight update is given up: %s"
            logger.warning(what, self._updates.replica_id, reason)
            await self._abandon(f": {reason}")

"""Updates that somebody drives call by call, with vLLM's own calls, beside whole pushes.

They come one at a time: start, update, finish. Between them the replica must neither step on
weights that are taken apart nor take a push.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.pausable_updates import SHORT_TIMEOUT_S, PausableUpdates
from torchrl_vllm_sync.engine.updates import POLL_S, RESUME_TIMEOUT_S
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    SyncError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.versions import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.admission import AdmissionGate
    from torchrl_vllm_sync.engine.updates import LoadReport
    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["IDLE_TIMEOUT_S", "NativeUpdates"]

logger = logging.getLogger(__name__)

# Seconds without a call after which whoever drives an update is taken to be gone.
IDLE_TIMEOUT_S = 300.0
# Run that versions belong to which vLLM's own calls brought.
NATIVE_RUN = "vLLM's own calls"
# What workers' own failures are raised as; one that did not answer in time is a plain SyncError.
WORKERS_ANSWERED = (TransferError, TransferNotReadyError, WeightMismatchError)


class NativeUpdates(PausableUpdates):
    """``PausableUpdates`` whose steps can be driven from outside too.

    Lifecycle of an update: :meth:`begin`, :meth:`receive` any number of times, :meth:`finish`; a
    failure ends it, and :meth:`abandon` gives it up, as happens by itself when no call has come for
    a while. From beginning to end pushes wait, the engine is paused, and requests wait at the gate.

    Args:
        engine: The replica's engine.
        gate: The gate in front of it.
    """

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate) -> None:
        super().__init__(engine, gate)
        self._open: contextlib.AsyncExitStack | None = None
        self._busy = False
        self._apart = False
        self._idle_watch: asyncio.Task[None] | None = None
        self._last_call = 0.0
        self.num_restarted = 0

    @property
    def is_open(self) -> bool:
        """Whether an update was begun and has not ended."""
        return self._open is not None

    @property
    def num_kept(self) -> int:
        """Requests inside the engine, which an open update has frozen."""
        return len(self._gate.running)

    # ---------------------------------------------------------------- the transfer engine

    async def initialise(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Initialises every worker's transfer engine; for most, all wait for the trainer in it.

        Raises:
            TransferNotReadyError: A weight update is open, or the engine has no transfer engine.
            TransferError: A worker could not: fields that do not fit, or a peer that did not come.
        """
        self._refuse_open("init_weight_transfer_engine")
        async with self.exclusive(timeout_s):
            await self._tell("native_init", init_info, timeout_s=timeout_s, what="initialising")

    async def use(self, backend: str | None) -> None:
        """Has every worker use another transfer engine; ``None`` takes that of the launch.

        Raises:
            UnsupportedArgumentError: No backend of that name.
            TransferNotReadyError: A weight update is open.
        """
        self._refuse_open("use_transfer_engine")
        async with self.exclusive(SHORT_TIMEOUT_S):
            await self._tell("native_use", backend, timeout_s=SHORT_TIMEOUT_S, what="changing")

    async def leave(self) -> None:
        """Leaves the trainer's group; an open update is given up first, see :meth:`abandon`.

        Raises:
            TransferNotReadyError: A transfer is under way.
            TransferError: A worker could not leave.
        """
        if self._open is not None:
            await self.abandon()
        async with self.exclusive(SHORT_TIMEOUT_S):
            await self._tell("native_shutdown", timeout_s=SHORT_TIMEOUT_S, what="leaving")

    async def abandon(self, reason: str = "") -> None:
        """Gives the open update up; a replica that had received part of it is stale then.

        Args:
            reason: Why; shown as the reason for being stale.

        Raises:
            TransferNotReadyError: No update is open, or a transfer is under way.
            TransferError: A worker could not put its model together.
        """
        async with self._step("giving up") as stack:
            try:
                await self._put_together()
            finally:
                why = f": {reason}" if reason else ""
                given_up = SyncError(f"an update was given up half-way{why}")
                await self._end(stack, None if self.whole else given_up)

    # ---------------------------------------------------------------- one update

    async def begin(
        self,
        *,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        timeout_s: float,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """Begins an update: other updates are kept out, and the engine is paused if it is not.

        Requests in flight freeze and go on when the update has ended; those without a token yet
        start again then, under the new weights.

        Args:
            mode: vLLM's pause mode, for an engine that is not paused yet.
            clear_cache: Drop cached prefixes; frozen requests recompute theirs.
            timeout_s: Seconds to wait for a push that is under way, and for the pause.
            idle_timeout_s: Seconds between two calls after which the update is given up.

        Raises:
            UnsupportedArgumentError: ``idle_timeout_s`` is not a finite number greater than 0.
            TransferNotReadyError: An update is open, the transfer engine is not initialised, or
                the weights are asleep.
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: A push was under way for ``timeout_s``, or the engine did not pause.
        """
        if not 0 < idle_timeout_s < math.inf:
            raise UnsupportedArgumentError(
                f"idle_timeout_s must be a finite number greater than 0, got {idle_timeout_s}"
            )
        self._refuse_open("start_weight_update")
        stack = self._open = contextlib.AsyncExitStack()
        try:
            async with self._step():
                await stack.enter_async_context(self.exclusive(timeout_s))
                self._require_weights()
                await self._tell("native_check", timeout_s=SHORT_TIMEOUT_S, what="checking")
                self.num_restarted = await stack.enter_async_context(
                    self._paused(mode, clear_cache, timeout_s)
                )
                self._apart = True
                await self._tell("native_start", timeout_s=timeout_s, what="starting")
        except BaseException as error:
            await self._give_up(stack, error)
            raise
        self._idle_watch = asyncio.create_task(self._end_when_idle(idle_timeout_s))

    async def _end_when_idle(self, idle_timeout_s: float) -> None:
        """Gives the update up when no call has come for ``idle_timeout_s``.

        A call under way has a limit of its own.
        """
        while (left := self._last_call + idle_timeout_s - time.monotonic()) > 0 or self._busy:  # noqa: ASYNC110
            await asyncio.sleep(max(left, POLL_S))
        reason = f"no call came for {idle_timeout_s:g} s"
        logger.warning("replica %s: a weight update is given up: %s", self.replica_id, reason)
        try:
            await self.abandon(reason)
        except SyncError as error:  # nobody waits for this task
            logger.warning("replica %s: %s", self.replica_id, error)

    async def receive(self, update_info: Any, *, timeout_s: float) -> None:
        """Receives one part of the update, or all of it.

        Args:
            update_info: What the transfer engine wants to know, or a list of it by worker.
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: No update was begun, or a part of it is under way.
            ReplicaUnavailableError: The engine core died.
            TransferError: It was not received, and the update is over. The replica is stale unless
                nothing had been touched.
        """
        async with self._step("update_weights") as stack:
            was_whole, self.whole = self.whole, False
            try:
                answers = await self.call_workers(
                    "native_update", update_info, timeout_s=timeout_s, what="receiving"
                )
                self.whole = was_whole and all(one["untouched"] for one in answers)
                _raise_failures(self.replica_id, answers)
            except BaseException as error:
                await self._give_up(stack, error)
                raise

    async def finish(
        self, label: str | None, *, run_id: str = NATIVE_RUN, timeout_s: float = RESUME_TIMEOUT_S
    ) -> None:
        """Ends the update: the engine goes on, unless its user had paused it before.

        Args:
            label: What the weights are called. An integer is their policy version. Anything else
                leaves the version as it is; new requests keep off the keys of the old weights all
                the same.
            run_id: Run that the version belongs to.
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: No update was begun, or a part of it is under way.
            StaleVersionError: An integer older than the version held. The update stays open.
            UnsupportedArgumentError: One that the stamps on rows cannot hold. It stays open too.
            TransferError: It could not be ended; the replica is stale.
        """
        async with self._step("finish_weight_update") as stack:
            version = self._version_of(label)
            self.whole = False
            try:
                await self._tell("native_finish", timeout_s=timeout_s, what="finishing")
                if label is not None:
                    await self.ask(
                        "labelling",
                        internals.set_weight_label(self._engine, label),
                        RESUME_TIMEOUT_S,
                    )
                self._apart = False
            except BaseException as error:
                await self._give_up(stack, error)
                raise
            self._adopt(version, run_id)
        await self._end(stack, None)

    async def rename(self, label: str) -> None:
        """Names weights that are in place already.

        Requests in flight freeze meanwhile, so that each of their tokens has one version.

        Raises:
            TransferNotReadyError: A weight update is open: its end names the weights.
            StaleVersionError: An integer older than the version held.
            UnsupportedArgumentError: One that the stamps on rows cannot hold.
        """
        self._refuse_open("update_weight_version")
        async with self.exclusive(SHORT_TIMEOUT_S):
            version = self._version_of(label)
            call = internals.set_weight_label(self._engine, label)
            if not (self.whole and self._gate.state.admits_requests):  # nothing is inside
                await self.ask("labelling", call, RESUME_TIMEOUT_S)
                self._gate.switch(version)
                return
            async with self._paused("keep", clear_cache=False, timeout_s=SHORT_TIMEOUT_S):
                await self.ask("labelling", call, RESUME_TIMEOUT_S)
                self._gate.switch(version)

    async def expect(self, version: int, run_id: str) -> None:
        """Says whether :meth:`load` could begin, so that nobody enters a collective in vain.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            TransferNotReadyError: An update is open, or the transfer engine is not initialised.
            StaleVersionError: The engine holds a newer version, or another run's.
        """
        self._refuse_open("a push")
        async with self.exclusive(SHORT_TIMEOUT_S):
            self._require_weights()
            self.refuse_stale(version, run_id)
            await self._tell("native_check", timeout_s=SHORT_TIMEOUT_S, what="checking")

    async def load(
        self,
        update_info: dict[str, Any],
        *,
        version: int,
        run_id: str,
        mode: PauseMode,
        clear_cache: bool,
        timeout_s: float,
    ) -> LoadReport:
        """Receives a whole version through the transfer engine, in one go.

        Args:
            update_info: What the transfer engine wants to know.
            version: Policy version.
            run_id: Run that it belongs to.
            mode: vLLM's pause mode.
            clear_cache: Recompute the keys and values of requests in flight.
            timeout_s: Seconds for everything.

        Raises:
            TransferNotReadyError: The transfer engine is not initialised.
            StaleVersionError: The engine holds a newer version, or another run's.
            SyncError: It was not received; see :meth:`apply`.
        """
        self._refuse_open("a push")
        async with self.exclusive(timeout_s):
            self.refuse_stale(version, run_id)
            await self._tell("native_check", timeout_s=SHORT_TIMEOUT_S, what="checking")
            return await self.apply(
                lambda left: self.call_workers("native_load", update_info, timeout_s=left),
                version=version,
                run_id=run_id,
                mode=mode,
                clear_cache=clear_cache,
                timeout_s=timeout_s,
            )

    def refuse_stale(self, version: int, run_id: str) -> None:
        """Refuses a version that is older than the one held, or another run's of that number.

        Raises:
            StaleVersionError: It is.
        """
        if version < self.version:
            raise StaleVersionError(
                f"version must be at least {self.version}, which replica {self.replica_id} "
                f"holds, got {version}"
            )
        self.refuse_foreign(version, run_id)

    async def apply(self, *args: Any, **options: Any) -> LoadReport:
        """See ``PausableUpdates.apply``; mends first what a failed update may have left behind."""
        if self._apart:
            await self._put_together()
        return await super().apply(*args, **options)

    def _version_of(self, label: str | None) -> int:
        try:
            version = self.version if label is None else int(label)
        except ValueError:
            return self.version
        if version < self.version:
            raise StaleVersionError(
                f"weight_version must be at least {self.version}, which replica "
                f"{self.replica_id} holds, got {label}"
            )
        if version > MAX_VERSION:
            raise UnsupportedArgumentError(
                f"weight_version must be at most {MAX_VERSION}, or no integer, got {label}"
            )
        return version

    @contextlib.asynccontextmanager
    async def _step(self, what: str = "") -> AsyncIterator[contextlib.AsyncExitStack]:
        """One call of an open update; a second one at the same time is refused."""
        self._refuse_busy(what)
        if self._open is None:
            raise TransferNotReadyError(
                f"{what}: no weight update is open on replica {self.replica_id}: "
                "start_weight_update comes first"
            )
        self._busy = True
        try:
            yield self._open
        finally:
            self._busy, self._last_call = False, time.monotonic()

    async def _give_up(self, stack: contextlib.AsyncExitStack, error: BaseException) -> None:
        """After a failure: puts the model together, then leaves what the update had taken.

        Workers that did not answer are busy still: the next update finds the model apart.
        """
        try:
            if self._apart and isinstance(error, WORKERS_ANSWERED) and not self._engine.errored:
                await self._put_together()
        finally:
            await self._end(stack, error)

    async def _put_together(self) -> None:
        await self._tell("native_abandon", timeout_s=SHORT_TIMEOUT_S, what="giving up")
        self._apart = False

    async def _end(self, stack: contextlib.AsyncExitStack, error: BaseException | None) -> None:
        """Resumes, or leaves the replica stale after ``error``, and lets other updates in."""
        self._open = None
        watch, self._idle_watch = self._idle_watch, None
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        if error is None:
            await stack.aclose()
        else:
            await stack.__aexit__(type(error), error, error.__traceback__)

    def _refuse_open(self, what: str) -> None:
        if self._open is not None:
            raise TransferNotReadyError(
                f"{what} has to wait: a weight update is open on replica {self.replica_id}; "
                "finish_weight_update, or shutdown_weight_transfer_engine, ends it"
            )

    def _refuse_busy(self, what: str) -> None:
        if self._busy:
            raise TransferNotReadyError(
                f"{what} has to wait: another call of the weight update on replica "
                f"{self.replica_id} is under way"
            )

    async def _tell(self, method: str, *args: Any, timeout_s: float, what: str) -> None:
        """Calls every worker, and raises what they ended with."""
        answers = await self.call_workers(method, *args, timeout_s=timeout_s, what=what)
        _raise_failures(self.replica_id, answers)


def _raise_failures(replica_id: str, answers: list[dict[str, Any]]) -> None:
    """Raises for the workers that failed, with this library's own type where theirs was one.

    Raises:
        SyncError: At least one did.
    """
    failed = {rank: one for rank, one in enumerate(answers) if one["error"]}
    if not failed:
        return
    kinds = {one["error_type"] for one in failed.values()} & set(errors.__all__)
    kind = getattr(errors, kinds.pop()) if len(kinds) == 1 else TransferError
    reasons = (f"worker {rank}: {one['error']}" for rank, one in failed.items())
    raise kind(f"replica {replica_id}: " + "; ".join(reasons))

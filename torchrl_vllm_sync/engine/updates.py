"""Weight updates of one engine: pause, load, acknowledge, resume, and the version they leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.errors import (
    PushUnderWayError,
    SilentEngineError,
    StaleVersionError,
    SyncError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.versions import MAX_VERSION
from torchrl_vllm_sync.weights.transport import check_mode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.gate import AdmissionGate
    from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
    from torchrl_vllm_sync.weights.transport import PauseMode

logger = logging.getLogger(__name__)

# Seconds within which requests without a token must have left a paused engine.
SEND_BACK_TIMEOUT_S = 10.0
# Seconds within which a paused engine must answer the call to resume.
RESUME_TIMEOUT_S = 30.0
# Seconds between looks at whether an engine core that owes an answer is still alive.
POLL_S = 0.5
# What a replica adds to the reason when a load broke off that had begun to write.
NOT_WHOLE = "its weights are not whole, and it is stale until the next push repairs it"
# A trainer on another host that gives no sign of life for so long is pushing no more.
PUSH_SILENCE_S = 30.0
# The same where its push has left the weights in pieces: a stopped trainer must not keep them so.
# One sign in 5 s may be half as late again.
TORN_SILENCE_S = 7.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How one replica came to hold a version. Times are seconds of wall clock.

    Attributes:
        version: Policy version the replica now holds.
        loaded: Whether anything was loaded; ``False`` when it held the version already.
        verify_s: Reading and checking the stored tensors, while generation goes on.
        stage_s: Receiving into spare memory, while generation goes on.
        ready_s: Of ``stage_s``, until the trainer's word to begin.
        pause_s: From the request to pause until no step is running.
        load_s: Loading into the model, the slowest worker.
        resume_s: Labelling and resuming.
        num_tensors: Tensors loaded by each worker.
        whole_pause_s: All of the pause: ``pause_s``, ``load_s`` and ``resume_s``.
        num_kept: Samples of requests that went on with the tokens and keys they had.
        num_restarted: Those without a token yet, which began again under the new weights.
        attempts: Loads it took, the most of any worker.
        path: How the weights got into the model: ``plan`` for copies straight into place,
            ``layerwise`` for vLLM's reload.
        path_reason: Why it was not the plan; empty when it was, or when it was not asked for.
        began_at: When the first of these phases began, in seconds of Unix time; ``None`` if nothing
            was loaded.
    """

    version: int
    loaded: bool
    verify_s: float = 0.0
    stage_s: float = 0.0
    ready_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    whole_pause_s: float = 0.0
    num_tensors: int = 0
    num_kept: int = 0
    num_restarted: int = 0
    attempts: int = 0
    path: str = ""
    path_reason: str = ""
    began_at: float | None = None


@dataclass(slots=True)
class _Push:
    """The last push that began: a trainer's, with a number that the trainer counts."""

    trainer: ProcessIdentity
    sender: str
    number: int
    seen_at: float
    is_open: bool = True


class WeightUpdates:
    """Applies whole versions to one engine, one at a time.

    A replica whose weights are not known to be whole stays paused, so that no step ever runs on
    them, until a load succeeds.

    Attributes:
        whole: Whether the weights are known to be all of :attr:`version`.
        num_waiting: Updates that wait for the one under way.
    """

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate) -> None:
        self.whole, self.num_waiting = True, 0
        self._engine, self._gate = engine, gate
        self._lock = asyncio.Lock()
        self._floor = 0
        self._drains = self._was_admitted = False
        self._run_id: str | None = None
        self._repeats = 0
        self._push: _Push | None = None

    @property
    def version(self) -> int:
        """Policy version the engine serves with; 0 is what it was launched with."""
        return self._gate.version

    @property
    def salt(self) -> str:
        """Names the weights in keys of cached prefixes: the version, and how often it was replaced.

        Weights that take the place of others under the same version must not find their keys.
        """
        return f"v{self.version}" + (f".{self._repeats}" if self._repeats else "")

    @property
    def is_busy(self) -> bool:
        """Whether an update, or a call that comes in turn with them, is under way."""
        return self._lock.locked()

    def _adopt(self, version: int, run_id: str | None) -> None:
        """Notes that the engine, which is paused, holds ``version`` from now on, all of it."""
        self._repeats = self._repeats + 1 if version == self.version else 0
        self._gate.switch(version)
        self.whole, self._run_id = True, run_id

    @property
    def run_id(self) -> str | None:
        """Run that the version belongs to; ``None`` if nobody said."""
        return self._run_id

    @property
    def replica_id(self) -> str:
        """Id of the replica."""
        return self._gate.replica_id

    @property
    def is_over(self) -> bool:
        """Whether the replica is dead or closed."""
        return self._gate.state in (ReplicaState.FAILED, ReplicaState.CLOSED)

    @contextlib.asynccontextmanager
    async def exclusive(self, timeout_s: float) -> AsyncIterator[None]:
        """Keeps other updates out."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise SyncError(f"another update was under way for {timeout_s:g} s") from None
        finally:
            self.num_waiting -= 1
        try:
            self._require_alive()
            yield
        finally:
            self._lock.release()

    def begin_push(self, trainer: ProcessIdentity, sender: str, number: int) -> bool:
        """Keeps pushes of other trainers out, until :meth:`end_push` or until this one is gone."""
        before = self._push
        is_same = before is not None and (before.trainer, before.sender) == (trainer, sender)
        if before is not None and not is_same and self._is_under_way(before):
            raise PushUnderWayError(before.trainer.hostname, before.trainer.pid)
        self._push = _Push(trainer, sender, number, time.monotonic())
        return is_same

    def keep_push(self, sender: str, number: int) -> None:
        """Notes a sign of life of whoever pushes."""
        push = self._push
        if push is not None and (push.sender, push.number) == (sender, number):
            push.seen_at = time.monotonic()

    def end_push(self, sender: str, number: int) -> None:
        """Lets other trainers push; does nothing if a later push has begun."""
        push = self._push
        if push is not None and (push.sender, push.number) == (sender, number):
            push.is_open = False

    def _is_under_way(self, push: _Push) -> bool:
        limit_s = PUSH_SILENCE_S if self.whole else TORN_SILENCE_S
        is_silent = time.monotonic() - push.seen_at > limit_s
        return push.is_open and not is_silent and not push.trainer.is_gone()

    def refuse_foreign(self, version: int, run_id: str | None) -> None:
        """Refuses a version that another run's has overtaken, or one of the same number."""
        foreign = run_id is not None and self._run_id not in (None, run_id)
        if foreign and self.version >= version:
            raise StaleVersionError(
                f"version must be greater than {self.version}, to which run {self._run_id} "
                f"brought replica {self.replica_id}, got {version} of run {run_id}"
            )

    def _require_alive(self) -> None:
        """Raises unless the engine can be updated."""
        if self._engine.errored:
            self._set(ReplicaState.FAILED, f"engine core died: {self._engine.dead_error}")
        if self._gate.state in (ReplicaState.FAILED, ReplicaState.CLOSED):
            raise self._gate.refusal()

    async def apply(
        self,
        load: Callable[[float], Awaitable[list[dict[str, Any]]]],
        *,
        version: int,
        run_id: str | None,
        mode: PauseMode,
        clear_cache: bool,
        timeout_s: float,
        verify_s: float = 0.0,
        stage_s: float = 0.0,
    ) -> LoadReport:
        """Pauses the engine, has its workers load, and resumes; :meth:`exclusive` is held."""
        begin, began_at = time.perf_counter(), time.time() - verify_s - stage_s
        was_whole = self.whole
        async with self._paused(mode, clear_cache, timeout_s) as num_restarted:
            paused = time.perf_counter()
            self.whole = False
            answers = await load(timeout_s - (paused - begin))
            failures = [
                f"worker {rank} could not load: {answer['error']}"
                for rank, answer in enumerate(answers)
                if answer["error"]
            ]
            if failures:
                self.whole = was_whole and all(one.get("untouched") for one in answers)
                told = "; ".join(failures)
                raise SyncError(told if self.whole else f"{NOT_WHOLE}: {told}")
            loaded = time.perf_counter()
            await self.ask(
                "labelling",
                internals.set_weight_label(self._engine, str(version)),
                RESUME_TIMEOUT_S,
            )
            self._adopt(version, run_id)
            num_kept = len(self._gate.running)
        done = time.perf_counter()
        return LoadReport(
            version=version,
            loaded=True,
            verify_s=verify_s,
            stage_s=stage_s,
            pause_s=paused - begin,
            load_s=loaded - paused,
            resume_s=done - loaded,
            whole_pause_s=done - begin,
            num_tensors=answers[0]["num_tensors"],
            num_kept=num_kept,
            num_restarted=num_restarted,
            attempts=max(answer["attempts"] for answer in answers),
            path=" and ".join(sorted({answer["path"] for answer in answers})),
            path_reason=next((one["path_reason"] for one in answers if one["path_reason"]), ""),
            began_at=began_at,
        )

    async def call_workers(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        what: str = "loading",
    ) -> list[Any]:
        """Calls a method of every worker and returns their answers; see :meth:`ask`."""
        call = internals.call_workers(self._engine, method, args)
        return await self.ask(what, call, timeout_s)

    async def ask(
        self,
        what: str,
        call: Awaitable[Any],
        timeout_s: float,
    ) -> Any:
        """Awaits the engine's answer, and notices if its core dies: vLLM answers no call then."""
        answer = asyncio.ensure_future(call)
        deadline = time.perf_counter() + timeout_s
        try:
            while not (await asyncio.wait({answer}, timeout=min(POLL_S, timeout_s)))[0]:
                self._require_alive()
                if time.perf_counter() >= deadline:
                    raise SilentEngineError(f"{what} took longer than {timeout_s:.3g} s")
        finally:
            answer.cancel()
        try:
            return answer.result()
        except EngineDeadError:
            self._require_alive()
            raise

    @contextlib.asynccontextmanager
    async def _paused(
        self, mode: PauseMode, clear_cache: bool, timeout_s: float
    ) -> AsyncIterator[int]:
        """Freezes the engine, and on every way out leaves it whole and serving, or out of service.

        Requests in flight outlive a failure before the load began; a failure after that leaves
        weights nobody knows, so the requests are ended and the engine stays paused. A replica that
        has not joined yet does not begin to serve by an update that failed.
        """
        before = self._gate.state
        self._set(ReplicaState.UPDATING)
        try:
            await self.ask(
                "pausing",
                internals.pause_scheduler(self._engine, mode=mode, clear_cache=clear_cache),
                timeout_s,
            )
            num_restarted = await self._send_back_unstarted()
            yield num_restarted
        except BaseException as error:
            if self.whole:
                await self._resume(before)
            else:
                reason = (str(error) or type(error).__name__).partition("\n")[0]
                self._set(ReplicaState.STALE, f"weight update failed: {reason}")
            raise
        await self._resume()

    async def _resume(self, before: ReplicaState = ReplicaState.SERVING) -> None:
        """Lets the engine step again and requests enter."""
        try:
            await self.ask("resuming", self._engine.resume_generation(), RESUME_TIMEOUT_S)
        except BaseException as error:
            self.whole = False  # it may be frozen: only a load that ends well makes it serve again
            self._set(ReplicaState.STALE, f"the engine did not resume: {error}")
            raise
        if before is ReplicaState.STARTING and not self._was_admitted:
            self._set(before)
        elif self.version >= self._floor:
            self._set(ReplicaState.DRAINING if self._drains else ReplicaState.SERVING)
        else:
            self._set(ReplicaState.STALE, f"it did not reach version {self._floor}")

    async def settled(self) -> None:
        """Waits until no load is under way."""
        async with self._lock:
            return

    def hold_back(self, version: int, run_id: str | None) -> None:
        """Takes the replica out of service unless it holds ``version``, or until it does.

        A replica that missed a push which others took is whole, but not current. One that holds
        another run's version of the same number would be taken for current; it must load anew.
        """
        self._floor = max(self._floor, version)
        foreign = self.version == version and run_id not in (None, self._run_id)
        if foreign:
            self.whole = False
        if (foreign or self.version < self._floor) and self._gate.state.admits_requests:
            other = " of this run" if foreign else ""
            self._set(ReplicaState.STALE, f"it did not reach version {self._floor}{other}")

    def admit(self, version: int, run_id: str | None) -> None:
        """Ends the time in which the replica had not joined its service; see ``EngineActor``."""
        starting, self._was_admitted = self._gate.state is ReplicaState.STARTING, True
        self.hold_back(version, run_id)
        if starting and self.whole and self.version >= self._floor:
            self._set(ReplicaState.DRAINING if self._drains else ReplicaState.SERVING)
        elif starting:
            self._set(ReplicaState.STALE, f"it has not reached version {self._floor} yet")

    def drain(self) -> None:
        """Has the replica take no more requests, unless :meth:`undrain` follows."""
        self._drains = True
        if self._gate.state is ReplicaState.SERVING:
            self._set(ReplicaState.DRAINING)

    def undrain(self) -> None:
        """Takes :meth:`drain` back."""
        self._drains = False
        if self._gate.state is ReplicaState.DRAINING:
            self._set(ReplicaState.SERVING)

    def _set(self, state: ReplicaState, reason: str = "") -> None:
        """Changes the replica's state; what is dead or closed stays so."""
        if self._gate.state not in (ReplicaState.FAILED, ReplicaState.CLOSED):
            self._gate.set(state, reason)

    async def _send_back_unstarted(self) -> int:
        """Sends requests without a token back to the gate; they would read old keys otherwise.

        A request that passed the gate just before the pause may not be registered with vLLM yet,
        hence the loop.
        """
        pending = {name: one for name, one in self._gate.running.items() if not one.has_begun}
        for running in pending.values():
            running.restart = True
        deadline = time.perf_counter() + SEND_BACK_TIMEOUT_S
        while left := [name for name in pending if name in self._gate.running]:
            self._require_alive()
            if time.perf_counter() > deadline:
                raise SyncError(f"{len(left)} requests did not leave the paused engine")
            await self._engine.abort(left)
            await asyncio.sleep(0.002)
        return len(pending)


# Pauses and sleep that the engine's user asks for, beside the pauses of updates.
#
# Whoever pauses an engine keeps it paused: a push in between leaves it so.


# Seconds for calls that only ask or clear up.
SHORT_TIMEOUT_S = 30.0
SLEEP_LEVELS = (0, 1, 2)
MEMORY_TAGS = frozenset({"weights", "kv_cache"})


class PausableUpdates(WeightUpdates):
    """``WeightUpdates`` of an engine that its user may pause and put to sleep.

    Attributes:
        held: Whether the user did.
    """

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate) -> None:
        super().__init__(engine, gate)
        self.held = False
        self._asleep: frozenset[str] = frozenset()

    async def pause(self, *, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        """Pauses the engine until :meth:`resume`; new requests wait at the gate."""
        check_mode(mode)
        self._refuse_open("pause_generation")
        call = self._engine.pause_generation
        async with self.exclusive(timeout_s):
            await self._hold("pausing", lambda: call(mode=mode, clear_cache=clear_cache), timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Ends :meth:`pause`; does nothing to an engine that is not paused."""
        self._refuse_open("resume_generation")
        async with self.exclusive(timeout_s):
            if self._asleep:
                raise TransferNotReadyError(
                    f"replica {self.replica_id} is asleep: wake_up, not resume_generation, ends it"
                )
            await self._let_go()

    async def is_paused(self) -> bool:
        """Returns whether vLLM's scheduler is paused; waits while a transfer blocks the engine."""
        return await self.ask("asking", self._engine.is_paused(), SHORT_TIMEOUT_S)

    async def sleep(self, *, level: int, mode: PauseMode, timeout_s: float) -> None:
        """Puts the engine to sleep; new requests wait at the gate until :meth:`wake_up`."""
        check_mode(mode)
        if level not in SLEEP_LEVELS:
            raise UnsupportedArgumentError(f"level must be one of {SLEEP_LEVELS}, got {level!r}")
        able = current_platform.is_cpu() or self._engine.vllm_config.model_config.enable_sleep_mode
        if level > 0 and not able:
            raise UnsupportedArgumentError(
                f"sleep(level={level}) needs enable_sleep_mode=True at launch"
            )
        self._refuse_open("sleep")
        async with self.exclusive(timeout_s):
            await self._hold("falling asleep", lambda: self._engine.sleep(level, mode), timeout_s)
            if level > 0:
                self._asleep = MEMORY_TAGS
            if level > 1:
                self.whole = False

    async def wake_up(self, tags: list[str] | None, *, timeout_s: float) -> bool:
        """Wakes the engine, or the memory that ``tags`` name; fully awake it takes requests.

        After ``sleep(level=2)``: ``wake_up(["weights"])``, an update, ``wake_up(["kv_cache"])``.
        """
        wanted = MEMORY_TAGS if tags is None else frozenset(tags)
        if unknown := sorted(wanted - MEMORY_TAGS - {"scheduling"}):
            raise UnsupportedArgumentError(
                f"tags must be among {sorted(MEMORY_TAGS)} and 'scheduling', got {unknown}"
            )
        self._refuse_open("wake_up")
        async with self.exclusive(timeout_s):
            left = self._asleep - wanted
            if not left and not self.whole:
                raise TransferNotReadyError(
                    f"replica {self.replica_id} has no weights to serve with: "
                    "wake_up(['weights']), then an update, then wake_up(['kv_cache'])"
                )
            await self.ask("waking up", self._engine.wake_up(tags), timeout_s)
            self._asleep = left
            if not left:
                await self._let_go()
        return not left

    async def _hold(self, what: str, call: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Keeps the engine from stepping by ``call``; undone if that fails."""
        before = self.held
        if self._gate.state is ReplicaState.SERVING:
            self._set(ReplicaState.UPDATING)
        self.held = True
        try:
            await self.ask(what, call(), timeout_s)
        except BaseException:
            self.held = before
            if self.whole:
                await self._resume()
            raise

    async def _let_go(self) -> None:
        """Ends what :meth:`_hold` began."""
        if not self.whole:
            raise self._gate.refusal()
        self.held = False
        await self._resume()

    async def _resume(self, before: ReplicaState = ReplicaState.SERVING) -> None:
        if not self.held:
            await super()._resume(before)

    async def apply(self, *args: Any, **options: Any) -> LoadReport:
        """See ``WeightUpdates.apply``; weights that sleep are not to be written to."""
        self._require_weights()
        return await super().apply(*args, **options)

    def _refuse_open(self, what: str) -> None:
        """Refuses what must not happen between the calls of one update."""

    def _require_weights(self) -> None:
        if "weights" in self._asleep:
            raise TransferNotReadyError(
                f"the weights of replica {self.replica_id} are asleep: wake_up(['weights']) first"
            )


# Updates that somebody drives call by call, with vLLM's own calls, beside whole pushes.
#
# They come one at a time: start, update, finish. Between them the replica must neither step on
# weights that are taken apart nor take a push.


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
        """Initialises every worker's transfer engine; for most, all wait for the trainer in it."""
        self._refuse_open("init_weight_transfer_engine")
        async with self.exclusive(timeout_s):
            await self._tell("native_init", init_info, timeout_s=timeout_s, what="initialising")

    async def use(self, backend: str | None) -> None:
        """Has every worker use another transfer engine; ``None`` takes that of the launch."""
        self._refuse_open("use_transfer_engine")
        async with self.exclusive(SHORT_TIMEOUT_S):
            await self._tell("native_use", backend, timeout_s=SHORT_TIMEOUT_S, what="changing")

    async def leave(self) -> None:
        """Leaves the trainer's group; an open update is given up first, see :meth:`abandon`."""
        if self._open is not None:
            await self.abandon()
        async with self.exclusive(SHORT_TIMEOUT_S):
            await self._tell("native_shutdown", timeout_s=SHORT_TIMEOUT_S, what="leaving")

    async def abandon(self, reason: str = "") -> None:
        """Gives the open update up; a replica that had received part of it is stale then."""
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
        """Receives one part of the update, or all of it."""
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
        """Ends the update: the engine goes on, unless its user had paused it before."""
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
        """Says whether :meth:`load` could begin, so that nobody enters a collective in vain."""
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
        """Receives a whole version through the transfer engine, in one go."""
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
        """Refuses a version that is older than the one held, or another run's of that number."""
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
    """Raises for the workers that failed, with this library's own type where theirs was one."""
    failed = {rank: one for rank, one in enumerate(answers) if one["error"]}
    if not failed:
        return
    kinds = {one["error_type"] for one in failed.values()} & set(errors.__all__)
    kind = getattr(errors, kinds.pop()) if len(kinds) == 1 else TransferError
    reasons = (f"worker {rank}: {one['error']}" for rank, one in failed.items())
    raise kind(f"replica {replica_id}: " + "; ".join(reasons))


# Versions that arrive in parts, one call each, through vLLM's transfer engine.


class ChunkedLoads:
    """Takes one version at a time: :meth:`begin`, :meth:`receive` for each part, :meth:`finish`.

    A sender that falls silent in between loses its turn after the time limit it gave.
    """

    def __init__(self, updates: NativeUpdates) -> None:
        self._updates = updates
        self._version, self._run_id = 0, ""
        self._begun = self._paused = 0.0
        self._num_tensors = 0
        self._expiry: asyncio.Task[None] | None = None

    async def begin(
        self, version: int, run_id: str, mode: PauseMode, clear_cache: bool, timeout_s: float
    ) -> None:
        """Pauses the engine for a version to come."""
        begun = time.perf_counter()
        self._updates.refuse_stale(version, run_id)
        await self._updates.begin(
            mode=mode, clear_cache=clear_cache, timeout_s=timeout_s, idle_timeout_s=timeout_s
        )
        self._begun, self._paused = begun, time.perf_counter()
        self._version, self._run_id, self._num_tensors = version, run_id, 0
        self._expiry = asyncio.create_task(self._expire(timeout_s))

    async def receive(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives one part; see ``NativeUpdates.receive``."""
        self._require_begun()
        await self._updates.receive(update_info, timeout_s=timeout_s)
        self._num_tensors += len(update_info["names"])

    async def finish(self) -> LoadReport:
        """Ends the version; see ``NativeUpdates.finish``."""
        self._require_begun()
        self._stop_expiry()
        begin = time.perf_counter()
        num_kept, num_restarted = self._updates.num_kept, self._updates.num_restarted
        await self._updates.finish(str(self._version), run_id=self._run_id)
        done = time.perf_counter()
        return LoadReport(
            version=self._version,
            loaded=True,
            pause_s=self._paused - self._begun,
            load_s=begin - self._paused,
            resume_s=done - begin,
            whole_pause_s=done - self._begun,
            num_tensors=self._num_tensors,
            num_kept=num_kept,
            num_restarted=num_restarted,
            attempts=1,
            path="layerwise",
            path_reason="vLLM's own transfer engines always take it",
            began_at=time.time() - (time.perf_counter() - self._begun),
        )

    async def give_up(self, run_id: str) -> None:
        """Ends what run ``run_id`` has begun; the replica is stale if a part of it had come."""
        if self._expiry is not None and self._run_id == run_id:
            self._stop_expiry()
            if self._updates.is_open:
                await self._updates.abandon()

    async def _expire(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._expiry = None
        if self._updates.is_open:
            logger.warning(
                "replica %s: version %d did not arrive within %g s and is given up",
                self._updates.replica_id,
                self._version,
                timeout_s,
            )
            try:
                await self._updates.abandon()
            except SyncError as error:  # nobody waits for this task
                logger.warning("replica %s: %s", self._updates.replica_id, error)

    def _require_begun(self) -> None:
        if self._expiry is None:
            raise TransferNotReadyError("no version was begun, or its time was up")

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

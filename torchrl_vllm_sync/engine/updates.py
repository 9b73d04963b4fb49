"""Weight updates of one engine: pause, load, acknowledge, resume, and the version they leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.errors import (
    PushUnderWayError,
    SilentEngineError,
    StaleVersionError,
    SyncError,
)
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.admission import AdmissionGate
    from torchrl_vllm_sync.weights.storage import ProcessIdentity

__all__ = ["LoadReport", "WeightUpdates"]

# Seconds within which requests without a token must have left a paused engine.
SEND_BACK_TIMEOUT_S = 10.0
# Seconds within which a paused engine must answer the call to resume.
RESUME_TIMEOUT_S = 30.0
# Seconds between signs of life to whoever waits for a load under way.
HEARTBEAT_S = 5.0
# Seconds between looks at whether an engine core that owes an answer is still alive.
POLL_S = 0.5
# What a replica adds to the reason when a load broke off that had begun to write.
NOT_WHOLE = "its weights are not whole, and it is stale until the next push repairs it"
# A trainer on another host that gives no sign of life for so long is pushing no more.
PUSH_SILENCE_S = 30.0


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

    Args:
        engine: The replica's engine.
        gate: The gate in front of it.
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
        """Keeps other updates out.

        Args:
            timeout_s: Seconds to wait for one that is under way.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: Another update was under way all the time.
        """
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
        """Keeps pushes of other trainers out, until :meth:`end_push` or until this one is gone.

        Args:
            trainer: The process that pushes.
            sender: Tells its pushes from those of others in that process.
            number: Number of the push; later ones have greater numbers.

        Returns:
            Whether the push before was the same sender's.

        Raises:
            PushUnderWayError: Another trainer's push is open.
        """
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

    @staticmethod
    def _is_under_way(push: _Push) -> bool:
        is_silent = time.monotonic() - push.seen_at > PUSH_SILENCE_S
        return push.is_open and not is_silent and not push.trainer.is_gone()

    def refuse_foreign(self, version: int, run_id: str | None) -> None:
        """Refuses a version that another run's has overtaken, or one of the same number.

        Raises:
            StaleVersionError: Another run brought the engine to ``version`` or a newer one.
        """
        foreign = run_id is not None and self._run_id not in (None, run_id)
        if foreign and self.version >= version:
            raise StaleVersionError(
                f"version must be greater than {self.version}, to which run {self._run_id} "
                f"brought replica {self.replica_id}, got {version} of run {run_id}"
            )

    def _require_alive(self) -> None:
        """Raises unless the engine can be updated.

        Raises:
            ReplicaUnavailableError: It is dead or closed.
        """
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
        """Pauses the engine, has its workers load, and resumes; :meth:`exclusive` is held.

        Args:
            load: Has every worker load within the seconds given, and returns their answers:
                ``error`` (empty if all is well), ``untouched`` if the weights are as they were,
                ``num_tensors``, ``attempts``, ``path`` and ``path_reason``.
            version: Policy version of what is loaded.
            run_id: Run that it belongs to.
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Recompute the keys and values of requests in flight under the new weights.
            timeout_s: Seconds for everything.
            verify_s: Seconds spent on checking before; for the report.
            stage_s: Seconds spent on receiving before; for the report.

        Raises:
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: The load failed or took too long. Unless the workers say that they are
                untouched the replica is stale: it takes no requests until a later load succeeds.
        """
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
        heartbeat: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker and returns their answers; see :meth:`ask`."""
        call = internals.call_workers(self._engine, method, args)
        return await self.ask(what, call, timeout_s, heartbeat=heartbeat)

    async def ask(
        self,
        what: str,
        call: Awaitable[Any],
        timeout_s: float,
        *,
        heartbeat: Callable[[], None] | None = None,
    ) -> Any:
        """Awaits the engine's answer, and notices if its core dies: vLLM answers no call then.

        Raises:
            ReplicaUnavailableError: The engine core died.
            SilentEngineError: There was no answer in time.
        """
        answer = asyncio.ensure_future(call)
        deadline = time.perf_counter() + timeout_s
        beaten = time.perf_counter()
        try:
            while not (await asyncio.wait({answer}, timeout=min(POLL_S, timeout_s)))[0]:
                self._require_alive()
                now = time.perf_counter()
                if now >= deadline:
                    raise SilentEngineError(f"{what} took longer than {timeout_s:.3g} s")
                if heartbeat is not None and now - beaten > HEARTBEAT_S:
                    heartbeat()
                    beaten = now
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
        """Lets the engine step again and requests enter.

        Args:
            before: State before an update that failed; what was ``STARTING`` goes on to be that,
                until it is admitted.

        Raises:
            ReplicaUnavailableError: The engine core is dead.
            SyncError: It did not resume in time; the replica is stale.
        """
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

        Args:
            version: Oldest version to serve with from now on.
            run_id: Run that ``version`` belongs to; ``None`` accepts any.
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

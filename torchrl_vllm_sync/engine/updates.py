"""Weight updates of one engine: pause, load, acknowledge, resume, and the version they leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.answers import AdmissionGate, RunningRequest
from torchrl_vllm_sync.replica import LoadReport, ReplicaState
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
from torchrl_vllm_sync.weights.transport import PauseMode

Replies = list[dict[str, Any]]  # the answers of all workers, by rank
Load = Callable[[float], Awaitable[Replies]]  # has them load within so many seconds

# Seconds for calls that only ask, label, resume or clear up.
SHORT_TIMEOUT_S = 30.0
# Seconds between checks that an engine core that has yet to answer is alive.
POLL_S = 0.5
# Added to the reason when a load broke off that had begun to write.
NOT_WHOLE = "its weights are not whole, and it is stale until the next push repairs it"
# A trainer on another host that gives no sign of life for so long counts as no longer pushing.
PUSH_SILENCE_S = 30.0
# The same where its push left the weights incomplete: a stopped trainer must not keep them so.
# Signs come every 5 s and may be half as late again.
TORN_SILENCE_S = 7.5


def path_of(answers: Replies) -> dict[str, str]:
    """How the workers' weights get into the model, and why not by a plan."""
    why = next((one["path_reason"] for one in answers if one["path_reason"]), "")
    return {"path": " and ".join(sorted({one["path"] for one in answers})), "path_reason": why}


@dataclass(slots=True)
class Pause:
    """One pause of the engine for an update; seconds of ``time.perf_counter()``."""

    begun: float = field(default_factory=time.perf_counter)
    reached: float = 0.0
    loaded: float = 0.0
    num_restarted: int = 0
    num_kept: int = 0
    ended: float = 0.0  # where nothing was paused, but workers stood until they had loaded

    def report(self, version: int, answers: Replies, **load: Any) -> LoadReport:
        """The report on the update that has just ended; ``load`` are fields of its own."""
        now = time.perf_counter()
        end, since_s = self.ended or now, now - self.begun
        before = load.get("verify_s", 0.0) + load.get("stage_s", 0.0)
        return LoadReport(
            version=version,
            pause_s=self.reached - self.begun,
            load_s=self.loaded - self.reached,
            resume_s=end - self.loaded,
            whole_pause_s=end - self.begun,
            num_kept=self.num_kept,
            num_restarted=self.num_restarted,
            began_at=time.time() - since_s - before,
            num_tensors=answers[0]["num_tensors"],
            attempts=max(one.get("attempts", 1) for one in answers),
            **path_of(answers),
            **load,
        )


class Updates:
    """Whole versions for one engine, which never steps while its weights are not whole."""

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate) -> None:
        self.whole = True  # whether the weights are known to be all of `version`
        self.apart = False  # whether models may be taken apart for a reload, which the next repairs
        self.held = False  # whether the engine's user has paused it
        self.pinned = False  # whether the version must stay as it is
        self.is_shared = False  # whether weights are in memory that a trainer writes in place
        self.asleep: frozenset[str] = frozenset()  # memory put to sleep: "weights", "kv_cache"
        self.run_id: str | None = None  # of the run that the version belongs to, if that is known
        self.num_waiting = 0  # updates that wait for the one under way
        self._engine, self._gate = engine, gate
        self._lock = asyncio.Lock()
        # Drops what came as a version of an adapter and is not to be served.
        self.drop_adapter: Callable[[int], object] = lambda _: None
        self.served_adapters: Callable[[], list[int]] = list  # what workers know them by
        self._floor = self._repeats = 0
        self._drains = self._was_admitted = False
        # Trainer and sender of the last push that began; sender and number of one under way.
        self._pushed_by: tuple[ProcessIdentity, str] | None = None
        self._push: tuple[str, int] | None = None
        self._seen_at = 0.0  # when its trainer last gave a sign of life

    @property
    def version(self) -> int:
        """Policy version the engine serves with; 0 is that of the launch."""
        return self._gate.version

    @property
    def base(self) -> int:
        """Version of the base weights; later ones brought adapters."""
        return self._gate.base

    @property
    def salt(self) -> str:
        """Name of the weights in keys of cached prefixes; a repeated version has one of its own."""
        return f"v{self.base}" + (f".{self._repeats}" if self._repeats else "")

    @property
    def replica_id(self) -> str:
        return self._gate.replica_id

    @property
    def is_busy(self) -> bool:
        """Whether an update, or a call that is serialised with updates, is under way."""
        return self._lock.locked()

    @property
    def is_over(self) -> bool:
        return self._gate.is_over

    def begin_push(self, trainer: ProcessIdentity, sender: str, number: int) -> bool:
        """Keeps other trainers out until this push ends; returns whether the last was its too."""
        if self.pinned:  # a trainer that has yet to learn of it tells no end to one left out
            return False
        before, now = self._pushed_by, time.monotonic()
        is_same = before == (trainer, sender)
        if before is not None and self._push is not None and not is_same:
            limit_s = PUSH_SILENCE_S if self.whole else TORN_SILENCE_S
            if now - self._seen_at <= limit_s and not before[0].is_gone():
                raise errors.PushUnderWayError(before[0].hostname, before[0].pid)
        self._pushed_by, self._push, self._seen_at = (trainer, sender), (sender, number), now
        return is_same

    def keep_push(self, sender: str, number: int) -> None:
        if self._push == (sender, number):
            self._seen_at = time.monotonic()

    def end_push(self, sender: str, number: int) -> None:
        """Lets other trainers push; does nothing if a later push has begun."""
        if self._push == (sender, number):
            self._push = None

    async def pin(self, version: int | None) -> None:
        """Refuses all updates of the version, which must be this one, until it is let go."""
        async with self.exclusive(SHORT_TIMEOUT_S):
            if version not in (None, self.version):  # it follows snapshots
                raise errors.VersionNotReachedError(version, {self.replica_id: "moved on"}, 0.0)
            self.pinned, self._push = True, None  # the end of a turn is not told to one left out

    def require_unpinned(self) -> None:
        if self.pinned:
            at = f"at version {self.version}, until it is handed back"
            raise errors.TransferNotReadyError(f"replica {self.replica_id} is pinned {at}")

    def refuse_older(self, version: int, what: str = "version") -> None:
        self.require_unpinned()  # also of its own version: what came may be other weights
        if version < self.version:
            held = f"{self.version}, which replica {self.replica_id} holds"
            raise errors.StaleVersionError(f"{what} must be at least {held}, got {version}")

    def refuse_foreign(self, version: int, run_id: str | None) -> None:
        """Refuses a version that another run's has overtaken or equals."""
        foreign = run_id is not None and self.run_id not in (None, run_id)
        if foreign and self.version >= version:
            raise errors.StaleVersionError(
                f"version must be greater than {self.version}, to which run {self.run_id} "
                f"brought replica {self.replica_id}, got {version} of run {run_id}"
            )

    def require_weights(self) -> None:
        if "weights" in self.asleep:
            asleep = f"the weights of replica {self.replica_id} are asleep"
            raise errors.TransferNotReadyError(f"{asleep}: wake_up(['weights']) first")

    def require_whole(self) -> None:
        self.require_weights()
        if not self.whole:
            raise errors.TransferError(f"replica {self.replica_id} holds no whole version")

    def require_asleep(self) -> None:
        """Refuses writes to weights that are being computed with."""
        if self.is_shared and not self.asleep:
            serves = f"replica {self.replica_id} serves the weights that are about to be written"
            raise errors.TransferNotReadyError(f"{serves}: sleep first")

    def require_base(self, version: int) -> None:
        self.require_whole()
        if self.base != version:
            held = f"replica {self.replica_id} holds base weights of version {self.base}"
            raise errors.TransferError(f"{held}, and the adapter adds to those of {version}")

    def _require_alive(self) -> None:
        if self._engine.errored:
            self.set_state(ReplicaState.FAILED, f"engine core died: {self._engine.dead_error}")
        if self.is_over:
            raise self._gate.refusal()

    @contextlib.asynccontextmanager
    async def exclusive(self, timeout_s: float) -> AsyncIterator[Deadline]:
        """Keeps other updates out; yields what it leaves of the time."""
        deadline = Deadline(timeout_s)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise errors.SyncError(f"another update was under way for {timeout_s:g} s") from None
        finally:
            self.num_waiting -= 1
        try:
            self._require_alive()
            yield deadline
        finally:
            self._lock.release()

    def raise_failures(self, answers: Replies) -> None:
        """Raises for the workers that failed, with this library's error type if they share one."""
        failed = {rank: one for rank, one in enumerate(answers) if one["error"]}
        if failed:
            kinds = {one["error_type"] for one in failed.values()} & set(errors.__all__)
            kind = getattr(errors, kinds.pop()) if len(kinds) == 1 else errors.TransferError
            reasons = (f"worker {rank}: {one['error']}" for rank, one in failed.items())
            raise kind(f"replica {self.replica_id}: " + "; ".join(reasons))

    async def call_workers(
        self, method: str, *args: Any, timeout_s: float, what: str = "loading"
    ) -> list[Any]:
        return await self.ask(what, internals.call_workers(self._engine, method, args), timeout_s)

    async def ask_workers(
        self, method: str, *args: Any, timeout_s: float = SHORT_TIMEOUT_S, what: str
    ) -> Replies:
        answers = await self.call_workers(method, *args, timeout_s=timeout_s, what=what)
        self.raise_failures(answers)
        return answers

    def loras_in_use(self) -> set[int]:
        return internals.loras_in_use(self._engine)

    async def probe_workers(self) -> None:
        await self.call_workers("sync_staging_refusal", timeout_s=60.0, what="a sign of life")

    async def ask(self, what: str, call: Awaitable[Any], timeout_s: float = SHORT_TIMEOUT_S) -> Any:
        """Awaits the engine's answer; raises if its core dies, since vLLM answers no call then."""
        try:
            return await self._answer(what, call, timeout_s)
        except Exception as error:
            if type(error) is Exception:  # a call failed in the core, maybe since workers died
                await self._require_workers()
            raise

    async def _require_workers(self) -> None:
        """Raises if the workers are gone, which their core answers before it dies, too."""
        try:
            await self._answer("a sign of life", internals.ask_health(self._engine))
        except Exception as error:
            if type(error) is not Exception:
                raise
            self.set_state(ReplicaState.FAILED, f"a worker is not well: {error}")
            raise self._gate.refusal() from error

    async def _answer(
        self, what: str, call: Awaitable[Any], timeout_s: float = SHORT_TIMEOUT_S
    ) -> Any:
        answer, deadline = asyncio.ensure_future(call), Deadline(timeout_s)
        try:
            while not (await asyncio.wait({answer}, timeout=min(POLL_S, timeout_s)))[0]:
                self._require_alive()
                if deadline.passed:
                    raise errors.SilentEngineError(f"{what} took longer than {timeout_s:.3g} s")
            return answer.result()
        except EngineDeadError:
            self._require_alive()
            raise
        finally:
            answer.cancel()

    async def apply(
        self,
        load: Load,
        version: int,
        run_id: str | None,
        timeout_s: float,
        phases: dict[str, float] | None = None,
        **options: Any,
    ) -> LoadReport:
        """Pauses as ``options`` say, loads, and resumes; ``phases`` of the report came before."""
        if self.apart:
            await self.put_together()
        self.require_weights()
        was_whole = self.whole
        async with self.paused(timeout_s, **options) as pause:
            self.whole = False
            answers = await load(timeout_s - (pause.reached - pause.begun))
            self._check(answers, was_whole)
            await self.commit(pause, version, str(version), run_id)
        return pause.report(version, answers, **(phases or {}))

    def can_swap(self, mode: PauseMode = "keep", clear_cache: bool = False) -> bool:
        """Whether :meth:`swap` does what :meth:`apply` does; an incomplete engine may be paused."""
        keeps = mode == "keep" and not clear_cache and self.whole and not self.apart
        return keeps and internals.knows_its_steps(self._engine.vllm_config)

    async def swap(
        self,
        method: str,
        *args: Any,
        version: int,
        run_id: str | None,
        timeout_s: float,
        phases: dict[str, float] | None = None,
    ) -> LoadReport:
        """Has the workers load between two steps; ``computed`` says how far the one before came."""
        self.require_weights()
        unstarted: list[RunningRequest] = []

        def take(answers: Replies) -> None:
            """Comes ahead of all that is sampled afterwards."""
            self._check(answers, was_whole=True)
            self._switch(version, answers[0]["computed"])
            unstarted.extend(self._mark_unstarted())

        async with self.paused(timeout_s, None) as pause:
            self.whole = False
            call = internals.call_between_steps(self._engine, method, args, take)
            answers = await self.ask("swapping", call, timeout_s)
            pause.loaded = pause.ended = time.perf_counter()
            pause.begun = pause.reached = pause.loaded - max(one["seconds"] for one in answers)
            pause.num_restarted = await self._send_back(unstarted)
            await self.commit(pause, None, str(version), run_id)
        return pause.report(version, answers, **(phases or {}))

    def _check(self, answers: Replies, was_whole: bool) -> None:
        if told := "; ".join(
            f"worker {rank} could not load: {one['error']}\n{one.get('traceback', '')}".rstrip()
            for rank, one in enumerate(answers)
            if one["error"]
        ):
            self.whole = was_whole and all(one.get("untouched") for one in answers)
            error = errors.SyncError(told if self.whole else f"{NOT_WHOLE}: {told}")
            self._end_if_torn(error)
            raise error

    @contextlib.asynccontextmanager
    async def paused(
        self, timeout_s: float, mode: PauseMode | None = "keep", clear_cache: bool = False
    ) -> AsyncIterator[Pause]:
        """Freezes the engine; on every exit it is whole and serving, or stale without requests."""
        # Without a mode it steps on, and only requests that would enter wait.
        before, pause = self._gate.state, Pause()
        self.set_state(ReplicaState.UPDATING)
        try:
            if mode is not None:
                call = internals.pause_scheduler(self._engine, mode=mode, clear_cache=clear_cache)
                await self.ask("pausing", call, timeout_s)
                pause.num_restarted = await self._send_back(self._mark_unstarted())
            pause.reached = time.perf_counter()
            yield pause
        except BaseException as error:
            if self.whole:
                await self.resume(before, is_paused=mode is not None)
            else:
                self._end_if_torn(error)
            raise
        await self.resume(is_paused=mode is not None)

    def _end_if_torn(self, error: BaseException) -> None:
        if not self.whole:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            self.set_state(ReplicaState.STALE, f"weight update failed: {reason}")

    def _mark_unstarted(self) -> list[RunningRequest]:
        """Marks requests without a token to begin again: they would read old keys otherwise."""
        unstarted = [one for one in self._gate.running.values() if not one.has_begun]
        for running in unstarted:
            running.restart = True
        return unstarted

    async def _send_back(self, unstarted: list[RunningRequest]) -> int:
        # What vLLM is still preparing, which takes long with images, goes back when it is done.
        if ids := [one.engine_id for one in unstarted if one.sample is not None]:
            await self.ask("sending back", self._engine.abort(ids))
        return len(unstarted)

    async def commit(
        self, pause: Pause, version: int | None, label: str | None, run_id: str | None
    ) -> None:
        """Labels the weights, which are in place, and notes that the engine holds all of them."""
        if version is not None:  # else they were switched to between two steps
            pause.loaded = time.perf_counter()
        if label is not None:
            await self.label(label)
        if version is not None:
            self._switch(version)
        self.whole, self.run_id = True, run_id
        pause.num_kept = sum(one.has_begun for one in self._gate.running.values())

    def _switch(self, version: int, computed: dict[str, int] | None = None) -> None:
        self._repeats = self._repeats + 1 if version == self.version else 0
        self._gate.switch(version, computed)

    async def label(self, label: str) -> None:
        await self.ask("labelling", internals.set_weight_label(self._engine, label))

    async def put_together(self) -> None:
        await self.ask_workers("native_abandon", what="giving up")
        self.apart = False

    async def resume(
        self, before: ReplicaState = ReplicaState.SERVING, *, is_paused: bool = True
    ) -> None:
        """Lets the engine step again and requests enter, unless its user holds it."""
        if self.held:
            return
        try:
            if is_paused:
                await self.ask("resuming", self._engine.resume_generation())
        except BaseException as error:
            self.whole = False  # it may be frozen: only a successful load makes it serve again
            self.set_state(ReplicaState.STALE, f"the engine did not resume: {error}")
            raise
        if before is ReplicaState.STARTING and not self._was_admitted:
            self.set_state(before)
        else:
            self._serve_or(f"it did not reach version {self._floor}")

    async def advance(self, version: int, run_id: str | None) -> None:
        """Moves to a version of the same base weights: an adapter came, for requests to come."""
        self._gate.advance(version)
        self.run_id = run_id
        await self.resume(self._gate.state, is_paused=False)

    def set_state(self, state: ReplicaState, reason: str = "") -> None:
        if not self.is_over:
            self._gate.set(state, reason)

    def _serve_or(self, why_stale: str) -> None:
        """Admits requests, unless the replica leaves (``DRAINING``) or is behind (``STALE``)."""
        if self.version < self._floor or not self.whole:
            self.set_state(ReplicaState.STALE, why_stale)
        else:
            self.set_state(ReplicaState.DRAINING if self._drains else ReplicaState.SERVING)

    def hold_back(self, version: int, run_id: str | None, let_go: bool = False) -> None:
        """Takes a replica that missed a push out of service until it holds ``version``."""
        self.pinned = self.pinned and not let_go
        if self.pinned:
            return  # whoever lets go of it says it again
        self._floor = max(self._floor, version)
        # Another run's version of the same number would be taken for this one: it must load anew.
        foreign = self.version == version and run_id not in (None, self.run_id)
        if foreign and version != self.base:
            self.drop_adapter(version)
        else:
            self.whole = self.whole and not foreign
        if (foreign or self.version < self._floor) and self._gate.state.admits_requests:
            other = " of this run" if foreign else ""
            self.set_state(ReplicaState.STALE, f"it did not reach version {self._floor}{other}")

    def admit(self, version: int, run_id: str | None) -> None:
        """Lets a replica that has joined a running service serve once it holds ``version``."""
        starting, self._was_admitted = self._gate.state is ReplicaState.STARTING, True
        self.hold_back(version, run_id)
        if starting:
            self._serve_or(f"it has not reached version {self._floor} yet")

    def drain(self) -> None:
        self._drains = True
        if self._gate.state is ReplicaState.SERVING:
            self.set_state(ReplicaState.DRAINING)

    def undrain(self) -> None:
        self._drains = False
        if self._gate.state is ReplicaState.DRAINING:
            self._serve_or(f"it did not reach version {self._floor}")

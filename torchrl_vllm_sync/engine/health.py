"""Health checks of one engine: its core's process, and the answers of the core and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.replica import ReplicaState, Silence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.gate import AdmissionGate


# Seconds between checks: a dead engine core is noticed at the next one.
LOOK_S = 0.5
# Seconds from an answer to the next question: at most these, and at most this part of the limit.
MAX_BEAT_S = 5.0
BEATS_PER_LIMIT = 4
# Seconds for which a caller's own call may block the engine by default.
BLOCKING_CALL_S = 300.0


class EngineHealth:
    """Asks one engine for a sign of life periodically, and marks its replica when none comes.

    The question goes to every worker, through the loop in which an engine core steps: no answer
    comes when the core or a worker is stopped or stuck, or when a step does not end. A request that
    is never scheduled does not show: its own time limit ends it.

    The replica is marked ``FAILED``, for good, within a second of vLLM's noticing a dead core or
    worker, and within ``unresponsive_after_s``, a quarter of that (at most 5 s) and 1 s of a
    silence; not while a call blocks the engine by design: updates, pauses and sleep, which have
    limits of their own (``is_updating``), and what runs within :meth:`blocking`.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        gate: AdmissionGate,
        *,
        unresponsive_after_s: float,
        is_updating: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._gate = engine, gate
        self._limit_s, self._is_updating = unresponsive_after_s, is_updating
        self._clock = clock
        self._beat_s = min(MAX_BEAT_S, unresponsive_after_s / BEATS_PER_LIMIT)
        self._silence = Silence(clock)
        self._answered_at = clock()
        self._question: asyncio.Task[None] | None = None
        self._blocking: list[Deadline] = []
        self._watch: asyncio.Task[None] | None = None

    @property
    def answer_age_s(self) -> float:
        return self._clock() - self._answered_at

    def start(self) -> None:
        """Starts the checks, in a task of the running event loop."""
        self._watch = asyncio.create_task(self._look_again())

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._drop_question()

    @contextlib.contextmanager
    def blocking(self, timeout_s: float | None = None) -> Iterator[None]:
        """Excuses silence while inside: a caller's call may keep the engine busy."""
        limit_s = BLOCKING_CALL_S if timeout_s is None else timeout_s
        limit = Deadline(limit_s, clock=self._clock)
        self._blocking.append(limit)
        try:
            yield
        finally:
            self._blocking.remove(limit)

    @property
    def _is_excused(self) -> bool:
        return self._is_updating() or not all(one.passed for one in self._blocking)

    async def _look_again(self) -> None:
        while self.look():  # noqa: ASYNC110  silence raises no event
            await asyncio.sleep(LOOK_S)

    def look(self) -> bool:
        """Checks once: asks if it is time to, and marks the replica if an answer is overdue."""
        if self._gate.state not in (ReplicaState.FAILED, ReplicaState.CLOSED):
            reason = self._failure()
            if not reason:
                is_time = self.answer_age_s >= self._beat_s and not self._is_excused
                if self._question is None and is_time:
                    self._question = asyncio.ensure_future(internals.ask_health(self._engine))
                return True
            self._gate.set(ReplicaState.FAILED, reason)
        self._drop_question()
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

    def _drop_question(self) -> None:
        """Cancels the question; vLLM ignores an answer that nothing waits for."""
        if self._question is not None:
            self._question.cancel()
            self._question = None

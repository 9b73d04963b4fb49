"""Pauses and sleep that the engine's user asks for, beside the pauses of updates.

Whoever pauses an engine keeps it paused: a push in between leaves it so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from torchrl_vllm_sync.engine.updates import WeightUpdates
from torchrl_vllm_sync.errors import TransferNotReadyError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.weights.transport import check_mode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_vllm_sync.engine.admission import AdmissionGate
    from torchrl_vllm_sync.engine.updates import LoadReport
    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["SHORT_TIMEOUT_S", "PausableUpdates"]

# Seconds for calls that only ask or clear up.
SHORT_TIMEOUT_S = 30.0
SLEEP_LEVELS = (0, 1, 2)
MEMORY_TAGS = frozenset({"weights", "kv_cache"})


class PausableUpdates(WeightUpdates):
    """``WeightUpdates`` of an engine that its user may pause and put to sleep.

    Attributes:
        held: Whether the user did.

    Args:
        engine: The replica's engine.
        gate: The gate in front of it.
    """

    def __init__(self, engine: AsyncLLM, gate: AdmissionGate) -> None:
        super().__init__(engine, gate)
        self.held = False
        self._asleep: frozenset[str] = frozenset()

    async def pause(self, *, mode: PauseMode, clear_cache: bool, timeout_s: float) -> None:
        """Pauses the engine until :meth:`resume`; new requests wait at the gate.

        Args:
            mode: vLLM's pause mode: ``keep``, ``wait`` or ``abort``.
            clear_cache: Drop cached prefixes; frozen requests recompute theirs.
            timeout_s: Seconds for it; ``wait`` takes as long as the requests in flight.

        Raises:
            UnsupportedArgumentError: There is no such mode.
            TransferNotReadyError: A weight update is open, which has paused the engine itself.
            ReplicaUnavailableError: The engine is dead or closed.
            SyncError: It took too long, and the engine goes on.
        """
        check_mode(mode)
        self._refuse_open("pause_generation")
        call = self._engine.pause_generation
        async with self.exclusive(timeout_s):
            await self._hold("pausing", lambda: call(mode=mode, clear_cache=clear_cache), timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Ends :meth:`pause`; does nothing to an engine that is not paused.

        Raises:
            TransferNotReadyError: A weight update is open, or the engine is asleep.
            ReplicaUnavailableError: The engine is dead or closed, or its weights are not whole.
            SyncError: A push was under way for ``timeout_s``, or the engine did not resume.
        """
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
        """Puts the engine to sleep; new requests wait at the gate until :meth:`wake_up`.

        Args:
            level: 0 pauses only; 1 moves weights to the host and drops keys and values; 2 drops
                both, so that an update must come before the engine is fully awake again.
            mode: vLLM's pause mode.
            timeout_s: Seconds for it.

        Raises:
            UnsupportedArgumentError: No such level or mode, or an engine launched without
                ``enable_sleep_mode``.
            TransferNotReadyError: A weight update is open.
            SyncError: It took too long.
        """
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

        Returns:
            Whether it is fully awake.

        Raises:
            UnsupportedArgumentError: There is no such tag.
            TransferNotReadyError: A weight update is open, or it would step on weights that were
                dropped.
            SyncError: It took too long.
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
        """Ends what :meth:`_hold` began.

        Raises:
            ReplicaUnavailableError: The weights are not whole: it stays paused.
        """
        if not self.whole:
            raise self._gate.refusal()
        self.held = False
        await self._resume()

    async def _resume(self, before: ReplicaState = ReplicaState.SERVING) -> None:
        if not self.held:
            await super()._resume(before)

    async def apply(self, *args: Any, **options: Any) -> LoadReport:
        """See ``WeightUpdates.apply``; weights that sleep are not to be written to.

        Raises:
            TransferNotReadyError: They do, and nothing was done.
        """
        self._require_weights()
        return await super().apply(*args, **options)

    def _refuse_open(self, what: str) -> None:
        """Refuses what must not happen between the calls of one update."""

    def _require_weights(self) -> None:
        if "weights" in self._asleep:
            raise TransferNotReadyError(
                f"the weights of replica {self.replica_id} are asleep: wake_up(['weights']) first"
            )

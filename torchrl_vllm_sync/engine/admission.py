"""The gate in front of one engine: who may enter, who waits, who must leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import ReplicaState

__all__ = ["AdmissionGate", "RunningRequest"]


@dataclass(slots=True)
class RunningRequest:
    """One request that is inside the engine.

    Attributes:
        engine_id: Id under which the engine knows it; a new one after each restart.
        task: The task that consumes its outputs.
        min_version: Policy version under which its first token is, or will be, sampled.
        restart: Set when an update sends it back to the gate before its first token.
    """

    engine_id: str
    task: asyncio.Task[object] | None
    min_version: int
    restart: bool = False


@dataclass
class AdmissionGate:
    """State of one replica and the requests inside it.

    Requests pass while the state is ``SERVING``, wait while it is ``UPDATING``, and are refused
    with a typed error in every other state, those already waiting included.

    Attributes:
        replica_id: Named in every refusal.
        state: Current state.
        reason: Why the replica is stale or failed.
        running: Requests inside the engine, by engine id.
    """

    replica_id: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    running: dict[str, RunningRequest] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, state: ReplicaState, reason: str = "") -> None:
        """Moves to ``state`` and wakes whoever waits at the gate.

        On ``STALE``, ``FAILED`` and ``CLOSED`` the requests inside are ended too: their tasks are
        cancelled, and each reports the refusal of :meth:`refusal`.
        """
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()
        if state in (ReplicaState.STALE, ReplicaState.FAILED, ReplicaState.CLOSED):
            for request in list(self.running.values()):
                if request.task is not None:
                    request.task.cancel()

    def refusal(self) -> ReplicaUnavailableError:
        """Returns the error with which this replica refuses a request in its present state."""
        return ReplicaUnavailableError(self.replica_id, self.state, self.reason)

    @property
    def refuses(self) -> bool:
        """Whether requests, waiting ones included, are turned away."""
        return not self.state.admits_requests

    async def enter(self) -> None:
        """Waits until the replica serves. The caller bounds the wait.

        Raises:
            ReplicaUnavailableError: The replica does not take requests, or stopped to while this
                one was waiting.
        """
        while self.state is not ReplicaState.SERVING:
            if self.refuses:
                raise self.refusal()
            await self._changed.wait()

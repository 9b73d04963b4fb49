"""The gate in front of one engine: who may enter, who waits, who must leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrl_vllm_sync.engine.samples import SampleVersions
from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from torchrl_vllm_sync.engine.internals import SampleState
    from torchrl_vllm_sync.requests import EngineRequest

__all__ = ["AdmissionGate", "RunningRequest"]


@dataclass(slots=True)
class RunningRequest:
    """One sample of a request that is inside the engine.

    Attributes:
        engine_id: Id under which the engine knows it; a new one after each restart.
        task: The task that is cancelled when the replica stops to serve.
        sample: Its versions; ``None`` until vLLM has registered it.
        restart: Set when an update sends it back to the gate before its first token.
        request: The request that it belongs to, where an answer that has begun is gone on with.
    """

    engine_id: str
    task: asyncio.Task[object] | None
    sample: SampleVersions | None = None
    restart: bool = False
    request: EngineRequest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it has a token of this engine, or ended without one."""
        return self.sample is not None and self.sample.has_begun


@dataclass
class AdmissionGate:
    """State of one replica and the requests inside it.

    Requests pass while the state is ``SERVING``, wait while it is ``UPDATING``, and are refused
    with a typed error in every other state, those already waiting included. Those inside go on
    while the state is ``DRAINING``, up to their end.

    Attributes:
        replica_id: Named in every refusal.
        state: Current state.
        reason: Why the replica is stale or failed.
        version: Policy version that the engine serves with; 0 is what it was launched with.
        running: Samples inside the engine, by engine id.
    """

    replica_id: str
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    version: int = 0
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
        if self.has_ended_requests:
            for request in list(self.running.values()):
                if request.task is not None:
                    request.task.cancel()

    def refusal(self) -> ReplicaUnavailableError:
        """Returns the error with which this replica refuses a request in its present state."""
        return ReplicaUnavailableError(self.replica_id, self.state, self.reason)

    def describe(self) -> str:
        """Says in words what the replica holds and is."""
        return f"holds version {self.version} and is {self.state}"

    @property
    def refuses(self) -> bool:
        """Whether requests, waiting ones included, are turned away."""
        return not self.state.admits_requests

    @property
    def has_ended_requests(self) -> bool:
        """Whether the requests inside were ended when the replica came into its present state."""
        return self.state in (ReplicaState.STALE, ReplicaState.FAILED, ReplicaState.CLOSED)

    def register(self, state: SampleState) -> None:
        """Takes note that vLLM has registered one of the samples inside."""
        request = self.running.get(state.engine_id)
        if request is None:
            return
        resumed = request.request
        begun = None if resumed is None else resumed.begun
        if resumed is not None and begun is not None:
            state.resume(begun, resumed.sampling_params)
        request.sample = SampleVersions(state, self.version, begun)

    def switch(self, version: int) -> None:
        """Notes that ``version`` samples from now on, behind the tokens that the requests have.

        The engine is paused, and its outputs have settled.
        """
        self.version = version
        for request in self.running.values():
            if request.sample is not None:
                request.sample.switch(version)

    async def enter(self, min_version: int = 0) -> None:
        """Waits until the replica serves, and with ``min_version`` or later. The caller bounds it.

        Raises:
            ReplicaUnavailableError: The replica does not take requests, or stopped to while this
                one was waiting.
        """
        while self.state is not ReplicaState.SERVING or self.version < min_version:
            if self.refuses:
                raise self.refusal()
            await self._changed.wait()

"""Waiting for one replica: up to a time limit, and not once it is known to have failed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.routing.ledger import LoadTracker

__all__ = ["ReplicaWatch"]

# What a failed replica had sent before is on its way for at most this long, in seconds.
LINGER_S = 0.2


class ReplicaWatch:
    """Gives up waiting for a replica that fails, leaves the service or gets another actor.

    A replica that is draining or stale goes on being waited for: it answers what it has, or ends it
    by itself.

    Example:
        >>> watch = ReplicaWatch(lambda: replicas, load, replica)
        >>> async with watch.limited(60.0):
        ...     answer = await replica.actor.report.remote()

    Args:
        replicas: Returns the current replicas.
        load: Ledger that says which of them have failed.
        replica: The one that is waited for.

    Attributes:
        loss: Why it is no longer waited for; ``None`` while it is.
    """

    def __init__(
        self, replicas: Callable[[], list[Replica]], load: LoadTracker, replica: Replica
    ) -> None:
        self._replicas, self._load, self._replica = replicas, load, replica
        self.loss: ReplicaUnavailableError | None = None

    @contextlib.asynccontextmanager
    async def limited(self, limit_s: float) -> AsyncGenerator[None]:
        """Bounds what is awaited inside.

        Args:
            limit_s: Seconds that it may take.

        Raises:
            ReplicaUnavailableError: The replica was lost before that had ended.
            TimeoutError: It took longer.
        """
        loop = asyncio.get_running_loop()
        inside = True

        def notice() -> None:
            # In whatever thread learns of it: a replica that is restarted at once has no longer
            # failed when the loop gets round to looking.
            self._note_failure()
            with contextlib.suppress(RuntimeError):  # the loop was closed under its requests
                loop.call_soon_threadsafe(look)

        def look() -> None:
            if not inside:
                return
            self._note_absence()
            last = timer.when()
            if self.loss is not None and last is not None and not timer.expired():
                timer.reschedule(min(last, loop.time() + LINGER_S))

        try:
            async with asyncio.timeout(limit_s) as timer:
                with self._load.watched(notice, urgent=False):
                    self._note_failure()
                    look()
                    yield
        except TimeoutError:
            if self.loss is not None:
                raise self.loss from None
            raise
        finally:
            inside = False

    def _note_failure(self) -> None:
        name = self._replica.replica_id
        known = self._load.snapshot(name)
        if self.loss is None and known is not None and known.state is ReplicaState.FAILED:
            self.loss = ReplicaUnavailableError(name, known.state, known.reason)

    def _note_absence(self) -> None:
        if self.loss is not None:
            return
        name = self._replica.replica_id
        now = next((one for one in self._replicas() if one.replica_id == name), None)
        if now is None:
            self.loss = ReplicaUnavailableError(name, ReplicaState.CLOSED, "it left the service")
        elif now.actor != self._replica.actor:
            self.loss = ReplicaUnavailableError(name, ReplicaState.FAILED, "its actor was replaced")

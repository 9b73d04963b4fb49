"""One request's place on a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from torchrl_vllm_sync.load import LoadTracker

__all__ = ["Reservation"]


class Reservation:
    """One request that counts as in flight on a replica until ``release``.

    Made by ``LoadBalancer.reserve``, which has counted it already. Leaving ``with`` or
    ``async with`` releases it, whichever way it is left.

    Attributes:
        replica_id: Stable id of the replica.
        index: Its position in the balancer's ``actors`` when the request was reserved.
    """

    __slots__ = ("_released", "_tracker", "index", "replica_id")

    def __init__(self, tracker: LoadTracker, replica_id: str, index: int) -> None:
        self._tracker, self._released = tracker, False
        self.replica_id, self.index = replica_id, index

    def release(self) -> None:
        """Gives the place back; does nothing the second time."""
        with self._tracker.lock:
            if not self._released:
                self._released = True
                self._tracker.release(self.replica_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

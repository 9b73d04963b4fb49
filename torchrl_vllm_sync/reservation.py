"""One request's place on a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import numpy as np

    from torchrl_vllm_sync.load import LoadTracker
    from torchrl_vllm_sync.load_snapshot import LoadSnapshot
    from torchrl_vllm_sync.placer import RequestPlacer
    from torchrl_vllm_sync.routing import RoutingRequest

__all__ = ["Reservation"]


class Reservation:
    """One request that counts as in flight on a replica until ``release``.

    Made by ``LoadBalancer.reserve``, which has counted it already. Leaving ``with`` or
    ``async with`` releases it, whichever way it is left.

    Attributes:
        replica_id: Stable id of the replica.
        index: Its position in the balancer's ``actors`` when the request was reserved.
    """

    __slots__ = (
        "_num_samples", "_placer", "_released", "_request", "_tokens", "_tracker", "_version",
        "index", "replica_id",
    )  # fmt: skip

    def __init__(
        self,
        tracker: LoadTracker,
        placer: RequestPlacer,
        request: RoutingRequest,
        snapshot: LoadSnapshot,
        index: int,
        tokens: int,
    ) -> None:
        self._tracker, self._placer, self._request = tracker, placer, request
        self._tokens, self._num_samples = tokens, request.num_samples
        self._version, self._released = snapshot.cache_version, False
        self.replica_id, self.index = snapshot.replica_id, index

    def release(
        self, answers: Sequence[Sequence[int] | np.ndarray] = (), version: int | None = None
    ) -> None:
        """Gives the place back; does nothing the second time.

        Args:
            answers: Token ids of each sample, if the request was answered: the next turn will
                begin with them. Integers, of shape ``(num_tokens,)`` each.
            version: Weight version that they began with; None if only what was known when the
                place was reserved is known.
        """
        with self._tracker.lock:
            if self._released:
                return
            self._released = True
            self._tracker.release(self.replica_id, self._num_samples, self._tokens)
            if answers:
                begun = self._version if version is None else version
                self._placer.finish(self._request, self.replica_id, begun, answers)

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

"""The ledger of a list of actors that no service feeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.load import LoadTracker
from torchrl_vllm_sync.load_monitor import BareActorReader, LoadMonitor
from torchrl_vllm_sync.replica import Replica, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BareActors"]


class BareActors:
    """Actors with TorchRL's methods, counted as serving until they prove dead.

    Their ids are ``"0"``, ``"1"``, ...; a pickled copy has an empty ledger, and asks nobody before
    :meth:`start`.

    Args:
        actors: Handles.
        interval_s: Seconds between two questions to each.

    Attributes:
        tracker: The ledger.
    """

    def __init__(self, actors: Sequence[Any], *, interval_s: float) -> None:
        self._actors = list(actors)
        ids = [str(index) for index in range(len(actors))]
        self.tracker = LoadTracker(ids, state=ReplicaState.SERVING)
        self._monitor = LoadMonitor(
            self.tracker, self._replicas, interval_s=interval_s, read=BareActorReader()
        )

    def start(self) -> None:
        """Begins to ask the actors; does nothing while that goes on."""
        self._monitor.start()

    def stop(self) -> None:
        """Stops asking them."""
        self._monitor.stop()

    def _replicas(self) -> list[Replica]:
        return [Replica(str(index), actor) for index, actor in enumerate(self._actors)]

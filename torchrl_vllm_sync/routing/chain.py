"""Several strategies in fallback order: the first that can tell decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchrl_vllm_sync.routing.strategies import LeastRequests, RoundRobin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrl_vllm_sync.load_snapshot import LoadSnapshot
    from torchrl_vllm_sync.routing.request import RoutingRequest
    from torchrl_vllm_sync.routing.strategies import StrategyFactory, StrategySettings

__all__ = ["StrategyChain"]


class StrategyChain:
    """Asks strategies in order; where none can tell, the fewest requests decide.

    Not safe for threads; whoever calls holds the ledger's lock.

    Args:
        factories: Of the strategies, by name and in fallback order.
        settings: What they are built with.
    """

    def __init__(
        self, factories: Mapping[str, StrategyFactory], settings: StrategySettings
    ) -> None:
        self._names = list(factories)
        self._strategies = [factory(settings) for factory in factories.values()]
        self._last_resort = LeastRequests(settings)

    def choose(self, request: RoutingRequest, choices: Sequence[LoadSnapshot]) -> int:
        """Position among ``choices`` of the replica to use.

        Raises:
            IndexError: A strategy chose none of them.
        """
        for name, strategy in zip(self._names, self._strategies, strict=True):
            position = strategy.choose(request, choices)
            if position is None:
                continue
            if (
                isinstance(position, bool)
                or not isinstance(position, (int, np.integer))
                or not 0 <= position < len(choices)
            ):
                raise IndexError(
                    f"strategy {name!r} must choose one of {len(choices)} positions, "
                    f"got {position!r}"
                )
            return int(position)
        return self._last_resort.choose(request, choices)

    def turn(self, snapshots: Sequence[LoadSnapshot]) -> int:
        """Position among all replicas whose turn is next; 0 if none, or without ``round-robin``."""
        admitting = [at for at, one in enumerate(snapshots) if one.state.admits_requests]
        for strategy in self._strategies:
            if isinstance(strategy, RoundRobin) and admitting:
                return admitting[strategy.peek([snapshots[at] for at in admitting])]
        return 0

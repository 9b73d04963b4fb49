"""How many replicas a service should have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torchrl_vllm_sync.checks import check_integer, check_number
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrl_vllm_sync.routing.ledger import LoadSnapshot

__all__ = ["QueueLengthScaling", "ScalingPolicy"]


class ScalingPolicy(Protocol):
    """Says once a second how many replicas there should be; write your own, or take ours.

    Attributes:
        drain_timeout_s: Seconds that a replica which is removed has for what it is doing.
    """

    drain_timeout_s: float

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted, at least 1.

        Args:
            snapshots: Those there are, but for the ones that are being removed.
            now: Time by the ledger's clock, in seconds.
        """
        ...


class QueueLengthScaling:
    """Adds a replica while requests queue in the engines, removes one while engines are idle.

    One at a time, and only after the queue has been long, or the engines idle, without a break.
    While a replica is starting nothing is added.

    Example:
        >>> AsyncVLLM.from_pretrained(model, scaling=QueueLengthScaling(2, 8))

    Args:
        min_replicas: Never fewer than this, at least 1.
        max_replicas: Never more than this.
        long_queue: Requests waiting in an engine, on average, from which on the queue is long.
        idle_load: Samples in an engine, on average of those that would be left, up to which the
            engines are idle.
        patience_s: Seconds for which either must have lasted.
        drain_timeout_s: Seconds that a replica which is removed has for what it is doing.

    Raises:
        UnsupportedArgumentError: A number is out of range.
    """

    def __init__(
        self,
        min_replicas: int,
        max_replicas: int,
        *,
        long_queue: float = 4.0,
        idle_load: float = 1.0,
        patience_s: float = 30.0,
        drain_timeout_s: float = 300.0,
    ) -> None:
        check_integer("min_replicas", min_replicas, 1)
        check_integer("max_replicas", max_replicas, 1)
        if max_replicas < min_replicas:
            raise UnsupportedArgumentError(
                f"max_replicas must be at least min_replicas, {min_replicas}, got {max_replicas}"
            )
        for name, value in (
            ("long_queue", long_queue),
            ("idle_load", idle_load),
            ("patience_s", patience_s),
            ("drain_timeout_s", drain_timeout_s),
        ):
            check_number(name, value, 0)
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.long_queue, self.idle_load = long_queue, idle_load
        self.patience_s, self.drain_timeout_s = patience_s, drain_timeout_s
        self._long_since: float | None = None
        self._idle_since: float | None = None

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted; see :class:`ScalingPolicy`."""
        num = len(snapshots)
        if num < self.min_replicas or num > self.max_replicas:
            return min(max(num, self.min_replicas), self.max_replicas)
        serving = [one for one in snapshots if one.state.admits_requests]
        queued = sum(one.num_waiting or 0 for one in serving)
        inside = sum(max(one.num_unfinished or 0, one.in_flight) for one in serving)
        is_settled = bool(serving) and all(
            one.state is not ReplicaState.STARTING for one in snapshots
        )
        is_long = is_settled and queued > self.long_queue * len(serving)
        is_idle = is_settled and inside <= self.idle_load * (len(serving) - 1)
        self._long_since = _since(self._long_since, now) if is_long else None
        self._idle_since = _since(self._idle_since, now) if is_idle else None
        if self._lasted(self._long_since, now) and num < self.max_replicas:
            self._long_since = None
            return num + 1
        if self._lasted(self._idle_since, now) and num > self.min_replicas:
            self._idle_since = None
            return num - 1
        return num

    def _lasted(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self.patience_s


def _since(before: float | None, now: float) -> float:
    return now if before is None else before

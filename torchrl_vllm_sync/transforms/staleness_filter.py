"""Keeps rows that too old a policy sampled out of training, and counts them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from torchrl.envs.transforms import PolicyAgeFilter

from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.keys import NO_VERSION, POLICY_VERSION
from torchrl_vllm_sync.transforms.stamps import oldest_versions, staleness_of
from torchrl_vllm_sync.transforms.version_source import as_version_source

if TYPE_CHECKING:
    from tensordict import NestedKey, TensorDictBase

    from torchrl_vllm_sync.transforms.version_source import VersionLike

__all__ = ["StalenessFilter"]


class StalenessFilter(PolicyAgeFilter):
    """Drops rows whose oldest token is more than ``max_staleness`` versions old.

    TorchRL's ``PolicyAgeFilter``, whose places it works in: in a replay buffer on ``extend`` and
    on ``sample``, which may then return fewer rows than asked for, down to none; called with a
    batch; nowhere in an environment. More than TorchRL's, it

    - counts what it drops;
    - raises on rows that carry no stamp, which TorchRL's lets pass;
    - reads ragged rows and rows of several steps: the oldest stamp is the row's;
    - has ``extend`` write nothing if every row is stale, where TorchRL's makes it fail.

    In a buffer put it before ``MCAdvantage``, whose groups are then complete when rows are dropped:
    transforms are applied in reverse order on ``extend``.

    Example:
        >>> buffer = ReplayBuffer(
        ...     storage=LazyStackStorage(512),
        ...     transform=Compose(StalenessFilter(2, service), MCAdvantage(grpo_size=8)),
        ... )
        >>> fresh = StalenessFilter(2, updater)(batch)  # without a buffer

    Args:
        max_staleness: Versions; 0 keeps rows of the newest version only.
        version: What tells the newest version, see ``as_version_source``.
        version_key: Integer entry with the stamp, of the batch's shape and perhaps more; negative
            stamps are none.
        allow_unstamped: Let rows without a stamp pass.

    Raises:
        UnsupportedArgumentError: ``max_staleness`` is no integer from 0 on, or ``version`` nothing
            that a version can be read from.
        UnstampedRowsError: When rows pass: some carry no stamp. None was dropped or counted.
    """

    def __init__(
        self,
        max_staleness: int,
        version: VersionLike,
        *,
        version_key: NestedKey = POLICY_VERSION,
        allow_unstamped: bool = False,
    ) -> None:
        if isinstance(max_staleness, bool) or not isinstance(max_staleness, int):
            raise UnsupportedArgumentError(f"max_staleness must be an int, got {max_staleness!r}")
        if max_staleness < 0:
            raise UnsupportedArgumentError(f"max_staleness must be at least 0, got {max_staleness}")
        super().__init__(
            as_version_source(version),
            max_staleness,
            policy_version_key=version_key,
            strict=not allow_unstamped,
        )
        self._dropped: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def max_staleness(self) -> int:
        """How many versions old a row may be."""
        return self.max_policy_lag

    @property
    def num_dropped(self) -> int:
        """Rows dropped so far, on writing and on reading."""
        return sum(self.dropped_by_staleness.values())

    @property
    def dropped_by_staleness(self) -> dict[int, int]:
        """Rows dropped so far, by how many versions old they were; in ascending order."""
        with self._lock:
            return dict(sorted(self._dropped.items()))

    def reset_counts(self) -> None:
        """Counts from 0 again."""
        with self._lock:
            self._dropped.clear()

    def _filter(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims < 1 or not tensordict.batch_size.numel():
            return tensordict
        versions = oldest_versions(tensordict, self.policy_version_key).reshape(len(tensordict), -1)
        missing = versions == NO_VERSION
        if self.strict and missing.any():
            raise UnstampedRowsError(
                type(self).__name__,
                self.policy_version_key,
                int(missing.any(-1).sum()),
                len(tensordict),
            )
        # TorchRL's way of asking would round what is no integer.
        now = self.current_version() if callable(self.current_version) else self.current_version
        staleness = staleness_of(versions, now)
        staleness = staleness.masked_fill(missing, 0).amax(-1)  # of the steps of a row
        stale = staleness > self.max_staleness
        if not stale.any():
            return tensordict
        with self._lock:
            self._dropped.update(staleness[stale].tolist())
        return tensordict[~stale]

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Drops stale rows before they are written; ``None`` writes nothing."""
        if tensordict is None:  # an MCAdvantage behind it holds incomplete groups back
            return None
        kept = super()._inv_call(tensordict)
        return kept if kept.batch_size.numel() or not tensordict.batch_size.numel() else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()

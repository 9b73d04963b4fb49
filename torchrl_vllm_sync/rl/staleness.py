"""TorchRL transforms over policy versions: stamping rows, leaving old ones out, weighing them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import nn
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import PolicyAgeFilter, Transform

from torchrl_vllm_sync.checks import check_integer, check_positive
from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.rows import MAX_POLICY_VERSION, NO_VERSION, POLICY_VERSION
from torchrl_vllm_sync.rl.updater import WeightUpdater
from torchrl_vllm_sync.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.rl.local_llm import LocalLLM
    from torchrl_vllm_sync.service.service import AsyncVLLM


# Held while any transform's counts change, so that copies need no lock of their own.
COUNTING = threading.Lock()

VersionLike: TypeAlias = (
    "int | Callable[[], int] | AsyncVLLM | LocalLLM | WeightUpdater | PolicyVersion"
)


def oldest_versions(tensordict: TensorDictBase, key: NestedKey) -> torch.Tensor:
    """Returns the oldest version stamped on each row, however the rows are stacked or padded."""
    shape = tensordict.batch_size
    if isinstance(tensordict, LazyStackedTensorDict) and tensordict.tensordicts:
        parts = [oldest_versions(one, key) for one in tensordict.tensordicts]
        return torch.stack(parts, tensordict.stack_dim)
    value = tensordict.get(key, None)
    if value is None or not shape.numel():
        return torch.full(shape, NO_VERSION, dtype=torch.int64, device=tensordict.device)
    kind = _kind(value)
    if not isinstance(kind, torch.dtype) or kind.is_floating_point or kind is torch.bool:
        raise UnsupportedArgumentError(f"{key!r} must hold integer policy versions, got {kind}")
    if not value.numel():  # rows without a token
        return value.new_full(shape, NO_VERSION, dtype=torch.int64)
    versions = value.to(torch.int64).reshape(*shape, -1)
    newest = torch.iinfo(torch.int64).max
    oldest = versions.masked_fill(versions < 0, newest).amin(-1)
    return oldest.masked_fill(oldest == newest, NO_VERSION)


def _kind(value: object) -> torch.dtype | str:
    return value.dtype if isinstance(value, torch.Tensor) else type(value).__name__


def staleness_of(versions: torch.Tensor, newest: int | Callable[[], int]) -> torch.Tensor:
    """Returns how many versions older than ``newest`` each is; those that are newer are 0 old."""
    now = newest() if callable(newest) else newest
    check_version("the newest version", now)
    return (now - versions).clamp(min=0)


def _ages(
    transform: Transform,
    rows: TensorDictBase,
    key: NestedKey,
    newest: int | Callable[[], int],
    *,
    strict: bool = True,
) -> torch.Tensor:
    """Returns how many versions old each row is; one without a stamp is 0 old, or refused."""
    versions = oldest_versions(rows, key)
    unstamped = versions == NO_VERSION
    if strict and unstamped.any():
        missing = int(unstamped.sum())
        raise UnstampedRowsError(type(transform).__name__, key, missing, versions.numel())
    return staleness_of(versions, newest).masked_fill(unstamped, 0)


def as_version_source(version: VersionLike) -> int | Callable[[], int]:
    """Returns the number itself, or a function that reads the newest version at each call."""
    if isinstance(version, bool):
        raise UnsupportedArgumentError(f"version must not be a truth value, got {version}")
    if isinstance(version, int):
        check_integer("version", version, 0)
        return version
    owner: Any = version.service if isinstance(version, WeightUpdater) else version
    if owner is None and version is not None:
        raise UnsupportedArgumentError("version: this updater has no service to ask")
    name = "version" if isinstance(version, PolicyVersion) else "weight_version"
    if hasattr(owner, name) and not isinstance(owner, type):
        return partial(getattr, owner, name)  # which pickles
    if callable(version) and not isinstance(version, (type, nn.Module, WeightUpdater)):
        return version
    raise UnsupportedArgumentError(
        "version must be an int, a function that returns one, a service, a WeightUpdater or a "
        f"PolicyVersion, got {type(version).__name__}"
    )


class StalenessFilter(PolicyAgeFilter):
    """Drops rows whose oldest token is more than ``max_staleness`` versions old.

    TorchRL's ``PolicyAgeFilter``, for a batch and for a buffer's ``extend`` and ``sample``, which
    may then return fewer rows than asked for. Beyond that it counts what it drops, raises on rows
    without a stamp, reads ragged rows and rows of several steps (the oldest stamp is the row's),
    and lets all of an ``extend`` be stale. In a buffer put it before ``MCAdvantage``.

    Example:
        >>> transform = Compose(StalenessFilter(2, service), MCAdvantage(grpo_size=8))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(512), transform=transform)
        >>> fresh = StalenessFilter(2, updater)(batch)  # without a buffer

    Args:
        max_staleness: Versions; 0 keeps rows of the newest version only.
        version: What tells the newest version: a service, a ``WeightUpdater``, a ``PolicyVersion``,
            a function, or a number.
        version_key: Integer entry with the stamp, of the batch's shape or more; negative is none.
        allow_unstamped: Let rows without a stamp pass.

    Raises:
        UnsupportedArgumentError: ``max_staleness`` is no integer from 0 on, or ``version`` nothing
            that a version can be read from.
        UnstampedRowsError: When rows pass: some carry no stamp; none was dropped.
    """

    def __init__(
        self,
        max_staleness: int,
        version: VersionLike,
        *,
        version_key: NestedKey = POLICY_VERSION,
        allow_unstamped: bool = False,
    ) -> None:
        check_integer("max_staleness", max_staleness, 0)
        how = {"policy_version_key": version_key, "strict": not allow_unstamped}
        super().__init__(as_version_source(version), max_staleness, **how)
        self._dropped: Counter[int] = Counter()

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
        with COUNTING:
            return dict(sorted(self._dropped.items()))

    def reset_counts(self) -> None:
        """Counts from 0 again."""
        with COUNTING:
            self._dropped.clear()

    def _filter(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims < 1 or not tensordict.batch_size.numel():
            return tensordict
        key, newest = self.policy_version_key, self.current_version
        staleness = _ages(self, tensordict, key, newest, strict=self.strict)
        staleness = staleness.reshape(len(tensordict), -1).amax(-1)  # of the steps of a row
        stale = staleness > self.max_staleness
        if not stale.any():
            return tensordict
        with COUNTING:
            self._dropped.update(staleness[stale].tolist())
        return tensordict[~stale]

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Drops stale rows before they are written; ``None`` writes nothing."""
        if tensordict is None:  # an MCAdvantage behind it holds incomplete groups back
            return None
        kept = super()._inv_call(tensordict)
        return kept if kept.batch_size.numel() or not tensordict.batch_size.numel() else None


class StalenessWeight(Transform):
    """Writes how many versions old each row is, and a weight that falls with it.

    For a batch, or what a replay buffer samples, in a shallow copy. ``"staleness"``, int64, is the
    newest version minus the oldest that sampled a token of the row, at least 0.
    ``"staleness_weight"``, float32, is ``0.5 ** (staleness / half_life)``, and 0 for rows more than
    ``max_staleness`` versions old.

    Example:
        >>> weigh = StalenessWeight(updater, half_life=2, multiply="advantage")
        >>> loss = loss_fn(weigh(batch))

    Args:
        version: What tells the newest version, as for ``StalenessFilter``.
        half_life: Versions after which a row counts half.
        max_staleness: Rows older than that weigh nothing.
        multiply: Floating-point entry to multiply by the weight, dense or ragged, its shape
            beginning with the batch's; usually ``"advantage"``.
        version_key: Integer entry with the stamp.

    Raises:
        UnsupportedArgumentError: Neither ``half_life`` nor ``max_staleness`` is given, one is out
            of range, or ``version`` is nothing that a version can be read from.
    """

    def __init__(
        self,
        version: VersionLike,
        *,
        half_life: float | None = None,
        max_staleness: int | None = None,
        multiply: NestedKey | None = None,
        version_key: NestedKey = POLICY_VERSION,
    ) -> None:
        if half_life is None and max_staleness is None:
            raise UnsupportedArgumentError("half_life or max_staleness must be given")
        if half_life is not None:
            check_positive("half_life", half_life)
        if max_staleness is not None:
            check_integer("max_staleness", max_staleness, 0)
        super().__init__()
        self._source = as_version_source(version)
        self.half_life, self.max_staleness = half_life, max_staleness
        self.multiply, self.version_key = multiply, version_key

    def weight_of(self, staleness: torch.Tensor) -> torch.Tensor:
        """Returns the float32 weight of rows of some ages.

        Args:
            staleness: Ages in versions, int64, of any shape.
        """
        weight = torch.pow(0.5, staleness / (self.half_life or math.inf))
        if self.max_staleness is not None:
            weight = weight.masked_fill(staleness > self.max_staleness, 0.0)
        return weight.to(torch.float32)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch with the entries above.

        Args:
            tensordict: Rows with a stamp.

        Raises:
            UnstampedRowsError: Some rows carry no stamp.
            UnsupportedArgumentError, KeyError: ``multiply`` names no floating-point entry.
        """
        if not tensordict.batch_size.numel():
            return tensordict
        staleness = _ages(self, tensordict, self.version_key, self._source)
        weight = self.weight_of(staleness)
        out = tensordict.copy()
        if self.multiply is not None:
            _multiply(out, self.multiply, weight)
        return out.set("staleness", staleness).set("staleness_weight", weight)


def _multiply(tensordict: TensorDictBase, key: NestedKey, weight: torch.Tensor) -> None:
    """Multiplies an entry by a weight of the batch's shape, in the TensorDict given."""
    if isinstance(tensordict, LazyStackedTensorDict):  # rows may be ragged
        parts = weight.unbind(tensordict.stack_dim)
        for one, part in zip(tensordict.tensordicts, parts, strict=True):
            _multiply(one, key, part)
        return
    value: Any = tensordict[key]  # KeyError if there is none
    kind = _kind(value)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        told = f"got {key!r}, which holds {kind}"
        raise UnsupportedArgumentError(f"multiply must name a floating-point entry, {told}")
    extra = value.ndim - weight.ndim
    tensordict.set(key, value * weight.to(value.dtype).reshape(*weight.shape, *(1,) * extra))


class VersionStamp(PolicyVersion):
    """TorchRL's ``PolicyVersion`` that says which version sampled the tokens.

    TorchRL's writes its counter when the environment steps, which is too new after a push between
    the sampling and the step. This one writes ``("next", "policy_version")`` from the row's own
    stamp of ``vLLMWrapper``; on rows without one, and at a reset, as TorchRL's does. An
    ``AsyncEnvPool`` steps environments elsewhere: give each of them a stamp, and the collector one.

    Example:
        >>> collector = LLMCollector(env, policy=policy, track_policy_version=VersionStamp(service))

    Args:
        version: ``None`` counts from 0, one for each :meth:`increment_version`. Otherwise
            :attr:`version` follows a service, an updater or a function; setting it announces a
            version of which its source may hear later.

    Raises:
        UnsupportedArgumentError: No version can be read from ``version``, or it is set to none.
    """

    def __init__(self, version: VersionLike | None = None) -> None:
        source = None if version is None else as_version_source(version)
        if isinstance(source, int):
            raise UnsupportedArgumentError(
                f"version must be something to follow, or None to count, got {source}"
            )
        self._source: Callable[[], int] | None = source
        self._announced = 0
        super().__init__(version_type=int)

    @property
    def version(self) -> int:
        """The newest version."""
        if self._source is None:
            return int(super().version)
        return max(int(self._source()), self._announced)

    @version.setter
    def version(self, value: str | int) -> None:
        """Sets the counter, or announces a version; what follows never goes back."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UnsupportedArgumentError(f"version must be an int of at least 0, got {value!r}")
        if self._source is None:
            self._current_version = value
        else:
            self._announced = max(value, self._announced)

    def _increment_version_int(self, init: bool = False) -> None:
        """Counts on, or takes what the source says now, for ``version_history``."""
        if self._source is None:
            super()._increment_version_int(init)
        else:
            self._current_version = self.version

    def _step(
        self, tensordict: TensorDictBase | None, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Stamps the step's rows; at a reset there is no ``tensordict``."""
        next_tensordict = super()._step(tensordict, next_tensordict)
        # A reset leaves a stamp in the root too: only the wrapper leaves a newest version as well.
        if tensordict is None or tensordict.get(MAX_POLICY_VERSION, None) is None:
            return next_tensordict
        sampled = oldest_versions(tensordict, POLICY_VERSION)
        today: Any = next_tensordict.get(POLICY_VERSION)
        next_tensordict.set(POLICY_VERSION, torch.where(sampled == NO_VERSION, today, sampled))
        return next_tensordict

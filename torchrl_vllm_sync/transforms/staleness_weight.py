"""Has old rows count less in training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict
from torchrl.envs.transforms import Transform

from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.keys import NO_VERSION, POLICY_VERSION
from torchrl_vllm_sync.transforms.stamps import oldest_versions, staleness_of
from torchrl_vllm_sync.transforms.version_source import as_version_source

if TYPE_CHECKING:
    from tensordict import NestedKey, TensorDictBase

    from torchrl_vllm_sync.transforms.version_source import VersionLike

__all__ = ["STALENESS", "STALENESS_WEIGHT", "StalenessWeight"]

STALENESS = "staleness"
STALENESS_WEIGHT = "staleness_weight"


class StalenessWeight(Transform):
    """Writes how many versions old each row is, and a weight that falls with it.

    ======================  ====================  ================================================
    entry                   type, shape           holds
    ======================  ====================  ================================================
    ``"staleness"``         int64, the batch's    newest version minus the oldest that sampled a
                                                  token of the row; at least 0
    ``"staleness_weight"``  float32, the batch's  ``0.5 ** (staleness / half_life)``, and 0 for
                                                  rows more than ``max_staleness`` versions old
    ======================  ====================  ================================================

    A plain geometric decay, of no published origin; TorchRL's ``StalenessAwareSampler`` decays by
    ``1 / (staleness + 1)`` instead, in how often it samples. It scales how much a row counts; it
    does not correct for the policy having changed, which is the importance ratio of the loss.

    In a replay buffer it works on ``sample``, on a shallow copy: what is stored stays as it was, so
    that a row sampled twice is weighted anew, not twice. Called with a batch, the same. In an
    environment it does nothing.

    Example:
        >>> weigh = StalenessWeight(updater, half_life=2, multiply="advantage")
        >>> loss = loss_fn(weigh(batch))

    Args:
        version: What tells the newest version, see ``as_version_source``.
        half_life: Versions after which a row counts half; ``None`` does not decay.
        max_staleness: Rows older than that weigh nothing; ``None`` sets no bound.
        multiply: Floating-point entry to multiply by the weight, its shape beginning with the
            batch's, dense or ragged; usually ``"advantage"``.
        version_key: Integer entry with the stamp.

    Raises:
        UnsupportedArgumentError: Neither ``half_life`` nor ``max_staleness`` is given, one is out
            of range, or ``version`` is nothing that a version can be read from.
            Or, when rows pass: ``multiply`` names no floating-point entry.
        UnstampedRowsError: When rows pass: some carry no stamp.
        KeyError: When rows pass: ``multiply`` names no entry.
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
        if half_life is not None and not (
            isinstance(half_life, int | float) and 0 < half_life < math.inf
        ):
            raise UnsupportedArgumentError(f"half_life must be greater than 0, got {half_life!r}")
        if max_staleness is not None:
            if isinstance(max_staleness, bool) or not isinstance(max_staleness, int):
                raise UnsupportedArgumentError(
                    f"max_staleness must be an int, got {max_staleness!r}"
                )
            if max_staleness < 0:
                raise UnsupportedArgumentError(
                    f"max_staleness must be at least 0, got {max_staleness}"
                )
        super().__init__()
        self._source = as_version_source(version)
        self.half_life, self.max_staleness = half_life, max_staleness
        self.multiply, self.version_key = multiply, version_key

    def weight_of(self, staleness: torch.Tensor) -> torch.Tensor:
        """Returns the float32 weight of rows that are ``staleness`` versions old.

        Args:
            staleness: Ages in versions, int64, of any shape.
        """
        weight = torch.ones_like(staleness, dtype=torch.float32)
        if self.half_life is not None:
            weight = torch.pow(0.5, staleness / self.half_life)
        if self.max_staleness is not None:
            weight = weight.masked_fill(staleness > self.max_staleness, 0.0)
        return weight.to(torch.float32)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch with the entries above.

        Args:
            tensordict: Rows with a stamp; they stay as they are.

        Raises:
            UnstampedRowsError: Some rows carry no stamp.
            UnsupportedArgumentError: ``multiply`` names no floating-point entry.
            KeyError: ``multiply`` names no entry.
        """
        if not tensordict.batch_size.numel():
            return tensordict
        versions = oldest_versions(tensordict, self.version_key)
        missing = int((versions == NO_VERSION).sum())
        if missing:
            raise UnstampedRowsError(
                type(self).__name__, self.version_key, missing, tensordict.batch_size.numel()
            )
        now = self._source() if callable(self._source) else self._source
        staleness = staleness_of(versions, now)
        weight = self.weight_of(staleness)
        out = tensordict.copy()
        if self.multiply is not None:
            _multiply(out, self.multiply, weight)
        out.set(STALENESS, staleness)
        return out.set(STALENESS_WEIGHT, weight)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict


def _multiply(tensordict: TensorDictBase, key: NestedKey, weight: torch.Tensor) -> None:
    """Multiplies an entry by a weight of the batch's shape, in the TensorDict given."""
    if isinstance(tensordict, LazyStackedTensorDict):  # rows may be ragged
        parts = weight.unbind(tensordict.stack_dim)
        for one, part in zip(tensordict.tensordicts, parts, strict=True):
            _multiply(one, key, part)
        return
    value: Any = tensordict[key]  # KeyError if there is none
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedArgumentError(
            f"multiply must name a floating-point entry, got {key!r}, which holds {kind}"
        )
    extra = value.ndim - weight.ndim
    tensordict.set(key, value * weight.to(value.dtype).reshape(*weight.shape, *(1,) * extra))

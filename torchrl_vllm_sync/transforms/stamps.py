"""Reads the version stamps of rows, however the rows are stacked or padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import LazyStackedTensorDict

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.keys import NO_VERSION
from torchrl_vllm_sync.versions import check_version

if TYPE_CHECKING:
    from tensordict import NestedKey, TensorDictBase

__all__ = ["oldest_versions", "staleness_of"]


def oldest_versions(tensordict: TensorDictBase, key: NestedKey) -> torch.Tensor:
    """Returns the oldest version stamped on each row.

    Args:
        tensordict: Rows; dense, or lazily stacked with entries that are ragged or missing in some.
        key: Integer entry whose shape begins with the batch's; what is negative stamps nothing.

    Returns:
        int64, of the batch's shape; ``NO_VERSION`` where nothing is stamped.

    Raises:
        UnsupportedArgumentError: The entry does not hold integers.
    """
    if isinstance(tensordict, LazyStackedTensorDict):
        parts = [oldest_versions(one, key) for one in tensordict.tensordicts]
        if parts:
            return torch.stack(parts, tensordict.stack_dim)
    value = tensordict.get(key, None)
    if value is None or not tensordict.batch_size.numel():
        return torch.full(
            tensordict.batch_size, NO_VERSION, dtype=torch.int64, device=tensordict.device
        )
    if (
        not isinstance(value, torch.Tensor)
        or value.is_floating_point()
        or value.dtype is torch.bool
    ):
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedArgumentError(
            f"{key!r} must hold integer policy versions, got {kind}; versions that are no "
            "integers, such as UUIDs, have no age"
        )
    if not value.numel():  # rows without a token
        return value.new_full(tensordict.batch_size, NO_VERSION, dtype=torch.int64)
    versions = value.to(torch.int64).reshape(*tensordict.batch_size, -1)
    newest = torch.iinfo(torch.int64).max
    oldest = versions.masked_fill(versions < 0, newest).amin(-1)
    return oldest.masked_fill(oldest == newest, NO_VERSION)


def staleness_of(versions: torch.Tensor, now: int) -> torch.Tensor:
    """Returns how many versions old each of ``versions`` is at version ``now``.

    Versions newer than ``now``, which a late report may hold, are 0 old.

    Raises:
        UnsupportedArgumentError: ``now`` is no integer from 0 on.
    """
    check_version("the newest version", now)
    return (now - versions).clamp(min=0)

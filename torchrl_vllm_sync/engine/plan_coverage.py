"""Whether planned writes cover a model: every element of every parameter exactly once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from torchrl_vllm_sync.engine.planned_writes import (
    PlannedCopy,
    PlanNotPossibleError,
    storage_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torchrl_vllm_sync.engine.planned_writes import PlannedFill

__all__ = ["check_coverage"]

SHOWN = 5
# What is not dense is kept as intervals of 16 bytes each; only a loader that scatters single
# elements of a large tensor needs more.
MAX_INTERVALS = 2**24


def check_coverage(model: torch.nn.Module, writes: Sequence[PlannedCopy | PlannedFill]) -> None:
    """Checks that ``writes`` set every parameter of ``model`` completely and nothing twice.

    A constant counts as covered. A copy may follow it on the same elements, not precede it.

    Args:
        model: The model that the writes were recorded from.
        writes: In their order.

    Raises:
        PlanNotPossibleError: Names up to five parameters with the number of elements that are
            missing or written twice.
    """
    by_storage: defaultdict[int, list[PlannedCopy | PlannedFill]] = defaultdict(list)
    for write in writes:
        by_storage[storage_key(write.target)].append(write)
    written: dict[int, _Written] = {}
    parameters = dict(model.named_parameters())
    faults: list[str] = []
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        if not tensor.numel():
            continue
        key = storage_key(tensor)
        if key not in written:
            written[key] = _Written(by_storage[key])
        missing, twice = (count // tensor.element_size() for count in written[key].faults(tensor))
        if missing and name in parameters:
            faults.append(f"{name} ({missing} of {tensor.numel()} elements missing)")
        if twice:
            faults.append(f"{name} ({twice} elements written twice)")
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise PlanNotPossibleError(
            f"the loader must write every element once: {', '.join(faults[:SHOWN])}{more}"
        )


class _Written:
    """Which bytes of one storage the writes cover, as arrays of starts and ends."""

    def __init__(self, writes: Sequence[PlannedCopy | PlannedFill]) -> None:
        bounds = [_bounds(write.target) for write in writes]
        is_copy = [isinstance(write, PlannedCopy) for write in writes]
        self._all = _joined(bounds)
        self._copies = _joined([one for one, copy in zip(bounds, is_copy, strict=True) if copy])
        # Constants that would wipe what an earlier copy wrote.
        self._wiped: list[np.ndarray] = []
        for i, one in enumerate(bounds):
            if not is_copy[i] and any(is_copy[:i]):
                before = [bounds[j] for j in range(i) if is_copy[j]]
                if _size(_joined([*before, one])) < _size(_joined(before)) + _size(one):
                    self._wiped.append(one)

    def faults(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Bytes of ``tensor`` that are not written, and that are written more than once."""
        own = _bounds(tensor)
        missing = _size(_joined([own, self._all])) - _size(self._all)
        low, high = own[0].min(), own[1].max()
        copies = np.clip(_joined([self._copies, *self._wiped]), low, high)
        return missing, int((copies[1] - copies[0]).sum()) - _size(copies)


def _bounds(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of its storage that a tensor shows: starts and ends, of shape ``(2, count)``."""
    if not tensor.numel():
        return np.empty((2, 0), dtype=np.int64)
    run = 1
    outer: list[tuple[int, int]] = []
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, count in sorted(dim for dim in dims if dim[1] != 1):
        if stride == run and not outer:
            run *= count
        else:
            outer.append((stride, count))
    if tensor.numel() // run > MAX_INTERVALS:
        raise PlanNotPossibleError(
            f"writes of shape {list(tensor.shape)} and strides {list(tensor.stride())} are too "
            "scattered to be checked"
        )
    starts = np.array([tensor.storage_offset()], dtype=np.int64)
    for stride, count in outer:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return np.stack([starts, starts + run]) * tensor.element_size()


def _joined(bounds: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty((2, 0), dtype=np.int64), *bounds], axis=1)


def _size(bounds: np.ndarray) -> int:
    """Bytes of the union of intervals."""
    if not bounds.size:
        return 0
    starts, ends = bounds[:, np.argsort(bounds[0], kind="stable")]
    reached = np.maximum.accumulate(ends)
    begins = np.maximum(starts[1:], reached[:-1])
    return int(ends[0] - starts[0] + np.maximum(ends[1:] - begins, 0).sum())

"""What a loader does to a model: copies of slices and constants, or more than a plan can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SyncError

if TYPE_CHECKING:
    import torch

__all__ = ["PlanNotPossibleError", "PlannedCopy", "PlannedFill", "storage_key"]


class PlanNotPossibleError(SyncError, RuntimeError):
    """This model cannot be loaded by plain copies; says why and names the tensor or parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCopy:
    """One slice of a checkpoint tensor and the place it is loaded to.

    Attributes:
        name: Checkpoint tensor.
        offset: Element offset of the slice in the full, contiguous checkpoint tensor.
        shape: Shape of the slice.
        stride: Strides of the slice in elements; 0 where one element fills several.
        target: View into a parameter or buffer of the model, of the same shape.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFill:
    """Elements that the loader sets to a constant, such as the padding of a vocabulary.

    Attributes:
        target: View into a parameter or buffer of the model.
        value: The constant.
    """

    target: torch.Tensor
    value: float


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory that ``tensor`` is a view of, as long as something keeps it alive."""
    return tensor.untyped_storage()._cdata

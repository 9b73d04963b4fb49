"""Where the trainer's weights are, and from which of its devices a transport sends them.

The current CUDA device says little: it is each thread's own, and a trainer that keeps its model on
``cuda:1`` need never have made that the current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.weights.source import StableSource

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.source import WeightSource

__all__ = ["current_device", "devices_of", "home_device"]


def devices_of(source: WeightSource) -> set[torch.device]:
    """Returns the devices of a source's tensors, without reading them.

    Args:
        source: One that does not tell, since it computes or gathers its tensors, is taken to be
            where its module is.

    Returns:
        Empty if the source does not tell and has no module.
    """
    if not isinstance(source, StableSource):
        return set()
    if (views := source.views()) is not None:
        return {tensor.device for _, tensor in views}
    if not isinstance(source.owner, torch.nn.Module):
        return set()
    return {parameter.device for parameter in source.owner.parameters()}


def home_device(source: WeightSource | None, kind: str) -> torch.device | None:
    """Returns the one device of a kind that a source's tensors are on.

    Args:
        source: The weights.
        kind: ``"cuda"`` or ``"cpu"``.

    Returns:
        ``None`` if they are on several devices of that kind or on none, or if nobody can tell.
    """
    devices = set() if source is None else devices_of(source)
    of_kind = [one for one in devices if one.type == kind]
    return of_kind[0] if len(of_kind) == 1 else None


def current_device(kind: str) -> torch.device:
    """Returns this thread's current CUDA device, or the CPU."""
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)

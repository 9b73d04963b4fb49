"""One gather of a few sharded parameters to the sending rank, under way until it is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Gather", "Part", "part_of"]


class Part(Protocol):
    """This rank's part in gathering one tensor."""

    def prepare(self, *, receives: bool) -> None:
        """Takes the memory that is needed."""
        ...

    def launch(self) -> dist.Work | None:
        """Begins, in lockstep on all ranks; ``None`` if there is nothing to wait for."""
        ...

    def result(self) -> torch.Tensor:
        """Returns the whole tensor once the work is done; only where it was received."""
        ...


class Gather:
    """Gathers some tensors at once. Lifecycle: constructed, ``launch`` and ``result`` once each.

    Args:
        parts: By name, in the same order on every rank.
        receives: Whether the whole tensors are wanted here.
    """

    def __init__(self, parts: Mapping[str, Part], *, receives: bool) -> None:
        self._parts, self._receives = dict(parts), receives
        self._works: list[dist.Work] = []
        for part in self._parts.values():
            part.prepare(receives=receives)

    def launch(self) -> None:
        """Begins to gather, without waiting."""
        works = [part.launch() for part in self._parts.values()]
        self._works = [work for work in works if work is not None]

    def is_completed(self) -> bool:
        """Whether :meth:`result` would return, or raise, at once."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> dict[str, torch.Tensor]:
        """Returns whole tensors by name, empty where they are not received.

        Raises:
            RuntimeError: The collective failed.
        """
        for work in self._works:
            work.wait()
        if not self._receives:
            return {}
        return {name: part.result() for name, part in self._parts.items()}


def part_of(tensor: torch.Tensor) -> Part:
    """Returns how ``tensor`` is gathered.

    Args:
        tensor: Any; sharded if it is a ``DTensor``.
    """
    if not isinstance(tensor, DTensor):
        return _Local(tensor)
    if all(isinstance(one, Replicate) for one in tensor.placements):
        with torch.no_grad():
            return _Local(tensor.to_local())
    (placement, *others), mesh = tensor.placements, tensor.device_mesh
    members = mesh.mesh.flatten().tolist()
    # Its subclasses lay shards out in another order.
    if not others and type(placement) is Shard and sorted(members) == members:
        return _Sharded(tensor, placement.dim)
    return _Redistributed(tensor)


class _Local:
    """A tensor that every rank holds whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def prepare(self, *, receives: bool) -> None:
        pass

    def launch(self) -> None:
        pass

    def result(self) -> torch.Tensor:
        return self._tensor


class _Sharded:
    """A tensor cut along one dimension over a list of ranks: only the first of them receives it.

    Shards are as large as the first, but for the last ones, so that gathered one after another,
    each in as much room as the first, the whole lies at the beginning.
    """

    def __init__(self, tensor: DTensor, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._group, self._world = tensor.device_mesh.get_group(), tensor.device_mesh.size()
        self._mine: torch.Tensor | None = None
        self._room: torch.Tensor | None = None

    def prepare(self, *, receives: bool) -> None:
        with torch.no_grad():
            local = self._tensor.to_local().detach().movedim(self._dim, 0)
        others = list(self._tensor.shape)
        size = others.pop(self._dim)
        rows = -(-size // self._world)
        if local.shape[0] == rows:
            self._mine = local.contiguous()
        else:
            self._mine = local.new_zeros((rows, *others))
            self._mine[: local.shape[0]] = local
        if receives:
            self._room = local.new_empty((self._world * rows, *others))

    def launch(self) -> dist.Work | None:
        mine, room = self._mine, self._room
        assert mine is not None
        rooms = None if room is None else [_bytes(one) for one in room.chunk(self._world)]
        return dist.gather(_bytes(mine), rooms, group=self._group, group_dst=0, async_op=True)

    def result(self) -> torch.Tensor:
        assert self._room is not None
        whole = self._room[: self._tensor.shape[self._dim]]
        return whole.movedim(0, self._dim).contiguous()


class _Redistributed:
    """A tensor that is laid out otherwise, such as on a mesh of several dimensions."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self._whole: Any = None

    def prepare(self, *, receives: bool) -> None:
        pass

    def launch(self) -> None:
        with torch.no_grad():
            self._whole = self._tensor.full_tensor()

    def result(self) -> torch.Tensor:
        return self._whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)

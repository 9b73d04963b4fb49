"""One gather of a few sharded parameters to the sending rank, under way until it is waited for."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Gather", "Part", "Work", "part_of"]

# Seconds between looks at who else takes part in a call that blocks.
WATCH_S = 0.05


class Work(Protocol):
    """What is under way; a ``torch.distributed.Work``, or what stands for one."""

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> Any:
        """Waits for it, on a GPU only the current stream."""
        ...


class Part(Protocol):
    """This rank's part in gathering one tensor.

    Attributes:
        blocks: Whether :meth:`launch` ends only with the others.
    """

    blocks: bool

    def prepare(self, *, receives: bool) -> None:
        """Takes the memory that is needed."""
        ...

    def launch(self) -> Work | None:
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
        self._works: list[Work] = []
        for part in self._parts.values():
            part.prepare(receives=receives)

    def launch(self, watch: Callable[[], None] = lambda: None) -> None:
        """Begins to gather; waits for the others only where a part cannot do without.

        Args:
            watch: Called while waiting; raises to give up early. The call that blocks is left
                behind in a thread then, until its process group ends.

        Raises:
            RuntimeError: The collective failed.
        """
        if not any(part.blocks for part in self._parts.values()):
            self._launch()
            return
        failures: list[BaseException] = []
        as_here = _same_stream()

        def run() -> None:
            try:
                with as_here:
                    self._launch()
            except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
                failures.append(error)

        thread = threading.Thread(target=run, name="gather", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(WATCH_S)
            if thread.is_alive():
                watch()
        for error in failures:
            raise error

    def _launch(self) -> None:
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

    blocks = False

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

    blocks = False

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

    blocks = True

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self._whole: Any = None

    def prepare(self, *, receives: bool) -> None:
        pass

    def launch(self) -> Work | None:
        with torch.no_grad():
            self._whole = self._tensor.full_tensor()
        return _Queued(self._whole.device) if self._whole.device.type == "cuda" else None

    def result(self) -> torch.Tensor:
        return self._whole


class _Queued:
    """Work on the current stream of a GPU, which waits for the others though the host does not."""

    def __init__(self, device: torch.device) -> None:
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return self._done.query()

    def wait(self) -> None:
        """Does nothing: it was queued on the stream that goes on with it."""


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _same_stream() -> contextlib.AbstractContextManager[None]:
    """Returns what makes another thread queue its work where this one does."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return _on_stream(torch.cuda.current_stream())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)

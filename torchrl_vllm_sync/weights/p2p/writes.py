"""Writes into workers' memory: planned by them for whole tensors, and cut to what a rank holds."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.broadcast.buckets import TensorCopy, merged_dims
from torchrl_vllm_sync.weights.module import (
    LEAST_ROW_SCALE,
    fp8_scale,
    place_of,
    storage_key,
    to_fp8,
)
from torchrl_vllm_sync.weights.p2p.memory import Handover, MappedMemory, device_of

# As a worker plans it, see ``BroadcastReceiver.plan_writes``: a tensor's name; offset, shape and
# stride of a region in elements of it, contiguous; dtype, place in bytes and stride of the target.
# Of what is quantised also place and shape of the scales, and what ``Quantised`` takes besides.
Row = list[Any]
Named = tuple[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # what is read, and where it is written to

# Of one row, each with a copy of its own; more are not worth it.
MOST_PARTS = 1024
# After which a memory hands on what it has got.
HANDED_ON_BYTES = 2**28


# ---- What a rank holds


class Cut(NamedTuple):
    """What a rank holds of a tensor of ``outer * size * inner`` elements, and what it writes."""

    outer: int
    size: int
    inner: int
    first: int  # index in the middle dimension, from which on it holds
    held: int  # so many
    begin: int  # of these it writes as many as others do that hold the same: from here
    end: int  # to here


Cuts = dict[str, Cut | None]  # by name; see ``cut_of``


def cut_of(tensor: torch.Tensor, *, leads: bool) -> Cut | None:
    """Returns what this rank holds; ``None``, on all ranks, if it is no range of one dimension."""
    if not isinstance(tensor, DTensor):  # the leading rank's to write
        count = tensor.numel()
        return Cut(1, count, 1, 0, count, 0, count if leads else 0)
    placements, mesh = tensor.placements, tensor.device_mesh
    # Subclasses of Shard lay shards out in another order.
    if {type(one) for one in placements} - {Shard, Replicate}:
        return None
    dims = [one.dim for one in placements if isinstance(one, Shard)]
    at, shape = mesh.get_coordinate(), tuple(tensor.shape) or (1,)
    if len(dims) > 1 or at is None:
        return None
    dim = dims[0] % len(shape) if dims else 0
    first, last, index, copies = 0, shape[dim], 0, 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):  # as ``torch.chunk`` cuts it
            rows = -(-shape[dim] // mesh.size(axis))
            first, last = (min(i * rows, shape[dim]) for i in (at[axis], at[axis] + 1))
        else:
            index, copies = index * mesh.size(axis) + at[axis], copies * mesh.size(axis)
    begin, end = (first + (last - first) * i // copies for i in (index, index + 1))
    around = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    return Cut(*around, first, last - first, begin, end)


def parts(row: Row, cut: Cut) -> list[Row] | None:
    """Returns what a rank writes of a region; ``None``, on all ranks, if it is too ragged."""
    name, offset, shape, stride, dtype, place, target_stride = row
    unit, block = cut.inner, cut.inner * cut.size
    if not unit or not block:
        return []
    dims = merged_dims(zip(shape, stride, target_stride, strict=True))
    for limit in (block, unit):
        dims = [part for dim in dims for part in _split(dim, limit)]
    outer = [dim for dim in dims if dim[1] % block == 0]
    along = [dim for dim in dims if dim[1] % block and dim[1] % unit == 0]
    inner = [dim for dim in dims if dim[1] % block and dim[1] % unit]
    within = offset % unit + sum((n - 1) * step for n, step, _ in inner)
    across = offset % block + sum((n - 1) * step for n, step, _ in (*along, *inner))
    *short, (count, step, target_step) = sorted(along) or [(1, unit, 0)]
    counts = [range(dim[0]) for dim in short]
    if within >= unit or across >= block or math.prod(map(len, counts)) > MOST_PARTS:
        return None
    itemsize = getattr(torch, dtype).itemsize
    found: list[Row] = []
    for at in itertools.product(*counts):
        start = offset + sum(i * one for i, (_, one, _) in zip(at, short, strict=True))
        target = sum(i * one for i, (_, _, one) in zip(at, short, strict=True))
        row_at, stride_along = start % block // unit, step // unit
        low = max(0, -((row_at - cut.begin) // stride_along))
        high = min(count, -((row_at - cut.end) // stride_along))
        if low >= high:
            continue
        local = start // block * cut.held * unit + start % unit
        local += (row_at + low * stride_along - cut.first) * unit
        kept = [
            *((n, one // block * cut.held * unit, other) for n, one, other in outer),
            (high - low, step, target_step),
            *inner,
        ]
        place_at = place + (target + low * target_step) * itemsize
        sizes, strides, targets = zip(*kept, strict=True)
        found.append([name, local, sizes, strides, dtype, place_at, targets])
    return found


def _split(dim: tuple[int, int, int], limit: int) -> list[tuple[int, int, int]]:
    """Cuts a dimension that goes beyond ``limit`` elements in two, if it does so evenly."""
    count, step, target = dim
    if not 0 < step < limit < count * step or limit % step or count % (limit // step):
        return [dim]
    each = limit // step
    return [(count // each, limit, target * each), (each, step, target)]


# ---- Where it goes


class Mapped:
    """A memory of one worker, in this process."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        descriptor: int,
        rows: Iterable[Row],
        shards: Iterable[Row],
        owner: torch.device | None = None,
    ) -> None:
        self.token = uuid.uuid4().hex
        self._within = within = MappedMemory(num_bytes, device, descriptor, owner)
        self.copies = Places(rows, within)
        self.shards = Places(shards, within)  # of what this rank has a part of
        # Parameters that were moved here, and the storages that they, or views of them, are in.
        self._moved: list[tuple[weakref.ref[torch.nn.Parameter], StorageWeakRef, range]] = []

    def may_be_written(self, tensors: list[Named] | None, device: torch.device) -> bool:
        """Whether nothing of these tensors goes where a trainer still has something else."""
        held = [where for _, storage, where in self._moved if not storage.expired()]
        if not held or tensors is None:
            return not held
        self.copies.bind(tensors, device)
        spans = map(_span, self.copies.targets())
        return not any(a.start < b.stop and b.start < a.stop for a in spans for b in held)

    def take_in(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Moves parameters that were written to where they were written."""
        for parameter, place in self.copies.whole(parameters):
            parameter.data = moved = self._within.place_of(place)
            storage = StorageWeakRef(moved.untyped_storage())
            self._moved.append((weakref.ref(parameter), storage, _span(place)))

    def inside(self) -> list[torch.nn.Parameter]:
        alive = [one for held, *_ in self._moved if (one := held()) is not None]
        return [one for one in alive if self._within.holds(one)]

    @torch.no_grad()
    def move_out(self) -> None:
        """Gives parameters that are here memory of their own; views of them keep this."""
        for one in self.inside():
            one.data = one.data.clone()

    def let_go(self) -> None:
        """Forgets the tensors that were written."""
        self.copies.let_go()
        self.shards.let_go()


class Quantised:
    """Weights that are quantised to fp8 with one scale, or one a row, as vLLM would on arrival.

    It casts them to ``dtype`` before; the scale is that of the whole tensors, or of the parts.
    """

    def __init__(self, scale: torch.Tensor, dtype: str, of_whole: bool) -> None:
        self.scale, self.dtype, self._of_whole = scale, getattr(torch, dtype), of_whole
        self.by_row = scale.dim() > 1  # of a single part
        self.copies: list[TensorCopy] = []
        self.arrived: dict[str, torch.Tensor] = {}  # of a push that comes one by one

    def take(self, name: str, dense: torch.Tensor) -> bool:
        """Keeps a tensor, which may change before the next comes; whether it was the last."""
        self.arrived[name] = dense
        if self.arrived.keys() == {one.name for one in self.copies}:
            return True
        self.arrived[name] = dense.to(self.dtype, copy=True)
        return False

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> list[Pair]:
        """What is quantised of these, each beside what its scale is found in."""
        parts = [(one, _part(tensors[one.name], one)) for one in self.copies]
        return [
            (one, self._whole(tensors[of.name], of) if self._of_whole else one) for of, one in parts
        ]

    def _whole(self, dense: torch.Tensor, copy: TensorCopy) -> torch.Tensor:
        if not self.by_row:
            return dense
        return dense.narrow(0, copy.offset // dense.stride(0), copy.shape[0])


def quantised(groups: Sequence[tuple[Quantised, list[Pair]]]) -> Iterator[Pair]:
    """Yields what is written of groups; by few calls, as what is launched would take longer.

    What is cast is not kept: of a model in another dtype that would be a second one.
    """
    for group, parts in (one for one in groups if one[0].by_row):
        for copy, (part, of) in zip(group.copies, parts, strict=True):
            greatest = torch.linalg.vector_norm(of.to(group.dtype), torch.inf, 1, keepdim=True)
            scale = fp8_scale(greatest).clamp_min(LEAST_ROW_SCALE)
            yield scale, group.scale
            yield to_fp8(part.to(group.dtype), scale), copy.target
    groups = [one for one in groups if not one[0].by_row]
    if not groups:
        return
    cast = (one.to(of.dtype) for of, parts in groups for _, one in parts)
    greatest = torch.stack([torch.linalg.vector_norm(one, torch.inf) for one in cast]).float()
    lengths = torch.tensor([len(parts) for _, parts in groups], device=greatest.device)
    scales = fp8_scale(torch.segment_reduce(greatest, "max", lengths=lengths)).split(1)
    for (group, parts), scale in zip(groups, scales, strict=True):
        yield scale, group.scale
        for copy, (part, _) in zip(group.copies, parts, strict=True):
            yield to_fp8(part.to(group.dtype), scale), copy.target


class Places:
    """Where in a memory parts of tensors go."""

    def __init__(self, rows: Iterable[Row], memory: MappedMemory) -> None:
        self.memory, rows = memory, list(rows)
        self.layout = hash(msgspec.msgpack.encode(rows))
        self._data = memory.data
        self.copies: dict[str, list[TensorCopy]] = {}  # by name of the tensor
        self._groups: dict[int, Quantised] = {}  # by the scale's place
        self._groups_of: dict[str, list[Quantised]] = {}
        for name, offset, shape, stride, dtype_name, place, target_stride, *how in rows:
            dtype = getattr(torch, dtype_name)
            target = self._place(dtype, shape, target_stride, place // dtype.itemsize)
            copy = TensorCopy(name, offset, shape, stride, target)
            if not how:
                self.copies.setdefault(name, []).append(copy)
                continue
            at, scales, *about = how
            if at not in self._groups:
                stride = (1,) * len(scales)
                scale = self._place(torch.float32, scales, stride, at // torch.float32.itemsize)
                self._groups[at] = Quantised(scale, *about)
            (group := self._groups[at]).copies.append(copy)
            if group not in (of := self._groups_of.setdefault(name, [])):
                of.append(group)
        self.let_go()

    def begin(self) -> None:
        """Forgets what came one by one of a push that broke off."""
        for one in self._groups.values():
            one.arrived.clear()

    def let_go(self) -> None:
        self.begin()
        self._tensors: list[Named] = []  # that were bound last
        self._at: list[Any] = []  # where they were
        self._pairs: list[Pair] = []
        self._ready: list[tuple[Quantised, list[Pair]]] = []
        self._loose: list[Named] = []  # those that are read anew each time

    def bind(self, tensors: list[Named], device: torch.device) -> None:
        """Works out what is written of tensors, unless they are where those of the last call were.

        The same list says so by itself.
        """
        if tensors is self._tensors:
            return
        for name, tensor in tensors:
            check_place(name, tensor, device)
        at = [(name, *place_of(one)) for name, one in tensors]
        if at != self._at:
            loose = {name for name, one in tensors if not one.is_contiguous()}
            held = {name: one for name, one in tensors if name in self._groups_of}
            if loose & held.keys():  # what goes with these has to wait for them
                loose |= held.keys()
            groups = self._groups.values() if held.keys() - loose else ()
            self._ready = [(one, one.parts(held)) for one in groups]
            dense = (self._plain(*one) for one in tensors if one[0] not in loose)
            pairs = _joined(itertools.chain(*dense))
            self._pairs = [pair for pair in pairs if place_of(pair[0]) != place_of(pair[1])]
            self._loose = [one for one in tensors if one[0] in loose]
        self._tensors, self._at = tensors, at

    def bound(self) -> Iterator[Pair]:
        """Yields what is written of the bound tensors."""
        yield from self._pairs
        yield from quantised(self._ready)
        for name, tensor in self._loose:
            yield from self.pairs(name, tensor.contiguous())

    def targets(self) -> Iterator[torch.Tensor]:
        """Yields where bound tensors are written to."""
        yield from (target for _, target in self._pairs)
        for name, _ in self._loose:
            yield from (one.target for one in self.copies.get(name, ()))

    def like(self, target: torch.Tensor) -> torch.Tensor:
        """The place here that this one is of another memory of the same layout."""
        return self._place(
            target.dtype, target.shape, target.stride(), int(target.storage_offset())
        )

    def _place(
        self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], begin: int
    ) -> torch.Tensor:
        flat = self._data[: self._data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, stride, begin)

    def whole(
        self, tensors: Iterable[torch.nn.Parameter]
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields the bound tensors that lie there in one piece, as they are, and this place."""
        dense = (pair for pair in self._pairs if all(one.is_contiguous() for one in pair))
        runs = sorted(dense, key=lambda pair: pair[0].data_ptr())
        begins = [source.data_ptr() for source, _ in runs]
        for tensor in tensors:
            at = bisect.bisect(begins, tensor.data_ptr()) - 1
            if at < 0 or not tensor.is_contiguous():
                continue
            source, target = runs[at]
            skipped = (tensor.data_ptr() - begins[at]) // tensor.itemsize
            is_same = tensor.dtype == source.dtype == target.dtype
            if is_same and tensor.numel() and skipped + tensor.numel() <= source.numel():
                begin = target.storage_offset() + skipped
                yield tensor, target.as_strided(tensor.shape, tensor.stride(), begin)

    def _plain(self, name: str, dense: torch.Tensor) -> Iterator[Pair]:
        for one in self.copies.get(name, ()):
            yield _part(dense, one), one.target

    def pairs(self, name: str, dense: torch.Tensor) -> Iterator[Pair]:
        yield from self._plain(name, dense)
        for group in self._groups_of.get(name, ()):
            if group.take(name, dense):
                yield from quantised([(group, group.parts(group.arrived))])
                group.arrived.clear()


def _part(dense: torch.Tensor, copy: TensorCopy) -> torch.Tensor:
    begin = dense.storage_offset() + copy.offset
    return dense.detach().as_strided(copy.shape, copy.stride, begin)


def _span(tensor: torch.Tensor) -> range:
    """The addresses from a tensor's first byte to its last."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return range(begin, begin + (steps + 1) * tensor.itemsize if tensor.numel() else begin)


def _joined(pairs: Iterable[Pair]) -> list[Pair]:
    """Makes one of pairs that go on where others end, and of strided ones fewer, wider elements."""
    runs: list[tuple[Pair, int]] = []  # each with how many elements follow its first
    found: list[Pair] = []
    for pair in pairs:
        if not all(one.is_contiguous() for one in pair):
            found.append(_widened(*pair))
        elif runs and _goes_on(*runs[-1], pair):
            runs[-1] = runs[-1][0], runs[-1][1] + pair[0].numel()
        else:
            runs.append((pair, pair[0].numel()))
    for (source, target), count in runs:
        found.append((source.as_strided((count,), (1,)), target.as_strided((count,), (1,))))
    return found


def _goes_on(run: Pair, count: int, pair: Pair) -> bool:
    """Whether both ends of a pair begin ``count`` elements behind the beginning of a run."""
    return all(
        one.dtype == other.dtype
        and storage_key(one) == storage_key(other)
        and one.storage_offset() + count == other.storage_offset()
        for one, other in zip(run, pair, strict=True)
    )


def _widened(source: torch.Tensor, target: torch.Tensor) -> Pair:
    if source.dtype == target.dtype:
        for wide in (torch.complex128, torch.int64, torch.int32):
            n = wide.itemsize // source.dtype.itemsize
            if n > 1 and all(_can_widen(one, n) for one in (source, target)):
                return source.view(wide), target.view(wide)
    return source, target


def _can_widen(tensor: torch.Tensor, n: int) -> bool:
    *others, last = tensor.stride()
    parts = tensor.storage_offset(), tensor.shape[-1], *others
    is_aligned = tensor.data_ptr() % (n * tensor.itemsize) == 0
    return last == 1 and is_aligned and not any(one % n for one in parts)


@torch.inference_mode(False)  # else what is kept could be written in that mode alone
@torch.no_grad()
def write(tensors: Iterable[Named], places: Collection[Places], device: torch.device) -> None:
    """Writes what is planned of these tensors; ``finish`` waits until it is done.

    A list of tensors is bound, others are read one by one.
    """
    with _apart(device, device):
        chains = _chains(places, device)
        for chain in chains:
            chain.first.begin()
        if isinstance(tensors, list):
            for chain in chains:
                chain.first.bind(tensors, device)
            for chain in chains:
                chain.write(chain.first.bound())
                chain.hand_on()
            return
        for name, tensor in tensors:
            check_place(name, tensor, device)
            dense = tensor.contiguous()
            for chain in chains:
                chain.write(chain.first.pairs(name, dense))
        for chain in chains:
            chain.hand_on()


class _Chain:
    """Memories of one layout: what is written to the first, each hands on to the next."""

    def __init__(self, first: Places, device: torch.device) -> None:
        self.first, self._all, self._device = first, [first], device
        self._written: list[range] = []  # and not yet handed on, in bytes of the memory
        self._num_bytes = 0

    def take(self, one: Places) -> bool:
        """Adds a memory, if the last one's device can hand on to it."""
        last = self._all[-1]
        is_taken = last.layout == one.layout and last.memory.can_hand_on_to(one.memory)
        if is_taken:
            self._all.append(one)
        return is_taken

    def write(self, pairs: Iterable[Pair]) -> None:
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
            _, *others = self._all
            if not others:
                continue
            if not target.is_contiguous():  # others may write between
                for one in others:
                    one.like(target).copy_(source, non_blocking=True)
                continue
            self._written.append(self.first.memory.span_of(target))
            self._num_bytes += target.nbytes
            if self._num_bytes >= HANDED_ON_BYTES:
                self.hand_on()

    def hand_on(self) -> None:
        """Has each device give the next one what has been written, once it is there."""
        behind = self._device
        with contextlib.ExitStack() as streams:
            for giver, taker in itertools.pairwise(one.memory for one in self._all):
                assert giver.owner is not None
                streams.enter_context(_apart(giver.owner, behind))
                giver.hand_on(taker, self._written)
                behind = giver.owner
        self._written, self._num_bytes = [], 0


def _chains(places: Iterable[Places], device: torch.device) -> list[_Chain]:
    chains: list[_Chain] = []
    for one in places:
        if not any(chain.take(one) for chain in chains):
            chains.append(_Chain(one, device))
    return chains


def _apart(device: torch.device, behind: torch.device) -> contextlib.AbstractContextManager[object]:
    """A stream of a device for what comes after another's work, beside kernels launched later."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    _streams[device].wait_stream(torch.cuda.current_stream(behind))
    return torch.cuda.stream(_streams[device])


# One of each device for good, as the allocator keeps what is freed for its stream.
_streams: dict[torch.device, torch.cuda.Stream] = {}


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        for one in _streams.values():  # of devices that hand on
            one.synchronize()


def check_place(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if isinstance(tensor, DTensor):
        raise WeightMismatchError(f"{name} is a shard: a source must yield whole tensors")
    if tensor.device != device:
        raise WeightMismatchError(
            f"{name} is on {tensor.device}, but this transport writes from {device}: move the "
            "weights there, or use the memmap transport"
        )


# ---- A rank that does not send


class Offer(msgspec.Struct, frozen=True):
    """What a rank that does not send has for its part of a push."""

    node: str
    tokens: list[str]  # of the memories that it knows


class Passed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which memories, by token, such a rank will be given, keeps, and is to write to now."""

    new: list[str]
    keep: list[str]
    now: list[str]
    left: list[str]  # tensors of the model that are gathered afterwards


class ShardWriter:
    """The memories that such a rank was passed, and where its shards go; kept from push to push."""

    def __init__(self) -> None:
        self._handover: Handover | None = None
        self._memories: dict[str, Mapped] = {}
        self._cuts: Cuts = {}

    def tokens(self, cuts: Cuts) -> list[str]:
        """Returns what it knows, which is nothing once its tensors are cut in another way."""
        if cuts != self._cuts:
            self.keep(())
            self._cuts = cuts
        return list(self._memories)

    def door(self) -> str:
        self._handover = self._handover or Handover()
        return self._handover.path

    def take(
        self, passed: Passed, device: torch.device, deadline: float, watch: Callable[[], None]
    ) -> None:
        """Takes the new memories, and lets go of those that are not kept."""
        self.keep(passed.keep)
        expected = set(passed.new)
        while expected:
            assert self._handover is not None
            said, descriptors = self._handover.take(deadline, watch)
            token = str(said["token"])
            if token not in expected:  # of a push that was given up
                for one in descriptors:
                    os.close(one)
                continue
            expected.remove(token)
            plan, memory = descriptors
            with os.fdopen(plan, "rb") as file:  # whose position several processes share
                size = os.fstat(plan).st_size
                rows: list[Row] = msgspec.msgpack.decode(os.pread(file.fileno(), size, 0))
            cuts = {name: self._cuts[name] for name in {row[0] for row in rows}}
            mine = [one for row in rows if (cut := cuts[row[0]]) for one in parts(row, cut) or ()]
            num_bytes = int(str(said["num_bytes"]))
            owner = device_of(said["owner"])
            self._memories[token] = Mapped(num_bytes, device, memory, (), mine, owner)

    def shards(self, tokens: list[str]) -> list[Places]:
        return [self._memories[one].shards for one in tokens]

    def keep(self, tokens: Iterable[str]) -> None:
        """Lets go of all other memories."""
        for token in self._memories.keys() - set(tokens):
            self._memories.pop(token)


def plan_file(rows: list[Row]) -> int:
    """Returns the descriptor of a file in memory that holds rows."""
    fd = os.memfd_create("plan", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.msgpack.encode(rows))
    return fd

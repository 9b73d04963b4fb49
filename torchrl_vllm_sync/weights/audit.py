"""Whether engines compute with what a trainer holds: checksums, compared slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.errors import NonFiniteWeightsError
from torchrl_vllm_sync.weights.module import (
    OfLast,
    ParamMeta,
    checked,
    fp8_scale,
    is_peft,
    local,
    metadata_digest,
    nonfinite,
    to_fp8,
    to_json,
)
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource
from torchrl_vllm_sync.weights.snapshots import data_file
from torchrl_vllm_sync.weights.snapshots.data_file import bytes_of, is_on_host
from torchrl_vllm_sync.weights.source import (
    MappingSource,
    StableSource,
    WeightSource,
    tensors_of,
    views_of,
)
from torchrl_vllm_sync.weights.transport import (
    GRACE_S,
    ReplicaClient,
    ask,
    failed,
    raise_exceptions,
)

# ---- Checksums

# 32 MiB at a time; with the temporaries of a step about 160 MiB.
CHUNK_WORDS = 2**22
WORD_BYTES = 8
# Read by one kernel, and kept until then: some are copies.
BATCH_BYTES = 2**30
BLOCK_WORDS = 4096  # of it
# The mixer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
# 2014), its constants as the signed numbers torch computes with.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_STEPS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def checksum(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Checksums of named tensors, against misplaced or stale weights, not forged ones."""
    tensors = dict(parameters)
    return dict(zip(tensors, checksums(tensors.values()), strict=True))


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksums in order; neighbours on a GPU are added up in one go, ``BATCH_BYTES`` at a time."""
    sums: list[torch.Tensor] = []
    batch: list[torch.Tensor] = []
    num_bytes = 0

    def add() -> None:
        nonlocal num_bytes
        if batch:
            sums.extend(_fused_sums(batch).unbind())
            batch.clear()
            num_bytes = 0

    for tensor in tensors:
        dense = tensor.detach().contiguous()  # a copy of some
        if batch and (num_bytes > BATCH_BYTES or dense.device != batch[0].device):
            add()
        if _is_fusible(dense):
            batch.append(dense)
            num_bytes += dense.nbytes
        else:
            add()
            sums.append(_sum(dense))
    add()
    # All at once, as each alone would wait for its device.
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


def _is_fusible(dense: torch.Tensor) -> bool:
    return dense.is_cuda and not (dense.nbytes % WORD_BYTES or dense.data_ptr() % WORD_BYTES)


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Words of 64 bits, mixed with their positions and added up; alike on all devices."""
    total = torch.full((), tensor.nbytes, dtype=torch.int64, device=tensor.device)
    position = 1
    for chunk in _chunks(tensor):
        words = torch.zeros(-(-len(chunk) // WORD_BYTES), dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[: len(chunk)].copy_(chunk)
        end = position + len(words)
        words ^= torch.arange(position, end, device=tensor.device).mul_(_GAMMA)
        for shift, factor in _STEPS:
            # Shifted without regard to the sign, which torch would keep.
            words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
            words *= factor
        total += words.sum()
        position = end
    return total


def _fused_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As ``_sum``, of contiguous tensors of whole words on one GPU, by one kernel."""
    pointers = torch.tensor([one.data_ptr() for one in tensors])
    sizes = torch.tensor([one.nbytes for one in tensors])
    words = sizes // WORD_BYTES
    blocks = -(-words // BLOCK_WORDS)
    owners = torch.repeat_interleave(blocks)
    begins = blocks.cumsum(0) - blocks
    device = tensors[0].device
    totals, *table = (one.to(device) for one in (sizes, pointers, words, owners, begins))
    with torch.cuda.device(device):
        _kernel()[(len(owners),)](*table, totals, BLOCK=BLOCK_WORDS)
    return totals


@functools.cache
def _kernel() -> Any:
    global tl  # by which the kernel knows it; builds of torch for CPUs do not bring it
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return triton.jit(_add_blocks)


def _add_blocks(pointers, words, owners, begins, totals, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    at = (block - tl.load(begins + owner)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(words + owner)
    begin = tl.load(pointers + owner).to(tl.pointer_type(tl.uint64))
    word = tl.load(begin + at, mask=inside, other=0)
    word ^= (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word ^= word >> 31
    tl.atomic_add(totals + owner, tl.sum(tl.where(inside, word, 0)).to(tl.int64, bitcast=True))


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return data.split(CHUNK_WORDS * WORD_BYTES)


def chunk_of(tensor: torch.Tensor, index: int) -> bytes:
    """A part of a tensor's bytes, to be sent; empty behind the last."""
    found = _chunks(tensor)[index : index + 1]
    return b"".join(one.cpu().numpy().tobytes() for one in found)


# ---- Before a push


def refuse_nonfinite(source: WeightSource) -> None:
    """Refuses NaN and infinity; of computed tensors a module's parameters stand for them."""
    if bad := nonfinite(tensors_of(source)):
        raise NonFiniteWeightsError(bad)


class Content:
    """What a source held at a moment, to recognise whether a later push repeats it.

    A glance shows an optimizer step and other tensors, but not a write through ``.data`` outside of
    the values it reads; :meth:`summed` shows every change.
    """

    def __init__(self, source: WeightSource) -> None:
        self._is_summed = False
        self._seen = self._see(source, wait=False)  # it is read once the push has ended

    def summed(self, source: WeightSource) -> None:
        """Notes that a retry is due, and checksums to recognise it by."""
        self._is_summed = True
        self._seen = self._see(source)

    def difference(self, source: WeightSource) -> str:
        """Returns what of ``source`` may not be as it was; empty if all is shown to be."""
        then, now = self._seen, self._see(source)
        if then is None or now is None:
            # A push that left replicas behind is retried whatever its source is.
            return "" if self._is_summed else "nothing is known to compare its weights with"
        changed = [n for n in {**now, **then} if not _is_same(now.get(n), then.get(n))]
        return f"{len(changed)} not as they were: {first_few(changed)}" if changed else ""

    def _see(self, source: WeightSource, *, wait: bool = True) -> dict[str, Any] | None:
        """Looks at the live tensors that a source reads unchanged; ``None`` if unknown."""
        owner = source.owner if isinstance(source, StableSource) else None
        if isinstance(source, MappingSource | ShardedModuleSource):
            held = source.tensors
        elif isinstance(owner, torch.nn.Module) and not is_peft(owner):
            held = dict(owner.state_dict(keep_vars=True))
        elif views := views_of(source):
            held = dict(views)
        else:
            return None
        if self._is_summed:
            own = {name: local(one).resolve_conj().resolve_neg() for name, one in held.items()}
            # There is a faster one on the host, to which others need not be copied.
            host = {n: data_file.checksum(one) for n, one in own.items() if is_on_host(one)}
            return host | checksum((n, one) for n, one in own.items() if n not in host)
        step = max(len(held) // 8, 1)
        return {
            # Fused optimizers do not count their writes, so some values of a few are read.
            name: _glance(one, with_values=index % step == 0, wait=wait)
            for index, (name, one) in enumerate(held.items())
        }


def _is_same(one: Any, other: Any) -> bool:
    """Whether glances or checksums are equal; a glance ends in some values, or nothing."""
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return one == other
    both = [bytes_of(values).tobytes() for *_, values in (one, other) if values is not None]
    return one[:-1] == other[:-1] and len(both) != 1 and len({*both}) < 2


def _glance(tensor: torch.Tensor, *, with_values: bool, wait: bool) -> tuple[Any, ...]:
    """Identifies a tensor's memory and the writes to it."""
    one, sample = local(tensor), None
    storage = StorageWeakRef(one.untyped_storage())  # no other storage is taken for it
    if with_values:
        flat = one.reshape(-1)
        some = flat[:: max(flat.numel() // 16, 1)].detach()
        sample = some.to("cpu", non_blocking=not wait, copy=True)
    writes = None if tensor.is_inference() else tensor._version
    return storage, one.storage_offset(), one.shape, one.stride(), writes, sample


# ---- What is compared


class Slice(NamedTuple):
    """What a worker holds of one tensor of a push, in elements of that, whole and contiguous."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype  # in which it is held, or was before it was quantised
    group: str = ""  # what is quantised together, and with it ``<group>_scale``

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The values that the trainer's tensor has here, cast as a load casts them."""
        begin = whole.storage_offset() + self.offset
        return whole.as_strided(self.shape, self.stride, begin).to(self.dtype)


def _quantised(parts: dict[Slice, torch.Tensor], scale: Slice) -> dict[Slice, torch.Tensor]:
    """What vLLM makes of weights that share a scale of fp8, bit by bit, and that scale."""
    value = fp8_scale(torch.stack([one.abs().max() for one in parts.values()]).max().reshape(1))
    return {name: to_fp8(one, value) for name, one in parts.items()} | {scale: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A tensor of which a worker serves other values than the trainer holds.

    Attributes:
        name: The tensor, as checkpoints name it.
        replica_id, rank: The replica, and the worker's rank in it.
        num_different, largest: Elements of the worker's share that differ in any bit, and the
            greatest absolute difference, NaN where either value is. Known of the first tensor that
            differs in a replica unless it is quantised, otherwise ``None``.
    """

    name: str
    replica_id: str
    rank: int
    num_different: int | None = None
    largest: float | None = None

    def __str__(self) -> str:
        told = f"{self.name} on worker {self.rank} of replica {self.replica_id}"
        if self.largest is None:
            return told
        return f"{told} ({self.num_different} elements differ, by up to {self.largest:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """An audit that found no difference.

    Attributes:
        versions: Replica id to the policy version that it serves.
        num_tensors, num_bytes: Tensors that were compared, and the trainer's bytes of them.
        seconds: How long it took.
    """

    versions: dict[str, int]
    num_tensors: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class Findings:
    """What an audit found: by replica its version, or why it gave no answer; and differences."""

    versions: dict[str, int]
    failures: dict[str, BaseException]
    differences: list[WeightDifference]


class Auditor:
    """Compares what workers compute with to a source's tensors, through their load plans."""

    def __init__(self, client: ReplicaClient) -> None:
        self._client = client
        self._metadata: list[ParamMeta] = []
        self._digest, self._digest_of = "", OfLast(metadata_digest)
        # Replica id to its incarnation and the metadata's digest, and to its workers' slices.
        self._known: dict[str, tuple[str, str]] = {}
        self._held: dict[str, list[list[Slice]]] = {}

    def plan(
        self, incarnations: Mapping[str, str], metadata: list[ParamMeta], timeout_s: float
    ) -> None:
        """Asks replicas what their workers hold of such tensors; raises if one cannot tell."""
        self._metadata, self._digest = metadata, self._digest_of(metadata)
        known = {name: (one, self._digest) for name, one in incarnations.items()}
        new = {name: one for name, one in known.items() if self._known.get(name) != one}
        if new:
            calls = dict.fromkeys(new, (to_json(metadata),))
            answers = ask(self._client, "plan_audit", calls, timeout_s)
            raise_exceptions(answers)
            kind, dtype = dict[str, list[list[Slice]]], lambda _, name: getattr(torch, name)
            self._held |= msgspec.convert(answers, kind, dec_hook=dtype)
            self._known |= new

    def compare(
        self, source: WeightSource, replica_ids: Collection[str], timeout_s: float
    ) -> Findings:
        """Compares the planned source's tensors with those that these replicas serve now."""
        calls = dict.fromkeys(replica_ids, (self._digest,))
        pending = self._client.start_calls("audit_weights", calls, timeout_s=timeout_s)
        held = {name: self._held[name] for name in replica_ids}
        wanted = {one for workers in held.values() for slices in workers for one in slices}
        own = self._own(source, wanted)
        answers = pending.answers(timeout_s + GRACE_S)
        failures = failed(answers)
        found = Findings({}, failures, [])
        for name in answers.keys() - failures.keys():
            found.versions[name] = answers[name]["version"]
            theirs = zip(held[name], answers[name]["workers"], strict=True)
            wrong = [
                (rank, at, one)
                for rank, (slices, sums) in enumerate(theirs)
                for at, (one, value) in enumerate(zip(slices, sums, strict=True))
                if own[one] != value
            ]
            is_known = bool(wrong) and not wrong[0][2].group
            extent = self._extent(source, name, *wrong[0], timeout_s) if is_known else {}
            for rank, _, one in wrong:
                about = {"name": one.name, "replica_id": name, "rank": rank, **extent}
                found.differences.append(WeightDifference(**about))
                extent = {}
        return found

    def _tensors(
        self, source: WeightSource, names: Collection[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, tensor in checked(source, self._metadata):
            if meta.name in names:
                yield meta.name, tensor.detach().to(meta.dtype).contiguous()

    @torch.no_grad()
    def _own(self, source: WeightSource, wanted: set[Slice]) -> dict[Slice, int]:
        by_name: dict[str, list[Slice]] = {}
        lacking: dict[str, set[Slice]] = {}  # of groups
        for one in wanted:
            by_name.setdefault(one.name, []).append(one)
            lacking.setdefault(one.group, set()).add(one)
        slices: list[Slice] = []
        parts: dict[str, dict[Slice, torch.Tensor]] = {}
        lasts = views_of(source) is not None  # else what it yields may change with the next

        def values() -> Iterator[torch.Tensor]:
            for name, tensor in self._tensors(source, by_name):
                for one in by_name[name]:
                    found = {one: one.of(tensor) if lasts else one.of(tensor).clone()}
                    if group := one.group:
                        parts.setdefault(group, {}).update(found)
                        if len(parts[group]) < len(lacking[group]) - 1:
                            continue
                        (scale,) = lacking[group] - parts[group].keys()
                        found = _quantised(parts.pop(group), scale)
                    slices.extend(found)
                    yield from found.values()

        sums = checksums(values())
        return dict(zip(slices, sums, strict=True))

    @torch.no_grad()
    def _extent(
        self, source: WeightSource, name: str, rank: int, at: int, one: Slice, timeout_s: float
    ) -> dict[str, Any]:
        """How far a worker's slice is from the source's."""
        ((_, tensor),) = self._tensors(source, [one.name])
        num_different, largest = 0, list[torch.Tensor]()
        for index, chunk in enumerate(_chunks(one.of(tensor))):
            calls = {name: (self._digest, rank, at, index)}
            answers = ask(self._client, "audit_values", calls, timeout_s)
            raise_exceptions(answers)
            mine = chunk.cpu()
            theirs = torch.frombuffer(bytearray(answers[name]), dtype=torch.uint8)
            bits = (mine != theirs).view(-1, one.dtype.itemsize).any(1)
            num_different += int(bits.sum())
            far = (mine.view(one.dtype).double() - theirs.view(one.dtype).double()).abs()
            largest += [far[bits].max()] if bits.any() else []
        return {"num_different": num_different, "largest": torch.stack(largest).max().item()}

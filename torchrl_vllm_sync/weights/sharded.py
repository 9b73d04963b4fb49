"""What a module sharded by FSDP2 sends: each layer gathered on the sending rank, one ahead.

The first of the module's ranks iterates; the others take part with ``participate()`` until they
hear how the push ended. While one group of parameters (a decoder layer, or what comes before or
after them) is consumed, the next is on its way, and no more than these two are ever alive.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import re
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import metadata_digest
from torchrl_vllm_sync.weights.module import (
    TensorReader,
    check_readable,
    is_peft,
    plan_of,
    same_values,
    tied_names,
    unwrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.module import Bundle, Plan

logger = logging.getLogger(__name__)

# One gather of a few sharded parameters to the sending rank, under way until it is waited for.


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
    """Gathers some tensors at once. Lifecycle: constructed, ``launch`` and ``result`` once each."""

    def __init__(self, parts: Mapping[str, Part], *, receives: bool) -> None:
        self._parts, self._receives = dict(parts), receives
        self._works: list[Work] = []
        for part in self._parts.values():
            part.prepare(receives=receives)

    def launch(self, watch: Callable[[], None] = lambda: None) -> None:
        """Begins to gather; waits for the others only where a part cannot do without."""
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
        """Returns whole tensors by name, empty where they are not received."""
        for work in self._works:
            work.wait()
        if not self._receives:
            return {}
        return {name: part.result() for name, part in self._parts.items()}


def part_of(tensor: torch.Tensor) -> Part:
    """Returns how ``tensor`` is gathered."""
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


# How the ranks of one trainer go through a push in step: one leads, the others follow.
#
# The leader says through the process group's key-value store what comes next ("gather group 3", or
# how the push ended), and goes on only when every other rank has said that it is ready. So a rank
# that fails is noticed before the others are inside a collective with it, and every wait ends:
# with
# the others, with the failed rank's own words, or at a deadline.
#
# Keys of one round, below its number: ``begun``; ``joined/<rank>``; ``ready/<step>/<rank>``;
# ``next/<step>``, the last of which holds the verdict; ``over``. Beside them ``broken``: who could
# not begin a gather that the others are in. Their process group is out of step from then on, and
# there is no other round.
#
# Everybody who reaches the store can write into it, and torch's listens on all interfaces: so a
# verdict is JSON, of bounded size, with plain values and this library's own dataclasses in it, and
# whatever else a key may hold ends in an error of this module.


FAILED, GATHER, VERDICT = "!", "g", "v"
BROKEN = "broken"
# The name of a dataclass, among its fields.
CLASS = "@"
# Of one value. What the store is asked for is bounded once it is here: it has no call for less.
MOST_BYTES = 1 << 22
MOST_REASON = 1 << 14
# When something broke off, ranks get as long to show that it was not them.
GRACE_S = 1.0


class TrainerRankError(SyncError, RuntimeError):
    """A rank of the trainer failed or fell silent, which ended a push on all of them.

    Attributes:
        rank: Global rank of the one to look at; ``None`` if none can be told from the others.
        reason: What it said, or how it was missed.
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        who = "ranks of the trainer" if self.rank is None else f"trainer rank {self.rank}"
        return f"{who}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a push ended on the leading rank.

    Attributes:
        outcome: What the leader announced; ``None`` after a failure.
        failed_rank: Global rank that failed, if that is known.
        reason: Why; empty after a success.
    """

    outcome: Any = None
    failed_rank: int | None = None
    reason: str = ""


class TrainerRanks:
    """The ranks that hold one sharded module; the first of them leads.

    A push is one round: :meth:`begin` on the leader, :meth:`join` on each other rank, in the same
    order everywhere. What state there is lies in the store.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Store, *, timeout_s: float) -> None:
        self.ranks, self.rank, self.timeout_s = tuple(ranks), rank, timeout_s
        self.store = PrefixStore("torchrl_vllm_sync/" + "-".join(map(str, ranks)), store)

    @property
    def leader(self) -> int:
        """Global rank of the one that sends."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether this process is the one that sends."""
        return self.rank == self.leader

    def begin(self, digest: str) -> LeadingRound:
        """Starts a round on the leader, without waiting for anybody."""
        self._refuse_broken()
        try:
            number = self.store.add("rounds", 1)
            self.store.set(f"{number}/begun", "")
        except dist.DistError as error:
            raise TrainerRankError(None, f"their store failed: {error}") from error
        return LeadingRound(self, number, digest)

    def join(self, *, timeout_s: float) -> FollowingRound:
        """Enters the round that the leader has begun or begins next."""
        self._refuse_broken()
        waiting = "begin a push"
        text = _await(self.store, "rounds", timeout_s, self.leader, waiting)
        number = _number(text, self.leader)
        if self.store.check([f"{number}/over"]) or self.store.check([self._joined(number)]):
            number += 1
        _await(self.store, f"{number}/begun", timeout_s, self.leader, waiting)
        self.store.set(self._joined(number), "")
        return FollowingRound(self, number, timeout_s)

    def break_step(self, error: BaseException) -> None:
        """Notes that this rank could not begin a gather to which all had been called."""
        if isinstance(error, TrainerRankError):
            rank, reason = error.rank, error.reason
        else:
            rank, reason = self.rank, _words_of(error)
        try:
            if not self.store.check([BROKEN]):
                self.store.set(BROKEN, _written(Verdict(failed_rank=rank, reason=reason)))
        except dist.DistError as other:
            logger.warning("the other ranks could not be told of a failure: %s", other)

    def _refuse_broken(self) -> None:
        """Raises if a gather was left that others were in."""
        try:
            if not self.store.check([BROKEN]):
                return
            broken = _read(_text(self.store.get(BROKEN), BROKEN))
        except dist.DistError as error:
            raise TrainerRankError(None, f"their store failed: {error}") from error
        raise TrainerRankError(
            broken.failed_rank,
            f"left the process group out of step in an earlier push, make another group: "
            f"{broken.reason}",
        )

    def _joined(self, number: int) -> str:
        return f"{number}/joined/{self.rank}"


class LeadingRound:
    """The leader's side of a round: :meth:`call` for each group, then one verdict.

    Made by :meth:`TrainerRanks.begin`.
    """

    def __init__(self, ranks: TrainerRanks, number: int, digest: str) -> None:
        self._ranks, self._number, self._digest, self._step = ranks, number, digest, 0
        self._store, self._is_broken = ranks.store, False

    def call(self, index: int) -> None:
        """Waits until all are ready, and has them gather group ``index``."""
        self._await_ready()
        self._say(GATHER + str(index))

    def succeed(self, outcome: Any) -> None:
        """Tells all ranks that the push succeeded; one that is not there any more is logged."""
        verdict = _written(Verdict(outcome))
        try:
            self._await_ready()
        except TrainerRankError as error:
            logger.warning("the push succeeded, but meanwhile %s", error)
        self._end(verdict)

    def fail(self, error: BaseException) -> None:
        """Tells all ranks why there was no push; waits for those who have yet to join."""
        if isinstance(error, TrainerRankError):
            verdict = Verdict(failed_rank=error.rank, reason=error.reason)
        else:
            verdict = Verdict(None, self._ranks.leader, _words_of(error))
            try:
                if not self._is_broken:  # all have joined then, and wait in a gather
                    self._await_ready()
            except TrainerRankError as other:
                logger.warning("the push failed, and meanwhile %s", other)
        self._end(_written(verdict))

    def break_step(self, error: BaseException) -> None:
        """Notes that this rank could not begin the gather it called for."""
        self._is_broken = True
        self._ranks.break_step(error)

    def raise_reported(self) -> None:
        """Looks, without waiting, whether a rank has said that it failed."""
        for key, rank in self._keys().items():
            if self._store.check([key]):
                self._raise_if_failed(rank, _text(self._store.get(key), key))

    def blame(self, reason: str) -> TrainerRankError:
        """Returns the error for a gather that broke off, after a look at who is still there."""
        try:
            self._await_ready(GRACE_S)
        except TrainerRankError as error:
            return TrainerRankError(error.rank, f"{error.reason} ({reason})")
        return TrainerRankError(None, reason)

    def _keys(self) -> dict[str, int]:
        return {f"{self._number}/ready/{self._step}/{rank}": rank for rank in self._ranks.ranks[1:]}

    def _await_ready(self, timeout_s: float | None = None) -> None:
        """Waits for the others' word that they have begun what was called for before."""
        timeout_s = self._ranks.timeout_s if timeout_s is None else timeout_s
        keys = self._keys()
        if not keys:
            return
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
            values = self._store.multi_get(list(keys))
            said = [_text(one, key) for one, key in zip(values, keys, strict=True)]
        except dist.DistStoreError as error:
            self.raise_reported()
            missing = [rank for key, rank in keys.items() if not self._store.check([key])]
            more = f", as ranks {missing[1:]}" if missing[1:] else ""
            raise TrainerRankError(
                next(iter(missing), None), f"was not ready within {timeout_s:g} s{more}"
            ) from error
        except dist.DistError as error:
            raise TrainerRankError(None, f"their store failed: {error}") from error
        for rank, text in zip(keys.values(), said, strict=True):
            self._raise_if_failed(rank, text)
            if self._step == 0 and text != self._digest:
                raise TrainerRankError(rank, "holds other tensors than the sending rank")

    @staticmethod
    def _raise_if_failed(rank: int, text: str) -> None:
        if text.startswith(FAILED):
            raise TrainerRankError(rank, text.removeprefix(FAILED))

    def _say(self, text: str) -> None:
        try:
            self._store.set(f"{self._number}/next/{self._step}", text)
        except dist.DistError as error:
            raise TrainerRankError(None, f"their store failed: {error}") from error
        self._step += 1

    def _end(self, verdict: str) -> None:
        try:
            self._say(verdict)
            self._store.set(f"{self._number}/over", str(self._step))
            self._forget(self._number - 1)
        except (dist.DistError, TrainerRankError) as error:
            logger.warning("the trainer's ranks could not be told how the push ended: %s", error)

    def _forget(self, number: int) -> None:
        """Deletes the keys of a round, whose verdict all have read who joined the one after it."""
        if not self._store.check([f"{number}/over"]):
            return
        joined = (f"{number}/joined/{rank}" for rank in self._ranks.ranks[1:])
        for key in (f"{number}/begun", *joined):
            self._store.delete_key(key)
        step = 0
        while self._store.delete_key(f"{number}/next/{step}"):
            step += 1


class FollowingRound:
    """Another rank's side of a round: :meth:`present`, :meth:`next`, gather, :meth:`launched`, ...

    Whoever was called must not fail before its part of the gather has begun.

    Made by :meth:`TrainerRanks.join`.
    """

    def __init__(self, ranks: TrainerRanks, number: int, timeout_s: float) -> None:
        self._ranks, self._number, self._timeout_s, self._step = ranks, number, timeout_s, 0
        self._store = ranks.store

    def present(self, digest: str) -> None:
        """Says that this rank is ready for the first call."""
        self._say_ready(digest)

    def next(self, timeout_s: float | None = None) -> int | Verdict:
        """Waits for the leader's word: the index of the group to gather, or the verdict."""
        key, leader = f"{self._number}/next/{self._step}", self._ranks.leader
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = _await(self._store, key, timeout_s, leader, "say what comes next")
        if call.startswith(VERDICT):
            self._drop([self._step])
            return _read(call)
        return _number(call.removeprefix(GATHER), leader)

    def launched(self) -> None:
        """Says that this rank's part of the gather has begun, so that the next may be called."""
        self._step += 1
        self._say_ready("")

    def break_step(self, error: BaseException) -> None:
        """Notes that this rank could not begin the gather it was called for."""
        self._ranks.break_step(error)

    def raise_reported(self) -> None:
        """Looks, without waiting, whether the push ended while this rank takes its part."""
        key = f"{self._number}/next/{self._step + 1}"
        if self._store.check([key]):
            verdict = _read(_text(self._store.get(key), key))
            raise TrainerRankError(verdict.failed_rank, verdict.reason)

    def explain(self, error: TrainerRankError) -> TrainerRankError:
        """Returns why a gather broke off: the leader's verdict if it comes to one, or ``error``."""
        try:
            call = self.next(self._ranks.timeout_s + 2 * GRACE_S)
        except TrainerRankError:
            return error
        if isinstance(call, Verdict) and call.reason:
            return TrainerRankError(call.failed_rank, call.reason)
        return error

    def fail(self, error: BaseException) -> None:
        """Tells the leader that this rank takes no further part, if it can still be told."""
        text = FAILED + _words_of(error)
        try:
            for step in (self._step, self._step + 1):
                self._store.set(self._ready(step), text)
        except dist.DistError as other:
            logger.warning("the sending rank could not be told of a failure: %s", other)

    def _say_ready(self, text: str) -> None:
        try:
            self._store.set(self._ready(self._step), text)
            if self._step:
                self._drop([self._step - 1])
        except dist.DistError as error:
            raise TrainerRankError(self._ranks.leader, f"cannot be reached: {error}") from error

    def _ready(self, step: int) -> str:
        return f"{self._number}/ready/{step}/{self._ranks.rank}"

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._store.delete_key(self._ready(step))


def _written(verdict: Verdict) -> str:
    """Writes a verdict as text."""
    try:
        text = VERDICT + json.dumps(_plain(verdict))
    except (ValueError, RecursionError) as error:
        raise TypeError(f"an outcome must be plain values or this library's: {error}") from error
    if len(text) > MOST_BYTES:
        raise TypeError(f"an outcome must have at most {MOST_BYTES} bytes, got {len(text)}")
    return text


def _plain(value: Any) -> Any:
    """Returns a value as JSON holds it, dataclasses of this library with their names."""
    kind = type(value)
    if is_dataclass(kind) and _class_of(_name_of(kind)) is kind:
        told = {each.name: _plain(getattr(value, each.name)) for each in fields(kind)}
        return {CLASS: _name_of(kind), **told}
    if kind is dict and CLASS not in value and all(type(name) is str for name in value):
        return {name: _plain(one) for name, one in value.items()}
    if kind is list:
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"an outcome must be plain values or this library's, got {kind.__qualname__}")


def _read(call: str) -> Verdict:
    """Reads a verdict, of which anybody may have written the text."""
    try:
        verdict = _built(json.loads(call.removeprefix(VERDICT)))
    except (ValueError, TypeError, NameError, RecursionError) as error:
        raise TrainerRankError(None, f"their store holds no verdict: {error}") from error
    if not isinstance(verdict, Verdict):
        raise TrainerRankError(None, f"their store holds no verdict: {type(verdict).__name__}")
    return verdict


def _built(value: Any) -> Any:
    """Returns what :func:`_plain` was given."""
    if isinstance(value, list):
        return [_built(one) for one in value]
    if not isinstance(value, dict):
        return value
    told = {name: _built(one) for name, one in value.items()}
    if CLASS not in told:
        return told
    name = told.pop(CLASS)
    kind = _class_of(name)
    if kind is None:
        raise TypeError(f"{name!r:.200} is no dataclass of this library")
    types = get_type_hints(kind)
    if told.keys() != {each.name for each in fields(kind)}:
        raise TypeError(f"{name} has other fields")
    if wrong := [field for field, one in told.items() if not _fits(one, types[field])]:
        raise TypeError(f"{name} has fields of other types: {', '.join(wrong)}")
    return kind(**told)


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether ``value`` is of that type, to the last entry."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    return kind is Any or isinstance(value, int | float if kind is float else kind)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of(name: object) -> Any:
    """Returns the dataclass with that name of this part of the library."""
    module, _, own = str(name).rpartition(".")
    if re.fullmatch(re.escape(__name__.rpartition(".")[0]) + r"\.[a-z_]+", module) is None:
        return None
    try:  # a rank that only takes part has imported no more than it needs
        found = vars(importlib.import_module(module)).get(own)
    except ModuleNotFoundError:
        return None
    is_here = isinstance(found, type) and is_dataclass(found) and found.__module__ == module
    return found if is_here else None


def _words_of(error: BaseException) -> str:
    """Returns what the other ranks are told of an error."""
    words = f"{type(error).__name__}: {error}"[:MOST_REASON]
    return words.encode(errors="backslashreplace").decode()


def _number(text: str, rank: int | None) -> int:
    """Reads a number that a rank wrote."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise TrainerRankError(rank, f"wrote {text!r:.50} where a number belongs")
    return int(text)


def _text(value: bytes, key: str) -> str:
    """Reads what the store holds under ``key``."""
    if len(value) > MOST_BYTES:
        raise TrainerRankError(None, f"their store holds {len(value)} bytes under {key}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise TrainerRankError(None, f"their store holds no text under {key}: {error}") from error


def _await(store: Store, key: str, timeout_s: float, leader: int, what: str) -> str:
    """Returns what the leader wrote under ``key``, once it has."""
    begin = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return _text(store.get(key), key)
    except dist.DistStoreError as error:
        raise TrainerRankError(leader, f"did not {what} within {timeout_s:g} s") from error
    except dist.DistError as error:
        waited = time.monotonic() - begin
        raise TrainerRankError(leader, f"could not be reached after {waited:.1f} s") from error


STEP_TIMEOUT_S = 60.0
# Seconds between looks at whether a rank has said that it failed.
LOOK_S = 0.1
FOLLOW_TIMEOUT_S = 900.0


@dataclass(slots=True)
class Announcement:
    """What the sending rank tells the others at the end of a push.

    Attributes:
        outcome: Handed to each ``participate()``: what JSON holds, or this library's dataclasses.
    """

    outcome: Any = None


class ShardedModuleSource:
    """A Hugging Face model under ``torch.distributed.fsdp.fully_shard``, on all of its ranks.

    Parameters may be sharded in one dimension, evenly or not, or not at all. Those on meshes of
    several dimensions are gathered on every rank.

    Example:
        >>> source = ShardedModuleSource(model)
        >>> if source.leads:
        ...     with source.lead() as announcement:
        ...         announcement.outcome = send(source)
        ... else:
        ...     outcome = source.participate()
    """

    def __init__(self, module: torch.nn.Module, *, timeout_s: float = STEP_TIMEOUT_S) -> None:
        module = unwrap(module)
        if is_peft(module):
            raise WeightMismatchError(
                "adapters on a sharded model cannot be merged: merge them first, or do not shard"
            )
        self._module = module
        check_readable(self._tensors())
        ranks = _ranks_of(module)
        if dist.get_rank() not in ranks:
            raise UnsupportedArgumentError(
                f"rank {dist.get_rank()} must be one of the model's ranks, {list(ranks)}"
            )
        store = _store_for(module)
        self._ranks = TrainerRanks(ranks, dist.get_rank(), store, timeout_s=timeout_s)
        self._round: LeadingRound | None = None
        self._failure: TrainerRankError | None = None

    @property
    def leads(self) -> bool:
        """Whether this process sends; the others only take part."""
        return self._ranks.leads

    @property
    def owner(self) -> object:
        """The model without its wrappers."""
        return self._module

    def views(self) -> None:
        """Returns ``None``: every value has to be gathered."""

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, on any rank, without gathering.

        It is the same list object as long as names, dtypes and shapes are the same: leave it as
        it is.
        """
        return self._plan(self._tensors()).metadata

    def same_values(self, name: str, other: str) -> bool:
        """Whether this rank's shards of two tensors, by their names in the model, are equal."""
        tensors = dict(self._module.state_dict(keep_vars=True))
        return same_values(tensors[name], tensors[other])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, whole, on the sending rank, while the others ``participate()``.

        A tensor must not be used on another stream after the next item is asked for. Outside
        :meth:`lead` an iteration is a round of its own.
        """
        if not self.leads:
            raise UnsupportedArgumentError(
                f"rank {self._ranks.rank} must take part with participate(): "
                f"rank {self._ranks.leader} sends"
            )
        if self._round is None:
            with self.lead():
                yield from self._iterate()
        else:
            yield from self._iterate()

    @contextmanager
    def lead(self) -> Iterator[Announcement]:
        """Goes round a push on the sending rank: tells the others how it ended, whatever happens.

        Inside, iterate as often as needed. Leaving waits for ranks that have yet to join.
        """
        announcement = Announcement()
        self._failure = None
        self._round = self._ranks.begin(self._digest())
        try:
            yield announcement
            self._round.succeed(announcement.outcome)
        except BaseException as error:
            if self._failure is None or not isinstance(error, Exception):
                self._round.fail(error)
                raise
            # Engines that were cut off report no more than that.
            self._round.fail(self._failure)
            raise self._failure from error
        finally:
            self._round = self._failure = None

    def participate(self, *, timeout_s: float = FOLLOW_TIMEOUT_S) -> Any:
        """Takes part in one push on a rank that does not send."""
        followed = self._ranks.join(timeout_s=timeout_s)
        under_way: list[Gather] = []
        try:
            tensors = self._tensors()
            groups = _groups(self._plan(tensors))
            # Prepared before this rank is called: failing between the call and the launch would
            # leave the sending rank alone in a collective, and the process group out of step.
            expected, prepared = 0, self._prepare(groups[0], tensors)
            followed.present(self._digest())
            while not isinstance(call := followed.next(), Verdict):
                with self._launching(followed) as watch:
                    if call != expected:  # a reader that stopped early begins again
                        prepared = self._prepare(self._called(groups, call), tensors)
                    prepared.launch(watch)
                under_way.append(prepared)
                expected = (call + 1) % len(groups)
                prepared = self._prepare(groups[expected], tensors)
                followed.launched()
                if len(under_way) > 1:
                    self._finish_following(under_way.pop(0), followed)
            if not call.reason:
                for gather in under_way:
                    self._finish(gather)
        except BaseException as error:
            followed.fail(error)
            raise
        if call.reason:
            raise TrainerRankError(call.failed_rank, call.reason)
        return call.outcome

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._tensors()
        groups = _groups(self._plan(tensors))
        ahead: Gather | None = None
        try:
            for index, group in enumerate(groups):
                now = ahead or self._call(index, group, tensors)
                ahead = None
                if index + 1 < len(groups):
                    ahead = self._call(index + 1, groups[index + 1], tensors)
                whole = self._finish(now)
                del now
                for bundle in group:
                    sources = [whole[name] for name in bundle.sources]
                    yield from bundle.publish(self._module, sources)
                    del sources
                del whole
        except TrainerRankError as error:
            # Without the traceback, which holds what the reader was sending.
            self._failure = TrainerRankError(error.rank, error.reason)
            raise
        except GeneratorExit:
            if ahead is not None:
                self._finish(ahead)  # its memory is still being written
            raise

    def _call(self, index: int, group: list[Bundle], tensors: dict[str, torch.Tensor]) -> Gather:
        """Begins to gather a group on all ranks; takes the memory before the others are called."""
        assert self._round is not None
        gather = self._prepare(group, tensors)
        self._round.call(index)
        with self._launching(self._round) as watch:
            gather.launch(watch)
        return gather

    def _called(self, groups: list[list[Bundle]], call: int) -> list[Bundle]:
        """Returns the group that this rank was called for."""
        if call >= len(groups):
            raise TrainerRankError(self._ranks.leader, f"called for group {call} of {len(groups)}")
        return groups[call]

    @contextmanager
    def _launching(self, turn: LeadingRound | FollowingRound) -> Iterator[Callable[[], None]]:
        """Tells the others if this rank cannot begin what all were called for."""
        deadline = time.monotonic() + self._ranks.timeout_s

        def watch() -> None:
            turn.raise_reported()
            if time.monotonic() > deadline:
                raise self._broken(f"a gather did not end within {self._ranks.timeout_s:g} s")

        try:
            yield watch
        except BaseException as error:
            turn.break_step(error)
            raise

    def _prepare(self, group: list[Bundle], tensors: dict[str, torch.Tensor]) -> Gather:
        names = [name for bundle in group for name in bundle.sources]
        return Gather({name: part_of(tensors[name]) for name in names}, receives=self.leads)

    def _finish(self, gather: Gather) -> dict[str, torch.Tensor]:
        """Waits for a gather and returns whole tensors by name, none on ranks that do not send."""
        deadline = time.monotonic() + self._ranks.timeout_s
        look = time.monotonic() + LOOK_S
        while not gather.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise self._broken(f"a gather did not end within {self._ranks.timeout_s:g} s")
            if self._round is not None and now > look:
                self._round.raise_reported()
                look = now + LOOK_S
            time.sleep(5e-5)
        try:
            return gather.result()
        except RuntimeError as error:  # torch.distributed's backends raise nothing narrower
            raise self._broken(f"a gather broke off: {error}") from error

    def _finish_following(self, gather: Gather, followed: FollowingRound) -> None:
        try:
            self._finish(gather)
        except TrainerRankError as error:
            # It breaks on every rank if one is gone; the sending rank finds out which.
            raise followed.explain(error) from error

    def _broken(self, reason: str) -> TrainerRankError:
        if self._round is not None:
            return self._round.blame(reason)
        return TrainerRankError(self._ranks.leader, reason)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers, sharded as they are; a tied one appears once."""
        tensors = dict(self._module.state_dict(keep_vars=True))
        for name, twin in tied_names(self._module).items():
            # Not by value: ranks would have to agree, and each sees its shard alone.
            if name in tensors and tensors[name] is tensors.get(twin):
                del tensors[name]
        return tensors

    def _plan(self, tensors: dict[str, torch.Tensor]) -> Plan:
        return plan_of(self._module, {name: TensorReader(one) for name, one in tensors.items()})

    def _digest(self) -> str:
        return metadata_digest(self.metadata())


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``module``, or the model it wraps, is sharded by FSDP2 or has a ``DTensor``."""
    pending: list[Any] = [unwrap(module)]
    while pending:  # at each push, so without the generators of ``module.modules()``
        part = pending.pop()
        parts = part.__dict__
        if isinstance(part, FSDPModule) or DTensor in map(type, parts["_parameters"].values()):
            return True
        pending += [one for one in parts["_modules"].values() if one is not None]
    return False


@contextmanager
def leading(source: object) -> Iterator[Announcement]:
    """Goes round any push: for a sharded source :meth:`ShardedModuleSource.lead`, else nothing."""
    if isinstance(source, ShardedModuleSource):
        with source.lead() as announcement:
            yield announcement
    else:
        yield Announcement()


def _groups(plan: Plan) -> list[list[Bundle]]:
    """Returns the bundles of each decoder layer, and of what comes before and after them."""
    return [list(group) for _, group in itertools.groupby(plan.bundles, _layer_of)]


def _layer_of(bundle: Bundle) -> tuple[str, ...]:
    """Returns a tensor's name up to its first number; nothing if there is none."""
    parts = bundle.sources[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return tuple(parts[: numbers[0] + 1]) if numbers else ()


def _ranks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Returns the global ranks that hold the shards, the same for all parameters."""
    tensors = module.state_dict(keep_vars=True).values()
    meshes = {one.device_mesh for one in tensors if isinstance(one, DTensor)}
    members = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len({frozenset(one) for one in members}) != 1:
        raise WeightMismatchError(
            f"all sharded parameters must be on the same ranks, got {sorted(members)}"
        )
    return min(members)


_STORES: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Store, Store]] = (
    weakref.WeakKeyDictionary()
)


def _store_for(module: torch.nn.Module) -> Store:
    """Returns a connection of its own to the process group's store, kept with the module."""
    default = _get_default_store()
    known = _STORES.get(module)
    if known is None or known[0] is not default:
        _STORES[module] = known = default, default.clone()  # pyright: ignore[reportAttributeAccessIssue]
    return known[1]

"""The tensors of a module sharded by FSDP2: each layer gathered on the sending rank, one ahead.

The first of the module's ranks iterates; the others take part with ``participate()`` until the push
ends. While one group of parameters (a decoder layer, or what comes before or after them) is
consumed, the next is on its way, and no more than these two are ever alive.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import time
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.metadata import metadata_digest
from torchrl_vllm_sync.weights.module import (
    check_readable,
    is_peft,
    known_of,
    plan_of,
    repeated,
    same_values,
    unwrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.module import Bundle, Plan

logger = logging.getLogger(__name__)

# ---- Gathers of a few sharded parameters to the sending rank


# Seconds between checks of the other ranks in a call that blocks.
WATCH_S = 0.05


class Gather:
    """Gathers some tensors at once. Lifecycle: constructed, ``launch`` and ``result`` once each.

    All memory is taken at construction, so that nothing but the network fails in ``launch``.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, receives: bool) -> None:
        self._parts = {name: _part_of(one, receives) for name, one in tensors.items()}
        self._receives = receives
        self._works: list[dist.Work | _Queued] = []

    def launch(self, watch: Callable[[], None] = lambda: None) -> None:
        """Begins to gather; waits for the others only where a part has to."""
        if not any(isinstance(part, _Redistributed) for part in self._parts.values()):
            self._launch()
            return
        as_here = _same_stream()

        def launch() -> None:
            with as_here:
                self._launch()

        launched = in_thread("gather", launch)
        while wait([launched], timeout=WATCH_S).not_done:
            watch()
        launched.result()

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


def _part_of(tensor: torch.Tensor, receives: bool) -> _Local | _Sharded | _Redistributed:
    if not isinstance(tensor, DTensor):
        return _Local(tensor)
    if all(isinstance(one, Replicate) for one in tensor.placements):
        with torch.no_grad():
            return _Local(tensor.to_local())
    (placement, *others), mesh = tensor.placements, tensor.device_mesh
    members = mesh.mesh.flatten().tolist()
    # Its subclasses lay shards out in another order.
    if not others and type(placement) is Shard and sorted(members) == members:
        return _Sharded(tensor, placement.dim, receives)
    return _Redistributed(tensor)


class _Local:
    """A tensor that every rank holds whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def launch(self) -> None:
        pass

    def result(self) -> torch.Tensor:
        return self._tensor


class _Sharded:
    """A tensor cut along one dimension over a list of ranks: only the first of them receives it.

    Shards are as large as the first, but for the last ones: gathered one after another, each in as
    much room as the first, they give the whole at the beginning.
    """

    def __init__(self, tensor: DTensor, dim: int, receives: bool) -> None:
        self._tensor, self._dim = tensor, dim
        self._group, self._world = tensor.device_mesh.get_group(), tensor.device_mesh.size()
        with torch.no_grad():
            local = tensor.to_local().detach().movedim(dim, 0)
        others = list(tensor.shape)
        rows = -(-others.pop(dim) // self._world)
        if local.shape[0] == rows:
            self._mine = local.contiguous()
        else:
            self._mine = local.new_zeros((rows, *others))
            self._mine[: local.shape[0]] = local
        self._room = local.new_empty((self._world * rows, *others)) if receives else None

    def launch(self) -> dist.Work | None:
        room = self._room
        rooms = None if room is None else [_bytes(one) for one in room.chunk(self._world)]
        return dist.gather(_bytes(self._mine), rooms, group=self._group, group_dst=0, async_op=True)

    def result(self) -> torch.Tensor:
        assert self._room is not None
        whole = self._room[: self._tensor.shape[self._dim]]
        return whole.movedim(0, self._dim).contiguous()


class _Redistributed:
    """A tensor in another layout, such as on a mesh of several dimensions.

    Launching it waits for the others, and every rank receives it.
    """

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self._whole: Any = None

    def launch(self) -> _Queued | None:
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


def _same_stream() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which another thread queues its work on this thread's stream."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    stream = torch.cuda.current_stream()

    @contextmanager
    def on_stream() -> Iterator[None]:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    return on_stream()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


# ---- Rounds: the ranks of one trainer go through a push in step
#
# The leader writes what comes next ("gather group 3", or how the push ended) into the process
# group's key-value store, and goes on only when every other rank has reported that it is ready. So
# a rank that fails is noticed before the others are inside a collective with it, and every wait
# ends: with the others, with the failed rank's own reason, or at a deadline.
#
# Keys of one round, below its number: ``begun``; ``joined/<rank>``; ``ready/<step>/<rank>``;
# ``next/<step>``, the last of which holds the verdict; ``over``. Beside them ``broken``: the rank
# that could not begin a gather that the others are in. Their process group is out of step from then
# on, and there is no other round.
#
# Every process that reaches the store can write into it, and torch's listens on all interfaces: so
# a verdict is JSON of bounded size, and whatever a key may hold ends in a ``TrainerRankError``.


FAILED, GATHER, VERDICT = "!", "g", "v"
BROKEN = "broken"
# Of one value, checked once it is here: the store has no call for less.
MOST_BYTES = 1 << 22
MOST_REASON = 1 << 14
# Seconds for ranks to show, when something broke off, that it was not them.
GRACE_S = 1.0


class TrainerRankError(SyncError, RuntimeError):
    """A rank of the trainer failed or fell silent, which ended a push on all of them.

    ``rank`` is its global rank, ``None`` if it cannot be told from the others; ``reason`` is what
    it reported, or how it was missed.
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        who = "ranks of the trainer" if self.rank is None else f"trainer rank {self.rank}"
        return f"{who}: {self.reason}"


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a push ended on the leading rank."""

    reason: str  # why it failed; empty after a success
    failed_rank: int | None = None  # global rank that failed, if that is known
    outcome: Any = None  # what the leader announced; `None` after a failure


class TrainerRanks:
    """The ranks that hold one sharded module; the first of them leads.

    A push is one round: :meth:`begin` on the leader, :meth:`join` on each other rank, in the same
    order everywhere. All state is in the store.
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
        """Whether this process sends."""
        return self.rank == self.leader

    def begin(self, digest: str) -> LeadingRound:
        """Starts a round on the leader, without waiting."""
        self._refuse_broken()
        with _store_errors():
            number = self.store.add("rounds", 1)
            self.store.set(f"{number}/begun", "")
        return LeadingRound(self, number, digest)

    def join(self, *, timeout_s: float, outcome: Any = Any) -> FollowingRound:
        """Enters the round that the leader has begun or begins next; ``outcome`` is a type."""
        self._refuse_broken()
        waiting = "begin a push"
        number = _number(self.await_text("rounds", timeout_s, waiting), self.leader)
        if self.store.check([f"{number}/over"]) or self.store.check([self._joined(number)]):
            number += 1
        self.await_text(f"{number}/begun", timeout_s, waiting)
        self.store.set(self._joined(number), "")
        return FollowingRound(self, number, timeout_s, outcome)

    def break_step(self, error: BaseException) -> None:
        """Notes that this rank could not begin a gather that all were called for."""
        with _logging_store_errors("the other ranks could not be told of a failure"):
            if not self.store.check([BROKEN]):
                self.store.set(BROKEN, _written(self.failure(error)))

    def failure(self, error: BaseException) -> Verdict:
        if isinstance(error, TrainerRankError):
            return Verdict(error.reason, error.rank)
        return Verdict(_words_of(error), self.rank)

    def await_text(self, key: str, timeout_s: float, what: str) -> str:
        """Waits for what the leader writes under ``key``."""
        begin = time.monotonic()
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return self.text(key)
        except dist.DistStoreError as error:
            told = f"did not {what} within {timeout_s:g} s"
            raise TrainerRankError(self.leader, told) from error
        except dist.DistError as error:
            waited = time.monotonic() - begin
            told = f"could not be reached after {waited:.1f} s"
            raise TrainerRankError(self.leader, told) from error

    def text(self, key: str) -> str:
        return _text(self.store.get(key), key)

    def _refuse_broken(self) -> None:
        """Raises if a rank left the others in a gather."""
        with _store_errors():
            if not self.store.check([BROKEN]):
                return
            broken = _read(self.text(BROKEN))
        raise TrainerRankError(
            broken.failed_rank,
            f"left the process group out of step in an earlier push, make another group: "
            f"{broken.reason}",
        )

    def _joined(self, number: int) -> str:
        return f"{number}/joined/{self.rank}"


class LeadingRound:
    """The leader's side of a round: :meth:`call` for each group, then one verdict.

    ``is_broken`` says whether this rank could not begin a gather that it had called for.
    """

    def __init__(self, ranks: TrainerRanks, number: int, digest: str) -> None:
        self._ranks, self._number, self._digest, self._step = ranks, number, digest, 0
        self._store, self.is_broken = ranks.store, False

    def call(self, index: int) -> None:
        """Waits until all are ready, and has them gather group ``index``."""
        self._await_ready()
        with _store_errors():
            self._say(GATHER + str(index))

    def succeed(self, outcome: Any) -> None:
        """Ends the round with success on all ranks; a rank that is gone is logged."""
        verdict = _written(Verdict("", outcome=outcome))
        try:
            self._await_ready()
        except TrainerRankError as error:
            logger.warning("the push succeeded, but meanwhile %s", error)
        self._end(verdict)

    def fail(self, error: BaseException) -> None:
        """Ends the round with the reason of a failure; waits for ranks that have yet to join."""
        # All that wait in a broken gather have joined, and so have those that a rank's error names.
        if not self.is_broken and not isinstance(error, TrainerRankError):
            try:
                self._await_ready()
            except TrainerRankError as other:
                logger.warning("the push failed, and meanwhile %s", other)
        self._end(_written(self._ranks.failure(error)))

    def raise_reported(self) -> None:
        """Raises if a rank has reported a failure, without waiting."""
        for key, rank in self._keys().items():
            if self._store.check([key]):
                _raise_if_failed(rank, self._ranks.text(key))

    def blame(self, reason: str) -> TrainerRankError:
        """Returns the error for a gather that broke off, after a check of which ranks are there."""
        try:
            self._await_ready(GRACE_S)
        except TrainerRankError as error:
            return TrainerRankError(error.rank, f"{error.reason} ({reason})")
        return TrainerRankError(None, reason)

    def _keys(self) -> dict[str, int]:
        return {f"{self._number}/ready/{self._step}/{rank}": rank for rank in self._ranks.ranks[1:]}

    def _await_ready(self, timeout_s: float | None = None) -> None:
        """Waits until the others have begun what was called for before."""
        timeout_s = self._ranks.timeout_s if timeout_s is None else timeout_s
        keys = self._keys()
        if not keys:
            return
        with _store_errors():
            try:
                self._store.wait(list(keys), timedelta(seconds=timeout_s))
                values = self._store.multi_get(list(keys))
            except dist.DistStoreError as error:
                self.raise_reported()
                missing = [rank for key, rank in keys.items() if not self._store.check([key])]
                more = f", as ranks {missing[1:]}" if missing[1:] else ""
                raise TrainerRankError(
                    next(iter(missing), None), f"was not ready within {timeout_s:g} s{more}"
                ) from error
        said = [_text(one, key) for one, key in zip(values, keys, strict=True)]
        for rank, text in zip(keys.values(), said, strict=True):
            _raise_if_failed(rank, text)
            if self._step == 0 and text != self._digest:
                raise TrainerRankError(rank, "holds other tensors than the sending rank")

    def _say(self, text: str) -> None:
        self._store.set(f"{self._number}/next/{self._step}", text)
        self._step += 1

    def _end(self, verdict: str) -> None:
        with _logging_store_errors("the trainer's ranks could not be told how the push ended"):
            self._say(verdict)
            self._store.set(f"{self._number}/over", str(self._step))
            self._forget(self._number - 1)

    def _forget(self, number: int) -> None:
        """Deletes the keys of a round: all that joined the one after it have read its verdict."""
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

    A rank that was called must not fail before its part of the gather has begun.
    """

    def __init__(self, ranks: TrainerRanks, number: int, timeout_s: float, outcome: Any) -> None:
        self._ranks, self._number, self._timeout_s, self._step = ranks, number, timeout_s, 0
        self._store, self._outcome, self.is_broken = ranks.store, outcome, False

    def present(self, digest: str) -> None:
        """Reports that this rank is ready for the first call."""
        self._say_ready(digest)

    def next(self, timeout_s: float | None = None) -> int | Verdict:
        """Waits for the leader's call: the index of the group to gather, or the verdict."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        key = f"{self._number}/next/{self._step}"
        call = self._ranks.await_text(key, timeout_s, "say what comes next")
        if call.startswith(VERDICT):
            self._store.delete_key(self._ready(self._step))
            return _read(call, self._outcome)
        return _number(call.removeprefix(GATHER), self._ranks.leader)

    def launched(self) -> None:
        """Reports that this rank's part of the gather has begun, so that the next may be called."""
        self._step += 1
        self._say_ready("")

    def raise_reported(self) -> None:
        """Raises if the push ended while this rank takes its part, without waiting."""
        key = f"{self._number}/next/{self._step + 1}"
        if self._store.check([key]):
            verdict = _read(self._ranks.text(key))
            raise TrainerRankError(verdict.failed_rank, verdict.reason)

    def explain(self, error: TrainerRankError) -> TrainerRankError:
        """Returns why a gather broke off: the leader's verdict if there is one, or ``error``."""
        try:
            call = self.next(self._ranks.timeout_s + 2 * GRACE_S)
        except TrainerRankError:
            return error
        if isinstance(call, Verdict) and call.reason:
            return TrainerRankError(call.failed_rank, call.reason)
        return error

    def fail(self, error: BaseException) -> None:
        """Reports that this rank takes no further part, if the store can still be reached."""
        text = FAILED + _words_of(error)
        with _logging_store_errors("the sending rank could not be told of a failure"):
            for step in (self._step, self._step + 1):
                self._store.set(self._ready(step), text)

    def _say_ready(self, text: str) -> None:
        with _store_errors(self._ranks.leader, "cannot be reached"):
            self._store.set(self._ready(self._step), text)
            if self._step:
                self._store.delete_key(self._ready(self._step - 1))

    def _ready(self, step: int) -> str:
        return f"{self._number}/ready/{step}/{self._ranks.rank}"


@contextmanager
def _store_errors(rank: int | None = None, what: str = "their store failed") -> Iterator[None]:
    """Turns failures of the store into the typed error."""
    try:
        yield
    except dist.DistError as error:
        raise TrainerRankError(rank, f"{what}: {error}") from error


@contextmanager
def _logging_store_errors(what: str) -> Iterator[None]:
    """Logs failures of the store, which must not replace the push's own outcome."""
    try:
        yield
    except dist.DistError as error:
        logger.warning("%s: %s", what, error)


def _raise_if_failed(rank: int, text: str) -> None:
    if text.startswith(FAILED):
        raise TrainerRankError(rank, text.removeprefix(FAILED))


def _written(verdict: Verdict) -> str:
    try:
        text = VERDICT + json.dumps(msgspec.to_builtins(verdict))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"an outcome must be plain values or dataclasses: {error}") from error
    if len(text) > MOST_BYTES:
        raise TypeError(f"an outcome must have at most {MOST_BYTES} bytes, got {len(text)}")
    return text


def _read(call: str, outcome: Any = Any) -> Verdict:
    """Reads a verdict, which any process may have written; ``outcome`` is a type."""
    try:
        verdict = msgspec.convert(json.loads(call.removeprefix(VERDICT)), Verdict)
        if verdict.outcome is None:
            return verdict
        return msgspec.structs.replace(verdict, outcome=msgspec.convert(verdict.outcome, outcome))
    except (ValueError, RecursionError) as error:
        raise TrainerRankError(None, f"their store holds no verdict: {error}") from error


def _words_of(error: BaseException) -> str:
    """Returns the text about an error for the other ranks."""
    words = f"{type(error).__name__}: {error}"[:MOST_REASON]
    return words.encode(errors="backslashreplace").decode()


def _number(text: str, rank: int | None) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise TrainerRankError(rank, f"wrote {text!r:.50} where a number belongs")
    return int(text)


def _text(value: bytes, key: str) -> str:
    if len(value) > MOST_BYTES:
        raise TrainerRankError(None, f"their store holds {len(value)} bytes under {key}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise TrainerRankError(None, f"their store holds no text under {key}: {error}") from error


STEP_TIMEOUT_S = 60.0
# Seconds between checks for a failure that a rank has reported.
LOOK_S = 0.1
FOLLOW_TIMEOUT_S = 900.0


@dataclass(slots=True)
class Announcement:
    """What the sending rank announces at the end of a push: plain values or dataclasses."""

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

        The same list object while names, dtypes and shapes stay: leave it as it is.
        """
        return plan_of(self._module, self._tensors()).metadata

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
        """Wraps a push on the sending rank: the others learn how it ended, whatever happens.

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
            # Engines that were cut off report only that, not why.
            self._round.fail(self._failure)
            raise self._failure from error
        finally:
            self._round = self._failure = None

    def participate(self, outcome: Any = Any, *, timeout_s: float = FOLLOW_TIMEOUT_S) -> Any:
        """Takes part in one push on a rank that does not send; returns its outcome."""
        followed = self._ranks.join(timeout_s=timeout_s, outcome=outcome)
        under_way: list[Gather] = []
        try:
            tensors = self._tensors()
            groups = _groups(plan_of(self._module, tensors))
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
        groups = _groups(plan_of(self._module, tensors))
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
            # Without the traceback, which keeps what the reader was sending alive.
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
        if call >= len(groups):
            raise TrainerRankError(self._ranks.leader, f"called for group {call} of {len(groups)}")
        return groups[call]

    @contextmanager
    def _launching(self, turn: LeadingRound | FollowingRound) -> Iterator[Callable[[], None]]:
        """Reports to the others if this rank cannot begin what all were called for."""
        deadline = time.monotonic() + self._ranks.timeout_s

        def watch() -> None:
            turn.raise_reported()
            if time.monotonic() > deadline:
                raise self._broken(f"a gather did not end within {self._ranks.timeout_s:g} s")

        try:
            yield watch
        except BaseException as error:
            turn.is_broken = True
            self._ranks.break_step(error)
            raise

    def _prepare(self, group: list[Bundle], tensors: dict[str, torch.Tensor]) -> Gather:
        names = [name for bundle in group for name in bundle.sources]
        return Gather({name: tensors[name] for name in names}, receives=self.leads)

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
        # Not by value: ranks would have to agree, and each sees only its own shard.
        left_out = repeated(self._module, tensors, operator.is_)
        return {name: one for name, one in tensors.items() if name not in left_out}

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
    """Wraps any push: of a sharded source in :meth:`ShardedModuleSource.lead`, else in nothing."""
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


def _store_for(module: torch.nn.Module) -> Store:
    """Returns the module's own connection to the process group's store."""
    default, known = _get_default_store(), known_of(module)
    if known.store is None or known.store[0] is not default:
        known.store = default, default.clone()  # pyright: ignore[reportAttributeAccessIssue]
    return known.store[1]

"""The tensors of a module sharded by FSDP2: gathered on the sending rank, or written by each rank.

While one group of parameters (a decoder layer, or what comes before or after them) is consumed, the
next is on its way, and no more than these two are ever alive.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import Deadline, in_thread
from torchrl_vllm_sync.weights.broadcast.group import wait_until
from torchrl_vllm_sync.weights.module import (
    Bundle,
    ParamMeta,
    Plan,
    check_readable,
    is_peft,
    known_of,
    layout_of,
    local,
    modules_of,
    nonfinite,
    place_of,
    plan_of,
    repeated,
    same_values,
    stand_ins,
    storage_key,
    unwrap,
)
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.p2p.writes import (
    Cut,
    Offer,
    Passed,
    ShardWriter,
    cut_of,
    finish,
    write,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Gather:
    """Gathers tensors at once; every rank gets those not ``_Sharded``, by calls that block."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, receives: bool) -> None:
        cut = {name: one for name, one in tensors.items() if isinstance(one, DTensor)}
        self._receives = receives
        self._whole = {name: one.detach() for name, one in tensors.items() if name not in cut}
        ours = {name: one for name, one in cut.items() if _Sharded.holds(one)}
        self._sharded = {name: _Sharded(one, receives) for name, one in ours.items()}
        self._blocking = {name: one for name, one in cut.items() if name not in ours}
        self._works: list[dist.Work] = []
        # On a GPU such calls are queued, and wait there though the host does not.
        self._queued: torch.cuda.Event | None = None

    def launch(self, watch: Callable[[], None] = lambda: None) -> None:
        """Begins to gather; waits for the others only where a call blocks."""
        self._works = [one.launch() for one in self._sharded.values()]
        if not self._blocking:
            return
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def block() -> None:
            with torch.no_grad(), torch.cuda.stream(stream):
                self._whole |= {name: one.full_tensor() for name, one in self._blocking.items()}
                if stream is not None:
                    self._queued = torch.cuda.Event()
                    self._queued.record(stream)

        launched = in_thread("gather", block)
        wait_until(launched.done, math.inf, watch, poll_s=1e-3)
        launched.result()

    def is_completed(self) -> bool:
        """Whether :meth:`result` would return, or raise, at once."""
        is_queued = self._queued is not None and not self._queued.query()
        return not is_queued and all(work.is_completed() for work in self._works)

    def result(self) -> dict[str, torch.Tensor]:
        for work in self._works:
            work.wait()
        if not self._receives:
            return {}
        return self._whole | {name: one.result() for name, one in self._sharded.items()}


class _Sharded:
    """A tensor cut along one dimension over a list of ranks: only the first of them receives it."""

    @staticmethod
    def holds(tensor: DTensor) -> bool:
        members = tensor.device_mesh.mesh.flatten().tolist()
        # Subclasses of Shard lay shards out in another order.
        return [type(one) for one in tensor.placements] == [Shard] and sorted(members) == members

    def __init__(self, tensor: DTensor, receives: bool) -> None:
        placement = tensor.placements[0]
        assert isinstance(placement, Shard)
        self._dim, self._size = placement.dim, tensor.shape[placement.dim]
        self._group, self._world = tensor.device_mesh.get_group(), tensor.device_mesh.size()
        with torch.no_grad():
            local = tensor.to_local().detach().movedim(self._dim, 0)
        # Shards are as large as the first, but for the last ones: one after another, each in as
        # much room as the first, they give the whole at the beginning.
        rows, others = -(-self._size // self._world), local.shape[1:]
        if local.shape[0] == rows:
            self._mine = local.contiguous()
        else:
            self._mine = local.new_zeros((rows, *others))
            self._mine[: local.shape[0]] = local
        self._room = local.new_empty((self._world * rows, *others)) if receives else None

    def launch(self) -> Any:
        room = self._room
        rooms = None if room is None else [_bytes(one) for one in room.chunk(self._world)]
        return dist.gather(_bytes(self._mine), rooms, group=self._group, group_dst=0, async_op=True)

    def result(self) -> torch.Tensor:
        assert self._room is not None
        return self._room[: self._size].movedim(0, self._dim).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


# ---- Rounds: the ranks of one trainer go through a push in step
#
# The leader writes what comes next ("gather group 3", "write your shards", or how the push ended)
# into the process group's key-value store, and goes on only when every other rank has reported that
# it is ready, and with the first report what it can take part in. So a rank that fails is noticed
# before the others are inside a collective with it, and every wait ends: with the others, with the
# failed rank's own reason, or at a deadline.
#
# Keys of one round, below its number: ``begun``; ``joined/<rank>``; ``ready/<step>/<rank>``;
# ``next/<step>``, the last of which holds the verdict; ``over``. Beside them ``broken``: the rank
# that could not begin a gather that the others are in, after which there is no other round.
#
# Every process that reaches the store can write into it, and torch's listens on all interfaces: so
# a verdict is JSON of bounded size, and whatever a key may hold ends in a ``TrainerRankError``.

FAILED, GATHER, DOOR, WRITE, VERDICT, BROKEN = "!", "g", "d", "w", "v", "broken"
# What the leader wants of all ranks as it begins: to give back what GPU memory torch keeps, to find
# NaN and infinity in what they hold, and that this waits until they write, as they are likely to.
CLEARS, CHECKS, WRITES = "clears", "checks", "writes"
STORE_ERRORS = dist.DistStoreError, dist.DistNetworkError
# Of one value, checked once it is here: the store has no call for less.
MOST_BYTES = 1 << 22
MOST_REASON = 1 << 14
# Seconds for ranks to show, when something broke off, that it was not them.
GRACE_S = 1.0


class TrainerRankError(errors.SyncError, RuntimeError):
    """A rank of the trainer, by its global number if known, failed or fell silent in a push."""

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

    @property
    def error(self) -> TrainerRankError:
        return TrainerRankError(self.failed_rank, self.reason)


class TrainerRanks:
    """The ranks that hold one sharded module; the first leads, and all state is in the store."""

    def __init__(self, ranks: Sequence[int], rank: int, store: Store, *, timeout_s: float) -> None:
        self.leader, *self.others = ranks
        self.rank, self.timeout_s, self.is_broken = rank, timeout_s, False
        self.store = PrefixStore("torchrl_vllm_sync/" + "-".join(map(str, ranks)), store)

    def begin(self, digest: str, wants: Iterable[str] = ()) -> LeadingRound:
        """Begins a round, in which the others are to do besides what is wanted."""
        self._refuse_broken()
        number = self.store.add("rounds", 1)
        self.store.set(f"{number}/begun", " ".join(wants))
        return LeadingRound(self, number, digest)

    def join(self, *, timeout_s: float, outcome: Any = Any) -> FollowingRound:
        """Enters the round that the leader has begun or begins next; ``outcome`` is a type."""
        self._refuse_broken()
        number = _number(self.await_text("rounds", timeout_s, "begin a push"), self.leader)
        ended = f"{number}/over", f"{number}/joined/{self.rank}"
        number += any(self.store.check([key]) for key in ended)
        wants = self.await_text(f"{number}/begun", timeout_s, "begin a push").split()
        if CLEARS in wants:
            torch.cuda.empty_cache()
        self.store.set(f"{number}/joined/{self.rank}", "")
        return FollowingRound(self, number, timeout_s, outcome, wants)

    def failure(self, error: BaseException) -> Verdict:
        if isinstance(error, TrainerRankError):
            return Verdict(error.reason, error.rank)
        return Verdict(_words_of(error), self.rank)

    @contextmanager
    def store_errors(self) -> Iterator[None]:
        """Turns failures of the store, which may be the leader's, into the typed error."""
        try:
            yield
        except STORE_ERRORS as error:
            rank = None if self.rank == self.leader else self.leader
            raise TrainerRankError(rank, f"their store failed: {error}") from error

    @contextmanager
    def logged(self, what: str) -> Iterator[None]:
        """Logs what fails besides the push, whose own outcome it must not replace."""
        try:
            yield
        except (TrainerRankError, *STORE_ERRORS) as error:
            logger.warning("%s: %s", what, error)

    def await_text(self, key: str, timeout_s: float, what: str) -> str:
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            reason = f"did not {what} within {timeout_s:g} s"
            raise TrainerRankError(self.leader, reason) from error
        return _text(self.store.get(key))

    def _refuse_broken(self) -> None:
        """Raises if a rank left the others in a gather."""
        if self.store.check([BROKEN]):
            broken = _read(_text(self.store.get(BROKEN)))
            why = "left the process group out of step in an earlier push, make another group"
            raise TrainerRankError(broken.failed_rank, f"{why}: {broken.reason}")


class LeadingRound:
    """The leader's side of a round: :meth:`call` for each group, then one verdict."""

    def __init__(self, ranks: TrainerRanks, number: int, digest: str) -> None:
        self._ranks, self._number, self._digest, self._step = ranks, number, digest, 0
        self._store, self._offers = ranks.store, dict[int, str]()
        self.all_wait = False  # for the leader, whose failure need not wait for them

    def call(self, what: str) -> None:
        """Waits until all are ready, and has them do something."""
        self.reports()
        self._store.set(f"{self._number}/next/{self._step}", what)
        self._step += 1

    def offers(self) -> dict[int, Offer]:
        """Waits until all have joined, and returns what they can take part in."""
        if self._step == 0:
            self.reports()
        return {rank: _strict(text, Offer, rank) for rank, text in self._offers.items()}

    def reports(self, timeout_s: float | None = None) -> dict[int, str]:
        """Waits until all have done what they were called for, and returns what they wrote."""
        timeout_s = self._ranks.timeout_s if timeout_s is None else timeout_s
        with suppress(dist.DistStoreError):
            self._store.wait(self._keys(), timedelta(seconds=timeout_s))
        reports = self.raise_reported()
        if missing := [rank for rank in self._ranks.others if rank not in reports]:
            more = f", as ranks {missing[1:]}" if missing[1:] else ""
            raise TrainerRankError(missing[0], f"was not ready within {timeout_s:g} s{more}")
        for rank, text in reports.items() if self._step == 0 else ():
            digest, _, self._offers[rank] = text.partition(" ")
            if digest != self._digest:
                raise TrainerRankError(rank, "holds other tensors than the sending rank")
        return reports

    def raise_reported(self) -> dict[int, str]:
        """Returns what ranks that are ready wrote by now; raises if one of them failed."""
        there = dict(zip(self._ranks.others, self._keys(), strict=True))
        if not self._store.check(list(there.values())):
            there = {rank: key for rank, key in there.items() if self._store.check([key])}
        values = self._store.multi_get(list(there.values()))
        reports = dict(zip(there, map(_text, values), strict=True))
        for rank, text in reports.items():
            if text.startswith(FAILED):
                raise TrainerRankError(rank, text.removeprefix(FAILED))
        return reports

    def succeed(self, outcome: Any) -> None:
        """Ends the round with success on all ranks; a rank that is gone is logged."""
        self._end(Verdict("", outcome=outcome), waits=True)

    def fail(self, error: BaseException) -> None:
        """Ends the round with the reason of a failure; waits for ranks that have yet to join."""
        # All that wait in a broken gather have joined, and so have those that a rank's error names.
        is_known = self._ranks.is_broken or self.all_wait
        waits = not is_known and not isinstance(error, TrainerRankError)
        self._end(self._ranks.failure(error), waits=waits)

    def blame(self, reason: str) -> TrainerRankError:
        """Returns the error for a gather that broke off, after a check of which ranks are there."""
        try:
            with self._ranks.store_errors():
                self.reports(GRACE_S)
        except TrainerRankError as error:
            return TrainerRankError(error.rank, f"{error.reason} ({reason})")
        return TrainerRankError(None, reason)

    def _keys(self) -> list[str]:
        return [f"{self._number}/ready/{self._step}/{rank}" for rank in self._ranks.others]

    def _end(self, verdict: Verdict, *, waits: bool) -> None:
        text, last, store = _written(verdict), self._number - 1, self._store
        if waits:
            how = "failed, and" if verdict.reason else "succeeded, but"
            with self._ranks.logged(f"the push {how} meanwhile"):
                self.reports()
        with self._ranks.logged("the other ranks could not be told how the push ended"):
            store.set(f"{self._number}/next/{self._step}", text)
            store.set(f"{self._number}/over", "")
            if store.check([f"{last}/over"]):  # all that joined this round have read its verdict
                for key in ("begun", *(f"joined/{rank}" for rank in self._ranks.others)):
                    store.delete_key(f"{last}/{key}")
                steps = itertools.count()
                while store.delete_key(f"{last}/next/{next(steps)}"):
                    pass


class FollowingRound:
    """Another rank's side of a round: :meth:`ready`, :meth:`next`, gather, :meth:`ready`, ..."""

    def __init__(
        self,
        ranks: TrainerRanks,
        number: int,
        timeout_s: float,
        outcome: Any,
        wants: Collection[str] = (),
    ) -> None:
        self.wants = wants
        self._ranks, self._number, self._timeout_s, self._step = ranks, number, timeout_s, 0
        self._store, self._outcome = ranks.store, outcome

    def ready(self, text: str = "") -> None:
        """Reports that this rank may be called: at first, or as its part has begun or is done."""
        self._store.set(self._ready(self._step), text)
        self._store.delete_key(self._ready(self._step - 1))

    def next(self, timeout_s: float | None = None) -> int | str | Passed | Verdict:
        """Waits for the leader's call: a group to gather, a door, what to write, or the verdict."""
        call = self._read(self._timeout_s if timeout_s is None else timeout_s)
        if isinstance(call, Verdict):
            self._store.delete_key(self._ready(self._step))
        else:
            self._step += 1
        return call

    def raise_reported(self) -> None:
        """Raises if the push has failed, without waiting."""
        if self._store.check([f"{self._number}/next/{self._step}"]):
            call = self._read(GRACE_S)
            if isinstance(call, Verdict) and call.reason:
                raise call.error

    def _read(self, timeout_s: float) -> int | str | Passed | Verdict:
        key = f"{self._number}/next/{self._step}"
        call = self._ranks.await_text(key, timeout_s, "say what comes next")
        if call.startswith(VERDICT):
            return _read(call, self._outcome)
        if call.startswith(WRITE):
            return _strict(call.removeprefix(WRITE), Passed, self._ranks.leader)
        return call if call == DOOR else _number(call.removeprefix(GATHER), self._ranks.leader)

    def blame(self, reason: str) -> TrainerRankError:
        """Returns why a gather broke off: the leader's verdict if there is one, or ``reason``."""
        # It breaks on every rank if one is gone; the sending rank finds out which.
        with suppress(TrainerRankError):
            call = self.next(self._ranks.timeout_s + 2 * GRACE_S)
            if isinstance(call, Verdict) and call.reason:
                return call.error
        return TrainerRankError(self._ranks.leader, reason)

    def fail(self, error: BaseException) -> None:
        """Reports that this rank takes no further part, if the store can still be reached."""
        text = FAILED + _words_of(error)
        with self._ranks.logged("the sending rank could not be told of a failure"):
            for step in (self._step, self._step + 1):
                self._store.set(self._ready(step), text)

    def _ready(self, step: int) -> str:
        return f"{self._number}/ready/{step}/{self._ranks.rank}"


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
        told = msgspec.convert(verdict.outcome, outcome | None)
        return msgspec.structs.replace(verdict, outcome=told)
    except (ValueError, RecursionError) as error:
        raise TrainerRankError(None, f"their store holds no verdict: {error}") from error


def _strict(text: str, kind: type[T], rank: int) -> T:
    """Reads what a rank, or any process, wrote."""
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError) as error:
        raise TrainerRankError(rank, f"wrote no {kind.__name__.lower()}: {error}") from error


def _words_of(error: BaseException) -> str:
    """Returns the text about an error for the other ranks."""
    words = f"{type(error).__name__}: {error}"[:MOST_REASON]
    return words.encode(errors="backslashreplace").decode()


def _number(text: str, rank: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise TrainerRankError(rank, f"wrote {text!r:.50} where a number belongs")
    return int(text)


def _text(value: bytes) -> str:
    """Returns what a key holds, whatever that is."""
    return value[:MOST_BYTES].decode(errors="backslashreplace")


# A tensor's name up to its first number.
LAYER = re.compile(r"(.*?\.)??[0-9]+(?=\.|$)")


class Group(NamedTuple):
    """What is gathered at once: a decoder layer, or what comes before or after them."""

    bundles: list[Bundle]
    tensors: dict[str, torch.Tensor]  # of the module, sharded as they are


class Origin(NamedTuple):
    """What a tensor is made of that is sent."""

    sources: tuple[str, ...]  # tensors of the model
    # where it begins in the one that it is a contiguous part of; ``None`` if it is none
    begin: int | None


Renaming: TypeAlias = (
    "Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]"
)


class ShardedModuleSource:
    """A model under ``fully_shard``; one rank iterates in :meth:`lead`, the others participate."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        timeout_s: float = 60.0,
        only: Callable[[], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self.owner, self._only = unwrap(module), only  # these of its tensors, such as an adapter's
        if is_peft(self.owner) and only is None:
            raise errors.WeightMismatchError(
                "adapters on a sharded model cannot be merged: push them by themselves "
                "(adapters='keep'), merge them first, or do not shard"
            )
        held, rank = self._look(), dist.get_rank()
        ranks = held.ranks
        self._resting, self._found = None, held if only is None else None
        if rank not in ranks:
            raise errors.UnsupportedArgumentError(
                f"rank {rank} must be one of the model's ranks, {list(ranks)}"
            )
        default, known = _get_default_store(), known_of(self.owner)
        if known.store is None or known.store[0] is not default:
            known.store = default, default.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._ranks = TrainerRanks(ranks, rank, known.store[1], timeout_s=timeout_s)
        self._round: LeadingRound | None = None
        self._left: list[str] = []
        self._failure: TrainerRankError | None = None

    @property
    def leads(self) -> bool:
        return self._ranks.rank == self._ranks.leader

    def views(self) -> None:
        """Returns ``None``: every value has to be gathered."""

    def metadata(self) -> list[ParamMeta]:
        """As those of a ``ModuleSource``, on any rank, without gathering."""
        return self._held.plan.metadata

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers, sharded as they are; a tied one appears once."""
        return self._held.tensors

    def same_values(self, name: str, other: str) -> bool:
        """Whether this rank's shards of two tensors, by their names in the model, are equal."""
        every = self._held.every
        return same_values(every[name], every[other])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors on the sending rank; outside :meth:`lead` in a round of its own.

        A tensor must not be used on another stream after the next item is asked for.
        """
        if (leading := self._round) is None:
            with self.lead():
                yield from self
            return
        yield from self._gathered(leading, self._held.groups)

    def _gathered(
        self, leading: LeadingRound, groups: list[Group], first: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole tensors of groups, which the other ranks count from ``first`` on."""
        ahead: Gather | None = None
        try:
            for index, group in enumerate(groups):
                now, ahead = ahead or self._call(leading, first + index, group), None
                if index + 1 < len(groups):
                    ahead = self._call(leading, first + index + 1, groups[index + 1])
                whole = self._finish(now, leading)
                del now
                for bundle in group.bundles:
                    sources = [whole[name] for name in bundle.sources]
                    yield from bundle.publish(self.owner, sources)
                    del sources
                del whole
        except TrainerRankError as error:
            # Without the traceback, which keeps what the reader was sending alive.
            self._failure = TrainerRankError(error.rank, error.reason)
            raise
        except GeneratorExit:
            if ahead is not None:
                self._finish(ahead, leading)  # its memory is still being written
            raise

    @contextmanager
    def lead(self, *wants: str, is_new: bool = False) -> Iterator[SimpleNamespace]:
        """Wraps a push on the sending rank: the others learn how it ended, and any ``outcome``.

        Of a source that was made for it, and is new, the tensors are where they were found then.
        """
        if not self.leads:
            raise errors.UnsupportedArgumentError(
                f"rank {self._ranks.rank} must take part with participate(): "
                f"rank {self._ranks.leader} sends"
            )
        announcement = SimpleNamespace(outcome=None)
        self._failure = None
        with self._at_rest(is_new) as held:
            with self._ranks.store_errors():
                self._round = self._ranks.begin(held.plan.digest, wants)
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

    def participate(self, outcome: Any = Any, *, timeout_s: float, is_new: bool = False) -> Any:
        """Takes part in one push on a rank that does not send; returns its outcome."""
        with self._ranks.store_errors():
            followed = self._ranks.join(timeout_s=timeout_s, outcome=outcome)
            try:
                with self._at_rest(is_new):
                    verdict = self._follow(followed)
            except BaseException as error:
                followed.fail(error)
                raise
        if verdict.reason:
            raise verdict.error
        return verdict.outcome

    def _follow(self, followed: FollowingRound) -> Verdict:
        """Gathers what the sending rank calls for, until it says how the push ended."""
        held, under_way = self._held, deque[Gather]()
        groups = held.groups
        cuts, writer = self.cuts(), self._writer
        # Prepared before this rank is called: failing between the call and the launch leaves the
        # sending rank alone in a collective, and the process group out of step.
        expected, prepared = 0, self._prepare(groups[0])
        has_written, is_checked = False, CHECKS not in followed.wants
        if not is_checked and WRITES not in followed.wants:
            is_checked = self._refuse_nonfinite()
        offer = json.dumps({"node": this_node(), "tokens": writer.tokens(cuts)})
        followed.ready(f"{held.plan.digest} {offer}")
        while not isinstance(call := followed.next(), Verdict):
            if isinstance(call, str):
                followed.ready(writer.door())
                continue
            if isinstance(call, Passed):
                self._write(call, followed, is_checked)
                is_checked = True
                has_written, whole = True, len(held.groups)
                groups = held.groups + held.groups_of(call.left)
                if groups[whole:]:
                    expected, prepared = whole, self._prepare(groups[whole])
                followed.ready()
                continue
            with self._breaking():
                if call != expected:  # a reader that stopped early begins again
                    prepared = self._prepare(self._called(groups, call))
                prepared.launch(self._watch(followed))
            under_way.append(prepared)
            is_checked = is_checked or self._refuse_nonfinite()
            expected = (call + 1) % len(groups)
            prepared = self._prepare(groups[expected])
            followed.ready()
            if len(under_way) > 1:
                self._finish(under_way.popleft(), followed)
        while under_way and not call.reason:
            self._finish(under_way.popleft(), followed)
        if not has_written and not call.reason:  # the pushes go another way now
            writer.keep(())
        return call

    @property
    def _writer(self) -> ShardWriter:
        """What this rank, if it does not send, has kept of earlier pushes of this model."""
        known = known_of(self.owner)
        known.writer = known.writer or ShardWriter()
        return known.writer

    def _refuse_nonfinite(self) -> bool:
        """Refuses what this rank holds, as the leading one does with its own; returns ``True``."""
        if bad := nonfinite(self.shards()):
            raise errors.NonFiniteWeightsError(bad)
        return True

    def _write(self, passed: Passed, followed: FollowingRound, is_checked: bool) -> None:
        """Writes this rank's shards to the memories that it knows or is passed now."""
        device, watch = self.device, self._watch(followed, "memory was not passed on")
        latest = Deadline(self._ranks.timeout_s + GRACE_S).at  # before, what is watched ends it
        self._writer.take(passed, device, latest, watch)
        places = deque(self._writer.shards(passed.now))
        # Each rank begins with another worker: to one they would all write through one link.
        places.rotate(-1 - self._ranks.others.index(self._ranks.rank))
        write(self.shards(), places, device)
        try:
            if not is_checked:  # while GPUs write
                self._refuse_nonfinite()
        finally:
            finish(device)

    # ---- Every rank its own shard, on the sending rank

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def shards(self) -> list[tuple[str, torch.Tensor]]:
        """Returns what this rank holds of each tensor, by its name in the model."""
        return self._held.shards

    def cuts(self) -> dict[str, Cut | None]:
        """Returns what that is of the whole ones."""
        return self._held.cuts

    def origins(self, renamed: Renaming) -> dict[str, Origin]:
        """Returns what each published tensor is made of, under the names that it is sent by."""
        plan, items = self._held.plan, list[tuple[str, torch.Tensor]]()
        live, made_of = stand_ins(plan.facts), {}
        for bundle in plan.bundles:
            views = bundle.views([live[one] for one in bundle.sources])
            is_computed = views is None
            if views is None:
                empty = stand_ins({one.name: (one.shape, one.dtype) for one in bundle.metadata})
                views = [*empty.items()]
            made_of |= {storage_key(one): (bundle.sources, is_computed) for _, one in views}
            items += views
        found: dict[str, Origin] = {}
        for name, view in renamed(items):
            sources, is_computed = made_of[storage_key(view)]
            is_part = view.is_contiguous() and not is_computed
            found[name] = Origin(sources, int(view.storage_offset()) if is_part else None)
        return found

    def offers(self) -> dict[int, Offer]:
        """Waits until all other ranks have joined the push, and returns what they offer."""
        with self._ranks.store_errors():
            return self._leading.offers()

    @contextmanager
    def written(self, passed: Passed) -> Iterator[Callable[[Any], None]]:
        """Has every other rank write its shards, until all have; yields what passes memory on."""
        leading, doors = self._leading, dict[int, str]()
        leading.all_wait = True
        with self._ranks.store_errors():
            if passed.new:
                leading.call(DOOR)
                doors = leading.reports()
            leading.call(WRITE + json.dumps(msgspec.to_builtins(passed)))
            watch = self._watch(leading, "the ranks did not take memory")

            def pass_on(give: Callable[[str, Callable[[], None]], None]) -> None:
                for rank, door in doors.items():
                    try:
                        give(door, watch)
                    except errors.TransferError as error:
                        raise TrainerRankError(rank, str(error)) from error

            yield pass_on
            leading.reports()
        self._left, leading.all_wait = passed.left, False

    def rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors, gathered as by iteration, of those that :meth:`written` left."""
        held = self._held
        return self._gathered(self._leading, held.groups_of(self._left), len(held.groups))

    @property
    def _leading(self) -> LeadingRound:
        if self._round is None:
            raise errors.UnsupportedArgumentError("a sharded model must be sent inside of lead()")
        return self._round

    def _call(self, leading: LeadingRound, index: int, group: Group) -> Gather:
        """Begins to gather a group on all ranks; takes the memory before the others are called."""
        gather = self._prepare(group)
        with self._ranks.store_errors():
            leading.call(GATHER + str(index))
        with self._breaking():
            gather.launch(self._watch(leading))
        return gather

    def _called(self, groups: list[Group], call: int) -> Group:
        if call >= len(groups):
            raise TrainerRankError(self._ranks.leader, f"called for group {call} of {len(groups)}")
        return groups[call]

    def _prepare(self, group: Group) -> Gather:
        return Gather(group.tensors, receives=self.leads)

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Notes, for good, if this rank cannot begin a gather that all were called for."""
        ranks = self._ranks
        try:
            yield
        except BaseException as error:
            ranks.is_broken = True
            with ranks.logged("the other ranks could not be told of a failure"):
                if not ranks.store.check([BROKEN]):
                    ranks.store.set(BROKEN, _written(ranks.failure(error)))
            raise

    def _watch(
        self, turn: LeadingRound | FollowingRound, what: str = "a gather did not end"
    ) -> Callable[[], None]:
        """Returns what raises once a rank has reported a failure, or it takes too long."""
        deadline = Deadline(self._ranks.timeout_s)

        def watch() -> None:
            with self._ranks.store_errors():
                turn.raise_reported()
            if deadline.passed:
                raise turn.blame(f"{what} within {self._ranks.timeout_s:g} s")

        return watch

    def _finish(
        self, gather: Gather, turn: LeadingRound | FollowingRound
    ) -> dict[str, torch.Tensor]:
        """Waits for a gather and returns whole tensors by name, none on ranks that do not send."""
        wait_until(gather.is_completed, math.inf, self._watch(turn))
        try:
            return gather.result()
        except RuntimeError as error:  # torch.distributed's backends raise nothing narrower
            raise turn.blame(f"a gather broke off: {error}") from error

    @property
    def _held(self) -> _Held:
        return self._resting or self._look()

    @contextmanager
    def _at_rest(self, is_new: bool) -> Iterator[_Held]:
        """Looks once for the tensors of a push."""
        self._resting = (is_new and self._found) or self._look()
        try:
            yield self._resting
        finally:
            self._resting = None

    def _look(self) -> _Held:
        """Looks for the tensors, which may have moved since the last push."""
        if self._only is not None:
            check_readable(tensors := self._only())
            return _Held(plan_of(self.owner, tensors), tensors, tensors)
        known = known_of(self.owner)
        held: _Held | None = known.held
        if held is not None and held.layout == _layout_of(self.owner):
            return held
        found = dict(self.owner.state_dict(keep_vars=True))  # FSDP's hooks shard what was gathered
        check_readable(found)
        layout = _layout_of(self.owner)
        if held is not None and held.layout == layout:
            return held
        # Not by value: ranks would have to agree, and each sees only its own shard.
        left_out = repeated(self.owner, found, lambda one, two: found[one] is found[two])
        # Hooks may compute a state dict that changes where the module's tensors do not.
        own = {one[:1] for one in layout if isinstance(one, tuple)}
        is_fixed = own.issuperset((id(one),) for one in found.values())
        # Parameters may have hooks that refer to the owner.
        every = {name: one.detach() for name, one in found.items()}
        tensors = {name: one for name, one in every.items() if name not in left_out}
        held = _Held(plan_of(self.owner, tensors), tensors, every, layout)
        known.held = held if is_fixed else None
        return held


class _Held:
    """What a rank holds of a model's tensors, while they stay where they are."""

    def __init__(
        self,
        plan: Plan,
        tensors: dict[str, torch.Tensor],  # sharded as they are
        every: dict[str, torch.Tensor],  # and those that repeat others
        layout: list[Any] | None = None,
    ) -> None:
        self.plan, self.tensors, self.every, self.layout = plan, tensors, every, layout
        self.ranks = _ranks_of(tensors.values())
        leads = dist.get_rank() == self.ranks[0]
        self.shards = [(name, local(one)) for name, one in tensors.items()]
        self.cuts = {name: cut_of(one, leads=leads) for name, one in tensors.items()}
        self.groups = self.groups_of(tensors)

    def groups_of(self, some: Collection[str]) -> list[Group]:
        """Returns what to gather at once of these tensors."""
        wanted = set(some)
        bundles = (one for one in self.plan.bundles if not wanted.isdisjoint(one.sources))
        layers = itertools.groupby(bundles, lambda one: (LAYER.match(one.sources[0]) or [""])[0])
        grouped, tensors = [list(layer) for _, layer in layers], self.tensors
        return [Group(one, {n: tensors[n] for b in one for n in b.sources}) for one in grouped]


def _layout_of(module: torch.nn.Module) -> list[Any]:
    """As :func:`layout_of`, of what this rank holds of tensors, and of which ones."""
    return layout_of(module, lambda one: (id(one), *place_of(local(one))))


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``module``, or the model it wraps, is sharded by FSDP2 or has a ``DTensor``."""
    if isinstance(module := unwrap(module), FSDPModule):
        return True
    parts = [*modules_of(module)]  # at each push, so by the few types that there are
    held = {type(one) for part in parts for one in vars(part)["_parameters"].values()}
    return DTensor in held or any(issubclass(one, FSDPModule) for one in set(map(type, parts)))


def leading(
    source: object, *wants: str, is_new: bool = False
) -> AbstractContextManager[SimpleNamespace]:
    """Wraps any push: of a sharded source in :meth:`ShardedModuleSource.lead`, else in nothing."""
    if isinstance(source, ShardedModuleSource):
        return source.lead(*wants, is_new=is_new)
    return nullcontext(SimpleNamespace())


def clear_caches(source: object) -> None:
    """Gives back the GPU memory that PyTorch keeps; waits until the other ranks have, too."""
    torch.cuda.empty_cache()
    if isinstance(source, ShardedModuleSource):
        source.offers()  # they clear theirs as they join


def _ranks_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Returns the global ranks that hold the shards, the same for all parameters."""
    meshes = {one.device_mesh for one in tensors if isinstance(one, DTensor)}
    members = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len(set(map(frozenset, members))) != 1:
        raise errors.WeightMismatchError(
            f"all sharded parameters must be on the same ranks, got {sorted(members)}"
        )
    return min(members)

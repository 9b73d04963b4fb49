"""How the ranks of one trainer go through a push in step: one leads, the others follow.

The leader says through the process group's key-value store what comes next ("gather group 3", or
how the push ended), and goes on only when every other rank has said that it is ready. So a rank
that fails is noticed before the others are inside a collective with it, and every wait ends: with
the others, with the failed rank's own words, or at a deadline.

Keys of one round, below its number: ``begun``; ``joined/<rank>``; ``ready/<step>/<rank>``;
``next/<step>``, the last of which holds the verdict; ``over``. Beside them ``broken``: who could
not begin a gather that the others are in. Their process group is out of step from then on, and
there is no other round.

Everybody who reaches the store can write into it, and torch's listens on all interfaces: so a
verdict is JSON, of bounded size, with plain values and this library's own dataclasses in it, and
whatever else a key may hold ends in an error of this module.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchrl_vllm_sync.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FollowingRound", "LeadingRound", "TrainerRankError", "TrainerRanks", "Verdict"]

logger = logging.getLogger(__name__)

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

    Args:
        ranks: Global ranks, the same list on each of them.
        rank: Global rank of this process.
        store: One that all of them reach, over a connection that nothing else uses meanwhile.
        timeout_s: Seconds after which a rank that should be ready counts as failed.
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
        """Starts a round on the leader, without waiting for anybody.

        Args:
            digest: Of what this rank would gather; the same on each.

        Raises:
            TrainerRankError: The store cannot be reached.
        """
        self._refuse_broken()
        try:
            number = self.store.add("rounds", 1)
            self.store.set(f"{number}/begun", "")
        except dist.DistError as error:
            raise TrainerRankError(None, f"their store failed: {error}") from error
        return LeadingRound(self, number, digest)

    def join(self, *, timeout_s: float) -> FollowingRound:
        """Enters the round that the leader has begun or begins next.

        Args:
            timeout_s: Seconds for which the leader may be silent, now and before each call.

        Raises:
            TrainerRankError: It did not begin in time, or the store cannot be reached.
        """
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
        """Notes that this rank could not begin a gather to which all had been called.

        Args:
            error: Why; another rank's failure if that was the cause.
        """
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
        """Raises if a gather was left that others were in.

        Raises:
            TrainerRankError: One was, or the store cannot be reached.
        """
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
        """Waits until all are ready, and has them gather group ``index``.

        Raises:
            TrainerRankError: A rank failed, would gather something else, or did not get ready.
        """
        self._await_ready()
        self._say(GATHER + str(index))

    def succeed(self, outcome: Any) -> None:
        """Tells all ranks that the push succeeded; one that is not there any more is logged.

        Args:
            outcome: Handed to all of them: what JSON can hold, and dataclasses of this library.

        Raises:
            TypeError: ``outcome`` holds something else.
        """
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
        """Looks, without waiting, whether a rank has said that it failed.

        Raises:
            TrainerRankError: One has.
        """
        for key, rank in self._keys().items():
            if self._store.check([key]):
                self._raise_if_failed(rank, _text(self._store.get(key), key))

    def blame(self, reason: str) -> TrainerRankError:
        """Returns the error for a gather that broke off, after a look at who is still there.

        Args:
            reason: What this rank saw of it.
        """
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
        """Says that this rank is ready for the first call.

        Args:
            digest: See :meth:`TrainerRanks.begin`.

        Raises:
            TrainerRankError: The store cannot be reached.
        """
        self._say_ready(digest)

    def next(self, timeout_s: float | None = None) -> int | Verdict:
        """Waits for the leader's word: the index of the group to gather, or the verdict.

        Args:
            timeout_s: Seconds, if other than those given when this rank joined.

        Raises:
            TrainerRankError: It was silent for too long, or the store cannot be reached.
        """
        key, leader = f"{self._number}/next/{self._step}", self._ranks.leader
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = _await(self._store, key, timeout_s, leader, "say what comes next")
        if call.startswith(VERDICT):
            self._drop([self._step])
            return _read(call)
        return _number(call.removeprefix(GATHER), leader)

    def launched(self) -> None:
        """Says that this rank's part of the gather has begun, so that the next may be called.

        Raises:
            TrainerRankError: The store cannot be reached.
        """
        self._step += 1
        self._say_ready("")

    def break_step(self, error: BaseException) -> None:
        """Notes that this rank could not begin the gather it was called for."""
        self._ranks.break_step(error)

    def raise_reported(self) -> None:
        """Looks, without waiting, whether the push ended while this rank takes its part.

        Raises:
            TrainerRankError: The leader has said so.
        """
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
    """Writes a verdict as text.

    Raises:
        TypeError: It holds what :func:`_read` would refuse.
    """
    try:
        text = VERDICT + json.dumps(_plain(verdict))
    except (ValueError, RecursionError) as error:
        raise TypeError(f"an outcome must be plain values or this library's: {error}") from error
    if len(text) > MOST_BYTES:
        raise TypeError(f"an outcome must have at most {MOST_BYTES} bytes, got {len(text)}")
    return text


def _plain(value: Any) -> Any:
    """Returns a value as JSON holds it, dataclasses of this library with their names.

    Raises:
        TypeError: Something in it would come out otherwise than it went in.
    """
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
    """Reads a verdict, of which anybody may have written the text.

    Raises:
        TrainerRankError: It is none.
    """
    try:
        verdict = _built(json.loads(call.removeprefix(VERDICT)))
    except (ValueError, TypeError, NameError, RecursionError) as error:
        raise TrainerRankError(None, f"their store holds no verdict: {error}") from error
    if not isinstance(verdict, Verdict):
        raise TrainerRankError(None, f"their store holds no verdict: {type(verdict).__name__}")
    return verdict


def _built(value: Any) -> Any:
    """Returns what :func:`_plain` was given.

    Raises:
        TypeError: It names what is no dataclass of this library, or other fields than that has.
        NameError: It names one whose fields' types are not known at run time.
    """
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
    """Returns the dataclass of this library that has that name; imports nothing."""
    module, _, own = str(name).rpartition(".")
    if module.partition(".")[0] != __name__.partition(".")[0] or module not in sys.modules:
        return None
    found = vars(sys.modules[module]).get(own)
    is_here = isinstance(found, type) and is_dataclass(found) and found.__module__ == module
    return found if is_here else None


def _words_of(error: BaseException) -> str:
    """Returns what the other ranks are told of an error."""
    words = f"{type(error).__name__}: {error}"[:MOST_REASON]
    return words.encode(errors="backslashreplace").decode()


def _number(text: str, rank: int | None) -> int:
    """Reads a number that a rank wrote.

    Raises:
        TrainerRankError: It is none.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise TrainerRankError(rank, f"wrote {text!r:.50} where a number belongs")
    return int(text)


def _text(value: bytes, key: str) -> str:
    """Reads what the store holds under ``key``.

    Raises:
        TrainerRankError: It is no text, or too long.
    """
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

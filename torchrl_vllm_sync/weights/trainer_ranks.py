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
verdict may hold plain values and this library's own dataclasses, and reading it calls nothing else.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import sys
import time
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchrl_vllm_sync.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FollowingRound", "LeadingRound", "TrainerRankError", "TrainerRanks", "Verdict"]

logger = logging.getLogger(__name__)

FAILED, GATHER, VERDICT = "!", "g", "v"
BROKEN = "broken"
# What damaged pickles make of ``pickle.Unpickler``, as its documentation lists it, and base64.
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
)
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
        number = int(_await(self.store, "rounds", timeout_s, self.leader, waiting))
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
            rank, reason = self.rank, f"{type(error).__name__}: {error}"
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
            broken = _read(self.store.get(BROKEN).decode())
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

    def succeed(self, outcome: Any) -> None:  # noqa: ANN401  whatever the ranks are to know
        """Tells all ranks that the push succeeded; one that is not there any more is logged.

        Args:
            outcome: Handed to all of them: plain values and containers, and dataclasses of this
                library.

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
            verdict = Verdict(None, self._ranks.leader, f"{type(error).__name__}: {error}")
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
                self._raise_if_failed(rank, self._store.get(key).decode())

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
            said = [one.decode() for one in self._store.multi_get(list(keys))]
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
        steps = int(self._store.get(f"{number}/over"))
        keys = [f"{number}/begun", *(f"{number}/next/{step}" for step in range(steps))]
        for rank in self._ranks.ranks[1:]:
            keys += [f"{number}/joined/{rank}"]
        for key in keys:
            self._store.delete_key(key)


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
        return int(call.removeprefix(GATHER))

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
            verdict = _read(self._store.get(key).decode())
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
        text = f"{FAILED}{type(error).__name__}: {error}"
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


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values and this library's dataclasses; every other class or function it refuses.

    Source of the rule: "Restricting Globals" of Python's ``pickle``.
    """

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if module.partition(".")[0] == __name__.partition(".")[0] and module in sys.modules:
            found = vars(sys.modules[module]).get(name)
            if isinstance(found, type) and is_dataclass(found) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no dataclass of this library")


def _written(verdict: Verdict) -> str:
    """Writes a verdict as text.

    Raises:
        TypeError: It holds what :func:`_read` would refuse.
    """
    pickled = pickle.dumps(verdict)
    try:
        _PlainUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as error:
        raise TypeError(f"an outcome must be plain values or this library's: {error}") from error
    return VERDICT + base64.b64encode(pickled).decode()


def _read(call: str) -> Verdict:
    """Reads a verdict, of which anybody may have written the text.

    Raises:
        TrainerRankError: It is none.
    """
    try:
        pickled = base64.b64decode(call.removeprefix(VERDICT), validate=True)
        verdict = _PlainUnpickler(io.BytesIO(pickled)).load()
    except _UNREADABLE as error:
        raise TrainerRankError(None, f"their store holds no verdict: {error}") from error
    if not isinstance(verdict, Verdict):
        raise TrainerRankError(None, f"their store holds no verdict: {type(verdict).__name__}")
    return verdict


def _await(store: Store, key: str, timeout_s: float, leader: int, what: str) -> str:
    """Returns what the leader wrote under ``key``, once it has."""
    begin = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key).decode()
    except dist.DistStoreError as error:
        raise TrainerRankError(leader, f"did not {what} within {timeout_s:g} s") from error
    except dist.DistError as error:
        waited = time.monotonic() - begin
        raise TrainerRankError(leader, f"could not be reached after {waited:.1f} s") from error

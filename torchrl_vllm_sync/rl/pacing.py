"""Pacing: rollouts begin only as fast as they are trained, so that none gets old and none is lost.

Rows have numbers, 0, 1, 2, ..., in the order in which they are admitted. They are trained in that
order, ``batch_size`` at a time, with one push after each batch at most, which has ended when the
trainer says that the batch is trained. Row ``n`` then belongs to batch ``n // batch_size``, and may
begin when

    n // batch_size <= num_trained // batch_size + max_staleness

so that ``admitted - trained <= (max_staleness + 1) * batch_size``. No row is ever older than
``max_staleness`` versions when it is trained: it is sampled by the weights that were there when it
was admitted, or by newer ones, and between then and its batch there are the pushes of the batches
``num_trained // batch_size`` to ``n // batch_size - 1``, which are ``max_staleness`` at most. So
nothing need be discarded; what takes long is waited for when its batch is due, and not before. What
fails or is filtered leaves its number to another, which begins later and so is newer still.

The inequality is that of AReaL's staleness-aware training (arXiv:2505.24298), with
batches trained in place of versions: without a push nothing gets older, and sampling goes on. By
itself it says how many rows begin, not which are trained next, and a row that is overtaken gets
older than it says. The order makes it a bound of every row, and each batch that of a synchronous
run, prompt by prompt.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from torchrl_vllm_sync.checks import Deadline, check_integer, check_seconds
from torchrl_vllm_sync.errors import (
    PacingError,
    PacingTimeoutError,
    UnsupportedArgumentError,
    is_gone,
)
from torchrl_vllm_sync.requests.background import run_blocking, start

GRACE_S = 30.0  # more than it waits itself, for an actor's answer
TIMEOUT_S = 3600.0
BOUNDS = "max_staleness", "batch_size"
COUNTS = "num_rows", "num_envs", "num_admitted", "num_delivered"
COUNTS += "num_asked", "num_trained", "_written"


class Ticket(NamedTuple):
    """Leave to sample one collector's batch."""

    number: int  # the batch's place in the order
    rows: tuple[int, ...]  # which rows of the data set are asked, counted from 0
    oldest: int  # nobody asks for an earlier row any more
    may_be_written: bool  # by one that held it before


class Ledger:
    """Whose each ticket is, which are handed on, and how many rows are trained."""

    def __init__(self, max_staleness: int, batch_size: int) -> None:
        self.max_staleness, self.batch_size = max_staleness, batch_size
        self.num_rows = self.num_envs = 0  # of a ticket, an environment; the first collector's
        self.num_admitted, self.num_delivered = 0, 0  # tickets
        self.num_asked, self.num_trained = 0, 0  # rows
        self._joined: dict[str, object] = {}  # collectors, each with what tells its lives apart
        self._held: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._returned: list[tuple[int, tuple[int, ...]]] = []
        self._written: tuple[int, int] = -1, 0  # a ticket, and the buffer's count before its rows
        self._handing: int | None = None  # the ticket whose rows are on their way to the trainer
        self._is_frozen = False
        self._changed = asyncio.Event()

    def join(self, owner: str, num_rows: int, num_envs: int = 0) -> None:
        """Takes a collector on, or one that began anew, whose tickets return.

        Of the data set its environment took ``num_envs`` rows when it was made; with 0, that does
        not count.
        """
        told = f"a collector's batches of {num_rows} rows"
        if self.num_rows not in (0, num_rows):
            raise UnsupportedArgumentError(f"{told}, where others' have {self.num_rows}")
        if self.batch_size % num_rows:
            raise UnsupportedArgumentError(f"{told} are no part of batch_size={self.batch_size}")
        if num_envs and self.num_envs not in (0, num_envs):
            took = f"an environment of {num_envs} rows, where others have {self.num_envs}"
            raise UnsupportedArgumentError(f"{took}: their rows would be other ones")
        self.num_rows, self.num_envs = num_rows, num_envs or self.num_envs
        self.leave(owner)
        self._joined[owner] = object()

    def leave(self, owner: str) -> None:
        """Takes back what a collector holds; whoever asks next gets the oldest of it."""
        self._joined.pop(owner, None)
        for number in [one for one, (held, _) in self._held.items() if held == owner]:
            heapq.heappush(self._returned, (number, self._held.pop(number)[1]))
            self._handing = None if number == self._handing else self._handing
        self._notify()

    def admit(self, owner: str) -> Ticket | None:
        """The oldest ticket that nobody holds, if its rows may begin."""
        if self._returned:
            number, rows = heapq.heappop(self._returned)
        else:
            number = self.num_admitted
            if self._batches_ahead(number) > self.max_staleness:
                return None
            rows, self.num_admitted = self._next_rows(self.num_rows), number + 1
        self._held[number] = owner, rows
        others = (min(one) for _, one in [*self._held.values(), *self._returned])
        return Ticket(number, rows, min(others), number == self._written[0])

    def replace(self, owner: str, number: int, dropped: Sequence[int]) -> tuple[int, ...]:
        """The next rows of the data set, in place of some of a ticket's."""
        rows, fresh = self._rows_of(owner, number), self._next_rows(len(dropped))
        instead = dict(zip(dropped, fresh, strict=True))
        self._held[number] = owner, tuple(instead.get(one, one) for one in rows)
        return fresh

    def turn(self, owner: str, number: int) -> Ticket | bool | None:
        """True if a ticket's rows are the next to be trained, or an older ticket that returned."""
        self._rows_of(owner, number)
        if self._returned and self._returned[0] < (number,):  # all may wait for a turn meanwhile
            return self.admit(owner)
        if self._is_frozen or number != self.num_delivered or self._batches_ahead(number) > 0:
            return None
        self._handing = number
        return True

    def write(self, owner: str, number: int, count: int) -> bool:
        """Whether a ticket whose turn it is has to be written to a buffer that counts what it got.

        A collector that died may have done so, and the trainer may even have taken the rows.
        """
        self._rows_of(owner, number)
        if self._written[0] != number:
            self._written = number, count
            return True
        return count == self._written[1] and self.num_trained < (number + 1) * self.num_rows

    def unwrite(self, owner: str, number: int) -> None:
        """Notes that a buffer has refused a ticket's rows; it may have counted them even so."""
        self._rows_of(owner, number)
        self._written = -1, 0

    def deliver(self, owner: str, number: int) -> None:
        """Notes that a ticket's rows are where the trainer takes them from."""
        self._rows_of(owner, number)
        if number != self.num_delivered:
            raise PacingError(f"batch {number} was handed on before {self.num_delivered}")
        del self._held[number]
        self.num_delivered, self._handing = self.num_delivered + 1, None
        self._notify()

    def ready(self) -> bool | None:
        """True once all rows of the batch that is trained next are handed on."""
        return self._batches_ahead(self.num_delivered) > 0 or None

    def train(self, num_rows: int) -> None:
        """Notes that so many more rows are trained, and pushed."""
        check_integer("num_rows", num_rows, 0)
        # Rows may be in the buffer before their collector has said so.
        there = self.num_admitted * self.num_rows - self.num_trained
        if num_rows > there:
            raise PacingError(f"{num_rows} rows were trained, where only {there} were there")
        self.num_trained += num_rows
        self._notify()

    def freeze(self) -> None:
        """Keeps rows from being handed on until :meth:`thaw`."""
        self._is_frozen = True

    def settled(self) -> bool | None:
        """None while rows are still handed on that had begun to be before :meth:`freeze`."""
        return True if self._handing is None or not self._is_frozen else None

    def thaw(self) -> None:
        """Ends :meth:`freeze`."""
        self._is_frozen = False
        self._notify()

    def state_dict(self) -> dict[str, Any]:
        """How far everyone is; what is held is to be asked for anew."""
        held = ((number, rows) for number, (_, rows) in self._held.items())
        state: dict[str, Any] = {name: getattr(self, name) for name in (*BOUNDS, *COUNTS)}
        return state | {"returned": sorted([*self._returned, *held])}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuses a state of other bounds, or once rows were admitted."""
        for name in (*BOUNDS, "num_rows", "num_envs"):
            mine, its = getattr(self, name), state.get(name)  # earlier states have no num_envs
            if mine != its and (name in BOUNDS or (mine and its)):
                raise UnsupportedArgumentError(f"{name} is {mine}, where it was {its} in the state")
        if self.num_admitted:
            raise PacingError(f"a state is loaded before rows are admitted: {self.told}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        self.check_state(state)
        for name in COUNTS:
            setattr(self, name, state.get(name) or getattr(self, name))
        self._returned = [*state["returned"]]
        self._notify()

    async def call(self, name: str, args: tuple[Any, ...], wait_s: float | None) -> Any:
        """The answer of a method; if it is to be waited for, once it is not None."""
        deadline, owner = Deadline(wait_s or 0), next((x for x in args if isinstance(x, str)), "")
        life = self._joined.get(owner)
        if name == "admit" and life is None:  # sent before it died
            raise PacingError(f"{owner} has left: {self.told}")
        while (answer := getattr(self, name)(*args)) is None and wait_s is not None:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline.left_s)
            except TimeoutError:
                raise PacingTimeoutError(name, wait_s, self.told) from None
            if self._joined.get(owner) is not life:
                raise PacingError(f"{owner} has left: {self.told}")
        return answer

    @property
    def told(self) -> str:
        """How far everyone is."""
        bound = f"batch_size={self.batch_size}, max_staleness={self.max_staleness}"
        rows = f"{self.num_admitted * self.num_rows} rows admitted, {self.num_trained} trained"
        owner, _ = self._held.get(self.num_delivered, ("nobody", ()))
        who = "" if self._joined else "; no collector is there, or all have failed or left"
        return f"{rows} ({bound}), and batch {self.num_delivered} is next, held by {owner}{who}"

    def _batches_ahead(self, number: int) -> int:
        """How many batches are to be trained before that of a ticket."""
        return number * self.num_rows // self.batch_size - self.num_trained // self.batch_size

    def _next_rows(self, number: int) -> tuple[int, ...]:
        self.num_asked += number
        return tuple(range(self.num_asked - number, self.num_asked))

    def _rows_of(self, owner: str, number: int) -> tuple[int, ...]:
        held_by, rows = self._held.get(number, ("nobody", ()))
        if held_by != owner:
            raise PacingError(f"batch {number} is not {owner}'s, but held by {held_by}")
        return rows

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Pacer:
    """Admits rollouts as fast as they are trained: none is older than a bound, none is discarded.

    One collector with a bound of its own needs no more than ``RolloutCollector(max_staleness=k)``.
    A pacer is for several, in threads or processes, that fill one buffer: their rows get there in
    one order, which is that of the data set, and the trainer says when it has trained a batch. See
    the module for the rule, and why it holds.

    Example:
        >>> pacer = Pacer(max_staleness=2, batch_size=64)
        >>> collectors = [
        ...     RolloutCollector(make_env(), policy=policy, replay_buffer=buffer, pacer=pacer, ...)
        ...     for _ in range(3)
        ... ]
        >>> for collector in collectors:
        ...     collector.start()
        >>> for _ in range(num_steps):
        ...     pacer.wait_for_batch()
        ...     train(buffer.sample(64))  # with a ConsumingSampler
        ...     updater.push_weights()
        ...     pacer.trained(64)

    Args:
        max_staleness: How many versions old a row may be when it is trained. 0 is synchronous
            training, in the same order of prompts.
        batch_size: Rows that are trained with each push, at least; some collectors' batches. They
            get into the buffer once those before are trained, so it has rows of one batch only,
            whatever its sampler, and need not hold more.
        shared: Keep the books in a Ray actor, so that copies of the pacer in other processes are
            the same pacer. It ends with this one.
        timeout_s: Seconds for which a collector waits to be admitted, or for its turn, and the
            trainer for its batch.

    Raises:
        UnsupportedArgumentError: An argument is out of range.
    """

    def __init__(
        self,
        max_staleness: int,
        batch_size: int,
        *,
        shared: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_integer("max_staleness", max_staleness, 0)
        check_integer("batch_size", batch_size, 1)
        check_seconds("timeout_s", timeout_s)
        self.max_staleness, self.batch_size = max_staleness, batch_size
        self.shared, self.timeout_s = shared, timeout_s
        made: Any = ray.remote(num_cpus=0)(Ledger).remote if shared else Ledger
        self._ledger = made(max_staleness, batch_size)

    def __getstate__(self) -> dict[str, Any]:
        if not self.shared:
            raise UnsupportedArgumentError("a Pacer for several processes needs shared=True")
        return vars(self)

    def wait_for_batch(self) -> None:
        """Waits until the next ``batch_size`` rows are in the buffer.

        Raises:
            PacingTimeoutError: They are not within ``timeout_s``; it says who holds them.
            PacingError: The pacer's actor died.
        """
        self._call("ready", waits=True)

    def trained(self, num_rows: int) -> None:
        """Says that so many more rows are trained, and that the weights they made are pushed.

        Args:
            num_rows: Rows.

        Raises:
            PacingError: So many rows were not even admitted.
        """
        self._call("train", num_rows)

    def leave(self, owner: str) -> None:
        """Takes back what a collector held that died; another samples the same rows.

        What it had written to a buffer that counts its rows is not written again. One whose actor
        Ray restarts says so itself, and must not be said to have left once it is there again.

        Args:
            owner: The collector's :attr:`RolloutCollector.name`.
        """
        self._call("leave", owner)

    def state_dict(self) -> dict[str, Any]:
        """Returns how many rows are admitted, handed on and trained, and which are under way."""
        return self._call("state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the state of another pacer; rows that were under way are sampled anew.

        Args:
            state_dict: The state.

        Raises:
            UnsupportedArgumentError: ``max_staleness``, ``batch_size`` or the collectors' batches
                are other ones; the pacer is as it was, as after the next.
            PacingError: Collectors of this pacer have begun.
        """
        self._call("load_state_dict", state_dict)

    def _call(self, name: str, *args: Any, waits: bool = False) -> Any:
        wait_s = self.timeout_s if waits else None
        if not self.shared:
            return run_blocking(self._ledger.call(name, args, wait_s))
        answer = self._ledger.call.remote(name, args, wait_s)
        try:
            return ray.get(answer, timeout=(wait_s or 0) + GRACE_S)
        except RayError as error:
            if is_gone(error):
                raise PacingError(f"the pacer's actor died: {error}") from error
            raise

    def _tell(self, name: str, *args: Any) -> None:
        """Calls without waiting for the answer: also at the end, when nobody may be there."""
        if not self.shared:
            start(self._ledger.call(name, args, None))
        elif ray.is_initialized():  # else the call would start Ray anew
            self._ledger.call.remote(name, args, None)

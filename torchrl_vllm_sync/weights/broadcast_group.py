"""The communicator of a trainer and its engines' workers: NCCL on CUDA, Gloo on CPU.

It stands beside torch's default process group, which is vLLM's in a worker, and it never waits
for ever: each wait has a deadline, after which the communicator is given up on this side.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.bounded_store import BoundedStore
from torchrl_vllm_sync.weights.nccl_environment import is_held_to_one_channel, nccl_environment
from torchrl_vllm_sync.weights.rendezvous import (
    Rendezvous,
    host_store,
    own_address,
    reach_store,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["BroadcastGroup"]

TRAINER_RANK = 0
# Seconds between looks at work on a GPU that is under way, and at those who take part in it.
SPIN_S = 50e-6
STORE_POLL_S = 50e-6
WATCH_S = 0.05
# Seconds that the end of a group waits for Gloo to end what was under way.
END_TIMEOUT_S = 0.2
LEFT, GIVEN_UP, ONE_CHANNEL = "left", "given-up", "one-channel"
CLOSED = "the group is not connected, or was closed after a failure"


class BroadcastGroup:
    """One communicator: rank 0 is the trainer, which sends; the others receive.

    Lifecycle: :meth:`host` on the trainer, which makes the store, then :meth:`connect` on every
    rank at about the same time; any number of :meth:`broadcast` in the same order everywhere;
    :meth:`close`. After an error on any rank the group is of no more use: close it everywhere.

    Args:
        store: Store of all ranks.
        rank: This process's rank.
        rendezvous: Where the group meets.
        device: Where the tensors are; its kind decides between NCCL and Gloo.

    Attributes:
        rank: This process's rank.
        device: As given.
        rendezvous: As given.
    """

    def __init__(
        self, store: BoundedStore, rank: int, rendezvous: Rendezvous, device: torch.device
    ) -> None:
        self.rank, self.rendezvous, self.device = rank, rendezvous, device
        self._store: BoundedStore | None = store
        # Of torch's own kinds, whose type stubs lack most methods.
        self._group: Any = None
        self._under_way: deque[dist.Work] = deque()  # with Gloo
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @classmethod
    def host(
        cls,
        address: str,
        *,
        port: int | None,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        interface: str | None = None,
    ) -> BroadcastGroup:
        """Makes the store on the trainer; :meth:`connect` has still to be called.

        Args:
            address: This host's address, reachable from every worker.
            port: Port to listen on; ``None`` takes a free one.
            world_size: The trainer and all workers.
            device: Where the trainer's tensors are.
            timeout_s: Seconds for the store's own waits.
            interface: See :class:`Rendezvous`.

        Raises:
            TransferError: The port cannot be had.
            UnsupportedArgumentError: This host has no such interface.
        """
        store = host_store(
            address, port, world_size=world_size, timeout_s=timeout_s, interface=interface
        )
        rendezvous = Rendezvous(address, store.port, world_size, interface)
        return cls(BoundedStore(store, answer_timeout_s=None), TRAINER_RANK, rendezvous, device)

    @classmethod
    def join(
        cls, rendezvous: Rendezvous, rank: int, device: torch.device, *, timeout_s: float
    ) -> BroadcastGroup:
        """Reaches the trainer's store from a worker; :meth:`connect` has still to be called.

        Raises:
            TransferError: The rank does not exist in this group, or the trainer cannot be reached.
            UnsupportedArgumentError: This host has no such interface.
        """
        if not 0 < rank < rendezvous.world_size:
            raise TransferError(
                f"rank must be in [1, {rendezvous.world_size}) in a group of "
                f"{rendezvous.world_size}, got {rank}"
            )
        store = BoundedStore(reach_store(rendezvous, timeout_s=timeout_s))
        return cls(store, rank, rendezvous, device)

    @property
    def backend(self) -> str:
        """``"nccl"`` or ``"gloo"``."""
        return "nccl" if self._stream is not None else "gloo"

    @property
    def is_connected(self) -> bool:
        """Whether the group can be used."""
        return self._group is not None

    @property
    def store(self) -> BoundedStore:
        """Store of all ranks.

        Raises:
            TransferError: The group is closed.
        """
        if self._store is None:
            raise TransferError(CLOSED)
        return self._store

    @property
    def was_left(self) -> bool:
        """On the trainer: whether a worker has left the group, perhaps for another trainer's."""
        return self._store is None or self._store.check([LEFT])

    def absent(self) -> list[int]:
        """Returns the ranks that have not come to the rendezvous yet."""
        ranks = range(self.rendezvous.world_size)
        return [rank for rank in ranks if not self.store.check([f"rank/{rank}"])]

    def connect(self, *, timeout_s: float, watch: Callable[[], None] | None = None) -> None:
        """Meets all other ranks and passes a word round, so that later waits are for data only.

        After a failure the group has still to be closed on the trainer, who may ask it first who
        was :meth:`absent`; workers have left it.

        Args:
            timeout_s: Seconds for everything.
            watch: Called while waiting; raises to give up early.

        Raises:
            TransferError: Not every rank came, or two came with one rank.
        """
        deadline = time.monotonic() + timeout_s
        give_up = self.abort if self.rank == TRAINER_RANK else self.close
        try:
            self._meet(deadline, watch)
        except TransferError:
            give_up()
            raise
        except RuntimeError as error:  # what the store and the communicators raise
            give_up()
            raise TransferError(f"the group could not be formed: {error}") from error

    def _meet(self, deadline: float, watch: Callable[[], None] | None) -> None:
        if self._stream is not None and is_held_to_one_channel():
            self.store.set(ONE_CHANNEL, "1")
        if self.store.add(f"rank/{self.rank}", 1) > 1:
            raise TransferError(f"rank {self.rank} of the group is taken already")
        keys = [f"rank/{rank}" for rank in range(self.rendezvous.world_size)]
        self.await_keys(keys, deadline, "come to the rendezvous in time", watch)
        word = torch.full((1,), float(self.rank == TRAINER_RANK), device=self.device)
        with self._nccl_environment():
            self._group = self._make_group(max(deadline - time.monotonic(), 1.0))
            with self.side_stream():
                work = self.broadcast(word, timeout_s=max(deadline - time.monotonic(), 1.0))
                self.wait(work, watch)
        self.synchronize(deadline=deadline, watch=watch)
        if word.item() != 1.0:
            raise TransferError(f"rank {self.rank} received nothing from the trainer")

    def broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> dist.Work:
        """Starts sending ``tensor`` from the trainer to every other rank.

        On CUDA the transfer follows the work queued on the current stream, and waiting for it
        makes that stream wait, not the host.

        Raises:
            TransferError: The group is closed.
        """
        if self._group is None:
            raise TransferError(CLOSED)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = TRAINER_RANK, 0
        options.timeout = timedelta(seconds=timeout_s)
        options.asyncOp = True
        work = self._group.broadcast([tensor], options)
        if self._stream is None:
            while self._under_way and self._under_way[0].is_completed():
                self._under_way.popleft()
            self._under_way.append(work)
        return work

    def broadcast_together(
        self, tensors: Sequence[torch.Tensor], *, timeout_s: float
    ) -> list[dist.Work]:
        """Starts sending several tensors as one transfer where the communicator can do that.

        Raises:
            TransferError: The group is closed.
        """
        if self._group is None or self._stream is None:
            return [self.broadcast(tensor, timeout_s=timeout_s) for tensor in tensors]
        self._group._start_coalescing()
        try:
            for tensor in tensors:
                self.broadcast(tensor, timeout_s=timeout_s)
        finally:
            work = self._group._end_coalescing()
        return [work]

    def wait(self, work: dist.Work, watch: Callable[[], None] | None = None) -> None:
        """Waits for one transfer; on CUDA the current stream does, not the host.

        Gloo forgets who waits for a message when the connection closes in the middle of it (torch
        2.13), so this looks now and then who is still there.

        Args:
            work: From :meth:`broadcast`.
            watch: Called about every 50 ms on a CPU; raises to give up early.

        Raises:
            RuntimeError: The communicator failed.
            TransferError: Somebody has left the group.
        """
        while self._stream is None and not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not yet, or a failure: see the last line
                work.wait(timedelta(seconds=WATCH_S))
            if not work.is_completed():
                self._raise_if_left(watch)
        work.wait()

    def _raise_if_left(self, watch: Callable[[], None] | None) -> None:
        """Raises if ``watch`` does, or if somebody has left the group."""
        if watch is not None:
            watch()
        if self._group is None:
            raise TransferError(CLOSED)
        if self.rank != TRAINER_RANK:
            self.raise_if_given_up()
        elif self.was_left:
            raise TransferError("a worker left the group during a transfer")

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queues what is done inside on the group's own stream, after what was queued before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def synchronize(
        self,
        *,
        deadline: float,
        watch: Callable[[], None] | None = None,
        poll_s: float = SPIN_S,
    ) -> None:
        """Waits until everything queued by this group is done; gives the group up otherwise.

        Args:
            deadline: ``time.monotonic()`` at which to give up.
            watch: Called about every 50 ms; raises to give up early.
            poll_s: Seconds between looks; each takes the interpreter from whatever else runs.

        Raises:
            TransferError: It was not done in time.
        """
        if self._stream is None:
            return
        done = torch.cuda.Event()
        done.record(self._stream)
        try:
            self._await_event(done, deadline, watch, poll_s)
        except BaseException:
            self.abort()
            raise

    def _await_event(
        self,
        done: torch.cuda.Event,
        deadline: float,
        watch: Callable[[], None] | None,
        poll_s: float,
    ) -> None:
        next_look = time.monotonic() + WATCH_S
        while not done.query():
            now = time.monotonic()
            if now > deadline:
                raise TransferError("the transfer did not end in time")
            if watch is not None and now > next_look:
                watch()
                next_look = now + WATCH_S
            time.sleep(poll_s)

    def follow(self) -> None:
        """Makes the current stream wait for everything queued by this group."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def abort(self) -> None:
        """Gives the communicator up, whatever it is doing; on CUDA this ends waiting kernels.

        No tensor is written to any more. Workers hear of it when the trainer does it, see
        :meth:`raise_if_given_up`.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if self.rank == TRAINER_RANK and self._store is not None:
            self._store.set(GIVEN_UP, "1")
        if self._stream is not None:
            group.abort()
            return
        self._close_connections(group)
        works, self._under_way = list(self._under_way), deque()
        if not _have_ended(works, time.monotonic() + END_TIMEOUT_S):
            # The group's destructor would wait for them here.
            threading.Thread(
                target=_keep, args=(group, works), name="gloo-ends", daemon=True
            ).start()

    def _close_connections(self, group: Any) -> None:
        """Closes them as Gloo does when a receive is late; it has no ``abort`` (torch 2.13)."""
        for peer in range(self.rendezvous.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):  # in time, as nobody sends it
                    group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))

    def raise_if_given_up(self) -> None:
        """On a worker: what a wait for the trainer calls now and then.

        Raises:
            TransferError: The trainer has given the group up, or is gone.
        """
        try:
            given_up = self.store.check([GIVEN_UP])
        except DistError as error:
            raise TransferError(f"the trainer is gone: {error}") from error
        if given_up:
            raise TransferError("the trainer gave the transfer up")

    def close(self) -> None:
        """Leaves the group; peers that still wait for this rank notice. Idempotent.

        The trainer's store goes too: workers wait in it until the last reference is gone, of which
        the traceback of an error may hold one to this object.
        """
        self.abort()
        store, self._store = self._store, None
        if store is not None and self.rank != TRAINER_RANK:
            with contextlib.suppress(DistError):  # the trainer is gone
                store.set(LEFT, str(self.rank))

    def await_keys(
        self, keys: Sequence[str], deadline: float, what: str, watch: Callable[[], None] | None
    ) -> None:
        """Waits for keys that end in a rank, one each.

        Looks again and again: a wait in the store that runs out leaves its connection in disorder.

        Args:
            keys: Keys of the store.
            deadline: ``time.monotonic()`` at which to give up.
            what: What the ranks whose keys are missing did not do.
            watch: Called about every 50 ms; raises to give up early.

        Raises:
            TransferError: A key was not there in time; names the ranks.
        """
        next_look = time.monotonic() + WATCH_S
        while not self.store.check(list(keys)):
            now = time.monotonic()
            if now > deadline:
                missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                raise TransferError(f"ranks {', '.join(missing)} did not {what}")
            if watch is not None and now > next_look:
                watch()
                next_look = now + WATCH_S
            time.sleep(STORE_POLL_S)

    def _make_group(self, timeout_s: float) -> Any:
        store = PrefixStore("weights", self.store.raw)
        world_size = self.rendezvous.world_size
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            options.is_high_priority_stream = True
            if self.store.check([ONE_CHANNEL]):  # all ranks must have as many
                options.config.min_ctas = options.config.max_ctas = 1
            return dist.ProcessGroupNCCL(store, self.rank, world_size, options)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=timeout_s)
        if self.rendezvous.interface is None:
            device = ProcessGroupGloo.create_device(
                hostname=own_address(self.rendezvous.address), lazy_init=False
            )
        else:
            device = ProcessGroupGloo.create_device(
                interface=self.rendezvous.interface, lazy_init=False
            )
        options._devices = [device]
        return ProcessGroupGloo(store, self.rank, world_size, options)

    def _nccl_environment(self) -> contextlib.AbstractContextManager[None]:
        if self._stream is None:
            return contextlib.nullcontext()
        return nccl_environment(self.rendezvous.interface)


def _have_ended(works: Sequence[dist.Work], deadline: float) -> bool:
    """Waits until all have ended, however; returns whether they had by ``deadline``."""
    while not all(one.is_completed() for one in works):
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def _keep(group: object, works: Sequence[dist.Work]) -> None:  # noqa: ARG001
    """Keeps a group until what waits in it has run out of time."""
    while not _have_ended(works, time.monotonic()):
        time.sleep(WATCH_S)

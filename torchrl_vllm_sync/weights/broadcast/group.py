"""Communicator of a trainer and its engines' workers, beside torch's own: NCCL or, on CPUs, Gloo.

Every wait has a deadline, after which the communicator is aborted on this side.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.p2p.memory import (
    Handover,
    HostRange,
    hand_over,
    new_memory,
    new_range,
)

# Raises when a wait has become pointless; called now and then while it lasts.
Watch = Callable[[], None] | None

logger = logging.getLogger(__name__)

# Buckets that are under way at once, each in a buffer.
NUM_BUFFERS = 3
# Seconds between looks at what is waited for, and at whether peers are alive.
SPIN_S = 50e-6
WATCH_S = 0.05


def left_s(deadline: float, least_s: float = 1e-3) -> float:
    """Returns the seconds until ``deadline`` by ``time.monotonic()``, as a positive time limit."""
    return max(deadline - time.monotonic(), least_s)


def wait_until(
    holds: Callable[[], bool], deadline: float, watch: Watch = None, poll_s: float = SPIN_S
) -> bool:
    """Waits until ``holds()``; returns whether it did by ``deadline``."""
    next_look = time.monotonic() + WATCH_S
    while not holds():
        now = time.monotonic()
        if now > deadline:
            return False
        if watch is not None and now > next_look:
            watch()
            next_look = now + WATCH_S
        time.sleep(poll_s)
    return True


# Seconds within which a process that hosts a store answers, unless it is stopped or cut off.
ANSWER_TIMEOUT_S = 10.0
# Seconds that it gets beyond the time limit of a wait, to report the timeout.
LAST_WORD_S = 0.5


class BoundedStore:
    """``set``, ``add`` and ``check`` of a ``TCPStore``, and a wait, each of which ends in time.

    While the process that hosts it is stopped none returns (torch 2.11 and 2.12). So each runs in a
    thread of its own, abandoned when there is no answer: then every later call fails at once.
    """

    def __init__(self, store: TCPStore, answer_timeout_s: float | None = ANSWER_TIMEOUT_S) -> None:
        self.raw, self._answer_timeout_s, self._is_lost = store, answer_timeout_s, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._call(lambda: getattr(self.raw, name)(*args))

    def await_value(self, key: str, timeout_s: float) -> str:
        def value() -> str:
            self.raw.wait([key], timedelta(seconds=timeout_s))
            return self.raw.get(key).decode(errors="replace")  # any process may have written it

        return self._call(value, timeout_s + LAST_WORD_S)

    def _call(self, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        if self._answer_timeout_s is None:
            return call()
        if self._is_lost:
            raise DistStoreError("the connection to the trainer's store was given up")
        ended = in_thread("trainers-store", call)
        limit_s = self._answer_timeout_s if timeout_s is None else timeout_s
        if wait([ended], timeout=limit_s).not_done:
            self._is_lost = True
            raise DistStoreError("the process that hosts the store did not answer in time")
        return ended.result()


# ProcessGroupNCCL's watchdog would end the whole process when a collective fails.
QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
CHANNELS = "NCCL_MAX_NCHANNELS"
# Pinned in vLLM's workers by batch invariance; all ends of a communicator must agree on them.
PINNED_BY_VLLM = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", CHANNELS)


def is_held_to_one_channel() -> bool:
    """Whether NCCL can only make communicators with one channel in this process."""
    # It reads the limit with a process's first communicator, which a batch-invariant vLLM worker
    # makes with one. From NCCL 2.29.7 on it can be read again, which vLLM 0.32 asks for
    # (``vllm/utils/nccl.py``, ``pin_nccl_env``).
    return (
        os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        and os.environ.get(CHANNELS) == "1"
        and CHANNELS not in os.environ.get("NCCL_NO_CACHE", "").split(",")
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


@contextlib.contextmanager
def nccl_environment(interface: str | None) -> Iterator[None]:
    """Sets NCCL's variables; inside must be the first collective, which makes the communicator."""
    wanted: dict[str, str | None] = dict(QUIET_NCCL)
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        wanted |= dict.fromkeys(PINNED_BY_VLLM)
    if interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=": not all whose names begin so
    before = {name: os.environ.pop(name, None) for name in wanted}
    try:
        os.environ.update({name: value for name, value in wanted.items() if value is not None})
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


# ---- Rendezvous: the trainer's address, and a store there
#
# What listens: the store, only on the trainer's address that the workers are given (torch's own
# would on all of the host's); each rank's Gloo, on the rank's address on the route there; NCCL, on
# the interface that it chooses or is given. None authenticates peers: keep that network private.
# The store holds numbers and short texts, nothing pickled.

CONNECT_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    address: str  # the trainer's address, reachable from every worker
    port: int  # port of its `TCPStore`
    world_size: int  # the trainer and the workers of all replicas
    # Network interface to use, of this name on every host; `None` takes the one that reaches
    # `address`. NCCL keeps to the one that a process has used first.
    interface: str | None = None
    shared_bytes: int = 0  # of the trainer's memory that all read: a `SharedGroup`, if any
    is_hosted: bool = False  # whether the store was there before anybody was told of it

    @property
    def kind(self) -> type[BroadcastGroup]:
        return SharedGroup if self.shared_bytes else BroadcastGroup


def free_port(address: str) -> int:
    """Returns a port that is free now at one of this host's addresses."""
    with _listening(address, 0) as probe:
        return int(probe.getsockname()[1])


def _listening(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family)


def _require_interface(name: str | None) -> None:
    """Refuses an interface that this host lacks; NCCL reports that only the first time."""
    known = [known for _, known in socket.if_nameindex()]
    if name is not None and name not in known:
        raise UnsupportedArgumentError(
            f"interface must be one of {known} on {socket.gethostname()}, got {name!r}"
        )


def _store_at(at: Rendezvous, timeout_s: float, **own: Any) -> TCPStore:
    own |= {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    return TCPStore(at.address, at.port, at.world_size, **own)


def _await_listener(at: Rendezvous, deadline: float) -> None:
    while True:
        try:
            return socket.create_connection((at.address, at.port), left_s(deadline)).close()
        except OSError as error:
            is_gone = at.is_hosted and isinstance(error, ConnectionRefusedError)
            if is_gone or deadline - time.monotonic() < CONNECT_POLL_S:
                raise
        time.sleep(CONNECT_POLL_S)


TRAINER_RANK = 0
# A push id is its group's id, then this many bits that count pushes.
PUSH_ID_BITS = 24
# Seconds that ``abort`` waits for NCCL to leave its peers, or for copies that read or write shared
# memory, and for Gloo to end what is under way.
ABORT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 0.2
LEFT, GIVEN_UP, ONE_CHANNEL, GO = "left", "given-up", "one-channel", "go"
CLOSED = "the group is not connected, or was closed after a failure"


class BroadcastGroup:
    """One communicator: rank 0 is the trainer, which sends; the others receive.

    After :meth:`host` on the trainer and :meth:`join` on workers, all :meth:`connect` at about the
    same time and broadcast in the same order. After an error on any rank all have to close it.
    """

    def __init__(
        self, store: BoundedStore, rank: int, rendezvous: Rendezvous, device: torch.device
    ) -> None:
        self.rank, self.rendezvous, self.device = rank, rendezvous, device
        self._store: BoundedStore | None = store
        self._group: Any = None  # of torch's own kinds, whose type stubs lack most methods
        self.memory: torch.Tensor | None = None  # for buckets, where that is not each rank's own
        self._under_way: deque[dist.Work] = deque()  # with Gloo
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @classmethod
    def host(cls, at: Rendezvous, device: torch.device, *, timeout_s: float) -> Self:
        """Makes the store on the trainer, which listens at its address alone; port 0 is any."""
        _require_interface(at.interface)
        try:
            with _listening(at.address, at.port) as listener:
                at = replace(at, port=int(listener.getsockname()[1]))
                handle = listener.detach()  # torch closes it
                store = _store_at(at, timeout_s, is_master=True, master_listen_fd=handle)
        except (DistError, OSError, RuntimeError) as error:
            raise TransferError(f"cannot listen at {at.address}:{at.port}: {error}") from error
        return cls(BoundedStore(store, answer_timeout_s=None), TRAINER_RANK, at, device)

    @classmethod
    def join(cls, at: Rendezvous, rank: int, device: torch.device, *, timeout_s: float) -> Self:
        size, deadline = at.world_size, time.monotonic() + timeout_s
        if not 0 < rank < size:
            raise TransferError(f"rank must be in [1, {size}) in a group of {size}, got {rank}")
        _require_interface(at.interface)
        try:
            # The store itself tries twice, each time for as long as it is given.
            _await_listener(at, deadline)
            store = _store_at(at, left_s(deadline, 1.0))
        except (DistError, OSError, RuntimeError) as error:
            raise TransferError(
                f"cannot reach the trainer at {at.address}:{at.port} within {timeout_s:g} s: "
                f"{error}"
            ) from error
        return cls(BoundedStore(store), rank, at, device)

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    @property
    def store(self) -> BoundedStore:
        if self._store is None:
            raise TransferError(CLOSED)
        return self._store

    @property
    def was_left(self) -> bool:
        """On the trainer: whether a worker has left, perhaps for another trainer's group."""
        return self._store is None or self._store.check([LEFT])

    def absent(self) -> list[int]:
        """Returns the ranks that have not reached the rendezvous yet."""
        ranks = range(self.rendezvous.world_size)
        return [rank for rank in ranks if not self.store.check([f"rank/{rank}"])]

    def connect(self, *, timeout_s: float, watch: Watch = None) -> None:
        """Meets all other ranks; after a failure the trainer may ask who was :meth:`absent`."""
        try:
            self._meet(time.monotonic() + timeout_s, watch)
        except RuntimeError as error:  # of the store, the communicators, or ours
            self.abort() if self.rank == TRAINER_RANK else self.close()
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the group could not be formed: {error}") from error

    def _arrive(self, deadline: float, watch: Watch) -> None:
        if self.store.add(f"rank/{self.rank}", 1) > 1:
            raise TransferError(f"rank {self.rank} of the group is taken already")
        keys = [f"rank/{rank}" for rank in range(self.rendezvous.world_size)]
        self.await_keys(keys, deadline, "come to the rendezvous in time", watch)

    def _meet(self, deadline: float, watch: Watch) -> None:
        is_nccl = self._stream is not None
        if is_nccl and is_held_to_one_channel():
            self.store.set(ONE_CHANNEL, "1")
        self._arrive(deadline, watch)
        # One value is broadcast, so that later waits are for data only.
        word = torch.full((1,), float(self.rank == TRAINER_RANK), device=self.device)
        interface = self.rendezvous.interface
        with nccl_environment(interface) if is_nccl else contextlib.nullcontext():
            self._group = self._make_group(left_s(deadline, 1.0))
            with self.side_stream():
                work = self.broadcast(word, timeout_s=left_s(deadline, 1.0))
                self.wait(work, watch)
        self.synchronize(deadline=deadline, watch=watch)
        if word.item() != 1.0:
            raise TransferError(f"rank {self.rank} received nothing from the trainer")

    def broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> dist.Work:
        """Starts sending from the trainer to all others; on CUDA behind the current stream."""
        if self._group is None:
            raise TransferError(CLOSED)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = TRAINER_RANK, timedelta(seconds=timeout_s)
        work = self._group.broadcast([tensor], options)
        if self._stream is None:
            while self._under_way and self._under_way[0].is_completed():
                self._under_way.popleft()
            self._under_way.append(work)
        return work

    def broadcast_together(
        self, tensors: Sequence[torch.Tensor], *, timeout_s: float
    ) -> list[dist.Work]:
        """Starts sending several tensors as one transfer where the communicator can do that."""
        if self._group is None or self._stream is None:
            return [self.broadcast(tensor, timeout_s=timeout_s) for tensor in tensors]
        self._group._start_coalescing()
        try:
            for tensor in tensors:
                self.broadcast(tensor, timeout_s=timeout_s)
        finally:
            work = self._group._end_coalescing()
        return [work]

    def wait(self, work: dist.Work, watch: Watch = None) -> None:
        """Waits for one transfer; on CUDA the current stream does, not the host."""
        # Gloo never ends the wait for a message whose connection closes within it (torch 2.13).
        while self._stream is None and not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not yet, or a failure: see the last line
                work.wait(timedelta(seconds=WATCH_S))
            if work.is_completed():
                break
            self._look(watch)
        work.wait()

    def _look(self, watch: Watch) -> None:
        """Raises what has made waiting for a transfer pointless."""
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

    def synchronize(self, *, deadline: float, watch: Watch = None, poll_s: float = SPIN_S) -> None:
        """Waits until everything queued by this group is done; aborts the group otherwise."""
        if self._stream is None:
            return
        done = torch.cuda.Event()
        done.record(self._stream)
        with contextlib.ExitStack() as undo:
            undo.callback(self.abort)
            if wait_until(done.query, deadline, watch, poll_s):
                undo.pop_all()
                return
        raise TransferError("the transfer did not end in time")

    def abort(self) -> None:
        """Aborts the communicator, whatever it is doing: no tensor is written to any more."""
        group, self._group = self._group, None
        if group is None:
            return
        if self.rank == TRAINER_RANK and self._store is not None:
            self._store.set(GIVEN_UP, "1")
        if self._stream is not None:
            self._abort_nccl(group)
            return
        # Connections close as when a receive is late: Gloo has no ``abort`` (torch 2.13).
        for peer in range(self.rendezvous.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):  # it times out: no peer sends this
                    group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
        works, self._under_way = list(self._under_way), deque()

        def have_ended() -> bool:
            return all(one.is_completed() for one in works)

        if not wait_until(have_ended, time.monotonic() + END_TIMEOUT_S, poll_s=1e-3):
            # The group's destructor would wait for them here.
            in_thread("gloo-ends", lambda: (wait_until(have_ended, math.inf, None, WATCH_S), group))

    def _abort_nccl(self, group: Any) -> None:
        # torch waits for NCCL as long as the group's own timeout, then raises, and its threads stay
        # behind (ProcessGroupNCCL::abort, in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
        aborting = in_thread("nccl-abort", group.abort)
        if not wait([aborting], timeout=ABORT_TIMEOUT_S).done:
            logger.warning("NCCL has not left its peers after %g s", ABORT_TIMEOUT_S)
        elif error := aborting.exception():
            logger.warning("NCCL could not leave its peers: %s", error)

    def start(self, push_id: int, *, deadline: float, watch: Callable[[], None]) -> None:
        """On the trainer: starts a transfer when all are ready; until then nothing is to abort."""
        keys = [f"ready/{push_id}/{rank}" for rank in range(1, self.rendezvous.world_size)]
        try:
            self.await_keys(keys, deadline, f"get ready for transfer {push_id} in time", watch)
        except BaseException as error:
            self.store.set(f"start/{push_id}", f"left: {error}"[:500])
            raise
        self.store.set(f"start/{push_id}", GO)

    def await_start(self, push_id: int, *, deadline: float) -> None:
        """On a worker: reports that it is ready and waits for the trainer's :meth:`start`."""
        try:
            self.store.set(f"ready/{push_id}/{self.rank}", "1")
            word = self.store.await_value(f"start/{push_id}", left_s(deadline))
        except DistError as error:
            raise TransferError(f"the trainer did not begin the transfer: {error}") from error
        if word != GO:
            raise TransferError(f"the trainer called the transfer off: {word[:500]}")

    def raise_if_given_up(self) -> None:
        """On a worker: raises once the trainer has aborted; waits for the trainer poll this."""
        try:
            given_up = self.store.check([GIVEN_UP])
        except DistError as error:
            raise TransferError(f"the trainer is gone: {error}") from error
        if given_up:
            raise TransferError("the trainer gave the transfer up")

    def close(self) -> None:
        """Leaves the group; peers that still wait for this rank notice. Idempotent."""
        self.abort()
        # Workers wait in the trainer's store until the last reference to it is gone, and the
        # traceback of an error may hold one to this object.
        store, self._store = self._store, None
        if store is not None and self.rank != TRAINER_RANK:
            with contextlib.suppress(DistError):  # the trainer is gone
                store.set(LEFT, str(self.rank))

    def await_keys(self, keys: Sequence[str], deadline: float, what: str, watch: Watch) -> None:
        """Waits for keys that end in a rank, one each."""
        # A wait in the store that times out would leave its connection unusable.
        if not wait_until(lambda: self.store.check(keys), deadline, watch):
            missing = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
            raise TransferError(f"ranks {', '.join(missing)} did not {what}")

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
        peer, at = self.rendezvous.address, {"interface": self.rendezvous.interface or ""}
        if not at["interface"]:  # this host's address on the route there; nothing is sent
            family = socket.AF_INET6 if ":" in peer else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                at = {"hostname": probe.getsockname()[0]}
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(**at, lazy_init=False)]
        return ProcessGroupGloo(store, self.rank, world_size, options)


class SharedGroup(BroadcastGroup):
    """One of ranks on one host: all read the buckets where the trainer fills them.

    They count, in memory of the host, how many the trainer has filled, and how many each other rank
    has read.
    """

    def _meet(self, deadline: float, watch: Watch) -> None:
        at, cpu = self.rendezvous, torch.device("cpu")
        num_counts, others = at.world_size * torch.int64.itemsize, range(1, at.world_size)
        with contextlib.ExitStack() as opened:

            def kept(one: Any) -> Any:
                opened.callback(one.close)
                return one

            if self.rank == TRAINER_RANK:
                self._arrive(deadline, watch)
                counts = kept(new_memory(num_counts, cpu))
                memory = kept(new_memory(at.shared_bytes, self.device))
                for path in [self.store.get(f"door/{rank}").decode() for rank in others]:
                    given = [counts.export(), memory.export()]
                    hand_over(path, {}, given, left_s(deadline))
            else:
                with contextlib.closing(Handover()) as door:
                    self.store.set(f"door/{self.rank}", door.path)
                    self._arrive(deadline, watch)
                    _, (first, second) = door.take(deadline, self.raise_if_given_up)
                counts = kept(new_memory(num_counts, cpu, first))
                memory = kept(new_memory(at.shared_bytes, self.device, second))
            within = kept(HostRange(num_counts)), kept(new_range(at.shared_bytes, self.device))
            for one, shown in zip(within, (counts, memory), strict=True):
                one.show(shown)
            self._counts = within[0].data[:num_counts].view(torch.int64)
            self._number, self.memory = 0, within[1].data
            self._group = opened.pop_all()

    def broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> Any:
        """Counts a bucket that is filled; on others all that this one takes the place of."""
        del tensor
        if self._group is None:
            raise TransferError(CLOSED)
        self._number, deadline = self._number + 1, time.monotonic() + timeout_s
        if self.rank == TRAINER_RANK:
            super().synchronize(deadline=deadline)
            self._counts[TRAINER_RANK] = self._number
        elif self._number > NUM_BUFFERS:
            super().synchronize(deadline=deadline)
            self._counts[self.rank] = self._number - NUM_BUFFERS
        return self._number, deadline

    def wait(self, work: Any, watch: Watch = None) -> None:
        """Waits until a bucket is filled; on the trainer, until all have read it."""
        if self._group is None:
            raise TransferError(CLOSED)
        number, deadline = work
        others = self._counts[1:] if self.rank == TRAINER_RANK else self._counts[:1]
        if not wait_until(lambda: int(others.min()) >= number, deadline, lambda: self._look(watch)):
            raise TransferError("the transfer did not end in time")

    def synchronize(self, *, deadline: float, watch: Watch = None, poll_s: float = SPIN_S) -> None:
        super().synchronize(deadline=deadline, watch=watch, poll_s=poll_s)
        if self._group is not None and self.rank != TRAINER_RANK:
            self._counts[self.rank] = self._number

    def abort(self) -> None:
        """Gives the memory back: it is neither written nor read any more."""
        opened, self._group = self._group, None
        if opened is None:
            return
        if self.rank == TRAINER_RANK and self._store is not None:
            self._store.set(GIVEN_UP, "1")
        self.memory = None
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            if not wait_until(done.query, time.monotonic() + ABORT_TIMEOUT_S):
                logger.warning("copies have not ended after %g s: memory is kept", ABORT_TIMEOUT_S)
                return
        opened.close()

"""The transports ``broadcast`` and ``ipc``: from the trainer's device to all replicas at once."""

from __future__ import annotations

import functools
import secrets
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from torchrl_vllm_sync.checks import Deadline, check_integer, check_seconds
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    SyncError,
    TransferError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights.broadcast import buckets
from torchrl_vllm_sync.weights.broadcast.buckets import BoundBucket, BucketLayout
from torchrl_vllm_sync.weights.broadcast.group import PUSH_ID_BITS, BroadcastGroup, Rendezvous
from torchrl_vllm_sync.weights.module import to_json
from torchrl_vllm_sync.weights.source import (
    StableSource,
    WeightSource,
    home_device,
    require_one_host,
    sending_device,
    views_of,
)
from torchrl_vllm_sync.weights.transport import (
    GRACE_S,
    Members,
    Push,
    ask,
    failed,
    is_lost,
    raise_exceptions,
)

DEFAULT_JOIN_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 15.0
GROUP_ID_BITS = 32
DEFAULT_SHARED_BYTES = 256 * 2**20
Verify = Literal["first", "always", "never"]


class BroadcastTransport:
    """Broadcasts each version from this process to the workers of all replicas.

    NCCL when the engines are on GPUs, Gloo when they are on CPUs. The group is formed by
    :meth:`open`, once, and again after a failure or when replicas have come or gone. What a push
    consists of is announced with the first one; after that a push is one call to each replica and
    one stream of buckets.

    Args:
        bucket_bytes: Most bytes of one bucket. Three of them are kept here and in each worker.
        device: The trainer's device; by default the one that the weights are on.
        interface: Network interface for rendezvous and data, such as ``"eth0"``; by default the
            one that reaches the other side.
        staged: Engines receive into spare memory while they generate, and stop only to put
            it in place. They must have been launched with ``stage_weights=True``.
        verify: When engines check what their load plan did against vLLM's own reload, for which
            everything is sent twice: at the ``"first"`` push, ``"always"``, or ``"never"``. Staged
            pushes are not checked: the reload would end the generation they are there to keep.
        join_timeout_s: Seconds within which every rank must have reached the rendezvous.

    Raises:
        UnsupportedArgumentError: ``bucket_bytes``, ``join_timeout_s`` or ``verify`` is not valid.
    """

    name = "broadcast"
    is_collective = True
    last_version = 0  # it stores none
    _shared_bytes = 0

    def __init__(
        self,
        *,
        bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
        device: torch.device | str | None = None,
        interface: str | None = None,
        staged: bool = False,
        verify: Verify = "first",
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    ) -> None:
        check_integer("bucket_bytes", bucket_bytes, 1)
        check_seconds("join_timeout_s", join_timeout_s)
        if verify not in ("first", "always", "never"):
            raise UnsupportedArgumentError(
                f"verify must be 'first', 'always' or 'never', got {verify!r}"
            )
        self._bucket_bytes, self._interface, self._staged = bucket_bytes, interface, staged
        self._given_device = None if device is None else torch.device(device)
        self._verify, self._join_timeout_s = verify, join_timeout_s
        # A copy in another process forms a group of its own.
        options = {"bucket_bytes": bucket_bytes, "device": device, "interface": interface}
        options |= {"staged": staged, "verify": verify, "join_timeout_s": join_timeout_s}
        self._copy = functools.partial(type(self), **options)
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._group: BroadcastGroup | None = None
        # Id of each replica in the group to its incarnation.
        self._joined: dict[str, str] = {}
        self._push_id = 0
        self._announced: str | None = None
        self._layout: BucketLayout | None = None
        self._buffers: list[torch.Tensor] = []
        self._views: Any = None
        self._owner: weakref.ref[Any] | None = None  # of these, beyond which they are not kept
        self._bound: list[BoundBucket] | None = None
        self._whole: list[torch.Tensor] | None = None
        self._checked: set[tuple[str, str, str]] = set()
        self._has_plans = self._takes_direct = False

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the buckets take on the trainer's device."""
        return sum(buffer.numel() for buffer in self._buffers)

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Forms the group with the workers of every replica that is alive; nothing if it stands.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            TransferError: No replica is there to join, or none came in time.
            UnsupportedArgumentError: The trainer's device and the engines' do not go together, or
                this host lacks the interface.
        """
        if (group := self._group) is not None:
            home = None if self._given_device else home_device(source, group.device.type)
            is_here = home in (None, group.device) and self._joined == members.incarnations
            if is_here and group.is_connected and not group.was_left:
                return
            self._leave()
        described = members.describe()
        if self._shared_bytes:
            require_one_host(self.name, described)
        device = sending_device(self.name, described, source, self._given_device)
        while not self._form(members, described, device):
            pass
        self._announced, self._views, self._bound, self._buffers = None, None, None, []

    def _form(
        self, members: Members, described: Mapping[str, EngineDescription], device: torch.device
    ) -> bool:
        """Forms a group; False if members that kept it from being formed were dropped."""
        self._joined = dict(members.incarnations)
        ranks: dict[str, range] = {}
        world_size = 1
        for name in self._joined:
            first, world_size = world_size, world_size + described[name].num_workers
            ranks[name] = range(first, world_size)
        address, port = members.client.rendezvous
        group_id, limit_s = secrets.randbits(GROUP_ID_BITS), self._join_timeout_s
        wanted = Rendezvous(
            address, port or 0, world_size, self._interface, shared_bytes=self._shared_bytes
        )
        group = wanted.kind.host(wanted, device, timeout_s=limit_s)
        shared: dict[str, Any] = {"world_size": world_size, "interface": self._interface}
        shared |= {"master_address": address, "master_port": group.rendezvous.port}
        shared |= {"group_id": group_id, "shared_bytes": self._shared_bytes}
        infos = {name: ({**shared, "rank_offset": own[0]},) for name, own in ranks.items()}
        calls = members.client.start_calls("join_broadcast", infos, timeout_s=limit_s)
        try:
            group.connect(timeout_s=limit_s, watch=lambda: raise_exceptions(calls.failures()))
            raise_exceptions(calls.answers(limit_s + GRACE_S))
        except TransferError as error:
            absent = set(group.absent())
            late = {name for name, own in ranks.items() if absent.intersection(own)}
            # Those that reported a failure prevented it; if there are none, those that were silent.
            failing = set(calls.failures()) or late
            group.close()  # which ends the others' waiting
            answers = calls.answers(GRACE_S)
            members.note_silent(answers)
            failing = failing or {n for n, one in answers.items() if is_lost(one)}
            if not failing or failing == self._joined.keys():
                raise
            reasons = calls.failures()
            members.drop({name: reasons.get(name, error) for name in failing})
            return False
        except BaseException:
            group.close()
            raise
        self._group, self._push_id = group, group_id << PUSH_ID_BITS
        return True

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _give_up(self, members: Members, answers: Mapping[str, Any]) -> None:
        """Abandons the group on both sides; the next push forms another."""
        self._leave()
        gone = TimeoutError, ReplicaUnavailableError
        there = {name: () for name, one in answers.items() if not isinstance(one, gone)}
        members.client.start_calls("leave_broadcast", there).answers(LEAVE_TIMEOUT_S)

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Broadcasts to every replica, those that hold the version already too.

        When one fails meanwhile, the communicator is given up on both sides. Every wait has a
        limit: ``join_timeout_s`` for a group to be formed, and for each attempt ``timeout_s`` to
        announce, get ready, transfer and acknowledge; 10 s more for final answers.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: The transport is not open.
            WeightMismatchError: A tensor is on another device, or too wide for a bucket. Nothing
                was sent.
        """
        push.confirm()
        begin, times, group = time.perf_counter(), push.times, self._group
        deadline = Deadline(push.timeout_s)
        if group is None:
            raise TransferError("no group was formed: open the transport first")
        layout = self._laid_out(push.source, group.device)
        answers: dict[str, Any] = {}
        if self._announced != layout.digest:
            answers = self._announce(members, layout, deadline)
        times.note("prepare_s", begin)
        if unable := failed(answers):
            self._give_up(members, answers)
            why = SyncError(f"nothing was sent: replica {', '.join(unable)} could not prepare")
            return {name: unable.get(name, why) for name in answers}
        # Engines of the group that have not loaded this yet: a second pass checks their load plans.
        unchecked = {(layout.digest, *one) for one in self._joined.items()} - self._checked
        wanted = self._verify == "always" or (self._verify == "first" and unchecked)
        num_passes = 2 if wanted and self._has_plans and not self._staged else 1
        whole = self._whole if self._takes_direct else None
        num_packed = num_passes if whole is None else num_passes - 1

        def transfer() -> None:
            begin = time.perf_counter()
            group.start(self._push_id, **limits)
            ready = time.perf_counter()
            times.note("ready_s", begin, ready)
            if whole is not None:
                buckets.broadcast_tensors(group, whole, **limits)
            for _ in range(num_packed):
                packing = self._packing(push.source, layout, group.device)
                buckets.send_buckets(group, layout, self._buffers, packing, **limits)
            times.note("queue_s", ready)
            group.synchronize(**limits)
            times.note("transfer_s", ready)

        if num_packed:
            self._packing(push.source, layout, group.device)  # plans copies; engines still run
        self._push_id += 1
        called = time.perf_counter()
        calls = members.start(
            "receive_broadcast",
            self._push_id,
            layout.digest,
            run_id=self.run_id,
            direct=whole is not None,
            num_passes=num_passes,
            staged=self._staged,
            timeout_s=max(deadline.left_s, 1.0),
            **push.terms,
        )
        limits: dict[str, Any]
        limits = {"deadline": deadline.at, "watch": lambda: raise_exceptions(calls.failures())}
        failure = _failure(transfer, group)
        sent, cause = time.perf_counter(), None if calls.failures() else failure
        if failure is not None:
            group.abort()  # ends the waiting of workers for data
        answers = calls.answers(GRACE_S + (0.0 if failure else deadline.left_s))
        times.note("send_s", called, sent)
        times.note("acknowledge_s", sent)
        if failure is not None and not failed(answers):
            answers = dict.fromkeys(answers, failure)
        if failed(answers):
            self._give_up(members, answers)
        else:
            self._checked |= unchecked
            paths = {one["path"] for one in answers.values()}
            # A check may have ended a worker's trust in its plan.
            self._takes_direct = self._takes_direct and paths == {"plan"}
            self._has_plans = any("plan" in path for path in paths)
        if whole is not None:
            self._bound, self._buffers = None, []  # until the next check
        return {name: _with_cause(one, cause) for name, one in answers.items()}

    def _announce(
        self, members: Members, layout: BucketLayout, deadline: Deadline
    ) -> dict[str, Any]:
        """Sends the replicas the metadata of this push and all later ones."""
        told = to_json(layout.metadata), self._bucket_bytes
        calls = dict.fromkeys(members.incarnations, told)
        answers = ask(members.client, "prepare_broadcast", calls, deadline.left_s)
        if not failed(answers):
            self._announced = layout.digest
            self._has_plans = any("plan" in one["path"] for one in answers.values())
            self._takes_direct = all(one["direct"] for one in answers.values())
        return answers

    def _laid_out(self, source: WeightSource, device: torch.device) -> BucketLayout:
        """Returns the buckets of what is sent; notes whether it can be sent from where it is."""
        metadata, layout = source.metadata(), self._layout
        if layout is None or metadata != layout.metadata:
            layout = self._layout = BucketLayout(metadata, self._bucket_bytes)
            self._bound, self._buffers = None, []
        views = views_of(source)
        if views is None or views is not self._views:
            for name, tensor in views or ():
                buckets.check_device(name, tensor, device)
            self._views, self._bound, self._owner = views, None, None
            if isinstance(source, StableSource):
                self._owner = weakref.ref(source.owner, self._drop_views)
            self._whole = buckets.sendable_tensors(metadata, views)
            if self._whole and self._whole[0].device != device:
                self._whole = None  # a group on CPUs, and tensors on a GPU
        return layout

    def _drop_views(self, owner: weakref.ref[Any]) -> None:
        """Frees tensors that were made for one push, such as a dict of gathered ones."""
        if owner is self._owner:
            self._views = self._bound = self._whole = None

    def _packing(
        self, source: WeightSource, layout: BucketLayout, device: torch.device
    ) -> Iterator[object]:
        """Returns what fills a bucket a step; planned once for tensors that stay in place."""
        if not self._buffers:
            memory = None if self._group is None else self._group.memory
            self._buffers, self._bound = buckets.make_buffers(layout, device, memory), None
        if self._views is None:
            return buckets.streamed(layout, self._buffers, source, device)
        self._bound = self._bound or buckets.bound_views(layout, self._buffers, self._views)
        return (one.pack() for one in self._bound)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

    def close(self) -> None:
        """Leaves the group, which the workers notice, and frees the buckets. Idempotent."""
        self._leave()
        self._forget()


class IPCTransport(BroadcastTransport):
    """Fills memory that the engines of this host share with this process, which they read.

    For engines on the trainer's GPU, where NCCL knows no way; others may be on other GPUs that
    reach it, or all on CPUs. What is sent, and how it gets into an engine's model, is as with a
    :class:`BroadcastTransport`.

    Args:
        buffer_bytes: Bytes to share on the trainer's device, in three parts that are filled in
            turn. Each must hold one row of any tensor.

    Raises:
        UnsupportedArgumentError: ``buffer_bytes`` is below 3.
    """

    name = "ipc"

    def __init__(self, *, buffer_bytes: int = DEFAULT_SHARED_BYTES) -> None:
        check_integer("buffer_bytes", buffer_bytes, buckets.NUM_BUFFERS)
        super().__init__(bucket_bytes=buffer_bytes // buckets.NUM_BUFFERS)
        self._shared_bytes = buckets.room_for(buffer_bytes // buckets.NUM_BUFFERS)
        self._copy = functools.partial(type(self), buffer_bytes=buffer_bytes)


def _failure(transfer: Callable[[], None], group: BroadcastGroup) -> SyncError | None:
    try:
        transfer()
    except SyncError as error:
        return error
    except Exception as error:  # noqa: BLE001  what communicators raise, and sources of any kind
        return TransferError(f"the transfer broke off: {type(error).__name__}: {error}")
    except BaseException:  # an interrupt from the keyboard
        group.abort()
        raise
    return None


def _with_cause(answer: Any, cause: SyncError | None) -> Any:
    """Prefixes a replica's error with the trainer's, if that caused it."""
    is_own = isinstance(answer, Exception) and not is_lost(answer) and str(cause) not in str(answer)
    return TransferError(f"{cause}; {answer}") if cause is not None and is_own else answer

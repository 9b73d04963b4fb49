"""The ``broadcast`` transport: from the trainer's device into every replica at once."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchrl_vllm_sync.errors import SyncError, TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.broadcast.buckets import (
    DEFAULT_BUCKET_BYTES,
    BucketLayout,
    StreamingPacker,
    ViewPacker,
    broadcast_tensors,
    check_device,
    make_buffers,
    send_buckets,
    sendable_tensors,
)
from torchrl_vllm_sync.weights.broadcast.group import PUSH_ID_BITS, StartSignal
from torchrl_vllm_sync.weights.broadcast.members import GRACE_S, BroadcastMembers
from torchrl_vllm_sync.weights.metadata import metadata_digest, to_json
from torchrl_vllm_sync.weights.source import StableSource
from torchrl_vllm_sync.weights.transport import (
    MOST_ATTEMPTS,
    PhaseTimes,
    ReplicaOutcome,
    SendOutcome,
    is_lost,
    lost_replicas,
    raise_exceptions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrl_vllm_sync.weights.broadcast.buckets import Packer
    from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import PauseMode, ReplicaClient


DEFAULT_JOIN_TIMEOUT_S = 120.0
# An announcement gets this many times longer than the slowest one took, beside the time to send.
ANNOUNCE_MULTIPLE = 3.0


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
        staged: Engines receive into spare memory while they generate, and pause only to copy it
            into place. They must have been launched with ``stage_weights=True``.
        verify: When engines check what their load plan did against vLLM's own reload, for which
            everything is sent twice: at the ``"first"`` push, ``"always"``, or ``"never"``. Staged
            pushes are not checked: the reload would end the generation they are there to keep.
        join_timeout_s: Seconds within which everybody must have come to the rendezvous.

    Raises:
        UnsupportedArgumentError: ``bucket_bytes``, ``join_timeout_s`` or ``verify`` is not valid.
    """

    name = "broadcast"

    def __init__(
        self,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str | None = None,
        interface: str | None = None,
        staged: bool = False,
        verify: Verify = "first",
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    ) -> None:
        if bucket_bytes < 1:
            raise UnsupportedArgumentError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        if not 0 < join_timeout_s < float("inf"):
            raise UnsupportedArgumentError(
                f"join_timeout_s must be a finite number greater than 0, got {join_timeout_s}"
            )
        if verify not in ("first", "always", "never"):
            raise UnsupportedArgumentError(
                f"verify must be 'first', 'always' or 'never', got {verify!r}"
            )
        self._bucket_bytes, self._interface, self._staged = bucket_bytes, interface, staged
        self._given_device = None if device is None else torch.device(device)
        self._verify, self._join_timeout_s = verify, join_timeout_s
        self._forget()

    def _forget(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._last_version = 0
        self._members = BroadcastMembers(self._given_device, self._interface, self._join_timeout_s)
        self._push_id = 0
        self._announced: str | None = None
        self._metadata: list[ParamMeta] = []
        self._layout: BucketLayout | None = None
        self._digest = ""
        self._buffers: list[torch.Tensor] = []
        self._views: Any = None
        self._packer: Packer | None = None
        self._whole: list[torch.Tensor] | None = None
        self._checked: set[tuple[str, str, str]] = set()
        self._announce_s = self._broke_off_at = 0.0
        self._has_plans = self._takes_direct = False

    @property
    def last_version(self) -> int:
        """Newest version sent by this transport; 0 before the first."""
        return self._last_version

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the buckets take on the trainer's device."""
        return sum(buffer.numel() for buffer in self._buffers)

    def open(self, client: ReplicaClient, source: WeightSource | None = None) -> None:
        """Forms the group with the workers of every replica that is alive; nothing if it stands.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            TransferError: Nobody is there to join, or nobody came in time.
            UnsupportedArgumentError: The trainer's device and the engines' do not go together, or
                this host has not the interface.
        """
        self._form(client, {}, source)

    def _form(
        self, client: ReplicaClient, without: dict[str, str], source: WeightSource | None
    ) -> None:
        if self._members.form(client, without, source):
            self._announced = None
            self._push_id = self._members.group_id << PUSH_ID_BITS
            self._views, self._packer, self._buffers = None, None, []

    def send(
        self,
        client: ReplicaClient,
        source: WeightSource,
        version: int,
        *,
        timeout_s: float,
        clear_cache: bool,
        mode: PauseMode = "keep",
    ) -> SendOutcome:
        """Broadcasts ``source`` as ``version``.

        Every replica receives it, those that hold the version already too. When replicas die or
        fall silent meanwhile, the communicator is given up on both sides, and everything is sent
        again to the others, in a group without them: twice more at most.

        Every wait has a limit: ``join_timeout_s`` for a group to be formed, and for each attempt
        ``timeout_s`` to announce, get ready, transfer and acknowledge; 10 s more for last words.
        After a second attempt the phases also tell of the first: ``lost_s`` from the beginning to
        the second one's, of which ``last_words_s`` from when it broke off, and ``again_s`` of the
        last attempt.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: No group could be formed. Nothing was sent.
            WeightMismatchError: A tensor is on another device, or too wide for a bucket. Nothing
                was sent.
        """
        options = {"version": version, "mode": mode, "clear_cache": clear_cache}
        times = PhaseTimes()
        answers: dict[str, Any] = {}
        lost: dict[str, str] = {}
        start = time.perf_counter()
        for attempt in range(MOST_ATTEMPTS):
            begin = time.perf_counter()
            try:
                # A push looked where the weights are when it opened this transport.
                self._form(client, lost, None if self._members.is_formed else source)
            except TransferError:
                if not answers:
                    raise
                break  # nobody is left: what was answered the first time stands
            if attempt:
                times.seconds["attempts"] = attempt + 1
                times.note("lost_s", start, begin)
                times.note("last_words_s", self._broke_off_at, begin)
            times.note("join_s", begin)
            now = self._send_to_members(
                client, source, time.monotonic() + timeout_s, options, times
            )
            answers |= now
            if attempt:
                times.note("again_s", begin)
            gone = lost_replicas(now)
            if not gone:
                break
            lost |= {name: str(now[name]) or type(now[name]).__name__ for name in gone}
        missing = {n: why for n, why in self._members.missing.items() if n not in answers}
        outcomes = [ReplicaOutcome.of(name, one) for name, one in answers.items()]
        return SendOutcome(
            num_bytes=sum(meta.num_bytes for meta in self._metadata),
            phases=times.seconds,
            phase_starts=times.starts,
            replicas=outcomes
            + ReplicaOutcome.missing(missing, client.standings(), silent=self._members.silent),
            run_id=self._run_id,
        )

    def _send_to_members(
        self,
        client: ReplicaClient,
        source: WeightSource,
        deadline: float,
        options: dict[str, Any],
        times: PhaseTimes,
    ) -> dict[str, Any]:
        """Announces ``source`` if need be and sends it; returns what each member answered."""
        begin = self._broke_off_at = time.perf_counter()
        group = self._members.group
        layout = self._layout_of(source)
        self._look_at(source, layout, group.device)
        answers: dict[str, Any] = {}
        if self._announced != self._digest:
            deadline += ANNOUNCE_MULTIPLE * self._announce_s
            answers = self._announce(client, layout, deadline)
            self._announce_s = max(self._announce_s, time.perf_counter() - begin)
        times.note("prepare_s", begin)
        if failed := [n for n, one in answers.items() if isinstance(one, BaseException)]:
            self._members.leave(client, answers)
            why = SyncError(f"nothing was sent: replica {', '.join(failed)} could not prepare")
            return {n: one if n in failed else why for n, one in answers.items()}
        self._note_prepared(answers)
        num_passes = self._num_passes()
        direct = self._takes_direct and self._whole is not None
        packer = None
        if num_passes > 1 or not direct:
            packer = self._packer_of(source, layout, group.device)
        self._push_id += 1
        calls = client.start_calls(
            "receive_broadcast",
            dict.fromkeys(self._members.ranks, (self._push_id, self._digest)),
            run_id=self._run_id,
            direct=direct,
            num_passes=num_passes,
            staged=self._staged,
            timeout_s=max(deadline - time.monotonic(), 1.0),
            **options,
        )
        called = time.perf_counter()
        whole = self._whole if direct else None

        def watch() -> None:
            raise_exceptions(calls.failures())

        streams = self._streams(group, layout, source, whole, packer, num_passes, deadline, watch)
        failure = self._transfer(group, streams, watch, deadline, times)
        sent = time.perf_counter()
        began_here = failure is not None and not calls.failures()
        if failure is not None:
            group.abort()  # whoever still waits for data need not wait any longer
        answers = calls.answers(
            GRACE_S if failure else max(deadline - time.monotonic(), 0.0) + GRACE_S
        )
        failed = any(isinstance(one, BaseException) for one in answers.values())
        self._broke_off_at = sent if failure is not None else time.perf_counter()
        times.note("send_s", called, sent)
        times.note("acknowledge_s", sent)
        if failure is not None and not failed:
            answers = dict.fromkeys(answers, failure)
        if failure is not None or failed:
            self._members.leave(client, answers)
        else:
            self._checked |= self._to_check()
            self._last_version = max(self._last_version, options["version"])
            paths = [one["path"] for one in answers.values()]
            # A check may have ended a worker's trust in its plan.
            self._takes_direct = self._takes_direct and set(paths) == {"plan"}
            self._has_plans = any("plan" in path for path in paths)
        if direct:
            self._packer, self._buffers = None, []  # until the next check
        if failure is not None and began_here:
            answers = {name: _with_cause(one, failure) for name, one in answers.items()}
        return answers

    def _streams(
        self,
        group: BroadcastGroup,
        layout: BucketLayout,
        source: WeightSource,
        whole: list[torch.Tensor] | None,
        packer: Packer | None,
        num_passes: int,
        deadline: float,
        watch: Callable[[], None],
    ) -> Iterator[None]:
        """Queues the passes of one push, one each time it is asked."""
        for number in range(num_passes):
            if number == 0 and whole is not None:
                broadcast_tensors(group, whole, deadline=deadline, watch=watch)
            elif packer is not None:
                send_buckets(group, layout, self._buffers, packer, deadline=deadline, watch=watch)
                if isinstance(packer, StreamingPacker):
                    packer.finish()
                    packer = StreamingPacker(layout, source, group.device)
            yield

    def _transfer(
        self,
        group: BroadcastGroup,
        streams: Iterator[None],
        watch: Callable[[], None],
        deadline: float,
        times: PhaseTimes,
    ) -> SyncError | None:
        """Sends everything once all are ready; returns what went wrong on this side."""
        begin = time.perf_counter()
        try:
            StartSignal(group, self._push_id).give(deadline=deadline, watch=watch)
            ready = time.perf_counter()
            times.note("ready_s", begin, ready)
            for _ in streams:
                pass
            queued = time.perf_counter()
            group.synchronize(deadline=deadline, watch=watch)
        except SyncError as error:
            return error
        except Exception as error:  # noqa: BLE001  what communicators raise, and sources of any kind
            return TransferError(f"the transfer broke off: {type(error).__name__}: {error}")
        except BaseException:  # an interrupt from the keyboard
            group.abort()
            raise
        times.note("queue_s", ready, queued)
        times.note("transfer_s", ready)
        return None

    def _announce(
        self, client: ReplicaClient, layout: BucketLayout, deadline: float
    ) -> dict[str, Any]:
        """Tells the replicas what all pushes consist of, from now on."""
        timeout_s = max(deadline - time.monotonic(), 1.0)
        announcement = to_json(layout.metadata), self._bucket_bytes
        answers = client.start_calls(
            "prepare_broadcast",
            dict.fromkeys(self._members.ranks, announcement),
            timeout_s=timeout_s,
        ).answers(timeout_s + GRACE_S)
        if not any(isinstance(one, BaseException) for one in answers.values()):
            self._announced = self._digest
        return answers

    def _to_check(self) -> set[tuple[str, str, str]]:
        """The engines of the group, each with what it is sent."""
        return {(self._digest, *one) for one in self._members.crew.items()}

    def _note_prepared(self, answers: dict[str, Any]) -> None:
        """Keeps what the replicas answered to an announcement, if there was one."""
        if answers:
            self._has_plans = any("plan" in one["path"] for one in answers.values())
            self._takes_direct = all(one["direct"] for one in answers.values())

    def _num_passes(self) -> int:
        """How often to send everything: the second time is a check of load plans."""
        unchecked = not self._to_check() <= self._checked
        wanted = self._verify == "always" or (self._verify == "first" and unchecked)
        return 2 if wanted and self._has_plans and not self._staged else 1

    def _layout_of(self, source: WeightSource) -> BucketLayout:
        metadata = source.metadata()
        if self._layout is None or (metadata is not self._metadata and metadata != self._metadata):
            self._layout = BucketLayout(metadata, self._bucket_bytes)
            self._digest = metadata_digest(metadata)
            self._packer, self._buffers = None, []
        self._metadata = metadata
        return self._layout

    def _look_at(self, source: WeightSource, layout: BucketLayout, device: torch.device) -> None:
        """Finds out whether the tensors stay in place, and can be sent from there."""
        views = source.views() if isinstance(source, StableSource) else None
        if views is not None and views is self._views:
            return
        for name, tensor in views or ():
            check_device(name, tensor, device)
        self._views, self._packer = views, None
        self._whole = sendable_tensors(layout.metadata, views)
        if self._whole and self._whole[0].device != device:
            self._whole = None  # a group on CPUs, and tensors on a GPU

    def _packer_of(
        self, source: WeightSource, layout: BucketLayout, device: torch.device
    ) -> Packer:
        """Returns what fills the buckets; kept as long as the source's tensors stay in place."""
        if not self._buffers:
            self._buffers, self._packer = make_buffers(layout, device), None
        if self._views is None:
            return StreamingPacker(layout, source, device)
        if self._packer is None:
            self._packer = ViewPacker(layout, self._buffers, self._views)
        return self._packer

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process forms a group of its own.
        settings = (
            "_bucket_bytes",
            "_interface",
            "_staged",
            "_given_device",
            "_verify",
            "_join_timeout_s",
        )
        return {name: self.__dict__[name] for name in settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def close(self) -> None:
        """Leaves the group, which the workers notice, and frees the buckets. Idempotent."""
        self._members.close()
        self._forget()


def _with_cause(answer: Any, cause: SyncError) -> Any:
    """Puts what went wrong at the trainer before what a replica says of it."""
    if not isinstance(answer, Exception) or is_lost(answer) or str(cause) in str(answer):
        return answer
    return TransferError(f"{cause}; {answer}")

"""Which transport, by where trainer and engines are; and ``ipc``, for those that share a GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from packaging.version import Version

from torchrl_vllm_sync.checks import Deadline, check_integer
from torchrl_vllm_sync.errors import (
    ServiceClosedError,
    SyncError,
    TransferError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import NOT_STAGED, EngineDescription
from torchrl_vllm_sync.weights.broadcast.buckets import check_device
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
from torchrl_vllm_sync.weights.module import ParamMeta, checked, dtype_name
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.source import (
    WeightSource,
    current_device,
    device_uuid,
    home_device,
    sending_device,
    tensors_of,
    views_of,
)
from torchrl_vllm_sync.weights.transport import GRACE_S, ask, failed, raise_exceptions, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchrl_vllm_sync.weights.transport import Members, Push, ReplicaClient, WeightTransport

logger = logging.getLogger(__name__)

TransportName = Literal["auto", "broadcast", "ipc", "memmap", "p2p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one side keeps its weights."""

    node_id: str  # see :func:`this_node`; empty if unknown, which is like no other
    device_type: str  # ``"cpu"`` or ``"cuda"``; anything else is a mixture
    device_uuids: tuple[str, ...] = ()  # see :func:`device_uuid`; empty on a CPU, or if unknown
    why_not_written: str = NOT_STAGED  # of an engine, see ``EngineDescription``


def choose_transport(
    trainer: Place, engines: Mapping[str, Place | EngineDescription]
) -> TransportName:
    """Names the transport that moves weights from ``trainer`` to all ``engines``.

    In this order: ``ipc`` if each engine is on the trainer's GPU and on no other; ``p2p`` if all
    are on the trainer's node, on CPUs as it is or on GPUs that its own reaches, and have reserved
    memory that can be written to; ``broadcast`` if all are on GPUs of their own; ``memmap`` if all
    are on the trainer's node, whose shared memory they see; ``broadcast`` over Gloo if all are on
    CPUs. Whether GPUs reach each other is only asked of those that this process sees.

    Args:
        trainer: Where the trainer's weights are.
        engines: Replica id to where its weights are.

    Returns:
        ``"ipc"``, ``"p2p"``, ``"broadcast"`` or ``"memmap"``.

    Raises:
        UnsupportedArgumentError: None does for all; ``MemmapTransport(directory)`` may.
    """
    places, own = list(engines.values()), set(trainer.device_uuids)
    kinds = {one.device_type for one in [trainer, *places]}
    on_gpus = places and kinds == {"cuda"}
    if on_gpus and own and all(set(one.device_uuids) == own for one in places):
        return "ipc"
    if places and not why_not_p2p(trainer, engines):
        return "p2p"
    if on_gpus and not any(own & set(one.device_uuids) for one in places):
        return "broadcast"
    if all(one.node_id and one.node_id == trainer.node_id for one in places):
        return "memmap"
    if kinds == {"cpu"}:
        return "broadcast"
    where = "; ".join(f"replica {name} {_named(place)}" for name, place in engines.items())
    raise UnsupportedArgumentError(
        "no transport reaches every replica on its own: the trainer's weights are "
        f"{_named(trainer)}, {where}: name one, such as MemmapTransport(directory) in a shared "
        "file system"
    )


def why_not_p2p(trainer: Place, engines: Mapping[str, Place | EngineDescription]) -> str:
    """Why a trainer cannot write to the memory of all engines; empty if nothing is known."""
    own = set(trainer.device_uuids)
    for name, one in engines.items():
        if not one.node_id or one.node_id != trainer.node_id:
            reason = "it is on another host than the trainer"
        elif one.device_type != trainer.device_type:
            reason = f"it is on {one.device_type}, the trainer on {trainer.device_type}"
        elif own & set(one.device_uuids):
            reason = "it shares the trainer's GPU"
        elif one.device_type == "cuda" and (apart := _unreachable(own, one.device_uuids)):
            reason = f"the trainer's GPU does not reach its {apart}"
        else:
            reason = one.why_not_written
        if reason:
            return f"replica {name}: {reason}"
    return ""


def _unreachable(own: set[str], others: Iterable[str]) -> str:
    """The first of other GPUs that one of ours cannot write to; those that are hidden may be."""
    gpus = range(torch.cuda.device_count())
    visible = {device_uuid(torch.device("cuda", index)): index for index in gpus}
    for other in visible.keys() & others:
        for mine in visible.keys() & own:
            if not torch.cuda.can_device_access_peer(visible[mine], visible[other]):
                return other
    return ""


def _named(place: Place | EngineDescription) -> str:
    return f"on {place.device_type} of node {place.node_id or 'unknown'}"


def place_of(source: WeightSource) -> Place:
    """Returns where a source's tensors are, without reading them; else the current GPU, if used."""
    own = "cuda" if torch.cuda.is_initialized() else "cpu"
    devices = {one.device for _, one in tensors_of(source)} or {current_device(own)}
    kinds = " and ".join({device.type for device in devices})
    if len(devices) > 1:
        return Place(node_id=this_node(), device_type=f"several devices ({kinds})")
    uuids = tuple(uuid for uuid in map(device_uuid, devices) if uuid)
    return Place(node_id=this_node(), device_type=kinds, device_uuids=uuids)


# ---- On one GPU

SHORT_TIMEOUT_S = 30.0
DEFAULT_BUFFER_BYTES = 256 * 2**20
# From this release on packing is agreed upon once; before, at each update.
_FIRST_WITH_PACKING_AT_INIT = Version("0.28")


class IPCTransport:
    """Shows the engines one buffer of the trainer's GPU memory, filled again and again.

    Each filling is one call to the replicas, which have copied it out when they answer, through
    vLLM's layerwise reload. Workers use vLLM's ``ipc`` engine while the transport is open, and need
    no ``VLLM_ALLOW_INSECURE_SERIALIZATION``: handles travel pickled to them alone.

    Args:
        buffer_bytes: Size of the buffer; a single tensor that is larger makes it so.

    Raises:
        UnsupportedArgumentError: ``buffer_bytes`` is below 1.
    """

    name = "ipc"
    is_collective = True
    last_version = 0  # it stores none

    def __init__(self, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        check_integer("buffer_bytes", buffer_bytes, 1)
        self._buffer_bytes = buffer_bytes
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._client: ReplicaClient | None = None
        self._device = torch.device("cpu")
        self._joined: dict[str, str] = {}
        self._fields: dict[str, dict[str, Any]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the buffer takes on the GPU; 0 before the first push."""
        return self._buffer.numel()

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Has the workers use vLLM's ``ipc`` engine; does nothing when all that count do.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            UnsupportedArgumentError: An engine is not on the trainer's GPU alone.
        """
        home = home_device(source, "cuda")
        is_open = self._client is not None and members.incarnations == self._joined
        if is_open and home in (None, self._device):
            return
        alive = members.describe()
        device = sending_device(self.name, alive, source, gpu=True)
        own = device_uuid(device)
        for name, one in alive.items():
            if set(one.device_uuids) != {own}:
                raise UnsupportedArgumentError(
                    "the ipc transport needs trainer and engines on one CUDA device, and replica "
                    f"{name} is on {list(one.device_uuids)}, the trainer on {own}: use the "
                    "broadcast transport"
                )
        self._device = device
        inits: dict[str, tuple[dict[str, Any]]] = {}
        for name, one in alive.items():
            is_old = Version(Version(one.vllm_version).base_version) < _FIRST_WITH_PACKING_AT_INIT
            inits[name] = ({} if is_old else {"packed": True},)
            self._fields[name] = {"packed": True} if is_old else {}
        uses = members.start("use_transfer_engine", "ipc")
        raise_exceptions(uses.answers(SHORT_TIMEOUT_S))
        calls = members.client.start_calls("init_weight_transfer_engine", inits)
        raise_exceptions(calls.answers(SHORT_TIMEOUT_S))
        self._client, self._joined = members.client, dict(members.incarnations)

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Sends one filling of the buffer after the other, to those that hold the version too.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            WeightMismatchError: A tensor is not on the transport's device. Nothing was sent.
        """
        deadline, num_chunks, is_whole = Deadline(push.timeout_s), 0, False
        with push.times.measure("begin_s"):
            for name, tensor in views_of(push.source) or ():
                check_device(name, tensor, self._device)
            self._make_buffer(push.source.metadata())
            begun = {"run_id": self.run_id, "timeout_s": push.timeout_s, **push.terms}
            calls = members.start("start_weight_update", **begun)
            answers = calls.answers(deadline.left_s + GRACE_S)
        with push.times.measure("send_s"):
            try:
                for chunk in self._chunks(push.source) if not failed(answers) else ():
                    num_chunks += 1
                    answers = self._show(members, chunk, deadline)
                    if failed(answers):
                        break
                is_whole = not failed(answers)
            finally:
                if not is_whole:
                    given_up = members.start("give_up_update", self.run_id)
                    given_up.answers(SHORT_TIMEOUT_S + GRACE_S)
        with push.times.measure("acknowledge_s"):
            if is_whole:
                calls = members.start("finish_weight_update", timeout_s=SHORT_TIMEOUT_S)
                answers = calls.answers(deadline.left_s + GRACE_S)
            torch.cuda.ipc_collect()
        push.times.seconds["num_chunks"] = num_chunks
        given_up = SyncError("the push was given up half-way")
        return {name: given_up if one is None else one for name, one in answers.items()}

    def _show(self, members: Members, chunk: list[ParamMeta], deadline: Deadline) -> dict[str, Any]:
        """Makes every replica copy the buffer out; it may be refilled when they have answered."""
        from torch.multiprocessing.reductions import reduce_tensor

        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        info = {
            "names": [one.name for one in chunk],
            "dtype_names": [dtype_name(one.dtype) for one in chunk],
            "shapes": [list(one.shape) for one in chunk],
            "tensor_sizes": [one.num_bytes for one in chunk],
        }
        calls: dict[str, Any] = {}
        for name in members.incarnations:
            # An export is counted once, and released by the process that opens it.
            handles = {device_uuid(self._device): reduce_tensor(self._buffer)[1]}
            own = {**info, **self._fields[name], "ipc_handles_bytes": pickle.dumps(handles)}
            calls[name] = (own,)
        return ask(members.client, "update_weights", calls, deadline.left_s)

    def _make_buffer(self, metadata: list[ParamMeta]) -> None:
        size = max([self._buffer_bytes, *(one.num_bytes for one in metadata)])
        if self._buffer.numel() != size or self._buffer.device != self._device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _chunks(self, source: WeightSource) -> Iterator[list[ParamMeta]]:
        """Fills the buffer with as many tensors as it takes, again and again; yields which."""
        chunk: list[ParamMeta] = []
        offset = 0
        for meta, tensor in checked(source, source.metadata()):
            check_device(meta.name, tensor, self._device)
            full = offset + meta.num_bytes > self._buffer.numel()
            # The receiver splits without gaps, so a wider dtype must happen to be aligned.
            if chunk and (full or offset % meta.dtype.itemsize):
                yield chunk
                chunk, offset = [], 0
            target = self._buffer[offset : offset + meta.num_bytes].view(meta.dtype)
            target.view(meta.shape).copy_(tensor.detach())
            chunk.append(meta)
            offset += meta.num_bytes
        if chunk:
            yield chunk

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has its own GPU and buffer.
        return functools.partial(type(self), buffer_bytes=self._buffer_bytes), ()

    def close(self) -> None:
        """Frees the buffer, and has the workers use the engine of their launch. Idempotent."""
        if self._client is not None:
            with contextlib.suppress(ServiceClosedError):  # engines that are gone need nothing
                joined = dict.fromkeys(self._joined, ())
                uses = self._client.start_calls("use_transfer_engine", joined)
                uses.answers(SHORT_TIMEOUT_S)
        self._forget()


# ---- The default


class AutoTransport:
    """Chooses by where trainer and engines are, then is that transport; see ``choose_transport``.

    The choice is made at the first push, which says where the weights are, and again when they
    have moved to another device, or after :meth:`close`. If engines turn out not to take ``p2p``,
    because a plan or a GPU does not allow it, the next best goes on for good, with a warning.

    Attributes:
        name: Name of the transport chosen; ``"auto"`` before the first push.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self._chosen: WeightTransport | None = None
        self._place: Place | None = None
        self._unwritable = ""  # why engines could not be written to, though they seemed to be

    @property
    def chosen(self) -> WeightTransport | None:
        """The transport chosen; ``None`` before the first push."""
        return self._chosen

    @property
    def is_collective(self) -> bool:
        """Whether that is so of the transport chosen; ``True`` before."""
        return self._chosen is None or self._chosen.is_collective

    @property
    def run_id(self) -> str:
        """That of the transport chosen; empty before."""
        return "" if self._chosen is None else self._chosen.run_id

    @property
    def last_version(self) -> int:
        """Newest version that the transport chosen stores; 0 before."""
        return 0 if self._chosen is None else self._chosen.last_version

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Chooses if that is due and the source is known, and opens the transport chosen.

        Arguments are those of :meth:`WeightTransport.open`.
        """
        place = self._place if source is None else place_of(source)
        is_given_up = self._unwritable and isinstance(self._chosen, P2PTransport)
        if place is not None and (self._chosen is None or place != self._place or is_given_up):
            self._choose(place, members, source)
        if is_given_up:
            why = self._unwritable
            logger.warning("%s is used from now on, since p2p cannot be: %s", self.name, why)
        try:
            if self._chosen is not None:
                self._chosen.open(members, source)
        except UnsupportedArgumentError as error:  # such as of a replica that came on another host
            if not isinstance(self._chosen, P2PTransport):
                raise
            self._unwritable = reason_of(error)
            self.open(members, source)  # what would have been chosen without it

    def _choose(self, place: Place, members: Members, source: WeightSource | None) -> None:
        engines: Mapping[str, EngineDescription] = members.describe()
        unwritable = self._unwritable
        if source is not None and not list(tensors_of(source)):
            unwritable = unwritable or "the source does not say where its tensors are"
        if unwritable:
            engines = {n: replace(one, why_not_written=unwritable) for n, one in engines.items()}
        chosen = TRANSPORTS[choose_transport(place, engines)]()
        self.close()
        self._chosen, self._place, self.name = chosen, place, chosen.name
        if isinstance(chosen, P2PTransport):
            chosen.all_or_none = True
        elif any(one.why_not_written != NOT_STAGED for one in engines.values()):
            logger.info("%s is used, not p2p: %s", self.name, why_not_p2p(place, engines))

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Sends through the transport chosen.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: None was chosen yet.
        """
        if self._chosen is None:
            raise TransferError("no transport was chosen yet: open it for what will be sent")
        if not isinstance(self._chosen, P2PTransport):
            return self._chosen.send(members, push)
        try:
            answers = self._chosen.send(members, push)
        except TransferError as error:  # nothing was sent
            self._unwritable = reason_of(error)
            self.open(members, push.source)
            return self.send(members, push)
        for name in answers.keys() - failed(answers):
            if reason := answers[name].get("path_reason"):  # a plan that the first push refuted
                self._unwritable = f"replica {name}: {reason}"  # it has got this push
        return answers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy may be elsewhere, and chooses for itself

    def close(self) -> None:
        """Closes the transport chosen, and forgets the choice. Idempotent."""
        if self._chosen is not None:
            self._chosen.close()
        self._chosen = self._place = None
        self.name = "auto"


TRANSPORTS: dict[TransportName, Callable[[], WeightTransport]] = {
    "auto": AutoTransport,
    "broadcast": BroadcastTransport,
    "ipc": IPCTransport,
    "memmap": MemmapTransport,
    "p2p": P2PTransport,
}

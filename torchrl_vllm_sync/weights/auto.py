"""Which transport, by where trainer and engines are."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import NOT_STAGED, EngineDescription
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport, IPCTransport
from torchrl_vllm_sync.weights.p2p.memory import device_uuid, this_node, unreachable
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.source import WeightSource, current_device, tensors_of
from torchrl_vllm_sync.weights.transport import Members, Push, WeightTransport, failed, reason_of

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

    In this order: ``p2p`` if all are on the trainer's node, on CPUs as it is or on GPUs that its
    own reaches, and have reserved memory that can be written to; ``ipc`` if an engine is on the
    trainer's GPU, and all are on GPUs of its node that reach it; ``broadcast`` if all are on GPUs
    of their own; ``memmap`` if all are on the trainer's node, whose shared memory they see;
    ``broadcast`` over Gloo if all are on CPUs. Whether GPUs reach each other is only asked of those
    that this process sees.

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
    used = set(itertools.chain(*(one.device_uuids for one in places)))
    is_local = all(one.node_id == trainer.node_id for one in places)
    if places and not why_not_p2p(trainer, engines):
        return "p2p"
    if on_gpus and own & used and is_local and not unreachable(own, used - own):
        return "ipc"
    if on_gpus and not any(own & set(one.device_uuids) for one in places):
        return "broadcast"
    if is_local and trainer.node_id:
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
        elif one.device_type == "cuda" and (apart := unreachable(own, one.device_uuids)):
            reason = f"the trainer's GPU does not reach its {apart}"
        else:
            reason = one.why_not_written
        if reason:
            return f"replica {name}: {reason}"
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

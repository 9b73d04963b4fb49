"""The places of weights, in trainer and engines, and the transport that they ask for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.replica import NOT_STAGED
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.source import StableSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.source import WeightSource


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
    places = list(engines.values())
    everybody = [trainer, *places]
    if places and all(one.device_type == "cuda" for one in everybody):
        own = set(trainer.device_uuids)
        if own and all(set(one.device_uuids) == own for one in places):
            return "ipc"
    if places and not why_not_p2p(trainer, engines):
        return "p2p"
    if places and all(one.device_type == "cuda" for one in everybody):
        own = set(trainer.device_uuids)
        if not any(own & set(one.device_uuids) for one in places):
            return "broadcast"
    if all(one.node_id and one.node_id == trainer.node_id for one in places):
        return "memmap"
    if all(one.device_type == "cpu" for one in everybody):
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
    visible = {
        device_uuid(torch.device("cuda", index)): index
        for index in range(torch.cuda.device_count())
    }
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
    devices = devices_of(source) or {current_device(own)}
    kinds = " and ".join({device.type for device in devices})
    if len(devices) > 1:
        return Place(node_id=this_node(), device_type=f"several devices ({kinds})")
    uuids = tuple(uuid for uuid in map(device_uuid, devices) if uuid)
    return Place(node_id=this_node(), device_type=kinds, device_uuids=uuids)


def device_uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, the same in every process; empty for a CPU."""
    return "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or how many cores of a CPU this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {len(os.sched_getaffinity(0))} cores"


# A transport sends from where the weights are. The current CUDA device says little of that: it is
# each thread's own, and a process that keeps a model on ``cuda:1`` need never have made it current.


def devices_of(source: WeightSource) -> set[torch.device]:
    """Returns the devices of a source's tensors, or of its module's; none if it has neither."""
    if not isinstance(source, StableSource):
        return set()
    named = source.views()
    if named is None:
        owner = source.owner
        named = owner.named_parameters() if isinstance(owner, torch.nn.Module) else ()
    return {tensor.device for _, tensor in named}


def home_device(source: WeightSource | None, kind: str) -> torch.device | None:
    """Returns the device of a kind that a source's tensors are on; ``None`` unless it is one."""
    devices = set() if source is None else devices_of(source)
    of_kind = [one for one in devices if one.type == kind]
    return of_kind[0] if len(of_kind) == 1 else None


def current_device(kind: str) -> torch.device:
    """Returns this thread's current CUDA device, or the CPU."""
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def sending_device(
    transport: str,
    engines: Mapping[str, EngineDescription],
    source: WeightSource | None,
    given: torch.device | None,
) -> torch.device:
    """Returns the trainer's device, which must be of the engines' kind."""
    kind, *others = sorted({one.device_type for one in engines.values()})
    device = given or home_device(source, kind) or torch.device(kind)
    if others:
        places = (f"replica {name} is on {one.device_type}" for name, one in engines.items())
        where = ", ".join(places)
    elif kind == "cuda" and not torch.cuda.is_available():
        where = "the engines are on cuda, the trainer is on a host without CUDA"
    elif device.type != kind:
        where = f"the engines are on {kind}, the trainer is on {device}"
    else:
        is_indexed = kind == "cuda" and device.index is not None
        return device if is_indexed else current_device(kind)
    raise UnsupportedArgumentError(
        f"the {transport} transport needs trainer and engines on one kind of device, and {where}: "
        "use the memmap transport"
    )

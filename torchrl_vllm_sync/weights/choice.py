"""Which transport a push takes: decided from where the trainer's and the engines' weights are."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchrl_vllm_sync.errors import UnsupportedArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Place", "choose_transport", "device_uuid", "this_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one side keeps its weights.

    Attributes:
        node_id: The machine, see :func:`this_node`; empty if unknown, which is like no other.
        device_type: ``"cpu"`` or ``"cuda"``; anything else is a mixture.
        device_uuids: The GPUs, by :func:`device_uuid`; empty on a CPU, or if unknown.
    """

    node_id: str
    device_type: str
    device_uuids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"on {self.device_type} of node {self.node_id or 'unknown'}"


def choose_transport(trainer: Place, engines: Mapping[str, Place]) -> str:
    """Names the transport that moves weights from ``trainer`` to all ``engines``.

    In this order: ``ipc`` if each engine is on the trainer's GPU and on no other; ``broadcast`` if
    all are on GPUs of their own; ``memmap`` if all are on the trainer's node, whose shared memory
    they see; ``broadcast`` over Gloo if all are on CPUs.

    Args:
        trainer: Where the trainer's weights are.
        engines: Replica id to where its weights are.

    Returns:
        ``"ipc"``, ``"broadcast"`` or ``"memmap"``.

    Raises:
        UnsupportedArgumentError: None of them does for all, and ``transport`` must be given: for
            one, a ``MemmapTransport`` on a file system that every node sees.
    """
    places = list(engines.values())
    everybody = [trainer, *places]
    if places and all(one.device_type == "cuda" for one in everybody):
        own = set(trainer.device_uuids)
        if own and all(set(one.device_uuids) == own for one in places):
            return "ipc"
        if not any(own & set(one.device_uuids) for one in places):
            return "broadcast"
    if all(one.node_id and one.node_id == trainer.node_id for one in places):
        return "memmap"
    if all(one.device_type == "cpu" for one in everybody):
        return "broadcast"
    where = "; ".join(f"replica {name} {place}" for name, place in engines.items())
    raise UnsupportedArgumentError(
        f"no transport reaches every replica on its own: the trainer's weights are {trainer}, "
        f"{where}: name one, such as MemmapTransport(directory) in a shared file system"
    )


def this_node() -> str:
    """Returns what tells this machine, or container, from others: its name and its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def device_uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, the same in every process; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)

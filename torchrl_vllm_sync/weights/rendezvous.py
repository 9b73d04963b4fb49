"""Where a trainer and the engines' workers meet: the trainer's address, and a store there.

What listens, and where: the store, on the trainer's one address that the workers are told, and not
on the host's others, as torch's ``TCPStore`` would by itself; each rank's Gloo, on the rank's own
address on the route there; NCCL, on the interface that it chooses or is given. None of them asks
who connects: keep that network private. The store holds numbers and short texts, nothing pickled.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError

__all__ = ["Rendezvous", "free_port", "host_store", "own_address", "reach_store"]

# Seconds between looks at whether the trainer listens yet.
CONNECT_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets.

    Attributes:
        address: The trainer's address, reachable from every worker.
        port: Port of its ``TCPStore``.
        world_size: The trainer and the workers of all replicas.
        interface: Network interface to use, of this name on every host; ``None`` takes the one that
            reaches ``address``. NCCL keeps to the one that a process has used first.
    """

    address: str
    port: int
    world_size: int
    interface: str | None = None


def own_address(peer: str) -> str:
    """Returns this host's address on the route to ``peer``; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]


def host_store(
    address: str, port: int | None, *, world_size: int, timeout_s: float, interface: str | None
) -> TCPStore:
    """Makes the store on the trainer, which listens at ``address`` alone.

    Args:
        address: This host's address, reachable from every worker; one of its own, not one that is
            translated on the way.
        port: Port to listen on; ``None`` takes a free one.
        world_size: The trainer and all workers.
        timeout_s: Seconds for the store's own waits.
        interface: See :class:`Rendezvous`.

    Raises:
        TransferError: The port cannot be had, or the address is not this host's.
        UnsupportedArgumentError: This host has no such interface.
    """
    _require_interface(interface)
    try:
        with _bound(address, 0 if port is None else port) as listener:
            listener.listen()
            port = int(listener.getsockname()[1])
            return TCPStore(
                address,
                port,
                world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # torch closes it
            )
    except (DistError, OSError, RuntimeError) as error:
        raise TransferError(f"cannot listen at {address}:{port}: {error}") from error


def reach_store(rendezvous: Rendezvous, *, timeout_s: float) -> TCPStore:
    """Reaches the trainer's store from a worker.

    Raises:
        TransferError: It cannot be reached in time.
        UnsupportedArgumentError: This host has no such interface.
    """
    _require_interface(rendezvous.interface)
    address, port = rendezvous.address, rendezvous.port
    deadline = time.monotonic() + timeout_s
    try:
        # The store itself tries twice, each time for as long as it is given.
        _await_listener(address, port, deadline)
        return TCPStore(
            address,
            port,
            rendezvous.world_size,
            is_master=False,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
            wait_for_workers=False,
        )
    except (DistError, OSError, RuntimeError) as error:
        raise TransferError(
            f"cannot reach the trainer at {address}:{port} within {timeout_s:g} s: {error}"
        ) from error


def free_port(address: str) -> int:
    """Returns a port that is free now at one of this host's addresses; nothing listens there.

    Raises:
        OSError: The address is not this host's.
    """
    with _bound(address, 0) as probe:
        return int(probe.getsockname()[1])


def _bound(address: str, port: int) -> socket.socket:
    """Returns a socket bound to one address only.

    Raises:
        OSError: The port is taken, or the address is not this host's.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except BaseException:
        bound.close()
        raise
    return bound


def _require_interface(name: str | None) -> None:
    """Refuses an interface that this host has not; NCCL says so only the first time.

    Raises:
        UnsupportedArgumentError: It has not; lists those that it has.
    """
    known = [known for _, known in socket.if_nameindex()]
    if name is not None and name not in known:
        raise UnsupportedArgumentError(
            f"interface must be one of {known} on {socket.gethostname()}, got {name!r}"
        )


def _await_listener(address: str, port: int, deadline: float) -> None:
    """Returns once somebody listens there.

    Raises:
        OSError: Nobody did until ``deadline``, of ``time.monotonic()``.
    """
    while True:
        try:
            left = max(deadline - time.monotonic(), 1e-3)
            socket.create_connection((address, port), timeout=left).close()
        except OSError:
            if time.monotonic() + CONNECT_POLL_S > deadline:
                raise
        else:
            return
        time.sleep(CONNECT_POLL_S)

"""Descriptors of a worker's memory for processes of its host, by a socket in a private folder."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

# The kernel takes no more in one message (SCM_MAX_FD): a quarter of a terabyte in handles of 1 GiB.
MAX_DESCRIPTORS = 253
MAX_HEADER_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# Seconds between looks at whether a wait is in vain.
POLL_S = 0.01


def this_node() -> str:
    """Returns what identifies this machine, or container: its name and its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _readable(one: Any, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def _check_peer(connection: socket.socket) -> None:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.getuid():
        raise TransferError(f"user {uid} is at the other end of a handover, not this process's")


class Handover:
    """The end that takes: a folder that only its user can enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="torchrl_vllm_sync-p2p-"))
        self.path = str(self._folder / "handover")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._finalizer = weakref.finalize(self, _close, self._listener, self._folder)

    def take(
        self, deadline: float, watch: Callable[[], None] | None = None
    ) -> tuple[dict[str, object], list[int]]:
        """Returns what one says and sends; until a time of ``time.monotonic()``.

        ``watch`` is called meanwhile, and may raise.
        """
        said, descriptors = b"", list[int]()
        while watch is not None and time.monotonic() < deadline:
            if _readable(self._listener, POLL_S):
                break
            watch()
        try:
            while not said:  # one that died before it sent has said nothing
                self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                with contextlib.closing(self._listener.accept()[0]) as connection:
                    _check_peer(connection)
                    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                    said, descriptors, *_ = socket.recv_fds(
                        connection, MAX_HEADER_BYTES, MAX_DESCRIPTORS
                    )
        except TimeoutError:
            raise TransferError("memory was not handed over in time") from None
        return json.loads(said), descriptors

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()


def _close(listener: socket.socket, folder: Path) -> None:
    listener.close()
    shutil.rmtree(folder, ignore_errors=True)


def hand_over(
    path: str,
    said: dict[str, object],
    descriptors: list[int],
    timeout_s: float,
    watch: Callable[[], None] | None = None,
) -> None:
    """The end that gives; the descriptors are closed here.

    With ``watch``, which may raise, it waits until the other end has them.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            _check_peer(connection)
            socket.send_fds(connection, [json.dumps(said).encode()], descriptors)
            while watch is not None and not _readable(connection, POLL_S):  # at the end it is
                watch()
    except OSError as error:
        raise TransferError(f"the trainer did not take a worker's memory: {error}") from error
    finally:
        for one in descriptors:
            os.close(one)

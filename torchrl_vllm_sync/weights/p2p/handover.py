"""Descriptors of a worker's memory for the trainer of its host, by a socket in a private folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import time
import weakref
from pathlib import Path

from torchrl_vllm_sync.errors import TransferError

# The kernel takes no more in one message (SCM_MAX_FD): a quarter of a terabyte in handles of 1 GiB.
MAX_DESCRIPTORS = 253
MAX_HEADER_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def _check_peer(connection: socket.socket) -> None:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.getuid():
        raise TransferError(f"user {uid} is at the other end of a handover, not this process's")


class Handover:
    """The trainer's end: a folder that only its user can enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="torchrl_vllm_sync-p2p-"))
        self.path = str(self._folder / "handover")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._finalizer = weakref.finalize(self, _close, self._listener, self._folder)

    def take(self, deadline: float) -> tuple[dict[str, object], list[int]]:
        """Returns what one worker says and sends; until a time of ``time.monotonic()``."""
        said, descriptors = b"", list[int]()
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
            raise TransferError("a worker did not hand over its memory in time") from None
        return json.loads(said), descriptors

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()


def _close(listener: socket.socket, folder: Path) -> None:
    listener.close()
    shutil.rmtree(folder, ignore_errors=True)


def hand_over(path: str, said: dict[str, object], descriptors: list[int], timeout_s: float) -> None:
    """The worker's end; the descriptors are closed here."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            _check_peer(connection)
            socket.send_fds(connection, [json.dumps(said).encode()], descriptors)
    except OSError as error:
        raise TransferError(f"the trainer did not take this worker's memory: {error}") from error
    finally:
        for one in descriptors:
            os.close(one)

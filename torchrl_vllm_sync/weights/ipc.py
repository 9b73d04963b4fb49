"""The ``ipc`` transport: engines read the trainer's memory, on their own GPU or on others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.weights.broadcast.buckets import NUM_BUFFERS, room_for
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
from torchrl_vllm_sync.weights.source import require_one_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.replica import EngineDescription

DEFAULT_BUFFER_BYTES = 256 * 2**20


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

    def __init__(self, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        check_integer("buffer_bytes", buffer_bytes, NUM_BUFFERS)
        super().__init__(bucket_bytes=buffer_bytes // NUM_BUFFERS)
        self._shared_bytes = room_for(buffer_bytes // NUM_BUFFERS)
        self._copy = functools.partial(type(self), buffer_bytes=buffer_bytes)

    def _check(self, engines: Mapping[str, EngineDescription]) -> None:
        require_one_host(self.name, engines)

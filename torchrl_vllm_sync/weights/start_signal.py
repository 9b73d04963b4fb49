"""The word to begin a transfer, which the trainer gives when every worker is ready."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.distributed import DistError

from torchrl_vllm_sync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.weights.broadcast_group import BroadcastGroup

__all__ = ["PUSH_ID_BITS", "StartSignal"]

# The number of a push: that of its group, then this many bits that count.
PUSH_ID_BITS = 24
GO = "go"


class StartSignal:
    """Who is ready for one transfer, and the trainer's word to begin it or to leave it.

    Nobody enters a collective before everybody is ready, so that a failure until then leaves the
    group usable and nothing to abort.

    Args:
        group: The connected group.
        push_id: Number of the transfer, of which the group sees each once.
    """

    def __init__(self, group: BroadcastGroup, push_id: int) -> None:
        self._group, self._push_id = group, push_id

    def give(self, *, deadline: float, watch: Callable[[], None]) -> None:
        """On the trainer: waits until every worker is ready, then gives the word.

        Raises:
            TransferError: Not everyone was ready in time; everyone is told to leave it.
            Exception: What ``watch`` raises; likewise.
        """
        keys = [
            f"ready/{self._push_id}/{rank}" for rank in range(1, self._group.rendezvous.world_size)
        ]
        try:
            self._group.await_keys(
                keys, deadline, f"get ready for transfer {self._push_id} in time", watch
            )
        except BaseException as error:
            self._group.store.set(self._start_key, f"left: {error}"[:500])
            raise
        self._group.store.set(self._start_key, GO)

    def await_start(self, *, deadline: float) -> None:
        """On a worker: says that it is ready and waits for the trainer's word.

        Raises:
            TransferError: The trainer called it off, is gone, or was silent until the deadline.
        """
        store = self._group.store
        try:
            store.set(f"ready/{self._push_id}/{self._group.rank}", "1")
            word = store.await_value(self._start_key, max(deadline - time.monotonic(), 1e-3))
        except DistError as error:
            raise TransferError(f"the trainer did not begin the transfer: {error}") from error
        if word != GO:
            raise TransferError(f"the trainer called the transfer off: {word[:500]}")

    @property
    def _start_key(self) -> str:
        return f"start/{self._push_id}"

"""A vLLM worker that sends itself a signal in the middle of a broadcast, when told to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
BROADCAST = BroadcastGroup.broadcast


class FailingWorker(SyncWorkerExtension):
    """The worker of this benchmark's engines; see :meth:`fail_in_mid_push`."""

    def fail_in_mid_push(self, how: str, note: str) -> int:
        """Plans a signal to this process, half way through the transfers of the next push."""
        receiver = self._sync_receiver()
        assert receiver._layout is not None, "push once before"
        planned = receiver._planned if receiver.takes_direct else None
        targets = planned.whole_targets if planned else None
        left = max(len(targets or receiver._layout.buckets) // 2, 1)

        def broadcast(
            group: BroadcastGroup, tensor: torch.Tensor, *, timeout_s: float
        ) -> dist.Work:
            nonlocal left
            left -= 1
            if left == 0:
                Path(note).write_text(repr(time.time()))
                os.kill(os.getpid(), SIGNALS[how])
            return BROADCAST(group, tensor, timeout_s=timeout_s)

        setattr(BroadcastGroup, "broadcast", broadcast)  # noqa: B010  a signature of its own
        return os.getpid()

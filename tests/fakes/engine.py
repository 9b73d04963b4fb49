"""An engine that runs no model, and updates of one whose workers live in the test's process."""

import asyncio
from types import SimpleNamespace

import torch

from torchrl_vllm_sync.engine.answers import AdmissionGate
from torchrl_vllm_sync.engine.updates import Updates


async def nothing(*_, **__):
    return None


def quiet_engine():
    """What updates need of an ``AsyncLLM``; it pauses, resumes and takes labels at once."""
    queue = SimpleNamespace(put_nowait=lambda _: None, empty=lambda: True)
    core = SimpleNamespace(pause_scheduler_async=nothing, outputs_queue=queue)
    return SimpleNamespace(
        errored=False,
        engine_core=core,
        vllm_config=SimpleNamespace(lora_config=None),
        _run_output_handler=lambda: None,
        pause_generation=nothing,
        resume_generation=nothing,
        update_weight_version=nothing,
        abort=nothing,
    )


class BareUpdates(Updates):
    """Updates that call the methods of ``workers``, each in a thread of its own.

    Attributes:
        asked: Names of the methods that were called.
    """

    def __init__(self, workers=(), version=0, run_id=None, whole=True, name="0"):
        super().__init__(quiet_engine(), AdmissionGate(name, version=version))
        self.workers, self.run_id, self.whole, self.asked = workers, run_id, whole, []

    def can_swap(self, mode, clear_cache):
        return False  # there is no engine that steps

    async def call_workers(self, method, *args, timeout_s, what="", heartbeat=None):
        def call(worker):
            with torch.no_grad():
                return getattr(worker, method)(*args)

        self.asked.append(method)
        calls = asyncio.gather(*(asyncio.to_thread(call, one) for one in self.workers))
        return await self.ask(what, calls, timeout_s)

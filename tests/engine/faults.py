"""Receivers that go wrong on purpose: what a twin must notice, and what a push must survive."""

import itertools
import multiprocessing
import os
import time
from pathlib import Path

import ray

from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension


def engine_core_pid(actor):
    """Process id of a replica's engine core, as the actor that started it knows it."""
    (pid,) = ray.get(actor.__ray_call__.remote(own_children))
    return pid


def own_children(_=None):
    return [child.pid for child in multiprocessing.active_children()]


class FaultyWorker(SyncWorkerExtension):
    """A worker whose loads misbehave as a plan says, which ``sync_plan`` sets.

    ``fail_at``: raise before this tensor, in as many loads as ``times``. ``zero``: the name of a
    tensor that arrives as zeros. ``hang_s``: sleep before the first tensor. ``die``: end the
    process before the first tensor.
    """

    def sync_plan(self, **plan):
        self._plan = plan
        return os.getpid()

    def _sync_tensors(self, path: Path, *args):
        plan = getattr(self, "_plan", {})
        tensors = super()._sync_tensors(path, *args)
        if plan.get("die"):
            os._exit(1)
        if plan.get("hang_s"):
            time.sleep(plan.pop("hang_s"))
        fail = plan.get("times", 0) > 0
        plan["times"] = plan.get("times", 0) - 1
        for index, (name, tensor) in enumerate(tensors):
            if fail and index == plan["fail_at"]:
                raise RuntimeError(f"injected before tensor {index}, {name}")
            yield name, tensor * 0 if name == plan.get("zero") else tensor


class FaultyActor(EngineActor):
    """An actor that skips loads, or cannot pause, as often as it is told."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._skips = 0

    def skip_loads(self, times):
        self._skips = times

    async def load_snapshot(self, directory, run_id, *, at_least, **options):
        if self._skips > 0:
            self._skips -= 1
            return {"version": at_least, "loaded": True}
        return await super().load_snapshot(directory, run_id, at_least=at_least, **options)

    def fail_pauses(self, times):
        left = itertools.count(times, -1)
        pause = self.engine.engine_core.pause_scheduler_async

        async def failing(*args, **kwargs):
            if next(left) > 0:
                raise RuntimeError("injected at the pause")
            return await pause(*args, **kwargs)

        self.engine.engine_core.pause_scheduler_async = failing

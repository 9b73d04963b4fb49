"""Receivers that go wrong on purpose: what a twin must notice, and what a push must survive."""

import asyncio
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import ray
import torch

from torchrl_vllm_sync.engine import internals, receiver
from torchrl_vllm_sync.engine import plan as plans
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.weights.audit import checksum
from torchrl_vllm_sync.weights.p2p.memory import HostFile

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def engine_core_pid(actor):
    """Process id of a replica's engine core, as the actor that started it knows it."""
    (pid,) = ray.get(actor.__ray_call__.remote(own_children))
    return pid


def own_children(_=None):
    return [child.pid for child in multiprocessing.active_children()]


def memory_files(_):
    """How often each process of a replica has memory for weights open, or mapped."""
    gc.collect()
    found = []
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        process = Path("/proc") / str(one.pid)
        opened = [os.readlink(one) for one in (process / "fd").iterdir() if one.is_symlink()]
        found.append([*opened, (process / "maps").read_text()])
    return [sum(text.count("/memfd:weights") for text in one) for one in found]


def num_loras_in_use(replica):
    """How many adapters vLLM's requests have."""
    return len(internals.loras_in_use(replica.engine))


class PacedWorker(SyncWorkerExtension):
    """A worker whose steps last as long as a test needs, on any machine."""

    def main_module(self):
        return sys.modules["__main__"].__spec__.name

    def sync_pace(self, seconds=0.0):
        """Has each step take that much longer until the next call."""
        step = type(self.model_runner).execute_model.__get__(self.model_runner)

        def paced(*args, **kwargs):
            time.sleep(seconds)
            return step(*args, **kwargs)

        self.model_runner.execute_model = paced


class AdapterWorker(PacedWorker):
    """A worker whose adapters can be counted, come late, or come as zeros."""

    _lost, _loses, _delay_s, _lookups = None, False, 0.0, None

    def sync_count_adapters(self):
        own = self._sync_adapters
        return len(own._held), len(own._manager.list_adapters())

    def sync_lose_slots(self):
        """What sleep of level 2 does on a GPU; what kernels are told of slots is lost, too."""
        slots = self._sync_adapters._slots
        for layer in slots.modules.values():
            for one in (*layer.lora_a_stacked, *layer.lora_b_stacked):
                one.fill_(float("nan"))
            if (order := getattr(layer, "sharded_to_full_mapping_gpu", None)) is not None:
                order.zero_()
        for told in slots.punica_wrapper_mapping.values():
            for one in filter(torch.is_tensor, vars(told).values()):
                one.fill_(-1)

    def sync_count_lookups(self):
        """How often, since the first call, a step had adapters, and vLLM looked for their slots."""
        manager = self._sync_adapters._slots
        if self._lookups is None:
            self._lookups = manager.set_adapter_mapping, manager._set_adapter_mapping = [
                Mock(wraps=one)
                for one in (manager.set_adapter_mapping, manager._set_adapter_mapping)
            ]
        return [one.call_count for one in self._lookups]

    def sync_spoil_adapters(self, loses=False, delay_s=0.0):
        self._loses, self._delay_s = loses, delay_s

    def sync_put_adapter(self, lora_id, digest, place, num_bytes, keep):
        time.sleep(self._delay_s)
        if self._loses:
            self._lost = HostFile(num_bytes)
            place = self._lost.path, 0
        return super().sync_put_adapter(lora_id, digest, place, num_bytes, keep)


class FaultyWorker(PacedWorker):
    """A worker whose loads misbehave as a plan says, which ``sync_plan`` sets.

    ``fail_at``: raise before this tensor, in as many loads as ``times``. ``zero``: the name of a
    tensor that arrives as zeros. ``die``: end the process before the first tensor. ``signal``
    and ``at``: send this process a signal, ``kill`` or ``stop``, before tensor ``at``. ``touch``:
    make this file before tensor ``at`` and sleep until it is gone; an ``at`` of ``"end"`` is behind
    the last tensor, one of ``"repack"`` where the weights are in place and what is computed from
    them is not, one of ``"ready"`` before the trainer of a broadcast is told that this worker is
    ready, one of ``"received"`` where a broadcast is in place and the worker has not said so. Of
    weights that were written to it ``"ready"`` and ``"end"`` are before and behind the swap.
    ``rank``: only the worker of this rank in its replica misbehaves.

    Of broadcasts alone: ``unready``: raise before the trainer is told that this worker is ready.
    ``linger_s``: sleep instead, there.
    """

    def sync_plan(self, rank=None, **plan):
        self._plan = plan if rank in (None, self._sync_receiver().rank_in_replica) else {}
        receiver.buckets.whole_tensors = self._sync_faulty_arrivals
        receiver.buckets.broadcast_tensors = self._sync_faulty_broadcast
        plans.repack_cpu = self._sync_faulty_repacking
        return os.getpid()

    def sync_note_experts(self):
        """What the routers chose since the last call, by layer, token and place; they note it on.

        By vLLM's own hooks for routed experts, whose way to a request is Model Runner V2's alone.
        """
        noted, self._noted = getattr(self, "_noted", {}), {}

        def capture(layer, chosen):
            self._noted.setdefault(layer, []).extend(chosen.tolist())

        # Not in vLLM 0.26, with which other faults are used, too.
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer

        capturer = SimpleNamespace(capture=capture)
        routed_experts_capturer.bind_routed_experts_capturer(self._sync_model(), capturer)
        return [noted[layer] for layer in sorted(noted)]

    def sync_sleep(self, seconds):
        time.sleep(seconds)

    def sync_checksums(self):
        """Checksums of what the kernels compute with, by the parameters' names.

        vLLM's CPU backend leaves linear layers an empty parameter and keeps a packed copy, a tied
        head a copy of the embedding. What a copy makes of the unit vectors is the weight, exactly.
        """
        tensors = dict(self._sync_model().named_parameters())
        for name, module in self._sync_model().named_modules():
            if packed := getattr(module, "cpu_linear", None):
                width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
                weight = packed(torch.eye(width), module.weight, None).T
                tensors[f"{name}.weight"] = weight.contiguous()
        return checksum(tensors.items())

    def _sync_tensors(self, path: Path, *args):
        return self._sync_faulty(super()._sync_tensors(path, *args))

    def sync_receive(self, *args):
        answer = super().sync_receive(*args)
        self._sync_reached("received")
        return answer

    def sync_take_written(self, *args):
        self._sync_reached("ready")
        answer = super().sync_take_written(*args)
        self._sync_reached("end")
        return answer

    def _sync_faulty_arrivals(self, *args):
        return self._sync_faulty(WHOLE_TENSORS(*args))

    def _sync_faulty_broadcast(self, group, tensors, **limits):
        """What comes without buckets only reaches points; to Gloo each is a transfer anyway."""
        for index, tensor in enumerate(tensors):
            self._sync_reached(index)
            BROADCAST_TENSORS(group, [tensor], **limits)
        self._sync_reached("end")

    def _sync_prepared(self, digest):
        plan = getattr(self, "_plan", {})
        if plan.get("unready"):
            raise RuntimeError("injected before it was ready")
        self._sync_reached("ready")
        time.sleep(plan.get("linger_s", 0))
        return super()._sync_prepared(digest)

    def _sync_faulty(self, tensors):
        plan = getattr(self, "_plan", {})
        if plan.get("die"):
            os._exit(1)
        fail = plan.get("times", 0) > 0
        plan["times"] = plan.get("times", 0) - 1
        for index, (name, tensor) in enumerate(tensors):
            if fail and index == plan["fail_at"]:
                raise RuntimeError(f"injected before tensor {index}, {name}")
            self._sync_reached(index)
            yield name, tensor * 0 if name == plan.get("zero") else tensor
        self._sync_reached("end")

    def _sync_faulty_repacking(self, model):
        self._sync_reached("repack")
        REPACK_CPU(model)

    def _sync_reached(self, point):
        plan = getattr(self, "_plan", {})
        if point == plan.get("at"):
            if word := plan.pop("signal", None):
                os.kill(os.getpid(), SIGNALS[word])
            if path := plan.pop("touch", None):
                hold(path)


def hold(path):
    """Makes the file ``path`` and waits until it is gone."""
    Path(path).touch()
    while Path(path).exists():
        time.sleep(0.01)


class CrampedWorker(SyncWorkerExtension):
    """A worker whose GPU had no room for staged weights."""

    def sync_staging_refusal(self):
        return "staged weights need 12.34 GB on cuda:0 beside the model, 1.00 GB are free"


WHOLE_TENSORS, REPACK_CPU = receiver.buckets.whole_tensors, plans.repack_cpu
BROADCAST_TENSORS = receiver.buckets.broadcast_tensors


class FaultyActor(EngineActor):
    """An actor that skips loads, or cannot pause, as often as it is told; and runs what it is."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._skips = 0

    async def call(self, function):
        """Runs a coroutine function of a test beside the engine."""
        return await function(self)

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


class HeldActor(EngineActor):
    """An actor that waits on its way through an update, at the point that :meth:`hold_at` names.

    ``asked``: it was called, and nothing has begun. ``apply``: before the pause; a stored version
    has been read and checked. ``label``: the weights are in, and the engine does not know of which
    version they are. ``resume``: it does, and is paused still. Its event loop goes on meanwhile.
    """

    _holds: dict[str, str]

    def hold_at(self, point=None, path=""):
        self._holds = {point: path} if point else {}

    async def start(self, *args, **kwargs):
        description = await super().start(*args, **kwargs)
        self.hold_at()
        updates = self._updates
        updates.apply = self._holding("apply", updates.apply)
        updates.resume = self._holding("resume", updates.resume)
        internals.set_weight_label = self._holding("label", internals.set_weight_label)
        return description

    async def load_snapshot(self, *args, **kwargs):
        return await self._holding("asked", super().load_snapshot)(*args, **kwargs)

    async def begin_writing(self, *args, **kwargs):
        return await self._holding("asked", super().begin_writing)(*args, **kwargs)

    async def receive_broadcast(self, *args, **kwargs):
        return await self._holding("asked", super().receive_broadcast)(*args, **kwargs)

    def _holding(self, point, call):
        async def held(*args, **kwargs):
            if path := self._holds.pop(point, None):
                await asyncio.to_thread(hold, path)
            return await call(*args, **kwargs)

        return held


class DozingActor(HeldActor):
    """One that also waits before its engine falls asleep, or wakes memory: at points of its own.

    ``sleep``, and the name of the memory: ``weights``, ``kv_cache``.
    """

    async def start(self, *args, **kwargs):
        description = await super().start(*args, **kwargs)
        engine = self.engine
        wake_up, engine.sleep = engine.wake_up, self._holding("sleep", engine.sleep)
        engine.wake_up = lambda tags=None: self._holding((tags or [""])[0], wake_up)(tags)
        return description

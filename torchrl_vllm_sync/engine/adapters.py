"""LoRA adapters beside the base weights: in a worker of vLLM, and which one a request gets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.errors import (
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.replica import LoadReport
from torchrl_vllm_sync.weights.adapters import MOST_INBOXES, OF, Adapter, Door, Kind
from torchrl_vllm_sync.weights.module import ParamMeta, dtype_name, from_json, metadata_digest
from torchrl_vllm_sync.weights.p2p.memory import (
    HostFile,
    MappedMemory,
    hand_over,
    new_memory,
    page_lock,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

    from torchrl_vllm_sync.engine.answers import AdmissionGate
    from torchrl_vllm_sync.engine.updates import Updates
    from torchrl_vllm_sync.requests.messages import EngineRequest

# Beyond what callers number their own adapters by.
FIRST_ID = 2**30
# Of a ``LoRARequest``, which must have a path: there is no file.
PATH = "/torchrl_vllm_sync/"
# Inits that change the base weights, too.
_CHANGING = ("pissa", "olora", "corda", "loftq")


# ---- In a worker


class Place(NamedTuple):
    """Where vLLM computes with a tensor of an adapter."""

    meta: ParamMeta
    slots: torch.Tensor  # of all adapters that are active, one of which it fills from the corner on
    part: torch.Tensor  # what of it this worker has, as a view of one without storage
    cut: tuple[Any, ...]  # shape, stride and offset of that part among all of an adapter's values

    def slot(self, at: int) -> torch.Tensor:
        """Its part of one of them."""
        return self.slots[at, 0, : self.part.shape[0], : self.part.shape[1]]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where all tensors of adapters of a kind go."""

    name: str
    rank: int  # the most of them
    places: list[Place]
    num_elements: int


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Memory of this worker for one version after the other of such adapters."""

    layout: Layout
    data: torch.Tensor  # all tensors, one after the other
    parts: list[torch.Tensor]  # what of it goes to each place
    # Events of what was enqueued last that writes it, and that reads it; None on a CPU.
    was_written: Any
    was_read: Any


class WorkerAdapters:
    """Adapters that a worker holds; they are put into vLLM's slots as requests need it.

    By a call or two for all layers, where vLLM would take an adapter apart name by name, and copy
    its matrices one by one. vLLM's books are kept.
    """

    def __init__(self, runner: Any) -> None:
        self._manager = runner.lora_manager  # vLLM's LRUCacheWorkerLoRAManager
        self._slots = self._manager._adapter_manager
        self._layouts: dict[str, Layout] = {}
        self._held: dict[int, Copy] = {}
        self._spare: list[Copy] = []  # of versions that are gone, the latest last
        # Memory that trainers write to, by the adapter's name and their token.
        self._inboxes = defaultdict[str, dict[str, MappedMemory]](dict)
        # Of each slot whose adapter is one of these, what fills it.
        self._filled: dict[int, tuple[Layout, list[torch.Tensor]]] = {}
        on_gpu = self._manager.device.type == "cuda"
        # What is enqueued here goes first, as steps that are to come wait for it.
        self._stream = torch.cuda.Stream(self._manager.device, priority=-1) if on_gpu else None
        self._mapper, slots = _names_of(self._slots.model), self._slots
        self._load_file, self._manager._load_adapter = self._manager._load_adapter, self._load
        self._enter_file, slots._add_adapter = slots._add_adapter, self._enter
        self._fill_from_file, slots.activate_adapter = slots.activate_adapter, self._fill

    def prepare(self, config: str, metadata: list[ParamMeta]) -> str:
        """Refuses what vLLM cannot adapt; returns the dtype that it holds adapters in."""
        name = metadata[0].name.partition(OF)[0]
        given = json.loads(config)
        init, has_bias = str(given.get("init_lora_weights")), given.get("lora_bias")
        try:
            PEFTHelper.from_dict(given).validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise WeightMismatchError(f"adapter {name!r}: {error}") from error
        if has_bias or init.lower().startswith(_CHANGING):  # vLLM 0.26 does not look at them
            told = f"LoRA bias={has_bias}, init_lora_weights={init} are not supported"
            raise WeightMismatchError(f"adapter {name!r}: {told}")
        found = {meta: self._place(meta) for meta in metadata}
        if bad := [f"{meta.name} {list(meta.shape)}" for meta, one in found.items() if one is None]:
            told = f"{len(bad)} of {len(metadata)} tensors have no place in the engines' model"
            raise WeightMismatchError(f"adapter {name!r}: {told}: {first_few(bad)}")
        *begins, end = itertools.accumulate((one.num_elements for one in metadata), initial=0)
        places = [
            one._replace(cut=(one.part.shape, one.part.stride(), at + one.part.storage_offset()))
            for at, one in zip(begins, found.values(), strict=True)
            if one is not None
        ]
        rank = max(min(one.shape) for one in metadata)
        self._layouts[metadata_digest(metadata)] = Layout(name, rank, places, end)
        return dtype_name(self._manager.lora_config.lora_dtype)

    def open_inbox(
        self, metadata: list[ParamMeta], door: Door, about: dict[str, Any], timeout_s: float
    ) -> None:
        """Hands over memory for versions of an adapter, which a trainer will write to."""
        layout = self._layouts[metadata_digest(metadata)]
        num_bytes = 2 * layout.num_elements * self._manager.lora_config.lora_dtype.itemsize
        is_near = door["device_type"] == self._manager.device.type
        device = self._manager.device if is_near else torch.device("cpu")
        with contextlib.closing(new_memory(num_bytes, device)) as memory:
            inbox = MappedMemory(num_bytes, device, memory.export())
            if not is_near:
                page_lock(inbox)
            about = {**about, "token": door["token"]}
            hand_over(door["path"], about, [memory.export()], timeout_s)
        inboxes = self._inboxes[layout.name]
        inboxes[door["token"]] = inbox
        self._finish()
        for one in [*inboxes][:-MOST_INBOXES]:  # of trainers before
            del inboxes[one]

    def _place(self, meta: ParamMeta) -> Place | None:
        name = meta.name.partition(OF)[2]
        module_name, is_first = parse_fine_tuned_lora_name(name, self._mapper)
        parents = self._slots.packed_modules.items()
        packed = [(one, names.index(module_name)) for one, names in parents if module_name in names]
        (parent, at) = packed[0] if packed else (module_name, 0)
        layer = self._slots.modules.get(parent)
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            return None
        slots = (layer.lora_a_stacked if is_first else layer.lora_b_stacked)[at]
        part: Any = torch.empty(meta.shape, device="meta")
        if layer.tp_size > 1:
            cut: Any = layer.slice_lora_a if is_first else layer.slice_lora_b
            among = [part if one == at else None for one in range(layer.n_slices)]
            part = cut(among)[at] if packed else cut(part)
        fits = all(one <= room for one, room in zip(part.shape, slots.shape[2:], strict=True))
        along = 1 if is_first else 0  # ranks may be less than the most
        fits = fits and part.shape[along] == slots.shape[2:][along]
        return Place(meta, slots, part, ()) if fits else None

    def put(
        self, lora_id: int, digest: str, place: tuple[str, int], num_bytes: int, keep: list[int]
    ) -> None:
        """Takes a version from a half of an inbox or a file, beside those to keep."""
        layout, (within, half) = self._layouts[digest], place
        inboxes = self._inboxes[layout.name]
        self._finish()  # a trainer is told by this that the other half was read
        if is_file := within.startswith("/"):
            came = HostFile(num_bytes, within).data
        elif within in inboxes:
            inboxes[within] = inboxes.pop(within)  # the last that is let go of
            came = inboxes[within].data.view(2, -1)[half]
        else:
            told = "another trainer's memory has replaced the one that was written to"
            raise TransferNotReadyError(told)
        slots = self._slots
        is_known = slots._last_slot_layout == tuple(slots.lora_index_to_id)
        for one in self._held.keys() - set(keep):
            self._manager.remove_adapter(one)
            self._spare = [*self._spare, self._held.pop(one)][-2:]
        if is_known:  # to vLLM, which else waits for the GPU to tell it where running requests' are
            slots._last_slot_layout = tuple(slots.lora_index_to_id)
        self._held[lora_id] = self._copied(came, layout)
        if is_file:
            self._finish()

    def _copied(self, came: torch.Tensor, layout: Layout) -> Copy:
        """The bytes that came, in memory of this worker's own."""
        dtype, device = self._manager.lora_config.lora_dtype, self._manager.device
        found = next((one for one in self._spare if one.layout is layout), None)
        if found is None:
            data = torch.empty(layout.num_elements, dtype=dtype, device=device)
            parts = [data.as_strided(*one.cut) for one in layout.places]
            events = [self._stream and torch.cuda.Event() for _ in range(2)]
            found = Copy(layout, data, parts, *events)
            self._note_read(found)
        else:
            self._spare.remove(found)
        came = came[: found.data.nbytes].view(dtype)
        if self._stream is None:
            found.data.copy_(came)
        else:  # beside the step that the GPU is at
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(found.was_read)
                found.data.copy_(came, non_blocking=True)
                found.was_written.record(self._stream)
        return found

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _await_written(self, copy: Copy) -> None:
        if copy.was_written is not None:
            torch.cuda.current_stream(self._manager.device).wait_event(copy.was_written)

    def _note_read(self, copy: Copy) -> None:
        if copy.was_read is not None:
            copy.was_read.record(torch.cuda.current_stream(self._manager.device))

    def _load(self, request: LoRARequest) -> LoRAModel:
        """What vLLM asks for when a request's adapter is not in its cache."""
        if (found := self._held.get(request.lora_int_id)) is None:
            return self._load_file(request)
        return LoRAModel(request.lora_int_id, found.layout.rank, {})

    def _enter(self, lora: LoRAModel) -> None:
        if lora.id in self._held:  # there is nothing to be put together
            self._slots._registered_adapters[lora.id] = lora
        else:
            self._enter_file(lora)

    def _fill(self, lora_id: int) -> bool:
        """Puts an adapter into a slot, in vLLM's place."""
        slots = self._slots
        active, ids = slots._active_adapters, slots.lora_index_to_id
        if lora_id in active or lora_id not in self._held:
            if is_new := self._fill_from_file(lora_id):
                self._filled.pop(ids.index(lora_id), None)
            return is_new
        if len(active) >= slots.lora_slots:
            active.remove_oldest()
        at, held = ids.index(None), self._held[lora_id]
        if at not in self._filled or self._filled[at][0] is not held.layout:
            for module in slots.modules.values():
                module.reset_lora(at)
            self._filled[at] = held.layout, [one.slot(at) for one in held.layout.places]
        self._await_written(held)
        copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy(self._filled[at][1], held.parts)
        self._note_read(held)
        active[lora_id], ids[at] = None, lora_id
        return True

    def empty_slots(self) -> None:
        """Has all that is active put into its slot anew: what was there was lost by sleep."""
        for one in filter(None, [*self._slots.lora_index_to_id]):
            self._slots.deactivate_adapter(one)
        self._filled.clear()
        self._slots._last_mapping = None  # and so was what kernels were told of these slots
        for layer in self._slots.modules.values():  # and where workers' logits belong
            if (order := getattr(layer, "sharded_to_full_mapping_gpu", None)) is not None:
                order.copy_(torch.tensor(layer.sharded_to_full_mapping))

    def give(self, lora_id: int, path: str) -> None:
        """Writes a version's bytes into a file in memory."""
        self._finish()
        data = self._held[lora_id].data.view(torch.uint8)
        HostFile(data.nbytes, path).data.copy_(data)

    def slices(self, digest: str) -> list[list[Any]] | None:
        """What of each tensor this worker computes with, for an audit; ``None`` of others."""
        if (layout := self._layouts.get(digest)) is None:
            return None
        dtype = dtype_name(self._manager.lora_config.lora_dtype)
        parts = [(one.meta.name, one.part) for one in layout.places]
        return [
            [name, one.storage_offset(), [*one.shape], [*one.stride()], dtype, ""]
            for name, one in parts
        ]

    def audited(self, digest: str, served: list[int]) -> list[torch.Tensor] | None:
        """Those parts, of the version that is among those ``served``."""
        if (layout := self._layouts.get(digest)) is None:
            return None
        found = [one for one in served if self._held[one].layout.name == layout.name]
        if not found:
            raise TransferError(f"adapter {layout.name!r} is not there")
        (lora_id,) = found
        self._manager.add_adapter(LoRARequest(str(lora_id), lora_id, PATH))
        at = self._slots.lora_index_to_id.index(lora_id)
        return [one.slot(at) for one in layout.places]


def _names_of(model: Any) -> WeightsMapper | None:
    """From names of published modules to those of vLLM's, one by one."""
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is None:
        return None
    make = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper  # vLLM 0.26
    return make()


# ---- In the actor


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One version of an adapter that all workers hold."""

    adapter: Adapter
    request: LoRARequest


class Adapters:
    """The adapters of one engine, by name, oldest version first."""

    def __init__(self, updates: Updates, gate: AdmissionGate) -> None:
        self._updates, self._gate = updates, gate
        self._held: dict[str, list[Held]] = {}
        self._ids = itertools.count(FIRST_ID)
        self._kinds: dict[str, Kind] = {}  # that the workers were prepared for, by digest
        updates.drop_adapter, updates.served_adapters = self._drop, self._served

    def choose(self, request: EngineRequest) -> Held | None:
        """The version that a request, which enters the engine now, is answered with."""
        name, known = request.adapter, sorted(self._held)
        if name == "" or request.lora_request is not None or (name is None and not known):
            return None
        if name is None and len(known) > 1:
            raise UnsupportedArgumentError(f"adapter must be one of {known}, got none")
        name = known[0] if name is None else name
        if name not in self._held:
            raise UnsupportedArgumentError(f"adapter must be one of {known}, got {name!r}")
        # A lost replica's answer goes on with the version that it began with, if that is here.
        former = request.begun.spans[-1].version if request.begun else -1
        versions = self._held[name]
        return next((one for one in versions if one.adapter.version == former), versions[-1])

    def _drop(self, version: int) -> None:
        kept = {
            name: [one for one in versions if one.adapter.version != version]
            for name, versions in self._held.items()
        }
        self._held = {name: versions for name, versions in kept.items() if versions}

    def _served(self) -> list[int]:
        return [versions[-1].request.lora_int_id for versions in self._held.values()]

    def newest(self) -> dict[str, int]:
        return {name: versions[-1].adapter.version for name, versions in self._held.items()}

    async def prepare_adapter(
        self, config: str, metadata: list[list[Any]], door: Door | None, *, timeout_s: float
    ) -> str:
        """Returns in which dtype engines hold such an adapter; workers hand memory for it over."""
        async with self._updates.exclusive(timeout_s) as deadline:
            return await self._prepare(config, metadata, door, deadline.left_s)

    async def _prepare(
        self, config: str, metadata: list[list[Any]], door: Door | None, timeout_s: float
    ) -> str:
        call = "sync_prepare_adapter", config, metadata, door, self._updates.replica_id, timeout_s
        answers = await self._updates.ask_workers(*call, timeout_s=timeout_s, what="preparing")
        self._kinds[metadata_digest(from_json(metadata))] = config, metadata
        return answers[0]["dtype"]

    async def put_adapter(self, adapter: Adapter, data: Any, *, timeout_s: float) -> dict[str, Any]:
        """Takes a version for requests to come; ``data`` are its bytes, or which inbox's half."""
        updates, report = self._updates, LoadReport(version=adapter.version, loaded=False)
        async with updates.exclusive(timeout_s) as deadline:
            if not self._has(adapter):
                updates.refuse_older(adapter.version)
                updates.refuse_foreign(adapter.version, adapter.run_id)
                updates.require_base(adapter.base)
                report = await self._add(adapter, data, deadline.left_s)
            await updates.advance(adapter.version, adapter.run_id)
        return asdict(report)

    def _has(self, adapter: Adapter) -> bool:
        newest = self._held.get(adapter.name, [None])[-1]
        stamp = adapter.version, adapter.run_id
        return newest is not None and (newest.adapter.version, newest.adapter.run_id) == stamp

    async def _add(self, adapter: Adapter, data: Any, timeout_s: float) -> LoadReport:
        begin, lora_id = time.time(), next(self._ids)
        file = None if isinstance(data, tuple) else await asyncio.to_thread(_file_of, data)
        place = data if file is None else (file.path, 0)
        # vLLM keys cached prefixes by an adapter's name and path.
        request = LoRARequest(f"{adapter.name}@{adapter.version}", lora_id, f"{PATH}{lora_id}")
        # Requests that enter from here on choose among those that stay.
        used = self._updates.loras_in_use() | {
            one.adapter.request.lora_int_id for one in self._gate.running.values() if one.adapter
        }
        if versions := self._held.get(adapter.name):
            newest = versions[1 - adapter.max_versions :]
            self._held[adapter.name] = [
                one for one in versions if one in newest or one.request.lora_int_id in used
            ]
        held = [one.request.lora_int_id for some in self._held.values() for one in some]
        keep = sorted(used.union(held))  # also what was dropped, but answers are not done with
        call = "sync_put_adapter", lora_id, adapter.digest, place, adapter.num_bytes, keep
        answers = await self._updates.ask_workers(*call, timeout_s=timeout_s, what="an adapter")
        self._held.setdefault(adapter.name, []).append(Held(adapter, request))
        seconds = max(one["seconds"] for one in answers)
        times = {"load_s": seconds, "whole_pause_s": seconds, "began_at": begin}
        num = len(self._kinds[adapter.digest][1])
        about = {"num_tensors": num, "attempts": 1, "path": "adapter"}
        return LoadReport(version=adapter.version, **times, **about)

    async def give_adapters(self, *, timeout_s: float) -> dict[str, Any]:
        """The newest version of each, by value, and what they belong to, for another replica."""
        updates = self._updates
        async with updates.exclusive(timeout_s) as deadline:
            given = list[tuple[Adapter, Kind, Any]]()
            for one in [versions[-1] for versions in self._held.values()]:
                file, adapter = HostFile(one.adapter.num_bytes), one.adapter
                call = "sync_give_adapter", one.request.lora_int_id, file.path
                await updates.ask_workers(*call, timeout_s=deadline.left_s, what="an adapter")
                given.append((adapter, self._kinds[adapter.digest], file.data.numpy()))
            stamp = {"version": updates.version, "run_id": updates.run_id, "base": self._gate.base}
            return {**stamp, "adapters": given}

    async def take_adapters(self, given: dict[str, Any], *, timeout_s: float) -> int:
        """Takes what another replica gave; returns the version of this one's base weights."""
        updates = self._updates
        async with updates.exclusive(timeout_s) as deadline:
            updates.require_unpinned()
            for adapter, (config, metadata), data in given["adapters"]:
                if not self._has(adapter):
                    await self._prepare(config, metadata, None, deadline.left_s)
                    await self._add(adapter, data, deadline.left_s)
            if updates.whole and self._gate.base == given["base"]:
                updates.refuse_older(given["version"])
                await updates.advance(given["version"], given["run_id"])
        return self._gate.base


def _file_of(data: Any) -> HostFile:
    """What came by value, where workers read it."""
    file = HostFile(data.size)
    file.data.numpy()[:] = data
    return file

"""The receiver of pushes in a vLLM worker: by a load plan into place, or by a layerwise reload.

Importing it registers the receiver with vLLM in this process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from torchrl_vllm_sync.checks import Deadline, first_few
from torchrl_vllm_sync.engine.args import BROADCAST_BACKEND, SHARED_BACKEND, STAGED_BACKEND
from torchrl_vllm_sync.engine.plan import (
    SCALES_ARE_OF_ALL_WORKERS,
    LoadPlan,
    PlanNotPossibleError,
    record_load_plan,
    reload_model,
    unquantised,
)
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights import audit
from torchrl_vllm_sync.weights.broadcast import buckets
from torchrl_vllm_sync.weights.broadcast.group import (
    PUSH_ID_BITS,
    SPIN_S,
    BroadcastGroup,
    Rendezvous,
)
from torchrl_vllm_sync.weights.module import (
    ParamMeta,
    dtype_name,
    from_json,
    metadata_digest,
    storage_key,
)
from torchrl_vllm_sync.weights.p2p.memory import WeightArena, device_uuid, hand_over

Take = Callable[[Iterator[int]], object]  # takes buckets, by index, as they arrive
# Seconds between checks of staged weights that are arriving: each takes the interpreter from the
# thread that launches the engine's kernels.
ARRIVAL_POLL_S = 1e-3


@dataclass
class BroadcastInitInfo(base.WeightTransferInitInfo):
    """How a worker joins the group; the field names are those of vLLM's own NCCL engine."""

    master_address: str  # of the trainer
    master_port: int  # of its store
    rank_offset: int  # rank of the replica's first worker, at least 1
    world_size: int  # the trainer and the workers of all replicas
    timeout_s: float = 60.0  # within which all must have joined
    interface: str | None = None  # None takes the one that reaches the trainer
    group_id: int = 0  # part of its pushes' ids, so that other groups' differ
    shared_bytes: int = 0  # of the trainer's memory, if its buckets are read there
    # time.monotonic() of this host after which nothing waits for the worker: a call that an engine
    # comes to later, because it was stopped, is not begun. Where it is given the store is there.
    deadline: float = math.inf


@dataclass
class BroadcastUpdateInfo(base.WeightTransferUpdateInfo):
    push_id: int  # begins with the group's
    timeout_s: float = 300.0  # for all of it
    metadata: list[list[Any]] | None = None  # ParamMeta in JSON form; None: the same as last time
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES  # read together with metadata


def repacks() -> bool:
    """Whether vLLM computes with other tensors than the model's parameters."""
    return current_platform.is_cpu() and _custom_ops._supports_onednn


def why_not_a_plan(config: Any, *, quantised: bool = False) -> str:
    """Returns which settings change or move weights after ``load_weights``; empty allows a plan.

    That weights are ``quantised`` may be allowed.
    """
    reasons = {
        "vLLM's CPU backend repacks weights after loading": repacks(),
        f"the model is quantised ({config.model_config.quantization})": (
            not quantised
            and (config.model_config.quantization is not None or config.quant_config is not None)
        ),
        "LoRA wraps the model's layers": config.lora_config is not None,
        "expert-parallel load balancing moves experts": config.parallel_config.enable_eplb,
        "latent attention (MLA) derives weights after loading": config.model_config.use_mla,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


class Writes(NamedTuple):
    """Where a trainer's writes go: in what is served, and in what may be written to."""

    live: LoadPlan
    spare: LoadPlan
    # Of copies that the trainer quantises, by their number: the weights' name, and their dtype
    # before.
    quantised: dict[int, tuple[str, torch.dtype]]


def rank_in_replica(config: Any) -> int:
    """A worker's rank among those of its replica, data-parallel ones included."""
    parallel = config.parallel_config
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


class BroadcastReceiver(base.WeightTransferEngine[BroadcastInitInfo, BroadcastUpdateInfo]):
    """One worker's end of the ``broadcast`` transport, made by vLLM when the model is loaded."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *made_of: Any) -> None:
        super().__init__(config, *made_of)
        self._group: BroadcastGroup | None = None
        self._group_id = 0
        self._layout: buckets.BucketLayout | None = None
        self._forget()
        # Why pushes take no load plan; and if a check has failed, for good. Whether one has not.
        self.path_reason, self._distrust = "no push was prepared yet", ""
        self._agrees = False
        self._audited: LoadPlan | None = None
        self._bare: dict[int, str] = {}  # of its targets those that are quantised, see unquantised
        # The refusal says why the memory for staged weights could not be reserved.
        self._can_stage, self.staging_refusal = config.backend == STAGED_BACKEND, ""
        self.arena: WeightArena | None = None
        # From the end of a staged push until it is installed: whole tensors, if there is no plan.
        self._staged: list[tuple[str, torch.Tensor]] | None = None
        if config.backend != BROADCAST_BACKEND and not repacks():
            try:
                # Before graphs are captured, and before vLLM sizes its KV cache for what is left.
                is_shared = config.backend == SHARED_BACKEND
                self.arena = WeightArena(self.model, self.device, is_shared=is_shared)
            except TransferError as error:
                # Raised here it would end the engine core; vLLM does not pass its message on.
                self._can_stage, self.staging_refusal = False, str(error)

    @property
    def path(self) -> str:
        """How pushes get into the model: ``"plan"`` or ``"layerwise"``."""
        return "layerwise" if self._planned is None else "plan"

    @property
    def path_taken(self) -> dict[str, str]:
        return {"path": self.path, "path_reason": self.path_reason}

    @property
    def takes_direct(self) -> bool:
        return (
            self._planned is not None
            and self._planned.whole_targets is not None
            and (self._group is None or self._group.memory is None)
        )

    @property
    def rank_in_replica(self) -> int:
        return rank_in_replica(self)

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Joins the trainer's group, and leaves the one before."""
        self.shutdown()
        deadline = Deadline(min(init_info.timeout_s, init_info.deadline - time.monotonic()))
        if deadline.passed:
            raise TransferError("this worker came too late to the rendezvous")
        address, port = init_info.master_address, init_info.master_port
        rendezvous = Rendezvous(
            address,
            port,
            init_info.world_size,
            init_info.interface,
            init_info.shared_bytes,
            is_hosted=init_info.deadline < math.inf,
        )
        rank, kind = init_info.rank_offset + self.rank_in_replica, rendezvous.kind
        group = kind.join(rendezvous, rank, self.device, timeout_s=deadline.left_s)
        group.connect(timeout_s=max(deadline.left_s, 1.0))
        self._group, self._group_id = group, init_info.group_id

    def prepare(self, metadata: Sequence[ParamMeta], bucket_bytes: int) -> None:
        self._layout = buckets.BucketLayout(metadata, bucket_bytes)
        self._forget()
        self.path_reason = ""
        try:
            self._planned = self._recorded(metadata)
        except PlanNotPossibleError as error:
            self.path_reason = str(error)
            if self.arena is not None and not self.why_not_written():
                self._plan_quantised(metadata, self.arena)
            return
        if self.arena is not None:
            self._staged_plan = self._planned.redirected(self.arena.counterpart)
            self._writes = Writes(self._planned, self._staged_plan, {})
        if not self.takes_direct:
            self._make_buffers(self._layout)
            for plan in filter(None, (self._planned, self._staged_plan)):
                self._bound[plan] = buckets.bound_buckets(plan.copies, self._layout, self._buffers)

    def _recorded(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        if reason := self._distrust or why_not_a_plan(self.vllm_config):
            raise PlanNotPossibleError(reason)
        with set_current_vllm_config(self.vllm_config):
            return record_load_plan(self.model, metadata)

    def _recorded_to_compare(self, metadata: Sequence[ParamMeta]) -> LoadPlan:
        """A plan of which no copies are made: of one worker, targets may be quantised to fp8."""
        config, self._bare = self.vllm_config, {}
        others = self._distrust or why_not_a_plan(config, quantised=True)
        if others or self.parallel_config.world_size > 1 or not why_not_a_plan(config):
            return self._recorded(metadata)
        plan, self._bare = self._recorded_bare(metadata)
        return plan

    def _recorded_bare(
        self, metadata: Sequence[ParamMeta], *, by_row: bool = False
    ) -> tuple[LoadPlan, dict[int, str]]:
        """A plan as before what is fp8 was quantised, and the names of that by storage."""
        with (
            set_current_vllm_config(self.vllm_config),
            unquantised(self.model, by_row=by_row) as bare,
        ):
            return record_load_plan(self.model, metadata, bare), bare

    def _plan_quantised(self, metadata: Sequence[ParamMeta], arena: WeightArena) -> None:
        try:
            plan, bare = self._recorded_bare(metadata, by_row=True)
        except PlanNotPossibleError as error:
            self.path_reason = f"{self.path_reason}; {error}"
            return
        numbered = enumerate(one.target for one in plan.copies)
        names = ((number, one, bare.get(storage_key(one))) for number, one in numbered)
        quantised = {number: (name, one.dtype) for number, one, name in names if name}
        live = plan.redirected(functools.partial(self._held, bare))
        self._writes = Writes(live, live.redirected(arena.counterpart), quantised)

    def why_not_written(self) -> str:
        """Why no trainer can write to this worker's memory, as far as is known before a push."""
        others = why_not_a_plan(self.vllm_config, quantised=True)
        if why := self.staging_refusal or self._distrust or others:
            return why
        if (why := why_not_a_plan(self.vllm_config)) and self.config.backend == SHARED_BACKEND:
            return f"{why}: a trainer has no use of its weights' memory"
        try:
            with unquantised(self.model, by_row=True) if why else contextlib.nullcontext():
                return ""
        except PlanNotPossibleError as error:
            return f"{why}; {error}"

    @property
    def digest(self) -> str:
        return self._layout.digest if self._layout else ""

    def start_weight_update(self) -> None:
        """Does nothing: each push is complete in itself."""

    finish_weight_update = start_weight_update

    def receive_weights(self, update_info: BroadcastUpdateInfo) -> None:
        self.receive(self.await_weights(update_info))

    def await_weights(self, update_info: BroadcastUpdateInfo) -> float:
        """Waits until :meth:`receive` may begin; returns the deadline of the push."""
        if update_info.metadata is not None:
            self.prepare(from_json(update_info.metadata), update_info.bucket_bytes)
        deadline = time.monotonic() + update_info.timeout_s
        self.await_start(update_info.push_id, deadline)
        return deadline

    def await_start(self, push_id: int, deadline: float) -> None:
        """Waits for the trainer's signal to begin; until then nothing has been touched."""
        group, _ = self._ready()
        if push_id >> PUSH_ID_BITS != self._group_id:
            raise TransferError("another trainer has brought this worker into a group of its own")
        group.await_start(push_id, deadline=deadline)

    def receive(self, deadline: float, *, num_passes: int = 1, direct: bool = False) -> int:
        """Receives one push into the model; a second pass checks the plan. Returns how many."""
        _, layout = self._ready()
        with self._leaving_on_failure():
            if self._planned is None:
                self._transfer(self._reload, deadline)
                if num_passes > 1:
                    self._transfer(list, deadline)
            else:
                self._load(self._planned, deadline, direct)
                if num_passes > 1:
                    was_direct = self.takes_direct
                    self._compare_with(lambda: self._transfer(self._reload, deadline))
                    if was_direct:
                        self._buffers, self._bound = [], {}  # until the next check
        return len(layout.metadata)

    def stage(self, deadline: float, *, direct: bool = False) -> None:
        """Receives one push into spare memory, while the model goes on serving."""
        self._ready()
        self.require_staging()
        self._staged, tensors = None, list[tuple[str, torch.Tensor]]()
        with self._leaving_on_failure():
            if self._staged_plan is not None and self.arena is not None:
                self.arena.open()
                self._load(self._staged_plan, deadline, direct, ARRIVAL_POLL_S)
            else:
                self._transfer(lambda arrivals: tensors.extend(self._whole(arrivals)), deadline)
        self._staged = tensors

    def require_staging(self) -> None:
        if not self._can_stage:
            launched = "this engine was launched without memory for staged weights"
            why = self.staging_refusal or f"{launched}: launch it with stage_weights=True"
            raise TransferError(why)
        if self._staged_plan is None and self.device.type != "cpu":
            needed = "staged weights need a load plan, which this model has not"
            raise TransferError(f"{needed}: {self.path_reason}")

    @torch.no_grad()
    def install_staged(self) -> None:
        """Puts what :meth:`stage` received into the model; no step may run meanwhile."""
        self.require_staging()
        tensors, self._staged = self._staged, None
        if tensors is None:
            raise TransferError("no weights are staged")
        if self._staged_plan is None:
            reload_model(self.model, self.vllm_config, tensors)
            return
        assert self.arena is not None  # it has the plan's targets
        self.arena.swap()

    # ---- Writes from outside

    def plan_writes(self, metadata: Sequence[ParamMeta]) -> dict[str, Any]:
        if metadata_digest(metadata) != self.digest:  # else a broadcast goes on with its buckets
            self.prepare(metadata, buckets.DEFAULT_BUCKET_BYTES)
        arena, planned = self.arena, self._writes
        if arena is None or planned is None:
            reason = self.why_not_written() or self.path_reason
            reason = reason or "launch it with stage_weights=True"
            raise TransferError(f"this engine's memory cannot be written to: {reason}")
        writes: list[Any] = []
        for number, copy in enumerate(planned.live.copies):
            place, target = arena.place(copy.target), copy.target
            if place is None:
                raise TransferError(f"{copy.name} goes into a tensor that is no parameter")
            dtype, how = dtype_name(target.dtype), ()
            if number in planned.quantised:
                name, before = planned.quantised[number]
                scale, shape = self.model.get_parameter(f"{name}_scale"), (1,)
                if scale.numel() > 1:
                    weight = self.model.get_parameter(name)
                    begin = (target.storage_offset() - weight.storage_offset()) // len(weight)
                    scale, shape = scale[begin:], (copy.shape[0], 1)
                of_whole = SCALES_ARE_OF_ALL_WORKERS and self.parallel_config.world_size > 1
                how = arena.place(scale), shape, dtype_name(before), of_whole
            row = copy.name, copy.offset, tuple(copy.shape), tuple(copy.stride)
            writes.append((*row, dtype, place, tuple(target.stride()), *how))
        about = {"device": device_uuid(self.device), "is_shared": arena.is_shared}
        return {"num_bytes": arena.num_bytes, "writes": writes, **about}

    @torch.no_grad()
    def begin_writing(
        self, run_id: str, known: Sequence[int], path: str, about: dict[str, Any], timeout_s: float
    ) -> int:
        """Lets a run write; returns the number of the memory, which is handed over if it is new."""
        arena, planned = self.arena, self._writes
        if arena is None or planned is None:
            raise TransferError(f"no writes can be taken: {self.path_reason}")
        number = arena.begin(run_id)
        if number not in known:
            arena.open()
            planned.spare.fill_constants()
            hand_over(path, {**about, "number": number}, [arena.export()], timeout_s)
        return number

    @torch.no_grad()
    def take_written(self, run_id: str, number: int) -> dict[str, str]:
        """Serves what a run has written, checked the first time; no step may run meanwhile.

        Returns how it got into the model.
        """
        if self.arena is None or (planned := self._writes) is None:
            raise TransferError("no writes were planned")
        self.arena.take(run_id, number)
        if not self.is_checked:
            self.is_checked = True
            tensors = planned.spare.tensors()
            if self.arena.is_shared:
                # They are read from where a reload writes to; the GPU may have no room for both.
                tensors = [(name, one.cpu()) for name, one in tensors]
            else:
                self.arena.mirror()  # the plan reads from there, which a reload leaves alone
            clear = self._without_scales(planned)
            self._compare_with(lambda: reload_model(self.model, self.vllm_config, tensors), clear)
            if self._distrust and planned.quantised:
                raise TransferError(self._distrust)
            if planned.quantised:
                self.arena.restore()
            if self._distrust and any(one.isnan().any() for one in self.model.parameters()):
                raise TransferError(f"{self._distrust}; some of the weights were not written")
        return {"path": "plan", "path_reason": ""} if self._writes else self.path_taken

    def _without_scales(self, planned: Writes) -> Callable[[], None]:
        """Sets scales to 1, as a reload of fp8's values finds them: the greatest is fp8's greatest.

        Returns what clears rows of which that is not so, before the reload and after it.
        """
        small: dict[str, torch.Tensor] = {}
        for name in {name for name, _ in planned.quantised.values()}:
            weight, scale = map(self.model.get_parameter, (name, f"{name}_scale"))
            if scale.numel() > 1:
                greatest = torch.linalg.vector_norm(weight.t().float(), torch.inf, 1)
                small[name] = greatest < torch.finfo(weight.dtype).max
            scale.fill_(1)

        def clear() -> None:
            for name, rows in small.items():
                weight, scale = map(self.model.get_parameter, (name, f"{name}_scale"))
                weight.t().view(torch.uint8)[rows] = 0
                scale[rows] = 1

        return clear

    # ---- Audits

    def plan_audit(self, metadata: Sequence[ParamMeta]) -> list[list[Any]]:
        if self.vllm_config.model_config.is_moe and not self._agrees:
            raise PlanNotPossibleError(
                "experts may be laid out anew after loading; whether they are is known after a "
                "first push by broadcast or p2p"
            )
        plan = self._planned if metadata_digest(metadata) == self.digest else None
        self._audited = plan or self._recorded_to_compare(metadata)
        rows = [
            [one.name, one.offset, [*one.shape], [*one.stride], dtype_name(one.target.dtype), group]
            for one in self._audited.copies
            for group in [self._bare.get(storage_key(one.target), "")]
        ]
        names = [(f"{one}_scale", one) for one in self._bare.values()]
        return rows + [[name, 0, [1], [1], "float32", group] for name, group in names]

    def audited(self, digest: str) -> list[torch.Tensor]:
        """Returns the slices of :meth:`plan_audit` as they are now."""
        plan = self._audited
        if self._distrust or plan is None or metadata_digest(plan.metadata) != digest:
            raise TransferError(self._distrust or "this worker was asked about other tensors since")
        if not plan.is_of(self.model):  # a reload may replace them
            self._audited = plan = self._recorded_to_compare(plan.metadata)
        scales = [self.model.get_parameter(f"{one}_scale") for one in self._bare.values()]
        return [self._held(self._bare, one.target) for one in plan.copies] + scales

    def _held(self, bare: dict[int, str], target: torch.Tensor) -> torch.Tensor:
        if (name := bare.get(storage_key(target))) is None:
            return target
        weight = self.model.get_parameter(name).t()  # in the order that it arrived in
        place = weight.storage_offset() + target.storage_offset()
        return weight.as_strided(target.shape, target.stride(), place)

    def shutdown(self) -> None:
        """Leaves the group; the trainer notices if it is still sending. Idempotent."""
        if self._group is not None:
            if self._group.memory is not None:  # which the buffers are in
                self._buffers, self._bound = [], {}
            self._group.close()
            self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[object], trainer_args: object) -> None:
        """Required by vLLM 0.26 and 0.27."""
        raise NotImplementedError("send with torchrl_vllm_sync's BroadcastTransport")

    def _ready(self) -> tuple[BroadcastGroup, buckets.BucketLayout]:
        if self._group is None:
            raise TransferError("this worker has not joined a group, or left it after a failure")
        if self._layout is None:
            raise TransferError("the push is unprepared: its metadata were never sent")
        return self._group, self._layout

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """Leaves the group if a transfer breaks off, so that the others notice."""
        try:
            yield
        except RuntimeError as error:  # what communicators raise, or our own
            self.shutdown()
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"the transfer broke off: {error}") from error

    def _forget(self) -> None:
        self._planned: LoadPlan | None = None
        self._staged_plan: LoadPlan | None = None
        self._writes: Writes | None = None
        self.is_checked = False  # by writes from outside
        self._buffers: list[torch.Tensor] = []
        self._bound: dict[LoadPlan, list[buckets.BoundBucket]] = {}

    def _make_buffers(self, layout: buckets.BucketLayout) -> None:
        memory = None if self._group is None else self._group.memory
        self._buffers = buckets.make_buffers(layout, self.device, memory)

    def _transfer(self, take: Take, deadline: float, poll_s: float = SPIN_S) -> None:
        """Passes the buckets to ``take`` as they arrive, and waits for the end."""
        group, layout = self._ready()
        if not self._buffers:
            self._make_buffers(layout)
        arrivals = buckets.receive_buckets(group, layout, self._buffers, deadline=deadline)
        with group.side_stream():
            try:
                take(arrivals)
            finally:  # if ``take`` failed this worker still takes part: the others' must end
                deque(arrivals, maxlen=0)
        self._await_end(group, deadline, poll_s)

    def _await_end(self, group: BroadcastGroup, deadline: float, poll_s: float) -> None:
        group.synchronize(deadline=deadline, watch=group.raise_if_given_up, poll_s=poll_s)

    @torch.no_grad()
    def _load(self, plan: LoadPlan, deadline: float, direct: bool, poll_s: float = SPIN_S) -> None:
        plan.fill_constants()
        if not direct:
            self._transfer(lambda arrivals: self._copy(plan, arrivals), deadline, poll_s)
            return
        group, _ = self._ready()
        if plan.whole_targets is None:
            raise TransferError("this worker cannot receive without buckets")
        buckets.broadcast_tensors(group, plan.whole_targets, deadline=deadline)
        self._await_end(group, deadline, poll_s)

    def _copy(self, plan: LoadPlan, arrivals: Iterator[int]) -> None:
        if plan not in self._bound:
            self._bound[plan] = buckets.bound_buckets(plan.copies, self._ready()[1], self._buffers)
        for index in arrivals:
            self._bound[plan][index].unpack()

    def _whole(self, arrivals: Iterator[int]) -> Iterator[tuple[str, torch.Tensor]]:
        return buckets.whole_tensors(self._ready()[1], self._buffers, arrivals)

    def _reload(self, arrivals: Iterator[int]) -> None:
        reload_model(self.model, self.vllm_config, self._whole(arrivals))

    def _compare_with(
        self, reload: Callable[[], object], clear: Callable[[], object] = lambda: None
    ) -> None:
        """Gives the plan up if ``reload`` leaves other values, which are the right ones.

        What ``clear`` sets on both sides is not compared.
        """
        clear()
        by_plan = audit.checksum(self.model.named_parameters())
        reload()
        clear()
        by_reload = audit.checksum(self.model.named_parameters())
        if wrong := [name for name in by_reload if by_plan.get(name) != by_reload[name]]:
            what = f"left other values than a reload in {len(wrong)} parameters: {first_few(wrong)}"
        elif (plan := self._writes.live if self._writes else self._planned) is not None and (
            not plan.is_of(self.model)
        ):
            what = "writes to tensors that a reload replaces"
        else:
            self._agrees = True
            return
        self._planned = self._staged_plan = self._writes = None
        self._distrust = self.path_reason = f"the plan {what}"


for _name in (BROADCAST_BACKEND, STAGED_BACKEND, SHARED_BACKEND):
    if _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, BroadcastReceiver)

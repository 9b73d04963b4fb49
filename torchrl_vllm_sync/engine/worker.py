"""Methods that this library adds to every vLLM worker, called by ``collective_rpc``.

VLLM mixes the class into its worker class. Names carry a prefix, because one that collides with the
worker's own fails an assertion. Failures are returned as data: an exception that crosses
``collective_rpc`` loses its type.
"""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.engine.adapters import WorkerAdapters
from torchrl_vllm_sync.engine.args import BROADCAST_BACKEND
from torchrl_vllm_sync.engine.internals import knows_its_steps, spare_generators
from torchrl_vllm_sync.engine.plan import Tensors, reload_model, repack_cpu
from torchrl_vllm_sync.engine.receiver import (
    BroadcastInitInfo,
    BroadcastReceiver,
    rank_in_replica,
    why_not_a_plan,
)
from torchrl_vllm_sync.errors import (
    SyncError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.replica import NOT_STAGED
from torchrl_vllm_sync.weights.adapters import Door
from torchrl_vllm_sync.weights.audit import checksum, checksums, chunk_of
from torchrl_vllm_sync.weights.module import ParamMeta, from_json, metadata_digest
from torchrl_vllm_sync.weights.p2p.memory import device_uuid
from torchrl_vllm_sync.weights.snapshots.data_file import open_tensordict
from torchrl_vllm_sync.weights.source import device_name

# Bytes of one chunk of a peer's weights, and where a worker leaves it for one on the same node.
CHUNK_BYTES = 64 * 2**20
PEER_DIRECTORY = Path("/dev/shm")
PEER_PREFIX = "torchrl_vllm_sync_peer-"


class PeerCopy:
    """All tensors of a worker's model as one row of bytes, in chunks for a model just like it."""

    def __init__(self, model: torch.nn.Module, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._rows = {name: _row_of(name, one.detach()) for name, one in tensors if one.numel()}
        self.layout = [
            (name, str(one.dtype), tuple(one.shape), one.stride()) for name, one in tensors
        ]
        self.num_chunks = -(-sum(row.numel() for row in self._rows.values()) // chunk_bytes)

    def give(self, index: int) -> bytes:
        return b"".join(piece.cpu().numpy().tobytes() for piece in self._pieces(index))

    def give_file(self, index: int, path: str) -> None:
        """Writes one chunk to a file that only this user can read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.writelines(piece.cpu().numpy().data for piece in self._pieces(index))

    def take(self, index: int, source: bytes | str) -> None:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        pieces = list(self._pieces(index))
        sizes = [piece.numel() for piece in pieces]
        if len(data) != sum(sizes):
            raise TransferError(f"chunk {index} has {len(data)} bytes, which do not fit")
        # NumPy's, as torch's takes no empty one: workers may have fewer chunks than others have.
        parts = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part)

    def checksums(self) -> dict[str, int]:
        return checksum(self._rows.items())

    def _pieces(self, index: int) -> Iterator[torch.Tensor]:
        begin, offset = index * self._chunk_bytes, 0
        end = begin + self._chunk_bytes
        for row in self._rows.values():
            low, high = max(begin - offset, 0), min(end - offset, row.numel())
            if low < high:
                yield row[low:high]
            offset += row.numel()


def _row_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order of its memory, whatever the order of its dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        raise TransferError(f"{name} has gaps: strides {tensor.stride()}, shape {tensor.shape}")
    return dense.reshape(-1).view(torch.uint8)


def answered(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Makes a method return its failure, and ``untouched``: whether the weights are as before."""

    @functools.wraps(method)
    def answer(self: SyncWorkerExtension, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._sync_touched = False
        try:
            given = method(self, *args, **kwargs) or {}
            if self._sync_touched:
                self._sync_forget_encodings()
        except Exception as failure:  # noqa: BLE001  any is reported to the replica's actor
            kind = type(failure).__name__
            is_own = isinstance(failure, SyncError) and str(failure)
            given = {
                "error": str(failure) if is_own else f"{kind}: {failure}",
                "error_type": kind,
                "traceback": traceback.format_exc(),
            }
        return {"error": "", "untouched": not self._sync_touched, **given}

    return answer


class SyncWorkerExtension:
    """Methods of a vLLM worker with which its replica's actor replaces and reads weights.

    A ``worker_extension_cls`` of your own must subclass this one. Methods named ``native_`` drive
    the worker's transfer engine, whichever it is; unlike those of vLLM's worker (0.26 to 0.32) they
    put the model together when an update fails.
    """

    # Of vLLM's worker.
    vllm_config: VllmConfig
    device: torch.device
    model_runner: Any
    execute_model: Callable[..., Any]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool

    _sync_engine: Any = None
    _sync_touched: bool = False
    _sync_peer: PeerCopy
    _sync_peer_file: str
    _sync_staged: Future[dict[str, Any]]
    _sync_step: Any = None  # what the scheduler gave out for the last step
    _native_launched: WeightTransferEngine[Any, Any] | None = None
    _native_ready: bool = False
    _native_parts: int | None = None  # received of the update that is open

    @property
    def weight_transfer_engine(self) -> Any:
        return self._sync_engine

    @weight_transfer_engine.setter
    def weight_transfer_engine(self, engine: Any) -> None:
        """VLLM sets it as soon as the weights are loaded, and then sizes the KV cache."""
        is_first, self._sync_engine = self._sync_engine is None, engine
        if not is_first or not isinstance(engine, BroadcastReceiver):
            return
        execute, arena = self.execute_model, engine.arena

        def watched(step: Any, *args: Any) -> Any:
            self._sync_step = step
            return execute(step, *args)

        if knows_its_steps(engine.vllm_config):
            self.execute_model = watched
        if arena is not None and engine.device.type == "cuda":
            # The weights, which vLLM has counted, are in the arena, which it counts as well.
            self.model_runner.model_memory_usage -= arena.num_bytes

    def _sync_loaded(self, begin: float, num_tensors: int, path: dict[str, str]) -> dict[str, Any]:
        """What :meth:`Updates.swap` is told: ``computed`` is how many keys the last step left."""
        computed: dict[str, int] = {}
        if (step := self._sync_step) is not None:
            known = step.scheduled_cached_reqs
            before = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
            before |= {one.req_id: one.num_computed_tokens for one in step.scheduled_new_reqs}
            computed = {name: before[name] + n for name, n in step.num_scheduled_tokens.items()}
        seconds = time.perf_counter() - begin
        return {"num_tensors": num_tensors, "seconds": seconds, "computed": computed, **path}

    @answered
    def sync_load_snapshot(self, path: str, metadata: list[list[Any]]) -> dict[str, Any]:
        """Loads one stored version, which the caller has verified and holds the lock on."""
        self._sync_part()
        self._sync_touched = True

        def load() -> int:
            weights = self._sync_tensors(Path(path), from_json(metadata))
            return reload_model(self._sync_model(), self.vllm_config, weights)

        try:
            num_tensors, attempts = load(), 1
        except Exception:  # noqa: BLE001  the second attempt repairs what the first left behind
            num_tensors, attempts = load(), 2
        taken = {"path": "layerwise", "path_reason": "snapshots are always loaded that way"}
        return {"num_tensors": num_tensors, "attempts": attempts, **taken}

    @answered
    def sync_join(self, init_info: dict[str, Any]) -> None:
        self._sync_receiver().init_transfer_engine(BroadcastInitInfo(**init_info))

    @answered
    def sync_prepare(self, metadata: list[list[Any]], bucket_bytes: int) -> dict[str, Any]:
        """Prepares for the tensors of all coming pushes; the model may be serving."""
        receiver = self._sync_receiver()
        receiver.prepare(from_json(metadata), bucket_bytes)
        return {**receiver.path_taken, "direct": receiver.takes_direct}

    @answered
    def sync_receive(
        self, push_id: int, digest: str, direct: bool, num_passes: int, timeout_s: float
    ) -> dict[str, Any]:
        """Receives one push into the model; no step may run meanwhile."""
        begin = time.perf_counter()
        deadline = time.monotonic() + timeout_s
        receiver = self._sync_prepared(digest)
        receiver.await_start(push_id, deadline)
        self._sync_part()
        self._sync_touched = True
        num_tensors = receiver.receive(deadline, num_passes=num_passes, direct=direct)
        return self._sync_loaded(begin, num_tensors, receiver.path_taken)

    @answered
    def sync_stage(self, push_id: int, digest: str, direct: bool, timeout_s: float) -> None:
        """Begins to receive one push into spare memory, in a thread; returns at once."""
        deadline, receiver = time.monotonic() + timeout_s, self._sync_prepared(digest)
        receiver.require_staging()

        def stage(_: SyncWorkerExtension) -> dict[str, Any]:
            receiver.await_start(push_id, deadline)
            began_at = time.monotonic()
            receiver.stage(deadline, direct=direct)
            return {"began_at": began_at}

        self._sync_staged = in_thread("staged-weights", lambda: answered(stage)(self))

    def sync_staged(self) -> dict[str, Any] | None:
        return self._sync_staged.result() if self._sync_staged.done() else None

    @answered
    def sync_install_staged(self) -> dict[str, Any]:
        """Puts staged weights into the model; no step may run meanwhile."""
        self._sync_touched, begin = True, time.perf_counter()
        receiver = self._sync_receiver()
        receiver.install_staged()
        return self._sync_loaded(begin, 0, receiver.path_taken)

    @answered
    def sync_plan_writes(self, metadata: list[list[Any]]) -> dict[str, Any]:
        return self._sync_receiver().plan_writes(from_json(metadata))

    @answered
    def sync_begin_writing(
        self,
        run_id: str,
        known: list[list[int] | None],
        path: str,
        replica_id: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Says which memory may be written to; the model may be serving."""
        receiver = self._sync_receiver()
        rank = receiver.rank_in_replica
        if (own := known[rank]) is None:
            self._sync_part()
        about = {"replica_id": replica_id, "rank": rank}
        number = receiver.begin_writing(run_id, own or (), path, about, timeout_s)
        return {"number": number, "is_checked": receiver.is_checked}

    @answered
    def sync_take_written(self, run_id: str, numbers: list[int]) -> dict[str, Any]:
        """Serves what was written; no step may run meanwhile."""
        self._sync_touched, begin = True, time.perf_counter()
        receiver = self._sync_receiver()
        path = receiver.take_written(run_id, numbers[receiver.rank_in_replica])
        return self._sync_loaded(begin, 0, path)

    @answered
    def sync_settle(self) -> None:
        """Waits for the last step: what it computes with may be changed from outside now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sync_staging_refusal(self) -> str:
        """Why the launch could not reserve memory for staged weights; empty if nothing is wrong."""
        receiver = self.weight_transfer_engine
        return receiver.staging_refusal if isinstance(receiver, BroadcastReceiver) else ""

    def sync_describe(self) -> tuple[str, str, str]:
        """Returns UUID (of a GPU) and name of its device, and why no trainer can write to it."""
        if self.device.type == "cpu":  # once, before any request
            spare_generators(self.model_runner)
        receiver, why = self.weight_transfer_engine, NOT_STAGED
        if isinstance(receiver, BroadcastReceiver) and receiver.config.backend != BROADCAST_BACKEND:
            why = receiver.why_not_written()
        return device_uuid(self.device), device_name(self.device), why

    def sync_leave(self) -> None:
        self._sync_receiver().shutdown()

    @answered
    def sync_peer_open(self, token: str, gives: bool) -> dict[str, Any]:
        """Prepares to give this worker's tensors to a peer, or to take a peer's."""
        receiver = self._sync_receiver()
        name = f"{PEER_PREFIX}{token}-{receiver.rank_in_replica}"
        self._sync_peer_file = str(PEER_DIRECTORY / name)
        # Pushes by a load plan prove that the tensors are all that the model computes with; a
        # worker without one yet trusts a peer of equal settings.
        unproven = receiver.path_reason if gives and receiver.path != "plan" else ""
        if reason := why_not_a_plan(self.vllm_config) or unproven:
            raise TransferError(f"weights cannot be copied as they are: {reason}")
        if not gives:
            self._sync_part()
        self._sync_peer = PeerCopy(self._sync_model())
        return {"layout": self._sync_peer.layout, "num_chunks": self._sync_peer.num_chunks}

    @answered
    def sync_peer_give(self, index: int, by_value: bool) -> dict[str, Any]:
        """Returns one chunk as ``source``: its bytes, or the path of a file that holds it now."""
        if by_value:
            return {"source": self._sync_peer.give(index)}
        self._sync_peer.give_file(index, self._sync_peer_file)
        return {"source": self._sync_peer_file}

    @answered
    def sync_peer_take(self, index: int, sources: list[Any]) -> None:
        """Overwrites one chunk with that of the peer of this worker's rank; no step may run."""
        self._sync_peer.take(index, sources[self._sync_receiver().rank_in_replica])

    @answered
    def sync_peer_checksums(self) -> dict[str, Any]:
        return {"checksums": self._sync_peer.checksums()}

    @answered
    def sync_peer_close(self) -> None:
        Path(self._sync_peer_file).unlink(missing_ok=True)
        self._sync_forget_encodings()

    @functools.cached_property
    def _sync_adapters(self) -> WorkerAdapters:
        if self.vllm_config.lora_config is None:
            raise WeightMismatchError("engines hold no adapters unless launched with enable_lora")
        return WorkerAdapters(self.model_runner)

    @answered
    def sync_prepare_adapter(
        self,
        config: str,
        metadata: list[list[Any]],
        door: Door | None,
        replica_id: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        own, weights = self._sync_adapters, from_json(metadata)
        dtype = own.prepare(config, weights)
        if door is not None:
            about = {"replica_id": replica_id, "rank": rank_in_replica(self.vllm_config)}
            own.open_inbox(weights, door, about, timeout_s)
        return {"dtype": dtype}

    @answered
    def sync_put_adapter(self, *version: Any) -> dict[str, Any]:
        """Takes a version of an adapter; no step may run meanwhile."""
        begin = time.perf_counter()
        self._sync_adapters.put(*version)
        return {"seconds": time.perf_counter() - begin}

    @answered
    def sync_empty_slots(self) -> None:
        self._sync_adapters.empty_slots()

    @answered
    def sync_give_adapter(self, lora_id: int, path: str) -> None:
        self._sync_adapters.give(lora_id, path)

    def _sync_held(self, digest: str, adapters: list[int]) -> list[torch.Tensor]:
        """What an audit of such weights compares, those of an adapter if they are that."""
        has_adapters = self.vllm_config.lora_config is not None
        found = self._sync_adapters.audited(digest, adapters) if has_adapters else None
        return self._sync_receiver().audited(digest) if found is None else found

    @answered
    def sync_plan_audit(self, metadata: list[list[Any]]) -> dict[str, Any]:
        weights = from_json(metadata)
        has_adapters = self.vllm_config.lora_config is not None
        found = self._sync_adapters.slices(metadata_digest(weights)) if has_adapters else None
        return {"slices": self._sync_receiver().plan_audit(weights) if found is None else found}

    @answered
    def sync_audit(self, digest: str, adapters: list[int]) -> dict[str, Any]:
        return {"checksums": checksums(self._sync_held(digest, adapters))}

    @answered
    def sync_audit_values(
        self, digest: str, rank: int, at: int, chunk: int, adapters: list[int]
    ) -> dict[str, Any]:
        """Returns some bytes of one slice, if it is this worker who is asked."""
        if self._sync_receiver().rank_in_replica != rank:
            return {"values": b""}
        return {"values": chunk_of(self._sync_held(digest, adapters)[at], chunk)}

    def _sync_receiver(self) -> BroadcastReceiver:
        """Who knows the load plan, also while an engine of vLLM's takes the pushes."""
        receiver = self._native_launched or self.weight_transfer_engine
        if not isinstance(receiver, BroadcastReceiver):
            raise TransferError(
                "the broadcast transport needs weight_transfer_config to be left unset at launch; "
                f"this worker has {type(receiver).__name__}"
            )
        return receiver

    def _sync_part(self) -> None:
        """Leaves memory that a trainer shares to it: other weights are about to come."""
        receiver = self._native_launched or self.weight_transfer_engine
        if isinstance(receiver, BroadcastReceiver) and receiver.arena is not None:
            receiver.arena.part()

    def _sync_prepared(self, digest: str) -> BroadcastReceiver:
        receiver = self._sync_receiver()
        if receiver.digest != digest:
            raise TransferError("the push holds other tensors than this worker was prepared for")
        return receiver

    def _sync_forget_encodings(self) -> None:
        """Drops vision encodings that were computed with the old weights."""
        if self.vllm_config.model_config.is_multimodal_model:
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()

    def _sync_tensors(self, path: Path, metadata: list[ParamMeta]) -> Tensors:
        return open_tensordict(path, metadata).items()

    def _sync_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    @answered
    def native_use(self, backend: str | None) -> None:
        self._native_refuse_open("another engine")
        present = self.weight_transfer_engine
        wanted = launched = self._native_launched = self._native_launched or present
        if backend is not None and (launched is None or launched.config.backend != backend):
            if backend not in (known := WeightTransferEngineFactory._registry):
                rule = f"backend must be one of {sorted(known)}"
                raise UnsupportedArgumentError(f"{rule}, got {backend!r}")
            made_of = self.vllm_config, self.device, self._sync_model()
            config = WeightTransferConfig(backend=backend)
            wanted = WeightTransferEngineFactory.create_engine(config, *made_of)
        if present is not None:
            present.shutdown()
        self.weight_transfer_engine, self._native_ready = wanted, False

    @answered
    def native_init(self, init_info: dict[str, Any]) -> None:
        self._native_refuse_open("initialising")
        engine = self._native_engine()
        self._native_ready = False
        engine.init_transfer_engine(engine.parse_init_info(dict(init_info)))
        self._native_ready = True

    @answered
    def native_shutdown(self) -> None:
        """Does what vLLM's ``shutdown_weight_transfer_engine`` does, which 0.26 does not have."""
        self._native_abandon()
        self._native_ready = False
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.shutdown()

    def native_engine_name(self) -> str:
        return type(self.weight_transfer_engine).__name__

    @answered
    def native_check(self) -> None:
        """Checks that an update could begin; changes nothing."""
        engine = self._native_engine()
        if not self._native_ready:
            what = f"{type(engine).__name__} is not initialised"
            raise TransferNotReadyError(f"{what}: call init_weight_transfer_engine first")

    @answered
    def native_start(self) -> None:
        """Begins an update; no step may run until it has ended."""
        self._native_abandon()
        self._sync_part()
        engine = self._native_engine()
        self._native_parts = 0
        if not isinstance(engine, BroadcastReceiver):
            try:
                with set_current_vllm_config(self.vllm_config):
                    self.start_weight_update()
            except BaseException:
                self._native_abandon()
                raise

    @answered
    def native_update(self, update_info: dict[str, Any] | list[Any]) -> None:
        engine = self._native_engine()
        parts = self._native_open_parts()
        self._sync_touched = parts > 0
        if isinstance(update_info, list):
            update_info = update_info[rank_in_replica(self.vllm_config)]
        info = dict(update_info)
        parsed = engine.parse_update_info(dict(info))
        if isinstance(engine, BroadcastReceiver):
            deadline = engine.await_weights(parsed)
            self._sync_touched = True
            engine.receive(deadline)
        else:
            self._sync_touched = True
            with set_current_vllm_config(self.vllm_config):
                self.update_weights(info)
        self._native_parts = parts + 1

    @answered
    def native_finish(self) -> None:
        self._sync_touched = True
        self._native_open_parts()
        engine = self._native_engine()
        if not isinstance(engine, BroadcastReceiver):
            with set_current_vllm_config(self.vllm_config):
                self.finish_weight_update()
                repack_cpu(engine.model)
        self._native_parts = None

    def _native_abandon(self) -> None:
        """Gives an open update up and puts the model together, so that a later one starts clean."""
        if self._native_parts is None:
            return
        self._native_parts = None
        engine = self._native_engine()
        if not isinstance(engine, BroadcastReceiver):
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(engine.model, engine.model_config)
                repack_cpu(engine.model)
            self._weight_update_active = False
        engine.reset_weight_update_target()

    native_abandon = answered(_native_abandon)

    def _native_open_parts(self) -> int:
        if self._native_parts is None:
            raise TransferNotReadyError("no update was begun: start_weight_update comes first")
        return self._native_parts

    def _native_refuse_open(self, what: str) -> None:
        if self._native_parts is not None:
            raise TransferNotReadyError(f"{what} has to wait: a weight update is open")

    def _native_engine(self) -> Any:
        if self.weight_transfer_engine is None:
            raise TransferNotReadyError("this engine has no weight_transfer_config")
        return self.weight_transfer_engine

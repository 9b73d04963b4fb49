"""What this library adds to every vLLM worker: methods called by ``collective_rpc``.

Importing it registers the receiver of the ``broadcast`` transport with vLLM, which mixes the class
into its own worker class when ``worker_extension_cls`` names it, so only engines started by this
library are touched. Names carry a prefix, because an attribute that collides with the worker's own
fails an assertion. Failures come back as data: an exception that crosses ``collective_rpc`` loses
its type.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from torchrl_vllm_sync.engine import receiver as receiver_module
from torchrl_vllm_sync.engine.receiver import BroadcastInitInfo, BroadcastReceiver, why_not_a_plan
from torchrl_vllm_sync.engine.reload import reload_model, repack_cpu, tensor_checksum
from torchrl_vllm_sync.errors import TransferError, TransferNotReadyError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.metadata import from_json
from torchrl_vllm_sync.weights.places import device_uuid
from torchrl_vllm_sync.weights.snapshots.data_file import open_tensordict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from torchrl_vllm_sync.weights.metadata import ParamMeta


# vLLM's own weight transfer in a worker: its calls with failures as data, and another engine.
#
# vLLM's worker methods of the same purpose (``vllm/v1/worker/gpu_worker.py``, 0.26 to 0.32) raise,
# and what they raise loses its type on the way; a failed update leaves the model taken apart. Here
# a failure says whether the weights are as they were, and puts the model together again.


class NativeTransferWorker:
    """Methods of a vLLM worker that drive its weight-transfer engine; names carry a prefix.

    Each returns ``error``, empty if all is well, ``error_type``, and ``untouched``: whether the
    weights are as they were before the update began.
    """

    _native_launched: WeightTransferEngine[Any, Any] | None = None
    _native_ready: bool = False
    _native_chunks: int | None = None

    def native_use(self, backend: str | None) -> dict[str, Any]:
        """Puts another transfer engine in the place of the present one, which leaves its group."""

        def use() -> None:
            self._native_refuse_open("another engine")
            present = self._native_host.weight_transfer_engine
            if self._native_launched is None:
                self._native_launched = present
            launched = self._native_launched
            if backend is None or (launched is not None and launched.config.backend == backend):
                wanted = launched
            else:
                known = WeightTransferEngineFactory._registry
                if backend not in known:
                    raise UnsupportedArgumentError(
                        f"backend must be one of {sorted(known)}, got {backend!r}"
                    )
                wanted = WeightTransferEngineFactory.create_engine(
                    WeightTransferConfig(backend=backend),
                    self._native_host.vllm_config,
                    self._native_host.device,
                    self._native_host.model_runner.get_model(),
                )
            if present is not None:
                present.shutdown()
            self._native_host.weight_transfer_engine, self._native_ready = wanted, False

        return self._native_answer(use)

    def native_init(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """Initialises the transfer engine; for most that is the rendezvous with the trainer."""

        def init() -> None:
            self._native_refuse_open("initialising")
            engine = self._native_engine()
            self._native_ready = False
            engine.init_transfer_engine(engine.parse_init_info(dict(init_info)))
            self._native_ready = True

        return self._native_answer(init)

    def native_shutdown(self) -> dict[str, Any]:
        """Leaves the trainer's group; initialising again is possible.

        Does what vLLM's ``shutdown_weight_transfer_engine`` does, which 0.26 does not have.
        """

        def shutdown() -> None:
            self._native_abandon()
            self._native_ready = False
            if self._native_host.weight_transfer_engine is not None:
                self._native_host.weight_transfer_engine.shutdown()

        return self._native_answer(shutdown)

    def native_engine_name(self) -> str:
        """Returns the class name of the present transfer engine."""
        return type(self._native_host.weight_transfer_engine).__name__

    def native_device_uuid(self) -> str:
        """Returns the UUID of this worker's GPU; empty on a CPU."""
        return device_uuid(self._native_host.device)

    def native_check(self) -> dict[str, Any]:
        """Says whether an update could begin; changes nothing."""

        def check() -> None:
            engine = self._native_engine()
            if not self._native_ready:
                raise TransferNotReadyError(
                    f"{type(engine).__name__} is not initialised: call "
                    "init_weight_transfer_engine first"
                )

        return self._native_answer(check)

    def native_start(self) -> dict[str, Any]:
        """Begins an update; no step may run until it has ended."""

        def start() -> None:
            self._native_abandon()
            engine = self._native_engine()
            self._native_chunks = 0
            if not isinstance(engine, BroadcastReceiver):
                with set_current_vllm_config(self._native_host.vllm_config):
                    self._native_host.start_weight_update()

        answer = self._native_answer(start)
        if answer["error"]:
            self._native_abandon()
        return {**answer, "untouched": True}

    def native_update(self, update_info: dict[str, Any] | list[Any]) -> dict[str, Any]:
        """Receives one part of an update, or all of it."""
        touched = bool(self._native_chunks)

        def update() -> None:
            nonlocal touched
            engine = self._native_engine()
            if self._native_chunks is None:
                raise TransferNotReadyError("no update was begun: start_weight_update comes first")
            info = dict(self._native_own(update_info))
            if "ipc_handles_bytes" in info:  # from this library's own trainer side
                info["ipc_handles"] = pickle.loads(info.pop("ipc_handles_bytes"))
            parsed = engine.parse_update_info(dict(info))
            if isinstance(engine, BroadcastReceiver):
                if parsed.metadata is not None:
                    engine.prepare(from_json(parsed.metadata), parsed.bucket_bytes)
                deadline = time.monotonic() + parsed.timeout_s
                engine.await_start(parsed.push_id, deadline)
                touched = True
                engine.receive(deadline, num_passes=parsed.num_passes)
            else:
                touched = True
                with set_current_vllm_config(self._native_host.vllm_config):
                    self._native_host.update_weights(dict(info))
            self._native_chunks += 1

        answer = self._native_answer(update)
        return {**answer, "untouched": not touched}

    def native_finish(self) -> dict[str, Any]:
        """Ends an update; afterwards the model is whole."""

        def finish() -> None:
            engine = self._native_engine()
            if self._native_chunks is None:
                raise TransferNotReadyError("no update was begun: start_weight_update comes first")
            if not isinstance(engine, BroadcastReceiver):
                with set_current_vllm_config(self._native_host.vllm_config):
                    self._native_host.finish_weight_update()
                    repack_cpu(engine.model)
            self._native_chunks = None
            self._native_host._sync_forget_encodings()

        return self._native_answer(finish)

    def native_load(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Begins, receives and ends an update in one call."""
        answer = self.native_start()
        if not answer["error"]:
            answer = self.native_update(update_info)
            if not answer["error"]:
                answer = {**self.native_finish(), "untouched": False}
            if answer["error"]:
                self._native_abandon()
        return answer | {
            "num_tensors": len(update_info["names"]),
            "attempts": 1,
            "path": "layerwise",
            "path_reason": f"vLLM's {self.native_engine_name()} always takes it",
        }

    def native_abandon(self) -> dict[str, Any]:
        """Gives an open update up and puts the model together, so that a later one starts clean."""
        return self._native_answer(self._native_abandon)

    @property
    def _native_host(self) -> Any:
        """The worker that this class is mixed into."""
        return self

    def _native_abandon(self) -> None:
        """Finalises a layerwise reload that was begun: left alone it would poison the next one."""
        if self._native_chunks is None:
            return
        self._native_chunks = None
        engine = self._native_engine()
        if not isinstance(engine, BroadcastReceiver):
            with set_current_vllm_config(self._native_host.vllm_config):
                finalize_layerwise_reload(engine.model, engine.model_config)
                repack_cpu(engine.model)
            self._native_host._weight_update_active = False
        engine.reset_weight_update_target()

    def _native_own(self, update_info: dict[str, Any] | list[Any]) -> dict[str, Any]:
        if isinstance(update_info, dict):
            return update_info
        parallel = self._native_host.vllm_config.parallel_config
        return update_info[parallel.data_parallel_index * parallel.world_size + parallel.rank]

    def _native_refuse_open(self, what: str) -> None:
        if self._native_chunks is not None:
            raise TransferNotReadyError(f"{what} has to wait: a weight update is open")

    def _native_engine(self) -> WeightTransferEngine[Any, Any]:
        if self._native_host.weight_transfer_engine is None:
            raise TransferNotReadyError("this engine has no weight_transfer_config")
        return self._native_host.weight_transfer_engine

    def _native_answer(self, call: Callable[[], None]) -> dict[str, Any]:
        try:
            call()
        except Exception as failure:  # noqa: BLE001  any is reported to the replica's actor
            return {
                "error": str(failure) or type(failure).__name__,
                "error_type": type(failure).__name__,
                "traceback": traceback.format_exc(),
            }
        return {"error": "", "error_type": ""}


# A model's parameters and buffers as they are, copied from a worker to one of the same rank.
#
# Two replicas with the same engine arguments hold the same tensors under the same names in the
# same
# layouts, so nothing is loaded or processed: bytes go from tensor to tensor, in chunks of fixed
# size.


CHUNK_BYTES = 64 * 2**20


class PeerCopy:
    """One worker's end: all its tensors as one row of bytes, cut into chunks."""

    def __init__(self, model: torch.nn.Module, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rows: list[tuple[str, torch.Tensor]] = []
        self.layout: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel():
                self._rows.append((name, _row_of(name, tensor.detach())))
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            self.layout.append((name, str(tensor.dtype), shape, stride))
        self.num_bytes = sum(row.numel() for _, row in self._rows)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return -(-self.num_bytes // self._chunk_bytes)

    def give(self, index: int) -> bytes:
        """Returns the bytes of one chunk."""
        pieces = [piece.cpu().numpy().tobytes() for piece in self._pieces(index)]
        return b"".join(pieces)

    def give_file(self, index: int, path: str) -> None:
        """Puts one chunk into a file that only this user can read; replaces what was there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            for piece in self._pieces(index):
                file.write(piece.cpu().numpy().data)

    def take(self, index: int, source: bytes | str) -> None:
        """Overwrites one chunk."""
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        pieces = list(self._pieces(index))
        if len(data) != sum(piece.numel() for piece in pieces):
            raise TransferError(f"chunk {index} has {len(data)} bytes, which do not fit")
        offset = 0
        for piece in pieces:
            part = torch.frombuffer(
                bytearray(memoryview(data)[offset : offset + piece.numel()]), dtype=torch.uint8
            )
            piece.copy_(part)
            offset += piece.numel()

    def checksums(self) -> dict[str, int]:
        """Returns a checksum of each tensor, by name."""
        return {name: tensor_checksum(row) for name, row in self._rows}

    def _pieces(self, index: int) -> Iterator[torch.Tensor]:
        """The parts of tensors that make up a chunk, as they lie in the model."""
        begin, offset = index * self._chunk_bytes, 0
        end = begin + self._chunk_bytes
        for _, row in self._rows:
            low, high = max(begin - offset, 0), min(end - offset, row.numel())
            if low < high:
                yield row[low:high]
            offset += row.numel()


def remove_file(path: str) -> None:
    """Removes what :meth:`PeerCopy.give_file` made, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def _row_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order in which they lie, whatever the order of its dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        raise TransferError(f"{name} has gaps: strides {tensor.stride()}, shape {tensor.shape}")
    return dense.reshape(-1).view(torch.uint8)


# The second attempt repairs what the first left behind; a third would not fare better.
MAX_ATTEMPTS = 2
# Where a worker leaves a chunk for one on the same node.
PEER_DIRECTORY = Path("/dev/shm")
PEER_PREFIX = "torchrl_vllm_sync_peer-"

receiver_module.register()


class SyncWorkerExtension(NativeTransferWorker):
    """Methods of a vLLM worker with which its replica's actor replaces and reads weights.

    A ``worker_extension_cls`` of your own must subclass this one.
    """

    _sync_peer: PeerCopy
    _sync_peer_file: str
    _sync_staged: concurrent.futures.Future[dict[str, Any]]

    def sync_load_snapshot(self, path: str, metadata: list[list[Any]]) -> dict[str, Any]:
        """Loads one stored version into this worker's shard of the model.

        The caller holds the lock on ``path`` and has verified it. A load that fails half-way is
        repeated once from the start, which repairs what the first attempt left behind.
        """
        begin, error, taken, attempts = time.perf_counter(), "", 0, 0
        while attempts < MAX_ATTEMPTS:
            attempts += 1
            try:
                weights = self._sync_tensors(Path(path), from_json(metadata))
                taken = reload_model(self._sync_model(), self.vllm_config, weights)  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as failure:  # noqa: BLE001  any is reported to the replica's actor
                error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
            else:
                error = ""
                break
        if not error:
            self._sync_forget_encodings()
        return {
            "seconds": time.perf_counter() - begin,
            "num_tensors": taken,
            "attempts": attempts,
            "path": "layerwise",
            "path_reason": "snapshots are always loaded that way",
            "error": error,
        }

    def sync_join(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """Joins the trainer's group; blocks until everybody has come."""
        return _answer(
            lambda: self._sync_receiver().init_transfer_engine(BroadcastInitInfo(**init_info))
        )

    def sync_prepare(self, metadata: list[list[Any]], bucket_bytes: int) -> dict[str, Any]:
        """Learns what all coming pushes consist of; the model may be serving."""

        def prepare() -> dict[str, Any]:
            receiver = self._sync_receiver()
            receiver.prepare(from_json(metadata), bucket_bytes)
            return _path(receiver) | {"direct": receiver.takes_direct}

        return _answer(prepare)

    def sync_receive(
        self, push_id: int, digest: str, direct: bool, num_passes: int, timeout_s: float
    ) -> dict[str, Any]:
        """Receives one push into the model; no step may run meanwhile."""
        begin = time.monotonic()
        touched = False

        def receive() -> dict[str, Any]:
            nonlocal touched
            receiver = self._sync_prepared(digest)
            receiver.await_start(push_id, begin + timeout_s)
            touched = True
            deadline = begin + timeout_s
            num_tensors = receiver.receive(deadline, num_passes=num_passes, direct=direct)
            self._sync_forget_encodings()
            return _loaded(receiver, num_tensors)

        answer = _answer(receive)
        return {**answer, "untouched": not touched}

    def sync_stage(
        self, push_id: int, digest: str, direct: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Begins to receive one push into spare memory, in a thread; returns at once."""
        deadline = time.monotonic() + timeout_s

        def stage() -> dict[str, Any]:
            receiver = self._sync_prepared(digest)
            receiver.await_start(push_id, deadline)
            began_at = time.monotonic()
            num_tensors = receiver.stage(deadline, direct=direct)
            return _loaded(receiver, num_tensors) | {"began_at": began_at}

        def start() -> None:
            self._sync_prepared(digest).require_staging()
            pool = concurrent.futures.ThreadPoolExecutor(1, "staged-weights")
            self._sync_staged = pool.submit(_answer, stage)
            pool.shutdown(wait=False)

        return _answer(start)

    def sync_staged(self) -> dict[str, Any] | None:
        """Returns how :meth:`sync_stage` ended, or ``None`` while it is under way.

        ``began_at`` is ``time.monotonic()`` at the trainer's word to begin.
        """
        return self._sync_staged.result() if self._sync_staged.done() else None

    def sync_install_staged(self) -> dict[str, Any]:
        """Puts staged weights into the model; no step may run meanwhile."""

        def install() -> dict[str, Any]:
            receiver = self._sync_receiver()
            receiver.install_staged()
            self._sync_forget_encodings()
            return _loaded(receiver, 0)

        return _answer(install)

    def sync_staging_refusal(self) -> str:
        """Why the launch could not reserve memory for staged weights; empty if nothing is wrong."""
        receiver = self.weight_transfer_engine  # pyright: ignore[reportAttributeAccessIssue]
        return receiver.staging_refusal if isinstance(receiver, BroadcastReceiver) else ""

    def sync_leave(self) -> None:
        """Leaves the trainer's group, if there is one."""
        self._sync_receiver().shutdown()

    def sync_peer_open(self, token: str, gives: bool) -> dict[str, Any]:
        """Prepares to give this worker's tensors to a peer, or to take a peer's."""

        def open_copy() -> dict[str, Any]:
            rank = self._sync_receiver().rank_in_replica
            self._sync_peer_file = str(PEER_DIRECTORY / f"{PEER_PREFIX}{token}-{rank}")
            if reason := self._sync_uncopyable(gives):
                raise TransferError(f"weights cannot be copied as they are: {reason}")
            self._sync_peer = PeerCopy(self._sync_model())
            return {"layout": self._sync_peer.layout, "num_chunks": self._sync_peer.num_chunks}

        return _answer(open_copy)

    def sync_peer_give(self, index: int, by_value: bool) -> dict[str, Any]:
        """Returns one chunk as ``source``: its bytes, or the path of a file that holds it now."""

        def give() -> dict[str, Any]:
            if by_value:
                return {"source": self._sync_peer.give(index)}
            self._sync_peer.give_file(index, self._sync_peer_file)
            return {"source": self._sync_peer_file}

        return _answer(give)

    def sync_peer_take(self, index: int, sources: list[Any]) -> dict[str, Any]:
        """Overwrites one chunk with that of the peer of this worker's rank; no step may run."""
        rank = self._sync_receiver().rank_in_replica
        return _answer(lambda: self._sync_peer.take(index, sources[rank]))

    def sync_peer_checksums(self) -> dict[str, Any]:
        """Returns ``checksums`` of what was given or taken."""
        return _answer(lambda: {"checksums": self._sync_peer.checksums()})

    def sync_peer_close(self) -> dict[str, Any]:
        """Removes what :meth:`sync_peer_give` left behind."""

        def close() -> None:
            remove_file(self._sync_peer_file)
            self._sync_forget_encodings()

        return _answer(close)

    def _sync_uncopyable(self, gives: bool) -> str:
        """Why the tensors are not all that the model computes with; empty if they are.

        Pushes through a load plan prove it; who has had none yet trusts a peer with equal settings.
        """
        if reason := why_not_a_plan(self.vllm_config):  # pyright: ignore[reportAttributeAccessIssue]
            return reason
        receiver = self._sync_receiver()
        return receiver.path_reason if gives and receiver.path != "plan" else ""

    def _sync_receiver(self) -> BroadcastReceiver:
        """Returns the worker's end of the broadcast transport."""
        receiver = self.weight_transfer_engine  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(receiver, BroadcastReceiver):
            raise TransferError(
                "the broadcast transport needs weight_transfer_config to be left unset at launch; "
                f"this worker has {type(receiver).__name__}"
            )
        return receiver

    def _sync_prepared(self, digest: str) -> BroadcastReceiver:
        receiver = self._sync_receiver()
        if receiver.digest != digest:
            raise TransferError("the push holds other tensors than this worker was prepared for")
        return receiver

    def _sync_forget_encodings(self) -> None:
        """Drops what the vision part of a model computed with the old weights."""
        if self.vllm_config.model_config.is_multimodal_model:  # pyright: ignore[reportAttributeAccessIssue]
            self.model_runner.reset_encoder_cache()  # pyright: ignore[reportAttributeAccessIssue]
            self.model_runner.reset_mm_cache()  # pyright: ignore[reportAttributeAccessIssue]

    def _sync_tensors(
        self, path: Path, metadata: list[ParamMeta]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Maps the stored tensors; none is copied here."""
        return open_tensordict(path, metadata).items()

    def _sync_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]


def _answer(call: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Runs ``call`` and returns what it returns, with ``seconds`` and ``error``."""
    begin, answer, error = time.perf_counter(), None, ""
    try:
        answer = call()
    except Exception as failure:  # noqa: BLE001  any is reported to the replica's actor
        error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
    return {**(answer or {}), "seconds": time.perf_counter() - begin, "error": error}


def _loaded(receiver: BroadcastReceiver, num_tensors: int) -> dict[str, Any]:
    return {"num_tensors": num_tensors, "attempts": 1} | _path(receiver)


def _path(receiver: BroadcastReceiver) -> dict[str, Any]:
    return {"path": receiver.path, "path_reason": receiver.path_reason}

"""vLLM's own weight transfer in a worker: its calls with failures as data, and another engine.

vLLM's worker methods of the same purpose (``vllm/v1/worker/gpu_worker.py``, 0.26 to 0.32) raise,
and what they raise loses its type on the way; a failed update leaves the model taken apart. Here
a failure says whether the weights are as they were, and puts the model together again.
"""

from __future__ import annotations

import pickle
import time
import traceback
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from torchrl_vllm_sync.engine.broadcast_receiver import BroadcastReceiver
from torchrl_vllm_sync.engine.reload import repack_cpu
from torchrl_vllm_sync.errors import TransferNotReadyError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.choice import device_uuid
from torchrl_vllm_sync.weights.metadata import from_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.distributed.weight_transfer.base import WeightTransferEngine

__all__ = ["NativeTransferWorker"]


class NativeTransferWorker:
    """Methods of a vLLM worker that drive its weight-transfer engine; names carry a prefix.

    Each returns ``error``, empty if all is well, ``error_type``, and ``untouched``: whether the
    weights are as they were before the update began.
    """

    _native_launched: WeightTransferEngine[Any, Any] | None = None
    _native_ready: bool = False
    _native_chunks: int | None = None

    def native_use(self, backend: str | None) -> dict[str, Any]:
        """Puts another transfer engine in the place of the present one, which leaves its group.

        Args:
            backend: A name registered with vLLM's ``WeightTransferEngineFactory``; ``None`` for
                the engine of the launch.
        """

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
        """Initialises the transfer engine; for most that is the rendezvous with the trainer.

        Args:
            init_info: Fields of the engine's own init info, this replica's ``rank_offset`` among
                them.
        """

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
        """Receives one part of an update, or all of it.

        Args:
            update_info: Fields of the engine's own update info, or a list of such by the worker's
                rank in its replica.
        """
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
        """Begins, receives and ends an update in one call.

        Returns:
            Also ``num_tensors``, ``attempts``, ``path`` and ``path_reason``, as a push reports.
        """
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

"""What this library adds to every vLLM worker: methods called by ``collective_rpc``.

vLLM mixes the class into its own worker class when ``worker_extension_cls`` names it, so only
engines started by this library are touched. Names carry a prefix, because an attribute that
collides with the worker's own fails an assertion. Failures come back as data: an exception that
crosses ``collective_rpc`` loses its type.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine.reload import reload_model
from torchrl_vllm_sync.weights.data_file import open_tensordict
from torchrl_vllm_sync.weights.metadata import from_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["SyncWorkerExtension"]

# The second attempt repairs what the first left behind; a third would not fare better.
MAX_ATTEMPTS = 2


class SyncWorkerExtension:
    """Methods of a vLLM worker with which its replica's actor replaces and reads weights.

    A ``worker_extension_cls`` of your own must subclass this one.
    """

    def sync_load_snapshot(
        self, path: str, metadata: list[list[Any]], trailer_checksum: int
    ) -> dict[str, Any]:
        """Loads one stored version into this worker's shard of the model.

        The caller holds the lease on ``path`` and has verified it. A load that fails half-way is
        repeated once from the start, which repairs what the first attempt left behind.

        Args:
            path: File that holds the version's tensors.
            metadata: Names, dtypes and shapes, in the JSON form of ``ParamMeta``.
            trailer_checksum: Checksum of the file's layout.

        Returns:
            ``seconds`` and ``num_tensors`` of the load, ``attempts``, and ``error``: the last
            failure and its traceback, or an empty string. With an error the weights of this worker
            are undefined.
        """
        begin, error, taken, attempts = time.perf_counter(), "", 0, 0
        while attempts < MAX_ATTEMPTS:
            attempts += 1
            try:
                weights = self._sync_tensors(Path(path), from_json(metadata), trailer_checksum)
                taken = reload_model(self._sync_model(), self.vllm_config, weights)  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as failure:  # noqa: BLE001  any is reported to the replica's actor
                error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
            else:
                error = ""
                break
        if not error and self.vllm_config.model_config.is_multimodal_model:  # pyright: ignore[reportAttributeAccessIssue]
            self.model_runner.reset_encoder_cache()  # pyright: ignore[reportAttributeAccessIssue]
            self.model_runner.reset_mm_cache()  # pyright: ignore[reportAttributeAccessIssue]
        return {
            "seconds": time.perf_counter() - begin,
            "num_tensors": taken,
            "attempts": attempts,
            "error": error,
        }

    def _sync_tensors(
        self, path: Path, metadata: list[ParamMeta], trailer_checksum: int
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Maps the stored tensors; none is copied here."""
        return open_tensordict(path, metadata, trailer_checksum).items()

    def _sync_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]

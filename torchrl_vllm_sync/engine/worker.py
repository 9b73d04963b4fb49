"""What this library adds to every vLLM worker: methods called by ``collective_rpc``.

Importing it registers the receiver of the ``broadcast`` transport with vLLM, which mixes the class
into its own worker class when ``worker_extension_cls`` names it, so only engines started by this
library are touched. Names carry a prefix, because an attribute that collides with the worker's own
fails an assertion. Failures come back as data: an exception that crosses ``collective_rpc`` loses
its type.
"""

from __future__ import annotations

import concurrent.futures
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.engine import broadcast_receiver
from torchrl_vllm_sync.engine.broadcast_info import BroadcastInitInfo
from torchrl_vllm_sync.engine.broadcast_receiver import BroadcastReceiver
from torchrl_vllm_sync.engine.load_path import why_not_a_plan
from torchrl_vllm_sync.engine.native_worker import NativeTransferWorker
from torchrl_vllm_sync.engine.peer_copy import PeerCopy, remove_file
from torchrl_vllm_sync.engine.reload import reload_model
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.data_file import open_tensordict
from torchrl_vllm_sync.weights.metadata import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["SyncWorkerExtension"]

# The second attempt repairs what the first left behind; a third would not fare better.
MAX_ATTEMPTS = 2
# Where a worker leaves a chunk for one on the same node.
PEER_DIRECTORY = Path("/dev/shm")
PEER_PREFIX = "torchrl_vllm_sync_peer-"

broadcast_receiver.register()


class SyncWorkerExtension(NativeTransferWorker):
    """Methods of a vLLM worker with which its replica's actor replaces and reads weights.

    A ``worker_extension_cls`` of your own must subclass this one.
    """

    _sync_peer: PeerCopy
    _sync_peer_file: str
    _sync_staged: concurrent.futures.Future[dict[str, Any]]

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
        """Joins the trainer's group; blocks until everybody has come.

        Args:
            init_info: Fields of ``BroadcastInitInfo``.

        Returns:
            ``error``, empty when the group is formed.
        """
        return _answer(
            lambda: self._sync_receiver().init_transfer_engine(BroadcastInitInfo(**init_info))
        )

    def sync_prepare(self, metadata: list[list[Any]], bucket_bytes: int) -> dict[str, Any]:
        """Learns what all coming pushes consist of; the model may be serving.

        Args:
            metadata: Names, dtypes and shapes, in the JSON form of ``ParamMeta``.
            bucket_bytes: Size of the buckets.

        Returns:
            ``path`` (``plan`` or ``layerwise``), ``path_reason``, ``direct`` (whether it can be
            received without buckets), ``seconds``, and ``error``.
        """

        def prepare() -> dict[str, Any]:
            receiver = self._sync_receiver()
            receiver.prepare(from_json(metadata), bucket_bytes)
            return _path(receiver) | {"direct": receiver.takes_direct}

        return _answer(prepare)

    def sync_receive(
        self, push_id: int, digest: str, direct: bool, num_passes: int, timeout_s: float
    ) -> dict[str, Any]:
        """Receives one push into the model; no step may run meanwhile.

        Args:
            push_id: Number of the push in this group.
            digest: Digest of its metadata.
            direct: Whether the first pass comes without buckets.
            num_passes: How often the trainer sends everything.
            timeout_s: Seconds for all of it.

        Returns:
            As :meth:`sync_load_snapshot`, and ``untouched``: whether the weights are as they were.
        """
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
        """Begins to receive one push into spare memory, in a thread; returns at once.

        Args:
            push_id: Number of the push in this group.
            digest: Digest of its metadata.
            direct: Whether it comes without buckets.
            timeout_s: Seconds for all of it.

        Returns:
            ``error``, empty when it has begun.
        """
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
        """Puts staged weights into the model; no step may run meanwhile.

        Returns:
            As :meth:`sync_receive`.
        """

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
        """Prepares to give this worker's tensors to a peer, or to take a peer's.

        Args:
            token: Names the copy.
            gives: Whether this worker gives, and does not take.

        Returns:
            ``layout`` and ``num_chunks``, and ``error``: among others why bytes are not enough.
        """

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
        """Returns the worker's end of the broadcast transport.

        Raises:
            TransferError: The engine was launched with another transfer engine.
        """
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
        self, path: Path, metadata: list[ParamMeta], trailer_checksum: int
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Maps the stored tensors; none is copied here."""
        return open_tensordict(path, metadata, trailer_checksum).items()

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

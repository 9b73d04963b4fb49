"""The ``ipc`` transport: trainer and engines on one GPU, through vLLM's CUDA IPC engine."""

from __future__ import annotations

import contextlib
import pickle
import time
import uuid
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from torchrl_vllm_sync.errors import (
    ServiceClosedError,
    SyncError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.broadcast.buckets import check_device
from torchrl_vllm_sync.weights.metadata import dtype_name
from torchrl_vllm_sync.weights.places import current_device, device_uuid, home_device
from torchrl_vllm_sync.weights.source import StableSource
from torchrl_vllm_sync.weights.transport import (
    PhaseTimes,
    ReplicaOutcome,
    SendOutcome,
    awaited_replicas,
    describe_replicas,
    raise_exceptions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import PauseMode, ReplicaClient


# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
SHORT_TIMEOUT_S = 30.0
DEFAULT_BUFFER_BYTES = 256 * 2**20
# From this release on that transfers are packed is agreed upon once; before, at each update.
_FIRST_WITH_PACKING_AT_INIT = Version("0.28")


class IPCTransport:
    """Shows the engines one buffer of the trainer's GPU memory, filled again and again.

    Each filling is one call to the replicas, which have copied it out when they answer; nobody
    waits inside a collective. Engines take vLLM's layerwise reload. The workers change to vLLM's
    ``ipc`` engine when the transport opens, and back when it closes.

    Handles travel pickled, to this library's own workers only, so that the engines need no
    ``VLLM_ALLOW_INSECURE_SERIALIZATION``.

    Args:
        buffer_bytes: Size of the buffer; a single tensor that is larger makes it so.

    Raises:
        UnsupportedArgumentError: ``buffer_bytes`` is below 1.
    """

    name = "ipc"

    def __init__(self, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        if buffer_bytes < 1:
            raise UnsupportedArgumentError(f"buffer_bytes must be at least 1, got {buffer_bytes}")
        self._buffer_bytes = buffer_bytes
        self._forget()

    def _forget(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._last_version = 0
        self._client: ReplicaClient | None = None
        self._device = torch.device("cpu")
        self._awaited: dict[str, str] = {}
        self._members: list[str] = []
        self._missing: dict[str, str] = {}
        self._fields: dict[str, dict[str, Any]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def last_version(self) -> int:
        """Newest version sent by this transport; 0 before the first."""
        return self._last_version

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the buffer takes on the GPU; 0 before the first push."""
        return self._buffer.numel()

    def open(self, client: ReplicaClient, source: WeightSource | None = None) -> None:
        """Has the workers use vLLM's ``ipc`` engine; does nothing when all that count do.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            TransferError: No replica is alive, or one could not change.
            UnsupportedArgumentError: An engine is not on the trainer's GPU, or not on it alone.
        """
        awaited = awaited_replicas(client.standings())
        home = home_device(source, "cuda")
        if self._client is not None and awaited == self._awaited and home in (None, self._device):
            return
        alive, missing = describe_replicas(client)
        kinds = {one.device_type for one in alive.values()}
        if kinds != {"cuda"}:
            raise UnsupportedArgumentError(
                "the ipc transport needs trainer and engines on one CUDA device, and "
                f"the engines are on {' and '.join(sorted(kinds))}: use the memmap transport"
            )
        if not torch.cuda.is_available():
            raise UnsupportedArgumentError(
                "the ipc transport needs trainer and engines on one CUDA device, and the trainer "
                "is on a host without CUDA: use the memmap transport"
            )
        device = home or current_device("cuda")
        own = device_uuid(device)
        for name, one in alive.items():
            if set(one.device_uuids) != {own}:
                raise UnsupportedArgumentError(
                    f"the ipc transport needs trainer and engines on one CUDA device, and replica "
                    f"{name} is on {list(one.device_uuids)}, the trainer on {own}: use the "
                    "broadcast transport"
                )
        old = {
            name
            for name, one in alive.items()
            if Version(Version(one.vllm_version).base_version) < _FIRST_WITH_PACKING_AT_INIT
        }
        uses = client.start_calls("use_transfer_engine", dict.fromkeys(alive, ("ipc",)))
        raise_exceptions(uses.answers(SHORT_TIMEOUT_S))
        infos = {name: ({} if name in old else {"packed": True},) for name in alive}
        raise_exceptions(
            client.start_calls("init_weight_transfer_engine", infos).answers(SHORT_TIMEOUT_S)
        )
        self._fields = {name: {"packed": True} if name in old else {} for name in alive}
        self._device, self._members, self._missing = device, list(alive), missing
        self._client, self._awaited = client, awaited

    def send(
        self,
        client: ReplicaClient,
        source: WeightSource,
        version: int,
        *,
        timeout_s: float,
        clear_cache: bool,
        mode: PauseMode = "keep",
    ) -> SendOutcome:
        """Sends ``source`` as ``version``, one filling of the buffer after the other.

        Every replica receives it, those that hold the version already too.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: See :meth:`open`. Nothing was sent.
            UnsupportedArgumentError: See :meth:`open`. Nothing was sent.
            WeightMismatchError: A tensor is not on the transport's device. Nothing was sent.
        """
        begin = time.perf_counter()
        deadline = time.monotonic() + timeout_s
        self.open(client, source)
        if isinstance(source, StableSource):
            for name, tensor in source.views() or ():
                check_device(name, tensor, self._device)
        metadata = source.metadata()
        self._make_buffer(metadata)
        opened = time.perf_counter()
        answers = self._on_all(
            client,
            "begin_chunks",
            (version, self._run_id, mode, clear_cache, timeout_s),
            deadline,
        )
        begun = time.perf_counter()
        num_chunks = 0
        failure: BaseException | None = None
        try:
            if not _failed(answers):
                for chunk in self._chunks(source):
                    num_chunks += 1
                    answers = self._show(client, chunk, deadline)
                    if _failed(answers):
                        break
        except BaseException as error:
            failure = error
            raise
        finally:
            if failure is not None or _failed(answers):
                soon = time.monotonic() + SHORT_TIMEOUT_S
                self._on_all(client, "give_up_chunks", (self._run_id,), soon)
        sent = time.perf_counter()
        if not _failed(answers):
            answers = self._on_all(client, "finish_chunks", (), deadline)
            self._last_version = max(self._last_version, version)
        torch.cuda.ipc_collect()
        times = PhaseTimes()
        times.note("open_s", begin, opened)
        times.note("begin_s", opened, begun)
        times.note("send_s", begun, sent)
        times.note("acknowledge_s", sent)
        times.seconds["num_chunks"] = num_chunks
        outcomes = [
            ReplicaOutcome.of(
                name, one if one is not None else SyncError("the push was given up half-way")
            )
            for name, one in answers.items()
        ]
        for name, why in self._missing.items():
            outcomes.append(ReplicaOutcome(replica_id=name, version=None, error=why))
        return SendOutcome(
            num_bytes=sum(meta.num_bytes for meta in metadata),
            phases=times.seconds,
            phase_starts=times.starts,
            replicas=outcomes,
            run_id=self._run_id,
        )

    def _on_all(
        self, client: ReplicaClient, method: str, args: tuple[Any, ...], deadline: float
    ) -> dict[str, Any]:
        calls = client.start_calls(method, dict.fromkeys(self._members, args))
        return calls.answers(max(deadline - time.monotonic(), 0.0) + GRACE_S)

    def _show(
        self, client: ReplicaClient, chunk: list[ParamMeta], deadline: float
    ) -> dict[str, Any]:
        """Has every replica copy the buffer out; it may be filled again when they have answered."""
        from torch.multiprocessing.reductions import reduce_tensor

        info = {
            "names": [one.name for one in chunk],
            "dtype_names": [dtype_name(one.dtype) for one in chunk],
            "shapes": [list(one.shape) for one in chunk],
            "tensor_sizes": [one.num_bytes for one in chunk],
        }
        left = max(deadline - time.monotonic(), 1e-3)
        calls = {}
        for name in self._members:
            # An export is counted once, and given back by the one who opens it.
            handles = {device_uuid(self._device): reduce_tensor(self._buffer)[1]}
            own = {**info, **self._fields[name], "ipc_handles_bytes": pickle.dumps(handles)}
            calls[name] = (own, left)
        return client.start_calls("receive_chunk", calls).answers(left + GRACE_S)

    def _make_buffer(self, metadata: list[ParamMeta]) -> None:
        size = max([self._buffer_bytes, *(one.num_bytes for one in metadata)])
        if self._buffer.numel() != size or self._buffer.device != self._device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _chunks(self, source: WeightSource) -> Iterator[list[ParamMeta]]:
        """Fills the buffer with as many tensors as it takes; yields which, when they are in it."""
        chunk: list[ParamMeta] = []
        offset = 0
        items = iter(source)
        for meta in source.metadata():
            name, tensor = next(items, ("nothing", torch.empty(0)))
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise WeightMismatchError(
                    f"the source announced {meta.name} {list(meta.shape)} and yielded {name} "
                    f"{list(tensor.shape)}"
                )
            check_device(name, tensor, self._device)
            full = offset + meta.num_bytes > self._buffer.numel()
            # The receiver splits without gaps, so that a wider dtype must happen to be aligned.
            if chunk and (full or offset % meta.dtype.itemsize):
                self._finish_copies()
                yield chunk
                chunk, offset = [], 0
            target = self._buffer[offset : offset + meta.num_bytes].view(meta.dtype)
            target.view(meta.shape).copy_(tensor.detach())
            chunk.append(meta)
            offset += meta.num_bytes
        if chunk:
            self._finish_copies()
            yield chunk

    def _finish_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has a GPU, and a buffer, of its own.
        return {"_buffer_bytes": self._buffer_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def close(self) -> None:
        """Frees the buffer, and has the workers use the engine of their launch. Idempotent."""
        if self._client is not None:
            with contextlib.suppress(ServiceClosedError):  # engines that are gone need nothing
                self._client.call_replicas("use_transfer_engine", deadline_s=SHORT_TIMEOUT_S)
        self._forget()


def _failed(answers: dict[str, Any]) -> bool:
    return any(isinstance(one, BaseException) for one in answers.values())

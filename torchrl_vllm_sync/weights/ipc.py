"""Weights by CUDA IPC, for a trainer and engines on the same GPUs, through vLLM's own engine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import uuid
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from torchrl_vllm_sync.checks import Deadline, check_integer
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.broadcast.buckets import check_device
from torchrl_vllm_sync.weights.module import ParamMeta, checked, dtype_name
from torchrl_vllm_sync.weights.source import (
    WeightSource,
    home_device,
    sending_device,
    views_of,
    visible_gpus,
)
from torchrl_vllm_sync.weights.transport import GRACE_S, ask, failed, raise_exceptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrl_vllm_sync.weights.transport import Members, Push, ReplicaClient

SHORT_TIMEOUT_S = 30.0
DEFAULT_BUFFER_BYTES = 256 * 2**20
# From this release on packing is agreed upon once; before, at each update.
_FIRST_WITH_PACKING_AT_INIT = Version("0.28")


class IPCTransport:
    """Shows the engines a buffer of the trainer's on their own GPU, filled again and again.

    Each filling is one call to the replicas, which have copied it out when they answer, through
    vLLM's layerwise reload. GPUs other than that of the weights, such as those of the other ranks
    of a sharded model, get a copy of the buffer, and must be visible to this process. Workers use
    vLLM's ``ipc`` engine while the transport is open, and need no
    ``VLLM_ALLOW_INSECURE_SERIALIZATION``: handles travel pickled to them alone.

    Args:
        buffer_bytes: Size of a buffer; a single tensor that is larger makes it so.

    Raises:
        UnsupportedArgumentError: ``buffer_bytes`` is below 1.
    """

    name = "ipc"
    is_collective = True
    last_version = 0  # it stores none

    def __init__(self, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        check_integer("buffer_bytes", buffer_bytes, 1)
        self._buffer_bytes = buffer_bytes
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._client: ReplicaClient | None = None
        self._device = torch.device("cpu")
        self._joined: dict[str, str] = {}
        self._fields: dict[str, dict[str, Any]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._gpus: dict[str, tuple[str, ...]] = {}  # UUIDs of those that each replica is on
        self._shown: dict[str, torch.Tensor] = {}  # by UUID: the buffer, or a copy on another GPU

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that a buffer takes on each GPU; 0 before the first push."""
        return self._buffer.numel()

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Has the workers use vLLM's ``ipc`` engine; does nothing when all that count do.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            UnsupportedArgumentError: An engine is on a GPU that this process does not see.
        """
        home = home_device(source, "cuda")
        is_open = self._client is not None and members.incarnations == self._joined
        if is_open and home in (None, self._device):
            return
        alive = members.describe()
        device = sending_device(self.name, alive, source, gpu=True)
        visible = visible_gpus()
        for name, one in alive.items():
            if hidden := sorted(set(one.device_uuids) - visible.keys()):
                raise UnsupportedArgumentError(
                    "the ipc transport needs engines on GPUs that the trainer's process sees, and "
                    f"replica {name} is on {hidden}, which are not among {list(visible)}: use the "
                    "broadcast transport"
                )
        self._device = device
        self._gpus = {name: one.device_uuids for name, one in alive.items()}
        inits: dict[str, tuple[dict[str, Any]]] = {}
        for name, one in alive.items():
            is_old = Version(Version(one.vllm_version).base_version) < _FIRST_WITH_PACKING_AT_INIT
            inits[name] = ({} if is_old else {"packed": True},)
            self._fields[name] = {"packed": True} if is_old else {}
        self._client, self._joined = members.client, dict(members.incarnations)
        try:
            uses = members.start("use_transfer_engine", "ipc")
            raise_exceptions(uses.answers(SHORT_TIMEOUT_S))
            calls = members.client.start_calls("init_weight_transfer_engine", inits)
            raise_exceptions(calls.answers(SHORT_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Sends one filling of the buffer after the other, to those that hold the version too.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            WeightMismatchError: A tensor is not on the transport's device. Nothing was sent.
        """
        push.confirm()
        deadline, num_chunks, is_whole = Deadline(push.timeout_s), 0, False
        with push.times.measure("begin_s"):
            for name, tensor in views_of(push.source) or ():
                check_device(name, tensor, self._device)
            self._make_buffer(push.source.metadata())
            begun = {"run_id": self.run_id, "timeout_s": push.timeout_s, **push.terms}
            calls = members.start("start_weight_update", **begun)
            answers = calls.answers(deadline.left_s + GRACE_S)
        with push.times.measure("send_s"):
            try:
                for chunk in self._chunks(push.source) if not failed(answers) else ():
                    num_chunks += 1
                    answers = self._show(members, chunk, deadline)
                    if failed(answers):
                        break
                is_whole = not failed(answers)
            finally:
                if not is_whole:
                    given_up = members.start("give_up_update", self.run_id)
                    given_up.answers(SHORT_TIMEOUT_S + GRACE_S)
        with push.times.measure("acknowledge_s"):
            if is_whole:
                calls = members.start("finish_weight_update", timeout_s=SHORT_TIMEOUT_S)
                answers = calls.answers(deadline.left_s + GRACE_S)
            torch.cuda.ipc_collect()
        push.times.seconds["num_chunks"] = num_chunks
        given_up = SyncError("the push was given up half-way")
        return {name: given_up if one is None else one for name, one in answers.items()}

    def _show(self, members: Members, chunk: list[ParamMeta], deadline: Deadline) -> dict[str, Any]:
        """Makes every replica copy the buffer out; it may be refilled when they have answered."""
        from torch.multiprocessing.reductions import reduce_tensor

        for shown in self._shown.values():
            if shown is not self._buffer:
                shown.copy_(self._buffer)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # which copies from here, too
        info = {
            "names": [one.name for one in chunk],
            "dtype_names": [dtype_name(one.dtype) for one in chunk],
            "shapes": [list(one.shape) for one in chunk],
            "tensor_sizes": [one.num_bytes for one in chunk],
        }
        calls: dict[str, Any] = {}
        for name in members.incarnations:
            # An export is counted once, and released by the process that opens it.
            handles = {one: reduce_tensor(self._shown[one])[1] for one in self._gpus[name]}
            own = {**info, **self._fields[name], "ipc_handles_bytes": pickle.dumps(handles)}
            calls[name] = (own,)
        return ask(members.client, "update_weights", calls, deadline.left_s)

    def _make_buffer(self, metadata: list[ParamMeta]) -> None:
        size = max([self._buffer_bytes, *(one.num_bytes for one in metadata)])
        if self._buffer.numel() != size or self._buffer.device != self._device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._shown.clear()
        used = set(itertools.chain(*self._gpus.values()))
        for name, gpu in visible_gpus().items():
            if name in used and name not in self._shown:
                own, is_home = self._buffer, gpu == self._device
                self._shown[name] = own if is_home else torch.empty_like(own, device=gpu)

    @torch.no_grad()
    def _chunks(self, source: WeightSource) -> Iterator[list[ParamMeta]]:
        """Fills the buffer with as many tensors as it takes, again and again; yields which."""
        chunk: list[ParamMeta] = []
        offset = 0
        for meta, tensor in checked(source, source.metadata()):
            check_device(meta.name, tensor, self._device)
            full = offset + meta.num_bytes > self._buffer.numel()
            # The receiver splits without gaps, so a wider dtype must happen to be aligned.
            if chunk and (full or offset % meta.dtype.itemsize):
                yield chunk
                chunk, offset = [], 0
            target = self._buffer[offset : offset + meta.num_bytes].view(meta.dtype)
            target.view(meta.shape).copy_(tensor.detach())
            chunk.append(meta)
            offset += meta.num_bytes
        if chunk:
            yield chunk

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has its own GPU and buffer.
        return functools.partial(type(self), buffer_bytes=self._buffer_bytes), ()

    def close(self) -> None:
        """Frees the buffer, and has the workers use the engine of their launch. Idempotent."""
        if self._client is not None:
            with contextlib.suppress(ServiceClosedError):  # engines that are gone need nothing
                joined = dict.fromkeys(self._joined, ())
                uses = self._client.start_calls("use_transfer_engine", joined)
                uses.answers(SHORT_TIMEOUT_S)
        self._forget()

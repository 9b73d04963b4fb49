"""vLLM's own packed NCCL engine behind this library's push: what ``broadcast`` is measured against.

Read in vLLM 0.26, 0.28, 0.32 and 0.33 (``vllm/distributed/weight_transfer/nccl_common.py``,
``packed_tensor.py``, ``nccl_engine.py``). Of the trainer's side only the two functions are used
that did not change in all of them; its engine classes come in three generations. Importing vLLM
takes seconds, and happens at the first call.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.errors import (
    ServiceClosedError,
    SyncError,
    TransferError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.broadcast.buckets import check_device
from torchrl_vllm_sync.weights.broadcast.group import free_port
from torchrl_vllm_sync.weights.module import ParamMeta, dtype_name
from torchrl_vllm_sync.weights.source import current_device, home_device, views_of
from torchrl_vllm_sync.weights.transport import GRACE_S, failed, raise_exceptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, PendingCalls, Push, ReplicaClient

DEFAULT_BUFFER_BYTES = 2**30
# From this release on the packing is agreed upon once, with the group; before, at each update.
_FIRST_WITH_PACKING_AT_INIT = Version("0.28")
SHORT_TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 60.0
# Seconds between looks at the replicas.
WATCH_S = 0.05


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors are packed; both sides must agree.

    With two buffers, receivers before 0.33 can reuse memory of one that is still being read.
    """

    buffer_bytes: int
    num_buffers: int

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of vLLM's payloads."""
        return {
            "packed": True,
            "packed_buffer_size_bytes": self.buffer_bytes,
            "packed_num_buffers": self.num_buffers,
        }


def _release(vllm_version: str) -> Version:
    return Version(Version(vllm_version).base_version)


def init_info(
    vllm_version: str, packing: Packing, *, address: str, port: int, world_size: int
) -> dict[str, Any]:
    """Returns the ``init_info`` of an engine's ``nccl`` backend, without its ``rank_offset``."""
    info = {"master_address": address, "master_port": port, "world_size": world_size}
    at_init = _release(vllm_version) >= _FIRST_WITH_PACKING_AT_INIT
    return info | (packing.as_fields() if at_init else {})


def update_info(
    vllm_version: str, packing: Packing, metadata: Sequence[ParamMeta]
) -> dict[str, Any]:
    """Returns the ``update_info`` of one push."""
    info: dict[str, Any] = {
        "names": [one.name for one in metadata],
        "dtype_names": [dtype_name(one.dtype) for one in metadata],
        "shapes": [list(one.shape) for one in metadata],
    }
    at_init = _release(vllm_version) >= _FIRST_WITH_PACKING_AT_INIT
    return info | ({} if at_init else packing.as_fields())


def open_group(address: str, port: int, world_size: int) -> Any:
    """Opens the trainer's end, as rank 0, on the current CUDA device; blocks until all joined."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": address, "master_port": port, "world_size": world_size})


def broadcast(pairs: Iterator[tuple[str, torch.Tensor]], group: Any, packing: Packing) -> None:
    """Packs and broadcasts ``pairs`` from the current CUDA device; blocks until it has left."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        iterator=pairs,
        group=group,
        src=0,
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=packing.buffer_bytes,
        num_buffers=packing.num_buffers,
    )
    torch.cuda.synchronize()  # up to 0.27 the producer leaves its last packs on their way


class VLLMNCCLTransport:
    """A ``WeightTransport`` that sends each version through vLLM's ``nccl`` weight-transfer engine.

    The engines take vLLM's layerwise reload, always. The workers change to that engine when the
    transport opens, and back to the one of their launch when it closes.

    vLLM's NCCL has no time limit on the workers' side. When a push breaks off in the middle, this
    side leaves it in time and says so; a replica that is still in it is stale, and can be lost.
    """

    name = "vllm-nccl"
    is_collective = False
    last_version = 0  # it stores none

    def __init__(
        self,
        *,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        num_buffers: int = 1,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self._packing = Packing(buffer_bytes, num_buffers)
        self._join_timeout_s = join_timeout_s
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._client: ReplicaClient | None = None
        self._group: Any = None
        self._device = torch.device("cuda")
        self._vllm_version = ""
        self._awaited: dict[str, str] = {}

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Forms the group with the workers of all replicas that are alive; nothing if it stands."""
        client, awaited = members.client, dict(members.incarnations)
        if self._group is not None:
            home = home_device(source, "cuda")
            if awaited == self._awaited and home in (None, self._device):
                return
            self._leave()
        self._awaited = awaited
        alive = members.describe()
        (self._vllm_version,) = {one.vllm_version for one in alive.values()}
        self._device = home_device(source, "cuda") or current_device("cuda")
        self._client = client
        raise_exceptions(
            client.start_calls("use_transfer_engine", dict.fromkeys(alive, ("nccl",))).answers(
                SHORT_TIMEOUT_S
            )
        )
        address, port = client.rendezvous
        port = free_port(address) if port is None else port
        world_size = 1 + sum(one.num_workers for one in alive.values())
        info = init_info(
            self._vllm_version, self._packing, address=address, port=port, world_size=world_size
        )
        calls, rank = {}, 1
        for name, one in alive.items():
            calls[name] = ({**info, "rank_offset": rank},)
            rank += one.num_workers
        joining = client.start_calls(
            "init_weight_transfer_engine", calls, timeout_s=self._join_timeout_s
        )
        deadline = time.monotonic() + self._join_timeout_s
        self._group = self._watched(
            "the rendezvous", lambda: open_group(address, port, world_size), joining, deadline
        )
        try:
            left = max(deadline - time.monotonic(), 0.0)
            raise_exceptions(joining.answers(left + GRACE_S))
        except BaseException:
            self._leave()
            raise

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Broadcasts one version, also to replicas that hold it already."""
        begin, times, source = time.perf_counter(), push.times, push.source
        deadline = time.monotonic() + push.timeout_s
        for name, tensor in views_of(source) or ():
            check_device(name, tensor, self._device)
        info = update_info(self._vllm_version, self._packing, source.metadata())
        torch.cuda.current_stream(self._device).synchronize()  # the sender has other streams
        ready = time.perf_counter()
        calls = members.start(
            "update_weights_native",
            info,
            version=push.version,
            run_id=self.run_id,
            mode=push.mode,
            clear_cache=push.clear_cache,
            timeout_s=push.timeout_s,
        )
        failure, group, packing = None, self._group, self._packing
        try:
            self._watched(
                "the transfer",
                lambda: broadcast(self._pairs(source), group, packing),
                calls,
                deadline,
            )
        except SyncError as error:
            failure = error
        sent = time.perf_counter()
        left = GRACE_S if failure else max(deadline - time.monotonic(), 0.0) + GRACE_S
        answers = calls.answers(left)
        times.note("prepare_s", begin, ready)
        times.note("send_s", ready, sent)
        times.note("acknowledge_s", sent)
        if failure is not None:  # silence follows from it
            answers = {
                name: failure if isinstance(one, TimeoutError | dict) else one
                for name, one in answers.items()
            }
        if failed(answers):
            self._leave()
        return answers

    def close(self) -> None:
        """Leaves the group, and has the workers use the engine of their launch. Idempotent."""
        self._leave()
        if self._client is not None:
            with contextlib.suppress(ServiceClosedError):  # engines that are gone need nothing
                self._client.call_replicas("use_transfer_engine", deadline_s=SHORT_TIMEOUT_S)
        self._forget()

    def _pairs(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors as the receivers expect them: in order, in the model's dtypes."""
        items = iter(source)
        for meta in source.metadata():
            name, tensor = next(items, ("nothing", torch.empty(0)))
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise WeightMismatchError(
                    f"the source announced {meta.name} {list(meta.shape)} and yielded {name} "
                    f"{list(tensor.shape)}"
                )
            check_device(name, tensor, self._device)
            yield name, tensor.detach().to(meta.dtype)

    def _watched(
        self, what: str, call: Callable[[], Any], pending: PendingCalls, deadline: float
    ) -> Any:
        """Runs ``call``, which NCCL may block for ever; leaves the group if it fails."""

        def on_device() -> Any:
            with torch.cuda.device(self._device):
                return call()

        try:
            return watched(what, on_device, pending, deadline)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Gives this side's communicator up, which ends what it is doing."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()


def watched(what: str, call: Callable[[], Any], pending: PendingCalls, deadline: float) -> Any:
    """Makes ``call`` in a thread and waits for it, but not for ever.

    The thread is left behind when this raises early; ending what it does is the caller's.
    """
    ended = in_thread(what, call)
    while wait([ended], timeout=WATCH_S).not_done:
        raise_exceptions(pending.failures())
        if time.monotonic() > deadline:
            raise TransferError(f"{what} did not end in time")
    try:
        return ended.result()
    except SyncError:
        raise
    except Exception as error:
        raise TransferError(f"{what} broke off: {type(error).__name__}: {error}") from error

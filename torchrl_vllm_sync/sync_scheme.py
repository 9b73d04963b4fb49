"""TorchRL's two weight sync schemes for vLLM, over this library's pushes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

import torch

from torchrl_vllm_sync.engine.args import num_workers
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service import AsyncVLLM
from torchrl_vllm_sync.service_scheme import ServiceScheme
from torchrl_vllm_sync.sync_receiver import VLLMDoubleBufferWeightReceiver
from torchrl_vllm_sync.sync_sender import VLLMDoubleBufferWeightSender
from torchrl_vllm_sync.weights.auto_transport import TRANSPORTS
from torchrl_vllm_sync.weights.broadcast_transport import BroadcastTransport
from torchrl_vllm_sync.weights.marker import LayoutName
from torchrl_vllm_sync.weights.memmap_transport import MemmapTransport
from torchrl_vllm_sync.weights.transport import check_transport

if TYPE_CHECKING:
    from torchrl_vllm_sync.local_llm import LocalLLM
    from torchrl_vllm_sync.service_scheme import Strategy
    from torchrl_vllm_sync.weights.transport import PauseMode, WeightTransport

__all__ = [
    "VLLMDoubleBufferSyncScheme",
    "VLLMWeightSyncScheme",
    "WeightSyncScheme",
]


class VLLMWeightSyncScheme(ServiceScheme):
    """Pushes weights from the trainer into every replica, by broadcast wherever that is faster.

    TorchRL's scheme of this name, which with vLLM 0.28 and later loads nothing.

    Example:
        >>> scheme = VLLMWeightSyncScheme(num_replicas=2)
        >>> collector = Collector(env, policy, weight_sync_schemes={"policy": scheme}, ...)
        >>> scheme.create_sender().register_model(trained_model)
        >>> collector.update_policy_weights_()

    Args:
        master_address: Where the engines find the trainer; found when ``None``.
        master_port: Port of the rendezvous; found when ``None``.
        gpus_per_replica: Tensor-parallel size of a replica, or all of its workers.
        num_replicas: Replicas of the service.
        strategy: See ``ServiceScheme``.
        device: The trainer's device for the broadcast, an integer being a GPU's index. ``None``
            sends from where the weights are.
        service: See ``ServiceScheme``.
        transport: ``"auto"``, ``"broadcast"``, ``"ipc"``, ``"memmap"``, ``"vllm-nccl"``, or a
            ``WeightTransport``; see ``WeightUpdater``. A ``device`` makes ``"auto"`` a broadcast.
        timeout_s: See ``ServiceScheme``.
        clear_cache: Recompute keys and values of requests in flight after each push.
        mode: What becomes of requests in flight.
        strict: See ``ServiceScheme``.

    Raises:
        UnsupportedArgumentError: There is no such ``strategy``, ``transport`` or ``device``.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int | None = None,
        *,
        service: Any = None,
        transport: str | WeightTransport = "auto",
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            strategy,
            service=service,
            timeout_s=timeout_s,
            clear_cache=clear_cache,
            mode=mode,
            strict=strict,
        )
        if isinstance(transport, str) and transport not in TRANSPORTS:
            raise UnsupportedArgumentError(
                f"transport must be one of {sorted(TRANSPORTS)}, got {transport!r}"
            )
        if not isinstance(transport, str):
            check_transport(transport)
        if device is not None and transport not in ("auto", "broadcast"):
            raise UnsupportedArgumentError(f"device {device!r} is for broadcasts only")
        self.master_address, self.master_port = master_address, master_port
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.device = _as_device(device)
        self._transport = transport

    def new_transport(self) -> WeightTransport:
        """Returns the transport that the sender pushes through."""
        if self.device is not None:
            return BroadcastTransport(device=self.device)
        if isinstance(self._transport, str):
            return TRANSPORTS[self._transport]()
        return self._transport

    def check_service(self, service: AsyncVLLM | LocalLLM) -> None:
        """Refuses a service of other replicas than the scheme was made for.

        Args:
            service: The service.

        Raises:
            UnsupportedArgumentError: ``num_replicas`` or ``gpus_per_replica`` is another.
        """
        if not isinstance(service, AsyncVLLM):
            return
        if self.num_replicas != service.num_replicas:
            raise UnsupportedArgumentError(
                f"num_replicas must be {service.num_replicas}, as the service has, "
                f"got {self.num_replicas}"
            )
        sizes = {service.get_tp_size(), num_workers(service.engine_args)}
        if self.gpus_per_replica not in sizes:
            raise UnsupportedArgumentError(
                f"gpus_per_replica must be {' or '.join(map(str, sorted(sizes)))}, as the service "
                f"has, got {self.gpus_per_replica}"
            )

    def meeting_point(self, service: AsyncVLLM | LocalLLM) -> dict[str, Any]:
        """Returns where trainer and engines meet, if that was given.

        Args:
            service: The service.
        """
        if isinstance(service, AsyncVLLM):
            return {"master_address": self.master_address, "master_port": self.master_port}
        return {}


class VLLMDoubleBufferSyncScheme(ServiceScheme):
    """Passes weights through memory-mapped TensorDicts in a directory that both sides see.

    TorchRL's scheme of this name, with real buffers: versions are stored whole and swapped in at
    once, checksummed, and loaded once each; a version older than the newest is refused.

    Two ways. A sender that was connected (``init_all_workers_group``, or a collector) pushes: each
    update is stored and loaded when ``update_weights`` returns. One that was not only stores, and
    ``receiver.poll_and_apply()``, wherever the service can be reached, has the engines load it.

    Example:
        >>> scheme = VLLMDoubleBufferSyncScheme("/shared/weights")
        >>> sender = scheme.create_sender()  # in the trainer
        >>> sender.register_model(model)
        >>> sender.update_weights()
        >>> receiver = scheme.create_receiver(service)  # where the service is
        >>> receiver.poll_and_apply()
        True

    Args:
        remote_addr: Directory that the sender writes.
        local_addr: The same directory as the replicas see it; by default under the same path.
        num_threads: Must be at least 1; stores and loads are bounded by memory, and use one.
        strategy: See ``ServiceScheme``.
        service: See ``ServiceScheme``.
        layout: ``"slots"`` rewrites a few buffers in turn, for one host; ``"versions"`` writes new
            files each time, for shared file systems.
        timeout_s: See ``ServiceScheme``.
        clear_cache: Recompute keys and values of requests in flight after each load.
        mode: What becomes of requests in flight.
        strict: See ``ServiceScheme``.

    Raises:
        UnsupportedArgumentError: There is no such ``strategy`` or ``layout``, an address is no
            path, or ``num_threads`` is below 1.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
        *,
        service: Any = None,
        layout: LayoutName = "slots",
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            strategy,
            service=service,
            timeout_s=timeout_s,
            clear_cache=clear_cache,
            mode=mode,
            strict=strict,
        )
        if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
            raise UnsupportedArgumentError(f"num_threads must be at least 1, got {num_threads!r}")
        if layout not in get_args(LayoutName):
            raise UnsupportedArgumentError(
                f"layout must be one of {get_args(LayoutName)}, got {layout!r}"
            )
        self.remote_addr = _as_directory("remote_addr", remote_addr)
        self.local_addr = (
            self.remote_addr if local_addr is None else _as_directory("local_addr", local_addr)
        )
        self.num_threads = num_threads
        self.layout: LayoutName = layout

    def new_transport(self) -> MemmapTransport:
        """Returns the transport that the sender pushes through once it is connected."""
        return MemmapTransport(self.remote_addr, layout=self.layout)

    def new_sender(self) -> VLLMDoubleBufferWeightSender:
        """Returns the trainer's end."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """Returns a new receiver, which has a service load what the directory holds.

        Args:
            vllm_engine: A service, or a ``vllm.LLM`` of this process.
        """
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


def _as_device(device: torch.device | str | int | None) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedArgumentError(f"device must be one, got {device!r}: {reason}") from None


def _as_directory(name: str, given: str | os.PathLike[str]) -> str:
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise UnsupportedArgumentError(f"{name} must be the path of a directory, got {given!r}")
    return str(given)


# The scheme that ``from torchrl_vllm_sync import WeightSyncScheme`` promises.
WeightSyncScheme = VLLMWeightSyncScheme

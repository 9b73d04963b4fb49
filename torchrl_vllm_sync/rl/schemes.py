"""TorchRL's two weight sync schemes for vLLM, with their senders and receivers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torchrl.weight_update import WeightSyncScheme as _TorchRLScheme
from torchrl.weight_update.utils import _resolve_model

from torchrl_vllm_sync.checks import check_integer, check_seconds, check_version
from torchrl_vllm_sync.engine.args import num_workers
from torchrl_vllm_sync.errors import (
    SyncError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    VersionNotReachedError,
    WeightSyncError,
)
from torchrl_vllm_sync.replica import PushReport
from torchrl_vllm_sync.rl.local_llm import LocalLLM
from torchrl_vllm_sync.rl.updater import CollectorVersions, WeightUpdater, as_service, as_transport
from torchrl_vllm_sync.service.service import AsyncVLLM
from torchrl_vllm_sync.weights.audit import refuse_nonfinite
from torchrl_vllm_sync.weights.auto import TransportName
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
from torchrl_vllm_sync.weights.module import ParamMeta
from torchrl_vllm_sync.weights.snapshots.files import LayoutName
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport, PublishReport
from torchrl_vllm_sync.weights.source import as_weight_source, fit_to_model
from torchrl_vllm_sync.weights.transport import GRACE_S, PauseMode, PushOptions, WeightTransport

# Name to dtype and full shape, as ``torchrl.weight_update.llm.get_model_metadata`` returns them.
ModelMetadata: TypeAlias = "Mapping[str, tuple[torch.dtype, torch.Size]]"


class VLLMWeightSender(WeightUpdater):
    """An updater under the names of TorchRL's senders; one of a directory also stores."""

    def __init__(self, scheme: ServiceScheme) -> None:
        super().__init__(None, transport=scheme.new_transport(), **asdict(scheme.options))
        self._scheme = scheme
        self._model: weakref.ref[Any] | None = None
        self._connected = False

    def register_model(self, model: Any) -> None:
        """Makes ``model`` what :meth:`update_weights` sends when it is given nothing."""
        known = self._model and self._model()
        if known is not None and known is not model:
            raise UnsupportedArgumentError(f"another {type(known).__name__} is registered already")
        try:
            self._model = weakref.ref(model)
        except TypeError:
            raise UnsupportedArgumentError(
                f"model must be a module, got {type(model).__name__}; give other weights to "
                "update_weights"
            ) from None

    def register_collector(self, collector: Any) -> None:
        """Keeps ``collector``'s version equal to the connected service's."""
        if self._scheme.remote_addr is not None and self.service is None:
            raise TransferNotReadyError(
                "a sender that is not connected stores: register the collector with the receiver"
            )
        super().register_collector(collector)

    def init_all_workers_group(
        self, model_metadata: ModelMetadata, vllm_engine: Any = None
    ) -> None:
        """Connects to a service and checks that the model fits its engines'."""
        if self._connected:
            raise UnsupportedArgumentError("the sender is connected already: call shutdown first")
        if vllm_engine is not None:
            service = find_service(vllm_engine)
            check_metadata(model_metadata, service)
            self.connect(service)
        self._connected = True

    def connect(self, service: AsyncVLLM | LocalLLM) -> None:
        """Opens the transport to ``service``; does nothing when it is connected to it."""
        if (known := self.service) is not None:
            if known.name != service.name:
                raise UnsupportedArgumentError(f"the sender is connected to service {known.name}")
            return
        self._scheme.check_service(service)
        meeting_point = self._scheme.meeting_point(service)
        self.service = service
        try:
            self.open(**meeting_point)
        except BaseException:
            self.service = None
            raise
        self._connected = True

    def update_weights(
        self, weights: Any = None, *, version: int | None = None
    ) -> PushReport | PublishReport:
        """Brings every replica, and every registered collector, to new weights; or stores them."""
        if not self._connected and self._scheme.remote_addr is None:
            raise TransferNotReadyError(
                "the sender is not connected: call init_all_workers_group, or use a collector"
            )
        if not self._connected and version is not None:
            check_version("version", version)
        if weights is None:
            weights = self._model and self._model()
        if weights is None:
            why = "no model was registered" if self._model is None else "the model is gone"
            raise TransferNotReadyError(f"there is nothing to send: {why}")
        if self._connected:
            return self.push_weights(weights, version=version)
        source = as_weight_source(weights)
        refuse_nonfinite(source)
        transport: Any = self._transport  # by a directory, which has no need of replicas
        transport.open(None)
        version = transport.last_version + 1 if version is None else version
        return transport._open_writer().publish(source, source.metadata(), version)

    def send_weights(self, weights: Any) -> None:
        """The same as :meth:`update_weights`, as a ``TransportBackend`` of TorchRL's."""
        self.update_weights(weights)

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Receives nothing: this is the sending end."""

    def shutdown(self) -> None:
        """Closes the transport and forgets the service and the collectors; idempotent."""
        self.disconnect()
        self._connected = False


def find_service(engine: Any) -> AsyncVLLM | LocalLLM:
    """Returns the service that ``engine`` is, or that stands around a ``vllm.LLM``."""
    service = as_service(engine)
    if not isinstance(service, AsyncVLLM | LocalLLM):
        raise UnsupportedArgumentError(
            "vllm_engine must be a torchrl_vllm_sync.AsyncVLLM or a vllm.LLM, "
            f"got {type(engine).__name__}"
        )
    return service


def check_metadata(metadata: ModelMetadata, service: AsyncVLLM | LocalLLM) -> None:
    """Compares announced metadata with the engines' model; tuples as names are joined by dots."""

    def listed(items: ModelMetadata) -> list[ParamMeta]:
        names = (".".join(name) if isinstance(name, tuple) else name for name in items)
        return [ParamMeta(name, *one) for name, one in zip(names, items.values(), strict=True)]

    given: Any = SimpleNamespace(metadata=lambda: listed(metadata))
    fit_to_model(given, listed(service.get_model_metadata()))


class VLLMWeightReceiver:
    """Says when pushes, which bring the weights into the engines, have reached a service."""

    def __init__(self, scheme: ServiceScheme, vllm_engine: Any) -> None:
        self._scheme, self.service = scheme, find_service(vllm_engine)
        scheme.check_service(self.service)
        self._versions = CollectorVersions()
        self._seen = self.service.weight_version

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Checks what will be sent; the sender's call of this name brings both ends together."""
        check_metadata(model_metadata, self.service)

    def register_collector(self, collector: Any) -> None:
        """Brings ``collector`` to the service's version, also at each poll that finds a push."""
        self._versions.register(collector, self.service)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Returns whether a push has been committed since the last poll that returned true."""
        try:
            self._moved(self.service.weights.wait_for_version(self._seen + 1, timeout_s=timeout))
        except VersionNotReachedError:
            return False
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> PushReport:
        """Pushes ``weights`` from this process, as a version of their own."""
        if not inplace:
            raise UnsupportedArgumentError("inplace must be True: engines load into their own")
        report = self.service.push_weights(weights, **asdict(self._scheme.options))
        assert report.version is not None  # as in every push that is committed
        self._moved(report.version)
        return report

    def _moved(self, version: int) -> None:
        self._seen = version
        self._versions.announce(version)

    def send_weights(self, weights: Any) -> None:
        """The same as :meth:`apply_weights`, as a ``TransportBackend`` of TorchRL's."""
        self.apply_weights(weights)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> None:
        """Polls once; the engines hold the weights."""
        self.poll_and_apply(*([] if timeout is None else [timeout]))

    def setup_connection_and_weights_on_receiver(self, **kwargs: Any) -> None:
        """Receives nothing: the engines hold what they were launched with, or were sent since."""


class VLLMDoubleBufferWeightReceiver(VLLMWeightReceiver):
    """Has a service load what a directory holds."""

    _scheme: VLLMDoubleBufferSyncScheme

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Has every replica load the newest version that the directory holds."""
        check_seconds("timeout", timeout)
        options: Any = {"timeout_s": timeout, "deadline_s": timeout + GRACE_S, "compare": True}
        options |= {name: getattr(self._scheme.options, name) for name in ("clear_cache", "mode")}
        answers = self.service.replicas.call_replicas(
            "load_snapshot", self._scheme.local_addr, None, at_least=0, **options
        )
        self.service.weights.learn_versions()
        reports = answers.good.values()
        if failures := answers.failures:
            error = next(iter(failures.values()))
            if not reports and isinstance(error, SyncError):
                raise error
            held = max((one["version"] for one in reports), default=self._seen)
            raise WeightSyncError(held, {name: str(one) for name, one in failures.items()})
        loaded = [one["version"] for one in reports if one["loaded"]]
        if loaded:
            self._moved(max(loaded))
        return bool(loaded)


Strategy: TypeAlias = Literal["tensordict", "state_dict"]


class ServiceScheme(_TorchRLScheme):
    """Base of the two schemes: both of TorchRL's interfaces over one sender.

    A collector (TorchRL's ``Collector`` takes ``weight_sync_schemes``, its ``LLMCollector`` does
    not) has the service in its policy; scripts call :meth:`create_sender` and
    :meth:`create_receiver`. Connecting sends nothing. A pickled copy is not connected.
    """

    _receiver_type: type[VLLMWeightReceiver] = VLLMWeightReceiver
    # Where a sender that is not connected stores weights; ``None`` is nowhere.
    remote_addr: str | None = None
    # What a scheme may expect of the service; ``None`` expects nothing.
    num_replicas: int | None = None
    gpus_per_replica: int | None = None
    master_address: str | None = None
    master_port: int | None = None

    def __init__(self, strategy: Strategy, service: Any, options: PushOptions) -> None:
        if strategy not in get_args(Strategy):
            raise UnsupportedArgumentError(
                f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}"
            )
        super().__init__()  # without it: TorchRL would warn of its own way to read a state dict
        self.strategy_str = self.strategy_name = strategy
        self.options, self._service = options, service
        self._sender: VLLMWeightSender | None = None

    def new_transport(self) -> WeightTransport:
        """Returns the transport that the sender pushes through."""
        raise NotImplementedError

    def new_sender(self) -> VLLMWeightSender:
        """Returns the trainer's end."""
        return VLLMWeightSender(self)

    def check_service(self, service: AsyncVLLM | LocalLLM) -> None:
        """Refuses a service of other replicas than the scheme was made for.

        Args:
            service: The service.

        Raises:
            UnsupportedArgumentError: It has others.
        """
        if not isinstance(service, AsyncVLLM) or self.num_replicas is None:
            return
        known = {
            "num_replicas": {service.num_replicas},
            "gpus_per_replica": {service.get_tp_size(), num_workers(service.engine_args)},
        }
        for name, right in known.items():
            if (given := getattr(self, name)) not in right:
                told = " or ".join(map(str, sorted(right)))
                raise UnsupportedArgumentError(
                    f"{name} must be {told}, as the service has, got {given}"
                )

    def meeting_point(self, service: AsyncVLLM | LocalLLM) -> dict[str, Any]:
        """Returns where trainer and engines meet, if that was given.

        Arguments are those of :meth:`check_service`.
        """
        given = {"master_address": self.master_address, "master_port": self.master_port}
        return given if isinstance(service, AsyncVLLM) else {}

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """Returns a new receiver for a service, or for a ``vllm.LLM``.

        Args:
            vllm_engine: A service, or a ``vllm.LLM`` of this process.
        """
        return self._receiver_type(self, vllm_engine)

    def create_sender(self) -> VLLMWeightSender:
        """Returns the scheme's one sender, the same each time."""
        if self._sender is None:
            self._sender = self.new_sender()
        return self._sender

    def create_transport(self, **kwargs: Any) -> VLLMWeightSender:
        """Returns what TorchRL sends through: the scheme's sender.

        Args:
            **kwargs: What TorchRL says of the worker; not needed here.
        """
        del kwargs
        return self.create_sender()

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Finds the service, and registers what TorchRL hands over."""
        kwargs.pop("ctx", None)  # how a collector of several processes starts them
        if kwargs:
            raise UnsupportedArgumentError(
                f"{sorted(kwargs)} have no meaning for engines: give a collector, or model="
            )
        sender, service = self.create_sender(), self._find_service(context, model_id)
        if model is not None:
            sender.register_model(model)
        sender.connect(service)
        if context is not None:
            self.context = context
            sender.register_collector(context)
        if model_id is not None:
            self.model_id = model_id
        self._register_worker_sender(worker_idx=0, transport=sender)

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.model_id, self.worker_idx = model_id, kwargs.get("worker_idx")
        service = self._find_service(context, model_id, policy=kwargs.get("model"))
        receiver = self.create_receiver(service)
        if context is not None:
            self.context = context
            receiver.register_collector(context)
        self._register_transport_receiver(transport=receiver)

    def _find_service(
        self, context: Any, model_id: str | None, policy: Any = None
    ) -> AsyncVLLM | LocalLLM:
        known = self.create_sender().service if self._service is None else self._service
        if known is None:
            if policy is None and context is not None and model_id is not None:
                policy = _resolve_model(context, model_id)
            known = getattr(policy, "model", None)  # where TorchRL's wrappers have it
        if known is None:
            raise UnsupportedArgumentError(
                f"{model_id!r} of the collector has no engine: give the scheme a service"
            )
        return find_service(known)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Pushes to every replica; ``update_policy_weights_`` of a collector calls it.

        Arguments and errors beside these are those of :meth:`WeightUpdater.push_weights`.

        Args:
            weights: What to send; ``None`` sends the registered model.

        Raises:
            TransferNotReadyError: The scheme is not connected, or there is nothing to send.
        """
        if worker_ids is not None:
            raise UnsupportedArgumentError(f"worker_ids must be None, got {worker_ids!r}")
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise TransferNotReadyError(
                "the scheme is not connected: use a collector, or init_on_sender and connect"
            )
        super().send(weights)

    def prepare_weights(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns ``weights`` as they are: the push reads them, merged, gathered and named.

        Args:
            weights: What a push takes, or the name of one of the collector's models.
            *args, **kwargs: TorchRL's, for a name.
        """
        named = isinstance(weights, str)
        return super().prepare_weights(weights, *args, **kwargs) if named else weights

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        del worker_idx
        if weights is not None:
            self.create_sender().update_weights(weights)

    def shutdown(self) -> None:
        """Closes the transport and forgets the service; idempotent."""
        super().shutdown()
        if (sender := self.__dict__.get("_sender")) is not None:  # also if it was never made whole
            sender.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_sender": None, "_sender_transports": None, "_receiver_transport": None}
        return {**super().__getstate__(), **own}


class VLLMWeightSyncScheme(ServiceScheme):
    """TorchRL's scheme of this name, which with vLLM 0.28 and later loads nothing: a push.

    Example:
        >>> scheme = VLLMWeightSyncScheme(num_replicas=2)
        >>> collector = Collector(env, policy, weight_sync_schemes={"policy": scheme}, ...)
        >>> scheme.create_sender().register_model(trained_model)
        >>> collector.update_policy_weights_()

    Args:
        master_address, master_port: Where the engines find the trainer; found when ``None``.
        gpus_per_replica, num_replicas: What the service must have: tensor-parallel size, or
            workers, of a replica; and replicas.
        strategy: ``"tensordict"`` or ``"state_dict"``, as TorchRL's; both push the same.
        device: The trainer's device (a GPU's index) for a broadcast, which ``"auto"`` is then.
        service: The service; by default that of the collector's policy.
        transport, timeout_s, clear_cache, mode, strict: See ``WeightUpdater``.

    Raises:
        UnsupportedArgumentError: An argument is no such value.
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
        transport: TransportName | WeightTransport = "auto",
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
    ) -> None:
        how = PushOptions(timeout_s=timeout_s, clear_cache=clear_cache, mode=mode, strict=strict)
        super().__init__(strategy, service, how)
        as_transport(transport)
        if device is not None and transport not in ("auto", "broadcast"):
            raise UnsupportedArgumentError(f"device {device!r} is for broadcasts only")
        self.master_address, self.master_port = master_address, master_port
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.device = _as_device(device)
        self._transport: TransportName | WeightTransport = transport

    def new_transport(self) -> WeightTransport:
        """Returns the transport that the sender pushes through."""
        if self.device is not None:
            return BroadcastTransport(device=self.device)
        return as_transport(self._transport)


class VLLMDoubleBufferSyncScheme(ServiceScheme):
    """Passes weights through memory-mapped TensorDicts in a directory that both sides see.

    TorchRL's scheme of this name, with real buffers: versions are stored whole, checksummed, and
    loaded once each; a version older than the newest is refused.

    A sender that was connected (``init_all_workers_group``, or a collector) stores and loads. One
    that was not only stores, and ``receiver.poll_and_apply()`` or ``service.follow_snapshots()``
    has the engines load it.

    Example:
        >>> scheme = VLLMDoubleBufferSyncScheme("/shared/weights")
        >>> scheme.create_sender().update_weights(model)  # in the trainer
        >>> scheme.create_receiver(service).poll_and_apply()  # where the service is
        True

    Args:
        remote_addr, local_addr: Directory that the sender writes, and as the replicas see it.
        num_threads: Must be at least 1; stores and loads are bounded by memory, and use one.
        strategy: ``"tensordict"`` or ``"state_dict"``, as TorchRL's; both push the same.
        service: The service; by default that of the collector's policy.
        layout: ``"slots"``, or ``"versions"``, see ``SnapshotWriter``.
        timeout_s, clear_cache, mode, strict: See ``WeightUpdater``.

    Raises:
        UnsupportedArgumentError: An argument is no such value.
    """

    _receiver_type = VLLMDoubleBufferWeightReceiver

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
        how = PushOptions(timeout_s=timeout_s, clear_cache=clear_cache, mode=mode, strict=strict)
        super().__init__(strategy, service, how)
        check_integer("num_threads", num_threads, 1)
        if layout not in (known := get_args(LayoutName)):
            raise UnsupportedArgumentError(f"layout must be one of {known}, got {layout!r}")
        local_addr = remote_addr if local_addr is None else local_addr
        self.remote_addr = _as_directory("remote_addr", remote_addr)
        self.local_addr = _as_directory("local_addr", local_addr)
        self.num_threads = num_threads
        self.layout: LayoutName = layout

    def new_transport(self) -> MemmapTransport:
        """Returns the transport that the sender pushes through once it is connected."""
        return MemmapTransport(self.remote_addr, layout=self.layout)

    def meeting_point(self, service: AsyncVLLM | LocalLLM) -> dict[str, Any]:
        """Returns no address; refuses to push where the replicas see another directory.

        Arguments and errors are those of :meth:`check_service`.
        """
        if self.local_addr != self.remote_addr:
            raise UnsupportedArgumentError(
                f"local_addr must be remote_addr to push to a service, got {self.local_addr} and "
                f"{self.remote_addr}: store only, and poll with a receiver"
            )
        return super().meeting_point(service)


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

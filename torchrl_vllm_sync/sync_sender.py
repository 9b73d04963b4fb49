"""The trainer's end of a weight sync scheme: what GRPO scripts call, over the updater's pushes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchrl_vllm_sync.errors import TransferNotReadyError, UnsupportedArgumentError
from torchrl_vllm_sync.local_llm import LocalLLM
from torchrl_vllm_sync.service import AsyncVLLM
from torchrl_vllm_sync.updater import WeightUpdater, as_service
from torchrl_vllm_sync.versions import MAX_VERSION, check_version
from torchrl_vllm_sync.weights.metadata import ParamMeta
from torchrl_vllm_sync.weights.snapshot_writer import SnapshotWriter
from torchrl_vllm_sync.weights.source import as_weight_source, fit_to_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from torchrl_vllm_sync.weights.marker import LayoutName
    from torchrl_vllm_sync.weights.snapshot_writer import PublishReport
    from torchrl_vllm_sync.weights.transport import PushReport, WeightTransport

__all__ = [
    "DirectorySettings",
    "ModelMetadata",
    "SenderSettings",
    "SenderTransport",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightSender",
    "check_metadata",
    "find_service",
]

# Name to dtype and full shape, as ``torchrl.weight_update.llm.get_model_metadata`` returns them.
ModelMetadata: TypeAlias = "Mapping[str, tuple[torch.dtype, torch.Size]]"


class SenderSettings(Protocol):
    """What a sender asks its scheme."""

    push_options: dict[str, Any]

    def new_transport(self) -> WeightTransport:
        """Returns the transport to push through."""
        ...

    def check_service(self, service: AsyncVLLM | LocalLLM) -> None:
        """Refuses a service that is not what the scheme was made for."""
        ...

    def meeting_point(self, service: AsyncVLLM | LocalLLM) -> dict[str, Any]:
        """Returns where trainer and engines meet, if that was given."""
        ...


class DirectorySettings(SenderSettings, Protocol):
    """What a sender that stores asks besides."""

    remote_addr: str
    local_addr: str
    layout: LayoutName


class VLLMWeightSender:
    """Sends a trainer's weights to the replicas of a service; ``scheme.create_sender()`` makes it.

    Lifecycle: :meth:`register_model`, :meth:`init_all_workers_group`, then :meth:`update_weights`
    any number of times, :meth:`shutdown`. TorchRL's names and arguments; each update is a push of a
    ``WeightUpdater``, so that all its promises hold.

    Example:
        >>> sender = scheme.create_sender()
        >>> sender.register_model(policy_training.model)
        >>> sender.init_all_workers_group(get_model_metadata(policy_training.model), service)
        >>> sender.register_collector(collector)
        >>> sender.update_weights()

    Args:
        scheme: Whose transport and settings it uses.
    """

    def __init__(self, scheme: SenderSettings) -> None:
        self._scheme = scheme
        self._model: weakref.ref[Any] | None = None
        self._connected = False
        self._updater = WeightUpdater(None, transport=scheme.new_transport(), **scheme.push_options)

    @property
    def service(self) -> AsyncVLLM | LocalLLM | None:
        """The service it is connected to."""
        return self._updater.service

    @property
    def last_report(self) -> PushReport | None:
        """What the last update did."""
        return self._updater.last_report

    def register_model(self, model: Any) -> None:
        """Makes ``model`` what :meth:`update_weights` sends when it is given nothing.

        Args:
            model: A module, plain or wrapped by TorchRL; it is held weakly.

        Raises:
            UnsupportedArgumentError: Another model is registered and still exists, or ``model``
                is nothing that can be held weakly, such as a state dict.
        """
        known = None if self._model is None else self._model()
        if known is not None and known is not model:
            raise UnsupportedArgumentError(
                f"another {type(known).__name__} is registered already: a scheme synchronises one "
                "model"
            )
        try:
            self._model = weakref.ref(model)
        except TypeError:
            raise UnsupportedArgumentError(
                f"model must be a module, got {type(model).__name__}; give other weights to "
                "update_weights"
            ) from None

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata,
        vllm_engine: Any = None,
    ) -> None:
        """Connects to a service, and checks that the model fits its engines' before anything moves.

        Args:
            model_metadata: Names, dtypes and shapes that will be sent.
            vllm_engine: The service, or a ``vllm.LLM`` of this process. ``None`` on the ranks of a
                model sharded by FSDP2 that do not push it.

        Raises:
            UnsupportedArgumentError: It is connected already, ``vllm_engine`` is neither, or its
                replicas are not what the scheme was made for.
            WeightMismatchError: The metadata do not fit the engines' model.
            SyncError: The transport could not be opened.
        """
        if self._connected:
            raise UnsupportedArgumentError("the sender is connected already: call shutdown first")
        if vllm_engine is None:
            self._connected = True
            return
        service = find_service(vllm_engine)
        check_metadata(model_metadata, service)
        self.connect(service)

    def connect(self, service: AsyncVLLM | LocalLLM) -> None:
        """Opens the transport to ``service``; does nothing when it is connected to it.

        Raises:
            UnsupportedArgumentError: It is connected to another one, or the replicas are not what
                the scheme was made for.
        """
        known = self._updater.service
        if known is not None:
            if known.service_name != service.service_name:
                raise UnsupportedArgumentError(
                    f"the sender is connected to service {known.service_name}, so it cannot be "
                    f"to {service.service_name}"
                )
            return
        self._scheme.check_service(service)
        self._updater.service = service
        try:
            self._updater.open(**self._scheme.meeting_point(service))
        except BaseException:
            self._updater.service = None
            raise
        self._connected = True

    def register_collector(self, collector: Any) -> None:
        """Keeps ``collector``'s version equal to the service's; see ``WeightUpdater``.

        Raises:
            UnsupportedArgumentError: It is none of TorchRL's collectors.
        """
        self._updater.register_collector(collector)

    def update_weights(
        self,
        weights: Any = None,
        *,
        version: int | None = None,
    ) -> PushReport | PublishReport:
        """Brings every replica to new weights, and every registered collector to their version.

        Args:
            weights: What to send; ``None`` sends the registered model.
            version: Policy version; by default one more than the newest.

        Returns:
            What the push did, with the time of each phase.

        Raises:
            TransferNotReadyError: It is not connected, or there is no model: none was registered,
                or it is gone.
            WeightMismatchError: The weights do not fit the engines' model; nothing was sent.
            StaleVersionError: ``version`` is older than the newest; nothing was sent.
            WeightSyncError: Some replicas did not reach the version. Collectors keep theirs.
        """
        if not self._connected:
            raise TransferNotReadyError(
                "the sender is not connected: call init_all_workers_group, or give the scheme to a "
                "collector, before update_weights"
            )
        return self._updater.push_weights(self.to_send(weights), version=version)

    def to_send(self, weights: Any) -> Any:
        """Returns ``weights``, or the registered model in their place.

        Raises:
            TransferNotReadyError: There is none.
        """
        if weights is None and self._model is not None:
            weights = self._model()
        if weights is None:
            raise TransferNotReadyError(
                "there is nothing to send: "
                + ("no model was registered" if self._model is None else "the model is gone")
            )
        return weights

    def shutdown(self) -> None:
        """Closes the transport and forgets the service and the collectors; idempotent."""
        self._updater.disconnect()
        self._connected = False


class VLLMDoubleBufferWeightSender(VLLMWeightSender):
    """Stores a trainer's weights in a directory, and has a service load them if it is connected.

    Without :meth:`init_all_workers_group` each update only stores a version, which
    ``receiver.poll_and_apply()`` or ``service.follow_snapshots()`` bring into the engines. The
    receiver then moves collectors, since the sender does not know when that is.
    """

    _scheme: DirectorySettings
    _writer: SnapshotWriter | None = None

    def connect(self, service: AsyncVLLM | LocalLLM) -> None:
        """Opens the transport to ``service``; see ``VLLMWeightSender``.

        Raises:
            UnsupportedArgumentError: The replicas see the directory elsewhere, so that they cannot
                be told what to load; or see there.
        """
        if self._scheme.local_addr != self._scheme.remote_addr:
            raise UnsupportedArgumentError(
                "local_addr must be remote_addr to push to a service, got "
                f"{self._scheme.local_addr} and {self._scheme.remote_addr}: store only, and poll "
                "with a receiver"
            )
        self._close_writer()
        super().connect(service)

    def register_collector(self, collector: Any) -> None:
        """Keeps ``collector``'s version equal to the service's; see ``VLLMWeightSender``.

        Raises:
            TransferNotReadyError: The sender is not connected to a service.
            UnsupportedArgumentError: It is none of TorchRL's collectors.
        """
        if self.service is None:
            raise TransferNotReadyError(
                "a sender that is not connected stores versions only: register the collector with "
                "the receiver, or call init_all_workers_group first"
            )
        super().register_collector(collector)

    def update_weights(
        self,
        weights: Any = None,
        *,
        version: int | None = None,
    ) -> PushReport | PublishReport:
        """Stores the next version, and has the service load it if there is one.

        Args:
            weights: What to send; ``None`` sends the registered model.
            version: Policy version; by default one more than the newest.

        Returns:
            What was done, with the time of each phase.

        Raises:
            TransferNotReadyError: There is no model: none was registered, or it is gone.
            UnsupportedArgumentError: ``version`` is no version.
            StaleVersionError: ``version`` is not newer than what is stored; nothing was.
            SnapshotError: The directory cannot be written.
            WeightMismatchError: The weights do not fit the engines' model; nothing was sent.
            WeightSyncError: Some replicas did not reach the version.
        """
        if self._connected:
            return super().update_weights(weights, version=version)
        if version is not None:
            check_version("version", version)
            if version > MAX_VERSION:
                raise UnsupportedArgumentError(
                    f"version must be at most {MAX_VERSION}, got {version}"
                )
        source = as_weight_source(self.to_send(weights))
        if self._writer is None:
            self._writer = SnapshotWriter(self._scheme.remote_addr, layout=self._scheme.layout)
        if version is None:
            version = (self._writer.last_version or 0) + 1
        return self._writer.publish(source, source.metadata(), version)

    def shutdown(self) -> None:
        """Gives the directory back, and forgets the service and the collectors; idempotent."""
        self._close_writer()
        super().shutdown()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class SenderTransport:
    """What TorchRL sends through: a sender, behind TorchRL's ``TransportBackend`` interface."""

    def __init__(self, sender: VLLMWeightSender) -> None:
        self._sender = sender

    def send_weights(self, weights: Any) -> None:
        """Pushes, and returns when every replica has answered."""
        self._sender.update_weights(weights)

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Receives nothing: this is the sending end."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Sends nothing: the engines hold what they were launched with."""


def find_service(engine: Any) -> AsyncVLLM | LocalLLM:
    """Returns the service that ``engine`` is, or that stands around a ``vllm.LLM``.

    Raises:
        UnsupportedArgumentError: It is neither.
    """
    service = as_service(engine)
    if not isinstance(service, AsyncVLLM | LocalLLM):
        raise UnsupportedArgumentError(
            "vllm_engine must be a torchrl_vllm_sync.AsyncVLLM or a vllm.LLM, "
            f"got {type(engine).__name__}"
        )
    return service


def check_metadata(metadata: ModelMetadata, service: AsyncVLLM | LocalLLM) -> None:
    """Compares what a trainer announces with what the engines' model consists of.

    Names may be those of a TensorDict too: tuples, whose parts are joined by dots.

    Raises:
        WeightMismatchError: Tensors are missing or unknown, or of other shapes or kinds of dtype.
    """
    given = [
        ParamMeta(".".join(name) if isinstance(name, tuple) else name, dtype, tuple(shape))
        for name, (dtype, shape) in metadata.items()
    ]
    model = service.get_model_metadata().items()
    expected = [ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model]
    fit_to_model(_Announced(given), expected)


class _Announced:
    """A source of which the metadata are known only."""

    def __init__(self, metadata: list[ParamMeta]) -> None:
        self._metadata = metadata

    def metadata(self) -> list[ParamMeta]:
        """Returns what was announced."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Has nothing."""
        return iter(())

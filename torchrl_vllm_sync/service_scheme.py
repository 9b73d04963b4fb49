"""What TorchRL's weight sync schemes over a service share: its interfaces over one sender.

One scheme serves both of TorchRL's interfaces: as a collector's ``weight_sync_schemes=``, and
through ``create_sender`` and ``create_receiver``, as the GRPO scripts use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrl.weight_update import WeightSyncScheme as _TorchRLScheme
from torchrl.weight_update.utils import _resolve_model

from torchrl_vllm_sync.errors import TransferNotReadyError, UnsupportedArgumentError
from torchrl_vllm_sync.sync_receiver import ReceiverTransport, VLLMWeightReceiver
from torchrl_vllm_sync.sync_sender import SenderTransport, VLLMWeightSender, find_service

if TYPE_CHECKING:
    from torchrl_vllm_sync.local_llm import LocalLLM
    from torchrl_vllm_sync.service import AsyncVLLM
    from torchrl_vllm_sync.weights.transport import PauseMode, WeightTransport

__all__ = ["ServiceScheme", "Strategy"]

Strategy: TypeAlias = Literal["tensordict", "state_dict"]


class ServiceScheme(_TorchRLScheme):
    """What TorchRL's schemes over a service share; see ``sync_scheme``.

    Given to a collector (``weight_sync_schemes={"policy": scheme}``, which TorchRL's ``Collector``
    takes and its ``LLMCollector`` refuses) it finds the service in the collector's policy. Then
    ``collector.update_policy_weights_(weights)`` and :meth:`send` push, and so does the sender; the
    collector's version is the service's after each. Connecting sends nothing: until the first push
    the engines compute with what they were launched with.

    A pickled copy is not connected, and has no model.

    Args:
        strategy: How TorchRL reads a module, ``"tensordict"`` or ``"state_dict"``. Pushes read
            either the same way, under the names of the checkpoint.
        service: The service, or a ``vllm.LLM``; by default that of the collector's policy.
        timeout_s: Seconds after which a silent replica counts as failed; ``None`` takes a multiple
            of what such pushes took.
        clear_cache: Recompute keys and values of requests in flight after each push.
        mode: What becomes of requests in flight: ``"keep"``, ``"wait"`` or ``"abort"``.
        strict: Raise if any replica is left behind, not only if all are; ``None`` does as the
            service does.

    Raises:
        UnsupportedArgumentError: There is no such ``strategy``.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        service: Any,
        timeout_s: float | None,
        clear_cache: bool,
        mode: PauseMode,
        strict: bool | None,
    ) -> None:
        if strategy not in ("tensordict", "state_dict"):
            raise UnsupportedArgumentError(
                f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}"
            )
        super().__init__()  # without it: TorchRL would warn of its own way to read a state dict
        self.strategy_str = self.strategy_name = strategy
        self.push_options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "clear_cache": clear_cache,
            "mode": mode,
            "strict": strict,
        }
        self._service = service
        self._sender: VLLMWeightSender | None = None

    # ---------------------------------------------------------------- what schemes differ in

    def new_transport(self) -> WeightTransport:
        """Returns the transport that the sender pushes through."""
        raise NotImplementedError

    def new_sender(self) -> VLLMWeightSender:
        """Returns the trainer's end."""
        return VLLMWeightSender(self)

    def check_service(self, service: AsyncVLLM | LocalLLM) -> None:
        """Refuses a service that is not what the scheme was made for.

        Args:
            service: The service.
        """

    def meeting_point(self, service: AsyncVLLM | LocalLLM) -> dict[str, Any]:
        """Returns where trainer and engines meet, if that was given.

        Args:
            service: The service.
        """
        del service
        return {}

    # ---------------------------------------------------------------- TorchRL's scripts

    def create_sender(self) -> VLLMWeightSender:
        """Returns the scheme's one sender, the same each time."""
        if self._sender is None:
            self._sender = self.new_sender()
        return self._sender

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """Returns a new receiver for a service, or for a ``vllm.LLM``.

        Args:
            vllm_engine: A service, or a ``vllm.LLM`` of this process.
        """
        return VLLMWeightReceiver(self, vllm_engine)

    # ---------------------------------------------------------------- TorchRL's collectors

    def create_transport(self, **kwargs: Any) -> SenderTransport:
        """Returns what TorchRL sends through: the scheme's sender.

        Args:
            **kwargs: What TorchRL says of the worker; not needed here.
        """
        del kwargs
        return SenderTransport(self.create_sender())

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Finds the service, and registers what TorchRL hands over.

        Raises:
            UnsupportedArgumentError: No service is known, or ``kwargs`` hold anything that only
                makes sense for copies of a policy.
        """
        kwargs.pop("ctx", None)  # how a collector of several processes starts them
        if kwargs:
            raise UnsupportedArgumentError(
                f"{sorted(kwargs)} have no meaning for engines: give a collector, or model="
            )
        sender = self.create_sender()
        service = self._find_service(context, model_id)
        if model is not None:
            sender.register_model(model)
        sender.connect(service)
        if context is not None:
            self.context = context
            sender.register_collector(context)
        if model_id is not None:
            self.model_id = model_id
        self._register_worker_sender(worker_idx=0, transport=self.create_transport())

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        **kwargs: Any,
    ) -> None:
        self.model_id, self.worker_idx = model_id, kwargs.get("worker_idx")
        policy = kwargs.get("model")
        receiver = self.create_receiver(self._find_service(context, model_id, policy))
        if context is not None:
            self.context = context
            receiver.register_collector(context)
        self._register_transport_receiver(transport=ReceiverTransport(receiver))

    def _find_service(
        self,
        context: Any,
        model_id: str | None,
        policy: Any = None,
    ) -> AsyncVLLM | LocalLLM:
        if self._service is not None:
            return find_service(self._service)
        sender = self.create_sender()
        if sender.service is not None:
            return sender.service
        if policy is None and context is not None and model_id is not None:
            policy = _resolve_model(context, model_id)
        engine = getattr(policy, "model", None)  # where TorchRL's wrappers have it
        if engine is None:
            raise UnsupportedArgumentError(
                f"{model_id!r} of the collector has no engine: give the scheme a service"
            )
        return find_service(engine)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Pushes to every replica; ``update_policy_weights_`` of a collector calls it.

        Args:
            weights: What ``AsyncVLLM.push_weights`` takes; ``None`` sends the registered model.
            worker_ids: Must be ``None``: replicas on different versions would mix in one batch.

        Raises:
            TransferNotReadyError: The scheme is not connected, or there is nothing to send.
            UnsupportedArgumentError: ``worker_ids`` is given.
            WeightMismatchError: The weights do not fit the engines' model; nothing was sent.
            WeightSyncError: Some replicas did not reach the version.
        """
        if worker_ids is not None:
            raise UnsupportedArgumentError(f"worker_ids must be None, got {worker_ids!r}")
        if not (self.initialized_on_sender and self.synchronized_on_sender):
            raise TransferNotReadyError(
                "the scheme is not connected: give it to a collector, or call init_on_sender and "
                "connect, before send"
            )
        super().send(weights)

    def prepare_weights(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Leaves ``weights`` as they are: the push reads them, merged, gathered and named.

        The name of a model of the collector stands for that model.

        Args:
            weights: What a push takes, or the name of a model of the collector.
            *args: TorchRL's, for a name.
            **kwargs: TorchRL's, for a name.

        Returns:
            What to push.
        """
        named = isinstance(weights, str)
        return super().prepare_weights(weights, *args, **kwargs) if named else weights

    def _setup_connection_and_weights_on_sender_impl(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
    ) -> None:
        del worker_idx
        if weights is not None:
            self.create_sender().update_weights(weights)

    def shutdown(self) -> None:
        """Closes the transport and forgets the service; idempotent."""
        super().shutdown()
        if self.__dict__.get("_sender") is not None:
            self.create_sender().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_sender": None, "_sender_transports": None, "_receiver_transport": None}
        return {**super().__getstate__(), **own}

"""The weight updater that TorchRL's collectors take: one push, one version, either way."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torchrl.collectors.weight_update import WeightUpdaterBase

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.weights.auto_transport import TRANSPORTS
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource
from torchrl_vllm_sync.weights.source import as_weight_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import LLM

    from torchrl_vllm_sync.local_llm import LocalLLM
    from torchrl_vllm_sync.service import AsyncVLLM
    from torchrl_vllm_sync.weights.transport import PauseMode, PushReport, WeightTransport

__all__ = ["WeightUpdater"]

logger = logging.getLogger(__name__)

# The rank that pushes may form a group and send twice before the others hear of it.
FOLLOW_GRACE_S = 180.0


class WeightUpdater:
    """Pushes a trainer's weights into every replica of a service.

    TorchRL's ``WeightUpdaterBase`` interface: give it to ``LLMCollector(weight_updater=...)``, or
    call :meth:`push_weights` yourself. Either way one push moves the version of every registered
    collector by one. It pickles; a copy has no collectors and no source.

    Example:
        >>> updater = WeightUpdater(service, source=trained_model)
        >>> collector = LLMCollector(env, policy=policy, weight_updater=updater, ...)
        >>> updater.push_weights()

    Args:
        service: The service, or a ``vllm.LLM`` of this process, see ``LocalLLM``. ``None`` on the
            ranks of a model sharded by FSDP2 that do not push it: every rank calls
            :meth:`push_weights`, and only the first has the service.
        source: What :meth:`push_weights` sends when it is given nothing: a module (plain, wrapped
            by TorchRL, or with LoRA adapters), a state dict or a TensorDict. Read at each push.
        transport: ``"auto"``, ``"broadcast"``, ``"ipc"``, ``"memmap"``, ``"vllm-nccl"``, or a
            ``WeightTransport``. ``"auto"`` chooses by where trainer and engines are, see
            ``weights/choice.py``; reports name what was chosen.
        timeout_s: Seconds after which a silent replica counts as failed.
        clear_cache: Recompute keys and values of requests in flight after each push.
        mode: What becomes of requests in flight: ``"keep"``, ``"wait"`` or ``"abort"``, see
            ``AsyncVLLM.push_weights``.

    Raises:
        UnsupportedArgumentError: No transport of that name.
    """

    def __init__(
        self,
        service: AsyncVLLM | LLM | None,
        source: Any = None,  # noqa: ANN401  every form that ``as_weight_source`` takes
        *,
        transport: str | WeightTransport = "auto",
        timeout_s: float = 300.0,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
    ) -> None:
        if isinstance(transport, str):
            if transport not in TRANSPORTS:
                raise UnsupportedArgumentError(
                    f"transport must be one of {sorted(TRANSPORTS)}, got {transport!r}"
                )
            transport = TRANSPORTS[transport]()
        self.service: AsyncVLLM | LocalLLM | None = _as_service(service)
        self.source = source
        self.last_report: PushReport | None = None
        self._transport = transport
        self._timeout_s, self._clear_cache = timeout_s, clear_cache
        self._mode: PauseMode = mode
        self._announced: int | None = None
        self._collectors: list[weakref.ref[Any]] = []
        self._post_hooks: list[Callable[[], Any]] = []

    def push_weights(
        self,
        policy_or_weights: Any = None,  # noqa: ANN401
        worker_ids: Any = None,  # noqa: ANN401
        *,
        version: int | None = None,
    ) -> PushReport:
        """Brings every replica to new weights and moves the collectors' version by one.

        Args:
            policy_or_weights: What to send; ``None`` sends ``source``.
            worker_ids: Must be ``None``: replicas on different versions would mix in one batch.
            version: Policy version; by default one more than the newest.

        Returns:
            What the push did, with the time of each phase; also kept as ``last_report``.

        Raises:
            UnsupportedArgumentError: There is nothing to send, or ``worker_ids`` is given.
            WeightMismatchError: The weights do not fit the model; nothing was sent.
            StaleVersionError: ``version`` is older than the newest; nothing was sent.
            WeightSyncError: Some replicas did not reach the version. Collectors keep theirs.
            TrainerRankError: The weights are sharded, and another rank failed.
        """
        report, moved = self._push(policy_or_weights, worker_ids, version)
        if moved:
            self.increment_version()
        return report

    def __call__(
        self,
        policy_or_weights: Any = None,  # noqa: ANN401
        worker_ids: Any = None,  # noqa: ANN401
    ) -> PushReport:
        """Pushes for a collector's ``update_policy_weights_``, which moves its version itself.

        Raises:
            UnsupportedArgumentError: Several collectors are registered: whose version has moved
                cannot be told, so call :meth:`push_weights`. Otherwise as there.
        """
        if len(self._live_collectors()) > 1:
            raise UnsupportedArgumentError(
                "update_policy_weights_ moves the version of one collector only, and "
                f"{len(self._live_collectors())} share this updater: call push_weights instead"
            )
        return self._push(policy_or_weights, worker_ids, None)[0]

    def _push(
        self,
        weights: Any,  # noqa: ANN401
        worker_ids: Any,  # noqa: ANN401
        version: int | None,
    ) -> tuple[PushReport, bool]:
        """Pushes, and says whether collectors have not heard of the version yet.

        A version that only survivors took is news still when the push is repeated.
        """
        if worker_ids is not None:
            raise UnsupportedArgumentError(f"worker_ids must be None, got {worker_ids!r}")
        weights = self.source if weights is None else weights
        if weights is None:
            raise UnsupportedArgumentError("push_weights has nothing to send: no source was given")
        if self._announced is None:
            self._announced = 0 if self.service is None else self.service.weight_version
        if self.service is None:
            self.last_report = self._take_part(weights)
        else:
            self.last_report = self.service.push_weights(
                weights,
                version=version,
                transport=self._transport,
                timeout_s=self._timeout_s,
                clear_cache=self._clear_cache,
                mode=self._mode,
            )
        moved = self.last_report.version > self._announced
        self._announced = max(self.last_report.version, self._announced)
        for hook in self._post_hooks:
            hook()
        return self.last_report, moved

    def _take_part(self, weights: Any) -> PushReport:  # noqa: ANN401
        """Gathers a sharded model with the rank that pushes it, and returns that rank's report."""
        source = as_weight_source(weights)
        if not isinstance(source, ShardedModuleSource) or source.leads:
            raise UnsupportedArgumentError(
                "service may be None only on the ranks of a sharded model that do not push it; "
                "the first of its ranks must have the service"
            )
        return source.participate(timeout_s=2 * self._timeout_s + FOLLOW_GRACE_S)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Opens the transport before the first push, which would do it too; arguments are ignored.

        ``collector.init_updater(...)`` calls it with whatever it was given.
        """
        del args, kwargs
        if self.service is None:
            return
        self.service.use_transport(self._transport)
        self.service.init_weight_update_group()

    def register_collector(self, collector: Any) -> None:  # noqa: ANN401
        """Moves ``collector``'s version at each push from now on; it is held weakly."""
        if not any(ref() is collector for ref in self._collectors):
            self._collectors.append(weakref.ref(collector))

    @property
    def collector(self) -> Any | None:  # noqa: ANN401
        """The collector registered last, or ``None``."""
        return next(reversed(self._live_collectors()), None)

    @property
    def collectors(self) -> list[Any]:
        """The registered collectors that still exist."""
        return self._live_collectors()

    def _live_collectors(self) -> list[Any]:
        """Returns collectors that still exist, and forgets the others."""
        found = [ref() for ref in self._collectors]
        if None in found:
            logger.warning("%d registered collector(s) are gone", found.count(None))
            self._collectors = [ref for ref in self._collectors if ref() is not None]
        return [one for one in found if one is not None]

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called, without arguments, after each push that succeeded."""
        return self._post_hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Calls ``hook`` after each push that succeeded."""
        self._post_hooks.append(hook)

    def increment_version(self) -> None:
        """Moves the version of every registered collector by one, without a push."""
        for collector in self._live_collectors():
            collector.increment_version()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_collectors": [], "_post_hooks": [], "source": None}


def _as_service(service: Any) -> Any:  # noqa: ANN401  a service, or an LLM
    """Puts what a push needs around a ``vllm.LLM``, and returns anything else as it is."""
    offline = sys.modules.get("vllm.entrypoints.llm")  # whoever has an LLM has imported it
    if offline is None or not isinstance(service, offline.LLM):
        return service
    from torchrl_vllm_sync.local_llm import LocalLLM

    return LocalLLM(service)


# A real subclass would warn at import (torchrl/collectors/weight_update.py:78, 0.14.1); a virtual
# one passes the collectors' isinstance check all the same.
WeightUpdaterBase.register(WeightUpdater)

"""The weight updater that TorchRL's collectors take, and the versions of those collectors."""

from __future__ import annotations

import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch
from ray.exceptions import RayError
from torchrl.collectors import BaseCollector
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.envs import Transform
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_vllm_sync.errors import UnsupportedArgumentError, is_away, is_gone
from torchrl_vllm_sync.replica import PushReport
from torchrl_vllm_sync.weights.adapters import AdapterSource
from torchrl_vllm_sync.weights.auto import TRANSPORTS, TransportName
from torchrl_vllm_sync.weights.push import FIRST_TIMEOUT_S
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource
from torchrl_vllm_sync.weights.source import as_weight_source
from torchrl_vllm_sync.weights.transport import (
    MOST_ATTEMPTS,
    PauseMode,
    PushOptions,
    WeightTransport,
    check_transport,
)

if TYPE_CHECKING:
    from vllm import LLM

    from torchrl_vllm_sync.rl.local_llm import LocalLLM
    from torchrl_vllm_sync.service.service import AsyncVLLM

logger = logging.getLogger(__name__)

# The pushing rank may form groups and send several times before the others get its report.
FOLLOW_GRACE_S = 180.0
# The other ranks wait this many times longer than the last push took, at least.
SLOWER = 10

# A collector in an actor answers between two rollouts, and is waited for this long at most.
MOVE_TIMEOUT_S = 30.0


class ServiceVersion(PolicyVersion):
    """A collector's counter at what the service said last, however often TorchRL moves it."""

    counter: PolicyVersion

    def __init__(self, counter: PolicyVersion) -> None:
        Transform.__init__(self)
        self.__dict__["counter"] = counter  # not as a module, a transform inside a transform
        self.announced: int | None = None
        self.version_type = counter.version_type

    @property
    def version(self) -> str | int:
        """The collector's version."""
        return self.counter.version

    @version.setter
    def version(self, value: str | int) -> None:
        self.counter.version = value

    def increment_version(self) -> None:
        """Does nothing: :meth:`move` does."""

    def move(self, version: int) -> None:
        """Brings the counter to ``version``; one of made-up ids gets a new one a version."""
        if self.version_type not in (int, "int"):
            if version != self.announced:
                self.counter.increment_version()
        else:
            if version == int(self.version) + 1:
                self.counter.increment_version()  # which keeps TorchRL's history of versions
            if version != self.version:  # also a counter that follows the service, and is behind
                self.counter.version = version
        self.announced = version


class _Counterless:
    """The class behind that of a collector without a counter, which may yet be given one.

    ``LLMCollector`` (TorchRL 0.14) registers with its updater before it makes a counter and an env.
    """

    __slots__ = ()  # as an object can change between classes of one layout only

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "env" and isinstance(vars(self)["policy_version_tracker"], PolicyVersion):
            self.__class__ = type(self).__bases__[0]
            move_collector(self, vars(self).pop("_announced"))


def move_collector(collector: Any, version: int) -> None:
    """Brings a collector of this process to ``version``, or as soon as it is built."""
    counter = getattr(collector, "policy_version_tracker", None)
    if not isinstance(counter, PolicyVersion):
        if isinstance(collector, LLMCollector):
            kind = type(collector)
            if not isinstance(collector, _Counterless):
                collector.__class__ = types.new_class(kind.__name__, (kind, _Counterless))
            vars(collector)["_announced"] = version
        return  # any other that tracks no version stays as it is
    if not isinstance(counter, ServiceVersion):
        counter = collector.policy_version_tracker = ServiceVersion(counter)
    counter.move(version)


class CollectorVersions:
    """The collectors that follow one service's versions, held weakly; a pickled copy has none."""

    def __init__(self) -> None:
        self._lock, self._newest = threading.RLock(), 0
        self._collectors: list[weakref.ref[Any]] = []
        # The last call of each collector that did not take it in time.
        self._late: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._end: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def follow(self, service: AsyncVLLM | LocalLLM) -> None:
        """Announces each version that this process brings ``service`` to."""
        if self._end is None:
            self._end = service.weights.hooks.listen(self.announce)

    def stop(self) -> None:
        """Ends :meth:`follow` and forgets the collectors."""
        if self._end is not None:
            self._end()
        with self._lock:
            self._end, self._collectors, self._newest = None, [], 0

    def register(self, collector: Any, service: AsyncVLLM | LocalLLM | None) -> None:
        """Brings ``collector`` to each version from now on; it becomes the last of :attr:`live`."""
        if not isinstance(collector, BaseCollector):
            raise UnsupportedArgumentError(
                f"collector must be one of TorchRL's collectors, got {type(collector).__name__}"
            )
        with self._lock:
            others = [ref for ref in self._collectors if ref() is not collector]
            self._collectors = [*others, weakref.ref(collector)]
        if service is not None:
            self.follow(service)
            self._move([collector], service.weight_version)

    def announce(self, version: int) -> None:
        """Brings all to ``version``, or to a newer one that was announced before."""
        self._move(self.live, version)

    @property
    def live(self) -> list[Any]:
        """The collectors that still exist, in the order of registration."""
        with self._lock:  # as another thread may register one
            found = [ref() for ref in self._collectors]
            self._collectors = [ref for ref in self._collectors if ref() is not None]
        if None in found:
            logger.warning("%d registered collector(s) are gone", found.count(None))
        return [one for one in found if one is not None]

    def _move(self, collectors: list[Any], version: int) -> None:
        calls: dict[Any, Any] = {}
        with self._lock:
            version = self._newest = max(version, self._newest)
            for collector in collectors:
                if isinstance(collector, RayLLMCollector):
                    actor = collector._collector
                    calls[collector] = actor.__ray_call__.remote(move_collector, version)
                else:
                    move_collector(collector, version)
        # One that has not even taken the version before is busy: it takes both when it is free.
        late = [(ref, self._late.pop(one, None)) for one, ref in calls.items()]
        waited = [ref for ref, last in late if last is None or ray.wait([last], timeout=0)[0]]
        if waited:
            ray.wait(waited, num_returns=len(waited), timeout=MOVE_TIMEOUT_S)
        for collector, ref in calls.items():
            if ray.wait([ref], timeout=0)[0]:
                self._check(collector, ref, version)
                continue
            self._late[collector] = ref
            if ref in waited:
                told = "a collector was busy for %g s; it hears of version %d when it is free"
                logger.warning(told, MOVE_TIMEOUT_S, version)

    def _check(self, collector: Any, ref: Any, version: int) -> None:
        """Forgets a collector whose actor died; raises what failed in one that lives."""
        try:
            ray.get(ref)
        except RayError as error:
            if is_gone(error):
                logger.warning("a registered collector died, and is forgotten: %s", error)
                with self._lock:
                    others = [one for one in self._collectors if one() is not collector]
                    self._collectors = others
            elif is_away(error):
                logger.warning("a collector did not hear of version %d: %s", version, error)
            else:
                raise


class WeightUpdater:
    """Pushes a trainer's weights into every replica of a service.

    Give it to ``LLMCollector(weight_updater=...)``, or call :meth:`push_weights` yourself. Either
    way every registered collector's version is the service's after each push. A pickled copy has
    no collectors and no source.

    Example:
        >>> updater = WeightUpdater(service, source=trained_model)
        >>> collector = LLMCollector(env, policy=policy, weight_updater=updater, ...)
        >>> updater.push_weights()

    Args:
        service: The service, or a ``vllm.LLM`` of this process, see ``LocalLLM``. Every rank of a
            model sharded by FSDP2 calls :meth:`push_weights`, and all but the first give ``None``.
        source: What :meth:`push_weights` sends when it is given nothing: a module (plain, wrapped
            by TorchRL, or with LoRA adapters), a state dict or a TensorDict. Read at each push.
        adapters: ``"merge"`` sends a model with LoRA adapters merged, ``"keep"`` its active adapter
            alone, which engines keep apart, see :class:`AdapterSource`.
        adapter: Names it in the service, with ``"keep"``; by default as in PEFT.
        transport: ``"broadcast"``, ``"ipc"``, ``"memmap"``, ``"p2p"``, a ``WeightTransport``, or
            ``"auto"``, which chooses by where trainer and engines are (``weights/auto.py``).
        timeout_s, clear_cache, mode, strict, audit, allow_nonfinite: Options of each push, see
            ``AsyncVLLM.push_weights``.

    Raises:
        UnsupportedArgumentError: No transport of that name, an option is no such value, or
            ``service`` is a model.
    """

    def __init__(
        self,
        service: AsyncVLLM | LLM | None,
        source: Any = None,
        *,
        adapters: Literal["merge", "keep"] = "merge",
        adapter: str | None = None,
        transport: TransportName | WeightTransport = "auto",
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
        audit: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        if isinstance(service, torch.nn.Module):
            told = "service must be an AsyncVLLM, a vllm.LLM or None; a model is the source"
            raise UnsupportedArgumentError(f"{told}, got {type(service).__name__}")
        self.service: AsyncVLLM | LocalLLM | None = as_service(service)
        self.source = source
        self.last_report: PushReport | None = None
        self._transport = as_transport(transport)
        self._options = PushOptions(
            timeout_s=timeout_s,
            clear_cache=clear_cache,
            mode=mode,
            strict=strict,
            audit=audit,
            allow_nonfinite=allow_nonfinite,
        )
        if adapters not in ("merge", "keep"):
            told = f"adapters must be 'merge' or 'keep', got {adapters!r}"
            raise UnsupportedArgumentError(told)
        self._keeps, self._adapter = adapters == "keep", adapter
        self._kept: tuple[Any, AdapterSource] | None = None  # of which model
        self._is_disconnected, self._versions = False, CollectorVersions()
        self._post_hooks: list[Callable[[], Any]] = []

    def push_weights(
        self,
        policy_or_weights: Any = None,
        worker_ids: Any = None,
        *,
        version: int | None = None,
        audit: bool | None = None,
    ) -> PushReport:
        """Brings every replica to new weights, and every registered collector to their version.

        Arguments and errors beside these are those of :meth:`AsyncVLLM.push_weights`.

        Args:
            policy_or_weights: What to send; ``None`` sends ``source``.
            worker_ids: Must be ``None``: replicas on different versions would mix in one batch.
            audit: For this push, another value than the updater's; of a sharded model the rank that
                pushes says it.

        Returns:
            What the push did, also kept as ``last_report``.

        Raises:
            UnsupportedArgumentError: There is nothing to send, ``worker_ids`` is given, or
                :meth:`disconnect` was called.
            TrainerRankError: The weights are sharded, and another rank failed.
        """
        if worker_ids is not None:
            raise UnsupportedArgumentError(f"worker_ids must be None, got {worker_ids!r}")
        weights = self.source if policy_or_weights is None else policy_or_weights
        if weights is None:
            raise UnsupportedArgumentError("push_weights has nothing to send: no source was given")
        if self._keeps:
            if self._kept is None or self._kept[0] is not weights:
                self._kept = weights, AdapterSource(weights, self._adapter)
            weights = self._kept[1]
        if self.service is None:
            if self._is_disconnected:
                raise UnsupportedArgumentError(
                    "this updater was disconnected from its service: make a new WeightUpdater"
                )
            report = self._take_part(weights)
            assert report.version is not None  # as in every push that is committed
            self._versions.announce(report.version)
        else:  # the service's listeners move the collectors
            options = self._options if audit is None else replace(self._options, audit=audit)
            report = self.service.push_weights(
                weights, version=version, transport=self._transport, **asdict(options)
            )
        self.last_report = report
        for hook in list(self._post_hooks):
            hook()
        return report

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> PushReport:
        """The same as :meth:`push_weights`; ``update_policy_weights_`` of collectors calls it."""
        return self.push_weights(policy_or_weights, worker_ids)

    def _take_part(self, weights: Any) -> PushReport:
        """Sends a sharded model with the rank that pushes it, and returns that rank's report."""
        source = as_weight_source(weights)
        source = source.sharded if isinstance(source, AdapterSource) else source
        if not isinstance(source, ShardedModuleSource) or source.leads:
            raise UnsupportedArgumentError(
                "service may be None only on ranks of a sharded model other than its first"
            )
        last_s = 0.0 if self.last_report is None else self.last_report.seconds
        limit_s = self._options.timeout_s or max(FIRST_TIMEOUT_S, SLOWER * last_s)
        limit_s = MOST_ATTEMPTS * limit_s + FOLLOW_GRACE_S
        return source.participate(PushReport, timeout_s=limit_s, is_new=source is not weights)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Calls :meth:`open` if there is a service, as ``collector.init_updater(...)`` wants it.

        Args:
            *args, **kwargs: Ignored.
        """
        del args, kwargs
        if self.service is not None:
            self.open()

    def open(self, **meeting_point: Any) -> None:
        """Opens the transport, and tells collectors the version; the first push would do it, too.

        Args:
            **meeting_point: What ``AsyncVLLM.init_weight_update_group`` takes.

        Raises:
            UnsupportedArgumentError: There is no service.
        """
        if self.service is None:
            raise UnsupportedArgumentError("there is no service to open a transport to")
        self.service.use_transport(self._transport)
        self.service.init_weight_update_group(**meeting_point)
        self._versions.follow(self.service)
        self._versions.announce(self.service.weight_version)

    def disconnect(self) -> None:
        """Closes the transport, and forgets the service and the collectors; idempotent."""
        self._transport.close()
        self._versions.stop()
        self.service, self._is_disconnected = None, True

    def register_collector(self, collector: Any) -> None:
        """Keeps a collector's version equal to the service's after every push of this process.

        Args:
            collector: One of TorchRL's; held weakly. Others are refused.
        """
        self._versions.register(collector, self.service)

    @property
    def collector(self) -> Any | None:
        """The collector registered last."""
        return next(reversed(self._versions.live), None)

    @property
    def collectors(self) -> list[Any]:
        """The registered collectors that still exist."""
        return self._versions.live

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called, without arguments, after each push that succeeded."""
        return self._post_hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Calls ``hook`` after each push that succeeded.

        Args:
            hook: Called without arguments.
        """
        self._post_hooks.append(hook)

    def increment_version(self) -> None:
        """Tells every registered collector the service's version, which only a push moves."""
        if self.service is not None:
            self._versions.announce(self.service.weight_version)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_post_hooks": [], "source": None, "_kept": None}


def as_transport(transport: TransportName | WeightTransport) -> WeightTransport:
    """Makes a transport of that name; returns one that is given as it is."""
    if not isinstance(transport, str):
        check_transport(transport)
        return transport
    if transport not in TRANSPORTS:
        names = sorted(TRANSPORTS)
        raise UnsupportedArgumentError(f"transport must be one of {names}, got {transport!r}")
    return TRANSPORTS[transport]()


def as_service(service: Any) -> Any:
    """Puts what a push needs around a ``vllm.LLM``; returns a service as it is."""
    offline = sys.modules.get("vllm.entrypoints.llm")  # there is an LLM only where it was imported
    if offline is not None and isinstance(service, offline.LLM):
        from torchrl_vllm_sync.rl.local_llm import LocalLLM

        return LocalLLM(service)
    return service


# A real subclass would warn at import (torchrl/collectors/weight_update.py:78, 0.14.1); a virtual
# one passes the collectors' isinstance check all the same.
WeightUpdaterBase.register(WeightUpdater)

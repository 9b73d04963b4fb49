"""TorchRL's collectors beside a service: their versions are the service's; a Ray buffer."""

from __future__ import annotations

import logging
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from torchrl.collectors import BaseCollector
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer as _TorchRLBuffer
from torchrl.envs import Transform
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_vllm_sync.errors import UnsupportedArgumentError, is_away, is_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.rl.local_llm import LocalLLM
    from torchrl_vllm_sync.service.service import AsyncVLLM

logger = logging.getLogger(__name__)

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
        found = [ref() for ref in self._collectors]
        if None in found:
            logger.warning("%d registered collector(s) are gone", found.count(None))
            self._collectors = [ref for ref in self._collectors if ref() is not None]
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
        late = {one: self._late.pop(one, None) for one in calls}
        waited = [
            calls[one] for one, ref in late.items() if ref is None or ray.wait([ref], timeout=0)[0]
        ]
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
                self._collectors = [one for one in self._collectors if one() is not collector]
            elif is_away(error):
                logger.warning("a collector did not hear of version %d: %s", version, error)
            else:
                raise


class RayReplayBuffer(_TorchRLBuffer):
    """TorchRL's ``RayReplayBuffer``, which pickles: a copy reads and writes the same buffer.

    TorchRL's own (up to 0.14.1 at least) does not pickle, as it must for a ``RayLLMCollector``.
    Only where the buffer was made do ``close()`` and ``shutdown()`` end the actor; a copy lets go.

    Example:
        >>> buffer = RayReplayBuffer(storage=partial(LazyStackStorage, 512), batch_size=32)
        >>> collector = RayLLMCollector(env, policy=policy, replay_buffer=buffer, ...)

    Args:
        *args, **kwargs: See TorchRL's ``RayReplayBuffer``.
    """

    _is_copy = False

    def close(self) -> None:
        """Ends the buffer's actor; on a copy, lets go of it."""
        if not self._is_copy:
            super().close()
        elif self.is_alive:
            del self._rb

    def __reduce__(self) -> tuple[Any, ...]:
        # Whether Ray runs is for each process to know, and TorchRL counts who needs it there.
        state = {name: value for name, value in vars(self).items() if name != "_runtime_lease"}
        return _rebuild, (type(self), {**state, "_is_copy": True})


def _rebuild(kind: type[RayReplayBuffer], state: dict[str, Any]) -> RayReplayBuffer:
    buffer = object.__new__(kind)
    vars(buffer).update(state)
    return buffer

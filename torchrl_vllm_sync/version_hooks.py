"""Functions that are called once for each newly committed policy version."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import UnsupportedArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.weights.transport import PushReport

__all__ = ["VersionHooks"]


class VersionHooks:
    """The hooks of one service in this process; a pickled copy has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[PushReport], object]] = []
        self._listeners: list[Callable[[int], object]] = []

    def __reduce__(self) -> tuple[type[VersionHooks], tuple[()]]:
        return type(self), ()

    def register(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Adds a hook; returns a function that takes it away, and does nothing the second time.

        Raises:
            UnsupportedArgumentError: ``hook`` cannot be called, or is registered already.
        """
        if not callable(hook):
            raise UnsupportedArgumentError(f"hook must be callable, got {hook!r}")
        with self._lock:
            if hook in self._hooks:
                raise UnsupportedArgumentError(f"hook is registered already: {hook!r}")
            self._hooks.append(hook)

        def unregister() -> None:
            with self._lock:
                if hook in self._hooks:
                    self._hooks.remove(hook)

        return unregister

    def listen(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Adds a function that :meth:`moved` calls; returns one that takes it away."""
        with self._lock:
            self._listeners.append(listener)

        def unregister() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unregister

    def moved(self, version: int) -> None:
        """Calls every listener with the version that this process brought the service to."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener(version)

    def announce(self, report: PushReport) -> None:
        """Calls every listener, then every hook, in the order of registration.

        Raises:
            Exception: What the first hook that failed raised; the others have been called too.
        """
        self.moved(report.version)
        with self._lock:
            hooks = list(self._hooks)
        failures: list[Exception] = []
        for hook in hooks:
            try:
                hook(report)
            except Exception as failure:  # noqa: BLE001  a user's own, raised below
                failures.append(failure)
        if failures:
            raise failures[0]

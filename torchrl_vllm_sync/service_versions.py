"""The policy versions of a service: which is committed, who holds what, waiting for one."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

import ray

from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionNotReachedError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.service_replicas import ServiceReplicas
from torchrl_vllm_sync.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torchrl_vllm_sync.observe.status import StatusLog
    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.routing.ledger import LoadSnapshot
    from torchrl_vllm_sync.version_hooks import VersionHooks
    from torchrl_vllm_sync.weights.push import WeightPusher
    from torchrl_vllm_sync.weights.transport import PushReport

__all__ = ["ServiceVersions"]

REPORT_TIMEOUT_S = 5.0
DOUBTFUL_TIMEOUT_S = 0.5
DEFAULT_WAIT_S = 300.0


class ServiceVersions(ServiceReplicas):
    """The part of a service that knows policy versions.

    What this process does not do itself it learns from the replicas' reports, which come once a
    second, and ten times a second while somebody waits for a version.
    """

    _is_copy: bool
    _last_served = 0
    _has_asked = False
    _pusher: WeightPusher
    _version_hooks: VersionHooks
    _log: StatusLog

    @property
    def weight_version(self) -> int:
        """Newest policy version that every serving replica is known to hold; 0 before any push.

        It is the committed one: pushes that failed for some replica leave it where it was, unless
        those replicas no longer serve. While none serves it stays. Reading it asks nobody, but
        for the first time in a pickled or attached copy.
        """
        held = [
            one.weight_version
            for one in self._known()
            if one.state.admits_requests and one.weight_version is not None
        ]
        if held:
            self._last_served = min(held)
        return max(self._pusher.committed, self._last_served)

    @property
    def weight_versions(self) -> dict[str, int | None]:
        """Replica id to the policy version it last said it holds; ``None`` if it has not said."""
        return {one.replica_id: one.weight_version for one in self._known()}

    def wait_for_version(self, version: int, *, timeout_s: float = DEFAULT_WAIT_S) -> int:
        """Waits until :attr:`weight_version` is ``version`` or later.

        Works in any process that has the service: a push of another process is noticed within
        0.1 s and the time of one actor call.

        Args:
            version: Policy version; one that nobody has pushed yet is waited for too.
            timeout_s: Seconds to wait; 0 only looks.

        Returns:
            The version that was reached.

        Raises:
            UnsupportedArgumentError: ``version`` is no version, or ``timeout_s`` no time.
            VersionNotReachedError: It was not reached in time; it says what each replica holds.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        check_version("version", version)
        if not (isinstance(timeout_s, int | float) and 0 <= timeout_s < math.inf):
            raise UnsupportedArgumentError(
                f"timeout_s must be a finite number from 0 on, got {timeout_s!r}"
            )
        deadline = time.monotonic() + timeout_s
        changed = threading.Event()
        with self.load.watched(changed.set):
            while True:
                self._require_launched()
                changed.clear()
                reached = self.weight_version
                if reached >= version:
                    return reached
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    held = {one.replica_id: one.describe() for one in self.load.snapshots()}
                    raise VersionNotReachedError(version, held, timeout_s)
                changed.wait(min(left_s, 1.0))  # a shutdown tells nobody

    def register_version_hook(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Has ``hook`` called with the report of each push that commits a new version.

        It is called in the thread that pushes, before ``push_weights`` returns, once for each
        version: not for one that was committed before, such as a push sent again. Pushes of other
        processes, and updates through vLLM's own calls, are not announced; see
        :meth:`wait_for_version`. If hooks raise, the others are called all the same, and the first
        exception leaves ``push_weights``; the version is committed. Copies have no hooks.

        Args:
            hook: Called with the ``PushReport``.

        Returns:
            A function that unregisters it; calling it twice does nothing.

        Raises:
            UnsupportedArgumentError: ``hook`` cannot be called, or is registered already.
        """
        return self._version_hooks.register(hook)

    def listen_to_versions(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Has ``listener`` called with each version that this process brings the service to.

        Unlike hooks it also hears of updates through vLLM's own calls, and of a version once more
        when it is pushed again.

        Args:
            listener: Called with the version.

        Returns:
            A function that ends this.
        """
        return self._version_hooks.listen(listener)

    def _known(self) -> list[LoadSnapshot]:
        """Returns what is known of each replica; a new copy knows nothing and asks."""
        known = self.load.snapshots()
        heard = [one.measured_at is not None for one in known]
        # The monitor may have heard of some already. One that never answers is asked once.
        unheard = not any(heard) or not (all(heard) or self._has_asked)
        if unheard and self._is_copy and self._launched and ray.is_initialized():
            self._has_asked = True
            self._learn_states()
            known = self.load.snapshots()
        return known

    def _learn_states(
        self, doubtful: Collection[str] = (), pushed: PushStatus | None = None
    ) -> None:
        """Asks the replicas what they are and hold now, ahead of the monitor's next look.

        Args:
            doubtful: Ids of replicas that may be silent, and are not waited for as long.
            pushed: What became of a push, for them to tell other processes.
        """
        self._require_launched()
        known = self.standings()
        doubtful = {name for name, one in known.items() if name in doubtful or one.absence}
        method, args = ("report", ()) if pushed is None else ("note_push", (pushed,))
        calls = self.start_calls(method, dict.fromkeys(doubtful, args))
        sure = self.start_calls(method, dict.fromkeys(known.keys() - doubtful, args))
        answers = sure.answers(REPORT_TIMEOUT_S) | calls.answers(DOUBTFUL_TIMEOUT_S)
        for report in answers.values():
            if isinstance(report, EngineReport):
                self.load.observe(report)

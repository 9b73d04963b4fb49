"""The thread that keeps a service's replicas alive, current and as many as are wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ray.exceptions import RayError

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker
    from torchrl_vllm_sync.scaling import ScalingPolicy

__all__ = ["RESTART_WINDOW_S", "RestartBudget", "Supervised", "Supervisor"]

logger = logging.getLogger(__name__)

RETURN_S = 30.0
"""Seconds for which an actor may be out of reach. Ray knows within as many that a node is dead."""
RESTART_WINDOW_S = 3600.0
"""Restarts of one replica are counted over this many seconds."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Seconds between looks; a replica that changes its state is looked at once.
INTERVAL_S = 0.5
SCALING_INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 5.0
SCALING = "scaling"


class Supervised(Protocol):
    """What a supervisor needs of a service's replicas; see ``Fleet``."""

    def add(self, num_replicas: int) -> list[str]:
        """Starts new replicas and waits until they have joined."""
        ...

    def remove(self, replica_ids: Sequence[str], *, drain_timeout_s: float) -> None:
        """Lets replicas finish what they have, and ends them."""
        ...

    def restart(self, replica_id: str) -> None:
        """Ends what is left of a replica, starts it anew and waits until it has joined."""
        ...

    def catch_up(self, replica_ids: Sequence[str]) -> dict[str, str]:
        """Brings replicas to the committed version; returns the reasons of those that are not."""
        ...


class RestartBudget:
    """How often, and how soon after one another, something may be tried for each replica.

    The first try is due at once, each further one after a pause that doubles from
    1 s to 60 s, and none beyond the limit within the last hour.

    Args:
        limit: Most tries for one replica within an hour; ``None`` for any number.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._tries: dict[str, deque[float]] = {}

    def is_due(self, replica_id: str, now: float) -> bool:
        """Whether the next try may begin at time ``now``, in seconds."""
        tries = self._recent(replica_id, now)
        if self.is_spent(replica_id, now):
            return False
        pause_s = min(FIRST_PAUSE_S * 2 ** (len(tries) - 1), LONGEST_PAUSE_S)
        return not tries or now >= tries[-1] + pause_s

    def is_spent(self, replica_id: str, now: float) -> bool:
        """Whether the hour before ``now`` has seen as many tries as are allowed."""
        return self._limit is not None and len(self._recent(replica_id, now)) >= self._limit

    def spend(self, replica_id: str, now: float) -> None:
        """Notes a try at time ``now``."""
        self._recent(replica_id, now).append(now)

    def refund(self, replica_id: str) -> None:
        """Forgets a replica's tries: it is well, or gone."""
        self._tries.pop(replica_id, None)

    def _recent(self, replica_id: str, now: float) -> deque[float]:
        tries = self._tries.setdefault(replica_id, deque())
        while tries and tries[0] <= now - RESTART_WINDOW_S:
            tries.popleft()
        return tries


class Supervisor:
    """Restarts replicas that failed, brings along those that are stale, adds and removes some.

    One daemon thread looks at the ledger, which costs no actor call; each restart, catch-up and
    change of the number of replicas runs in a thread of its own. What fails is tried again: see
    :class:`RestartBudget`. A replica whose actor cannot be reached, but may be back, is restarted
    only if it stays away for ``RETURN_S`` seconds. One that has used up its restarts stays
    ``FAILED`` until the first of them is an hour old.

    Args:
        fleet: The replicas.
        load: Their ledger.
        max_restarts: Most restarts of one replica within an hour; 0 for none.
        scaling: Says how many replicas there should be; ``None`` leaves that to the user.
        is_wanted: Whether the service still exists; the thread ends when it does not.
    """

    def __init__(
        self,
        fleet: Supervised,
        load: LoadTracker,
        *,
        max_restarts: int,
        scaling: ScalingPolicy | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fleet, self._load, self._scaling = fleet, load, scaling
        self._restarts, self._catch_ups = RestartBudget(max_restarts), RestartBudget(None)
        self._scalings = RestartBudget(None)
        self._complained = False
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._given_up: set[str] = set()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._scaled_at = float("-inf")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a restart under way ends by itself. Idempotent."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def is_at_work(self) -> bool:
        """Whether a replica is on its way: being restarted, or about to be."""
        if self._stopped.is_set():
            return False
        now = self._load.clock()
        with self._lock:
            snapshots = self._load.snapshots()
            return bool(self._busy) or (
                not _is_over(snapshots)
                and any(
                    one.state is ReplicaState.FAILED
                    and not self._restarts.is_spent(one.replica_id, now)
                    for one in snapshots
                )
            )

    def _run(self) -> None:
        with self._load.watched(self._wake.set, urgent=False):
            while not self._stopped.is_set() and self._is_wanted():
                self.look()
                self._wake.wait(INTERVAL_S)
                self._wake.clear()

    def look(self) -> None:
        """Begins whatever is due."""
        now = self._load.clock()
        snapshots = self._load.snapshots()
        if _is_over(snapshots):
            return
        for one in snapshots:
            name = one.replica_id
            if one.away_since is not None and now < one.away_since + RETURN_S:
                continue
            if one.state is ReplicaState.FAILED:
                if self._restarts.is_due(name, now):
                    self._begin(name, self._restarts, lambda name=name: self._fleet.restart(name))
                elif self._restarts.is_spent(name, now):
                    self._give_up(one)
            elif one.state is ReplicaState.STALE:
                if self._catch_ups.is_due(name, now):
                    self._begin(name, self._catch_ups, lambda name=name: self._bring_along(name))
            elif one.state is ReplicaState.SERVING:
                self._catch_ups.refund(name)
                self._given_up.discard(name)
        if self._scaling is not None and now >= self._scaled_at + SCALING_INTERVAL_S:
            self._scaled_at = now
            self._scale(self._scaling, snapshots, now)

    def _bring_along(self, replica_id: str) -> None:
        self._fleet.catch_up([replica_id])

    def _give_up(self, one: LoadSnapshot) -> None:
        if one.replica_id not in self._given_up:
            self._given_up.add(one.replica_id)
            logger.error(
                "replica %s has used up its restarts and stays failed: %s",
                one.replica_id,
                one.reason,
            )

    def _scale(self, scaling: ScalingPolicy, snapshots: Sequence[LoadSnapshot], now: float) -> None:
        """Brings the number of replicas nearer to what the policy wants."""
        there = [one for one in snapshots if one.state is not ReplicaState.DRAINING]
        try:
            wanted = scaling(there, now)
            check_integer("the number of replicas wanted", wanted, 1)
        except Exception:  # whatever the user's own code raises must not end the restarts
            if not self._complained:
                logger.exception("the scaling policy failed; the replicas stay as many as they are")
            self._complained = True
            return
        self._complained = False
        if wanted == len(there):
            return
        if not self._scalings.is_due(SCALING, now):
            return
        if wanted > len(there):
            self._begin(SCALING, self._scalings, lambda: self._fleet.add(wanted - len(there)))
        else:
            idlest = sorted(there, key=lambda one: (one.state.admits_requests, one.in_flight))
            leaving = [one.replica_id for one in idlest[: len(there) - wanted]]
            self._begin(
                SCALING,
                self._scalings,
                lambda: self._fleet.remove(leaving, drain_timeout_s=scaling.drain_timeout_s),
            )

    def _begin(self, name: str, budget: RestartBudget, work: Callable[[], object]) -> None:
        """Runs ``work`` in a thread, unless something is under way for this name."""
        with self._lock:
            if name in self._busy:
                return
            self._busy.add(name)
        budget.spend(name, self._load.clock())
        threading.Thread(
            target=self._work, args=(name, work), name=f"supervisor-{name}", daemon=True
        ).start()

    def _work(self, name: str, work: Callable[[], object]) -> None:
        begin = time.monotonic()
        try:
            work()
            if name == SCALING:
                self._scalings.refund(name)
            logger.info("replica %s: done in %.1f s", name, time.monotonic() - begin)
        except ServiceClosedError:
            logger.debug("replica %s was not needed any more", name)
        except KeyError:
            logger.debug("replica %s was removed meanwhile", name)
        except (SyncError, RayError) as error:
            logger.warning("replica %s: %s", name, error)
            self._mark_failed(name, str(error))
        except BaseException:
            self._mark_failed(name, "the supervisor failed; see the log")
            raise
        finally:
            with self._lock:
                self._busy.discard(name)
            self._wake.set()

    def _mark_failed(self, name: str, reason: str) -> None:
        """A restart that failed leaves its replica failed, so that it is tried again."""
        with self._load.lock:
            known = {one.replica_id: one.state for one in self._load.snapshots()}
            if known.get(name) is ReplicaState.STARTING:
                self._load.mark(name, ReplicaState.FAILED, reason)


def _is_over(snapshots: Sequence[LoadSnapshot]) -> bool:
    """Whether another process ended the service: a replica that leaves alone is not listed."""
    return any(one.state is ReplicaState.CLOSED for one in snapshots)

"""The thread that keeps a service's replicas alive, and how many are wanted."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from ray.exceptions import RayError

from torchrl_vllm_sync.checks import check_integer, check_number
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker

logger = logging.getLogger(__name__)


class ScalingPolicy(Protocol):
    """Says once a second how many replicas there should be; write your own, or take ours."""

    drain_timeout_s: float  # seconds that a replica which is removed has for what it is doing

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted, at least 1."""
        ...


class QueueLengthScaling:
    """Adds a replica while requests queue in the engines, removes one while engines are idle.

    One at a time, and only after the queue has been long, or the engines idle, without a break.
    While a replica is starting nothing is added.

    Example:
        >>> AsyncVLLM.from_pretrained(model, scaling=QueueLengthScaling(2, 8))

    Args:
        min_replicas: Never fewer than this, at least 1.
        max_replicas: Never more than this.
        long_queue: Requests waiting in an engine, on average, from which on the queue is long.
        idle_load: Samples in an engine, on average of those that would be left, up to which the
            engines are idle.
        patience_s: Seconds for which either must have lasted.
        drain_timeout_s: Seconds that a replica which is removed has for what it is doing.

    Raises:
        UnsupportedArgumentError: A number is out of range.
    """

    def __init__(
        self,
        min_replicas: int,
        max_replicas: int,
        *,
        long_queue: float = 4.0,
        idle_load: float = 1.0,
        patience_s: float = 30.0,
        drain_timeout_s: float = 300.0,
    ) -> None:
        check_integer("min_replicas", min_replicas, 1)
        check_integer("max_replicas", max_replicas, 1)
        if max_replicas < min_replicas:
            raise UnsupportedArgumentError(
                f"max_replicas must be at least min_replicas, {min_replicas}, got {max_replicas}"
            )
        for name, value in (
            ("long_queue", long_queue),
            ("idle_load", idle_load),
            ("patience_s", patience_s),
            ("drain_timeout_s", drain_timeout_s),
        ):
            check_number(name, value, 0)
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.long_queue, self.idle_load = long_queue, idle_load
        self.patience_s, self.drain_timeout_s = patience_s, drain_timeout_s
        self._long_since = self._idle_since = math.inf

    def __call__(self, snapshots: Sequence[LoadSnapshot], now: float) -> int:
        """Returns the number of replicas wanted."""
        num = len(snapshots)
        if num < self.min_replicas or num > self.max_replicas:
            return min(max(num, self.min_replicas), self.max_replicas)
        serving = [one for one in snapshots if one.state.admits_requests]
        queued = sum(one.num_waiting or 0 for one in serving)
        inside = sum(max(one.num_unfinished or 0, one.in_flight) for one in serving)
        is_settled = bool(serving) and all(
            one.state is not ReplicaState.STARTING for one in snapshots
        )
        is_long = is_settled and queued > self.long_queue * len(serving)
        is_idle = is_settled and inside <= self.idle_load * (len(serving) - 1)
        self._long_since = min(self._long_since, now) if is_long else math.inf
        self._idle_since = min(self._idle_since, now) if is_idle else math.inf
        if now - self._long_since >= self.patience_s and num < self.max_replicas:
            self._long_since = math.inf
            return num + 1
        if now - self._idle_since >= self.patience_s and num > self.min_replicas:
            self._idle_since = math.inf
            return num - 1
        return num


def idlest(snapshots: Sequence[LoadSnapshot]) -> list[str]:
    """Returns the ids of replicas in the order in which they should leave."""
    order = sorted(snapshots, key=lambda one: (one.state.admits_requests, one.in_flight))
    return [one.replica_id for one in order]


RETURN_S = 70.0
"""Seconds for which an actor may be out of reach before it is restarted.

Ray takes about 62 s to know that a silent node is dead: by its defaults 5 health checks that each
time out after 10 s, with pauses of 3 s in between. A restart before that would be tried on the
node that is gone, and wasted.
"""
RESTART_WINDOW_S = 3600.0
"""Restarts of one replica are counted over this many seconds."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Seconds between looks; a replica that changes its state is looked at once.
INTERVAL_S = 0.5
SCALING_INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 5.0
SCALING = "scaling"


class RestartBudget:
    """Tries per replica: the first at once, then after pauses doubling from 1 s to 60 s.

    At most ``limit`` of them within an hour.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._tries: dict[str, deque[float]] = {}

    def is_due(self, replica_id: str, now: float) -> bool:
        tries = self._recent(replica_id, now)
        pause_s = min(FIRST_PAUSE_S * 2 ** (len(tries) - 1), LONGEST_PAUSE_S)
        return len(tries) < self._limit and (not tries or now >= tries[-1] + pause_s)

    def is_spent(self, replica_id: str, now: float) -> bool:
        return len(self._recent(replica_id, now)) >= self._limit

    def spend(self, replica_id: str, now: float) -> None:
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
    """Restarts replicas that failed, catches up stale ones, and scales.

    One daemon thread reads the ledger, which costs no actor call; each restart, catch-up and
    scaling runs in a thread of its own, and is retried within its :class:`RestartBudget`. A replica
    out of reach is restarted only after ``RETURN_S`` seconds. One that has used up its restarts
    stays ``FAILED`` until the first of them is an hour old.
    """

    def __init__(
        self,
        fleet: Any,  # a ``Fleet``: its ``add``, ``remove``, ``restart`` and ``catch_up``
        load: LoadTracker,
        *,
        max_restarts: int,
        scaling: ScalingPolicy | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fleet, self._load, self._scaling = fleet, load, scaling
        self._restarts, self._catch_ups = RestartBudget(max_restarts), RestartBudget()
        self._scalings, self._scaled_at = RestartBudget(), -math.inf
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._warned: set[str] = set()  # of replicas, and of a scaling policy that fails
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a restart under way ends by itself. Idempotent."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def is_at_work(self) -> bool:
        """Whether a replica is being restarted, or about to be."""
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
        now, snapshots = self._load.clock(), self._load.snapshots()
        if _is_over(snapshots):
            return
        for one in snapshots:
            name = one.replica_id
            if one.away_since is not None and now < one.away_since + RETURN_S:
                continue
            if one.state is ReplicaState.FAILED:
                if self._restarts.is_due(name, now):
                    self._begin(name, self._restarts, self._fleet.restart, name)
                elif self._restarts.is_spent(name, now) and name not in self._warned:
                    self._warned.add(name)
                    logger.error(
                        "replica %s has used up its restarts and stays failed: %s", name, one.reason
                    )
            elif one.state is ReplicaState.STALE:
                if self._catch_ups.is_due(name, now):
                    self._begin(name, self._catch_ups, self._fleet.catch_up, [name])
            elif one.state is ReplicaState.SERVING:
                self._catch_ups.refund(name)
                self._warned.discard(name)
        if self._scaling is not None and now >= self._scaled_at + SCALING_INTERVAL_S:
            self._scaled_at = now
            self._scale(self._scaling, snapshots, now)

    def _scale(self, scaling: ScalingPolicy, snapshots: Sequence[LoadSnapshot], now: float) -> None:
        """Brings the number of replicas nearer to what the policy wants."""
        there = [one for one in snapshots if one.state is not ReplicaState.DRAINING]
        try:
            wanted = scaling(there, now)
            check_integer("the number of replicas wanted", wanted, 1)
        except Exception:  # whatever the user's own code raises must not end the restarts
            if SCALING not in self._warned:
                logger.exception("the scaling policy failed; the replicas stay as many as they are")
            self._warned.add(SCALING)
            return
        self._warned.discard(SCALING)
        if wanted == len(there) or not self._scalings.is_due(SCALING, now):
            return
        if wanted > len(there):
            self._begin(SCALING, self._scalings, self._fleet.add, wanted - len(there))
        else:
            remove = functools.partial(self._fleet.remove, drain_timeout_s=scaling.drain_timeout_s)
            self._begin(SCALING, self._scalings, remove, idlest(there)[: len(there) - wanted])

    def _begin(
        self, name: str, budget: RestartBudget, work: Callable[[Any], object], arg: Any
    ) -> None:
        """Runs ``work(arg)`` in a thread, unless something is under way for this name."""
        with self._lock:
            if name in self._busy:
                return
            self._busy.add(name)
        budget.spend(name, self._load.clock())
        threading.Thread(
            target=self._work, args=(name, work, arg), name=f"supervisor-{name}", daemon=True
        ).start()

    def _work(self, name: str, work: Callable[[Any], object], arg: Any) -> None:
        begin = time.monotonic()
        try:
            work(arg)
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
            known = self._load.snapshot(name)
            if known is not None and known.state is ReplicaState.STARTING:
                self._load.mark(name, ReplicaState.FAILED, reason)


def _is_over(snapshots: Sequence[LoadSnapshot]) -> bool:
    """Whether another process ended the service: a replica that leaves alone is not listed."""
    return any(one.state is ReplicaState.CLOSED for one in snapshots)

"""Background thread that asks every replica for its load, so that no routing decision has to."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from inspect import ismethod
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError

from torchrl_vllm_sync.errors import loss
from torchrl_vllm_sync.replica import EngineReport, Replica, ReplicaState, Silence
from torchrl_vllm_sync.routing.ledger import LoadTracker

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def staying_connected() -> Iterator[bool]:
    """Yields whether this process is connected to Ray, and keeps that from ending in the block."""
    # A core worker (Ray 2.60) that is called after its end takes the whole process with it, so
    # background threads make their calls in here, and no long ones: Ray shuts down under this lock.
    # No time limit: while one of them waits for a busy head, the others must not end for good.
    with worker._connect_or_shutdown_lock:
        yield ray.is_initialized()


def _connection() -> tuple[str, str]:
    """Identity of this process's connection to a Ray cluster, unlike an earlier one's."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@dataclass(slots=True)
class _Ask:
    """Calls under way to one actor."""

    replica: Replica
    futures: list[Future[Any]]
    asked_at: float
    in_flight: int
    silence: Silence = field(default_factory=Silence)
    given_up: bool = False  # whether it was marked failed for its silence


# Seconds between rounds of questions while a caller waits for a replica to change.
_WATCHED_INTERVAL_S = 0.1


class LoadMonitor:
    """Asks every replica for its load once an interval, for a ledger to record.

    Its thread ends when Ray is shut down, or when the object whose method ``replicas`` is has gone.
    """

    def __init__(
        self,
        tracker: LoadTracker,
        replicas: Callable[[], Sequence[Replica]],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 5.0,
        unresponsive_after_s: float | None = None,
    ) -> None:
        self._tracker = tracker
        self._replicas = weakref.WeakMethod(replicas) if ismethod(replicas) else lambda: replicas
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._unresponsive_after_s = unresponsive_after_s
        self._lock = threading.Lock()
        self._started_in: int | None = None
        self._thread: threading.Thread | None = None
        self._stop: Future[None] = Future()
        self._warned: set[str] = set()

    def ask(self, replica: Replica) -> list[Any]:
        """Starts the calls that the load is read from; returns their object refs."""
        return [replica.actor.report.remote()]

    def read(self, replica_id: str, answers: Sequence[object]) -> EngineReport:  # noqa: ARG002
        """Makes a report of the answers, one for each ref; a failed call's answer is its error."""
        (report,) = answers
        if isinstance(report, Exception):
            raise report
        if not isinstance(report, EngineReport):
            raise TypeError(f"report() must return an EngineReport, got {report!r}")
        return report

    def start(self) -> None:
        """Starts the thread, unless it was started in this process and not stopped since."""
        with self._lock:
            if self._started_in == os.getpid():
                return
            self._started_in, self._stop = os.getpid(), Future()
            run = functools.partial(self._run, self._stop)
            self._thread = threading.Thread(target=run, name="load-monitor", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and waits for that at most ``timeout_s``; idempotent."""
        with self._lock:
            thread = self._thread if self._started_in == os.getpid() else None
            self._thread = self._started_in = None
            if thread is None:
                return
            self._stop.set_result(None)
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self, stop: Future[None]) -> None:
        with staying_connected() as is_connected:
            if not is_connected:
                return
            connection = _connection()
        asks: dict[str, _Ask] = {}
        while not stop.done():
            try:
                if not self._ask_all(asks, connection):
                    return
            except Exception as error:
                if not ray.is_initialized():
                    return  # it was shut down in between
                if not isinstance(error, RayError):  # such as of a head that is too busy to answer
                    raise
                logger.warning("replicas were not asked for their load this time: %s", error)
            began = time.monotonic()
            while (left_s := began + self._round_s() - time.monotonic()) > 0 and not stop.done():
                waiting = [f for ask in asks.values() for f in ask.futures if not f.done()]
                left_s = min(left_s, _WATCHED_INTERVAL_S)
                wait([stop, *waiting], timeout=left_s, return_when=FIRST_COMPLETED)
                self._take_answers(asks)
                for ask in asks.values():
                    ask.silence.look()

    def _round_s(self) -> float:
        longest = _WATCHED_INTERVAL_S if self._tracker.is_watched else math.inf
        return min(self._interval_s, longest)

    def _ask_all(self, asks: dict[str, _Ask], connection: tuple[str, str]) -> bool:
        """Asks each replica that owes no answer; returns whether there is somebody to ask for."""
        replicas = self._replicas()
        if replicas is None:
            return False
        with staying_connected() as is_connected:
            # A handle of an earlier connection must not be used in a later one.
            if not is_connected or _connection() != connection:
                return False
            asked_at = time.monotonic()  # what is marked from now on counts more than an answer
            current = {replica.replica_id: replica for replica in replicas()}
            for replica_id, ask in list(asks.items()):
                replica = current.get(replica_id)
                if replica is None or replica.actor is not ask.replica.actor:
                    del asks[replica_id]  # removed, or restarted as another actor
                else:
                    self._judge(ask)
            for replica_id in current.keys() - asks.keys():
                known = self._tracker.snapshot(replica_id)
                in_flight = known.in_flight if known else 0
                try:
                    futures = [ref.future() for ref in self.ask(current[replica_id])]
                except AttributeError as error:  # the actor lacks a method
                    self._warn_once(replica_id, f"cannot be asked for its load: {error}")
                    continue
                asks[replica_id] = _Ask(current[replica_id], futures, asked_at, in_flight)
        return True

    def _judge(self, ask: _Ask) -> None:
        """Logs an actor that has been silent for long, or marks it failed."""
        replica_id, silent_s = ask.replica.replica_id, ask.silence.look()
        known, limit_s = self._tracker.snapshot(replica_id), self._unresponsive_after_s
        if known and known.state in (ReplicaState.STARTING, ReplicaState.CLOSED):
            ask.silence.reset()
            return
        if silent_s > self._timeout_s:
            self._warn_once(replica_id, f"no answer for {silent_s:.1f} s; its figures age")
        if limit_s is not None and silent_s > limit_s and not ask.given_up:
            ask.given_up = True
            self._mark_failed(replica_id, f"its actor has not answered for {silent_s:.1f} s")

    def _take_answers(self, asks: dict[str, _Ask]) -> None:
        for replica_id, ask in list(asks.items()):
            if not all(future.done() for future in ask.futures):
                continue
            del asks[replica_id]
            answers = [future.exception() or future.result() for future in ask.futures]
            errors = [answer for answer in answers if isinstance(answer, RayError)]
            lost = next(filter(None, [loss(replica_id, error) for error in errors]), None)
            if lost is not None:
                self._mark_failed(replica_id, lost.reason, may_return=lost.may_return)
                continue
            try:
                report = self.read(replica_id, answers)
            except (RayError, TypeError) as error:  # the call failed inside a live actor
                self._warn_once(replica_id, f"its report failed: {error}")
                continue
            self._warned.discard(replica_id)
            self._tracker.observe(report, asked_at=ask.asked_at, in_flight_then=ask.in_flight)

    def _mark_failed(self, replica_id: str, reason: str, *, may_return: bool = False) -> None:
        """Marks a replica that is dead or silent; one that was closed before stays so."""
        if self._tracker.mark(replica_id, ReplicaState.FAILED, reason, may_return=may_return):
            self._warn_once(replica_id, reason)

    def _warn_once(self, replica_id: str, what: str) -> None:
        """Logs a fault of a replica, once until it answers again."""
        if replica_id not in self._warned:
            self._warned.add(replica_id)
            logger.warning("replica %s: %s", replica_id, what)


class BareActorMonitor(LoadMonitor):
    """Asks actors with TorchRL's methods, which know no state: one that answers is serving."""

    def ask(self, replica: Replica) -> list[Any]:
        actor = replica.actor
        return [actor.get_num_unfinished_requests.remote(), actor.get_cache_usage.remote()]

    def read(self, replica_id: str, answers: Sequence[object]) -> EngineReport:
        num_unfinished, cache_usage = answers
        return EngineReport(
            replica_id=replica_id,
            state=ReplicaState.SERVING,
            num_unfinished=num_unfinished if isinstance(num_unfinished, int) else None,
            kv_cache_usage=cache_usage if isinstance(cache_usage, (int, float)) else None,
        )

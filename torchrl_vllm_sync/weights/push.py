"""One push: reconcile, send, acknowledge, commit; and the ledger of versions that replicas hold."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import statistics
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import Deadline, check_version
from torchrl_vllm_sync.replica import EngineReport, LoadReport, PushReport, ReplicaState
from torchrl_vllm_sync.weights.adapters import AdapterSender, AdapterSource, Packed
from torchrl_vllm_sync.weights.audit import Auditor, AuditReport, Content, refuse_nonfinite
from torchrl_vllm_sync.weights.auto import AutoTransport
from torchrl_vllm_sync.weights.module import ModuleSource, OfLast, ParamMeta, is_peft
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.sharded import (
    CHECKS,
    CLEARS,
    WRITES,
    ShardedModuleSource,
    clear_caches,
    leading,
)
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.source import (
    StableSource,
    WeightSource,
    as_weight_source,
    fit_to_model,
)
from torchrl_vllm_sync.weights.transport import (
    GRACE_S,
    MOST_ATTEMPTS,
    Members,
    PauseMode,
    PendingCalls,
    PhaseTimes,
    Push,
    PushOptions,
    ReplicaClient,
    WeightTransport,
    ask,
    awaited_replicas,
    check_transport,
    failed,
    is_lost,
    raise_exceptions,
    reason_of,
)

logger = logging.getLogger(__name__)

# ---- Earlier pushes: their times, and their versions

FIRST_TIMEOUT_S = 300.0
"""Seconds for a push of a kind that was not measured yet: groups form, plans are made."""
SLACK_S, MULTIPLE, NUM_SAMPLES = 30.0, 3.0, 9


class PushKind(NamedTuple):
    """What pushes must have in common for their times to be comparable."""

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    members: frozenset[tuple[str, str]] = frozenset()  # replicas and their incarnations


class PushDeadlines:
    """Time limits of pushes: 30 s and three times the median of the last ones of the same kind."""

    def __init__(self) -> None:
        self._kind: PushKind | None = None
        self._seconds: deque[float] = deque(maxlen=NUM_SAMPLES)

    def record(self, kind: PushKind, seconds: float) -> None:
        """Records the time of a push that every replica acknowledged."""
        if kind != self._kind:
            self._kind = kind
            self._seconds.clear()
        self._seconds.append(seconds)

    def timeout_s(self, kind: PushKind) -> float:
        """Returns the seconds after which a replica that is silent in such a push has failed."""
        if kind != self._kind:
            return FIRST_TIMEOUT_S
        measured = SLACK_S + MULTIPLE * statistics.median(self._seconds)
        return max(measured, FIRST_TIMEOUT_S) if kind.mode == "wait" else measured


class VersionLedger:
    """The versions this trainer knows of, and which one is committed, see :func:`commits`."""

    def __init__(self) -> None:
        self.committed = 0  # newest version that was; 0 is what engines launch with
        self.run_id: str | None = None  # run that it belongs to; ``None`` if unknown here
        self.newest = 0  # that any replica, stale ones included, was at when it last said
        self.reached = 0  # newest version that a replica took from this process
        self.attempted = 0  # newest version that this process began to send
        self.is_current = False  # whether no replica need be asked what it holds
        self.base = 0  # newest version that brought weights, not an adapter

    def take_stock(self, answers: Mapping[str, Any]) -> None:
        reports = [one for one in answers.values() if isinstance(one, EngineReport)]
        whole = [one.weight_version for one in reports if one.state.admits_requests]
        held = [one for one in whole if one is not None]
        oldest = min(held, default=0) if len(held) == len(answers) else 0
        if oldest > self.committed:
            self.committed, self.run_id = oldest, None
        self.newest = max([self.committed, *(one.weight_version or 0 for one in reports)])
        self.base = max([0, *(one.base_version or 0 for one in reports)])
        self.is_current = True

    def next_version(self, wanted: int | None, stored: int) -> int:
        """Returns the version to send, by default an unused one."""
        if wanted is None:
            # A version that failed everywhere may be stored already: its number is used up.
            wanted = max(self.newest, self.attempted, stored) + 1
        elif wanted < max(self.newest, 1):
            raise errors.StaleVersionError(
                f"version must be at least {max(self.newest, 1)}, got {wanted}"
            )
        self.attempted = max(self.attempted, wanted)
        return wanted

    def record(self, reports: list[LoadReport], version: int, run_id: str, *, strict: bool) -> bool:
        """Records the replicas' answers; returns whether they newly commit ``version``."""
        is_news = commits(reports, strict=strict) and version > self.committed
        if is_news or (version == self.committed and reached_some(reports)):
            self.committed, self.run_id = version, run_id
        self.newest = max([self.newest, self.committed, *(one.version or 0 for one in reports)])
        if reached_some(reports):
            self.reached = max(self.reached, version)
        return is_news


def reached_some(reports: list[LoadReport]) -> bool:
    return not reports or not all(one.error for one in reports)


def commits(reports: list[LoadReport], *, strict: bool) -> bool:
    """Whether a version counts as committed: on all expected replicas, or at least on one."""
    is_complete = not any(one.error and one.is_expected for one in reports)
    return reached_some(reports) and (is_complete or not strict)


def errors_of(reports: list[LoadReport]) -> dict[str, str]:
    return {one.replica_id: one.error for one in reports if one.error}


class VersionHooks:
    """The hooks of one service in this process."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[PushReport], object]] = []
        self._listeners: list[Callable[[int], object]] = []

    def register(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Adds a hook; returns an idempotent function that removes it."""
        if not callable(hook):
            raise errors.UnsupportedArgumentError(f"hook must be callable, got {hook!r}")
        if hook in self._hooks:
            raise errors.UnsupportedArgumentError(f"hook is registered already: {hook!r}")
        return self._add(self._hooks, hook)

    def listen(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Adds a function that :meth:`moved` calls; returns one that removes it."""
        return self._add(self._listeners, listener)

    def _add(self, known: list[Any], one: object) -> Callable[[], None]:
        def remove() -> None:
            with contextlib.suppress(ValueError):  # it is gone already
                known.remove(one)

        known.append(one)  # as thread-safe as removing is
        return remove

    def moved(self, version: int) -> None:
        """Notifies listeners of the version that this process brought the service to."""
        for listener in [*self._listeners]:
            listener(version)

    def announce(self, report: PushReport) -> None:
        """Notifies listeners, then hooks, in the order of registration."""
        assert report.version is not None  # as in every push that is committed
        self.moved(report.version)
        failures: list[Exception] = []
        for hook in [*self._hooks]:
            try:
                hook(report)
            except Exception as failure:  # noqa: BLE001  a user's own, raised below
                failures.append(failure)
        if failures:
            raise failures[0]


# Seconds for a replica to show that all of it is alive before it is sent weights.
PROBE_TIMEOUT_S = 10.0


def load_snapshot(
    client: ReplicaClient, replica_ids: Collection[str], stored: Any, version: int, limit_s: float
) -> dict[str, Any]:
    calls = dict.fromkeys(replica_ids, (stored["directory"], stored["run_id"]))
    return ask(client, "load_snapshot", calls, limit_s, at_least=version)


def catch_up_from_others(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    deadline: Deadline,
) -> dict[str, Any]:
    """Makes replicas load the snapshot that others loaded, or copy the weights of one of them."""
    answers: dict[str, Any] = {}
    calls = client.start_calls("snapshot_source", dict.fromkeys(givers, ()))
    told = calls.answers(min(deadline.left_s, PROBE_TIMEOUT_S)).values()
    if stored := next((one for one in told if isinstance(one, dict)), None):
        answers = load_snapshot(client, replica_ids, stored, version, deadline.left_s)
        replica_ids = failed(answers)
    left = [*replica_ids]
    reason: BaseException = RuntimeError(f"no replica is there that serves version {version}")
    for giver in givers if left else ():
        offer = ask(client, "offer_weights", {giver: ()}, deadline.left_s).get(giver, reason)
        if isinstance(offer, BaseException):
            reason = offer
            if deadline.passed:  # each of the others might be waited for, too
                break
            continue
        try:
            while left and offer["version"] == version and not deadline.passed:
                answers |= ask(client, "take_weights", {left.pop(0): (offer,)}, deadline.left_s)
        finally:
            withdrawal = client.start_calls("withdraw_weights", {giver: (offer["token"],)})
            withdrawal.answers(GRACE_S)
        break
    return answers | dict.fromkeys(left, reason)


STOCK_TIMEOUT_S = 30.0
WAKE_TIMEOUT_S = 60.0
HOLD_BACK_TIMEOUT_S = 5.0
# No sender's: whoever is held back by it must load anew, whatever it holds.
UNKNOWN_RUN = "unknown"
# A push that is under way has time limits of its own; this is for one that ignores them.
TURN_TIMEOUT_S = 3600.0
# Seconds for a replica to answer whether another trainer is pushing; a silent one is passed over.
TURN_CALL_TIMEOUT_S = 5.0
TURN_POLL_S = 0.1
# Seconds between signs of life to the replicas, which drop a trainer that gives none for long.
SIGN_OF_LIFE_S = 5.0


def deliver(transport: WeightTransport, members: Members, push: Push) -> list[LoadReport]:
    """Sends, and again to the others when replicas are lost; returns the replicas' reports."""
    times, start = push.times, time.perf_counter()
    answers: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for attempt in range(MOST_ATTEMPTS):
        begin = time.perf_counter()
        if attempt:
            members.choose(members.silent | lost)
            try:
                transport.open(members, push.source)
            except errors.TransferError:
                break  # no replica is left: earlier answers stand
            times.seconds["attempts"] = attempt + 1
            times.note("lost_s", start, begin)
        if transport.is_collective:
            times.note("join_s", begin)
        now = transport.send(members, push)
        answers |= now
        members.note_silent(now)
        gone = {name: reason_of(one) for name, one in now.items() if is_lost(one)}
        broke_off = failed(now).keys() - gone.keys()  # for others, who may get it without them
        if not (transport.is_collective and gone and broke_off):
            break
        lost |= gone
    return members.reports(answers)


def refuse_steps(pusher: WeightPusher) -> None:
    """Has optimizers ask before they write, as long as the pusher is there."""
    me = weakref.ref(pusher)

    def ask_first(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (alive := me()) is not None:
            alive.refuse_step(optimizer)

    weakref.finalize(pusher, register_optimizer_step_pre_hook(ask_first).remove)


class WeightPusher:
    """Pushes a trainer's weights to a service's replicas, one push at a time."""

    def __init__(
        self,
        client: ReplicaClient,
        expected: Callable[[], list[ParamMeta]],
        on_commit: Callable[[PushReport], None] | None = None,
        *,
        strict: bool = True,
        wakes: bool = False,
        shares: bool = False,
    ) -> None:
        self._client, self._expected = client, expected
        self._on_commit, self._strict = on_commit, strict
        self._wakes, self._shares = wakes, shares
        if shares:
            refuse_steps(self)
        self.slept_s: float | None = None  # while engines sleep: what it took to begin that
        self._members, self._ledger = Members(client), VersionLedger()
        # The last version that a replica may hold, and the run that it was sent as.
        self._pushed: dict[int | None, tuple[Content | Packed, str]] = {}
        self._missed: set[str] = set()
        self._sender, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._deadlines, self._auditor = PushDeadlines(), Auditor(client)
        self._bytes_of = OfLast[int](lambda metadata: sum(meta.num_bytes for meta in metadata))
        self._transport: WeightTransport = AutoTransport()
        self._adapters = AdapterSender(lambda: self._ledger.base)
        self._lock = threading.RLock()

    @property
    def committed(self) -> int:
        """Newest version that this process committed; 0 before its first push."""
        return self._ledger.committed

    @property
    def committed_run_id(self) -> str | None:
        """Run that the committed version belongs to; ``None`` if unknown here."""
        return self._ledger.run_id

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Keeps pushes of other threads of this process out, such as while replicas come or go."""
        if not self._lock.acquire(timeout=timeout_s):
            raise errors.SyncError(f"a push was under way for {timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def quiet(self, timeout_s: float) -> Iterator[None]:
        """Keeps every trainer's pushes out, in whatever process; waits for one under way."""
        deadline = Deadline(timeout_s)
        with contextlib.ExitStack() as ending, self.exclusive(timeout_s):
            self._client.refresh_members()
            while True:
                with contextlib.ExitStack() as turn:
                    try:
                        turn.enter_context(self._turn(ending))()
                    except errors.PushUnderWayError:
                        if deadline.passed:
                            raise
                    else:
                        yield
                        return
                time.sleep(TURN_POLL_S)

    @contextlib.contextmanager
    def _turn(self, ending: contextlib.ExitStack) -> Iterator[Callable[[], bool]]:
        """Excludes pushes of other trainers, in whatever process, or is refused by one.

        All trainers ask the same replica first, so that one of two that begin at once goes on, and
        then the others, in case that one dies. Yields what has to be called: it waits for their
        answers, and returns whether the push before was this trainer's too; else the ledger is not
        current. ``ending`` waits for those told of the end.
        """
        members, push_id = self._members, (self._sender, next(self._numbers))
        members.look()
        members.choose(members.silent)
        first = min(members.incarnations.items(), default=None)
        replicas, ended = sorted(members.incarnations), threading.Event()

        def call(names: Collection[str], method: str, *args: Any) -> PendingCalls:
            return self._client.start_calls(method, dict.fromkeys(names, (*args, *push_id)))

        def granted(calls: PendingCalls) -> bool:
            answers = calls.answers(TURN_CALL_TIMEOUT_S).values()
            for answer in answers:
                if isinstance(answer, errors.PushUnderWayError):
                    raise answer
            return all(one is not False for one in answers)

        def give_signs() -> None:
            with contextlib.suppress(errors.ServiceClosedError):  # no replica is left to notify
                while not ended.wait(SIGN_OF_LIFE_S):
                    call(replicas, "keep_push")

        signs = threading.Thread(target=give_signs, name="push-signs-of-life", daemon=True)
        signs.start()
        try:
            trainer = ProcessIdentity.current()
            asked = call(replicas[:1], "begin_push", trainer)
            # Not current until they have answered that nobody else pushed.
            was_current, self._ledger.is_current = self._ledger.is_current, False

            def was_ours() -> bool:
                nonlocal replicas
                is_same = granted(asked)
                members.choose(members.silent)  # others may have come, or restarted, meanwhile
                here = sorted(members.incarnations.items())
                replicas = sorted({*replicas, *members.incarnations})
                others = [name for name, one in here if (name, one) != first]
                is_same &= granted(call(others, "begin_push", trainer))
                self._ledger.is_current = was_current and is_same
                return is_same

            yield was_ours
        finally:
            ended.set()
            signs.join()
            silent = members.silent.keys() & replicas
            with contextlib.suppress(errors.ServiceClosedError):  # no replica is left to notify
                call(silent, "end_push")
                awake = call(set(replicas) - silent, "end_push")
                ending.callback(awake.answers, TURN_CALL_TIMEOUT_S)

    @property
    def transport(self) -> WeightTransport:
        """The transport that pushes use; for an ``AutoTransport`` the one that it chose."""
        used = self._transport
        return (used.chosen or used) if isinstance(used, AutoTransport) else used

    def use(self, transport: WeightTransport) -> None:
        check_transport(transport)
        with self._lock:
            if self._transport is not transport:
                self.close()
            self._transport = transport

    def open(self) -> None:
        with contextlib.ExitStack() as ending, self._lock, self._turn(ending) as was_ours:
            was_ours()
            self._open()

    def step_aside(self) -> None:
        """Closes a transport that shares a group with the engines: others are about to use them."""
        with self._lock:
            if not isinstance(self.transport, MemmapTransport):
                self._transport.close()

    def look_again(self) -> None:
        """Makes the next push ask the replicas what they hold: others have changed it."""
        with self._lock:
            self._ledger.is_current = False

    def close(self) -> None:
        with self._lock:
            self._transport.close()

    def push(
        self,
        weights: Any,
        *,
        version: int | None,
        on_end: Callable[[PushReport | None], object] | None = None,
        **options: Any,
    ) -> PushReport:
        """Brings every replica to ``version``; ``options`` are those of :class:`PushOptions`.

        ``on_end`` gets the report ahead of hooks, a failed push's too; ``None`` after an interrupt.
        """
        begin, ended = time.perf_counter(), None
        with contextlib.ExitStack() as ending:
            try:
                source = as_weight_source(weights)
                of = source.sharded if isinstance(source, AdapterSource) else source
                wants = [CLEARS] * self._wakes
                # Of adapters the sending rank checks all that it has gathered.
                if of is source and not options.get("allow_nonfinite"):
                    wants += [CHECKS, *[WRITES] * isinstance(self.transport, P2PTransport)]
                with leading(of, *wants, is_new=source is not weights) as announcement:
                    if version is not None:
                        check_version("version", version)
                    given = PushOptions(**options)
                    with self.exclusive(TURN_TIMEOUT_S), self._sending(source, given):
                        report, is_news = self._push(source, version, given, begin, ending)
                    announcement.outcome = ended = report
            except Exception as error:
                ended = failed_push(error, version, time.perf_counter() - begin, time.time())
                raise
            finally:
                if on_end is not None:
                    on_end(ended)
        if is_news and self._on_commit is not None:
            self._on_commit(report)
        return report

    @contextlib.contextmanager
    def _sending(self, source: WeightSource, options: PushOptions) -> Iterator[None]:
        """Sends adapters their own way, whichever transport weights take."""
        if not isinstance(source, AdapterSource):
            yield
            return
        if options.mode != "keep" or options.clear_cache:
            raise errors.UnsupportedArgumentError(
                "mode must be 'keep' and clear_cache False for adapters: requests in flight end "
                f"with the version they have, got {options.mode!r} and {options.clear_cache}"
            )
        kept, self._transport = self._transport, self._adapters
        try:
            yield
        finally:
            self._transport = kept

    def _bring_along(self, late: Sequence[str]) -> None:
        """Gives replicas what others hold beside what is about to be pushed."""
        failures = self.catch_up(late, FIRST_TIMEOUT_S)
        if self._transport is self._adapters:
            self._members.drop({name: errors.TransferError(why) for name, why in failures.items()})
            if not self._members.incarnations:
                raise errors.TransferError(f"no replica can be reached: {self._members.missing}")

    def _fitted(self, source: WeightSource) -> WeightSource:
        if isinstance(source, AdapterSource):  # which the engines compare
            return self._adapters.look(source)
        if isinstance(source, ModuleSource) and not self._shares:  # else parameters may move yet
            source = source.at_rest()
        return fit_to_model(source, self._expected())

    def _push(
        self,
        given: WeightSource,
        version: int | None,
        options: PushOptions,
        begin: float,
        ending: contextlib.ExitStack,
    ) -> tuple[PushReport, bool]:
        """Sends, and returns whether that commits a version anew."""
        times, transport, ledger = PhaseTimes(), self._transport, self._ledger
        strict = self._strict if options.strict is None else options.strict
        mode, clear_cache = options.mode, options.clear_cache

        with contextlib.ExitStack() as stack:
            with times.measure("open_s"):
                follow = self._client.look_for_members()  # answered meanwhile, as the next is
                was_ours = stack.enter_context(self._turn(ending))
                source = self._fitted(given)
                is_adapter = isinstance(source, AdapterSource)
                owner = given.owner if isinstance(given, StableSource) else None
                merges = isinstance(owner, torch.nn.Module) and is_peft(owner) and not is_adapter
                if merges and (kept := self._adapters.names):
                    logger.warning(
                        "an adapter is merged into what is pushed, and engines add those that they "
                        "hold, %s, to it: ask for answers with adapter=''",
                        kept,
                    )
                known, sent_as = self._pushed.get(version, (None, None))
                if known is not None and (problem := known.difference(given)):
                    raise errors.StaleVersionError(
                        f"version {version} was pushed already, and what is pushed now cannot be "
                        f"called the same: {problem}; give other weights a version of their own"
                    )

                @functools.cache
                def confirm() -> Content | Packed:
                    if not options.allow_nonfinite and not is_adapter:
                        refuse_nonfinite(source)
                    return self._adapters.content if is_adapter else Content(given)

                if isinstance(source, AdapterSource):
                    self._adapters.pack(source, allow_nonfinite=options.allow_nonfinite)
                elif not isinstance(self.transport, P2PTransport):  # which does, as it writes
                    confirm()
                follow()
                if not was_ours():  # another may have pushed since, or holds a replica
                    self._client.refresh_members()
                if self._shares and self.slept_s is None:  # weights are written in place
                    self._fall_asleep(mode)
                if self._wakes:
                    times.seconds["sleep_s"] = self.slept_s or 0.0
                    with times.measure("wake_s"):
                        clear_caches(given)  # of what the trainer freed
                        self._rouse("weights")  # whoever cannot is named by what is sent to it
                self._open(source)
                if sent_as not in (None, transport.run_id):  # whoever has it would refuse it
                    raise errors.StaleVersionError(
                        f"version {version} was pushed already, by another transport: retry it by "
                        "that one, or give these weights a later version"
                    )
                metadata, joined = source.metadata(), self._members.incarnations
                if late := self._adapters.late(joined, self._missed):
                    self._bring_along(late)
                if options.audit:
                    self._auditor.plan(joined, metadata, FIRST_TIMEOUT_S)
                self._take_stock()

            num_bytes = self._bytes_of(metadata)
            awaited, to = awaited_replicas(self._client.standings()), self.transport.name
            kind = PushKind(to, num_bytes, mode, clear_cache, frozenset(awaited.items()))
            # Once more if another process's versions were followed meanwhile, and are as many.
            for last_try in (version is not None, True):
                attempted = ledger.attempted
                chosen = ledger.next_version(version, transport.last_version)
                limit_s = options.timeout_s or self._deadlines.timeout_s(kind)
                how = mode, clear_cache, options.allow_nonfinite, confirm
                push = Push(source, chosen, limit_s, *how)
                start = time.perf_counter()
                try:
                    reports = deliver(transport, self._members, push)
                except errors.NonFiniteWeightsError:  # nobody knows of this version
                    ledger.attempted = attempted
                    raise
                content = confirm()
                if options.audit:
                    with times.measure("audit_s"):
                        reports = self._audited(push, reports)
                if self._wakes:
                    with times.measure("wake_cache_s"):
                        asleep = failed(self._rouse("kv_cache"))
                        good = {one.replica_id for one in reports if not one.error}
                        wrong = {n: f"it did not wake: {asleep[n]}" for n in good & asleep.keys()}
                        reports = self._held_back(push, reports, wrong)
                    if reached_some(reports):
                        self.slept_s = None
                seconds, failures = time.perf_counter() - start, errors_of(reports)
                is_news = ledger.record(reports, chosen, transport.run_id, strict=strict)
                if is_news and not is_adapter:
                    ledger.base = chosen
                may_have = reached_some(reports) or any(one.is_silent for one in reports)
                if may_have or transport.last_version >= chosen:
                    content, _ = self._pushed.get(chosen, (content, ""))
                    self._pushed = {chosen: (content, transport.run_id)}
                self._keep_out(reports, chosen)
                missed = failures.keys() & awaited.keys()
                if not missed and all(one.loaded for one in reports if not one.error):
                    self._deadlines.record(kind, seconds)
                ledger.is_current &= not failures  # else the next push asks what the replicas hold
                if missed - self._missed:  # this may well be sent again
                    with times.measure("compare_s"):
                        content.summed(given)
                self._missed = missed
                if last_try or reached_some(reports):
                    break
                self._take_stock()
                if ledger.newest < chosen:
                    break
                self._open(source)
        if not commits(reports, strict=strict):
            raise errors.WeightSyncError(chosen, failures)
        seconds, starts = time.perf_counter() - begin, times.starts | push.times.starts
        report = PushReport(
            version=chosen,
            transport=self.transport.name,  # which may have changed
            num_bytes=num_bytes,
            seconds=seconds,
            phases=times.seconds | push.times.seconds,
            replicas=reports,
            left_behind=failures,
            began_at=time.time() - seconds,
            phase_starts={name: at - begin for name, at in starts.items()},
        )
        return report, is_news

    def audit(self, weights: Any, timeout_s: float) -> AuditReport:
        """Compares what every replica serves with ``weights``; raises if anything differs."""
        given, start = as_weight_source(weights), time.perf_counter()
        if isinstance(given, ShardedModuleSource):
            raise errors.UnsupportedArgumentError(
                "weights must be on one rank; of a sharded model use push_weights(audit=True)"
            )
        with contextlib.ExitStack() as ending, self.exclusive(timeout_s):
            self._client.refresh_members()
            with self._turn(ending) as was_ours:
                source = self._fitted(given)
                was_ours()
                self._members.choose()
                if isinstance(given, AdapterSource):
                    self._adapters.open(self._members, given)
                metadata, joined = source.metadata(), self._members.incarnations
                self._auditor.plan(joined, metadata, timeout_s)
                found = self._auditor.compare(source, joined, timeout_s)
        raise_exceptions(found.failures)
        if found.differences:
            raise errors.WeightAuditError(found.differences)
        return AuditReport(
            versions=found.versions,
            num_tensors=len(metadata),
            num_bytes=sum(meta.num_bytes for meta in metadata),
            seconds=time.perf_counter() - start,
        )

    def _audited(self, push: Push, reports: list[LoadReport]) -> list[LoadReport]:
        """The reports, of failures where replicas hold other weights; these serve no more."""
        names = [one.replica_id for one in reports if not one.error]
        found = self._auditor.compare(push.source, names, push.timeout_s)
        wrong = {name: f"it cannot be audited: {one}" for name, one in found.failures.items()}
        for one in found.differences:
            wrong.setdefault(one.replica_id, f"it holds other weights than were sent: {one}")
        return self._held_back(push, reports, wrong)

    def _rouse(self, tag: str) -> dict[str, Any]:
        """Wakes memory of the replicas that sleep."""
        return self._ask(self._heard(), "rouse", tag, limit_s=WAKE_TIMEOUT_S)

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps an optimizer from weights that engines are computing with."""
        transport = self.transport
        if self.slept_s is not None or not isinstance(transport, P2PTransport):
            return
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if stepped.isdisjoint(map(id, transport.inside())):
            return

        def rests(report: Any) -> bool:  # one that does not answer may be computing
            is_asleep = isinstance(report, EngineReport) and report.asleep
            return is_asleep or isinstance(report, errors.ReplicaUnavailableError)

        if awake := [name for name, one in self._reports().items() if not rests(one)]:
            raise errors.TransferNotReadyError(
                f"replicas {awake} compute with these parameters: have the service sleep before "
                "an optimizer changes them"
            )

    def _fall_asleep(self, mode: PauseMode) -> None:
        begin = time.perf_counter()
        answers = self._ask(self._heard(), "sleep", 2, mode, limit_s=FIRST_TIMEOUT_S)
        if not failed(answers):  # else one may be awake, and will refuse to be written to
            self.slept_s = time.perf_counter() - begin

    def _heard(self) -> Collection[str]:
        return self._client.standings().keys() - self._members.silent.keys()

    def _held_back(
        self, push: Push, reports: list[LoadReport], wrong: Mapping[str, str]
    ) -> list[LoadReport]:
        """The reports, of failures where something is wrong; these replicas serve no more."""
        stamp = push.version, UNKNOWN_RUN
        calls = self._client.start_calls("hold_back", dict.fromkeys(wrong, stamp))
        calls.answers(HOLD_BACK_TIMEOUT_S)
        told = {one.replica_id: one for one in reports}
        told |= {name: replace(told[name], version=None, error=why) for name, why in wrong.items()}
        return list(told.values())

    def _open(self, source: WeightSource | None = None) -> None:
        is_collective = self._transport.is_collective
        self._members.choose(self._members.silent if is_collective else None)
        self._transport.open(self._members, source)

    def _keep_out(self, reports: list[LoadReport], version: int) -> None:
        """Keeps requests from replicas behind ``version``, those that have just joined included."""
        everyone, wrong = self._client.standings().keys(), errors_of(reports)
        behind = everyone - {one.replica_id for one in reports} | wrong.keys()
        if not behind or not reached_some(reports):  # else whole ones go on with what they hold
            return
        self._client.note_left_behind(version, behind)
        told, silent = everyone if wrong else behind, self._members.silent.keys()
        stamp = version, self._transport.run_id
        self._client.start_calls("hold_back", dict.fromkeys(told & silent, stamp))  # when it wakes
        awake = self._client.start_calls("hold_back", dict.fromkeys(told - silent, stamp))
        if wrong:  # pushes need not wait for those that have just joined
            awake.answers(HOLD_BACK_TIMEOUT_S)

    def _take_stock(self) -> None:
        """Asks the replicas what they hold: before the first push, and after one that failed."""
        if not self._ledger.is_current:
            self._ledger.take_stock(self._reports())

    def _reports(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns reports of the replicas that were not silent a moment ago."""
        awaited = awaited_replicas(self._client.standings())
        asked = awaited.keys() - self._members.silent.keys() - set(without)
        calls = self._client.start_calls("report", dict.fromkeys(asked, ()))
        return calls.answers(STOCK_TIMEOUT_S)

    def _ask(
        self, names: Collection[str], method: str, *args: Any, limit_s: float
    ) -> dict[str, Any]:
        return ask(self._client, method, dict.fromkeys(names, args), limit_s) if names else {}

    def _given_adapters(
        self, givers: Sequence[str], version: int, deadline: Deadline
    ) -> dict[str, Any] | None:
        """The newest adapters beside ``version``, from one that serves it, or as sent from here."""
        for name in givers:
            told = self._ask([name], "give_adapters", limit_s=deadline.left_s).get(name)
            if isinstance(told, dict) and told["version"] == version:
                return told if told["adapters"] else None
        own = {"version": version, "run_id": self._ledger.run_id, "base": self._ledger.base}
        return {**own, "adapters": found} if (found := self._adapters.newest()) else None

    def catch_up(self, replica_ids: Collection[str], timeout_s: float) -> dict[str, str]:
        """Brings single replicas to the newest version that others serve; returns who failed.

        Without a push, and a silent replica keeps none waiting.
        """
        deadline = Deadline(timeout_s)
        probes = self._client.start_calls("probe_workers", dict.fromkeys(replica_ids, ()))
        silent = failed(probes.answers(min(deadline.left_s, PROBE_TIMEOUT_S)))
        with self.exclusive(timeout_s):
            told, serving = self._reports(without=silent).values(), ReplicaState.SERVING
            reports = [one for one in told if isinstance(one, EngineReport)]
            held = {n.replica_id: n.weight_version or 0 for n in reports if n.state is serving}
            served = {name: one for name, one in held.items() if name not in replica_ids}
            version = max([self._ledger.reached, *served.values()])
            if version == 0:
                return {}
            transport, answers = self.transport, dict[str, Any]()
            givers = [name for name, one in served.items() if one == version]
            # What was sent from here takes the place of nothing that came from others since.
            newer = {name for name, one in held.items() if not givers and one > version}
            left = [one for one in replica_ids if one not in silent and one not in newer]
            holders = [n.replica_id for n in reports if n.adapters and n.replica_id in givers]
            if rouses := self._wakes and bool(givers):  # it sleeps, and others are awake
                self._ask(left, "rouse", "weights", limit_s=WAKE_TIMEOUT_S)
            reached, adapters = self._ledger.reached, None
            if holders or not givers:
                adapters = self._given_adapters(holders, version, deadline)
            if adapters is not None:
                answers = self._ask(left, "take_adapters", adapters, limit_s=deadline.left_s)
                version = adapters["base"]
                reached, behind = min(reached, version), answers.keys() - failed(answers).keys()
                left = [name for name in left if name in behind and answers[name] != version]
            is_stored = version == reached == transport.last_version
            if left and isinstance(transport, MemmapTransport) and is_stored:
                own = {"directory": str(transport.directory), "run_id": transport.run_id}
                answers |= load_snapshot(self._client, left, own, version, deadline.left_s)
                left = failed(answers)
            if left and (givers or not answers):  # such as on a node that the store is not on
                answers |= catch_up_from_others(self._client, left, givers, version, deadline)
            if adapters is not None:  # they count once the weights are those that they add to
                whole = [name for name in replica_ids if name in answers.keys() - failed(answers)]
                told = {**adapters, "adapters": []}
                answers |= self._ask(whole, "take_adapters", told, limit_s=deadline.left_s)
            if rouses:
                whole = [*(answers.keys() - failed(answers).keys())]
                answers |= failed(self._ask(whole, "rouse", "kv_cache", limit_s=WAKE_TIMEOUT_S))
            failures = silent | failed(answers)
            for name in answers.keys() - failures.keys():  # these have done something
                self._members.silent.pop(name, None)
            self._ledger.is_current = False
        return {name: reason_of(one) for name, one in failures.items()}


def failed_push(
    error: Exception, version: int | None, seconds: float, ended_at: float
) -> PushReport:
    about: dict[str, Any] = {"version": version if isinstance(version, int) else None}
    if isinstance(error, errors.WeightSyncError):
        about = {"version": error.version, "left_behind": dict(error.failures)}
    began_at, reason = ended_at - seconds, reason_of(error)
    return PushReport(began_at=began_at, seconds=seconds, error=reason, **about)

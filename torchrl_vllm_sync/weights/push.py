"""One push: reconcile, send, acknowledge, commit; and the ledger of who holds which version."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import (
    PushUnderWayError,
    ServiceClosedError,
    StaleVersionError,
    SyncError,
    TransferError,
    UnsupportedArgumentError,
    WeightSyncError,
)
from torchrl_vllm_sync.replica import EngineReport, PushStatus, ReplicaState
from torchrl_vllm_sync.versions import MAX_VERSION
from torchrl_vllm_sync.weights.auto import AutoTransport
from torchrl_vllm_sync.weights.sharded import leading
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.source import Content, as_weight_source, fit_to_model
from torchrl_vllm_sync.weights.transport import (
    GRACE_S,
    MOST_ATTEMPTS,
    Members,
    PhaseTimes,
    Push,
    PushOptions,
    PushReport,
    awaited_replicas,
    check_transport,
    failed,
    lost_replicas,
    reason_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import (
        LoadReport,
        PauseMode,
        PendingCalls,
        ReplicaClient,
        WeightTransport,
    )


# Functions that are called once for each newly committed policy version.


class VersionHooks:
    """The hooks of one service in this process; a pickled copy has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[PushReport], object]] = []
        self._listeners: list[Callable[[int], object]] = []

    def __reduce__(self) -> tuple[type[VersionHooks], tuple[()]]:
        return type(self), ()

    def register(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Adds a hook; returns a function that takes it away, and does nothing the second time."""
        if not callable(hook):
            raise UnsupportedArgumentError(f"hook must be callable, got {hook!r}")
        with self._lock:
            if hook in self._hooks:
                raise UnsupportedArgumentError(f"hook is registered already: {hook!r}")
        return self._add(self._hooks, hook)

    def listen(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Adds a function that :meth:`moved` calls; returns one that takes it away."""
        return self._add(self._listeners, listener)

    def _add(self, known: list[Any], one: Callable[..., object]) -> Callable[[], None]:
        with self._lock:
            known.append(one)

        def remove() -> None:
            with self._lock:
                if one in known:
                    known.remove(one)

        return remove

    def moved(self, version: int) -> None:
        """Calls every listener with the version that this process brought the service to."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener(version)

    def announce(self, report: PushReport) -> None:
        """Calls every listener, then every hook, in the order of registration."""
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


# Single replicas brought to the version of another: from its snapshot, or by its weights.


# Seconds within which a replica must show that all of it is alive before another gives it anything.
PROBE_TIMEOUT_S = 10.0
# What a step of a catch-up gets at least, however late it begins.
LEAST_S = 1.0


def catch_up_from_snapshot(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    deadline: Deadline,
) -> dict[str, Any]:
    """Has replicas load the snapshot that others loaded, whichever process stored it."""
    calls = client.start_calls("snapshot_source", dict.fromkeys(givers, ()))
    answers = calls.answers(deadline.min(PROBE_TIMEOUT_S).left_s).values()
    source = next((one for one in answers if isinstance(one, dict)), None)
    if source is None:
        return {}
    left_s = max(deadline.left_s, LEAST_S)
    return client.start_calls(
        "load_snapshot",
        dict.fromkeys(replica_ids, (source["directory"], source["run_id"])),
        at_least=version,
        timeout_s=left_s,
    ).answers(left_s + GRACE_S)


def catch_up_from_peer(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    deadline: Deadline,
) -> dict[str, Any]:
    """Has replicas copy the weights of one that serves, which goes on serving.

    Pushes to the giving replica wait for a chunk at most. A replica that is silent gets nothing.
    """
    probes = client.start_calls("probe_workers", dict.fromkeys(replica_ids, ()))
    answers: dict[str, Any] = {}
    answers |= failed(probes.answers(deadline.min(PROBE_TIMEOUT_S).left_s))
    left = [one for one in replica_ids if one not in answers]
    reason: BaseException = RuntimeError(f"no replica is there that serves version {version}")
    for giver in givers if left else ():
        left_s = max(deadline.left_s, LEAST_S)
        calls = client.start_calls("offer_weights", {giver: ()}, timeout_s=left_s)
        offer = calls.answers(left_s).get(giver, reason)
        if isinstance(offer, BaseException):
            reason = offer
            continue
        try:
            while left and offer["version"] == version and not deadline.passed:
                left_s = max(deadline.left_s, LEAST_S)
                call = client.start_calls("take_weights", {left[0]: (offer,)}, timeout_s=left_s)
                answers |= call.answers(left_s + GRACE_S)
                del left[0]
        finally:
            withdrawal = client.start_calls("withdraw_weights", {giver: (offer["token"],)})
            withdrawal.answers(GRACE_S)
        break
    return dict.fromkeys(left, reason) | answers


# How long a push may take when nobody says: a multiple of what pushes like it have taken.


FIRST_TIMEOUT_S = 300.0
"""Seconds for a push of a kind that was not measured yet: groups form, plans are made."""
SLACK_S = 30.0
MULTIPLE = 3.0
NUM_SAMPLES = 9
MOST_KINDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PushKind:
    """What pushes must have in common for one to tell how long another takes."""

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    # Replicas and their incarnations: after a change groups are formed anew.
    members: frozenset[tuple[str, str]] = frozenset()


class PushDeadlines:
    """Time limits of pushes, from the times of those that went well.

    30 s and three times the median of the last few, as a watchdog that neither ends slow pushes nor
    lets a wedged peer hold the others for long. Before there is a measurement, and where requests
    in flight are waited for, 300 s at least: how long those take says nothing of the next.

    Example:
        >>> deadlines = PushDeadlines()
        >>> kind = PushKind(transport="memmap", num_bytes=8, mode="keep", clear_cache=False)
        >>> deadlines.timeout_s(kind)
        300.0
        >>> deadlines.record(kind, 2.0)
        >>> deadlines.timeout_s(kind)
        36.0
    """

    def __init__(self) -> None:
        self._seconds: dict[PushKind, deque[float]] = {}

    def record(self, kind: PushKind, seconds: float) -> None:
        """Notes how long a push took that every replica acknowledged."""
        taken = self._seconds.pop(kind, None) or deque(maxlen=NUM_SAMPLES)
        taken.append(seconds)
        self._seconds[kind] = taken
        while len(self._seconds) > MOST_KINDS:
            del self._seconds[next(iter(self._seconds))]

    def timeout_s(self, kind: PushKind) -> float:
        """Returns the seconds after which a replica that is silent in such a push has failed."""
        taken = self._seconds.get(kind)
        if not taken:
            return FIRST_TIMEOUT_S
        measured = SLACK_S + MULTIPLE * statistics.median(taken)
        return max(measured, FIRST_TIMEOUT_S) if kind.mode == "wait" else measured


class VersionLedger:
    """Which versions this trainer knows of: what each replica holds, and which one is committed.

    A version is committed once every replica holds it, or, if pushes are not strict, once one does:
    the others take no requests until they hold it too. A push that fails commits nothing.

    Attributes:
        committed: Newest version that was committed; 0 is what engines launch with.
        reached: Newest version that a replica took from this process.
        attempted: Newest version that this process began to send.
        seen: Newest version that any replica was at, one that is stale now too.
        held: What each replica last acknowledged; ``None`` after a failed update.
        is_current: Whether nobody need be asked what the replicas hold.
    """

    def __init__(self) -> None:
        self.committed = self.reached = self.attempted = self.seen = 0
        self.held: dict[str, int | None] = {}
        self.is_current = False
        self._run: tuple[int, str | None] = 0, None

    @property
    def newest(self) -> int:
        """Newest version that any replica acknowledged."""
        return max([self.committed, self.seen, *filter(None, self.held.values())])

    @property
    def run_id(self) -> str | None:
        """Run that the committed version belongs to; ``None`` if nobody here knows."""
        version, run_id = self._run
        return run_id if version == self.committed else None

    def take_stock(self, answers: Mapping[str, Any]) -> None:
        """Takes over what the replicas report of themselves."""
        reports = {n: one for n, one in answers.items() if isinstance(one, EngineReport)}
        whole = {n for n, one in reports.items() if one.state.admits_requests}
        self.held = {n: reports[n].weight_version if n in whole else None for n in answers}
        self.seen = max([0, *(one.weight_version or 0 for one in reports.values())])
        versions = [-1 if one is None else one for one in self.held.values()]
        self.committed = max(self.committed, min(versions, default=0))
        self.is_current = True

    def next_version(self, wanted: int | None, stored: int) -> int:
        """Returns the version to send, by default one that nobody has seen."""
        if wanted is None:
            # A version that failed everywhere may be stored already: its number is used up.
            wanted = max(self.newest, self.attempted, stored) + 1
        elif wanted < max(self.newest, 1):
            raise StaleVersionError(f"version must be at least {max(self.newest, 1)}, got {wanted}")
        self.attempted = max(self.attempted, wanted)
        return wanted

    def record(self, reports: list[LoadReport], version: int, run_id: str, *, strict: bool) -> bool:
        """Notes each replica's answer; returns whether that commits ``version``, as news."""
        self.held |= {one.replica_id: one.version for one in reports}
        is_news = commits(reports, strict=strict) and version > self.committed
        if is_news:
            self.committed = version
        if self.committed == version:
            self._run = version, run_id
        if reached_some(reports):
            self.reached = max(self.reached, version)
        return is_news


def reached_some(reports: list[LoadReport]) -> bool:
    """Whether at least one replica reached the version of a push."""
    return not reports or not all(one.error for one in reports)


def commits(reports: list[LoadReport], *, strict: bool) -> bool:
    """Whether a version counts as committed: on all replicas that count, or at least on one."""
    is_complete = not any(one.error and one.is_expected for one in reports)
    return reached_some(reports) and (is_complete or not strict)


def errors_of(reports: list[LoadReport]) -> dict[str, str]:
    """Returns the id of each replica that did not reach the version, to the reason."""
    return {one.replica_id: one.error for one in reports if one.error}


# How pushes look to other processes.


def finished_push(report: PushReport, ended_at: float) -> PushStatus:
    """Makes the status of a push that was committed."""
    return PushStatus(
        ended_at=ended_at,
        seconds=report.seconds,
        version=report.version,
        transport=report.transport,
        num_bytes=report.num_bytes,
        phases=_seconds(report.phases),
        replicas={one.replica_id: _seconds(one.phases) for one in report.replicas if not one.error},
        left_behind=dict(report.left_behind),
    )


def failed_push(
    error: Exception, version: int | None, seconds: float, ended_at: float
) -> PushStatus:
    """Makes the status of a push that raised."""
    is_sent = isinstance(error, WeightSyncError)
    return PushStatus(
        ended_at=ended_at,
        seconds=seconds,
        version=error.version if is_sent else version,
        left_behind=dict(error.failures) if is_sent else {},
        error=reason_of(error),
    )


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that are seconds, without the unit in their names; the others are counts."""
    return {name.removesuffix("_s"): value for name, value in phases.items() if name.endswith("_s")}


# Turns: of all trainers, in whatever process, one pushes at a time.


STOCK_TIMEOUT_S = 30.0
HOLD_BACK_TIMEOUT_S = 5.0
# A push that is under way has time limits of its own; this is for one that ignores them.
TURN_TIMEOUT_S = 3600.0
# Seconds for a replica to say whether another trainer is pushing; one that is silent has no say.
TURN_CALL_TIMEOUT_S = 5.0
# Seconds between signs of life to the replicas, which forget a trainer that gives none for long.
SIGN_OF_LIFE_S = 5.0


class Turn:
    """Keeps pushes of other trainers out, or is kept out by one.

    All trainers ask the same replica first, so that one of two that begin at once goes on. The
    others are told too, for when that one dies; they answer while the weights are being looked at.
    """

    def __init__(self, members: Members, sender: str, number: int) -> None:
        self._members, self._client = members, members.client
        self._sender, self._number = sender, number
        members.choose(members.silent)
        self._replicas = sorted(members.incarnations)
        self._is_same = True
        self._others: PendingCalls | None = None

    def begin(self) -> None:
        """Asks the first replica, and then the others."""
        trainer, others = ProcessIdentity.current(), self._replicas[1:]
        self._note(self._start(self._replicas[:1], "begin_push", trainer))
        self._others = self._start(others, "begin_push", trainer) if others else None

    def confirm(self) -> bool:
        """Waits for the others; returns whether the push before was this trainer's too."""
        if self._others is not None:
            self._note(self._others)
        return self._is_same

    def _start(self, replicas: Collection[str], method: str, *args: Any) -> PendingCalls:
        calls = dict.fromkeys(replicas, (*args, self._sender, self._number))
        return self._client.start_calls(method, calls)

    def _note(self, calls: PendingCalls) -> None:
        for answer in calls.answers(TURN_CALL_TIMEOUT_S).values():
            if isinstance(answer, PushUnderWayError):
                raise answer
            self._is_same = self._is_same and answer is not False

    @contextlib.contextmanager
    def giving_signs(self) -> Iterator[None]:
        """Tells the replicas from time to time that the push goes on."""
        ended = threading.Event()

        def give() -> None:
            with contextlib.suppress(ServiceClosedError):  # nobody is left to be told
                while not ended.wait(SIGN_OF_LIFE_S):
                    self._start(self._replicas, "keep_push")

        thread = threading.Thread(target=give, name="push-signs-of-life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def end(self) -> Callable[[], object]:
        """Lets other trainers push; returns what waits until those that are awake know."""
        silent = self._members.silent.keys() & self._replicas
        with contextlib.suppress(ServiceClosedError):  # nobody is left to be told
            if silent:
                self._start(silent, "end_push")
            awake = self._start([n for n in self._replicas if n not in silent], "end_push")
            return lambda: awake.answers(TURN_CALL_TIMEOUT_S)
        return lambda: None


def deliver(transport: WeightTransport, members: Members, push: Push) -> list[LoadReport]:
    """Sends, and once more to the others when replicas are lost; returns who has it."""
    times = push.times
    answers: dict[str, Any] = {}
    lost: dict[str, str] = {}
    start = begin = time.perf_counter()
    if transport.is_collective:
        times.note("join_s", begin)
    for attempt in range(MOST_ATTEMPTS):
        if attempt:
            begin = time.perf_counter()
            members.choose(members.silent | lost)
            try:
                transport.open(members, push.source)
            except TransferError:
                break  # nobody is left: what was answered before stands
            times.seconds["attempts"] = attempt + 1
            times.note("lost_s", start, begin)
            times.note("last_words_s", times.broke_off or begin, begin)
            times.note("join_s", begin)
        now = transport.send(members, push)
        answers |= now
        members.note_silent(now)
        if attempt:
            times.note("again_s", begin)
        gone = lost_replicas(now) if transport.is_collective else {}
        if not gone:
            break
        lost |= gone
    return members.reports(answers)


class WeightPusher:
    """Pushes a trainer's weights to a service's replicas, one push at a time."""

    def __init__(
        self,
        client: ReplicaClient,
        expected: Callable[[], list[ParamMeta]],
        on_commit: Callable[[PushReport], None] | None = None,
        *,
        strict: bool = True,
    ) -> None:
        self._client, self._expected = client, expected
        self._on_commit, self._strict = on_commit, strict
        self._members, self._ledger = Members(client), VersionLedger()
        self._pushed: tuple[int, Content] | None = None
        self._missed: set[str] = set()
        self._sender, self._number = uuid.uuid4().hex, 0
        self._deadlines = PushDeadlines()
        self._transport: WeightTransport | None = None
        self._lock = threading.RLock()

    @property
    def committed(self) -> int:
        """Newest version that this process committed; 0 before its first push."""
        return self._ledger.committed

    @property
    def committed_run_id(self) -> str | None:
        """Run that the committed version belongs to; ``None`` if nobody here knows."""
        return self._ledger.run_id

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Keeps pushes of this process out, such as while replicas come or go.

        The thread that holds it may push, and enter it again.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise SyncError(f"a push was under way for {timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _turn(self, ending: contextlib.ExitStack) -> Iterator[Turn]:
        """Takes a turn; ``ending`` waits until the replicas know that it is over."""
        self._number += 1
        self._members.look()
        turn = Turn(self._members, self._sender, self._number)
        try:
            turn.begin()
            with turn.giving_signs():
                yield turn
        finally:
            ending.callback(turn.end())

    @property
    def transport(self) -> WeightTransport:
        """The transport that pushes use: what was chosen for the first one, unless it was told."""
        transport = self._used()
        chosen = transport.chosen if isinstance(transport, AutoTransport) else None
        return chosen or transport

    def _used(self) -> WeightTransport:
        if self._transport is None:
            self._transport = AutoTransport()
        return self._transport

    def use(self, transport: WeightTransport) -> None:
        """Makes ``transport`` the one that pushes use; closes the one before."""
        check_transport(transport)
        with self._lock:
            if self._transport is not transport:
                self.close()
            self._transport = transport

    def open(self) -> None:
        """Opens the transport; does nothing when it is open."""
        with contextlib.ExitStack() as ending, self._lock, self._turn(ending) as turn:
            self._open(turn, self._used())

    def step_aside(self) -> None:
        """Closes a transport that meets the engines in a group, which others are about to use."""
        with self._lock:
            if self._transport is not None and not isinstance(self.transport, MemmapTransport):
                self._transport.close()

    def look_again(self) -> None:
        """Asks the replicas what they hold before the next push: others have changed it."""
        with self._lock:
            self._ledger.is_current = False

    def close(self) -> None:
        """Closes the transport; idempotent."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()

    def push(
        self,
        weights: Any,
        *,
        version: int | None,
        on_end: Callable[[PushStatus | None], object] | None = None,
        **options: Any,
    ) -> PushReport:
        """Brings every replica to ``version``; ``options`` are those of :class:`PushOptions`.

        ``on_end`` is told what became of it, ahead of hooks; ``None`` after an interrupt.
        """
        begin = time.perf_counter()
        status: PushStatus | None = None
        with contextlib.ExitStack() as ending:
            try:
                source = as_weight_source(weights)
                with leading(source) as announcement:
                    _check_version(version)
                    given = PushOptions(**options)
                    if given.strict is None:
                        given = replace(given, strict=self._strict)
                    with self.exclusive(TURN_TIMEOUT_S):
                        report, is_news = self._push(source, version, given, begin, ending)
                    announcement.outcome = report
                status = finished_push(report, time.time())
            except Exception as error:
                status = failed_push(error, version, time.perf_counter() - begin, time.time())
                raise
            finally:
                if on_end is not None:
                    on_end(status)
        if is_news and self._on_commit is not None:
            self._on_commit(report)
        return report

    def _push(
        self,
        given: WeightSource,
        version: int | None,
        options: PushOptions,
        begin: float,
        ending: contextlib.ExitStack,
    ) -> tuple[PushReport, bool]:
        """Sends once, or twice if another process was quicker; says whether that is news."""
        times, transport, ledger = PhaseTimes(), self._used(), self._ledger
        strict = bool(options.strict)
        with contextlib.ExitStack() as stack:
            with times.measure("open_s"):
                self._client.refresh_members()
                turn = stack.enter_context(self._turn(ending))
                source = fit_to_model(given, self._expected())
                self._check_repeat(given, version)
                self._open(turn, transport, source)
                self._take_stock()
            num_bytes = sum(meta.num_bytes for meta in source.metadata())
            awaited = awaited_replicas(self._client.standings())
            for last_try in (version is not None, True):
                chosen = ledger.next_version(version, transport.last_version)
                kind = PushKind(
                    transport=self.transport.name,
                    num_bytes=num_bytes,
                    mode=options.mode,
                    clear_cache=options.clear_cache,
                    members=frozenset(awaited.items()),
                )
                limit_s = options.timeout_s or self._deadlines.timeout_s(kind)
                push = Push(
                    source=source,
                    version=chosen,
                    timeout_s=limit_s,
                    clear_cache=options.clear_cache,
                    mode=options.mode,
                )
                content, start = Content(given), time.perf_counter()
                reports = deliver(transport, self._members, push)
                seconds = time.perf_counter() - start
                is_news = ledger.record(reports, chosen, transport.run_id, strict=strict)
                self._keep(content, reports, chosen, transport)
                failures = errors_of(reports)
                if reached_some(reports):
                    self._hold_back_late(reports, chosen, transport.run_id)
                missed = failures.keys() & awaited.keys()
                if not missed and all(one.loaded for one in reports if not one.error):
                    self._deadlines.record(kind, seconds)
                news, self._missed = missed - self._missed, missed
                if not failures:
                    break
                self._settle(reports, chosen, transport.run_id)
                if news:  # somebody may well send this again
                    with times.measure("compare_s"):
                        content.summed(given)
                if last_try or not self._was_overtaken(reports, chosen):
                    break
                self._open(turn, transport, source)
        if not commits(reports, strict=strict):
            raise WeightSyncError(chosen, failures)
        now = time.perf_counter()
        starts = times.starts | push.times.starts
        report = PushReport(
            version=chosen,
            transport=self.transport.name,
            num_bytes=num_bytes,
            seconds=now - begin,
            phases=times.seconds | push.times.seconds,
            replicas=reports,
            left_behind=failures,
            began_at=time.time() - (now - begin),
            phase_starts={name: at - begin for name, at in starts.items()},
        )
        return report, is_news

    def _open(
        self, turn: Turn, transport: WeightTransport, source: WeightSource | None = None
    ) -> None:
        """Opens the transport for those who are there, when they agree that this trainer pushes."""
        if not turn.confirm():
            self._ledger.is_current = False  # another trainer may have pushed since
        self._members.choose(self._members.silent if transport.is_collective else None)
        transport.open(self._members, source)

    def _check_repeat(self, source: WeightSource, version: int | None) -> None:
        """Refuses other weights under the version that this process pushed last."""
        known, content = self._pushed or (None, None)
        if content is None or version != known:
            return
        if problem := content.difference(source):
            raise StaleVersionError(
                f"version {version} was pushed already, and what is pushed now cannot be called "
                f"the same: {problem}; give other weights a version of their own"
            )

    def _keep(
        self,
        content: Content,
        reports: list[LoadReport],
        version: int,
        transport: WeightTransport,
    ) -> None:
        """Remembers what was pushed if anybody may have it under this version; silent ones may."""
        may_have = reached_some(reports) or any(one.is_silent for one in reports)
        is_known = self._pushed is not None and self._pushed[0] == version
        if (may_have or transport.last_version >= version) and not is_known:
            self._pushed = version, content

    def _was_overtaken(self, reports: list[LoadReport], version: int) -> bool:
        """Whether nobody took ``version`` because another process pushed as many in between."""
        if reached_some(reports):
            return False
        self._take_stock()
        return self._ledger.newest >= version

    def _hold_back_late(self, reports: list[LoadReport], version: int, run_id: str) -> None:
        """Keeps out replicas that joined while ``version`` was on its way to the others only.

        While this process pushes none joins here, but in the process that supervises the service.
        """
        late = self._client.standings().keys() - {one.replica_id for one in reports}
        if late:
            self._client.note_left_behind(version, late)
            self._hold_back(late, version, run_id)  # pushes need not wait for that

    def _settle(self, reports: list[LoadReport], version: int, run_id: str) -> None:
        """After a push that left replicas behind: those take no requests until repaired.

        If nobody reached ``version``, the replicas that are whole go on serving what they hold.
        """
        if reached_some(reports):
            self._client.note_left_behind(version, errors_of(reports))
            everyone, silent = self._client.standings().keys(), self._members.silent.keys()
            self._hold_back(everyone & silent, version, run_id)  # which it reads when it wakes
            awake = self._hold_back(everyone - silent, version, run_id)
            awake.answers(HOLD_BACK_TIMEOUT_S)
        self._ledger.is_current = False  # the next push asks anew what the replicas hold

    def _hold_back(self, replicas: Collection[str], version: int, run_id: str) -> PendingCalls:
        return self._client.start_calls("hold_back", dict.fromkeys(replicas, (version, run_id)))

    def _take_stock(self) -> None:
        """Asks the replicas what they hold: before the first push, and after one that failed."""
        if not self._ledger.is_current:
            self._ledger.take_stock(self._reports())

    def _reports(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Asks those replicas for reports that were not silent a moment ago."""
        awaited = awaited_replicas(self._client.standings())
        asked = awaited.keys() - self._members.silent.keys() - set(without)
        calls = self._client.start_calls("report", dict.fromkeys(asked, ()))
        return calls.answers(STOCK_TIMEOUT_S)

    def catch_up(self, replica_ids: Collection[str], timeout_s: float) -> dict[str, str]:
        """Brings single replicas to the newest version that others serve, without a push.

        From the snapshots of the memmap transport if that stored the version, here or in another
        process, and otherwise from another replica that serves it, where weights can be copied as
        they are.
        """
        deadline = Deadline(timeout_s)
        with self.exclusive(timeout_s):
            others = self._reports(without=replica_ids)
            served = {
                name: one.weight_version or 0
                for name, one in others.items()
                if isinstance(one, EngineReport) and one.state is ReplicaState.SERVING
            }
            version = max([self._ledger.reached, *served.values()])
            if version == 0:
                return {}
            transport, answers = self.transport, {}
            is_stored = version == self._ledger.reached == transport.last_version
            if isinstance(transport, MemmapTransport) and is_stored:
                left_s = max(deadline.left_s, LEAST_S)
                answers = transport.catch_up(self._client, replica_ids, version, timeout_s=left_s)
            left = failed(answers) if answers else replica_ids
            givers = [name for name, held in served.items() if held == version]
            if left and (givers or not answers):  # such as on a node that the store is not on
                loaded = catch_up_from_snapshot(self._client, left, givers, version, deadline)
                answers |= loaded
                left = failed(loaded) if loaded else left
                if left:
                    answers |= catch_up_from_peer(self._client, left, givers, version, deadline)
            failures = failed(answers)
            self._members.forget_silence(answers.keys() - failures.keys())
            self._ledger.is_current = False
        return {name: reason_of(one) for name, one in failures.items()}


def _check_version(version: object) -> None:
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise UnsupportedArgumentError(f"version must be an integer or None, got {version!r}")
    if version is not None and version > MAX_VERSION:
        raise UnsupportedArgumentError(f"version must be at most {MAX_VERSION}, got {version}")

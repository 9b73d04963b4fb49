"""One push: reconcile, send, acknowledge, commit; and the ledger of who holds which version."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import (
    PushUnderWayError,
    ServiceClosedError,
    StaleVersionError,
    SyncError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.versions import MAX_VERSION
from torchrl_vllm_sync.weights.auto import AutoTransport
from torchrl_vllm_sync.weights.sharded import leading
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.source import Content, as_weight_source, fit_to_model
from torchrl_vllm_sync.weights.transport import (
    PhaseTimes,
    PushReport,
    awaited_replicas,
    check_mode,
    check_transport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import (
        PauseMode,
        ReplicaClient,
        SendOutcome,
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


# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
# Seconds within which a replica must show that all of it is alive before another gives it anything.
PROBE_TIMEOUT_S = 10.0


def catch_up_from_snapshot(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Has replicas load the snapshot that others loaded, whichever process stored it."""
    deadline = time.monotonic() + timeout_s
    calls = client.start_calls("snapshot_source", dict.fromkeys(givers, ()))
    told = calls.answers(min(PROBE_TIMEOUT_S, timeout_s)).values()
    source = next((one for one in told if isinstance(one, dict)), None)
    if source is None:
        return {}
    left_s = max(deadline - time.monotonic(), 1.0)
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
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Has replicas copy the weights of one that serves, which goes on serving.

    Pushes to the giving replica wait for a chunk at most. A replica that is silent gets nothing.
    """
    deadline = time.monotonic() + timeout_s
    probes = client.start_calls("probe_workers", dict.fromkeys(replica_ids, ()))
    answers = {
        name: one
        for name, one in probes.answers(min(PROBE_TIMEOUT_S, timeout_s)).items()
        if isinstance(one, BaseException)
    }
    left = [one for one in replica_ids if one not in answers]
    if not left:
        return answers
    reason: BaseException = RuntimeError(f"no replica is there that serves version {version}")
    for giver in givers:
        left_s = max(deadline - time.monotonic(), 1.0)
        calls = client.start_calls("offer_weights", {giver: ()}, timeout_s=left_s)
        offer = calls.answers(left_s).get(giver, reason)
        if isinstance(offer, BaseException):
            reason = offer
            continue
        try:
            while left and offer["version"] == version and time.monotonic() < deadline:
                name = left[0]
                left_s = max(deadline - time.monotonic(), 1.0)
                call = client.start_calls("take_weights", {name: (offer,)}, timeout_s=left_s)
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
    """What pushes must have in common for one to tell how long another takes.

    Attributes:
        transport: Name of the transport.
        num_bytes: Bytes of all tensors.
        mode: What becomes of requests in flight.
        clear_cache: Whether their keys and values are computed again.
        crew: Replicas and their incarnations: after a change groups are formed anew.
    """

    transport: str
    num_bytes: int
    mode: PauseMode
    clear_cache: bool
    crew: frozenset[tuple[str, str]] = frozenset()


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


STOCK_TIMEOUT_S = 30.0
HOLD_BACK_TIMEOUT_S = 5.0
# A push that is under way has time limits of its own; this is for one that has lost its mind.
TURN_TIMEOUT_S = 3600.0
# Seconds for a replica to say whether another trainer is pushing; one that is silent has no say.
TURN_CALL_TIMEOUT_S = 5.0
# Seconds between signs of life to the replicas, which forget a trainer that gives none for long.
SIGN_OF_LIFE_S = 5.0


class VersionLedger:
    """Which version each replica last acknowledged, and which one is committed.

    A version is committed once every replica holds it, or, if pushes are not strict, once one does:
    the others take no requests until they hold it too. A push that fails commits nothing.

    Attributes:
        committed: Newest version that was committed; 0 is what engines launch with.
        held: What each replica last acknowledged; ``None`` after a failed update.
        seen: Newest version that any replica was at, one that is stale now too.
    """

    def __init__(self) -> None:
        self.committed = self.seen = 0
        self.held: dict[str, int | None] = {}

    @property
    def newest(self) -> int:
        """Newest version that any replica acknowledged."""
        return max(
            [self.committed, self.seen, *(one for one in self.held.values() if one is not None)]
        )

    def record(self, outcome: SendOutcome, version: int, *, strict: bool = True) -> bool:
        """Notes each replica's answer, and commits ``version`` if enough of them hold it."""
        for one in outcome.replicas:
            self.held[one.replica_id] = one.version
        if not outcome.commits(strict=strict) or version <= self.committed:
            return False
        self.committed = version
        return True


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
        self._on_commit, self._strict = on_commit, strict
        self._ledger: VersionLedger | None = None
        self._attempted = self._committed = 0
        self._committed_run: tuple[int, str | None] = 0, None
        self._newest: tuple[int, str | None] = 0, None
        self._pushed: tuple[int, Content] | None = None
        self._silent: set[str] = set()
        self._missed: set[str] = set()
        self._sender, self._number = uuid.uuid4().hex, 0
        self._deadlines = PushDeadlines()
        self._client, self._expected = client, expected
        self._transport: WeightTransport | None = None
        self._lock = threading.RLock()

    @property
    def committed(self) -> int:
        """Newest version that this process committed; 0 before its first push."""
        ledger = self._ledger
        return ledger.committed if ledger else self._committed

    @property
    def committed_run_id(self) -> str | None:
        """Run that the committed version belongs to; ``None`` if nobody here knows."""
        version, run_id = self._committed_run
        return run_id if version == self.committed else None

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
    def _turn(self) -> Iterator[None]:
        """Keeps pushes of other trainers out, in whatever process, or is kept out by one.

        All trainers ask the same replica first, so that one of two that begin at once goes on; the
        others are told too, for when that one dies.
        """
        self._number += 1
        turn = self._sender, self._number
        replicas = set(awaited_replicas(self._client.standings())) - self._silent
        try:
            if not self._begin(sorted(replicas)):  # another trainer may have pushed since
                self._committed, self._ledger = self.committed, None
            with self._giving_signs(replicas, turn):
                yield
        finally:
            with contextlib.suppress(ServiceClosedError):  # nobody is left to be told
                self._client.start_calls("end_push", dict.fromkeys(replicas & self._silent, turn))
                awake = dict.fromkeys(replicas - self._silent, turn)
                self._client.start_calls("end_push", awake).answers(TURN_CALL_TIMEOUT_S)

    def _begin(self, replicas: list[str]) -> bool:
        """Tells these replicas of a push; returns whether the one before was this pusher's too."""
        mine = ProcessIdentity.current(), self._sender, self._number
        answers: dict[str, Any] = {}
        for asked in filter(None, (replicas[:1], replicas[1:])):
            calls = self._client.start_calls("begin_push", dict.fromkeys(asked, mine))
            answers |= calls.answers(TURN_CALL_TIMEOUT_S)
            for refusal in answers.values():
                if isinstance(refusal, PushUnderWayError):
                    raise refusal
        return False not in answers.values()

    @contextlib.contextmanager
    def _giving_signs(self, replicas: Collection[str], turn: tuple[str, int]) -> Iterator[None]:
        """Tells the replicas from time to time that the push goes on."""
        ended = threading.Event()

        def give() -> None:
            with contextlib.suppress(ServiceClosedError):  # nobody is left to be told
                while not ended.wait(SIGN_OF_LIFE_S):
                    self._client.start_calls("keep_push", dict.fromkeys(replicas, turn))

        thread = threading.Thread(target=give, name="push-signs-of-life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

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
            if self._transport is not None and self._transport is not transport:
                self._transport.close()
            self._transport = transport

    def open(self) -> None:
        """Opens the transport; does nothing when it is open."""
        with self._lock, self._turn():
            self._used().open(self._client)

    def step_aside(self) -> None:
        """Closes a transport that meets the engines in a group, which others are about to use."""
        with self._lock:
            if self._transport is not None and not isinstance(self.transport, MemmapTransport):
                self._transport.close()

    def look_again(self) -> None:
        """Asks the replicas what they hold before the next push: others have changed it."""
        with self._lock:
            self._committed, self._ledger = self.committed, None

    def push(
        self,
        weights: Any,
        *,
        version: int | None,
        timeout_s: float | None,
        clear_cache: bool,
        mode: PauseMode = "keep",
        strict: bool | None = None,
        on_report: Callable[[PushReport], object] | None = None,
    ) -> PushReport:
        """Brings every replica to ``version``."""
        begin = time.perf_counter()
        source = as_weight_source(weights)
        with leading(source) as announcement:
            _check_arguments(version, timeout_s, mode, strict)
            strict = self._strict if strict is None else strict
            with self.exclusive(TURN_TIMEOUT_S), contextlib.ExitStack() as turn:
                outcome, chosen, is_news = self._send(
                    turn,
                    source,
                    version,
                    strict=strict,
                    timeout_s=timeout_s,
                    clear_cache=clear_cache,
                    mode=mode,
                )
                transport = self.transport.name
            report = announcement.outcome = PushReport.from_outcome(
                outcome,
                version=chosen,
                transport=transport,
                seconds=time.perf_counter() - begin,
                strict=strict,
                began=begin,
            )
        if on_report is not None:
            on_report(report)
        if is_news and self._on_commit is not None:
            self._on_commit(report)
        return report

    def _send(
        self,
        turn: contextlib.ExitStack,
        source: WeightSource,
        version: int | None,
        *,
        strict: bool,
        timeout_s: float | None,
        clear_cache: bool,
        mode: PauseMode,
    ) -> tuple[SendOutcome, int, bool]:
        """Sends once, or twice if another process was quicker; enters its turn into ``turn``."""
        times = PhaseTimes()
        given = source
        with times.measure("open_s"):
            source = fit_to_model(source, self._expected())
            self._check_repeat(given, version)
            self._client.refresh_members()
            turn.enter_context(self._turn())
            transport = self._used()  # which may choose anew
            transport.open(self._client, source)
            self._ledger = self._ledger or self._take_stock()
        num_bytes = sum(meta.num_bytes for meta in source.metadata())
        crew = awaited_replicas(self._client.standings())
        for last_try in (version is not None, True):
            ledger = self._ledger = self._ledger or self._take_stock()
            chosen = self._choose(version, ledger, transport)
            self._attempted = max(self._attempted, chosen)
            kind = PushKind(
                transport=self.transport.name,
                num_bytes=num_bytes,
                mode=mode,
                clear_cache=clear_cache,
                crew=frozenset(crew.items()),
            )
            content = Content(given)
            begin = time.perf_counter()
            outcome = transport.send(
                self._client,
                source,
                chosen,
                timeout_s=self._deadlines.timeout_s(kind) if timeout_s is None else timeout_s,
                clear_cache=clear_cache,
                mode=mode,
            )
            self._silent = {one.replica_id for one in outcome.replicas if one.is_silent}
            is_news = ledger.record(outcome, chosen, strict=strict)
            if ledger.committed == chosen:
                self._committed_run = chosen, outcome.run_id
            if outcome.reached_some:
                self._newest = chosen, outcome.run_id
                self._hold_back_late(outcome, chosen)
            if self._is_taken(outcome, chosen, transport):
                known, former = self._pushed or (None, None)
                content = former if former is not None and known == chosen else content
                self._pushed = chosen, content
            if outcome.was_loaded and not crew.keys() & outcome.failures.keys():
                self._deadlines.record(kind, time.perf_counter() - begin)
            missed = outcome.failures.keys() & set(crew)
            news, self._missed = missed - self._missed, missed
            if not outcome.failures:
                break
            self._settle(ledger, outcome, chosen)
            if news:  # somebody may well send this again
                with times.measure("compare_s"):
                    content.summed(given)
            if last_try or not self._was_overtaken(outcome, chosen):
                break
        return outcome.after(times), chosen, is_news

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

    @staticmethod
    def _is_taken(outcome: SendOutcome, version: int, transport: WeightTransport) -> bool:
        """Whether anybody may have something under this version; silent replicas may."""
        may_have = outcome.reached_some or any(one.is_silent for one in outcome.replicas)
        return may_have or transport.last_version >= version

    def _choose(
        self, version: int | None, ledger: VersionLedger, transport: WeightTransport
    ) -> int:
        """Returns the version to send."""
        if version is None:
            # A version that failed everywhere may be stored already: its number is used up.
            return max(ledger.newest, self._attempted, transport.last_version) + 1
        if version < max(ledger.newest, 1):
            raise StaleVersionError(
                f"version must be at least {max(ledger.newest, 1)}, got {version}"
            )
        return version

    def _was_overtaken(self, outcome: SendOutcome, version: int) -> bool:
        """Whether nobody took ``version`` because another process pushed as many in between."""
        if outcome.reached_some:
            return False
        self._ledger = self._take_stock()
        return self._ledger.newest >= version

    def _hold_back_late(self, outcome: SendOutcome, version: int) -> None:
        """Keeps out replicas that joined while ``version`` was on its way to the others only.

        While this process pushes none joins here, but in the process that supervises the service.
        """
        late = self._client.standings().keys() - {one.replica_id for one in outcome.replicas}
        if late:
            self._client.note_left_behind(version, late)
            calls = dict.fromkeys(late, (version, outcome.run_id))
            self._client.start_calls("hold_back", calls)  # pushes need not wait for that

    def _settle(self, ledger: VersionLedger, outcome: SendOutcome, version: int) -> None:
        """After a push that left replicas behind: those take no requests until repaired.

        If nobody reached ``version``, the replicas that are whole go on serving what they hold.
        """
        if outcome.reached_some:
            self._client.note_left_behind(version, outcome.failures)
            everyone = self._client.standings()
            calls = {name: (version, outcome.run_id) for name in everyone if name in self._silent}
            self._client.start_calls("hold_back", calls)  # which it will read when it wakes
            calls = {name: (version, outcome.run_id) for name in everyone if name not in calls}
            self._client.start_calls("hold_back", calls).answers(HOLD_BACK_TIMEOUT_S)
        self._committed = ledger.committed
        self._ledger = None  # the next push asks anew what the replicas hold

    def _take_stock(self) -> VersionLedger:
        """Asks the replicas what they hold: before the first push, and after one that failed."""
        ledger = VersionLedger()
        for replica_id, report in self._reports().items():
            whole = isinstance(report, EngineReport) and report.state.admits_requests
            ledger.held[replica_id] = report.weight_version if whole else None
            if isinstance(report, EngineReport):
                ledger.seen = max(ledger.seen, report.weight_version or 0)
        versions = [-1 if one is None else one for one in ledger.held.values()]
        ledger.committed = self._committed = max(self._committed, min(versions, default=0))
        return ledger

    def _reports(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Asks those replicas for reports that were not silent a moment ago."""
        awaited = awaited_replicas(self._client.standings())
        asked = dict.fromkeys(set(awaited) - self._silent - set(without), ())
        return self._client.start_calls("report", asked).answers(STOCK_TIMEOUT_S)

    def catch_up(self, replica_ids: Collection[str], timeout_s: float) -> dict[str, str]:
        """Brings single replicas to the newest version that others serve, without a push.

        From the snapshots of the memmap transport if that stored the version, here or in another
        process, and otherwise from another replica that serves it, where weights can be copied as
        they are.
        """
        deadline = time.monotonic() + timeout_s
        with self.exclusive(timeout_s):
            others = self._reports(without=replica_ids)
            served = {
                name: one.weight_version or 0
                for name, one in others.items()
                if isinstance(one, EngineReport) and one.state is ReplicaState.SERVING
            }
            version = max([self._newest[0], *served.values()])
            if version == 0:
                return {}
            transport, answers = self.transport, {}
            if (
                isinstance(transport, MemmapTransport)
                and version == self._newest[0] == transport.last_version
            ):
                left_s = max(deadline - time.monotonic(), 1.0)
                answers = transport.catch_up(self._client, replica_ids, version, timeout_s=left_s)
            left = [name for name in replica_ids if not isinstance(answers.get(name), dict)]
            givers = [name for name, held in served.items() if held == version]
            if left and (givers or not answers):  # such as on a node that the store is not on
                answers |= self._learn_from(givers, left, version, deadline)
            self._silent -= {n for n, one in answers.items() if not isinstance(one, BaseException)}
            self._ledger, self._committed = None, self.committed
        return {
            name: str(one) or type(one).__name__
            for name, one in answers.items()
            if isinstance(one, BaseException)
        }

    def _learn_from(
        self, givers: Sequence[str], replica_ids: Collection[str], version: int, deadline: float
    ) -> dict[str, Any]:
        """Has replicas take over what others hold: from their snapshot, or else from themselves."""
        loaded = catch_up_from_snapshot(
            self._client,
            replica_ids,
            givers,
            version,
            timeout_s=max(deadline - time.monotonic(), 1.0),
        )
        left = [name for name in replica_ids if not isinstance(loaded.get(name), dict)]
        if not left:
            return loaded
        return loaded | catch_up_from_peer(
            self._client, left, givers, version, timeout_s=max(deadline - time.monotonic(), 1.0)
        )

    def close(self) -> None:
        """Closes the transport; idempotent."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()


def _check_arguments(
    version: int | None, timeout_s: float | None, mode: PauseMode, strict: bool | None
) -> None:
    """Refuses arguments of a push."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise UnsupportedArgumentError(f"version must be an integer or None, got {version!r}")
    if version is not None and version > MAX_VERSION:
        raise UnsupportedArgumentError(f"version must be at most {MAX_VERSION}, got {version}")
    if timeout_s is not None and not (
        isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf
    ):
        raise UnsupportedArgumentError(
            f"timeout_s must be a finite number greater than 0, or None, got {timeout_s!r}"
        )
    if strict is not None and not isinstance(strict, bool):
        raise UnsupportedArgumentError(f"strict must be a bool or None, got {strict!r}")
    check_mode(mode)

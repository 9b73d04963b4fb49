"""What every transport owes and shares: outcomes, reports, phases, watched waits."""

from __future__ import annotations

import time
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    SilentEngineError,
    SyncError,
    TransferError,
    UnsupportedArgumentError,
    WeightSyncError,
)
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.source import WeightSource


# How long the phases of a push took, and when each began.


class PhaseTimes:
    """Notes the phases of one push as its transport measures them; a later note replaces one.

    Example:
        >>> times = PhaseTimes()
        >>> with times.measure("join_s"):
        ...     time.sleep(0.001)
        >>> 0.001 < times.seconds["join_s"] < 1.0
        True

    Attributes:
        seconds: Seconds of wall clock by phase; and counts, by names that do not end in ``_s``.
        starts: When each phase began, in seconds of this process's ``time.perf_counter()``. A phase
            that is the sum of many pieces has no start.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    def note(self, phase: str, begin: float, end: float | None = None) -> None:
        """Notes one phase."""
        self.seconds[phase] = (time.perf_counter() if end is None else end) - begin
        self.starts[phase] = begin

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Notes the time inside ``with`` as one phase, also if that ends with an exception."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.note(phase, begin)


# What becomes of requests in flight: they freeze and go on, are waited for, or end as they are.
PauseMode = Literal["keep", "wait", "abort"]

# One that joins is ``STARTING`` and has an engine: it takes pushes before it takes requests.
_NOT_AWAITED = (ReplicaState.FAILED, ReplicaState.CLOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the service knows of a replica before a push, without asking it.

    Attributes:
        state: Its state.
        reason: Why it is in that state; may be empty.
        incarnation: Tells its actor from one that had its id before.
    """

    state: ReplicaState
    reason: str = ""
    incarnation: str = ""

    @property
    def absence(self) -> str:
        """Why a push does not wait for it; empty if it does."""
        if self.state not in _NOT_AWAITED:
            return ""
        return f"it is {self.state}" + (f": {self.reason}" if self.reason else "")


def awaited_replicas(standings: Mapping[str, Standing]) -> dict[str, str]:
    """Returns the ids of replicas that a push waits for, each with its incarnation."""
    return {name: one.incarnation for name, one in standings.items() if not one.absence}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOutcome:
    """What one replica answered to one push.

    Attributes:
        replica_id: Stable id of the replica.
        version: Policy version it holds now; ``None`` when that is not known.
        error: Why it did not reach the version of the push; empty when it did.
        phases: Seconds of wall clock by phase, and counts, as the replica measured them.
        path: How the weights got into its model: ``plan`` or ``layerwise``; empty when nothing was
            loaded.
        path_reason: Why it was not the plan; empty when it was, or when none was asked for.
        is_expected: Whether it counts that it did not reach the version; not while it starts, as it
            will serve only when it has caught up.
        is_silent: Whether its actor did not answer at all in time.
        began_at: When its first phase began, in seconds of Unix time by its host's clock; ``None``
            when nothing was loaded. Its phases follow each other: ``verify_s`` or ``stage_s`` (of
            which ``ready_s`` is the beginning), then ``pause_s``, ``load_s`` and ``resume_s``.
    """

    replica_id: str
    version: int | None
    error: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    path: str = ""
    path_reason: str = ""
    is_expected: bool = True
    is_silent: bool = False
    began_at: float | None = None

    @classmethod
    def of(cls, replica_id: str, answer: Any) -> ReplicaOutcome:
        """Makes it from what a call to the replica ended with.

        Args:
            replica_id: The replica.
            answer: A ``LoadReport`` as a dictionary, or the exception that came instead.

        Returns:
            The outcome.
        """
        if isinstance(answer, BaseException):
            why = str(answer) or type(answer).__name__
            silent = isinstance(answer, TimeoutError) and not isinstance(answer, SyncError)
            return cls(replica_id=replica_id, version=None, error=why, is_silent=silent)
        words = ("version", "path", "path_reason", "began_at")
        return cls(
            replica_id=replica_id,
            version=answer["version"],
            phases={name: float(value) for name, value in answer.items() if name not in words},
            path=answer.get("path", ""),
            path_reason=answer.get("path_reason", ""),
            began_at=answer.get("began_at"),
        )

    @classmethod
    def missing(
        cls,
        reasons: Mapping[str, str],
        standings: Mapping[str, Standing],
        silent: Collection[str] = (),
    ) -> list[ReplicaOutcome]:
        """Makes those of replicas that a push did without.

        Args:
            reasons: Replica id to the reason.
            standings: Each replica's standing.
            silent: Ids of those that do not answer.

        Returns:
            One outcome for each reason.
        """
        return [
            cls(
                replica_id=name,
                version=None,
                error=why,
                is_expected=name not in standings
                or standings[name].state is not ReplicaState.STARTING,
                is_silent=name in silent,
            )
            for name, why in reasons.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """What a transport did with one version.

    Attributes:
        num_bytes: Bytes of all tensors, once.
        phases: Seconds of wall clock by phase on the trainer's side.
        replicas: One answer for each replica of the service.
        run_id: Tells versions of this sender from another's with the same number; ``None`` if the
            transport has no such thing.
        phase_starts: When each phase began, in seconds of ``time.perf_counter()``; one that is the
            sum of many pieces, or whose start the transport does not know, is missing.
    """

    num_bytes: int
    phases: dict[str, float]
    replicas: list[ReplicaOutcome]
    run_id: str | None = None
    phase_starts: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, str]:
        """Id of each replica that did not reach the version, to the reason."""
        return {one.replica_id: one.error for one in self.replicas if one.error}

    @property
    def is_complete(self) -> bool:
        """Whether every replica that counts reached the version."""
        return not any(one.error and one.is_expected for one in self.replicas)

    @property
    def reached_some(self) -> bool:
        """Whether at least one replica reached the version."""
        return any(not one.error for one in self.replicas) or not self.replicas

    @property
    def was_loaded(self) -> bool:
        """Whether every replica that reached the version loaded it, and none held it before."""
        return all(one.phases.get("loaded", 1.0) for one in self.replicas if not one.error)

    def after(self, times: PhaseTimes) -> SendOutcome:
        """Returns the outcome with the phases that came before it."""
        return replace(
            self,
            phases=times.seconds | self.phases,
            phase_starts=times.starts | self.phase_starts,
        )

    def commits(self, *, strict: bool) -> bool:
        """Whether the version counts as committed: on all replicas, or at least on one."""
        return self.reached_some and (self.is_complete or not strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push that was committed.

    Attributes:
        version: Policy version committed.
        transport: Name of the transport.
        num_bytes: Bytes of all tensors, once.
        seconds: Wall clock of the whole push.
        phases: Seconds by phase on the trainer's side, by names that end in ``_s``; and counts.
            ``open_s`` is what comes before the transport's own: for the first push, choosing a
            transport, forming its group and asking the replicas what they hold. ``copy_s`` and
            ``hash_s`` of ``memmap`` are those of several threads together. ``compare_s`` is reading
            all weights once, to know a retry by, after somebody was left behind.
        replicas: What each replica answered.
        left_behind: Id of each replica that did not reach the version, to the reason; it takes no
            requests until it does. Empty after a push with ``strict=True``, but for replicas that
            were starting.
        began_at: When the push began, in seconds of Unix time by the trainer's clock; ``None`` if
            unknown.
        phase_starts: Seconds from the beginning of the push to that of each phase on the trainer's
            side, as far as the transport said.
    """

    version: int
    transport: str
    num_bytes: int
    seconds: float
    phases: dict[str, float]
    replicas: list[ReplicaOutcome]
    left_behind: dict[str, str] = field(default_factory=dict)
    began_at: float | None = None
    phase_starts: dict[str, float] = field(default_factory=dict)

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of the weights by the seconds of the whole push, in 10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9

    @classmethod
    def from_outcome(
        cls,
        outcome: SendOutcome,
        *,
        version: int,
        transport: str,
        seconds: float,
        strict: bool = True,
        began: float | None = None,
    ) -> PushReport:
        """Makes the report, or raises for the replicas that were left behind.

        Args:
            outcome: What became of the push.
            version: Its policy version.
            transport: Name of the transport.
            seconds: Wall clock of the whole push.
            strict: Raise if any replica was left behind, not only if all were.
            began: When it began, in seconds of ``time.perf_counter()``; ``None`` if unknown.

        Returns:
            The report.

        Raises:
            WeightSyncError: At least one replica did not reach ``version``, or none did.
        """
        if not outcome.commits(strict=strict):
            raise WeightSyncError(version, outcome.failures)
        return cls(
            version=version,
            transport=transport,
            num_bytes=outcome.num_bytes,
            seconds=seconds,
            phases=outcome.phases,
            replicas=outcome.replicas,
            left_behind=outcome.failures,
            began_at=None if began is None else time.time() - (time.perf_counter() - began),
            phase_starts={}
            if began is None
            else {name: start - began for name, start in outcome.phase_starts.items()},
        )


class PendingCalls(Protocol):
    """One call to every replica, under way."""

    def failures(self) -> dict[str, BaseException]:
        """Returns those that have ended with an exception by now, without waiting."""
        ...

    def answers(self, deadline_s: float) -> dict[str, Any]:
        """Waits for all; see :meth:`ReplicaClient.call_replicas`."""
        ...


class ReplicaClient(Protocol):
    """How a transport reaches every replica of a service: one call a push, all at once."""

    @property
    def service_name(self) -> str:
        """Name of the service, unique on the cluster."""
        ...

    @property
    def rendezvous(self) -> tuple[str, int | None]:
        """This host's address as the replicas reach it, and a port if one was asked for."""
        ...

    def refresh_members(self) -> None:
        """Follows replicas that have come or gone by now; asks one of them if others change it."""
        ...

    def standings(self) -> dict[str, Standing]:
        """Returns what is known of every replica, by id, without asking any."""
        ...

    def note_left_behind(self, version: int, replica_ids: Collection[str]) -> None:
        """Takes these replicas out of this process's rotation until they report ``version``."""
        ...

    def start_calls(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **kwargs: Any
    ) -> PendingCalls:
        """Calls an engine actor's method on some replicas and does not wait."""
        ...

    def call_replicas(
        self, method: str, *args: Any, deadline_s: float, **kwargs: Any
    ) -> dict[str, Any]:
        """Calls an engine actor's method on every replica and waits ``deadline_s`` for them."""
        ...


class WeightTransport(Protocol):
    """Moves whole versions of the weights from the trainer into every replica.

    Lifecycle: constructed, ``open`` once, ``send`` any number of times, ``close``. Opening again
    after ``close`` is allowed.
    """

    name: str

    @property
    def last_version(self) -> int:
        """Newest version that it holds already, from an earlier process too; 0 if none."""
        ...

    def open(self, client: ReplicaClient, source: WeightSource | None = None) -> None:
        """Prepares to send to the replicas behind ``client``; does nothing when open already.

        Args:
            client: The replicas.
            source: What will be sent, if that is known: it may be sent from where it is.
        """
        ...

    def send(
        self,
        client: ReplicaClient,
        source: WeightSource,
        version: int,
        *,
        timeout_s: float,
        clear_cache: bool,
        mode: PauseMode = "keep",
    ) -> SendOutcome:
        """Sends ``source`` as ``version`` to every replica and waits for each one's answer.

        Sending the same version again brings along only the replicas that do not hold it.

        Args:
            client: The replicas.
            source: Complete and fitting the engines' model.
            version: Policy version of these tensors.
            timeout_s: Seconds after which a silent replica counts as failed.
            clear_cache: Recompute keys and values of requests in flight.
            mode: What becomes of requests in flight.

        Returns:
            How many bytes, how long each phase took, and one answer for each replica.
        """
        ...

    def close(self) -> None:
        """Releases whatever ``open`` took; idempotent."""
        ...


def check_transport(transport: object) -> None:
    """Refuses what cannot be sent through, before it takes the place of what can."""
    methods = [getattr(transport, one, None) for one in ("open", "send", "close")]
    if isinstance(transport, type) or not all(map(callable, methods)):
        raise UnsupportedArgumentError(
            f"transport must be a WeightTransport, got {transport!r}: an object such as "
            "MemmapTransport(); only WeightUpdater takes names"
        )


def check_mode(mode: object) -> None:
    """Refuses what says nothing of requests in flight."""
    if mode not in get_args(PauseMode):
        raise UnsupportedArgumentError(f"mode must be one of {get_args(PauseMode)}, got {mode!r}")


# Which replicas a transport can begin with, and why it has to do without the others.


DESCRIBE_TIMEOUT_S = 30.0
MOST_ATTEMPTS = 3
"""How often one push sends everything: again without replicas that were lost, and again."""
OVER = (ReplicaState.FAILED, ReplicaState.CLOSED)


def describe_replicas(
    client: ReplicaClient, without: Collection[str] = ()
) -> tuple[dict[str, EngineDescription], dict[str, str]]:
    """Asks every replica that a push waits for what it is."""
    missing: dict[str, str] = {}
    asked: dict[str, tuple[()]] = {}
    for name, standing in client.standings().items():
        if standing.absence:
            missing[name] = standing.absence
        elif name not in without:
            asked[name] = ()
    answers = client.start_calls("describe", asked).answers(DESCRIBE_TIMEOUT_S) if asked else {}
    alive = {name: one for name, one in answers.items() if not isinstance(one, BaseException)}
    missing |= {name: str(one) for name, one in answers.items() if name not in alive}
    if not alive:
        raise TransferError(f"no replica can be reached: {missing}")
    return alive, missing


def is_dead(answer: Any) -> bool:
    """Whether a call to a replica ended so that there will be no other."""
    return isinstance(answer, ReplicaUnavailableError) and answer.state in OVER


def is_lost(answer: Any) -> bool:
    """Whether a replica died during a call, or it or its engine kept silent."""
    silent = isinstance(answer, TimeoutError) and not isinstance(answer, SyncError)
    return silent or isinstance(answer, SilentEngineError) or is_dead(answer)


def lost_replicas(answers: Mapping[str, Any]) -> set[str]:
    """Returns the replicas without which an update that broke off is worth another attempt."""
    lost = {name for name, one in answers.items() if is_lost(one)}
    others = [one for name, one in answers.items() if name not in lost]
    return lost if any(isinstance(one, BaseException) for one in others) else set()


# Replicas that gave no answer, which pushes do without until they show a sign of life.


@dataclass(slots=True)
class _Silence:
    reason: str
    incarnation: str
    probe: PendingCalls


class SilentReplicas:
    """Who was silent, and a question to each that nobody waits for.

    The question goes through the actor and the engine core to every worker, so that an answer means
    that all of them run again. Asking costs one call; looking for the answer costs nothing, so a
    wedged replica delays only the push that it was wedged in.
    """

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Id of each silent replica, to what it was silent about."""
        return {name: one.reason for name, one in self._silences.items()}

    def note(self, client: ReplicaClient, reasons: Mapping[str, str]) -> None:
        """Begins to do without these replicas."""
        standings = client.standings()
        for name in reasons.keys() & standings.keys():
            self._silences[name] = _Silence(
                reasons[name], standings[name].incarnation, _probe(client, name)
            )

    def look(self, client: ReplicaClient) -> None:
        """Forgets those that have answered since, are dead, or are other actors by now."""
        standings = client.standings()
        for name, silence in list(self._silences.items()):
            standing = standings.get(name)
            if standing is None or standing.absence or standing.incarnation != silence.incarnation:
                del self._silences[name]
                continue
            answer = silence.probe.answers(0.0).get(name)
            if isinstance(answer, SilentEngineError):  # the actor lives, its engine does not answer
                silence.probe = _probe(client, name)
            elif not isinstance(answer, TimeoutError) or isinstance(answer, SyncError):
                del self._silences[name]


def _probe(client: ReplicaClient, name: str) -> PendingCalls:
    return client.start_calls("probe_workers", {name: ()})


# Blocking calls that may never return, made in a thread while the replicas are watched.


# Seconds between looks at the replicas.
WATCH_S = 0.05


def watched(what: str, call: Callable[[], Any], pending: PendingCalls, deadline: float) -> Any:
    """Makes ``call`` in a thread and waits for it, but not for ever.

    The thread is left behind when this raises early; ending what it does is the caller's.
    """
    ended = in_thread(what, call)
    while wait([ended], timeout=WATCH_S).not_done:
        raise_exceptions(pending.failures())
        if time.monotonic() > deadline:
            raise TransferError(f"{what} did not end in time")
    try:
        return ended.result()
    except SyncError:
        raise
    except Exception as error:
        raise TransferError(f"{what} broke off: {type(error).__name__}: {error}") from error


def raise_exceptions(answers: Mapping[str, Any]) -> None:
    """Raises for the replicas that failed."""
    failures = {name: one for name, one in answers.items() if isinstance(one, BaseException)}
    if failures:
        reasons = (f"replica {name}: {one!s}" for name, one in failures.items())
        raise TransferError("; ".join(reasons))

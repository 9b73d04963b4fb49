"""The common part of all transports: pushes, their members, phases and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from torchrl_vllm_sync.checks import check_seconds
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    SilentEngineError,
    SyncError,
    TransferError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineDescription, LoadReport, ReplicaState

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.source import WeightSource


# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
LEAST_S = 1.0  # of such a limit, however late the call begins
DESCRIBE_TIMEOUT_S = 30.0
# How often one push sends everything: again without replicas that were lost, and again.
MOST_ATTEMPTS = 3

# What becomes of requests in flight: they freeze and go on, are waited for, or end as they are.
PauseMode = Literal["keep", "wait", "abort"]


def check_mode(mode: object) -> None:
    if mode not in get_args(PauseMode):
        raise UnsupportedArgumentError(f"mode must be one of {get_args(PauseMode)}, got {mode!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Options of a push, checked; ``AsyncVLLM.push_weights`` describes them."""

    timeout_s: float | None = None
    clear_cache: bool = False
    mode: PauseMode = "keep"
    strict: bool | None = None
    audit: bool = False
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)
        if self.strict is not None and not isinstance(self.strict, bool):
            raise UnsupportedArgumentError(f"strict must be a bool or None, got {self.strict!r}")
        for name in ("audit", "allow_nonfinite"):
            if not isinstance(value := getattr(self, name), bool):
                raise UnsupportedArgumentError(f"{name} must be a bool, got {value!r}")
        check_mode(self.mode)


class PhaseTimes:
    """Notes the phases of one push as they are measured; a later note replaces one."""

    def __init__(self) -> None:
        # Seconds of wall clock by phase; and counts, by names that do not end in ``_s``.
        self.seconds: dict[str, float] = {}
        # When each phase began, by ``time.perf_counter()``; not of sums of many pieces.
        self.starts: dict[str, float] = {}

    def note(self, phase: str, begin: float, end: float | None = None) -> None:
        self.seconds[phase] = (time.perf_counter() if end is None else end) - begin
        self.starts[phase] = begin

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Notes the time inside ``with`` as one phase, also after an exception."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.note(phase, begin)


@dataclass(frozen=True, slots=True)
class Push:
    """One version on its way: what a transport sends, and how."""

    source: WeightSource  # complete, and fitting the engines' model
    version: int
    timeout_s: float  # after which a silent replica counts as failed
    mode: PauseMode = "keep"
    clear_cache: bool = False
    allow_nonfinite: bool = False
    # Refuses weights that must not be served: transports call it while these are not, yet.
    confirm: Callable[[], object] = lambda: None
    times: PhaseTimes = field(default_factory=PhaseTimes)

    @property
    def terms(self) -> dict[str, Any]:
        """What every replica is told of it."""
        return {"version": self.version, "mode": self.mode, "clear_cache": self.clear_cache}


def reason_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def failed(answers: Mapping[str, Any]) -> dict[str, BaseException]:
    return {name: one for name, one in answers.items() if isinstance(one, BaseException)}


def is_silent(answer: Any) -> bool:
    """Whether the replica's actor, or its engine, gave no answer in time."""
    unanswered = isinstance(answer, TimeoutError) and not isinstance(answer, SyncError)
    return unanswered or isinstance(answer, SilentEngineError)


def is_lost(answer: Any) -> bool:
    """Whether the replica was silent, or is dead, so that no other answer will come."""
    dead = isinstance(answer, ReplicaUnavailableError) and answer.state in _NOT_AWAITED
    return dead or is_silent(answer)


def raise_exceptions(answers: Mapping[str, Any]) -> None:
    reasons = [f"replica {name}: {one!s}" for name, one in failed(answers).items()]
    if reasons:
        raise TransferError("; ".join(reasons))


# One that is ``STARTING`` has an engine: it takes pushes before it takes requests.
_NOT_AWAITED = (ReplicaState.FAILED, ReplicaState.CLOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the service knows of a replica before a push, without asking it."""

    state: ReplicaState
    reason: str = ""  # why it is in that state
    incarnation: str = ""  # identifies its actor among all that have had its id

    @property
    def absence(self) -> str:
        """Why a push does not wait for it; empty if it does."""
        why = f"it is {self.state}" + (f": {self.reason}" if self.reason else "")
        return why if self.state in _NOT_AWAITED else ""


def awaited_replicas(standings: Mapping[str, Standing]) -> dict[str, str]:
    """Returns the ids of replicas that a push waits for, each with its incarnation."""
    return {name: one.incarnation for name, one in standings.items() if not one.absence}


class PendingCalls(Protocol):
    """One call to some replicas, under way."""

    # Those that have ended with an exception by now, without waiting.
    def failures(self) -> dict[str, BaseException]: ...
    # Waits for all; an exception stands for a replica that failed or did not answer.
    def answers(self, deadline_s: float) -> dict[str, Any]: ...


class ReplicaClient(Protocol):
    """How a transport reaches every replica of a service: one call a push, all at once."""

    @property
    def service_name(self) -> str: ...  # unique on the cluster
    # This host's address as the replicas reach it, and a port if one was asked for.
    @property
    def rendezvous(self) -> tuple[str, int | None]: ...
    # Follows replicas that have come or gone; asks one of them if others change the set.
    def refresh_members(self) -> None: ...
    # Begins that, and returns what ends it.
    def look_for_members(self) -> Callable[[], None]: ...
    # What is known of every replica, by id, without asking any.
    def standings(self) -> dict[str, Standing]: ...
    # Takes these out of this process's rotation until they report ``version``.
    def note_left_behind(self, version: int, replica_ids: Collection[str]) -> None: ...
    # Calls an engine actor's method on some replicas and does not wait.
    def start_calls(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **kwargs: Any
    ) -> PendingCalls: ...


def ask(
    client: ReplicaClient,
    method: str,
    calls: Mapping[str, Any],
    limit_s: float,
    meanwhile: Callable[[], object] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    """Makes a call, each replica's with its own arguments and a time limit that it keeps itself."""
    limit_s = max(limit_s, LEAST_S)
    pending = client.start_calls(method, calls, timeout_s=limit_s, **options)
    meanwhile()
    return pending.answers(limit_s + GRACE_S)


class Members:
    """The replicas that a trainer's pushes go to, and why others are left out.

    A silent replica is left out until it answers, so that it delays only the push that it hung in.
    """

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.incarnations: dict[str, str] = {}  # of the replicas that the push goes to, by id
        self.missing: dict[str, str] = {}  # id of each other replica, to the reason
        self.silent: dict[str, str] = {}  # id of each silent replica, to what it was silent about
        # Of each, its incarnation and a question that nothing waits for. It passes through actor
        # and engine core to every worker, so an answer means that all of them run again.
        self._probes: dict[str, tuple[str, PendingCalls]] = {}

    def choose(self, without: Mapping[str, str] | None = None) -> None:
        """Starts over with every replica that is present, except ``without``."""
        standings = self.client.standings()
        self.missing = {n: one.absence for n, one in standings.items() if one.absence}
        self.missing |= {n: why for n, why in (without or {}).items() if n in standings}
        present = standings.keys() - self.missing.keys()
        self.incarnations = {n: one.incarnation for n, one in standings.items() if n in present}

    def drop(self, answers: Mapping[str, BaseException]) -> None:
        """Leaves these out, for what they answered."""
        self.missing |= {name: reason_of(one) for name, one in answers.items()}
        for name in answers:
            self.incarnations.pop(name, None)
        self.note_silent(answers)

    def start(self, method: str, *args: Any, **kwargs: Any) -> PendingCalls:
        return self.client.start_calls(method, dict.fromkeys(self.incarnations, args), **kwargs)

    def describe(self) -> dict[str, EngineDescription]:
        """Asks each for its description, and drops those that do not answer."""
        answers = self.start("describe").answers(DESCRIBE_TIMEOUT_S) if self.incarnations else {}
        self.drop(failed(answers))
        if not (alive := {n: one for n, one in answers.items() if n not in self.missing}):
            raise TransferError(f"no replica can be reached: {self.missing}")
        return alive

    def note_silent(self, answers: Mapping[str, Any]) -> None:
        """Remembers those that gave no answer, and asks them for a sign of life."""
        standings = self.client.standings()
        for name, one in answers.items():
            if is_silent(one) and name in standings:
                self.silent[name] = reason_of(one)
                self._probe(name, standings[name].incarnation)

    def _probe(self, name: str, incarnation: str) -> None:
        self._probes[name] = incarnation, self.client.start_calls("probe_workers", {name: ()})

    def look(self) -> None:
        """Forgets silent replicas that have answered since, are dead, or were replaced."""
        awaited = awaited_replicas(self.client.standings())
        for name in list(self.silent):
            incarnation, probe = self._probes[name]
            is_same = awaited.get(name) == incarnation
            answer = probe.answers(0.0).get(name) if is_same else None
            if isinstance(answer, SilentEngineError):  # the actor lives, its engine does not answer
                self._probe(name, incarnation)
            elif not is_silent(answer):
                del self.silent[name]

    def reports(self, answers: Mapping[str, Any]) -> list[LoadReport]:
        """Returns what each replica answered, and why each missing one did not."""
        standings, facts = self.client.standings(), dict(answers)
        reasons = {n: why for n, why in self.missing.items() if n not in answers}
        reasons |= {n: reason_of(one) for n, one in failed(answers).items()}
        for name, error in reasons.items():
            is_starting = name in standings and standings[name].state is ReplicaState.STARTING
            about = {"is_expected": not is_starting, "is_silent": name in self.silent}
            facts[name] = {"version": None, "error": error, **about}
        return [LoadReport(**{**one, "replica_id": name}) for name, one in facts.items()]


class WeightTransport(Protocol):
    """Moves whole versions of the weights from the trainer into every replica.

    Lifecycle: ``open`` before each attempt of a push, ``send``, ``close``; it may be opened again.

    Attributes:
        name: Its name in reports.
        is_collective: Whether all replicas take part in one transfer, which breaks off for all when
            one is lost. Such pushes leave silent replicas out, and send again without lost ones.
    """

    name: str

    @property
    def is_collective(self) -> bool:
        """See the class."""
        ...

    @property
    def run_id(self) -> str:
        """Tells versions of this sender from another's with the same number."""
        ...

    @property
    def last_version(self) -> int:
        """Newest version that it stores, an earlier process's included; 0 if it stores none."""
        ...

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Prepares to send to ``members``; does nothing when that was done.

        Args:
            members: The replicas; those that it cannot begin with are dropped from them.
            source: What will be sent, if that is known: it may be sent from where it is.
        """
        ...

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Sends to every member and waits for each one's answer; :meth:`open` was called.

        Sending the same version again brings along only the replicas that do not hold it.

        Args:
            members: The replicas.
            push: What to send. Its ``confirm()`` is called before an engine could serve any of it,
                and what it raises ends the push.

        Returns:
            Replica id to the fields of its ``LoadReport``, or to the exception that came instead.
        """
        ...

    def close(self) -> None:
        """Releases whatever ``open`` took; idempotent."""
        ...


def check_transport(transport: object) -> None:
    """Refuses what is no transport, before it replaces one."""
    methods = [getattr(transport, one, None) for one in ("open", "send", "close")]
    if isinstance(transport, type) or not all(map(callable, methods)):
        raise UnsupportedArgumentError(
            f"transport must be a WeightTransport, got {transport!r}: an object such as "
            "MemmapTransport(); only WeightUpdater takes names"
        )

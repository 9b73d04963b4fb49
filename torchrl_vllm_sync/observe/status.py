"""What a service is and does at one moment, and the log of its pushes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

from torchrl_vllm_sync.replica import EngineCounters, Latency, Member, PushReport, ReplicaState
from torchrl_vllm_sync.routing.ledger import LoadSnapshot, LoadTracker, token_rates

MAX_PUSHES = 8
MAX_FAILURES = 16
# An engine's figures that are older than this many seconds count as unknown.
MAX_AGE_S = 5.0


@dataclass(frozen=True, slots=True)
class FailureStatus:
    """Something that went wrong."""

    at: float  # when this process noticed it, in seconds since 1970
    what: str  # "push", or the state that a replica came to: "failed" or "stale"
    replica_id: str | None = None  # None for a push
    reason: str = ""


class StatusLog:
    """The last pushes that it was given, and the last failures, of a ledger's replicas too."""

    def __init__(self, load: LoadTracker, wall_clock: Callable[[], float] = time.time) -> None:
        self._load, self._wall_clock = load, wall_clock
        self._lock = threading.Lock()
        self.pushes: tuple[PushReport, ...] = ()  # newest first
        self._failures: deque[FailureStatus] = deque(maxlen=MAX_FAILURES)
        self._states: dict[str, ReplicaState] = {}
        self._listeners: dict[object, Callable[[PushReport], object]] = {}
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(load.watched(self._note_failures, urgent=False))

    def add_pushes(self, pushes: Iterable[PushReport]) -> None:
        """Adds pushes that are not known yet; one is known by when it ended and its version."""
        with self._lock:
            known = {(one.ended_at, one.version): one for one in (*self.pushes, *pushes)}
            newest = sorted(known.values(), key=lambda one: one.ended_at, reverse=True)
            self.pushes = tuple(newest[:MAX_PUSHES])

    def listen(self, listener: Callable[[PushReport], object]) -> Callable[[], object]:
        """Calls ``listener``, which must not raise, as each push ends, in the pushing thread."""
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None)

    def end_push(self, push: PushReport) -> None:
        """Adds a push of this process, and calls the listeners."""
        self.add_pushes([push])
        for listener in [*self._listeners.values()]:
            listener(push)

    def status(
        self, name: str, weight_version: int, members: Sequence[Member], **about: Any
    ) -> ServiceStatus:
        """Puts together what is known of a service, without actor calls, and ``about`` it."""
        snapshots, now = self._load.snapshots(), self._load.clock()
        engines = ", ".join(sorted({one.description.vllm_version for one in members}))
        self.add_pushes(one.last_push for one in snapshots if one.last_push is not None)
        with self._lock:
            pushes, failures = self.pushes, [*self._failures]
        failed = [one for one in pushes if one.error]
        failures += [FailureStatus(one.ended_at, "push", None, one.error) for one in failed]
        failures.sort(key=lambda one: one.at)
        known = {one.replica_id: one for one in members}
        return ServiceStatus(
            name=name,
            time=time.time(),
            weight_version=weight_version,
            in_flight=self._load.total_in_flight,
            replicas=tuple(_of_replica(one, known.get(one.replica_id), now) for one in snapshots),
            pushes=pushes,
            failures=tuple(failures[::-1][:MAX_FAILURES]),
            versions=({"vllm": engines} if engines else {}) | _own_versions(),
            model=next((one.description.model for one in members), ""),
            **about,
        )

    def _note_failures(self) -> None:
        """Notes replicas that have newly failed or gone stale; the ledger is locked meanwhile."""
        snapshots = self._load.snapshots()
        with self._lock:
            for one in snapshots:
                is_news = one.state is not self._states.get(one.replica_id)
                # One that joins is stale for a moment, and has no reason to be.
                is_stale = one.state is ReplicaState.STALE and one.reason
                if is_news and (is_stale or one.state is ReplicaState.FAILED):
                    noted = self._wall_clock(), one.state, one.replica_id, one.reason
                    self._failures.append(FailureStatus(*noted))
            self._states = {one.replica_id: one.state for one in snapshots}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica at one moment; ``None`` wherever a figure is not known.

    Figures of the engine are those of its last report, unless that is more than 5 s old.

    Attributes:
        replica_id, state, reason: Which replica, its state, and why it is ``STALE`` or ``FAILED``.
        weight_version: Policy version that it last said it holds.
        in_flight, elsewhere: Samples of this process there, exact, and others' at the last report.
        num_unfinished, num_running, num_waiting: Requests inside its engine: all, those in the
            running batch, and those that are queued.
        kv_cache_usage: Share of KV-cache blocks in use, 0 to 1.
        prefix_cache_hit_rate: Share, 0 to 1, of the prompt tokens looked up in its prefix cache
            since the engine's start that were found there.
        generated_tokens_per_s: Tokens sampled, over the last 2 s or so.
        prompt_tokens_per_s: The same of prompts whose prefill ended, cached tokens included.
        time_to_first_token: Seconds from a request's arrival to its first token, over the last 256.
        inter_token_latency: Seconds from one token of a request to its next, over the last 4,096.
        counters: What the engine has done since it started.
        report_age_s, num_restarts: Seconds since its last report; how often its actor was replaced.
        node, pid: Address of its node, and its actor's process id there.
        device_type, device_name: ``"cpu"`` or ``"cuda"``; its first GPU, or how many cores it uses.
        num_workers: GPUs that it uses; processes on a CPU.
    """

    replica_id: str
    state: ReplicaState
    in_flight: int
    reason: str = ""
    weight_version: int | None = None
    elsewhere: int | None = None
    num_unfinished: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_cache_hit_rate: float | None = None
    generated_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    time_to_first_token: Latency | None = None
    inter_token_latency: Latency | None = None
    counters: EngineCounters | None = None
    report_age_s: float | None = None
    num_restarts: int | None = None
    node: str | None = None
    pid: int | None = None
    device_type: str | None = None
    device_name: str | None = None
    num_workers: int | None = None

    @property
    def samples(self) -> int | None:
        """Samples of all processes that it holds, as well as this one can tell."""
        return None if self.elsewhere is None else self.in_flight + self.elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service at one moment.

    Example:
        >>> [one.replica_id for one in service.status().replicas if one.state != "serving"]
        ['1']

    Attributes:
        name, time, launched_at: Its name, when this was so, and its launch, in Unix seconds.
        weight_version: Newest policy version that every serving replica is known to hold.
        in_flight: Samples that this process has in flight, those of removed replicas included.
        replicas: Its replicas, in the order of their joining.
        pushes, failures: The last pushes that this process made or heard of from replicas, and
            what went wrong lately, newest first.
        requests: Requests of this process that were ``answered``, ``lost`` with their replicas,
            ``failed`` or ``cancelled``, and how often one was ``retried``: sent again.
        model: The checkpoint's name or path; empty if unknown.
        versions: Name to version of the libraries: the engines' vLLM, and this process's TorchRL.
    """

    name: str
    time: float
    weight_version: int
    in_flight: int
    replicas: tuple[ReplicaStatus, ...]
    pushes: tuple[PushReport, ...] = ()
    failures: tuple[FailureStatus, ...] = ()
    requests: dict[str, int] = field(default_factory=dict)
    model: str = ""
    launched_at: float | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def uptime_s(self) -> float | None:
        """Seconds since the launch."""
        return None if self.launched_at is None else max(0.0, self.time - self.launched_at)

    @property
    def hardware(self) -> str:
        """Such as ``"4 x NVIDIA H100 80GB HBM3, 1 node"``; empty if unknown."""
        known = [one for one in self.replicas if one.device_name and one.num_workers]
        gpus = Counter[str]()
        for one in known:
            gpus[f"{one.device_name}"] += (one.num_workers or 0) * (one.device_type != "cpu")
        names = [f"{number} x {name}" if number else name for name, number in gpus.items()]
        num_nodes = len({one.node for one in known})
        return ", ".join([*names, f"{num_nodes} node{'s' * (num_nodes > 1)}"]) if names else ""

    @property
    def num_serving(self) -> int:
        """Replicas that take requests."""
        return sum(one.state.admits_requests for one in self.replicas)

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Tokens that all replicas sample per second."""
        return self._total("generated_tokens_per_s")

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """The same of prompts whose prefill ended, cached tokens included."""
        return self._total("prompt_tokens_per_s")

    @property
    def samples(self) -> int | None:
        """Samples of all processes that they hold, as well as this one can tell."""
        return self._total("samples")

    def _total(self, figure: str) -> Any:
        """Sum over the replicas that serve; ``None`` without any, or if one is not known."""
        known = [getattr(one, figure) for one in self.replicas if one.state.admits_requests]
        return None if not known or None in known else sum(known)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and finite numbers, for JSON."""
        totals = [name for name, one in vars(type(self)).items() if isinstance(one, property)]
        whole = dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}
        for one, shown in zip(self.replicas, whole["replicas"], strict=True):
            shown["samples"] = one.samples
        return finite(whole)


@cache  # reading the metadata of distributions takes longer than the rest
def _own_versions() -> dict[str, str]:
    return {"torchrl": version("torchrl"), "torchrl_vllm_sync": version("torchrl-vllm-sync")}


def finite(value: Any) -> Any:
    """Returns what JSON makes of it, with None for figures that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


_NAMES = [one.name for one in dataclasses.fields(ReplicaStatus)]


def _of_replica(known: LoadSnapshot, member: Member | None, now: float) -> ReplicaStatus:
    """Reads each figure by its name from whoever has it, and from the ledger what it has itself."""
    sources: list[Any] = []
    if member is not None:
        sources += [member.description, member]
    if is_fresh := known.is_fresh(now, MAX_AGE_S):
        sources += [known.report, known.report.counters]
    figures = {name: getattr(one, name) for one in sources for name in _NAMES if hasattr(one, name)}
    own = ("replica_id", "state", "reason", "in_flight", "weight_version")
    figures |= {name: getattr(known, name) for name in own}
    if known.measured_at is not None:
        figures["report_age_s"] = max(0.0, now - known.measured_at)
    if member is not None:
        figures["node"] = member.description.node_ip
    if is_fresh:
        figures |= token_rates(known.counted) | {"elsewhere": known.num_elsewhere}
    return ReplicaStatus(**figures)

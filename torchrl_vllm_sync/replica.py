"""A replica as the whole library knows it: its id, actor, state, last report and last push."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one replica answered to one push; times are seconds of wall clock as it measured them.

    Attributes:
        version: Policy version it holds now; ``None`` when that is not known.
        loaded: Whether anything was loaded; ``False`` when it held the version already.
        verify_s, stage_s: Reading and checking stored tensors, and receiving into spare memory,
            while generation goes on.
        ready_s: Of ``stage_s``, until the trainer's word to begin.
        pause_s: From the request to pause until no step is running.
        load_s, resume_s: Loading into the model, the slowest worker; labelling and resuming.
        whole_pause_s: All of the pause: ``pause_s``, ``load_s`` and ``resume_s``. Of weights that
            were swapped between two steps ``load_s``, for which workers stood still at most.
        num_tensors, attempts: Tensors loaded by each worker, and the most loads that one took.
        num_kept: Samples of requests that went on with the tokens and keys they had.
        num_restarted: Those without a token yet, which began again under the new weights.
        path: How the weights got into the model: ``plan`` for copies straight into place,
            ``layerwise`` for vLLM's reload; empty when nothing was loaded.
        path_reason: Why it was not the plan; empty when it was, or when it was not asked for.
        began_at: When the first of these phases, which follow each other, began, in Unix seconds by
            its host's clock; ``None`` when nothing was loaded.
        replica_id, error: Which replica, and why it did not reach the push's version, if so.
        is_expected: Whether that counts; not while it starts: it will catch up before it serves.
        is_silent: Whether its actor or its engine did not answer in time.
    """

    version: int | None
    loaded: bool = True
    verify_s: float = 0.0
    stage_s: float = 0.0
    ready_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    whole_pause_s: float = 0.0
    num_tensors: int = 0
    num_kept: int = 0
    num_restarted: int = 0
    attempts: int = 0
    path: str = ""
    path_reason: str = ""
    began_at: float | None = None
    replica_id: str = ""
    error: str = ""
    is_expected: bool = True
    is_silent: bool = False

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, by names that end in ``_s``, and counts; empty for one that failed."""
        return {} if self.error else {name: float(getattr(self, name)) for name in _MEASURED}

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of those phases that took time and follow each other, in their order."""
        return {name: seconds for name in LOAD_STEPS if (seconds := self.phases.get(name, 0.0))}


# What a replica does one after the other; it is paused during the last three.
LOAD_STEPS = ("verify_s", "stage_s", "pause_s", "load_s", "resume_s")
_FACTS = {"version", "path", "path_reason", "began_at"}
_FACTS |= {"replica_id", "error", "is_expected", "is_silent"}
_MEASURED = [one.name for one in fields(LoadReport) if one.name not in _FACTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push that has ended: committed, unless there is an ``error``.

    Attributes:
        began_at, seconds: When it began, in Unix seconds by the trainer's clock, and how long it
            took.
        version: Policy version; ``None`` if it failed before it had one.
        transport, num_bytes: Name of the transport, and bytes of all tensors, once; ``None`` if it
            failed.
        phases: Seconds by phase on the trainer's side, by names that end in ``_s``; and counts.
            ``open_s`` comes before the transport's own; the first time it chooses a transport,
            forms its group and asks replicas what they hold. ``compare_s`` reads all weights once,
            to know a retry by; ``audit_s`` compares them. Where engines sleep, ``wake_s`` (within
            ``open_s``) wakes the weights' memory and ``wake_cache_s`` that of keys and values, and
            ``sleep_s`` is what it took to begin the sleep. After a second attempt ``lost_s`` is
            from the beginning of the first to that of the last.
        replicas: What each replica answered.
        left_behind: Id of each replica that did not reach the version, and takes no requests until
            it does, to the reason. After a strict push only replicas that were starting.
        phase_starts: Seconds from the beginning of the push to that of each phase, where known.
        error: Why nothing was committed; empty if the version was.
    """

    began_at: float
    seconds: float
    version: int | None = None
    transport: str | None = None
    num_bytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    replicas: list[LoadReport] = field(default_factory=list)
    left_behind: dict[str, str] = field(default_factory=dict)
    phase_starts: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def ended_at(self) -> float:
        """When it ended, in Unix seconds by the trainer's clock."""
        return self.began_at + self.seconds

    @property
    def pause_s(self) -> float | None:
        """Seconds for which generation paused, on the replica where that was longest."""
        return max((one.whole_pause_s for one in self.replicas if not one.error), default=None)

    @property
    def slowest(self) -> LoadReport | None:
        """The replica that took longest; ``None`` if none loaded anything."""
        loaded = [one for one in self.replicas if one.steps]
        return max(loaded, key=lambda one: sum(one.steps.values()), default=None)

    @property
    def gigabytes_per_s(self) -> float | None:
        """Bytes of the weights by the seconds of the whole push, in 10^9 bytes per second."""
        return None if self.num_bytes is None else self.num_bytes / self.seconds / 1e9


def seconds_of(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that are seconds, without the unit in their names; others are counts."""
    return {name.removesuffix("_s"): value for name, value in phases.items() if name.endswith("_s")}


# Seconds that count, at most, between two looks at a silence: we may have been stopped ourselves.
MAX_STEP_S = 1.0
# Seconds of silence after which an engine, or an actor, has failed unless told otherwise.
UNRESPONSIVE_AFTER_S = 60.0


class Silence:
    """Seconds for which an answer has been owed, not counting those of our own absence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Begins again at 0 seconds."""
        self._looked_at, self._seconds = self._clock(), 0.0

    def look(self) -> float:
        """Returns the seconds so far."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, MAX_STEP_S)
        self._looked_at = now
        return self._seconds


class ReplicaState(StrEnum):
    """Lifecycle of a replica; only ``SERVING`` and ``UPDATING`` replicas may be sent requests.

    Requests that reach an ``UPDATING`` replica wait inside it until the new weights are committed.
    """

    STARTING = "starting"
    SERVING = "serving"
    UPDATING = "updating"
    DRAINING = "draining"
    STALE = "stale"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def admits_requests(self) -> bool:
        """Whether a new request may be sent to a replica in this state."""
        return self in (ReplicaState.SERVING, ReplicaState.UPDATING)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What an engine has done since it started; each number only grows."""

    num_prompt_tokens: int = 0  # of prompts whose prefill has ended, cached ones included
    num_generated_tokens: int = 0
    num_preempted: int = 0  # times a request lost its KV-cache blocks, to be computed anew
    prefix_cache_queries: int = 0  # tokens of prompts that were looked up in the prefix cache
    prefix_cache_hits: int = 0  # those of them that were found there

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of looked-up tokens found in the prefix cache, 0 to 1; ``None`` before any."""
        queries = self.prefix_cache_queries
        return self.prefix_cache_hits / queries if queries else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long something took of late: in half of the cases at most, and in 99 % of them."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one replica last said of itself; ``None`` wherever the engine has not said yet."""

    replica_id: str
    state: ReplicaState  # held by the engine actor
    weight_version: int | None = None  # policy version of its weights
    base_version: int | None = None  # of those without adapters
    adapters: dict[str, int] | None = None  # name to version of the newest of each
    asleep: bool = False  # whether memory of weights, or of keys and values, is put to sleep
    num_unfinished: int | None = None  # requests inside the engine, exact when it reported
    # From the scheduler's last statistics: its running batch, its queue, and the share of KV-cache
    # blocks in use, 0 to 1; and how old these were when it reported.
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    stats_age_s: float | None = None
    reason: str = ""  # why it is STALE or FAILED
    # Samples whose version spans, as counted in the replica, were not those that vLLM reported.
    num_span_disagreements: int = 0
    membership_epoch: int = 0  # changes of the service's membership that it knows of
    counters: EngineCounters | None = None
    # Of the last 256 requests, from their arrival on, and of the last 4,096 tokens after a first.
    time_to_first_token: Latency | None = None
    inter_token_latency: Latency | None = None
    last_push: PushReport | None = None  # that it knows of, which need not have reached it


def process_began(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat`` (proc(5)); ``None`` when the process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in field 2 may itself hold spaces and brackets, so count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    # A zombie with other threads (field 20) is none yet: they may still be at work.
    if fields[0] in {"Z", "X"} and int(fields[17]) <= 1:
        return None
    return int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, which a later one of the same number is not taken for."""

    pid: int
    began: int  # in clock ticks since its machine booted


@dataclass(frozen=True, slots=True)
class ReplicaProcesses:
    """Everything that runs for one replica."""

    node_id: str  # Ray's
    processes: tuple[ProcessId, ...]  # the actor first, then whatever it started
    # Paths of shared memory and semaphores among them, which stay behind if they are killed.
    shared_memory: tuple[str, ...] = ()


# Why a trainer cannot write to an engine's memory that was launched as usual.
NOT_STAGED = "it was launched without stage_weights=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Facts about one replica's engine that do not change while it lives."""

    replica_id: str
    node_ip: str  # reachable from the other nodes of the Ray cluster
    pid: int  # of its actor
    max_model_len: int  # longest sequence, prompt and output together, in tokens
    vocab_size: int
    block_size: int  # tokens in one KV-cache block
    num_kv_blocks: int | None  # None if vLLM does not say
    vllm_version: str
    device_type: str = "cpu"  # where its weights are: "cpu" or "cuda"
    num_workers: int = 1  # tensor x pipeline x data parallel size
    node_id: str = ""  # of its machine, or container; empty if unknown
    device_uuids: tuple[str, ...] = ()  # GPUs of its workers
    model: str = ""  # name or path of its checkpoint; empty if unknown
    why_not_written: str = NOT_STAGED  # by the p2p transport; empty if nothing speaks against it
    device_name: str = ""  # of its first worker: the GPU's, or a CPU's cores; empty if unknown
    processes: ReplicaProcesses | None = None  # None if unknown


@dataclass(frozen=True, slots=True)
class Replica:
    """One Ray actor with one vLLM engine; its id is never reused within a service."""

    replica_id: str
    actor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Replica):
    """One replica of a service."""

    description: EngineDescription
    group: Any = None  # placement group that holds its resources, if it claims any
    # Whether it may be called: not from its actor's end until another has taken that one's place.
    joined: bool = True
    held: bool = False  # alive though not joined: kept at its version, for ``pinned`` alone
    num_restarts: int = 0  # how often its actor was replaced

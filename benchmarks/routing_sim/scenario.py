"""What is asked of a cluster, and what befalls it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.routing_sim.workload import Session

__all__ = ["Batches", "Churn", "Reports", "Routers", "Scenario", "Updates"]


@dataclass(frozen=True, slots=True)
class Routers:
    """The processes that route, each with a policy of its own.

    Attributes:
        count: How many.
        split: Which of them gets a request: the same for a ``session``, the same for a ``group``,
            or a ``random`` one for each request.
    """

    count: int = 1
    split: Literal["session", "group", "random"] = "session"


@dataclass(frozen=True, slots=True)
class Reports:
    """How routers hear of the engines.

    Attributes:
        interval_s: Every engine is asked that often by each router.
        delay_s: Its answer is as old when it arrives.
        loss: Share of the answers that never arrive, 0 to 1.
    """

    interval_s: float = 1.0
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Updates:
    """New weights by the clock.

    Attributes:
        every_s: Time from one update to the next.
        pause_s: All engines stand still for as long, between two steps.
        clear: What runs is computed again; otherwise it keeps its keys and values. Either way no
            request that starts later finds what was computed before.
    """

    every_s: float
    pause_s: float = 0.5
    clear: bool = False


@dataclass(frozen=True, slots=True)
class Batches:
    """New weights whenever a batch of sessions is done and trained on: asynchronous RL.

    Sessions belong to batches in their order. Batch ``b`` may start only when at most
    ``max_staleness`` batches before it have not been trained on yet; so 0 is synchronous.

    Attributes:
        size: Sessions in a batch.
        max_staleness: Bound on the versions between what samples a session and what trains on it.
        train_s: Seconds of training, beside which engines go on.
        pause_s: All engines then stand still for as long.
    """

    size: int
    max_staleness: int = 1
    train_s: float = 5.0
    pause_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Churn:
    """A replica that dies or joins.

    Attributes:
        at_s: When.
        replica_id: Who.
        joins: It joins, empty, and is announced at once; otherwise it dies with all it has.
        detection_s: A death is known after that time. What was sent there meanwhile is lost too.
    """

    at_s: float
    replica_id: int
    joins: bool = False
    detection_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One trace.

    Attributes:
        name: Of the trace.
        sessions: In the order in which they start.
        num_replicas: At the start; their ids count from 0.
        concurrency: Sessions at a time, the next starts when one ends; None: each at its arrival.
        keys: What routers see: session and group, the group alone, or nothing.
        routers: Who routes.
        reports: What they hear of engines; None: nothing.
        updates: Weight updates by the clock, if any.
        batches: Weight updates by batches, if any.
        churn: Deaths and joins.
    """

    name: str
    sessions: tuple[Session, ...]
    num_replicas: int
    concurrency: int | None
    keys: Literal["session", "group", "none"] = "session"
    routers: Routers = field(default_factory=Routers)
    reports: Reports | None = field(default_factory=Reports)
    updates: Updates | None = None
    batches: Batches | None = None
    churn: tuple[Churn, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what cannot be run.

        Raises:
            ValueError: Named in the message.
        """
        if not self.sessions:
            raise ValueError(f"trace {self.name!r} has no sessions")
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.updates is not None and self.updates.every_s <= self.updates.pause_s:
            raise ValueError(f"every_s must be greater than pause_s, got {self.updates}")
        if self.batches is not None and self.concurrency is None:
            raise ValueError("batches need sessions that start one after the other, not by clock")
        alive = set(range(self.num_replicas))
        buried: dict[int, float] = {}
        for event in sorted(self.churn, key=lambda event: event.at_s):
            early = event.at_s <= buried.get(event.replica_id, -1.0)
            if event.joins == (event.replica_id in alive) or early:
                raise ValueError(f"{event} is not possible with replicas {sorted(alive)}")
            alive ^= {event.replica_id}
            buried[event.replica_id] = event.at_s + event.detection_s
            if not alive:
                raise ValueError(f"after {event} no replica is left")

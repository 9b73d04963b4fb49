"""What is known of one replica's load."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchrl_vllm_sync.replica import EngineCounters, PushStatus, ReplicaState
    from torchrl_vllm_sync.token_rates import Counted

__all__ = ["MAX_KV_USAGE", "LoadSnapshot", "describe_replicas"]

MAX_KV_USAGE = 0.9
"""Replicas whose KV cache would be fuller than this get nothing while others would not be."""


@dataclass(slots=True, kw_only=True)
class LoadSnapshot:
    """What is known of one replica's load at one moment.

    Those that a strategy is given are the ledger's own: they stay as they are while it decides and
    change afterwards. ``LoadTracker.snapshots`` returns copies.

    Attributes:
        replica_id: Stable id of the replica.
        state: Its state, from its last report or from a caller who saw it change since.
        in_flight: Samples that this process reserved and has not released; exact. A request for
            one sample is one of them.
        held_tokens: Tokens, of prompts and expected of answers, of these samples.
        num_elsewhere: Samples of other processes, estimated when the last report came: those in the
            engine beyond the ones that this process had in flight. None until reported.
        num_unfinished: Samples inside the engine, from every process; None until reported.
        num_running: Samples in the engine's running batch; None until reported.
        num_waiting: Samples queued in the engine; None until reported.
        kv_cache_usage: Share of KV-cache blocks in use, 0 to 1; None until reported.
        weight_version: Policy version it serves with; None before the first push or report.
        measured_at: Time of the last report, by the ledger's clock; None before it.
        held_when_measured: ``held_tokens`` at the time of the last report.
        kv_cache_tokens: Tokens for which its KV cache has room; None if unknown.
        block_size: Tokens in a block of its KV cache; None if unknown.
        membership_epoch: Changes of the service's membership that it had been told of.
        reason: Why it is ``STALE`` or ``FAILED``; empty otherwise.
        away_since: Time, by the ledger's clock, since which it is ``FAILED`` only because its actor
            cannot be reached and may be back; None otherwise.
        counted: The engine's counters of the last few seconds' reports, oldest first.
        last_push: The last push that the replica was told of; None before one.
    """

    replica_id: str
    state: ReplicaState
    in_flight: int = 0
    held_tokens: int = 0
    num_elsewhere: int | None = None
    num_unfinished: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    weight_version: int | None = None
    measured_at: float | None = None
    held_when_measured: int = 0
    kv_cache_tokens: int | None = None
    block_size: int | None = None
    membership_epoch: int = 0
    reason: str = ""
    away_since: float | None = None
    counted: tuple[Counted, ...] = ()
    last_push: PushStatus | None = None

    @property
    def counters(self) -> EngineCounters | None:
        """What the engine has done since it started, as of its last report; None until reported."""
        return self.counted[-1].counters if self.counted else None

    @property
    def cache_version(self) -> int:
        """Version that its cache is of; as long as none is known, that of the first weights."""
        return self.weight_version or 0

    def hold(self, num_samples: int, tokens: int) -> None:
        """Counts samples, and the tokens that they hold, as in flight; only its ledger does so.

        Args:
            num_samples: How many more; negative for those that have ended.
            tokens: What they hold.
        """
        self.in_flight += num_samples
        self.held_tokens += tokens

    def is_fresh(self, now: float, max_age_s: float) -> bool:
        """Whether the last report is at most ``max_age_s`` older than ``now``, by the clock.

        Args:
            now: Time by the ledger's clock.
            max_age_s: Seconds.
        """
        return self.measured_at is not None and now - self.measured_at <= max_age_s

    def load(self, now: float, max_age_s: float) -> int:
        """Returns the samples that this replica holds, as well as this process can tell.

        Those counted here, which is exact, and those of other processes as of the last report, as
        long as that is fresh: so the error is what other processes sent or got back since then.

        Args:
            now: Time by the ledger's clock.
            max_age_s: Older reports count as unknown.
        """
        if self.num_elsewhere and self.is_fresh(now, max_age_s):
            return self.in_flight + self.num_elsewhere
        return self.in_flight

    def predicted_usage(self, now: float, max_age_s: float) -> float | None:
        """Share of the KV cache that its requests use, or will; above 1 if they will have to wait.

        The engine's own figure while it is fresh, and what this process has reserved since.
        Otherwise all that this process has reserved. Blocks that requests share count once in the
        first and several times in the second. None if neither is known.

        Args:
            now: Time by the ledger's clock.
            max_age_s: Older reports count as unknown.

        Returns:
            Share of the KV cache, 0 to 1 or more; None if unknown.
        """
        reserved = 0.0
        if self.kv_cache_usage is not None and self.is_fresh(now, max_age_s):
            if self.kv_cache_tokens:
                since = self.held_tokens - self.held_when_measured
                reserved = max(0, since) / self.kv_cache_tokens
            return self.kv_cache_usage + reserved
        return self.held_tokens / self.kv_cache_tokens if self.kv_cache_tokens else None

    def has_room(self, tokens: int, now: float, max_age_s: float) -> bool:
        """Whether the KV cache would be at most 90 % full with so many tokens more.

        One of which nothing is known counts as having room.

        Args:
            tokens: Tokens more.
            now: Time by the ledger's clock.
            max_age_s: Older reports count as unknown.
        """
        room = self.kv_cache_tokens
        if self.kv_cache_usage is None:  # the usual case, without a report: quick
            return room is None or self.held_tokens + tokens <= MAX_KV_USAGE * room
        usage = self.predicted_usage(now, max_age_s)
        if usage is not None and room:
            usage += tokens / room
        return usage is None or usage <= MAX_KV_USAGE

    def as_stats(self, now: float | None = None) -> dict[str, Any]:
        """Returns what is known, under the names that TorchRL's statistics of a balancer have.

        Args:
            now: Time by the ledger's clock; None means ``time.monotonic()``.
        """
        now = time.monotonic() if now is None else now
        return {
            "replica_id": self.replica_id,
            "state": str(self.state),
            "reason": self.reason,
            "pending_requests": self.in_flight,
            "num_unfinished": self.num_unfinished,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "cache_usage": self.kv_cache_usage,
            "weight_version": self.weight_version,
            "age_s": None if self.measured_at is None else now - self.measured_at,
        }

    def reaches(self, version: int) -> bool:
        """Whether the replica is known to hold ``version`` or a later one.

        Args:
            version: Policy version.
        """
        return self.weight_version is not None and self.weight_version >= version

    def describe(self) -> str:
        """Returns in words what the replica holds and is, as far as is known here."""
        if self.weight_version is None:
            return f"has not said what it holds and is {self.state}"
        return f"holds version {self.weight_version} and is {self.state}"


def describe_replicas(snapshots: Sequence[LoadSnapshot], exclude: Collection[str]) -> str:
    """Says in words why each replica can or cannot take a request."""
    if not snapshots:
        return "there is none"
    return ", ".join(
        f"replica {snapshot.replica_id} is {snapshot.state}"
        + (f" ({snapshot.reason})" if snapshot.reason else "")
        + (" and excluded" if snapshot.replica_id in exclude else "")
        for snapshot in snapshots
    )

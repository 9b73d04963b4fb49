"""What became of one push, as every process that has the service may know it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PushStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStatus:
    """One push that has ended, well or not.

    Attributes:
        ended_at: When it ended, in seconds since 1970, by the clock of the process that pushed.
        seconds: Wall clock of the whole push.
        version: Policy version; ``None`` if it failed before it had one.
        transport: Name of the transport; ``None`` if it failed.
        num_bytes: Bytes of all tensors, once; ``None`` if it failed.
        phases: Seconds by phase on the trainer's side. Some are parts of others.
        replicas: Replica id to the seconds by phase that it measured itself.
        left_behind: Id of each replica that did not reach the version, to the reason.
        error: Why nothing was committed; empty if the version was.
    """

    ended_at: float
    seconds: float
    version: int | None = None
    transport: str | None = None
    num_bytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, dict[str, float]] = field(default_factory=dict)
    left_behind: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def pause_s(self) -> float | None:
        """Seconds for which generation paused, on the replica where that was longest."""
        pauses = [one["whole_pause"] for one in self.replicas.values() if "whole_pause" in one]
        return max(pauses, default=None)

"""How a status reads: the same columns, numbers and words in a terminal and on a page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.status import ReplicaStatus, ServiceStatus
    from torchrl_vllm_sync.status_log import FailureStatus

__all__ = [
    "COLUMNS",
    "UNKNOWN",
    "clock_text",
    "failure_text",
    "headline",
    "milliseconds_text",
    "number_text",
    "printable",
    "push_text",
    "replica_cells",
    "share_text",
]

UNKNOWN = "\N{EN DASH}"
"""What stands for a figure that is not known."""
MAX_LENGTH = 300
COLUMNS = (
    "replica",
    "state",
    "version",
    "in flight",
    "running",
    "waiting",
    "KV",
    "hits",
    "tokens/s",
    "prompt/s",
    "restarts",
    "node",
)
"""Headings of the table of replicas."""


def printable(text: str) -> str:
    """Returns a text's first line, without control characters, and cut if it is very long.

    What Ray says of a dead actor goes on for many lines; errors and the log have all of it.
    """
    text = text.lstrip().partition("\n")[0]
    clean = "".join(one if one.isprintable() else " " for one in text[: MAX_LENGTH + 1])
    return clean if len(text) <= MAX_LENGTH else f"{clean[: MAX_LENGTH - 1]}…"


def number_text(value: float | None) -> str:
    """Returns a count or a rate: whole, with thousands apart."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share_text(value: float | None) -> str:
    """Returns a share of 0 to 1 in percent."""
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def milliseconds_text(seconds: float | None) -> str:
    """Returns seconds as milliseconds, or as seconds from 10 s on."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def clock_text(at: float) -> str:
    """Returns a time in seconds since 1970 as hours, minutes and seconds of this machine's zone."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def replica_cells(replica: ReplicaStatus) -> tuple[str, ...]:
    """Returns a replica's row in the table: one text for each of ``COLUMNS``."""
    return (
        printable(replica.replica_id),
        str(replica.state),
        UNKNOWN if replica.weight_version is None else str(replica.weight_version),
        number_text(replica.samples),
        number_text(replica.num_running),
        number_text(replica.num_waiting),
        share_text(replica.kv_cache_usage),
        share_text(replica.prefix_cache_hit_rate),
        number_text(replica.generated_tokens_per_s),
        number_text(replica.prompt_tokens_per_s),
        number_text(replica.num_restarts),
        UNKNOWN if replica.node is None else printable(replica.node),
    )


def headline(status: ServiceStatus) -> str:
    """Returns what matters most of a service, on one line, without its name."""
    return (
        f"version {status.weight_version}, "
        f"{status.num_serving} of {len(status.replicas)} replicas serve, "
        f"{number_text(status.samples)} in flight, "
        f"{number_text(status.generated_tokens_per_s)} tokens/s, "
        f"at {clock_text(status.time)}"
    )


def push_text(push: PushStatus) -> str:
    """Returns what became of a push, on one line."""
    from rich import filesize  # not with the service, which needs none of rich

    version = UNKNOWN if push.version is None else push.version
    if push.error:
        return f"version {version} failed at {clock_text(push.ended_at)}: {printable(push.error)}"
    size = "" if push.num_bytes is None else f", {filesize.decimal(push.num_bytes)}"
    pause = "" if push.pause_s is None else f", pause {milliseconds_text(push.pause_s)}"
    left = f", {len(push.left_behind)} left behind" if push.left_behind else ""
    return (
        f"version {version} at {clock_text(push.ended_at)} in {milliseconds_text(push.seconds)} "
        f"by {printable(push.transport or UNKNOWN)}{size}{pause}{left}"
    )


def failure_text(failure: FailureStatus) -> str:
    """Returns what went wrong, on one line."""
    who = "push" if failure.replica_id is None else f"replica {printable(failure.replica_id)}"
    what = "failed" if failure.what == "push" else failure.what
    why = f": {printable(failure.reason)}" if failure.reason else ""
    return f"{clock_text(failure.at)} {who} {what}{why}"

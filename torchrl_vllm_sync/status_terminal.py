"""A status in a terminal, drawn by ``rich``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torchrl_vllm_sync.status_text import (
    COLUMNS,
    failure_text,
    headline,
    milliseconds_text,
    printable,
    push_text,
    replica_cells,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.status import ServiceStatus

__all__ = ["services_view", "status_view"]

MAX_FAILURES = 5
BAR_WIDTH = 40
WIDE = 100
_FOR_WIDE = ("prompt/s", "restarts", "node")
_STYLES = {
    "serving": "green",
    "updating": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "stale": "red",
    "failed": "bold red",
    "closed": "dim",
}


def status_view(status: ServiceStatus, width: int = WIDE) -> RenderableType:
    """Returns a service's status: replicas, the last push by phase, and what went wrong.

    All texts are shown as they are: none is taken for markup or for terminal codes.

    Args:
        status: The status.
        width: Columns of the terminal; on a narrow one the table leaves some figures out.
    """
    title = Text.assemble((printable(status.name), "bold"), " ", headline(status))
    parts: list[RenderableType] = [title, _replicas(status, width)]
    if status.pushes:
        parts += _last_push(status.pushes[0])
        parts += [Text(f"before it: {push_text(one)}", "dim") for one in status.pushes[1:4]]
    else:
        parts.append(Text("no push yet that this process heard of", "dim"))
    reasons = {one.replica_id: one.reason for one in status.replicas if one.reason}
    for replica_id, reason in reasons.items():
        parts.append(Text(f"replica {printable(replica_id)}: {printable(reason)}", "red"))
    if status.failures:
        parts.append(Text("lately", "bold"))
        parts += [Text(failure_text(one), "red") for one in status.failures[:MAX_FAILURES]]
    return Group(*parts)


def services_view(services: Mapping[str, int]) -> RenderableType:
    """Returns a list of services.

    Args:
        services: Name of each to the number of its replicas whose actors are alive.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("service")
    table.add_column("replicas alive", justify="right")
    for name, num_replicas in services.items():
        table.add_row(Text(printable(name), "bold"), Text(str(num_replicas)))
    return table


def _replicas(status: ServiceStatus, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    shown = [at for at, one in enumerate(COLUMNS) if width >= WIDE or one not in _FOR_WIDE]
    for column in (COLUMNS[at] for at in shown):
        left = column in ("replica", "state", "node")
        justify = "left" if left else "right"
        table.add_column(column, justify=justify, no_wrap=column == "state", overflow="fold")
    for replica in status.replicas:
        style = _STYLES[replica.state]
        cells = replica_cells(replica)
        table.add_row(*(Text(cells[at], style if COLUMNS[at] == "state" else "") for at in shown))
    return table


def _last_push(push: PushStatus) -> list[RenderableType]:
    """One line for the push, and a bar for each of its phases, as long as its part of the whole."""
    line = Text.assemble(("last push ", "bold"), (push_text(push), "red" if push.error else ""))
    if not push.phases:
        return [line]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in push.phases.items():
        part = min(max(seconds / push.seconds, 0.0), 1.0) if push.seconds > 0 else 0.0
        bar = Text("━" * max(round(part * BAR_WIDTH), 1), "blue")
        table.add_row(Text(f"  {printable(name)}", "dim"), Text(milliseconds_text(seconds)), bar)
    return [line, table]

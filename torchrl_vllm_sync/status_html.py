"""A status as a small table for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torchrl_vllm_sync.status_text import COLUMNS, headline, push_text, replica_cells

if TYPE_CHECKING:
    from torchrl_vllm_sync.status import ReplicaStatus, ServiceStatus

__all__ = ["absent_html", "status_html"]

_CELL = "padding:2px 8px;text-align:right;white-space:nowrap"


def status_html(status: ServiceStatus) -> str:
    """Returns a page's fragment: a line, a table of replicas, and the last push."""
    heads = "".join(f'<th style="{_CELL}">{escape(one)}</th>' for one in COLUMNS)
    rows = "".join(_row(one) for one in status.replicas)
    pushed = f"<div>last push: {escape(push_text(status.pushes[0]))}</div>" if status.pushes else ""
    return (
        f"<div><b>AsyncVLLM {escape(status.name)}</b> {escape(headline(status))}"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{pushed}</div>"
    )


def absent_html(name: str) -> str:
    """Returns what stands for a service that has no replicas."""
    return f"<div><b>AsyncVLLM {escape(name)}</b> is not launched, or was shut down</div>"


def _row(replica: ReplicaStatus) -> str:
    cells = "".join(f'<td style="{_CELL}">{escape(one)}</td>' for one in replica_cells(replica))
    return f'<tr title="{escape(replica.reason)}">{cells}</tr>'

"""The table of weight synchronisation, and a timeline of one push, from the records.

``python -m benchmarks.weight_sync_report`` prints the table of all records in
``benchmarks/results`` and draws one PNG a record beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS

if TYPE_CHECKING:
    from pathlib import Path


SYSTEMS = ("raw-nccl", "vllm-nccl", "broadcast", "broadcast-staged")
HEADS = (
    "| case | raw NCCL | `vllm-nccl` | `broadcast` | staged | running: `vllm-nccl` | `broadcast` "
    "| staged | engine step | tokens/s | while staged weights arrive |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
PHASES = {
    "stage": ("receive, generating", "tab:green"),
    "pause": ("pause", "tab:gray"),
    "load": ("receive and load, paused", "tab:red"),
    "resume": ("resume", "tab:olive"),
}


def records(paths: list[Path] | None = None) -> list[dict[str, Any]]:
    """Reads weight-sync records, those in ``benchmarks/results`` unless told otherwise."""
    chosen = sorted(RESULTS.glob("weight_sync_*.json")) if paths is None else paths
    return [json.loads(path.read_text()) for path in chosen]


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table of medians: of the whole pause in milliseconds, idle and under load.

    Under load the figure is the longest gap between two tokens of a request around a push, and
    the engine step is the median gap. The last two columns are an engine's tokens per second
    before a staged push and from its beginning to the pause.
    """
    lines = list(HEADS)
    for run in runs:
        medians = _medians(run)
        case = min((one for one, _, _ in medians), key=len)
        loaded = next((one for one, _, _ in medians if one.startswith(f"{case}, ")), case)
        cells = [
            medians.get((case, "raw-nccl", "whole")),
            *(medians.get((case, system, "whole_pause")) for system in SYSTEMS[1:]),
            *(medians.get((loaded, system, "longest gap")) for system in SYSTEMS[1:]),
            medians.get((loaded, "broadcast", "normal step")),
            medians.get((loaded, "broadcast-staged", "throughput undisturbed")),
            medians.get((loaded, "broadcast-staged", "throughput while weights arrive")),
        ]
        shown = ["" if cell is None else f"{cell:.{1 if cell < 1000 else 0}f}" for cell in cells]
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def timeline(run: dict[str, Any], path: Path) -> None:
    """Draws one push to idle engines of each system, by the medians of its phases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    medians = _medians(run)
    case = min((one for one, _, _ in medians), key=len)
    figure, axes = pyplot.subplots(figsize=(8, 2.4), layout="constrained")
    rows = []
    if (whole := medians.get((case, "raw-nccl", "whole"))) is not None:
        axes.barh(0, whole, color="tab:blue", label="bare broadcast")
        rows.append("raw NCCL")
    for system in SYSTEMS[1:]:
        if (case, system, "whole_pause") not in medians:
            continue
        left = 0.0
        for phase, (label, colour) in PHASES.items():
            width = medians.get((case, system, phase), 0.0)
            new = label not in axes.get_legend_handles_labels()[1]
            if width:
                axes.barh(len(rows), width, left=left, color=colour, label=label if new else None)
            left += width
        rows.append(system)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms, one push to idle engines, {case} on {run['hardware']}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=5, fontsize=7, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _medians(run: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    return {
        (one["case"], one["system"], one["metric"]): statistics.median(one["samples"])
        for one in run["records"]
    }


def main() -> int:
    """Prints the table and draws the timelines."""
    paths = sorted(RESULTS.glob("weight_sync_*.json"))
    for path, run in zip(paths, records(paths), strict=True):
        timeline(run, path.with_suffix(".png"))
    print(table(records(paths)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

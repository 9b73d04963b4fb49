"""The table of weight synchronisation, and its pictures, from the records.

``python -m benchmarks.weight_sync_report`` prints the table of all records in
``benchmarks/results``, and draws ``weight_sync_pauses.png`` of all, and a ``..._tokens.png`` of
each that says what running engines did around a push.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS, medians_of, picture, runs_of
from benchmarks.weight_sync import AROUND_MS

if TYPE_CHECKING:
    from pathlib import Path


# The table's columns: each system's name and colour in pictures.
SYSTEMS = {
    "raw-nccl": ("raw NCCL, no engine", "tab:gray"),
    "vllm-nccl": ("vLLM's NCCL engine", "tab:red"),
    "broadcast": ("broadcast", "tab:blue"),
    "broadcast-staged": ("broadcast, staged", "tab:green"),
    "p2p": ("p2p", "tab:purple"),
}
SHOWN = {"torchrl": ("TorchRL's own service and updater", "tab:orange"), **SYSTEMS}
HEADS = (
    "| case | raw NCCL | `vllm-nccl` | `broadcast` | staged | `p2p` | running: `vllm-nccl` "
    "| `broadcast` | staged | `p2p` | engine step | speed, staged | `p2p` |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table of medians: of the whole pause in milliseconds, idle and under load.

    Under load the figure is the longest gap between two tokens of a request around a push, and
    the engine step is the median gap. The last two columns are an engine's tokens per second while
    weights arrive, in per cent of those before.
    """
    lines = list(HEADS)
    engines = [*SYSTEMS][1:]
    for run in runs:
        medians = medians_of(run)
        case = min((one for one, _, _ in medians), key=len)
        loaded = next((one for one, _, _ in medians if one.startswith(f"{case}, ")), case)
        cells = [
            medians.get((case, "raw-nccl", "whole")),
            *(medians.get((case, system, "whole_pause")) for system in engines),
            *(medians.get((loaded, system, "longest gap")) for system in engines),
            medians.get((loaded, "broadcast", "normal step")),
        ]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        for system in ("broadcast-staged", "p2p"):
            alone = medians.get((loaded, system, "throughput undisturbed"))
            arriving = medians.get((loaded, system, "throughput while weights arrive"), 0.0)
            speed = 100 * arriving / alone if alone else None  # where it was not noted
            speed = medians.get((loaded, system, "speed while weights arrive"), speed)
            shown.append("" if speed is None else f"{speed:.0f} %")
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def pauses(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the whole pause of idle engines for each case and system, the least bytes first."""
    found = {}
    for run in runs:
        medians = medians_of(run)
        case = min((one for one, _, _ in medians), key=len)
        if bare := medians.get((case, "raw-nccl", "whole")):
            engines = (medians.get((case, one, "whole_pause")) for one in [*SYSTEMS][1:])
            found[case] = [bare, *engines]
    cases = sorted(found, key=lambda case: found[case][0])

    with picture(path, figsize=(8, 3.2)) as (figure, axes):
        for number, (label, colour) in enumerate(SYSTEMS.values()):
            points = [
                (place, found[case][number])
                for place, case in enumerate(cases)
                if found[case][number]
            ]
            axes.scatter(*([one[i] for one in points] for i in (0, 1)), color=colour, label=label)
            for place, pause in points:
                text = f"{pause:.0f}" if pause > 100 else f"{pause:.1f}"
                left = label.startswith("raw")  # it lies beside the broadcast's
                where = {"ha": "right" if left else "left", "va": "center"}
                at = place + (-0.06 if left else 0.06)
                axes.text(at, pause, text, color=colour, fontsize=8, **where)
        axes.set_yscale("log")
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlim(-0.5, len(cases) - 0.5)
        axes.set_xticks(range(len(cases)), [one.replace("-graphs", "\ngraphs") for one in cases])
        axes.set_ylabel("pause of idle engines, ms")
        figure.legend(loc="outside upper center", ncols=5, fontsize=7, frameon=False)


def tokens(run: dict[str, Any], path: Path) -> None:
    """Draws tokens per second of running engines around one push of each system, if noted."""
    noted = {
        one["system"]: one["samples"]
        for one in run["records"]
        if one["metric"] == "tokens around a push" and one["system"] in SHOWN
    }
    if not noted:
        return
    shared: Any = {"sharex": True, "sharey": True, "squeeze": False}
    with picture(path, len(noted), figsize=(8, 1 + 0.8 * len(noted)), **shared) as (figure, rows):
        for system, (axes,) in zip(sorted(noted, key=[*SHOWN].index), rows, strict=True):
            (label, colour), rates = SHOWN[system], noted[system]
            places = [one + AROUND_MS.step / 2 for one in AROUND_MS]
            axes.fill_between(places, [one / 1e3 for one in rates], color=colour, alpha=0.7)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_title(label, loc="left", fontsize=9, color=colour)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0)
        rows[0][0].set_ylim(0, 1.05e-3 * max(map(max, noted.values())))
        rows[-1][0].set_xlabel(f"ms since the trainer began to push, {run['hardware']}")
        figure.supylabel("thousand tokens/s", fontsize=9)


def main() -> int:
    runs = runs_of("weight_sync")
    for path, run in runs.items():
        tokens(run, path.with_name(f"{path.stem}_tokens.png"))
    pauses([*runs.values()], RESULTS / "weight_sync_pauses.png")
    print(table([*runs.values()]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

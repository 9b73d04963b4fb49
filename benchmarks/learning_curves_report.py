"""Held-out accuracy over seconds of training, as a picture of the records of ``learning_curves``.

``python -m benchmarks.learning_curves_report`` draws one PNG for each data set and machine, of the
records in ``benchmarks/results`` that are of the newest one's commit, and prints how many seconds
each set-up took to the accuracy that all reached.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS, picture, runs_of

if TYPE_CHECKING:
    from pathlib import Path

SETUPS = {
    "ours": ("this library", "tab:blue"),
    "one-off": ("this library, one step off", "tab:green"),
    "four-off": ("this library, up to four steps off", "tab:olive"),
    "discarding": ("one step off, discarding", "tab:red"),
    "torchrl-classes": ("TorchRL's classes", "tab:orange"),
    "trl": ("TRL", "tab:gray"),
}
Lines = dict[str, tuple[list[float], list[float]]]


def lines(runs: list[dict[str, Any]]) -> dict[tuple[str, str], Lines]:
    """Seconds and accuracies of each set-up's last run, by data set and hardware, of one commit."""
    found: dict[tuple[str, str], Lines] = {}
    commits: dict[tuple[str, str], str] = {}
    for run in sorted(runs, key=lambda one: one["finished_at"]):
        samples = {one["metric"]: one["samples"] for one in run["records"]}
        first = run["records"][0]
        key = first["case"], run["hardware"]
        if commits.get(key) != run["commit"]:  # what other code took is another picture
            commits[key], found[key] = run["commit"], {}
        line = samples["seconds of training"], samples["held-out accuracy"]
        found[key][first["system"]] = line
    return found


def seconds_to(accuracy: float, line: tuple[list[float], list[float]]) -> float:
    """Seconds until an accuracy that was reached, between evaluations in proportion."""
    points = [*zip(*line, strict=True)]
    for (since, before), (until, after) in pairwise(points):
        if before < accuracy <= after:
            return since + (accuracy - before) / (after - before) * (until - since)
    return points[0][0]


def draw(case: str, hardware: str, drawn: Lines, path: Path) -> None:
    with picture(path, figsize=(7, 3)) as (_, axes):
        for name, (label, colour) in SETUPS.items():
            if name in drawn:
                axes.plot(
                    *drawn[name], "o-", color=colour, label=label, markersize=3, linewidth=1.5
                )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"seconds of training, {case} on {hardware}")
        axes.set_ylabel("mean score, held out")
        axes.legend(frameon=False, fontsize=8)


def main() -> int:
    for (case, hardware), drawn in lines([*runs_of("learning_curves").values()]).items():
        draw(case, hardware, drawn, RESULTS / f"learning_curves_{case}_{hardware}.png")
        same = min(max(reached) for _, reached in drawn.values())
        for name, line in drawn.items():
            print(f"{case}, {hardware}, {name}: {seconds_to(same, line):.1f} s to {same:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

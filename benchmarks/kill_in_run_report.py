"""Reward and serving replicas of a run in which one is killed, as a picture beside its record.

``python -m benchmarks.kill_in_run_report`` draws one PNG for each record of ``kill_in_run`` in
``benchmarks/results``.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS

if TYPE_CHECKING:
    from pathlib import Path

LINES = {
    "undisturbed": ("undisturbed", "tab:gray"),
    "killed": ("a replica is killed", "tab:blue"),
}
Points = tuple[list[float], list[float]]


def series(run: dict[str, Any]) -> dict[tuple[str, str], Points]:
    """Seconds and samples, by system and metric."""
    return {(one["system"], one["metric"]): (one["at_s"], one["samples"]) for one in run["records"]}


def returned_at(serving: Points, killed_at: float) -> float:
    """When as many replicas served as before the kill, for the first time after fewer did."""
    whole, is_short = serving[1][0], False
    for at, number in zip(*serving, strict=True):
        is_short |= at >= killed_at and number < whole
        if is_short and number == whole:
            return at
    raise ValueError(f"the replica that was killed at {killed_at:g} s did not return")


def picture(run: dict[str, Any], path: Path) -> None:
    """Draws rewards, and below them the number of replicas that serve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = series(run)
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(7, 3.6), height_ratios=(3, 1), layout="constrained"
    )
    for system, (label, colour) in LINES.items():
        above.plot(*found[system, "reward"], color=colour, label=label, linewidth=1.2)
    serving = found["killed", "replicas serving"]
    end = found["killed", "reward"][0][-1]
    below.step(
        [*serving[0], end], [*serving[1], serving[1][-1]], where="post", color=LINES["killed"][1]
    )
    ((killed_at, *_), (lost, *_)) = found["killed", "rows begun again on the other replica"]
    marks = {
        killed_at: f" killed, {lost:.0f} rows begun again",
        returned_at(serving, killed_at): " serves again",
    }
    for at, text in marks.items():
        for axes in (above, below):
            axes.axvline(at, color="tab:red", linestyle=":", linewidth=1)
        above.text(
            at, 0.02, text, color="tab:red", fontsize=8, transform=above.get_xaxis_transform()
        )
    for axes in (above, below):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_ylabel("reward")
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.set_ylabel("replicas\nserving")
    below.set_ylim(0, 1.2 * max(serving[1]))
    below.set_xlim(0, 1.1 * end)
    below.set_xlabel(f"seconds, {run['records'][0]['case']} on {run['hardware']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Draws the pictures."""
    for path in sorted(RESULTS.glob("kill_in_run_*.json")):
        picture(json.loads(path.read_text()), path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

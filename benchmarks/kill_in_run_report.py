"""Reward and loss of runs with and without kills, as a picture beside their record.

``python -m benchmarks.kill_in_run_report`` draws one PNG for each record of ``kill_in_run`` in
``benchmarks/results``.
"""

from __future__ import annotations

import bisect
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.record import picture, runs_of

if TYPE_CHECKING:
    from pathlib import Path

LINES = {
    "undisturbed": {"label": "undisturbed", "color": "tab:gray", "linewidth": 4, "alpha": 0.4},
    "killed": {"label": "replicas are killed", "color": "tab:blue", "linewidth": 1.2},
    "ordinary": {"label": "killed, without seeds", "color": "tab:orange", "linewidth": 0.8},
}


def step_of(at: float, ends: list[float]) -> float:
    """A moment as a number of steps that have ended, and a share of the next."""
    number = bisect.bisect_left(ends, at)
    if number == len(ends):
        return float(number)
    begin = ends[number - 1] if number else 0.0
    return number + (at - begin) / (ends[number] - begin)


def draw(run: dict[str, Any], path: Path) -> None:
    """Draws reward and loss over steps, and below them the number of replicas that serve."""
    records = run["records"]
    found = {(one["system"], one["metric"]): (one["at_s"], one["samples"]) for one in records}
    with picture(path, 3, sharex=True, figsize=(7, 4.6), height_ratios=(3, 3, 1)) as (_, axes):
        for metric, one in zip(("reward", "loss"), axes, strict=False):
            for system, style in LINES.items():
                if (system, metric) in found:  # of a pair there is no third
                    samples = found[system, metric][1]
                    one.plot(range(1, 1 + len(samples)), samples, **style)
            one.set_ylabel(metric)
        ends = found["killed", "reward"][0]
        serving, numbers = found["killed", "replicas serving"]
        at = [*(step_of(one, ends) for one in serving), len(ends)]
        axes[2].step(at, [*numbers, numbers[-1]], where="post", color=LINES["killed"]["color"])
        for killed_at, rows in zip(*found["killed", "rows begun again"], strict=True):
            place = step_of(killed_at, ends)
            for one in axes:
                one.axvline(place, color="tab:red", linestyle=":", linewidth=1)
            where = axes[0].get_xaxis_transform()
            told = f" {rows:.0f} rows"
            axes[0].text(place, 0.02, told, color="tab:red", fontsize=7, transform=where)
        for one in axes:
            one.grid(alpha=0.2)
            one.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False, fontsize=8, loc="upper left")
        axes[2].set_ylabel("replicas\nserving")
        axes[2].set_ylim(0, 1.2 * max(numbers))
        axes[2].set_xlabel(f"steps of {run['records'][0]['case']} on {run['hardware']}; red: kills")


def main() -> int:
    for path, run in runs_of("kill_in_run").items():
        draw(run, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A table and a plot of a record of ``benchmarks.routing``: who wins where, and by how much.

``python -m benchmarks.routing_report [RECORD ...]`` prints Markdown and draws a PNG file beside
each record, of those in ``benchmarks/results`` unless named; without names also one beside each
record of ``benchmarks.routing_live``.

Differences are paired: of each seed's makespan to ours on the same seed, in percent, with the
standard error of their mean in brackets. One counts as a win or a loss if it is more than twice its
standard error; everything else is called even, and with a handful of seeds little is sure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.record import RESULTS, medians_of, picture, runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Samples: TypeAlias = "dict[tuple[str, str, str], list[float]]"
"""By case, system and metric, in the order of seeds."""

OURS = "ours"
# Of the record of real engines: its cases and systems as the guides name them.
LIVE_CASES = {
    "grpo": "48 prompts, 8 samples of each",
    "multi-turn": "64 conversations of 5 turns",
    "shared-system-prompt": "512 questions, one system prompt",
}
LIVE_SYSTEMS = {
    OURS: ("this library", "tab:blue"),
    "round-robin": ("round robin", "tab:gray"),
    "torchrl, wrapper": ("TorchRL's balancer, called by its wrapper", "tab:orange"),
    "torchrl": ("TorchRL's balancer, called with token ids", "tab:red"),
}


def read(path: Path) -> Samples:
    run = json.loads(path.read_text())
    if run["benchmark"] != "routing":
        raise ValueError(f"{path} is a record of {run['benchmark']!r}, not of 'routing'")
    return {(one["case"], one["system"], one["metric"]): one["samples"] for one in run["records"]}


def origin(path: Path) -> str:
    """One line: which command made a record, of which commit, on what."""
    run = json.loads(path.read_text())
    seeds = {len(one["samples"]) for one in run["records"]}
    words = f"`{run['command']}` at {(run['commit'] or 'no commit')[:12]} on {run['hardware']}"
    words += f", {'/'.join(map(str, sorted(seeds)))} seeds"
    return words + (", SMOKE: small traces that mean little" if run["smoke"] else "")


def recorded(directory: Path) -> list[Path]:
    """Records of this benchmark in a directory; others' names can begin alike."""
    paths = sorted(directory.glob("routing_*.json"))
    return [path for path in paths if json.loads(path.read_text())["benchmark"] == "routing"]


def paired(samples: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean difference to ``others`` in percent of them, seed by seed, and its standard error.

    The error of a single seed is infinite.
    """
    percents = [100 * (one / other - 1) for one, other in zip(samples, others, strict=True)]
    if len(percents) == 1:
        return percents[0], math.inf
    return statistics.fmean(percents), statistics.stdev(percents) / math.sqrt(len(percents))


def verdict(percent: float, error: float) -> str:
    """``"win"``, ``"loss"`` or ``"even"`` for a difference of makespans."""
    if abs(percent) <= 2 * error:
        return "even"
    return "loss" if percent > 0 else "win"


def cases_of(samples: Samples) -> list[str]:
    return list(dict.fromkeys(case for case, _, _ in samples))


def systems_of(samples: Samples) -> list[str]:
    return list(dict.fromkeys(system for _, system, _ in samples))


def table(samples: Samples) -> str:
    """A Markdown table: our makespan, cache hits and latency, and our difference to each other."""
    others = [system for system in systems_of(samples) if system != OURS]
    lines = [
        "| trace | ours | hits | p99 turn | " + " | ".join(f"to {one}" for one in others) + " |",
        "|---" * (4 + len(others)) + "|",
    ]
    for case in cases_of(samples):
        own = {
            metric: statistics.fmean(samples[case, OURS, metric])
            for metric in ("makespan", "hit_rate", "latency_p99")
        }
        cells = [
            case,
            f"{own['makespan']:.1f} s",
            f"{own['hit_rate']:.1%}",
            f"{own['latency_p99']:.1f} s",
        ]
        for other in others:
            percent, error = paired(
                samples[case, OURS, "makespan"], samples[case, other, "makespan"]
            )
            spread = f" ({error:.1f})" if math.isfinite(error) else ""
            cells.append(f"{percent:+.1f} %{spread} {verdict(percent, error)}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(samples: Samples, path: Path) -> None:
    """A heat map: mean makespan of every policy on every trace, over the trace's best."""
    cases, systems = cases_of(samples), systems_of(samples)
    means = {
        (case, one): statistics.fmean(samples[case, one, "makespan"])
        for case in cases
        for one in systems
    }
    least = {case: min(means[case, one] for one in systems) for case in cases}
    ratios = [[means[case, system] / least[case] for case in cases] for system in systems]
    size = (2.6 + 0.62 * len(cases), 1.6 + 0.3 * len(systems))
    with picture(path, dpi=100, figsize=size) as (_, axes):
        axes.imshow(ratios, cmap="YlOrRd", vmin=1.0, vmax=1.3, aspect="auto")
        axes.set_xticks(range(len(cases)), cases, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(systems)), systems, fontsize=8)
        for row, values in enumerate(ratios):
            for column, value in enumerate(values):
                ink = "white" if value > 1.18 else "black"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink
                )
        axes.set_title("makespan over the trace's best (colours end at 1.3)", fontsize=9)


def draw_live(run: dict[str, Any], path: Path) -> None:
    """Bars: median seconds that real engines took under each router."""
    medians = medians_of(run)
    with picture(path, 1, len(LIVE_CASES), figsize=(9, 2.2)) as (figure, panels):
        for axes, (case, title) in zip(panels, LIVE_CASES.items(), strict=True):
            for place, (system, (label, colour)) in enumerate(LIVE_SYSTEMS.items()):
                bar = axes.barh(
                    place, medians[case, system, "wall_time"], color=colour, label=label
                )
                axes.bar_label(bar, fmt=" %.2f s", fontsize=8)
            axes.set(
                title=title,
                yticks=[],
                xlim=(0, 1.3 * max(medians[case, one, "wall_time"] for one in LIVE_SYSTEMS)),
            )
            axes.title.set_fontsize(9)
            axes.invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and draws the plots; returns 1 if there is no record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    named = parser.parse_args(argv).records
    for path, run in {} if named else runs_of("routing_live").items():
        draw_live(run, path.with_suffix(".png"))
    paths = named or recorded(RESULTS)
    if not paths:
        print(f"no record of benchmarks.routing in {RESULTS}; name one, or make one")
        return 1
    for path in paths:
        samples = read(path)
        print(f"## {path.name}\n\n{origin(path)}\n")
        if OURS in systems_of(samples):
            print(table(samples))
        draw(samples, path.with_name(f"{path.stem}_ratios.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

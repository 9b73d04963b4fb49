"""Tables and plots of a record of ``benchmarks.routing``: who wins where, and by how much.

``python -m benchmarks.routing_report [RECORD ...]`` prints Markdown and draws two PNG files beside
each record, of those in ``benchmarks/results`` unless named.

Differences are paired: of each seed's makespan to another policy's on the same seed, in percent,
with the standard error of their mean in brackets. One counts as a win or a loss if it is more than
twice its standard error; everything else is called even, and with a handful of seeds little is
sure. Who is best on a trace is found on the same seeds, so that its lead is a little too large.

The first table is of ``ours`` against the best of the others: makespans, shares of prompt tokens
found in caches, 99th percentile of a request's latency, and our makespan over what no routing could
beat. The second is of all: differences to the best of the others, and each policy's worst trace as
a multiple of the best makespan of anybody there. The third is the real time of a decision.
``routing_sim.results`` explains each number, ``routing_sim.traces`` each trace.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.record import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Samples",
    "decisions",
    "matrix",
    "origin",
    "ours_against_best",
    "paired",
    "read",
    "verdict",
    "worst",
]

Samples: TypeAlias = "dict[tuple[str, str, str], list[float]]"
"""By case, system and metric, in the order of seeds."""

OURS = "ours"


def read(path: Path) -> Samples:
    """The samples of a record.

    Raises:
        ValueError: It is of another benchmark.
    """
    run = json.loads(path.read_text())
    if run["benchmark"] != "routing":
        raise ValueError(f"{path} is a record of {run['benchmark']!r}, not of 'routing'")
    return {(one["case"], one["system"], one["metric"]): one["samples"] for one in run["records"]}


def origin(path: Path) -> str:
    """One line: which command made a record, of which commit, on what."""
    run = json.loads(path.read_text())
    seeds = {len(one["samples"]) for one in run["records"] if one["metric"] == "makespan"}
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
    """Traces, in the record's order."""
    return list(dict.fromkeys(case for case, _, metric in samples if metric == "makespan"))


def systems_of(samples: Samples) -> list[str]:
    """Policies, in the record's order."""
    return list(dict.fromkeys(one for _, one, metric in samples if metric == "makespan"))


def best_of(samples: Samples, case: str, systems: Sequence[str]) -> str:
    """Whoever of ``systems`` has the least mean makespan on a trace."""
    return min(systems, key=lambda system: statistics.fmean(samples[case, system, "makespan"]))


def ours_against_best(samples: Samples, ours: str = OURS) -> str:
    """A Markdown table: our policy on every trace, against the best of all others there."""
    lines = [
        "| trace | best other | its makespan | ours | difference | verdict | hits: other | ours "
        "| p99 turn: other | ours | over the bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    peers = [system for system in systems_of(samples) if not system.startswith(OURS)]
    for case in cases_of(samples):
        best = best_of(samples, case, peers)
        percent, error = paired(samples[case, ours, "makespan"], samples[case, best, "makespan"])
        means = {
            (system, metric): statistics.fmean(samples[case, system, metric])
            for system in (best, ours)
            for metric in ("makespan", "hit_rate", "latency_p99", "bound_ratio")
        }
        cells = (
            case,
            best,
            f"{means[best, 'makespan']:.1f} s",
            f"{means[ours, 'makespan']:.1f} s",
            _difference(percent, error),
            f"**{verdict(percent, error)}**",
            f"{means[best, 'hit_rate']:.1%}",
            f"{means[ours, 'hit_rate']:.1%}",
            f"{means[best, 'latency_p99']:.1f} s",
            f"{means[ours, 'latency_p99']:.1f} s",
            f"{means[ours, 'bound_ratio']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def matrix(samples: Samples) -> str:
    """A Markdown table: every policy's makespan on every trace, against the best peer there.

    The best peer is the best policy that is not ours, so its own difference is 0. The last column
    is the policy's worst.
    """
    cases = cases_of(samples)
    systems = systems_of(samples)
    peers = [system for system in systems if not system.startswith(OURS)] or systems
    best = {case: best_of(samples, case, peers) for case in cases}
    lines = [
        "| policy | " + " | ".join(cases) + " | worst |",
        "|---" * (len(cases) + 2) + "|",
    ]
    for system in systems:
        cells = [system]
        for case in cases:
            if system == best[case]:
                cells.append("0")
                continue
            other = samples[case, best[case], "makespan"]
            percent, error = paired(samples[case, system, "makespan"], other)
            cells.append(f"{_difference(percent, error)} {verdict(percent, error)}")
        ratio, case = worst(samples)[system]
        cells.append(f"{ratio:.2f} ({case})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def worst(samples: Samples) -> dict[str, tuple[float, str]]:
    """Each policy's greatest mean makespan over that of the trace's best of all, and where."""
    systems = systems_of(samples)
    found: dict[str, tuple[float, str]] = dict.fromkeys(systems, (0.0, ""))
    for case in cases_of(samples):
        means = {one: statistics.fmean(samples[case, one, "makespan"]) for one in systems}
        for system in systems:
            ratio = means[system] / min(means.values())
            found[system] = max(found[system], (ratio, case))
    return found


def decisions(samples: Samples) -> str:
    """A Markdown table: real time of a decision, the median repetition's p50 and p99."""
    cases = dict.fromkeys(case for case, _, metric in samples if metric == "decision_p50")
    cases = [case for case in cases if case not in cases_of(samples)]
    lines = [
        "| policy | " + " | ".join(f"{case}: p50 | p99" for case in cases) + " |",
        "|---" * (2 * len(cases) + 1) + "|",
    ]
    for system in systems_of(samples):
        cells = [
            f"{statistics.median(samples[case, system, metric]):.3g} µs"
            for case in cases
            for metric in ("decision_p50", "decision_p99")
        ]
        lines.append("| " + " | ".join([system, *cells]) + " |")
    return "\n".join(lines) + "\n"


def draw_ratios(samples: Samples, path: Path) -> None:
    """A heat map: mean makespan of every policy on every trace, over the trace's best."""
    pyplot = _pyplot()
    cases, systems = cases_of(samples), systems_of(samples)
    means = {
        (case, one): statistics.fmean(samples[case, one, "makespan"])
        for case in cases
        for one in systems
    }
    least = {case: min(means[case, one] for one in systems) for case in cases}
    ratios = [[means[case, system] / least[case] for case in cases] for system in systems]
    size = (2.6 + 0.62 * len(cases), 1.6 + 0.3 * len(systems))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.imshow(ratios, cmap="YlOrRd", vmin=1.0, vmax=1.3, aspect="auto")
    axes.set_xticks(range(len(cases)), cases, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(systems)), systems, fontsize=8)
    for row, values in enumerate(ratios):
        for column, value in enumerate(values):
            ink = "white" if value > 1.18 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_title("makespan over the trace's best (colours end at 1.3)", fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_balance(samples: Samples, path: Path) -> None:
    """One panel a trace: the share of prompt tokens found in caches, over how uneven load is."""
    pyplot = _pyplot()
    cases, systems = cases_of(samples), systems_of(samples)
    columns = min(5, len(cases))
    rows = -(-len(cases) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(2.4 * columns, 2.0 * rows + 0.9), squeeze=False
    )
    colours = pyplot.get_cmap("tab20").colors
    panels = list(grid.flat)
    for axes in panels[len(cases) :]:
        axes.axis("off")
    for axes, case in zip(panels, cases, strict=False):
        for number, system in enumerate(systems):
            axes.scatter(
                statistics.fmean(samples[case, system, "imbalance"]),
                statistics.fmean(samples[case, system, "hit_rate"]),
                color=colours[number % len(colours)],
                marker="*" if system.startswith(OURS) else "osD^v<>P"[number % 8],
                s=90 if system.startswith(OURS) else 25,
                label=system,
            )
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=6)
    figure.supxlabel("load of the most loaded replica over the mean", fontsize=8)
    figure.supylabel("share of prompt tokens found in caches", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=5, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0.01, 0.01, 1, 1 - 0.8 / (2.0 * rows + 0.9)))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _difference(percent: float, error: float) -> str:
    return f"{percent:+.1f} %" + (f" ({error:.1f})" if math.isfinite(error) else "")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and draws the plots; returns 1 if there is no record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    paths = parser.parse_args(argv).records or recorded(RESULTS)
    if not paths:
        print(f"no record of benchmarks.routing in {RESULTS}; name one, or make one")
        return 1
    for path in paths:
        samples = read(path)
        print(f"## {path.name}\n\n{origin(path)}\n")
        systems = systems_of(samples)
        if OURS in systems and not all(system.startswith(OURS) for system in systems):
            print(ours_against_best(samples))
        print(matrix(samples))
        print(decisions(samples))
        draw_ratios(samples, path.with_name(f"{path.stem}_ratios.png"))
        draw_balance(samples, path.with_name(f"{path.stem}_balance.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

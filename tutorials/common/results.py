"""What a training tutorial leaves: a table, the figures of every step, pictures, PASS or FAIL."""

from __future__ import annotations

import contextlib
import csv
from dataclasses import asdict, field, fields
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
REWARD_SLACK = 0.1  # how much lower than it began the reward may be after a smoke run


def shown(heading: str, spec: str) -> Any:
    """A field of a step that its table shows, with this heading and format."""
    return field(metadata={"heading": heading, "spec": spec})


def table(steps: Sequence[Any]) -> str:
    """Returns about ten of the steps as text, in the columns that are ``shown``."""
    stride = max(1, round(len(steps) / 8))
    chosen = [one for at, one in enumerate(steps) if at % stride == 0 or one is steps[-1]]
    columns = []
    for one in fields(steps[0]):
        if heading := one.metadata.get("heading"):
            cells = [format(getattr(step, one.name), one.metadata["spec"]) for step in chosen]
            width = max(map(len, [heading, *cells]))
            columns.append([cell.rjust(width) for cell in [heading, *cells]])
    return "\n".join(map(" ".join, zip(*columns, strict=True)))


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Writes dataclasses of one kind, a row each."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(one) for one in rows)


@contextlib.contextmanager
def picture(
    path: Path, rows: int = 1, columns: int = 1, *, title: str = "", **options: Any
) -> Iterator[Any]:
    """Gives the axes of a picture, and saves it."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
        figure.suptitle(title, fontsize=10)
        yield axes
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_reward(axis: Any, rewards: Sequence[float], target: float | None) -> None:
    """Draws the mean reward of each step, and what it must reach for PASS if it must."""
    axis.set_ylabel("mean reward")
    if target is not None:
        axis.set_ylim(0, 1.02)
        axis.axhline(target, color="grey", linestyle=":", linewidth=1)
        axis.annotate(
            f"PASS above {target}", (0, target), (0, -10), color="grey", textcoords="offset points"
        )
    axis.plot(range(len(rewards)), rewards, color="tab:blue")


def drive(
    training: Generator[Any], steps: list[Any], problems: list[str], *failures: type[Exception]
) -> None:
    """Runs a training loop and keeps its steps; a failure ends it and is a problem."""
    try:
        with contextlib.closing(training):
            for step in training:
                steps.append(step)  # noqa: PERF402  those before a failure are kept
    except failures as error:
        problems.append(f"step {len(steps)}: {type(error).__name__}: {error}")


def reward_problems(
    args: argparse.Namespace, first: float, last: float, target: float | None
) -> list[str]:
    """Returns what is wrong with the reward; after a smoke run, that it fell."""
    if args.smoke and not last >= first - REWARD_SLACK:
        return [f"the reward fell from {first:.3f} to {last:.3f}"]
    if not args.smoke and target is not None and not last > target:
        return [f"the reward ended at {last:.3f}, not above {target}"]
    return []


def verdict(problems: list[str], figures: str) -> int:
    """Prints problems, and PASS or FAIL with the figures; returns the exit status."""
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{'FAIL' if problems else 'PASS'} {figures}", flush=True)
    return 1 if problems else 0

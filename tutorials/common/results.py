"""What a training tutorial leaves: a table, the figures of every step, pictures, PASS or FAIL."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import time
from dataclasses import asdict, field, fields
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot as plt
from tqdm import tqdm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
COLORS = ("tab:green", "tab:orange", "tab:red")
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


def write(
    args: argparse.Namespace,
    title: str,
    steps: Sequence[Any],
    panels: dict[str, Any],
    held_out: Sequence[float] = (),
    below: Callable[[Any], None] | None = None,
    **rows: Sequence[Any],
) -> None:
    """Writes ``curve.png``, ``table.txt`` and CSV files to ``args.output``; prints the table.

    A panel below the reward is a label and the names of its lines: figures by their name in a step,
    or constants. ``held_out`` is the reward on other problems before the first step and after the
    last one; ``below`` draws more below that; ``rows`` are dataclasses of other kinds.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    text = table(steps)
    (args.output / "table.txt").write_text(text + "\n")
    for name, some in {"curve": steps, **rows}.items():
        with (args.output / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [one.name for one in fields(some[0])])
            writer.writeheader()
            writer.writerows(asdict(one) for one in some)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(7, 12 if below else 7), layout="constrained")
        parts = figure.subfigures(2, height_ratios=(7, 5)) if below else (figure,)
        first, *rest = parts[0].subplots(1 + len(panels), sharex=True)
        if below:
            below(parts[1])
        figure.suptitle(title, fontsize=10)
        first.set_ylabel("mean reward")
        first.plot([one.reward for one in steps], color="tab:blue")
        if len(held_out) == 2:  # the run came to its end
            first.plot([0, len(steps) - 1], held_out, "o--", color="grey", label="held out, greedy")
            first.legend(frameon=False)
        if (target := args.reward_target) is not None:
            first.set_ylim(0, 1.02)
            first.axhline(target, color="grey", linestyle=":", linewidth=1)
            first.text(0, target - 0.06, f"PASS above {target}", color="grey")
        for axis, (label, lines) in zip(rest, panels.items(), strict=True):
            axis.set_ylabel(label)
            for color, (what, name) in zip(COLORS, lines.items(), strict=False):
                if isinstance(what, str):
                    axis.plot([getattr(one, what) for one in steps], label=name, color=color)
                else:
                    axis.axhline(what, label=name, color=color, linestyle=":", linewidth=1)
            if len(lines) > 1:
                axis.legend(frameon=False)
        (rest or [first])[-1].set_xlabel("step")
        figure.savefig(args.output / "curve.png", dpi=150)
        plt.close(figure)
    print(text)
    names = sorted(one.name for one in args.output.iterdir())
    print(f"Written to {args.output}: {', '.join(names)}")


class Clock:
    """Times the parts of each step: ``with clock("train_s"): ...``."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._parts[part] = time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """The seconds of each part that ended last, and all ``seconds`` so far."""
        return {**self._parts, "seconds": time.perf_counter() - self._began}


def counted(args: argparse.Namespace) -> Iterator[int]:
    """Counts steps: as many as there are to be, or until the time is over."""
    end = time.monotonic() + 60 * args.minutes
    return itertools.takewhile(lambda _: time.monotonic() < end, range(args.steps))


def drive(
    training: Iterator[Any],
    args: argparse.Namespace,
    problems: list[str],
    *failures: type[Exception],
) -> list[Any]:
    """Runs a training loop to its end and returns its steps; a failure ends it, as a problem."""
    steps: list[Any] = []
    print(f"Set up in {time.perf_counter() - args.began:.1f} s", flush=True)
    try:
        total = args.steps if args.minutes == math.inf else None
        with contextlib.closing(training), tqdm(total=total, desc="GRPO", unit="step") as bar:
            for step in training:
                steps.append(step)
                bar.set_postfix_str(f"reward {step.reward:.3f}", refresh=False)
                bar.update()
    except failures as error:
        problems.append(f"step {len(steps)}: {type(error).__name__}: {error}")
    return steps


def reward_problems(args: argparse.Namespace, first: float, last: float) -> list[str]:
    """Returns what is wrong with the reward; after a smoke run, that it fell."""
    target = args.reward_target
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

"""Where the seconds of a GRPO step go, as a picture beside each record of ``grpo_step``.

``python -m benchmarks.grpo_step_report`` draws one PNG for each record in ``benchmarks/results``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.record import medians_of, picture, runs_of

if TYPE_CHECKING:
    from pathlib import Path

SYSTEMS = {
    "bound": "the two models alone",
    "ours, one step off": "this library, one step off",
    "ours, four steps off": "this library, up to four steps off",
    "ours, discarding": "this library, one step off, discarding",
    "ours, checked": "this library, everything checked",
    "ours": "this library",
    "torchrl-classes": "TorchRL's classes",
    "trl": "TRL",
}
PARTS = {
    "sampling": ("tab:green", ("generate",)),
    "rows, rewards, advantages, buffer": (
        "tab:red",
        ("environment", "encode", "rows", "reward", "advantage", "buffer", "sample"),
    ),
    "loss, backward, optimizer": ("tab:blue", ("log-probabilities", "backward", "optimizer")),
    "push, sleep, wake": ("tab:purple", ("push", "sleep", "wake")),
    "waiting for rows": ("tab:olive", ("wait",)),
    "all at once, or not told apart": ("tab:gray", ("other",)),
}


def parts(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of each system's step by part, medians summed."""
    medians = {key[1:]: median for key, median in medians_of(run).items()}
    return {
        system: {
            part: sum(medians.get((system, phase), 0.0) for phase in phases)
            for part, (_, phases) in PARTS.items()
        }
        for system in SYSTEMS
        if (system, "step") in medians
    }


def draw(run: dict[str, Any], path: Path) -> None:
    found = parts(run)
    with picture(path, figsize=(8, 0.9 + 0.4 * len(found))) as (figure, axes):
        left = [0.0] * len(found)
        for part, (colour, _) in PARTS.items():
            widths = [of[part] for of in found.values()]
            label = part if any(widths) else None
            axes.barh(range(len(found)), widths, left=left, color=colour, label=label)
            left = [sum(both) for both in zip(left, widths, strict=True)]
        for row, end in enumerate(left):
            axes.text(end, row, f" {end:.2f} s", va="center", fontsize=8)
        axes.set_yticks(range(len(found)), [SYSTEMS[one] for one in found])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.08 * max(left))
        axes.set_xlabel(f"seconds a step, {run['records'][0]['case']} on {run['hardware']}")
        figure.legend(loc="outside upper center", ncols=5, fontsize=7, frameon=False)


def main() -> int:
    for path, run in runs_of("grpo_step").items():
        draw(run, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

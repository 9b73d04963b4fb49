"""Who worked when in a run, and how old and how long its rows were."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensordict import TensorDictBase

    from torchrl_vllm_sync import AsyncVLLM, PushReport

POLL_S = 0.01
MAX_BINS = 24
SHOWN_STEPS = 6  # in the middle of a run, so that single answers can be seen
COLORS = {"wait_s": "lightgrey", "train_s": "tab:blue", "push": "tab:red"}


def lengths(rows: TensorDictBase) -> list[int]:
    """Sampled tokens of each row."""
    return (rows["policy_versions", "response"] >= 0).flatten(1).sum(-1).tolist()


@dataclass
class Work:
    """What trainer and engines did, in Unix seconds, and the rows that came of it."""

    trainer: list[tuple[str, float, float]] = field(default_factory=list)  # part, begin, end
    in_flight: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # by replica
    pushes: list[PushReport] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)  # lengths of all rows that were scored
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)  # of trained rows, in versions

    @contextlib.contextmanager
    def watching(self, service: AsyncVLLM) -> Iterator[None]:
        """Polls how many requests each replica has, and notes pushes, until a ``with`` ends."""
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(POLL_S):
                counts = {one.replica_id: one.samples or 0 for one in service.status().replicas}
                self.in_flight.append((time.time(), counts))

        thread = threading.Thread(target=poll, daemon=True)
        forget = service.register_version_hook(self.pushes.append)
        thread.start()
        try:
            yield
        finally:
            forget()
            ended.set()
            thread.join(10)

    def keep(self, group: TensorDictBase) -> bool:
        """Notes a group of a collector, all of which are kept."""
        self.generated.extend(lengths(group))
        return True

    def train(self, rows: TensorDictBase, ages: Any) -> None:
        """Notes rows that were trained."""
        self.trained.extend(lengths(rows))
        self.ages.extend(ages.flatten().tolist())

    def shortcomings(self, most_ahead: int) -> list[str]:
        """Returns what is wrong with the rows; so many may be ahead of the trainer at the end."""
        found = []
        if unknown := Counter(self.trained) - Counter(self.generated):
            found.append(f"{unknown.total()} trained rows have lengths that no engine generated")
        if (left := len(self.generated) - len(self.trained)) > most_ahead:
            found.append(f"{left} rows were generated and not trained, above {most_ahead}")
        return found

    def draw(self, figure: Any) -> None:
        """Draws all into a part of a figure."""
        axes = figure.subplot_mosaic([["when", "when"], ["ages", "lengths"]])
        self._draw_when(axes["when"])
        oldest = max(self.ages)
        axes["ages"].bar(range(oldest + 1), [self.ages.count(at) for at in range(oldest + 1)])
        axes["ages"].set(xlabel="staleness, versions", ylabel="rows", xticks=range(oldest + 1))
        shortest, longest = min(self.generated), max(self.generated)
        width = (longest - shortest) // MAX_BINS + 1  # whole numbers, as lengths are
        edges = range(shortest, longest + width + 1, width)
        axes["lengths"].hist(self.generated, edges, label="generated", color="lightgrey")
        axes["lengths"].hist(self.trained, edges, label="trained", histtype="step")
        axes["lengths"].set(xlabel="tokens of an answer", ylabel="rows")
        axes["lengths"].legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))

    def _draw_when(self, axis: Any) -> None:
        steps = [begin for part, begin, _ in self.trainer if part == "wait_s"]
        first = max(0, len(steps) // 2 - SHOWN_STEPS // 2)
        begin, end = steps[first], [*steps, self.trainer[-1][2]][first:][: SHOWN_STEPS + 1][-1]
        for part, color in COLORS.items():
            spans = [(one[1], one[2]) for one in self.trainer if one[0] == part]
            if part == "push":
                spans = [(one.began_at, one.ended_at) for one in self.pushes]
            bars(axis, 0, spans, begin, end, color=color, label=part.removesuffix("_s"))
        names = sorted({name for _, counts in self.in_flight for name in counts})
        for at, name in enumerate(names, 1):
            times = [when for when, _ in self.in_flight]
            busy = [counts.get(name, 0) > 0 for _, counts in self.in_flight]
            spans = [(a, b) for a, b, on in zip(times, times[1:], busy, strict=False) if on]
            label = "generate" if at == 1 else None
            bars(axis, at, spans, begin, end, color="tab:green", label=label)
        axis.set(xlim=(0, end - begin), xlabel=f"seconds, from step {first} on")
        axis.set_yticks(range(len(names) + 1), ["trainer", *(f"replica {one}" for one in names)])
        axis.invert_yaxis()
        axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def bars(
    axis: Any, row: int, spans: Sequence[tuple[float, float]], begin: float, end: float, **how: Any
) -> None:
    """Draws spans that meet a window, from its begin on."""
    shown = [(max(a, begin) - begin, min(b, end) - max(a, begin)) for a, b in spans]
    axis.broken_barh([one for one in shown if one[1] > 0], (row - 0.4, 0.8), **how)

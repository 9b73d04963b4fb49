"""Runs the kill matrix and prints it: ``python -m tests.chaos.matrix --help``.

A failed cell does not end the run; the exit status says whether there was one.
"""

import argparse
import fnmatch
import sys
import tempfile
import time

from benchmarks.record import Recorder, RecordError
from tests.chaos.arena import Arena
from tests.chaos.cells import ENGINES, PHASES, SIGNALS, TRANSPORTS, VICTIMS, all_cells

FIGURES = {"noticed": "noticed_s", "push ended": "pushed_s", "repaired": "repaired_s"}
LEGEND = (
    "Seconds to: noticed / push ended / repaired. E: the push ended in a typed error, which the "
    "trainer outlived.\nnoticed: no request goes to the victim, or no replica waits for the "
    "trainer. repaired: all replicas serve the newest version.\n"
)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def chosen_cells(patterns):
    """The cells whose names fit one of the patterns, which may hold ``*``."""
    return [
        cell
        for cell in all_cells()
        if any(fnmatch.fnmatch(str(cell), pattern) for pattern in patterns)
    ]


def told(verdict):
    """One cell of the printed matrix."""
    if verdict is None:
        return ""
    if verdict.failure:
        return "FAILED"
    figures = [getattr(verdict, name) for name in FIGURES.values()]
    words = ["-" if one is None else f"{one:.1f}" for one in figures]
    words[1] += "E" if verdict.push.startswith("error") else ""
    return "/".join(words)


def table(verdicts):
    """Victim and signal down, phase and transport across, one block a transport."""
    found = {verdict.cell: verdict for verdict in verdicts}
    lines = [LEGEND]
    for transport in TRANSPORTS:
        rows = [["", *PHASES]]
        for victim in VICTIMS:
            for signal in SIGNALS:
                cells = {
                    cell.phase: verdict
                    for cell, verdict in found.items()
                    if (cell.victim, cell.signal, cell.transport) == (victim, signal, transport)
                }
                row = [told(cells.get(phase)) for phase in PHASES]
                rows.append([f"{signal} {victim}", *row])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(transport)
        lines += [
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines)


def record(verdicts, directory):
    """Writes the times of the cells that passed; anything goes for a working tree elsewhere.

    Cells of one transport only have a record of their own, so that a matrix may come in parts.
    """
    transports = {verdict.cell.transport for verdict in verdicts}
    recorder = Recorder("_".join(["chaos", *(transports if len(transports) == 1 else ())]))
    for verdict in verdicts:
        for metric, name in FIGURES.items():
            seconds = getattr(verdict, name)
            if not verdict.failure and seconds is not None:
                recorder.add(
                    case=str(verdict.cell),
                    system="AsyncVLLM",
                    metric=metric,
                    unit="s",
                    samples=[seconds],
                    push=verdict.push,
                    answered=verdict.num_answered,
                    errors=verdict.num_errors,
                )
    return recorder.write(smoke=directory is not None, directory=directory)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="*", help="such as 'kill-core-* stop-*-memmap'")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--output", help="directory of the record; benchmarks/results if left out")
    parser.add_argument("--list", action="store_true", help="name the cells and run nothing")
    options = parser.parse_args(argv)
    order = list(ENGINES.values()).index  # engines start once for all cells that need such
    cells = sorted(chosen_cells(options.cells.split()), key=lambda cell: order(cell.engines))
    if options.list or not cells:
        say("\n".join(map(str, cells)) or f"no cell fits {options.cells!r}")
        return 0 if cells else 2
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        arena = None
        try:
            for number, cell in enumerate(cells, 1):
                if arena is None or arena.engines != cell.engines:
                    if arena is not None:
                        arena.close()
                    arena = Arena(f"{directory}/{number}", options.replicas, engines=cell.engines)
                begin = time.monotonic()
                verdict = arena.run(cell)
                verdicts.append(verdict)
                say(
                    f"{number}/{len(cells)} {cell}: {told(verdict)} "
                    f"({time.monotonic() - begin:.0f} s; {verdict.num_answered} answers, "
                    f"{verdict.num_errors} errors; {verdict.push}) {' '.join(verdict.notes)}"
                )
                if verdict.failure:
                    say(f"    {verdict.failure}")
        except KeyboardInterrupt:
            say(f"interrupted after {len(verdicts)} of {len(cells)} cells")
        finally:
            if arena is not None:
                arena.close()
    say("\n" + table(verdicts))
    try:
        say(f"record: {record(verdicts, options.output)}")
    except RecordError as error:
        say(f"no record: {error}")
    return 1 if len(verdicts) < len(cells) or any(one.failure for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())

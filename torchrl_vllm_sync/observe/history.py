"""What a dashboard's plots show: the last samples in memory and, if asked for, all in a file.

Each line of the file is JSON: a sample, and once a minute and at the end the whole status.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections import deque
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torchrl_vllm_sync.errors import UnsupportedArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


logger = logging.getLogger(__name__)

MAX_SAMPLES = 900  # of the plots: a quarter of an hour, or a file's whole time thinned out
STATUS_EVERY_S = 60.0
_MAX_LINE_BYTES = 64 << 20
_BEGINNINGS = (b'{"sample": ', b'{"status": ')
_PARTS = {"time": float, "replicas": dict, "pushes": list, "numbers": dict, "histograms": dict}


class History:
    """The samples of one dashboard, and the file, if any, that it goes on with and alone writes."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._file: BinaryIO | None = None
        self._last: dict[str, Any] = {}  # the last sample's status
        self._written: dict[str, Any] = {"time": 0.0}  # the last one that is in the file
        if path is not None:
            self._open(path)

    def add(self, sample: dict[str, Any], status: dict[str, Any]) -> None:
        """Adds a moment's sample; a file that cannot be written any more ends, with a warning."""
        self.samples.append(sample)
        self._last = status
        is_due = status["time"] - self._written["time"] >= STATUS_EVERY_S
        self._write({"sample": sample} | ({"status": status} if is_due else {}))

    def close(self) -> None:
        """Writes the last status, and closes the file; idempotent."""
        if self._last not in ({}, self._written):
            self._write({"status": self._last})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: str | os.PathLike[str]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(_opened(Path(path)))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (OSError, TypeError, ValueError) as error:
                is_taken = isinstance(error, BlockingIOError)
                why = "another dashboard writes to it" if is_taken else str(error)
                raise UnsupportedArgumentError(
                    f"history must be a file to write, got {str(path)!r}: {why}"
                ) from error
            lines = deque(_lines(path), MAX_SAMPLES)
            self.samples.extend(line["sample"] for line, _ in lines if "sample" in line)
            # Without a line that was cut off as a process ended.
            file.truncate(lines[-1][1] if lines else 0)
            self._file = file
            stack.pop_all()

    def _write(self, line: dict[str, Any]) -> None:
        self._written = line.get("status", self._written)
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the dashboard's history ends: %s", error)
            with contextlib.suppress(OSError):  # what is left of the line cannot be written
                self._file.close()
            self._file = None


def read_history(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the last status of a file, and samples of its whole time.

    Of several that follow each other one is left, with the pushes and what was logged of all.
    """
    status: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    group: list[dict[str, Any]] = []  # those that become the next one
    size = 1
    for line, _ in _lines(path):
        status = line.get("status", status)
        group += [line["sample"]] if "sample" in line else []
        if len(group) == size:
            samples.append(reduce(_merged, group))
            group = []
        if len(samples) == MAX_SAMPLES:
            samples = list(map(_merged, samples[::2], samples[1::2]))
            size *= 2
    if not status:
        raise UnsupportedArgumentError(f"{path} holds no history of a dashboard yet")
    return status, [*samples, reduce(_merged, group)] if group else samples


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    logged = {name: first[name] | second[name] for name in ("numbers", "histograms")}
    return second | logged | {"pushes": first["pushes"] + second["pushes"]}


def _opened(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():  # opening a pipe may never return
        raise OSError("it is no regular file")
    return path.open("ab")


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each whole line, and where it ends; refuses what no dashboard has written."""
    number = end = 0
    try:
        with Path(path).open("rb") as file:
            while text := file.readline(_MAX_LINE_BYTES):
                number += 1
                end += len(text)
                if (line := _checked(text)) is not None:
                    yield line, end
    except OSError as error:
        raise UnsupportedArgumentError(f"history must be a file to read: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnsupportedArgumentError(
            f"{path} is no history of a dashboard: line {number}: {error!r}"
        ) from error


def _checked(text: bytes) -> dict[str, Any] | None:
    """Reads one line, ``None`` if it was cut off; raises one of several errors for another's."""
    if not text.endswith(b"\n"):
        if not any(one.startswith(text[: len(one)]) for one in _BEGINNINGS):
            raise ValueError("it does not begin like a sample or a status")
        return None
    line = json.loads(text, parse_constant=lambda _: None)
    for name, kind in _PARTS.items() if "sample" in line else ():
        if not isinstance(line["sample"][name], kind):
            raise TypeError(f"{name} of a sample is something else")
    if "sample" not in line or "status" in line:
        float(line["status"]["time"])
    return line

"""What a dashboard's plots show: the last samples in memory and, if asked for, all in a file.

The file is of JSON lines, each with a sample; after a push or a failure, every minute and at the
end also with the whole status of that moment.
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
MAX_FILE_BYTES = 64 << 20  # then the file becomes the former one, which is replaced
STATUS_EVERY_S = 60.0


class History:
    """The samples of one dashboard, and the file, if any, that it goes on with and alone writes."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._path, self._file = None, None
        self._status: dict[str, Any] = {}  # the last one
        self._written: dict[str, Any] = {}  # the last one that is in the file
        if path is not None:
            self._open(path)

    def add(self, sample: dict[str, Any], status: dict[str, Any]) -> None:
        """Adds a moment's sample; a file that cannot be written any more ends, with a warning."""
        self.samples.append(sample)
        self._status, before = status, self._written
        is_new = any(status[name] != before.get(name) for name in ("pushes", "failures"))
        if is_new or status["time"] - before["time"] >= STATUS_EVERY_S:
            self._write({"sample": sample, "status": status})
        else:
            self._write({"sample": sample})

    def close(self) -> None:
        """Writes the last status, and closes the file; idempotent."""
        if self._status != self._written:
            self._write({"status": self._status})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, given: str | os.PathLike[str]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                path = Path(given)
                file = stack.enter_context(_opened(path))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (OSError, TypeError, ValueError) as error:
                is_taken = isinstance(error, BlockingIOError)
                why = "another dashboard writes to it" if is_taken else str(error)
                raise UnsupportedArgumentError(
                    f"history must be a file to write, got {str(given)!r}: {why}"
                ) from error
            lines = deque(_lines(path), MAX_SAMPLES)
            self.samples.extend(line["sample"] for line, _ in lines if "sample" in line)
            # Without a line that was cut off as a process ended.
            file.truncate(lines[-1][1] if lines else 0)
            self._path, self._file = path, file
            stack.pop_all()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None or self._path is None:
            return
        try:
            if self._file.tell() > MAX_FILE_BYTES:
                self._file.close()
                self._path.replace(_former(self._path))
                self._open(self._path)
                line = line | {"status": self._status}
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except (OSError, UnsupportedArgumentError) as error:
            logger.warning("the dashboard's history ends: %s", error)
            with contextlib.suppress(OSError):  # what is left of the line cannot be written
                self._file.close()
            self._file = None
        self._written = line.get("status", self._written)


def read_history(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the last status of a file and its former one, and samples of their whole time.

    Of several that follow each other one is left, with the pushes and what was logged of all.
    """
    status: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    group: list[dict[str, Any]] = []  # those that become the next one
    size = 1
    for file in [*_kept_former(Path(path)), Path(path)]:
        for line, _ in _lines(file):
            status = line.get("status", status)
            if "sample" not in line:
                continue
            group.append(line["sample"])
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
    """Opens a file to write at its end."""
    if path.exists() and not path.is_file():  # opening a pipe may never return
        raise OSError("it is no regular file")
    return path.open("ab")


def _former(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _kept_former(path: Path) -> list[Path]:
    """The former file, if there is one."""
    try:
        return [_former(path)] if _former(path).exists() else []
    except OSError as error:
        raise UnsupportedArgumentError(f"history must be a file to read: {error}") from error


_PARTS = {"time": float, "replicas": dict, "pushes": list, "numbers": dict, "histograms": dict}


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each whole line, and where it ends."""
    number = end = 0
    try:
        with path.open("rb") as file:
            while text := file.readline(MAX_FILE_BYTES):
                number += 1
                if not text.endswith(b"\n"):
                    _check_beginning(text)
                    return
                end += len(text)
                yield _checked(text), end
    except OSError as error:
        raise UnsupportedArgumentError(f"history must be a file to read: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UnsupportedArgumentError(
            f"{path} is no history of a dashboard: line {number}: {error!r}"
        ) from error


def _check_beginning(text: bytes) -> None:
    """Raises unless a line without an end is one of a dashboard, which may be cut off."""
    for whole in (b'{"sample": ', b'{"status": '):
        if text.startswith(whole) or whole.startswith(text):
            return
    raise ValueError("it does not begin like a sample or a status")


def _checked(text: bytes) -> dict[str, Any]:
    """Reads one line; raises one of several errors for what no dashboard has written."""
    line = dict(json.loads(text, parse_constant=lambda _: None))
    if not line.keys() & {"sample", "status"}:
        raise ValueError("it has neither a sample nor a status")
    if "sample" in line:
        wrong = [
            name for name, kind in _PARTS.items() if not isinstance(line["sample"][name], kind)
        ]
        if wrong:
            raise TypeError(f"{wrong[0]} of a sample is something else")
    if "status" in line:
        float(line["status"]["time"])
    return line

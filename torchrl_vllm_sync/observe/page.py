"""A small web page that shows a service as it runs, and the history behind its plots."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any, BinaryIO, Self
from urllib.parse import parse_qs, urlsplit

import numpy as np

from torchrl_vllm_sync.checks import Deadline, url_of
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.observe.status import ServiceStatus, finite
from torchrl_vllm_sync.replica import Latency

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
NUM_BINS = 24  # of a histogram
MAX_BINNED = 1e12  # numbers as far as this from 0 count as unknown in histograms
MAX_CONNECTIONS = 64  # at once; each holds a file descriptor and a thread of the trainer's process
_REQUEST_S = 10.0  # for one connection, from its beginning to the last byte of the answer
_POLL_S = 0.2  # between looks whether the thread is to end
_JOIN_TIMEOUT_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Dashboard:
    """Serves a page about a service, over HTTP, until it is closed or the service ends.

    ``/`` is the page, ``/status.json`` the status as ``ServiceStatus.as_dict`` gives it, and
    ``/history.json`` what the plots show. Whoever reaches the address can read it, and change
    nothing; the loopback address is not for pages of other sites in a browser here.

    Example:
        >>> with service.dashboard() as board:
        ...     print(board.url)
        ...     train()

    Args:
        look: Returns the status. Called once a second and for each request, in threads of the
            dashboard. ``ServiceGoneError`` ends it; the page shows any other error. ``None`` shows
            what is in ``history``, which is only read.
        host: Name or address to listen on; afterwards the address.
        port: Port to listen on; 0 takes a free one.
        history: File for what the plots show, a line of JSON a second, behind what it holds.

    Raises:
        UnsupportedArgumentError: There is no such host or port, or it is taken; or ``history`` is
            no file that a dashboard wrote, cannot be written, or another one writes to it.
    """

    def __init__(
        self,
        look: Callable[[], ServiceStatus] | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        history: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UnsupportedArgumentError(f"port must be an integer from 0 to 65535, got {port!r}")
        if not isinstance(host, str) or not host:
            raise UnsupportedArgumentError(f"host must be a name or an address, got {host!r}")
        if history is None and look is None:
            raise UnsupportedArgumentError("look must be a function unless there is a history")
        self._look = look
        self._recorded: dict[str, Any] = {}
        self._history = History(None if look is None else history)
        if look is None:
            self._recorded, samples = read_history(history or "")
            self._history.samples.extend(samples)
        self._logged, self._logging = defaultdict[str, dict[str, Any]](dict), threading.Lock()
        self._before: ServiceStatus | None = None
        self._stop = threading.Event()
        try:
            self._server = _Server(self, host, port)
        except (OSError, UnicodeError) as error:
            self._history.close()
            told = f"host and port must be free to listen on, got {host!r} and {port}: {error}"
            raise UnsupportedArgumentError(told) from error
        self.host, self.port = self._server.server_name, self._server.server_port
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, as it is reached from this machine."""
        return f"{url_of(self.host, self.port)}/"

    @property
    def is_open(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the server and its threads; idempotent."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Dashboard({self.url!r}{'' if self.is_open else ', closed'})"

    def log(self, name: str, value: float | Sequence[float]) -> None:
        """Shows a figure of the run: a number over time, or of several the last histogram.

        Args:
            name: What it is called on the page.
            value: A number, or several, such as the lengths of a batch's responses; or a tensor.

        Raises:
            UnsupportedArgumentError: ``name`` is no text, or ``value`` no number and no several.
        """
        if not isinstance(name, str):
            raise UnsupportedArgumentError(f"name must be text, got {name!r}")
        values = numbers(name, value)
        with self._logging:
            if not values.ndim:
                self._logged["numbers"][name] = float(values)
            elif (known := values[np.abs(values) < MAX_BINNED]).size:
                self._logged["histograms"][name] = _histogram(known)

    def status(self) -> dict[str, Any]:
        """Returns what ``/status.json`` shows; raises what the service raises."""
        return self._recorded if self._look is None else self._look().as_dict()

    def history(self, since: float) -> dict[str, Any]:
        """Returns what ``/history.json`` shows.

        Args:
            since: Only what was later than this, in seconds since 1970.
        """
        samples = [one for one in list(self._history.samples) if one["time"] > since]
        return {"status": self.status(), "samples": samples, "is_live": self._look is not None}

    def _run(self) -> None:
        next_sample = Deadline(0)
        try:
            while not self._stop.is_set():
                if self._look is not None and next_sample.passed:
                    next_sample = Deadline(INTERVAL_S)
                    self._sample(self._look)
                self._server.handle_request()  # returns after ``_POLL_S`` at the latest
                self._server.end_overdue()
        finally:
            self._server.server_close()
            self._server.end_overdue(is_last=True)
            self._history.close()

    def _sample(self, look: Callable[[], ServiceStatus]) -> None:
        """Adds what the plots show of this moment."""
        try:
            status = look()
            with self._logging:
                logged, self._logged = self._logged, defaultdict(dict)
            self._history.add(_sample_of(status, self._before, logged), status.as_dict())
            self._before = status
        except ServiceGoneError:
            self._stop.set()
        except Exception:  # of whatever kind: the page says so, and the plots have a gap
            logger.debug("the dashboard has nothing to show now", exc_info=True)


class ServiceGoneError(ServiceClosedError):
    """No handle on the service is left in this process."""


def numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Returns a number, or several of any shape."""
    try:
        return np.asarray(_plain(value), dtype=float)
    except (TypeError, ValueError) as error:
        raise UnsupportedArgumentError(
            f"{name!r} must be a number or several, got {value!r}"
        ) from error


def _plain(value: Any) -> Any:
    """A tensor's own list, as numpy takes none with a gradient, or of bfloat16."""
    if value is None or isinstance(value, str):
        raise TypeError("numpy would read it")
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return getattr(value, "tolist", lambda: value)()


def _histogram(values: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Counts of values and the edges between these; few whole numbers have a bin each."""
    low, high = values.min(), values.max()
    if high - low < NUM_BINS and np.array_equal(values, values.round()):
        edges = np.arange(low - 0.5, high + 1)
    elif high - low > 1e-9 * max(abs(low), abs(high)):
        edges = np.linspace(low, high, NUM_BINS + 1)
    else:  # numbers have too few digits for bins between these
        edges = np.array([low - 0.5, high + 0.5])
    counts, edges = np.histogram(values, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _sample_of(
    status: ServiceStatus,
    before: ServiceStatus | None = None,
    logged: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What the plots show of a moment, with the pushes that ended since the one before."""
    known = before.pushes if before else ()
    pushes = [
        {"at": one.ended_at, "version": one.version, "failed": bool(one.error)}
        for one in status.pushes
        if one not in known
    ]
    replicas = {
        one.replica_id: {
            "in_flight": one.samples,
            "waiting": one.num_waiting,
            "kv": one.kv_cache_usage,
            "tokens": one.generated_tokens_per_s,
            "version": one.weight_version,
            **_quantiles("ttft", one.time_to_first_token),
            **_quantiles("itl", one.inter_token_latency),
        }
        for one in status.replicas
    }
    sample = {"time": status.time, "replicas": replicas, "pushes": pushes}
    return finite(sample | {"numbers": {}, "histograms": {}} | (logged or {}))


def _quantiles(name: str, known: Latency | None) -> dict[str, float | None]:
    return {name: known and known.p50_s, f"{name}_p99": known and known.p99_s}


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own; so many at once, and each for so long."""

    timeout = _POLL_S
    request_queue_size = MAX_CONNECTIONS
    allow_reuse_port = False

    def __init__(self, board: Dashboard, host: str, port: int) -> None:
        self.board = board
        self._open: dict[threading.Thread, tuple[socket.socket, Deadline]] = {}
        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        super().__init__(found[4][:2], _Handler)
        # Other sites' pages can have a browser here ask, under a name that they point to this
        # address. On the loopback address only its own names are answered.
        own = ipaddress.ip_address(self.server_name)
        self.names = {"localhost", "127.0.0.1", "[::1]", host.lower()} if own.is_loopback else None

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server for this host's name
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def process_request(self, request: Any, client_address: object) -> None:
        self._open = {thread: one for thread, one in self._open.items() if thread.is_alive()}
        if len(self._open) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        answer, args = self.process_request_thread, (request, client_address)
        thread = threading.Thread(target=answer, args=args, name="dashboard-page", daemon=True)
        self._open[thread] = request, Deadline(_REQUEST_S)
        thread.start()

    def handle_error(self, request: Any, client_address: object) -> None:  # noqa: ARG002
        gone = isinstance(sys.exc_info()[1], OSError)  # the browser has left, or took too long
        level = logging.DEBUG if gone else logging.ERROR
        logger.log(level, "a connection to the dashboard ended", exc_info=True)

    def end_overdue(self, *, is_last: bool = False) -> None:
        for request, deadline in self._open.values():
            if is_last or deadline.passed:
                with contextlib.suppress(OSError):  # it had ended already
                    request.shutdown(socket.SHUT_RDWR)
        for thread in self._open if is_last else ():
            thread.join(_JOIN_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "torchrl_vllm_sync", ""

    def do_GET(self) -> None:
        code, kind, body = _answer(self.server, self.path, self.headers.get("Host", "").lower())
        self.send_response(code)
        length = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in (_HEADERS | length).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the base class's name

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        logger.debug(format, *args)


def _answer(server: Any, path: str, host: str) -> tuple[int, str, bytes]:
    """The status, type and body of what is answered."""
    names, board = server.names, server.board
    if names is not None and host.rsplit(":", 1)[0] not in names and host not in names:
        return 421, "text/plain", b"this address is not served under that name\n"
    try:
        asked = urlsplit(path)
    except ValueError as error:
        return 400, "text/plain", f"not an address: {error}\n".encode()
    if asked.path == "/":
        return 200, "text/html; charset=utf-8", _page()
    if asked.path not in ("/status.json", "/history.json"):
        return 404, "text/plain", b"there is /, /status.json and /history.json\n"
    since = 0.0
    with contextlib.suppress(KeyError, ValueError):
        since = float(parse_qs(asked.query)["since"][-1])
    try:
        made = board.status() if asked.path == "/status.json" else board.history(since)
        code, text = 200, json.dumps(made, allow_nan=False)
    except Exception as error:  # noqa: BLE001  the page says what it is
        why = str(error) if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
        code, text = 503, json.dumps({"error": why})
    return code, "application/json", text.encode()


@cache
def _page() -> bytes:
    return files("torchrl_vllm_sync.observe").joinpath("dashboard.html").read_bytes()


# ---- History: the last samples in memory and, if asked for, all in a file
#
# Each line of the file is JSON: a sample, and once a minute and at the end the whole status.

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
                told = f"history must be a file to write, got {str(path)!r}: {why}"
                raise UnsupportedArgumentError(told) from error
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
    """Returns the last status of a file, and samples of its whole time, of several merged ones."""
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
        told = f"{path} is no history of a dashboard: line {number}: {error!r}"
        raise UnsupportedArgumentError(told) from error


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

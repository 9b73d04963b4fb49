"""A small web page that shows a service as it runs."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

import numpy as np

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import ServiceClosedError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.observe.history import History, read_history
from torchrl_vllm_sync.observe.status import ServiceStatus, finite

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

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
        history: File that keeps what the plots show, one line of JSON a second, and goes on with
            what it holds.

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
        self._logged, self._logging = _nothing_logged(), threading.Lock()
        self._before: ServiceStatus | None = None
        self._stop = threading.Event()
        try:
            self._server = _Server(self, host, port)
        except (OSError, UnicodeError) as error:
            self._history.close()
            raise UnsupportedArgumentError(
                f"host and port must be free to listen on, got {host!r} and {port}: {error}"
            ) from error
        self.host, self.port = self._server.server_name, self._server.server_port
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, as it is reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

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
        try:
            # A tensor's own list, as numpy takes none with a gradient, or of bfloat16.
            values = np.asarray(getattr(value, "tolist", lambda: value)(), dtype=float)
        except (TypeError, ValueError) as error:
            raise UnsupportedArgumentError(
                f"{name!r} must be a number or several, got {value!r}"
            ) from error
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
            self._server.end()
            self._history.close()

    def _sample(self, look: Callable[[], ServiceStatus]) -> None:
        """Adds what the plots show of this moment."""
        try:
            status = look()
            with self._logging:
                logged, self._logged = self._logged, _nothing_logged()
            self._history.add(_sample_of(status, self._before, logged), status.as_dict())
            self._before = status
        except ServiceGoneError:
            self._stop.set()
        except Exception:  # of whatever kind: the page says so, and the plots have a gap
            logger.debug("the dashboard has nothing to show now", exc_info=True)


class ServiceGoneError(ServiceClosedError):
    """No handle on the service is left in this process."""


def _nothing_logged() -> dict[str, dict[str, Any]]:
    """What a run has logged since the last sample, of each name the last: nothing yet."""
    return {"numbers": {}, "histograms": {}}


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
    return finite(sample | (logged or _nothing_logged()))


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

    def end_overdue(self, *, all_of_them: bool = False) -> None:
        for request, deadline in self._open.values():
            if all_of_them or deadline.passed:
                with contextlib.suppress(OSError):  # it had ended already
                    request.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Takes no more connections, and ends those there are."""
        self.server_close()
        self.end_overdue(all_of_them=True)
        for thread in self._open:
            thread.join(_JOIN_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "torchrl_vllm_sync", ""

    def do_GET(self) -> None:
        server: Any = self.server
        names, board, host = server.names, server.board, self.headers.get("Host", "").lower()
        if names is not None and host.rsplit(":", 1)[0] not in names and host not in names:
            return self._send(421, "text/plain", b"this address is not served under that name\n")
        try:
            asked = urlsplit(self.path)
        except ValueError as error:
            return self._send(400, "text/plain", f"not an address: {error}\n".encode())
        if asked.path == "/":
            return self._send(200, "text/html; charset=utf-8", _page())
        if asked.path == "/status.json":
            return self._send_json(board.status)
        if asked.path == "/history.json":
            return self._send_json(lambda: board.history(_since(asked.query)))
        return self._send(404, "text/plain", b"there is /, /status.json and /history.json\n")

    do_HEAD = do_GET  # noqa: N815  the base class's name

    def _send_json(self, made: Callable[[], dict[str, Any]]) -> None:
        try:
            code, body = 200, json.dumps(made(), allow_nan=False)
        except Exception as error:  # noqa: BLE001  the page says what it is
            why = str(error) if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
            code, body = 503, json.dumps({"error": why})
        self._send(code, "application/json", body.encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        logger.debug(format, *args)


def _since(query: str) -> float:
    """The time that a query names; 0 if it names none."""
    try:
        return float(parse_qs(query)["since"][-1])
    except (KeyError, ValueError):
        return 0.0


@cache
def _page() -> bytes:
    return files("torchrl_vllm_sync.observe").joinpath("dashboard.html").read_bytes()

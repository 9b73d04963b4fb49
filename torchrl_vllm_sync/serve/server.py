"""The HTTP server: who may ask, how much at once, and what every answer says of its versions."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.serve.client import ASKED, Asked, make_app, serving_args

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BODY_BYTES = 32 << 20
START_S = 300.0
# Seconds for answers that are under way when the server is closed, and for its thread after that.
CLOSE_S = 2
_JOIN_S = 15.0
VERSIONS = "policy_versions"


class OpenAIServer:
    """What :meth:`AsyncVLLM.serve` returns: an OpenAI server, until it or the service ends.

    Example:
        >>> with service.serve() as server:
        ...     client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    Args:
        service: What answers.
        host, port, api_key, options: As for :meth:`AsyncVLLM.serve`; afterwards where it listens.

    Raises:
        UnsupportedArgumentError, SyncError: As for :meth:`AsyncVLLM.serve`.
    """

    def __init__(
        self, service: Any, host: str, port: int, api_key: str | None, options: Mapping[str, Any]
    ) -> None:
        key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        if key is not None and not (key and key.isascii()):
            raise UnsupportedArgumentError("api_key must be text of ASCII characters")
        args = serving_args(service.engine_args, options)
        try:
            found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0], backlog=2048)
        except (OSError, UnicodeError, OverflowError, TypeError) as error:
            told = f"host and port must be free to listen on, got {host!r} and {port!r}: {error}"
            raise UnsupportedArgumentError(told) from error
        self.host: str
        self.host, self.port = self._socket.getsockname()[:2]
        self._server: Any = None
        ready = Future[None]()
        run = self._run(service, args, key, ready)
        name = "openai-server"
        self._thread = threading.Thread(target=asyncio.run, args=(run,), name=name, daemon=True)
        self._thread.start()
        try:
            ready.result(START_S)
        except TimeoutError as error:
            raise SyncError(f"the server has not started within {START_S:g} s") from error

    @property
    def url(self) -> str:
        """Address of the server, as it is reached from this machine, without a path."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the server; answers under way have two seconds. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _run(self, service: Any, args: Any, key: str | None, ready: Future[None]) -> None:
        import uvicorn

        with self._socket:
            try:
                app = Gate(await make_app(service, args), key, self._names())
                # Without a lifespan: vLLM's freezes the garbage of a process that is its own.
                config = uvicorn.Config(
                    app,
                    lifespan="off",
                    ws="none",
                    log_config=None,
                    access_log=False,
                    timeout_graceful_shutdown=CLOSE_S,
                )
                self._server = uvicorn.Server(config)
            except Exception as error:  # noqa: BLE001  raised where it was asked for
                ready.set_exception(error)
                return
            ready.set_result(None)
            await self._server.serve(sockets=[self._socket])

    def _names(self) -> frozenset[str]:
        """Names under which it answers on the loopback address; elsewhere under any."""
        # Other sites' pages can have a browser here ask, under a name that they point to it.
        is_own = ipaddress.ip_address(self.host).is_loopback
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host} if is_own else ())


class Gate:
    """ASGI middleware: lets in who has the key, bounds bodies, and adds versions to answers."""

    def __init__(self, app: Any, api_key: str | None, names: frozenset[str]) -> None:
        self._app, self._names = app, names
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse

        headers = Headers(scope=scope)
        body, refusal = b"", self._refusal(scope["path"], headers)
        try:
            body = await _body(receive) if refusal is None else b""
        except ClientDisconnect:
            return
        except OverflowError:
            refusal = 413, f"a body must have at most {MAX_BODY_BYTES} bytes"
        if refusal is not None:
            code, told = refusal
            error = {"message": told, "type": "invalid_request_error", "code": code}
            answer = JSONResponse({"error": error}, code, {"connection": "close"})
            await answer(scope, receive, send)
            return
        if "x-session-id" not in headers and (user := _user(body)):
            scope = {**scope, "headers": [*scope["headers"], (b"x-session-id", user.encode())]}
        asked = Asked(headers.get("x-group-id"))
        ASKED.set(asked)
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Any:
            return next(whole, None) or await receive()

        await self._app(scope, replay, Stamped(send, asked).send)

    def _refusal(self, path: str, headers: Any) -> tuple[int, str] | None:
        host = headers.get("host", "").lower()
        if self._names and self._names.isdisjoint({host, host.rpartition(":")[0]}):
            return 421, "this address is not served under that name"
        given = headers.get("authorization", "").encode("latin-1")
        if self._bearer and path != "/health" and not secrets.compare_digest(given, self._bearer):
            return 401, "the API key is wrong or missing"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return 413, f"a body must have at most {MAX_BODY_BYTES} bytes, got {length}"
        return None


async def _body(receive: Any) -> bytes:
    from starlette.requests import ClientDisconnect

    parts, size, has_more = list[bytes](), 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise OverflowError
    return b"".join(parts)


def _user(body: bytes) -> str:
    """OpenAI's field for the end user, which vLLM reads and does nothing with."""
    if b'"user"' in body:
        with contextlib.suppress(ValueError, RecursionError):  # vLLM says what is wrong with it
            asked = json.loads(body)
            if isinstance(asked, dict) and isinstance(user := asked.get("user"), str):
                return user
    return ""


class Stamped:
    """Sends an answer with its policy versions: in a header, and in each JSON object."""

    def __init__(self, send: Any, asked: Asked) -> None:
        self._send, self._asked = send, asked
        self._start: Any = None  # held back until it is known what answers

    async def send(self, message: Any) -> None:
        from starlette.datastructures import MutableHeaders

        if message["type"] == "http.response.start":
            self._start = message
            return
        body, versions = message.get("body", b""), sorted(self._asked.versions)
        end = next((one for one in (b"}\n\n", b"}") if body.endswith(one)), b"")
        if versions and end:
            field = f',"{VERSIONS}":{json.dumps(versions)}'.encode()
            body = body.removesuffix(end) + field + end
        if self._start is not None:
            headers = MutableHeaders(raw=self._start["headers"])
            if versions:
                headers["x-policy-versions"] = ",".join(map(str, versions))
            if "content-length" in headers:
                headers["content-length"] = str(len(body))
            await self._send(self._start)
            self._start = None
        await self._send({**message, "body": body})

"""The HTTP server: who may ask, how much at once, and what every answer says of its versions."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from torchrl_vllm_sync.checks import check_integer, url_of
from torchrl_vllm_sync.errors import RewardError, UnsupportedArgumentError
from torchrl_vllm_sync.serve.client import MAX_KEY, make_app, server_args
from torchrl_vllm_sync.serve.sessions import (
    ASKED,
    DEFAULT_LIMIT,
    Asked,
    Sessions,
    chat_of,
    note_given,
)

MAX_BODY_BYTES = 32 << 20
_NAMED = re.compile(rb'"(user|session_id)"\s*:')  # fields that may name a session
SLOW_S = 60  # for a client to send what it asks, or to read on
CLOSE_S = 2  # for answers that are under way when the server is closed


class OpenAIServer:
    """What :meth:`AsyncVLLM.serve` returns: an OpenAI server, until it or the service ends.

    Example:
        >>> with service.serve() as server:
        ...     client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    Attributes:
        sessions: The :class:`~torchrl_vllm_sync.serve.sessions.Sessions` that asked this server,
            with ``capture``. They are the server's, as its keys are: they end with it, and another
            server of the service has others.

    Args:
        service: What answers.
        host, port, api_key, options, capture: As for :meth:`AsyncVLLM.serve`.

    Raises:
        UnsupportedArgumentError, NoReplicaAvailableError: As for :meth:`AsyncVLLM.serve`.
    """

    def __init__(
        self,
        service: Any,
        host: str,
        port: int,
        api_key: str | None,
        options: Mapping[str, Any],
        capture: int = False,
    ) -> None:
        key, limit = _key(api_key), _limit(capture)
        self.sessions: Any = Sessions(service.requests.tokenizer(), limit) if limit else None
        making = make_app(service, key, options, self.sessions)
        with ThreadPoolExecutor(1) as pool:  # as a notebook's thread has a loop of its own
            app: Any = pool.submit(asyncio.run, making).result()
        for path in ("/sessions", "/v1/sessions") if limit else ():
            path, rewarding = path + "/{name:path}/reward", _rewarding(self.sessions)
            app.router.routes.append(Route(path, rewarding, methods=["POST"]))
        listening = _listen(host, port)
        address: tuple[str, int] = listening.getsockname()[:2]
        self.host, self.port = address
        app = Gate(app, key, self.sessions)
        if ipaddress.ip_address(self.host).is_loopback:
            # Other sites' pages can have a browser here ask, under a name that they point to it.
            names = ["localhost", "127.0.0.1", self.host, f"[{self.host}]"]
            app = TrustedHostMiddleware(app, names)
        # Without a lifespan: vLLM's freezes the garbage of a process that is its own.
        plain: Any = {"lifespan": "off", "ws": "none", "log_config": None}
        config = uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=CLOSE_S, **plain)
        self._server = uvicorn.Server(config)
        run, name = self._server.run, "openai-server"
        self._thread = threading.Thread(target=run, args=([listening],), name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the server, as it is reached from this machine, without a path."""
        return url_of(self.host, self.port)

    @property
    def is_open(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the server; answers under way have two seconds. Idempotent."""
        self._server.should_exit = True
        self._thread.join(CLOSE_S + 10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_serving(
    host: str, port: int, api_key: str | None = None, *, capture: int = False, **options: Any
) -> None:
    """Refuses what :meth:`AsyncVLLM.serve` will not take, as far as that is known by now."""
    _key(api_key)
    _limit(capture)
    server_args(options)
    _listen(host, port).close()


def _key(given: Any) -> str | None:
    key = (os.environ.get("VLLM_API_KEY") or None) if given is None else given
    if key is not None and not (isinstance(key, str) and key and key.isascii()):
        raise UnsupportedArgumentError("api_key must be text of ASCII characters")
    return key


def _limit(capture: Any) -> int:
    """How many answers are kept."""
    if isinstance(capture, bool):
        return DEFAULT_LIMIT if capture else 0
    check_integer("capture", capture, 1)
    return int(capture)


def _listen(host: str, port: int) -> socket.socket:
    if isinstance(port, int) and not 0 <= port < 2**16:  # the C library takes its last 16 bits
        raise UnsupportedArgumentError(f"port must be from 0 to 65535, got {port}")
    try:
        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(found[4][:2], family=found[0], backlog=2048)
        # Connections have it from here: Linux closes one whose reader stands still.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SLOW_S)
        # asyncio does not set it for such sockets, and the first token would wait 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, UnicodeError, OverflowError, TypeError) as error:
        told = f"host and port must be free to listen on, got {host!r} and {port!r}: {error}"
        raise UnsupportedArgumentError(told) from error
    return listening


class Gate:
    """ASGI middleware: lets in who has the key, bounds bodies, and adds versions to answers."""

    def __init__(self, app: Any, api_key: str | None, sessions: Sessions | None) -> None:
        self._app, self._sessions = app, sessions
        self._bearer = b"" if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope)
        # vLLM's own check leaves out some paths.
        is_open = not self._bearer or scope["path"] == "/health"
        given = headers.get("authorization", "").encode("latin-1")
        asked = Asked(headers.get("x-group-id"))
        if self._sessions is not None:
            session = self._sessions._bound(given.removeprefix(b"Bearer ").decode("latin-1"))
            if session is not None:
                asked.session_id, asked.is_bound, given = session.id, True, self._bearer
                MutableHeaders(scope=scope)["authorization"] = given.decode("latin-1")
        if not (is_open or secrets.compare_digest(given, self._bearer)):
            await _refusal(401, "the API key is wrong or missing")(scope, receive, send)
            return
        size, body = int(headers.get("content-length", 0)), bytearray()
        has_more = scope["path"] != "/health"  # which anybody may ask, and which reads none
        try:
            async with asyncio.timeout(SLOW_S):
                while has_more and size <= MAX_BODY_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    size, has_more = max(size, len(body)), message.get("more_body", False)
        except TimeoutError:
            await _refusal(408, f"a body must come within {SLOW_S} s")(scope, receive, send)
            return
        if size > MAX_BODY_BYTES:
            told = f"a body must have at most {MAX_BODY_BYTES} bytes"
            await _refusal(413, told)(scope, receive, send)
            return
        if self._sessions is not None or _NAMED.search(body):
            body = _captured(self._sessions, asked, headers, body)
        else:
            asked.session_id = headers.get("x-session-id")
        whole = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])
        ASKED.set(asked)

        async def replay() -> Any:
            return next(whole, None) or await receive()

        await self._app(scope, replay, _stamping(send, asked))


def _refusal(code: int, told: str) -> JSONResponse:
    error = {"message": told, "type": "invalid_request_error", "code": code}
    return JSONResponse({"error": error}, code, {"connection": "close"})


def _captured(
    sessions: Sessions | None, asked: Asked, headers: Headers, body: bytearray
) -> bytearray:
    """The body with answers in it as they were sampled; notes whose session it is."""
    given: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # vLLM says what is wrong with it
        given = json.loads(body)
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    if not asked.is_bound:
        user = fields.get("user")  # OpenAI's for the end user, which may be a name of anything
        user = user if isinstance(user, str) and len(user) <= MAX_KEY else None
        names = fields.get("session_id"), headers.get("x-session-id"), user
        asked.session_id = next((one for one in names if one and isinstance(one, str)), None)
    asked.is_search, messages = bool(fields.get("use_beam_search")), fields.get("messages")
    if sessions is None or asked.session_id is None or not isinstance(messages, list):
        return body
    with contextlib.suppress(AttributeError, TypeError, RecursionError):  # so it does of messages
        if (session := sessions.get(asked.session_id)) is not None:
            messages = fields["messages"] = session._as_sampled(messages)
            body = bytearray(json.dumps(fields).encode())
        asked.chat = chat_of(messages)
    asked.is_cut = fields.get("truncate_prompt_tokens") is not None
    return body


def _rewarding(sessions: Sessions) -> Any:
    """Answers ``POST /sessions/{name}/reward``; who has a session's key may reward that one."""

    async def reward(request: Any) -> JSONResponse:
        name, asked = request.path_params["name"], ASKED.get()
        session = sessions.get(name)
        if session is None or (asked.is_bound and asked.session_id != name):
            return _refusal(404, f"there is no session {name[:MAX_KEY]!r}")
        try:
            session.reward(json.loads(await request.body())["reward"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            told = str(error) if isinstance(error, RewardError) else f"no reward: {error!r}"
            return _refusal(422, told)
        return JSONResponse({"session": name, "reward": session.score})

    return reward


def _stamping(send: Any, asked: Asked) -> Any:
    """Sends an answer with its policy versions: in a header, and in each JSON object."""
    start: Any = None  # held back until it is known what answers
    chat, told = asked.chat if asked.session_id is not None else None, bytearray()

    async def stamp(message: Any) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
            return
        body, known = message.get("body", b""), sorted(asked.versions)
        if chat is not None:
            told.extend(body)
            if asked.answers and not message.get("more_body"):
                note_given(bytes(told), asked.answers)
        end = next((one for one in (b"}\n\n", b"}") if known and body.endswith(one)), b"")
        if end:
            body = body.removesuffix(end) + f',"policy_versions":{known}'.encode() + end
        if start is not None:
            headers = MutableHeaders(raw=start["headers"])
            if known:
                headers["x-policy-versions"] = ",".join(map(str, known))
            if "content-length" in headers:
                headers["content-length"] = str(len(body))
            await send(start)
            start = None
        await send({**message, "body": body})

    return stamp

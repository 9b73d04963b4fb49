"""A real router over HTTP, in front of stub workers that say which one was reached.

The workers are in this process: each answers a request when it is told to, so that a script decides
how many are in flight. The router is a process of its own, of an interpreter that has it installed;
its own Python package only parses arguments and starts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from benchmarks.peers.script import End, EndSession, Leave, Send, Wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from benchmarks.peers.script import Script

__all__ = ["HttpRouter", "PeerError", "RouterKind", "choices_over_http"]

_START_S = 60.0
_ANSWER_S = 20.0
_SETTLE_S = 0.003  # for the router to notice that a response is through
_LOOPBACK = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}


class PeerError(RuntimeError):
    """A real router did not start, or did not do what the script needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind:
    """How a router is started and spoken to, by ``/generate`` as SGLang has it.

    Attributes:
        name: Of its distribution.
        listing: Where it lists its workers, in the order in which it looks at them.
        program: What its interpreter runs; the words of ``arguments`` follow.
        arguments: Words for workers' addresses, the port, the port of metrics and the settings.
        session_header: Header that names the session; None if the router has none.
        end_session: Path to which the end of a session is told; None if the router is not told.
    """

    name: str
    program: Sequence[str]
    arguments: Callable[[list[str], int, int, dict[str, Any]], list[str]]
    listing: str
    session_header: str | None = None
    end_session: str | None = None


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:  # workers are stubs: there is no model to look for elsewhere
        return subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | _LOOPBACK)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass(slots=True)
class _Workers:
    """The stub workers: who was reached by which request, and what lets each answer."""

    addresses: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    reached: dict[str, asyncio.Future[int]] = field(default_factory=dict)
    answers: dict[str, asyncio.Event] = field(default_factory=dict)

    async def handle(self, index: int, request: web.Request) -> web.Response:
        """Anything that a router asks a worker."""
        if request.method == "GET":
            info = {"id": "stub", "object": "model", "served_model_name": "stub", "version": "0"}
            return web.json_response({"data": [info], "object": "list", "status": "ok", **info})
        name = json.loads(await request.read())["rid"]
        if not self.reached[name].done():
            self.reached[name].set_result(index)
        await self.answers[name].wait()
        return web.json_response({"text": "", "choices": [], "meta_info": {"id": name}})


class HttpRouter:
    """A running router and its workers; made by :meth:`running`."""

    def __init__(self, kind: RouterKind, address: str, workers: _Workers) -> None:
        self._kind = kind
        self._address = address
        self._workers = workers
        self._requests: dict[int, asyncio.Task[None]] = {}

    @property
    def worker_addresses(self) -> list[str]:
        """The workers' addresses, in the router's order."""
        return [self._workers.addresses[index] for index in self._workers.order]

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        kind: RouterKind,
        interpreter: Path,
        settings: dict[str, Any],
        *,
        num_workers: int,
        log: Path,
    ) -> AsyncIterator[HttpRouter]:
        """Starts workers and a router, and ends them.

        Args:
            kind: Which router.
            interpreter: Python that has it installed.
            settings: Of its policy.
            num_workers: Stub workers.
            log: File for what the router prints.

        Raises:
            PeerError: The router ended, or did not answer in time.
        """
        workers = _Workers()
        ports = _free_ports(num_workers)
        runners = []
        process: subprocess.Popen[bytes] | None = None
        try:
            for index in range(num_workers):
                runner = web.AppRunner(_application(workers, index), access_log=None)
                await runner.setup()
                runners.append(runner)
                await web.TCPSite(runner, "127.0.0.1", ports[index]).start()
                workers.addresses.append(f"http://127.0.0.1:{ports[index]}")
            port, metrics = _free_ports(2)
            words = kind.arguments(workers.addresses, port, metrics, settings)
            process = _start([str(interpreter), *kind.program, *words], log)
            address = f"http://127.0.0.1:{port}"
            listed = await _wait_for_workers(kind, address, num_workers, process, log)
            workers.order = [workers.addresses.index(one) for one in listed]
            yield cls(kind, address, workers)
        finally:
            for event in workers.answers.values():
                event.set()
            if process is not None:
                process.kill()
                process.wait(_ANSWER_S)
            for runner in runners:
                await runner.cleanup()

    async def choices(self, script: Script, *, words: bool = False) -> list[int]:
        """What the router chooses for a script's requests: workers by their place in its order.

        Args:
            script: What happens.
            words: Prompts are words instead of characters (``Script.text``).

        Raises:
            PeerError: A request reached no worker in time.
        """
        chosen: list[int] = []
        connector = TCPConnector(limit=0)
        timeout = ClientTimeout(total=None)
        async with ClientSession(self._address, connector=connector, timeout=timeout) as client:
            for step in script.steps:
                match step:
                    case Send():
                        request = len(chosen)
                        text = script.text(request, words=words)
                        chosen.append(await self._send(client, text, request, step))
                    case End(request):
                        await self._end(request)
                    case EndSession(session):
                        await self._end_session(client, session)
                    case Leave(replica):
                        await self._remove(client, replica)
                    case Wait(seconds):
                        await asyncio.sleep(seconds)
            for request in list(self._requests):
                await self._end(request)
        return chosen

    async def _send(self, client: ClientSession, text: str, request: int, send: Send) -> int:
        name = str(request)
        reached = self._workers.reached[name] = asyncio.get_running_loop().create_future()
        self._workers.answers[name] = asyncio.Event()
        headers = {}
        body = {"text": text, "rid": name, "stream": False}
        key = _key(send)
        if self._kind.session_header and key:
            headers[self._kind.session_header] = key

        async def post() -> None:
            async with client.post("/generate", json=body, headers=headers) as response:
                await response.read()
                if response.status != 200:
                    raise PeerError(f"{self._kind.name}: request {name}: {response.status}")

        task = self._requests[request] = asyncio.create_task(post())
        done, _ = await asyncio.wait(
            {task, reached}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED
        )
        if reached not in done:
            reason = task.exception() if task in done else "no worker was reached in time"
            raise PeerError(f"{self._kind.name}: request {name}: {reason}")
        return self._workers.order.index(reached.result())

    async def _end(self, request: int) -> None:
        self._workers.answers[str(request)].set()
        await asyncio.wait_for(self._requests.pop(request), _ANSWER_S)
        await asyncio.sleep(_SETTLE_S)

    async def _end_session(self, client: ClientSession, session: int) -> None:
        if self._kind.end_session is None:
            return
        name = {"session_id": f"session-{session}"}
        async with client.post(self._kind.end_session, params=name) as response:
            await response.read()
            if response.status != 200:
                raise PeerError(f"{self._kind.name}: end of session {session}: {response.status}")

    async def _remove(self, client: ClientSession, replica: int) -> None:
        """Takes a worker out, and waits until the router has done so."""
        address = self.worker_addresses[replica]
        async with client.get(self._kind.listing) as response:
            listed = (await response.json(content_type=None))["workers"]
        identity = next(worker["id"] for worker in listed if worker["url"] == address)
        async with client.delete(f"/workers/{identity}") as response:
            await response.read()
        deadline = time.monotonic() + _ANSWER_S
        while address in await _list_workers(client, self._kind.listing):
            if time.monotonic() > deadline:
                raise PeerError(f"{self._kind.name} did not remove {address}")
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)  # the policy hears of it a little later than the list


def _key(send: Send) -> str | None:
    if send.session != -1:
        return f"session-{send.session}"
    return None if send.group == -1 else f"group-{send.group}"


def _application(workers: _Workers, index: int) -> web.Application:
    async def handle(request: web.Request) -> web.Response:
        return await workers.handle(index, request)

    application = web.Application(client_max_size=2**24)
    application.router.add_route("*", "/{path:.*}", handle)
    return application


async def _wait_for_workers(
    kind: RouterKind, address: str, num_workers: int, process: subprocess.Popen[bytes], log: Path
) -> list[str]:
    """Waits until the router knows so many workers; returns their addresses in its order."""
    deadline = time.monotonic() + _START_S
    async with ClientSession(address, timeout=ClientTimeout(total=2)) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise PeerError(f"{kind.name} ended with {process.returncode}:\n{_tail(log)}")
            with suppress(ClientError, TimeoutError):
                listed = await _list_workers(client, kind.listing)
                if len(listed) == num_workers:
                    return listed
            await asyncio.sleep(0.2)
    raise PeerError(f"{kind.name} did not list {num_workers} workers in time:\n{_tail(log)}")


async def _list_workers(client: ClientSession, path: str) -> list[str]:
    async with client.get(path) as response:
        if response.status != 200:
            return []
        answer = await response.json(content_type=None)
    if "urls" in answer:
        return answer["urls"]
    return [worker["url"] for worker in answer["workers"]]


def choices_over_http(
    kind: RouterKind,
    interpreter: Path,
    settings: dict[str, Any],
    script: Script,
    *,
    num_workers: int,
    log: Path,
    words: bool = False,
) -> tuple[list[int], list[str]]:
    """Runs a script on a router of its own; returns the choices and the addresses in order.

    Args:
        kind: Which router.
        interpreter: Python that has it installed.
        settings: Of its policy.
        script: What happens.
        num_workers: Stub workers.
        log: File for what the router prints.
        words: Prompts are words instead of characters (``Script.text``).

    Raises:
        PeerError: The router did not start, or a request reached no worker.
    """

    async def run() -> tuple[list[int], list[str]]:
        async with HttpRouter.running(
            kind, interpreter, settings, num_workers=num_workers, log=log
        ) as router:
            return await router.choices(script, words=words), router.worker_addresses

    return asyncio.run(run())

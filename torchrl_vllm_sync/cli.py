"""The command ``torchrl-vllm-sync``: looks at services of a Ray cluster from a terminal."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import socket
import time
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import ServiceClosedError, SyncError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from torchrl_vllm_sync.observe.status import ServiceStatus
    from torchrl_vllm_sync.service.service import AsyncVLLM


DEFAULT_WATCH_S = 1.0
# Reports come once a second; tokens per second need two of them.
FIRST_LOOK_S = 1.5
CONNECT_TIMEOUT_S = 5.0
_EPILOG = """\
exit status: 0 when it has shown what there is, 1 when there is no such service or no Ray cluster,
2 when the arguments are wrong"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from rich.console import Console

    options = _parser().parse_args(arguments)
    try:
        _connect(options.address)
        show = _list_services if options.name is None else _show_service
        show(options, Console())
    except SyncError as error:
        Console(stderr=True).print(f"torchrl-vllm-sync: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:  # how --watch ends
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrl-vllm-sync", epilog=_EPILOG)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="show what a service is and does now",
        description="Shows what a service is and does now, or lists the services.",
        epilog=_EPILOG,
    )
    status.add_argument("name", nargs="?", metavar="NAME", help="the service; all if not given")
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=DEFAULT_WATCH_S,
        metavar="SECONDS",
        help="look again and again, every second unless told otherwise",
    )
    status.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    status.add_argument(
        "--address", metavar="ADDR", help="Ray cluster; RAY_ADDRESS, or this machine's, by default"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds greater than 0, got {text!r}")
    return seconds


def _connect(address: str | None) -> None:
    """Joins a Ray cluster, unless this process has joined one."""
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this machine" if address == "auto" else f"at {address}"
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise ServiceClosedError(
            f"no Ray cluster was found {where}; name one by --address or RAY_ADDRESS ({error})"
        ) from error


def _check_reachable(address: str) -> None:
    """Fails within seconds where Ray would go on trying for minutes."""
    import ray.util

    if address == "local":
        raise ValueError("it would be a new one")
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        return  # a client's address, or nothing that Ray takes long to refuse
    own = host in ("localhost", "127.0.0.1")  # by which Ray means this node's address
    node = ray.util.get_node_ip_address() if own else host
    socket.create_connection((node, int(port)), CONNECT_TIMEOUT_S).close()


def _repeat(show: Callable[[], None], options: argparse.Namespace) -> None:
    """Shows once, or again and again."""
    show()
    while options.watch is not None:
        time.sleep(options.watch)
        show()


def _list_services(options: argparse.Namespace, console: Console) -> None:
    from torchrl_vllm_sync.observe.views import services_view
    from torchrl_vllm_sync.service.replicas import running_services

    def show() -> None:
        services = running_services()
        if options.json:
            _print_json(console, {"services": services})
        elif services:
            console.print(services_view(services))
        else:
            console.print("no service runs on this Ray cluster")

    _repeat(show, options)


def _show_service(options: argparse.Namespace, console: Console) -> None:
    """Shows one service, once or until it ends."""
    from rich.live import Live

    from torchrl_vllm_sync.observe.views import status_view
    from torchrl_vllm_sync.service.service import attach

    with attach(options.name) as service:
        service.status()
        time.sleep(FIRST_LOOK_S)
        if options.json:
            _repeat(lambda: _print_json(console, _status(service).as_dict()), options)
        elif options.watch is None:
            console.print(status_view(_status(service), console.width))
        else:
            with Live(console=console, auto_refresh=False) as live:
                _repeat(
                    lambda: live.update(status_view(_status(service), console.width), refresh=True),
                    options,
                )


def _status(service: AsyncVLLM) -> ServiceStatus:
    """Returns what a service is now, unless it has ended."""
    status = service.status()
    if status.replicas and all(one.state is ReplicaState.CLOSED for one in status.replicas):
        raise ServiceClosedError(f"service {status.name} was shut down")
    return status


def _print_json(console: Console, value: object) -> None:
    console.file.write(json.dumps(value) + "\n")
    console.file.flush()


if __name__ == "__main__":
    raise SystemExit(main())

"""The command ``torchrl-vllm-sync``: looks at services, serves a model, and trains with GRPO."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import ConfigError, ServiceClosedError, SyncError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from rich.console import Console


WATCH_S = 1.0
# Reports come once a second; tokens per second need two of them.
FIRST_LOOK_S = 1.5
CONNECT_TIMEOUT_S = 5.0
_EPILOG = """\
exit status: 0 when it has shown what there is, 1 when there is no such service, no Ray cluster
or no history, 2 when the arguments are wrong"""
_GRPO_EPILOG = """\
without any setting a tiny random model learns on two CPU engines, in a minute. Files and settings
have the form of TorchRL's sota-implementations/grpo, as in `grpo train.total_dialog_turns=640
optimizer.lr=1e-3`; torchrl_vllm_sync/rl/config.py explains each.
exit status: 0 when it has trained, 1 when it failed, 2 when settings are wrong"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from rich.console import Console

    options = _parser().parse_args(arguments)
    try:
        options.run(options, Console())
    except SyncError as error:
        Console(stderr=True).print(f"torchrl-vllm-sync: {error}", style="red", markup=False)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # how --watch ends
        return 130 if options.run is _train else 0
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Serves a model from several vLLM engines, trains with GRPO, and watches services."
    parser = argparse.ArgumentParser("torchrl-vllm-sync", description=about, epilog=_EPILOG)
    version = metadata.version("torchrl-vllm-sync")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], about: str, epilog: str = _EPILOG) -> Any:
        parser = commands.add_parser(name, help=about, description=about, epilog=epilog)
        parser.set_defaults(run=run)
        return parser.add_argument

    add = command("status", _show, "show what a service is and does now, or list the services")
    add("name", nargs="?", metavar="NAME", help="the service; all if not given")
    watch = "look again and again, every second unless told otherwise"
    add("--watch", nargs="?", type=_seconds, const=WATCH_S, metavar="SECONDS", help=watch)
    add("--json", action="store_true", help="print JSON, one line for each look")
    where = "Ray cluster; RAY_ADDRESS, or this machine's, by default"
    add("--address", metavar="ADDR", help=where)
    about = "show the history that a dashboard has kept in a file, in a browser"
    add = command("dashboard", _show_history, about)
    add("file", metavar="FILE", help="what dashboard(history=FILE) has written")
    add("--port", type=int, default=0, help="port to listen on; a free one")
    about = "serve a model to OpenAI clients, from several engines"
    known = "engine arguments and options are those of vllm serve; serves until it is interrupted"
    add = command("serve", _serve, about, known)
    add("model", metavar="MODEL", help="name or path of the checkpoint")
    add("--replicas", type=int, default=1, help="engines; 1 by default")
    add("--host", default="127.0.0.1", help="address to listen on; this machine's own by default")
    add("--port", type=int, default=8000, help="port to listen on; 8000 by default")
    named = {"type": _setting, "default": [], "metavar": "NAME=VALUE"}
    add("--engine", action="append", help="an engine argument", **named)
    add("--option", action="append", help="an option of the server", **named)
    about = "train with GRPO: start engines, sample, learn and push"
    add = command("grpo", _train, about, _GRPO_EPILOG)
    where = "YAML with settings; several are put over each other, the last one on top"
    add("--config", metavar="FILE", action="append", default=[], help=where)
    add("--resume", action="store_true", help="go on from the newest save: logging.resume=must")
    add("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="a setting, on top")
    return parser


def _train(options: argparse.Namespace, console: Console) -> None:
    """Trains, once the settings are known to be right."""
    from torchrl_vllm_sync.rl.config import GRPOConfig

    overrides = [*options.overrides, *["logging.resume=must"] * options.resume]
    config = GRPOConfig.load(*options.config, overrides=overrides)
    from torchrl_vllm_sync.rl.grpo import train_grpo  # imports torch

    sys.path.insert(0, os.getcwd())  # for env.dataset=module:function
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    train_grpo(config)
    kept, logs = config.logging.checkpoint_dir, config.logging.log_dir
    weights = f"weights in {kept}" if kept else "weights were not saved: set logging.checkpoint_dir"
    console.print(f"logs in {logs}; {weights}", markup=False)


def _serve(options: argparse.Namespace, console: Console) -> None:
    """Serves until it is interrupted or terminated."""
    from torchrl_vllm_sync.checks import collect_rarely
    from torchrl_vllm_sync.serve.server import check_serving
    from torchrl_vllm_sync.service.service import AsyncVLLM

    serving: Any = {"host": options.host, "port": options.port, **dict(options.option)}
    check_serving(**serving)  # engines take minutes to start
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings, replicas = dict(options.engine), options.replicas
    with AsyncVLLM.from_pretrained(options.model, num_replicas=replicas, **settings) as service:
        server = service.serve(**serving)
        collect_rarely()
        name = settings.get("served_model_name", options.model)
        console.print(f"serving at {server.url}/v1 as {name} until Ctrl-C", markup=False)
        for _ in _looks(WATCH_S):
            if not server.is_open:
                raise ServiceClosedError("the server has ended")


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    name = name.replace("-", "_")  # as of vllm serve
    with contextlib.suppress(yaml.YAMLError):
        if name.isidentifier() and equals:
            return name, yaml.safe_load(value)
    raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be seconds greater than 0, got {text!r}")


def _show(options: argparse.Namespace, console: Console) -> None:
    """Shows a service, or the services, without importing vLLM, which takes seconds."""
    # Ray (2.60) imports an actor's class along with its handle. Where that fails it makes do with
    # the names of the methods: function_manager.py, _create_fake_actor_class.
    modules: dict[str, Any] = sys.modules
    if was_absent := "vllm" not in modules:
        modules["vllm"] = None
    try:
        _connect(options.address)
        (_list_services if options.name is None else _show_service)(options, console)
    finally:
        if was_absent:
            del modules["vllm"]


def _connect(address: str | None) -> None:
    """Joins a Ray cluster, unless this process has joined one."""
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
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


def _looks(watch_s: float | None) -> Iterator[None]:
    """Once, or again and again."""
    yield
    while watch_s is not None:
        time.sleep(watch_s)
        yield


def _show_history(options: argparse.Namespace, console: Console) -> None:
    """Shows a file until it is interrupted."""
    from torchrl_vllm_sync.observe.page import Dashboard

    with Dashboard(None, port=options.port, history=options.file) as board:
        console.print(f"{options.file} is shown at {board.url} until Ctrl-C", markup=False)
        for _ in _looks(WATCH_S):
            if not board.is_open:
                break


def _list_services(options: argparse.Namespace, console: Console) -> None:
    from torchrl_vllm_sync.observe.views import services_view
    from torchrl_vllm_sync.service.replicas import running_services

    for _ in _looks(options.watch):
        services = running_services()
        if options.json:
            console.out(json.dumps({"services": services}), highlight=False)
        else:
            none = "no service runs on this Ray cluster"
            console.print(services_view(services) if services else none)


def _show_service(options: argparse.Namespace, console: Console) -> None:
    """Shows one service, once or until it ends."""
    from rich.live import Live

    from torchrl_vllm_sync.observe.views import status_view
    from torchrl_vllm_sync.service.replicas import observed

    is_live = options.watch is not None and not options.json
    live = Live(console=console, auto_refresh=False)
    with observed(options.name) as look:
        look()
        time.sleep(FIRST_LOOK_S)
        with live if is_live else contextlib.nullcontext():
            for _ in _looks(options.watch):
                status = look()
                states = {one.state for one in status.replicas}
                if states == {ReplicaState.CLOSED}:
                    raise ServiceClosedError(f"service {status.name} was shut down")
                if options.json:
                    console.out(json.dumps(status.as_dict()), highlight=False)
                elif is_live:
                    live.update(status_view(status, console.width), refresh=True)
                else:
                    console.print(status_view(status, console.width))


if __name__ == "__main__":
    raise SystemExit(main())

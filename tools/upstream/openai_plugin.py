"""A pytest plugin that has vLLM's own tests of its OpenAI server ask this library's front.

``make upstream-openai SRC=<sources of vLLM> MODEL=<checkpoint>`` loads it. No file of vLLM is
changed, and of its sources only ``tests`` is imported:

- ``RemoteOpenAIServer`` opens a front over two replicas, with the arguments that a test gives it;
- the names of published checkpoints resolve to the one that ``MODEL`` names, through a Hugging Face
  cache made for the run, with the network switched off;
- tests that ask no server, or need what the checkpoint has not, are left out.
With ``UPSTREAM_SERVER=vllm`` the same tests ask ``vllm serve`` on the same checkpoint.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upstream_plugin import HOME, REVISION

if TYPE_CHECKING:
    import pytest

NAMES = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
# One engine for nearly all files, in the place of what they say of engines.
CPU = "--dtype float32 --enforce-eager --max-model-len 8192 --kv-cache-memory-bytes 536870912"
LEFT_OUT = ("lora", "reasoning", "prefix-caching", "chunked-prefill", "--max-num", "--max-model")
LEFT_OUT += ("--dtype", "--enforce-eager", "--gpu-memory", "--structured-outputs-config")
# Adapters, a reasoning model, a context of 10,100 tokens, and time to fill one of 8,192.
NEEDED = ("lora", "watermarked", "reasoning", "True-auto", "True-required", "True-tool_choice2")
NEEDED += ("request_cancellation", "max_tokens_when_omitted")
CHECKPOINT = os.path.realpath(os.environ["MODEL"])
services: dict[str, Any] = {}  # the one that is open, by its engine arguments


def pytest_configure() -> None:
    """Makes the cache and swaps the server, before any test file is imported."""
    home = Path(tempfile.mkdtemp(prefix="upstream-tests-"))
    os.environ.update(
        {HOME: str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
    )
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    for name in (*NAMES, "charent/self_cognition_Alice", "typeof/zephyr-7b-beta-lora"):
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / REVISION).symlink_to(CHECKPOINT)
    swap_server()


def pytest_unconfigure() -> None:
    """Ends the service and removes the cache."""
    close_service()
    shutil.rmtree(os.environ.pop(HOME), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leaves out what asks no server, or needs what the checkpoint has not."""
    kept = [one for one in items if asks_server(one) and not any(n in one.name for n in NEEDED)]
    config.hook.pytest_deselected(items=[one for one in items if one not in kept])
    items[:] = kept


def asks_server(item: Any) -> bool:
    """Whether a test has a server: as a fixture, or started by itself."""
    has_fixture = any("server" in name for name in item.fixturenames)
    return has_fixture or "RemoteOpenAIServer" in inspect.getsource(item.function)


def for_cpu(arguments: list[str]) -> list[str]:
    """Arguments of a server, with those of a CPU's engine in the place of ``LEFT_OUT``."""
    kept = [
        one
        for one, last in zip(arguments, ["", *arguments], strict=False)
        if not any(name in one or (name in last and one[:2] != "--") for name in LEFT_OUT)
    ]
    return [*kept, *CPU.split(), "--served-model-name", *NAMES]


def close_service() -> None:
    """Ends the open service, if there is one."""
    for key in list(services):
        services.pop(key).shutdown()


def service_of(engine_args: Any) -> Any:
    """The service with these arguments; one with others is ended for it."""
    from torchrl_vllm_sync import AsyncVLLM

    if (key := repr(engine_args)) not in services:
        close_service()
        services[key] = AsyncVLLM.launch(engine_args, 2, num_cpus_per_replica=0, verbose=False)
    return services[key]


def named_vllm() -> dict[str, str]:
    """Environment in which ``vllm`` starts, which looks for a package of that name alone."""
    import vllm

    home, version = Path(os.environ[HOME], "named"), f"{vllm.__version__.partition('+')[0]}+cpu"
    record = home / f"vllm-{version}.dist-info" / "METADATA"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"Name: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": str(home)}


def swap_server() -> None:
    """Sets ``RemoteOpenAIServer`` to one that opens a front, where tests import it from."""
    import tests.utils  # vLLM's
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server_class: Any = tests.utils.RemoteOpenAIServer

    class Own(server_class):
        """``vllm serve``, on the checkpoint that there is."""

        def _pre_download_model(self, *_: Any) -> None: ...

        def _start_server(self, _: str, arguments: list[str], env: Any) -> None:
            super()._start_server(CHECKPOINT, for_cpu(arguments), {**(env or {}), **named_vllm()})

    class Front(Own):
        """A front of this library."""

        def _start_server(self, _: str, arguments: list[str], env: Any) -> None:
            parser = make_arg_parser(FlexibleArgumentParser())
            args = parser.parse_args(["--model", CHECKPOINT, *for_cpu(arguments)])
            options = {
                field.name: getattr(args, field.name)
                for field in dataclasses.fields(BaseFrontendArgs)
                if getattr(args, field.name) != getattr(BaseFrontendArgs(), field.name)
            }
            service = service_of(AsyncEngineArgs.from_cli_args(args))
            options["api_key"] = (env or {}).get("VLLM_API_KEY")
            self.front = service.serve(port=self.port, **options)

        def _poll(self) -> int | None:
            return None if self.front.is_open else 1

        def _shutdown(self) -> None:
            self.front.close()

    swapped = Own if os.environ.get("UPSTREAM_SERVER") == "vllm" else Front
    vars(tests.utils)["RemoteOpenAIServer"] = swapped

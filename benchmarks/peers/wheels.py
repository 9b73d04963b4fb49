"""How the real routers that come as programs are started and spoken to."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.http_router import RouterKind

__all__ = ["SGLANG_ROUTER", "SMG", "VLLM_ROUTER"]


def _words(addresses: list[str], port: int, metrics: int, settings: dict[str, Any]) -> list[str]:
    words = ["--worker-urls", *addresses, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    words += ["--disable-retries", "--worker-startup-check-interval", "1"]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _sglang_words(
    addresses: list[str], port: int, metrics: int, settings: dict[str, Any]
) -> list[str]:
    words = _words(addresses, port, metrics, settings)
    return [*words, "--disable-health-check", "--log-level", "warn"]


def _vllm_words(
    addresses: list[str], port: int, metrics: int, settings: dict[str, Any]
) -> list[str]:
    return [*_words(addresses, port, metrics, settings), "--log-level", "warning"]


# The launcher's parser leaves out policies that the wheel's router has.
_SGLANG_PROGRAM = """
import sys
from sglang_router import launch_router
words = sys.argv[1:]
position = words.index("--policy")
policy = words[position + 1]
parsed = launch_router.parse_router_args(words[:position] + words[position + 2 :])
parsed.policy = policy
launch_router.launch_router(parsed)
"""

SGLANG_ROUTER = RouterKind(
    name="sglang-router",
    program=("-c", _SGLANG_PROGRAM),
    arguments=_sglang_words,
    listing="/workers",
    session_header="x-smg-routing-key",
)

VLLM_ROUTER = RouterKind(
    name="vllm-router",
    program=("-m", "vllm_router.launch_router"),
    arguments=_vllm_words,
    listing="/list_workers",
    session_header="x-session-id",
    end_session="/finish_session",
)

SMG = RouterKind(
    name="smg",
    program=("-m", "smg.launch_router"),
    arguments=_sglang_words,
    listing="/workers",
    session_header="x-smg-routing-key",
)

"""What NCCL reads from the environment when a communicator is made."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["nccl_environment"]

# ProcessGroupNCCL's watchdog would end the whole process when a collective fails.
QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
# Pinned in vLLM's workers by batch invariance; both ends of a communicator must agree on them.
PINNED_BY_VLLM = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
)


@contextlib.contextmanager
def nccl_environment(interface: str | None) -> Iterator[None]:
    """Sets the variables, and takes them back afterwards.

    Args:
        interface: Network interface to use; ``None`` leaves the choice to NCCL.
    """
    wanted: dict[str, str | None] = dict(QUIET_NCCL)
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        wanted |= dict.fromkeys(PINNED_BY_VLLM)
    if interface is not None:
        # "=": this one, not all whose names begin so.
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    before = {name: os.environ.get(name) for name in wanted}
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

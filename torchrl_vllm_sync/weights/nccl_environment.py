"""What NCCL reads from the environment when a communicator is made."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_held_to_one_channel", "nccl_environment"]

# ProcessGroupNCCL's watchdog would end the whole process when a collective fails.
QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
CHANNELS = "NCCL_MAX_NCHANNELS"
# Pinned in vLLM's workers by batch invariance; ends of a communicator that do not agree on them
# wait for each other for ever.
PINNED_BY_VLLM = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", CHANNELS)


def is_held_to_one_channel() -> bool:
    """Whether NCCL makes no communicator with more than one channel in this process any more.

    It reads how many there may be once, with a process's first communicator. A batch-invariant
    vLLM worker that has a communicator with other workers has said: one. From NCCL 2.29.7 on it
    reads again, which vLLM from 0.32 on asks for (``vllm/utils/nccl.py``, ``pin_nccl_env``).
    """
    return (
        os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        and os.environ.get(CHANNELS) == "1"
        and CHANNELS not in os.environ.get("NCCL_NO_CACHE", "").split(",")
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


@contextlib.contextmanager
def nccl_environment(interface: str | None) -> Iterator[None]:
    """Sets the variables, and takes them back afterwards.

    The first collective has to be inside: only then does torch make the communicator.

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

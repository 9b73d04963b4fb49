"""The share of time in which this host's GPUs are busy, as NVML tells it."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import deque
from typing import Any, Self

logger = logging.getLogger(__name__)

POLL_S = 0.02
_MAX_POLLS = 50_000  # of the last quarter of an hour
_JOIN_TIMEOUT_S = 10.0


class GPUUse:
    """Polls NVML for the share of time in which each GPU that CUDA may use runs anything.

    NVML itself averages over the last 1/6 s to 1 s, so that only longer times say something. Where
    NVML or what it is asked is not there, nothing is known.
    """

    def __init__(self) -> None:
        self._polls: deque[tuple[float, list[float]]] = deque(maxlen=_MAX_POLLS)
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        from vllm.third_party import pynvml

        self._ended.clear()
        self._thread = threading.Thread(
            target=self._poll, args=(pynvml,), name="gpu-use", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _poll(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # there is no GPU of NVIDIA's
            logger.debug("GPU use is not known: %s", error)
            return
        try:
            gpus = _visible(nvml)
            while gpus and not self._ended.wait(POLL_S):
                rates = [nvml.nvmlDeviceGetUtilizationRates(one) for one in gpus]
                self._polls.append((time.perf_counter(), [one.gpu / 100 for one in rates]))
        except nvml.NVMLError as error:  # a part of a GPU (MIG), or one that fell off the bus
            logger.warning("GPU use is not known any more: %s", error)
        finally:
            nvml.nvmlShutdown()

    def between(self, begin: float, end: float) -> list[float] | None:
        """Shares of each GPU between two times of ``time.perf_counter()``; ``None`` if unknown."""
        polls = [shares for when, shares in self._polls.copy() if begin <= when <= end]
        return [statistics.fmean(of_one) for of_one in zip(*polls, strict=True)] or None


def _visible(nvml: Any) -> list[Any]:
    """NVML's handles of the GPUs that this process may use, by their numbers or UUIDs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    names = filter(None, map(str.strip, named.split(",")))
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_index(int(one)) if one.isdigit() else by_uuid(one) for one in names]

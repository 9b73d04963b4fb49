"""What the log-probabilities of one step cost the host: sent as vLLM does, and packed.

Each step's outputs are made as the scheduler makes them, encoded, decoded, and added to their
samples, in one process and without an engine: on the way of a real step the first two happen in the
engine core's process and the last two in the one that it answers. ``none`` is a step whose requests
want no log-probabilities. The systems take turns.

``python -m benchmarks.packed_logprobs`` takes seconds.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.record import Recorder, parser_of
from torchrl_vllm_sync.engine.internals import pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

SYSTEMS = ("none", "vLLM", "packed")


def step(system: str, whole: LogprobsLists, samples: dict[str, Any]) -> dict[str, float]:
    """Sends one step's outputs; returns its milliseconds by phase."""
    times = [time.perf_counter()]
    outputs = [
        EngineCoreOutput(
            name, [row], new_logprobs=None if system == "none" else whole.slice_request(row, 1)
        )
        for row, name in enumerate(samples)
    ]
    if system == "packed":
        pack(outputs)
    times.append(time.perf_counter())
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    times.append(time.perf_counter())
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs
    times.append(time.perf_counter())
    if system == "packed":
        unpack(arrived, samples)
    for one in arrived:
        samples[one.request_id].logprobs_processor.update_from_output(one)
    times.append(time.perf_counter())
    phases = np.diff(times) * 1e3
    names = ("make", "encode", "decode", "add")
    return dict(zip((*names, "step"), (*phases.tolist(), float(phases.sum())), strict=True))


def main(argv: list[str] | None = None) -> Path:
    arguments = parser_of(__doc__, "few steps of few rows").parse_args(argv)
    recorder = Recorder("packed_logprobs")
    recorder.check(smoke=arguments.smoke)
    rng = np.random.default_rng(0)
    for rows in (16,) if arguments.smoke else (32, 256, 1024):
        whole = LogprobsLists(
            rng.integers(0, 150_000, (rows, 1)).astype(np.int32),
            rng.standard_normal((rows, 1)).astype(np.float32),
            rng.integers(1, 1000, rows).astype(np.int32),
        )
        found: dict[str, list[dict[str, float]]] = {one: [] for one in SYSTEMS}
        for _ in range(5 if arguments.smoke else 200):
            for system, steps in found.items():
                samples = {
                    f"{row}-{row:08x}": SimpleNamespace(
                        logprobs_processor=LogprobsProcessor(
                            None, FlatLogprobs(), None, 0.0, 0, None
                        )
                    )
                    for row in range(rows)
                }
                steps.append(step(system, whole, samples))
        for system, steps in found.items():
            for phase in steps[0]:
                values = [one[phase] for one in steps]
                recorder.add(
                    case=f"{rows} rows", system=system, metric=phase, unit="ms", samples=values
                )
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])

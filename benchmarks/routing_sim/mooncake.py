"""Public traces in the format of Mooncake's: requests by the clock, known by hashes of blocks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.scenario import Scenario
from benchmarks.routing_sim.workload import Session, Turn

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HASHED_TOKENS", "read_mooncake"]

HASHED_TOKENS = 512
"""Tokens behind one entry of ``hash_ids``."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(
    path: Path,
    *,
    num_replicas: int = 8,
    speed: float = 1.0,
    first: int = 0,
    count: int | None = None,
) -> Scenario:
    """An open-loop trace of a file in the JSONL format of Mooncake's traces.

    Source: kvcache-ai/Mooncake, ``FAST25-release/traces`` (Qin et al., FAST 2025). Each line has
    ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and
    ``hash_ids``: one for each 512 tokens of the prompt, the last one for the rest; equal ones are
    equal blocks with equal blocks before. The tokens themselves are not published, so a block gets
    512 tokens made from its id. What a model answered is not known by hashes either: each output
    is new, and does not help a later prompt that contains it.

    Nothing has a key. Memory: 4 bytes for each token of each prompt.

    Args:
        path: The file.
        num_replicas: In the cluster.
        speed: Requests arrive as many times as fast as in the file.
        first: Number of the first request to take, from 0.
        count: Of requests to take; all if None.

    Raises:
        ValueError: A line is not of the format, or no request is left.
    """
    if not speed > 0:
        raise ValueError(f"speed must be greater than 0, got {speed}")
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number < first or not line.strip():
                continue
            if count is not None and len(requests) == count:
                break
            requests.append(_parse(line, f"{path}, line {number + 1}"))
    if not requests:
        raise ValueError(f"{path} has no requests from number {first} on")
    start = min(timestamp for timestamp, *_ in requests)
    generator = np.random.default_rng(len(requests))
    blocks: dict[int, np.ndarray] = {}
    sessions = []
    for number, (timestamp, input_length, output_length, hash_ids) in enumerate(requests):
        for hash_id in hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = np.random.default_rng([hash_id, 15]).integers(
                    0, 2**31 - 1, HASHED_TOKENS, np.int32
                )
        prompt = np.concatenate([blocks[hash_id] for hash_id in hash_ids])[:input_length]
        output = generator.integers(0, 2**31 - 1, output_length, np.int32)
        arrival_s = (timestamp - start) / 1000 / speed
        turns = (Turn(input_length, output_length),)
        text = np.concatenate([prompt, output])
        sessions.append(Session(number, number, text, turns, arrival_s))
    return Scenario(
        name=path.stem,
        sessions=tuple(sessions),
        num_replicas=num_replicas,
        concurrency=None,
        keys="none",
    )


def _parse(line: str, where: str) -> tuple[float, int, int, list[int]]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    missing = [name for name in _FIELDS if name not in values]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    timestamp, input_length, output_length, hash_ids = (values[name] for name in _FIELDS)
    if input_length < 1 or output_length < 1:
        lengths = f"{input_length} and {output_length}"
        raise ValueError(f"{where}: lengths must be at least 1, got {lengths}")
    if len(hash_ids) != -(-input_length // HASHED_TOKENS):
        raise ValueError(
            f"{where}: {input_length} tokens are {-(-input_length // HASHED_TOKENS)} blocks of "
            f"{HASHED_TOKENS}, hash_ids has {len(hash_ids)}"
        )
    return timestamp, input_length, output_length, hash_ids

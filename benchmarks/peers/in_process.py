"""Runs a script on a real router that is a Python package, in the interpreter that has it.

``python -m benchmarks.peers.in_process JOB RESULT``: both are JSON files.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.script import Script

__all__ = ["choices_in_process", "main"]


def choices_in_process(
    peer: str, script: Script, num_replicas: int, settings: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """What a real router chooses for the requests of a script, and the seconds of each decision."""
    match peer:
        case "ray":
            from benchmarks.peers.ray_tree import ray_choices

            return ray_choices(script, num_replicas, settings)
        case "torchrl":
            from benchmarks.peers.torchrl_balancer import torchrl_choices

            return torchrl_choices(script, num_replicas)
        case "ai-dynamo-runtime":
            from benchmarks.peers.dynamo_select import dynamo_choices

            return dynamo_choices(script, num_replicas, **settings)
        case "verl":
            from benchmarks.peers.verl_balancer import verl_choices

            return verl_choices(script, num_replicas)
    raise ValueError(f"{peer!r} does not run in process")


def main(argv: list[str]) -> int:
    """Reads a job, runs it, and writes the result."""
    job_file, result_file = map(Path, argv)
    job = json.loads(job_file.read_text())
    logging.disable(logging.WARNING)  # TorchRL warns at every decision
    choices, seconds = choices_in_process(
        job["peer"], Script.from_json(job["steps"]), job["num_replicas"], job["settings"]
    )
    result_file.write_text(json.dumps({"choices": choices, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

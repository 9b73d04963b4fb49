"""OpenAI requests over HTTP: this library's server beside vLLM's own, over one and the same engine.

vLLM's server runs where it always does, in the engine's process; this library's in the process that
has the service, and both look for garbage as ``torchrl-vllm-sync serve`` does: rarely. Both are
asked by ``vllm bench serve`` in a process of its own, which streams completions of random prompts:
first one request after the other, then ``--at-once``.

- ``throughput``: tokens of the answers per second.
- ``first token``, ``between tokens``: medians of the requests.

``python -m benchmarks.serving --model FOLDER`` takes minutes, ``--smoke`` half a one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import socket
import sys
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray

from benchmarks.live_engines import engine_options, local_ray, start
from benchmarks.record import Recorder, parser_of, refuse_less
from torchrl_vllm_sync.checks import collect_rarely
from torchrl_vllm_sync.testing import make_tiny_checkpoint

METRICS = {
    "throughput": ("tokens/s", "output_throughput"),
    "first token": ("ms", "median_ttft_ms"),
    "between tokens": ("ms", "median_itl_ms"),
}
SEEDS = itertools.count()


def own_server() -> type:
    """The replica's class with one more method: vLLM's own server, over its engine alone."""
    from torchrl_vllm_sync.engine.actor import EngineActor

    class ServingActor(EngineActor):
        async def serve(self) -> int:
            """Port of a server that runs until the replica ends."""
            import uvicorn

            from torchrl_vllm_sync.serve.client import app_over, server_args

            args, own = server_args({}), self.engine.vllm_config
            args.model = own.model_config.model
            app = await app_over(self.engine, own, args)
            config = uvicorn.Config(app, access_log=False, log_config=None, lifespan="off")
            listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
            serving = uvicorn.Server(config).serve([listening])
            self._serving = asyncio.create_task(serving)
            return listening.getsockname()[1]

    return ServingActor


def client(command: list[str]) -> dict[str, Any]:
    """What ``vllm bench serve`` measures, in the process that it is called in."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    with redirect_stdout(None):
        return serve.main(parser.parse_args(command))


def ask(
    clients: Pool, url: str, checkpoint: Path, num: int, at_once: int, tokens: int
) -> dict[str, float]:
    """What the client measures; it is asked in one process for all of a run."""
    command = ["--backend", "openai", "--base-url", url, "--model", str(checkpoint)]
    command += ["--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
    command += ["--random-input-len", "32", "--random-output-len", str(tokens)]
    command += ["--num-prompts", str(num), "--max-concurrency", str(at_once)]
    command += ["--seed", str(next(SEEDS))]  # no prompt is asked again
    found = clients.apply_async(client, (command,)).get(timeout=600)
    assert found["completed"] == num, found
    return {metric: found[name] for metric, (_, name) in METRICS.items()}


def main(argv: list[str] | None = None) -> Path:
    parser = parser_of(__doc__, "few requests of the tiny model")
    parser.add_argument("--model", type=Path, help="a checkpoint; else a tiny random model")
    parser.add_argument("--requests", type=int, default=1024, help="of each round")
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="with both systems in turn")
    arguments = parser.parse_args(argv)
    refuse_less(parser, arguments, requests=1, at_once=1, tokens=2, rounds=1)
    if arguments.smoke:
        arguments.requests, arguments.at_once, arguments.tokens, arguments.rounds = 16, 8, 8, 1
    recorder = Recorder("serving")
    recorder.check(smoke=arguments.smoke)
    found = defaultdict[tuple[str, str, str, str], list[float]](list)
    options = engine_options(
        execution="graphs", max_model_len=1024, max_num_seqs=max(64, arguments.at_once)
    )
    spawn = multiprocessing.get_context("spawn")
    with local_ray(), tempfile.TemporaryDirectory() as directory, spawn.Pool(1) as clients:
        checkpoint = arguments.model or make_tiny_checkpoint(directory)
        how = options | {"load_format": "auto", "actor_class": own_server()}
        with start(checkpoint, **how) as service, service.serve() as server:
            collect_rarely()
            port = ray.get(service.actors[0].serve.remote(), timeout=120)
            systems = {"vllm": f"http://127.0.0.1:{port}", "ours": server.url}
            for at_once in (1, arguments.at_once):
                num = arguments.requests if at_once > 1 else max(1, arguments.requests // 8)
                for turn in range(arguments.rounds + 1):  # the first does not count
                    for system, url in systems.items():
                        each = ask(clients, url, checkpoint, num, at_once, arguments.tokens)
                        print(system, at_once, each, flush=True)
                        for metric, value in each.items() if turn or arguments.smoke else ():
                            unit = METRICS[metric][0]
                            found[f"{at_once} at once", system, metric, unit].append(value)
    for (case, system, metric, unit), samples in found.items():
        recorder.add(case=case, system=system, metric=metric, unit=unit, samples=samples)
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])

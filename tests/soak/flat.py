"""Hundreds of pushes and collector steps leave memory where it was, and audits find nothing.

``python -m tests.soak.flat`` pushes by each transport, every time other weights that are compared
with the engines', and then trains. Memory is looked at between, after some of each to warm up:
of the trainer, and each replica's actor and engine core, what nobody shares with them; of each GPU
all that is taken. It fails if one of them has grown by more than 16 MiB at the end of its part, or
if an audit named a tensor of these pushes, which are whole.
"""

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py

import psutil
import ray
import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import Case
from benchmarks.learning_curves import OverService
from benchmarks.record import Recorder
from tests.engine.checks import perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from torchrl_vllm_sync import (
    AsyncVLLM,
    BroadcastTransport,
    IPCTransport,
    MemmapTransport,
    P2PTransport,
)
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

SLACK_MIB, MIB = 16.0, 2**20
NUM_LOOKS = 10
TRANSPORTS = {
    "broadcast": BroadcastTransport,
    "memmap": MemmapTransport,
    "p2p": P2PTransport,
    "ipc": IPCTransport,  # where trainer and engines share a GPU
}
CASE = Case("tiny", rows=8, tokens=8, minibatch=8, group=4)


def held(service):
    """MiB of each process and GPU."""
    gc.collect()
    pids = {"trainer": os.getpid()}
    for one in service.replicas:
        pids[f"actor {one.replica_id}"] = ray.get(one.actor.describe.remote()).pid
        pids[f"engine core {one.replica_id}"] = engine_core_pid(one.actor)
    found = {name: psutil.Process(pid).memory_full_info().uss / MIB for name, pid in pids.items()}
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        found[f"GPU {device}"] = (total - free) / MIB
    return found


def watched(service, step, number):
    """Takes so many steps, after some more; returns what was held, look by look."""
    for _ in range(max(3, number // 5)):
        step()
    looks = [held(service)]
    for at in range(number):
        step()
        if (at + 1) * NUM_LOOKS // number > at * NUM_LOOKS // number:
            looks.append(held(service))
    return {name: [one[name] for one in looks] for name in looks[0]}


def grown(looks):
    """Who holds more at the end than at the beginning, in words."""
    return [
        f"{name}: {values[0]:.0f} MiB before, {values[-1]:.0f} after"
        for name, values in looks.items()
        if values[-1] > values[0] + SLACK_MIB
    ]


def options(checkpoint):
    """Of engines with two memories: two on CPUs, or one on each GPU but the last of several."""
    shared = {"model_name": checkpoint, "stage_weights": True, **ENGINE}
    if gpus := torch.cuda.device_count():
        return shared | {"num_replicas": max(1, gpus - 1), "dtype": "bfloat16", "compile": False}
    plain = "tests.engine.plain_worker.PlainWorker"
    return shared | {"num_replicas": 2, "worker_extension_cls": plain}


def parts(service, transports, num_pushes, num_steps):
    """Yields each part's name and number, and what was held."""
    checkpoint = service.engine_args.model
    gpus = torch.cuda.device_count()  # the last of which is the trainer's
    model = load_tiny_model(checkpoint).to(f"cuda:{gpus - 1}" if gpus else "cpu")

    def push(transport):
        weights = perturbed(model, seed=service.weight_version, scale=1e-3)
        service.push_weights(weights, transport=transport, audit=True)

    for name in transports:
        step = partial(push, TRANSPORTS[name]())
        yield f"{num_pushes} pushes by {name}", watched(service, step, num_pushes)
    arguments = {"held_out": 0, "seed": 0, "lr": 1e-4, "checkpoint": Path(checkpoint)}
    arguments |= {"case": CASE, "dataset": "low-ids"}
    training = OverService("ours", argparse.Namespace(**arguments), service)
    yield f"{num_steps} collector steps", watched(service, training.step, num_steps)
    training.close()


def main():
    """Reads the command line; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=[*TRANSPORTS][:3])
    parser.add_argument("--pushes", type=int, default=500, help="by each transport")
    parser.add_argument("--steps", type=int, default=200, help="of a collector and a trainer")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/flat_*")
    args = parser.parse_args()
    recorder, found, begin = Recorder("flat_memory"), [], time.monotonic()
    recorder.check(smoke=not args.record)
    set_list_to_stack(True).set()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as directory,
        AsyncVLLM.from_pretrained(
            **options(str(make_tiny_checkpoint(directory, seed=0)))
        ) as service,
    ):
        held(service)  # the first look makes this process a context on each GPU
        for case, looks in parts(service, args.transports, args.pushes, args.steps):
            for name, values in looks.items():
                told = " ".join(f"{one:.0f}" for one in values)
                sys.stdout.write(f"{case:24s} {name:16s} {told} MiB\n")
                sys.stdout.flush()
                recorder.add(case=case, system=name, metric="memory", unit="MiB", samples=values)
            found += grown(looks)
    ray.shutdown()
    audited = len(args.transports) * (args.pushes + max(3, args.pushes // 5))
    recorder.notes.append(f"{audited} pushes were audited, and none was named")
    sys.stdout.write(f"{recorder.notes[0]}; {time.monotonic() - begin:.0f} s\n")
    sys.stdout.write("\n".join(found) + "\n" if found else "PASS\n")
    if args.record and not found:
        sys.stdout.write(f"record: {recorder.write()}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

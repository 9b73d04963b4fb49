"""Thousands of requests while replicas are killed, join, leave and get new weights.

``python -m tests.soak.soak --requests 10000 --events 20`` prints what happened, and what all
processes hold before and after; it fails if a request was lost or answered twice, if one was
sampled by weights that were never pushed, if the replicas differ at the end, or if something grew.
"""

import argparse
import itertools
import logging
import os
import random  # noqa: TID251  seeded below
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from tests.engine.checks import assert_holds, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import sampling
from tests.soak.holdings import growth, of_service
from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

STEADY = "0"
NUM_REPLICAS, MAX_REPLICAS = 2, 3
NUM_CALLERS = 4
REPAIR_S = 240.0
PUSH_PAUSE_S = 1.0
KINDS = ("kill actor", "kill core", "join", "leave")


def say(text):
    """Prints a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Soak:
    """One service under load.

    Args:
        checkpoint: What it is launched with.
        seed: Decides what happens when.
    """

    def __init__(self, checkpoint, seed):
        self.random = random.Random(seed)
        self.model = load_tiny_model(checkpoint)
        self.service = AsyncVLLM.from_pretrained(
            str(checkpoint), num_replicas=NUM_REPLICAS, **{**ENGINE, "max_restarts": 1000}
        )
        self.happened, self.versions = Counter(), {0}
        self.answers, self.errors = Counter(), []
        self.numbers = itertools.count()

    def push(self):
        """One push of changed weights."""
        version = self.service.weight_version + 1
        self.versions.add(version)
        perturbed(self.model, seed=version, scale=0.01)
        self.service.push_weights(self.model, version=version)
        self.happened["push"] += 1

    def cause(self, kind):
        """Lets one thing happen to a replica, and waits until all serve again."""
        service = self.service
        others = [one for one in service.replicas if one.replica_id != STEADY]
        if kind == "join" and len(others) + 1 >= MAX_REPLICAS:
            kind = "leave"
        if kind == "leave" and len(others) < NUM_REPLICAS:
            kind = "join"
        victim = self.random.choice(others)
        if kind == "join":
            service.add_replicas()
        elif kind == "leave":
            service.remove_replicas(victim.replica_id, drain_timeout_s=self.random.choice([0, 60]))
        else:
            pid = ray.get(victim.actor.describe.remote()).pid
            if kind == "kill core":
                pid = engine_core_pid(victim.actor)
            os.kill(pid, signal.SIGKILL)
            self._await_restart(victim.replica_id)
        service.wait_until_serving(timeout_s=REPAIR_S)
        self.happened[kind] += 1

    def _await_restart(self, replica_id):
        """Waits until it is known that a replica was killed, and until it is there again."""
        find = self.service._membership.find
        before, deadline = find(replica_id).num_restarts, time.monotonic() + REPAIR_S
        while find(replica_id).num_restarts == before:
            assert time.monotonic() < deadline, f"replica {replica_id} was not restarted"
            time.sleep(0.05)

    def call(self, stop):
        """Sends requests until told to stop; every one is answered, once."""
        generator = random.Random(self.random.random())
        while not stop():
            numbers = [next(self.numbers) for _ in range(generator.choice([1, 4, 16]))]
            prompts = [[5 + one // 200 % 200, 5 + one % 200, 5 + one // 40_000] for one in numbers]
            length = generator.choice([2, 16, 40])
            params = sampling(max_tokens=length, temperature=1.0, ignore_eos=True)
            outputs = self.service.generate(
                prompts, params, timeout_seconds=REPAIR_S, return_exceptions=True, use_tqdm=False
            )
            for number, prompt, output in zip(numbers, prompts, outputs, strict=True):
                if isinstance(output, Exception):
                    self.errors.append(f"request {number}: {type(output).__name__}: {output}")
                    continue
                assert output.prompt_token_ids == prompt
                assert len(output.outputs[0].token_ids) == length
                used = {one.version for one in output.version_spans[0]}
                if not used <= self.versions:
                    self.errors.append(f"request {number}: sampled by {used - self.versions}")
                self.answers[number] += 1

    def run(self, num_requests, kinds):
        """Lets ``kinds`` happen one after the other, while pushes and requests run."""
        ended = threading.Event()
        first = sum(self.answers.values())

        def stop():
            return ended.is_set() and sum(self.answers.values()) - first >= num_requests

        def push():
            while not ended.wait(PUSH_PAUSE_S):
                self.push()

        with ThreadPoolExecutor(NUM_CALLERS + 1) as pool:
            callers = [pool.submit(self.call, stop) for _ in range(NUM_CALLERS)]
            pusher = pool.submit(push)
            try:
                for kind in kinds:
                    self.cause(kind)
            finally:
                ended.set()
            pusher.result(REPAIR_S)
            for one in callers:
                one.result(2 * REPAIR_S)
        self.push()

    def rest(self):
        """Brings the service back to its number of replicas, idle and alike; returns holdings."""
        service = self.service
        service.wait_until_serving(timeout_s=REPAIR_S)
        while service.num_replicas > NUM_REPLICAS:
            service.remove_replicas([one.replica_id for one in service.replicas][-1])
        while service.num_replicas < NUM_REPLICAS:
            service.add_replicas()
        service.push_weights(self.model, strict=True)
        self.versions.add(service.weight_version)
        assert_holds(service, self.model)
        time.sleep(2.0)
        assert service.load.total_in_flight == 0
        return of_service(service, STEADY)

    def shortcomings(self, before, after):
        """What was not as it should be, in words."""
        twice = [number for number, times in self.answers.items() if times > 1]
        lost = set(range(max(self.answers) + 1)) - set(self.answers)
        found = [*self.errors[:5], *growth(before, after)]
        found += [f"{len(twice)} requests were answered twice"] if twice else []
        found += [f"{len(lost)} requests were lost"] if lost else []
        return found


def soak(checkpoint, *, num_requests, num_events, seed):
    """Runs everything; returns what is wrong, in words, and prints the rest."""
    begin = time.monotonic()
    one = Soak(checkpoint, seed)
    with one.service:
        one.run(
            20, KINDS[:1] + KINDS[2:]
        )  # each path once, so that what is kept for later is there
        before = one.rest()
        one.run(num_requests, [one.random.choice(KINDS) for _ in range(num_events)])
        after = one.rest()
    for name, value in before.items():
        say(f"{name:24s} {value:8.0f} {after[name]:8.0f}")
    total, happened = sum(one.answers.values()), dict(one.happened)
    say(f"{total} requests, {happened}, {time.monotonic() - begin:.0f} s")
    return one.shortcomings(before, after)


def main():
    """Reads the command line; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_tiny_checkpoint(Path(directory) / "model", seed=0)
        found = soak(checkpoint, num_requests=args.requests, num_events=args.events, seed=args.seed)
    ray.shutdown()
    say("\n".join(found) if found else "PASS")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

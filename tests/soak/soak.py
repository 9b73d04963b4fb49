"""Thousands of requests while replicas are killed, join, leave and get new weights.

``python -m tests.soak.soak --requests 10000 --events 20`` prints what happened, and what all
processes hold before and after; it fails if a request was lost or answered twice, if one was
sampled by weights that were never pushed, or has other log-probabilities than the weights that its
spans name, if the replicas differ at the end, or if something grew. ``--kills``, ``--memory-kills``
and ``--pushes`` say how many there must be of each, beside ``--events`` of any kind.
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
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py

import ray

from benchmarks.record import Recorder, RecordError
from tests.engine.checks import TOLERANCE, assert_holds
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import eventually, sampling
from tests.engine.test_version_spans import Weights, compare, scored_spans
from tests.soak.holdings import growth, of_service
from tests.soak.memory import eat, quick_to_kill
from torchrl_vllm_sync import AsyncVLLM, ReplicaState
from torchrl_vllm_sync.testing import make_tiny_checkpoint

STEADY = "0"
NUM_REPLICAS, MAX_REPLICAS = 2, 3
NUM_CALLERS = 4
REPAIR_S = 240.0
PUSH_PAUSE_S = 1.0
KILLS = ("kill actor", "kill core")
KINDS = (*KILLS, "join", "leave")
MEMORY = "kill by memory monitor"  # wants a Ray that is quick to kill


def say(text):
    """Prints a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Soak:
    """One service under load.

    Args:
        checkpoint: What it is launched with.
        seed: Decides what happens when.
        call_pause_s: Seconds between the requests of one caller while things happen: where cores
            are few, replicas start much later beside callers that never pause.
        one_by_one: Whether replicas begin in the order of their ids.
    """

    def __init__(self, checkpoint, seed, *, call_pause_s=0.0, one_by_one=False):
        self.random = random.Random(seed)
        self.weights, self.call_pause_s = Weights(checkpoint), call_pause_s
        self.service = AsyncVLLM.from_pretrained(
            str(checkpoint),
            num_replicas=1 if one_by_one else NUM_REPLICAS,
            **{**ENGINE, "max_restarts": 1000},
        )
        if one_by_one:
            self.service.add_replicas(NUM_REPLICAS - 1)
        self.happened, self.versions, self.cleared = Counter(), set(), set()
        self.answers, self.errors, self.spans = Counter(), [], {}
        self.numbers = itertools.count()
        self.began = self.service.load.replica_ids  # their actors, in this order
        self.push()

    def push(self, **options):
        """One push of other weights; requests in flight keep their keys or recompute them."""
        version = self.service.weight_version + 1
        self.versions.add(version)
        clear_cache = version % 2 == 0
        if clear_cache:
            self.cleared.add(version)
        model = self.weights.at(version)
        self.service.push_weights(model, version=version, clear_cache=clear_cache, **options)
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
            self.began += service.add_replicas()
        elif kind == "leave":
            service.remove_replicas(victim.replica_id, drain_timeout_s=self.random.choice([0, 60]))
        elif kind == MEMORY:
            self._exhaust(others)
        else:
            pid = ray.get(victim.actor.describe.remote()).pid
            if kind == "kill core":
                pid = engine_core_pid(victim.actor)
            eventually(lambda: service.load.in_flight(victim.replica_id))  # it has some to lose
            before = self._num_restarts(victim.replica_id)
            os.kill(pid, signal.SIGKILL)
            self._await_restart(victim.replica_id, before)
            self.began.append(victim.replica_id)
        service.wait_until_serving(timeout_s=REPAIR_S)
        self.happened[kind] += 1

    def _exhaust(self, others):
        """Fills the memory of the actor that began last, and waits for whom the monitor killed."""
        load = self.service.load
        before = {one.replica_id: self._num_restarts(one.replica_id) for one in others}
        killed = set()

        def note():
            failed = (one for one in load.snapshots() if one.state is ReplicaState.FAILED)
            killed.update(one.replica_id for one in failed if "low on memory" in one.reason)

        last = min(others, key=lambda one: self.began[::-1].index(one.replica_id))
        with load.watched(note):
            last.actor.__ray_call__.remote(eat)
            self._await_restart(last.replica_id, before[last.replica_id])
        assert last.replica_id in killed, f"the memory monitor killed {killed or 'nobody'}"
        for one in killed - {last.replica_id}:
            self._await_restart(one, before[one])
        self.began += killed
        self.happened[MEMORY] += len(killed) - 1  # one is counted as every event is

    def _await_restart(self, replica_id, before):
        """Waits until it is known that a replica was killed, and until it is there again."""
        deadline = time.monotonic() + REPAIR_S
        while self._num_restarts(replica_id) == before:
            assert time.monotonic() < deadline, f"replica {replica_id} was not restarted"
            time.sleep(0.05)

    def _num_restarts(self, replica_id):
        return self.service.replicas.membership.find(replica_id).num_restarts

    def call(self, stop, ended):
        """Sends requests until told to stop; every one is answered, once."""
        generator = random.Random(self.random.random())
        while not stop():
            ended.wait(self.call_pause_s)
            numbers = [next(self.numbers) for _ in range(generator.choice([1, 4, 16]))]
            prompts = [[5 + one // 200 % 200, 5 + one % 200, 5 + one // 40_000] for one in numbers]
            length = generator.choice([2, 16, 40])
            params = sampling(max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0)
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
                self._keep(output)

    def _keep(self, output):
        """Keeps the spans that a model can be compared with, in little memory.

        Keys that were kept at a switch are the old weights'.
        """
        first = output.version_spans[0][0].version
        for version, spans in scored_spans([output], first_only=False).items():
            if version == first or version in self.cleared:
                self.spans.setdefault(version, []).extend(
                    replace(
                        one,
                        sequence=array("i", one.sequence),
                        engine=array("f", one.engine),
                        later=array("f", one.later),
                    )
                    for one in spans
                )

    def run(self, num_requests, kinds, num_pushes=0, push_pause_s=PUSH_PAUSE_S):
        """Lets ``kinds`` happen one after the other, while pushes and requests run."""
        ended = threading.Event()
        first, last_push = sum(self.answers.values()), self.happened["push"] + num_pushes

        def stop():
            return ended.is_set() and sum(self.answers.values()) - first >= num_requests

        def push():
            while not ended.wait(push_pause_s) or self.happened["push"] < last_push:
                self.push()

        with ThreadPoolExecutor(NUM_CALLERS + 1) as pool:
            callers = [pool.submit(self.call, stop, ended) for _ in range(NUM_CALLERS)]
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
        self.push(strict=True)
        assert_holds(service, self.weights.model)
        time.sleep(2.0)
        assert service.load.total_in_flight == 0
        return of_service(service, STEADY)

    def compared(self):
        """Compares all spans with their versions' models.

        Returns:
            The largest difference, the number of spans and the share of tokens right behind one, of
            the next version, that would have been noticed in it.
        """
        worst, foreign = 0.0, []
        for version, spans in self.spans.items():
            own, after = compare(self.weights.at(version), spans)
            worst = max(worst, own)
            foreign += after
        noticed = sum(one > 10 * TOLERANCE for one in foreign) / max(len(foreign), 1)
        return worst, sum(map(len, self.spans.values())), noticed

    def shortcomings(self, before, after):
        """What was not as it should be, in words."""
        twice = [number for number, times in self.answers.items() if times > 1]
        lost = set(range(max(self.answers) + 1)) - set(self.answers)
        found = [*self.errors[:5], *growth(before, after)]
        found += [f"{len(twice)} requests were answered twice"] if twice else []
        found += [f"{len(lost)} requests were lost"] if lost else []
        return found


def soak(
    checkpoint,
    *,
    num_requests,
    num_events,
    seed,
    num_kills=0,
    num_memory_kills=0,
    num_pushes=0,
    push_pause_s=PUSH_PAUSE_S,
    call_pause_s=0.0,
):
    """Runs everything, and prints what happened.

    Returns:
        What is wrong, in words, and what happened.
    """
    begin = time.monotonic()
    one = Soak(checkpoint, seed, call_pause_s=call_pause_s, one_by_one=bool(num_memory_kills))
    kinds = [one.random.choice(KINDS) for _ in range(num_events)]
    kinds += [one.random.choice(KILLS) for _ in range(num_kills)] + [MEMORY] * num_memory_kills
    one.random.shuffle(kinds)
    with one.service:
        one.run(
            20, KINDS[:1] + KINDS[2:]
        )  # each path once, so that what is kept for later is there
        before = one.rest()
        one.run(num_requests, kinds, num_pushes, push_pause_s)
        after = one.rest()
    for name, value in before.items():
        say(f"{name:24s} {value:8.0f} {after[name]:8.0f}")
    worst, num_spans, noticed = one.compared()
    told = {
        "requests": sum(one.answers.values()),
        **dict(one.happened),
        "spans": num_spans,
        "worst_difference": worst,
        "share_noticed_one_token_on": noticed,
        "seconds": time.monotonic() - begin,
    }
    say(", ".join(f"{name} {value:g}" for name, value in told.items()))
    found = one.shortcomings(before, after)
    if worst > TOLERANCE:
        found.append(f"log-probabilities differ from their versions' by {worst:.2g}")
    return found, told


def record(told, seed):
    """Writes what happened in a run that went well."""
    recorder = Recorder("soak")
    told = dict(told)
    recorder.add(
        case=f"{told['requests']} requests",
        system="AsyncVLLM",
        metric="time",
        unit="s",
        samples=[told.pop("seconds")],
        seed=seed,
        **told,
    )
    return recorder.write()


def main():
    """Reads the command line; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=20, help="of any kind, but those below")
    parser.add_argument("--kills", type=int, default=0, help="by SIGKILL")
    parser.add_argument("--memory-kills", type=int, default=0, help="by Ray's memory monitor")
    parser.add_argument("--pushes", type=int, default=0, help="at least")
    parser.add_argument("--push-pause", type=float, default=PUSH_PAUSE_S, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/soak_*")
    args = parser.parse_args()
    if args.memory_kills:
        os.environ.update(quick_to_kill())
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        found, told = soak(
            make_tiny_checkpoint(Path(directory) / "model", seed=0),
            num_requests=args.requests,
            num_events=args.events,
            seed=args.seed,
            num_kills=args.kills,
            num_memory_kills=args.memory_kills,
            num_pushes=args.pushes,
            push_pause_s=args.push_pause,
        )
    ray.shutdown()
    say("\n".join(found) if found else "PASS")
    if args.record and not found:
        try:
            say(f"record: {record(told, args.seed)}")
        except RecordError as error:
            say(f"no record: {error}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

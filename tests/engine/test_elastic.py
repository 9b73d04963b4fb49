"""Replicas that die are back by themselves; others join and leave while requests and pushes run."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import eventually, is_idle, sampling
from tests.engine.trainers import broadcast
from tests.warm import warm_python
from torchrl_vllm_sync import AsyncVLLM, MemmapTransport, ReplicaState, attach
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = pytest.mark.slow
OWN = {**ENGINE, "max_restarts": 3}
REPAIR_S = 200.0
# Seconds between requests of one thread: the engines' processes must get to start, too.
PAUSE_S = 0.3


class Load:
    """Requests that run until the end of ``with``, each with a prompt of its own."""

    def __init__(self, service, num_threads=2):
        self._service, self._stop = service, threading.Event()
        self._numbers, self._pool = itertools.count(), ThreadPoolExecutor(num_threads)
        self.outputs, self._num_threads = {}, num_threads

    def __enter__(self):
        self._calls = [self._pool.submit(self._run) for _ in range(self._num_threads)]
        return self

    def _run(self):
        while not self._stop.is_set():
            numbers = [next(self._numbers) for _ in range(4)]
            prompts = [[5 + one // 200, 5 + one % 200, 9] for one in numbers]
            outputs = self._service.generate(
                prompts, sampling(max_tokens=24, ignore_eos=True), timeout_seconds=120
            )
            for number, prompt, output in zip(numbers, prompts, outputs, strict=True):
                assert output.prompt_token_ids == prompt
                assert number not in self.outputs
                self.outputs[number] = output
            self._stop.wait(PAUSE_S)

    def __exit__(self, *_):
        self._stop.set()
        with self._pool:
            for call in self._calls:
                call.result(200)  # raises what a request raised

    @property
    def replicas(self):
        """Who has answered, so far."""
        return {one.replica_id for one in list(self.outputs.values())}

    def num_from(self, replica_id):
        return sum(one.replica_id == replica_id for one in list(self.outputs.values()))

    def now(self):
        """A number below those of all requests that are yet to begin."""
        return next(self._numbers)

    def replicas_after(self, number):
        """Who has answered what began later."""
        return {one.replica_id for key, one in list(self.outputs.items()) if key > number}


def pid(service, replica_id):
    answer = service.replicas.start_calls("describe", {replica_id: ()}).answers(30)[replica_id]
    return answer.pid


def actor(service, replica_id):
    return next(one.actor for one in service.replicas if one.replica_id == replica_id)


def started(service, replica_id):
    """How often a replica was started again and has joined."""
    member = service.replicas.membership.find(replica_id)
    return member.num_restarts


def ids(service):
    return [one.replica_id for one in service.replicas]


@pytest.fixture(scope="module")
def elastic(cluster, checkpoint):
    """A service that starts with two replicas; its tests follow each other."""
    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=2, **OWN) as service:
        yield service


@pytest.fixture
def trained(elastic, checkpoint):
    """What all replicas hold: weights of no other version."""
    elastic.use_transport(MemmapTransport())
    model = perturbed(load_tiny_model(checkpoint), seed=elastic.weight_version + 1)
    elastic.push_weights(model)
    elastic.wait_until_serving(timeout_s=REPAIR_S)
    assert_holds(elastic, model)
    return model


def test_a_killed_actor_is_back_with_the_committed_version(elastic, trained, checkpoint):
    launched = load_tiny_model(checkpoint)
    before, version = pid(elastic, "0"), elastic.weight_version
    with Load(elastic) as load:
        eventually(lambda: load.replicas == {"0", "1"})
        os.kill(before, signal.SIGKILL)
        eventually(lambda: elastic.load.snapshots()[0].state is not ReplicaState.SERVING)
        elastic.wait_until_serving(timeout_s=REPAIR_S)
        back = load.num_from("0")
        eventually(lambda: load.num_from("0") > back)
    assert not psutil.pid_exists(before)
    assert pid(elastic, "0") != before
    assert ids(elastic) == ["0", "1"]
    assert elastic.weight_versions == {"0": version, "1": version}
    assert_holds(elastic, trained)
    assert distance(elastic, launched, 0) > 100 * TOLERANCE  # nothing was loaded, otherwise
    assert {one.min_version for one in load.outputs.values()} == {version}
    eventually(lambda: is_idle(elastic))


def test_a_killed_engine_core_is_replaced_during_pushes(elastic, trained):
    """By broadcast, which stores nothing: where peers cannot give, the next push does."""
    elastic.use_transport(broadcast(join_timeout_s=20))
    elastic.push_weights(perturbed(trained, seed=11))
    before = started(elastic, "1")
    with Load(elastic) as load:
        os.kill(engine_core_pid(actor(elastic, "1")), signal.SIGKILL)
        eventually(lambda: elastic.load.snapshots()[1].state is not ReplicaState.SERVING)
        report = elastic.push_weights(perturbed(trained, seed=12))
        assert set(report.left_behind) <= {"1"}
        eventually(lambda: started(elastic, "1") > before, timeout_s=REPAIR_S)
        assert elastic.push_weights(perturbed(trained, seed=13)).left_behind == {}
        elastic.wait_until_serving(timeout_s=REPAIR_S)
    assert_holds(elastic, trained)
    assert len(set(elastic.weight_versions.values())) == 1
    assert load.outputs


FOLLOW = """
    import sys, time
    from tests.engine.requests import sampling
    from torchrl_vllm_sync import attach

    with attach(sys.argv[1]) as service:
        print(*service.load.replica_ids, flush=True)
        input()
        deadline = time.monotonic() + 60
        while service.load.replica_ids != sys.argv[2:]:
            assert time.monotonic() < deadline, service.load.replica_ids
            time.sleep(0.1)
        service.wait_until_serving(timeout_s=60)
        outputs = service.generate([[7, 8, 9 + i] for i in range(16)], sampling())
        print(*sorted({one.replica_id for one in outputs}), flush=True)
"""


@contextlib.contextmanager
def follower(service, *expected):
    """A process that has the service; called, it says whom it used when it knew these replicas."""
    process = subprocess.Popen(
        [warm_python(), "-c", textwrap.dedent(FOLLOW), service.name, *expected],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def told():
        said, _ = process.communicate("\n", timeout=200)
        assert process.returncode == 0
        return said.split()

    try:
        assert process.stdout.readline().split() == ids(service)
        yield told
    finally:
        process.kill()


def test_replicas_join_and_leave_while_requests_and_pushes_run(elastic, trained):
    """Another process follows, and one that hears of no change still pushes to who is there."""
    pushed = threading.Event()

    def push():
        for seed in itertools.count(20):
            elastic.push_weights(perturbed(trained, seed=seed))
            if pushed.wait(0.5):
                return

    with follower(elastic, "0", "2") as told, attach(elastic.name) as late:
        late._monitor.stop()
        with ThreadPoolExecutor(1) as pool:
            pushes = pool.submit(push)
            with Load(elastic) as load:
                (new,) = elastic.add_replicas()
                assert new == "2"
                assert ids(elastic) == ["0", "1", new]
                elastic.wait_until_serving(timeout_s=60)
                eventually(lambda: new in load.replicas)
                leaving = psutil.Process(pid(elastic, "1"))
                assert elastic.remove_replicas("1", drain_timeout_s=60) == ["1"]
                removed = load.now()
                eventually(lambda: not leaving.is_running())
                eventually(lambda: load.replicas_after(removed) == {"0", new})
            pushed.set()
            pushes.result(120)
        assert load.replicas_after(removed) == {"0", new}
        assert ids(elastic) == ["0", new]
        assert elastic.num_replicas == elastic.get_world_size() == 2
        assert_holds(elastic, trained)
        eventually(lambda: is_idle(elastic))

        assert late.load.replica_ids == ["0", "1"]
        report = late.push_weights(perturbed(trained, seed=21), version=elastic.weight_version + 1)
        assert [one.replica_id for one in report.replicas] == ["0", new]
        assert not any(one.error for one in report.replicas)
        assert_holds(elastic, trained)
        assert told() == ["0", new]


def test_what_cannot_be_is_refused_and_changes_nothing(elastic):
    before = ids(elastic)
    for call, words in (
        (lambda: elastic.add_replicas(0), "num_replicas must be at least 1, got 0"),
        (lambda: elastic.add_replicas(1.5), "num_replicas must be an integer"),
        (lambda: elastic.remove_replicas("nobody"), "replicas must be among"),
        (lambda: elastic.remove_replicas([]), "replicas must be among"),
        (lambda: elastic.remove_replicas(before), "must leave at least 1"),
        (lambda: elastic.remove_replicas(len(before)), "must leave at least 1"),
        (lambda: elastic.remove_replicas(1, drain_timeout_s=-1), "drain_timeout_s must be"),
        (lambda: attach(elastic.name).add_replicas(), "by the process that launched it"),
        (lambda: attach(elastic.name, supervise=True), "is not detached"),
        (lambda: AsyncVLLM(elastic.engine_args, max_restarts=-1), "max_restarts must be"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=words):
            call()
    assert ids(elastic) == before
    elastic.wait_until_serving(timeout_s=10)


def test_what_is_running_on_a_replica_that_must_go_now_goes_on_elsewhere(elastic, trained):
    """Last of this service: it leaves one replica."""
    stays, goes = ids(elastic)
    with Load(elastic) as load:
        eventually(lambda: goes in load.replicas)
        elastic.remove_replicas([goes], drain_timeout_s=0)
        before = load.num_from(stays)
        eventually(lambda: load.num_from(stays) > before)
    assert goes not in ids(elastic)
    numbers = sorted(load.outputs)
    assert numbers == list(range(len(numbers)))


LAUNCH = """
    import sys, time
    from tests.engine.test_elastic import OWN
    from torchrl_vllm_sync import AsyncVLLM
    from torchrl_vllm_sync.testing import load_tiny_model

    service = AsyncVLLM.from_pretrained(
        sys.argv[1], num_replicas=2, detached=True, name="orphan", **OWN
    )
    service.push_weights(load_tiny_model(sys.argv[2]), version=7)
    print("serving", flush=True)
    time.sleep(600)
"""


def test_a_trainer_is_killed_and_its_successor_goes_on(cluster, checkpoint, other_checkpoint):
    """The detached replicas serve the last committed version; the new one supervises them."""
    with subprocess.Popen(
        [warm_python(), "-c", textwrap.dedent(LAUNCH), str(checkpoint), str(other_checkpoint)],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        try:
            assert trainer.stdout.readline() == "serving\n"
        finally:
            trainer.kill()
    service = attach("orphan", supervise=True)
    try:
        assert service.wait_for_version(7) == 7
        model = load_tiny_model(other_checkpoint)
        assert_holds(service, model)
        os.kill(pid(service, "0"), signal.SIGKILL)
        eventually(lambda: service.load.snapshots()[0].state is not ReplicaState.SERVING)
        report = service.push_weights(perturbed(model, seed=3))
        assert report.version == 8
        service.wait_until_serving(timeout_s=REPAIR_S)
        assert service.weight_versions == {"0": 8, "1": 8}
        assert_holds(service, model)
    finally:
        service.shutdown()
    # Ray forgets an actor somewhat later than it ends it.
    names = functools.partial(ray.util.list_named_actors, all_namespaces=True)
    eventually(lambda: not [one for one in names() if "orphan" in one["name"]])

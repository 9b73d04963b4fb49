"""Engines and actors that die or fall silent are noticed, and an engine that wakes up is fenced.

The tests share two replicas, of which 0 is what things happen to, and follow each other: all but
the last two leave both serving.
"""

import sys
import time

import psutil
import pytest
import ray

from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import STEP_S, endless, eventually, token_ids
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.args import end_replica
from torchrl_vllm_sync.errors import ReplicaUnavailableError

LIMIT_S = 6.0
# What is promised: the actor notices, and the service hears of it. Twice that if all is busy.
PROMISED_S = LIMIT_S + LIMIT_S / 4 + 3
NOTICE_S = 2 * PROMISED_S

pytestmark = pytest.mark.slow


class Watched(EngineActor):
    """An actor whose watch can be turned off, and which can be taken for well again."""

    def watch(self, on):
        if on:
            self._health.start()
        else:
            self._health.stop()

    def revive(self):
        """What nothing but a test may do: the next one needs the replica, and saves a launch."""
        self._gate.set(ReplicaState.SERVING)
        self._health.start()

    def state_and_load(self):
        return self._gate.state, self._gate.reason, self.get_num_unfinished_requests()


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture(scope="module")
def service(cluster, checkpoint):
    """Two replicas whose workers are processes of their own."""
    from torchrl_vllm_sync import AsyncVLLM

    own = {
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "tests.engine.faults.FaultyWorker",
        "actor_class": Watched,
    }
    with AsyncVLLM.from_pretrained(
        str(checkpoint), num_replicas=2, unresponsive_after_s=LIMIT_S, **own, **ENGINE
    ) as service:
        yield service


def processes_of(service, index):
    """Its actor, its engine core and its worker."""
    actor = service.actors[index]
    core = psutil.Process(engine_core_pid(actor))
    (worker,) = [one for one in core.children() if one.num_threads() > 1]  # others only wait
    pid = ray.get(actor.describe.remote()).pid
    return {"actor": psutil.Process(pid), "core": core, "worker": worker}


def is_running(pid):
    """Whether it has not ended; what has, and was not yet waited for, holds nothing any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def snapshot(service, index):
    return service.load.snapshots()[index]


def state_of(service, index):
    return str(snapshot(service, index).state)


def ask(service, index):
    """What the actor itself says: its state, why, and the requests in its engine."""
    return ray.get(service.actors[index].state_and_load.remote(), timeout=60)


def prompts(count=24):
    return [[5 + i, 9, 10] for i in range(count)]


@pytest.fixture(scope="module")
def wanted(service):
    """The answers of a replica to which nothing has happened."""
    outputs = service.generate(prompts(), endless(), actor_index=1)
    return [token_ids(output) for output in outputs]


@pytest.mark.parametrize(("which", "busy"), [("worker", True), ("worker", False), ("core", False)])
def test_an_engine_that_stops_has_failed_and_stays_so_when_it_goes_on(service, wanted, which, busy):
    service.create_load_balancer("round-robin")
    processes = processes_of(service, 0)
    streams = []
    if busy:
        pace = service.actors[0].collective_rpc
        ray.get(pace.remote("sync_pace", None, (STEP_S,)))  # until they are looked at again
        streams = [service.generate([7, i], endless(), actor_index=0, stream=True) for i in (5, 6)]
        for stream in streams:
            next(stream)
    processes[which].suspend()
    if busy:
        outputs = service.generate(prompts(), endless())  # half of them go to replica 0 first
        assert {output.replica_id for output in outputs} == {"1"}
        assert [token_ids(output) for output in outputs] == wanted
    for stream in streams:
        with pytest.raises(ReplicaUnavailableError, match="replica 0 is failed: its engine core"):
            list(stream)
    eventually(lambda: state_of(service, 0) == "failed", timeout_s=NOTICE_S)
    assert "silent for" in snapshot(service, 0).reason

    processes[which].resume()
    # It has done what it was asked before: the question, and the requests' ends.
    ray.get(service.actors[0].collective_rpc.remote("check_health"), timeout=60)
    state, reason, unfinished = ask(service, 0)
    assert (str(state), unfinished) == ("failed", 0)
    assert "silent for" in reason
    time.sleep(2)  # two reports
    assert state_of(service, 0) == "failed"
    outputs = service.generate(prompts(), endless())
    assert {output.replica_id for output in outputs} == {"1"}
    assert service.load.total_in_flight == 0
    ray.get(service.actors[0].revive.remote())
    if busy:
        ray.get(pace.remote("sync_pace"))
    eventually(lambda: state_of(service, 0) == "serving")


def test_an_actor_that_stops_has_failed_and_serves_when_it_goes_on(service, wanted):
    """Its engine is as it was: nothing but the actor had stopped."""
    actor = processes_of(service, 0)["actor"]
    actor.suspend()
    eventually(lambda: state_of(service, 0) == "failed", timeout_s=NOTICE_S)
    marked = snapshot(service, 0)
    assert marked.marked_at - marked.asked_at > LIMIT_S  # since the last question that was answered
    assert "its actor has not answered for" in marked.reason
    outputs = service.generate(prompts(), endless())
    assert {output.replica_id for output in outputs} == {"1"}
    assert [token_ids(output) for output in outputs] == wanted
    actor.resume()
    eventually(lambda: state_of(service, 0) == "serving")
    outputs = service.generate(prompts(), endless())
    assert {output.replica_id for output in outputs} == {"0", "1"}
    assert [token_ids(output) for output in outputs] == wanted


def test_nobody_notices_where_nobody_asks(service):
    """The twin of the two above."""
    core = processes_of(service, 0)["core"]
    ray.get(service.actors[0].watch.remote(False))
    core.suspend()
    time.sleep(PROMISED_S)
    assert str(ask(service, 0)[0]) == "serving"
    core.resume()
    ray.get(service.actors[0].watch.remote(True))


def test_a_worker_that_stops_for_less_than_the_limit_goes_on(service, wanted):
    worker = processes_of(service, 0)["worker"]
    worker.suspend()
    time.sleep(LIMIT_S / 2)
    worker.resume()
    outputs = service.generate(prompts(), endless(), actor_index=0)
    assert [token_ids(output) for output in outputs] == wanted
    time.sleep(LIMIT_S)
    assert str(ask(service, 0)[0]) == "serving"


def test_a_callers_own_call_may_keep_the_engine_busy(service, wanted):
    ray.get(service.actors[0].collective_rpc.remote("sync_sleep", None, (PROMISED_S,)))
    assert str(ask(service, 0)[0]) == "serving"
    outputs = service.generate(prompts(), endless(), actor_index=0)
    assert [token_ids(output) for output in outputs] == wanted


def test_a_replica_of_which_everything_has_stopped_is_ended_whole(service):
    everyone = processes_of(service, 0)
    processes = ray.get(service.actors[0].describe.remote()).processes
    assert {one.pid for one in everyone.values()} <= {one.pid for one in processes.processes}
    for one in everyone.values():
        one.suspend()
    begun = time.monotonic()
    end_replica(service.actors[0], processes)
    assert time.monotonic() - begun < 20
    assert not any(is_running(one.pid) for one in processes.processes)
    end_replica(service.actors[0], processes)  # again, when there is nothing left


def test_a_worker_that_is_killed_takes_its_replica_down(service):
    """Last: nobody is left."""
    worker = processes_of(service, 1)["worker"]
    ray.get(service.actors[1].collective_rpc.remote("sync_pace", None, (STEP_S,)))
    stream = service.generate([5, 6], endless(), actor_index=1, stream=True)
    next(stream)
    worker.kill()
    with pytest.raises(ReplicaUnavailableError, match="replica 1 is failed"):
        list(stream)
    eventually(lambda: state_of(service, 1) == "failed", timeout_s=NOTICE_S)
    eventually(lambda: service.load.total_in_flight == 0)

"""What each of Ray's exceptions means for a replica, and that whoever calls one goes by it."""

import contextlib
import pickle
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from tests.fakes.requests import FakeActor, Rig, ids, make_requests, raises
from tests.unit.test_snapshot_locks import headless
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine import args
from torchrl_vllm_sync.engine.args import end_replica
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    SyncError,
    is_away,
    is_gone,
    loss,
)
from torchrl_vllm_sync.replica import EngineReport, ProcessId, Replica, ReplicaProcesses
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor, _Ask
from torchrl_vllm_sync.service import requests
from torchrl_vllm_sync.service.replicas import ReplicaCalls

FAILED, SERVING = ReplicaState.FAILED, ReplicaState.SERVING

GONE = """
ActorDiedError ActorPlacementGroupRemoved ActorUnschedulableError NodeDiedError
ObjectFetchTimedOutError ObjectFreedError ObjectLostError ObjectReconstructionFailedError
OutOfMemoryError OwnerDiedError RayActorError ReferenceCountingAssertionError RuntimeEnvSetupError
WorkerCrashedError
"""
AWAY = "ActorUnavailableError"
THE_CALLS_OWN = """
ActorAlreadyExistsError ActorHandleNotFoundError AsyncioActorExit AuthenticationError
CrossLanguageError GetTimeoutError LocalRayletDiedError ObjectRefStreamEndOfStreamError
ObjectStoreFullError OufOfBandObjectRefSerializationException OutOfDiskError
PendingCallsLimitExceeded PlasmaObjectNotAvailable RayCgraphCapacityExceeded RayChannelError
RayChannelTimeoutError RayDirectTransportError RayError RaySystemError RayTaskError RpcError
StreamingGeneratorReplayInconsistentError TaskCancelledError TaskPlacementGroupRemoved
TaskUnschedulableError UnserializableException UserCodeException
"""


def family(kind):
    """A class and what inherits from it, without those that Ray makes of whatever a task raised."""
    heirs = [] if kind is RayTaskError else kind.__subclasses__()
    return {kind}.union(*map(family, heirs))


def blank(kind):
    """An instance, whatever its constructor wants."""
    return kind.__new__(kind)


def test_each_of_rays_exceptions_is_decided_on():
    decided = [*GONE.split(), AWAY, *THE_CALLS_OWN.split()]
    assert sorted(one.__name__ for one in family(exceptions.RayError)) == sorted(decided)
    for name in decided:
        error = blank(getattr(exceptions, name))
        assert (is_gone(error), is_away(error)) == (name in GONE.split(), name == AWAY), name


NESTED = [OutOfMemoryError("of a task"), ActorDiedError(), ActorUnavailableError("away", None)]


@pytest.mark.parametrize("cause", NESTED, ids=lambda one: type(one).__name__)
def test_what_a_method_raised_is_not_its_actors(cause):
    raised = RayTaskError("nested", "trace", cause).as_instanceof_cause()
    assert isinstance(raised, type(cause))
    assert loss("0", raised) is None


def test_a_loss_says_what_happened_and_whether_it_may_pass():
    gone = loss("3", OutOfMemoryError("low on memory\nand much advice"))
    assert (gone.replica_id, gone.state, gone.may_return) == ("3", FAILED, False)
    assert gone.reason == "its actor died: low on memory"
    cause = ActorDiedErrorContext(actor_id=b"1" * 16, error_message="it was killed by ray.kill")
    assert loss("3", ActorDiedError(cause)).reason == "its actor died: it was killed by ray.kill"
    away = pickle.loads(pickle.dumps(loss("3", ActorUnavailableError("no route", None))))
    assert (away.state, away.may_return) == (FAILED, True)
    assert "cannot be reached" in away.reason


# ---------------------------------------------------------------- who calls

LOST = {
    "killed for memory": OutOfMemoryError("low on memory"),
    "out of reach": ActorUnavailableError("no route", None),
    "node": exceptions.NodeDiedError("its node died"),
}
each_loss = pytest.mark.parametrize("error", LOST.values(), ids=LOST)


@each_loss
async def test_what_a_lost_replica_had_goes_to_the_others(error):
    lost = FakeActor("a", num_answers=3, then=raises(error))
    rig = Rig(lost, FakeActor("b"))
    requests = make_requests(20)
    results = await rig.run(requests)
    assert ids(results) == ids(requests)
    assert not any(result.error for result in results)
    assert rig.states() == ["failed", "serving"]
    may_return = isinstance(error, ActorUnavailableError)
    assert (rig.load.snapshot("a").away_since is not None) == may_return
    assert len(lost.aborted) == (7 if may_return else 0)  # it may still be at work on them


@each_loss
async def test_a_stream_of_a_lost_replica_goes_on_elsewhere(error):
    rig = Rig(FakeActor("a", 1, raises(error)), FakeActor("b"))
    (request,) = make_requests(1)
    *_, last = [result async for result in rig.stream(request)]
    assert last.error is None
    assert last.replica_id == "b"
    assert rig.states() == ["failed", "serving"]


@each_loss
def test_an_answer_of_a_lost_replica_names_it(error):
    told = []
    raised = RayTaskError("f", "trace", OutOfMemoryError("of a task")).as_instanceof_cause()
    odd = exceptions.RaySystemError("the answer cannot be read")
    futures = {name: Future() for name in "012"}
    for future, one in zip(futures.values(), (error, raised, odd), strict=True):
        future.set_exception(one)
    calls = ReplicaCalls(futures, told.append)
    answers = calls.answers(1.0)
    assert isinstance(answers["0"], ReplicaUnavailableError)
    assert answers["0"].replica_id == "0"
    assert answers["1"] is raised.cause
    assert answers["2"] is odd
    assert told == [answers["0"]]


@pytest.mark.parametrize("error", [*LOST.values(), ActorDiedError()], ids=[*LOST, "died"])
def test_the_monitor_marks_a_lost_replica(error):
    tracker = LoadTracker(["0"], state=SERVING)
    monitor = LoadMonitor(tracker, list)

    def answer(outcome):
        future = Future()
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        monitor._take_answers({"0": _Ask(Replica("0", "handle"), [future], tracker.clock(), 0)})
        return tracker.snapshot("0")

    assert answer(RayTaskError("report", "trace", error).as_instanceof_cause()).state is SERVING
    marked = answer(error)
    assert marked.state is FAILED
    assert (marked.away_since is not None) == isinstance(error, ActorUnavailableError)
    assert answer(error).away_since == marked.away_since  # it counts from the first time
    back = answer(EngineReport(replica_id="0", state=SERVING))
    assert (back.state, back.away_since) == (SERVING, None)


@pytest.mark.parametrize("state", [ReplicaState.UPDATING, ReplicaState.DRAINING, FAILED])
def test_who_was_only_away_is_back_with_whatever_it_reports(state):
    tracker = LoadTracker(["0", "1"], state=SERVING)
    tracker.mark("0", FAILED, "its actor cannot be reached", may_return=True)
    tracker.mark("1", FAILED, "its actor died")
    for name in "01":
        tracker.observe(EngineReport(replica_id=name, state=state, reason="its own"))
    back, dead = tracker.snapshots()
    assert (back.state, back.reason, back.away_since) == (state, "its own", None)
    assert (dead.state, dead.reason) == (FAILED, "its actor died")


def test_what_failed_otherwise_does_not_come_to_be_away():
    tracker = LoadTracker(["0"], state=SERVING)
    tracker.mark("0", FAILED, "its actor cannot be reached", may_return=True)
    tracker.mark("0", FAILED, "its actor died")
    assert tracker.snapshot("0").away_since is None
    tracker.mark("0", FAILED, "its actor cannot be reached", may_return=True)
    assert tracker.snapshot("0").away_since is None


def test_the_tokenizer_is_fetched_from_a_replica_that_lives(monkeypatch):
    class Actor:
        def __init__(self, answer):
            self.get_tokenizer = self
            self.remote = lambda: answer

    def get(answer, timeout):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(requests.ray, "get", get)
    replicas = [Replica(name, Actor(error)) for name, error in LOST.items()]
    found = SimpleNamespace(
        current=lambda: replicas, answering=lambda: replicas, load=LoadTracker([])
    )
    made = requests.Requests(found, None, lambda: False)
    with pytest.raises(NoReplicaAvailableError, match=r"OutOfMemoryError.*NodeDiedError"):
        made.fetch("get_tokenizer")
    replicas.append(Replica("alive", Actor("tokenizer")))
    assert made.fetch("get_tokenizer") == "tokenizer"
    replicas.insert(0, Replica("odd", Actor(RayTaskError("f", "trace", KeyError("odd")))))
    with pytest.raises(RayTaskError):
        made.fetch("get_tokenizer")


@pytest.mark.parametrize(
    ("error", "node_lives", "expected"),
    [
        (OutOfMemoryError("the task was killed"), True, SyncError),
        (exceptions.WorkerCrashedError(), True, SyncError),
        (exceptions.GetTimeoutError(), True, SyncError),
        (exceptions.NodeDiedError("gone"), False, None),
        (RayTaskError("_end_all", "trace", PermissionError("odd")), True, RayTaskError),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_who_ends_a_replica_hears_whether_that_was_done(monkeypatch, error, node_lives, expected):
    nodes = iter([True, node_lives])
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a" * 56, "Alive": next(nodes)}])
    monkeypatch.setattr(ray, "remote", lambda function: function)
    monkeypatch.setattr(args, "_end_all", Task())

    def get(call, timeout):
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        end_replica("actor", ReplicaProcesses("a" * 56, ()))


def test_a_process_of_which_only_a_thread_is_left_is_ended_too():
    with headless() as (process, began):
        left = args._end_all(ReplicaProcesses("", (ProcessId(process.pid, began),)), 5.0)
        assert left == []
        assert process.wait(5.0) == -signal.SIGKILL


class Task:
    """A task that is never run."""

    def options(self, **_):
        return self

    def remote(self, *_):
        return None

"""Who the members are, in which order, and that copies go their own way."""

import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import ray
import torch

from tests.fakes.service import member, replicas_of
from torchrl_vllm_sync import AsyncVLLM, ParamMeta, ReplicaState
from torchrl_vllm_sync.errors import NoReplicaAvailableError, ServiceClosedError
from torchrl_vllm_sync.replica import EngineReport, LoadReport, PushReport
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.service import fleet, service
from torchrl_vllm_sync.service.replicas import Answers, Membership, Replicas, ServiceSettings
from torchrl_vllm_sync.service.weights import Weights


def ids(membership):
    return [one.replica_id for one in membership.members]


def test_a_restarted_replica_keeps_its_place():
    replicas = replicas_of(map(member, "012"))
    replicas.suspend("1")
    assert ids(replicas) == ["0", "1", "2"]
    assert [one.replica_id for one in replicas if one.joined] == ["0", "2"]
    replicas.put(member("1", "another", num_restarts=1))
    assert [one.actor for one in replicas] == ["actor", "another", "actor"]
    assert all(one.joined for one in replicas)


def test_ids_are_never_used_twice():
    replicas = replicas_of(map(member, "01"))
    assert replicas.new_ids(1) == ["2"]
    replicas.put(member("3"))
    replicas.put(without="3")
    assert replicas.new_ids(1) == ["4"]
    assert pickle.loads(pickle.dumps(replicas.membership)).next_id == 5


def test_ids_are_distinct_under_threads():
    replicas, found = replicas_of([]), []
    threads = [
        threading.Thread(target=lambda: found.extend(replicas.new_ids(1)[0] for _ in range(100)))
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    assert sorted(map(int, found)) == list(range(800))


def test_every_change_counts():
    replicas = replicas_of(map(member, "01"))
    replicas.suspend("0")
    replicas.put(member("0"))
    replicas.put(without="1")
    assert replicas.membership.epoch == 3
    with pytest.raises(KeyError):
        replicas.suspend("1")
    assert replicas.membership.find("1") is None
    assert replicas.membership.epoch == 3


def test_a_copy_is_of_one_moment():
    replicas = replicas_of(map(member, "01"))
    copy = replicas.membership
    replicas.put(member("2"))
    replicas.put(without="0")
    assert (ids(copy), copy.epoch, copy.next_id) == (["0", "1"], 0, 2)
    assert (ids(replicas), replicas.membership.epoch) == (["1", "2"], 2)


def test_a_card_holds_no_actor():
    bare = Membership(map(member, "01"), epoch=4).with_actors(None)
    assert [one.actor for one in bare.members] == [None, None]
    assert (ids(bare), bare.epoch) == (["0", "1"], 4)


def test_the_replicas_of_a_service_are_a_sequence_that_others_can_be_given():
    replicas = replicas_of(map(member, "012"))
    replicas.suspend("1")
    assert [one.replica_id for one in replicas] == ["0", "1", "2"]
    assert [one.replica_id for one in replicas.current()] == ["0", "2"]
    assert (replicas[1].replica_id, replicas[-1].replica_id, len(replicas[:2])) == ("1", "2", 2)
    assert pickle.loads(pickle.dumps(replicas)) == list(replicas)
    with pytest.raises(IndexError, match=r"\[0, 3\), got -1"):
        replicas.at(-1)
    replicas.close()
    assert list(replicas) == []
    with pytest.raises(ServiceClosedError, match="rollouts"):
        replicas.at(0)


def test_where_a_process_meets_engines_is_no_matter_of_its_copies(monkeypatch):
    here = replicas_of([member("0")])
    assert here.meeting_point("192.0.2.1", 5000) == here.rendezvous == ("192.0.2.1", 5000)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.2")
    copy = Replicas(here.settings, here.membership, is_copy=True)
    assert copy.rendezvous == ("192.0.2.2", None)


@pytest.mark.parametrize("strategy", ["round-robin", "requests"])
def test_copies_do_not_all_begin_at_one_replica(monkeypatch, strategy):
    monkeypatch.setattr(LoadMonitor, "start", lambda self: None)
    monkeypatch.setattr(fleet, "_job_id", lambda: None)
    engine = SimpleNamespace(model="m", skip_tokenizer_init=True)
    settings = ServiceSettings(name="s", engine_args=engine, balancing={"strategy": strategy})
    members = Membership(map(member, "0123"))
    copies = [service._rebuild(AsyncVLLM, settings, members) for _ in range(16)]
    first = [one.requests.balancer.reserve([1, 2]).replica_id for one in copies]
    assert len({*first}) > 1  # that all are alike happens once in a billion times


def test_one_replica_s_figure_is_asked_of_that_one_alone(monkeypatch):
    """Another may hang."""
    replicas, asked = replicas_of(map(member, "012")), []

    def start_calls(method, calls):
        asked.append([*calls])
        found = Answers({name: 10 + int(name) for name in calls if name != "1"})
        return SimpleNamespace(answers=lambda deadline_s: found)

    monkeypatch.setattr(replicas, "start_calls", start_calls)
    assert replicas.figure("get_cache_usage", 2) == 12
    assert replicas.figure("get_cache_usage", 1) is None
    assert replicas.figure("get_cache_usage", None) == [10, None, 12]
    assert asked == [["2"], ["1"], ["0", "1", "2"]]


def test_the_first_failure_of_several_is_raised():
    answers = Answers({"0": 1, "1": KeyError("a"), "2": ValueError("b")})
    assert list(answers.failures) == ["1", "2"]
    with pytest.raises(KeyError, match="a"):
        answers.raise_failures()
    assert Answers({"0": 1}).raise_failures() == {"0": 1}


@pytest.mark.parametrize("answer", [None, RuntimeError("no such checkpoint")])
def test_what_a_push_must_hold_is_asked_of_those_that_are_there(monkeypatch, answer):
    replicas = replicas_of([member("0"), member("1")])

    def start_calls(method, calls):
        failures = {} if answer is None else dict.fromkeys(calls, answer)
        first = [["w", "float32", [2]]] if calls and answer is None else None
        return SimpleNamespace(first_answer=lambda deadline_s: first, failures=lambda: failures)

    monkeypatch.setattr(replicas, "start_calls", start_calls)
    if answer is not None:
        with pytest.raises(RuntimeError, match="no such checkpoint"):
            Weights(replicas).expected()
    else:
        assert Weights(replicas).expected() == [ParamMeta("w", torch.float32, (2,))]
    for one in "01":
        replicas.suspend(one)
        replicas.load.mark(one, ReplicaState.STARTING, "it is being restarted")
    with pytest.raises(NoReplicaAvailableError, match=r"replica 0 is starting \(it is being rest"):
        Weights(replicas).model_metadata()


# ---------------------------------------------------------------- the ledger beside it


def test_a_ledger_follows_the_order_and_keeps_what_is_in_flight():
    load = LoadTracker("012", state=ReplicaState.SERVING)
    load.reserve("0")
    load.reserve("1", 2, 30)
    load.follow(["2", "1", "3"])
    assert load.replica_ids == ["2", "1", "3"]
    assert load.total_in_flight == 3
    assert [one.state for one in load.snapshots()][2] is ReplicaState.STARTING
    load.follow(["0", "2", "1", "3"])  # it is back before its request has ended
    assert load.in_flight("0") == 1
    load.release("0")
    load.release("1", 2, 30)
    assert load.total_in_flight == 0
    with load.lock:
        assert [load.replica_ids.index(one.replica_id) for one in load.candidates()] == [1, 2]


def test_a_renewed_replica_is_known_for_nothing_but_its_requests():
    load = LoadTracker("01", state=ReplicaState.SERVING)
    load.observe(
        EngineReport(replica_id="1", state=ReplicaState.SERVING, weight_version=7, num_unfinished=3)
    )
    load.reserve("1", 2, 30)
    asked_at = load.clock() - 1.0
    load.renew("1", ReplicaState.STARTING)
    after = load.snapshots()[1]
    assert (after.weight_version, after.num_unfinished) == (None, None)
    assert (after.in_flight, after.held_tokens) == (2, 30)
    old = EngineReport(replica_id="1", state=ReplicaState.SERVING, weight_version=7)
    load.observe(old, asked_at=asked_at)
    assert load.snapshots()[1].state is ReplicaState.STARTING
    load.release("1", 2, 30)


def test_whoever_watches_hears_of_replicas_that_come_and_go():
    load, heard = LoadTracker("01", state=ReplicaState.SERVING), []
    with load.watched(lambda: heard.append(len(load.replica_ids))):
        load.follow(["0", "1", "2"])
        load.renew("2", ReplicaState.SERVING)
        load.remove("0")
    assert heard[-1] == 2
    assert len(heard) >= 3


# What ``torchrl-vllm-sync status`` does with what replicas keep, and with what they report.
READER = """
import pickle, sys
import torchrl_vllm_sync.cli, torchrl_vllm_sync.observe.views
from torchrl_vllm_sync.service.replicas import observed
state, report = pickle.load(sys.stdin.buffer)
print(state["settings"].name, len(state["membership"].members), report.last_push.version)
print(sorted({"vllm", "torch", "torchrl", "transformers"} & {*sys.modules}))
"""


def test_what_replicas_keep_is_read_without_vllm_or_torch():
    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.engine.actor import EngineActor

    engine_args = AsyncEngineArgs(model="m")
    replicas = replicas_of(map(member, "01"), engine_args=engine_args, actor_class=Membership)
    bare = replicas.membership.with_actors(None)
    kept = SimpleNamespace(_card={"settings": replicas.settings, "membership": bare})
    state = EngineActor.card(kept, bare=True)
    push = PushReport(began_at=0.0, seconds=1.0, version=7, replicas=[LoadReport(version=7)])
    report = EngineReport(replica_id="0", state=ReplicaState.SERVING, last_push=push)
    found = subprocess.run(
        [sys.executable, "-c", READER],
        input=pickle.dumps((state, report)),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.decode().splitlines() == ["rollouts 2 7", "[]"]
    assert EngineActor.card(kept) == kept._card  # for those who attach
    assert EngineActor.card(SimpleNamespace(_card={}), bare=True) == {}  # one that joins has none

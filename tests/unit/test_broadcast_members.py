"""Who is in the group of a trainer and its engines, and what a push makes of who fails."""

from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fakes.weights import Answered, DescribingClient, members_of, send
from torchrl_vllm_sync import BroadcastTransport, ReplicaState
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights.broadcast import transport as module
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup
from torchrl_vllm_sync.weights.module import ModuleSource
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Standing


def standing_group(device):
    return SimpleNamespace(
        is_connected=True, was_left=False, device=torch.device(device), close=lambda: None
    )


def test_a_group_that_stands_does_without_those_who_are_absent_now_and_no_others():
    client = DescribingClient(None, None)
    client.known["1"] = Standing(state=ReplicaState.FAILED)
    transport = BroadcastTransport(device="cpu")
    group = transport._group = standing_group("cpu")
    transport._joined = {"0": ""}
    members = members_of(client)
    transport.open(members)
    assert transport._group is group
    assert members.missing == {"1": "it is failed"}
    assert not client.described


@pytest.mark.parametrize(("device", "again"), [("meta", False), ("meta:1", True)])
def test_weights_that_are_elsewhere_have_a_new_group_formed(device, again):
    source = MappingSource({"a": torch.ones(2)})
    source.views = lambda: [("a", torch.ones(2, device="meta"))]
    client = DescribingClient(TransferError("too busy"))
    transport = BroadcastTransport()
    transport._group, transport._joined = standing_group(device), {"0": ""}
    if again:
        with pytest.raises(TransferError, match="too busy"):
            transport.open(members_of(client), source)
    else:
        transport.open(members_of(client), source)
    assert client.described == again
    group = transport._group = standing_group(device)
    transport.open(members_of(client))
    assert transport._group is group, "without knowing what will be sent, the group stands"


# ---------------------------------------------------------------- pushes, without a communicator


class Group:
    """A communicator that everybody joins and nothing is sent through."""

    is_connected, was_left, device, memory = True, False, torch.device("cpu"), None
    rendezvous = SimpleNamespace(address="127.0.0.1", port=4321)

    def __init__(self):
        self.closed = False

    def connect(self, *, timeout_s, watch):
        watch()

    def absent(self):
        return []

    def start(self, push_id, *, deadline, watch):
        pass

    def synchronize(self, *, deadline, watch):
        pass

    def abort(self):
        pass

    def close(self):
        self.closed = True


class Engines:
    """Two replicas that join, prepare and receive, or fail at it; what they are asked is kept."""

    service_name, rendezvous = "fake", ("127.0.0.1", None)

    def __init__(self):
        self.called, self.failing = [], {}
        self.known = {one: Standing(state=ReplicaState.SERVING) for one in "01"}

    def standings(self):
        return self.known

    def start_calls(self, method, calls, **options):
        self.called.append((method, sorted(calls), options))
        failing = self.failing.get(method, {})
        answers = {n: failing.get(n, self.answer(method, n, options)) for n in calls}
        return Answered(answers)

    def answer(self, method, name, options):
        if method == "describe":
            return describe_engine(name)
        if method == "prepare_broadcast":
            return {"path": "plan", "direct": True}
        if method == "receive_broadcast":
            return {"version": options["version"], "path": "plan"}
        return None

    def calls_of(self, method):
        return [(names, options) for called, names, options in self.called if called == method]


def describe_engine(name):
    facts = {"max_model_len": 8, "vocab_size": 8, "block_size": 8, "num_kv_blocks": None}
    return EngineDescription(replica_id=name, node_ip="127.0.0.1", pid=1, vllm_version="0", **facts)


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
def groups(monkeypatch):
    """The groups formed; transfers are not made."""
    made = []

    def host(at, device, **options):
        made.append(Group())
        return made[-1]

    monkeypatch.setattr(BroadcastGroup, "host", host)
    monkeypatch.setattr(module.buckets, "broadcast_tensors", lambda *args, **options: None)
    monkeypatch.setattr(module.buckets, "send_buckets", lambda *args, **options: None)
    return made


def push(transport, engines, version):
    return send(transport, engines, MappingSource({"a": torch.ones(2)}), version)


def passes(engines):
    return [options["num_passes"] for _, options in engines.calls_of("receive_broadcast")]


def test_plans_are_checked_until_everybody_has_loaded_by_them(engines, groups):
    transport = BroadcastTransport()
    engines.failing = {"receive_broadcast": {"1": OSError("no room")}}
    assert push(transport, engines, 1).failures == {"1": "no room"}
    assert groups[0].closed
    engines.failing = {}
    for version in (2, 3):
        assert push(transport, engines, version).failures == {}
    assert passes(engines) == [2, 2, 1]
    assert len(groups) == 2


@pytest.mark.parametrize("contiguous", [True, False], ids=["whole", "through buckets"])
def test_tensors_that_were_made_for_one_push_are_not_kept_until_the_next(
    engines, groups, contiguous
):
    transport, module = BroadcastTransport(), torch.nn.Linear(2, 2, bias=False)
    made = torch.ones(2, 2) if contiguous else torch.ones(2, 4)[:, ::2]
    kept = StorageWeakRef(module.weight.untyped_storage())
    freed = StorageWeakRef(made.untyped_storage())
    assert send(transport, engines, MappingSource({"a": made}), 1).failures == {}
    del made
    assert freed.expired()
    for version in (2, 3):
        assert send(transport, engines, ModuleSource(module), version).failures == {}
        views, bound = transport._views, transport._bound
    assert send(transport, engines, ModuleSource(module), 4).failures == {}
    assert (transport._views is views, transport._bound is bound) == (True, True)
    assert not kept.expired()


def test_a_new_group_is_told_what_pushes_consist_of(engines, groups):
    """An engine in it may have been started since."""
    transport = BroadcastTransport()
    push(transport, engines, 1)
    push(transport, engines, 2)
    assert [names for names, _ in engines.calls_of("prepare_broadcast")] == [["0", "1"]]
    engines.known = {
        **engines.known,
        "1": Standing(state=ReplicaState.SERVING, incarnation="restarted"),
    }
    push(transport, engines, 3)
    assert len(groups) == 2
    assert len(engines.calls_of("prepare_broadcast")) == 2
    assert passes(engines) == [2, 1, 2], "an engine that was started since has a plan of its own"


def test_a_standing_group_is_told_of_other_tensors(engines, groups):
    transport = BroadcastTransport()
    push(transport, engines, 1)
    other = MappingSource({"a": torch.ones(2), "b": torch.ones(3)})
    for version in (2, 3):
        assert send(transport, engines, other, version).failures == {}
    assert len(groups) == 1
    assert len(engines.calls_of("prepare_broadcast")) == 2
    assert passes(engines) == [2, 2, 1], "plans of other tensors are checked, too"


def test_who_does_not_say_what_it_is_is_left_out_and_reported(engines, groups):
    engines.failing = {"describe": {"1": TimeoutError("no answer")}}
    outcome = push(BroadcastTransport(), engines, 1)
    assert outcome.failures == {"1": "no answer"}
    assert [names for names, _ in engines.calls_of("join_broadcast")] == [["0"]]
    assert [(one.replica_id, one.version) for one in outcome.replicas] == [("0", 1), ("1", None)]


def test_who_does_not_join_is_left_out_and_reported(engines, groups):
    engines.failing = {"join_broadcast": {"1": OSError("no route")}}
    outcome = push(BroadcastTransport(), engines, 1)
    assert outcome.failures == {"1": "no route"}
    assert [one.closed for one in groups] == [True, False]
    assert [names for names, _ in engines.calls_of("receive_broadcast")] == [["0"]]


def test_who_cannot_prepare_keeps_everything_from_being_sent(engines, groups):
    engines.failing = {"prepare_broadcast": {"1": OSError("no memory")}}
    outcome = push(BroadcastTransport(), engines, 1)
    assert outcome.failures == {
        "0": "nothing was sent: replica 1 could not prepare",
        "1": "no memory",
    }
    assert engines.calls_of("receive_broadcast") == []
    assert groups[0].closed

"""Which transport is chosen where, and how the choice shows."""

import logging
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.weights import DescribingClient, members_of, open_transport
from torchrl_vllm_sync import AutoTransport, WeightUpdater, as_weight_source
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights.auto import TRANSPORTS, Place, choose_transport, place_of
from torchrl_vllm_sync.weights.p2p import memory
from torchrl_vllm_sync.weights.p2p.memory import device_uuid, this_node
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.source import MappingSource, current_device, home_device
from torchrl_vllm_sync.weights.transport import Push


def cpu(node="n1"):
    return Place(node_id=node, device_type="cpu")


def gpu(*uuids, node="n1"):
    return Place(node_id=node, device_type="cuda", device_uuids=uuids)


MIXED = Place(node_id="n1", device_type="several devices")


def spare(place):
    """An engine there that has reserved memory for a second set."""
    return replace(place, why_not_written="")


CHOICES = {
    "spare memory on another GPU": (gpu("a"), [spare(gpu("b")), spare(gpu("c", "d"))], "p2p"),
    "spare memory on the same GPU": (gpu("a"), [spare(gpu("a"))], "p2p"),
    "spare memory on the trainer's GPU, too": (gpu("a"), [spare(gpu("a", "b"))], "p2p"),
    "spare memory on another node": (gpu("a"), [spare(gpu("b", node="n2"))], "broadcast"),
    "one without spare memory": (gpu("a"), [spare(gpu("b")), gpu("c")], "broadcast"),
    "spare memory on CPUs": (cpu(), [spare(cpu()), spare(cpu())], "p2p"),
    "spare memory on CPUs, a GPU trainer": (gpu("a"), [spare(cpu())], "memmap"),
    "spare memory, nobody knows where": (cpu(""), [spare(cpu(""))], "broadcast"),
    "the same GPU": (gpu("a"), [gpu("a")], "ipc"),
    "two engines on the trainer's GPU": (gpu("a"), [gpu("a"), gpu("a")], "ipc"),
    "another GPU of this node": (gpu("a"), [gpu("b")], "broadcast"),
    "GPUs of other nodes": (gpu("a"), [gpu("b"), gpu("c", "d", node="n2")], "broadcast"),
    "one on the trainer's GPU, one not": (gpu("a"), [gpu("a"), gpu("b")], "ipc"),
    "tensor parallel over the trainer's GPU": (gpu("a"), [gpu("a", "b")], "ipc"),
    "GPUs that nobody names": (gpu(), [gpu()], "broadcast"),
    "CPUs of one node": (cpu(), [cpu(), cpu()], "memmap"),
    "CPUs of several nodes": (cpu(), [cpu(), cpu("n2")], "broadcast"),
    "CPUs of unknown nodes": (cpu(""), [cpu("")], "broadcast"),
    "a CPU trainer, engines on its node's GPUs": (cpu(), [gpu("a"), gpu("b")], "memmap"),
    "a GPU trainer, engines on its node's CPUs": (gpu("a"), [cpu()], "memmap"),
    "a trainer over several devices": (MIXED, [gpu("a")], "memmap"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice_follows_the_places(case):
    trainer, engines, wanted = CHOICES[case]
    assert choose_transport(trainer, dict(enumerate(engines))) == wanted
    assert wanted in TRANSPORTS


@pytest.mark.parametrize("reaches", [True, False])
def test_gpus_that_are_seen_must_reach_each_other(monkeypatch, reaches):
    asked, devices = [], {0: "a", 1: "b"}  # a third one is hidden
    cuda = SimpleNamespace(
        device_count=lambda: len(devices),
        can_device_access_peer=lambda *pair: asked.append(pair) or reaches,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(memory, "device_uuid", lambda device: devices[device.index])
    apart, beside = [spare(gpu("b")), spare(gpu("c"))], [gpu("a", "b"), gpu("a")]
    for engines, wanted in (apart, ("broadcast", "p2p")), (beside, ("memmap", "ipc")):
        assert choose_transport(gpu("a"), dict(enumerate(engines))) == wanted[reaches]
    pair = torch.device("cuda", 0), torch.device("cuda", 1)
    assert asked == [pair] * len(asked) != []


@pytest.mark.parametrize(
    ("trainer", "engines"),
    [
        (cpu(), [gpu("a", node="n2")]),
        (gpu("a"), [cpu("n2")]),
        (gpu("a"), [gpu("a"), gpu("b", node="n2")]),
        (MIXED, [gpu("a", node="n2")]),
        (cpu(""), [gpu("a", node="")]),
    ],
)
def test_where_nothing_reaches_all_one_must_be_named(trainer, engines):
    with pytest.raises(UnsupportedArgumentError, match=r"weights are on .*replica 0 on .*name one"):
        choose_transport(trainer, dict(enumerate(engines)))


def test_facts_of_this_process():
    assert this_node() == this_node() != ""
    assert device_uuid(torch.device("cpu")) == ""
    for source in (MappingSource({"a": torch.ones(2)}), as_weight_source(torch.nn.Linear(2, 2))):
        assert place_of(source) == Place(node_id=this_node(), device_type="cpu")


class Views(MappingSource):
    """A source of what says it is on these devices."""

    def __init__(self, *devices):
        super().__init__({})
        self._shown = [("a", SimpleNamespace(device=torch.device(one))) for one in devices]

    def views(self):
        return self._shown


def test_weights_are_sent_from_where_they_are():
    assert home_device(Views("cuda:1", "cuda:1"), "cuda") == torch.device("cuda:1")
    assert home_device(Views("cuda:1", "cpu"), "cuda") == torch.device("cuda:1")
    assert home_device(Views("cuda:0", "cuda:1"), "cuda") is None
    assert home_device(Views("cpu"), "cuda") is None
    assert home_device(Views(), "cpu") is None
    assert home_device(None, "cpu") is None
    assert home_device(Pairs(), "cpu") is None
    assert home_device(as_weight_source(torch.nn.Linear(2, 2)), "cpu") == current_device("cpu")


class Pairs:
    """A source that says nothing of where it is."""

    def metadata(self):
        return []

    def __iter__(self):
        raise AssertionError("must not be read")


def test_a_source_that_does_not_tell_is_not_read():
    assert place_of(Pairs()).device_type in ("cpu", "cuda")


def description(**facts):
    return EngineDescription(
        replica_id="0",
        node_ip="192.0.2.1",
        pid=1,
        max_model_len=16,
        vocab_size=8,
        block_size=16,
        num_kv_blocks=4,
        vllm_version="0.32.0",
        **facts,
    )


class Chosen:
    """Stands for whatever is chosen."""

    name, run_id, last_version, is_collective = "memmap", "", 7, False

    def __init__(self):
        self.closed, self.opened_for = 0, []

    def open(self, members, source=None):
        self.opened_for.append(source)

    def send(self, members, push):
        return {}

    def close(self):
        self.closed += 1


def send(transport, client, source=None):
    return open_transport(transport, client, source or MappingSource({"a": torch.ones(2)}))


def test_the_choice_is_made_once(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "memmap", Chosen)
    client, transport = DescribingClient(description(node_id=this_node())), AutoTransport()
    transport.open(members_of(client))
    assert (transport.name, transport.last_version, client.described) == ("auto", 0, 0)
    for _ in range(3):
        send(transport, client)
    assert (transport.name, transport.last_version, client.described) == ("memmap", 7, 1)
    chosen = transport.chosen
    transport.close()
    transport.close()
    assert (transport.name, chosen.closed) == ("auto", 1)
    send(transport, client)
    assert client.described == 2
    assert transport.chosen is not chosen


def test_what_is_chosen_is_opened_for_the_weights_that_it_will_send(monkeypatch):
    """Or it would send from the current device, wherever they are."""
    monkeypatch.setitem(TRANSPORTS, "memmap", Chosen)
    client, transport = DescribingClient(description(node_id=this_node())), AutoTransport()
    source = MappingSource({"a": torch.ones(2)})
    send(transport, client, source)
    assert transport.chosen.opened_for == [source]


def test_a_choice_that_cannot_be_made_leaves_none():
    transport = AutoTransport()
    with pytest.raises(TransferError, match="no replica can be reached"):
        send(transport, DescribingClient(RuntimeError("gone")))
    with pytest.raises(UnsupportedArgumentError, match="name one"):
        send(transport, DescribingClient(description(device_type="cuda", node_id="elsewhere")))
    assert transport.name == "auto"


class Refused(P2PTransport):
    """One that engines do not take after all."""

    failures = ()

    def open(self, members, source=None):
        pass

    def send(self, members, push):
        assert self.all_or_none
        if self.failures:
            raise self.failures[0]
        return {"0": {"path": "layerwise", "path_reason": "the plan left other values"}}


@pytest.mark.parametrize("failure", [None, TransferError("replica 0: no plan")])
def test_engines_that_do_not_take_p2p_get_the_next_best_for_good(monkeypatch, caplog, failure):
    """At once if nothing was sent; from the next push on if they got this one by a reload."""
    monkeypatch.setitem(TRANSPORTS, "memmap", Chosen)
    monkeypatch.setitem(TRANSPORTS, "p2p", Refused)
    monkeypatch.setattr(Refused, "failures", [one for one in (failure,) if one])
    caplog.set_level(logging.WARNING)
    source = MappingSource({"a": torch.ones(2)})
    client = DescribingClient(description(node_id=this_node(), why_not_written=""))
    members, transport = members_of(client), AutoTransport()
    used = []
    for version in (1, 2, 3):
        transport.open(members, source)
        transport.send(members, Push(source, version, 5.0))
        used.append(transport.name)
    assert used == ["memmap" if failure else "p2p", "memmap", "memmap"]
    (said,) = [one.message for one in caplog.records]
    assert "memmap is used from now on" in said
    assert ("no plan" if failure else "other values") in said


def test_what_does_not_say_where_it_is_is_not_written(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "memmap", Chosen)
    client = DescribingClient(description(node_id=this_node(), why_not_written=""))
    transport = AutoTransport()
    send(transport, client, Pairs())
    assert transport.name == ("memmap" if place_of(Pairs()).device_type == "cpu" else "broadcast")


def test_the_updater_knows_every_name():
    for name in TRANSPORTS:
        updater = WeightUpdater(None, transport=name)
        assert updater._transport.name == name
        assert pickle.loads(pickle.dumps(updater._transport)).name == name
    with pytest.raises(UnsupportedArgumentError, match=r"'broadcast', 'ipc', 'memmap', 'p2p'"):
        WeightUpdater(None, transport="carrier pigeon")

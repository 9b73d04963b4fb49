"""The p2p transport without a GPU: what it writes into vLLM's models, and what it refuses."""

import asyncio
import copy
import gc
import itertools
import weakref
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.contract.test_transports import Client, P2PReplica
from tests.fakes.engine import BareUpdates
from tests.fakes.weights import (
    DescribingClient,
    description,
    mapped_memory,
    open_transport,
    send,
)
from tests.unit import test_broadcast_receiver as broadcast
from tests.unit.test_sharded_source import push, succeed
from tests.unit.vllm_models import single_process_group
from torchrl_vllm_sync import P2PTransport, as_weight_source
from torchrl_vllm_sync.engine import receiver
from torchrl_vllm_sync.engine.arrivals import Arrivals
from torchrl_vllm_sync.errors import (
    TransferError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.replica import LoadReport, ReplicaState
from torchrl_vllm_sync.weights.p2p import writes
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory, device_of, this_node
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Members, Push

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory):
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture
def transport():
    made = P2PTransport()
    yield made
    made.close()


class Replica(broadcast.Replica):
    """A replica's side of the transport, as the engine actor has it."""

    def __init__(self, name, workers):
        super().__init__(name, workers)
        self.loads = Arrivals(BareUpdates(workers, name=name), list)

    def describe(self):
        return replace(super().describe(), node_id=this_node())

    def plan_writes(self, metadata, **options):
        return asyncio.run(self.loads.plan_writes(metadata, **options))

    def begin_writing(self, known, **options):
        return asyncio.run(self.loads.begin_writing(known, **options))

    def take_written(self, numbers, **options):
        return asdict(asyncio.run(self.loads.take_written(numbers, **options)))


@pytest.fixture
def world(tmp_path, monkeypatch):
    def make(name, **options):
        here = broadcast.World(tmp_path, monkeypatch, name, **options)
        here.client = broadcast.Client([Replica("0", [here.worker])])
        return here

    return make


@pytest.mark.parametrize("name", ["qwen3", "qwen2-tied", "gemma3", "qwen3-moe"])
def test_what_is_written_is_what_vllms_loader_would_load(world, transport, name):
    here = world(name, stage=True)
    for version in (1, 2, 3):  # two memories take turns
        checkpoint = here.checkpoint(start=1000 * version)
        one = broadcast.only(here.push(transport, checkpoint, version))
        assert (one.error, one.version, one.path) == ("", version, "plan")
        here.assert_holds(checkpoint)
    assert here.client.called.count("describe") == 1


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_plan_loses_is_noticed_and_not_served(world, transport, is_read):
    """A parameter is written from nothing, or from another's tensor."""
    here = world("qwen3", stage=True)
    here.receiver.plan_writes(here.metadata)
    for plan in (here.receiver._planned, here.receiver._staged_plan):
        first, second, *_ = (one for one in plan.copies if "input_layernorm" in one.name)
        plan.copies.remove(first)
        if is_read:
            plan.copies.append(replace(first, name=second.name))
    one = broadcast.only(here.push(transport, here.checkpoint(), 1))
    assert (one.version, one.replica_id) == (None, "0")
    assert "some of the weights were not written" in one.error
    updates = here.client.replicas["0"].loads._updates
    assert (updates.whole, updates._gate.state) == (False, ReplicaState.STALE)
    one = broadcast.only(here.push(transport, here.checkpoint(), 1))
    assert "the plan left other values than a reload in 1 parameters" in one.error


def assert_refused_untouched(here, transport, reason):
    one = broadcast.only(here.push(transport, here.checkpoint(), 1))
    assert (one.version, one.replica_id) == (None, "0")
    assert reason in one.error
    assert all((tensor == -1).all() for tensor in here.model.parameters())


def test_an_engine_without_spare_memory_is_named(world, transport):
    assert_refused_untouched(world("qwen3"), transport, "launch it with stage_weights=True")


@pytest.mark.parametrize("stage", [True, False])
def test_an_engine_that_repacks_its_weights_is_named(world, transport, monkeypatch, stage):
    monkeypatch.setattr(receiver, "repacks", lambda: True)
    here = world("qwen3", stage=stage)
    assert here.receiver.arena is None
    assert_refused_untouched(here, transport, "vLLM's CPU backend repacks weights after loading")


def test_a_gpu_without_room_is_named(world, transport, monkeypatch):
    def refuse(*_, **__):
        raise TransferError("staged weights need 9.00 GB")

    monkeypatch.setattr(receiver, "WeightArena", refuse)
    assert_refused_untouched(world("qwen3", stage=True), transport, "staged weights need 9.00 GB")


@pytest.mark.parametrize("num_pushes", [1, 2, 3])
def test_whichever_memory_another_trainer_took_the_next_pushes_arrive(transport, num_pushes):
    client, sources = Client(P2PReplica), itertools.count(1)

    def push():
        value = next(sources)
        source = MappingSource({"t0": torch.full((4,), float(value))})
        assert send(transport, client, source, value).failures == {}
        assert all((one.values["t0"] == value).all() for one in client.replicas.values())

    for _ in range(num_pushes):  # the memory served is one or the other by now
        push()
    for _ in range(3):
        for replica in client.replicas.values():
            replica.arena.begin("one that ended half-way")
        for _ in range(3):
            push()
    held = [worker.memories for of in transport._workers.values() for worker in of]
    assert [len(one) for one in held] == [2] * len(client.replicas)


def test_pushes_in_inference_mode_and_outside_write_to_the_same_memory(transport):
    client = Client(P2PReplica)
    for value in range(1, 7):
        source = MappingSource({"t0": torch.full((4,), float(value))})
        with torch.inference_mode(value in (1, 2, 5)):
            assert send(transport, client, source, value).failures == {}
        assert all((one.values["t0"] == value).all() for one in client.replicas.values())


def row_of(name, shape, at, dtype="float32", offset=0, stride=None):
    dense = torch.empty(shape, device="meta").stride()
    return [name, offset, shape, stride or dense, dtype, at, dense]


def test_neighbours_are_written_by_one_copy_and_read_anew_once_they_have_moved():
    memory = mapped_memory(256)
    places = [4 * 6 * one + 4 * (one > 2) for one in range(4)]  # a gap before the last
    rows = [row_of(f"t{one}", (2, 3), at) for one, at in enumerate(places)]
    targets, data = writes.Places(rows, memory), memory.data

    def assert_written(tensors):
        writes.write([(f"t{at}", one) for at, one in enumerate(tensors)], [targets], CPU)
        for at, one in zip(places, tensors, strict=True):
            assert torch.equal(data[at : at + 24].view(torch.float32).view(2, 3), one)

    whole = torch.arange(24.0).view(4, 2, 3)
    assert_written(whole)
    assert [one.numel() for one, _ in targets._pairs] == [18, 6]
    before = targets._pairs
    whole.mul_(-2)
    assert_written(whole)
    assert targets._pairs is before
    assert_written([*whole[:3], whole[0] + 1])
    assert_written(torch.full((4, 2, 3), 7.0))
    assert_written([*torch.arange(12.0).view(2, 2, 3), *torch.arange(12.0, 24).view(2, 3, 2).mT])


def in_row(rows, num_memories, owner=CPU):
    return [writes.Places(rows, mapped_memory(4096, owner)) for _ in range(num_memories)]


def as_read(tensors):
    return ((f"t{at}", one) for at, one in enumerate(tensors))


@pytest.mark.parametrize("after", [1, 100, writes.HANDED_ON_BYTES])
@pytest.mark.parametrize("bind", [as_read, lambda tensors: [*as_read(tensors)]])
def test_what_is_written_once_is_handed_on_from_memory_to_memory(monkeypatch, after, bind):
    """Dense tensors are; where others may write in between, each memory is written to."""
    monkeypatch.setattr(writes, "HANDED_ON_BYTES", after)
    rows = [row_of("t0", (8, 4), 0), row_of("t1", (3,), 512), row_of("t2", (2, 2), 1024)]
    rows[2][-1] = (4, 1)
    chained = in_row(rows, 3)
    alone, other = in_row(rows, 1, owner=None), in_row([*rows, row_of("t1", (3,), 2048)], 1)
    copied = []
    copy = torch.Tensor.copy_

    def count(target, *args, **options):
        copied.append(target)
        return copy(target, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", count)
    for _ in range(2):
        tensors = [torch.rand(8, 4), torch.rand(3), torch.rand(2, 2)]
        copied.clear()
        writes.write(bind(tensors), [*chained, *alone, *other], CPU)
        for one in (*chained, *alone, *other):
            found = one.memory.data.view(torch.float32)
            assert torch.equal(found[:32].view(8, 4), tensors[0])
            assert torch.equal(found[128:131], tensors[1])
            assert torch.equal(found[256:272].as_strided((2, 2), (4, 1)), tensors[2])
            assert not found[258:260].any()
        # The chain takes five, of the strided tensor one each; the others take one a row.
        assert len(copied) == 5 + 3 + 4


def test_memory_that_the_last_ones_gpu_does_not_reach_is_written_to(monkeypatch):
    asked, gpus = [], [torch.device("cuda", index) for index in range(2)]
    rows = [row_of("t0", (3,), 0)]

    def reaches(*pair):
        asked.append(pair)
        return False

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(MappedMemory, "hand_on", lambda *_: pytest.fail("it was handed on"))
    places = [one for gpu in gpus for one in in_row(rows, 1, gpu)]
    tensor = torch.rand(3)
    writes.write([("t0", tensor)], places, CPU)
    assert asked == [(*gpus,)]
    assert [device_of(one) for one in (None, "", "GPU-hidden")] == [None, CPU, None]
    for one in places:
        assert torch.equal(one.memory.data.view(torch.float32)[:3], tensor)


@pytest.mark.parametrize(("width", "begin", "dtype"), [(8, 8, "complex128"), (6, 2, "int32")])
def test_strided_copies_are_wide_and_change_no_bit(width, begin, dtype):
    source = torch.randint(-(2**15), 2**15, (5, 24), dtype=torch.int16).view(torch.bfloat16)
    memory = mapped_memory(256)
    row = row_of("one", (5, width), 32, "bfloat16", offset=begin, stride=(24, 1))
    targets, data = writes.Places([row], memory), memory.data
    writes.write([("one", source)], [targets], CPU)
    assert {one.dtype for one in targets._pairs[0]} == {getattr(torch, dtype)}
    found = data[32 : 32 + 10 * width].view(torch.int16).view(5, width)
    assert torch.equal(found, source.view(torch.int16)[:, begin : begin + width])


def test_tensors_that_are_computed_by_now_are_not_those_of_the_push_before(transport):
    """As of a model whose adapters were switched on in between."""
    client, source = Client(P2PReplica), MappingSource({"t0": torch.ones(4)})
    for version in (1, 2):
        assert send(transport, client, source, version).failures == {}
    source.views = lambda: None
    source.tensors["t0"] = torch.full((4,), 5.0)
    for version in (3, 4):
        assert send(transport, client, source, version).failures == {}
        assert all((one.values["t0"] == 5).all() for one in client.replicas.values())


def test_a_transport_lets_go_of_a_model_that_is_gone(transport):
    client = Client(P2PReplica)

    def push_thrice():
        model = torch.nn.Module()
        model.t0 = torch.nn.Parameter(torch.ones(4))
        for version in (1, 2, 3):  # each memory is written
            assert send(transport, client, as_weight_source(model), version).failures == {}
        return weakref.ref(model.t0.untyped_storage())

    values = push_thrice()
    gc.collect()
    assert values() is None
    source = MappingSource({"t0": torch.full((4,), 5.0)})
    assert send(transport, client, source, 4).failures == {}
    assert all((one.values["t0"] == 5).all() for one in client.replicas.values())


HERE = {"node_id": this_node()}


@pytest.mark.parametrize(
    ("engines", "device", "reason"),
    [
        ([{"node_id": "elsewhere"}], None, "one host, and replica 0 is on elsewhere"),
        ([HERE, {"node_id": ""}], None, "one host, and replica 1 is on an unknown one"),
        ([HERE, {**HERE, "device_type": "cuda"}], None, "is on cpu, replica 1 is on cuda"),
        ([HERE], "cuda:0", "the engines are on cpu, the trainer is on cuda:0"),
        pytest.param(
            [{**HERE, "device_type": "cuda"}],
            None,
            "the trainer is on a host without CUDA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA"),
        ),
    ],
)
def test_engines_out_of_reach_are_named(engines, device, reason):
    client = DescribingClient(*(description(**one) for one in engines))
    with pytest.raises(UnsupportedArgumentError, match=reason):
        open_transport(P2PTransport(device=device), client)


class Elsewhere(MappingSource):
    """Yields tensors on another device than those of the engines."""

    def __iter__(self):
        return ((name, one.to("meta")) for name, one in super().__iter__())


class Computed(Elsewhere):
    """The same without views."""

    def views(self):
        return None


@pytest.mark.parametrize("source", [Elsewhere, Computed])
def test_tensors_elsewhere_are_named_and_nothing_is_served(transport, source):
    client, given = Client(P2PReplica), source({"t0": torch.ones(4)})
    if source is Elsewhere:
        given.views = lambda: [("t0", torch.ones(4, device="meta"))]
    with pytest.raises(WeightMismatchError, match="t0 is on meta, but this transport writes from"):
        send(transport, client, given, 1)
    assert {one.version for one in client.replicas.values()} == {0}


def test_replicas_that_cannot_be_reached_are_named():
    with pytest.raises(TransferError, match=r"no replica can be reached: .*gone"):
        open_transport(P2PTransport(), DescribingClient(RuntimeError("gone")))


def test_a_transport_that_is_not_open_sends_nothing(transport):
    with pytest.raises(TransferError, match="not open"):
        transport.send(Members(Client(P2PReplica)), Push(MappingSource({}), 1, 1.0))


class Shards(MappingSource):
    """Yields what a rank holds of each tensor, as a source of a user's own may."""

    def views(self):
        return None

    def __iter__(self):
        return iter(self.tensors.items())


def write_shards(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = Shards({"t0": distribute_tensor(torch.ones(4), mesh)})
    with pytest.raises(WeightMismatchError, match="t0 is a shard"):
        send(P2PTransport(), Client(P2PReplica), shards, 1)
    return True


@pytest.mark.slow
def test_shards_that_a_source_does_not_gather_are_refused():
    assert succeed(write_shards) == [True, True]


def push_shards(rank):
    """A trainer of two ranks under FSDP2: the first one writes whole tensors."""
    whole = torch.nn.Module()
    for name, shape in (("first", (6, 4)), ("second", (5,)), ("third", (3, 2))):
        values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        whole.register_parameter(name, torch.nn.Parameter(values))
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert all(isinstance(one, DTensor) for one in sharded.parameters())
    transport, client = P2PTransport(), Client(P2PReplica)
    for version in (1, 2):
        with torch.no_grad():
            for one in (*whole.parameters(), *sharded.parameters()):
                one.mul_(-1.5)
        source = as_weight_source(sharded)
        failures = push(source, lambda now, at=version: send(transport, client, now, at).failures)
        assert failures == {}
    for replica in client.replicas.values() if rank == 0 else ():
        assert replica.version == 2
        for name, tensor in whole.named_parameters():
            assert torch.equal(replica.values[name], tensor), name
    transport.close()
    return True


def test_shards_of_several_ranks_are_written_whole():
    assert succeed(push_shards) == [True, True]


def test_a_plan_that_another_way_refuted_is_not_trusted_between_two_steps():
    class Told(BareUpdates):
        path = "plan"

        def can_swap(self, **options):
            return True

        async def call_workers(self, *call, **options):
            return [{"error": "", "path": self.path, "path_reason": "", "direct": True}]

        async def swap(self, *call, **push):
            return self.came("swap")

        async def apply(self, *call, **push):
            return self.came("apply")

        def came(self, how):
            self.asked.append(how)
            return LoadReport(version=1, path=self.path)

    async def run():
        updates = Told()
        loads, push = Arrivals(updates, list), {"version": 1, "run_id": "r", "timeout_s": 9.0}
        await loads.prepare_broadcast([], 1, timeout_s=9.0)
        await loads.receive_broadcast(1, "", **push)
        updates.path = "layerwise"
        await loads.take_written([0], **push)  # the first, which is compared with a reload
        updates.path = "plan"
        await loads.receive_broadcast(2, "", **push)
        await loads.receive_broadcast(3, "", **push)
        return updates.asked

    assert asyncio.run(run()) == ["swap", "apply", "apply", "swap"]

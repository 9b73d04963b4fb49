"""A sharded trainer by p2p: every rank writes what it holds, straight into vLLM's models.

The engines' side is in this process, the trainer's ranks in others, the first of which calls it.
"""

import contextlib
import copy
import gc
import itertools
import os
import signal
import threading
import time
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.contract.test_transports import Client, P2PReplica
from tests.engine.requests import eventually
from tests.fakes.weights import SERVING, Answered, mapped_memory, send
from tests.unit import test_broadcast_receiver as broadcast
from tests.unit.test_p2p import Replica
from tests.unit.test_sharded_source import STEP_S, run, succeed, together
from tests.unit.test_sharded_source import push as push_on_every_rank
from tests.unit.vllm_models import single_process_group
from torchrl_vllm_sync import P2PTransport, as_weight_source
from torchrl_vllm_sync.errors import NonFiniteWeightsError
from torchrl_vllm_sync.weights import sharded as sharded_module
from torchrl_vllm_sync.weights.module import ModuleSource
from torchrl_vllm_sync.weights.p2p import writes
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory
from torchrl_vllm_sync.weights.p2p.writes import Cut, parts
from torchrl_vllm_sync.weights.sharded import (
    CHECKS,
    WRITES,
    Origin,
    ShardedModuleSource,
    TrainerRankError,
    TrainerRanks,
)
from torchrl_vllm_sync.weights.source import fit_to_model

CPU = torch.device("cpu")


# ---------------------------------------------------------------- what a rank's part of a region is


def regions(shape):
    """Views of a tensor such as loaders take: the whole, flat, rows, columns, blocks, turned."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    yield from (whole, whole.flatten(), whole.reshape(shape[0], -1), whole[::2], whole[1:])
    yield from (whole[..., : shape[-1] // 2], whole[..., 1::2], whole.transpose(0, -1))
    if whole.ndim > 1:
        yield from (whole[1], whole[:, 1:], whole[-1:, : shape[1] // 2])
        yield whole.unflatten(1, (2, -1)).transpose(0, 1) if shape[1] % 2 == 0 else whole
        yield whole[:1].expand(3, *shape[1:])


@pytest.mark.parametrize("shape", [(7,), (6, 4), (5, 6), (3, 4, 5), (4, 6, 2)])
def test_the_parts_of_all_ranks_make_up_each_region(shape):
    size = torch.Size(shape).numel()
    for dim, world, copies in itertools.product(range(len(shape)), (1, 2, 3), (1, 2)):
        for region in regions(shape):
            memory = mapped_memory(8 * region.numel())
            target = memory.data.view(torch.float32).fill_(-1.0)
            place = torch.empty(region.numel() * 2).as_strided(
                region.shape, [2 * one for one in torch.empty(region.shape).stride()]
            )
            row = [
                *("one", region.storage_offset(), region.shape, region.stride()),
                *("float32", 0, place.stride()),
            ]
            written = 0
            for rank, index in itertools.product(range(world), range(copies)):
                rows = -(-shape[dim] // world)
                first, last = (min(i * rows, shape[dim]) for i in (rank, rank + 1))
                begin, end = (first + (last - first) * i // copies for i in (index, index + 1))
                outer, inner = torch.Size(shape[:dim]).numel(), torch.Size(shape[dim + 1 :]).numel()
                cut = Cut(outer, shape[dim], inner, first, last - first, begin, end)
                mine = torch.arange(float(size)).reshape(shape).narrow(dim, first, last - first)
                copied = writes.Places(parts(row, cut), memory)
                writes.write([("one", mine)], [copied], CPU)
                written += sum(one.target.numel() for one in copied.copies.get("one", ()))
            found = target.as_strided(region.shape, place.stride())
            assert torch.equal(found, region), (dim, world, region.shape, region.stride())
            assert written == region.numel()  # nothing twice


def test_a_ragged_region_is_left():
    """From the middle of one block to the middle of the next, as no tensor of a model is taken."""
    row = ["one", 3, (6,), (1,), "float32", 0, (1,)]
    assert parts(row, Cut(2, 5, 1, 0, 3, 0, 3)) is None
    assert parts(row, Cut(2, 5, 1, 3, 2, 3, 5)) is None


# ---------------------------------------------------------------- engines here, ranks elsewhere


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory):
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield


class Remote:
    """How the first rank reaches replicas that are in the test's process."""

    def __init__(self, address, names):
        self._names, self._connection = names, connection.Client(address)

    def standings(self):
        return dict.fromkeys(self._names, SERVING)

    def start_calls(self, method, calls, **kwargs):
        self._connection.send((method, calls, kwargs))
        return Answered(self._connection.recv())


class Engines:
    """Replicas with vLLM's models, of several workers each if ``size`` says so."""

    def __init__(self, directory, monkeypatch, name, *, num_replicas=1, size=1, **options):
        self.replicas = []
        for number in range(num_replicas):
            worlds = [
                broadcast.World(
                    directory / f"{number}-{rank}",
                    monkeypatch,
                    name,
                    stage=True,
                    rank=rank,
                    size=size,
                    **options,
                )
                for rank in range(size)
            ]
            for rank, one in enumerate(worlds):
                self._settle(one, rank, size)
            self.replicas.append(worlds)
        self.config, self.metadata = worlds[0].models.config, worlds[0].metadata
        self.names = [str(number) for number in range(num_replicas)]
        self.client = broadcast.Client(
            [
                Replica(name, [one.worker for one in worlds])
                for name, worlds in zip(self.names, self.replicas, strict=True)
            ]
        )
        self._listener = connection.Listener(str(directory / "engines"), "AF_UNIX")

    @staticmethod
    def _settle(world, rank, size):
        """Plans now, while vLLM's rank is patched; it is so for the whole process."""
        receiver = world.receiver
        receiver.parallel_config = SimpleNamespace(
            data_parallel_index=0, world_size=size, rank=rank
        )
        with world.models.active():
            receiver.prepare(world.metadata, 4096)
        receiver.prepare = lambda metadata, bucket_bytes: None
        receiver._is_checked = True

    def _serve(self):
        with self._listener, self._listener.accept() as there, contextlib.suppress(EOFError):
            while True:
                method, calls, kwargs = there.recv()
                there.send(self.client.start_calls(method, calls, **kwargs).answers(60))

    @contextlib.contextmanager
    def reached(self):
        """Serves the first rank inside; yields what it reaches the engines by."""
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        about = {"address": self._listener.address, "names": self.names}
        yield {"config": self.config, "expected": self.metadata, **about}
        thread.join(10)

    @property
    def num_planned(self):
        """Elements that all workers take of one push."""
        workers = itertools.chain(*self.replicas)
        return sum(one.target.numel() for w in workers for one in w.receiver._planned.copies)

    def assert_hold(self, model):
        checkpoint = dict(fit_to_model(ModuleSource(model), self.metadata))
        for world in itertools.chain(*self.replicas):
            world.assert_holds(checkpoint)


@pytest.fixture
def engines(tmp_path, monkeypatch):
    number = itertools.count()
    return lambda *args, **options: Engines(
        tmp_path / str(next(number)), monkeypatch, *args, **options
    )


def whole_model(config, times=0, dtype=torch.float32):
    """The trainer's model after some steps."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype)
    with torch.no_grad():
        for one in itertools.chain(*([*model.parameters()] for _ in range(times))):
            one.mul_(-1.5)
    return model


def shard(model, wrap):
    world = dist.get_world_size()
    shape = {"copies": (world, 1), "both": (2, world // 2)}.get(wrap, (world,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])

    def columns(parameter):
        return Shard(parameter.ndim - 1)

    placement = {"shard_placement_fn": columns} if wrap == "columns" else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **placement)
    ignored = {model.model.norm.weight} if wrap == "mixed" else set()
    fully_shard(model, mesh=mesh, ignored_params=ignored, **placement)
    return model


LAUNCH, WRITE = sharded_module.Gather.launch, writes.write
HAND_ON = MappedMemory.hand_on


class Counted:
    """Counts what a rank gathers and writes, from now on."""

    def __init__(self):
        self.num_gathered = self.num_written = self.num_handed_on = 0

        def launch(gather, *args):
            self.num_gathered += 1
            return LAUNCH(gather, *args)

        def write(tensors, copies, device):
            tensors = list(tensors)
            for (name, _), of in itertools.product(tensors, copies):
                self.num_written += sum(one.target.numel() for one in of.copies.get(name, ()))
            return WRITE(tensors, copies, device)

        def hand_on(memory, other, spans):
            self.num_handed_on += sum(map(len, spans))
            return HAND_ON(memory, other, spans)

        MappedMemory.hand_on = hand_on
        sharded_module.Gather.launch = launch
        sharded_module.write = writes.write = write


def train_and_push(rank, address, names, expected, config, wrap, dtype, idle, hand_on):
    """Three pushes; returns how often this rank gathered, and what it wrote and handed on.

    That is counted in elements, and in bytes.
    """
    model = shard(whole_model(config, dtype=dtype), wrap)
    client = Remote(address, names) if rank == 0 else None
    transport, counted = P2PTransport(hand_on=hand_on), Counted()
    if rank == idle:
        sharded_module.write = lambda tensors, copies, device: None
    for version in (1, 2, 3):
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(-1.5)
        failures = push_on_every_rank(
            as_weight_source(model),
            lambda now, at=version: (
                send(transport, client, fit_to_model(now, expected), at).failures
            ),
        )
        assert failures == {}
    transport.close()
    return counted.num_gathered, counted.num_written, counted.num_handed_on


def all_of(rank, jobs):
    return [train_and_push(rank, **job) for job in jobs]


def job(name, wrap="layers", dtype=torch.float32, idle=None, hand_on=False, **options):
    return name, {"wrap": wrap, "dtype": dtype, "idle": idle, "hand_on": hand_on}, options


JOBS = {
    2: [
        job("qwen3", num_replicas=2),
        job("qwen3", hand_on=True, num_replicas=3),
        job("qwen3", "columns", size=2),
        job("qwen3", "copies", dtype=torch.float64),
        job("qwen3-moe", "columns", size=2, expert_parallel=True),
        job("qwen3", idle=1),
    ],
    3: [job("qwen2-tied", "mixed"), job("qwen3-moe"), job("qwen3-moe", "copies", size=2)],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_writes_its_own_part_and_nothing_is_gathered(engines, world_size):
    """The last job of two ranks is the negative control: one of them writes nothing."""
    with contextlib.ExitStack() as stack:
        jobs = [(engines(name, **options), how) for name, how, options in JOBS[world_size]]
        given = [stack.enter_context(here.reached()) | how for here, how in jobs]
        ranks = succeed(all_of, world_size=world_size, limit_s=100.0, jobs=given)
    for (here, how), counts in zip(jobs, zip(*ranks, strict=True), strict=True):
        gathered, written, handed_on = zip(*counts, strict=True)
        assert not any(gathered)
        # Of three replicas two get all by way of another.
        planned = 4 * 3 * here.num_planned * 2 // 3
        assert sum(handed_on) == (planned if how["hand_on"] else 0)
        wanted = whole_model(here.config, 3, how["dtype"]).float()
        if how["idle"] is None:
            here.assert_hold(wanted)
            assert all(written)
            assert sum(written) == 3 * here.num_planned
        else:
            assert sum(written) < 3 * here.num_planned
            with pytest.raises(AssertionError):
                here.assert_hold(wanted)


# ---------------------------------------------------------------- failures


def break_off(rank, address, names, expected, config, how, path):
    """A push in which rank 1 writes one half, and is killed, raises, or goes on much later.

    Or it writes all, with a value that is no number.
    """
    model = shard(whole_model(config), "layers")
    client = Remote(address, names) if rank == 0 else None
    transport = P2PTransport()

    def push(version):
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(-1.5)
        return push_on_every_rank(
            ShardedModuleSource(model, timeout_s=STEP_S),
            lambda now: send(transport, client, fit_to_model(now, expected), version).failures,
            CHECKS,
            WRITES,
        )

    def half(tensors, copies, device):
        tensors = list(tensors)
        WRITE(tensors[::2], copies, device)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise OSError("out of luck")
        eventually(Path(path).exists, timeout_s=60)
        WRITE(tensors[1::2], copies, device)

    together()
    assert push(1) == {}
    if rank == 1 and how == "nan":
        with torch.no_grad():
            model.lm_head.weight.to_local()[-1, 3] = torch.nan
    elif rank == 1:
        sharded_module.write = half
    begin = time.monotonic()
    expected_errors = {"raises": OSError, "nan": NonFiniteWeightsError}
    kind = expected_errors.get(how, TrainerRankError) if rank else TrainerRankError
    with pytest.raises(kind) as caught:
        push(2)
    seconds = time.monotonic() - begin
    if how == "late" and rank == 0:
        assert send(transport, client, ModuleSource(whole_model(config, 3)), 3).failures == {}
        Path(path).touch()
    transport.close()
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", "was not ready within 6 s"),
        ("raises", "OSError: out of luck"),
        ("nan", f"NonFiniteWeightsError: {NonFiniteWeightsError(['lm_head.weight'])}"),
        pytest.param("late", "was not ready within 6 s", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_breaks_off_is_named_and_the_engines_serve_whole_weights(
    engines, tmp_path, how, reason
):
    """One that goes on later writes where nobody reads."""
    here = engines("qwen3")
    with here.reached() as about:
        first, second = run(break_off, how=how, path=str(tmp_path / "go on"), **about)
    said, seconds = first[0]
    assert said == f"trainer rank 1: {reason}"
    assert seconds < STEP_S + 5
    if how == "killed":
        assert second is None
    else:
        assert second[0][0] == (said if how == "late" else reason.partition(": ")[2])
    here.assert_hold(whole_model(here.config, 3 if how == "late" else 1))
    transport = P2PTransport()  # of a trainer that holds all
    source = fit_to_model(ModuleSource(whole_model(here.config, 4)), here.metadata)
    assert send(transport, here.client, source, 4).failures == {}
    here.assert_hold(whole_model(here.config, 4))
    transport.close()


# ---------------------------------------------------------------- what is gathered all the same


def mixed_layouts(rank, is_away):
    """A model of tensors that are cut in two dimensions, computed, and cut plainly."""
    grid = init_device_mesh("cpu", (1, dist.get_world_size()))
    whole, sharded = torch.nn.Module(), torch.nn.Module()
    layouts = {"two": [Shard(0), Shard(1)], "computed": [Replicate(), Shard(0)]}
    layouts |= {"plain": [Replicate(), Shard(0)], "same": [Replicate()] * 2}
    for number, (name, placements) in enumerate(layouts.items()):
        values = torch.arange(24.0).reshape(6, 4) + 100 * number
        whole.register_parameter(name, torch.nn.Parameter(values))
        part = distribute_tensor(values.clone(), grid, placements)
        sharded.register_parameter(name, torch.nn.Parameter(part))
    origins, transport, client = ShardedModuleSource.origins, P2PTransport(), Client(P2PReplica)
    ShardedModuleSource.origins = lambda source, renamed: (
        origins(source, renamed) | {"computed": Origin(("computed",), None)}
    )
    if is_away and rank:
        sharded_module.this_node = lambda: "elsewhere"
    counted, gathered = Counted(), []
    prepare = ShardedModuleSource._prepare
    ShardedModuleSource._prepare = lambda source, group: (
        gathered.append(set(group.tensors)) or prepare(source, group)
    )
    for version in (1, 2):
        for one in (*whole.parameters(), *sharded.parameters()):
            one.data.mul_(-1.5)
        failures = push_on_every_rank(
            as_weight_source(sharded),
            lambda now, at=version: send(transport, client, now, at).failures,
        )
        assert failures == {}
        for replica in client.replicas.values() if rank == 0 else ():
            for name, tensor in whole.named_parameters():
                assert torch.equal(replica.values[name], tensor), name
    transport.close()
    return gathered, counted.num_written


@pytest.mark.slow
def test_what_ranks_cannot_write_is_gathered_and_nothing_else():
    (gathered, first), (_, second) = succeed(mixed_layouts, is_away=False)
    assert gathered == [{"two", "computed"}] * 2
    # Of two versions and replicas: the second rank half of the plain and of the equal tensor.
    assert (first, second) == (4 * (24 + 48), 4 * 24)


@pytest.mark.slow
def test_ranks_on_another_host_have_everything_gathered():
    (gathered, first), (_, second) = succeed(mixed_layouts, is_away=True)
    assert gathered == [{"two", "computed", "plain", "same"}] * 2
    assert (first, second) == (4 * 96, 0)


@pytest.mark.slow
def test_the_engines_memory_is_let_go_with_the_model_or_when_pushes_go_another_way():
    assert succeed(let_go) == [True, True]


def let_go(rank):
    def held():
        return Path("/proc/self/maps").read_text().count("memfd:weights")

    model = torch.nn.Linear(8, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for ending in ("another way", "model"):
        transport, client = P2PTransport(), Client(P2PReplica)
        for version in (1, 2, 3):
            push_on_every_rank(
                as_weight_source(model),
                lambda now, at=version, by=(transport, client): send(*by, now, at).failures,
            )
        if rank:
            assert held() == 4  # two of each replica
        transport.close()
        if ending == "another way":
            push_on_every_rank(as_weight_source(model), lambda now: len(list(now)))
        else:
            del model
            gc.collect()
        assert rank == 0 or held() == 0
    return True


# ---------------------------------------------------------------- what strangers write


@pytest.mark.parametrize("strange", ["", "[]", '{"node": 1, "tokens": []}', "[" * 100_000])
def test_strange_offers_end_in_a_typed_error(strange):
    store = dist.HashStore()
    leader, follower = (TrainerRanks([0, 1], rank, store, timeout_s=5) for rank in (0, 1))
    leading = leader.begin("digest")
    followed = follower.join(timeout_s=5)
    followed.ready(f"digest {strange}")
    with pytest.raises(TrainerRankError, match="trainer rank 1: wrote no offer"):
        leading.offers()
    leading.call(f"w{strange}")
    with pytest.raises(TrainerRankError, match="trainer rank 0: wrote no passed"):
        followed.next()

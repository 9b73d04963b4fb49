"""A trainer and workers, in threads: whole tensors arrive, and nobody waits for ever.

Over Gloo, or reading in the trainer's memory.
"""

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.errors import (
    TransferError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.broadcast import group as group_module
from torchrl_vllm_sync.weights.broadcast.buckets import (
    BucketLayout,
    bound_views,
    broadcast_tensors,
    check_device,
    make_buffers,
    receive_buckets,
    room_for,
    send_buckets,
    sendable_tensors,
    streamed,
    whole_tensors,
)
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup, Rendezvous
from torchrl_vllm_sync.weights.source import MappingSource

CPU = torch.device("cpu")
SHARED_BYTES = room_for(1 << 22)
HOST = "127.0.0.1"


def tensors(seed=0):
    """Several dtypes, shapes, strides and sizes; some lie side by side in one storage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    fused = normal(4, 6, 5)
    return {
        "embed": normal(37, 8),
        "scalar": torch.tensor(3.25),
        "transposed": normal(5, 9).t(),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": normal(11, 3).to(torch.bfloat16),
        **{f"experts.{i}.{j}": fused[i, 3 * j : 3 * j + 3] for i in range(4) for j in range(2)},
        "empty": torch.empty(0, 4),
        "bias": normal(129),
    }


def metadata_of(tensors, dtype=None):
    return [
        ParamMeta(name, dtype or tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


@pytest.fixture
def groups(request):
    """One trainer and two workers that have met."""
    how = {"shared_bytes": SHARED_BYTES} if getattr(request, "param", "gloo") == "shared" else {}
    with ThreadPoolExecutor(2) as pool:
        trainer = host(world_size=3, **how)
        joined = [pool.submit(join, trainer.rendezvous, rank) for rank in (1, 2)]
        trainer.connect(timeout_s=20)
        groups = [trainer, *(one.result() for one in joined)]
    yield groups
    for group in groups:
        group.close()


both_kinds = pytest.mark.parametrize("groups", ["gloo", "shared"], indirect=True)


def host(world_size, timeout_s=20, **how):
    at = Rendezvous(HOST, 0, world_size, **how)
    return at.kind.host(at, CPU, timeout_s=timeout_s)


def join(rendezvous, rank, timeout_s=20):
    group = rendezvous.kind.join(rendezvous, rank, CPU, timeout_s=timeout_s)
    group.connect(timeout_s=timeout_s)
    return group


def pack(layout, buffers, views):
    return (one.pack() for one in bound_views(layout, buffers, views))


def transfer(groups, layout, packing_of, num_passes=1):
    """Sends to the workers, which take whole tensors; returns what each pass brought to each."""

    deadline = time.monotonic() + 20

    def receive(group):
        buffers = make_buffers(layout, CPU, group.memory)
        passes = []
        for _ in range(num_passes):
            arrivals = receive_buckets(group, layout, buffers, deadline=deadline)
            passes.append(dict(whole_tensors(layout, buffers, arrivals)))
            group.synchronize(deadline=deadline)
        return passes

    buffers = make_buffers(layout, CPU, groups[0].memory)
    with ThreadPoolExecutor(2) as pool:
        received = [pool.submit(receive, group) for group in groups[1:]]
        for _ in range(num_passes):
            packing = packing_of(buffers)
            send_buckets(groups[0], layout, buffers, packing, deadline=deadline)
        return [one.result(timeout=30) for one in received]


@both_kinds
@pytest.mark.parametrize("bucket_bytes", [64, 100, 1000, 1 << 20])
def test_every_tensor_arrives_whole_whatever_the_buckets(groups, bucket_bytes):
    wanted = tensors()
    layout = BucketLayout(metadata_of(wanted), bucket_bytes)
    assert all(bucket.num_bytes <= bucket_bytes for bucket in layout.buckets)
    views = list(wanted.items())
    for received in transfer(
        groups, layout, lambda buffers: pack(layout, buffers, views), num_passes=2
    ):
        for one in received:
            assert sorted(one) == sorted(wanted)
            for name, tensor in wanted.items():
                assert one[name].dtype == tensor.dtype
                assert torch.equal(one[name], tensor), name


@both_kinds
def test_a_streaming_source_arrives_alike(groups):
    wanted = tensors(seed=1)
    layout = BucketLayout(metadata_of(wanted), 200)
    source = MappingSource(wanted)
    for (one,) in transfer(groups, layout, lambda buffers: streamed(layout, buffers, source, CPU)):
        assert all(torch.equal(one[name], tensor) for name, tensor in wanted.items())


class Writes(TorchDispatchMode):
    """Notes the operations that make or fill memory; views are none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_streamed_tensor_is_copied_by_rows_alone_however_it_lies_in_memory():
    wide = torch.arange(12.0).view(3, 4).T
    layout = BucketLayout(metadata_of({"wide": wide}), 24)
    buffers = make_buffers(layout, CPU)
    with Writes() as writes:
        deque(streamed(layout, buffers, MappingSource({"wide": wide}), CPU), maxlen=0)
    assert len(layout.buckets) == 2
    assert torch.equal(torch.cat(buffers).view(torch.float32), wide.reshape(-1))
    copies = [one for one in writes.names if not one.startswith("aten::empty")]
    assert copies == ["aten::copy_"] * 2


@both_kinds
def test_values_are_cast_to_the_dtype_on_the_wire(groups):
    wanted = {name: one for name, one in tensors().items() if one.is_floating_point()}
    layout = BucketLayout(metadata_of(wanted, torch.bfloat16), 300)
    views = list(wanted.items())
    for (one,) in transfer(groups, layout, lambda buffers: pack(layout, buffers, views)):
        for name, tensor in wanted.items():
            assert torch.equal(one[name], tensor.to(torch.bfloat16))


def test_live_tensors_are_read_at_each_push(groups):
    """A twin of the tests above: what is packed once and kept would show."""
    wanted = tensors()
    layout = BucketLayout(metadata_of(wanted), 500)
    buffers = make_buffers(layout, CPU)
    bound = bound_views(layout, buffers, list(wanted.items()))
    first = buffers[0].clone()
    bound[0].pack()
    wanted["embed"].add_(1)
    bound[0].pack()
    assert torch.equal(
        buffers[0][: 4 * 8].view(torch.float32), wanted["embed"][0].contiguous().view(-1)
    )
    assert not torch.equal(first, buffers[0])


def num_copies(bound):
    return sum(len(targets) for bucket in bound for targets, _ in bucket.groups)


def test_neighbours_in_memory_become_one_copy():
    fused = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    parts = {f"{i}.{j}": fused[i, 3 * j : 3 * j + 3] for i in range(4) for j in range(2)}
    layout = BucketLayout(metadata_of(parts), 1 << 20)
    buffers = make_buffers(layout, CPU)
    bound = bound_views(layout, buffers, list(parts.items()))
    assert num_copies(bound) == 1
    bound[0].pack()
    assert torch.equal(buffers[0].view(torch.float32), fused.view(-1))
    shuffled = dict(reversed(parts.items()))
    layout = BucketLayout(metadata_of(shuffled), 1 << 20)
    bound = bound_views(layout, make_buffers(layout, CPU), list(shuffled.items()))
    assert num_copies(bound) == 8


@pytest.mark.parametrize(
    ("yielded", "culprit"),
    [
        ({"a": (2, 2)}, "announced b"),
        ({"a": (2, 2), "c": (3,)}, r"announced b \[3\] and yielded c"),
        ({"a": (2, 2), "b": (4,)}, r"announced b \[3\] and yielded b \[4\]"),
        ({"a": (2, 2), "b": (3,), "c": (1,)}, "yielded c, which it had not announced"),
    ],
)
def test_a_source_that_yields_other_things_than_announced_is_named(yielded, culprit):
    layout = BucketLayout(
        [ParamMeta("a", torch.float32, (2, 2)), ParamMeta("b", torch.float32, (3,))]
    )
    source = MappingSource({name: torch.zeros(shape) for name, shape in yielded.items()})
    packing = streamed(layout, make_buffers(layout, CPU), source, CPU)
    with pytest.raises(WeightMismatchError, match=culprit):
        deque(packing, maxlen=0)


def test_a_row_wider_than_a_bucket_is_named():
    with pytest.raises(WeightMismatchError, match="one row of wide, which has 40 bytes"):
        BucketLayout([ParamMeta("wide", torch.float32, (2, 10))], 32)


def test_tensors_on_another_device_are_refused_for_a_gpu():
    with pytest.raises(
        WeightMismatchError, match="a is on cpu, but this transport sends from cuda:0"
    ):
        check_device("a", torch.zeros(2), torch.device("cuda:0"))


def test_whole_tensors_go_without_buckets(groups):
    wanted = {name: one.contiguous() for name, one in tensors().items()}
    sent = sendable_tensors(metadata_of(wanted), list(wanted.items()))
    received = [[torch.zeros_like(one) for one in sent] for _ in groups[1:]]
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(broadcast_tensors, group, targets, deadline=deadline)
            for group, targets in zip(groups[1:], received, strict=True)
        ]
        broadcast_tensors(groups[0], sent, deadline=deadline)
        for one in waiting:
            one.result(timeout=20)
    for targets in received:
        assert all(map(torch.equal, targets, sent))


def test_what_cannot_go_without_buckets():
    wanted = {"a": torch.zeros(3, 2)}
    views = list(wanted.items())
    assert len(sendable_tensors(metadata_of(wanted), views)) == 1
    assert sendable_tensors(metadata_of(wanted), None) is None
    assert sendable_tensors(metadata_of(wanted, torch.bfloat16), views) is None
    assert (
        sendable_tensors([ParamMeta("a", torch.float32, (2, 3))], [("a", wanted["a"].t())]) is None
    )


@both_kinds
def test_nobody_begins_before_all_are_ready_and_a_push_left_does_no_harm(groups):
    trainer, one, other = groups
    deadline = time.monotonic() + 10
    begun = []

    def await_start(group, push_id):
        group.await_start(push_id, deadline=deadline)
        begun.append(group.rank)

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(await_start, one, 1)

        def watch():
            raise TransferError("replica 1 cannot pause")

        with pytest.raises(TransferError, match="cannot pause"):
            trainer.start(1, deadline=deadline, watch=watch)
        with pytest.raises(TransferError, match="called the transfer off: left: replica 1 cannot"):
            waiting.result(timeout=10)
        assert begun == []
        ready = [pool.submit(await_start, group, 2) for group in (one, other)]
        trainer.start(2, deadline=deadline, watch=lambda: None)
        for each in ready:
            each.result(timeout=10)
    assert sorted(begun) == [1, 2]
    wanted = tensors()
    layout = BucketLayout(metadata_of(wanted), 500)
    views = list(wanted.items())
    transfer(groups, layout, lambda buffers: pack(layout, buffers, views))


@both_kinds
def test_who_never_gets_ready_is_named(groups):
    trainer, one, _ = groups
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.await_start, 1, deadline=time.monotonic() + 10)
        with pytest.raises(TransferError, match="ranks 2 did not get ready for transfer 1"):
            trainer.start(1, deadline=time.monotonic() + 0.5, watch=lambda: None)
        with pytest.raises(TransferError, match="called the transfer off"):
            waiting.result(timeout=10)


def test_a_worker_waits_no_longer_than_its_deadline(groups):
    begin = time.monotonic()
    with pytest.raises(TransferError, match="did not begin the transfer"):
        groups[1].await_start(7, deadline=begin + 0.3)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("word", [b"\xff\xfe", b"x" * 5_000_000, b""])
def test_a_strange_word_to_begin_ends_in_a_typed_error(groups, word):
    groups[0].store.raw.set("start/7", word)
    with pytest.raises(TransferError, match="called the transfer off") as caught:
        groups[1].await_start(7, deadline=time.monotonic() + 10)
    assert len(str(caught.value)) < 1000


def test_a_rank_that_does_not_come_is_named():
    trainer = host(world_size=3, timeout_s=5)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, trainer.rendezvous, 2, 5)
        with pytest.raises(TransferError, match="ranks 1 did not come to the rendezvous"):
            trainer.connect(timeout_s=1)
        del trainer
        with pytest.raises(TransferError):
            joined.result(timeout=30)


def test_two_workers_of_one_rank_are_refused():
    trainer = host(world_size=3)
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(join, trainer.rendezvous, 1, 2) for _ in range(2)]
        with pytest.raises(TransferError, match="ranks 2 did not come"):
            trainer.connect(timeout_s=2)
        errors = [str(one.exception(timeout=30)) for one in joined]
    assert sum("rank 1 of the group is taken already" in one for one in errors) == 1


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_outside_the_group_is_refused(rank):
    trainer = host(world_size=3)
    with pytest.raises(
        TransferError, match=rf"rank must be in \[1, 3\) in a group of 3, got {rank}"
    ):
        BroadcastGroup.join(trainer.rendezvous, rank, CPU, timeout_s=5)


def test_a_trainer_that_is_not_there_is_named():
    trainer = host(world_size=2)
    where = trainer.rendezvous
    del trainer
    with pytest.raises(TransferError, match=f"cannot reach the trainer at {HOST}:{where.port}"):
        BroadcastGroup.join(where, 1, CPU, timeout_s=1)


def test_a_worker_does_not_wait_for_a_trainer_that_was_there_and_is_gone():
    where = dataclasses.replace(host(world_size=2).rendezvous, is_hosted=True)
    begin = time.monotonic()
    with pytest.raises(TransferError, match="cannot reach the trainer"):
        BroadcastGroup.join(where, 1, CPU, timeout_s=60)
    assert time.monotonic() - begin < 10


def test_a_taken_port_is_named():
    trainer = host(world_size=2)
    port = trainer.rendezvous.port
    with pytest.raises(TransferError, match=f"cannot listen at {HOST}:{port}"):
        BroadcastGroup.host(Rendezvous(HOST, port, 2), CPU, timeout_s=1)


def test_an_interface_is_used_if_it_is_there_and_refused_otherwise():
    at = Rendezvous(HOST, 0, world_size=2, interface="nosuch0")
    with pytest.raises(UnsupportedArgumentError, match=r"one of \[.*'lo'.*got 'nosuch0'"):
        BroadcastGroup.host(at, CPU, timeout_s=20)
    trainer = BroadcastGroup.host(dataclasses.replace(at, interface="lo"), CPU, timeout_s=20)
    elsewhere = dataclasses.replace(trainer.rendezvous, interface="nosuch0")
    with pytest.raises(UnsupportedArgumentError, match="nosuch0"):
        BroadcastGroup.join(elsewhere, 1, CPU, timeout_s=5)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, trainer.rendezvous, 1)
        trainer.connect(timeout_s=20)
        assert joined.result().is_connected
    joined.result().close()
    trainer.close()


@both_kinds
def test_a_worker_that_leaves_ends_the_senders_wait(groups):
    """Its end of the connection closes, as when its process dies."""
    trainer, one, other = groups
    wanted = {"big": torch.zeros(64, 1 << 18)}
    layout = BucketLayout(metadata_of(wanted), 1 << 22)
    buffers = make_buffers(layout, CPU, trainer.memory)
    packing = pack(layout, buffers, list(wanted.items()))
    received = []

    def receive_some():
        slots = make_buffers(layout, CPU, one.memory)
        for index in receive_buckets(one, layout, slots, deadline=time.monotonic() + 20):
            received.append(index)
            if index == 2:
                one.close()
                return

    def receive_all():
        slots = make_buffers(layout, CPU, other.memory)
        for _ in receive_buckets(other, layout, slots, deadline=time.monotonic() + 20):
            pass

    threads = [threading.Thread(target=receive_some)]
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(receive_all)
        threads[0].start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            send_buckets(trainer, layout, buffers, packing, deadline=begin + 20)
        trainer.close()
        assert isinstance(rest.exception(timeout=30), RuntimeError | None)
    threads[0].join()
    assert received == [0, 1, 2]
    assert time.monotonic() - begin < 15
    with pytest.raises(TransferError, match="not connected, or was closed"):
        trainer.broadcast(torch.zeros(1), timeout_s=1)


@contextlib.contextmanager
def in_the_middle_of_a_message(groups, timeout_s):
    """Has the groups transfer; yields the tensors, and the waits that are under way."""
    sent = torch.ones(1 << 27)  # takes long enough to be caught at it
    received = [torch.zeros_like(sent) for _ in groups[1:]]
    with ThreadPoolExecutor(len(groups)) as pool:
        waits = [
            pool.submit(broadcast_tensors, group, [one], deadline=time.monotonic() + timeout_s)
            for group, one in zip(groups, (sent, *received), strict=True)
        ]
        while not all(one[0] for one in received):
            assert not any(one.done() for one in waits)
        yield received, waits


def test_connections_that_break_in_the_middle_of_a_message_end_all_waits(groups):
    """Gloo forgets who waits for the rest."""
    trainer, one, _ = groups
    store = trainer.rendezvous.port
    begin = time.monotonic()
    with in_the_middle_of_a_message(groups, timeout_s=20) as (received, waits):
        for each in psutil.Process().net_connections("tcp"):
            if each.status == "ESTABLISHED" and store not in (each.laddr.port, each.raddr.port):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)  # its other end is in this process too
        one.close()
        with pytest.raises(TransferError, match="a worker left the group"):
            waits[0].result(timeout=15)
        trainer.abort()
        with pytest.raises(TransferError, match="the trainer gave the transfer up"):
            waits[2].result(timeout=15)
    assert time.monotonic() - begin < 15
    assert not any(tensor[-1] for tensor in received)


def test_the_sender_is_told_of_a_failure_while_a_worker_takes_nothing(groups):
    def watch():
        raise TransferError("replica 1 is dead")

    begin = time.monotonic()
    with pytest.raises(TransferError, match="replica 1 is dead"):
        broadcast_tensors(groups[0], [torch.ones(1 << 25)], deadline=begin + 20, watch=watch)
    assert time.monotonic() - begin < 15


@pytest.mark.slow
def test_a_transfer_that_is_given_up_writes_no_more(groups):
    with in_the_middle_of_a_message(groups, timeout_s=10) as (received, waits):
        groups[0].abort()
        for group, wait in zip(groups, waits, strict=True):
            with pytest.raises(RuntimeError):
                wait.result(timeout=20)
            group.abort()
        assert not any(tensor[-1] for tensor in received)
        before = [tensor.clone() for tensor in received]
        time.sleep(0.2)
        assert all(map(torch.equal, before, received))


def test_an_abort_of_nccl_that_hangs_or_fails_is_told_of_and_keeps_nobody(
    groups, monkeypatch, caplog
):
    monkeypatch.setattr(group_module, "ABORT_TIMEOUT_S", 0.2)
    released = threading.Event()

    def fail():
        raise RuntimeError("NCCL is out of order")

    for abort, words in (
        (lambda: released.wait(20), ["NCCL has not left its peers after 0.2 s"]),
        (fail, ["NCCL could not leave its peers: NCCL is out of order"]),
        (lambda: None, []),
    ):
        caplog.clear()
        begin = time.monotonic()
        groups[0]._abort_nccl(SimpleNamespace(abort=abort))
        assert time.monotonic() - begin < 10
        assert caplog.messages == words
    released.set()


def test_workers_hear_that_the_trainer_gave_up_or_is_gone(groups):
    trainer, one, other = groups
    one.raise_if_given_up()
    trainer.abort()
    for group in (one, other):
        with pytest.raises(TransferError, match="the trainer gave the transfer up"):
            group.raise_if_given_up()
    trainer.close()
    with pytest.raises(TransferError, match="the trainer is gone"):
        one.raise_if_given_up()

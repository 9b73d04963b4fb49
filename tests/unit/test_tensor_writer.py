"""How tensors get into a data file: by several threads, whole, whatever fails on the way."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.weights.snapshots import data_file
from torchrl_vllm_sync.weights.snapshots.data_file import (
    BUFFERS_PER_THREAD,
    CHUNK_BYTES,
    TensorWriter,
    checksum,
)

PIECE = CHUNK_BYTES // 4  # float32 items


class Memory:
    """A file in memory; ``before`` sees each piece's offset first."""

    path = "weights.td"

    def __init__(self, num_bytes, before=lambda offset: None):
        self.content = torch.zeros(num_bytes, dtype=torch.uint8)
        self.before = before

    def write(self, piece, offset):
        self.before(offset)
        stored = self.content.numpy()[offset : offset + len(piece)]
        stored[:] = piece
        return stored


@pytest.fixture(params=["host", "device"])
def place(request, monkeypatch):
    """Tensors on a device are copied out first; here it is memory too, and the way is the same."""
    if request.param == "device":
        monkeypatch.setattr(data_file, "is_on_host", lambda tensor: False)
    return request.param


def fill(file, tensors, dtype=torch.float32, *, num_threads=1, stays=True, buffers=None):
    offset = 0
    buffers = [] if buffers is None else buffers
    with TensorWriter(file, buffers, num_threads=num_threads) as writer:
        for tensor in tensors:
            writer.add(tensor, ParamMeta("w", dtype, tuple(tensor.shape)), offset, stays=stays)
            offset += tensor.numel() * dtype.itemsize
        return writer.finish()


def many(*, seed=0):
    sizes = [PIECE * 9 // 4, 3, 0, PIECE, PIECE - 1, 5 * PIECE, 1, PIECE + 1]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_is_where_it_belongs_and_hashed(place, dtype, stays, num_threads):
    buffers = []
    for seed in range(2):  # with the same buffers again
        tensors = [one.to(dtype) for one in many(seed=seed)]
        wanted = torch.cat(tensors).view(torch.uint8)
        file = Memory(len(wanted))
        found = fill(
            file, many(seed=seed), dtype, num_threads=num_threads, stays=stays, buffers=buffers
        )
        assert torch.equal(file.content, wanted)
        assert found == tuple(checksum(one) for one in tensors)


def test_tensors_that_stay_are_stored_at_the_same_time(place):
    """Each of two threads waits in its first piece until the other is in its own."""
    meeting = threading.Barrier(2)
    tensors = [torch.ones(PIECE), torch.ones(PIECE)]
    file = Memory(2 * CHUNK_BYTES, lambda offset: meeting.wait(20))
    fill(file, tensors, num_threads=2)
    assert meeting.n_waiting == 0
    assert not meeting.broken


def test_one_thread_would_fail_the_check_above(place):
    meeting = threading.Barrier(2)
    tensors = [torch.ones(PIECE), torch.ones(PIECE)]
    file = Memory(2 * CHUNK_BYTES, lambda offset: meeting.wait(0.2))
    with pytest.raises(threading.BrokenBarrierError):
        fill(file, tensors)


def test_a_tensor_may_change_as_soon_as_it_was_added_if_it_does_not_stay(place):
    file = Memory(6 * CHUNK_BYTES)
    reused = torch.zeros(PIECE)
    meta = ParamMeta("w", torch.float32, (PIECE,))
    with TensorWriter(file, [], num_threads=3) as writer:
        for index in range(6):
            writer.add(reused.fill_(index), meta, index * CHUNK_BYTES, stays=False)
        writer.finish()
    stored = file.content.view(torch.float32).view(6, PIECE)
    assert [one.unique().tolist() for one in stored] == [[0], [1], [2], [3], [4], [5]]


def test_no_piece_is_stored_before_it_has_arrived_from_its_device(monkeypatch):
    arrived, stored = [], []

    class Event:
        def record(self, stream):
            assert stream == "the current one"

        def synchronize(self):
            arrived.append(self)

    device = SimpleNamespace(Event=Event, current_stream=lambda device: "the current one")
    monkeypatch.setattr(data_file, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device_of: device)
    tensors = many()
    num_bytes = sum(one.nbytes for one in tensors)
    file = Memory(num_bytes, lambda offset: stored.append(len(arrived)))
    fill(file, tensors)
    assert len(stored) == len(arrived) == sum(-(-max(len(one), 1) // PIECE) for one in tensors)
    assert all(there > before for before, there in enumerate(stored))


def test_a_slow_disk_has_the_caller_wait_for_buffers(place):
    slow = threading.Event()
    tensor = torch.arange(PIECE * (BUFFERS_PER_THREAD + 5), dtype=torch.float32)
    file = Memory(tensor.nbytes, lambda offset: slow.wait(0.02))
    found = fill(file, [tensor])
    assert torch.equal(file.content.view(torch.float32), tensor)
    assert found == (checksum(tensor),)


@pytest.mark.parametrize("stays", [True, False])
def test_a_piece_that_cannot_be_stored_ends_it_and_the_next_version_is_whole(place, stays):
    """More often than there are buffers: none is lost."""
    buffers, tensors = [], many()
    num_bytes = sum(one.nbytes for one in tensors)

    def full(offset):
        if offset > 3 * CHUNK_BYTES:
            raise OSError(28, "No space left on device")

    for _ in range(3 * BUFFERS_PER_THREAD):
        with pytest.raises(OSError, match="No space left"):
            fill(Memory(num_bytes, full), tensors, num_threads=2, stays=stays, buffers=buffers)
    file = Memory(num_bytes)
    fill(file, tensors, num_threads=2, stays=stays, buffers=buffers)
    assert torch.equal(file.content, torch.cat(tensors).view(torch.uint8))


def test_nothing_is_stored_any_more_after_a_caller_gave_up(place):
    stored = []
    gate = threading.Event()

    def slow(offset):
        gate.wait(0.05)
        stored.append(offset)

    file = Memory(9 * CHUNK_BYTES, slow)
    with suppress(KeyboardInterrupt), TensorWriter(file, [], num_threads=2) as writer:
        for index in range(9):
            meta = ParamMeta("w", torch.float32, (PIECE,))
            writer.add(torch.ones(PIECE), meta, index * CHUNK_BYTES, stays=True)
        raise KeyboardInterrupt
    ended = len(stored)
    assert ended < 9
    gate.wait(0.3)
    assert len(stored) == ended


def test_a_slow_disk_may_take_its_time(place, monkeypatch):
    monkeypatch.setattr(data_file, "STORE_TIMEOUT_S", 4.0)  # a busy machine takes its time, too
    slow = threading.Event()
    tensor = torch.arange(20 * PIECE, dtype=torch.float32)
    file = Memory(tensor.nbytes, lambda offset: slow.wait(0.25))
    fill(file, [tensor])
    assert torch.equal(file.content.view(torch.float32), tensor)


def test_waiting_for_a_disk_that_hangs_ends(place, monkeypatch):
    monkeypatch.setattr(data_file, "STORE_TIMEOUT_S", 0.1)
    hung = threading.Event()
    file = Memory(40 * CHUNK_BYTES, lambda offset: hung.wait(2))
    with pytest.raises(data_file.SnapshotError, match=r"weights.td: nothing was stored within"):
        fill(file, [torch.ones(40 * PIECE)])

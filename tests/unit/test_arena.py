"""A model's parameters with two memories behind their addresses."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.p2p import memory
from torchrl_vllm_sync.weights.p2p.memory import (
    CudaMemory,
    CudaRange,
    Handover,
    HostFile,
    WeightArena,
    hand_over,
    new_memory,
    new_range,
)
from torchrl_vllm_sync.weights.p2p.writes import Mapped

CPU = torch.device("cpu")


def model():
    """Tied, transposed and fused parameters, of several dtypes."""
    torch.manual_seed(0)
    found = torch.nn.Module()
    found.first = torch.nn.Parameter(torch.randn(33, 7))
    found.tied = found.first
    found.rounded = torch.nn.Parameter(torch.randn(129).bfloat16())
    found.transposed = torch.nn.Parameter(torch.randn(8, 5).t())
    fused = torch.randn(12, 4)
    found.upper, found.lower = torch.nn.Parameter(fused[:6]), torch.nn.Parameter(fused[6:])
    found.nothing = torch.nn.Parameter(torch.empty(0))
    return found


def contents(of):
    return {name: one.detach().clone() for name, one in of.named_parameters()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, wanted[name], rtol=0, atol=0)


@pytest.fixture
def arena():
    of = model()
    before, strides = contents(of), [one.stride() for one in of.parameters()]
    made = WeightArena(of, CPU)
    assert_equal(contents(of), before)
    assert [one.stride() for one in of.parameters()] == strides
    assert of.tied is of.first
    made.model, made.before = of, before
    return made


def outside(arena, run_id="run"):
    """What another process has of the memory that it may write to."""
    number = arena.begin(run_id)
    memory = new_memory(arena.num_bytes, CPU, arena.export())
    there = new_range(arena.num_bytes, CPU)
    there.show(memory)
    return number, there


def write(there, arena, value):
    for one in arena.model.parameters():
        if one.numel():
            target = there.data.view(one.dtype)
            target.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(value)


def values(arena):
    return {float(value) for one in arena.model.parameters() for value in one.detach().reshape(-1)}


def test_what_is_written_is_served_after_a_swap_and_not_before(arena):
    addresses = [one.data_ptr() for one in arena.model.parameters()]
    number, there = outside(arena)
    write(there, arena, 2.0)
    assert_equal(contents(arena.model), arena.before)
    arena.take("run", number)
    assert values(arena) == {2.0}
    assert [one.data_ptr() for one in arena.model.parameters()] == addresses
    second, other = outside(arena)
    assert second != number
    write(other, arena, 3.0)
    assert values(arena) == {2.0}
    arena.take("run", second)
    assert values(arena) == {3.0}
    assert outside(arena)[0] == number  # two memories take turns


def test_who_was_given_up_writes_nowhere_that_is_served(arena):
    _, stopped = outside(arena, "stopped")
    number, there = outside(arena, "other")
    write(there, arena, 5.0)
    write(stopped, arena, 9.0)
    arena.take("other", number)
    write(stopped, arena, 9.0)
    outside(arena, "other")
    write(stopped, arena, 9.0)
    assert values(arena) == {5.0}


@pytest.mark.parametrize("run", ["run", "other"])
def test_what_was_not_begun_is_not_served(arena, run):
    number, _ = outside(arena)
    if run == "run":
        arena.take("run", number)
    with pytest.raises(TransferError, match="another trainer has begun to write"):
        arena.take(run, number)


def descriptors():
    """What this process has open."""
    return {*os.listdir("/proc/self/fd")}


def test_memory_of_another_size_is_refused_and_closed():
    memory = new_memory(5_000, CPU)
    open_before = descriptors()
    with pytest.raises(TransferError, match="not of 3"):
        new_memory(300_000, CPU, memory.export())
    assert descriptors() <= open_before


def test_memory_that_a_plan_does_not_fit_is_closed():
    memory = new_memory(5_000, CPU)
    open_before = descriptors()
    row = ["w", 0, (9_000,), (1,), "float32", 0, (1,)]
    with pytest.raises(RuntimeError, match="out of bounds"):
        Mapped(5_000, CPU, memory.export(), [row], ())
    assert descriptors() <= open_before


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_no_single_memory_is_closed(number):
    door = Handover()
    open_before = descriptors()
    one = {"replica_id": "a", "rank": 0, "number": 1}
    hand_over(door.path, one, [os.dup(0) for _ in range(number)], 10.0)
    with pytest.raises(TransferError, match="not handed over in time"):
        next(door.take_all({("a", 0, 1)}, time.monotonic() + 0.1, "number"))
    assert descriptors() <= open_before
    door.close()


def test_descriptors_are_handed_over_and_closed(tmp_path):
    shared, door = new_memory(1000, CPU), Handover()
    open_before = descriptors()
    giving = threading.Thread(
        target=hand_over, args=(door.path, {"rank": 3}, [shared.export()], 10.0)
    )
    giving.start()
    said, (descriptor,) = door.take(time.monotonic() + 10)
    giving.join()
    assert said == {"rank": 3}
    new_memory(1000, CPU, descriptor).close()
    assert descriptors() <= open_before  # garbage of other tests may close some
    assert os.stat(os.path.dirname(door.path)).st_mode & 0o077 == 0
    door.close()
    assert not os.path.exists(door.path.rpartition(":")[0])
    door.close()


def test_a_file_in_memory_is_not_taken_for_another_that_has_got_its_number_since():
    gc.collect()
    first = HostFile(8)
    first.data.fill_(1)
    gone = first.path
    assert HostFile(8, gone).data.tolist() == [1] * 8
    del first
    second = HostFile(8)
    assert second.path.rpartition(":")[0] == gone.rpartition(":")[0]
    with pytest.raises(TransferError, match="let go of it"):
        HostFile(8, gone)
    assert HostFile(8, second.path).data.tolist() == [0] * 8


def test_a_door_may_be_in_a_folder_with_a_name_longer_than_an_address(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    shared, door = new_memory(10, CPU), Handover()
    open_before = descriptors()
    hand_over(door.path, {"rank": 3}, [shared.export()], 10.0)
    said, (descriptor,) = door.take(time.monotonic() + 10)
    assert said == {"rank": 3}
    os.close(descriptor)
    assert descriptors() <= open_before
    door.close()
    assert not [*folder.iterdir()]


def test_a_process_that_was_forked_leaves_the_door_open():
    forks = "import os; pid = os.fork(); pid and os.waitpid(pid, 0)"
    begin = "from torchrl_vllm_sync.weights.p2p.memory import Handover, hand_over"
    given = "pid and hand_over(door.path, {'rank': 3}, [os.dup(0)], 10.0)"
    said = "pid and print(door.take(10.0 + __import__('time').monotonic())[0])"
    code = f"{begin}; door = Handover(); {forks}; {given}; {said}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "{'rank': 3}"


def test_a_process_that_was_killed_leaves_no_folder(tmp_path):
    begin = "from torchrl_vllm_sync.weights.p2p.memory import Handover; door = Handover()"
    code = f"{begin}; import os; os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode < 0
    assert not [*tmp_path.iterdir()]


def test_nothing_is_handed_over_at_a_door_that_has_got_the_number_of_a_closed_one_since():
    first = Handover()
    gone = first.path
    first.close()
    second = Handover()
    assert second.path.rpartition(":")[0] == gone.rpartition(":")[0]
    with pytest.raises(TransferError, match="not taken at the other end"):
        hand_over(gone, {}, [os.dup(0)], 10.0)
    hand_over(second.path, {"rank": 3}, [os.dup(0)], 10.0)
    said, (descriptor,) = second.take(time.monotonic() + 10)
    assert said == {"rank": 3}
    os.close(descriptor)
    second.close()


def test_no_wait_for_a_worker_or_a_trainer_is_endless():
    door = Handover()
    with pytest.raises(TransferError, match="in time"):
        door.take(time.monotonic() + 0.05)
    door.close()
    with pytest.raises(TransferError, match="memory was not taken at the other end"):
        hand_over(door.path, {}, [new_memory(10, CPU).export()], 0.05)


def test_a_door_of_a_process_that_this_one_does_not_see_is_named():
    with pytest.raises(TransferError, match=r"the other end: .* /proc/0/fd/3:of is seen by .*user"):
        hand_over("/proc/0/fd/3:of", {}, [os.dup(0)], 0.05)


def test_after_a_peer_that_said_nothing_the_others_are_still_watched():
    door = Handover()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(door.path.rpartition(":")[0])

    def watch():
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        door.take(time.monotonic() + 30, watch)
    door.close()


class Driver:
    """CUDA's, of which a call fails when it is told to."""

    def __init__(self, monkeypatch, fails_at):
        self.calls, self.fails_at = [], fails_at
        monkeypatch.setattr(memory, "_cuda", self)
        monkeypatch.setattr(memory, "_granularity", lambda _: 2 << 20)

    def __call__(self, function, *args):
        if self.fails_at == function:
            raise TransferError(f"{function} failed: planted")
        self.calls.append(function)
        if function == "cuMemCreate":
            args[0]._obj.value = 7


@pytest.mark.parametrize("fails_at", ["cuMemMap", "cuMemSetAccess"])
def test_what_a_failed_call_of_cuda_leaves_is_given_back(monkeypatch, fails_at):
    driver, gpu = Driver(monkeypatch, fails_at), torch.device("cuda", 0)
    written, there = CudaMemory(2**30, gpu), CudaRange(2**30, gpu)
    with pytest.raises(TransferError, match="planted"):
        there.show(written)
    for _ in range(2):
        there.close()
        written.close()
    taken = ["cuMemCreate", "cuMemAddressReserve"]
    mapped = ["cuMemMap", "cuMemUnmap"] if fails_at == "cuMemSetAccess" else []
    assert driver.calls == [*taken, *mapped, "cuMemAddressFree", "cuMemRelease"]


@pytest.mark.slow
def test_another_process_writes(arena):
    code = """
import sys, torch
from torchrl_vllm_sync.weights.p2p.memory import new_memory, new_range
memory = new_memory(int(sys.argv[1]), torch.device("cpu"), int(sys.argv[2]))
there = new_range(int(sys.argv[1]), torch.device("cpu"))
there.show(memory)
there.data.fill_(0)
"""
    number = arena.begin("run")
    descriptor = arena.export()
    args = [sys.executable, "-c", code, str(arena.num_bytes), str(descriptor)]
    subprocess.run(args, pass_fds=[descriptor], check=True, timeout=60)
    arena.take("run", number)
    assert values(arena) == {0.0}

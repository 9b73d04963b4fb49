"""One writer a directory: a second is refused, and one that was replaced changes nothing."""

import fcntl
import os
import signal
from contextlib import closing

import pytest
import torch

from tests.processes import Child, stop
from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.files import COMMIT, LOCK

NAMES = ("a", "b")

# Holds the directory argv[1]; publishes each version it is told on stdin. "half 4" stores the first
# of version 4's tensors and waits for another line before it goes on.
OTHER_PROCESS = """
import os, sys, torch
from torchrl_vllm_sync.errors import SyncError
from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync import SnapshotWriter
writer = SnapshotWriter(sys.argv[1], layout=sys.argv[2])
def tensors(version, pauses):
    yield "a", torch.full((100,), version)
    if pauses:
        print("half", flush=True)
        sys.stdin.readline()
    yield "b", torch.full((100,), version)
print("ready", flush=True)
while line := sys.stdin.readline():
    if line == "fork and die\\n":
        if os.fork() == 0:
            os.close(1)
            os.read(0, 1)
            os._exit(0)
        os.kill(os.getpid(), 9)
    if line == "fork and close\\n":
        if os.fork() == 0:
            writer.close()
            os._exit(0)
        os.wait()
        print("closed", flush=True)
        continue
    version = int(line.split()[-1])
    try:
        metadata = [ParamMeta(name, torch.int64, (100,)) for name in "ab"]
        writer.publish(tensors(version, "half" in line), metadata, version)
        print("published", flush=True)
    except SyncError as error:
        print(type(error).__name__, flush=True)
"""


def other_process(directory, layout):
    other = Child(OTHER_PROCESS, directory, layout)
    assert other.stdout.readline() == "ready\n"
    return closing(other)


@pytest.fixture(params=["slots", "versions"])
def layout(request):
    return request.param


@pytest.fixture
def other(tmp_path, layout):
    with other_process(tmp_path, layout) as other:
        yield other


def tensors(version):
    return [(name, torch.full((100,), version)) for name in NAMES]


METADATA = [ParamMeta(name, torch.int64, (100,)) for name in NAMES]


def publish(writer, version):
    return writer.publish(tensors(version), METADATA, version)


def assert_whole(directory, version):
    with SnapshotReader(directory).read() as snapshot:
        assert snapshot.version == version
        assert all(tensor.unique().tolist() == [version] for _, tensor in snapshot.tensors())


def test_a_second_writer_is_refused_and_a_stopped_one_fenced(tmp_path, layout, other):
    assert other.ask(1) == "published"
    with pytest.raises(SnapshotError, match=f"another writer holds it: pid {other.pid} "):
        SnapshotWriter(tmp_path, layout=layout)
    stop(other.pid)
    with SnapshotWriter(tmp_path, layout=layout, takeover=True) as writer:
        assert writer.last_version == 1
        os.kill(other.pid, signal.SIGCONT)
        assert other.ask(2) == "FencedWriterError"
        assert_whole(tmp_path, 1)
        publish(writer, 2)
        assert other.ask(3) == "FencedWriterError"
        assert_whole(tmp_path, 2)


@pytest.mark.parametrize("heir", [False, True], ids=["own slots", "inherited slots"])
def test_a_stopped_writer_that_outlives_its_successor_tears_nothing(tmp_path, layout, heir):
    """Chains of three: the second ends before it has published, and the first wakes up again."""
    if heir:
        with SnapshotWriter(tmp_path, layout=layout) as ended:
            for version in (0, 1, 2):
                publish(ended, version)
    with other_process(tmp_path, layout) as first:
        for version in (3, 4, 5):
            assert first.ask(version) == "published"
        assert first.ask("half 99") == "half"
        stop(first.pid)
        SnapshotWriter(tmp_path, layout=layout, takeover=True).close()
        with SnapshotWriter(tmp_path, layout=layout) as third:
            publish(third, 6)
            with SnapshotReader(tmp_path).read() as snapshot:  # verified, and now it is used
                os.kill(first.pid, signal.SIGCONT)
                assert first.ask("go on") == "FencedWriterError"
                assert [tensor.unique().tolist() for _, tensor in snapshot.tensors()] == [[6], [6]]
            for version in range(7, 11):
                publish(third, version)
                assert_whole(tmp_path, version)


def test_a_lock_that_only_a_dead_writers_children_hold_is_no_owner(tmp_path, layout, other):
    """Loader processes that a trainer forked inherit its lock, and may outlive it."""
    assert other.ask(1) == "published"
    assert other.ask("fork and die") == ""
    other.process.join()
    assert other.process.exitcode == -signal.SIGKILL
    with (tmp_path / LOCK).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with SnapshotWriter(tmp_path, layout=layout) as writer:
        publish(writer, 2)
    assert_whole(tmp_path, 2)


def test_a_fork_that_closes_its_copy_of_a_writer_replaces_nobody(tmp_path, layout, other):
    assert other.ask(1) == "published"
    assert other.ask("fork and close") == "closed"
    assert other.ask(2) == "published"
    assert_whole(tmp_path, 2)


@pytest.mark.parametrize("before", [0, 1])
def test_a_writer_replaced_in_the_middle_of_a_publish_changes_nothing(tmp_path, layout, before):
    zombie = SnapshotWriter(tmp_path, layout=layout)
    for version in range(before):
        publish(zombie, version)
    successor = None

    def replaced_half_way():
        nonlocal successor
        first, second = tensors(77)
        yield first
        successor = SnapshotWriter(tmp_path, layout=layout, takeover=True)
        for version in (5, 6, 7):
            publish(successor, version)
        yield second

    with pytest.raises(FencedWriterError, match=f"epoch 1 was replaced by pid {os.getpid()} "):
        zombie.publish(replaced_half_way(), METADATA, 77)
    assert_whole(tmp_path, 7)
    with pytest.raises(FencedWriterError):
        publish(zombie, 78)
    with pytest.raises(FencedWriterError):
        zombie.close(remove=True)
    publish(successor, 8)
    assert_whole(tmp_path, 8)
    successor.close()


def test_a_lost_lock_file_does_not_let_a_second_writer_in(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        (tmp_path / LOCK).unlink()
        with pytest.raises(SnapshotError, match="another writer holds it"):
            SnapshotWriter(tmp_path)
        publish(writer, 1)


def test_a_writer_stopped_inside_its_commit_meets_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        with (tmp_path / COMMIT).open() as commit:
            fcntl.flock(commit, fcntl.LOCK_EX)
            with pytest.raises(
                SnapshotError, match=f"locked for 0.05 s; the owner, pid {os.getpid()}"
            ):
                SnapshotWriter(tmp_path, takeover=True)
        publish(writer, 2)


def test_a_refused_takeover_fences_nobody(tmp_path):
    with SnapshotWriter(tmp_path, layout="slots") as writer:
        with pytest.raises(SnapshotError, match="layout"):
            SnapshotWriter(tmp_path, layout="versions", takeover=True)
        publish(writer, 1)


def test_slots_of_a_writer_that_may_wake_up_are_not_reused(tmp_path):
    zombie = SnapshotWriter(tmp_path)
    for version in range(3):
        publish(zombie, version)
    with SnapshotWriter(tmp_path, takeover=True) as successor:
        for version in range(3, 7):
            assert publish(successor, version).path.name.startswith("slot-2-")
        assert not list(tmp_path.glob("slot-1-*"))
    zombie.close()


def test_a_writer_replaced_before_it_collects_removes_nothing_of_its_successor(tmp_path, layout):
    zombie = SnapshotWriter(tmp_path, layout=layout)
    storage, successors = zombie._storage, []

    def replaced_before_collecting(doing):
        if "removing old ones" in doing:
            successors.append(SnapshotWriter(tmp_path, layout=layout, takeover=True))
            publish(successors[0], 2)
        return storage(doing)

    zombie._storage = replaced_before_collecting
    with pytest.raises(FencedWriterError):
        publish(zombie, 1)
    assert_whole(tmp_path, 2)
    zombie.close()
    successors[0].close()

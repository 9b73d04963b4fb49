"""Readers hold what they read, writers do not wait for them, and the dead hold nothing."""

import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
import torch

from tests.processes import Child, stop
from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.snapshots import transport as writer_module
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity, is_locked

# Reads the directory argv[1], and holds what it has read until it is told to let go. "fork" leaves
# a child behind that was made meanwhile.
OTHER_PROCESS = """
import os, sys
from torchrl_vllm_sync import SnapshotReader
with SnapshotReader(sys.argv[1]).read() as snapshot:
    print("reading", flush=True)
    if sys.stdin.readline() == "fork\\n":
        if os.fork() == 0:
            os.close(1)
            os.read(0, 1)
            os._exit(0)
    print(*snapshot.tensordict.get("a").unique().tolist(), flush=True)
print("let go", flush=True)
sys.stdin.readline()
"""


class OtherReader(Child):
    """A reader in a process of its own, in the middle of reading."""

    def __init__(self, directory):
        super().__init__(OTHER_PROCESS, directory)
        assert self.stdout.readline() == "reading\n"

    def let_go(self, line=""):
        """Returns the values that it has read."""
        values = self.ask(line).split()
        assert self.stdout.readline() == "let go\n"
        return values


def publish(writer, version):
    tensor = torch.full((100,), version)
    return writer.publish([("a", tensor)], [ParamMeta.of("a", tensor)], version)


def slots(directory):
    return len(list(directory.glob("slot-*")))


def locked(directory):
    return [path.parent.name for path in directory.glob(f"*/{DATA_FILE}") if is_locked(path)]


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(writer_module, "SLOT_TIMEOUT_S", 0.05)


@pytest.fixture
def writer(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=2, max_slots=4) as writer:
        yield writer


def test_a_version_that_is_read_stays_whole_while_the_writer_goes_on(writer, tmp_path):
    publish(writer, 1)
    with SnapshotReader(tmp_path).read() as snapshot:
        for version in range(2, 12):
            publish(writer, version)
            assert snapshot.tensordict.get("a").unique().tolist() == [1]
            assert len(locked(tmp_path)) == 1
        snapshot.validate()
    assert locked(tmp_path) == []


def test_slots_grow_with_slow_readers_and_shrink_after_them(writer, tmp_path):
    publish(writer, 1)
    readers = [SnapshotReader(tmp_path) for _ in range(2)]
    with readers[0].read():
        publish(writer, 2)
        with readers[1].read():
            publish(writer, 3)
            publish(writer, 4)
            assert slots(tmp_path) == 4
    for version in (5, 6, 7):
        publish(writer, version)
    assert slots(tmp_path) == 2


def test_a_slot_of_an_earlier_writer_stays_as_long_as_it_is_read(tmp_path):
    with closing(SnapshotWriter(tmp_path)) as replaced:
        publish(replaced, 1)
        with SnapshotWriter(tmp_path, takeover=True) as writer:
            with SnapshotReader(tmp_path).read() as snapshot:
                path = publish(replaced := writer, 2).path.parent / snapshot.manifest.path
                publish(writer, 3)
                assert path.exists()
            publish(writer, 4)
            assert not path.exists()


@pytest.mark.parametrize("held", [False, True])
def test_slots_are_written_oldest_first_also_by_the_next_writer(tmp_path, held):
    with SnapshotWriter(tmp_path) as writer:
        names = [publish(writer, version).path.name for version in range(4)]
        assert names[3] == names[0]
        if held:  # the oldest is not to be had for a while
            with SnapshotReader(tmp_path).read():
                names += [publish(writer, version).path.name for version in (4, 5)]
                assert names[4:] == names[1:3]
                assert publish(writer, 6).path.name == names[1]
            assert publish(writer, 7).path.name == names[0]
            names += [names[1], names[0]]
    with SnapshotWriter(tmp_path) as writer:
        assert publish(writer, 8).path.name == names[-3]


def test_at_the_limit_the_error_says_who_holds_what(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=2, max_slots=2) as writer:
        publish(writer, 1)
        with SnapshotReader(tmp_path).read():
            publish(writer, 2)
            with pytest.raises(SnapshotError, match=rf"pid {os.getpid()} .* reads slot-1-0"):
                publish(writer, 3)
            assert SnapshotReader(tmp_path).current().version == 2
        publish(writer, 3)


def test_a_stopped_reader_keeps_its_slot_until_it_lets_go_and_the_writer_goes_on(writer, tmp_path):
    """A child that it forked meanwhile keeps nothing."""
    publish(writer, 1)
    with closing(OtherReader(tmp_path)) as reader:
        stop(reader.pid)
        for version in range(2, 8):
            publish(writer, version)
        assert locked(tmp_path) == ["slot-1-0"]
        os.kill(reader.pid, signal.SIGCONT)
        assert reader.let_go("fork") == ["1"]
        assert locked(tmp_path) == []


@pytest.mark.parametrize("layout", ["slots", "versions"])
def test_a_reader_that_is_killed_holds_nothing_also_if_it_was_stopped(tmp_path, layout):
    with SnapshotWriter(tmp_path, layout=layout) as writer:
        name = publish(writer, 1).path.name
        with closing(OtherReader(tmp_path)) as reader:
            stop(reader.pid)
            assert locked(tmp_path) == [name]
        assert locked(tmp_path) == []


def test_another_file_in_the_place_of_one_that_was_mapped_is_read_anew(tmp_path):
    """Its mapping is kept, and its folder has the same name."""
    reader = SnapshotReader(tmp_path / "run", verify=False)
    for version in (1, 2):
        with SnapshotWriter(tmp_path / "run", run_id="same") as writer:
            publish(writer, version)
            with reader.read() as snapshot:
                assert snapshot.manifest.path == "slot-1-0"
                assert snapshot.tensordict.get("a").unique().tolist() == [version]
            writer.close(remove=True)


def test_a_reused_pid_and_a_zombie_are_dead_and_another_host_is_unknown():
    here = ProcessIdentity.current()
    assert here.is_gone() is False
    reused = ProcessIdentity(here.host, here.hostname, here.pid, here.start_time - 1)
    assert reused.is_gone() is True
    elsewhere = ProcessIdentity("other boot", "far", here.pid, here.start_time)
    assert elsewhere.is_gone() is None
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessIdentity(here.host, here.hostname, child.pid, 0).is_gone() is True
    child.wait()


@contextmanager
def headless():
    """Yields a process whose first thread has ended while another lives, and when it began."""
    code = """
import ctypes, os, sys, threading, time
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
print(ProcessIdentity.current().start_time, flush=True)
def run():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    os.write(1, b"alone\\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=run).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        start_time = int(process.stdout.readline())
        assert process.stdout.readline() == b"alone\n"
        yield process, start_time


def test_a_process_is_not_gone_while_one_of_its_threads_lives():
    """Its first thread may have ended: by itself, or killed before the others."""
    with headless() as (process, start_time):
        here = ProcessIdentity.current()
        it = ProcessIdentity(here.host, here.hostname, process.pid, start_time)
        assert it.is_gone() is False
        process.stdin.close()
        process.wait()
        assert it.is_gone() is True


def test_the_lock_is_released_when_the_block_fails(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        seen = []

        def fail():
            with SnapshotReader(tmp_path).read():
                seen.extend(locked(tmp_path))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert len(seen) == 1
        assert locked(tmp_path) == []


def test_a_lock_on_a_version_that_moved_on_is_taken_again(tmp_path, monkeypatch):
    """The writer publishes between the reader's first look and its lock."""
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        reader = SnapshotReader(tmp_path)
        look, looked = reader.current, []

        def current():
            manifest = look()
            looked.append(manifest.version)
            if len(looked) == 1:
                publish(writer, 2)
            return manifest

        monkeypatch.setattr(reader, "current", current)
        with reader.read() as snapshot:
            assert snapshot.version == 2
        assert looked == [1, 2, 2, 2]


def test_a_writer_that_never_rests_meets_a_deadline(tmp_path, monkeypatch):
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        reader = SnapshotReader(tmp_path, timeout_s=0.05)
        look = reader.current

        def current():
            publish(writer, writer.last_version + 1)
            return look()

        monkeypatch.setattr(reader, "current", current)
        with pytest.raises(SnapshotError, match="faster than they could be locked"), reader.read():
            pass
        assert locked(tmp_path) == []

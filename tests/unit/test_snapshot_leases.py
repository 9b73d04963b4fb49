"""Readers hold what they read, writers do not wait for them, and the dead hold nothing."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity, read_json, write_json
from torchrl_vllm_sync.weights.snapshots.records import READERS


def publish(writer, version):
    tensor = torch.full((100,), version)
    return writer.publish([("a", tensor)], [ParamMeta.of("a", tensor)], version)


def slots(directory):
    return len(list(directory.glob("slot-*")))


def leases(directory):
    return sorted((directory / READERS).iterdir())


def set_age(path, age_s):
    then = time.time() - age_s
    os.utime(path, (then, then))


@pytest.fixture
def writer(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=2, max_slots=4, slot_timeout_s=0.05) as writer:
        yield writer


def test_a_leased_version_stays_whole_while_the_writer_goes_on(writer, tmp_path):
    publish(writer, 1)
    with SnapshotReader(tmp_path).read() as snapshot:
        for version in range(2, 12):
            publish(writer, version)
            assert snapshot.tensordict.get("a").unique().tolist() == [1]
        snapshot.validate()
    assert leases(tmp_path) == []


def test_slots_grow_with_slow_readers_and_shrink_after_them(writer, tmp_path):
    publish(writer, 1)
    readers = [SnapshotReader(tmp_path, reader_id=f"r{i}") for i in range(2)]
    with readers[0].read():
        publish(writer, 2)
        with readers[1].read():
            publish(writer, 3)
            publish(writer, 4)
            assert slots(tmp_path) == 4
    for version in (5, 6, 7):
        publish(writer, version)
    assert slots(tmp_path) == 2


def test_at_the_limit_the_error_says_who_holds_what(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=2, max_slots=2, slot_timeout_s=0.05) as writer:
        publish(writer, 1)
        with SnapshotReader(tmp_path, reader_id="evaluator").read():
            publish(writer, 2)
            with pytest.raises(SnapshotError, match=rf"evaluator \(pid {os.getpid()} on .*\(v1\)"):
                publish(writer, 3)
            assert SnapshotReader(tmp_path).current().version == 2
        publish(writer, 3)


def test_a_lease_without_heartbeat_is_broken_at_the_limit_and_its_reader_told(tmp_path):
    def read_too_slowly(writer):
        with SnapshotReader(tmp_path).read() as snapshot:
            publish(writer, 2)
            set_age(leases(tmp_path)[0], 31)
            publish(writer, 3)
            with pytest.raises(SnapshotError, match="broke this lease"):
                snapshot.heartbeat()

    with SnapshotWriter(tmp_path, num_slots=2, max_slots=2, lease_timeout_s=30) as writer:
        publish(writer, 1)
        with pytest.raises(SnapshotError, match="was recycled while version 1 was being read"):
            read_too_slowly(writer)


def test_a_heartbeat_keeps_the_lease(tmp_path):
    with SnapshotWriter(
        tmp_path, num_slots=2, max_slots=2, lease_timeout_s=30, slot_timeout_s=0.05
    ) as writer:
        publish(writer, 1)
        with SnapshotReader(tmp_path).read() as snapshot:
            publish(writer, 2)
            set_age(leases(tmp_path)[0], 31)
            snapshot.heartbeat()
            with pytest.raises(SnapshotError, match="current or leased"):
                publish(writer, 3)


@pytest.mark.parametrize("layout", ["slots", "versions"])
def test_leases_of_dead_processes_go_at_the_next_publish(tmp_path, layout):
    with SnapshotWriter(tmp_path, layout=layout) as writer:
        publish(writer, 1)
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        reading = SnapshotReader(tmp_path).read()
        reading.__enter__()
        path = leases(tmp_path)[0]
        write_json(path, read_json(path) | {"pid": dead.pid}, fsync=False)
        (tmp_path / READERS / ".tmp-killed").write_text("")
        set_age(tmp_path / READERS / ".tmp-killed", 61)
        publish(writer, 2)
        publish(writer, 3)
        assert leases(tmp_path) == []


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


def test_an_unreadable_lease_claims_everything_until_it_expires(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=2, max_slots=2, slot_timeout_s=0.05) as writer:
        publish(writer, 1)
        publish(writer, 2)
        stray = tmp_path / READERS / "stray"
        stray.write_text("{")
        with pytest.raises(SnapshotError, match=r"stray .*an unreadable lease"):
            publish(writer, 3)
        set_age(stray, 61)
        publish(writer, 3)


def test_the_lease_is_released_when_the_block_fails(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        seen = []

        def fail():
            with SnapshotReader(tmp_path).read():
                seen.extend(leases(tmp_path))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert len(seen) == 1
        assert leases(tmp_path) == []


def test_a_lease_on_a_version_that_moved_on_is_taken_again(tmp_path, monkeypatch):
    """The writer publishes between the reader's first look and its lease."""
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
        with pytest.raises(SnapshotError, match="faster than they could be leased"), reader.read():
            pass
        assert leases(tmp_path) == []

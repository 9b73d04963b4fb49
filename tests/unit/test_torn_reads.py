"""Whatever is killed when, a reader applies whole versions only, and the next start goes on.

Run as a program, this file is the experiment: it forks a writer that never rests and two readers
from one process that has torch loaded, kills one of them at random again and again, and prints what
the readers applied. Forking happens there and not in pytest, whose threads would not survive it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random  # noqa: TID251  seeded

import pytest
import torch
from tensordict import TensorDict

from torchrl_vllm_sync.weights.data_file import DATA_FILE, DataFile, DataLayout
from torchrl_vllm_sync.weights.head import HEAD, Head
from torchrl_vllm_sync.weights.metadata import ParamMeta
from torchrl_vllm_sync.weights.snapshot_reader import SnapshotReader
from torchrl_vllm_sync.weights.snapshot_writer import SnapshotWriter
from torchrl_vllm_sync.weights.tensor_writer import TensorWriter

# One tensor larger than a piece of the copy, some smaller than a page: about 3 MB.
SIZES = (600_000, 3, 70_000, 1_000, 1, 20_000, 50_000)
METADATA = [ParamMeta(f"layers.{i}.weight", torch.int32, (n,)) for i, n in enumerate(SIZES)]
NUM_READERS = 2


def stamped(version):
    """Every element of every tensor is the version."""
    for meta in METADATA:
        yield meta.name, torch.full(meta.shape, version, dtype=meta.dtype)


def write_snapshots(directory, layout):
    writer = SnapshotWriter(directory, layout=layout, run_id="kills")
    version = writer.last_version or 0
    while True:
        version += 1
        writer.publish(stamped(version), METADATA, version)


def read_snapshots(directory, applied, verify):
    """Yields copies of whole versions, each newer than the last."""
    reader = SnapshotReader(directory, verify=verify, run_id="kills")
    while True:
        with reader.read(newer_than=applied) as snapshot:
            copies = snapshot and [tensor.clone() for _, tensor in snapshot.tensors()]
        if copies is None:
            time.sleep(0.0005)
        else:
            applied = snapshot.version
            yield applied, copies


def write_in_place(directory, layout):
    """The naive writer: one file, written over and over, and nothing that names a version."""
    data = DataLayout.of(METADATA)
    path = directory / DATA_FILE
    file = DataFile.reopen(path, data, mapped=True)
    file = file or DataFile.create(path, data, allocate=True, mapped=True)
    writer, version = TensorWriter(checksums=False), 0
    while True:
        version += 1
        with writer.filling(file) as filling:
            for (_, tensor), meta, offset in zip(
                stamped(version), METADATA, data.offsets, strict=True
            ):
                filling.add(tensor, meta, offset, stays=False)


def read_in_place(directory, applied, verify):
    while not (directory / DATA_FILE).exists():
        time.sleep(0.0005)
    while True:
        stored = TensorDict.from_consolidated(directory / DATA_FILE)
        copies = [stored.get(meta.name).clone() for meta in METADATA]
        yield int(copies[0][0]), copies


def apply(log, versions):
    """Takes every version whole or says that it was mixed: one line each, written at once."""
    for version, copies in versions:
        mixed = any(bool((tensor != version).any()) for tensor in copies)
        os.write(log, f"{version} {'mixed' if mixed else 'whole'}\n".encode())


def fork(run):
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    return pid


class Experiment:
    """A writer and readers, killed one at a time and started again."""

    def __init__(self, directory, kind, seed):
        self.directory, self.kind = directory, kind
        self.random = Random(seed)
        self.logs = [directory.parent / f"reader-{i}" for i in range(NUM_READERS)]
        self.pids = {}
        self.report = {"kills": 0, "writer_kills": 0, "mid_write": 0, "advanced": 0}

    def applied(self, i):
        lines = self.logs[i].read_text().splitlines() if self.logs[i].exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def start(self, role):
        directory, kind = self.directory, self.kind
        if role == "writer":
            write = write_in_place if kind == "in-place" else write_snapshots
            self.pids[role] = fork(lambda: write(directory, kind))
            return
        read = read_in_place if kind == "in-place" else read_snapshots
        applied = self.applied(role)
        last = applied[-1][0] if applied else None
        log = os.open(self.logs[role], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # One reader has the checksums, the other the protocol alone.
        self.pids[role] = fork(lambda: apply(log, read(directory, last, verify=role == 0)))
        os.close(log)

    def kill(self, role):
        pid = self.pids.pop(role)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"{role} ended by itself before it was killed")
        self.report["kills"] += 1

    def last_version(self):
        manifest = None if self.kind == "in-place" else SnapshotReader(self.directory).current()
        return 0 if manifest is None else manifest.version

    def run(self, kills):
        try:
            return self.run_to_the_end(kills)
        finally:
            for role in list(self.pids):
                os.kill(self.pids[role], signal.SIGKILL)
                os.waitpid(self.pids.pop(role), 0)

    def run_to_the_end(self, kills):
        roles = ["writer", *range(NUM_READERS)]
        for role in roles:
            self.start(role)
        seen = 0
        for _ in range(kills):
            time.sleep(self.random.uniform(0.005, 0.03))
            role = self.random.choice(["writer", *roles])
            self.kill(role)
            if role == "writer" and self.kind != "in-place":
                version = self.last_version()
                self.report["writer_kills"] += 1
                self.report["advanced"] += version > seen
                # Folders with a dot are versions that have no name yet.
                paths = [*self.directory.glob(f"*/{HEAD}"), *self.directory.glob(f".*/{HEAD}")]
                heads = [Head.read(path.parent) for path in paths]
                self.report["mid_write"] += any(not head.complete for head in heads)
                seen = version
            self.start(role)
        for role in roles:
            self.kill(role)
        if self.kind != "in-place":
            with SnapshotWriter(self.directory, layout=self.kind, run_id="kills") as writer:
                version = writer.last_version + 1
                writer.publish(stamped(version), METADATA, version)
            apply_log = os.open(self.logs[0], os.O_WRONLY | os.O_APPEND)
            versions = read_snapshots(self.directory, version - 1, verify=True)
            apply(apply_log, [next(versions)])
            self.report["recovered"] = self.applied(0)[-1] == (version, "whole")
        self.report["readers"] = [self.applied(i) for i in range(NUM_READERS)]
        return self.report


def run_experiment(kind, kills, seed=0):
    command = [sys.executable, __file__, kind, str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def mixed(report):
    return [line for reader in report["readers"] for line in reader if line[1] == "mixed"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "kills"), [("slots", 500), ("versions", 100)])
def test_no_mixed_version_is_ever_applied_and_versions_only_grow(kind, kills):
    report = run_experiment(kind, kills)
    assert mixed(report) == []
    for reader in report["readers"]:
        versions = [version for version, _ in reader]
        assert versions == sorted(set(versions))
        assert len(versions) > kills / 5
    assert report["recovered"]
    # The kills hit: writers died with a version half written, and most restarts published again.
    assert report["kills"] == kills + 1 + NUM_READERS
    assert report["mid_write"] > report["writer_kills"] / 10
    assert report["advanced"] > report["writer_kills"] / 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_check_above_notices_a_writer_in_place():
    assert mixed(run_experiment("in-place", kills=20)) != []


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that has used OpenMP's threads cannot fork
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        experiment = Experiment(Path(temporary) / "run", sys.argv[1], int(sys.argv[3]))
        if sys.argv[1] == "in-place":
            experiment.directory.mkdir()
        sys.stdout.write(json.dumps(experiment.run(int(sys.argv[2]))))

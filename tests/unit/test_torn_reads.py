"""Whatever is killed or stopped when, a reader applies whole versions only; the next start goes on.

Run as a program, this file is the experiment: it forks writers that never rest and two readers from
one process that has torch loaded, and again and again does one of these at random: kills one of
them; stops the writer, so that another takes over, which may be killed as well before it has
published, for a third; wakes one that was replaced. Forking happens there and not in pytest, whose
threads would not survive it. ``make kills`` runs it at length.
"""

import argparse
import fcntl
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

from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import FencedWriterError
from torchrl_vllm_sync.weights.snapshots.data_file import (
    DATA_FILE,
    TAG_BYTES,
    DataFile,
    DataLayout,
    TensorWriter,
)
from torchrl_vllm_sync.weights.snapshots.files import COMMIT, MARKER, TEMPORARY_PREFIX, read_json

# One tensor larger than a piece of the copy, some smaller than a page: about 2 MB.
SIZES = (530_000, 3, 10_000, 1_000, 1, 2_000, 5_000)
METADATA = [ParamMeta(f"layers.{i}.weight", torch.int32, (n,)) for i, n in enumerate(SIZES)]
NUM_READERS = 2
# A writer that finds itself replaced ends so; anything else but a kill is a failure.
FENCED = 0


def stamp(version, epoch):
    """Two writers may be at one version: their elements differ."""
    return version * 10_000 + epoch % 10_000


def stamped(value, pause=lambda: None):
    """Every element of every tensor is the value."""
    for meta in METADATA:
        pause()
        yield meta.name, torch.full(meta.shape, value, dtype=meta.dtype)


def pauses(share):
    """Sometimes waits a moment: to be stopped then, or to be late for what is read."""
    random = Random(os.getpid())
    return lambda: random.random() < share and time.sleep(random.uniform(0.0, 0.004))


def write_snapshots(directory, layout, takeover):
    pause = pauses(0.5)
    try:
        writer = SnapshotWriter(directory, layout=layout, run_id="kills", takeover=takeover)
        version = writer.last_version or 0
        while True:
            version += 1
            writer.publish(stamped(stamp(version, writer.epoch), pause), METADATA, version)
    except FencedWriterError:
        os._exit(FENCED)


def read_snapshots(directory, applied, verify):
    """Yields copies of whole versions; without checksums each is newer than the last."""
    reader = SnapshotReader(directory, verify=verify, run_id="kills")
    pause = pauses(0.1)
    while True:
        with reader.read(newer_than=None if verify else applied) as snapshot:
            copies = []
            for _, tensor in snapshot.tensors() if snapshot else ():
                pause()
                copies.append(tensor.clone())
        if copies:
            applied = snapshot.version
            yield applied, stamp(applied, snapshot.manifest.epoch), copies
        else:
            time.sleep(0.0005)


def open_in_place(directory):
    return DataFile(directory / DATA_FILE, DataLayout.of(METADATA), allocate=True, mapped=True)


def write_in_place(directory):
    """The naive writer: one file, written over and over, and nothing that names a version."""
    file = open_in_place(directory)
    version = 0
    while True:
        version += 1
        with TensorWriter(file, []) as writer:
            for (_, tensor), meta, offset in zip(
                stamped(version), METADATA, file.layout.offsets, strict=True
            ):
                writer.add(tensor, meta, offset, stays=False)


def read_in_place(directory):
    while True:
        stored = TensorDict.from_consolidated(directory / DATA_FILE)
        copies = [stored.get(meta.name).clone() for meta in METADATA]
        yield int(copies[0][0]), int(copies[0][0]), copies


def apply(log, versions):
    """Takes every version whole or says that it was mixed: one line each, written at once."""
    for version, value, copies in versions:
        mixed = any(bool((tensor != value).any()) for tensor in copies)
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


class ReaderLog:
    """What one reader has applied, over all of its lives."""

    def __init__(self, path):
        self.path, self.num_read = path, 0
        self.last, self.reads, self.mixed, self.only_grow = None, 0, 0, True

    def open(self):
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def follow(self):
        with self.path.open("rb") as file:
            file.seek(self.num_read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self.num_read += len(lines)
        for line in lines.decode().splitlines():
            version, state = line.split()
            self.reads += 1
            self.mixed += state == "mixed"
            self.only_grow &= self.last is None or int(version) >= self.last
            self.last = int(version)


class Experiment:
    """A writer and readers, killed or replaced one at a time and started again."""

    def __init__(self, directory, kind, seed):
        self.directory, self.kind = directory, kind
        self.random = Random(seed)
        self.logs = [ReaderLog(directory.parent / f"reader-{i}") for i in range(NUM_READERS)]
        self.pids = {}
        self.replaced = []  # writers that were stopped, and may have been woken again
        self.seen = 0
        self.report = dict.fromkeys(
            ["kills", "writer_kills", "mid_write", "advanced", "takeovers", "chains", "woken"], 0
        )

    def start(self, role):
        directory, kind = self.directory, self.kind
        if role == "writer":
            takeover = bool(self.replaced)
            self.pids[role] = fork(
                (lambda: write_in_place(directory))
                if kind == "in-place"
                else (lambda: write_snapshots(directory, kind, takeover))
            )
            return
        log = self.logs[role].open()
        self.logs[role].follow()
        last = self.logs[role].last
        # One reader has the checksums, the other the protocol alone.
        self.pids[role] = fork(
            (lambda: apply(log, read_in_place(directory)))
            if kind == "in-place"
            else (lambda: apply(log, read_snapshots(directory, last, verify=role == 0)))
        )
        os.close(log)

    def kill(self, pid, who):
        os.kill(pid, signal.SIGKILL)
        self.require(os.WIFSIGNALED(os.waitpid(pid, 0)[1]), f"{who} ended by itself")
        self.report["kills"] += 1

    def require(self, holds, otherwise):
        if not holds:
            raise SystemExit(f"{otherwise}, after {self.report}")

    def last_version(self):
        manifest = None if self.kind == "in-place" else SnapshotReader(self.directory).current()
        return 0 if manifest is None else manifest.version

    def kill_and_start(self, role):
        self.kill(self.pids.pop(role), role)
        if role == "writer" and self.kind != "in-place":
            version = self.last_version()
            self.report["writer_kills"] += 1
            self.report["advanced"] += version > self.seen
            paths = self.directory.glob(f"*/{DATA_FILE}")
            tags = [path.open("rb").read(TAG_BYTES) for path in paths]
            self.report["mid_write"] += any(not any(tag) for tag in tags)
            self.seen = version
        self.start(role)

    def take_over(self):
        """Stops the writer and starts another, and sometimes kills that at once for a third."""
        pid = self.pids["writer"]
        os.kill(pid, signal.SIGSTOP)
        self.require(os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "writer ended by itself")
        try:  # one that has yet to open, or is in its commit, cannot be replaced
            with (self.directory / COMMIT).open() as commit:
                fcntl.flock(commit, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_owner = read_json(self.directory / MARKER)["pid"] == pid
        except (BlockingIOError, FileNotFoundError):
            is_owner = False
        if not is_owner:
            os.kill(pid, signal.SIGCONT)
            return
        self.replaced.append(self.pids.pop("writer"))
        self.report["takeovers"] += 1
        self.start("writer")
        if self.random.random() < 0.5:
            time.sleep(self.random.uniform(0.0, 0.02))
            self.kill_and_start("writer")
            self.report["chains"] += 1

    def wake(self, pid):
        os.kill(pid, signal.SIGCONT)
        self.report["woken"] += 1

    def reap(self, options=os.WNOHANG):
        """Forgets replaced writers that have found out."""
        for pid in list(self.replaced):
            ended, status = os.waitpid(pid, options)
            if ended:
                self.replaced.remove(pid)
                ended_well = os.WIFEXITED(status) and os.WEXITSTATUS(status) == FENCED
                self.require(ended_well, f"a replaced writer ended with status {status}")

    def step(self, is_ahead):
        time.sleep(self.random.uniform(0.005, 0.15 if is_ahead else 0.03))
        choices = ["writer", *range(NUM_READERS)]
        if self.kind != "in-place":
            self.reap()
            choices += ["take over", "take over"] if len(self.replaced) < 4 else []
            choices += ["wake"] if self.replaced else []
        choice = self.random.choice(choices)
        if choice == "take over":
            self.take_over()
        elif choice == "wake":
            self.wake(self.random.choice(self.replaced))
        else:
            self.kill_and_start(choice)
        for log in self.logs:
            log.follow()

    def run(self, kills, reads):
        try:
            return self.run_to_the_end(kills, reads)
        finally:
            for pid in [*self.pids.values(), *self.replaced]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def run_to_the_end(self, kills, reads):
        roles = ["writer", *range(NUM_READERS)]
        if self.kind == "in-place":  # readers find a file whose description is written
            open_in_place(self.directory).close()
        for role in roles:
            self.start(role)
        while self.report["kills"] < kills or self.logs[0].reads < reads:
            self.step(is_ahead=self.report["kills"] * reads > self.logs[0].reads * kills)
        for role in roles:
            self.kill(self.pids.pop(role), role)
        for pid in self.replaced:
            self.wake(pid)
        if self.kind != "in-place":
            with SnapshotWriter(
                self.directory, layout=self.kind, run_id="kills", takeover=True
            ) as writer:
                version = writer.last_version + 1
                writer.publish(stamped(stamp(version, writer.epoch)), METADATA, version)
                self.reap(options=0)
            left = self.directory.rglob(f"{TEMPORARY_PREFIX}*")
            self.report["left"] = [str(path) for path in left]
            apply_log = self.logs[0].open()
            apply(apply_log, [next(read_snapshots(self.directory, None, verify=True))])
            self.logs[0].follow()
            self.report["recovered"] = self.logs[0].last == version
        self.report["readers"] = [
            {"reads": log.reads, "mixed": log.mixed, "only_grow": log.only_grow}
            for log in self.logs
        ]
        return self.report


def run_experiment(kind, kills, reads=0):
    command = [sys.executable, __file__, kind, f"--kills={kills}", f"--reads={reads}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)[kind]


def mixed(report):
    return sum(reader["mixed"] for reader in report["readers"])


def assert_whole_and_hit(report):
    assert mixed(report) == 0
    assert all(reader["only_grow"] for reader in report["readers"])
    assert all(reader["reads"] > report["kills"] / 5 for reader in report["readers"])
    assert report["recovered"]
    assert report["left"] == []  # by writers that were killed
    # The kills hit: writers died with a version half written, and most restarts published again.
    assert report["mid_write"] > report["writer_kills"] / 10
    assert report["advanced"] > report["writer_kills"] / 3
    # Writers were replaced while they were stopped, some by the third, and found out.
    assert min(report[name] for name in ("takeovers", "chains", "woken")) > report["kills"] / 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "kills"), [("slots", 250), pytest.param("versions", 80, marks=pytest.mark.slow)]
)
def test_no_mixed_version_is_ever_applied_and_versions_only_grow(kind, kills):
    report = run_experiment(kind, kills)
    assert report["kills"] >= kills
    assert_whole_and_hit(report)


@pytest.mark.timeout(300)
def test_the_check_above_notices_a_writer_in_place():
    assert mixed(run_experiment("in-place", kills=20)) > 0


def record(reports):
    """Writes what the experiment found to ``benchmarks/results``."""
    from benchmarks.record import Recorder

    recorder = Recorder("torn_reads")
    for kind, report in reports.items():
        assert_whole_and_hit(report)
        for verified, reader in zip(("verified", "unverified"), report["readers"], strict=True):
            recorder.add(
                case=f"{kind}: {report['kills']} kills",
                system="SnapshotReader",
                metric=f"torn reads of {reader['reads']} {verified}",
                unit="reads",
                samples=[reader["mixed"]],
                **{name: value for name, value in report.items() if name != "readers"},
            )
    sys.stderr.write(f"record: {recorder.write()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=["slots", "versions", "in-place"])
    parser.add_argument("--kills", type=int, default=2000, help="at least as many")
    parser.add_argument("--reads", type=int, default=0, help="at least as many verified ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="from an unchanged commit")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process that has used OpenMP's threads cannot fork
    reports = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
            experiment = Experiment(Path(temporary) / "run", kind, options.seed)
            if kind == "in-place":
                experiment.directory.mkdir()
            reports[kind] = experiment.run(options.kills, options.reads)
    if options.record:
        record(reports)
    sys.stdout.write(json.dumps(reports))

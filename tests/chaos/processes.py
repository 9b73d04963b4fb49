"""The processes that are hit: of replicas, and the trainer's."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

from tests.engine.faults import SIGNALS, engine_core_pid


def replica_pids(actor):
    """Process ids of one replica, by what they are."""
    return {
        "actor": ray.get(actor.describe.remote(), timeout=30).pid,
        "core": engine_core_pid(actor),
        "worker": ray.get(actor.collective_rpc.remote("sync_plan"), timeout=30)[0],
    }


def weight_memories(pid):
    """The memory files for weights that a process has open or mapped, by inode; and how many."""
    opened = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:weights" in str(entry.readlink()):
                opened.append(entry.stat().st_ino)
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {int(line.split()[4]) for line in lines if "memfd:weights" in line}
    return {*opened} | mapped, len(opened)


def strike(pid, word):
    """Sends ``kill`` or ``stop`` to a process."""
    os.kill(pid, SIGNALS[word])


def wake(pid):
    """Lets a stopped process go on, if it is still there; says whether it was."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        return is_alive(pid)
    return False


def is_alive(pid):
    """Whether there is such a process, other than a dead one that nobody has waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TrainerProcess:
    """A trainer on the other side of two pipes; see ``tests.chaos.trainer``.

    Args:
        checkpoint: What the engines were launched with.
        directory: Where its stored versions go.
        address: Of the Ray cluster.
        log: File for what it has to say otherwise.
    """

    def __init__(self, checkpoint, directory, address, log):
        self._log = Path(log)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.trainer", str(checkpoint), str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"},
            )
        self._answers = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.is_attached = False

    @property
    def pid(self):
        return self._process.pid

    def _read(self):
        for line in self._process.stdout:
            self._answers.put((time.monotonic(), json.loads(line)))
        self._answers.put((time.monotonic(), None))

    def tell(self, do, **arguments):
        """Sends one command; :meth:`answer` has what comes of it."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s):
        """Returns when the next answer came, by ``time.monotonic()``, and the answer."""
        try:
            came_at, answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"the trainer is silent after {timeout_s:g} s") from None
        assert answer is not None, f"the trainer ended: {self._log.read_text()[-2000:]}"
        return came_at, answer

    def attach(self, name, timeout_s=90):
        """Waits until it is ready and attached to the service of this name."""
        if not self.is_attached:
            self.answer(timeout_s)
            self.tell("attach", name=name)
            self.answer(timeout_s)
            self.is_attached = True

    def end(self):
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

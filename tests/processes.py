"""Child processes: with what they need imported already, and stopped for sure."""

import multiprocessing
import os
import signal
import sys
import time

import psutil

# Everything a process imports is imported once, by the server that processes are forked from.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torchrl_vllm_sync.weights.source",
        "torchrl.modules.llm",  # this and conversions are imported late
        "transformers.core_model_loading",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "torch.distributed.fsdp",
        "pytest",
    ]
)


class Child:
    """Runs code as ``python -c`` does, but for what ends with an interpreter, and speaks to it."""

    def __init__(self, code, *args):
        theirs, self._asks = PROCESSES.Pipe(duplex=False)
        self._answers, its = PROCESSES.Pipe(duplex=False)
        self.stdin = os.fdopen(self._asks.fileno(), "w", buffering=1, closefd=False)
        self.stdout = os.fdopen(self._answers.fileno(), closefd=False)
        given = code, ["-c", *map(str, args)], theirs, its
        self.process = PROCESSES.Process(target=_run, args=given, daemon=True)
        self.process.start()
        theirs.close()
        its.close()

    @property
    def pid(self):
        return self.process.pid

    def ask(self, line):
        """Has it read a line; returns the line that it answers."""
        self.stdin.write(f"{line}\n")
        return self.stdout.readline().strip()

    def close(self):
        """Ends it, stopped or not, and the pipes to it."""
        self.process.kill()
        self.process.join()
        for one in (self.stdin, self.stdout, self._asks, self._answers):
            one.close()


def _run(code, argv, *streams):
    for at, one in enumerate(streams):
        os.dup2(one.fileno(), at)
        one.close()
    sys.argv, sys.stdin, sys.stdout = argv, os.fdopen(0), os.fdopen(1, "w")
    exec(compile(code, "child", "exec"), {"__name__": "__main__"})


def stop(pid):
    """Stops a process; a SIGSTOP is not in force yet when ``os.kill`` returns."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while (status := psutil.Process(pid).status()) != psutil.STATUS_STOPPED:
        assert status != psutil.STATUS_ZOMBIE, f"process {pid} ended by itself"
        assert time.monotonic() < deadline, f"process {pid} is {status}"
        time.sleep(0.001)

"""Ray's workers and engine cores start in a second: forked, with what they import imported.

Most of a cold replica's start is that two processes import torch and vLLM. In a cluster of
``warm_cluster`` a server forks Ray's workers instead. Before Ray's threads begin, each of them
forks a child that waits to be the first process that it spawns, which is the engine core; and so
does that one. All run the command lines that they would have been started with, in the same
environment and with the same files.

Programs that tests run, the tutorials' and the README's for instance, start cold.
"""

import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import ray
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.utils import update_envs
from ray._private.workers import setup_worker
from ray.core.generated.common_pb2 import Language

IMPORTED = (
    "torchrl_vllm_sync.engine.preload",
    "torchrl_vllm_sync.engine.actor",
    "torchrl_vllm_sync.engine.worker",
    "vllm.v1.worker.cpu_worker",
    "torchrl.modules.llm",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
_HIGH, _MOST_FDS = 500, 64  # file descriptors
# No worker before it is asked for, and none that is less urgent than its engine core.
_RAY_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
# Run in the place of python. Of a worker's environment Ray reads two variables when it is imported,
# so the server has to have the same; what is for another driver starts cold.
_CLIENT = """#!{python} -ISs
import json, os, socket, sys
{ask}
address = "/".join([{folder!r}, os.getenv("RAY_JOB_ID", ""), os.getenv("RAY_RAYLET_PID", "")])
if not (sys.argv[1].endswith("_worker.py") and os.path.exists(address)):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
    server.connect(address)
    ask(server, sys.argv[1:], [0, 1, 2])
"""


def ask(server, args, fds):
    """Tells what is to be run, with which files open under which numbers."""
    asked = json.dumps([args, fds, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], fds)
    server.sendall(asked)


def preloaded():
    """Libraries that vLLM has its cores preload (``vllm/platforms/cpu.py``, 0.32)."""
    packages = Path(np.__file__).parents[1]
    yield from map(str, packages.glob("vllm/libs/libtcmalloc_minimal*.so*"))
    yield from map(str, packages.glob("torch*/**/libgomp*.so*"))


@contextlib.contextmanager
def warm_cluster(**options):
    """A local Ray cluster by options of ``ray.init``; workers of this process's actors start so."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        client = Path(folder, "python")
        given = {"python": sys.executable, "folder": folder, "ask": inspect.getsource(ask)}
        client.write_text(_CLIENT.format(**given))
        client.chmod(0o755)
        with (
            mock.patch.object(sys, "executable", str(client)),  # as Ray's start reads it
            mock.patch.dict(os.environ, _RAY_SETTINGS),
        ):
            ray.init(address="local", **options)
        (raylet,) = (one.pid for one in psutil.Process().children() if one.name() == "raylet")
        job = ray.get_runtime_context().get_job_id()
        address = Path(folder, job, str(raylet))
        address.parent.mkdir()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", address],
            cwd=Path(__file__).parents[1],
            env={
                **os.environ,
                "RAY_JOB_ID": job,
                "RAY_RAYLET_PID": str(raylet),
                "LD_PRELOAD": ":".join(preloaded()),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with server:
            try:
                assert server.stdout.readline() == b"ready\n", "the server of workers has failed"
                yield
            finally:
                ray.shutdown()
                server.kill()


def serve(address):
    """Forks a process for each that is asked for; only these return, with their arguments."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(64)
        assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot fork"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel waits for them
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if listening not in ready:
                os._exit(0)  # the tests have ended
            asker, _ = listening.accept()
            with asker:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setpgid(0, 0)  # of which all are killed when the worker ends
                    return take_over(asker)


def take_over(asker):
    """Gets files, environment and folder of the process asked for; returns its arguments."""
    head, received, _, _ = socket.recv_fds(asker, 4, _MOST_FDS)
    with asker.makefile("rb") as rest:
        args, fds, environment, folder = json.loads(rest.read(int.from_bytes(head, "big")))
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH) for one in received]
    for one in (*received, asker.detach()):
        os.close(one)
    for one, wanted in zip(high, fds, strict=True):
        os.dup2(one, wanted)
        os.close(one)
    for name in set(os.environ).difference(environment):  # whole, setproctitle would miss it
        del os.environ[name]
    os.environ.update({k: v for k, v in environment.items() if os.environ.get(k) != v})
    os.chdir(folder)
    np.random.seed()
    return args


def keep_child():
    """Forks what the first process that this spawns will be; returns in it, with its arguments."""
    asks, asked = socket.socketpair()
    if (pid := os.fork()) == 0:
        asks.detach()
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != asked.fileno():
                with contextlib.suppress(OSError):  # the listing's own is closed by now
                    os.close(fd)
        if not asked.recv(1, socket.MSG_PEEK):
            os._exit(0)  # its parent has ended
        return take_over(asked)
    asked.close()
    spawn_cold = multiprocessing.util.spawnv_passfds

    def spawn(path, args, passed):
        command = [os.fsdecode(one) for one in args]
        if asks.fileno() < 0 or "--multiprocessing-fork" not in command:
            return spawn_cold(path, args, passed)
        with asks:
            ask(asks, command, [0, 1, 2, *map(int, passed)])
        return pid

    multiprocessing.util.spawnv_passfds = spawn
    return None


def main(address):
    sys.path[0] = str(Path(setup_worker.__file__).parent)  # as for what it is to become
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    args = serve(address)
    if args[0].endswith("setup_worker.py"):  # of which Ray makes use where there is an environment
        del args[0]
    known, command = setup_worker.parser.parse_known_args(args)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.py_executable != sys.executable:
        context.exec_worker(command, Language.Value(known.language))
    update_envs(context.env_vars)
    sys.path[1:1] = filter(None, os.getenv("PYTHONPATH", "").split(os.pathsep))
    if (spawned := keep_child()) is not None:  # the engine core, and its first worker, and so on
        while (child := keep_child()) is not None:
            spawned = child
        at = spawned.index("-c")
        sys.argv = [spawned[at], *spawned[at + 2 :]]
        return exec(spawned[at + 1], {"__name__": "__main__"})
    sys.argv = command
    return runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])

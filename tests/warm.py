"""Ray's workers and engine cores start in a second: forked, with what they import imported.

Most of a cold replica's start is that two processes import torch and vLLM. In a cluster of
``warm_cluster`` a server forks Ray's workers instead. Before Ray's threads begin, each of them
forks a child that waits to be the first process that it spawns, which is the engine core; and so
does that one. All run the command lines that they would have been started with, in the same
environment and with the same files.

``warm_python`` is a command in the place of python that has programs forked likewise, and workers
of the cluster that such a program starts. ``python -m tests.warm COMMAND`` runs a command which
finds it in WARM_PYTHON. Programs that are not run by it start cold.
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

from torchrl_vllm_sync.checks import collecting_no_garbage

IMPORTED = (
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.fsdp",
)
# These import Ray, which then reads two variables of the environment that differ in each cluster.
IMPORTED_IN_CLUSTER = (
    "torchrl_vllm_sync.engine.preload",
    "torchrl_vllm_sync.engine.actor",
    "torchrl_vllm_sync.engine.worker",
    "torchrl.modules.llm",
)
_SERVE = "--serve"
_OF_CLUSTER = ("RAY_JOB_ID", "RAY_RAYLET_PID")
_HIGH, _MOST_FDS = 500, 64  # file descriptors
# No worker before it is asked for, and none that is less urgent than its engine core.
_RAY_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
# Run in the place of python. Ray does not wait for what starts its workers; who runs a program gets
# its exit status. Other processes, of Ray's for instance, start cold.
_CLIENT = """#!{python} -ISs
import json, os, socket, sys
{ask}
is_worker = sys.argv[1].endswith("_worker.py")
if not is_worker and sys.argv[1] != "-m" and not sys.argv[1].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
    server.connect(os.environ["WARM_WORKERS"] if is_worker else {address!r})
    ask(server, sys.argv[1:], [0, 1, 2])
    if not is_worker:
        sys.exit(int(server.recv(4) or 1))
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
def serving(*command, **options):
    """Runs a server that prints when it is ready and ends with its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, **options) as server:
        assert server.stdout.readline() == b"ready\n", "a server of warm processes has failed"
        yield


@contextlib.contextmanager
def warm_python():
    """The path of what runs programs as python does, but has them forked."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        client, address = Path(folder, "python"), str(Path(folder, "server"))
        given = {"python": sys.executable, "address": address, "ask": inspect.getsource(ask)}
        client.write_text(_CLIENT.format(**given))
        client.chmod(0o755)
        early = {"LD_PRELOAD": ":".join(preloaded()), "OMP_NUM_THREADS": "1"}
        command = sys.executable, "-m", "tests.warm", _SERVE, address
        with serving(*command, cwd=Path(__file__).parents[1], env=os.environ | early):
            yield str(client)


@contextlib.contextmanager
def warm_workers(python):
    """Gives a context: workers of Ray clusters that are started in it are forked."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = str(Path(folder, "workers"))
        settings = mock.patch.dict(os.environ, _RAY_SETTINGS, WARM_WORKERS=address)
        with (
            contextlib.ExitStack() as context,
            serving(python, "-m", "tests.warm", _SERVE, address),
        ):
            context.enter_context(settings)
            context.enter_context(mock.patch.object(sys, "executable", python))
            yield context


@contextlib.contextmanager
def warm_cluster(**options):
    """A local Ray cluster by options of ``ray.init``; workers of this process's actors start so."""
    import ray

    with warm_python() as python, warm_workers(python) as context:
        with context:  # Ray's start reads it
            ray.init(address="local", **options)
        try:
            yield
        finally:
            ray.shutdown()


def serve(address):
    """Forks a process for each that is asked for; only these return, with their arguments."""
    cluster = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(64)
        assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot fork"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel waits for them
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if listening not in ready:
                os._exit(0)  # who started it has ended
            asker, _ = listening.accept()
            with asker:
                received, asked = receive(asker)
                args, environment = asked[0], asked[2]
                of = [environment.get(one) for one in _OF_CLUSTER] if is_worker(args) else None
                if cluster is None and of and all(of):
                    cluster = of
                    os.environ.update(environment)
                    for name in IMPORTED_IN_CLUSTER:
                        importlib.import_module(name)
                    gc.freeze()
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setpgid(0, 0)  # of which all are killed when the worker ends
                    if not is_worker(args):
                        run_child(asker, received)
                    take_over(received, *asked)
                    if of != cluster:  # another driver's, or nobody's
                        os.execv(sys.executable, [sys.executable, *args])
                    return args
                for one in received:
                    os.close(one)


def is_worker(args):
    return args[0].endswith("_worker.py")


def run_child(asker, files):
    """Forks the program, where alone this returns; the other tells how it ends, or has it end."""
    if (pid := os.fork()) == 0:
        return
    for one in (0, 1, 2, *files):
        os.close(one)
    if asker in select.select([asker, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGTERM)  # who asked for it has ended
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asker.sendall(b"%d" % abs(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def receive(asker):
    """What ``ask`` has sent: files, and the rest."""
    head, received, _, _ = socket.recv_fds(asker, 4, _MOST_FDS)
    with asker.makefile("rb") as rest:
        return received, json.loads(rest.read(int.from_bytes(head, "big")))


def take_over(received, args, fds, environment, folder):
    """Becomes the process asked for, by its files, environment and folder."""
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH) for one in received]
    for one in received:
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
        with asked:
            received, rest = receive(asked)
        return take_over(received, *rest)
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
    with collecting_no_garbage():
        for name in IMPORTED:
            importlib.import_module(name)
    gc.freeze()
    assert "ray" not in sys.modules
    args = serve(address)
    if args[1:3] == ["tests.warm", _SERVE]:
        args = serve(args[3])
    sys.path[1:1] = filter(None, os.getenv("PYTHONPATH", "").split(os.pathsep))
    return run_worker(args) if is_worker(args) else run_program(args, address)


def run_worker(args):
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker
    from ray.core.generated.common_pb2 import Language

    sys.path[0] = str(Path(setup_worker.__file__).parent)
    if args[0].endswith("setup_worker.py"):  # of which Ray makes use where there is an environment
        del args[0]
    known, command = setup_worker.parser.parse_known_args(args)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.py_executable != sys.executable:
        context.exec_worker(command, Language.Value(known.language))
    update_envs(context.env_vars)
    if (spawned := keep_child()) is not None:  # the engine core, and its first worker, and so on
        while (child := keep_child()) is not None:
            spawned = child
        at = spawned.index("-c")
        sys.argv = [spawned[at], *spawned[at + 2 :]]
        return exec(spawned[at + 1], {"__name__": "__main__"})
    sys.argv = command
    return runpy.run_path(command[0], run_name="__main__")


def run_program(args, address):
    with warm_workers(str(Path(address).with_name("python"))) as context, context:
        if args[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), args[1:]
            return runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        sys.path[0], sys.argv = str(Path(args[0]).resolve().parent), args
        return runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        main(sys.argv[2])
    else:
        with warm_python() as python:
            sys.exit(subprocess.call(sys.argv[1:], env=os.environ | {"WARM_PYTHON": python}))

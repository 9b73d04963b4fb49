"""Ray's workers and engine cores start in a second: forked, with what they import imported.

Most of a cold replica's start is that two processes import torch and vLLM. In a cluster of
``warm_cluster`` a server forks Ray's workers instead. Before Ray's threads begin, each of them
forks children that wait to be the first processes that it spawns, which are engine cores; and so
do those, whose children are vLLM's workers. All run the command lines that they would have been
started with, in the same environment and with the same files.

``warm_python`` is a command in the place of python that has programs forked likewise, and workers
of the cluster that such a program starts. ``python -m tests.warm COMMAND`` runs a command which
finds it in WARM_PYTHON. Programs that are not run by it start cold.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
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
_OF_CLUSTER = ("RAY_JOB_ID", "RAY_RAYLET_PID")
_HIGH, _MOST_FDS = 500, 64  # file descriptors
_KEPT = 3  # with two cores of a replica comes what coordinates them
# No worker before it is asked for, and none that is less urgent than its engine core.
_RAY_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
# Run in the place of python. Ray does not wait for what starts its workers; who runs a program gets
# its exit status, and its signals through. Other processes, of Ray's for instance, start cold.
_CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
{ask}
is_worker = sys.argv[1].endswith("_worker.py")
if not (is_worker or sys.argv[1] in ("-c", "-m") or sys.argv[1].endswith(".py")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
    server.connect({address!r})
    if not is_worker:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda number, _: server.send(bytes([number])))
    ask(server, sys.argv[1:], [0, 1, 2])
    if not is_worker:
        sys.exit(int(server.recv(4) or 1))
"""


def ask(server, args, fds):
    """Tells what is to be run, with which files open under which numbers."""
    asked = json.dumps([args, fds, dict(os.environ), os.getcwd()]).encode()
    send(server, fds, asked)


def send(server, fds, asked):
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], fds)
    server.sendall(asked)


def preloaded():
    """Libraries that vLLM has its cores preload (``vllm/platforms/cpu.py``, 0.32)."""
    packages = Path(np.__file__).parents[1]
    yield from map(str, packages.glob("vllm/libs/libtcmalloc_minimal*.so*"))
    yield from map(str, packages.glob("torch*/**/libgomp*.so*"))


@functools.cache
def warm_python():
    """The path of what runs programs as python does, but has them forked, while this one runs."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder)
    client, address = folder / "python", str(folder / "server")
    functions = inspect.getsource(ask) + inspect.getsource(send)
    client.write_text(_CLIENT.format(python=sys.executable, address=address, ask=functions))
    client.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", "--serve", address],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"LD_PRELOAD": ":".join(preloaded()), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.communicate)  # its input ends, and so does it
    assert server.stdout.readline() == b"ready\n", "the server of warm processes has failed"
    return str(client)


@contextlib.contextmanager
def warm_workers(python=None):
    """Ray clusters that start in this context have their workers forked."""
    with (
        mock.patch.object(sys, "executable", python or warm_python()),  # as Ray's start reads it
        mock.patch.dict(os.environ, _RAY_SETTINGS),
    ):
        yield


@contextlib.contextmanager
def warm_cluster(**options):
    """A local Ray cluster by options of ``ray.init``; workers of this process's actors start so."""
    import ray

    with warm_workers():
        ray.init(address="local", **options)
    try:
        yield
    finally:
        ray.shutdown()


def serve(address):
    """Forks a process for each that is asked for; only these return, with their arguments."""
    clusters = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(64)
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if listening not in ready:
                os._exit(0)  # who started it has ended
            asker, _ = listening.accept()
            with asker:
                received, asked = receive(asker)
                if not asked:
                    continue
                args, _, environment, _ = json.loads(asked)
                if is_worker(args):
                    cluster = tuple(map(environment.get, _OF_CLUSTER))
                    if cluster not in clusters:
                        clusters[cluster], requests = socket.socketpair()
                        if is_new_process():
                            for one in (listening, *clusters.values()):
                                one.close()
                            return serve_cluster(requests, environment)
                        requests.close()
                    with contextlib.suppress(OSError):  # its cluster has ended
                        send(clusters[cluster], received, asked)
                elif is_new_process():
                    run_child(asker, received)
                    return take_over(received, *json.loads(asked))
            for one in received:
                os.close(one)


def serve_cluster(requests, environment):
    """The same for workers of one driver on one node of a Ray cluster, until the node ends."""
    os.environ.update(environment)
    node = os.pidfd_open(int(environment["RAY_RAYLET_PID"]))
    for name in IMPORTED_IN_CLUSTER:
        importlib.import_module(name)
    gc.freeze()
    while True:
        ready, _, _ = select.select([requests, node], [], [])
        received, asked = receive(requests) if node not in ready else ([], b"")
        if not asked:
            os._exit(0)
        if is_new_process():
            requests.close()
            return take_over(received, *json.loads(asked))
        for one in received:
            os.close(one)


def is_new_process():
    """Forks; true in the child, whose process group is its own and ends when it does."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel waits for them
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    return True


def is_worker(args):
    return args[0].endswith("_worker.py")


def run_child(asker, files):
    """Forks the program, where alone this returns; the other passes signals on, and its status."""
    if (pid := os.fork()) == 0:
        return
    for one in (0, 1, 2, *files):
        os.close(one)
    ended = os.pidfd_open(pid)
    while ended not in select.select([asker, ended], [], [])[0]:
        if told := asker.recv(1):
            os.kill(pid, told[0])
        else:  # who has asked for it was killed
            os.killpg(0, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        asker.sendall(b"%d" % (status if status >= 0 else 128 - status))
    os._exit(0)


def receive(asker):
    """What ``ask`` has sent: files, and the rest, which is empty if the asker has ended."""
    head, received, _, _ = socket.recv_fds(asker, 4, _MOST_FDS)
    size = int.from_bytes(head, "big")
    asked = asker.recv(size, socket.MSG_WAITALL)
    return received, asked if len(asked) == size else b""


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


def keep_children():
    """Forks what the first processes that this spawns will be; returns in them, with arguments."""
    kept = []
    for _ in range(_KEPT):
        asks, asked = socket.socketpair()
        if (pid := os.fork()) == 0:
            for one in (asks, *(one for one, _ in kept)):
                one.detach()
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd != asked.fileno():
                    with contextlib.suppress(OSError):  # the listing's own is closed by now
                        os.close(fd)
            if not asked.recv(1, socket.MSG_PEEK):
                os._exit(0)  # its parent has ended
            with asked:
                received, rest = receive(asked)
            return take_over(received, *json.loads(rest))
        asked.close()
        kept.append((asks, pid))
    spawn_cold = multiprocessing.util.spawnv_passfds

    def spawn(path, args, passed):
        command = [os.fsdecode(one) for one in args]
        if not kept or "--multiprocessing-fork" not in command:
            return spawn_cold(path, args, passed)
        asks, pid = kept.pop(0)
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
    return run_worker(args) if is_worker(args) else run_program(args, address)


def has_been_spawned():
    """Keeps children; true in them when they have ended: engine cores, their workers, and so on."""
    if (spawned := keep_children()) is None:
        return False
    while (child := keep_children()) is not None:
        spawned = child
    at = spawned.index("-c")
    sys.argv = [spawned[at], *spawned[at + 2 :]]
    exec(spawned[at + 1], {"__name__": "__main__"})
    return True


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
    take_python_path()
    if has_been_spawned():
        return None
    sys.argv = command
    return runpy.run_path(command[0], run_name="__main__")


def take_python_path():
    sys.path[1:1] = filter(None, os.getenv("PYTHONPATH", "").split(os.pathsep))


def run_program(args, address):
    take_python_path()
    if has_been_spawned():
        return None
    with warm_workers(str(Path(address).with_name("python"))):
        if args[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), args[1:]
            return runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        if args[0] == "-c":
            sys.path[0], sys.argv = "", ["-c", *args[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            return exec(args[1], main.__dict__)
        sys.path[0], sys.argv = str(Path(args[0]).resolve().parent), args
        return runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        main(sys.argv[2])
    else:
        environment = os.environ | {"WARM_PYTHON": warm_python()}
        sys.exit(subprocess.call(sys.argv[1:], env=environment))

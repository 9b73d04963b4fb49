"""The reliable end of a replica: its actor, its engine cores and its workers, stopped ones too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import SyncError, is_gone
from torchrl_vllm_sync.replica import ProcessId, ReplicaProcesses, process_began

END_TIMEOUT_S = 30.0
# The part of that for which the task on the replica's node waits; the rest is for its start.
WAIT_SHARE = 0.5
_POLL_S = 0.05
# Names of ``multiprocessing.shared_memory`` and ``multiprocessing.synchronize``.
_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\w+")
# The maker of a semaphore has it mapped under a name that the C library gives it only briefly.
_MADE = re.compile(r"(\d+) +/dev/shm/sem\.\w+ \(deleted\)")


def own_processes() -> ReplicaProcesses:
    """Returns this process, a Ray actor, and its children, as they are now."""
    found = _with_children(os.getpid())
    shared = sorted({path for one in found for path in _shared_memory(one.pid)})
    return ReplicaProcesses(ray.get_runtime_context().get_node_id(), tuple(found), tuple(shared))


def _with_children(pid: int) -> list[ProcessId]:
    """A process and all below it, those that have not ended."""
    pids = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        pids += [one.pid for one in psutil.Process(pid).children(recursive=True)]
    begun = ((one, process_began(one)) for one in pids)
    return [ProcessId(one, began) for one, began in begun if began is not None]


def end_replica(
    actor: Any, processes: ReplicaProcesses | None, *, timeout_s: float = END_TIMEOUT_S
) -> None:
    """Ends a replica, whatever state it is in, and returns when its processes have gone.

    ``ray.kill`` alone returns at once, and Ray (2.60) takes up to ten seconds over an actor that
    is stopped. So all are killed by number too, by a task on the same node, and their shared memory
    is removed: Python's ``resource_tracker``, which would do that, is killed as well.

    Args:
        actor: Its actor, dead or alive.
        processes: What was known to run for it; ``None`` when its engine had never started.
        timeout_s: Seconds for it.

    Raises:
        SyncError: Something was left over after ``timeout_s``, or the node did not answer.
    """
    ray.kill(actor)
    if processes is None or not _is_alive(processes.node_id):
        return
    on_node = NodeAffinitySchedulingStrategy(processes.node_id, soft=False)
    task = ray.remote(_end_all).options(num_cpus=0, scheduling_strategy=on_node, max_retries=3)
    call = task.remote(processes, timeout_s * WAIT_SHARE)
    try:
        left = ray.get(call, timeout=timeout_s)
    except TaskUnschedulableError:
        return  # the node has gone meanwhile
    except RayError as error:
        if not isinstance(error, GetTimeoutError) and not is_gone(error):
            raise
        if not _is_alive(node := processes.node_id):
            return
        late = f"node {node} did not say within {timeout_s:g} s whether a replica has ended"
        raise SyncError(f"{late}: {error}") from error
    if left:
        raise SyncError(f"processes of a replica outlived SIGKILL for {timeout_s:g} s: {left}")


def _is_alive(node_id: str) -> bool:
    return any(one["NodeID"] == node_id and one["Alive"] for one in ray.nodes())


def _shared_memory(pid: int) -> set[str]:
    """What Python's ``multiprocessing`` shares and a process has mapped (``proc(5)``)."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    made = {int(one) for one in _MADE.findall(maps)}
    named = {one.path for one in os.scandir("/dev/shm") if one.inode() in made} if made else set()
    return named.union(_SHARED.findall(maps))


def _end_all(replica: ReplicaProcesses, timeout_s: float) -> list[int]:
    """Kills processes and their children; returns the pids of those that are left."""
    known = [one for one in replica.processes if process_began(one.pid) == one.began]
    found = {one for root in known for one in _with_children(root.pid)}.union(known)
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    deadline = Deadline(timeout_s)
    while left := [one.pid for one in found if process_began(one.pid) == one.began]:
        if deadline.passed:
            return left
        time.sleep(_POLL_S)
    for path in replica.shared_memory:
        Path(path).unlink(missing_ok=True)
    return []

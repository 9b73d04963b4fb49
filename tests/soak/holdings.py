"""What a service's processes hold: memory, threads, files, sockets, actors, shared memory."""

import gc
from pathlib import Path

import psutil
import ray
from ray.util import placement_group_table

SHARED_MEMORY = Path("/dev/shm")


def of_process(pid):
    """What one process holds, by name."""
    process = psutil.Process(pid)
    with process.oneshot():
        sockets = process.net_connections(kind="inet")
        return {
            "memory_mb": process.memory_full_info().uss / 2**20,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "children": len(process.children(recursive=True)),
            "listening": sum(one.status == psutil.CONN_LISTEN for one in sockets),
        }


def of_service(service, steady_id):
    """What this process, the replica that is never killed, and the cluster hold.

    Args:
        service: The service, at rest.
        steady_id: Id of that replica.
    """
    gc.collect()
    descriptions = service.replicas.call_replicas("describe")
    found = {f"trainer {name}": value for name, value in of_process(None).items()}
    steady = of_process(descriptions[steady_id].pid)
    found |= {f"replica {name}": value for name, value in steady.items()}
    found["actors"] = sum(
        service.name in one["name"] for one in ray.util.list_named_actors(all_namespaces=True)
    )
    found["groups"] = sum(one["state"] != "REMOVED" for one in placement_group_table().values())
    found["shared memory files"] = len(list(SHARED_MEMORY.iterdir()))
    return found


def growth(before, after):
    """What is more at the end than it may be, in words.

    Ray and gRPC open threads and connections as they need them, some for each process they have
    ever spoken to; what leaks with each event would be far more.
    """
    slack = {"memory_mb": 60.0, "threads": 12, "files": 24}
    found = []
    for name, value in after.items():
        allowed = before[name] + next((n for key, n in slack.items() if name.endswith(key)), 0)
        if value > allowed:
            found.append(f"{name}: {before[name]:.0f} before, {value:.0f} after")
    return found

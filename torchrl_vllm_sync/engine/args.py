"""A replica from outside: the arguments its engine is launched with, and the end of it all."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import inspect
import logging
import math
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from torchrl_vllm_sync.checks import Deadline, check_integer
from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError, is_gone
from torchrl_vllm_sync.replica import ProcessId, ReplicaProcesses, process_began

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

logger = logging.getLogger(__name__)
# Registered with vLLM by the worker extension, in our engines only.
BROADCAST_BACKEND = "torchrl_broadcast"
STAGED_BACKEND = "torchrl_broadcast_staged"
SHARED_BACKEND = "torchrl_broadcast_shared"
WORKER_EXTENSION = "torchrl_vllm_sync.engine.worker.SyncWorkerExtension"
# vLLM's own defaults take most of a host's memory for the KV cache of one CPU engine.
CPU_KV_CACHE_BYTES = 256 * 2**20
CPU_MEMORY_FRACTION = 0.05
# How many log-probabilities of a token can be asked for: sampling masks of a top_k up to 248.
MAX_LOGPROBS = 256
# A service has fewer replicas than this, so that no two engines of it ever have the same seed.
SEEDS_OF_A_START = 10_007
# torchrl/modules/llm/backends/vllm/vllm_plugin.py: turns on TorchRL's FP32 output layers.
FP32_OUTPUT_ENVIRONMENT = {"VLLM_ENABLE_FP32_OUTPUT": "1", "TORCHRL_VLLM_FP32_OVERRIDES": "1"}
# Silences the start-up logs of vLLM, PyTorch and Triton.
QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def gpu_bytes() -> int:
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


def make_engine_args(
    model_name: str | os.PathLike[str],
    *,
    num_devices: int | None = None,
    compile: bool = True,  # noqa: A002  TorchRL's spelling
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    also_known: Collection[str] = (),
    **kwargs: Any,
) -> AsyncEngineArgs:
    """Builds engine arguments from those of ``make_async_vllm_engine``, with defaults for a CPU."""
    from vllm import AsyncEngineArgs

    if tensor_parallel_size is None:
        tensor_parallel_size = 1 if num_devices is None else num_devices
    elif num_devices not in (None, 1, tensor_parallel_size):
        raise UnsupportedArgumentError(
            f"num_devices and tensor_parallel_size must agree, got {num_devices} and "
            f"{tensor_parallel_size}"
        )
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    # vLLM dropped it: preempted requests are recomputed instead.
    if "swap_space" not in known and kwargs.pop("swap_space", None) is not None:
        logger.warning("the installed vLLM has no swap space: swap_space is passed over")
    if unknown := sorted(set(kwargs) - known):
        own = inspect.signature(make_engine_args).parameters.keys()
        named = ", ".join(_with_hint(one, known | own | set(also_known)) for one in unknown)
        raise UnsupportedArgumentError(
            f"neither AsyncVLLM nor the installed vLLM's engine has the argument {named}"
        )
    settings: dict[str, Any] = {
        "model": os.fspath(model_name),
        "enable_prefix_caching": True,
        "max_loras": 2,  # with enable_lora: a version beside that of requests in flight
        # Those of the distribution that tokens are sampled from: at temperature 1, with no token
        # removed or weighed otherwise, vLLM's raw ones.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,  # nothing is reserved for them
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": 1 if data_parallel_size is None else data_parallel_size,
        "pipeline_parallel_size": 1 if pipeline_parallel_size is None else pipeline_parallel_size,
    }
    if on_cpu():
        settings |= {"dtype": "float32", "enforce_eager": True}
        settings["gpu_memory_utilization"] = CPU_MEMORY_FRACTION
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    else:
        settings["compilation_config"] = {"mode": 3 if compile else 0}
    return AsyncEngineArgs(**settings | kwargs)


def _with_hint(unknown: str, known: set[str]) -> str:
    if unknown in ("strategy", "load_balancer", "routing"):
        return f"{unknown} (routing is for service.create_load_balancer)"
    if unknown in ("transport", "weight_updater"):
        return f"{unknown} (weights are pushed by WeightUpdater(service, source, transport=...))"
    close = difflib.get_close_matches(unknown, sorted(known), n=1)
    return f"{unknown} (did you mean {close[0]}?)" if close else unknown


def prepare_engine_args(
    engine_args: AsyncEngineArgs, *, stage_weights: bool = False, share_weights: bool = False
) -> AsyncEngineArgs:
    """Returns a copy that this library's replicas can run."""
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig

    if not isinstance(engine_args, AsyncEngineArgs):
        raise UnsupportedArgumentError(
            f"engine_args must be vllm.AsyncEngineArgs, got {type(engine_args).__name__}: make "
            "them with AsyncEngineArgs(model=...), or take from_pretrained(model, ...)"
        )
    prepared = copy.copy(engine_args)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        check_integer(name, getattr(prepared, name), 1)
    check_integer("seed", prepared.seed, 0)  # replicas count up from it
    if prepared.disable_log_stats:
        raise UnsupportedArgumentError(
            "disable_log_stats must be False: replicas report their load from these statistics"
        )
    if prepared.worker_extension_cls:
        _check_extension(prepared.worker_extension_cls)
    else:
        prepared.worker_extension_cls = WORKER_EXTENSION
    if (given := prepared.weight_transfer_config) is None:
        backend = STAGED_BACKEND if stage_weights else BROADCAST_BACKEND
        backend = SHARED_BACKEND if share_weights else backend
        prepared.weight_transfer_config = WeightTransferConfig(backend=backend)
    elif stage_weights or share_weights:
        argument = "stage_weights" if stage_weights else "share_weights"
        raise UnsupportedArgumentError(
            f"{argument} needs weight_transfer_config to be left unset, got {given}"
        )
    # What vLLM's CPU backend was seen to crash on (0.32; SIGSEGV, NotImplementedError).
    given, backend = prepared.pipeline_parallel_size, "on vLLM's CPU backend"
    if on_cpu() and given > 1:
        raise UnsupportedArgumentError(f"pipeline_parallel_size must be 1 {backend}, got {given}")
    if on_cpu() and prepared.enable_expert_parallel and num_workers(prepared) > 1:
        raise UnsupportedArgumentError(
            f"enable_expert_parallel needs tensor and data parallel size 1 {backend}, "
            f"got {prepared.tensor_parallel_size} and {prepared.data_parallel_size}"
        )
    if prepared.distributed_executor_backend is None:
        # A replica is on one node. By default vLLM would use the actor's placement group for its
        # Ray executor, which needs one bundle a GPU.
        if num_workers(prepared) > 1:
            prepared.distributed_executor_backend = "mp"
        elif on_cpu():
            prepared.distributed_executor_backend = "uni"
    return prepared


def check_shares(engine_args: AsyncEngineArgs, trainer_bytes: int, gpu_bytes: int) -> None:
    """Refuses engines that would not fit on a GPU beside what a trainer keeps there."""
    share, cache_bytes = engine_args.gpu_memory_utilization, engine_args.kv_cache_memory_bytes or 0
    # vLLM wants that much to be free when it starts, also if the cache has a size of its own.
    engine_bytes = max(math.ceil(share * gpu_bytes), cache_bytes)
    if engine_bytes + trainer_bytes > gpu_bytes:
        gpu, engine, trainer = (
            f"{n / 1e9:.2f} GB" for n in (gpu_bytes, engine_bytes, trainer_bytes)
        )
        given = f"gpu_memory_utilization={share:g}"
        given += f", kv_cache_memory_bytes={cache_bytes}" if cache_bytes else ""
        raise UnsupportedArgumentError(
            f"engine and trainer must fit on a GPU of {gpu} together, got {engine} for the engine "
            f"({given}) and {trainer} for the trainer (trainer_memory_bytes)"
        )


def for_replica(engine_args: AsyncEngineArgs, index: int, num_restarts: int = 0) -> AsyncEngineArgs:
    """Returns a copy with a seed of its own, and another one after each restart."""
    # Engines with one seed draw the same numbers: equal prompts could get equal answers.
    own = copy.copy(engine_args)
    own.seed += index + num_restarts * SEEDS_OF_A_START
    return own


def num_workers(engine_args: AsyncEngineArgs) -> int:
    """Returns the vLLM workers of one replica: tensor x pipeline x data parallel size."""
    per_engine = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size
    return per_engine * engine_args.data_parallel_size


def engine_environment(
    engine_args: AsyncEngineArgs, *, verbose: bool, enable_fp32_output: bool
) -> dict[str, str]:
    """Returns environment variables for a replica's processes; what is set already stays."""
    wanted = {} if verbose else dict(QUIET_ENVIRONMENT)
    if enable_fp32_output:
        wanted |= FP32_OUTPUT_ENVIRONMENT
    if on_cpu():
        # More threads of a worker inside the engine core spin against the other replicas.
        wanted["OMP_NUM_THREADS"] = "1"
        if engine_args.enforce_eager:
            # vLLM compiles the ranks of log-probabilities all the same, while the first request
            # that asks for any waits: seconds, on a busy machine a quarter of a minute.
            wanted["TORCH_COMPILE_DISABLE"] = "1"
        if engine_args.distributed_executor_backend == "uni":
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:
            # vLLM's automatic choice binds every replica to the same core.
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return wanted | {name: os.environ[name] for name in wanted if name in os.environ}


def payload_of(request: Any, field: str) -> Any:
    """Returns the plain payload of one of vLLM's transfer requests, which may be plain itself."""
    if isinstance(request, (dict, list)):
        return request.get(field, request) if isinstance(request, dict) else request
    if dataclasses.is_dataclass(request) and hasattr(request, field):
        return getattr(request, field)
    raise UnsupportedArgumentError(
        f"expected vLLM's request or a mapping with {field}, got {type(request).__name__}"
    )


END_TIMEOUT_S = 30.0
# The part of that for which the task on the replica's node waits; the rest is for its start.
WAIT_SHARE = 0.5
_POLL_S = 0.05
# Names of ``multiprocessing.shared_memory`` and ``multiprocessing.synchronize``.
_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\w+")
# The maker of a semaphore has it mapped under a name that the C library gives it only briefly.
_MADE = re.compile(r"(\d+) +/dev/shm/sem\.\w+ \(deleted\)")


def own_processes() -> ReplicaProcesses:
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


def _check_extension(given: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    try:
        extension = resolve_obj_by_qualname(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedArgumentError(
            f"worker_extension_cls must name an importable class, got {given!r}: {error}"
        ) from error
    ours = resolve_obj_by_qualname(WORKER_EXTENSION)
    if not (inspect.isclass(extension) and issubclass(extension, ours)):
        raise UnsupportedArgumentError(
            f"worker_extension_cls must be a subclass of {WORKER_EXTENSION}, got {given}"
        )

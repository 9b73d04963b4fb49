"""Replicated vLLM rollouts for TorchRL, and the trainer's weights inside the engines after a step.

The names below are imported when they are first used: importing the package brings in neither vLLM
nor Ray.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_vllm_sync import errors
    from torchrl_vllm_sync.observe.metrics import MetricsExporter
    from torchrl_vllm_sync.observe.page import Dashboard
    from torchrl_vllm_sync.observe.status import ReplicaStatus, ServiceStatus
    from torchrl_vllm_sync.observe.timeline import save_timeline
    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.rl.collectors import RayReplayBuffer
    from torchrl_vllm_sync.rl.policy import vLLMWrapper
    from torchrl_vllm_sync.rl.schemes import (
        VLLMDoubleBufferSyncScheme,
        VLLMWeightSyncScheme,
        WeightSyncScheme,
    )
    from torchrl_vllm_sync.rl.staleness import StalenessFilter, StalenessWeight, VersionStamp
    from torchrl_vllm_sync.rl.statistics import GenerationStatistics, log_pushes, log_rollouts
    from torchrl_vllm_sync.rl.updater import WeightUpdater
    from torchrl_vllm_sync.routing.balancer import LoadBalancer
    from torchrl_vllm_sync.service.service import AsyncVLLM, attach, make_async_vllm_engine
    from torchrl_vllm_sync.service.supervisor import QueueLengthScaling

    __version__: str

__all__ = [
    "AsyncVLLM",
    "Dashboard",
    "GenerationStatistics",
    "LoadBalancer",
    "MetricsExporter",
    "PushStatus",
    "QueueLengthScaling",
    "RayReplayBuffer",
    "ReplicaStatus",
    "ServiceStatus",
    "StalenessFilter",
    "StalenessWeight",
    "VLLMDoubleBufferSyncScheme",
    "VLLMWeightSyncScheme",
    "VersionStamp",
    "WeightSyncScheme",
    "WeightUpdater",
    "__version__",
    "attach",
    "errors",
    "log_pushes",
    "log_rollouts",
    "make_async_vllm_engine",
    "save_timeline",
    "vLLMWrapper",
]

_HOMES = {
    "AsyncVLLM": "torchrl_vllm_sync.service.service",
    "Dashboard": "torchrl_vllm_sync.observe.page",
    "GenerationStatistics": "torchrl_vllm_sync.rl.statistics",
    "LoadBalancer": "torchrl_vllm_sync.routing.balancer",
    "MetricsExporter": "torchrl_vllm_sync.observe.metrics",
    "PushStatus": "torchrl_vllm_sync.replica",
    "QueueLengthScaling": "torchrl_vllm_sync.service.supervisor",
    "RayReplayBuffer": "torchrl_vllm_sync.rl.collectors",
    "ReplicaStatus": "torchrl_vllm_sync.observe.status",
    "ServiceStatus": "torchrl_vllm_sync.observe.status",
    "StalenessFilter": "torchrl_vllm_sync.rl.staleness",
    "StalenessWeight": "torchrl_vllm_sync.rl.staleness",
    "VLLMDoubleBufferSyncScheme": "torchrl_vllm_sync.rl.schemes",
    "VLLMWeightSyncScheme": "torchrl_vllm_sync.rl.schemes",
    "VersionStamp": "torchrl_vllm_sync.rl.staleness",
    "WeightSyncScheme": "torchrl_vllm_sync.rl.schemes",
    "WeightUpdater": "torchrl_vllm_sync.rl.updater",
    "attach": "torchrl_vllm_sync.service.service",
    "log_pushes": "torchrl_vllm_sync.rl.statistics",
    "log_rollouts": "torchrl_vllm_sync.rl.statistics",
    "make_async_vllm_engine": "torchrl_vllm_sync.service.service",
    "save_timeline": "torchrl_vllm_sync.observe.timeline",
    "vLLMWrapper": "torchrl_vllm_sync.rl.policy",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = metadata.version("torchrl-vllm-sync")
    elif name == "errors":
        value = import_module("torchrl_vllm_sync.errors")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

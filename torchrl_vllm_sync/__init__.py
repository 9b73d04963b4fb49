"""Replicated vLLM rollouts for TorchRL, and the trainer's weights inside the engines after a step.

The names below are imported when they are first used: importing the package brings in neither vLLM
nor Ray.
"""

from __future__ import annotations

import ast
import functools
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_vllm_sync import errors
    from torchrl_vllm_sync.observe.metrics import MetricsExporter
    from torchrl_vllm_sync.observe.page import Dashboard
    from torchrl_vllm_sync.observe.status import ReplicaStatus, ServiceStatus
    from torchrl_vllm_sync.observe.timeline import save_timeline
    from torchrl_vllm_sync.replica import LoadReport, PushReport, ReplicaState
    from torchrl_vllm_sync.rl.collectors import RayReplayBuffer
    from torchrl_vllm_sync.rl.groups import GroupAdvantage, RolloutStorage
    from torchrl_vllm_sync.rl.policy import vLLMWrapper
    from torchrl_vllm_sync.rl.rollouts import RolloutCollector, TextReward
    from torchrl_vllm_sync.rl.schemes import (
        VLLMDoubleBufferSyncScheme,
        VLLMWeightSyncScheme,
        WeightSyncScheme,
    )
    from torchrl_vllm_sync.rl.staleness import StalenessFilter, StalenessWeight, VersionStamp
    from torchrl_vllm_sync.rl.statistics import (
        DashboardLogger,
        GenerationStatistics,
        log_pushes,
        log_rollouts,
    )
    from torchrl_vllm_sync.rl.trainer import TrainerPolicy
    from torchrl_vllm_sync.rl.updater import WeightUpdater
    from torchrl_vllm_sync.routing.balancer import LoadBalancer
    from torchrl_vllm_sync.routing.strategies import (
        RoutingRequest,
        RoutingStrategy,
        StrategySettings,
        known_strategies,
        register_strategy,
    )
    from torchrl_vllm_sync.service.fleet import QueueLengthScaling
    from torchrl_vllm_sync.service.service import AsyncVLLM, attach, make_async_vllm_engine
    from torchrl_vllm_sync.versions import VersionSpan, expand_spans, max_version, min_version
    from torchrl_vllm_sync.weights.auto import AutoTransport
    from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
    from torchrl_vllm_sync.weights.ipc import IPCTransport
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.snapshots.reader import SnapshotReader
    from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
    from torchrl_vllm_sync.weights.snapshots.writer import SnapshotWriter
    from torchrl_vllm_sync.weights.source import as_weight_source
    from torchrl_vllm_sync.weights.transport import WeightTransport

    __version__: str

__all__ = [
    "AsyncVLLM",
    "AutoTransport",
    "BroadcastTransport",
    "Dashboard",
    "DashboardLogger",
    "GenerationStatistics",
    "GroupAdvantage",
    "IPCTransport",
    "LoadBalancer",
    "LoadReport",
    "MemmapTransport",
    "MetricsExporter",
    "ParamMeta",
    "PushReport",
    "QueueLengthScaling",
    "RayReplayBuffer",
    "ReplicaState",
    "ReplicaStatus",
    "RolloutCollector",
    "RolloutStorage",
    "RoutingRequest",
    "RoutingStrategy",
    "ServiceStatus",
    "SnapshotReader",
    "SnapshotWriter",
    "StalenessFilter",
    "StalenessWeight",
    "StrategySettings",
    "TextReward",
    "TrainerPolicy",
    "VLLMDoubleBufferSyncScheme",
    "VLLMWeightSyncScheme",
    "VersionSpan",
    "VersionStamp",
    "WeightSyncScheme",
    "WeightTransport",
    "WeightUpdater",
    "__version__",
    "as_weight_source",
    "attach",
    "errors",
    "expand_spans",
    "known_strategies",
    "log_pushes",
    "log_rollouts",
    "make_async_vllm_engine",
    "max_version",
    "min_version",
    "register_strategy",
    "save_timeline",
    "vLLMWrapper",
]


@functools.cache
def _homes() -> dict[str, str | None]:
    """Returns the module of each name, read from the imports above, as ``lazy_loader`` does."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if f"{node.module}".startswith(__name__)]
    return {alias.name: node.module for node in ours for alias in node.names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = metadata.version("torchrl-vllm-sync")
    elif name == "errors":
        value = import_module("torchrl_vllm_sync.errors")
    else:
        value = getattr(import_module(f"{_homes()[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

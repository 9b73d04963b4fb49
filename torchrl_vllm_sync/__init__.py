"""Replicated vLLM rollouts for TorchRL, and the trainer's weights inside the engines after a step.

The names below are imported when they are first used: importing the package brings in neither vLLM
nor Ray.
"""

from __future__ import annotations

import ast
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_vllm_sync import errors as errors
    from torchrl_vllm_sync.observe.metrics import MetricsExporter as MetricsExporter
    from torchrl_vllm_sync.observe.page import Dashboard as Dashboard
    from torchrl_vllm_sync.observe.status import ReplicaStatus as ReplicaStatus
    from torchrl_vllm_sync.observe.status import ServiceStatus as ServiceStatus
    from torchrl_vllm_sync.observe.views import save_timeline as save_timeline
    from torchrl_vllm_sync.replica import LoadReport as LoadReport
    from torchrl_vllm_sync.replica import PushReport as PushReport
    from torchrl_vllm_sync.replica import ReplicaState as ReplicaState
    from torchrl_vllm_sync.requests.messages import VersionSpan as VersionSpan
    from torchrl_vllm_sync.requests.messages import expand_spans as expand_spans
    from torchrl_vllm_sync.requests.messages import max_version as max_version
    from torchrl_vllm_sync.requests.messages import min_version as min_version
    from torchrl_vllm_sync.rl.agents import AgentCollector as AgentCollector
    from torchrl_vllm_sync.rl.agents import session_rows as session_rows
    from torchrl_vllm_sync.rl.config import GRPOConfig as GRPOConfig
    from torchrl_vllm_sync.rl.corrections import RolloutCorrection as RolloutCorrection
    from torchrl_vllm_sync.rl.corrections import StalenessFilter as StalenessFilter
    from torchrl_vllm_sync.rl.corrections import StalenessWeight as StalenessWeight
    from torchrl_vllm_sync.rl.corrections import VersionStamp as VersionStamp
    from torchrl_vllm_sync.rl.experts import replay_routed_experts as replay_routed_experts
    from torchrl_vllm_sync.rl.groups import GroupAdvantage as GroupAdvantage
    from torchrl_vllm_sync.rl.groups import RayReplayBuffer as RayReplayBuffer
    from torchrl_vllm_sync.rl.groups import RolloutStorage as RolloutStorage
    from torchrl_vllm_sync.rl.grpo import GRPORun as GRPORun
    from torchrl_vllm_sync.rl.grpo import train_grpo as train_grpo
    from torchrl_vllm_sync.rl.masters import MasterWeights as MasterWeights
    from torchrl_vllm_sync.rl.pacing import Pacer as Pacer
    from torchrl_vllm_sync.rl.policy import vLLMWrapper as vLLMWrapper
    from torchrl_vllm_sync.rl.rollouts import RolloutCollector as RolloutCollector
    from torchrl_vllm_sync.rl.rollouts import TextReward as TextReward
    from torchrl_vllm_sync.rl.run_state import RunState as RunState
    from torchrl_vllm_sync.rl.schemes import (
        VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme,
    )
    from torchrl_vllm_sync.rl.schemes import VLLMWeightSyncScheme as VLLMWeightSyncScheme
    from torchrl_vllm_sync.rl.schemes import WeightSyncScheme as WeightSyncScheme
    from torchrl_vllm_sync.rl.statistics import DashboardLogger as DashboardLogger
    from torchrl_vllm_sync.rl.statistics import GenerationStatistics as GenerationStatistics
    from torchrl_vllm_sync.rl.statistics import RunLog as RunLog
    from torchrl_vllm_sync.rl.statistics import log_pushes as log_pushes
    from torchrl_vllm_sync.rl.statistics import log_rollouts as log_rollouts
    from torchrl_vllm_sync.rl.tasks import Evaluation as Evaluation
    from torchrl_vllm_sync.rl.tasks import Evaluator as Evaluator
    from torchrl_vllm_sync.rl.trainer import TrainerPolicy as TrainerPolicy
    from torchrl_vllm_sync.rl.updater import WeightUpdater as WeightUpdater
    from torchrl_vllm_sync.routing.balancer import LoadBalancer as LoadBalancer
    from torchrl_vllm_sync.routing.strategies import RoutingRequest as RoutingRequest
    from torchrl_vllm_sync.routing.strategies import RoutingStrategy as RoutingStrategy
    from torchrl_vllm_sync.routing.strategies import StrategySettings as StrategySettings
    from torchrl_vllm_sync.routing.strategies import known_strategies as known_strategies
    from torchrl_vllm_sync.routing.strategies import register_strategy as register_strategy
    from torchrl_vllm_sync.serve.server import OpenAIServer as OpenAIServer
    from torchrl_vllm_sync.serve.sessions import Session as Session
    from torchrl_vllm_sync.serve.sessions import Sessions as Sessions
    from torchrl_vllm_sync.service.fleet import QueueLengthScaling as QueueLengthScaling
    from torchrl_vllm_sync.service.service import AsyncVLLM as AsyncVLLM
    from torchrl_vllm_sync.service.service import attach as attach
    from torchrl_vllm_sync.service.service import make_async_vllm_engine as make_async_vllm_engine
    from torchrl_vllm_sync.weights.adapters import AdapterSource as AdapterSource
    from torchrl_vllm_sync.weights.audit import AuditReport as AuditReport
    from torchrl_vllm_sync.weights.audit import WeightDifference as WeightDifference
    from torchrl_vllm_sync.weights.auto import AutoTransport as AutoTransport
    from torchrl_vllm_sync.weights.broadcast.transport import (
        BroadcastTransport as BroadcastTransport,
    )
    from torchrl_vllm_sync.weights.broadcast.transport import IPCTransport as IPCTransport
    from torchrl_vllm_sync.weights.module import ParamMeta as ParamMeta
    from torchrl_vllm_sync.weights.p2p.transport import P2PTransport as P2PTransport
    from torchrl_vllm_sync.weights.snapshots.data_file import SnapshotReader as SnapshotReader
    from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport as MemmapTransport
    from torchrl_vllm_sync.weights.snapshots.transport import SnapshotWriter as SnapshotWriter
    from torchrl_vllm_sync.weights.source import as_weight_source as as_weight_source
    from torchrl_vllm_sync.weights.transport import WeightTransport as WeightTransport

    __version__: str


def _homes() -> dict[str, str]:
    """Returns the module of each name, read from the imports above, as ``lazy_loader`` does."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    ours = [one for one in nodes if isinstance(one, ast.ImportFrom) and one.level == 0]
    found = {alias.name: f"{one.module}" for one in ours for alias in one.names}
    return {name: home for name, home in found.items() if home.startswith(__name__)}


_HOMES = _homes()
__all__ = [*sorted(_HOMES), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = metadata.version("torchrl-vllm-sync")
    elif name == "errors":
        value = import_module("torchrl_vllm_sync.errors")
    else:
        with import_module("torchrl_vllm_sync.checks").collecting_no_garbage():
            value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

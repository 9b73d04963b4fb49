"""Routing: which replica a request goes to, decided from load snapshots and without any I/O."""

from torchrl_vllm_sync.routing.prefix_index import PrefixIndex
from torchrl_vllm_sync.routing.strategies import (
    RoutingRequest,
    RoutingStrategy,
    StrategySettings,
    known_strategies,
    register_strategy,
    routing_prompt,
    strategy_factory,
)

__all__ = [
    "PrefixIndex",
    "RoutingRequest",
    "RoutingStrategy",
    "StrategySettings",
    "known_strategies",
    "register_strategy",
    "routing_prompt",
    "strategy_factory",
]

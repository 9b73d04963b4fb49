"""Services without engines: members that nobody started, and calls that tests answer."""

from types import SimpleNamespace
from typing import Any

from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.replica import EngineDescription, Member
from torchrl_vllm_sync.service.replicas import Membership, Replicas, ServiceSettings
from torchrl_vllm_sync.service.requests import RequestCounts
from torchrl_vllm_sync.service.weights import Weights


class Actor(str):
    """An actor handle that can be told from others by its text."""

    __slots__ = ()
    _actor_id = b"actor"


def member(replica_id, actor="actor", **facts):
    description = EngineDescription(
        replica_id=replica_id,
        node_ip="192.0.2.1",
        pid=1,
        max_model_len=64,
        vocab_size=128,
        block_size=16,
        num_kv_blocks=10,
        vllm_version="0.32.0",
    )
    handle = Actor(actor) if isinstance(actor, str) else actor
    return Member(replica_id, handle, description=description, **facts)


def replicas_of(members=(), *, load=None, launched=True, **settings):
    """Replicas with a ledger of the test's own, if it gives one."""
    known = ServiceSettings(
        **{"name": "rollouts", "engine_args": SimpleNamespace(model="tiny")} | settings
    )
    replicas = Replicas(known)
    replicas.membership = Membership(members) if launched else None
    if load is None:
        replicas.load.follow([one.replica_id for one in replicas])
    else:
        replicas.load = load
    return replicas


def service_of(replicas, *, log=None, committed=0):
    """A service of these replicas, as much of it as reading it needs."""
    service = object.__new__(AsyncVLLM)
    weights: Any = Weights(replicas)
    weights.pusher = SimpleNamespace(committed=committed)
    service.replicas, service.weights = replicas, weights
    if log is not None:
        service.weights.log = log
    service.requests = SimpleNamespace(counts=RequestCounts())
    service._views, service._exporter = [], None
    return service

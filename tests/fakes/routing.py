"""What a ledger may know of a replica, without a ledger."""

from dataclasses import fields

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.ledger import LoadSnapshot

REPORTED = {field.name for field in fields(EngineReport)} - {
    field.name for field in fields(LoadSnapshot)
}


def snapshot(replica_id, state=ReplicaState.SERVING, **figures):
    """A record of a replica, with the engine's figures where its last report holds them."""
    reported = {name: figures.pop(name) for name in REPORTED & figures.keys()}
    report = EngineReport(replica_id=replica_id, state=state, **reported)
    return LoadSnapshot(replica_id=replica_id, state=state, report=report, **figures)

"""Which replicas a transport can begin with, and why it has to do without the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import TransferError

if TYPE_CHECKING:
    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.transport import ReplicaClient

__all__ = ["describe_replicas"]

DESCRIBE_TIMEOUT_S = 30.0


def describe_replicas(
    client: ReplicaClient,
) -> tuple[dict[str, EngineDescription], dict[str, str]]:
    """Asks every replica what it is.

    Returns:
        Replica id to its description, for those that answer, and to the reason, for the others.

    Raises:
        TransferError: None answers.
    """
    answers = client.call_replicas("describe", deadline_s=DESCRIBE_TIMEOUT_S)
    alive = {name: one for name, one in answers.items() if not isinstance(one, BaseException)}
    missing = {name: str(one) for name, one in answers.items() if name not in alive}
    if not alive:
        raise TransferError(f"no replica can be reached: {missing}")
    return alive, missing

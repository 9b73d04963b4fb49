"""Which replicas a transport can begin with, and why it has to do without the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    SilentEngineError,
    SyncError,
    TransferError,
)
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.transport import ReplicaClient

__all__ = ["MOST_ATTEMPTS", "describe_replicas", "is_dead", "is_lost", "lost_replicas"]

DESCRIBE_TIMEOUT_S = 30.0
MOST_ATTEMPTS = 3
"""How often one push sends everything: again without replicas that were lost, and again."""
OVER = (ReplicaState.FAILED, ReplicaState.CLOSED)


def describe_replicas(
    client: ReplicaClient, without: Collection[str] = ()
) -> tuple[dict[str, EngineDescription], dict[str, str]]:
    """Asks every replica that a push waits for what it is.

    Args:
        client: The replicas.
        without: Ids of replicas not to ask.

    Returns:
        Replica id to its description, for those that answer, and to the reason, for the others
        that were asked, or are not waited for.

    Raises:
        TransferError: None answers.
    """
    missing: dict[str, str] = {}
    asked: dict[str, tuple[()]] = {}
    for name, standing in client.standings().items():
        if standing.absence:
            missing[name] = standing.absence
        elif name not in without:
            asked[name] = ()
    answers = client.start_calls("describe", asked).answers(DESCRIBE_TIMEOUT_S) if asked else {}
    alive = {name: one for name, one in answers.items() if not isinstance(one, BaseException)}
    missing |= {name: str(one) for name, one in answers.items() if name not in alive}
    if not alive:
        raise TransferError(f"no replica can be reached: {missing}")
    return alive, missing


def is_dead(answer: Any) -> bool:
    """Whether a call to a replica ended so that there will be no other.

    Args:
        answer: What it ended with.
    """
    return isinstance(answer, ReplicaUnavailableError) and answer.state in OVER


def is_lost(answer: Any) -> bool:
    """Whether a replica died during a call, or it or its engine kept silent.

    Args:
        answer: What the call ended with.
    """
    silent = isinstance(answer, TimeoutError) and not isinstance(answer, SyncError)
    return silent or isinstance(answer, SilentEngineError) or is_dead(answer)


def lost_replicas(answers: Mapping[str, Any]) -> set[str]:
    """Returns the replicas without which an update that broke off is worth another attempt.

    Args:
        answers: Replica id to what it answered, or to the exception that came instead.

    Returns:
        Those that died or were silent, if others failed too, who may have failed for that alone.
        Empty if all the others are well, or if there are no others.
    """
    lost = {name for name, one in answers.items() if is_lost(one)}
    others = [one for name, one in answers.items() if name not in lost]
    return lost if any(isinstance(one, BaseException) for one in others) else set()

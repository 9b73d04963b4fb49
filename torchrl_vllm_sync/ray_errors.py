"""Ray's exceptions by what they say of the actor that was called: gone, away, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray import exceptions
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from ray.exceptions import RayError

# Every call to an actor that the memory monitor killed ends with an ``OutOfMemoryError``, and every
# call to one that could not be created with what prevented it. An answer is lost with its node.
_GONE = (
    RayActorError,
    exceptions.OutOfMemoryError,
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
    exceptions.ObjectLostError,
    exceptions.ActorUnschedulableError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.RuntimeEnvSetupError,
)


def is_gone(error: BaseException) -> bool:
    """Whether a call ended because its actor is dead, or never lived."""
    # What a method itself raised says nothing of its actor: Ray makes a ``RayTaskError`` of it,
    # which is of the cause's class too.
    return isinstance(error, _GONE) and not isinstance(error, RayTaskError | ActorUnavailableError)


def is_away(error: BaseException) -> bool:
    """Whether a call ended because its actor could not be reached; it may be back."""
    return isinstance(error, ActorUnavailableError) and not isinstance(error, RayTaskError)


def loss(replica_id: str, error: RayError) -> ReplicaUnavailableError | None:
    """Says that a call found a replica's actor gone or away; ``None`` if only the call failed."""
    away = is_away(error)
    if not away and not is_gone(error):
        return None
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Ray says at the end why an actor died, behind who it was; elsewhere advice follows.
    why = lines[-1] if isinstance(error, RayActorError) else lines[0]
    reason = f"its actor {'cannot be reached' if away else 'died'}: {why}"
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, reason, may_return=away)

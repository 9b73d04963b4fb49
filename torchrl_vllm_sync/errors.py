"""The library's exceptions: one tree, each class also the standard error it stands for.

Every constructor stores exactly its arguments in ``args``, so that instances survive pickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.replica import ReplicaState

if TYPE_CHECKING:
    from ray.exceptions import RayError


class SyncError(Exception):
    """Base class of every error that this library raises on purpose."""


class InvalidPromptError(SyncError, ValueError):
    """A prompt or batch is empty, ambiguous, of a wrong type or longer than the model's context."""


class UnsupportedArgumentError(SyncError, ValueError):
    """An argument, or a combination, that the installed vLLM or the platform cannot honour."""


class ConfigError(SyncError, ValueError):
    """Settings of a run that are no such, of a wrong type, out of range, or do not go together.

    Attributes:
        problems: What is wrong, by key; nothing was started.
    """

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(f"{key} {why}" for key, why in self.problems.items())


class TokenizerMismatchError(SyncError, ValueError):
    """Two tokenizers mean different tokens by the same ids; nothing was generated.

    Attributes:
        first, second: Whose tokenizers these are, and their names.
        difference: What they disagree on.
    """

    def __init__(self, first: str, second: str, difference: str) -> None:
        super().__init__(first, second, difference)
        self.first, self.second, self.difference = first, second, difference

    def __str__(self) -> str:
        return f"{self.first} is not {self.second}: {self.difference}"


class UncorrectableSamplingError(SyncError, ValueError):
    """Engines would sample what the loss cannot take for what it is; nothing was generated.

    Attributes:
        settings: Name of each setting to its value and what to do about it.
    """

    def __init__(self, settings: dict[str, tuple[Any, str]]) -> None:
        super().__init__(settings)
        self.settings = settings

    def __str__(self) -> str:
        told = "; ".join(f"{name}={value!r}: {do}" for name, (value, do) in self.settings.items())
        return f"{told}. allow={tuple(self.settings)} samples all the same, and says so in the rows"


class UnstampedRowsError(SyncError, KeyError):
    """Rows reached a transform without an entry that ``vLLMWrapper`` stamps on them.

    Attributes:
        transform: Name of the transform's class.
        key: Name of the entry.
        num_missing: Rows without it.
        num_rows: Rows of the batch.
    """

    def __init__(self, transform: str, key: object, num_missing: int, num_rows: int) -> None:
        super().__init__(transform, key, num_missing, num_rows)
        self.transform, self.key = transform, key
        self.num_missing, self.num_rows = num_missing, num_rows

    def __str__(self) -> str:
        return (
            f"{self.transform}: {self.num_missing} of {self.num_rows} rows have no {self.key!r}; "
            "torchrl_vllm_sync.vLLMWrapper stamps it where they are sampled"
        )


class RewardError(SyncError, ValueError):
    """Rewards are missing, not finite, or not one number a row; nothing was stored or queued."""


class AgentError(SyncError, RuntimeError):
    """An agent failed at a problem as often as it may; no row of its batch was handed on.

    Attributes:
        problem: Columns of the data set.
        reasons: Why each attempt failed.
    """

    def __init__(self, problem: dict[str, Any], reasons: list[str]) -> None:
        super().__init__(problem, reasons)
        self.problem, self.reasons = problem, reasons

    def __str__(self) -> str:
        told = "; ".join(f"attempt {at}: {why}" for at, why in enumerate(self.reasons, 1))
        return f"problem {self.problem!r}: {told}"


class RowLayoutError(SyncError, ValueError):
    """Rows are not laid out as columns that belong together; nothing was stored or queued.

    Attributes:
        key, reason: The entry, and what is wrong with it.
    """

    def __init__(self, key: object, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key!r}: {self.reason}"


class UnknownStrategyError(SyncError, ValueError):
    """A routing strategy's name is not registered; the message lists those that are."""


class PlacementError(SyncError, RuntimeError):
    """The Ray cluster cannot hold the requested replicas; says what was asked and what is free."""


class LaunchError(SyncError, RuntimeError):
    """Replicas failed to start; everything that had been started is gone again.

    Attributes:
        failures: Replica id to the reason of its failure.
    """

    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.failures.items())
        return f"launch failed: {reasons}"


class ServerError(SyncError, RuntimeError):
    """Servers of others are away, not what they should be, or cannot do what they were asked.

    Attributes:
        failures: Address of each to what is wrong with it.
    """

    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "; ".join(f"server {address}: {why}" for address, why in self.failures.items())


class ServiceClosedError(SyncError, RuntimeError):
    """The service was shut down, or was never launched."""


class NoReplicaAvailableError(SyncError, RuntimeError):
    """No replica can take a request now; the message names each replica and its state."""


class ReplicaUnavailableError(SyncError, RuntimeError):
    """One replica refused or lost a request: it died, is stale, or is shutting down.

    Attributes:
        replica_id, state, reason: Stable id of the replica, its state, and what is wrong with it.
        may_return: Whether its actor could only not be reached for the moment.
    """

    def __init__(
        self, replica_id: str, state: ReplicaState, reason: str = "", may_return: bool = False
    ) -> None:
        super().__init__(replica_id, state, reason, may_return)
        self.replica_id, self.state, self.reason = replica_id, state, reason
        self.may_return = may_return

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"replica {self.replica_id} is {self.state}{why}"


class GenerationError(SyncError, RuntimeError):
    """One request failed for good.

    Attributes:
        request_id, reason: Id of the request, and the last cause.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id, self.reason = request_id, reason

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"


class RequestLostError(GenerationError, ReplicaUnavailableError):
    """Every replica that was given a request lost it, and no other took it up in time.

    It has the id of the request, and the id and the state of the replica that had it last.

    Attributes:
        request_id: Id of the request.
        attempts: What each replica that had it ended with, in order; at least one.
        why: Why there was no further attempt.
    """

    def __init__(
        self, request_id: str, attempts: tuple[ReplicaUnavailableError, ...], why: str
    ) -> None:
        Exception.__init__(self, request_id, attempts, why)  # the bases have other arguments
        self.request_id, self.attempts, self.why = request_id, attempts, why
        last = attempts[-1]
        self.replica_id, self.state, self.may_return = last.replica_id, last.state, last.may_return
        told = "; ".join(f"attempt {at}: {one}" for at, one in enumerate(attempts, 1))
        self.reason = f"lost by every replica that had it ({told}), {why}"


class GenerationTimeoutError(SyncError, TimeoutError):
    """A request did not finish in time; its work in the engine was ended too."""


class TransferError(SyncError, RuntimeError):
    """A transfer between trainer and engines could not be set up, or broke off."""


class SilentEngineError(SyncError, TimeoutError):
    """An engine did not answer a call in time: it is wedged, or too slow to wait for."""


class TransferNotReadyError(SyncError, RuntimeError):
    """A weight update came out of turn, or to a replica that is pinned, and did nothing."""


class PushUnderWayError(SyncError, RuntimeError):
    """Another trainer is pushing to the service; this push touched nothing and may be repeated.

    Attributes:
        host, pid: Name of the host that the other trainer runs on, and its process id there.
    """

    def __init__(self, host: str, pid: int) -> None:
        super().__init__(host, pid)
        self.host, self.pid = host, pid

    def __str__(self) -> str:
        return (
            f"another trainer is pushing to this service: pid {self.pid} on {self.host}; "
            "push again when it is done"
        )


class WeightMismatchError(SyncError, ValueError):
    """A push does not fit the model, by names, shapes or dtypes; nothing was written or loaded."""


class NonFiniteWeightsError(SyncError, ValueError):
    """A push holds NaN or infinity; nothing was sent.

    Attributes:
        names: The tensors that do.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        return f"weights are not finite: {self.names[0]}, as one of {len(self.names)} tensors"


class DivergedError(SyncError, FloatingPointError):
    """The trained model computes NaN or infinity; no step was made of it."""

    def __str__(self) -> str:
        return "the model computes NaN or infinity, as after optimizer steps that were too large"


class WeightAuditError(SyncError, RuntimeError):
    """Engines serve other weights than the trainer holds.

    Attributes:
        differences: A ``WeightDifference`` for each tensor and worker.
    """

    def __init__(self, differences: Sequence[Any]) -> None:
        super().__init__(differences)
        self.differences = differences

    def __str__(self) -> str:
        told = f"{len(self.differences)} tensors are not the trainer's"
        return f"{told}; the first is {self.differences[0]}"


class WeightSyncError(SyncError, RuntimeError):
    """Some replicas did not reach ``version``; they admit no requests until repaired.

    Attributes:
        version: Policy version of the push.
        failures: Replica id to the reason of its failure.
    """

    def __init__(self, version: int, failures: dict[str, str]) -> None:
        super().__init__(version, failures)
        self.version, self.failures = version, failures

    def __str__(self) -> str:
        reasons = "; ".join(f"replica {name}: {why}" for name, why in self.failures.items())
        return f"version {self.version} did not reach every replica: {reasons}"


class StaleVersionError(SyncError, ValueError):
    """A version is not greater than the last one published or committed."""


class VersionNotReachedError(SyncError, TimeoutError):
    """No replica, or not every one, came to hold a policy version in time.

    Attributes:
        version: The policy version that was waited for.
        held: Replica id to what it holds, in words: its version and state.
        timeout_s: Seconds that were waited.
    """

    def __init__(self, version: int, held: dict[str, str], timeout_s: float) -> None:
        super().__init__(version, held, timeout_s)
        self.version, self.held, self.timeout_s = version, held, timeout_s

    def __str__(self) -> str:
        replicas = "; ".join(f"replica {name} {what}" for name, what in self.held.items())
        return (
            f"version {self.version} was not reached within {self.timeout_s:g} s: "
            f"{replicas or 'there is no replica'}"
        )


class PacingError(SyncError, RuntimeError):
    """Rows were handed on or trained out of order, or are another's; or the pacer's actor died."""


class PacingTimeoutError(PacingError, TimeoutError):
    """What a collector or the trainer of a pacer waited for did not come in time.

    Attributes:
        step: ``"admit"``, ``"turn"``, ``"keep"``, ``"settled"`` or ``"ready"``: what it was.
        timeout_s: Seconds that were waited.
        told: How many rows are admitted and trained, and who holds those that are next.
    """

    def __init__(self, step: str, timeout_s: float, told: str) -> None:
        super().__init__(step, timeout_s, told)
        self.step, self.timeout_s, self.told = step, timeout_s, told

    def __str__(self) -> str:
        what = {"admit": "no rows were admitted", "turn": "the rows' turn did not come"}
        what |= {"settled": "rows on their way did not get there", "ready": "no batch was complete"}
        told = what.get(self.step, "no group was kept")
        return f"{told} within {self.timeout_s:g} s: {self.told}"


class VersionSpanError(SyncError, ValueError):
    """Version spans do not cover their response exactly, or tokens have no version."""


class SnapshotError(SyncError, RuntimeError):
    """A snapshot directory is unusable: unwritable, full, foreign, truncated or corrupted."""


class RunStateError(SyncError, ValueError):
    """A saved run is none, is not whole, or is of another program; nothing was loaded.

    Attributes:
        path: The folder.
        reason: What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class FencedWriterError(SyncError, RuntimeError):
    """Another writer has taken over the snapshot directory; this one may no longer publish."""


__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, one in list(globals().items())
    if isinstance(one, type) and issubclass(one, SyncError)
]


def is_gone(error: BaseException) -> bool:
    """Whether a call of Ray ended because its actor is dead, or never lived."""
    from ray import exceptions

    # Every call to an actor that the memory monitor killed ends with an ``OutOfMemoryError``, and
    # every call to one that could not be created with what prevented it. An answer is lost with its
    # node.
    gone = (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
        exceptions.ObjectLostError,
        exceptions.ActorUnschedulableError,
        exceptions.ActorPlacementGroupRemoved,
        exceptions.RuntimeEnvSetupError,
    )
    # What a method itself raised says nothing of its actor: Ray makes a ``RayTaskError`` of it,
    # which is of the cause's class too.
    not_gone = exceptions.RayTaskError, exceptions.ActorUnavailableError
    return isinstance(error, gone) and not isinstance(error, not_gone)


def is_away(error: BaseException) -> bool:
    """Whether a call of Ray ended because its actor could not be reached; it may be back."""
    from ray.exceptions import ActorUnavailableError, RayTaskError

    return isinstance(error, ActorUnavailableError) and not isinstance(error, RayTaskError)


def loss(replica_id: str, error: RayError) -> ReplicaUnavailableError | None:
    """Says that a call found a replica's actor gone or away; ``None`` if only the call failed."""
    from ray.exceptions import RayActorError

    away = is_away(error)
    if not away and not is_gone(error):
        return None
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Ray says at the end why an actor died, behind who it was; elsewhere advice follows.
    why = lines[-1] if isinstance(error, RayActorError) else lines[0]
    reason = f"its actor {'cannot be reached' if away else 'died'}: {why}"
    return ReplicaUnavailableError(replica_id, ReplicaState.FAILED, reason, may_return=away)

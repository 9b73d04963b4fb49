"""How the bytes of a push go, and what each replica answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torchrl_vllm_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.source import WeightSource

__all__ = ["PushReport", "ReplicaClient", "ReplicaOutcome", "SendOutcome", "WeightTransport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOutcome:
    """What one replica answered to one push.

    Attributes:
        replica_id: Stable id of the replica.
        version: Policy version it holds now; ``None`` when that is not known.
        error: Why it did not reach the version of the push; empty when it did.
        phases: Seconds of wall clock by phase, and counts, as the replica measured them.
    """

    replica_id: str
    version: int | None
    error: str = ""
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """What a transport did with one version.

    Attributes:
        num_bytes: Bytes of all tensors, once.
        phases: Seconds of wall clock by phase on the trainer's side.
        replicas: One answer for each replica of the service.
        run_id: Tells versions of this sender from another's with the same number; ``None`` if the
            transport has no such thing.
    """

    num_bytes: int
    phases: dict[str, float]
    replicas: list[ReplicaOutcome]
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push that reached every replica.

    Attributes:
        version: Policy version committed.
        transport: Name of the transport.
        num_bytes: Bytes of all tensors, once.
        seconds: Wall clock of the whole push.
        phases: Seconds by phase on the trainer's side.
        replicas: What each replica answered.
    """

    version: int
    transport: str
    num_bytes: int
    seconds: float
    phases: dict[str, float]
    replicas: list[ReplicaOutcome]

    @classmethod
    def from_outcome(
        cls, outcome: SendOutcome, *, version: int, transport: str, seconds: float
    ) -> PushReport:
        """Makes the report, or raises for the replicas that were left behind.

        Raises:
            WeightSyncError: At least one replica did not reach ``version``.
        """
        failures = {one.replica_id: one.error for one in outcome.replicas if one.error}
        if failures:
            raise WeightSyncError(version, failures)
        return cls(
            version=version,
            transport=transport,
            num_bytes=outcome.num_bytes,
            seconds=seconds,
            phases=outcome.phases,
            replicas=outcome.replicas,
        )


class ReplicaClient(Protocol):
    """How a transport reaches every replica of a service: one call a push, all at once."""

    @property
    def service_name(self) -> str:
        """Name of the service, unique on the cluster."""
        ...

    def call_replicas(
        self, method: str, *args: Any, deadline_s: float, **kwargs: Any
    ) -> dict[str, Any]:
        """Calls an engine actor's method on every replica and waits ``deadline_s`` for them.

        Returns:
            Replica id to the answer, or to the exception with which the call ended.
        """
        ...


class WeightTransport(Protocol):
    """Moves whole versions of the weights from the trainer into every replica.

    Lifecycle: constructed, ``open`` once, ``send`` any number of times, ``close``. Opening again
    after ``close`` is allowed.
    """

    name: str

    @property
    def last_version(self) -> int:
        """Newest version that it holds already, from an earlier process too; 0 if none."""
        ...

    def open(self, client: ReplicaClient) -> None:
        """Prepares to send to the replicas behind ``client``; does nothing when open already."""
        ...

    def send(
        self,
        client: ReplicaClient,
        source: WeightSource,
        version: int,
        *,
        timeout_s: float,
        clear_cache: bool,
    ) -> SendOutcome:
        """Sends ``source`` as ``version`` to every replica and waits for each one's answer.

        Sending the same version again brings along only the replicas that do not hold it.

        Args:
            client: The replicas.
            source: Complete and fitting the engines' model.
            version: Policy version of these tensors.
            timeout_s: Seconds after which a silent replica counts as failed.
            clear_cache: Recompute keys and values of requests in flight.
        """
        ...

    def close(self) -> None:
        """Releases whatever ``open`` took; idempotent."""
        ...

"""How the bytes of a push go, and what each replica answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.weights.source import WeightSource

__all__ = [
    "PauseMode",
    "PendingCalls",
    "PushReport",
    "ReplicaClient",
    "ReplicaOutcome",
    "SendOutcome",
    "WeightTransport",
    "check_transport",
]

# What becomes of requests in flight: they freeze and go on, are waited for, or end as they are.
PauseMode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOutcome:
    """What one replica answered to one push.

    Attributes:
        replica_id: Stable id of the replica.
        version: Policy version it holds now; ``None`` when that is not known.
        error: Why it did not reach the version of the push; empty when it did.
        phases: Seconds of wall clock by phase, and counts, as the replica measured them.
        path: How the weights got into its model: ``plan`` or ``layerwise``; empty when nothing was
            loaded.
        path_reason: Why it was not the plan; empty when it was, or when none was asked for.
    """

    replica_id: str
    version: int | None
    error: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    path: str = ""
    path_reason: str = ""

    @classmethod
    def of(cls, replica_id: str, answer: Any) -> ReplicaOutcome:  # noqa: ANN401  a report, or an error
        """Makes it from what a call to the replica ended with.

        Args:
            replica_id: The replica.
            answer: A ``LoadReport`` as a dictionary, or the exception that came instead.
        """
        if isinstance(answer, BaseException):
            why = str(answer) or type(answer).__name__
            return cls(replica_id=replica_id, version=None, error=why)
        words = ("version", "path", "path_reason")
        return cls(
            replica_id=replica_id,
            version=answer["version"],
            phases={name: float(value) for name, value in answer.items() if name not in words},
            path=answer.get("path", ""),
            path_reason=answer.get("path_reason", ""),
        )


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

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of the weights by the seconds of the whole push, in 10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9

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


class PendingCalls(Protocol):
    """One call to every replica, under way."""

    def failures(self) -> dict[str, BaseException]:
        """Returns those that have ended with an exception by now, without waiting."""
        ...

    def answers(self, deadline_s: float) -> dict[str, Any]:
        """Waits for all; see :meth:`ReplicaClient.call_replicas`."""
        ...


class ReplicaClient(Protocol):
    """How a transport reaches every replica of a service: one call a push, all at once."""

    @property
    def service_name(self) -> str:
        """Name of the service, unique on the cluster."""
        ...

    @property
    def rendezvous(self) -> tuple[str, int | None]:
        """This host's address as the replicas reach it, and a port if one was asked for."""
        ...

    def start_calls(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **kwargs: Any
    ) -> PendingCalls:
        """Calls an engine actor's method on some replicas and does not wait.

        Args:
            method: Name of the method.
            calls: Replica id to positional arguments.
            **kwargs: Keyword arguments for all of them.
        """
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
        mode: PauseMode = "keep",
    ) -> SendOutcome:
        """Sends ``source`` as ``version`` to every replica and waits for each one's answer.

        Sending the same version again brings along only the replicas that do not hold it.

        Args:
            client: The replicas.
            source: Complete and fitting the engines' model.
            version: Policy version of these tensors.
            timeout_s: Seconds after which a silent replica counts as failed.
            clear_cache: Recompute keys and values of requests in flight.
            mode: What becomes of requests in flight.
        """
        ...

    def close(self) -> None:
        """Releases whatever ``open`` took; idempotent."""
        ...


def check_transport(transport: object) -> None:
    """Refuses what cannot be sent through, before it takes the place of what can.

    Raises:
        UnsupportedArgumentError: It has not the methods of a ``WeightTransport``; its name is none.
    """
    methods = [getattr(transport, one, None) for one in ("open", "send", "close")]
    if isinstance(transport, type) or not all(map(callable, methods)):
        raise UnsupportedArgumentError(f"transport must be a WeightTransport, got {transport!r}")

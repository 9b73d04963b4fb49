"""One push: reconcile, send, acknowledge, commit; and the ledger of who holds which version."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, get_args

from torchrl_vllm_sync.errors import StaleVersionError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.versions import MAX_VERSION
from torchrl_vllm_sync.weights.auto_transport import AutoTransport
from torchrl_vllm_sync.weights.memmap_transport import MemmapTransport
from torchrl_vllm_sync.weights.sharded import leading
from torchrl_vllm_sync.weights.source import as_weight_source, fit_to_model
from torchrl_vllm_sync.weights.transport import PauseMode, PushReport, check_transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import ReplicaClient, SendOutcome, WeightTransport

__all__ = ["VersionLedger", "WeightPusher"]

STOCK_TIMEOUT_S = 30.0
HOLD_BACK_TIMEOUT_S = 5.0


class VersionLedger:
    """Which version each replica last acknowledged, and which one all of them do.

    A version is committed once every replica holds it; a push that fails commits nothing.

    Attributes:
        committed: Newest version that every replica acknowledged; 0 is what engines launch with.
        held: What each replica last acknowledged; ``None`` after a failed update.
        seen: Newest version that any replica was at, one that is stale now too.
    """

    def __init__(self) -> None:
        self.committed = self.seen = 0
        self.held: dict[str, int | None] = {}

    @property
    def newest(self) -> int:
        """Newest version that any replica acknowledged."""
        return max(
            [self.committed, self.seen, *(one for one in self.held.values() if one is not None)]
        )

    def record(self, outcome: SendOutcome, version: int) -> bool:
        """Notes each replica's answer, and commits ``version`` if all of them hold it.

        Returns:
            Whether that is news: it was not committed before.
        """
        for one in outcome.replicas:
            self.held[one.replica_id] = one.version
        if any(one.error for one in outcome.replicas) or version <= self.committed:
            return False
        self.committed = version
        return True


class WeightPusher:
    """Pushes a trainer's weights to a service's replicas, one push at a time.

    Args:
        client: The replicas.
        expected: Returns the tensors that the engines' model consists of.
        on_commit: Called with the report of each push that commits a new version, in the thread
            that pushes, when the next push may begin.
    """

    def __init__(
        self,
        client: ReplicaClient,
        expected: Callable[[], list[ParamMeta]],
        on_commit: Callable[[PushReport], None] | None = None,
    ) -> None:
        self._on_commit = on_commit
        self._ledger: VersionLedger | None = None
        self._attempted = self._committed = 0
        self._client, self._expected = client, expected
        self._transport: WeightTransport | None = None
        self._lock = threading.Lock()

    @property
    def committed(self) -> int:
        """Newest version that this process brought every replica to; 0 before its first push."""
        return self._ledger.committed if self._ledger else self._committed

    @property
    def transport(self) -> WeightTransport:
        """The transport that pushes use: what was chosen for the first one, unless it was told."""
        transport = self._used()
        chosen = transport.chosen if isinstance(transport, AutoTransport) else None
        return chosen or transport

    def _used(self) -> WeightTransport:
        if self._transport is None:
            self._transport = AutoTransport()
        return self._transport

    def use(self, transport: WeightTransport) -> None:
        """Makes ``transport`` the one that pushes use; closes the one before.

        Raises:
            UnsupportedArgumentError: It is no transport.
        """
        check_transport(transport)
        with self._lock:
            if self._transport is not None and self._transport is not transport:
                self._transport.close()
            self._transport = transport

    def open(self) -> None:
        """Opens the transport; does nothing when it is open."""
        with self._lock:
            self._used().open(self._client)

    def step_aside(self) -> None:
        """Closes a transport that meets the engines in a group, which others are about to use."""
        with self._lock:
            if self._transport is not None and not isinstance(self.transport, MemmapTransport):
                self._transport.close()

    def look_again(self) -> None:
        """Asks the replicas what they hold before the next push: others have changed it."""
        with self._lock:
            self._committed, self._ledger = self.committed, None

    def push(
        self,
        weights: Any,  # noqa: ANN401  every form that ``as_weight_source`` takes
        *,
        version: int | None,
        timeout_s: float,
        clear_cache: bool,
        mode: PauseMode = "keep",
    ) -> PushReport:
        """Brings every replica to ``version``.

        Args:
            weights: See :func:`as_weight_source`.
            version: Policy version of these weights; by default one more than the newest. A
                version that was sent before is not sent again: the replicas that missed it get it.
            timeout_s: Seconds after which a silent replica counts as failed.
            clear_cache: Recompute keys and values of requests in flight.
            mode: What becomes of requests in flight.

        Returns:
            The report of a push that every replica acknowledged.

        Raises:
            UnsupportedArgumentError: ``version`` or ``timeout_s`` is no such number, or there is
                no such ``mode``.
            WeightMismatchError: ``weights`` do not fit the engines' model. Nothing was sent.
            StaleVersionError: ``version`` is older than the newest. Nothing was sent.
            SnapshotError: The transport could not store the weights. Replicas are as they were.
            TransferError: The transport could not reach the replicas. They are as they were.
            WeightSyncError: Some replicas did not reach ``version``; they take no requests until
                they do. Pushing the same version again is safe. If none reached it, those that are
                whole go on with what they hold.
            TrainerRankError: The weights are sharded, and a rank that holds some failed.
        """
        begin = time.perf_counter()
        source = as_weight_source(weights)
        with leading(source) as announcement:
            _check_arguments(version, timeout_s, mode)
            with self._lock:
                outcome, chosen, is_news = self._send(
                    source, version, timeout_s=timeout_s, clear_cache=clear_cache, mode=mode
                )
                transport = self.transport.name
            report = announcement.outcome = PushReport.from_outcome(
                outcome, version=chosen, transport=transport, seconds=time.perf_counter() - begin
            )
        if is_news and self._on_commit is not None:
            self._on_commit(report)
        return report

    def _send(
        self, source: WeightSource, version: int | None, **options: Any
    ) -> tuple[SendOutcome, int, bool]:
        """Sends once, or twice if another process was quicker.

        Returns:
            The outcome, the version chosen, and whether that was committed now.
        """
        source = fit_to_model(source, self._expected())
        transport = self.transport
        transport.open(self._client)
        for last_try in (version is not None, True):
            ledger = self._ledger = self._ledger or self._take_stock()
            chosen = self._choose(version, ledger, transport)
            self._attempted = max(self._attempted, chosen)
            outcome = transport.send(self._client, source, chosen, **options)
            is_news = ledger.record(outcome, chosen)
            if not any(one.error for one in outcome.replicas):
                break
            self._settle(ledger, outcome, chosen)
            if last_try or not self._was_overtaken(outcome, chosen):
                break
        return outcome, chosen, is_news

    def _choose(
        self, version: int | None, ledger: VersionLedger, transport: WeightTransport
    ) -> int:
        """Returns the version to send.

        Raises:
            StaleVersionError: ``version`` is older than the newest.
        """
        if version is None:
            # A version that failed everywhere may be stored already: its number is used up.
            return max(ledger.newest, self._attempted, transport.last_version) + 1
        if version < max(ledger.newest, 1):
            raise StaleVersionError(
                f"version must be at least {max(ledger.newest, 1)}, got {version}"
            )
        return version

    def _was_overtaken(self, outcome: SendOutcome, version: int) -> bool:
        """Whether nobody took ``version`` because another process pushed as many in between."""
        if not all(one.error for one in outcome.replicas):
            return False
        self._ledger = self._take_stock()
        return self._ledger.newest >= version

    def _settle(self, ledger: VersionLedger, outcome: SendOutcome, version: int) -> None:
        """After a push that failed: whoever was left behind takes no requests until repaired.

        If nobody reached ``version``, the replicas that are whole go on serving what they hold.
        """
        if any(not one.error for one in outcome.replicas):
            self._client.call_replicas(
                "hold_back", version, outcome.run_id, deadline_s=HOLD_BACK_TIMEOUT_S
            )
        self._committed = ledger.committed
        self._ledger = None  # the next push asks anew what the replicas hold

    def _take_stock(self) -> VersionLedger:
        """Asks the replicas what they hold: before the first push, and after one that failed."""
        reports = self._client.call_replicas("report", deadline_s=STOCK_TIMEOUT_S)
        ledger = VersionLedger()
        for replica_id, report in reports.items():
            whole = isinstance(report, EngineReport) and report.state.admits_requests
            ledger.held[replica_id] = report.weight_version if whole else None
            if isinstance(report, EngineReport):
                ledger.seen = max(ledger.seen, report.weight_version or 0)
        versions = [-1 if one is None else one for one in ledger.held.values()]
        ledger.committed = self._committed = max(self._committed, min(versions, default=0))
        return ledger

    def close(self) -> None:
        """Closes the transport; idempotent."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()


def _check_arguments(version: int | None, timeout_s: float, mode: PauseMode) -> None:
    """Refuses arguments of a push.

    Raises:
        UnsupportedArgumentError: One is not valid; the message names it.
    """
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise UnsupportedArgumentError(f"version must be an integer or None, got {version!r}")
    if version is not None and version > MAX_VERSION:
        raise UnsupportedArgumentError(f"version must be at most {MAX_VERSION}, got {version}")
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise UnsupportedArgumentError(
            f"timeout_s must be a finite number greater than 0, got {timeout_s!r}"
        )
    if mode not in get_args(PauseMode):
        raise UnsupportedArgumentError(f"mode must be one of {get_args(PauseMode)}, got {mode!r}")

"""Metrics of a service for Prometheus, through Ray."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.metrics import MetricsExporter, metrics_port
from torchrl_vllm_sync.requests.generation import REQUEST_ENDS
from torchrl_vllm_sync.service_status import ServiceView

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.requests.generation import Generation

__all__ = ["ServiceMetrics"]

logger = logging.getLogger(__name__)


class ServiceMetrics(ServiceView):
    """The part of a service that others measure."""

    _generation: Generation | None
    _exporter: MetricsExporter | None = None

    def export_metrics(self, interval_s: float = 5.0) -> MetricsExporter:
        """Exports this service's metrics through Ray, until it ends or the exporter is stopped.

        They are in what Prometheus scrapes of this node, which needs ``ray[default]``;
        ``tutorials/guides/metrics.md`` lists them.

        Args:
            interval_s: Seconds from one export to the next, greater than 0.

        Returns:
            What exports them. Its ``stop()`` ends that.

        Raises:
            UnsupportedArgumentError: They are exported already, or ``interval_s`` is no such
                number.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        if self._exporter is not None and self._exporter.is_running:
            raise UnsupportedArgumentError(
                f"the metrics of service {self.name} are exported by this process already"
            )
        self._exporter = MetricsExporter(self, interval_s=interval_s)
        if not metrics_port():
            logger.warning(
                "Ray serves no metrics on this node, and nothing can be scraped: ray[default] must "
                "be installed where Ray is started"
            )
        return self._exporter

    def request_totals(self) -> dict[str, int]:
        """Returns how many requests of this process have ended, by how they did.

        The ends are ``"answered"``, ``"lost"`` (by a ``RequestLostError``), ``"failed"`` and
        ``"cancelled"``, which streams that are not read to their end are too.
        """
        if self._generation is None:
            return dict.fromkeys(REQUEST_ENDS, 0)
        return self._generation.counts.totals()

    def listen_to_pushes(self, listener: Callable[[PushStatus], object]) -> Callable[[], None]:
        """Has ``listener`` called with each push of this process that ends, well or not.

        It is called in the thread that pushes, before ``push_weights`` returns, and must not raise.

        Args:
            listener: Called with what became of the push.

        Returns:
            A function that ends this; calling it twice does nothing.
        """
        return self._log.listen(listener)

    def _end_metrics(self) -> None:
        """Exports nothing any more; idempotent."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.stop()

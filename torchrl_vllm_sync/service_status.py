"""Looking at a service: what it is and does now."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torchrl_vllm_sync.observe.page import Dashboard, ServiceGoneError
from torchrl_vllm_sync.observe.status import collect_status
from torchrl_vllm_sync.observe.views import absent_html, status_html
from torchrl_vllm_sync.service_versions import ServiceVersions

if TYPE_CHECKING:
    from torchrl_vllm_sync.observe.status import ServiceStatus

__all__ = ["ServiceView"]


class ServiceView(ServiceVersions):
    """The part of a service that shows what it is and does."""

    _dashboards: list[Dashboard]

    def status(self) -> ServiceStatus:
        """Returns what this process knows of the service now.

        Asks nobody, but for the first time in a pickled or attached copy: figures of the engines
        are those of their last reports, which come once a second.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        snapshots = self._known()
        membership = self._membership
        return collect_status(
            self.name,
            self.weight_version,
            self.load.total_in_flight,
            snapshots,
            [] if membership is None else membership.members,
            self._log,
            self.load.clock(),
        )

    def dashboard(self, port: int = 0, host: str = "127.0.0.1") -> Dashboard:
        """Serves a page that shows the service as it runs; see ``Dashboard``.

        It works for copies and attached services too. It ends with this process's handle on the
        service: with :meth:`shutdown`, with ``with``, or when nobody has the handle any more.

        Args:
            port: Port to listen on; 0 takes a free one.
            host: Name or address to listen on. Other than the loopback address it can be read by
                everybody who reaches this machine.

        Returns:
            The dashboard, which serves already. Its ``url`` is the page's address.

        Raises:
            UnsupportedArgumentError: There is no such host or port, or it is taken.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        me: weakref.ref[ServiceView] = weakref.ref(self)

        def look() -> ServiceStatus:
            service = me()
            if service is None:
                raise ServiceGoneError("the service is gone")
            return service.status()

        board = Dashboard(look, host=host, port=port)
        self._dashboards = [*(one for one in self._dashboards if one.is_open), board]
        return board

    def _close_dashboards(self) -> None:
        """Ends those that are still open; idempotent."""
        boards, self._dashboards = self._dashboards, []
        for board in boards:
            board.close()

    def _repr_html_(self) -> str:
        """What a notebook shows: the replicas as they are at this moment."""
        return status_html(self.status()) if self._launched else absent_html(self.name)

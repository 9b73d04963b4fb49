"""Looking at a service: what it is and does now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_vllm_sync.service_versions import ServiceVersions
from torchrl_vllm_sync.status import collect_status

if TYPE_CHECKING:
    from torchrl_vllm_sync.status import ServiceStatus

__all__ = ["ServiceView"]


class ServiceView(ServiceVersions):
    """The part of a service that shows what it is and does."""

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

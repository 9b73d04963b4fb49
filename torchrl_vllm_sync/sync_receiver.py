"""The engines' end of a weight sync scheme: says what arrived, or has what is stored loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.collector_versions import CollectorVersions
from torchrl_vllm_sync.errors import (
    SyncError,
    UnsupportedArgumentError,
    VersionNotReachedError,
    WeightSyncError,
)
from torchrl_vllm_sync.service import AsyncVLLM
from torchrl_vllm_sync.sync_sender import check_metadata, find_service

if TYPE_CHECKING:
    from torchrl_vllm_sync.sync_sender import DirectorySettings, ModelMetadata, SenderSettings
    from torchrl_vllm_sync.weights.transport import PushReport

__all__ = ["ReceiverTransport", "VLLMDoubleBufferWeightReceiver", "VLLMWeightReceiver"]

# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0


class VLLMWeightReceiver:
    """Tells when pushes have reached a service; ``scheme.create_receiver(service)`` makes it.

    The sender's push brings the weights into the engines, so there is nothing to fetch here.

    Args:
        scheme: The scheme.
        vllm_engine: The service, or a ``vllm.LLM`` of this process.

    Raises:
        UnsupportedArgumentError: It is neither, or its replicas are not what the scheme is for.
    """

    def __init__(self, scheme: SenderSettings, vllm_engine: Any) -> None:
        self._scheme = scheme
        self.service = find_service(vllm_engine)
        scheme.check_service(self.service)
        self._versions = CollectorVersions()
        self._seen = self.service.weight_version

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Checks what will be sent; the sender's call of this name brings both ends together.

        Raises:
            WeightMismatchError: The metadata do not fit the engines' model.
        """
        check_metadata(model_metadata, self.service)

    def register_collector(self, collector: Any) -> None:
        """Brings ``collector`` to the service's version now, and at each poll that finds news.

        Raises:
            UnsupportedArgumentError: It is none of TorchRL's collectors.
        """
        self._versions.register(collector, self.service.weight_version)
        self._versions.follow(self.service)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Says whether a push has been committed since the last poll that said so.

        Args:
            timeout: Seconds to wait for one.

        Returns:
            ``True`` if the replicas hold a newer version than when this last said ``True``, or than
            when the receiver was made. Pushes of other processes count too.

        Raises:
            ServiceClosedError: The service was shut down.
        """
        if isinstance(self.service, AsyncVLLM):
            try:
                version = self.service.wait_for_version(self._seen + 1, timeout_s=timeout)
            except VersionNotReachedError:
                return False
        elif (version := self.service.weight_version) <= self._seen:
            return False  # an LLM of this process: nobody pushes while this waits
        self._seen = version
        self._versions.announce(version)
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> PushReport:
        """Pushes ``weights`` from this process, as a version of their own.

        Args:
            weights: What ``AsyncVLLM.push_weights`` takes.
            inplace: Must be ``True``.

        Raises:
            UnsupportedArgumentError: ``inplace`` is ``False``.
            WeightMismatchError: They do not fit the engines' model; nothing was sent.
            WeightSyncError: Some replicas did not reach the version.
        """
        if not inplace:
            raise UnsupportedArgumentError("inplace must be True: engines load into their own")
        report = self.service.push_weights(weights, **self._scheme.push_options)
        self._seen = report.version
        self._versions.announce(report.version)
        return report


class VLLMDoubleBufferWeightReceiver(VLLMWeightReceiver):
    """Has a service load what a directory holds; ``scheme.create_receiver(service)`` makes it.

    Args:
        scheme: The scheme; its ``local_addr`` is read.
        vllm_engine: The service, or a ``vllm.LLM`` of this process.
    """

    _scheme: DirectorySettings

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Has every replica load the newest version that the directory holds.

        Args:
            timeout: Seconds for the loads; there is no waiting for a version.

        Returns:
            Whether a replica loaded something. ``False`` if all hold the newest version, or none
            was stored yet.

        Raises:
            UnsupportedArgumentError: ``timeout`` is no time.
            SnapshotError: What is stored is damaged. The engines are as they were.
            WeightMismatchError: What is stored does not fit the engines' model. They are as they
                were.
            StaleVersionError: Another run brought the engines further than what is stored.
            WeightSyncError: Some replicas did not load it, and take no requests until they do.
        """
        if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
            raise UnsupportedArgumentError(
                f"timeout must be a finite number greater than 0, got {timeout!r}"
            )
        answers = self.service.call_replicas(
            "load_snapshot",
            self._scheme.local_addr,
            None,
            at_least=0,
            compare=True,
            timeout_s=timeout,
            deadline_s=timeout + GRACE_S,
            clear_cache=self._scheme.push_options["clear_cache"],
            mode=self._scheme.push_options["mode"],
        )
        if isinstance(self.service, AsyncVLLM):
            self.service.learn_versions()
        failures = [one for one in answers.values() if isinstance(one, BaseException)]
        loaded = [one for one in answers.values() if isinstance(one, dict) and one["loaded"]]
        if failures and len(failures) == len(answers) and isinstance(failures[0], SyncError):
            raise failures[0]
        if failures:
            reasons = {
                name: str(one) for name, one in answers.items() if isinstance(one, BaseException)
            }
            held = [one["version"] for one in answers.values() if isinstance(one, dict)]
            raise WeightSyncError(max(held, default=self._seen), reasons)
        if loaded:
            self._seen = max(one["version"] for one in loaded)
            self._versions.announce(self._seen)
        return bool(loaded)


class ReceiverTransport:
    """What TorchRL receives through: a receiver, behind its ``TransportBackend`` interface."""

    def __init__(self, receiver: VLLMWeightReceiver) -> None:
        self._receiver = receiver

    def send_weights(self, weights: Any) -> None:
        """Pushes from this end."""
        self._receiver.apply_weights(weights)

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Polls once; there are no weights to hand over, since the engines hold them."""
        del kwargs
        self._receiver.poll_and_apply(*([] if timeout is None else [timeout]))

    def setup_connection_and_weights_on_receiver(self, **kwargs: Any) -> None:
        """Receives nothing: the engines hold what they were launched with, or were sent since."""

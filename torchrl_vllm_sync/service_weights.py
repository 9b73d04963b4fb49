"""The weights side of a service: pushes, versions, and what a push must hold."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
import ray.util
import torch

from torchrl_vllm_sync.engine.args import num_workers
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.status import failed_push, finished_push
from torchrl_vllm_sync.service_versions import ServiceVersions
from torchrl_vllm_sync.weights.metadata import from_json
from torchrl_vllm_sync.weights.rendezvous import free_port

if TYPE_CHECKING:
    import os

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.transport import PauseMode, PushReport, WeightTransport

__all__ = ["ServiceWeights"]

DEFAULT_PUSH_TIMEOUT_S = 300.0


class ServiceWeights(ServiceVersions):
    """The part of a service that takes weights.

    Attributes:
        engine_args: The arguments that the replicas run with.
    """

    engine_args: AsyncEngineArgs
    _metadata: list[ParamMeta] | None
    _rendezvous: tuple[str, int] | None

    def push_weights(
        self,
        weights: Any,
        *,
        version: int | None = None,
        transport: WeightTransport | None = None,
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
    ) -> PushReport:
        """Brings every replica to new weights, keeping requests in flight.

        Args:
            weights: A module, a state dict, a TensorDict, a ``WeightSource``, or an iterable of
                ``(name, tensor)``.
            version: Policy version; by default one more than the newest. One version names the same
                weights each time: repeating the last one is a retry, and where it is held already
                some transports load nothing. What another process pushed is not known here.
            transport: How to send from now on; memmap in shared memory to begin with.
            timeout_s: Seconds after which a silent replica counts as failed, in each attempt: when
                some die or fall silent, the others get everything once more. By default 30 s and
                three times the median of pushes like this one, and 300 s for the first.
            clear_cache: Recompute keys and values of requests in flight under the new weights.
                Only then do their next tokens equal those of a fresh engine.
            mode: What becomes of requests in flight: ``"keep"`` freezes them until the new weights
                are in, ``"wait"`` lets them finish first, ``"abort"`` returns them as they are.
            strict: Raise if any replica is left behind, and commit nothing. Otherwise the version
                is committed once one replica holds it, and the report's ``left_behind`` names the
                others. ``None`` is strict where the service restarts no replicas.

        Returns:
            What was sent, how long each phase took, and what each replica answered.

        Raises:
            UnsupportedArgumentError: ``version`` or ``timeout_s`` is no such number, ``strict`` is
                no bool, or there is no such ``mode``.
            WeightMismatchError: The weights do not fit the model; nothing was sent.
            StaleVersionError: ``version`` is older than the newest, or this process pushed other
                weights under it; see ``WeightPusher.push``. Nothing was sent.
            PushUnderWayError: Another trainer is pushing; nothing was sent.
            SnapshotError: The memmap transport could not store the weights; nothing was loaded.
            WeightSyncError: No replica reached the version, or with ``strict`` some did not; these
                take no requests until they do. Pushing the same version again is safe. If none
                reached it, those that are whole go on with what they hold.
        """
        self._require_launched()
        if transport is not None:
            self._pusher.use(transport)
        reports: list[PushReport] = []
        pushed: PushStatus | None = None
        begin = time.perf_counter()
        try:
            return self._pusher.push(
                weights,
                version=version,
                timeout_s=timeout_s,
                clear_cache=clear_cache,
                mode=mode,
                strict=strict,
                on_report=reports.append,
            )
        except Exception as error:
            pushed = failed_push(error, version, time.perf_counter() - begin, time.time())
            raise
        finally:
            if reports:  # committed, even if a hook has failed
                pushed = finished_push(reports[0], time.time())
            if pushed is not None:
                self._log.end_push(pushed)
            if self._launched:
                self._learn_states(pushed.left_behind if pushed else (), pushed)

    def learn_versions(self) -> None:
        """Asks the replicas what they hold, after something other than a push brought them there.

        This process's versions and states are up to date then, without waiting for the next look.
        """
        self._pusher.look_again()
        self._learn_states()
        self._version_hooks.moved(self.weight_version)

    def follow_snapshots(
        self,
        directory: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        interval_s: float = 1.0,
        timeout_s: float = DEFAULT_PUSH_TIMEOUT_S,
        verify: bool = True,
    ) -> None:
        """Has every replica load new versions of a snapshot directory on its own, as they appear.

        For a trainer that only writes, with ``SnapshotWriter``, and knows nothing of the service.
        Each replica applies each version at most once and skips those it was too late for, so
        that replicas may differ for a moment; outputs say which version sampled them. Following
        another directory ends following the one before.

        Args:
            directory: Visible to every replica's node; it need not exist yet.
            run_id: Load snapshots of this training run only; ``None`` loads those of any.
            interval_s: Seconds between looks, greater than 0.
            timeout_s: Seconds for each load.
            verify: Check the stored checksums before each load.

        Raises:
            UnsupportedArgumentError: ``interval_s`` is not greater than 0.
        """
        if not interval_s > 0:
            raise UnsupportedArgumentError(f"interval_s must be greater than 0, got {interval_s}")
        answers = self.call_replicas(
            "follow_snapshots",
            str(directory),
            run_id,
            interval_s=interval_s,
            timeout_s=timeout_s,
            verify=verify,
        )
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer

    def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self._call_all("stop_following")

    def use_transport(self, transport: WeightTransport) -> None:
        """Makes ``transport`` the one that pushes use, and closes the one before.

        Args:
            transport: What to send through.

        Raises:
            UnsupportedArgumentError: It has not the methods of a ``WeightTransport``.
        """
        self._pusher.use(transport)

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | str | None = None
    ) -> None:
        """Opens the transport that pushes use; TorchRL's name for it.

        Args:
            master_address: Address at which the trainer is reached; found when ``None``.
            master_port: Port of the rendezvous; found when ``None``.
        """
        self._require_launched()
        if master_address is not None or master_port is not None:
            address, port = self._rendezvous_point()
            self._rendezvous = (
                address if master_address is None else master_address,
                port if master_port is None else int(master_port),
            )
        self._pusher.open()

    def update_weights(self, weights: Any) -> None:
        """Replaces the weights on all replicas; TorchRL's and vLLM's name for it.

        Args:
            weights: An iterator of ``(name, tensor)`` or whatever :meth:`push_weights` takes.
                vLLM's own ``WeightTransferUpdateRequest``, or a mapping with ``update_info``, goes
                to the engines' native transfer instead.

        Raises:
            WeightMismatchError: See :meth:`push_weights`.
            WeightSyncError: See :meth:`push_weights`.
        """
        native = isinstance(weights, dict) and "update_info" in weights
        if native or type(weights).__name__ == "WeightTransferUpdateRequest":
            self._call_all("update_weights", weights)
            return
        self.push_weights(weights)

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns name to dtype and full shape of each tensor that a push must hold.

        Names are those of the loaded model's checkpoint; a tied output head is left out.
        """
        return {
            meta.name: (meta.dtype, torch.Size(meta.shape)) for meta in self._expected_weights()
        }

    def _expected_weights(self) -> list[ParamMeta]:
        if self._metadata is None:
            answers = list(self.call_replicas("model_metadata").values())
            good = [one for one in answers if not isinstance(one, BaseException)]
            if not good:
                raise answers[0]
            self._metadata = from_json(good[0])
        return self._metadata

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of a replica."""
        return self.engine_args.tensor_parallel_size

    def get_world_size(self) -> int:
        """Returns the number of vLLM workers of all replicas together."""
        return len(self.replicas) * num_workers(self.engine_args)

    def get_master_address(self) -> str:
        """Returns this node's address, as the other nodes of the Ray cluster reach it."""
        return self._rendezvous_point()[0]

    def get_master_port(self) -> int:
        """Returns a port that was free on this node when first asked for; the same ever after."""
        return self._rendezvous_point()[1]

    @property
    def rendezvous(self) -> tuple[str, int | None]:
        """This node's address, where transports meet the engines, and a port if one was named."""
        if self._rendezvous is None:
            return ray.util.get_node_ip_address(), None
        return self._rendezvous

    def _rendezvous_point(self) -> tuple[str, int]:
        if self._rendezvous is None:
            address = ray.util.get_node_ip_address()
            self._rendezvous = address, free_port(address)
        return self._rendezvous

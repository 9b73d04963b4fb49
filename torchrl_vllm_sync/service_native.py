"""vLLM's own RL calls on a service: the same names, for all replicas at once.

The service also is a ``VLLMWeightSyncClient``, the object that vLLM's trainer-side engines drive
(``vllm/distributed/weight_transfer/base.py``, 0.26 to 0.32).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync.engine.args import num_workers
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service_weights import ServiceWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.weights.transport import PauseMode

__all__ = ["ServiceNative"]

DEFAULT_TIMEOUT_S = 300.0
# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0


class ServiceNative(ServiceWeights):
    """The part of a service that passes vLLM's own weight-transfer, pause and sleep calls on.

    Each call goes to every replica at once and returns when all have answered; the first failure
    is raised then. Calls out of turn raise ``TransferNotReadyError`` and do nothing.

    Example:
        >>> service.init_weight_transfer_engine({"init_info": {...}})  # and the trainer's own end
        >>> service.pause_generation(mode="keep", clear_cache=False)
        >>> service.start_weight_update()
        >>> service.update_weights({"update_info": {...}})  # while the trainer sends
        >>> service.finish_weight_update(weight_version="5")
        >>> service.resume_generation()
    """

    def init_weight_transfer_engine(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Initialises the transfer engine of every replica; blocks until the trainer has come.

        Where the payload has a ``rank_offset`` each replica gets its own: the given one, plus the
        workers of the replicas before it. ``world_size`` must be the trainer's ranks and
        :meth:`get_world_size`.

        Args:
            request: vLLM's ``WeightTransferInitRequest``, or a mapping: its ``init_info``, or the
                fields of that.
            timeout_s: Seconds to wait for the replicas' answers.

        Raises:
            UnsupportedArgumentError: ``world_size`` has no room for every worker, or ``request``
                is nothing of the above.
            TransferNotReadyError: A weight update is open.
            TransferError: A replica could not: fields that do not fit, a peer that did not come.
        """
        info = _payload(request, "init_info")
        if not isinstance(info, dict):
            raise UnsupportedArgumentError(f"init_info must be a mapping, got {info!r}")
        workers = num_workers(self.engine_args)
        offset, world_size = info.get("rank_offset"), info.get("world_size")
        own: dict[str, tuple[Any, ...]] = {}
        for index, one in enumerate(self._require_replicas()):
            ranks = {} if offset is None else {"rank_offset": offset + index * workers}
            own[one.replica_id] = ({**info, **ranks},)
        if offset is not None and world_size is not None:
            needed = offset + len(own) * workers
            if world_size < needed:
                raise UnsupportedArgumentError(
                    f"world_size must be at least {needed}, for {offset} trainer rank(s) and "
                    f"{len(own) * workers} workers, got {world_size}"
                )
        self._pusher.step_aside()
        self._natively("init_weight_transfer_engine", own, timeout_s)

    def shutdown_weight_transfer_engine(self) -> None:
        """Has every replica leave the trainer's group, and give an open update up.

        :meth:`init_weight_transfer_engine` sets it up again. A replica that had received part of
        an update is stale until a later update succeeds.

        Raises:
            TransferNotReadyError: A transfer is under way.
        """
        self._natively("shutdown_weight_transfer_engine")
        self._learn_states()

    def use_transfer_engine(self, backend: str | None = None) -> None:
        """Has every worker use another of vLLM's transfer engines, without a new launch.

        Args:
            backend: ``"nccl"``, ``"ipc"`` or any other name that vLLM's
                ``WeightTransferEngineFactory`` knows in the workers; ``None`` goes back to the
                engine of the launch, which the ``broadcast`` transport needs.

        Raises:
            UnsupportedArgumentError: No backend of that name.
            TransferNotReadyError: A weight update is open.
        """
        self._pusher.step_aside()
        self._natively("use_transfer_engine", self._same(backend))

    def start_weight_update(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Begins an update on every replica; pushes wait until it has ended.

        Engines that nobody paused are paused until :meth:`finish_weight_update`, and their
        requests in flight kept: vLLM alone loses an engine that steps meanwhile.

        Args:
            timeout_s: Seconds to wait for a push that is under way.

        Raises:
            TransferNotReadyError: An update is open, or the transfer engine is not initialised. No
                replica has begun.
            SyncError: A replica did not pause, or took pushes all the time.
        """
        everyone = self._same()
        answers = self._asked("start_weight_update", everyone, timeout_s)
        failures = [one for one in answers.values() if isinstance(one, BaseException)]
        if failures and len(failures) < len(answers):
            begun = {
                name: () for name, one in answers.items() if not isinstance(one, BaseException)
            }
            self._asked("shutdown_weight_transfer_engine", begun, timeout_s)
        for failure in failures:
            raise failure

    def update_weights(
        self,
        weights: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Replaces the weights on all replicas; TorchRL's and vLLM's name for it.

        Args:
            weights: An iterator of ``(name, tensor)`` or whatever :meth:`push_weights` takes: a
                whole push. Or vLLM's ``WeightTransferUpdateRequest``, a mapping with
                ``update_info``, that payload itself, or a list of it by worker: one part of an
                update that :meth:`start_weight_update` began. It returns when that is received, so
                the trainer sends meanwhile.
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: No update was begun.
            TransferError: A replica did not receive its part. Its update is over, and unless
                nothing had been touched it is stale until a later update succeeds.
            WeightMismatchError: See :meth:`push_weights`.
            WeightSyncError: See :meth:`push_weights`.
            UnsupportedArgumentError: A list has not one part for each worker.
        """
        if not _is_payload(weights):
            self.push_weights(weights, timeout_s=timeout_s)
            return
        info = _payload(weights, "update_info")
        calls = self._same(info)
        if isinstance(info, list):
            workers = num_workers(self.engine_args)
            if len(info) != len(calls) * workers:
                raise UnsupportedArgumentError(
                    f"a list of update_info must have one for each of {len(calls) * workers} "
                    f"workers, got {len(info)}"
                )
            calls = {
                name: (info[index * workers : (index + 1) * workers],)
                for index, name in enumerate(calls)
            }
        self._natively("update_weights", calls, timeout_s)

    def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Ends an update on every replica; they go on unless :meth:`pause_generation` holds them.

        Args:
            weight_version: Label of the weights. An integer moves the policy version. Without one
                the version stays, and new requests keep off the keys of the old weights even so.
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: No update was begun.
            StaleVersionError: An integer older than the version held; the update stays open.
            UnsupportedArgumentError: One beyond 64 bits; the update stays open.
            TransferError: A replica could not; it is stale until a later update succeeds.
        """
        try:
            self._natively("finish_weight_update", self._same(weight_version), timeout_s)
        finally:
            if self._launched:
                self._pusher.look_again()
                self._learn_states()
        self._version_hooks.moved(self.weight_version)

    def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Pauses every engine until :meth:`resume_generation`, whatever is pushed in between.

        New requests wait at the replicas.

        Args:
            mode: What becomes of requests in flight: ``"abort"`` returns them as they are,
                ``"wait"`` lets them finish, ``"keep"`` freezes them.
            clear_cache: Drop cached prefixes; frozen requests recompute theirs.
            timeout_s: Seconds for it; ``"wait"`` takes as long as the requests in flight.

        Raises:
            UnsupportedArgumentError: There is no such mode.
            TransferNotReadyError: A weight update is open.
            SyncError: It took too long; that engine goes on.
        """
        options = {"mode": mode, "clear_cache": clear_cache}
        self._natively("pause_generation", None, timeout_s, **options)

    def resume_generation(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ends :meth:`pause_generation`; does nothing to engines that are not paused.

        Args:
            timeout_s: Seconds for it.

        Raises:
            TransferNotReadyError: A weight update is open, or an engine is asleep.
            ReplicaUnavailableError: A replica's weights are not whole; it stays paused.
        """
        self._natively("resume_generation", None, timeout_s)
        self._learn_states()

    def is_paused(self) -> bool:
        """Returns whether every engine is paused."""
        return all(self._call_all("is_paused"))

    def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Puts every engine to sleep; new requests wait at the replicas until :meth:`wake_up`.

        Args:
            level: 0 pauses only; 1 moves weights to the host and drops keys and values; 2 drops
                both: then ``wake_up(["weights"])``, an update, ``wake_up(["kv_cache"])``.
            mode: See :meth:`pause_generation`.
            timeout_s: Seconds for it.

        Raises:
            UnsupportedArgumentError: No such level or mode, or engines on GPUs that were launched
                without ``enable_sleep_mode``.
            TransferNotReadyError: A weight update is open.
        """
        self._natively("sleep", self._same(level, mode), timeout_s)

    def wake_up(
        self, tags: list[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Wakes every engine.

        Args:
            tags: Memory to wake: ``"weights"``, ``"kv_cache"``; ``None`` wakes all.
            timeout_s: Seconds for it.

        Returns:
            Whether all are fully awake and take requests.

        Raises:
            UnsupportedArgumentError: There is no such tag.
            TransferNotReadyError: A weight update is open, or weights that level 2 dropped have
                not been replaced.
        """
        awake = self._natively("wake_up", self._same(tags), timeout_s)
        self._learn_states()
        return all(awake)

    def _natively(
        self,
        method: str,
        calls: Mapping[str, tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> list[Any]:
        """Calls all replicas, waits for all, and raises the first failure."""
        answers = self._asked(method, calls, timeout_s, **options)
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return list(answers.values())

    def _asked(
        self,
        method: str,
        calls: Mapping[str, tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        if timeout_s is not None and method != "shutdown_weight_transfer_engine":
            options["timeout_s"] = timeout_s
        pending = self.start_calls(method, self._same() if calls is None else calls, **options)
        return pending.answers((timeout_s or DEFAULT_TIMEOUT_S) + GRACE_S)

    def _same(self, *args: Any) -> dict[str, tuple[Any, ...]]:
        return {one.replica_id: args for one in self._require_replicas()}

    def _require_replicas(self) -> list[Any]:
        self._require_launched()
        return self._current_replicas()


def _payload(request: Any, field: str) -> Any:
    """Returns the plain payload of one of vLLM's requests, which may be plain itself."""
    if dataclasses.is_dataclass(request) and not isinstance(request, type):
        request = dataclasses.asdict(request)
    return request.get(field, request) if isinstance(request, dict) else request


def _is_payload(weights: Any) -> bool:
    """Whether ``weights`` speak of a transfer, rather than are weights."""
    if type(weights).__name__ == "WeightTransferUpdateRequest":
        return True
    if isinstance(weights, list):
        return bool(weights) and all(isinstance(one, dict) for one in weights)
    if not isinstance(weights, dict) or not weights:
        return False
    return "update_info" in weights or not any(
        isinstance(one, (torch.Tensor, dict)) for one in weights.values()
    )

"""The weights of a service: its pushes, its policy versions, and vLLM's own calls on all replicas.

The service also is a ``VLLMWeightSyncClient``, the object that vLLM's trainer-side engines drive
(``vllm/distributed/weight_transfer/base.py``, 0.26 to 0.32).
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
import ray.util
import torch

from torchrl_vllm_sync.engine.args import num_workers, payload_of
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionNotReachedError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.service.replicas import ServiceReplicas
from torchrl_vllm_sync.versions import check_version
from torchrl_vllm_sync.weights.broadcast.group import free_port
from torchrl_vllm_sync.weights.metadata import from_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.observe.status import StatusLog
    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.routing.ledger import LoadSnapshot
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.push import VersionHooks, WeightPusher
    from torchrl_vllm_sync.weights.transport import PauseMode, PushReport, WeightTransport


# The policy versions of a service: which is committed, who holds what, waiting for one.


REPORT_TIMEOUT_S = 5.0
DOUBTFUL_TIMEOUT_S = 0.5
DEFAULT_WAIT_S = 300.0


class ServiceVersions(ServiceReplicas):
    """The part of a service that knows policy versions.

    What this process does not do itself it learns from the replicas' reports, which come once a
    second, and ten times a second while somebody waits for a version.
    """

    _is_copy: bool
    _last_served = 0
    _has_asked = False
    _pusher: WeightPusher
    _version_hooks: VersionHooks
    _log: StatusLog

    @property
    def weight_version(self) -> int:
        """Newest policy version that every serving replica is known to hold; 0 before any push.

        It is the committed one: pushes that failed for some replica leave it where it was, unless
        those replicas no longer serve. While none serves it stays. Reading it asks nobody, but
        for the first time in a pickled or attached copy.
        """
        held = [
            one.weight_version
            for one in self._known()
            if one.state.admits_requests and one.weight_version is not None
        ]
        if held:
            self._last_served = min(held)
        return max(self._pusher.committed, self._last_served)

    @property
    def weight_versions(self) -> dict[str, int | None]:
        """Replica id to the policy version it last said it holds; ``None`` if it has not said."""
        return {one.replica_id: one.weight_version for one in self._known()}

    def wait_for_version(self, version: int, *, timeout_s: float = DEFAULT_WAIT_S) -> int:
        """Waits until :attr:`weight_version` is ``version`` or later.

        Works in any process that has the service: a push of another process is noticed within
        0.1 s and the time of one actor call.

        Args:
            version: Policy version; one that nobody has pushed yet is waited for too.
            timeout_s: Seconds to wait; 0 only looks.

        Returns:
            The version that was reached.

        Raises:
            UnsupportedArgumentError: ``version`` is no version, or ``timeout_s`` no time.
            VersionNotReachedError: It was not reached in time; it says what each replica holds.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        check_version("version", version)
        if not (isinstance(timeout_s, int | float) and 0 <= timeout_s < math.inf):
            raise UnsupportedArgumentError(
                f"timeout_s must be a finite number from 0 on, got {timeout_s!r}"
            )
        deadline = time.monotonic() + timeout_s
        changed = threading.Event()
        with self.load.watched(changed.set):
            while True:
                self._require_launched()
                changed.clear()
                reached = self.weight_version
                if reached >= version:
                    return reached
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    held = {one.replica_id: one.describe() for one in self.load.snapshots()}
                    raise VersionNotReachedError(version, held, timeout_s)
                changed.wait(min(left_s, 1.0))  # a shutdown tells nobody

    def register_version_hook(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Has ``hook`` called with the report of each push that commits a new version.

        It is called in the thread that pushes, before ``push_weights`` returns, once for each
        version: not for one that was committed before, such as a push sent again. Pushes of other
        processes, and updates through vLLM's own calls, are not announced; see
        :meth:`wait_for_version`. If hooks raise, the others are called all the same, and the first
        exception leaves ``push_weights``; the version is committed. Copies have no hooks.

        Args:
            hook: Called with the ``PushReport``.

        Returns:
            A function that unregisters it; calling it twice does nothing.

        Raises:
            UnsupportedArgumentError: ``hook`` cannot be called, or is registered already.
        """
        return self._version_hooks.register(hook)

    def listen_to_versions(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Has ``listener`` called with each version that this process brings the service to.

        Unlike hooks it also hears of updates through vLLM's own calls, and of a version once more
        when it is pushed again.

        Args:
            listener: Called with the version.

        Returns:
            A function that ends this.
        """
        return self._version_hooks.listen(listener)

    def _known(self) -> list[LoadSnapshot]:
        """Returns what is known of each replica; a new copy knows nothing and asks."""
        known = self.load.snapshots()
        heard = [one.measured_at is not None for one in known]
        # The monitor may have heard of some already. One that never answers is asked once.
        unheard = not any(heard) or not (all(heard) or self._has_asked)
        if unheard and self._is_copy and self._launched and ray.is_initialized():
            self._has_asked = True
            self._learn_states()
            known = self.load.snapshots()
        return known

    def _learn_states(
        self, doubtful: Collection[str] = (), pushed: PushStatus | None = None
    ) -> None:
        """Asks the replicas what they are and hold now, ahead of the monitor's next look."""
        self._require_launched()
        known = self.standings()
        doubtful = {name for name, one in known.items() if name in doubtful or one.absence}
        method, args = ("report", ()) if pushed is None else ("note_push", (pushed,))
        calls = self.start_calls(method, dict.fromkeys(doubtful, args))
        sure = self.start_calls(method, dict.fromkeys(known.keys() - doubtful, args))
        answers = sure.answers(REPORT_TIMEOUT_S) | calls.answers(DOUBTFUL_TIMEOUT_S)
        for report in answers.values():
            if isinstance(report, EngineReport):
                self.load.observe(report)


# The weights side of a service: pushes, versions, and what a push must hold.


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
        return self._pusher.push(
            weights,
            version=version,
            timeout_s=timeout_s,
            clear_cache=clear_cache,
            mode=mode,
            strict=strict,
            on_end=self._end_push,
        )

    def _end_push(self, pushed: PushStatus | None) -> None:
        """Tells those who watch, and the replicas, what became of a push."""
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
        """Replaces the weights on all replicas; TorchRL's and vLLM's name for it."""
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
        info = payload_of(request, "init_info")
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
        info = payload_of(weights, "update_info")
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

"""One replica: a Ray actor that owns one vLLM engine; under TorchRL's and vLLM's names too."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray.util
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.answers import RequestAnswers
from torchrl_vllm_sync.engine.args import num_workers
from torchrl_vllm_sync.engine.arrivals import BroadcastLoads, PeerLoads, SnapshotLoads
from torchrl_vllm_sync.engine.gate import AdmissionGate
from torchrl_vllm_sync.engine.health import EngineHealth
from torchrl_vllm_sync.engine.processes import own_processes
from torchrl_vllm_sync.engine.reload import check_can_be_filled, checkpoint_metadata
from torchrl_vllm_sync.engine.updates import IDLE_TIMEOUT_S, ChunkedLoads, NativeUpdates
from torchrl_vllm_sync.errors import LaunchError, SyncError, TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import (
    UNRESPONSIVE_AFTER_S,
    EngineDescription,
    EngineReport,
    ReplicaState,
)
from torchrl_vllm_sync.weights.broadcast.group import free_port
from torchrl_vllm_sync.weights.metadata import to_json
from torchrl_vllm_sync.weights.places import this_node

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.weights.snapshots.files import ProcessIdentity
    from torchrl_vllm_sync.weights.transport import PauseMode


# vLLM's own weight-transfer, pause and sleep calls on a replica's actor, under vLLM's names.
#
# TorchRL's ``VLLMWeightSyncScheme`` and vLLM's ``RayVLLMWeightSyncClient`` call them on the
# actors,
# the service on all of them at once. Plain mappings are taken beside vLLM's request classes, so
# that
# a driver need not import vLLM.


DEFAULT_TIMEOUT_S = 300.0


class NativeWeightTransfer:
    """Mixin of the engine actor: vLLM's ``AsyncLLM`` methods of the same names.

    Beyond vLLM each has a time limit, comes in turn or is refused with ``TransferNotReadyError``,
    and an update pauses the engine if nobody has.
    """

    _updates: NativeUpdates

    @cached_property
    def _chunks(self) -> ChunkedLoads:
        return ChunkedLoads(self._updates)

    async def init_weight_transfer_engine(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Initialises the transfer engine; blocks this replica until the trainer has come."""
        await self._updates.initialise(_payload(request, "init_info"), timeout_s=timeout_s)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leaves the trainer's group; see ``NativeUpdates.leave``."""
        await self._updates.leave()

    async def use_transfer_engine(self, backend: str | None = None) -> None:
        """Has the workers use another transfer engine; see ``NativeUpdates.use``."""
        await self._updates.use(backend)

    async def start_weight_update(
        self, *, timeout_s: float = DEFAULT_TIMEOUT_S, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        """Begins an update; see ``NativeUpdates.begin``."""
        await self._updates.begin(timeout_s=timeout_s, idle_timeout_s=idle_timeout_s)

    async def update_weights(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Receives weights; takes vLLM's ``WeightTransferUpdateRequest``, or its
        ``update_info``."""
        await self._updates.receive(_payload(request, "update_info"), timeout_s=timeout_s)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Ends an update; see ``NativeUpdates.finish``."""
        label = None if weight_version is None else str(weight_version)
        await self._updates.finish(label, timeout_s=timeout_s)

    async def update_weight_version(self, new_version: str) -> None:
        """Names the weights after an update; vLLM's Ray client calls it when that has ended."""
        await self._updates.rename(str(new_version))

    async def update_weights_native(
        self,
        request: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """TorchRL's name for start, update and finish in one call."""
        await self.start_weight_update(timeout_s=timeout_s)
        await self.update_weights(request, timeout_s=timeout_s)
        await self.finish_weight_update(timeout_s=timeout_s)

    async def expect_native(self, version: int, run_id: str) -> None:
        """Says whether :meth:`receive_native` could begin; see ``NativeUpdates.expect``."""
        await self._updates.expect(version, run_id)

    async def receive_native(self, update_info: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Receives a whole version through the transfer engine; see ``NativeUpdates.load``."""
        return dataclasses.asdict(await self._updates.load(update_info, **options))

    async def begin_chunks(self, *args: Any) -> None:
        """Begins a version that comes in parts; see ``ChunkedLoads.begin``."""
        await self._chunks.begin(*args)

    async def receive_chunk(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives a part of a version; see ``ChunkedLoads.receive``."""
        await self._chunks.receive(update_info, timeout_s)

    async def finish_chunks(self) -> dict[str, Any]:
        """Ends a version that came in parts; see ``ChunkedLoads.finish``."""
        return dataclasses.asdict(await self._chunks.finish())

    async def give_up_chunks(self, run_id: str) -> None:
        """Gives a version up that came in parts; see ``ChunkedLoads.give_up``."""
        await self._chunks.give_up(run_id)

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Pauses until :meth:`resume_generation`; vLLM's defaults end requests and drop caches."""
        await self._updates.pause(mode=mode, clear_cache=clear_cache, timeout_s=timeout_s)

    async def resume_generation(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ends a pause; see ``NativeUpdates.resume``."""
        await self._updates.resume(timeout_s=timeout_s)

    async def is_paused(self) -> bool:
        """Returns whether the scheduler is paused."""
        return await self._updates.is_paused()

    async def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Puts the engine to sleep; see ``NativeUpdates.sleep``."""
        await self._updates.sleep(level=level, mode=mode, timeout_s=timeout_s)

    async def wake_up(
        self, tags: list[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Wakes the engine; see ``NativeUpdates.wake_up``."""
        return await self._updates.wake_up(tags, timeout_s=timeout_s)


def _payload(request: Any, field: str) -> Any:
    """Returns the plain payload of one of vLLM's requests, which may be plain itself."""
    if isinstance(request, dict):
        return request.get(field, request)
    if isinstance(request, list):
        return request
    if dataclasses.is_dataclass(request) and field in {
        one.name for one in dataclasses.fields(request)
    }:
        return getattr(request, field)
    raise UnsupportedArgumentError(
        f"expected vLLM's request or a mapping with {field}, got {type(request).__name__}"
    )


PROBE_TIMEOUT_S = 60.0


class EngineActor(RequestAnswers, NativeWeightTransfer):
    """The class behind each replica's Ray actor; subclass it for an ``actor_class`` of your own.

    Lifecycle: constructed (``STARTING``), :meth:`start` builds the engine (``SERVING``), weight
    updates pass through ``UPDATING``, :meth:`drain` lets requests end (``DRAINING``), :meth:`close`
    ends the engine (``CLOSED``). An update that fails leaves ``STALE``, a dead or silent engine
    ``FAILED``; neither takes requests. A replica that joins a running service is told
    :meth:`join_later` before it starts, and serves from :meth:`admit` on.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        engine_args: AsyncEngineArgs,
        environment: dict[str, str],
        service_name: str = "alone",
        unresponsive_after_s: float = UNRESPONSIVE_AFTER_S,
    ) -> None:
        self.replica_id = replica_id
        self._service_name = service_name
        self._engine_args = engine_args
        self._environment = environment
        self._unresponsive_after_s = unresponsive_after_s
        self._gate = AdmissionGate(replica_id)
        self._stats = internals.StatsRecorder()
        self._begin_answers()
        self._card: dict[str, Any] = {}
        self._membership_epoch = 0
        self._last_push: PushStatus | None = None
        self._joins_later = self._started = False
        self._device_uuids: tuple[str, ...] = ()

    # ---------------------------------------------------------------- lifecycle

    async def start(self) -> EngineDescription:
        """Builds the engine and begins to serve."""
        printed = internals.output_sizes()
        try:
            return await self._start()
        except SyncError:
            raise
        except Exception as error:
            # Some, such as pydantic's, cannot be pickled, of which Ray would tell instead.
            why = f"{type(error).__name__}: {error}"
            if "root cause" in why and (cause := internals.startup_failure(printed)):
                why = f"{why}: {cause}"
            raise LaunchError({self.replica_id: why}) from error

    async def _start(self) -> EngineDescription:
        os.environ.update(self._environment)
        check_can_be_filled(self._engine_args.create_model_config())
        self.engine = AsyncLLM.from_engine_args(self._engine_args, stat_loggers=[self._stats])
        for refusal in await internals.call_workers(self.engine, "sync_staging_refusal", ()):
            if refusal:
                await asyncio.to_thread(self.engine.shutdown)
                raise TransferError(refusal)
        internals.watch_samples(self.engine, self._gate.register)
        self._take_weights()
        if not self._joins_later:
            self._gate.set(ReplicaState.SERVING)
        self._health.start()
        found = await internals.call_workers(self.engine, "native_device_uuid", ())
        self._device_uuids = tuple(uuid for uuid in found if uuid)
        return self.describe()

    def _take_weights(self) -> None:
        """Makes what brings weights to the engine, and what tells whether it is alive."""
        self._updates = NativeUpdates(self.engine, self._gate)
        self._snapshots = SnapshotLoads(
            self._updates,
            functools.partial(checkpoint_metadata, self.engine.vllm_config.model_config),
        )
        self._broadcasts = BroadcastLoads(self._updates)
        self._peers = PeerLoads(self._updates)
        self._health = EngineHealth(
            self.engine,
            self._gate,
            unresponsive_after_s=self._unresponsive_after_s,
            is_updating=lambda: self._updates.is_busy,
        )
        self._started = True

    def join_later(self) -> None:
        """Has :meth:`start` leave the replica ``STARTING``: it serves once it is admitted."""
        self._joins_later = True

    def admit(self, version: int, run_id: str | None) -> None:
        """Lets a replica that has joined a running service serve, once it holds ``version``."""
        self._updates.admit(version, run_id)

    def drain(self) -> None:
        """Takes no more requests; those inside go on to their end."""
        self._updates.drain()

    def undrain(self) -> None:
        """Takes :meth:`drain` back: the replica stays after all."""
        self._updates.undrain()

    def describe(self) -> EngineDescription:
        """Returns the facts about the engine that do not change while it lives."""
        config = self.engine.vllm_config
        return EngineDescription(
            replica_id=self.replica_id,
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=config.cache_config.block_size,
            num_kv_blocks=config.cache_config.num_gpu_blocks,
            vllm_version=str(internals.installed_vllm()),
            device_type=current_platform.device_type,
            num_workers=num_workers(self._engine_args),
            node_id=this_node(),
            device_uuids=self._device_uuids,
            processes=own_processes(),
        )

    def ready(self) -> bool:
        """Returns whether the replica serves requests."""
        return self._gate.state is ReplicaState.SERVING

    async def close(self) -> None:
        """Ends the engine and its processes; later requests are refused. Idempotent."""
        if self._gate.state is ReplicaState.CLOSED:
            return
        self._gate.set(ReplicaState.CLOSED, "the service was shut down")
        self._health.stop()
        self._snapshots.stop_following()
        await asyncio.to_thread(self.engine.shutdown)

    def report(self) -> EngineReport:
        """Returns state, version and load as they are now."""
        stats = self._stats.latest()
        started = self._started
        return EngineReport(
            replica_id=self.replica_id,
            state=self._gate.state,
            weight_version=self._updates.version if started else None,
            num_unfinished=self.get_num_unfinished_requests() if started else None,
            num_running=stats.num_running if stats else None,
            num_waiting=stats.num_waiting if stats else None,
            kv_cache_usage=stats.kv_cache_usage if stats else None,
            stats_age_s=time.monotonic() - stats.measured_at if stats else None,
            answer_age_s=self._health.answer_age_s if started else None,
            reason=self._gate.reason,
            num_span_disagreements=self._checker.num_disagreements,
            membership_epoch=self._membership_epoch,
            counters=self._stats.counters() if started else None,
            last_push=self._last_push,
        )

    def note_push(self, push: PushStatus) -> EngineReport:
        """Keeps what became of a push, for processes that ask; returns :meth:`report`."""
        self._last_push = push
        return self.report()

    def keep_card(self, card: dict[str, Any]) -> None:
        """Keeps what a process needs to attach to the service, unless it has a newer one."""
        epoch = card["_membership"].epoch
        if epoch >= self._membership_epoch:
            self._card, self._membership_epoch = card, epoch

    def card(self) -> dict[str, Any]:
        """Returns what :meth:`keep_card` was given."""
        return self._card

    # ---------------------------------------------------------------- weights

    async def model_metadata(self) -> list[list[Any]]:
        """Returns the tensors that a complete push must hold, as ``ParamMeta`` in JSON form."""
        metas = await asyncio.to_thread(checkpoint_metadata, self.engine.vllm_config.model_config)
        return to_json(metas)

    async def load_snapshot(
        self,
        directory: str,
        run_id: str | None,
        **options: Any,
    ) -> dict[str, Any]:
        """Loads the newest version stored in ``directory``; see ``SnapshotLoads.load``."""
        report = await self._snapshots.load(directory, run_id, **options)
        return dataclasses.asdict(report)

    def snapshot_source(self) -> dict[str, Any] | None:
        """Says where the weights were loaded from; see ``SnapshotLoads.source``."""
        return self._snapshots.source

    async def follow_snapshots(self, directory: str, run_id: str | None, **options: Any) -> None:
        """Loads new versions of ``directory`` as they appear, without being told."""
        self._snapshots.follow(directory, run_id, **options)

    async def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self._snapshots.stop_following()
        await self._updates.settled()

    async def join_broadcast(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Joins a trainer's group; see ``BroadcastLoads.join``."""
        await self._broadcasts.join(init_info, timeout_s=timeout_s)

    async def prepare_broadcast(
        self, metadata: list[list[Any]], bucket_bytes: int, *, timeout_s: float
    ) -> dict[str, Any]:
        """Learns what coming pushes consist of; see ``BroadcastLoads.prepare``."""
        return await self._broadcasts.prepare(metadata, bucket_bytes, timeout_s=timeout_s)

    async def receive_broadcast(self, push_id: int, digest: str, **options: Any) -> dict[str, Any]:
        """Receives one version; see ``BroadcastLoads.receive``."""
        return dataclasses.asdict(await self._broadcasts.receive(push_id, digest, **options))

    async def leave_broadcast(self) -> None:
        """Leaves the trainer's group."""
        await self._broadcasts.leave()

    async def offer_weights(self, *, timeout_s: float) -> dict[str, Any]:
        """Offers its weights to another replica; see ``PeerLoads``."""
        return await self._peers.offer(timeout_s=timeout_s)

    async def give_weights(self, token: str, index: int, by_value: bool) -> list[Any]:
        """Gives one chunk of what it offered; see ``PeerLoads``."""
        return await self._peers.give(token, index, by_value)

    async def weight_checksums(self, token: str) -> list[dict[str, int]]:
        """Returns checksums of what it offered; see ``PeerLoads``."""
        return await self._peers.checksums(token)

    async def withdraw_weights(self, token: str) -> None:
        """Ends an offer; see ``PeerLoads``."""
        await self._peers.withdraw(token)

    async def take_weights(self, offer: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Takes what another replica offers; see ``PeerLoads``."""
        return dataclasses.asdict(await self._peers.take(offer, timeout_s=timeout_s))

    def begin_push(self, trainer: ProcessIdentity, sender: str, number: int) -> bool:
        """Keeps other trainers' pushes out; see ``WeightUpdates.begin_push``."""
        return self._updates.begin_push(trainer, sender, number)

    def keep_push(self, sender: str, number: int) -> None:
        """Takes a sign of life from whoever pushes."""
        self._updates.keep_push(sender, number)

    def end_push(self, sender: str, number: int) -> None:
        """Lets other trainers push again."""
        self._updates.end_push(sender, number)

    async def probe_workers(self) -> None:
        """Returns when every worker has answered: a sign of life of the whole replica."""
        await self._updates.call_workers(
            "sync_staging_refusal", timeout_s=PROBE_TIMEOUT_S, what="a sign of life"
        )

    def hold_back(self, version: int, run_id: str | None) -> None:
        """Takes the replica out of service until it holds ``version`` of run ``run_id``."""
        self._updates.hold_back(version, run_id)

    # ---------------------------------------------------------------- TorchRL's and vLLM's surface

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests inside the engine, exactly; a dead engine has none."""
        return 0 if self.engine.errored else internals.num_unfinished_requests(self.engine)

    def get_cache_usage(self) -> float | None:
        """Returns the share of KV-cache blocks in use, 0 to 1; ``None`` until it is known."""
        stats = self._stats.latest()
        return stats.kv_cache_usage if stats else None

    def get_tokenizer(self) -> Any:
        """Returns the engine's tokenizer."""
        return self.engine.get_tokenizer()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  TorchRL's and vLLM's argument
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on every vLLM worker of this replica and returns their answers.

        Workers of all data-parallel engines answer, one engine's after the other's. For as long
        as ``timeout``, 300 s without one, the engine may be silent meanwhile.
        """
        with self._health.blocking(timeout):
            return await internals.call_workers(self.engine, method, args, kwargs, timeout)

    collective_rpc_v1 = collective_rpc

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drops cached prefixes."""
        return await self.engine.reset_prefix_cache(reset_running_requests)

    def free_port(self) -> tuple[str, int]:
        """Returns this node's address and a port that is free on it now."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

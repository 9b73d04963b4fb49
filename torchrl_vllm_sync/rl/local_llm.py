"""vLLM's offline ``LLM`` in the place of a service: the same pushes, in the caller's process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.checks import in_thread
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.answers import AdmissionGate, SampleVersions
from torchrl_vllm_sync.engine.args import WORKER_EXTENSION
from torchrl_vllm_sync.engine.plan import check_can_be_filled
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineDescription, Member, ReplicaState
from torchrl_vllm_sync.requests.background import run_blocking
from torchrl_vllm_sync.requests.messages import marks
from torchrl_vllm_sync.routing.ledger import LoadSnapshot
from torchrl_vllm_sync.service.replicas import Membership, ReplicaCalls, Replicas, ServiceSettings
from torchrl_vllm_sync.service.service import AsyncVLLM
from torchrl_vllm_sync.service.weights import Weights
from torchrl_vllm_sync.weights.transport import Standing

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from torchrl_vllm_sync.engine.internals import SampleState


REPLICA_ID = "0"
LOCAL_ADDRESS = "127.0.0.1"
# Where an LLM's engine keeps what follows it, so that a second updater counts versions on.
REPLICA_ATTRIBUTE = "torchrl_vllm_sync_replica"


class LocalLLM:
    """One ``vllm.LLM`` that takes pushes as the only replica of a service.

    ``WeightUpdater(llm)`` makes one. The ``LLM`` must not generate during a push; its prefix cache
    is emptied after each. Its outputs carry ``version_spans``, ``min_version`` and ``max_version``.

    Example:
        >>> llm = vllm.LLM(
        ...     model,
        ...     worker_extension_cls="torchrl_vllm_sync.engine.worker.SyncWorkerExtension",
        ...     weight_transfer_config={"backend": "torchrl_broadcast"},  # for "broadcast"
        ... )
        >>> updater = WeightUpdater(llm, source=model)
        >>> updater.push_weights()
    """

    def __init__(self, llm: LLM) -> None:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        given = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
        if not given or not issubclass(resolve_obj_by_qualname(given), SyncWorkerExtension):
            raise UnsupportedArgumentError(
                f"the LLM must be created with worker_extension_cls={WORKER_EXTENSION!r}, "
                f"got {given!r}"
            )
        check_can_be_filled(llm.llm_engine.vllm_config.model_config)
        replica: _LocalReplica | None = vars(llm.llm_engine).get(REPLICA_ATTRIBUTE)
        if replica is None:
            replica = _LocalReplica(llm)
            run_blocking(replica.start())
            setattr(llm.llm_engine, REPLICA_ATTRIBUTE, replica)
        self.replicas = LocalReplicas(replica)
        self.weights = Weights(self.replicas)

    # All of this a service does by its ``replicas`` and ``weights`` alone.
    name = AsyncVLLM.name
    weight_version, weight_versions = AsyncVLLM.weight_version, AsyncVLLM.weight_versions
    register_version_hook = AsyncVLLM.register_version_hook
    push_weights, audit = AsyncVLLM.push_weights, AsyncVLLM.audit
    use_transport = AsyncVLLM.use_transport
    init_weight_update_group = AsyncVLLM.init_weight_update_group
    get_model_metadata = AsyncVLLM.get_model_metadata

    def close(self) -> None:
        """Closes the transport; the ``LLM`` lives on. Idempotent."""
        self.weights.pusher.close()


class LocalReplicas(Replicas):
    """The one replica of an ``LLM``, which is called in threads of this process."""

    def __init__(self, replica: _LocalReplica) -> None:
        name = f"llm-{os.getpid()}-{id(replica):x}"
        settings = ServiceSettings(name=name, engine_args=replica.engine)
        member = Member(REPLICA_ID, replica, description=replica.describe())
        super().__init__(settings, Membership([member]))
        self._replica, self._met_at = replica, (LOCAL_ADDRESS, None)

    def start_calls(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **kwargs: Any
    ) -> ReplicaCalls:
        """Calls the replica's method and does not wait."""

        def call(args: tuple[Any, ...]) -> Any:
            answer = getattr(self._replica, method)(*args, **kwargs)
            return run_blocking(answer) if asyncio.iscoroutine(answer) else answer

        futures = {name: in_thread("local-llm", partial(call, calls[name])) for name in calls}
        return ReplicaCalls(futures, lambda _: None)

    def standings(self) -> dict[str, Standing]:
        """The ``LLM`` is there as long as its process is."""
        return {REPLICA_ID: Standing(state=ReplicaState.SERVING)}

    def known(self) -> list[LoadSnapshot]:
        """What it is now: another updater may have pushed."""
        self.load.observe(self._replica.report())
        return self.load.snapshots()


class _LocalReplica(EngineActor):
    """What a replica's actor does, over an ``LLM`` instead of an ``AsyncLLM``."""

    def __init__(self, llm: LLM) -> None:
        self._llm_engine: Any = llm.llm_engine
        super().__init__(replica_id=REPLICA_ID, engine_args=self._llm_engine, environment={})
        self.engine: Any = _AsyncFace(llm)
        self._gate: Any = _FollowedRequests()

    async def start(self) -> EngineDescription:
        """Begins to take pushes, and to stamp outputs; the engine runs already."""
        from vllm import RequestOutput

        def step_and_stamp() -> list[Any]:
            outputs = step()
            for output in outputs:
                if isinstance(output, RequestOutput):
                    self._stamp(output)
            return outputs

        await self._begin()
        step, self._llm_engine.step = self._llm_engine.step, step_and_stamp
        return self.describe()

    def describe(self) -> EngineDescription:
        return self._description(LOCAL_ADDRESS, None)

    async def prepare_adapter(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedArgumentError("adapters must be merged for a vllm.LLM")

    def _stamp(self, output: RequestOutput) -> None:
        """Has an output of ``LLM.generate`` say which versions sampled it, as a service's do."""
        followed = self._gate.samples
        keys = [(output.request_id, one.index) for one in output.outputs]
        if not all(key in followed for key in keys):  # enqueued before the first updater was made
            return
        reports = [
            followed[key].report(one, self._answers.checker)
            for key, one in zip(keys, output.outputs, strict=True)
        ]
        for key in keys:
            if followed[key].state.is_finished:
                del followed[key]
        vars(output).update(marks(reports, replica_id=REPLICA_ID, version=self._gate.version))


class _FollowedRequests(AdmissionGate):
    """The gate of an ``LLM``, which admits everything: it only tracks the samples inside."""

    def __init__(self) -> None:
        super().__init__(REPLICA_ID)
        self.samples: dict[tuple[str, int], SampleVersions] = {}

    def register(self, state: SampleState) -> None:
        self.samples[state.engine_id, state.index] = SampleVersions(state, self.version)

    def switch(self, version: int, computed: Mapping[str, int] | None = None) -> None:
        """Notes that ``version`` samples from now on, and forgets what was aborted."""
        super().switch(version, computed)
        for key, sample in list(self.samples.items()):
            if sample.state.is_finished:
                del self.samples[key]
            else:
                sample.switch(version)


class _AsyncFace:
    """The part of ``AsyncLLM`` that updates use, over an ``LLM`` that is not generating."""

    core_engines = (0,)
    errored = False
    dead_error = RuntimeError("the engine of an LLM that died says so when it is called")

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.vllm_config = llm.llm_engine.vllm_config
        self.output_processor = llm.llm_engine.output_processor
        self.engine_core = self
        # Stands for the queue of outputs that an ``AsyncLLM`` has: nothing is ever in it.
        self.outputs_queue = SimpleNamespace(put_nowait=lambda _: None, empty=lambda: True)

    async def _call_utility_async(self, utility: str, *args: Any, engine: int) -> list[Any]:
        """What ``internals.call_workers`` calls; an ``LLM`` is one engine."""
        assert (utility, engine) == ("collective_rpc", 0)
        return await asyncio.to_thread(self._llm.collective_rpc, *args)

    def _run_output_handler(self) -> None:
        """Does nothing: an ``LLM`` takes up outputs inside ``generate``."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Does nothing: an ``LLM`` steps only inside ``generate``."""

    pause_scheduler_async = pause_generation

    async def resume_generation(self) -> None:
        """Drops cached prefixes: an ``LLM`` does not salt them by version."""
        if not await asyncio.to_thread(self._llm.reset_prefix_cache):
            raise SyncError(
                "vLLM did not drop its cached prefixes: requests of the LLM are under way"
            )

    async def update_weight_version(self, label: str) -> None:
        await asyncio.to_thread(self._llm.llm_engine.set_weight_version, label)

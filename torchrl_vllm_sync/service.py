"""The service: replicated vLLM engines behind one object that TorchRL takes for its own."""

from __future__ import annotations

import functools
import math
import re
import uuid
from typing import TYPE_CHECKING, Any, Self

import ray
import ray.util
from torchrl.modules.llm.backends.vllm.base import RLvLLMEngine

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.engine.args import (
    engine_environment,
    make_engine_args,
    num_workers,
    on_cpu,
    prepare_engine_args,
)
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.fleet import Fleet, describe
from torchrl_vllm_sync.launch import (
    CLOSE_LINGER_S,
    CLOSE_TIMEOUT_S,
    LaunchPlan,
    close_replicas,
    launch_replicas,
    launch_timeout_s,
)
from torchrl_vllm_sync.membership import Membership
from torchrl_vllm_sync.observe.status import StatusLog
from torchrl_vllm_sync.placement import ReplicaResources
from torchrl_vllm_sync.registry import find_service, named_actors
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, ReplicaState
from torchrl_vllm_sync.requests.generation import Generation
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.service_members import ServiceMembers
from torchrl_vllm_sync.service_metrics import ServiceMetrics
from torchrl_vllm_sync.service_native import ServiceNative
from torchrl_vllm_sync.service_requests import ServiceRequests
from torchrl_vllm_sync.version_hooks import VersionHooks
from torchrl_vllm_sync.weights.push import WeightPusher

if TYPE_CHECKING:
    from types import TracebackType

    from vllm import AsyncEngineArgs

    from torchrl_vllm_sync.scaling import ScalingPolicy
    from torchrl_vllm_sync.supervisor import Supervisor
    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["AsyncVLLM", "attach", "make_async_vllm_engine"]

DEFAULT_REQUEST_TIMEOUT_S = 3600.0
_CONSTRUCTOR_KEYWORDS = (
    "actor_class",
    "num_cpus_per_replica",
    "name",
    "detached",
    "stage_weights",
    "request_timeout_s",
    "unresponsive_after_s",
    "max_restarts",
    "scaling",
)
# What a pickled copy and a process that attaches need; the rest each process makes for itself.
_SHARED = (
    "engine_args",
    "name",
    "request_timeout_s",
    "unresponsive_after_s",
    "max_restarts",
    "actor_class",
    "_resources",
    "_environment",
    "_detached",
    "_balancing",
    "_rendezvous",
    "_membership",
)


class AsyncVLLM(ServiceRequests, ServiceNative, ServiceMembers, ServiceMetrics, RLvLLMEngine):
    """Replicas of one vLLM engine behind one object, with TorchRL's names and more.

    Every public name, argument and result of TorchRL's ``AsyncVLLM`` is kept, and TorchRL's own
    ``vLLMWrapper``, ``vLLMUpdaterV2``, ``LLMCollector`` and ``RayLLMCollector`` take it for theirs.

    Lifecycle: :meth:`from_pretrained`, :meth:`launch` or :func:`attach` give a service that serves;
    :meth:`shutdown`, or leaving ``with``, ends it. The replicas also end with the process that
    launched them, unless ``detached``. A pickled copy works in any process of the Ray cluster; it
    counts its own requests and knows the others' from what the engines report.

    Example:
        >>> with AsyncVLLM.from_pretrained("Qwen/Qwen2.5-0.5B", num_replicas=2) as service:
        ...     outputs = service.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=8))
        ...     service.push_weights(trained_model)

    Args:
        engine_args: vLLM engine arguments; a copy is used. Replica ``i`` samples with
            ``seed + i``, so that replicas do not give equal prompts equal answers.
        num_replicas: Engines to start, at least 1.
        actor_class: ``EngineActor``, the default, or a subclass of it, decorated by ``ray.remote``
            or not.
        enable_prefix_caching: Overrides ``engine_args``; when both are ``None`` prefix caching is
            off, as in TorchRL. ``from_pretrained`` turns it on.
        num_cpus_per_replica: CPUs that each replica claims in Ray; 0 claims none.
        name: Name under which other processes attach; unique on the cluster.
        detached: Replicas outlive this process until somebody calls :meth:`shutdown`.
        verbose: Leave vLLM's logging in the replicas as it is; ``False`` shows errors only.
        enable_fp32_output: Compute output layers in float32, for models TorchRL has them for.
        stage_weights: Reserve memory for a second set of weights in each worker, into which
            ``BroadcastTransport(staged=True)`` sends while the replica generates.
        request_timeout_s: Time limit of requests that name none, in seconds.
        unresponsive_after_s: Seconds of silence, at least 1, after which a replica has failed: see
            ``EngineHealth`` for its engine and ``LoadMonitor`` for its actor. Longer than any step
            of the engine takes. What is dead, and not silent, is noticed within about 2 s.
        max_restarts: How often within an hour a replica that failed is started anew, with pauses
            that grow from 1 s to 60 s. The process that launched the service does that.
        scaling: Says how many replicas there should be from moment to moment, such as a
            ``QueueLengthScaling``; ``None`` leaves that to :meth:`add_replicas` and
            :meth:`remove_replicas`.

    Raises:
        UnsupportedArgumentError: A setting is out of range, ``engine_args`` are no
            ``AsyncEngineArgs``, or the platform cannot run it.

    Attributes:
        engine_args: The arguments that the replicas run with.
        max_restarts: As given.
        scaling: As given; ``None`` in copies.
        load: This process's ledger of requests in flight and of the engines' reports.
        name: Name of the service.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes an instance that TorchRL's own classes recognise, of a subclass too."""
        del args, kwargs
        return object.__new__(_recognised(_origin(cls)))  # pyright: ignore[reportReturnType]

    def __init__(
        self,
        engine_args: AsyncEngineArgs,
        num_replicas: int = 1,
        actor_class: Any = None,
        enable_prefix_caching: bool | None = None,
        *,
        num_cpus_per_replica: float = 1,
        name: str | None = None,
        detached: bool = False,
        verbose: bool = True,
        enable_fp32_output: bool = False,
        stage_weights: bool = False,
        request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
        unresponsive_after_s: float = UNRESPONSIVE_AFTER_S,
        max_restarts: int = 3,
        scaling: ScalingPolicy | None = None,
    ) -> None:
        check_integer("max_restarts", max_restarts, 0)
        for setting, value, least in (
            ("num_replicas", num_replicas, 1),
            ("num_cpus_per_replica", num_cpus_per_replica, 0),
        ):
            if value < least:
                raise UnsupportedArgumentError(f"{setting} must be at least {least}, got {value}")
        if not request_timeout_s > 0:
            raise UnsupportedArgumentError(
                f"request_timeout_s must be greater than 0, got {request_timeout_s}"
            )
        if not 1 <= unresponsive_after_s < math.inf:
            raise UnsupportedArgumentError(
                f"unresponsive_after_s must be finite and at least 1, got {unresponsive_after_s}"
            )
        if name is not None and not re.fullmatch(r"[\w.-]+", name):
            raise UnsupportedArgumentError(
                f"name must consist of letters, digits, '_', '.' and '-', got {name!r}"
            )
        self.engine_args = prepare_engine_args(engine_args, stage_weights=stage_weights)
        if not verbose:
            self.engine_args.use_tqdm_on_load = False
        if enable_prefix_caching is not None:
            self.engine_args.enable_prefix_caching = enable_prefix_caching
        elif self.engine_args.enable_prefix_caching is None:
            self.engine_args.enable_prefix_caching = False
        self._num_wanted = num_replicas
        self.max_restarts, self.scaling = max_restarts, scaling
        self.name = name or uuid.uuid4().hex[:8]
        self.request_timeout_s = request_timeout_s
        self.unresponsive_after_s = unresponsive_after_s
        self.actor_class = actor_class
        self._resources = ReplicaResources(
            0 if on_cpu() else num_workers(self.engine_args), num_cpus_per_replica
        )
        self._environment = engine_environment(
            self.engine_args, verbose=verbose, enable_fp32_output=enable_fp32_output
        )
        self._detached = detached
        self._balancing: dict[str, Any] = {}
        self._rendezvous: tuple[str, int] | None = None
        self._membership: Membership | None = None
        self._is_copy, self._supervises = False, True
        self._begin()

    # ---------------------------------------------------------------- starting and ending

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,  # noqa: A002  TorchRL's spelling
        enable_fp32_output: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Launches a service for a checkpoint.

        Args:
            model_name: Name or path of the checkpoint.
            num_devices: Devices of one replica, as tensor-parallel size.
            num_replicas: Engines to start.
            verbose: Leave vLLM's logging as it is; ``False`` shows errors only.
            compile: Let vLLM compile the model; on a CPU models run eagerly.
            enable_fp32_output: Compute output layers in float32.
            **kwargs: Keyword arguments of the constructor, and fields of ``AsyncEngineArgs``.

        Returns:
            The service, which serves.

        Raises:
            UnsupportedArgumentError: See the constructor.
            PlacementError: The cluster cannot hold the replicas; said at once.
            LaunchError: Some did not start; nothing is left behind.
        """
        own = {key: kwargs.pop(key) for key in _CONSTRUCTOR_KEYWORDS if key in kwargs}
        engine_args = make_engine_args(
            model_name,
            num_devices=num_devices,
            compile=compile,
            also_known=(*_CONSTRUCTOR_KEYWORDS, "num_replicas", "verbose", "enable_fp32_output"),
            **kwargs,
        )
        return cls.launch(
            engine_args,
            num_replicas,
            verbose=verbose,
            enable_fp32_output=enable_fp32_output,
            **own,
        )

    @classmethod
    def launch(cls, engine_args: AsyncEngineArgs, num_replicas: int = 1, **kwargs: Any) -> Self:
        """Launches a service from engine arguments.

        Args:
            engine_args: vLLM engine arguments.
            num_replicas: Engines to start.
            **kwargs: Keyword arguments of the constructor.

        Returns:
            The service, which serves.

        Raises:
            UnsupportedArgumentError: See the constructor.
            PlacementError: The cluster cannot hold the replicas; said at once.
            LaunchError: Some did not start; nothing is left behind.
        """
        service = cls(engine_args, num_replicas, **kwargs)
        service._launch()
        return service

    def _launch(self) -> None:
        """Starts the replicas; TorchRL's name for it.

        Raises:
            UnsupportedArgumentError: The service is launched already.
            PlacementError: The cluster cannot hold the replicas.
            LaunchError: Some did not start; nothing is left behind.
        """
        if self._launched:
            raise UnsupportedArgumentError(f"service {self.name} is launched already")
        ids = [str(index) for index in range(self._num_wanted)]
        self._membership = Membership(launch_replicas(self._plan(), ids))
        self._begin()
        try:
            self._call_all("keep_card", self._card())
        except BaseException:
            self.shutdown()
            raise

    def _plan(self) -> LaunchPlan:
        from torchrl_vllm_sync.engine.actor import EngineActor

        return LaunchPlan(
            name=self.name,
            engine_args=self.engine_args,
            resources=self._resources,
            environment=self._environment,
            actor_class=self.actor_class or EngineActor,
            detached=self._detached,
            timeout_s=launch_timeout_s(),
            unresponsive_after_s=self.unresponsive_after_s,
        )

    def _begin(self) -> None:
        """Makes what belongs to this process alone: ledger, balancer, monitor, pusher."""
        members = self._membership.members if self._membership else []
        self.load = LoadTracker([one.replica_id for one in members], state=ReplicaState.SERVING)
        for one in members:
            describe(self.load, one)
            if not one.joined:
                self.load.mark(one.replica_id, ReplicaState.STARTING, "it is being restarted")
        self._log, self._dashboards = StatusLog(self.load), []
        self._metadata: list[ParamMeta] | None = None
        self._last_served, self._has_asked = 0, False
        self._version_hooks = VersionHooks()
        self._pusher = WeightPusher(
            self,
            self._expected_weights,
            self._version_hooks.announce,
            strict=not self.max_restarts,
        )
        self._monitor = LoadMonitor(
            self.load,
            self._replicas_to_ask,
            unresponsive_after_s=self.unresponsive_after_s,
        )
        self._load_balancer: LoadBalancer | None = None
        self._generation: Generation | None = None
        self._fleet: Fleet | None = None
        self._supervisor: Supervisor | None = None
        if members:
            self._load_balancer = LoadBalancer(self, **self._balancing)
            self._generation = Generation(
                self._current_replicas, self.load, members[0].description, self._recovers
            )
            self._begin_supervision()
            self._monitor.start()

    def shutdown(self) -> None:
        """Ends every replica and gives back what the service held; idempotent.

        Requests still running end with ``ReplicaUnavailableError``. Called on a pickled or attached
        copy it ends the service for everybody; leaving ``with`` there only lets go.
        """
        self._end_metrics()
        self._end_supervision()
        membership, self._membership = self._membership, None
        if membership is not None and ray.is_initialized():
            members = membership.members
            groups = [one.group for one in members if one.group is not None]
            close_replicas(
                [one.replica for one in members],
                groups,
                timeout_s=CLOSE_TIMEOUT_S,
                linger_s=0.0 if self._supervises else CLOSE_LINGER_S,
            )
            for actor in named_actors(self.name).values():  # such as one that was just starting
                ray.kill(actor)
        self._let_go()  # after the replicas: that also ends a push which waits for them

    def _let_go(self) -> None:
        """Ends what belongs to this process alone; replicas live on."""
        self._end_metrics()
        self._close_dashboards()
        self._end_supervision()
        self._membership = None
        self._monitor.stop()
        self._pusher.close()
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_copy:
            self._let_go()
        else:
            self.shutdown()

    def __repr__(self) -> str:
        replicas = f"{len(self.replicas)} replicas" if self._launched else "not launched"
        return f"AsyncVLLM(name={self.name!r}, {replicas}, weight_version={self.weight_version})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SHARED}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (_origin(type(self)), self.__getstate__())


@functools.cache
def _recognised(kind: type[AsyncVLLM]) -> type[AsyncVLLM]:
    """Returns the type of ``kind``'s instances, with a name that TorchRL's wrapper looks for.

    It tells an engine by its type's name and module prefix
    (torchrl/modules/llm/policies/vllm_wrapper.py, 0.14.1); no module of this name need exist.
    """
    module = "torchrl.modules.llm.backends.vllm.torchrl_vllm_sync"
    return type(kind)("AsyncVLLM", (kind,), {"__module__": module, "_is_recognised": True})


def _origin(kind: type[AsyncVLLM]) -> type[AsyncVLLM]:
    """Returns the class that can be imported of an instance's type."""
    return kind.__bases__[0] if "_is_recognised" in vars(kind) else kind


def _rebuild(kind: type[AsyncVLLM], state: dict[str, Any]) -> AsyncVLLM:
    service = kind.__new__(kind)
    vars(service).update(state, _is_copy=True, _supervises=False, _num_wanted=0, scaling=None)
    service._begin()
    return service


def attach(name: str, *, supervise: bool = False) -> AsyncVLLM:
    """Returns a running service by its name, from any process of its Ray cluster.

    Args:
        name: The service's ``name``.
        supervise: Restart replicas that fail, and allow adding and removing some, from this process
            on; for a detached service whose launching process is gone.

    Raises:
        ServiceClosedError: No service of this name runs on the cluster.
        UnsupportedArgumentError: ``supervise`` for a service that is not detached: its replicas
            end with the process that launched it.
    """
    service = _rebuild(AsyncVLLM, find_service(name))
    if supervise:
        service._take_over()
    return service


def make_async_vllm_engine(
    *,
    model_name: str,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool = True,  # noqa: A002  TorchRL's spelling
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    **kwargs: Any,
) -> AsyncVLLM:
    """Launches a service; TorchRL's function of this name.

    Args:
        model_name: Name or path of the checkpoint.
        num_devices: Devices of one replica, as tensor-parallel size.
        num_replicas: Engines to start.
        verbose: Leave vLLM's logging as it is; ``False`` shows errors only.
        compile: Let vLLM compile the model; on a CPU models run eagerly.
        enable_fp32_output: Compute output layers in float32.
        tensor_parallel_size: The same as ``num_devices``.
        data_parallel_size: Data-parallel engines in a replica.
        pipeline_parallel_size: Pipeline stages in a replica.
        **kwargs: Keyword arguments of ``AsyncVLLM``, and fields of ``AsyncEngineArgs``.

    Returns:
        The service, which serves.

    Raises:
        UnsupportedArgumentError: See ``AsyncVLLM``.
        PlacementError: The cluster cannot hold the replicas.
        LaunchError: Some did not start; nothing is left behind.
    """
    return AsyncVLLM.from_pretrained(
        model_name,
        num_devices=num_devices,
        num_replicas=num_replicas,
        verbose=verbose,
        compile=compile,
        enable_fp32_output=enable_fp32_output,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        **kwargs,
    )

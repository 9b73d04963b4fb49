"""The service: replicated vLLM engines behind one object that TorchRL takes for its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import uuid
from typing import TYPE_CHECKING, Any, Self

import ray
import ray.util
import torch
from ray.exceptions import RayActorError, RayTaskError
from torchrl.modules.llm.backends.vllm.base import RLvLLMEngine

from torchrl_vllm_sync.background import iterate_blocking, run_blocking
from torchrl_vllm_sync.balancer import LoadBalancer
from torchrl_vllm_sync.engine_args import (
    engine_environment,
    make_engine_args,
    num_workers,
    on_cpu,
    prepare_engine_args,
)
from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    ServiceClosedError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.generation import Generation, PinnedBalancer
from torchrl_vllm_sync.launch import (
    CLOSE_TIMEOUT_S,
    LaunchedReplicas,
    LaunchPlan,
    close_replicas,
    find_replicas,
    launch_replicas,
    launch_timeout_s,
)
from torchrl_vllm_sync.load import LoadTracker
from torchrl_vllm_sync.load_monitor import LoadMonitor
from torchrl_vllm_sync.placement import ReplicaResources
from torchrl_vllm_sync.replica import Replica, ReplicaState
from torchrl_vllm_sync.weights.metadata import from_json
from torchrl_vllm_sync.weights.push import WeightPusher

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams

    from torchrl_vllm_sync.generation import PreparedBatch
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.transport import PushReport, WeightTransport

__all__ = ["AsyncVLLM", "attach", "make_async_vllm_engine"]

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 60.0
FIGURE_TIMEOUT_S = 10.0
DEFAULT_REQUEST_TIMEOUT_S = 3600.0
DEFAULT_PUSH_TIMEOUT_S = 300.0
_CONSTRUCTOR_KEYWORDS = (
    "actor_class",
    "num_cpus_per_replica",
    "name",
    "detached",
    "request_timeout_s",
)
# What a pickled copy and a process that attaches need; the rest each process makes for itself.
_SHARED = (
    "engine_args",
    "num_replicas",
    "name",
    "request_timeout_s",
    "actor_class",
    "_resources",
    "_environment",
    "_detached",
    "_balancing",
    "_rendezvous",
    "_launched_replicas",
)


class AsyncVLLM(RLvLLMEngine):
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
        request_timeout_s: Time limit of requests that name none, in seconds.

    Raises:
        UnsupportedArgumentError: A setting is out of range, or the platform cannot run it.

    Attributes:
        engine_args: The arguments that the replicas run with.
        num_replicas: Engines the service was asked for.
        replicas: Current replicas.
        load: This process's ledger of requests in flight and of the engines' reports.
        name: Name of the service.
    """

    def __init__(
        self,
        engine_args: AsyncEngineArgs,
        num_replicas: int = 1,
        actor_class: Any = None,  # noqa: ANN401  a class, or a Ray actor class
        enable_prefix_caching: bool | None = None,
        *,
        num_cpus_per_replica: float = 1,
        name: str | None = None,
        detached: bool = False,
        verbose: bool = True,
        enable_fp32_output: bool = False,
        request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S,
    ) -> None:
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
        self.engine_args = prepare_engine_args(engine_args)
        if not verbose:
            self.engine_args.use_tqdm_on_load = False
        if enable_prefix_caching is not None:
            self.engine_args.enable_prefix_caching = enable_prefix_caching
        elif self.engine_args.enable_prefix_caching is None:
            self.engine_args.enable_prefix_caching = False
        self.num_replicas = num_replicas
        self.name = name or uuid.uuid4().hex[:8]
        self.request_timeout_s = request_timeout_s
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
        self._launched_replicas: LaunchedReplicas | None = None
        self._is_copy = False
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

        Raises:
            UnsupportedArgumentError: See the constructor.
            PlacementError: The cluster cannot hold the replicas; said at once.
            LaunchError: Some did not start; nothing is left behind.
        """
        own = {key: kwargs.pop(key) for key in _CONSTRUCTOR_KEYWORDS if key in kwargs}
        return cls.launch(
            make_engine_args(model_name, num_devices=num_devices, compile=compile, **kwargs),
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
        from torchrl_vllm_sync.engine.actor import EngineActor

        self._launched_replicas = launch_replicas(
            LaunchPlan(
                name=self.name,
                engine_args=self.engine_args,
                num_replicas=self.num_replicas,
                resources=self._resources,
                environment=self._environment,
                actor_class=self.actor_class or EngineActor,
                detached=self._detached,
                timeout_s=launch_timeout_s(),
            )
        )
        self._begin()
        card = {
            **self.__getstate__(),
            "_launched_replicas": self._launched_replicas.without_actors(),
        }
        try:
            self._call_all("keep_card", card)
        except BaseException:
            self.shutdown()
            raise

    def _begin(self) -> None:
        """Makes what belongs to this process alone: ledger, balancer, monitor, pusher."""
        launched = self._launched_replicas
        replicas = launched.replicas if launched else []
        self.load = LoadTracker([one.replica_id for one in replicas], state=ReplicaState.SERVING)
        self._metadata: list[ParamMeta] | None = None
        self._pusher = WeightPusher(self, self._expected_weights)
        self._monitor = LoadMonitor(self.load, self._current_replicas)
        self._load_balancer: LoadBalancer | None = None
        self._generation: Generation | None = None
        if launched:
            self._load_balancer = LoadBalancer(self, **self._balancing)
            self._generation = Generation(
                self._current_replicas, self.load, launched.descriptions[0]
            )
            self._monitor.start()

    def shutdown(self) -> None:
        """Ends every replica and gives back what the service held; idempotent.

        Requests still running end with ``ReplicaUnavailableError``. Called on a pickled or attached
        copy it ends the service for everybody; leaving ``with`` there only lets go.
        """
        launched = self._let_go()
        if launched is not None and ray.is_initialized():
            close_replicas(launched.replicas, launched.groups, timeout_s=CLOSE_TIMEOUT_S)

    def _let_go(self) -> LaunchedReplicas | None:
        """Ends what belongs to this process alone; returns the replicas, which live on."""
        launched, self._launched_replicas = self._launched_replicas, None
        self._monitor.stop()
        self._pusher.close()
        self._begin()
        return launched

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
        kind = None if type(self) is AsyncVLLM else type(self)  # its module name is not importable
        return _rebuild, (kind, self.__getstate__())

    # ---------------------------------------------------------------- replicas

    @property
    def actors(self) -> list[Any]:
        """Ray actor handles of the current replicas; empty when the service is not launched."""
        return [one.actor for one in self._current_replicas()]

    @property
    def replicas(self) -> list[Replica]:
        """The current replicas."""
        return self._current_replicas()

    @property
    def service_name(self) -> str:
        """The same as ``name``."""
        return self.name

    @property
    def _launched(self) -> bool:
        return self._launched_replicas is not None

    def _current_replicas(self) -> list[Replica]:
        return list(self._launched_replicas.replicas) if self._launched_replicas else []

    def _serving(self) -> tuple[Generation, LoadBalancer]:
        """Returns the request side.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        if self._generation is None or self._load_balancer is None:
            raise ServiceClosedError(f"service {self.name} is not launched, or was shut down")
        return self._generation, self._load_balancer

    def call_replicas(
        self, method: str, *args: Any, deadline_s: float = RPC_TIMEOUT_S, **kwargs: Any
    ) -> dict[str, Any]:
        """Calls an engine actor's method on every replica at once.

        Args:
            method: Name of a method of ``EngineActor``.
            *args: Its arguments.
            deadline_s: Seconds to wait for all of them.
            **kwargs: Its keyword arguments.

        Returns:
            Replica id to the answer, or to the exception with which that call ended.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._serving()
        calls = {
            one.replica_id: getattr(one.actor, method).remote(*args, **kwargs)
            for one in self._current_replicas()
        }
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=deadline_s)
        answers: dict[str, Any] = {}
        for replica_id, ref in calls.items():
            if ref not in ready:
                answers[replica_id] = TimeoutError(f"no answer within {deadline_s:g} s")
                continue
            try:
                answers[replica_id] = ray.get(ref)
            except RayTaskError as error:
                answers[replica_id] = error.cause
            except RayActorError as error:
                death = ReplicaUnavailableError(replica_id, ReplicaState.FAILED, str(error))
                self.load.mark(replica_id, death.state, death.reason)
                answers[replica_id] = death
        return answers

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Calls every replica and returns the answers in order; the first failure is raised."""
        answers = list(self.call_replicas(method, *args).values())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _figure(self, method: str, actor_index: int | None) -> Any:  # noqa: ANN401
        """TorchRL's convention: one replica's figure by position, or the list of all.

        What a replica that is dead or silent would have said is unknown: ``None``.
        """
        chosen = None if actor_index is None else self._at(actor_index).replica_id
        answers = self.call_replicas(method, deadline_s=FIGURE_TIMEOUT_S)
        figures = {
            replica_id: None if isinstance(answer, BaseException) else answer
            for replica_id, answer in answers.items()
        }
        return list(figures.values()) if chosen is None else figures[chosen]

    def _at(self, actor_index: int) -> Replica:
        self._serving()
        replicas = self._current_replicas()
        if not 0 <= actor_index < len(replicas):
            raise IndexError(f"actor_index must be in [0, {len(replicas)}), got {actor_index}")
        return replicas[actor_index]

    # ---------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Any = None,  # noqa: ANN401  see Args
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,  # noqa: ANN401  vLLM's LoRARequest
        prompt_adapter_request: Any = None,  # noqa: ANN401
        guided_options_request: Any = None,  # noqa: ANN401
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        stream: bool = False,
        return_exceptions: bool = False,
    ) -> Any:  # noqa: ANN401  see Returns
        """Generates on the replicas and waits for the result; callable from any thread.

        Each output carries, beside vLLM's attributes, ``replica_id``, and ``min_version`` and
        ``max_version``: the oldest and newest policy version that may have sampled one of its
        tokens.

        Args:
            prompts: Text, token ids (a list of ``int``, a 1-D integer tensor or array), vLLM's
                ``TokensPrompt`` or ``TextPrompt``, or a list or tuple of these.
            sampling_params: For all prompts, or one for each; ``SamplingParams()``, vLLM's
                defaults with 16 tokens, when ``None``.
            prompt_token_ids: Token ids instead of ``prompts``, flat or nested.
            use_tqdm: Show a progress bar for batches of 32 prompts or more.
            lora_request: vLLM ``LoRARequest`` for all prompts.
            prompt_adapter_request: Must be ``None``: vLLM no longer has it.
            guided_options_request: Must be ``None``: vLLM no longer has it.
            timeout_seconds: Time limit of each request; ``None`` means ``request_timeout_s``.
            actor_index: Use this replica instead of the balancer's choice.
            stream: Yield partial outputs of a single prompt instead; asyncio: :meth:`astream`.
            return_exceptions: Put errors into a batch's list instead of raising the first one.

        Returns:
            A ``RequestOutput`` for one prompt, a list of them for a batch, or with ``stream`` an
            iterator of growing outputs.

        Raises:
            InvalidPromptError: Prompts or sampling parameters are not valid; nothing was sent.
            UnsupportedArgumentError: An argument that vLLM no longer has is given.
            NoReplicaAvailableError: No replica takes requests.
            GenerationTimeoutError: A request ran into its time limit; the engine dropped it.
            GenerationError: A request failed in the engine.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        for name, value in (
            ("prompt_adapter_request", prompt_adapter_request),
            ("guided_options_request", guided_options_request),
        ):
            if value is not None:
                raise UnsupportedArgumentError(
                    f"{name} must be None: vLLM no longer has it, got {type(value).__name__}"
                )
        batch, balancer = self._prepare(
            prompts,
            sampling_params,
            prompt_token_ids,
            lora_request,
            timeout_seconds,
            actor_index,
            stream=stream,
        )
        generation, _ = self._serving()
        if stream:
            return iterate_blocking(generation.stream(batch, balancer))
        outputs = run_blocking(generation.run(batch, balancer, use_tqdm=use_tqdm))
        return _unbatch(outputs, batch, return_exceptions=return_exceptions)

    async def agenerate(
        self,
        prompts: Any = None,  # noqa: ANN401
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = False,
        lora_request: Any = None,  # noqa: ANN401
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        return_exceptions: bool = False,
    ) -> Any:  # noqa: ANN401
        """:meth:`generate` for asyncio. Cancelling it ends the engines' work too.

        Arguments, results and errors are those of :meth:`generate`.
        """
        batch, balancer = await asyncio.to_thread(  # fetches the tokenizer, encodes text
            self._prepare,
            prompts,
            sampling_params,
            prompt_token_ids,
            lora_request,
            timeout_seconds,
            actor_index,
            stream=False,
        )
        generation, _ = self._serving()
        outputs = await generation.run(batch, balancer, use_tqdm=use_tqdm)
        return _unbatch(outputs, batch, return_exceptions=return_exceptions)

    async def astream(
        self,
        prompt: Any = None,  # noqa: ANN401
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,  # noqa: ANN401
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """``generate(stream=True)`` for asyncio: yields the growing outputs of one prompt."""
        batch, balancer = await asyncio.to_thread(
            self._prepare,
            prompt,
            sampling_params,
            prompt_token_ids,
            lora_request,
            timeout_seconds,
            actor_index,
            stream=True,
        )
        async with contextlib.aclosing(self._serving()[0].stream(batch, balancer)) as outputs:
            async for output in outputs:
                yield output

    def _prepare(
        self,
        prompts: Any,  # noqa: ANN401
        sampling_params: Any,  # noqa: ANN401
        prompt_token_ids: Any,  # noqa: ANN401
        lora_request: Any,  # noqa: ANN401
        timeout_seconds: float | None,
        actor_index: int | None,
        *,
        stream: bool,
    ) -> tuple[PreparedBatch, LoadBalancer | PinnedBalancer]:
        generation, balancer = self._serving()
        batch = generation.prepare(
            prompts,
            prompt_token_ids,
            sampling_params,
            lora_request=lora_request,
            timeout_s=self.request_timeout_s if timeout_seconds is None else timeout_seconds,
            stream=stream,
        )
        if actor_index is None:
            return batch, balancer
        return batch, PinnedBalancer(balancer, self._at(actor_index).replica_id)

    # ---------------------------------------------------------------- load

    def create_load_balancer(
        self, strategy: str | Sequence[str] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Replaces the balancer; requests in flight stay counted.

        Args:
            strategy: See :class:`LoadBalancer`.
            **kwargs: Its other arguments.

        Raises:
            UnknownStrategyError: A strategy's name is not registered.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._serving()
        self._load_balancer = LoadBalancer(self, strategy, **kwargs)
        self._balancing = {"strategy": strategy, **kwargs}
        return self._load_balancer

    def get_random_actor_index(self) -> int:
        """Returns the position of one of :attr:`actors`, at random."""
        self._serving()
        return secrets.randbelow(len(self._current_replicas()))

    def get_num_unfinished_requests(
        self, actor_index: int | None = None
    ) -> int | list[int | None] | None:
        """Returns the requests inside one engine, or the list for all, as they say themselves.

        ``None`` stands for an engine that does not answer.

        Raises:
            IndexError: ``actor_index`` is out of range.
        """
        return self._figure("get_num_unfinished_requests", actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float | None] | None:
        """Returns the share of KV-cache blocks in use, 0 to 1, of one engine, or the list for all.

        ``None`` until an engine has said, and for one that does not answer.

        Raises:
            IndexError: ``actor_index`` is out of range.
        """
        return self._figure("get_cache_usage", actor_index)

    def reset_prefix_cache(self) -> None:
        """Drops cached prefixes on all replicas, unless prefix caching is off.

        Pushes do not need it: requests are salted by policy version. Where running requests hold
        blocks vLLM clears nothing, which is logged.
        """
        if not self.engine_args.enable_prefix_caching:
            return
        if not all(self._call_all("reset_prefix_cache")):
            logger.warning("running requests hold KV blocks: some prefix caches were not reset")

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on every vLLM worker of every replica.

        Returns:
            One Ray object ref for each replica; its value is the list of its workers' answers.
        """
        self._serving()
        return [actor.collective_rpc.remote(method, timeout, args, kwargs) for actor in self.actors]

    # ---------------------------------------------------------------- weights

    @property
    def weight_version(self) -> int:
        """Newest policy version that every serving replica is known to hold; 0 before any push."""
        held = [
            one.weight_version
            for one in self.load.snapshots()
            if one.state.admits_requests and one.weight_version is not None
        ]
        return max(self._pusher.committed, min(held, default=0))

    def push_weights(
        self,
        weights: Any,  # noqa: ANN401  see Args
        *,
        version: int | None = None,
        transport: WeightTransport | None = None,
        timeout_s: float = DEFAULT_PUSH_TIMEOUT_S,
        clear_cache: bool = False,
    ) -> PushReport:
        """Brings every replica to new weights, keeping requests in flight.

        Args:
            weights: A module, a state dict, a TensorDict, a ``WeightSource``, or an iterable of
                ``(name, tensor)``.
            version: Policy version; by default one more than the newest.
            transport: How to send from now on; memmap in shared memory to begin with.
            timeout_s: Seconds after which a silent replica counts as failed.
            clear_cache: Recompute keys and values of requests in flight under the new weights.
                Only then do their next tokens equal those of a fresh engine.

        Returns:
            What was sent, how long each phase took, and what each replica answered.

        Raises:
            WeightMismatchError: The weights do not fit the model; nothing was sent.
            StaleVersionError: ``version`` is older than the newest; nothing was sent.
            SnapshotError: The memmap transport could not store the weights; nothing was loaded.
            WeightSyncError: Some replicas did not reach the version; they take no requests until
                they do. Pushing the same version again is safe. If none reached it, those that are
                whole go on with what they hold.
        """
        self._serving()
        if transport is not None:
            self._pusher.use(transport)
        return self._pusher.push(
            weights, version=version, timeout_s=timeout_s, clear_cache=clear_cache
        )

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
        """Makes ``transport`` the one that pushes use, and closes the one before."""
        self._pusher.use(transport)

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | str | None = None
    ) -> None:
        """Opens the transport that pushes use; TorchRL's name for it.

        Args:
            master_address: Address at which the trainer is reached; found when ``None``.
            master_port: Port of the rendezvous; found when ``None``.
        """
        self._serving()
        if master_address is not None or master_port is not None:
            address, port = self._rendezvous_point()
            self._rendezvous = (
                address if master_address is None else master_address,
                port if master_port is None else int(master_port),
            )
        self._pusher.open()

    def update_weights(self, weights: Any) -> None:  # noqa: ANN401
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
            self._serving()
            answer = self.actors[0].model_metadata.remote()
            self._metadata = from_json(ray.get(answer, timeout=RPC_TIMEOUT_S))
        return self._metadata

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of a replica."""
        return self.engine_args.tensor_parallel_size

    def get_world_size(self) -> int:
        """Returns the number of vLLM workers of all replicas together."""
        return self.num_replicas * num_workers(self.engine_args)

    def get_master_address(self) -> str:
        """Returns this node's address, as the other nodes of the Ray cluster reach it."""
        return self._rendezvous_point()[0]

    def get_master_port(self) -> int:
        """Returns a port that was free on this node when first asked for; the same ever after."""
        return self._rendezvous_point()[1]

    def _rendezvous_point(self) -> tuple[str, int]:
        if self._rendezvous is None:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._rendezvous = ray.util.get_node_ip_address(), probe.getsockname()[1]
        return self._rendezvous


# TorchRL's vLLMWrapper recognises an engine by its type's name and module prefix
# (torchrl/modules/llm/policies/vllm_wrapper.py, 0.14.1); no module of this name need exist.
AsyncVLLM.__module__ = "torchrl.modules.llm.backends.vllm.torchrl_vllm_sync"


def _rebuild(kind: type[AsyncVLLM] | None, state: dict[str, Any]) -> AsyncVLLM:
    service = object.__new__(kind or AsyncVLLM)
    vars(service).update(state, _is_copy=True)
    service._begin()
    return service


def attach(name: str) -> AsyncVLLM:
    """Returns a running service by its name, from any process of its Ray cluster.

    Args:
        name: The service's ``name``.

    Raises:
        ServiceClosedError: No service of this name runs on the cluster.
    """
    state = find_replicas(name)
    return _rebuild(None, state)


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


def _unbatch(
    outputs: list[RequestOutput | Exception], batch: PreparedBatch, *, return_exceptions: bool
) -> Any:  # noqa: ANN401
    """Gives back a list for a batch and one output otherwise; raises the first error."""
    if not return_exceptions or not batch.is_batch:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
    return outputs if batch.is_batch else outputs[0]

"""The service: replicated vLLM engines behind one object that TorchRL takes for its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import operator
import os
import re
import secrets
import sys
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, overload

import ray
from torchrl.modules.llm.backends.vllm.base import RLvLLMEngine
from tqdm import tqdm

from torchrl_vllm_sync import checks
from torchrl_vllm_sync.engine.args import (
    check_shares,
    engine_environment,
    gpu_bytes,
    make_engine_args,
    num_workers,
    on_cpu,
    prepare_engine_args,
)
from torchrl_vllm_sync.errors import NoReplicaAvailableError, UnsupportedArgumentError
from torchrl_vllm_sync.observe.metrics import MetricsExporter, metrics_port
from torchrl_vllm_sync.observe.page import Dashboard, ServiceGoneError
from torchrl_vllm_sync.observe.status import ServiceStatus
from torchrl_vllm_sync.observe.views import absent_html, status_html
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, PushReport, ReplicaState
from torchrl_vllm_sync.requests.background import iterate_blocking, run_blocking
from torchrl_vllm_sync.routing.balancer import LoadBalancer, RequestKey
from torchrl_vllm_sync.routing.ledger import LoadTracker, describe_replicas
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.service.fleet import Fleet, ScalingPolicy
from torchrl_vllm_sync.service.launch import CLOSE_LINGER_S, close_members, launch_replicas
from torchrl_vllm_sync.service.replicas import (
    DEFAULT_REQUEST_TIMEOUT_S,
    Membership,
    Replicas,
    ServiceSettings,
    find_service,
    named_actors,
)
from torchrl_vllm_sync.service.requests import GenerateOptions, Requests
from torchrl_vllm_sync.service.weights import NativeClient, Weights
from torchrl_vllm_sync.weights.transport import WeightTransport

if TYPE_CHECKING:
    from typing import Literal, Unpack

    from vllm import AsyncEngineArgs, SamplingParams

    from torchrl_vllm_sync.serve.server import OpenAIServer
    from torchrl_vllm_sync.service.requests import Prompt, ServedOutput

    Batch = Sequence[Prompt] | None
    Params = SamplingParams | Sequence[SamplingParams] | None
    One = GenerateOptions[list[int], bool]
    Many = GenerateOptions[list[list[int]], Literal[False]]
    ManyOrErrors = GenerateOptions[list[list[int]], bool]

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def of_part(
    part: str, method: Callable[Concatenate[Any, P], T], name: str = ""
) -> Callable[Concatenate[Any, P], T]:
    """Makes a method of the service that is ``method`` of one of its parts, or has a ``name``."""
    part_of = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(part_of(self), *args, **kwargs)
        except TypeError:
            try:
                inspect.signature(method).bind(self, *args, **kwargs)
            except TypeError as error:  # which is to name what was called
                raise TypeError(f"AsyncVLLM.{name or method.__name__}() {error}") from None
            raise

    return call


class AsyncVLLM(RLvLLMEngine):
    """Replicas of one vLLM engine behind one object, with TorchRL's names and more.

    TorchRL's own ``vLLMWrapper``, ``vLLMUpdaterV2`` and collectors take it for theirs.

    Lifecycle: :meth:`from_pretrained`, :meth:`launch` or :func:`attach` give a service that serves;
    :meth:`shutdown`, or leaving ``with``, ends it. The replicas also end with the process that
    launched them, unless ``detached``. A pickled copy works in any process of the Ray cluster.

    Three errors are told here only. What is not as described is refused with
    ``UnsupportedArgumentError``. What needs replicas raises ``ServiceClosedError`` before launch
    and after shutdown. Calls of vLLM's own, such as :meth:`sleep`, that come out of turn raise
    ``TransferNotReadyError`` and do nothing.

    Example:
        >>> with AsyncVLLM.from_pretrained("Qwen/Qwen2.5-0.5B", num_replicas=2) as service:
        ...     outputs = service.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=8))
        ...     service.push_weights(trained_model)

    Args:
        engine_args: vLLM engine arguments; replica ``i`` samples with ``seed + i``.
        num_replicas: Engines to start, at least 1.
        actor_class: ``EngineActor`` by default, or a subclass, decorated by ``ray.remote`` or not.
        enable_prefix_caching: Overrides ``engine_args``; off when both are ``None``, as in TorchRL.
        num_cpus_per_replica: CPUs that each replica claims in Ray; 0 claims none.
        name: Name under which other processes attach; unique on the cluster.
        detached: Replicas outlive this process until somebody calls :meth:`shutdown`.
        verbose: Show a bar of the engines that are ready; ``False`` also has vLLM log errors only.
        enable_fp32_output: Compute output layers in float32, for models TorchRL has them for.
        stage_weights: Reserve memory for a second set of weights in each worker, into which
            ``BroadcastTransport(staged=True)`` and ``P2PTransport`` send while replicas generate;
            the latter is the default then for a trainer on the same host.
        request_timeout_s: Time limit of requests that name none, in seconds.
        unresponsive_after_s: Seconds of silence, at least 1, after which a replica's engine or
            actor has failed; longer than any step of the engine takes. Death is noticed in 2 s.
        max_restarts: How often within an hour a replica that failed is started anew, with pauses
            that grow from 1 s to 60 s, by the process that launched the service.
        scaling: Says how many replicas there should be, such as a ``QueueLengthScaling``.
        colocate: Engines are on the trainer's GPUs, and sleep while it needs their memory: from
            :meth:`sleep` on, which :class:`RolloutCollector` calls before it hands a batch on,
            until the next push, which wakes them. See :meth:`awake`.
        share_weights: With ``colocate``, engines keep their memory while they sleep, and the first
            push of a module moves its parameters there, as far as these are of the engines' dtype
            and lie there in one piece: later ones send nothing. Only when engines sleep may an
            optimizer write, and a push that fails leaves them asleep. See ``MasterWeights``.
        trainer_memory_bytes: With ``colocate``, what the trainer keeps on each of these GPUs while
            engines are awake: parameters, gradients, optimizer state. Where that does not fit
            beside ``gpu_memory_utilization``, nothing is started.

    Raises:
        UnsupportedArgumentError: Also if the platform cannot run what ``engine_args`` ask for.

    Attributes:
        replicas: The current replicas, in the order of joining; each has ``replica_id``, ``actor``.
        requests, weights, fleet: The parts that run requests, push weights, and manage replicas.
        scaling: As given; ``None`` in copies.
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
        colocate: bool = False,
        share_weights: bool = False,
        trainer_memory_bytes: int = 0,
    ) -> None:
        checks.check_integer("max_restarts", max_restarts, 0)
        checks.check_integer("num_replicas", num_replicas, 1)
        checks.check_number("num_cpus_per_replica", num_cpus_per_replica, 0)
        checks.check_integer("trainer_memory_bytes", trainer_memory_bytes, 0)
        if trainer_memory_bytes and not colocate:
            raise UnsupportedArgumentError("trainer_memory_bytes is for colocate=True")
        checks.check_positive("request_timeout_s", request_timeout_s)
        if not 1 <= unresponsive_after_s < math.inf:
            raise UnsupportedArgumentError(
                f"unresponsive_after_s must be finite and at least 1, got {unresponsive_after_s}"
            )
        if name is not None and not re.fullmatch(r"[\w.-]+", name):
            raise UnsupportedArgumentError(
                f"name must consist of letters, digits, '_', '.' and '-', got {name!r}"
            )
        if colocate and (stage_weights or scaling):
            what = "stage_weights, whose second set" if stage_weights else "scaling, whose replicas"
            raise UnsupportedArgumentError(f"colocate is not for {what} would be awake")
        if share_weights and not colocate:
            raise UnsupportedArgumentError("share_weights is for colocate=True")
        engine_args = prepare_engine_args(
            engine_args, stage_weights=stage_weights, share_weights=share_weights
        )
        if colocate and not on_cpu():
            engine_args.enable_sleep_mode = not share_weights
            if trainer_memory_bytes:
                check_shares(engine_args, trainer_memory_bytes, gpu_bytes())
        if not verbose:
            engine_args.use_tqdm_on_load = False
        if enable_prefix_caching is None:
            enable_prefix_caching = bool(engine_args.enable_prefix_caching)
        engine_args.enable_prefix_caching = enable_prefix_caching
        num_gpus = 0 if on_cpu() else num_workers(engine_args)
        claims = {"GPU": float(num_gpus), "CPU": float(num_cpus_per_replica)}
        self._num_wanted, self.scaling, self._verbose = num_replicas, scaling, verbose
        settings = ServiceSettings(
            name=name or uuid.uuid4().hex[:8],
            engine_args=engine_args,
            claims={name: amount for name, amount in claims.items() if amount},
            environment=engine_environment(
                engine_args, verbose=verbose, enable_fp32_output=enable_fp32_output
            ),
            actor_class=actor_class,
            detached=detached,
            colocated=colocate,
            shares_weights=share_weights,
            request_timeout_s=request_timeout_s,
            unresponsive_after_s=unresponsive_after_s,
            max_restarts=max_restarts,
        )
        self._set_up(settings)

    def _set_up(
        self, settings: ServiceSettings, membership: Membership | None = None, is_copy: bool = False
    ) -> None:
        """Makes the parts, which belong to this process alone; with a membership they run."""
        self.replicas = Replicas(settings, membership, is_copy=is_copy)
        self.weights = Weights(self.replicas)
        self.fleet = Fleet(self.replicas, self.weights.pusher)
        self._native = NativeClient(self.replicas, self.weights)
        balancer = LoadBalancer(self, **settings.balancing) if self.replicas else None
        if balancer is not None and is_copy:
            balancer._become_a_copy()
        self.requests = Requests(self.replicas, balancer, self.fleet.recovers)
        limit_s = settings.unresponsive_after_s
        self._monitor = LoadMonitor(self.load, self.replicas.to_ask, unresponsive_after_s=limit_s)
        self._views: list[Dashboard | OpenAIServer] = []
        self._exporter: MetricsExporter | None = None
        if self.replicas:
            if not is_copy:
                self._supervise()
            self._monitor.start()

    def _supervise(self) -> None:
        me = weakref.ref(self)  # the supervisor's thread keeps no service alive
        self.fleet.supervise(self.scaling, lambda: me() is not None)

    @property
    def name(self) -> str:
        """Name of the service, unique on the cluster."""
        return self.replicas.service_name

    @property
    def engine_args(self) -> AsyncEngineArgs:
        """The arguments that the replicas run with."""
        return self.replicas.settings.engine_args

    @property
    def request_timeout_s(self) -> float:
        """Time limit of requests that name none, in seconds."""
        return self.replicas.settings.request_timeout_s

    @property
    def max_restarts(self) -> int:
        """How often within an hour a replica that failed is started anew."""
        return self.replicas.settings.max_restarts

    @property
    def load(self) -> LoadTracker:
        """This process's ledger of requests in flight and of the engines' reports."""
        return self.replicas.load

    # ---------------------------------------------------------------- starting and ending

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,  # noqa: A002  TorchRL's spelling
        enable_fp32_output: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Returns a service for a checkpoint, launched and serving.

        Args:
            model_name: Name or path of the checkpoint.
            num_devices: Devices of one replica, as tensor-parallel size.
            compile: Let vLLM compile the model; on a CPU models run eagerly.
            num_replicas, verbose, enable_fp32_output: As for the class.
            **kwargs: Other arguments of the class, and fields of ``AsyncEngineArgs``.

        Raises:
            PlacementError: The cluster cannot hold the replicas; said at once.
            LaunchError: Some did not start; nothing is left behind.
        """
        names = inspect.signature(AsyncVLLM.__init__).parameters.keys()
        names -= {"self", "engine_args", "enable_prefix_caching"}  # the last is an engine argument
        own = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        engine_args = make_engine_args(
            model_name, num_devices=num_devices, compile=compile, also_known=names, **kwargs
        )
        own |= {"verbose": verbose, "enable_fp32_output": enable_fp32_output}
        return cls.launch(engine_args, num_replicas, **own)

    @classmethod
    def launch(cls, engine_args: AsyncEngineArgs, num_replicas: int = 1, **kwargs: Any) -> Self:
        """Returns a service for engine arguments, launched and serving.

        Arguments not named here, and errors, are those of :meth:`from_pretrained`.

        Args:
            engine_args: That of the class.
            **kwargs: Its other arguments.
        """
        service = cls(engine_args, num_replicas, **kwargs)
        service._launch()
        return service

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        *,
        api_key: str | None = None,
        model: str | os.PathLike[str] | None = None,
        max_restarts: int = 1000,
        **kwargs: Any,
    ) -> Self:
        """Returns a service whose replicas are ``vllm serve`` processes that others run.

        They stay when the service ends. ``tutorials/guides/connect.md`` says how to start them, and
        what they cannot do.

        Args:
            addresses: Of the servers, such as ``"http://host:8000"``.
            api_key: What they ask for as bearer token; ``VLLM_API_KEY`` if ``None``.
            model: Name or path of their checkpoint as it is read here, for its tokenizer and the
                names of its weights; what they say themselves if ``None``.
            max_restarts: How often within an hour a server that is gone is waited for anew.
            **kwargs: Other arguments of the class that are not about engines.

        Raises:
            UnsupportedArgumentError: ``addresses`` is text, or empty.
            ServerError: Some are away, refuse the key, lack a route, or do not serve the same; it
                names each. Nothing was started.
            LaunchError: Some were lost meanwhile.
        """
        from torchrl_vllm_sync.engine import remote  # what vLLM brings along

        key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        facts = run_blocking(remote.look_at(addresses, key))
        engine_args = remote.connected_args(facts, None if model is None else os.fspath(model))
        kwargs |= {"num_cpus_per_replica": 0, "max_restarts": max_restarts}
        service = cls(engine_args, len(facts), remote.ServerActor, **kwargs)
        known = service.replicas.settings
        environment = {**known.environment, **({"VLLM_API_KEY": key} if key else {})}
        # Their devices are not Ray's to give.
        service._set_up(dataclasses.replace(known, claims={}, environment=environment))
        service._launch()
        return service

    def _launch(self) -> None:
        """Starts the replicas; TorchRL's name for it."""
        if self._launched:
            raise UnsupportedArgumentError(f"service {self.name} is launched already")
        settings = dataclasses.replace(self.replicas.settings, launched_at=time.time())
        ids = [str(index) for index in range(self._num_wanted)]
        title = f"AsyncVLLM {self.name}: engines ready"
        with tqdm(total=len(ids), desc=title, unit="engine", disable=not self._verbose) as bar:
            members = launch_replicas(settings, ids, progress=bar)
        self._set_up(settings, Membership(members))
        try:
            self.fleet.share_membership().raise_failures()
        except BaseException:
            self.shutdown()
            raise

    @property
    def _launched(self) -> bool:
        """Whether there are replicas; TorchRL's name for it."""
        return self.replicas.membership is not None

    def shutdown(self) -> None:
        """Ends every replica, for everybody, and requests still running; idempotent.

        Leaving ``with`` on a pickled or attached copy only lets go.
        """
        self._let_go(and_end=True)

    def _let_go(self, *, and_end: bool = False) -> None:
        """Ends what belongs to this process alone; replicas live on, unless they are to end too."""
        self._end_views()
        and_end = and_end and self._launched
        members = self.fleet.close()
        if and_end and ray.is_initialized():
            close_members(members, linger_s=0.0 if self.fleet.supervises else CLOSE_LINGER_S)
            for actor in named_actors(self.name).values():  # such as one that was just starting
                ray.kill(actor)
        self._monitor.stop()
        self.weights.pusher.close()  # the end of the replicas also ends a push that waits for them
        self._set_up(self.replicas.settings, is_copy=self.replicas.is_copy)

    def _end_views(self) -> None:
        """Ends what shows or serves the service; idempotent."""
        if self._exporter is not None:
            self._exporter.stop()
        for view in self._views:
            view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go(and_end=not self.replicas.is_copy)

    def __repr__(self) -> str:
        replicas = f"{len(self.replicas)} replicas" if self._launched else "not launched"
        return f"AsyncVLLM(name={self.name!r}, {replicas}, weight_version={self.weight_version})"

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.replicas.settings, self.replicas.membership
        return _rebuild, (_origin(type(self)), *state)

    # ---------------------------------------------------------------- requests

    # fmt: off
    @overload  # with neither prompts nor ids, which is refused, both of these apply
    def generate(self, prompts: Prompt | None = None, sampling_params: Params = None, *,  # pyright: ignore[reportOverlappingOverload]
                 stream: Literal[False] = False, **options: Unpack[One]) -> ServedOutput: ...
    @overload
    def generate(self, prompts: Batch = None, sampling_params: Params = None, *,
                 stream: Literal[False] = False, **options: Unpack[Many]) -> list[ServedOutput]: ...
    @overload
    def generate(self, prompts: Batch = None, sampling_params: Params = None, *,
                 stream: Literal[False] = False, **options: Unpack[ManyOrErrors],
                 ) -> list[ServedOutput | Exception]: ...
    @overload
    def generate(self, prompts: Prompt | None = None, sampling_params: Params = None, *,
                 stream: Literal[True], **options: Unpack[One]) -> Iterator[ServedOutput]: ...
    # fmt: on

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        stream: bool = False,
        return_exceptions: bool = False,
        min_version: int | None = None,
        session_id: RequestKey | Sequence[RequestKey | None] | None = None,
        group_id: RequestKey | Sequence[RequestKey | None] | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Generates on the replicas and waits for the result; callable from any thread.

        Each output carries, beside vLLM's attributes, ``replica_id``; ``version_spans``, for each
        sample the ``VersionSpan`` tuples that cover its tokens; and the oldest and newest policy
        version among them, ``min_version`` and ``max_version``.

        Args:
            prompts: Text, token ids (a list of ``int``, a 1-D integer tensor or array), vLLM's
                ``TokensPrompt`` or ``TextPrompt``, or a list or tuple of these.
            sampling_params: For all prompts, or one for each; vLLM's defaults when ``None``.
            prompt_token_ids: Token ids instead of ``prompts``, flat or nested.
            use_tqdm: Show a progress bar for batches of 32 prompts or more.
            lora_request: vLLM ``LoRARequest`` for all prompts.
            prompt_adapter_request, guided_options_request: Must be ``None``: vLLM has none.
            timeout_seconds: Time limit of each request; ``None`` means ``request_timeout_s``.
            actor_index: Use this replica instead of the balancer's choice.
            stream: Yield partial outputs of a single prompt instead, the newest where the reader is
                slower than the engine; no ``DELTA`` is left out. When its replica is lost another
                goes on behind the tokens received, or begins again where that is unsound:
                with a ``seed``, penalties that count the answer alone, ``n > 1``, structured
                outputs. Those of kind ``DELTA`` then end with an error.
            return_exceptions: Put errors into a batch's list instead of raising the first one.
            min_version: Begin only under this policy version or a later one; a replica that holds
                it, pushed or not yet, is waited for within the time limit.
            session_id: Names the conversation of a prompt: an integer or text, one for all prompts
                or a list with one, or ``None``, for each. A session stays with the replica whose
                prefix cache holds it, unless moving costs less; see :meth:`release_sessions`.
            group_id: Names prompts that are alike, such as the samples of one GRPO group, in the
                same forms. What begins goes where its group is, unless that replica is overloaded.
            adapter: Name of an adapter that was pushed, see :class:`AdapterSource`; by default the
                only one, if there is one. ``""`` is the base weights alone.

        Returns:
            A ``RequestOutput`` for one prompt, a list of them for a batch, or with ``stream`` an
            iterator of growing outputs.

        Raises:
            InvalidPromptError: Prompts or sampling parameters are not valid; nothing was sent.
            UnsupportedArgumentError: Also if there is not one ``session_id`` or ``group_id`` for
                each prompt; nothing was sent.
            NoReplicaAvailableError: No replica takes requests.
            GenerationTimeoutError: A request ran into its time limit; the engine dropped it.
            VersionNotReachedError: No replica held ``min_version`` in time; it says what each does.
            RequestLostError: Three replicas lost a request, or there was no other to take it up.
            GenerationError: A request failed in the engine.
        """
        if prompt_adapter_request is not None or guided_options_request is not None:
            raise UnsupportedArgumentError(
                "prompt_adapter_request must be None, and guided_options_request must be None: "
                "vLLM no longer has them"
            )
        options = lora_request, timeout_seconds, actor_index, min_version, session_id, group_id
        batch = self.requests.prepare(
            prompts, sampling_params, prompt_token_ids, *options, adapter, stream=stream
        )
        if stream:
            return iterate_blocking(self.requests.stream(batch))
        outputs = self.requests.run(batch, use_tqdm=use_tqdm, return_exceptions=return_exceptions)
        return run_blocking(outputs)

    # fmt: off
    @overload
    async def agenerate(self, prompts: Prompt | None = None, sampling_params: Params = None,
                        **options: Unpack[One]) -> ServedOutput: ...
    @overload
    async def agenerate(self, prompts: Batch = None, sampling_params: Params = None,
                        **options: Unpack[Many]) -> list[ServedOutput]: ...
    @overload
    async def agenerate(self, prompts: Batch = None, sampling_params: Params = None,
                        **options: Unpack[ManyOrErrors]) -> list[ServedOutput | Exception]: ...
    # fmt: on

    async def agenerate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool = False,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        return_exceptions: bool = False,
        min_version: int | None = None,
        session_id: RequestKey | Sequence[RequestKey | None] | None = None,
        group_id: RequestKey | Sequence[RequestKey | None] | None = None,
        adapter: str | None = None,
    ) -> Any:
        """:meth:`generate` for asyncio. Cancelling it ends the engines' work too.

        Arguments, results and errors are those of :meth:`generate`.
        """
        options = lora_request, timeout_seconds, actor_index, min_version, session_id, group_id
        batch = await asyncio.to_thread(  # fetches the tokenizer, encodes text
            self.requests.prepare, prompts, sampling_params, prompt_token_ids, *options, adapter
        )
        return await self.requests.run(
            batch, use_tqdm=use_tqdm, return_exceptions=return_exceptions
        )

    async def astream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        min_version: int | None = None,
        session_id: RequestKey | None = None,
        group_id: RequestKey | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[ServedOutput]:
        """Yields the growing outputs of one prompt: ``generate(stream=True)`` for asyncio.

        Arguments but ``prompt``, and errors, are those of :meth:`generate`.

        Args:
            prompt: One prompt, in any form that :meth:`generate` takes.
        """
        options = lora_request, timeout_seconds, actor_index, min_version, session_id, group_id
        given = prompt, sampling_params, prompt_token_ids, *options, adapter
        batch = await asyncio.to_thread(self.requests.prepare, *given, stream=True)
        async with contextlib.aclosing(self.requests.stream(batch)) as outputs:
            async for output in outputs:
                yield output

    release_sessions = of_part("requests.balancer", LoadBalancer.release_sessions)

    def create_load_balancer(
        self, strategy: str | Sequence[str] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Returns a new balancer; requests in flight stay counted, sessions are forgotten.

        Args:
            strategy: That of :class:`LoadBalancer`, which raises its errors.
            **kwargs: Its other arguments.
        """
        self.replicas.require()
        balancer = self.requests.balancer = LoadBalancer(self, strategy, **kwargs)
        balancing = {"strategy": strategy, **kwargs}
        self.replicas.settings = dataclasses.replace(self.replicas.settings, balancing=balancing)
        return balancer

    def get_random_actor_index(self) -> int:
        """Returns the position of one of :attr:`actors`, at random."""
        self.replicas.require()
        return secrets.randbelow(len(self.replicas))

    def get_num_unfinished_requests(
        self, actor_index: int | None = None
    ) -> int | list[int | None] | None:
        """Returns the requests inside one engine, or the list for all; ``None`` if it is silent.

        Args:
            actor_index: Position in :attr:`actors`; ``None`` for all.

        Raises:
            IndexError: ``actor_index`` is out of range.
        """
        return self.replicas.figure("get_num_unfinished_requests", actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float | None] | None:
        """Returns the share of KV-cache blocks in use, 0 to 1; ``None`` also before it is known.

        Arguments and errors are those of :meth:`get_num_unfinished_requests`.
        """
        return self.replicas.figure("get_cache_usage", actor_index)

    def reset_prefix_cache(self) -> None:
        """Drops cached prefixes on all replicas, which pushes do not need; logs where it cannot."""
        if not self.engine_args.enable_prefix_caching:
            return
        for replica_id, done in self.replicas.call_replicas("reset_prefix_cache").items():
            if done is not True:
                why = done or "running requests hold KV blocks"
                logger.warning("replica %s: its prefix cache was not reset: %s", replica_id, why)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls ``method`` on every vLLM worker of every replica.

        Args:
            method, args, kwargs: Name and arguments of a method of the worker or its extension.
            timeout: Seconds for the call, during which an engine may be silent; ``None`` sets no
                limit, and allows 300 s of silence.

        Returns:
            One Ray object ref for each replica; its value is the list of its workers' answers.
        """
        self.replicas.require()
        return [actor.collective_rpc.remote(method, timeout, args, kwargs) for actor in self.actors]

    # ---------------------------------------------------------------- weights and their versions

    @property
    def weight_version(self) -> int:
        """Newest policy version that every serving replica is known to hold; 0 before any push."""
        return self.weights.version

    @property
    def weight_versions(self) -> dict[str, int | None]:
        """Replica id to the policy version it last said it holds; ``None`` if it has not said."""
        return self.weights.versions

    push_weights = of_part("weights", Weights.push, "push_weights")
    audit = of_part("weights", Weights.audit)
    wait_for_version = of_part("weights", Weights.wait_for_version)
    get_model_metadata = of_part(  # pyright: ignore[reportAssignmentType]
        "weights", Weights.model_metadata, "get_model_metadata"
    )

    def register_version_hook(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Returns what unregisters ``hook``, which is called once a version that is pushed here.

        In the thread that pushes, before :meth:`push_weights` returns. If hooks raise, all are
        called and the first exception leaves :meth:`push_weights`.

        Args:
            hook: Called with the ``PushReport``; may be registered once.
        """
        return self.weights.hooks.register(hook)

    @contextlib.contextmanager
    def pinned(
        self,
        version: int | None = None,
        *,
        timeout_s: float = checks.DEFAULT_TIMEOUT_S,
        allow_last: bool = False,
    ) -> Iterator[AsyncVLLM]:
        """Gives one replica as a service of its own that keeps its version while others move on.

        Pushes, snapshots and the service's requests pass it by, but for those it has begun. Leaving
        ``with``, however that happens, hands it back: it catches up, and then serves again. If it
        dies, requests of the inner service raise ``RequestLostError`` or
        ``NoReplicaAvailableError``, and it is restarted with current weights once handed back.
        The same processes may do it as :meth:`add_replicas`.

        Args:
            version: Policy version that it must serve; the newest that one does if ``None``.
            timeout_s: Seconds to wait for a push that is under way.
            allow_last: Pin even the only replica that serves. Until it is handed back, requests to
                this service and pushes find none then.

        Yields:
            A service whose :attr:`weight_version` stays as it is. It refuses pushes.

        Raises:
            VersionNotReachedError: No replica serves ``version``; it says what each does.
            NoReplicaAvailableError: None serves, or only one.
            PushUnderWayError, SyncError: Another trainer's push, or this process's, took too long.
        """
        if version is not None:
            checks.check_integer("version", version, 0)
        checks.check_seconds("timeout_s", timeout_s)
        with self.fleet.held(version, timeout_s, allow_last=allow_last) as member:
            # Nobody's membership is newer, and nobody restarts it.
            settings = dataclasses.replace(self.replicas.settings, max_restarts=0)
            membership = Membership([member], epoch=sys.maxsize)
            with _rebuild(PinnedVLLM, settings, membership) as service:
                yield service

    def follow_snapshots(
        self,
        directory: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        interval_s: float = 1.0,
        timeout_s: float = checks.DEFAULT_TIMEOUT_S,
        verify: bool = True,
    ) -> None:
        """Has every replica load new versions of a snapshot directory on its own, as they appear.

        For a trainer that only writes, with ``SnapshotWriter``. Replicas may differ for a moment.

        Args:
            directory: Visible to every replica's node, and need not exist yet; replaces another.
            run_id: Load snapshots of this training run only; ``None`` loads those of any.
            interval_s: Seconds between looks, greater than 0.
            timeout_s: Seconds for each load.
            verify: Check the stored checksums before each load.

        Raises:
            UnsupportedArgumentError: ``interval_s`` is not greater than 0.
        """
        checks.check_positive("interval_s", interval_s)
        options = {"interval_s": interval_s, "timeout_s": timeout_s, "verify": verify}
        call = self.replicas.call_replicas
        call("follow_snapshots", str(directory), run_id, **options).raise_failures()

    def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self.replicas.call_replicas("stop_following").raise_failures()

    def use_transport(self, transport: WeightTransport) -> None:
        """Makes another transport the one that pushes use, and closes the one before.

        Args:
            transport: What to send through.
        """
        self.weights.pusher.use(transport)

    def init_weight_update_group(
        self, master_address: str | None = None, master_port: int | str | None = None
    ) -> None:
        """Opens the transport that pushes use; TorchRL's name for it.

        Args:
            master_address, master_port: Where the trainer is met; found when ``None``.
        """
        self.replicas.require()
        if master_address is not None or master_port is not None:
            self.replicas.meeting_point(master_address, master_port)
        self.weights.pusher.open()

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of a replica."""
        return self.engine_args.tensor_parallel_size

    def get_world_size(self) -> int:
        """Returns the number of vLLM workers of all replicas together."""
        return sum(one.description.num_workers for one in self.replicas.members)

    def get_master_address(self) -> str:
        """Returns this node's address, as the other nodes of the Ray cluster reach it."""
        return self.replicas.meeting_point()[0]

    def get_master_port(self) -> int:
        """Returns a port that was free on this node when first asked for; the same ever after."""
        return self.replicas.meeting_point()[1]

    # ---------------------------------------------------------------- vLLM's own calls

    init_weight_transfer_engine = of_part("_native", NativeClient.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = of_part(
        "_native", NativeClient.shutdown_weight_transfer_engine
    )
    use_transfer_engine = of_part("_native", NativeClient.use_transfer_engine)
    start_weight_update = of_part("_native", NativeClient.start_weight_update)
    update_weights = of_part(  # pyright: ignore[reportAssignmentType]
        "_native", NativeClient.update_weights
    )
    finish_weight_update = of_part("_native", NativeClient.finish_weight_update)
    pause_generation = of_part("_native", NativeClient.pause_generation)
    resume_generation = of_part("_native", NativeClient.resume_generation)
    is_paused = of_part("_native", NativeClient.is_paused)
    sleep = of_part("_native", NativeClient.sleep)
    wake_up = of_part("_native", NativeClient.wake_up)

    @property
    def colocated(self) -> bool:
        """Whether engines share the trainer's GPUs, and are woken by pushes."""
        return self.replicas.settings.colocated

    @contextlib.contextmanager
    def awake(self, weights: Any, **options: Any) -> Iterator[PushReport]:
        """Brings engines that sleep to new weights, and lets them sleep again after ``with``.

        Their memory is woken in two steps, so that it never holds keys and values beside what is
        being sent. Requests in flight at the end wait until the engines are awake again, and then
        go on under the weights of that time.

        Args:
            weights: As for :meth:`push_weights`.
            **options: Those of :meth:`push_weights`.

        Yields:
            The report, with ``wake_s``, ``wake_cache_s``, and ``sleep_s`` of the sleep before in
            its ``phases``.

        Raises:
            UnsupportedArgumentError: The service was launched without ``colocate=True``.
        """
        if not self.colocated:
            raise UnsupportedArgumentError("only a service with colocate=True goes to sleep")
        report = self.push_weights(weights, **options)
        try:
            yield report
        finally:
            self.sleep(2, "keep")

    # ---------------------------------------------------------------- replicas coming and going

    @property
    def actors(self) -> list[Any]:
        """Ray actor handles of the current replicas; empty when the service is not launched.

        The actor of a replica that is being restarted is the former one, which is dead.
        """
        return [one.actor for one in self.replicas]

    @property
    def num_replicas(self) -> int:
        """The replicas there are; before the launch, those that it will start."""
        return len(self.replicas) if self._launched else self._num_wanted

    add_replicas = of_part("fleet", Fleet.add_replicas)
    remove_replicas = of_part("fleet", Fleet.remove_replicas)

    def wait_until_serving(
        self, num_replicas: int | None = None, *, timeout_s: float = checks.DEFAULT_TIMEOUT_S
    ) -> None:
        """Waits until replicas serve, such as after one had to be restarted.

        Args:
            num_replicas: How many; ``None`` for all that the service has.
            timeout_s: Seconds to wait; 0 only looks.

        Raises:
            NoReplicaAvailableError: Fewer serve after that time; it says what each is.
        """
        checks.check_seconds("timeout_s", timeout_s, or_zero=True)
        if num_replicas is not None:
            checks.check_integer("num_replicas", num_replicas, 0)

        def serving() -> tuple[int, int]:
            self.replicas.require()
            states = [one.state for one in self.load.snapshots()]
            wanted = len(states) if num_replicas is None else num_replicas
            return states.count(ReplicaState.SERVING), wanted  # updating ones hold requests back

        if not self.load.wait_until(lambda: operator.ge(*serving()) or None, timeout_s):
            found, wanted = serving()
            what = f"{found} of {wanted} replicas serve after {timeout_s:g} s"
            states = describe_replicas(self.load.snapshots(), ())
            raise NoReplicaAvailableError(f"{what}: {states}")

    # ---------------------------------------------------------------- looking at it

    def status(self) -> ServiceStatus:
        """Returns what this process knows of the service now, by the last reports of each second.

        Asks nobody, but for the first time in a pickled or attached copy.
        """
        self.replicas.require()
        return self.weights.log.status(
            self.name,
            self.weight_version,
            self.replicas.members,
            launched_at=self.replicas.settings.launched_at,
            requests=self.requests.counts.totals(),
        )

    def dashboard(
        self, port: int = 0, host: str = "127.0.0.1", history: str | os.PathLike[str] | None = None
    ) -> Dashboard:
        """Returns the server of a page that shows the service, until this process lets it go.

        Args:
            port: Port to listen on, which must be free; 0 takes a free one.
            host: Address to listen on; whoever reaches one other than the loopback can read it.
            history: File that keeps what the plots show, and goes on with what it holds;
                ``torchrl-vllm-sync dashboard FILE`` shows it when the service has ended.
        """
        self.replicas.require()
        me: weakref.ref[AsyncVLLM] = weakref.ref(self)

        def look() -> ServiceStatus:
            if (service := me()) is None:
                raise ServiceGoneError("the service is gone")
            return service.status()

        board = Dashboard(look, host=host, port=port, history=history)
        self._views = [*(one for one in self._views if one.is_open), board]
        return board

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        *,
        capture: int = False,
        **options: Any,
    ) -> OpenAIServer:
        """Returns an OpenAI server over the replicas, which ends with it or with the service.

        ``tutorials/guides/serving.md`` says what it answers, and how versions and sessions appear.

        Args:
            host: Name or address to listen on; only this machine reaches the default one.
            port: Port to listen on, which must be free; 0 takes a free one.
            api_key: What clients must send as bearer token; ``VLLM_API_KEY`` if ``None``, and
                without either anybody who reaches the address may ask.
            capture: Keep what sessions ask and get, as tokens, in the server's ``sessions``; a
                number is how many answers at most, by default 16,384. Sampling parameters that
                their clients leave out are then vLLM's, not those of the checkpoint.
            **options: Those of ``vllm serve`` that concern answers, such as ``tool_call_parser``.

        Raises:
            UnsupportedArgumentError: Also if the installed vLLM has other serving classes.
            NoReplicaAvailableError: No replica could be asked for its configuration.
        """
        from torchrl_vllm_sync.serve.server import OpenAIServer  # what vLLM brings along

        self.replicas.require()
        server = OpenAIServer(self, host, port, api_key, options, capture)
        self._views = [*(one for one in self._views if one.is_open), server]
        return server

    def _repr_html_(self) -> str:
        """What a notebook shows: the replicas as they are at this moment."""
        return status_html(self.status()) if self._launched else absent_html(self.name)

    def export_metrics(self, interval_s: float = 5.0) -> MetricsExporter:
        """Returns what exports this service's metrics through Ray, until it is stopped.

        ``tutorials/guides/metrics.md`` lists them, and says how Prometheus scrapes them.

        Args:
            interval_s: Seconds from one export to the next, greater than 0.

        Raises:
            UnsupportedArgumentError: Also if this process exports them already.
        """
        self.replicas.require()
        if self._exporter is not None and self._exporter.is_running:
            told = f"the metrics of service {self.name} are exported by this process already"
            raise UnsupportedArgumentError(told)
        self._exporter = MetricsExporter(self, interval_s=interval_s)
        if not metrics_port():
            remedy = "ray[default] must be installed where Ray is started"
            logger.warning("Ray serves no metrics on this node: %s", remedy)
        return self._exporter


class PinnedVLLM(AsyncVLLM):
    """What :meth:`AsyncVLLM.pinned` gives: a copy that knows of one replica, at one version."""

    def push_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: a pinned replica keeps its version."""
        del args, kwargs
        raise UnsupportedArgumentError("weights must not be pushed to a replica that is pinned")

    update_weights = push_weights

    def shutdown(self) -> None:
        """Lets go of the replica, which lives on."""
        self._let_go()


@functools.cache
def _recognised(kind: type[AsyncVLLM]) -> type[AsyncVLLM]:
    """Returns ``kind`` under the name and module prefix by which TorchRL finds engines."""
    # torchrl/modules/llm/policies/vllm_wrapper.py, 0.14.1; no module of this name need exist.
    module = "torchrl.modules.llm.backends.vllm.torchrl_vllm_sync"
    return type(kind)("AsyncVLLM", (kind,), {"__module__": module, "_is_recognised": True})


def _origin(kind: type[AsyncVLLM]) -> type[AsyncVLLM]:
    """Returns the importable class of an instance's type."""
    return kind.__bases__[0] if "_is_recognised" in vars(kind) else kind


def _rebuild(
    kind: type[AsyncVLLM], settings: ServiceSettings, membership: Membership | None
) -> AsyncVLLM:
    service: AsyncVLLM = object.__new__(_recognised(kind))  # a subclass's may want arguments
    service._num_wanted, service.scaling, service._verbose = 0, None, False
    service._set_up(settings, membership, is_copy=True)
    return service


def attach(name: str, *, supervise: bool = False) -> AsyncVLLM:
    """Returns a running service by its name, from any process of its Ray cluster.

    Args:
        name: The service's ``name``.
        supervise: Restart, add and remove replicas from this process on; for a detached service
            whose launching process is gone.

    Raises:
        ServiceClosedError: No service of this name runs on the cluster.
        UnsupportedArgumentError: ``supervise`` for a service that is not detached: its replicas
            end with the process that launched it.
    """
    settings, membership = find_service(name)
    if supervise and not settings.detached:
        raise UnsupportedArgumentError(
            f"supervise must be False: service {name} is not detached, so that its replicas end "
            "with the process that launched it"
        )
    service = _rebuild(AsyncVLLM, settings, membership)
    if supervise:
        service._supervise()
    return service


def make_async_vllm_engine(
    *,
    model_name: str | os.PathLike[str],
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
    """Returns a service, launched and serving; TorchRL's function of this name.

    Arguments not named here, and errors, are those of :meth:`AsyncVLLM.from_pretrained`.

    Args:
        tensor_parallel_size: The same as ``num_devices``.
        data_parallel_size: Data-parallel engines in a replica.
        pipeline_parallel_size: Pipeline stages in a replica.
    """
    given = dict(locals())
    return AsyncVLLM.from_pretrained(**given | given.pop("kwargs"))

"""The service: replicated vLLM engines behind one object that TorchRL takes for its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import re
import secrets
import uuid
import weakref
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
from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.observe.metrics import MetricsExporter, metrics_port
from torchrl_vllm_sync.observe.page import Dashboard, ServiceGoneError
from torchrl_vllm_sync.observe.status import StatusLog, collect_status
from torchrl_vllm_sync.observe.views import absent_html, status_html
from torchrl_vllm_sync.replica import UNRESPONSIVE_AFTER_S, ReplicaState
from torchrl_vllm_sync.requests.generation import (
    REQUEST_ENDS,
    Generation,
    iterate_blocking,
    run_blocking,
)
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import LoadMonitor
from torchrl_vllm_sync.service.fleet import Fleet, ServiceMembers, describe
from torchrl_vllm_sync.service.launch import (
    CLOSE_LINGER_S,
    CLOSE_TIMEOUT_S,
    LaunchPlan,
    ReplicaResources,
    close_replicas,
    find_service,
    launch_replicas,
    launch_timeout_s,
    named_actors,
)
from torchrl_vllm_sync.service.replicas import Membership, ServiceReplicas
from torchrl_vllm_sync.service.weights import ServiceNative, ServiceVersions
from torchrl_vllm_sync.weights.push import VersionHooks, WeightPusher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from types import TracebackType

    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams

    from torchrl_vllm_sync.observe.status import ServiceStatus
    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.requests.generation import PreparedBatch
    from torchrl_vllm_sync.routing.placer import RequestKey
    from torchrl_vllm_sync.service.supervisor import ScalingPolicy, Supervisor
    from torchrl_vllm_sync.weights.metadata import ParamMeta

logger = logging.getLogger(__name__)

# The request side of a service: generating, and the load that decides where.


class ServiceRequests(ServiceReplicas):
    """The part of a service that runs requests.

    Attributes:
        engine_args: The arguments that the replicas run with.
        request_timeout_s: Time limit of requests that name none, in seconds.
    """

    engine_args: AsyncEngineArgs
    request_timeout_s: float
    _generation: Generation | None
    _load_balancer: LoadBalancer | None
    _balancing: dict[str, Any]

    def _serving(self) -> tuple[Generation, LoadBalancer]:
        """Returns the request side."""
        if self._generation is None or self._load_balancer is None:
            raise ServiceClosedError(f"service {self.name} is not launched, or was shut down")
        return self._generation, self._load_balancer

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
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
    ) -> Any:
        """Generates on the replicas and waits for the result; callable from any thread.

        Each output carries, beside vLLM's attributes, ``replica_id``; ``version_spans``, for each
        of its samples a tuple of ``VersionSpan(version, start, end)`` that covers its tokens; and
        ``min_version`` and ``max_version``, the oldest and newest policy version among them.

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
            stream: Yield partial outputs of a single prompt instead; asyncio: :meth:`astream`. When
                its replica is lost another goes on behind the tokens received. With a ``seed``,
                penalties that count the answer alone, ``n > 1``, structured outputs or anything
                else that makes this unsound it begins again, and so do the outputs; those of kind
                ``DELTA`` then end with an error.
            return_exceptions: Put errors into a batch's list instead of raising the first one.
            min_version: Begin only under this policy version or a later one, waiting for a replica
                that holds it. The wait counts against the time limit. A version that nobody has
                pushed yet is waited for too.
            session_id: Names the conversation of a prompt: an integer or text, one for all prompts
                or a list with one, or ``None``, for each. A session stays with the replica that
                served it last, whose prefix cache holds it, whatever the strategy. It moves when
                that replica dies, drains, goes stale or gets new weights, and when its KV cache is
                about to overflow and computing the session elsewhere costs less. Each process
                remembers its own; see :meth:`release_sessions`.
            group_id: Names prompts that are alike, such as the samples of one GRPO group, in the
                same forms. What begins goes where its group is, unless that replica is overloaded.

        Returns:
            A ``RequestOutput`` for one prompt, a list of them for a batch, or with ``stream`` an
            iterator of growing outputs.

        Raises:
            InvalidPromptError: Prompts or sampling parameters are not valid; nothing was sent.
            UnsupportedArgumentError: An argument that vLLM no longer has is given,
                ``min_version`` is no version, or there is not one ``session_id`` or ``group_id``
                for each prompt; nothing was sent.
            NoReplicaAvailableError: No replica takes requests.
            GenerationTimeoutError: A request ran into its time limit; the engine dropped it.
            VersionNotReachedError: No replica held ``min_version`` in time; it says what each does.
            RequestLostError: Three replicas lost a request, or there was no other to take it up.
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
            min_version=min_version,
            session_id=session_id,
            group_id=group_id,
            stream=stream,
        )
        generation, _ = self._serving()
        if stream:
            return iterate_blocking(generation.stream(batch, balancer))
        outputs = run_blocking(generation.run(batch, balancer, use_tqdm=use_tqdm))
        return _unbatch(outputs, batch, return_exceptions=return_exceptions)

    async def agenerate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
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
    ) -> Any:
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
            min_version=min_version,
            session_id=session_id,
            group_id=group_id,
            stream=False,
        )
        generation, _ = self._serving()
        outputs = await generation.run(batch, balancer, use_tqdm=use_tqdm)
        return _unbatch(outputs, batch, return_exceptions=return_exceptions)

    async def astream(
        self,
        prompt: Any = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        min_version: int | None = None,
        session_id: RequestKey | None = None,
        group_id: RequestKey | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the growing outputs of one prompt: ``generate(stream=True)`` for asyncio.

        Args:
            prompt: One prompt, in any form that :meth:`generate` takes.
            sampling_params: See :meth:`generate`, also for what follows.
            prompt_token_ids: Token ids instead of ``prompt``.
            lora_request: vLLM ``LoRARequest``.
            timeout_seconds: Time limit; ``None`` means ``request_timeout_s``.
            actor_index: Use this replica instead of the balancer's choice.
            min_version: Begin only under this policy version or a later one.
            session_id: Names the conversation.
            group_id: Names prompts that are alike.

        Yields:
            ``RequestOutput`` objects, each with all tokens so far unless ``output_kind`` says
            otherwise. Errors are those of :meth:`generate`.
        """
        batch, balancer = await asyncio.to_thread(
            self._prepare,
            prompt,
            sampling_params,
            prompt_token_ids,
            lora_request,
            timeout_seconds,
            actor_index,
            min_version=min_version,
            session_id=session_id,
            group_id=group_id,
            stream=True,
        )
        async with contextlib.aclosing(self._serving()[0].stream(batch, balancer)) as outputs:
            async for output in outputs:
                yield output

    def _prepare(
        self,
        prompts: Any,
        sampling_params: Any,
        prompt_token_ids: Any,
        lora_request: Any,
        timeout_seconds: float | None,
        actor_index: int | None,
        *,
        min_version: int | None,
        session_id: Any,
        group_id: Any,
        stream: bool,
    ) -> tuple[PreparedBatch, LoadBalancer]:
        generation, balancer = self._serving()
        batch = generation.prepare(
            prompts,
            prompt_token_ids,
            sampling_params,
            lora_request=lora_request,
            timeout_s=self.request_timeout_s if timeout_seconds is None else timeout_seconds,
            stream=stream,
            min_version=min_version,
            session_id=session_id,
            group_id=group_id,
            only=None if actor_index is None else self._at(actor_index).replica_id,
        )
        return batch, balancer

    def release_sessions(self, session_ids: RequestKey | Iterable[RequestKey]) -> int:
        """Forgets sessions that are over, in this process.

        Not necessary: the balancer forgets the least recently used of more than ``max_sessions``.

        Args:
            session_ids: One, or several. Those that are not known are passed over.

        Returns:
            How many were known.

        Raises:
            UnsupportedArgumentError: One is neither an integer nor text that is not empty.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        _, balancer = self._serving()
        return balancer.release_sessions(session_ids)

    def create_load_balancer(
        self, strategy: str | Sequence[str] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Replaces the balancer; requests in flight stay counted, sessions are forgotten.

        Args:
            strategy: See :class:`LoadBalancer`.
            **kwargs: Its other arguments.

        Returns:
            The balancer that requests go through from now on.

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
        return secrets.randbelow(len(self.replicas))

    def get_num_unfinished_requests(
        self, actor_index: int | None = None
    ) -> int | list[int | None] | None:
        """Returns the requests inside one engine, or the list for all, as they say themselves.

        ``None`` stands for an engine that does not answer.

        Args:
            actor_index: Position in :attr:`actors`; ``None`` for all.

        Raises:
            IndexError: ``actor_index`` is out of range.
        """
        return self._figure("get_num_unfinished_requests", actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float | None] | None:
        """Returns the share of KV-cache blocks in use, 0 to 1, of one engine, or the list for all.

        ``None`` until an engine has said, and for one that does not answer.

        Args:
            actor_index: Position in :attr:`actors`; ``None`` for all.

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
        for replica_id, done in self.call_replicas("reset_prefix_cache").items():
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
            method: Name of a method of the worker or of its extension.
            timeout: Seconds for the call, during which an engine may be silent; ``None`` sets no
                limit, and allows 300 s of silence.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            One Ray object ref for each replica; its value is the list of its workers' answers.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._serving()
        return [actor.collective_rpc.remote(method, timeout, args, kwargs) for actor in self.actors]


def _unbatch(
    outputs: list[RequestOutput | Exception], batch: PreparedBatch, *, return_exceptions: bool
) -> Any:
    """Gives back a list for a batch and one output otherwise; raises the first error."""
    if not return_exceptions or not batch.is_batch:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
    return outputs if batch.is_batch else outputs[0]


# Looking at a service: what it is and does now.


class ServiceView(ServiceVersions):
    """The part of a service that shows what it is and does."""

    _dashboards: list[Dashboard]

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

    def dashboard(self, port: int = 0, host: str = "127.0.0.1") -> Dashboard:
        """Serves a page that shows the service as it runs; see ``Dashboard``.

        It works for copies and attached services too. It ends with this process's handle on the
        service: with :meth:`shutdown`, with ``with``, or when nobody has the handle any more.

        Args:
            port: Port to listen on; 0 takes a free one.
            host: Name or address to listen on. Other than the loopback address it can be read by
                everybody who reaches this machine.

        Returns:
            The dashboard, which serves already. Its ``url`` is the page's address.

        Raises:
            UnsupportedArgumentError: There is no such host or port, or it is taken.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        me: weakref.ref[ServiceView] = weakref.ref(self)

        def look() -> ServiceStatus:
            service = me()
            if service is None:
                raise ServiceGoneError("the service is gone")
            return service.status()

        board = Dashboard(look, host=host, port=port)
        self._dashboards = [*(one for one in self._dashboards if one.is_open), board]
        return board

    def _close_dashboards(self) -> None:
        """Ends those that are still open; idempotent."""
        boards, self._dashboards = self._dashboards, []
        for board in boards:
            board.close()

    def _repr_html_(self) -> str:
        """What a notebook shows: the replicas as they are at this moment."""
        return status_html(self.status()) if self._launched else absent_html(self.name)


# Metrics of a service for Prometheus, through Ray.


class ServiceMetrics(ServiceView):
    """The part of a service that others measure."""

    _generation: Generation | None
    _exporter: MetricsExporter | None = None

    def export_metrics(self, interval_s: float = 5.0) -> MetricsExporter:
        """Exports this service's metrics through Ray, until it ends or the exporter is stopped.

        They are in what Prometheus scrapes of this node, which needs ``ray[default]``;
        ``tutorials/guides/metrics.md`` lists them.

        Args:
            interval_s: Seconds from one export to the next, greater than 0.

        Returns:
            What exports them. Its ``stop()`` ends that.

        Raises:
            UnsupportedArgumentError: They are exported already, or ``interval_s`` is no such
                number.
            ServiceClosedError: The service is not launched, or was shut down.
        """
        self._require_launched()
        if self._exporter is not None and self._exporter.is_running:
            raise UnsupportedArgumentError(
                f"the metrics of service {self.name} are exported by this process already"
            )
        self._exporter = MetricsExporter(self, interval_s=interval_s)
        if not metrics_port():
            logger.warning(
                "Ray serves no metrics on this node, and nothing can be scraped: ray[default] must "
                "be installed where Ray is started"
            )
        return self._exporter

    def request_totals(self) -> dict[str, int]:
        """Returns how many requests of this process have ended, by how they did.

        The ends are ``"answered"``, ``"lost"`` (by a ``RequestLostError``), ``"failed"`` and
        ``"cancelled"``, which streams that are not read to their end are too.
        """
        if self._generation is None:
            return dict.fromkeys(REQUEST_ENDS, 0)
        return self._generation.counts.totals()

    def listen_to_pushes(self, listener: Callable[[PushStatus], object]) -> Callable[[], None]:
        """Has ``listener`` called with each push of this process that ends, well or not.

        It is called in the thread that pushes, before ``push_weights`` returns, and must not raise.

        Args:
            listener: Called with what became of the push.

        Returns:
            A function that ends this; calling it twice does nothing.
        """
        return self._log.listen(listener)

    def _end_metrics(self) -> None:
        """Exports nothing any more; idempotent."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.stop()


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
        """Starts the replicas; TorchRL's name for it."""
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
    service: AsyncVLLM = object.__new__(_recognised(kind))  # a subclass's may want arguments
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

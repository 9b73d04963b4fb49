"""The request side of a service: generating, and the load that decides where."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.generation import (
    Generation,
    PinnedBalancer,
    iterate_blocking,
    run_blocking,
)
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.service_replicas import ServiceReplicas

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams

    from torchrl_vllm_sync.requests.generation import PreparedBatch
    from torchrl_vllm_sync.routing.placer import RequestKey

__all__ = ["ServiceRequests"]

logger = logging.getLogger(__name__)


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
        """Returns the request side.

        Raises:
            ServiceClosedError: The service is not launched, or was shut down.
        """
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
    ) -> tuple[PreparedBatch, LoadBalancer | PinnedBalancer]:
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
        )
        if actor_index is None:
            return batch, balancer
        return batch, PinnedBalancer(balancer, self._at(actor_index).replica_id)

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

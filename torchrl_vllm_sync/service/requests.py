"""The requests of a service: prompts in, ``RequestOutput`` objects out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.requests.generation import REQUEST_ENDS, Generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from vllm import RequestOutput

    from torchrl_vllm_sync.requests.generation import PreparedBatch
    from torchrl_vllm_sync.routing.balancer import LoadBalancer
    from torchrl_vllm_sync.service.replicas import Replicas


class Requests:
    """Runs calls to ``generate`` over the replicas."""

    def __init__(
        self, replicas: Replicas, balancer: LoadBalancer | None, recovers: Callable[[], bool]
    ) -> None:
        self._replicas, self._balancer = replicas, balancer
        self._generation: Generation | None = None
        if members := replicas.members:
            description = members[0].description
            self._generation = Generation(replicas.current, replicas.load, description, recovers)

    @property
    def generation(self) -> Generation:
        self._replicas.require()
        assert self._generation is not None, "there are replicas"
        return self._generation

    @property
    def balancer(self) -> LoadBalancer:
        self._replicas.require()
        assert self._balancer is not None, "there are replicas"
        return self._balancer

    @balancer.setter
    def balancer(self, balancer: LoadBalancer) -> None:
        self._replicas.require()
        self._balancer = balancer

    def prepare(
        self,
        prompts: Any,
        sampling_params: Any,
        prompt_token_ids: Any,
        *,
        timeout_s: float | None,
        actor_index: int | None,
        stream: bool = False,
        **options: Any,
    ) -> PreparedBatch:
        """Checks everything about a call; ``options`` are those of ``Generation.prepare``."""
        default_s = self._replicas.settings.request_timeout_s
        return self.generation.prepare(
            prompts,
            prompt_token_ids,
            sampling_params,
            timeout_s=default_s if timeout_s is None else timeout_s,
            stream=stream,
            only=None if actor_index is None else self._replicas.at(actor_index).replica_id,
            **options,
        )

    def stream(self, batch: PreparedBatch) -> AsyncGenerator[RequestOutput]:
        """Yields the growing outputs of a call with one prompt."""
        return self.generation.stream(batch, self.balancer)

    async def run(self, batch: PreparedBatch, *, use_tqdm: bool, return_exceptions: bool) -> Any:
        """Returns a list for a batch and one output otherwise; raises the first error."""
        outputs = await self.generation.run(batch, self.balancer, use_tqdm=use_tqdm)
        if not return_exceptions or not batch.is_batch:
            for output in outputs:
                if isinstance(output, Exception):
                    raise output
        return outputs if batch.is_batch else outputs[0]

    def request_totals(self) -> dict[str, int]:
        """Returns how many requests of this process have ended, by ``REQUEST_ENDS``."""
        if self._generation is None:
            return dict.fromkeys(REQUEST_ENDS, 0)
        return self._generation.counts.totals()

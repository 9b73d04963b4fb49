"""The requests of a service: prompts in, ``RequestOutput`` objects out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.requests.generation import (
    REQUEST_ENDS,
    Generation,
    PinnedBalancer,
    run_blocking,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from vllm import RequestOutput

    from torchrl_vllm_sync.requests.generation import PreparedBatch
    from torchrl_vllm_sync.routing.balancer import LoadBalancer
    from torchrl_vllm_sync.service.replicas import Replicas


class PreparedCall(NamedTuple):
    """A checked call to ``generate``, and what chooses its replicas."""

    batch: PreparedBatch
    balancer: LoadBalancer | PinnedBalancer


class Requests:
    """Runs calls to ``generate`` over the replicas.

    Attributes:
        balancer: Chooses among them; ``None`` unless the service is launched.
    """

    def __init__(
        self, replicas: Replicas, balancer: LoadBalancer | None, recovers: Callable[[], bool]
    ) -> None:
        self._replicas, self.balancer = replicas, balancer
        self._generation: Generation | None = None
        if members := replicas.members:
            description = members[0].description
            self._generation = Generation(replicas.current, replicas.load, description, recovers)

    @property
    def generation(self) -> Generation:
        """What runs them; there must be replicas."""
        if self._generation is None or self._replicas.membership is None:
            self._replicas.require()
            raise ServiceClosedError(f"service {self._replicas.service_name} was shut down")
        return self._generation

    def prepare(
        self,
        prompts: Any,
        sampling_params: Any,
        prompt_token_ids: Any,
        lora_request: Any,
        timeout_s: float | None,
        actor_index: int | None,
        *,
        min_version: int | None,
        session_id: Any,
        group_id: Any,
        stream: bool = False,
    ) -> PreparedCall:
        """Checks everything about a call before any of it is sent."""
        default_s = self._replicas.settings.request_timeout_s
        batch = self.generation.prepare(
            prompts,
            prompt_token_ids,
            sampling_params,
            lora_request=lora_request,
            timeout_s=default_s if timeout_s is None else timeout_s,
            stream=stream,
            min_version=min_version,
            session_id=session_id,
            group_id=group_id,
        )
        assert self.balancer is not None, "there are replicas"
        if actor_index is None:
            return PreparedCall(batch, self.balancer)
        chosen = self._replicas.at(actor_index).replica_id
        return PreparedCall(batch, PinnedBalancer(self.balancer, chosen))

    def stream(self, call: PreparedCall) -> AsyncGenerator[RequestOutput]:
        """Yields the growing outputs of a call with one prompt."""
        return self.generation.stream(call.batch, call.balancer)

    async def run(self, call: PreparedCall, *, use_tqdm: bool, return_exceptions: bool) -> Any:
        """Returns a list for a batch and one output otherwise; raises the first error."""
        batch = call.batch
        outputs = await self.generation.run(batch, call.balancer, use_tqdm=use_tqdm)
        if not return_exceptions or not batch.is_batch:
            for output in outputs:
                if isinstance(output, Exception):
                    raise output
        return outputs if batch.is_batch else outputs[0]

    def run_blocking(self, call: PreparedCall, **options: Any) -> Any:
        """The same for code that is not asynchronous, in any thread."""
        return run_blocking(self.run(call, **options))

    def request_totals(self) -> dict[str, int]:
        """Returns how many requests of this process have ended, by how they did.

        The ends are ``"answered"``, ``"lost"`` (by a ``RequestLostError``), ``"failed"`` and
        ``"cancelled"``, which streams that are not read to their end are too.
        """
        if self._generation is None:
            return dict.fromkeys(REQUEST_ENDS, 0)
        return self._generation.counts.totals()

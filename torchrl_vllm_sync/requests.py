"""What travels between a service and an engine actor for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_vllm_sync.wire import WireOutput

__all__ = ["EngineRequest", "EngineResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt with its sampling parameters, on its way to an engine.

    Attributes:
        request_id: Unique within the service.
        prompt: vLLM ``TokensPrompt``: ``prompt_token_ids`` and whatever else vLLM accepts there.
        sampling_params: vLLM ``SamplingParams``.
        lora_request: vLLM ``LoRARequest``, or ``None``.
        timeout_s: Seconds after which the engine ends the request.
    """

    request_id: str
    prompt: dict[str, Any]
    sampling_params: Any
    timeout_s: float
    lora_request: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """The end of one request, or one step of it when streaming.

    Attributes:
        request_id: Id of the request it answers.
        replica_id: Replica that answered.
        output: The output, flattened; ``None`` when ``error`` is set.
        finished: Whether this is the request's last output.
        error: Why the request failed; ``None`` when it did not.
        min_version: Oldest policy version that may have sampled a token of this output.
        max_version: Newest one.
    """

    request_id: str
    replica_id: str
    output: WireOutput | None = None
    finished: bool = True
    error: Exception | None = None
    min_version: int | None = None
    max_version: int | None = None

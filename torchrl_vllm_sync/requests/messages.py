"""What travels between a service and an engine actor for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.versions import max_version, min_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm import RequestOutput

    from torchrl_vllm_sync.requests.wire import WireOutput
    from torchrl_vllm_sync.versions import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunAnswer:
    """What a replica that was lost had sent of the one sample of a request, for another to go on.

    Attributes:
        token_ids: All tokens that were received, at least one.
        spans: Which version sampled which of them.
        logprobs: vLLM's ``SampleLogprobs`` of all of them, or ``None``.
        cumulative_logprob: Their sum, or ``None``.
        prompt_logprobs: What outputs are to say of the prompt: vLLM's ``PromptLogprobs``, nothing
            where each holds only what is new, or ``None``.
        num_cached_tokens: Tokens of the prompt that came from the first replica's prefix cache.
        queue_s: Seconds in the first replica's queue.
        prefill_s: Seconds to its first token.
    """

    token_ids: tuple[int, ...]
    spans: tuple[VersionSpan, ...]
    logprobs: Any = None
    cumulative_logprob: float | None = None
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt with its sampling parameters, on its way to an engine.

    Attributes:
        request_id: Unique within the service.
        prompt: vLLM ``TokensPrompt``: ``prompt_token_ids`` and whatever else vLLM accepts there.
        sampling_params: vLLM ``SamplingParams``.
        lora_request: vLLM ``LoRARequest``, or ``None``.
        timeout_s: Seconds after which the engine ends the request.
        min_version: Oldest policy version to begin it under; 0 takes any.
        session_id: The conversation that it belongs to, or ``None``.
        group_id: The group of requests with the same prompt that it belongs to, or ``None``.
        begun: The answer so far, to go on with; ``None`` to begin.
        attempt: How often it was sent before.
    """

    request_id: str
    prompt: dict[str, Any]
    sampling_params: Any
    timeout_s: float
    lora_request: Any = None
    min_version: int = 0
    session_id: str | int | None = None
    group_id: str | int | None = None
    begun: BegunAnswer | None = None
    attempt: int = 0

    @property
    def abort_id(self) -> str:
        """Id by which it is aborted: another one each time that it is sent.

        An engine turns away what was aborted before it came. What an actor that was out of reach is
        asked for again is not to be taken for that.
        """
        return f"{self.request_id}~{self.attempt}" if self.attempt else self.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """What the engine's replica knows of one sample beside vLLM's output.

    Attributes:
        spans: Which version sampled which of the tokens that came with it.
        num_cached_tokens: Tokens of its prompt that came from the prefix cache; ``None`` if vLLM
            has not said.
        queue_s: Seconds in vLLM's queue; ``None`` if vLLM has not said, as below.
        prefill_s: Seconds from the first batch that it was part of to its first token.
        decode_s: Seconds from the first token to the last.
    """

    spans: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """The end of one request, or one step of it when streaming.

    Attributes:
        request_id: Id of the request it answers.
        replica_id: Replica that answered.
        output: The output, flattened; ``None`` when ``error`` is set.
        finished: Whether this is the request's last output.
        error: Why the request failed; ``None`` when it did not.
        samples: One report for each of the output's samples, in its order.
        version: What the replica held when it answered.
    """

    request_id: str
    replica_id: str
    output: WireOutput | None = None
    finished: bool = True
    error: Exception | None = None
    samples: tuple[SampleReport, ...] = ()
    version: int | None = None


def mark_output(
    output: RequestOutput, samples: Sequence[SampleReport], *, replica_id: str, version: int
) -> None:
    """Sets the attributes that this library adds to vLLM's outputs.

    ``version_spans`` and ``sample_reports``, one of each for each sample; ``min_version`` and
    ``max_version`` over all of them; and ``replica_id``.
    """
    spans = [span for one in samples for span in one.spans]
    vars(output).update(
        replica_id=replica_id,
        version_spans=tuple(one.spans for one in samples),
        sample_reports=tuple(samples),
        min_version=min_version(spans, default=version),
        max_version=max_version(spans, default=version),
    )

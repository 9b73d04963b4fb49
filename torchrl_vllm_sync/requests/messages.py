"""What travels between a service and an engine actor for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.versions import max_version, min_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrl_vllm_sync.versions import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunAnswer:
    """What a lost replica had sent of the one sample of a request, for another to go on."""

    token_ids: tuple[int, ...]  # all that were received, at least one
    spans: tuple[VersionSpan, ...]
    logprobs: Any = None  # vLLM's SampleLogprobs of all of them
    cumulative_logprob: float | None = None
    # What outputs are to say of the prompt: vLLM's PromptLogprobs, nothing where each output holds
    # only what is new, or None.
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = None  # these three were measured by the first replica
    queue_s: float | None = None
    prefill_s: float | None = None


# No slots: a frozen class with slots is pickled by Python code, object by object.
@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One checked prompt with its sampling parameters, on its way to an engine."""

    request_id: str  # unique within the service
    prompt: dict[str, Any]  # vLLM's TokensPrompt: prompt_token_ids, and what else vLLM accepts
    sampling_params: Any  # vLLM's SamplingParams
    timeout_s: float  # seconds after which the engine ends it
    lora_request: Any = None  # vLLM's LoRARequest
    min_version: int = 0  # oldest policy version to begin it under; 0 takes any
    session_id: str | int | None = None  # the conversation that it belongs to
    group_id: str | int | None = None  # the group of requests with the same prompt
    begun: BegunAnswer | None = None  # the answer so far, to go on with
    attempt: int = 0  # how often it was sent before

    @property
    def abort_id(self) -> str:
        """Id by which it is aborted: another one for each attempt."""
        # An engine turns away what was aborted before it came, and must not take for that what an
        # actor that was out of reach gets again.
        return f"{self.request_id}~{self.attempt}" if self.attempt else self.request_id


# A report and a result travel as columns, which takes their attributes to be in a dict.
@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """What the replica knows of one sample beside vLLM's output; None is what vLLM has not said."""

    spans: tuple[VersionSpan, ...] = ()  # of the tokens that came with it
    num_cached_tokens: int | None = None  # tokens of its prompt from the prefix cache
    queue_s: float | None = None  # in vLLM's queue
    prefill_s: float | None = None  # from the first batch that it was part of to its first token
    decode_s: float | None = None  # from the first token to the last


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """The end of one request, or one step of it when streaming."""

    request_id: str
    replica_id: str
    # vLLM's RequestOutput inside the engine's process, an OutputRow outside; None with an error.
    output: Any = None
    finished: bool = True
    error: Exception | None = None
    samples: tuple[SampleReport, ...] = ()  # one for each of the output's samples, in its order
    version: int | None = None  # what the replica held when it answered


def marks(samples: Sequence[SampleReport], *, replica_id: str, version: int) -> dict[str, Any]:
    """This library's attributes of a vLLM output, from one report for each sample."""
    spans = [span for one in samples for span in one.spans]
    return {
        "replica_id": replica_id,
        "version_spans": tuple(one.spans for one in samples),
        "sample_reports": tuple(samples),
        "min_version": min_version(spans, default=version),
        "max_version": max_version(spans, default=version),
    }

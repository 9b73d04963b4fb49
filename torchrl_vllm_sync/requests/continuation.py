"""Resumption of an answer that another replica began: whether it is sound, and with what.

The new replica gets the prompt and the tokens that were received, which to its engine are all
prompt. That gives the answer of an unbroken run wherever sampling neither asks which of the earlier
tokens are prompt and which are answer, nor keeps state from step to step. ``engine.resumption`` has
everything else that vLLM does with an answer begin where the other ended.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.requests.messages import BegunAnswer
from torchrl_vllm_sync.versions import spans_from_starts

if TYPE_CHECKING:
    from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult


# Fields of vLLM's SamplingParams with which an answer can be gone on with. A field that is not here
# must have its default, so that one which a later vLLM adds is unsound until it was looked at.
# Among those left out: `seed` (the generator's state is lost), `presence_penalty` and
# `frequency_penalty` (count the answer alone), `bad_words` and `repetition_detection` (match within
# the answer), `structured_outputs`, `thinking_token_budget` and `extra_args` (state of their own),
# `n` (samples that have ended would be sampled again), `prompt_logprob_token_ids` and
# `prompt_logprob_start` (rows of the prompt), `trace_decode_token_ids` (counted from the first).
_SOUND_SETTINGS = frozenset(
    {
        # Applied to each distribution by itself.
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "allowed_token_ids",
        # Counts prompt and answer alike: apply_penalties in vllm/model_executor/layers/utils.py.
        "repetition_penalty",
        # Reduced by what was received.
        "max_tokens",
        "min_tokens",
        # Looked for in the newest token alone, or in the text, which begins where it ended.
        "stop_token_ids",
        "ignore_eos",
        "stop",
        "include_stop_str_in_output",
        # Of what is reported, not of what is sampled.
        "logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "skip_reading_prefix_cache",
        # Set by vLLM itself, from those above and from the model.
        "output_text_buffer_length",
        "_eos_token_id",
        "_all_stop_token_ids",
    }
)
# Entries of a prompt that say the same of one that is longer. Placeholders of images or sound would
# also be looked for among the tokens of the answer.
_SOUND_ENTRIES = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def unsound_settings(request: EngineRequest) -> list[str]:
    """Returns what makes it unsound to go on with an answer to a request; empty if nothing does."""
    from vllm import SamplingParams

    params, default = request.sampling_params, SamplingParams()
    found = [
        name
        for name in SamplingParams.__struct_fields__
        if name not in _SOUND_SETTINGS and not _equal(getattr(params, name), getattr(default, name))
    ]
    return found + [name for name in request.prompt if name not in _SOUND_ENTRIES]


class AnswerSoFar:
    """What a stream has yielded of the answer to one request."""

    def __init__(self, request: EngineRequest) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._request = request
        self._only_new = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._forget()

    def _forget(self) -> None:
        self._last: EngineResult | None = None
        # Of the outputs so far together: those of single tokens would take 10 KB each.
        self._token_ids: list[int] = []
        self._starts: list[tuple[int, int]] = []  # where each version began
        self._logprobs: Any = None

    def add(self, result: EngineResult) -> None:
        if not self._only_new:
            self._forget()
        if result.output is not None:
            self._last = result
            if self._only_new:
                self._take(result)

    def _take(self, result: EngineResult) -> None:
        samples, at = next(result.output.samples())
        logprobs: Any = samples.fields["logprobs"][at]
        if self._logprobs is None:
            self._logprobs = logprobs
        else:
            self._logprobs.extend(logprobs or ())
        begin = len(self._token_ids)
        self._starts += [(one.version, begin + one.start) for one in result.samples[0].spans]
        self._token_ids += result.output.answers[0].tolist()

    @property
    def is_whole(self) -> bool:
        """Whether the last output has all tokens, not only those of a step or of one sample."""
        return self._request.sampling_params.n == 1 and not self._only_new

    @property
    def final_reason(self) -> str:
        """Why no other replica can take the request up; empty if one can."""
        if not self._only_new or not self._num_tokens() or not (unsound := self._obstacles()):
            return ""
        return (
            "and a stream of deltas that has begun can neither begin again nor be gone on with "
            f"because of {', '.join(unsound)}"
        )

    def follow_up(self, request: EngineRequest) -> EngineRequest:
        """Returns what to ask the next replica for."""
        if not self._num_tokens() or self._obstacles():
            self._forget()
            return request
        return dataclasses.replace(request, begun=self._begun())

    def _obstacles(self) -> list[str]:
        unsound = unsound_settings(self._request)
        limit = self._request.sampling_params.max_tokens
        if limit is not None and self._num_tokens() >= limit:
            unsound.append(f"max_tokens={limit}, which have all come")
        return unsound

    def _num_tokens(self) -> int:
        return len(self._token_ids or (self._last.output.answers[0] if self._last else ()))

    def _begun(self) -> BegunAnswer:
        assert self._last is not None, "there are tokens"
        if not self._token_ids:
            self._take(self._last)
        output, report = self._last.output.make(), self._last.samples[0]
        is_rest = self._only_new and output.prompt_logprobs is not None
        return BegunAnswer(
            token_ids=tuple(self._token_ids),
            spans=spans_from_starts(self._starts, len(self._token_ids)),
            logprobs=self._logprobs,
            cumulative_logprob=output.outputs[0].cumulative_logprob,
            prompt_logprobs=[] if is_rest else output.prompt_logprobs,
            num_cached_tokens=report.num_cached_tokens,
            queue_s=report.queue_s,
            prefill_s=report.prefill_s,
        )


def _equal(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)

"""The policy for TorchRL's collectors: TorchRL's wrapper, plus what it drops of each output."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import vLLMWrapper as _TorchRLWrapper

from torchrl_vllm_sync import keys
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service import AsyncVLLM
from torchrl_vllm_sync.versions import expand_spans, max_version, min_version

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from torchrl_vllm_sync.requests import SampleReport

__all__ = ["vLLMWrapper"]

# What is stamped, by the names at the top.
_STAMPS = list(dict.fromkeys(one if isinstance(one, str) else one[0] for one in keys.STAMPED_KEYS))

# The outputs of the engine call that is being turned into a TensorDict, in this thread.
_outputs: ContextVar[list[Any]] = ContextVar("torchrl_vllm_sync_outputs")


class vLLMWrapper(_TorchRLWrapper):  # noqa: N801  TorchRL's spelling
    """TorchRL's ``vLLMWrapper`` over a service, with what TorchRL drops of each response kept.

    Each generated row carries more entries than TorchRL's, whose names are in
    ``torchrl_vllm_sync.keys``. Where no shape is given it is the batch's.

    - ``"policy_version"``, int64: the oldest policy version that sampled one of the row's tokens.
      ``PolicyAgeFilter`` works on it as it is. A collector's own stamp, made when the environment
      steps, is overwritten.
    - ``"max_policy_version"``, int64: the newest one.
    - ``("policy_versions", "response")``, int64, laid out as ``("tokens", "response")``: the
      version that sampled each token; -1 on padding.
    - ``("policy_versions", "full")``, int64, laid out as ``("tokens", "full")``: the same, with -1
      on the prompt. Absent with ``input_mode="text"``, where TorchRL has no ``("tokens", "full")``.
    - ``"finish_reason"``, text: vLLM's reason (``"stop"``, ``"length"``, ``"abort"``).
    - ``("generation", "num_cached_tokens")``, int64: tokens of the prompt that came from the prefix
      cache; -1 where vLLM did not say.
    - ``("generation", "queue_time")``, ``"prefill_time"`` and ``"decode_time"``, float32 seconds:
      from vLLM's queue to its first batch, from there to the first token, from there to the last.
      Pauses are part of the phase they fall into; what a request did before an update sent it back
      is not counted. NaN where vLLM did not say.
    - ``("generation", "replica_id")``, text: the replica that answered.

    Prompt log-probabilities are not asked for while generating unless ``generate_kwargs`` has
    ``prompt_logprobs``: asking makes vLLM skip its prefix cache (``vllm/sampling_params.py``,
    ``skip_reading_prefix_cache``). TorchRL then fills the prompt's slice with NaN, which
    ``GRPOLoss`` masks, and logs once that it got none.

    Example:
        >>> policy = vLLMWrapper(service, tokenizer=tokenizer, input_mode="history")

    Args:
        model: The service.
        generate: Generate; ``False`` scores given tokens.
        generate_kwargs: Sampling parameters.
        **kwargs: Everything else of TorchRL's wrapper.

    Raises:
        UnsupportedArgumentError: ``model`` is not a service of this library.
        ValueError: See TorchRL's wrapper.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401  a service
        *,
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, AsyncVLLM):
            raise UnsupportedArgumentError(
                f"model must be a torchrl_vllm_sync.AsyncVLLM, got {type(model).__name__}; "
                "for other engines use torchrl.modules.llm.vLLMWrapper"
            )
        generate_kwargs = dict(generate_kwargs or {})
        if generate:
            generate_kwargs.setdefault("prompt_logprobs", None)
        super().__init__(model, generate=generate, generate_kwargs=generate_kwargs, **kwargs)
        if generate:
            self.out_keys = [*self.out_keys, *_STAMPS]

    def _call_generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        kwargs.setdefault("use_tqdm", False)  # the loop that collects has its own bar
        outputs = super()._call_generate(*args, **kwargs)
        _outputs.set(outputs if isinstance(outputs, list) else [outputs])
        return outputs

    def _from_vllm_generate_history(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._stamped(super()._from_vllm_generate_history(*args, **kwargs))

    def _from_vllm_generate_text(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._stamped(super()._from_vllm_generate_text(*args, **kwargs))

    def _from_vllm_generate_tokens(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._stamped(super()._from_vllm_generate_tokens(*args, **kwargs))

    def _stamped(self, out: TensorDictBase) -> TensorDictBase:
        """Adds the entries of this library to what TorchRL made of an engine call's outputs."""
        width = prompt_width = None
        if self.pad_output:
            width = out.get((self.tokens_key, "response")).shape[-1]
            if self.input_mode != "text":
                prompt_width = out.get((self.tokens_key, "full")).shape[-1] - width
        rows: list[TensorDictBase] = []
        for output in _outputs.get():
            if not self.pad_output and self.input_mode != "text":
                prompt_width = len(output.prompt_token_ids)
            for completion, sample in zip(output.outputs, output.sample_reports, strict=True):
                row = _row(output, completion, sample)
                response = _padded(expand_spans(sample.spans), width)
                row.set(keys.RESPONSE_VERSIONS, response)
                if prompt_width is not None:  # TorchRL has no ids of prompts that came as text
                    prompt = torch.full((prompt_width,), keys.NO_VERSION)
                    row.set(keys.FULL_VERSIONS, torch.cat([prompt, response]))
                rows.append(row)
        for size in reversed(out.shape[1:]):
            rows = [lazy_stack(rows[at : at + size]) for at in range(0, len(rows), size)]
        return out.update(lazy_stack(rows))


def _row(output: Any, completion: Any, sample: SampleReport) -> TensorDictBase:  # noqa: ANN401
    """Returns the entries of one response that do not depend on its layout."""
    seconds = {
        keys.QUEUE_TIME: sample.queue_s,
        keys.PREFILL_TIME: sample.prefill_s,
        keys.DECODE_TIME: sample.decode_s,
    }
    cached = sample.num_cached_tokens
    counts = {
        keys.POLICY_VERSION: min_version(sample.spans, default=output.min_version),
        keys.MAX_POLICY_VERSION: max_version(sample.spans, default=output.max_version),
        keys.NUM_CACHED_TOKENS: keys.UNKNOWN_COUNT if cached is None else cached,
    }
    row = TensorDict()
    for key, count in counts.items():
        row.set(key, torch.tensor(count, dtype=torch.int64))
    for key, value in seconds.items():
        row.set(key, torch.tensor(math.nan if value is None else value, dtype=torch.float32))
    row.set_non_tensor(keys.FINISH_REASON, completion.finish_reason)
    row.set_non_tensor(keys.REPLICA_ID, output.replica_id)
    return row


def _padded(versions: list[int], width: int | None) -> torch.Tensor:
    """Returns versions as a tensor, padded to ``width`` on the right where there is one."""
    padding = [] if width is None else [keys.NO_VERSION] * (width - len(versions))
    return torch.tensor([*versions, *padding], dtype=torch.int64)

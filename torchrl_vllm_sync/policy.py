"""The policy for TorchRL's collectors: TorchRL's wrapper, plus what it drops of each output."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack
from torchrl.modules.llm import vLLMWrapper as _TorchRLWrapper

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service import AsyncVLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

__all__ = ["vLLMWrapper"]

# The outputs of the engine call that is being turned into a TensorDict, in this thread.
_outputs: ContextVar[list[Any]] = ContextVar("torchrl_vllm_sync_outputs")


class vLLMWrapper(_TorchRLWrapper):  # noqa: N801  TorchRL's spelling
    """TorchRL's ``vLLMWrapper`` over a service, with the version and end of each sample kept.

    Each generated row carries two entries more than TorchRL's:

    - ``"policy_version"``, int64, of the batch's shape: the oldest policy version that sampled one
      of the row's tokens. ``PolicyAgeFilter`` works on it as it is. A collector's own stamp, made
      when the environment steps, is overwritten.
    - ``"finish_reason"``, text: vLLM's reason (``"stop"``, ``"length"``, ``"abort"``).

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
            self.out_keys = [*self.out_keys, "policy_version", "finish_reason"]

    def _call_generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        kwargs.setdefault("use_tqdm", False)  # the loop that collects has its own bar
        outputs = super()._call_generate(*args, **kwargs)
        _outputs.set(outputs if isinstance(outputs, list) else [outputs])
        return outputs

    def _from_vllm_generate_history(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return _stamped(super()._from_vllm_generate_history, *args, **kwargs)

    def _from_vllm_generate_text(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return _stamped(super()._from_vllm_generate_text, *args, **kwargs)

    def _from_vllm_generate_tokens(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return _stamped(super()._from_vllm_generate_tokens, *args, **kwargs)


def _stamped(convert: Callable[..., TensorDictBase], *args: Any, **kwargs: Any) -> TensorDictBase:
    """Runs TorchRL's conversion and adds the entries of this library to its result."""
    out = convert(*args, **kwargs)
    completions = [(request, one) for request in _outputs.get() for one in request.outputs]
    versions = torch.tensor([request.min_version for request, _ in completions], dtype=torch.int64)
    out.set("policy_version", versions.view(out.shape))
    flat = NonTensorStack(*[one.finish_reason for _, one in completions])  # pyright: ignore[reportAbstractUsage]
    out.set("finish_reason", flat if out.ndim == 1 else flat.view(out.shape))
    return out

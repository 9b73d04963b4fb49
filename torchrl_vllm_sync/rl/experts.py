"""The experts that an engine chose for each token, in the routers of the trainer's model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchrl_vllm_sync.errors import InvalidPromptError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.rows import ROUTED_EXPERTS
from torchrl_vllm_sync.weights.module import base_model, unwrap


@contextmanager
def replay_routed_experts(model: torch.nn.Module, experts: torch.Tensor) -> Iterator[None]:
    """Inside, a mixture of experts computes each token by the experts that the engine chose.

    They take the place of those that routers of transformers find by ``torch.topk``; how much each
    weighs, and gradients, are the routers' own. For another model write a function like this one.

    Args:
        model: The model, which is called once inside.
        experts: Integers ``[B, T, layers, top_k]`` for the tokens that it is called with, as vLLM
            has them, dense layers included; -1 leaves the choice to the router.

    Yields:
        Nothing: the model is called meanwhile, once.

    Raises:
        UnsupportedArgumentError: The model is compiled, or transformers does not say what its
            routers are; when it is called, a router does not choose once by ``torch.topk``.
        InvalidPromptError: ``experts`` have the shape of another model, or there is no such expert.
    """
    core: Any = base_model(unwrap(model))
    routers, config = _routers(model, core), core.config.get_text_config()
    if not isinstance(top_k := getattr(config, "num_experts_per_tok", None), int):
        told = f"{type(config).__name__} has no num_experts_per_tok"
        raise UnsupportedArgumentError(
            f"cannot replay the experts of {type(core).__name__}: {told}"
        )
    if [*experts.shape[2:]] != (shape := [config.num_hidden_layers, top_k]):
        told = f"has shape {[*experts.shape]}, the model layers and experts a token {shape}"
        raise InvalidPromptError(f"{ROUTED_EXPERTS!r} {told}")
    flat, highest = experts.flatten(0, 1).long(), int(experts.amax())
    with ExitStack() as hooks:
        for layer, router in routers.items():
            choice = _Choice(f"router of layer {layer}", flat[:, layer], highest)
            hooks.callback(router.register_forward_pre_hook(choice.begin).remove)
            hooks.callback(router.register_forward_hook(choice.end, always_call=True).remove)
        yield


def _routers(model: torch.nn.Module, core: Any) -> dict[int, torch.nn.Module]:
    """The routers by the numbers of their layers, where transformers would record their logits."""
    from torch._dynamo.eval_frame import OptimizedModule

    told = f"cannot replay the experts of {type(core).__name__}:"
    if any(isinstance(one, OptimizedModule) or one._compiled_call_impl for one in model.modules()):
        raise UnsupportedArgumentError(f"{told} compiled code would not see them")
    kind = getattr(core.can_record_outputs.get("router_logits"), "target_class", ())
    named = [one for one in core.named_modules() if isinstance(one[1], kind)]
    found = {int(at[1]): one for name, one in named if (at := re.search(r"layers\.(\d+)", name))}
    if not found or len(found) != len(named):
        raise UnsupportedArgumentError(f"{told} transformers names no router of each layer")
    return found


class _Choice(TorchFunctionMode):
    """From the beginning of a router to its end, what ``torch.topk`` finds there."""

    def __init__(self, name: str, experts: torch.Tensor, highest: int) -> None:
        super().__init__()
        self._name, self._experts, self._highest = name, experts, highest

    def begin(self, *_: object) -> None:
        self._num_choices = 0
        self.__enter__()

    def end(self, _router: object, _args: object, output: object) -> None:
        self.__exit__(None, None, None)
        if output is not None and self._num_choices != 1:  # without one it has failed
            told = f"made {self._num_choices} choices of shape {[*self._experts.shape]} by topk"
            raise UnsupportedArgumentError(f"cannot replay experts: the {self._name} {told}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or found[1].shape != self._experts.shape:
            return found
        self._num_choices += 1
        if self._highest >= args[0].shape[-1]:
            told = f"has {args[0].shape[-1]} experts, {ROUTED_EXPERTS!r} number {self._highest}"
            raise InvalidPromptError(f"the {self._name} {told}")
        experts = torch.where(self._experts < 0, found[1], self._experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))

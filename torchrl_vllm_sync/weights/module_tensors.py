"""Which tensors a trainer's module stands for: its state dict, with LoRA adapters merged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TensorReader",
    "drop_tied",
    "is_peft",
    "layout_of",
    "module_readers",
    "same_values",
    "tied_names",
    "whole",
]


class TensorReader:
    """Reads one tensor of a module, merged and whole, each time it is called.

    Args:
        tensor: A parameter or buffer; a ``DTensor`` is gathered when it is read.
        delta: Computes what adapters add to it; ``None`` when nothing does.

    Attributes:
        shape: Full shape.
        dtype: Dtype of what is read.
        changed: Whether adapters add to the tensor.
    """

    def __init__(
        self, tensor: torch.Tensor, delta: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._tensor, self._delta = tensor, delta
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.changed = delta is not None

    @property
    def is_plain(self) -> bool:
        """Whether what is read is the tensor itself: neither merged nor gathered."""
        return not self.changed and not isinstance(self._tensor, DTensor)

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the tensor lies and how, as :func:`layout_of` lists it."""
        return _place(self._tensor)

    def __call__(self) -> torch.Tensor:
        """Returns the tensor as it is now; where adapters add to it, a fresh one."""
        with torch.no_grad():
            tensor = whole(self._tensor)
            if self._delta is None:
                return tensor
            return tensor + whole(self._delta()).to(tensor.dtype)

    def same_as(self, other: TensorReader) -> bool:
        """Whether both read the same values; gathers and merges only where adapters add."""
        if self.changed or other.changed:
            return torch.equal(self(), other())
        return same_values(self._tensor, other._tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` detached and, if it is sharded, gathered."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, at no cost when they share their storage.

    Of sharded tensors this rank's shards are compared.
    """
    one, other = _local(one), _local(other)
    if one.shape != other.shape:
        return False
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one, other.to(one.device))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def module_readers(module: torch.nn.Module) -> dict[str, TensorReader]:
    """Returns a reader for each tensor of ``module``, under the names of the plain model.

    Args:
        module: A model, or a PEFT model whose adapters are LoRA.

    Raises:
        WeightMismatchError: Adapters of a kind that does not add to single tensors.
    """
    if is_peft(module):
        return _lora_readers(module)
    return {name: TensorReader(tensor) for name, tensor in module.state_dict().items()}


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Returns which tensors of a transformers model, with adapters or not, repeat which."""
    model = module.get_base_model() if is_peft(module) else module  # pyright: ignore[reportCallIssue]
    return dict(getattr(model, "all_tied_weights_keys", {}))


def drop_tied(readers: dict[str, TensorReader], tied: dict[str, str]) -> dict[str, TensorReader]:
    """Leaves a tied tensor once, unless its two names no longer hold the same values.

    Args:
        readers: By name.
        tied: See :func:`tied_names`.
    """
    kept = dict(readers)
    for name, twin in tied.items():
        if name in kept and twin in kept and kept[name].same_as(kept[twin]):
            del kept[name]
    return kept


def layout_of(module: torch.nn.Module) -> list[Any]:
    """Returns names and places of all tensors in ``module``; equal lists: nothing has moved.

    One walk over the modules, several times quicker than ``state_dict()``. Values play no part.
    """
    layout: list[Any] = []
    pending = [module]
    while pending:
        parts = pending.pop().__dict__
        children = parts["_modules"]
        layout.append(tuple(children))
        pending += [one for one in children.values() if one is not None]
        for tensors in (parts["_parameters"], parts["_buffers"]):
            for name, tensor in tensors.items():
                if tensor is not None:
                    layout.append(name)
                    layout.append(_place(tensor))
        layout.append(len(parts["_non_persistent_buffers_set"]))
    return layout


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def is_peft(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a PEFT model; says so without importing PEFT."""
    return type(module).__module__.startswith("peft.")


def _lora_readers(model: Any) -> dict[str, TensorReader]:  # noqa: ANN401  peft.PeftModel, an optional dependency
    """Readers for the base model's names, each adding the active adapters' change on reading."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    if model.active_peft_config.is_prompt_learning:
        raise WeightMismatchError("prompt learning changes no weights: there is nothing to push")
    base = model.get_base_model()
    wrappers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer | ModulesToSaveWrapper)
    }
    readers: dict[str, TensorReader] = {}
    for name, tensor in base.state_dict().items():
        owner = _owner(name, wrappers)
        if owner is None:
            readers[name] = TensorReader(tensor)
            continue
        wrapper, inner = wrappers[owner], name.removeprefix(owner + ".")
        if isinstance(wrapper, ModulesToSaveWrapper):
            chosen = _chosen_copy(wrapper)
            if inner.startswith(chosen):
                readers[f"{owner}.{inner.removeprefix(chosen)}"] = TensorReader(tensor)
        elif inner.startswith("base_layer."):
            # Adapters of several parameters of one module wrap each other.
            leaf = inner.replace("base_layer.", "")
            if not leaf.startswith("lora_"):
                plain = f"{owner}.{leaf}"
                readers[plain] = TensorReader(tensor, _lora_delta(plain, leaf, wrapper))
    return readers


def _owner(name: str, wrappers: dict[str, Any]) -> str | None:
    """Returns the outermost wrapper that ``name`` lies in."""
    end = name.find(".")
    while end != -1:
        if name[:end] in wrappers:
            return name[:end]
        end = name.find(".", end + 1)
    return None


def _chosen_copy(wrapper: Any) -> str:  # noqa: ANN401  peft's ModulesToSaveWrapper
    active = [one for one in wrapper.active_adapters if one in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return "original_module."
    return f"modules_to_save.{active[0]}."


def _lora_delta(name: str, leaf: str, layer: Any) -> Callable[[], torch.Tensor] | None:  # noqa: ANN401
    """Returns a function that computes what the active adapters add to ``leaf`` of ``layer``."""
    if hasattr(layer, "parameter_name"):
        while layer.parameter_name != leaf:
            layer = layer.base_layer
            if not hasattr(layer, "parameter_name"):
                return None
    elif leaf not in ("weight", "bias"):
        return None
    if layer.disable_adapters or layer.merged:
        return None
    active = [
        one for one in layer.active_adapters if one in layer.lora_A or one in layer.lora_embedding_A
    ]
    if variants := [one for one in active if one in getattr(layer, "lora_variant", {})]:
        raise WeightMismatchError(
            f"{name}: adapter {variants[0]!r} is no plain LoRA ("
            f"{type(layer.lora_variant[variants[0]]).__name__}), which cannot be merged tensor by "
            "tensor; merge it and push the merged model"
        )
    if leaf == "bias":
        active = [one for one in active if layer.lora_bias.get(one, False)]
        deltas = [lambda one=one: layer.lora_B[one].bias * layer.scaling[one] for one in active]
    else:
        deltas = [lambda one=one: layer.get_delta_weight(one) for one in active]
    if not deltas:
        return None
    return lambda: torch.stack([delta() for delta in deltas]).sum(0)

"""Which tensors a trainer's module stands for: its state dict, with LoRA adapters merged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.errors import WeightMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "TensorReader",
    "check_readable",
    "drop_tied",
    "is_peft",
    "layout_of",
    "local",
    "module_readers",
    "same_values",
    "tied_names",
    "whole",
]


class TensorReader:
    """Reads one tensor of a module, merged and whole, each time it is called.

    Args:
        tensor: A parameter or buffer; a ``DTensor`` is gathered when it is read.
        deltas: Each computes what one adapter adds to it.

    Attributes:
        shape: Full shape.
        dtype: Dtype of what is read.
        changed: Whether adapters add to the tensor.
    """

    def __init__(
        self, tensor: torch.Tensor, deltas: Sequence[Callable[[], torch.Tensor]] = ()
    ) -> None:
        self._tensor, self._deltas = tensor, deltas
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.changed = bool(deltas)

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
            if not self._deltas:
                return tensor
            merged = tensor.clone()
            for delta in self._deltas:
                merged += whole(delta())  # as PEFT merges: one adapter at a time, each rounded once
            return merged

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
    one, other = local(one), local(other)
    if one.shape != other.shape:
        return False
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one, other.to(one.device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` detached or, if it is sharded, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def module_readers(module: torch.nn.Module) -> dict[str, TensorReader]:
    """Returns a reader for each tensor of ``module``, under the names of the plain model.

    Args:
        module: A model, or a PEFT model whose adapters are LoRA.

    Raises:
        WeightMismatchError: Adapters of a kind that does not add to single tensors, or whose biases
            have nothing to be added to; or see :func:`check_readable`.
    """
    if is_peft(module):
        return _lora_readers(module)
    tensors = module.state_dict()
    check_readable(tensors)
    return {name: TensorReader(tensor) for name, tensor in tensors.items()}


def check_readable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors without values to read, before anybody is told that they will come.

    Raises:
        WeightMismatchError: Some are sparse, or have no storage: names the first, and how many.
    """
    bad = {
        name: "on the meta device" if one.is_meta else one.layout
        for name, one in tensors.items()
        if one.is_meta or one.layout is not torch.strided
    }
    for name, kind in bad.items():
        raise WeightMismatchError(
            f"{name} must be a dense tensor with storage, is {kind}: so are {len(bad)} of "
            f"{len(tensors)} tensors"
        )


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


def _lora_readers(model: Any) -> dict[str, TensorReader]:
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
    for name, wrapper in wrappers.items():
        _check_biases(name, wrapper)
    readers: dict[str, TensorReader] = {}
    tensors = base.state_dict()
    check_readable(tensors)
    for name, tensor in tensors.items():
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
                readers[plain] = TensorReader(tensor, _lora_deltas(plain, leaf, wrapper))
    return readers


def _owner(name: str, wrappers: dict[str, Any]) -> str | None:
    """Returns the outermost wrapper that ``name`` lies in."""
    end = name.find(".")
    while end != -1:
        if name[:end] in wrappers:
            return name[:end]
        end = name.find(".", end + 1)
    return None


def _chosen_copy(wrapper: Any) -> str:
    active = [one for one in wrapper.active_adapters if one in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return "original_module."
    return f"modules_to_save.{active[0]}."


def _check_biases(name: str, wrapper: Any) -> None:
    """Refuses biases of adapters over a layer that has none, which the engines' has not either.

    Raises:
        WeightMismatchError: The layer ``name`` has such an adapter, and it is active.
    """
    biased = getattr(wrapper, "lora_bias", {})
    adapters = [one for one in wrapper.active_adapters if biased.get(one, False)]
    has_none = adapters and getattr(wrapper.get_base_layer(), "bias", None) is None
    if has_none and not (wrapper.disable_adapters or wrapper.merged):
        raise WeightMismatchError(
            f"{name}: adapter {adapters[0]!r} has a bias (lora_bias=True) and the layer has none, "
            "so that they cannot be merged"
        )


def _lora_deltas(name: str, leaf: str, layer: Any) -> list[Callable[[], torch.Tensor]]:
    """Returns what computes the addition of each active adapter to ``leaf`` of ``layer``."""
    from peft.tuners.lora import Embedding

    if hasattr(layer, "parameter_name"):
        while layer.parameter_name != leaf:
            layer = layer.base_layer
            if not hasattr(layer, "parameter_name"):
                return []
    elif leaf not in ("weight", "bias"):
        return []
    if layer.disable_adapters or layer.merged:
        return []
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
        return [lambda one=one: layer.lora_B[one].bias * layer.scaling[one] for one in active]
    if isinstance(layer, Embedding):  # of which alone PEFT rounds the addition first
        dtype = layer.get_base_layer().weight.dtype
        return [lambda one=one: layer.get_delta_weight(one).to(dtype) for one in active]
    return [lambda one=one: layer.get_delta_weight(one) for one in active]

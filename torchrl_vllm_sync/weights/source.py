"""What a push sends: named full tensors in checkpoint form, from whatever the trainer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MappingSource", "ModuleSource", "WeightSource", "as_weight_source", "fit_to_model"]


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors of full shape under Hugging Face names; iterating again reads them anew.

    The words are those of vLLM's weight transfer (``vllm/distributed/weight_transfer/base.py``):
    ``metadata()`` and iteration agree item by item.
    """

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, in the order of iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)``; the tensor stays valid until the next item is asked for."""
        ...


class MappingSource:
    """A state dict, or any mapping of names to tensors.

    Args:
        tensors: Hugging Face name to tensor. ``DTensor`` values are gathered one at a time.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor."""
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached and whole."""
        for name, tensor in self._tensors.items():
            yield name, _whole(tensor)


class ModuleSource:
    """A Hugging Face model, plain or wrapped by PEFT or by a TorchRL policy.

    Every iteration reads the parameters as they are then. LoRA adapters are merged one tensor at a
    time into a fresh tensor, so that the training copy is never touched. Experts that transformers
    holds fused are split into their published names (views, no copies).

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = _unwrap(module)

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, without merging anything."""
        return [
            ParamMeta(published, tensor.dtype, tuple(tensor.shape))
            for name, read in self._readers().items()
            for published, tensor in self._published(name, read.stand_in()).items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached, merged and whole."""
        for name, read in self._readers().items():
            yield from self._published(name, read()).items()

    def _readers(self) -> dict[str, _Reader]:
        return (
            _lora_readers(self._module) if _is_peft(self._module) else _plain_readers(self._module)
        )

    def _published(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the one or more tensors as which a checkpoint holds ``tensor``."""
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion

        model = self._module.get_base_model() if _is_peft(self._module) else self._module  # pyright: ignore[reportCallIssue]
        if not isinstance(model, PreTrainedModel):
            return {name: tensor}
        return revert_weight_conversion(model, {name: tensor})


class _Reader:
    """Reads one tensor of a module, merged and whole, when called."""

    def __init__(
        self, tensor: torch.Tensor, delta: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._tensor, self._delta = tensor, delta

    def stand_in(self) -> torch.Tensor:
        """Returns a tensor of the same dtype and full shape without any storage."""
        return torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="meta")

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            tensor = _whole(self._tensor)
            if self._delta is None:
                return tensor
            return tensor + self._delta().to(tensor.dtype)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the language model inside a TorchRL policy wrapper, or ``module`` itself."""
    from torchrl.modules.llm import TransformersWrapper

    if isinstance(module, TransformersWrapper):
        return module.model
    if isinstance(module, TensorDictModuleBase) and isinstance(
        getattr(module, "module", None), torch.nn.Module
    ):
        return _unwrap(module.module)  # pyright: ignore[reportArgumentType]
    return module


def _plain_readers(module: torch.nn.Module) -> dict[str, _Reader]:
    """Readers for the state dict, without the second name of a tied tensor."""
    tied = set(getattr(module, "all_tied_weights_keys", ()))
    return {
        name: _Reader(tensor) for name, tensor in module.state_dict().items() if name not in tied
    }


def _is_peft(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _lora_readers(model: Any) -> dict[str, _Reader]:  # noqa: ANN401  peft.PeftModel, an optional dependency
    """Readers for the base model's names, each adding the active adapters' change on reading."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    layers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer | ModulesToSaveWrapper)
    }
    tied = set(getattr(base, "all_tied_weights_keys", ()))
    readers: dict[str, _Reader] = {}
    for name, tensor in base.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(layer + ".")), None)
        if owner is None:
            if name not in tied:
                readers[name] = _Reader(tensor)
            continue
        layer, inner = layers[owner], name.removeprefix(owner + ".")
        if isinstance(layer, ModulesToSaveWrapper):
            chosen = f"modules_to_save.{layer.active_adapters[0]}."
            if inner.startswith(chosen):
                readers[f"{owner}.{inner.removeprefix(chosen)}"] = _Reader(tensor)
        elif inner.startswith("base_layer."):
            plain = f"{owner}.{inner.removeprefix('base_layer.')}"
            changed = inner == "base_layer.weight"
            if plain not in tied:
                readers[plain] = _Reader(tensor, _lora_delta(plain, layer) if changed else None)
    return readers


def _lora_delta(name: str, layer: Any) -> Callable[[], torch.Tensor] | None:  # noqa: ANN401
    """Returns a function that computes what the active adapters add to ``layer``'s weight."""
    active = [
        one for one in layer.active_adapters if one in layer.lora_A or one in layer.lora_embedding_A
    ]
    if layer.disable_adapters or layer.merged or not active:
        return None
    if any(getattr(layer, "use_dora", {}).get(one, False) for one in active):
        raise WeightMismatchError(f"{name}: DoRA adapters cannot be merged tensor by tensor")
    return lambda: sum(
        (layer.get_delta_weight(one) for one in active[1:]), layer.get_delta_weight(active[0])
    )


def as_weight_source(weights: Any) -> WeightSource:  # noqa: ANN401  every form the trainer may hold
    """Turns what a trainer may hold into a source.

    Args:
        weights: A ``WeightSource``, a module (a Hugging Face model, a PEFT model, a TorchRL
            ``TransformersWrapper``), a TensorDict (nested or flat), a mapping of names to tensors,
            or an iterable of ``(name, tensor)``, which is read once, here.

    Raises:
        TypeError: ``weights`` is none of these.
    """
    if isinstance(weights, torch.nn.Module) and not isinstance(weights, TensorDictBase):
        return ModuleSource(weights)
    if isinstance(weights, TensorDictBase):
        return MappingSource(dict(weights.flatten_keys(".").items()))
    if isinstance(weights, Mapping):
        return MappingSource(weights)
    if isinstance(weights, WeightSource):
        return weights
    if isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
        return MappingSource(dict(weights))
    raise TypeError(
        "weights must be a module, a TensorDict, a mapping, a WeightSource or an iterable of "
        f"(name, tensor), got {type(weights).__name__}"
    )


class _FittedSource:
    """A source whose names and dtypes are those of the engines' model, in its order of sending."""

    def __init__(
        self, source: WeightSource, prefix: str, accepted: Mapping[str, ParamMeta]
    ) -> None:
        self._source, self._prefix, self._accepted = source, prefix, accepted

    def metadata(self) -> list[ParamMeta]:
        """Returns what the engines expect, in the source's order."""
        names = (meta.name.removeprefix(self._prefix) for meta in self._source.metadata())
        return [self._accepted[name] for name in names if name in self._accepted]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors the engines expect; the transport casts them."""
        for name, tensor in self._source:
            short = name.removeprefix(self._prefix)
            if short in self._accepted:
                yield short, tensor


def fit_to_model(source: WeightSource, expected: Sequence[ParamMeta]) -> WeightSource:
    """Checks that ``source`` is a complete push for the engines' model and renames it to fit.

    A prefix that all names share, as wrappers add, is removed. A tied output head may be present
    or not. Any floating-point dtype may stand for another, since transports cast.

    Args:
        source: What the trainer wants to send.
        expected: What the engines' model consists of.

    Raises:
        WeightMismatchError: Tensors are missing or unknown, or have other shapes or kinds of
            dtype. The message names up to five of each.
    """
    wanted = {meta.name: meta for meta in expected}
    given = {meta.name: meta for meta in source.metadata()}
    prefix = _common_prefix(given, wanted)
    found = {name.removeprefix(prefix): meta for name, meta in given.items()}
    optional = {"lm_head.weight"} - set(wanted)
    problems = [
        _listing("missing", [name for name in wanted if name not in found]),
        _listing(
            "unknown", [name for name in found if name not in wanted | dict.fromkeys(optional)]
        ),
        _listing(
            "of another shape",
            [
                f"{name} {list(meta.shape)} instead of {list(wanted[name].shape)}"
                for name, meta in found.items()
                if name in wanted and meta.shape != wanted[name].shape
            ],
        ),
        _listing(
            "of another kind of dtype",
            [
                f"{name} {meta.dtype} instead of {wanted[name].dtype}"
                for name, meta in found.items()
                if name in wanted
                and meta.dtype.is_floating_point != wanted[name].dtype.is_floating_point
            ],
        ),
    ]
    if any(problems):
        raise WeightMismatchError(
            "the push does not fit the engines' model: " + "; ".join(filter(None, problems))
        )
    return _FittedSource(source, prefix, wanted)


def _common_prefix(given: Iterable[str], wanted: Mapping[str, ParamMeta]) -> str:
    """Returns the prefix whose removal turns the most given names into wanted ones."""
    given = list(given)
    if not wanted or any(name in wanted for name in given):
        return ""
    probe = next(iter(wanted))
    candidates = [name.removesuffix(probe) for name in given if name.endswith("." + probe)]
    return candidates[0] if len(candidates) == 1 else ""


def _listing(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {what}: {', '.join(names[:5])}{more}"

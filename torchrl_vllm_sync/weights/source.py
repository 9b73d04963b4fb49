"""What a push sends: named full tensors in checkpoint form, from whatever the trainer holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta
from torchrl_vllm_sync.weights.module_tensors import (
    TensorReader,
    is_peft,
    module_readers,
    same_values,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MappingSource", "ModuleSource", "WeightSource", "as_weight_source", "fit_to_model"]

HEAD = "lm_head.weight"
# Buffers that no checkpoint holds, since they follow from its configuration; a TensorDict may.
DERIVED = ("inv_freq", "original_inv_freq", "position_ids")


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

    Raises:
        TypeError: A name is no text, or a value is no tensor (named).
        WeightMismatchError: A tensor is sparse, or has no storage (named).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        for name, tensor in self._tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"names of weights must be text, got {name!r}")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"weights must be tensors, got {type(tensor).__name__} for {name!r}"
                )
            if tensor.is_meta or tensor.layout is not torch.strided:
                kind = "on the meta device" if tensor.is_meta else tensor.layout
                raise WeightMismatchError(f"{name} must be a dense tensor with storage, is {kind}")

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor."""
        return [ParamMeta.of(name, tensor) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached and whole."""
        for name, tensor in self._tensors.items():
            yield name, whole(tensor)

    def same_values(self, name: str, other: str) -> bool:
        """Whether two of the tensors are equal."""
        return same_values(self._tensors[name], self._tensors[other])


class ModuleSource:
    """A Hugging Face model, plain or wrapped by PEFT, by a TorchRL policy, by DDP or by compile.

    Every iteration reads the parameters as they are then. LoRA adapters are merged one tensor at a
    time into a fresh tensor, so that the training copy is never touched. Experts that transformers
    holds fused are split into their published names, one layer at a time.

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = _unwrap(module)

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, without merging anything."""
        plan = self._plan(self._readers())
        return [meta for published in plan.values() for meta in published]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached, merged and whole."""
        readers = self._readers()
        for name, published in self._plan(readers).items():
            tensor = readers[name]()
            if [(one.name, one.shape) for one in published] == [(name, readers[name].shape)]:
                yield name, tensor
            else:
                yield from _published(self._model, {name: tensor}).items()

    def same_values(self, name: str, other: str) -> bool:
        """Whether two of the model's tensors, by their names in it, are equal."""
        readers = self._readers()
        return readers[name].same_as(readers[other])

    @property
    def _model(self) -> torch.nn.Module:
        return self._module.get_base_model() if is_peft(self._module) else self._module  # pyright: ignore[reportCallIssue]

    def _readers(self) -> dict[str, TensorReader]:
        return module_readers(self._module)

    def _plan(self, readers: dict[str, TensorReader]) -> dict[str, list[ParamMeta]]:
        """Returns as which tensors a checkpoint holds each of the model's.

        Working it out takes milliseconds for each fused tensor, so it is kept with the module.
        """
        facts = [(name, one.shape, one.dtype) for name, one in readers.items()]
        known = _PLANS.get(self._module)
        if known is None or known[0] != facts:
            model = self._model
            plan = {
                name: [
                    ParamMeta.of(published, tensor)
                    for published, tensor in _published(model, {name: one.stand_in()}).items()
                ]
                for name, one in readers.items()
            }
            _PLANS[self._module] = known = facts, plan
        return known[1]


_PLANS: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, dict[str, list[ParamMeta]]]] = (
    weakref.WeakKeyDictionary()
)


def _published(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns ``tensors`` as a checkpoint on a hub holds them."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return tensors
    return revert_weight_conversion(model, tensors)


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the language model inside wrappers of TorchRL and torch, or ``module`` itself."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel
    from torchrl.modules.llm import TransformersWrapper

    if isinstance(module, TransformersWrapper):
        return _unwrap(module.model)
    if isinstance(module, OptimizedModule):
        return _unwrap(module._orig_mod)
    inner = getattr(module, "module", None)
    wraps = isinstance(module, TensorDictModuleBase | DistributedDataParallel)
    return _unwrap(inner) if wraps and isinstance(inner, torch.nn.Module) else module


def as_weight_source(weights: Any) -> WeightSource:  # noqa: ANN401  every form the trainer may hold
    """Turns what a trainer may hold into a source.

    Args:
        weights: A ``WeightSource``, a module (a Hugging Face model, a PEFT model, a TorchRL
            ``TransformersWrapper``), a TensorDict (nested or flat), a mapping of names to tensors,
            or an iterable of ``(name, tensor)``, which is read once, here.

    Raises:
        TypeError: ``weights`` is none of these, or holds something that is no tensor.
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
        self,
        source: WeightSource,
        prefix: str,
        accepted: Mapping[str, ParamMeta],
        metadata: list[ParamMeta],
    ) -> None:
        self._source, self._prefix, self._accepted = source, prefix, accepted
        self._metadata = metadata

    def metadata(self) -> list[ParamMeta]:
        """Returns what the engines expect, in the source's order."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors the engines expect; the transport casts them."""
        for name, tensor in self._source:
            short = name.removeprefix(self._prefix)
            if short in self._accepted:
                yield short, tensor


def fit_to_model(source: WeightSource, expected: Sequence[ParamMeta]) -> WeightSource:
    """Checks that ``source`` is a complete push for the engines' model and renames it to fit.

    A prefix that all names share, as wrappers add, is removed. A tied output head may be present
    or not, but must equal the embedding. Any floating-point dtype may stand for another, since
    transports cast.

    Args:
        source: What the trainer wants to send.
        expected: What the engines' model consists of.

    Raises:
        WeightMismatchError: Tensors are missing or unknown, or have other shapes or kinds of
            dtype (up to five of each are named), or a head that the engines tie is not tied.
    """
    wanted = {meta.name: meta for meta in expected}
    given = {
        meta.name: meta
        for meta in source.metadata()
        if meta.name in wanted or meta.name.rpartition(".")[2] not in DERIVED
    }
    prefix = _common_prefix(given, wanted)
    found = {name.removeprefix(prefix): meta for name, meta in given.items()}
    optional = {HEAD} - set(wanted)
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
    if HEAD in optional and HEAD in found:
        problems.append(_untied(source, prefix, found, wanted))
    if any(problems):
        raise WeightMismatchError(
            "the push does not fit the engines' model: " + "; ".join(filter(None, problems))
        )
    metadata = [wanted[name] for name in found if name in wanted]
    return _FittedSource(source, prefix, wanted, metadata)


def _untied(
    source: WeightSource,
    prefix: str,
    found: Mapping[str, ParamMeta],
    wanted: Mapping[str, ParamMeta],
) -> str:
    """Says if ``source`` has an output head of its own, which engines that tie it would drop."""
    same = getattr(source, "same_values", None)
    twins = [
        name
        for name, meta in found.items()
        if name in wanted and "embed" in name and meta.shape == found[HEAD].shape
    ]
    if same is None or len(twins) != 1 or same(prefix + HEAD, prefix + twins[0]):
        return ""
    return f"{HEAD} differs from {twins[0]}, to which the engines tie it"


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

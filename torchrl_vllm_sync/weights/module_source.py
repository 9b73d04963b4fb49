"""What a trainer's module sends: its parameters as they are now, under a checkpoint's names."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_vllm_sync.weights.module_tensors import (
    TensorReader,
    drop_tied,
    is_peft,
    layout_of,
    module_readers,
    tied_names,
)
from torchrl_vllm_sync.weights.published import bundles_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.published import Bundle

__all__ = ["ModuleSource", "Plan", "base_model", "plan_of", "unwrap"]


class ModuleSource:
    """A Hugging Face model, plain or wrapped by PEFT, by a TorchRL policy, by DDP or by compile.

    Every iteration reads the parameters as they are then. LoRA adapters are merged one tensor at a
    time into a fresh tensor, so that the training copy is never touched; the result equals that of
    PEFT's ``merge_and_unload()`` bit by bit, whatever the dtypes of base and adapters. Experts that
    transformers holds fused are published under their own names as views of the fused tensor, in
    the order in which they lie there.

    What is worked out about a module is kept with it, not with the source. A ``StableSource``.

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = unwrap(module)

    @property
    def owner(self) -> object:
        """The model without its wrappers, with which everything kept goes away."""
        return self._module

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, without merging anything.

        It is the same list object as long as names, dtypes and shapes are the same: leave it as
        it is.
        """
        return self._state().plan.metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached, merged and whole."""
        state = self._state()
        model = base_model(self._module)
        for bundle in state.plan.bundles:
            yield from bundle.publish(model, [state.readers[name]() for name in bundle.sources])

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns what iteration yields as aliases of the parameters.

        Returns:
            The same list object while nothing was added, removed, moved, reshaped or cast, as one
            look at each of the module's own tensors tells. ``None`` where adapters add to a tensor,
            where one is sharded, or where the checkpoint's form has to be computed.
        """
        return self._state().views()

    def same_values(self, name: str, other: str) -> bool:
        """Whether two of the model's tensors, by their names in it, are equal."""
        readers = self._state().readers
        return readers[name].same_as(readers[other])

    def _state(self) -> _State:
        """Returns the module's tensors and plan, from last time if nothing has moved."""
        module = self._module
        if is_peft(module):  # which adapters add to what may change at any time
            readers = drop_tied(module_readers(module), tied_names(module))
            return _State(readers, plan_of(module, readers), None)
        layout = layout_of(module)
        known = _STATES.get(module)
        tied = tied_names(module)
        if known is not None and known.layout == layout and known.ties == _ties(known.all, tied):
            return known
        everything = module_readers(module)
        readers = drop_tied(everything, tied)
        state = _State(
            readers, plan_of(module, readers), layout, everything, _ties(everything, tied)
        )
        _STATES.pop(module, None)
        # A state dict that is computed by hooks may change where the module's tensors do not.
        places = {one for one in layout if isinstance(one, tuple)}
        if all(one.is_plain and one.place in places for one in everything.values()):
            _STATES[module] = state
        return state


@dataclass(slots=True)
class Plan:
    """As what a module's tensors are published.

    Attributes:
        facts: Name, shape and dtype of each of the module's tensors.
        bundles: What is made of which.
        metadata: All published tensors, in their order.
    """

    facts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    bundles: list[Bundle]
    metadata: list[ParamMeta]


@dataclass(slots=True)
class _State:
    """What is known of a module while its tensors stay where they are."""

    readers: dict[str, TensorReader]
    plan: Plan
    layout: list[Any] | None
    all: dict[str, TensorReader] = field(default_factory=dict)
    ties: list[bool] = field(default_factory=list)
    found: list[tuple[str, torch.Tensor]] | None = None

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns the published tensors as aliases, made when they are first asked for."""
        if self.found is None and all(one.is_plain for one in self.readers.values()):
            found = []
            for bundle in self.plan.bundles:
                views = bundle.views([self.readers[name]() for name in bundle.sources])
                if views is None:
                    return None
                found += views
            self.found = found
        return self.found


_PLANS: weakref.WeakKeyDictionary[torch.nn.Module, Plan] = weakref.WeakKeyDictionary()
_STATES: weakref.WeakKeyDictionary[torch.nn.Module, _State] = weakref.WeakKeyDictionary()


def _ties(readers: dict[str, TensorReader], tied: dict[str, str]) -> list[bool]:
    """Returns which tied tensors are equal, at no cost where they share their storage."""
    return [
        readers[name].same_as(readers[twin])
        for name, twin in tied.items()
        if name in readers and twin in readers
    ]


def plan_of(module: torch.nn.Module, readers: dict[str, TensorReader]) -> Plan:
    """Returns as what the tensors of ``readers`` are published; worked out once for a module."""
    facts = {name: (one.shape, one.dtype) for name, one in readers.items()}
    plan = _PLANS.get(module)
    if plan is None or list(plan.facts.items()) != list(facts.items()):
        bundles = bundles_of(base_model(module), facts)
        plan = Plan(facts, bundles, [meta for bundle in bundles for meta in bundle.metadata])
        _PLANS[module] = plan
    return plan


def base_model(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside a PEFT model, or ``module`` itself."""
    return module.get_base_model() if is_peft(module) else module  # pyright: ignore[reportCallIssue]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the language model inside wrappers of TorchRL and torch, or ``module`` itself."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel
    from torchrl.modules.llm import TransformersWrapper

    if isinstance(module, TransformersWrapper):
        return unwrap(module.model)
    if isinstance(module, OptimizedModule):
        return unwrap(module._orig_mod)
    inner = getattr(module, "module", None)
    wraps = isinstance(module, TensorDictModuleBase | DistributedDataParallel)
    return unwrap(inner) if wraps and isinstance(inner, torch.nn.Module) else module

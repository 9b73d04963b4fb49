"""The tensors of a trainer's module as they are now, under a checkpoint's names."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.weights.metadata import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


# ---- Tensors of a module: its state dict, with LoRA adapters merged in


class TensorReader:
    """Reads one tensor of a module, merged and whole; ``changed``: whether adapters add to it."""

    def __init__(
        self, tensor: torch.Tensor, deltas: Sequence[Callable[[], torch.Tensor]] = ()
    ) -> None:
        self._tensor, self._deltas = tensor, deltas
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.changed = bool(deltas)

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is read as it is: neither merged nor gathered."""
        return not self.changed and not isinstance(self._tensor, DTensor)

    @property
    def place(self) -> tuple[Any, ...]:
        """Memory and layout of the tensor, as in :func:`layout_of`."""
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
    """Whether two tensors, or this rank's shards, are equal; free if they share their storage."""
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
    """Returns a reader for each tensor of ``module``, under the names of the plain model."""
    if is_peft(module):
        return _lora_readers(module)
    tensors = module.state_dict()
    check_readable(tensors)
    return {name: TensorReader(tensor) for name, tensor in tensors.items()}


def check_readable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors without values to read, before a push is announced."""
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
    """Returns each tied tensor of a transformers model, and the one that it repeats."""
    model = module.get_base_model() if is_peft(module) else module  # pyright: ignore[reportCallIssue]
    return dict(getattr(model, "all_tied_weights_keys", {}))


def drop_tied(readers: dict[str, TensorReader], tied: dict[str, str]) -> dict[str, TensorReader]:
    """Leaves out tied tensors, unless their two names no longer hold the same values."""
    kept = dict(readers)
    for name, twin in tied.items():
        if name in kept and twin in kept and kept[name].same_as(kept[twin]):
            del kept[name]
    return kept


def layout_of(module: torch.nn.Module) -> list[Any]:
    """Returns names and places of all tensors in ``module``; equal lists: nothing has moved.

    One walk over the modules, several times quicker than ``state_dict()``.
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
    """Whether ``module`` is a PEFT model; PEFT is not imported."""
    return type(module).__module__.startswith("peft.")


def _lora_readers(model: Any) -> dict[str, TensorReader]:
    """Readers under the base model's names, each adding what the active adapters change."""
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
    """Refuses biases of adapters on a layer that has none: the engines' has none either."""
    biased = getattr(wrapper, "lora_bias", {})
    adapters = [one for one in wrapper.active_adapters if biased.get(one, False)]
    has_none = adapters and getattr(wrapper.get_base_layer(), "bias", None) is None
    if has_none and not (wrapper.disable_adapters or wrapper.merged):
        raise WeightMismatchError(
            f"{name}: adapter {adapters[0]!r} has a bias (lora_bias=True) and the layer has none, "
            "so that they cannot be merged"
        )


def _lora_deltas(name: str, leaf: str, layer: Any) -> list[Callable[[], torch.Tensor]]:
    """Returns what computes each active adapter's addition to ``leaf`` of ``layer``."""
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


# ---- Tensors in checkpoint form: worked out once, then replayed as views
#
# transformers keeps some tensors in another form than checkpoints do, experts above all: one fused
# tensor a layer here, two or three a layer and expert there. Its ``revert_weight_conversion`` takes
# milliseconds for each, so it runs once, on tensors without storage, while a dispatch mode records
# what becomes of each. What is cut, indexed or transposed out of one tensor is a strided view of
# it, and is taken as such from the live tensor ever after, without a copy. What is computed
# (joined, interleaved) is converted anew each time.


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Window:
    """Where a published tensor lies in the contiguous tensor that holds it."""

    # elements between neighbours, for each dimension of the published tensor
    stride: tuple[int, ...]
    offset: int  # elements before its first value


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors of a checkpoint that are made from the same tensors of the model."""

    sources: tuple[str, ...]  # names of the model's tensors
    # the checkpoint's tensors; those that are views in the order of their storage
    metadata: tuple[ParamMeta, ...]
    # where each of these lies in the one source; `None` if they must be computed
    windows: tuple[Window, ...] | None
    # whether the one published tensor is the source itself, perhaps renamed
    unchanged: bool = False

    def views(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]] | None:
        """Returns name and view of each published tensor, without copying anything."""
        if self.unchanged:
            return [(self.metadata[0].name, tensors[0])]
        if self.windows is None or not tensors[0].is_contiguous():
            return None
        whole, start = tensors[0], tensors[0].storage_offset()
        return [
            (meta.name, whole.as_strided(meta.shape, window.stride, start + window.offset))
            for meta, window in zip(self.metadata, self.windows, strict=True)
        ]

    def publish(
        self, model: torch.nn.Module, tensors: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """Returns name and value of each published tensor: views where possible."""
        views = self.views(tensors)
        if views is None:
            found = _revert(model, dict(zip(self.sources, tensors, strict=True)))
            views = [(meta.name, found[meta.name]) for meta in self.metadata]
        return views


def bundles_of(
    model: torch.nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[Bundle]:
    """Returns in which tensors a checkpoint of ``model`` holds the given ones."""
    stand_ins = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in tensors.items()
    }
    origins = _Origins(stand_ins)
    with origins:
        found = _revert(model, dict(stand_ins))
    order = {name: i for i, name in enumerate(stand_ins)}
    makings = {name: origins.of(tensor) for name, tensor in found.items()}
    grouped: dict[frozenset[str], list[str]] = {}
    whole_of = _components(makings.values())
    for name, sources in makings.items():
        grouped.setdefault(whole_of[min(sources, key=order.__getitem__)], []).append(name)
    bundles = [
        _bundle(tuple(sorted(sources, key=order.__getitem__)), names, stand_ins, found, origins)
        for sources, names in grouped.items()
    ]
    return sorted(bundles, key=lambda one: order[one.sources[0]])


def _bundle(
    sources: tuple[str, ...],
    names: list[str],
    stand_ins: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    origins: _Origins,
) -> Bundle:
    whole = stand_ins[sources[0]]
    if len(sources) > 1 or not all(origins.is_view(found[name], whole) for name in names):
        metadata = tuple(ParamMeta.of(name, found[name]) for name in names)
        return Bundle(sources, metadata, None)
    names = sorted(names, key=lambda name: found[name].storage_offset())
    windows = tuple(
        Window(found[name].stride(), int(found[name].storage_offset())) for name in names
    )
    metadata = tuple(ParamMeta.of(name, found[name]) for name in names)
    itself = Window(whole.stride(), 0)
    unchanged = windows == (itself,) and metadata[0].shape == tuple(whole.shape)
    return Bundle(sources, metadata, windows, unchanged)


def _components(groups: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Returns, for each member of any group, the union of all groups it is linked to."""
    whole_of: dict[str, frozenset[str]] = {}
    for group in groups:
        union = group.union(*(whole_of.get(one, frozenset()) for one in group))
        whole_of.update(dict.fromkeys(union, union))
    return whole_of


def _revert(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns ``tensors`` in the form of a checkpoint on a hub."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return tensors
    return revert_weight_conversion(model, tensors)


class _Origins(TorchDispatchMode):
    """Records which tensors another is made from, and replaces plain copies by their sources."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {_storage(one): frozenset({name}) for name, one in stand_ins.items()}
        self._written: set[int] = set()
        self._kept: list[torch.Tensor] = []  # a storage's address must not be given out again

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._sources[_storage(tensor)]

    def is_view(self, tensor: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether ``tensor`` is some elements of ``whole``, unchanged."""
        storage = _storage(tensor)
        return (
            storage == _storage(whole)
            and storage not in self._written
            and tensor.dtype == whole.dtype
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func in (aten.view.default, aten._unsafe_view.default):
            out = args[0].reshape(args[1])  # the copy that was left out may be needed after all
        else:
            out = func(*args, **kwargs)
        made = [one for one in _tensors(out) if _storage(one) not in self._sources]
        if made or func._schema.is_mutable:
            inputs = _tensors((args, kwargs))
            if func._schema.is_mutable:
                self._written.update(map(_storage, inputs))
            known = (self._sources.get(_storage(one), frozenset()) for one in inputs)
            made_from: frozenset[str] = frozenset().union(*known)
            self._sources.update((_storage(one), made_from) for one in made)
            self._kept += made
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = [tree] if isinstance(tree, torch.Tensor) else tree_leaves(tree)
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class ModuleSource:
    """A Hugging Face model, plain or wrapped by PEFT, by a TorchRL policy, by DDP or by compile.

    Every iteration reads the parameters as they are then. LoRA adapters are merged one tensor at a
    time into a fresh tensor, so the training copy is never touched; the result equals PEFT's
    ``merge_and_unload()`` bit by bit, whatever the dtypes. Fused experts are published under their
    own names as views, in the order in which they lie in the fused tensor.

    What is worked out about a module is kept with it, not with the source. A ``StableSource``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = unwrap(module)

    @property
    def owner(self) -> object:
        """The model without its wrappers; what is cached lives as long as it."""
        return self._module

    def metadata(self) -> list[ParamMeta]:
        """Returns the metadata of each tensor, without merging anything.

        The same list object while names, dtypes and shapes stay: leave it as it is.
        """
        return self._state().plan.metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, detached, merged and whole."""
        state = self._state()
        model = base_model(self._module)
        for bundle in state.plan.bundles:
            yield from bundle.publish(model, [state.readers[name]() for name in bundle.sources])

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns what iteration yields as aliases of the parameters."""
        return self._state().views()

    def same_values(self, name: str, other: str) -> bool:
        """Whether two of the model's tensors, by their names in it, are equal."""
        readers = self._state().readers
        return readers[name].same_as(readers[other])

    def _state(self) -> _State:
        """Returns the module's tensors and plan, cached while nothing has moved."""
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
        # Hooks may compute a state dict that changes where the module's tensors do not.
        places = {one for one in layout if isinstance(one, tuple)}
        if all(one.is_plain and one.place in places for one in everything.values()):
            _STATES[module] = state
        return state


@dataclass(slots=True)
class Plan:
    """How a module's tensors are published."""

    # name, shape and dtype of each of the module's tensors
    facts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    bundles: list[Bundle]  # what is made of which
    metadata: list[ParamMeta]  # all published tensors, in their order


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
    """Returns how the tensors of ``readers`` are published; computed once for a module."""
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

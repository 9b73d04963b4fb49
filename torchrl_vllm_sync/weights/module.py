"""Metadata of weights, and the tensors of a module as they are now, under a checkpoint's names."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
import torch
from tensordict.nn import TensorDictModuleBase
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_vllm_sync.errors import WeightMismatchError

# ---- Names, dtypes and shapes: in memory, on the wire and as one digest

T = TypeVar("T")
_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]  # the most that torch's loops do


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as the trainer announces it and as the engine receives it.

    Attributes:
        name: Hugging Face parameter name, dots included.
        dtype: Dtype of the transferred values.
        shape: Full shape, never that of a shard.

    Example:
        >>> ParamMeta("lm_head.weight", torch.bfloat16, (32, 8)).num_bytes
        512
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of values; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values, without padding."""
        return self.num_elements * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Returns the metadata of a tensor.

        Args:
            name: Its name.
            tensor: Any tensor; of a sharded one the shape is that of the whole.
        """
        return cls(name, tensor.dtype, tuple(tensor.shape))


def checked(
    source: Iterable[tuple[str, torch.Tensor]], metadata: Iterable[ParamMeta]
) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Yields a source's tensors; refuses those that are not as announced, and surplus ones."""
    items = iter(source)
    for meta in metadata:
        name, tensor = next(items, ("nothing", torch.empty(0)))
        if name != meta.name or tuple(tensor.shape) != meta.shape:
            raise WeightMismatchError(
                f"the source announced {meta.name} {list(meta.shape)} and yielded {name} "
                f"{list(tensor.shape)}"
            )
        yield meta, tensor
    for name, _ in items:
        raise WeightMismatchError(f"the source yielded {name}, which it had not announced")


def to_json(metadata: Iterable[ParamMeta]) -> list[list[Any]]:
    """Returns lists of ``[name, dtype, shape]`` for JSON, dtypes as ``"float32"``."""
    return [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in metadata]


def from_json(items: object) -> list[ParamMeta]:
    """Reads what ``to_json`` returned; a ``ValueError`` says what is wrong, and where."""
    rows = msgspec.convert(items, list[tuple[str, str, _Shape]])
    if bad := [dtype for _, dtype, _ in rows if dtype not in _DTYPES]:
        raise ValueError(f"dtype must be one of torch's, such as 'bfloat16', got {bad[0]!r:.60}")
    return [ParamMeta(name, _DTYPES[dtype], shape) for name, dtype, shape in rows]


def metadata_digest(metadata: Iterable[ParamMeta]) -> str:
    """A digest of names, dtypes and shapes, equal in every process; their order counts."""
    text = json.dumps(to_json(metadata), separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class OfLast(Generic[T]):
    """What follows from the metadata given last; worked out again only for another list."""

    def __init__(self, found: Callable[[list[ParamMeta]], T]) -> None:
        self._found, self._last = found, None

    def __call__(self, metadata: list[ParamMeta]) -> T:
        if metadata is not self._last:
            self._value, self._last = self._found(metadata), metadata
        return self._value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- The tensors of a module

Delta: TypeAlias = "Callable[[], torch.Tensor]"  # computes what an adapter adds to a tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` detached and, if it is sharded, gathered."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, or this rank's shards, are equal; free if they share their storage."""
    one, other = local(one), local(other)
    is_same = one.device == other.device and one.data_ptr() == other.data_ptr()
    return one.shape == other.shape and (is_same or torch.equal(one, other.to(one.device)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` detached or, if it is sharded, this rank's shard."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # in a tenth of the time of detaching it
            return tensor.to_local()
    return tensor.detach() if tensor.requires_grad else tensor


def nonfinite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names of tensors, or of shards, that hold NaN or infinity."""
    held = {name: local(one) for name, one in named}
    tensors = {n: one for n, one in held.items() if one.is_floating_point() and one.itemsize > 1}
    doubtful: list[str] = []
    for device in {one.device for one in tensors.values()}:
        names = [name for name, one in tensors.items() if one.device == device]
        # A sum shows either, in a tenth of the time of a norm; large values may overflow it.
        sums = torch.stack([tensors[name].sum(dtype=torch.float32) for name in names]).tolist()
        doubtful += [n for n, one in zip(names, sums, strict=True) if not math.isfinite(one)]
    return [name for name in doubtful if not tensors[name].isfinite().all()]


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


def repeated(
    module: torch.nn.Module, names: Collection[str], is_same: Callable[[str, str], bool]
) -> set[str]:
    """Returns the tied tensors of a transformers model that are the same as those they repeat."""
    tied: dict[str, str] = getattr(base_model(module), "all_tied_weights_keys", {})
    pairs = ((name, other) for name, other in tied.items() if name in names and other in names)
    return {name for name, other in pairs if is_same(name, other)}


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields a module and all inside, at each push, so without the layers of ``modules()``."""
    pending = [module]
    while pending:
        yield (part := pending.pop())
        pending += [one for one in vars(part)["_modules"].values() if one is not None]


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory of a tensor and its layout."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def layout_of(
    module: torch.nn.Module, place: Callable[[torch.Tensor], tuple[Any, ...]] = place_of
) -> list[Any]:
    """Returns names and places of all tensors in ``module``; equal lists: nothing has moved."""
    layout: list[Any] = []
    for parts in map(vars, modules_of(module)):  # several times quicker than `state_dict()`
        layout.append(tuple(parts["_modules"]))
        for tensors in (parts["_parameters"], parts["_buffers"]):
            for name, tensor in tensors.items():
                if tensor is not None:
                    layout.append(name)
                    layout.append(place(tensor))
        layout.append(len(parts["_non_persistent_buffers_set"]))
    return layout


# ---- Quantised

# Rows have a scale of this at least (vLLM's ``online/fp8.py``, and its kernel for tokens).
LEAST_ROW_SCALE = 1 / (torch.finfo(torch.float8_e4m3fn).max * 512)


def fp8_scale(greatest: torch.Tensor) -> torch.Tensor:
    """The scales that vLLM gives weights of these greatest absolute values."""
    greatest, limit = greatest.float(), torch.finfo(torch.float8_e4m3fn).max
    return greatest / torch.full_like(greatest, limit)  # a number would be multiplied by


def to_fp8(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What vLLM makes of a matrix, bit by bit: by its kernel, or on CPUs, which have none.

    Of scales of rows, shaped ``(rows, 1)``, it takes no reciprocal, and the kernel does.
    """
    if scale.dim() > 1:
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (matrix.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    if matrix.is_cuda:
        from vllm import _custom_ops

        return _custom_ops.scaled_fp8_quant(matrix.contiguous(), scale)[0]
    limit = torch.full_like(scale, torch.finfo(torch.float8_e4m3fn).max)
    scaled = matrix.float() * scale.reciprocal()
    # Of zeros with a scale of zero the kernel makes the greatest, too, and no NaN.
    return torch.fmax(torch.fmin(scaled, limit), -limit).to(torch.float8_e4m3fn)


def is_peft(module: torch.nn.Module) -> bool:
    # Sharding makes a class of its own of it.
    return any(one.__module__.startswith("peft.") for one in type(module).__mro__)


def _lora_tensors(
    model: Any, held: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, list[Delta]]]:
    """Returns what is held under the plain model's names, and what active adapters add to it."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    if model.active_peft_config.is_prompt_learning:
        raise WeightMismatchError("prompt learning changes no weights: there is nothing to push")
    wrappers: dict[str, Any] = {
        name: module
        for name, module in base_model(model).named_modules()
        if isinstance(module, LoraLayer | ModulesToSaveWrapper)
    }
    tensors: dict[str, torch.Tensor] = {}
    deltas: dict[str, list[Delta]] = {}
    for name, tensor in held.items():
        parents = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
        owner = next((one for one in parents if one in wrappers), None)
        if owner is None:
            tensors[name] = tensor
            continue
        wrapper, inner = wrappers[owner], name.removeprefix(owner + ".")
        if isinstance(wrapper, ModulesToSaveWrapper):
            active = [one for one in wrapper.active_adapters if one in wrapper.modules_to_save]
            is_saved = active and not wrapper.disable_adapters
            chosen = f"modules_to_save.{active[0]}." if is_saved else "original_module."
            if inner.startswith(chosen):
                tensors[f"{owner}.{inner.removeprefix(chosen)}"] = tensor
        elif inner.startswith("base_layer."):
            # Adapters of several parameters of one module wrap each other.
            leaf = inner.replace("base_layer.", "")
            if not leaf.startswith("lora_"):
                plain = f"{owner}.{leaf}"
                tensors[plain], deltas[plain] = tensor, _lora_deltas(plain, leaf, wrapper)
    return tensors, {name: found for name, found in deltas.items() if found}


def _lora_deltas(name: str, leaf: str, layer: Any) -> list[Delta]:
    """Returns what computes each active adapter's addition to ``leaf`` of ``layer``."""
    from peft.tuners.lora import Embedding

    if hasattr(layer, "parameter_name"):
        while layer.parameter_name != leaf:
            layer = layer.base_layer
            if not hasattr(layer, "parameter_name"):
                return []
    elif leaf != "weight":
        return []
    if layer.disable_adapters or layer.merged:
        return []
    active = [
        one for one in layer.active_adapters if one in layer.lora_A or one in layer.lora_embedding_A
    ]
    for one in active:
        variant = getattr(layer, "lora_variant", {}).get(one)
        if variant is not None or getattr(layer, "lora_bias", {}).get(one):
            kind = "lora_bias" if variant is None else type(variant).__name__
            raise WeightMismatchError(
                f"{name}: adapter {one!r} is no plain LoRA ({kind}), which cannot be merged tensor "
                "by tensor; merge it and push the merged model"
            )
    if isinstance(layer, Embedding):  # of which alone PEFT rounds the addition first
        dtype = layer.get_base_layer().weight.dtype
        return [lambda one=one: layer.get_delta_weight(one).to(dtype) for one in active]
    return [lambda one=one: layer.get_delta_weight(one) for one in active]


# ---- Tensors in checkpoint form: worked out once, then replayed as views
#
# transformers keeps some tensors in another form than checkpoints do, experts above all: one fused
# tensor a layer here, two or three a layer and expert there. Its ``revert_weight_conversion`` takes
# milliseconds for each, so it runs once, on tensors without storage, while a dispatch mode records
# what becomes of each. What is cut, indexed or transposed out of one tensor is taken as a view of
# the live tensor ever after. What is computed (joined, interleaved) is converted anew each time.


aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Tensors of a checkpoint that are made from the same tensors of the model."""

    sources: tuple[str, ...]  # names of the model's tensors
    # the checkpoint's tensors; those that are views in the order of their storage
    metadata: tuple[ParamMeta, ...]
    # each of these without storage, as it lies in the one source; `None` if they must be computed
    windows: tuple[torch.Tensor, ...] | None = None

    def views(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]] | None:
        """Returns name and view of each published tensor, without copying anything."""
        whole = tensors[0]
        if self.windows is None or not whole.is_contiguous():
            return None
        start = whole.storage_offset()
        return [
            (meta.name, whole.as_strided(one.shape, one.stride(), start + one.storage_offset()))
            for meta, one in zip(self.metadata, self.windows, strict=True)
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


def stand_ins(facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Returns tensors of these shapes and dtypes without storage."""
    sizes = facts.items()
    return {name: torch.empty(one, dtype=dtype, device="meta") for name, (one, dtype) in sizes}


def bundles_of(
    model: torch.nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[Bundle]:
    """Returns in which tensors a checkpoint of ``model`` holds the given ones."""
    hollow = stand_ins(tensors)
    with _Origins(hollow) as origins:
        found = _revert(model, dict(hollow))
    makings = {name: origins.of(tensor) for name, tensor in found.items()}
    whole_of: dict[str, frozenset[str]] = {}  # each source to all that it is linked to
    for group in makings.values():
        union = group.union(*(whole_of.get(one, frozenset()) for one in group))
        whole_of.update(dict.fromkeys(union, union))
    grouped: dict[frozenset[str], list[str]] = {}
    for name, sources in makings.items():
        grouped.setdefault(whole_of[next(iter(sources))], []).append(name)
    order = {name: i for i, name in enumerate(hollow)}
    bundles: list[Bundle] = []
    for members, names in grouped.items():
        sources = tuple(sorted(members, key=order.__getitem__))
        whole = hollow[sources[0]]
        windows = None
        if len(sources) == 1 and all(origins.is_view(found[name], whole) for name in names):
            names.sort(key=lambda name: found[name].storage_offset())
            windows = tuple(found[name] for name in names)
        metadata = tuple(ParamMeta.of(name, found[name]) for name in names)
        bundles.append(Bundle(sources, metadata, windows))
    return sorted(bundles, key=lambda one: order[one.sources[0]])


def _revert(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return tensors
    return revert_weight_conversion(model, tensors)


class _Origins(TorchDispatchMode):
    """Records which tensors another is made from, and replaces plain copies by their sources."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {storage_key(one): frozenset({name}) for name, one in stand_ins.items()}
        self._written: set[int] = set()
        self._kept: list[torch.Tensor] = []  # a storage's address must not be given out again

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._sources[storage_key(tensor)]

    def is_view(self, tensor: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether ``tensor`` is some elements of ``whole``, unchanged."""
        storage = storage_key(tensor)
        is_same = storage == storage_key(whole) and tensor.dtype == whole.dtype
        return is_same and storage not in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func in (aten.view.default, aten._unsafe_view.default):
            out = args[0].reshape(args[1])  # the copy that was left out may be needed after all
        else:
            out = func(*args, **kwargs)
        made = [one for one in tensors_in(out) if storage_key(one) not in self._sources]
        inputs = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            self._written.update(map(storage_key, inputs))
        known = (self._sources.get(storage_key(one), frozenset()) for one in inputs)
        made_from: frozenset[str] = frozenset().union(*known)
        self._sources.update((storage_key(one), made_from) for one in made)
        self._kept += made
        return out


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory that ``tensor`` views, as long as something keeps it alive."""
    return tensor.untyped_storage()._cdata


@dataclass(slots=True)
class Plan:
    # name, shape and dtype of each of the module's tensors
    facts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    bundles: list[Bundle]  # what is made of which
    metadata: list[ParamMeta]  # all published tensors, in their order
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = metadata_digest(self.metadata)


@dataclass(slots=True)
class _State:
    """A module's tensors under the names of the plain model, while they stay where they are."""

    tensors: dict[str, torch.Tensor]
    deltas: dict[str, list[Delta]]  # what adapters add to some of them
    layout: list[Any] | None
    left_out: set[str] = field(init=False)  # tied tensors that repeat others
    plan: Plan = field(init=False)
    views: list[tuple[str, torch.Tensor]] | None = None  # made when they are first asked for

    def read(self, bundle: Bundle) -> list[torch.Tensor]:
        return [self.merged(name) for name in bundle.sources]

    def merged(self, name: str) -> torch.Tensor:
        """Returns a tensor as it is now; where adapters add to it, a fresh one."""
        with torch.no_grad():
            tensor = whole(self.tensors[name])
            if name in self.deltas:
                tensor = tensor.clone()
            for delta in self.deltas.get(name, ()):
                tensor += delta()  # as PEFT merges: one adapter at a time, each rounded once
            return tensor

    def is_same(self, name: str, other: str) -> bool:
        """Whether two have the same values; merges only where adapters add."""
        if self.deltas.keys() & {name, other}:
            return torch.equal(self.merged(name), self.merged(other))
        return same_values(self.tensors[name], self.tensors[other])


@dataclass(slots=True)
class Known:
    """What was worked out about the owner of some tensors, since a source is made for each push."""

    plan: Plan | None = None
    state: _State | None = None
    fit: Any = None  # how its tensors become those that engines expect, see :mod:`source`
    held: Any = None  # what this rank holds of it, if it is sharded, see :mod:`sharded`
    store: Any = None  # its connection to its process group's store, see :mod:`sharded`
    writer: Any = None  # the engines' memory that its shards are written to, see :mod:`sharded`


_KNOWN: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()


def known_of(owner: Any) -> Known:
    """Returns the record of ``owner``, to which nothing in it may refer: it lives as long."""
    return _KNOWN.setdefault(owner, Known())


class ModuleSource:
    """A Hugging Face model, plain or wrapped by PEFT, by a TorchRL policy, by DDP or by compile.

    LoRA adapters are merged one tensor at a time into a fresh tensor, bit by bit as PEFT's
    ``merge_and_unload()`` does. Fused experts are published under their own names as views, in the
    order in which they lie in the fused tensor.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.owner = unwrap(module)
        self._resting: _State | None = None

    def at_rest(self) -> ModuleSource:
        """Returns one that does not look again where the tensors are, for a push."""
        source = ModuleSource(self.owner)
        source._resting = self._state()
        return source

    def metadata(self) -> list[ParamMeta]:
        return self._state().plan.metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self._state()
        for bundle in state.plan.bundles:
            yield from bundle.publish(base_model(self.owner), state.read(bundle))

    def held(self) -> dict[str, torch.Tensor] | None:
        """Returns aliases of what is read, by its name in the model; None if adapters add to it."""
        state = self._state()
        if state.deltas:
            return None
        return {name: one for name, one in state.tensors.items() if name not in state.left_out}

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns what iteration yields as aliases of the parameters."""
        state = self._state()
        if state.views is None and not state.deltas:
            found = [bundle.views(state.read(bundle)) for bundle in state.plan.bundles]
            if None not in found:
                state.views = list(itertools.chain(*filter(None, found)))
        return state.views

    def same_values(self, name: str, other: str) -> bool:
        """Whether two of the model's tensors, by their names in it, are equal."""
        return self._state().is_same(name, other)

    def _state(self) -> _State:
        """Returns the module's tensors and plan, kept while nothing has moved."""
        if self._resting is not None:
            return self._resting
        module, known = self.owner, known_of(self.owner)
        # What adapters add, and to what, may change at any time.
        layout = None if is_peft(module) else layout_of(module)
        state = known.state if known.state and known.state.layout == layout else None
        if state and state.left_out == repeated(module, state.tensors, state.is_same):
            return state
        tensors, deltas = base_model(module).state_dict(), {}
        check_readable(tensors)
        if is_peft(module):
            tensors, deltas = _lora_tensors(module, tensors)
        state = _State(tensors, deltas, layout)
        state.left_out = repeated(module, tensors, state.is_same)
        sent = {name: one for name, one in tensors.items() if name not in state.left_out}
        state.plan = plan_of(module, sent)
        # Hooks may compute a state dict that changes where the module's tensors do not.
        places = {one for one in layout or () if isinstance(one, tuple)}
        is_fixed = all(place_of(one) in places for one in tensors.values())
        known.state = state if is_fixed else None
        return state


def plan_of(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Returns how the tensors of a module are published; computed once for each module."""
    known = known_of(module)
    facts = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
    if known.plan is None or list(known.plan.facts.items()) != list(facts.items()):
        bundles = bundles_of(base_model(module), facts)
        metadata = [meta for bundle in bundles for meta in bundle.metadata]
        known.plan = Plan(facts, bundles, metadata)
    return known.plan


def base_model(module: torch.nn.Module) -> torch.nn.Module:
    return module.get_base_model() if is_peft(module) else module  # pyright: ignore[reportCallIssue]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the language model inside wrappers of TorchRL and torch, or ``module`` itself."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel
    from torchrl.modules.llm.policies.common import LLMWrapperBase

    within = {
        LLMWrapperBase: "model",  # first: it is a TensorDictModuleBase too
        OptimizedModule: "_orig_mod",
        TensorDictModuleBase: "module",
        DistributedDataParallel: "module",
    }
    name = next((name for kind, name in within.items() if isinstance(module, kind)), "")
    inner = getattr(module, name, None)
    return unwrap(inner) if isinstance(inner, torch.nn.Module) else module

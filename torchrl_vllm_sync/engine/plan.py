"""How weights get into a worker's model: by a load plan recorded once, or vLLM's layerwise reload.

For the plan its own ``load_weights`` runs over stand-ins on the ``meta`` device. Views share their
storage, so a slice that reaches a parameter still identifies its tensor, offset and strides. The
copy into the parameter is recorded and left out, so the model does not change.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload import meta as on_meta
from vllm.platforms import current_platform

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.errors import SyncError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.broadcast.buckets import TensorCopy, is_flat, merged_dims
from torchrl_vllm_sync.weights.module import ParamMeta, storage_key, tensors_in

Tensors = Iterable[tuple[str, torch.Tensor]]
# Writes that are not dense are kept as intervals of 16 bytes each; only a loader that scatters
# single elements of a large tensor needs more.
MAX_INTERVALS = 2**24
aten = torch.ops.aten
# They share their input's storage although their schemas do not say so.
_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
_MOVES = frozenset({aten._to_copy.default, aten.clone.default})


class PlanNotPossibleError(SyncError, RuntimeError):
    """This model cannot be loaded by plain copies; says why and names the tensor or parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFill:
    """Elements of the model that the loader sets to a constant, such as a vocabulary's padding."""

    target: torch.Tensor
    value: float


Write = TensorCopy | PlannedFill


@dataclass(eq=False)
class LoadPlan:
    """The copies that make up one complete load, and constants, which no push changes."""

    metadata: Sequence[ParamMeta]
    copies: list[TensorCopy]
    fills: list[PlannedFill] = field(default_factory=list)

    @functools.cached_property
    def whole_targets(self) -> list[torch.Tensor] | None:
        """Where to receive all tensors without buckets, if each lands whole and unchanged."""
        found: dict[str, torch.Tensor] = {}
        wanted = {meta.name: meta for meta in self.metadata if meta.num_elements}
        for copy in self.copies:
            meta, target = wanted[copy.name], copy.target
            is_straight = target.dtype == meta.dtype and is_flat(copy.dims)
            if copy.name in found or not is_straight or target.numel() < meta.num_elements:
                return None
            found[copy.name] = target.as_strided((target.numel(),), (1,))
        return [found[name] for name in wanted] if found.keys() == wanted.keys() else None

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Sets what a model launched with dummy weights lacks, or new memory; a load follows."""
        for fill in self.fills:
            fill.target.fill_(fill.value)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts the tensors of a push together from what the model holds; the rest is NaN."""
        copies: defaultdict[str, list[TensorCopy]] = defaultdict(list)
        for copy in self.copies:
            copies[copy.name].append(copy)
        for meta in self.metadata:
            rest = math.nan if meta.dtype.is_floating_point else 0
            device = self.copies[0].target.device
            whole = torch.full(meta.shape, rest, dtype=meta.dtype, device=device)
            for copy in copies[meta.name]:
                target = copy.target
                for dim, step in enumerate(copy.stride):
                    target = target if step else target.narrow(dim, 0, 1)  # the others are equal
                whole.as_strided(target.shape, copy.stride, copy.offset).copy_(target)
            yield meta.name, whole

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether the model still consists of the tensors that the plan writes to."""
        targets = (one.target for one in self.copies if not one.target.is_meta)
        tensors = (*model.parameters(), *model.buffers())
        return {*map(storage_key, targets)} <= {*map(storage_key, tensors)}

    def redirected(self, place: Callable[[torch.Tensor], torch.Tensor]) -> LoadPlan:
        return LoadPlan(
            self.metadata,
            [replace(copy, target=place(copy.target)) for copy in self.copies],
            [replace(fill, target=place(fill.target)) for fill in self.fills],
        )


def check_can_be_filled(model_config: Any) -> None:
    """Refuses models whose layers need packed integers and scales, which no trainer holds."""
    quantization = model_config.quantization
    if getattr(model_config.hf_config, "quantization_config", None) is not None:
        how = f"a checkpoint that is quantised already ({quantization})"
    elif quantization in ("bitsandbytes", "gguf"):
        how = f"quantization={quantization!r}, which happens while files are read"
    else:
        return
    raise UnsupportedArgumentError(
        f"the model must be able to take a trainer's weights, got {model_config.model} with {how}; "
        'start from the unquantised checkpoint, with quantization="fp8" or another method that '
        "vLLM applies to weights as they arrive"
    )


def checkpoint_metadata(model_config: Any) -> list[ParamMeta]:
    """Returns the tensors of the model's checkpoint, as published, in the engine's dtype."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config.hf_config, trust_remote_code=model_config.trust_remote_code
        )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        tensors.pop(name, None)
    dtype = model_config.dtype
    return [
        ParamMeta(name, dtype if one.is_floating_point() else one.dtype, tuple(one.shape))
        for name, one in revert_weight_conversion(model, tensors).items()
    ]


@torch.no_grad()
def reload_model(model: torch.nn.Module, vllm_config: Any, weights: Tensors) -> int:
    """Replaces every parameter of ``model`` by ``weights``; returns the number of tensors."""
    taken = itertools.count()
    with set_current_vllm_config(vllm_config), _unwrapped(model):
        reload.initialize_layerwise_reload(model)
        expected = _loadable_names(model)
        try:
            counted = (one for one, _ in zip(weights, taken, strict=False))
            loaded = model.load_weights(counted)  # pyright: ignore[reportCallIssue]  vLLM's, not a Tensor
        finally:
            # An interrupted reload that is not finalised corrupts even a complete next one.
            reload.finalize_layerwise_reload(model, vllm_config.model_config)
        repack_cpu(model)
    missing = set() if loaded is None else expected - _resolved(loaded, expected)
    if missing:
        count = f"{len(missing)} of {len(expected)} parameters received no weights"
        raise WeightMismatchError(f"{count}: {first_few(sorted(missing))}")
    return next(taken)


@contextlib.contextmanager
def _unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Puts layers that LoRA wraps in their wrappers' place, whose names vLLM 0.26 does not load."""
    layers = [(of, *one) for of in model.modules() for one in of.named_children()]
    wrapped = [one for one in layers if isinstance(one[2], BaseLayerWithLoRA)]
    for parent, name, layer in wrapped:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


def _loadable_names(model: torch.nn.Module) -> set[str]:
    """Names of the parameters a full checkpoint fills: no tied head, no scales of a KV cache."""
    names = {name for name, _ in model.named_parameters()}
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    for name, module in model.named_modules():
        if is_tied and isinstance(module, ParallelLMHead):
            names.discard(f"{name}.weight")
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            # Every fp8 model has them, with defaults.
            names -= {f"{name}.{of}_scale" for of in ("q", "k", "v", "prob")}
    return names


def _resolved(loaded: Iterable[str], expected: set[str]) -> set[str]:
    """Adds the full names of parameters with shorter ones, as experts of vLLM 0.26 report."""
    names = set(loaded)
    for module, _, leaf in [one.rpartition(".") for one in names - expected]:
        within = [one for one in expected if one.startswith(f"{module}.")]
        within = [one for one in within if one.endswith(f".{leaf}")]
        names |= set(within) if len(within) == 1 else set()
    return names


def repack_cpu(model: torch.nn.Module) -> None:
    """Redoes the prepacking that a layerwise reload skips on vLLM's CPU backend (0.26 to 0.32)."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if type(experts).__name__.endswith("CPUUnquantizedExperts"):
            experts.process_weights_after_loading(module)
        elif isinstance(module, ParallelLMHead):
            method.process_weights_after_loading(module)


# Whether scales of fp8 are those of whole layers, also where workers share these: not in vLLM 0.26.
SCALES_ARE_OF_ALL_WORKERS = "amax_for_tp_weight_quant" in vars(quant_utils)


@contextlib.contextmanager
def unquantised(model: torch.nn.Module, *, by_row: bool = False) -> Iterator[dict[int, str]]:
    """Gives layers of fp8 back the weights that their loader expects, with no data.

    By storage, what these are called: all that vLLM quantises as it arrives, with one scale each
    or, if that is allowed, one a row.
    """
    found: dict[int, str] = {}
    with _restored(model):
        for prefix, layer in model.named_modules():
            table = layer._parameters
            weight, scale = table.get("weight"), table.get("weight_scale")
            if weight is not None and weight.dtype == torch.float8_e4m3fn and scale is not None:
                is_known = scale.numel() == 1 or (by_row and scale.shape == (weight.shape[1], 1))
                if not (is_known and weight.t().is_contiguous()):
                    raise PlanNotPossibleError(f"{prefix}.weight has more than one scale")
                kept = {name: table[name] for name in table.keys() - {"weight", "weight_scale"}}
                on_meta.restore_layer_on_meta(layer, layerwise.get_layerwise_info(layer))
                table |= kept
                bare: Any = layer.weight
                bare.weight_loader = layerwise._get_original_loader(bare)  # the other one buffers
                found[storage_key(bare)] = f"{prefix}.weight"
        if others := [name for name, one in model.named_parameters() if one.itemsize == 1]:
            raise PlanNotPossibleError(
                f"{first_few(others)} are quantised otherwise than to fp8 with a scale a layer"
            )
        if not found:  # such as where the kernels are Marlin's, which pack weights
            raise PlanNotPossibleError("none of its weights is held in fp8 with a scale a layer")
        yield found


def record_load_plan(
    model: torch.nn.Module, metadata: Sequence[ParamMeta], bare: Container[int] = ()
) -> LoadPlan:
    """Records where each slice of a push lands in a model that is as its loader expects it.

    Parameters whose storages are ``bare`` need no data.
    """
    if len({meta.name for meta in metadata}) < len(metadata):
        raise ValueError("metadata must name each tensor once")
    names: dict[int, str] = {}
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor.is_meta and tensor.numel() and storage_key(tensor) not in bare:
            raise PlanNotPossibleError(f"{name} holds no data yet")
        if tensor.numel():
            names[storage_key(tensor)] = name
    recorder = _Recorder(names)
    try:
        # In inference mode a dispatch mode sees composite operations, which may be views or not.
        with _restored(model) as changed, torch.inference_mode(False), torch.no_grad(), recorder:
            model.load_weights(recorder.stand_ins(metadata))  # pyright: ignore[reportCallIssue]  vLLM's
    except PlanNotPossibleError:
        raise
    except Exception as error:  # any: the loader is the model's, and stand-ins are new to it
        why = f"the loader failed at {recorder.current}: {type(error).__name__}: {error}"
        raise PlanNotPossibleError(why) from error
    if changed:
        raise PlanNotPossibleError(f"the loader replaces {first_few(sorted(changed))}")
    _check_coverage(model, writes := recorder.writes)
    copies = [one for one in writes if isinstance(one, TensorCopy)]
    return LoadPlan(metadata, copies, [one for one in writes if isinstance(one, PlannedFill)])


@contextlib.contextmanager
def _restored(model: torch.nn.Module) -> Iterator[list[str]]:
    """Puts the tensors back that a loader replaces, and lists their names."""
    changed: list[str] = []
    # In a module's own attributes are tensors that are not registered.
    tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (prefix, table, dict(table))
        for prefix, module in model.named_modules()
        for table in (module._parameters, module._buffers, module.__dict__)
    ]
    tensors = (*model.named_parameters(), *model.named_buffers())
    contents = [(name, one, one.data) for name, one in tensors if not one.is_meta]
    try:
        yield changed
    finally:
        for prefix, table, before in tables:
            for name in [*table, *(before.keys() - table)]:
                now, then = table.get(name), before.get(name)
                if now is not then and any(isinstance(one, torch.Tensor) for one in (now, then)):
                    changed.append(f"{prefix}.{name}".removeprefix("."))
                    table.pop(name, None)
                    table |= {name: then} if name in before else {}
            if table.keys() == before.keys() and [*table] != [*before]:
                for name in before:  # replicas copy from each other in this order
                    table[name] = table.pop(name)
        for name, tensor, data in contents:
            if tensor.dtype != data.dtype or not tensor.is_set_to(data):
                changed.append(name)
                tensor.data = data


class _Recorder(TorchDispatchMode):
    """Records every write into the model, in order, in place of doing it."""

    def __init__(self, model_names: dict[int, str]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.current = "the first tensor"  # the one the loader took last
        # By storage. A storage's key is its address, so all that have one must stay alive.
        self._model_names = model_names
        self._sources: dict[int, ParamMeta] = {}
        self._origins: dict[int, str] = {}  # what was made of stand-ins, and of which
        self._alive: list[torch.Tensor] = []

    def stand_ins(self, metadata: Iterable[ParamMeta]) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in metadata:
            self.current = meta.name
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            self._sources[storage_key(tensor)] = meta
            self._origins[storage_key(tensor)] = meta.name
            self._alive.append(tensor)
            yield meta.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.as_strided.default and storage_key(args[0]) in self._sources:
            # A stand-in's strides are not reliable: its clones are views.
            raise PlanNotPossibleError(f"{self._origin(args[0])} is viewed by {func}")
        if func.is_view or func in _VIEWS:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copied(args[0], args[1])
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copied(target, source)
            return None
        if func is aten.fill_.Tensor and self._origin(args[1]) is not None:
            return self._copied(args[0], args[1])
        if func in _FILLS and storage_key(args[0]) in self._model_names:
            if args[0].numel():
                value = 0.0 if func is aten.zero_.default else float(args[1])
                self.writes.append(PlannedFill(_plain_view(args[0]), value))
            return args[0]
        is_same = kwargs.get("dtype") in (None, args[0].dtype) if func in _MOVES else False
        if is_same and self._source(args[0]):
            return aten.alias.default(args[0])
        return self._other(func, args, kwargs)

    def _source(self, tensor: torch.Tensor) -> ParamMeta | None:
        meta = self._sources.get(storage_key(tensor))
        return meta if meta is not None and meta.dtype == tensor.dtype else None

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Records a copy into the model; refuses one whose source is not known."""
        if not target.numel():
            return target
        into = self._model_names.get(storage_key(target))
        meta = self._source(source)
        if into is None or meta is None:
            origin = self._origin(source)
            if into is None and origin is None and self._origin(target) is None:
                return target.copy_(source)
            raise PlanNotPossibleError(
                f"{into or 'a tensor outside of the model'} is written from "
                f"{origin or 'a tensor that is not of the checkpoint'} while {self.current} loads"
            )
        source = source.expand(target.shape)
        offset, shape = int(source.storage_offset()), tuple(source.shape)
        view = _plain_view(target)
        self.writes.append(TensorCopy(meta.name, offset, shape, source.stride(), view))
        return target

    def _origin(self, tensor: torch.Tensor) -> str | None:
        return self._origins.get(storage_key(tensor))

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other operation: its results are no stand-ins, and it must not write."""
        origin = next(filter(None, map(self._origin, tensors_in((args, kwargs)))), None)
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        written = [given.get(one.name) for one in func._schema.arguments if one.is_write]
        for tensor in tensors_in(written):
            if name := self._model_names.get(storage_key(tensor)) or origin:
                raise PlanNotPossibleError(f"{name} is changed in place by {func}")
        if origin is None:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            raise PlanNotPossibleError(f"a value of {origin} is read by {func}")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                raise PlanNotPossibleError(f"a value of {origin} is read by {func}")
            self._origins[storage_key(tensor)] = f"{func} of {origin}"
            self._alive.append(tensor)
        return result


def _plain_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor; vLLM's parameter classes give views of their own class."""
    view, place = torch.empty(0, dtype=tensor.dtype, device=tensor.device), tensor.storage_offset()
    return view.set_(tensor.untyped_storage(), place, tensor.shape, tensor.stride())


def _check_coverage(model: torch.nn.Module, writes: Sequence[Write]) -> None:
    """Refuses parameters not set completely, and what is set twice; constants may come first."""
    by_storage: defaultdict[int, list[Write]] = defaultdict(list)
    for write in writes:
        by_storage[storage_key(write.target)].append(write)
    # In an arena all parameters are in one storage: each is compared with the writes near it alone.
    spans = {key: np.array([_span(w.target) for w in of]) for key, of in by_storage.items()}
    parameters = dict(model.named_parameters())
    faults: list[str] = []
    tensors = (one for one in [*parameters.items(), *model.named_buffers()] if one[1].numel())
    for name, tensor in tensors:
        key, (begin, end) = storage_key(tensor), _span(tensor)
        starts, ends = spans.get(key, np.empty((0, 2))).T
        near = np.flatnonzero((starts < end) & (ends > begin))
        found = _faults(tensor, [by_storage[key][at] for at in near])
        missing, twice = (num_bytes // tensor.element_size() for num_bytes in found)
        if missing and name in parameters:
            faults.append(f"{name} ({missing} of {tensor.numel()} elements missing)")
        if twice:
            faults.append(f"{name} ({twice} elements written twice)")
    if faults:
        raise PlanNotPossibleError(f"the loader must write every element once: {first_few(faults)}")


def _faults(tensor: torch.Tensor, writes: Sequence[Write]) -> tuple[int, int]:
    """Returns bytes of ``tensor`` that are not written, and those written more than once."""
    once: list[np.ndarray] = []  # what nothing may write again: copies, constants over copies
    constants: list[np.ndarray] = []
    for write in writes:
        bounds = _bounds(write.target)
        if isinstance(write, PlannedFill) and _size(*once, bounds) == _size(*once) + _size(bounds):
            constants.append(bounds)
        else:
            once.append(bounds)
    own, written = _bounds(tensor), [*once, *constants]
    within = [bounds.clip(own[0].min(), own[1].max()) for bounds in once]
    twice = sum(int((ends - starts).sum()) for starts, ends in within) - _size(*within)
    return _size(own, *written) - _size(*written), twice


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers, and the end of the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first, size = int(tensor.storage_offset()), tensor.element_size()
    extent = 1 + sum((count - 1) * step for count, step in steps)
    return first * size, (first + extent) * size


def _bounds(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of its storage that a tensor covers: starts and ends, of shape ``(2, count)``."""
    dims = list(merged_dims(zip(tensor.shape, tensor.stride(), tensor.stride(), strict=True)))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    if tensor.numel() // run > MAX_INTERVALS:
        what = f"writes of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        raise PlanNotPossibleError(f"{what} are too scattered to be checked")
    starts = np.array([tensor.storage_offset()], dtype=np.int64)
    for count, stride, _ in dims:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return np.stack([starts, starts + run]) * tensor.element_size()


def _size(*bounds: np.ndarray) -> int:
    """Bytes of the union of intervals."""
    if not bounds:
        return 0
    joined = np.concatenate(bounds, axis=1)
    starts, ends = joined[:, np.argsort(joined[0], kind="stable")]
    reached = np.maximum.accumulate(ends)
    begins = np.maximum(starts[1:], reached[:-1])
    return int(ends[0] - starts[0] + np.maximum(ends[1:] - begins, 0).sum())

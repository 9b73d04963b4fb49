"""The recording of a load plan: the model's own ``load_weights`` runs over stand-ins without data.

Stand-ins are tensors on the ``meta`` device. Views of them share their storage, so a slice that
reaches a parameter still identifies its tensor, its offset and its strides. The copy into the
parameter is recorded and left out, so the model does not change.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_vllm_sync.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._ops import OpOverload

    from torchrl_vllm_sync.weights.metadata import ParamMeta


SHOWN = 5
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
class PlannedCopy:
    """One slice of a checkpoint tensor and the place it is loaded to."""

    name: str  # of the checkpoint tensor
    offset: int  # in elements of the full, contiguous checkpoint tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; 0 where one element fills several
    target: torch.Tensor  # a view into a parameter or buffer of the model, of the same shape


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFill:
    """Elements of the model that the loader sets to a constant, such as a vocabulary's padding."""

    target: torch.Tensor
    value: float


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory that ``tensor`` views, as long as something keeps it alive."""
    return tensor.untyped_storage()._cdata


def check_coverage(model: torch.nn.Module, writes: Sequence[PlannedCopy | PlannedFill]) -> None:
    """Checks that ``writes`` set every parameter of ``model`` completely and nothing twice.

    A constant counts as covered. A copy may follow it on the same elements, not precede it.
    """
    by_storage: defaultdict[int, list[PlannedCopy | PlannedFill]] = defaultdict(list)
    for write in writes:
        by_storage[storage_key(write.target)].append(write)
    written: dict[int, _Written] = {}
    parameters = dict(model.named_parameters())
    faults: list[str] = []
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        if not tensor.numel():
            continue
        key = storage_key(tensor)
        if key not in written:
            written[key] = _Written(by_storage[key])
        missing, twice = (count // tensor.element_size() for count in written[key].faults(tensor))
        if missing and name in parameters:
            faults.append(f"{name} ({missing} of {tensor.numel()} elements missing)")
        if twice:
            faults.append(f"{name} ({twice} elements written twice)")
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise PlanNotPossibleError(
            f"the loader must write every element once: {', '.join(faults[:SHOWN])}{more}"
        )


class _Written:
    """Which bytes of one storage the writes cover, as arrays of starts and ends."""

    def __init__(self, writes: Sequence[PlannedCopy | PlannedFill]) -> None:
        bounds = [_bounds(write.target) for write in writes]
        is_copy = [isinstance(write, PlannedCopy) for write in writes]
        self._all = _joined(bounds)
        self._copies = _joined([one for one, copy in zip(bounds, is_copy, strict=True) if copy])
        # Constants that would overwrite an earlier copy.
        self._wiped: list[np.ndarray] = []
        for i, one in enumerate(bounds):
            if not is_copy[i] and any(is_copy[:i]):
                before = [bounds[j] for j in range(i) if is_copy[j]]
                if _size(_joined([*before, one])) < _size(_joined(before)) + _size(one):
                    self._wiped.append(one)

    def faults(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns bytes of ``tensor`` that are not written, and those written more than once."""
        own = _bounds(tensor)
        missing = _size(_joined([own, self._all])) - _size(self._all)
        low, high = own[0].min(), own[1].max()
        copies = np.clip(_joined([self._copies, *self._wiped]), low, high)
        return missing, int((copies[1] - copies[0]).sum()) - _size(copies)


def _bounds(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of its storage that a tensor covers: starts and ends, of shape ``(2, count)``."""
    if not tensor.numel():
        return np.empty((2, 0), dtype=np.int64)
    run = 1
    outer: list[tuple[int, int]] = []
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, count in sorted(dim for dim in dims if dim[1] != 1):
        if stride == run and not outer:
            run *= count
        else:
            outer.append((stride, count))
    if tensor.numel() // run > MAX_INTERVALS:
        raise PlanNotPossibleError(
            f"writes of shape {list(tensor.shape)} and strides {list(tensor.stride())} are too "
            "scattered to be checked"
        )
    starts = np.array([tensor.storage_offset()], dtype=np.int64)
    for stride, count in outer:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return np.stack([starts, starts + run]) * tensor.element_size()


def _joined(bounds: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty((2, 0), dtype=np.int64), *bounds], axis=1)


def _size(bounds: np.ndarray) -> int:
    """Bytes of the union of intervals."""
    if not bounds.size:
        return 0
    starts, ends = bounds[:, np.argsort(bounds[0], kind="stable")]
    reached = np.maximum.accumulate(ends)
    begins = np.maximum(starts[1:], reached[:-1])
    return int(ends[0] - starts[0] + np.maximum(ends[1:] - begins, 0).sum())


def record_writes(
    model: torch.nn.Module, metadata: Sequence[ParamMeta]
) -> list[PlannedCopy | PlannedFill]:
    """Runs the loader of ``model`` over stand-ins and returns its writes, in order."""
    if len({meta.name for meta in metadata}) < len(metadata):
        raise ValueError("metadata must name each tensor once")
    names: dict[int, str] = {}
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor.is_meta and tensor.numel():
            raise PlanNotPossibleError(f"{name} holds no data yet")
        if tensor.numel():
            names[storage_key(tensor)] = name
    recorder = _Recorder(names, metadata)
    state = _ModelState(model)
    try:
        # In inference mode a dispatch mode sees composite operations, which may be views or not.
        with torch.inference_mode(mode=False), torch.no_grad(), recorder:
            model.load_weights(recorder.stand_ins())  # pyright: ignore[reportCallIssue]  vLLM's
    except PlanNotPossibleError:
        raise
    except Exception as error:  # any: the loader is the model's, and stand-ins are new to it
        raise PlanNotPossibleError(
            f"the loader failed at {recorder.current}: {type(error).__name__}: {error}"
        ) from error
    finally:
        changed = state.restore()
    if changed:
        raise PlanNotPossibleError(f"the loader replaces {', '.join(changed[:5])}")
    check_coverage(model, recorder.writes)
    return recorder.writes


class _ModelState:
    """The tensors of a model, to put back what a loader replaces."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (name, module, dict(module._parameters), dict(module._buffers), _plain_tensors(module))
            for name, module in model.named_modules()
        ]
        self._data = {
            name: (tensor, tensor.data)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }

    def restore(self) -> list[str]:
        """Undoes every replacement and returns the names."""
        changed: list[str] = []
        for prefix, module, parameters, buffers, plain in self._modules:
            now_plain = _plain_tensors(module)
            for now, before in [
                (module._parameters, parameters),
                (module._buffers, buffers),
                (now_plain, plain),
            ]:
                names = now.keys() | before.keys()
                differing = [name for name in names if now.get(name) is not before.get(name)]
                changed += [f"{prefix}.{name}".removeprefix(".") for name in differing]
                if now is now_plain:
                    for name in differing:
                        module.__dict__.pop(name, None)
                    module.__dict__.update(plain)
                elif differing:
                    now.clear()
                    now.update(before)
        for name, (tensor, data) in self._data.items():
            if not _same_memory(tensor, data):
                changed.append(name)
                tensor.data = data
        return sorted(changed)


def _plain_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are attributes of a module without being registered."""
    return {
        name: value for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)
    }


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        storage_key(one) == storage_key(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


class _Recorder(TorchDispatchMode):
    """Records every write into the model, in order, in place of doing it."""

    def __init__(self, model_names: dict[int, str], metadata: Sequence[ParamMeta]) -> None:
        super().__init__()
        self.writes: list[PlannedCopy | PlannedFill] = []
        self.current = "the first tensor"  # the one the loader took last
        self._model_names = model_names
        self._stand_ins = [
            (meta, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta in metadata
        ]
        # By storage. A storage's key is its address, so all that have one must stay alive.
        self._sources = {storage_key(tensor): meta for meta, tensor in self._stand_ins}
        self._computed: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []

    def stand_ins(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, tensor in self._stand_ins:
            self.current = meta.name
            yield meta.name, tensor

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
        """The checkpoint tensor that ``tensor`` is a view of."""
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
        if source.shape != target.shape:
            source = source.expand(target.shape)
        self.writes.append(
            PlannedCopy(
                meta.name,
                int(source.storage_offset()),
                tuple(source.shape),
                source.stride(),
                _plain_view(target),
            )
        )
        return target

    def _origin(self, tensor: torch.Tensor) -> str | None:
        """What a tensor was made of, if that is stand-ins."""
        key = storage_key(tensor)
        meta = self._sources.get(key)
        return meta.name if meta is not None else self._computed.get(key)

    def _other(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other operation: its results are no stand-ins, and it must not write."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origin = next(filter(None, map(self._origin, tensors)), None)
        if func._schema.is_mutable:
            for tensor in tree_leaves(_written_arguments(func, args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    name = self._model_names.get(storage_key(tensor)) or origin
                    if name is not None:
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
            self._computed[storage_key(tensor)] = f"{func} of {origin}"
            self._alive.append(tensor)
        return result


def _written_arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    return [
        given[one.name]
        for one in func._schema.arguments
        if one.name in given and one.alias_info is not None and one.alias_info.is_write
    ]


def _plain_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor; vLLM's parameter classes give views of their own class."""
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )

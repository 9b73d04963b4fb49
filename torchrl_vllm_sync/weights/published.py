"""As which tensors a hub's checkpoint holds a model's: worked out once, then replayed as views.

transformers keeps some tensors in another form than checkpoints do, experts above all: one fused
tensor a layer here, two or three a layer and expert there. Its ``revert_weight_conversion`` takes
milliseconds for each, so it runs once, over tensors without storage, while a dispatch mode notes
what becomes of each. What is cut, indexed or transposed out of one tensor is a strided view of it,
and is taken as such from the live tensor ever after, without a copy. What is computed (joined,
interleaved) is converted anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_vllm_sync.weights.metadata import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Bundle", "Window", "bundles_of"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Window:
    """Where a published tensor lies in the contiguous tensor that holds it.

    Attributes:
        stride: Elements between neighbours, for each dimension of the published tensor.
        offset: Elements before its first value.
    """

    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors of a checkpoint that are made from the same tensors of the model.

    Attributes:
        sources: Names of the model's tensors.
        metadata: The checkpoint's tensors; those that are views in the order of their storage.
        windows: Where each of these lies in the one source; ``None`` if they must be computed.
        unchanged: Whether the one published tensor is the source itself, perhaps renamed.
    """

    sources: tuple[str, ...]
    metadata: tuple[ParamMeta, ...]
    windows: tuple[Window, ...] | None
    unchanged: bool = False

    def views(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]] | None:
        """Returns name and view of each published tensor, without copying anything.

        Args:
            tensors: The model's tensors, full and detached, in the order of ``sources``.

        Returns:
            ``None`` if values must be computed or copied.
        """
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
        """Returns name and value of each published tensor: views where it can be.

        Args:
            model: The model, which knows how its checkpoints differ from it.
            tensors: Its tensors, full and detached, in the order of ``sources``.
        """
        views = self.views(tensors)
        if views is None:
            found = _revert(model, dict(zip(self.sources, tensors, strict=True)))
            views = [(meta.name, found[meta.name]) for meta in self.metadata]
        return views


def bundles_of(
    model: torch.nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[Bundle]:
    """Works out as which tensors a checkpoint of ``model`` holds the given ones.

    Args:
        model: Published under its own names unless it is a transformers model.
        tensors: Name to full shape and dtype of each tensor of the model.

    Returns:
        Bundles in the order of their first source. Every published tensor is in one of them.
    """
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
    """Describes the tensors ``names``, all of which are made from ``sources``."""
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
    """Returns ``tensors`` as a checkpoint on a hub holds them."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return tensors
    return revert_weight_conversion(model, tensors)


class _Origins(TorchDispatchMode):
    """Notes which tensors another is made from, and takes plain copies for what they copy."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._sources = {_storage(one): frozenset({name}) for name, one in stand_ins.items()}
        self._written: set[int] = set()
        self._kept: list[torch.Tensor] = []  # a storage's address must not be given out again

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Returns the names of the tensors from which ``tensor`` was made."""
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
            out = args[0].reshape(args[1])  # of a copy that was none, it may need one after all
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

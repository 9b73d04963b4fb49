"""The source of a push: named full tensors in checkpoint form, from whatever the trainer holds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.module import (
    Known,
    ModuleSource,
    ParamMeta,
    check_readable,
    known_of,
    place_of,
    same_values,
    unwrap,
    whole,
)
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.sharded import Renaming, ShardedModuleSource, is_sharded

HEAD = "lm_head.weight"
# Buffers that follow from the configuration: no checkpoint holds them, but a TensorDict may.
DERIVED = ("inv_freq", "original_inv_freq", "position_ids")
# transformers 5 holds the experts of a layer in one tensor: which matrices of each expert it holds,
# one below the other, by the names of either kind of checkpoint.
EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
# In models with experts: transformers' name, and that of checkpoints.
RENAMED = (".mlp.", ".block_sparse_moe.")


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors of full shape under Hugging Face names, as in vLLM's weight transfer.

    ``metadata()`` and iteration agree item by item; iterating again reads the tensors anew.
    """

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, in the order of iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, tensor)``; the tensor stays valid until the next item is asked for."""
        ...


@runtime_checkable
class StableSource(Protocol):
    """What a source offers besides when its tensors live at the same place from push to push."""

    @property
    def owner(self) -> object:
        """The object whose lifetime the tensors share: hashable and weakly referenceable."""
        ...

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns what iteration would yield, as aliases; the same list while they stay."""
        ...


def tensors_of(source: WeightSource) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns aliases of what a source reads, else its module's parameters; nothing if unknown.

    Experts as their module holds them: many small views take longer to look at than few tensors.
    """
    if not isinstance(source, StableSource):
        return ()
    if isinstance(source, _FittedSource):
        return source.held
    if isinstance(source, ShardedModuleSource):
        return source.shards()
    if isinstance(source, ModuleSource) and (held := source.held()) is not None:
        return held.items()
    if (views := source.views()) is None and isinstance(source.owner, torch.nn.Module):
        return source.owner.named_parameters()
    return views or ()


def views_of(source: WeightSource) -> list[tuple[str, torch.Tensor]] | None:
    """Returns aliases of a source's tensors; ``None`` if it computes them, or cannot say."""
    return source.views() if isinstance(source, StableSource) else None


class MappingSource:
    """A state dict, or any mapping of names to tensors."""

    def __init__(self, tensors: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = dict(tensors)
        for name, one in self.tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"names of weights must be text, got {name!r}")
            if not isinstance(one, torch.Tensor):
                raise TypeError(f"weights must be tensors, got {type(one).__name__} for {name!r}")
        check_readable(self.tensors)
        self._metadata: list[ParamMeta] = []
        self._views: list[tuple[str, torch.Tensor]] = []
        self._places: list[tuple[Any, ...]] = []

    @property
    def owner(self) -> object:
        """This source: another one of the same tensors shares nothing with it."""
        return self

    def metadata(self) -> list[ParamMeta]:
        """Returns the tensors' metadata; the same list while none changes."""
        metadata = [ParamMeta.of(name, tensor) for name, tensor in self.tensors.items()]
        if metadata != self._metadata:
            self._metadata = metadata
        return self._metadata

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns the tensors, detached."""
        if any(isinstance(tensor, DTensor) for tensor in self.tensors.values()):
            return None
        places = [(name, *place_of(tensor)) for name, tensor in self.tensors.items()]
        if places != self._places:
            self._places = places
            self._views = [(name, tensor.detach()) for name, tensor in self.tensors.items()]
        return self._views

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, whole(tensor)

    def same_values(self, name: str, other: str) -> bool:
        return same_values(self.tensors[name], self.tensors[other])


def as_weight_source(weights: Any) -> WeightSource:
    """Turns what a trainer may hold into a source.

    Args:
        weights: A ``WeightSource``, a module (a Hugging Face model, a PEFT model, a TorchRL
            ``TransformersWrapper``, any of them under FSDP2 except with adapters), a TensorDict
            (nested or flat), a mapping of names to tensors,
            or an iterable of ``(name, tensor)``, which is read once, here.

    Returns:
        A source of these tensors.

    Raises:
        TypeError: ``weights`` is none of these, or holds something that is no tensor.
    """
    if isinstance(weights, torch.nn.Module) and not isinstance(weights, TensorDictBase):
        return ShardedModuleSource(weights) if is_sharded(weights) else ModuleSource(weights)
    if isinstance(weights, TensorDictBase):
        return MappingSource(weights.flatten_keys(".").items())
    if isinstance(weights, WeightSource) and not isinstance(weights, Mapping):
        return weights
    if isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
        return MappingSource(weights)
    raise TypeError(
        "weights must be a module, a TensorDict, a mapping, a WeightSource or an iterable of "
        f"(name, tensor), got {type(weights).__name__}"
    )


@dataclass(slots=True)
class _Fit:
    """How one source's tensors become those that one engines' model expects."""

    given: list[ParamMeta]  # the source's metadata that was compared
    expected: Sequence[ParamMeta]  # the engines' model's metadata that it was compared with
    prefix: str  # what is removed from the source's names
    # for each of the source's names the names that its values are sent under: one, or those of each
    # expert's parts. A name that is not here is tied or derived
    sent: dict[str, str | list[tuple[str, ...]]]
    metadata: list[ParamMeta]  # what is sent
    embedding: str | None  # what a head that comes along, and is not sent, must equal
    # a list of the source's views, and what is sent of it
    views: tuple[Any, list[tuple[str, torch.Tensor]]] = None, []

    def renamed(
        self, items: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what is sent of a source's tensors, experts as views of what holds them all."""
        for name, tensor in items:
            match self.sent.get(name):
                case str() as short:
                    yield short, tensor
                case [*experts]:
                    for parts, expert in zip(experts, tensor, strict=True):
                        yield from zip(parts, expert.chunk(len(parts)), strict=True)


class _FittedSource:
    """A source under the names and dtypes of the engines' model, in its own order, for one push.

    So where the tensors are is asked once.
    """

    def __init__(self, source: WeightSource, fit: _Fit) -> None:
        self._source, self._fit = source, fit

    @property
    def owner(self) -> object:
        return self._source.owner if isinstance(self._source, StableSource) else self

    def metadata(self) -> list[ParamMeta]:
        return self._fit.metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._fit.renamed(self._source)

    @cached_property
    def held(self) -> list[tuple[str, torch.Tensor]]:
        return [*tensors_of(self._source)]

    @cached_property
    def _given(self) -> list[tuple[str, torch.Tensor]] | None:
        return views_of(self._source)

    def views(self) -> list[tuple[str, torch.Tensor]] | None:
        views, fit = self._given, self._fit
        if views is None:
            return None
        if views is not fit.views[0]:
            fit.views = views, list(fit.renamed(views))
        return fit.views[1]


def sharded_of(source: WeightSource) -> tuple[ShardedModuleSource, Renaming] | None:
    """Returns the sharded model that a source reads, and what renames its tensors to those sent."""
    if isinstance(source, ShardedModuleSource):
        return source, iter
    if isinstance(source, _FittedSource) and isinstance(source._source, ShardedModuleSource):
        return source._source, source._fit.renamed
    return None


def fit_to_model(source: WeightSource, expected: Sequence[ParamMeta]) -> WeightSource:
    """Checks that ``source`` is a complete push for the engines' model and renames it to fit.

    A tied output head may be absent, but must equal the embedding. Any floating-point dtype may
    stand for another, since transports cast.
    """
    given = source.metadata()
    known = known_of(source.owner) if isinstance(source, StableSource) else Known()
    fit: _Fit | None = known.fit
    if fit is None or fit.given is not given or fit.expected is not expected:
        fit = known.fit = _fit(source, given, expected)
    else:
        _check(source, fit.prefix, fit.embedding)
    return _FittedSource(source, fit)


def served_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Returns the coarsest dtype in which engines hold the module's weights, once it was pushed."""
    fit: _Fit | None = known_of(unwrap(module)).fit
    return fit and coarsest(one.dtype for one in fit.metadata)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Returns the floating-point dtype that rounds most."""
    floating = {one for one in dtypes if one.is_floating_point}
    return max(floating, key=lambda one: torch.finfo(one).eps, default=None)


def _fit(source: WeightSource, given: list[ParamMeta], expected: Sequence[ParamMeta]) -> _Fit:
    """Compares what ``source`` gives with what the engines expect."""
    wanted = {meta.name: meta for meta in expected}
    relevant = [
        meta for meta in given if meta.name in wanted or meta.name.rpartition(".")[2] not in DERIVED
    ]
    prefix = ""
    if wanted and not any(meta.name in wanted for meta in relevant):
        probe = next(iter(wanted))
        longer = [meta.name for meta in relevant if meta.name.endswith("." + probe)]
        prefix = longer[0].removesuffix(probe) if len(longer) == 1 else ""
    found: dict[str, ParamMeta] = {}
    sent: dict[str, str | list[tuple[str, ...]]] = {}
    twice: list[str] = []
    for meta in relevant:
        names = _sent_as(meta.name.removeprefix(prefix), meta, wanted)
        if isinstance(names, str):
            items = [ParamMeta(names, meta.dtype, meta.shape)]
        else:
            shape = meta.shape[1] // len(names[0]), meta.shape[2]
            items = [ParamMeta(one, meta.dtype, shape) for one in itertools.chain(*names)]
        twice += [one.name for one in items if one.name in found]
        found |= {one.name: one for one in items}
        sent[meta.name] = names
    both = [(meta, wanted[name]) for name, meta in found.items() if name in wanted]
    embedding, shapes, dtypes = None, list[str](), list[str]()
    if HEAD in found and HEAD not in wanted:
        shape = found[HEAD].shape
        alike = [one.name for one, _ in both if "embed" in one.name and one.shape == shape]
        embedding = alike[0] if len(alike) == 1 else None
    for meta, want in both:
        if meta.shape != want.shape:
            shapes.append(f"{meta.name} {list(meta.shape)} instead of {list(want.shape)}")
        if meta.dtype.is_floating_point != want.dtype.is_floating_point:
            dtypes.append(f"{meta.name} {meta.dtype} instead of {want.dtype}")
    problems = [
        _listing("missing", [name for name in wanted if name not in found]),
        _listing("unknown", [name for name in found if name not in wanted and name != HEAD]),
        _listing("given twice", twice),
        _listing("of another shape", shapes),
        _listing("of another kind of dtype", dtypes),
    ]
    _check(source, prefix, embedding, *filter(None, problems))
    if HEAD not in wanted:
        sent.pop(prefix + HEAD, None)
    return _Fit(given, expected, prefix, sent, [want for _, want in both], embedding)


def _sent_as(
    name: str, meta: ParamMeta, wanted: Mapping[str, ParamMeta]
) -> str | list[tuple[str, ...]]:
    """Returns the name of a tensor in the engines' checkpoint, or those of each expert's parts."""
    for known_as in (name, name.replace(*RENAMED)):
        if known_as in wanted:
            return known_as
        layer, _, leaf = known_as.rpartition(".")
        for parts in EXPERTS.get(leaf, ()) if len(meta.shape) == 3 else ():
            divides = meta.shape[0] and meta.shape[1] % len(parts) == 0
            if divides and f"{layer}.0.{parts[0]}.weight" in wanted:
                return [
                    tuple(f"{layer}.{expert}.{part}.weight" for part in parts)
                    for expert in range(meta.shape[0])
                ]
    return name


def _check(source: WeightSource, prefix: str, embedding: str | None, *problems: str) -> None:
    """Raises what does not fit, with a separate output head, which engines that tie it drop."""
    same = getattr(source, "same_values", None)
    if embedding and same and not same(prefix + HEAD, prefix + embedding):
        problems += (f"{HEAD} differs from {embedding}, to which the engines tie it",)
    if problems:
        raise WeightMismatchError(
            f"the push does not fit the engines' model: {'; '.join(problems)}"
        )


def _listing(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}: {first_few(names)}" if names else ""


# ---- Where a source is
#
# A transport sends from where the weights are. The current CUDA device says little of that: it is
# each thread's own, and a process that keeps a model on ``cuda:1`` need never have made it current.


def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or how many cores of a CPU this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {len(os.sched_getaffinity(0))} cores"


def home_device(source: WeightSource | None, kind: str) -> torch.device | None:
    """Returns the device of a kind that a source's tensors are on; ``None`` unless it is one."""
    devices = {one.device for _, one in tensors_of(source)} if source is not None else set()
    of_kind = [one for one in devices if one.type == kind]
    return of_kind[0] if len(of_kind) == 1 else None


def current_device(kind: str) -> torch.device:
    """Returns this thread's current CUDA device, or the CPU."""
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def sending_device(
    transport: str,
    engines: Mapping[str, Any],
    source: WeightSource | None,
    given: torch.device | None = None,
) -> torch.device:
    """Returns the trainer's device, of the kind that all engines are on."""
    kind, *others = sorted({one.device_type for one in engines.values()})
    device = given or home_device(source, kind) or torch.device(kind)
    if others:
        places = (f"replica {name} is on {one.device_type}" for name, one in engines.items())
        where = ", ".join(places)
    elif kind == "cuda" and not torch.cuda.is_available():
        where = "the engines are on cuda, the trainer is on a host without CUDA"
    elif device.type != kind:
        where = f"the engines are on {kind}, the trainer is on {device}"
    else:
        is_indexed = kind == "cuda" and device.index is not None
        return device if is_indexed else current_device(kind)
    raise UnsupportedArgumentError(
        f"the {transport} transport needs trainer and engines on one kind of device, and {where}: "
        "use the memmap transport"
    )


def require_one_host(transport: str, engines: Mapping[str, Any]) -> None:
    """Refuses engines on other hosts than this process."""
    here = this_node()
    for name, one in engines.items():
        if one.node_id != here:
            raise UnsupportedArgumentError(
                f"the {transport} transport needs trainer and engines on one host, and replica "
                f"{name} is on {one.node_id or 'an unknown one'}, the trainer on {here}: use the "
                "broadcast transport"
            )

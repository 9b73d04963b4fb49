"""LoRA adapters that are kept apart: what is sent of one, and its way to every replica's node."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import operator
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._utils import _flatten_dense_tensors

from torchrl_vllm_sync.checks import Deadline, check_integer, first_few
from torchrl_vllm_sync.errors import (
    ServerError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.audit import refuse_nonfinite
from torchrl_vllm_sync.weights.module import (
    OfLast,
    ParamMeta,
    base_model,
    check_readable,
    checked,
    dtype_name,
    is_peft,
    metadata_digest,
    to_json,
    unwrap,
)
from torchrl_vllm_sync.weights.p2p.memory import (
    Handover,
    MappedMemory,
    device_uuid,
    page_lock,
    this_node,
    unreachable,
)
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource, is_sharded
from torchrl_vllm_sync.weights.snapshots.data_file import bytes_of
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import ask, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, Push

logger = logging.getLogger(__name__)

# Between an adapter's name and those of its tensors.
OF = ":"
# Seconds for engines to say whether they can hold such an adapter.
PREPARE_TIMEOUT_S = 60.0
# Of each adapter how many memories a worker keeps for trainers, the last used.
MOST_INBOXES = 2
_HALVES = "lora_A", "lora_B"
# PEFT's configuration as JSON, and the tensors' metadata in JSON form.
Kind: TypeAlias = tuple[str, list[list[Any]]]
# Where workers hand over memory that an adapter is written to: the ``path`` of a ``Handover``, a
# ``token`` of this memory, and its ``device_type``: theirs, or that of the host.
Door: TypeAlias = dict[str, str]
# What PEFT adds to weights by other means than two matrices of a linear layer; the rest of what an
# engine cannot do, vLLM itself knows.
_BESIDE = ("modules_to_save", "trainable_token_indices", "target_parameters")


class AdapterSource:
    """The active LoRA adapter of a PEFT model, which engines keep apart from the base weights.

    Push it as you would the model: only its tensors travel, and no engine pauses. Requests in
    flight end with the version they began with, later ones begin with this one. Engines must have
    been launched with ``enable_lora=True`` and the base weights that the adapter is trained on.

    Example:
        >>> service.push_weights(AdapterSource(peft_model))

    Args:
        module: The PEFT model, in any wrapper that ``push_weights`` takes.
        name: Names the adapter in the service, where there may be several; by default as in PEFT.
            Engines keep what was pushed under each name until the service ends.
        max_versions: Versions that engines keep, besides those that requests in flight use; at
            least the one that serves, and the one that comes.

    Raises:
        UnsupportedArgumentError: ``module`` is no such model.
        WeightMismatchError: Not all of it can be kept apart; it says what.
    """

    def __init__(
        self, module: torch.nn.Module, name: str | None = None, *, max_versions: int = 2
    ) -> None:
        from peft.tuners.lora import LoraLayer

        self.owner: Any = unwrap(module)
        check_integer("max_versions", max_versions, 2)
        self.max_versions = max_versions
        if not is_peft(self.owner):
            kind = type(self.owner).__name__
            raise UnsupportedArgumentError(f"an adapter must be a PEFT model's, got a {kind}")
        if len(active := self.owner.active_adapters) != 1:
            raise WeightMismatchError(f"1 adapter must be active to be kept apart, got {active}")
        (adapter,) = active
        self.name: str = adapter if name is None else name
        if not isinstance(self.name, str) or not self.name or OF in self.name:
            raise UnsupportedArgumentError(f"name must be text without {OF!r}, got {name!r}")
        config = self.owner.peft_config[adapter].to_dict()
        problems = [f"{one}={config[one]}" for one in _BESIDE if config.get(one)]
        if config["peft_type"] != "LORA":
            problems.append(f"peft_type={config['peft_type']}")
        self._layers: dict[str, Any] = {}
        for at, layer in base_model(self.owner).named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                self._layers[at] = layer
                is_linear = isinstance(dict(layer.lora_A).get(adapter), torch.nn.Linear)
                if not is_linear or hasattr(layer, "parameter_name"):
                    problems.append(f"{at} is adapted as {type(layer).__name__}")
        if problems:
            raise WeightMismatchError(
                f"adapter {self.name!r} cannot be kept apart, merge it: {first_few(problems)}"
            )
        if not self._layers:
            raise WeightMismatchError(f"adapter {self.name!r} is of no layer")
        self._adapter, self._metadata = adapter, list[ParamMeta]()
        self._views = list[tuple[str, torch.Tensor]]()
        halves = [(at, layer, half) for half in _HALVES for at, layer in self._layers.items()]
        within = f"{self.name}{OF}base_model.model."
        self._names = [f"{within}{at}.{half}.weight" for at, _, half in halves]
        self._halves = [getattr(layer, half) for _, layer, half in halves]
        self.config = json.dumps(config, default=sorted)
        self._look()
        # Under FSDP2 every rank gathers it, as it would the model.
        self.sharded = (
            ShardedModuleSource(self.owner, only=lambda: dict(self._look()))
            if is_sharded(self.owner)
            else None
        )

    def _look(self) -> list[tuple[str, torch.Tensor]]:
        """Finds the parameters."""
        # Quicker than attributes of modules, which are looked for in three places.
        found = [half._modules[self._adapter]._parameters.get("weight") for half in self._halves]
        if not self._views or any(map(operator.is_not, found, [one for _, one in self._views])):
            found = [half[self._adapter].weight for half in self._halves]
            self._views = [*zip(self._names, found, strict=True)]
        weights = [one for _, one in self._views]
        if [(n.dtype, n.shape) for n in self._metadata] != [(n.dtype, n.shape) for n in weights]:
            self._metadata = [ParamMeta.of(*one) for one in self._views]
        return self._views

    def views(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the parameters that the last push found; the same list while they are these."""
        return self._views

    def metadata(self) -> list[ParamMeta]:
        """Returns their metadata, as of then; the same list while it does not change."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the matrices, the second of each layer times what PEFT scales it by."""
        parts = self._packed().split([one.num_elements for one in self._metadata])
        for meta, part in zip(self._metadata, parts, strict=True):
            yield meta.name, part.view(meta.shape).to(meta.dtype)

    @torch.no_grad()
    def _packed(self) -> torch.Tensor:
        """Returns what iteration yields, one after the other, by few calls for all of them."""
        weights = self._views if self.sharded is None else checked(self.sharded, self._metadata)
        flat = _flatten_dense_tensors([one for _, one in weights])
        sizes = [one.num_elements for one in self._metadata[len(self._layers) :]]
        scales = [layer.scaling[self._adapter] for layer in self._layers.values()]
        begin = len(flat) - sum(sizes)
        for scale, alike in itertools.groupby(zip(scales, sizes, strict=True), lambda one: one[0]):
            num_elements = sum(size for _, size in alike)
            flat[begin : begin + num_elements] *= scale
            begin += num_elements
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter, as engines are told of it."""

    name: str
    version: int
    run_id: str
    base: int  # version of the weights that it adds to
    max_versions: int
    digest: str  # of the metadata that engines were prepared for
    num_bytes: int  # of all of them, one after the other, in the engines' dtype


@dataclass(frozen=True, slots=True)
class Packed:
    """What an adapter held at a moment, as :class:`Content` of other weights."""

    flat: torch.Tensor

    def summed(self, source: WeightSource) -> None:
        """Does nothing: these are the values."""

    def difference(self, source: WeightSource) -> str:
        """Returns what of ``source`` is not as it was; empty if nothing is."""
        if not isinstance(source, AdapterSource):
            return "it was an adapter"
        now, metadata = source._packed().to(self.flat), source.metadata()
        if len(now) != len(self.flat):
            return "it was an adapter of other layers or ranks"
        sizes = [one.num_elements for one in metadata]
        pairs = zip(metadata, now.split(sizes), self.flat.split(sizes), strict=True)
        changed = [  # by their bytes, as NaN equals nothing
            meta.name
            for meta, one, other in pairs
            if not one.view(torch.uint8).equal(other.view(torch.uint8))
        ]
        return f"{len(changed)} not as they were: {first_few(changed)}" if changed else ""


@dataclass(slots=True)
class Reached:
    """A replica whose workers are prepared for adapters of a kind."""

    dtype: torch.dtype
    token: str
    inboxes: list[torch.Tensor]  # memory of its workers, in halves; none on another node
    half: int = 0  # of each, that nobody reads
    holds: torch.Tensor | None = None  # what was written there


class AdapterSender:
    """Writes adapters into memory of every worker of this node, and sends them by value to others.

    Its halves are written in turn: a worker that takes one has read the other, but may have yet to
    read this one. The memory of a replica that failed may be read late: it is replaced.
    """

    name, is_collective, last_version = "adapters", False, 0

    def __init__(self, base: Callable[[], int]) -> None:
        self.run_id, self._base = uuid.uuid4().hex, base
        # By its actor's incarnation and what the adapter is.
        self._known: dict[tuple[str, Any], Reached] = {}
        self._took = set[str]()  # incarnations that took what was sent to them last
        # Of each adapter the newest version, for replicas that restart while no other serves.
        self._newest: dict[str, tuple[Adapter, Kind, torch.Tensor]] = {}
        self._packed: torch.Tensor | None = None  # what :meth:`send` is about to send
        self.content = Packed(torch.empty(0))  # of what it sent last
        self._forms = OfLast[tuple[str, Any]](lambda one: (metadata_digest(one), to_json(one)))
        self._readable: object = None  # the parameters that were found to have values

    def late(self, incarnations: Mapping[str, str], missed: Collection[str]) -> list[str]:
        """Replicas that may lack an adapter: they came since one was sent, or missed a push."""
        return [
            name
            for name, one in incarnations.items()
            if self._newest and (one not in self._took or name in missed)
        ]

    def _kind_of(self, source: AdapterSource) -> Any:
        (_, one), *_ = source.views()
        return source.name, source.config, self._forms(source.metadata())[0], one.device

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Asks replicas whether they can hold such an adapter; raises if their model cannot."""
        if not isinstance(source, AdapterSource):
            return
        members.choose(members.silent)
        kind, present = self._kind_of(source), {*members.incarnations.values()}
        self._known = {key: one for key, one in self._known.items() if key[0] in present}
        self._took &= present
        if any((one, kind) not in self._known for one in present):
            with contextlib.closing(Handover()) as handover:
                self._prepare(members, source, kind, handover)
        if not members.incarnations:
            raise TransferError(f"no replica can be reached: {members.missing}")

    def _prepare(
        self, members: Members, source: AdapterSource, kind: Any, handover: Handover
    ) -> None:
        """Asks those that do not know such an adapter, and maps the memory that they give."""
        deadline, device = Deadline(PREPARE_TIMEOUT_S), kind[-1]
        engines, own = members.describe(), {device_uuid(device)}
        metadata, calls = self._forms(source.metadata())[1], dict[str, Any]()
        for name, incarnation in members.incarnations.items():
            if (incarnation, kind) in self._known:
                continue
            door: Door | None = None
            engine = engines[name]
            if engine.node_id == this_node():
                is_near = engine.device_type == device.type
                is_near = is_near and not unreachable(own, engine.device_uuids)
                where = device.type if is_near else "cpu"
                door = {"path": handover.path, "token": uuid.uuid4().hex, "device_type": where}
            calls[name] = source.config, metadata, door
        answers = ask(members.client, "prepare_adapter", calls, deadline.left_s)
        # Workers that cannot give memory, such as another user's, get adapters by value.
        refused = {n: one for n, one in failed(answers).items() if isinstance(one, TransferError)}
        if far := {n: (source.config, metadata, None) for n in refused if calls[n][-1] is not None}:
            logger.warning("adapters go by value: %s", first_few([str(refused[n]) for n in far]))
            calls |= far
            answers |= ask(members.client, "prepare_adapter", far, deadline.left_s)
        for one in answers.values():
            if isinstance(one, (UnsupportedArgumentError, WeightMismatchError, ServerError)):
                raise one
        members.drop(failed(answers))
        expected, found = set[tuple[Any, ...]](), dict[str, Reached]()
        for name in answers.keys() - failed(answers).keys():
            token = (calls[name][-1] or {}).get("token", "")
            ranks = range(engines[name].num_workers) if token else ()
            expected |= {(name, rank, token) for rank in ranks}
            found[name] = Reached(getattr(torch, answers[name]), token, [])
        size = 2 * sum(one.num_elements for one in source.metadata())
        for (name, *_), descriptor in handover.take_all(expected, deadline.at, "token"):
            one, is_near = found[name], calls[name][-1]["device_type"] == device.type
            on = device if is_near else torch.device("cpu")
            given = MappedMemory(size * one.dtype.itemsize, on, descriptor)
            if not is_near:
                page_lock(given)
            one.inboxes.append(given.data.view(one.dtype).view(2, -1))
        known = *self._known.values(), *found.values()
        if len(dtypes := sorted({dtype_name(one.dtype) for one in known})) > 1:
            raise UnsupportedArgumentError(f"engines hold adapters in unlike dtypes: {dtypes}")
        self._known |= {(members.incarnations[name], kind): one for name, one in found.items()}
        for name in found:  # as its workers do
            incarnation = members.incarnations[name]
            alike = [key for key in self._known if (key[0], key[1][0]) == (incarnation, kind[0])]
            for key in alike[:-MOST_INBOXES]:
                del self._known[key]

    def look(self, source: AdapterSource) -> AdapterSource:
        """Has it find its parameters, which may be others than before, and must have values."""
        if (views := source._look()) is not self._readable:
            check_readable(dict(views))
            self._readable = views
        return source

    def pack(self, source: AdapterSource, *, allow_nonfinite: bool) -> None:
        """Writes what is about to be sent to those that are known; none may hold NaN."""
        kind, self._packed = self._kind_of(source), None
        if not self._known:  # before the first push
            return
        (dtype,) = {one.dtype for one in self._known.values()}
        flat = source._packed().to(dtype)
        self._write(flat, [one for (_, of), one in self._known.items() if of == kind])
        if not (allow_nonfinite or math.isfinite(flat.sum(dtype=torch.float32))):
            metadata = source.metadata()  # it may have been too much for a sum
            parts = flat.split([one.num_elements for one in metadata])
            named = (one.name for one in metadata)
            refuse_nonfinite(MappingSource(zip(named, parts, strict=True)))
        self._packed = flat

    @torch.inference_mode()  # in which the first push may have been, and its memory mapped
    def _write(self, flat: torch.Tensor, to: Iterable[Reached]) -> None:
        for one in to:
            if one.holds is not flat:
                for inbox in one.inboxes:
                    inbox[one.half].copy_(flat, non_blocking=True)
                one.holds = flat
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        source, begin = push.source, time.perf_counter()
        assert isinstance(source, AdapterSource)
        kind, (digest, metadata) = self._kind_of(source), self._forms(source.metadata())
        if self._packed is None:
            self.pack(source, allow_nonfinite=push.allow_nonfinite)
        flat, self._packed = self._packed, None
        assert flat is not None
        self.content = Packed(flat)
        # Only those come back that have answered.
        to = {n: self._known.pop((one, kind)) for n, one in members.incarnations.items()}
        self._write(flat, to.values())
        push.times.note("copy_s", begin)
        adapter = Adapter(
            name=source.name,
            version=push.version,
            run_id=self.run_id,
            base=self._base(),
            max_versions=source.max_versions,
            digest=digest,
            num_bytes=flat.nbytes,
        )
        deadline = Deadline(push.timeout_s)
        value = None if all(one.inboxes for one in to.values()) else _shared(flat)
        places = {name: (one.token, one.half) if one.token else value for name, one in to.items()}
        calls = {name: (adapter, place) for name, place in places.items()}
        begin = time.perf_counter()
        answers = ask(members.client, "put_adapter", calls, push.timeout_s, push.confirm)
        for name in to.keys() - failed(answers).keys():
            if answers[name]["loaded"]:  # else it had this version, and has read neither half
                to[name].half, to[name].holds = 1 - to[name].half, None
            self._known[members.incarnations[name], kind] = to[name]
        # Workers that have let go of the memory get it by value, and give other memory next time.
        refusals = failed(answers).items()
        if lost := [name for name, one in refusals if isinstance(one, TransferNotReadyError)]:
            calls = dict.fromkeys(lost, (adapter, _shared(flat)))
            answers |= ask(members.client, "put_adapter", calls, deadline.left_s)
        push.times.note("send_s", begin)
        took = answers.keys() - failed(answers).keys()
        self._took -= {*members.incarnations.values()}
        self._took |= {members.incarnations[name] for name in took}
        if took:
            self._newest[source.name] = adapter, (source.config, metadata), flat
        return answers

    @property
    def names(self) -> list[str]:
        """Of which adapters engines hold a version that was sent from here."""
        return sorted(self._newest)

    def newest(self) -> list[tuple[Adapter, Kind, Any]]:
        """The newest version of each adapter that was sent from here, by value."""
        return [(one, kind, bytes_of(flat)) for one, kind, flat in self._newest.values()]

    def close(self) -> None:
        """Does nothing: what was sent may be asked for."""


def _shared(flat: torch.Tensor) -> Any:
    """Its bytes, as all that Ray calls with them find them."""
    import ray

    return ray.put(bytes_of(flat))

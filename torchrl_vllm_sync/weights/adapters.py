"""LoRA adapters that are kept apart: what is sent of one, and its way to every replica's node."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync.checks import check_integer, first_few
from torchrl_vllm_sync.errors import (
    ServerError,
    TransferError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.module import (
    ParamMeta,
    base_model,
    checked,
    is_peft,
    metadata_digest,
    to_json,
    unwrap,
)
from torchrl_vllm_sync.weights.p2p.memory import HostMemory, this_node
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource, is_sharded
from torchrl_vllm_sync.weights.transport import ask, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, Push

# Between an adapter's name and those of its tensors.
OF = ":"
# Seconds for engines to say whether they can hold such an adapter.
PREPARE_TIMEOUT_S = 60.0
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
        self._adapter, self._metadata = adapter, list[ParamMeta]()
        self.config = json.dumps(config, default=sorted)
        # Under FSDP2 every rank gathers it, as it would the model.
        self.sharded = (
            ShardedModuleSource(self.owner, only=lambda: dict(self.views()))
            if is_sharded(self.owner)
            else None
        )

    def views(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the parameters that are read."""
        return [
            (f"{self.name}{OF}base_model.model.{at}.{half}.weight", weights[self._adapter].weight)
            for at, layer in self._layers.items()
            for half, weights in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        ]

    def metadata(self) -> list[ParamMeta]:
        """Returns their metadata; the same list while it does not change."""
        metadata = [ParamMeta.of(*one) for one in self.views()]
        if metadata != self._metadata:
            self._metadata = metadata
        return self._metadata

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the matrices, the second of each layer times what PEFT scales it by."""
        scales = ((1, layer.scaling[self._adapter]) for layer in self._layers.values())
        tensors = zip(itertools.chain(*scales), self.sharded or self.views(), strict=True)
        for scale, (name, one) in tensors:
            yield name, one.detach() if scale == 1 else one.detach() * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter, as engines are told of it."""

    name: str
    version: int
    run_id: str
    base: int  # version of the weights that it adds to
    max_versions: int
    config: str  # PEFT's, as JSON
    metadata: list[list[Any]]  # of its tensors, in JSON form
    num_bytes: int  # of all of them, one after the other, in the engines' dtype


class Room:
    """Memory of one version, which other processes of this node map while this object is there."""

    def __init__(self, num_bytes: int) -> None:
        memory = HostMemory(num_bytes)
        weakref.finalize(self, memory.close)
        self.place = memory.path, os.stat(memory.path).st_ino
        self.data = mapped(self.place, num_bytes, writes=True)


def mapped(place: tuple[str, int], num_bytes: int, *, writes: bool = False) -> torch.Tensor:
    """The bytes of such memory, which are there as long as anybody has mapped them."""
    path, inode = place
    try:
        data = torch.from_file(path, shared=writes, size=num_bytes, dtype=torch.uint8)
        if os.stat(path).st_ino == inode:  # else another has got its number since
            return data
    except (OSError, RuntimeError) as error:
        raise TransferError(f"an adapter cannot be mapped: {error}") from error
    raise TransferError("an adapter cannot be mapped: its trainer has let go of it")


class AdapterSender:
    """Brings adapters to all replicas: in memory of this node, or by value to other nodes."""

    name, is_collective, last_version = "adapters", False, 0

    def __init__(self, base: Callable[[], int]) -> None:
        self.run_id, self._base = uuid.uuid4().hex, base
        # What a replica's actor said to being asked for an adapter of such a kind.
        self._known: dict[tuple[str, str, str], dict[str, str]] = {}
        # Of each adapter the newest version, for replicas that restart while no other serves.
        self._newest: dict[str, tuple[Adapter, Room]] = {}

    def late(self, incarnations: Mapping[str, str], missed: Collection[str]) -> list[str]:
        """Replicas that may lack an adapter: they came since one was sent, or missed a push."""
        asked = {incarnation for incarnation, *_ in self._known}
        return [n for n, one in incarnations.items() if asked and (one not in asked or n in missed)]

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Asks replicas whether they can hold such an adapter; raises if their model cannot."""
        if not isinstance(source, AdapterSource):
            return
        members.choose(members.silent)
        kind = source.config, metadata_digest(source.metadata())
        new = {n: one for n, one in members.incarnations.items() if (one, *kind) not in self._known}
        if new:
            asked = source.config, to_json(source.metadata())
            calls = dict.fromkeys(new, asked)
            answers = ask(members.client, "prepare_adapter", calls, PREPARE_TIMEOUT_S)
            for one in answers.values():
                if isinstance(one, (UnsupportedArgumentError, WeightMismatchError, ServerError)):
                    raise one
            members.drop(failed(answers))
            for name in answers.keys() - failed(answers).keys():
                self._known[(new[name], *kind)] = answers[name]
        if not members.incarnations:
            raise TransferError(f"no replica can be reached: {members.missing}")

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        source, begin = push.source, time.perf_counter()
        assert isinstance(source, AdapterSource)
        metadata = source.metadata()
        kind = source.config, metadata_digest(metadata)
        facts = {name: self._known[(one, *kind)] for name, one in members.incarnations.items()}
        (dtype,) = {getattr(torch, one["dtype"]) for one in facts.values()}
        tensors = (one for _, one in checked(source, metadata))
        bytes_of = torch.cat([one.reshape(-1).to(dtype) for one in tensors]).view(torch.uint8)
        push.confirm()
        room = Room(bytes_of.numel())
        room.data.copy_(bytes_of)
        push.times.note("copy_s", begin)
        adapter = Adapter(
            name=source.name,
            version=push.version,
            run_id=self.run_id,
            base=self._base(),
            max_versions=source.max_versions,
            config=source.config,
            metadata=to_json(metadata),
            num_bytes=bytes_of.numel(),
        )
        here, value = this_node(), None
        if any(one["node"] != here for one in facts.values()):
            import ray

            value = ray.put(room.data.numpy())
        calls = {
            name: (adapter, room.place if one["node"] == here else value)
            for name, one in facts.items()
        }
        begin = time.perf_counter()
        answers = ask(members.client, "put_adapter", calls, push.timeout_s)
        push.times.note("send_s", begin)
        if len(failed(answers)) < len(answers):
            self._newest[source.name] = adapter, room
        return answers

    def newest(self) -> list[tuple[Adapter, Any]]:
        """The newest version of each adapter that was sent from here, by value."""
        return [(adapter, room.data.numpy()) for adapter, room in self._newest.values()]

    def close(self) -> None:
        """Does nothing: what was sent may be asked for."""

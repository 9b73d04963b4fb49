"""The ``p2p`` transport: the trainer writes into spare memory of the engines on its host."""

from __future__ import annotations

import functools
import itertools
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import (
    TransferError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights.broadcast.buckets import TensorCopy
from torchrl_vllm_sync.weights.metadata import checked, metadata_digest, to_json
from torchrl_vllm_sync.weights.p2p.handover import Handover
from torchrl_vllm_sync.weights.p2p.memory import new_memory, new_range
from torchrl_vllm_sync.weights.places import sending_device, this_node
from torchrl_vllm_sync.weights.source import views_of
from torchrl_vllm_sync.weights.transport import GRACE_S, failed, raise_exceptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.p2p.memory import Memory, Range
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, Push


@dataclass(slots=True)
class Mapped:
    """A memory of one worker, in this process."""

    memory: Memory
    range: Range
    copies: dict[str, list[TensorCopy]]  # by name of the tensor that they take parts of

    def close(self) -> None:
        self.copies = {}
        self.range.close()
        self.memory.close()


@dataclass(slots=True)
class Worker:
    """What one worker says of itself, see ``BroadcastReceiver.plan_writes``, and its memories."""

    num_bytes: int
    writes: list[list[Any]]
    memories: dict[int, Mapped] = field(default_factory=dict)  # the last used one last

    def bind(self, number: int, device: torch.device, descriptors: list[int]) -> None:
        memory = new_memory(self.num_bytes, device, descriptors)
        within = new_range(self.num_bytes, device)
        within.show(memory)
        copies: dict[str, list[TensorCopy]] = {}
        for name, offset, shape, stride, dtype_name, place, target_stride in self.writes:
            dtype = getattr(torch, dtype_name)
            flat = within.data[: within.data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            target = flat.as_strided(shape, target_stride, place // dtype.itemsize)
            copies.setdefault(name, []).append(TensorCopy(name, offset, shape, stride, target))
        self.memories[number] = Mapped(memory, within, copies)

    def use(self, number: int) -> None:
        """Keeps this memory and the one used before, which may be served: the worker has two."""
        self.memories[number] = self.memories.pop(number)
        while len(self.memories) > 2:
            self.memories.pop(next(iter(self.memories))).close()


class P2PTransport:
    """Writes each version into spare memory of every engine, which then serves it at once.

    The engines do nothing while weights arrive. They must be on this host, on GPUs that the
    trainer's reaches, or on CPUs as the trainer is, and launched with ``stage_weights=True``; and a
    load plan must be possible for their model.

    Args:
        device: The trainer's device; by default the one that the weights are on.
    """

    name = "p2p"
    is_collective = False
    last_version = 0  # it stores none
    # Whether one replica whose memory cannot be written to ends a push before anything is sent.
    all_or_none = False

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._given_device = None if device is None else torch.device(device)
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._device = torch.device("cpu")
        self._handover: Handover | None = None
        self._digest = ""
        self._joined: dict[str, str] = {}
        self._workers: dict[str, list[Worker]] = {}

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Opens the door through which workers hand their memory over.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            UnsupportedArgumentError: An engine is on another host or kind of device, which the
                message names.
        """
        for name in [
            one for one in self._joined if members.incarnations.get(one) != self._joined[one]
        ]:
            self._drop(name)
        new = members.incarnations.keys() - self._joined.keys()
        if not new:
            return
        _check_node(engines := members.describe())
        self._device = sending_device(self.name, engines, source, self._given_device)
        self._handover = self._handover or Handover()

    def _drop(self, name: str) -> None:
        self._joined.pop(name, None)
        for worker in self._workers.pop(name, []):
            for one in worker.memories.values():
                one.close()

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Writes to every replica, and has each one serve it.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: The transport is not open.
            WeightMismatchError: A tensor is on another device, or a shard. Nothing was sent.
        """
        deadline, times = Deadline(push.timeout_s), push.times
        if self._handover is None:
            raise TransferError("the transport is not open")
        for name, tensor in views_of(push.source) or ():
            _check_place(name, tensor, self._device)
        with times.measure("prepare_s"):
            answers = self._prepare(members, push.source, deadline)
        ready = {name: () for name in answers if name not in failed(answers)}
        with times.measure("begin_s"):
            begun = self._begin(members, ready, deadline)
        if self.all_or_none:
            refusals = failed(answers | begun).items()
            raise_exceptions({n: one for n, one in refusals if isinstance(one, TransferError)})
        writable = {name: one for name, one in begun.items() if name not in failed(begun)}
        with times.measure("send_s"):
            self._write(push.source, writable)
        with times.measure("acknowledge_s"):
            calls = members.client.start_calls(
                "take_written",
                {name: (numbers,) for name, numbers in writable.items()},
                run_id=self.run_id,
                timeout_s=max(deadline.left_s, 1.0),
                **push.terms,
            )
            taken = calls.answers(deadline.left_s + GRACE_S)
        for name in failed(taken):
            self._drop(name)
        return answers | begun | taken

    def _prepare(
        self, members: Members, source: WeightSource, deadline: Deadline
    ) -> dict[str, Any]:
        """Has replicas that do not know it yet plan where the tensors go."""
        metadata = source.metadata()
        if (digest := metadata_digest(metadata)) != self._digest:
            for name in list(self._joined):
                self._drop(name)
            self._digest = digest
        new = {one: (to_json(metadata),) for one in members.incarnations if one not in self._joined}
        limit_s = max(deadline.left_s, 1.0)
        calls = members.client.start_calls("plan_writes", new, timeout_s=limit_s)
        answers = calls.answers(limit_s + GRACE_S)
        for name, planned in answers.items():
            if name not in failed(answers):
                self._workers[name] = [Worker(one["num_bytes"], one["writes"]) for one in planned]
                self._joined[name] = members.incarnations[name]
        return dict.fromkeys(members.incarnations) | failed(answers)

    def _begin(self, members: Members, names: Iterable[str], deadline: Deadline) -> dict[str, Any]:
        """Asks which memory is to be written to, and takes those that are new."""
        assert self._handover is not None
        known = {name: ([list(one.memories) for one in self._workers[name]],) for name in names}
        options = {"run_id": self.run_id, "path": self._handover.path}
        calls = members.client.start_calls(
            "begin_writing", known, timeout_s=max(deadline.left_s, 1.0), **options
        )
        # Workers connect, and go on without waiting to be heard: the listener keeps what they sent.
        answers = calls.answers(deadline.left_s + GRACE_S)
        expected = {
            (name, rank, number)
            for name, numbers in answers.items()
            if name not in failed(answers)
            for rank, number in enumerate(numbers)
            if number not in self._workers[name][rank].memories
        }
        while expected:
            said, descriptors = self._handover.take(deadline.at)
            one = str(said["replica_id"]), int(str(said["rank"])), int(str(said["number"]))
            if one not in expected:  # of a push that was given up
                for fd in descriptors:
                    os.close(fd)
                continue
            expected.remove(one)
            name, rank, number = one
            self._workers[name][rank].bind(number, self._device, descriptors)
        for name in answers.keys() - failed(answers):
            for worker, number in zip(self._workers[name], answers[name], strict=True):
                worker.use(number)
        return answers

    @torch.no_grad()
    def _write(self, source: WeightSource, numbers: dict[str, Any]) -> None:
        mapped = [
            worker.memories[number].copies
            for name, of in numbers.items()
            for worker, number in zip(self._workers[name], of, strict=True)
        ]
        views, metadata = views_of(source), source.metadata()
        tensors = source if views is None else views
        for meta, tensor in checked(tensors, metadata):
            _check_place(meta.name, tensor, self._device)
            dense = tensor.detach().contiguous()
            for one in itertools.chain(*(copies.get(meta.name, ()) for copies in mapped)):
                begin = dense.storage_offset() + one.offset
                part = dense.as_strided(one.shape, one.stride, begin)
                one.target.copy_(part, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), device=self._given_device), ()

    def close(self) -> None:
        """Forgets the engines' memory. Idempotent."""
        for name in list(self._joined):
            self._drop(name)
        if self._handover is not None:
            self._handover.close()
        self._forget()


def _check_node(engines: Mapping[str, EngineDescription]) -> None:
    """Refuses engines whose memory this process cannot reach."""
    need, here = "the p2p transport needs trainer and engines on one host, and", this_node()
    for name, one in engines.items():
        if one.node_id != here:
            where = f"replica {name} is on {one.node_id or 'an unknown one'}, the trainer on {here}"
            raise UnsupportedArgumentError(f"{need} {where}: use the broadcast transport")


def _check_place(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if isinstance(tensor, DTensor):
        raise WeightMismatchError(f"{name} is a shard: a source must yield whole tensors")
    if tensor.device != device:
        raise WeightMismatchError(
            f"{name} is on {tensor.device}, but this transport writes from {device}: move the "
            "weights there, or use the memmap transport"
        )

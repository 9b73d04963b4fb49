"""The ``p2p`` transport: the trainer writes into spare memory of the engines on its host."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_vllm_sync.checks import Deadline, first_few
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.module import OfLast, checked, metadata_digest, to_json
from torchrl_vllm_sync.weights.p2p import writes
from torchrl_vllm_sync.weights.p2p.memory import (
    Handover,
    device_of,
    device_uuid,
    hand_over,
    this_node,
)
from torchrl_vllm_sync.weights.sharded import Origin, Renaming, ShardedModuleSource
from torchrl_vllm_sync.weights.source import (
    StableSource,
    WeightSource,
    require_one_host,
    sending_device,
    sharded_of,
    views_of,
)
from torchrl_vllm_sync.weights.transport import Members, Push, ask, failed, raise_exceptions

logger = logging.getLogger(__name__)

# Seconds for another rank of the trainer to connect, and to take what it is passed, at most.
HANDOVER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Worker:
    """What one worker says of itself, see ``BroadcastReceiver.plan_writes``, and its memories."""

    num_bytes: int
    device: str  # see :func:`device_uuid`
    is_shared: bool  # a trainer's parameters may be moved there
    rows: list[writes.Row]  # what is written of whole tensors
    hands_on_by: str | None = None  # its device, if that is to
    mine: list[writes.Row] = field(default_factory=list)  # of what this rank holds of the model's
    passed_on: list[writes.Row] = field(default_factory=list)  # of the model's, to be cut by all
    memories: dict[int, writes.Mapped] = field(default_factory=dict)  # the last used one last

    @torch.inference_mode(False)
    def bind(self, number: int, device: torch.device, descriptor: int) -> None:
        self.memories.pop(number, None)
        owner = device_of(self.hands_on_by)
        mapped = writes.Mapped(self.num_bytes, device, descriptor, self.rows, self.mine, owner)
        self.memories[number] = mapped

    def use(self, number: int) -> writes.Mapped:
        """Keeps this memory and the one used before, which may be served: the worker has two."""
        self.memories[number] = self.memories.pop(number)
        self.keep(2)
        return self.used

    @property
    def used(self) -> writes.Mapped:
        return next(reversed(self.memories.values()))

    def keep(self, most: int) -> None:
        while len(self.memories) > most:
            self.memories.pop(next(iter(self.memories)))

    def split(self, cuts: writes.Cuts, origins: Mapping[str, Origin]) -> set[str]:
        """Leaves to every rank what it can write; returns which tensors are written whole."""
        rows, self.rows, left = self.rows, [], set[str]()
        for row in rows:
            name, begin = origins[row[0]].sources[0], origins[row[0]].begin
            cut, found = cuts[name], None
            moved = [name, row[1] + (begin or 0), *row[2:]]
            if begin is not None and cut is not None and not row[7:]:
                found = writes.parts(moved, cut)
            if found is None:
                self.rows.append(row)
                left.update(origins[row[0]].sources)
            else:
                self.mine += found
                self.passed_on.append(moved)
        return left


@dataclass(slots=True)
class Shards:
    """A push of a sharded model, whose every rank writes what it holds."""

    source: ShardedModuleSource
    renamed: Renaming
    cuts: writes.Cuts
    # Tokens of the memories that all other ranks know; ``None`` if there are none.
    known: set[str] | None
    # What they lack: whose memory of which number, and its descriptor.
    new: list[tuple[Worker, int, int]] = field(default_factory=list)

    def pass_on(self, path: str, watch: Callable[[], None]) -> None:
        """Gives one rank what it lacks."""
        for worker, number, descriptor in self.new:
            said = {"token": worker.memories[number].token, "num_bytes": worker.num_bytes}
            said["owner"] = worker.hands_on_by
            copies = [writes.plan_file(worker.passed_on), os.dup(descriptor)]
            hand_over(path, said, copies, HANDOVER_TIMEOUT_S, watch)

    def close(self) -> None:
        while self.new:
            os.close(self.new.pop()[2])


class P2PTransport:
    """Writes each version into spare memory of every engine, which then serves it at once.

    The engines do nothing while weights arrive. They must be on this host, on GPUs that the
    trainer's reaches, or on CPUs as the trainer is, and launched with ``stage_weights=True``; and a
    load plan must be possible for their model. What they hold in fp8, with one scale a layer or a
    row, is quantised on the trainer, as vLLM would, bit by bit.

    Of a model under FSDP2 every rank writes what it holds, and nothing is gathered, except for
    tensors that are computed from others or not cut along one dimension, and if a rank is on
    another host.

    Args:
        device: The trainer's device; by default the one that the weights are on.
        hand_on: Whether each replica's GPU hands on to the next what it has got, so that the
            trainer's writes once for all replicas of one layout, not once for each. Only the GPUs
            take part, not the engines, and only those that the trainer's process sees; it takes
            some memory of each for its own context there. It has run on two GPUs; what it saves
            with three replicas has not been measured.
    """

    name = "p2p"
    is_collective = False
    last_version = 0  # it stores none
    # Whether one replica whose memory cannot be written to ends a push before anything is sent.
    all_or_none = False

    def __init__(self, *, device: torch.device | str | None = None, hand_on: bool = False) -> None:
        self._given_device = None if device is None else torch.device(device)
        self._hands_on = hand_on
        self._forget()

    def _forget(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._device = torch.device("cpu")
        self._handover: Handover | None = None
        # What the workers' rows are for: a digest of the tensors, and what this rank holds of them.
        self._planned_for: tuple[str, Any] = "", None
        self._left: set[str] = set()  # of a sharded model's tensors, what has to be gathered
        self._digest_of = OfLast(metadata_digest)
        self._owner: weakref.ref[Any] | None = None  # of the tensors that are written
        self._views: list[writes.Named] | None = None  # these, if they stay where they are
        self._joined: dict[str, str] = {}
        self._workers: dict[str, list[Worker]] = {}

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Opens the door through which workers hand their memory over.

        Arguments are those of :meth:`WeightTransport.open`.

        Raises:
            UnsupportedArgumentError: An engine is on another host or kind of device, which the
                message names.
        """
        for name, incarnation in list(self._joined.items()):
            if members.incarnations.get(name) != incarnation:
                self._drop(name)
        if not members.incarnations.keys() - self._joined.keys():
            return
        engines = members.describe()
        require_one_host(self.name, engines)
        self._device = sending_device(self.name, engines, source, self._given_device)
        self._handover = self._handover or Handover()

    def _drop(self, name: str) -> None:
        self._joined.pop(name, None)
        for worker in self._workers.pop(name, ()):
            for one in worker.memories.values():
                one.move_out()

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Writes to every replica, and has each one serve it.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: The transport is not open.
            WeightMismatchError: A tensor is on another device, or a shard. Nothing was sent.
            TrainerRankError: A rank of a sharded model failed or was silent. The engines serve what
                they served.
        """
        deadline, times = Deadline(push.timeout_s), push.times
        if self._handover is None:
            raise TransferError("the transport is not open")
        self._see(push.source)
        shards = _shards(push.source)
        try:
            with times.measure("prepare_s"):
                answers = self._prepare(members, push.source, shards, deadline)
            ready = {name: () for name in answers if name not in failed(answers)}
            with times.measure("begin_s"):
                begun = self._begin(members, ready, shards, deadline)
            if self.all_or_none:
                refusals = failed(answers | begun).items()
                raise_exceptions({n: one for n, one in refusals if isinstance(one, TransferError)})
            writable = {name: one for name, one in begun.items() if name not in failed(begun)}
            with times.measure("send_s"):
                try:
                    self._write(push, writable, shards)
                finally:  # before anything else is written there, or these tensors change
                    writes.finish(self._device)
        except BaseException:
            if shards is not None:  # other ranks may be writing still, and must not to what is next
                self.close()
            raise
        finally:
            if shards is not None:
                shards.close()
        with times.measure("acknowledge_s"):
            told = {name: (numbers,) for name, numbers in writable.items()}
            about = {"run_id": self.run_id, **push.terms}
            taken = ask(members.client, "take_written", told, deadline.left_s, **about)
        for name in failed(taken):
            self._drop(name)
        if shards is None:
            self._take_in(writable.keys() & self._joined.keys())
        return answers | begun | taken

    def _take_in(self, names: Collection[str]) -> None:
        """Moves a module's parameters into the memory of the first worker that shares its own."""
        workers = itertools.chain(*(self._workers[name] for name in sorted(names)))
        sharing = [one for one in workers if one.is_shared]
        lender = next((one for one in sharing if one.device == device_uuid(self._device)), None)
        module = self._owner() if self._owner is not None and self._views is not None else None
        if lender is not None and isinstance(module, torch.nn.Module):
            lender.used.take_in(module.parameters())
        for one in sharing:
            one.keep(1)

    def inside(self) -> list[torch.nn.Parameter]:
        """Returns the trainer's parameters that are in engines' memory."""
        workers = itertools.chain(*self._workers.values())
        memories = itertools.chain(*(one.memories.values() for one in workers))
        return [parameter for one in memories for parameter in one.inside()]

    def _see(self, source: WeightSource) -> None:
        """Checks tensors that stay where they are, once; they are let go of with their owner."""
        owner, views = source.owner if isinstance(source, StableSource) else None, views_of(source)
        if self._owner is None or self._owner() is not owner:
            self._let_go(self._owner)
            self._owner = None if owner is None else weakref.ref(owner, self._let_go)
        if views is not None and views is not self._views:
            for meta, tensor in checked(views, source.metadata()):
                writes.check_place(meta.name, tensor, self._device)
        self._views = views

    def _let_go(self, owner: Any) -> None:
        if owner is self._owner:  # else of a source before
            self._views = None
            for worker in itertools.chain(*self._workers.values()):
                for one in worker.memories.values():
                    one.let_go()

    def _prepare(
        self, members: Members, source: WeightSource, shards: Shards | None, deadline: Deadline
    ) -> dict[str, Any]:
        """Has replicas that do not know it yet plan where the tensors go."""
        metadata = source.metadata()
        planned_for = self._digest_of(metadata), shards and shards.cuts
        if planned_for != self._planned_for:
            for name in list(self._joined):
                self._drop(name)
            self._planned_for, self._left = planned_for, set()
        new = {one: (to_json(metadata),) for one in members.incarnations if one not in self._joined}
        answers = ask(members.client, "plan_writes", new, deadline.left_s)
        planned = {name: one for name, one in answers.items() if name not in failed(answers)}
        origins = shards.source.origins(shards.renamed) if shards and planned else {}
        for name, workers in planned.items():
            facts = "num_bytes", "device", "is_shared", "writes"
            self._workers[name] = [Worker(*(one[fact] for fact in facts)) for one in workers]
            for one in self._workers[name] if self._hands_on else ():
                one.hands_on_by = None if one.is_shared else one.device
            self._joined[name] = members.incarnations[name]
            if shards is not None:
                self._left.update(*(one.split(shards.cuts, origins) for one in self._workers[name]))
        if self._left and planned:
            logger.debug("gathered, as ranks cannot write them: %s", first_few([*self._left]))
        return dict.fromkeys(members.incarnations) | failed(answers)

    def _begin(
        self, members: Members, names: Iterable[str], shards: Shards | None, deadline: Deadline
    ) -> dict[str, Any]:
        """Asks which memory is to be written to, and takes those that a rank does not know."""
        assert self._handover is not None

        ranks = None if shards is None else shards.known

        def numbers(worker: Worker) -> list[int] | None:
            held = worker.memories.items()
            if held and not worker.used.may_be_written(self._views, self._device):
                return None  # it has to take new memory
            return [number for number, one in held if ranks is None or one.token in ranks]

        known = {name: ([numbers(one) for one in self._workers[name]],) for name in names}
        # Workers connect, and go on without waiting to be heard: the listener keeps what they sent.
        options: dict[str, Any] = {"run_id": self.run_id, "path": self._handover.path}
        answers = ask(members.client, "begin_writing", known, deadline.left_s, **options)
        expected = {
            (name, rank, number)
            for name, numbers in answers.items()
            if name not in failed(answers)
            for rank, number in enumerate(numbers)
            if number not in (known[name][0][rank] or ())
        }
        handed = self._handover.take_all(expected, deadline.at, "number")
        for (name, rank, number), descriptor in handed:
            worker = self._workers[name][rank]
            if shards is not None:
                shards.new.append((worker, number, os.dup(descriptor)))
            worker.bind(number, self._device, descriptor)
        return answers

    def _write(self, push: Push, numbers: dict[str, Any], shards: Shards | None) -> None:
        source = push.source
        mapped = [
            worker.use(number)
            for name, of in numbers.items()
            for worker, number in zip(self._workers[name], of, strict=True)
        ]
        whole = [one.copies for one in mapped]
        if shards is None:
            read = ((meta.name, one) for meta, one in checked(source, source.metadata()))
            writes.write(read if self._views is None else self._views, whole, self._device)
        else:
            workers = itertools.chain(*self._workers.values())
            held = itertools.chain(*(one.memories.values() for one in workers))
            passed = writes.Passed(
                new=[worker.memories[number].token for worker, number, _ in shards.new],
                keep=[one.token for one in held],
                now=[one.token for one in mapped],
                left=sorted(self._left),
            )
            with shards.source.written(passed) as pass_on:
                pass_on(shards.pass_on)
                writes.write(shards.source.shards(), [one.shards for one in mapped], self._device)
                push.confirm()  # while GPUs write
                writes.finish(self._device)
            writes.write(shards.renamed(shards.source.rest()), whole, self._device)
        push.confirm()  # while the GPU writes

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"device": self._given_device, "hand_on": self._hands_on}
        return functools.partial(type(self), **options), ()

    def close(self) -> None:
        """Forgets the engines' memory. Idempotent."""
        for name in list(self._joined):
            self._drop(name)
        if self._handover is not None:
            self._handover.close()
        self._forget()


def _shards(source: WeightSource) -> Shards | None:
    """Returns how every rank of a sharded source writes; ``None`` if it is to be read whole."""
    if (found := sharded_of(source)) is None:
        return None
    sharded, renamed = found
    offers, here = sharded.offers(), this_node()
    if away := [rank for rank, one in offers.items() if one.node != here]:
        logger.debug("gathered whole, as rank %d is on another host than the engines", away[0])
        return None
    tokens = [set(one.tokens) for one in offers.values()]
    return Shards(sharded, renamed, sharded.cuts(), set.intersection(*tokens) if tokens else None)

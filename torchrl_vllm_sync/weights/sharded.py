"""What a module sharded by FSDP2 sends: each layer gathered on the sending rank, one ahead.

The first of the module's ranks iterates; the others take part with ``participate()`` until they
hear how the push ended. While one group of parameters (a decoder layer, or what comes before or
after them) is consumed, the next is on its way, and no more than these two are ever alive.
"""

from __future__ import annotations

import itertools
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.weights.gathering import Gather, part_of
from torchrl_vllm_sync.weights.metadata import metadata_digest
from torchrl_vllm_sync.weights.module_source import plan_of, unwrap
from torchrl_vllm_sync.weights.module_tensors import (
    TensorReader,
    check_readable,
    is_peft,
    same_values,
    tied_names,
)
from torchrl_vllm_sync.weights.trainer_ranks import TrainerRankError, TrainerRanks, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.module_source import Plan
    from torchrl_vllm_sync.weights.published import Bundle
    from torchrl_vllm_sync.weights.trainer_ranks import FollowingRound, LeadingRound

__all__ = ["Announcement", "ShardedModuleSource", "is_sharded", "leading"]

STEP_TIMEOUT_S = 60.0
# Seconds between looks at whether a rank has said that it failed.
LOOK_S = 0.1
FOLLOW_TIMEOUT_S = 900.0


@dataclass(slots=True)
class Announcement:
    """What the sending rank tells the others at the end of a push.

    Attributes:
        outcome: Handed to each ``participate()``: what JSON holds, or this library's dataclasses.
    """

    outcome: Any = None


class ShardedModuleSource:
    """A Hugging Face model under ``torch.distributed.fsdp.fully_shard``, on all of its ranks.

    Parameters may be sharded in one dimension, evenly or not, or not at all. Those on meshes of
    several dimensions are gathered on every rank.

    Example:
        >>> source = ShardedModuleSource(model)
        >>> if source.leads:
        ...     with source.lead() as announcement:
        ...         announcement.outcome = send(source)
        ... else:
        ...     outcome = source.participate()

    Args:
        module: The model, perhaps wrapped by a TorchRL policy or by compile.
        timeout_s: Seconds after which a rank that does not take its part counts as failed.

    Raises:
        WeightMismatchError: The model has adapters, which cannot be merged shard by shard, its
            parameters are spread over different ranks, or some have no storage.
        UnsupportedArgumentError: This process belongs to none of its ranks.
    """

    def __init__(self, module: torch.nn.Module, *, timeout_s: float = STEP_TIMEOUT_S) -> None:
        module = unwrap(module)
        if is_peft(module):
            raise WeightMismatchError(
                "adapters on a sharded model cannot be merged: merge them first, or do not shard"
            )
        self._module = module
        check_readable(self._tensors())
        ranks = _ranks_of(module)
        if dist.get_rank() not in ranks:
            raise UnsupportedArgumentError(
                f"rank {dist.get_rank()} must be one of the model's ranks, {list(ranks)}"
            )
        store = _store_for(module)
        self._ranks = TrainerRanks(ranks, dist.get_rank(), store, timeout_s=timeout_s)
        self._round: LeadingRound | None = None
        self._failure: TrainerRankError | None = None

    @property
    def leads(self) -> bool:
        """Whether this process sends; the others only take part."""
        return self._ranks.leads

    @property
    def owner(self) -> object:
        """The model without its wrappers."""
        return self._module

    def views(self) -> None:
        """Returns ``None``: every value has to be gathered."""

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each tensor, on any rank, without gathering.

        It is the same list object as long as names, dtypes and shapes are the same: leave it as
        it is.
        """
        return self._plan(self._tensors()).metadata

    def same_values(self, name: str, other: str) -> bool:
        """Whether this rank's shards of two tensors, by their names in the model, are equal."""
        tensors = dict(self._module.state_dict(keep_vars=True))
        return same_values(tensors[name], tensors[other])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor, whole, on the sending rank, while the others ``participate()``.

        A tensor must not be used on another stream after the next item is asked for. Outside
        :meth:`lead` an iteration is a round of its own.

        Raises:
            UnsupportedArgumentError: This rank is not the one that sends.
            TrainerRankError: Another rank failed or fell silent.
        """
        if not self.leads:
            raise UnsupportedArgumentError(
                f"rank {self._ranks.rank} must take part with participate(): "
                f"rank {self._ranks.leader} sends"
            )
        if self._round is None:
            with self.lead():
                yield from self._iterate()
        else:
            yield from self._iterate()

    @contextmanager
    def lead(self) -> Iterator[Announcement]:
        """Goes round a push on the sending rank: tells the others how it ended, whatever happens.

        Inside, iterate as often as needed. Leaving waits for ranks that have yet to join.

        Yields:
            What they will be told after a success; an exception is told by its text.

        Raises:
            TrainerRankError: The other ranks cannot be reached, or one failed during an iteration,
                whatever its reader made of that.
        """
        announcement = Announcement()
        self._failure = None
        self._round = self._ranks.begin(self._digest())
        try:
            yield announcement
            self._round.succeed(announcement.outcome)
        except BaseException as error:
            if self._failure is None or not isinstance(error, Exception):
                self._round.fail(error)
                raise
            # Engines that were cut off report no more than that.
            self._round.fail(self._failure)
            raise self._failure from error
        finally:
            self._round = self._failure = None

    def participate(self, *, timeout_s: float = FOLLOW_TIMEOUT_S) -> Any:
        """Takes part in one push on a rank that does not send.

        Args:
            timeout_s: Seconds for which the sending rank may be silent: until its push begins,
                between two groups, and while it waits for the engines.

        Returns:
            What the sending rank announced.

        Raises:
            TrainerRankError: The push failed: names the rank and says why.
        """
        followed = self._ranks.join(timeout_s=timeout_s)
        under_way: list[Gather] = []
        try:
            tensors = self._tensors()
            groups = _groups(self._plan(tensors))
            # Prepared before this rank is called: failing between the call and the launch would
            # leave the sending rank alone in a collective, and the process group out of step.
            expected, prepared = 0, self._prepare(groups[0], tensors)
            followed.present(self._digest())
            while not isinstance(call := followed.next(), Verdict):
                with self._launching(followed) as watch:
                    if call != expected:  # a reader that stopped early begins again
                        prepared = self._prepare(self._called(groups, call), tensors)
                    prepared.launch(watch)
                under_way.append(prepared)
                expected = (call + 1) % len(groups)
                prepared = self._prepare(groups[expected], tensors)
                followed.launched()
                if len(under_way) > 1:
                    self._finish_following(under_way.pop(0), followed)
            if not call.reason:
                for gather in under_way:
                    self._finish(gather)
        except BaseException as error:
            followed.fail(error)
            raise
        if call.reason:
            raise TrainerRankError(call.failed_rank, call.reason)
        return call.outcome

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._tensors()
        groups = _groups(self._plan(tensors))
        ahead: Gather | None = None
        try:
            for index, group in enumerate(groups):
                now = ahead or self._call(index, group, tensors)
                ahead = None
                if index + 1 < len(groups):
                    ahead = self._call(index + 1, groups[index + 1], tensors)
                whole = self._finish(now)
                del now
                for bundle in group:
                    sources = [whole[name] for name in bundle.sources]
                    yield from bundle.publish(self._module, sources)
                    del sources
                del whole
        except TrainerRankError as error:
            # Without the traceback, which holds what the reader was sending.
            self._failure = TrainerRankError(error.rank, error.reason)
            raise
        except GeneratorExit:
            if ahead is not None:
                self._finish(ahead)  # its memory is still being written
            raise

    def _call(self, index: int, group: list[Bundle], tensors: dict[str, torch.Tensor]) -> Gather:
        """Begins to gather a group on all ranks; takes the memory before the others are called."""
        assert self._round is not None
        gather = self._prepare(group, tensors)
        self._round.call(index)
        with self._launching(self._round) as watch:
            gather.launch(watch)
        return gather

    def _called(self, groups: list[list[Bundle]], call: int) -> list[Bundle]:
        """Returns the group that this rank was called for."""
        if call >= len(groups):
            raise TrainerRankError(self._ranks.leader, f"called for group {call} of {len(groups)}")
        return groups[call]

    @contextmanager
    def _launching(self, turn: LeadingRound | FollowingRound) -> Iterator[Callable[[], None]]:
        """Tells the others if this rank cannot begin what all were called for.

        Yields:
            What raises as soon as another rank has failed, or too much time has gone by.
        """
        deadline = time.monotonic() + self._ranks.timeout_s

        def watch() -> None:
            turn.raise_reported()
            if time.monotonic() > deadline:
                raise self._broken(f"a gather did not end within {self._ranks.timeout_s:g} s")

        try:
            yield watch
        except BaseException as error:
            turn.break_step(error)
            raise

    def _prepare(self, group: list[Bundle], tensors: dict[str, torch.Tensor]) -> Gather:
        names = [name for bundle in group for name in bundle.sources]
        return Gather({name: part_of(tensors[name]) for name in names}, receives=self.leads)

    def _finish(self, gather: Gather) -> dict[str, torch.Tensor]:
        """Waits for a gather and returns whole tensors by name, none on ranks that do not send.

        Raises:
            TrainerRankError: It broke off, or did not end in time.
        """
        deadline = time.monotonic() + self._ranks.timeout_s
        look = time.monotonic() + LOOK_S
        while not gather.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise self._broken(f"a gather did not end within {self._ranks.timeout_s:g} s")
            if self._round is not None and now > look:
                self._round.raise_reported()
                look = now + LOOK_S
            time.sleep(5e-5)
        try:
            return gather.result()
        except RuntimeError as error:  # torch.distributed's backends raise nothing narrower
            raise self._broken(f"a gather broke off: {error}") from error

    def _finish_following(self, gather: Gather, followed: FollowingRound) -> None:
        try:
            self._finish(gather)
        except TrainerRankError as error:
            # It breaks on every rank if one is gone; the sending rank finds out which.
            raise followed.explain(error) from error

    def _broken(self, reason: str) -> TrainerRankError:
        if self._round is not None:
            return self._round.blame(reason)
        return TrainerRankError(self._ranks.leader, reason)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers, sharded as they are; a tied one appears once."""
        tensors = dict(self._module.state_dict(keep_vars=True))
        for name, twin in tied_names(self._module).items():
            # Not by value: ranks would have to agree, and each sees its shard alone.
            if name in tensors and tensors[name] is tensors.get(twin):
                del tensors[name]
        return tensors

    def _plan(self, tensors: dict[str, torch.Tensor]) -> Plan:
        return plan_of(self._module, {name: TensorReader(one) for name, one in tensors.items()})

    def _digest(self) -> str:
        return metadata_digest(self.metadata())


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``module``, or the model it wraps, is sharded by FSDP2 or has a ``DTensor``."""
    pending: list[Any] = [unwrap(module)]
    while pending:  # at each push, so without the generators of ``module.modules()``
        part = pending.pop()
        parts = part.__dict__
        if isinstance(part, FSDPModule) or DTensor in map(type, parts["_parameters"].values()):
            return True
        pending += [one for one in parts["_modules"].values() if one is not None]
    return False


@contextmanager
def leading(source: object) -> Iterator[Announcement]:
    """Goes round any push: for a sharded source :meth:`ShardedModuleSource.lead`, else nothing.

    Args:
        source: As it was before it was fitted.

    Yields:
        What the trainer's other ranks, if there are any, will be told after a success.

    Raises:
        TrainerRankError: The other ranks cannot be reached.
    """
    if isinstance(source, ShardedModuleSource):
        with source.lead() as announcement:
            yield announcement
    else:
        yield Announcement()


def _groups(plan: Plan) -> list[list[Bundle]]:
    """Returns the bundles of each decoder layer, and of what comes before and after them."""
    return [list(group) for _, group in itertools.groupby(plan.bundles, _layer_of)]


def _layer_of(bundle: Bundle) -> tuple[str, ...]:
    """Returns a tensor's name up to its first number; nothing if there is none."""
    parts = bundle.sources[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return tuple(parts[: numbers[0] + 1]) if numbers else ()


def _ranks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Returns the global ranks that hold the shards, the same for all parameters."""
    tensors = module.state_dict(keep_vars=True).values()
    meshes = {one.device_mesh for one in tensors if isinstance(one, DTensor)}
    members = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len({frozenset(one) for one in members}) != 1:
        raise WeightMismatchError(
            f"all sharded parameters must be on the same ranks, got {sorted(members)}"
        )
    return min(members)


_STORES: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Store, Store]] = (
    weakref.WeakKeyDictionary()
)


def _store_for(module: torch.nn.Module) -> Store:
    """Returns a connection of its own to the process group's store, kept with the module."""
    default = _get_default_store()
    known = _STORES.get(module)
    if known is None or known[0] is not default:
        _STORES[module] = known = default, default.clone()  # pyright: ignore[reportAttributeAccessIssue]
    return known[1]

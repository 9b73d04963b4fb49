"""Groups of rollouts: advantages of whole groups at once, and a storage for replay buffers.

Both work on dense rows, column by column; see ``torchrl_vllm_sync.rl.rows``.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from itertools import count, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.utils import _unravel_key_to_tuple
from torchrl._utils import logger
from torchrl.data import LazyStackStorage
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer as _TorchRLBuffer
from torchrl.objectives.llm import MCAdvantage
from torchrl.objectives.llm import MCAdvantageSelector as _Selector

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.errors import RewardError, RowLayoutError
from torchrl_vllm_sync.rl.rows import ATTENTION, TOKENS, Columns, Padding, joined

# Held while any transform groups rows, so that copies need no lock of their own: buffers call it
# outside theirs.
_GROUPING = threading.RLock()


class _Row(NamedTuple):
    """A row that waits for its group."""

    columns: Columns
    at: int


class GroupAdvantage(MCAdvantage):
    """TorchRL's ``MCAdvantage`` with its arguments and results, computed on columns.

    Dense rows, each a trajectory of one step, are grouped in one pass, and the advantages of all
    groups that are complete are computed at once. Rows of groups that are not wait as columns, and
    are returned as wide as the widest rows. Everything else goes TorchRL's way, row by row: lazy
    stacks, batches of one row, trajectories of several steps, queues shared between processes, and
    groups that are chosen from more candidates.

    Example:
        >>> rows = TensorDict(
        ...     query=["2 + 2?", "3 + 3?", "2 + 2?"],
        ...     next=TensorDict(reward=[1.0, 1.0, 0.0], done=[True] * 3, batch_size=[3]),
        ...     batch_size=[3],
        ... )
        >>> advantage = GroupAdvantage(grpo_size=2)
        >>> advantage.inv(rows)["advantage"]
        tensor([ 0.7071, -0.7071])
        >>> advantage.queued_trajectories
        1

    Args:
        grpo_size: Rows of a group.
        *args, **kwargs: See ``MCAdvantage``.
        padding_token: See :class:`RolloutStorage`.

    Raises:
        ValueError: See ``MCAdvantage``.
        RewardError: Of dense rows, of which none was queued: rewards are missing, not finite, or
            not one floating point number a row.
        RowLayoutError: Also of dense rows: those that waited have other columns.
    """

    queues: Any  # deques of TensorDicts, and of _Row

    def __init__(
        self, grpo_size: int, *args: Any, padding_token: int | None = None, **kwargs: Any
    ) -> None:
        check_integer("grpo_size", grpo_size, 2)
        super().__init__(grpo_size, *args, **kwargs)
        self._padding = Padding(padding_token)

    def share_memory_(self) -> MCAdvantage:
        """Returns itself, with queues and counters in objects that processes share."""
        if not self.is_shared:
            for group, queue in self.queues.items():
                self.queues[group] = deque(self._queue_list(group), queue.maxlen)
        return super().share_memory_()

    def _queue_list(self, group: Any) -> list[TensorDictBase]:
        return [
            one.columns.take(torch.tensor([one.at])).rows() if isinstance(one, _Row) else one
            for one in super()._queue_list(group)
        ]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        groups = self._dense_groups(tensordict)
        with _GROUPING:
            members: dict[Any, list[int]] = {group: [] for group in groups or ()}
            waiting = [(group, one) for group in members for one in self.queues.get(group, ())]
            if groups is None or not all(isinstance(one, _Row) for _, one in waiting):
                return super()._inv_call(tensordict)
            if self.verbose:
                waits = f"{self.queued_trajectories} of {self.queued_groups} groups wait"
                logger.info(f"{type(self).__name__}: {len(tensordict)} rows, {waits}")
            columns = Columns.of(tensordict)
            self._check_rewards(columns)
            if ATTENTION in columns.leaves and all(columns.widths):
                columns.check()
                self._padding.learn(columns)
            waiting.sort(key=lambda one: id(one[1].columns))  # one for all rows of a group
            for at, (group, _) in enumerate(waiting):
                members[group].append(at)
            parts = []
            for _, rows in groupby((row for _, row in waiting), key=lambda row: id(row.columns)):
                of, places = zip(*rows, strict=True)
                parts.append(of[0].take(torch.tensor(places)))
            columns = joined([*parts, columns], self._padding)
            return self._complete(columns, groups, members, len(waiting))

    def _dense_groups(self, rows: TensorDictBase) -> list[Any] | None:
        """The group of each row, if these are dense rows of one step a trajectory."""
        if type(rows) is not TensorDict or rows.ndim != 1 or len(rows) < 2 or self.is_shared:
            return None
        has_candidates = self.candidate_group_size > self.grpo_size
        if has_candidates or type(self.candidate_selector) is not _Selector:
            return None
        done, prompts = rows.get(self.done_key, None), rows.get(self.prompt_key, None)
        if not isinstance(done, torch.Tensor) or done.numel() != len(rows) or not done.all():
            return None
        if isinstance(prompts, torch.Tensor):
            values = prompts.reshape(len(rows), -1).tolist()
            return [one[0] if len(one) == 1 else tuple(one) for one in values]
        groups = prompts if isinstance(prompts, list) else getattr(prompts, "tolist", list)()
        if isinstance(groups, str):
            groups = [groups] * len(rows)
        return groups if groups and all(isinstance(one, str) for one in groups) else None

    def _check_rewards(self, columns: Columns) -> None:
        key, rewards = self.rewards_key, columns.leaves.get(_unravel_key_to_tuple(self.rewards_key))
        if not isinstance(rewards, torch.Tensor):
            raise RewardError(f"{key!r}: rows hold no tensor there")
        if rewards.numel() != columns.size or not rewards.is_floating_point():
            told = f"{rewards.dtype} of shape {[*rewards.shape]}"
            raise RewardError(f"{key!r}: {columns.size} rows need a number each, got {told}")
        if bad := (~rewards.reshape(-1).isfinite()).nonzero().flatten().tolist():
            values = rewards.reshape(-1)[bad[:8]].tolist()
            told = f"{len(bad)} of {columns.size} are not finite: rows {bad[:8]} hold {values}"
            raise RewardError(f"{key!r}: {told}")
        if not (rewards.abs() < 1e18).all():  # whose squares are none that float32 has
            most = float(rewards.abs().max())
            raise RewardError(f"{key!r}: must be below 1e18, got {most:g}")

    def _complete(
        self, columns: Columns, groups: list[Any], members: dict[Any, list[int]], num_waiting: int
    ) -> TensorDictBase | None:
        """Returns the rows of all groups that are complete, and lets the others wait."""
        rewards = columns.leaves[_unravel_key_to_tuple(self.rewards_key)]
        values = rewards.reshape(-1)
        self._count_arrivals(values[num_waiting:])
        order: list[int] = []
        advantages: list[torch.Tensor] = []
        low, high = self.keep_return_bounds or (-torch.inf, torch.inf)
        for at, group in enumerate(groups, num_waiting):
            members[group].append(at)
            if len(members[group]) < self.grpo_size:
                continue
            whole, members[group] = members[group], []
            returns, is_chosen = values[whole], self.trajectory_return is not None
            is_kept = not is_chosen or low < float(returns.mean()) < high
            self.completed_groups += 1
            self.written_groups += is_kept
            self.dropped_groups += not is_kept
            self.selected_trajectories += self.grpo_size * (is_chosen and is_kept)
            if is_kept:
                order += whole
                advantages.append((returns - returns.mean()) / returns.std().clamp_min(1e-6))
            if self.verbose:
                logger.info(f"Group {group!r} is {'kept' if is_kept else 'dropped'}: {returns}")
        self._wait(columns, members)
        if not order:
            return None
        rows = columns.take(torch.tensor(order)).rows()
        return rows.set(self.advantage_key, torch.cat(advantages).reshape(-1, *rewards.shape[1:]))

    def _count_arrivals(self, returns: torch.Tensor) -> None:
        self.completed_trajectories += len(returns)
        self.completed_decisions += len(returns)
        if self.trajectory_return is not None:
            numbers = returns.tolist()
            for number in numbers:  # one by one, for the same sum as TorchRL's
                self.trajectory_return_sum += number
            self.trajectory_return_max = max(self.trajectory_return_max, *numbers)
            self.successful_trajectories += sum(number > 0.0 for number in numbers)

    def _wait(self, columns: Columns, members: dict[Any, list[int]]) -> None:
        places = [at for queue in members.values() for at in queue]
        rows, at = columns.take(torch.tensor(places, dtype=torch.int64)), count()
        for group, queue in members.items():
            self.queues.pop(group, None)
            if queue:
                waiting = [_Row(rows, next(at)) for _ in queue]
                self.queues[group] = deque(waiting, self.candidate_group_size)


class RolloutStorage(LazyStackStorage):
    """A storage of dense rows for TorchRL's replay buffers: columns, copied in and out.

    Stored rows are as wide as the widest; a sample has the columns that some of its rows use. What
    is padded anew holds what rows hold outside their attention masks: false in masks, -1 in policy
    versions, NaN in log-probabilities of prompts. Entries that are no tensors, and nested entries
    with further batch dimensions, come back stacked, and are not copied.

    All rows need ``("tokens", "prompt")``, ``("tokens", "response")``, ``("tokens", "full")`` and
    ``("masks", "all_attention_mask")``, and have the entries of the first ones. When a buffer has
    refused rows, its writer has moved on all the same, as with TorchRL's storages: ``empty()`` it.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=RolloutStorage(4096), transform=GroupAdvantage(16), batch_size=64
        ... )
        >>> len(buffer)
        0

    Args:
        max_size: Rows, of which the oldest are overwritten; by default there is no bound.
        device: Where tensors are kept; by default where they are.
        padding_token: Token that pads rows of different widths; by default what the rows hold
            where ``("masks", "all_attention_mask")`` is false, or 0.

    Raises:
        RowLayoutError: When rows are stored: they lack an entry or have one more, or it has another
            shape or type; stored rows are as before.
    """

    _storage: Columns

    def __init__(
        self,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        padding_token: int | None = None,
    ) -> None:
        super().__init__(max_size, device=device)
        self.device: Any
        self._padding = Padding(padding_token)
        self._empty()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows of at most {self.max_size})"

    def _empty(self) -> None:
        self._storage = Columns(0)
        self._bump_mutation_revision()

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:  # noqa: ARG002
        """Copies rows in.

        Args:
            cursor, data: Indices, a slice or a mask, and as many rows; or an index and one.
            set_cursor: Without effect, as in TorchRL's list storages.

        Raises:
            RowLayoutError: See the class.
            IndexError: Places before these rows hold none.
        """
        if isinstance(data, LazyStackedTensorDict) or not isinstance(data, TensorDictBase):
            raise RowLayoutError((), f"rows must be a dense TensorDict, got {type(data).__name__}")
        rows = Columns.of(data if data.ndim else data.unsqueeze(0)).to(self.device)
        rows.check()
        stored = self._storage
        if isinstance(cursor, slice):
            cursor = range(*cursor.indices(max(len(stored), cursor.stop or 0)))
        index = torch.as_tensor(cursor)
        index = index.nonzero() if index.dtype is torch.bool else index.long()
        index = torch.where(index < 0, index + len(stored), index).reshape(-1)[-self.max_size :]
        if len(rows) > self.max_size:  # the last ones stay
            rows = rows.take(torch.arange(len(rows))[-self.max_size :])
        if len(index) != len(rows):
            raise RowLayoutError((), f"{len(rows)} rows for {len(index)} places")
        end = max(len(stored), int(index.max()) + 1)
        if gaps := {*range(len(stored), end)} - {*index.tolist()}:
            raise IndexError(f"rows at {int(index.max())}, and none at {min(gaps)}")
        if stored.leaves:
            rows.check_like(stored)
        else:
            stored = rows.first(0)
        self._padding.learn(rows)
        widths = [max(each) for each in zip(rows.widths, stored.widths, strict=True)]
        rows = rows.widened(widths, self._padding)
        stored = self._reserved(stored, end, widths)
        places = index.cpu().numpy()
        for key, leaf in rows.leaves.items():
            is_tensor = isinstance(leaf, torch.Tensor)
            stored.leaves[key][index.to(leaf.device) if is_tensor else places] = leaf
        self._storage = stored
        self._bump_mutation_revision()

    def _reserved(self, stored: Columns, size: int, widths: list[int]) -> Columns:
        """The same rows in columns that hold ``size`` of them; room for rows is doubled."""
        room, leaves = len(stored.leaves[TOKENS]), stored.leaves
        if room < size or [*stored.widths] != widths:
            room = room if room >= size else min(max(size, 2 * room), self.max_size)
            held, leaves = stored.first(len(stored)).widened(widths, self._padding), {}
            for key, leaf in held.leaves.items():
                is_tensor = isinstance(leaf, torch.Tensor)
                make = leaf.new_empty if is_tensor else partial(np.empty, dtype=leaf.dtype)
                leaves[key] = make((room, *leaf.shape[1:]))
                leaves[key][: len(stored)] = leaf
        return Columns(size, leaves, stored.kinds)

    def get(self, index: Any) -> TensorDict:
        """Returns copies of rows, without the columns that none of them uses.

        Args:
            index: An integer for one row; a slice or integers for several.

        Raises:
            IndexError: There is no such row.
        """
        if not len(self):
            raise IndexError("the storage is empty")
        places = torch.arange(len(self))[list(index) if isinstance(index, range) else index]
        rows = self._storage.trimmed(places.reshape(-1)).rows()
        return rows if places.ndim else rows[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the rows, as one ``TensorDict`` under ``"rows"``; None without any."""
        return {
            "rows": self.get(slice(None)) if len(self) else None,
            "padding_token": self._padding.token,
            "padding": dict(self._padding.answers),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces all rows by copies of those of a :meth:`state_dict`.

        Args:
            state_dict: The state.
        """
        self._empty()
        self._padding.token = state_dict["padding_token"]
        self._padding.answers = dict(state_dict["padding"])
        if (rows := state_dict["rows"]) is not None:
            self.set(slice(0, len(rows)), rows)


class RayReplayBuffer(_TorchRLBuffer):
    """TorchRL's ``RayReplayBuffer``, which pickles: a copy reads and writes the same buffer.

    TorchRL's own (up to 0.14.1 at least) does not pickle, as it must for a ``RayLLMCollector``.
    Only where the buffer was made do ``close()`` and ``shutdown()`` end the actor; a copy lets go.

    Example:
        >>> buffer = RayReplayBuffer(storage=partial(LazyStackStorage, 512), batch_size=32)
        >>> collector = RayLLMCollector(env, policy=policy, replay_buffer=buffer, ...)

    Args:
        *args, **kwargs: See TorchRL's ``RayReplayBuffer``.
    """

    _is_copy = False

    def close(self) -> None:
        """Ends the buffer's actor; on a copy, lets go of it."""
        if not self._is_copy:
            super().close()
        elif self.is_alive:
            del self._rb

    def __reduce__(self) -> tuple[Any, ...]:
        # Whether Ray runs is for each process to know, and TorchRL counts who needs it there.
        state = {name: value for name, value in vars(self).items() if name != "_runtime_lease"}
        return _rebuild, (type(self), {**state, "_is_copy": True})


def _rebuild(kind: type[RayReplayBuffer], state: dict[str, Any]) -> RayReplayBuffer:
    buffer = object.__new__(kind)
    vars(buffer).update(state)
    return buffer

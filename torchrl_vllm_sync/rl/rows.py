"""Dense rows: rollouts as columns of one ``TensorDict``, and what is done with them as such.

One response is a row of batch size ``[N]``: prompts of width P padded on the left, responses of
width R on the right. Of such widths are tensors whose names end in ``"prompt"`` (P), ``"response"``
(R), and ``"full"``, ``"all_attention_mask"`` or ``"all_assistant_mask"`` (P + R). Other tensors
have one shape in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from tensordict.base import _NESTED_TENSORS_AS_LISTS_NONTENSOR
from tensordict.utils import LinkedList
from torch.nn.functional import pad

from torchrl_vllm_sync.errors import RowLayoutError

# Entries that ``vLLMWrapper`` adds to TorchRL's, whose dtypes, shapes and meanings it documents.
POLICY_VERSION = "policy_version"
MAX_POLICY_VERSION = "max_policy_version"
POLICY_VERSIONS = "policy_versions"
RESPONSE_VERSIONS = (POLICY_VERSIONS, "response")
FULL_VERSIONS = (POLICY_VERSIONS, "full")
NO_VERSION = -1  # on tokens that were not sampled: of prompts, and padding
FINISH_REASON = "finish_reason"
GENERATION = "generation"
NUM_CACHED_TOKENS = (GENERATION, "num_cached_tokens")
UNKNOWN_COUNT = -1  # where vLLM gave no count
QUEUE_TIME = (GENERATION, "queue_time")
PREFILL_TIME = (GENERATION, "prefill_time")
DECODE_TIME = (GENERATION, "decode_time")
REPLICA_ID = (GENERATION, "replica_id")
UNCORRECTED = (GENERATION, "uncorrected")
SAMPLING_MASK = ("sampling_mask", "response")
NO_TOKEN = -1  # behind the last; where there is none at all, all of the vocabulary could be sampled
ROUTED_EXPERTS = ("routed_experts", "full")
NO_EXPERT = -1
TURNS = "turns"
NUM_MESSAGES = (TURNS, "num_messages")
KEPT = (TURNS, "kept")
FORKED = (TURNS, "forked")

_Key = tuple[str, ...]
# Entries of TorchRL's that are read here.
TOKENS, PROMPT, RESPONSE = ("tokens", "full"), ("tokens", "prompt"), ("tokens", "response")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
# By the end of a key: whether its columns are those of prompts, and those of responses.
_SECTIONS = {
    "prompt": (True, False),
    "response": (False, True),
    "full": (True, True),
    "all_attention_mask": (True, True),
    "all_assistant_mask": (True, True),
}


# A row's values: the texts that hold them, and where.
_CELL = np.dtype([("texts", object), ("place", np.int64)])


class Texts(NonTensorStack):
    """A ``NonTensorStack`` that is an array, which may itself be made late.

    It stays one while it is indexed, copied and listed; for all else it becomes the stack.
    """

    _array: Callable[[], np.ndarray]
    _is_shared = _is_memmap = False
    _lock_parents_weakrefs: Any = ()
    device: Any = None
    # What is made of parts is a stack, whoever makes it.
    _new_lazy_unsafe = NonTensorStack._new_lazy_unsafe
    lazy_stack = NonTensorStack.lazy_stack  # pyright: ignore[reportAssignmentType]

    def __init__(self, shape: Sequence[int], make: Callable[[], np.ndarray]) -> None:
        shape = torch.Size(shape)
        made = cache(lambda: make().reshape(shape))
        self.__dict__.update(_is_locked=False, _batch_size=shape, _array=made)

    @classmethod
    def of(cls, values: Sequence[Any], shape: Sequence[int] | None = None) -> Texts:
        """Of values at hand, in the order of a flat array of this ``shape``."""
        return cls((len(values),) if shape is None else shape, lambda: objects(values))

    @classmethod
    def late(cls, shape: Sequence[int], make: Callable[[], np.ndarray]) -> Texts:
        """Of values that are made when they are looked at."""
        return cls(shape, make)

    @classmethod
    def cells(cls, column: Any) -> np.ndarray:
        """Of any column without tensors, for each row where its values are."""
        if isinstance(column, Texts):
            texts = column._clone()  # which nobody makes a stack
        else:
            shape = column.batch_size
            if isinstance(column, NonTensorData):
                values = [column.data] * shape.numel()
            else:
                values = column.tolist()
                for _ in shape[1:]:
                    values = [one for several in values for one in several]
            texts = cls.of(values, shape)
        cells = np.empty(len(texts), _CELL)
        cells["texts"].fill(texts)
        cells["place"] = np.arange(len(texts))
        return cells

    @classmethod
    def gathered(cls, cells: Sequence[Any] | np.ndarray) -> Texts:
        """Of the values of cells, which are looked at when these are."""
        shape = (len(cells), *cells[0]["texts"].batch_size[1:])

        def make() -> np.ndarray:
            values = np.empty(shape, object)
            for at, (texts, place) in enumerate(np.asarray(cells).tolist()):
                values[at] = texts._array()[place]
            return values

        return cls(shape, make)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self._array().ravel().tolist(), tuple(self._batch_size))

    def __getattr__(self, name: str) -> Any:
        if name not in ("tensordicts", "stack_dim", "hook_in", "hook_out"):
            raise AttributeError(name)
        objects = [self[at] for at in range(len(self))]
        plain = {"tensordicts": objects, "stack_dim": 0, "hook_in": None, "hook_out": None}
        del self._array
        self.__dict__.update(plain)
        self.__class__ = NonTensorStack
        return plain[name]

    def tolist(self, *, as_linked_list: bool = False, **_: Any) -> Any:
        """The values, as lists in lists."""
        values = self._array().tolist()
        return LinkedList(values, td=self) if as_linked_list else values

    def __getitem__(self, index: Any) -> Any:
        where = tuple(map(_for_numpy, index)) if isinstance(index, tuple) else _for_numpy(index)
        shape = np.broadcast_to(False, self._batch_size)[where].shape
        if shape:
            array = self._array
            return type(self)(shape, lambda: array()[where])
        return non_tensor(self._array()[where])

    def _propagate_lock(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._is_locked = True

    def _propagate_unlock(self) -> list[Any]:
        self._is_locked = False
        return []

    def maybe_to_stack(self) -> Texts:
        """Itself."""
        return self

    def split(self, split_size: int | list[int], dim: int = 0) -> Any:
        """Texts of some rows each."""
        if dim:
            stack: Any = super()
            return stack.split(split_size, dim)
        return tuple(self[at] for at in torch.arange(len(self)).split(split_size))

    def _clone(self, recurse: bool = True) -> Texts:  # noqa: ARG002  nothing is nested
        return type(self)(self._batch_size, self._array)

    def _has_names(self) -> bool:
        return False

    def _key_list(self) -> list[str]:
        return []

    def items(self, *args: Any, is_leaf: Any = None, **kwargs: Any) -> Any:
        """Nothing, but for those who take texts for leaves."""
        if is_leaf is _NESTED_TENSORS_AS_LISTS_NONTENSOR:
            stack: Any = super()
            return stack.items(*args, is_leaf=is_leaf, **kwargs)
        return iter(())

    def _apply_nest(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("batch_size") in (None, self._batch_size):
            return self  # there is no tensor to apply anything to
        stack: Any = super()
        return stack._apply_nest(*args, **kwargs)


def non_tensor(value: Any) -> NonTensorData:
    """A value in the form of an entry, without the time that its constructor takes."""
    return NonTensorData._from_tensordict(TensorDict({}), {"data": value})


def _for_numpy(index: Any) -> Any:
    """A copy: it is used when somebody looks, and what it is of may be another by then."""
    return copy(index.cpu().numpy() if isinstance(index, torch.Tensor) else index)


def padded(rows: Any, key: NestedKey, value: float, side: str = "right") -> Any:
    """An entry, ragged rows of which are padded with ``value``; ``None`` if there is none."""
    layout = {"as_padded_tensor": True, "padding_side": side, "padding_value": value}
    return rows.get(key, None, **layout)


def num_trained(rows: Any) -> int:
    """Tokens of answers that have the log-probability they were sampled with."""
    sampled = padded(rows, LOG_PROBS, torch.nan, "left").isfinite()
    return int((padded(rows, ASSISTANT, 0, "left").bool() & sampled).sum())


def objects(values: Sequence[Any]) -> np.ndarray:
    """A flat array of ``values``, whatever they are."""
    return np.fromiter(values, object, len(values))  # which does not look into lists


@dataclass(slots=True)
class Columns:
    """Rows as flat columns: a tensor, or an array with a cell of texts or an object for each."""

    size: int
    leaves: dict[_Key, Any] = field(default_factory=dict)
    # Class of each node, and its batch dimensions beside the rows'; parents first. Metadata, which
    # is of all rows, is a node, too.
    kinds: dict[_Key, tuple[Any, torch.Size]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: TensorDictBase) -> Columns:
        """The columns of rows, which share their memory."""
        columns = cls(len(rows))
        columns._add((), rows)
        return columns

    def _add(self, key: _Key, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.leaves[key] = value
        elif isinstance(value, MetaData):
            self.kinds[key] = MetaData(value.data), torch.Size([])
        elif is_non_tensor(value):
            self.leaves[key] = Texts.cells(value)
        elif isinstance(inner := getattr(value, "_tensordict", value), LazyStackedTensorDict):
            self.leaves[key] = objects(value.unbind(0))
        else:
            self.kinds[key] = type(value), value.batch_size[1:]
            for name, entry in inner.items():
                self._add((*key, name), entry)

    def rows(self) -> TensorDict:
        """The rows as they were, of the same classes; tensors are shared."""
        nodes: dict[_Key, dict[str, Any]] = {key: {} for key in self.kinds}
        for key, leaf in self.leaves.items():
            if not isinstance(leaf, torch.Tensor):
                leaf = Texts.gathered(leaf) if leaf.dtype == _CELL else lazy_stack([*leaf])
            nodes[key[:-1]][key[-1]] = leaf
        for key, (kind, inner) in reversed(self.kinds.items()):
            if isinstance(kind, MetaData):
                nodes[key[:-1]][key[-1]] = kind
            elif key:
                node = TensorDict(nodes[key], [self.size, *inner])
                made = kind._from_tensordict(node) if is_tensorclass(kind) else node
                nodes[key[:-1]][key[-1]] = made
        return TensorDict(nodes.get((), {}), [self.size])

    def take(self, index: torch.Tensor) -> Columns:
        """Copies of rows."""
        places = index.cpu().numpy()
        leaves = {
            key: leaf.index_select(0, index.to(leaf.device))
            if isinstance(leaf, torch.Tensor)
            else leaf[places]
            for key, leaf in self.leaves.items()
        }
        return Columns(len(places), leaves, self.kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.first(self.size).rows(),)  # not all that cells are of

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device | str | None) -> Columns:
        """The same rows on a device; where they are if it is None."""
        if device is None:
            return self
        moved = {one: leaf.to(device) for one, leaf in self.leaves.items() if torch.is_tensor(leaf)}
        return Columns(self.size, self.leaves | moved, self.kinds)

    def first(self, size: int) -> Columns:
        """Views of the first rows."""
        return Columns(size, {key: leaf[:size] for key, leaf in self.leaves.items()}, self.kinds)

    def check(self) -> None:
        """Raises unless these are dense rows."""
        for key in (TOKENS, PROMPT, RESPONSE, ATTENTION):
            if not isinstance(self.leaves.get(key), torch.Tensor):
                raise RowLayoutError(key, "dense rows hold a tensor there")
        if self.leaves[ATTENTION].dtype is not torch.bool:
            raise RowLayoutError(ATTENTION, "the mask must hold truth values")
        for key, leaf in self.leaves.items():
            if any(parts := sections(key, leaf)):
                width = sum(one for one, has in zip(self.widths, parts, strict=True) if has)
                if leaf.shape[1] != width:
                    raise RowLayoutError(key, f"it has {leaf.shape[1]} columns instead of {width}")

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of prompts and of responses; rows of another kind have none."""
        if any(not isinstance(self.leaves.get(key), torch.Tensor) for key in (PROMPT, RESPONSE)):
            return 0, 0
        return self.leaves[PROMPT].shape[1], self.leaves[RESPONSE].shape[1]

    def check_like(self, other: Columns) -> None:
        """Raises unless both have the same columns, whatever their widths."""
        told = {
            key: (f"of {[*inner]}", f"of {[*other.kinds.get(key, (None, inner))[1]]}")
            for key, (_, inner) in self.kinds.items()
        }
        for key in [*other.leaves, *self.leaves]:
            mine, its = self.leaves.get(key), other.leaves.get(key)
            if mine is None or its is None:
                raise RowLayoutError(key, f"{'these' if mine is None else 'earlier'} rows lack it")
            told[key] = _form(key, mine), _form(key, its)
        for key, (mine, its) in told.items():
            if mine != its:
                raise RowLayoutError(key, f"it is {mine} a row, in earlier rows {its}")

    def widened(self, widths: Sequence[int], padding: Padding) -> Columns:
        """The same rows with more columns; needs those of :meth:`check`."""
        more = [new - old for new, old in zip(widths, self.widths, strict=True)]
        if not any(more):
            return self
        leaves = dict(self.leaves)
        for key, leaf in self.leaves.items():
            for is_right, has in enumerate(sections(key, leaf)):
                if has and (missing := more[is_right]):
                    sides = (0, missing) if is_right else (missing, 0)
                    value = padding.value(key, leaf.dtype, is_right=bool(is_right))
                    leaves[key] = pad(leaves[key], (0, 0) * (leaf.ndim - 2) + sides, value=value)
        return Columns(self.size, leaves, self.kinds)

    def trimmed(self, index: torch.Tensor) -> Columns:
        """Copies of rows, without the columns that none of them attends to."""
        middle = self.widths[0]
        attended = self.leaves[ATTENTION].index_select(0, index.to(self.leaves[ATTENTION].device))
        used = attended.any(0).nonzero().flatten().tolist() or [middle]
        begin, end = min(used[0], middle), max(used[-1] + 1, middle)
        leaves = dict(self.leaves)
        for key, leaf in self.leaves.items():
            if any(parts := sections(key, leaf)):
                stop = end if all(parts) else end - middle
                leaves[key] = leaf[:, begin if parts[0] else 0 : stop if parts[1] else None]
        return Columns(self.size, leaves, self.kinds).take(index)


def unbound(entry: Any, masks: Mapping[tuple[bool, bool], torch.Tensor], name: str = "") -> Any:
    """Rows one by one, to be sent alone; without what pads a section that has a mask."""
    if isinstance(entry, MetaData):  # of what is padded
        return repeat(MetaData(not masks), len(entry))
    if isinstance(entry, torch.Tensor):
        if (mask := masks.get(sections((name,), entry))) is not None:
            return [row[at] for row, at in zip(entry, mask, strict=True)]
        return entry.unbind(0) if entry.ndim > 1 else [one.clone() for one in entry]
    if isinstance(entry, Texts):
        return map(non_tensor, entry.tolist())
    if isinstance(entry, list):
        return entry
    nested = getattr(entry, "_tensordict", entry).items()
    columns = {name: unbound(one, masks, name) for name, one in nested}
    rows = zip(*columns.values(), strict=True)
    made = [TensorDict(dict(zip(columns, row, strict=True))) for row in rows]
    return map(type(entry)._from_tensordict, made) if is_tensorclass(entry) else made


def sections(key: _Key, leaf: Any) -> tuple[bool, bool]:
    """Whether a column has the places of prompts, and those of responses."""
    has_columns = isinstance(leaf, torch.Tensor) and leaf.ndim > 1
    return _SECTIONS.get(key[-1], (False, False)) if has_columns else (False, False)


def _form(key: _Key, leaf: Any) -> str:
    """What a column must have in common with others, whatever their widths."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {[*leaf.shape[2 if any(sections(key, leaf)) else 1 :]]}"
    shape = leaf[0]["texts"].batch_size[1:] if leaf.dtype == _CELL else None
    return "no text" if shape is None else f"texts of {[*shape]}"


def joined(parts: list[Columns], padding: Padding) -> Columns:
    """Rows of several batches one after the other, as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for other in parts[1:]:
        other.check_like(first)
    widths = [max(each) for each in zip(*(one.widths for one in parts), strict=True)]
    if any([*one.widths] != widths for one in parts):
        for one in parts:
            one.check()
        parts = [one.widened(widths, padding) for one in parts]
    leaves = dict[_Key, Any]()
    for key, leaf in first.leaves.items():
        join: Any = torch.cat if isinstance(leaf, torch.Tensor) else np.concatenate
        leaves[key] = join([one.leaves[key] for one in parts])
    return Columns(sum(one.size for one in parts), leaves, first.kinds)


class Padding:
    """What rows hold outside their attention masks; there tokens nobody has shown are 0."""

    def __init__(self, token: int | None) -> None:
        self.token = token
        self.answers: dict[_Key, float] = {}  # floating point columns, behind responses

    def learn(self, columns: Columns) -> None:
        """Notes what padding rows show that was not known."""
        is_padding, begin = ~columns.leaves[ATTENTION], columns.widths[0]
        if self.token is None:
            self.token = next(iter(columns.leaves[TOKENS][is_padding][:1].tolist()), None)
        for key, leaf in columns.leaves.items():
            parts = sections(key, leaf)
            if parts[1] and leaf.is_floating_point() and key not in self.answers:
                values = leaf[:, begin if parts[0] else 0 :][is_padding[:, begin:]]
                if values.numel():
                    self.answers[key] = values.flatten()[0].item()

    def value(self, key: _Key, dtype: torch.dtype, *, is_right: bool) -> float:
        """What to pad a column with."""
        if dtype is torch.bool:
            return False
        if dtype.is_floating_point:
            return self.answers.get(key, torch.nan) if is_right else torch.nan
        if key[0] in (POLICY_VERSIONS, SAMPLING_MASK[0], ROUTED_EXPERTS[0]):
            return NO_VERSION  # and NO_TOKEN, NO_EXPERT
        return self.token or 0

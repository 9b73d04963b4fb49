"""Texts of many rows in one array: TorchRL's object for each is made when somebody asks for it."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.base import _NESTED_TENSORS_AS_LISTS_NONTENSOR
from tensordict.utils import LinkedList

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class TextCell(NamedTuple):
    """The values of a row, in the array of a column."""

    array: Callable[[], np.ndarray]
    shape: torch.Size  # of the values; of one it is ()
    at: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _cell, (self.array()[self.at], self.shape)


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
    def cells(cls, column: Any) -> list[TextCell]:
        """The values of any column without tensors, row by row."""
        texts = column
        if not isinstance(column, Texts):
            shape = column.batch_size
            if isinstance(column, NonTensorData):
                values = [column.data] * shape.numel()
            else:
                values = column.tolist()
                for _ in shape[1:]:
                    values = [one for several in values for one in several]
            texts = cls.of(values, shape)
        return [TextCell(texts._array, texts.batch_size[1:], at) for at in range(len(texts))]

    @classmethod
    def gathered(cls, cells: Sequence[TextCell]) -> Texts:
        """Of the values of cells, which are looked at when these are."""
        shape = (len(cells), *cells[0].shape)

        def make() -> np.ndarray:
            values = np.empty(shape, object)
            for at, cell in enumerate(cells):
                values[at] = cell.array()[cell.at]
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
        return NonTensorData._from_tensordict(TensorDict({}), {"data": self._array()[where]})

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


def _cell(values: Any, shape: torch.Size) -> TextCell:
    array = np.empty((1, *shape), object)
    array[0] = values
    return TextCell(lambda: array, shape, 0)


def _for_numpy(index: Any) -> Any:
    """A copy: it is used when somebody looks, and what it is of may be another by then."""
    return copy(index.cpu().numpy() if isinstance(index, torch.Tensor) else index)


def objects(values: Sequence[Any]) -> np.ndarray:
    """A flat array of ``values``, whatever they are."""
    array = np.empty(len(values), object)
    for at, value in enumerate(values):  # at once, numpy would look into lists
        array[at] = value
    return array

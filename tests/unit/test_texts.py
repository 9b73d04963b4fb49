"""Texts in an array are TorchRL's stacks to whoever uses them, and made when they are looked at."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
)
from torchrl.data.llm import History

from torchrl_vllm_sync.rl.rows import Texts, objects

FLAT = ["a", "b", "c", "d"]
NESTED = [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def rows_of(flat, nested):
    entries = {"at": torch.arange(4), "flat": flat, "deep": TensorDict({"nested": nested}, [4])}
    return TensorDict(entries, [4])


def mine():
    return rows_of(Texts.of(FLAT), Texts.of(list("01234567"), (4, 2)))


def torchrls():
    return rows_of(NonTensorStack(*FLAT), NonTensorStack.from_list(NESTED))


def gathered(rows, name, order):
    """Texts of the cells of texts, or of a stack."""
    cells = Texts.cells(rows.get(name))
    return Texts.gathered([cells[at] for at in order])


USES = {
    "slice": lambda rows: rows[1:3],
    "tensor": lambda rows: rows[torch.tensor([3, 0, 0])],
    "mask": lambda rows: rows[rows["at"] > 1],
    "one row": lambda rows: rows[2],
    "clone": lambda rows: rows.clone(),
    "copy": lambda rows: rows.copy(),
    "select": lambda rows: rows.select("at", "flat", ("deep", "nested")),
    "to": lambda rows: rows.to("cpu"),
    "to a dtype": lambda rows: rows.to(torch.float64),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "cat": lambda rows: torch.cat([rows, rows[:1]]),
    "stack": lambda rows: torch.stack([rows, rows]),
    "lazy stack": lambda rows: lazy_stack([rows[0], rows[3]]),
    "unbind": lambda rows: lazy_stack(rows.unbind(0)),
    "to lazy stack": lambda rows: rows.to_lazystack(0),
    "view": lambda rows: rows.view(2, 2),
    "unsqueeze": lambda rows: rows.unsqueeze(0),
    "apply": lambda rows: rows.apply(lambda one: one + 1),
    "update": lambda rows: TensorDict({}, [4]).update(rows),
    "lock": lambda rows: rows.lock_().unlock_(),
    "contiguous": lambda rows: rows.contiguous(),
    "expand": lambda rows: rows.expand(2, 4),
    "list": lambda rows: rows[[1, 2]],
    "new dimension": lambda rows: rows[1:, None],
    "split": lambda rows: rows.split([1, 3])[1],
    "chunks": lambda rows: rows.split(3)[0],
    "another device": lambda rows: (
        rows.exclude("at").to("meta").to("cpu").update({"at": rows["at"]})
    ),
    "set": lambda rows: rows.clone().__setitem__(0, rows[1]) or rows,
    "gathered": lambda rows: rows.clone().update({"flat": gathered(rows, "flat", [2, 0, 1, 3])}),
    "gathered twice": lambda rows: rows.clone().update(
        {"deep": {"nested": gathered(rows[[3, 1, 1, 0]], ("deep", "nested"), [2, 0, 1, 3])}}
    ),
}


USES_OF_AN_ARRAY = [
    "slice",
    "tensor",
    "mask",
    "clone",
    "copy",
    "to",
    "split",
    "apply",
    "to a dtype",
]


@pytest.mark.parametrize("use", USES)
def test_they_can_be_used_as_stacks(use):
    found, wanted = (USES[use](make()) for make in (mine, torchrls))
    assert found.batch_size == wanted.batch_size
    assert type(found) is type(wanted)
    for name in ("flat", ("deep", "nested")):
        one, other = found.get(name), wanted.get(name)
        assert one.batch_size == other.batch_size
        assert one.tolist() == other.tolist()
        assert isinstance(one, type(other))
    torch.testing.assert_close(found["at"], wanted["at"])


def test_nothing_is_made_before_somebody_looks():
    looked = []

    def make():
        looked.append(1)
        return objects(FLAT)

    rows = rows_of(Texts.late((4,), make), Texts.of(list("01234567"), (4, 2)))
    copies = [USES[use](rows) for use in USES_OF_AN_ARRAY]
    assert looked == []
    assert {type(one.get("flat")) for one in copies} == {Texts}
    assert copies[1]["flat"] == ["d", "a", "a"]
    assert copies[3]["flat"] == rows["flat"] == FLAT
    assert looked == [1]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_stay_those_that_were_chosen(kind):
    index = kind([0, 1])
    rows = mine()[index]
    index[0] = 3
    assert rows["at"].tolist() == [0, 1]
    assert rows["flat"] == ["a", "b"]
    assert rows["deep", "nested"] == NESTED[:2]


def test_what_is_changed_is_a_stack_from_then_on():
    rows = mine()
    before = rows.clone()
    rows["flat"][1] = "other"
    assert rows["flat"] == ["a", "other", "c", "d"]
    assert type(rows.get("flat")) is NonTensorStack
    assert before["flat"] == FLAT


def test_a_history_of_texts_is_a_history():
    fields = {
        "role": Texts.of(["user", "assistant"] * 2, (2, 2)),
        "content": Texts.of(["What?", "That.", "Who?", "Me."], (2, 2)),
        "is_complete": Texts.of([True] * 4, (2, 2)),
    }
    found = History._from_tensordict(TensorDict(fields, (2, 2)))
    wanted = History(
        role=[["user", "assistant"]] * 2,
        content=[["What?", "That."], ["Who?", "Me."]],
        batch_size=(2, 2),
    )
    assert found.content == wanted.content
    assert [one.content for one in found[1].unbind(0)] == ["Who?", "Me."]
    added = found.append(History(role="user", content="x", batch_size=(2,)), inplace=False)
    assert added.content[0] == ["What?", "That.", "x"]


def test_values_may_be_lists():
    values = [["a"], ["b", "c"], []]
    rows = TensorDict({"many": Texts.of(values)}, [3])
    assert rows.get("many").tolist() == values
    assert isinstance(rows.get("many")[1:], LazyStackedTensorDict)
    assert np.shape(objects(values)) == (3,)


COLUMNS = {
    "a list of all rows": (NonTensorData(["a", "b", "c"], batch_size=[3]), [["a", "b", "c"]] * 3),
    "a list of another length": (NonTensorData(["a", "b"], batch_size=[3]), [["a", "b"]] * 3),
    "a list of rows and turns": (NonTensorData(["a", "b"], batch_size=[1, 2]), [[["a", "b"]] * 2]),
    "a list a row": (NonTensorStack(*map(NonTensorData, [["a"], ["b", "c"], []])), None),
    "a list a turn": (
        lazy_stack([NonTensorStack(*map(NonTensorData, one)) for one in [[["a"], ["b"]]] * 3]),
        [[["a"], ["b"]]] * 3,
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_cells_hold_lists_as_they_are(case):
    column, wanted = COLUMNS[case]
    found = Texts.gathered(Texts.cells(column))
    assert found.batch_size == column.batch_size
    assert found.tolist() == (wanted or column.tolist())

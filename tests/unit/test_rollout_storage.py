"""RolloutStorage gives back the rows it was given, whatever their widths, in all buffers."""

import io
import pickle
import random  # noqa: TID251  seeded

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from torchrl.data import (
    ConsumingSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies.common import ChatHistory, LogProbs, Masks, Text, Tokens

from tests.fakes.dense import PAD, contents, dense_rows
from torchrl_vllm_sync.errors import RowLayoutError
from torchrl_vllm_sync.rl.groups import GroupAdvantage, RolloutStorage
from torchrl_vllm_sync.rl.rows import Texts, objects


def batches(*sizes, seed=0, **options):
    lengths = random.Random(seed)
    made = []
    for at, size in enumerate(sizes):
        prompts = [lengths.randint(1, 3 + at % 3) for _ in range(size)]
        answers = [lengths.randint(1, 5 - at % 4) for _ in range(size)]
        made.append(dense_rows(prompts, answers, **options))
    return made


def stored(num_rows, *sizes, **options):
    options.setdefault("batch_size", 4)
    buffer = ReplayBuffer(storage=RolloutStorage(num_rows), **options)
    given = []
    for rows in batches(*sizes):
        buffer.extend(rows)
        given += contents(rows)
    return buffer, given


def by_name(rows):
    return {one["row"]: one for one in rows}


def assert_held(found, given):
    """Each row found is one of those given, padded as those are."""
    names = by_name(given)
    for one in contents(found):
        expected = names[one["row"]]
        assert {**one, "elsewhere": None} == {**expected, "elsewhere": None}
        assert one["elsewhere"] <= {PAD, -1, float(PAD)}
        assert one["prompts_unknown"]


def test_rows_of_different_widths_come_back():
    buffer, given = stored(64, 6, 1, 9, 4, 8)
    assert len(buffer) == 28
    everything = buffer[:]
    assert [one["row"] for one in contents(everything)] == [one["row"] for one in given]
    assert_held(everything, given)
    classes = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs, "text": Text}
    assert all(type(everything[key]) is kind for key, kind in classes.items())
    assert type(everything) is TensorDict
    assert isinstance(everything.get("query"), NonTensorStack)


def test_sampling_masks_are_as_wide_as_the_responses():
    buffer = ReplayBuffer(storage=RolloutStorage(8), batch_size=8)
    for answers in ([2, 3], [5, 1]):
        rows = dense_rows([4, 2], answers)
        ids = rows["tokens", "response"]
        masks = torch.stack([ids, ids + 1, torch.full_like(ids, -1)], -1)
        rows["sampling_mask"] = {"response": masks.masked_fill((ids == PAD)[..., None], -1).int()}
        buffer.extend(rows)
    rows = buffer[:]
    ids, masks = rows["tokens", "response"], rows["sampling_mask", "response"]
    assert masks.shape == (4, 5, 3)
    is_there = ids != PAD
    assert (masks[..., 0] == torch.where(is_there, ids, -1)).all()
    assert (masks[..., 1] == torch.where(is_there, ids + 1, -1)).all()


def test_samples_have_the_columns_that_their_rows_use():
    buffer = ReplayBuffer(storage=RolloutStorage(8))
    buffer.extend(dense_rows([2, 5], [7, 1]))
    buffer.extend(dense_rows([1, 3], [2, 4]))
    widths = {}
    for index in ([0], [1], [2, 3], [0, 2], [0, 1, 2, 3]):
        rows = buffer[torch.tensor(index)]
        widths[tuple(index)] = (
            rows["tokens", "prompt"].shape[1],
            rows["tokens", "response"].shape[1],
        )
        assert rows["masks", "all_attention_mask"].any(0).all() or len(index) > 1
        assert rows["masks", "all_attention_mask"][:, [0, -1]].any(0).all()
    assert widths == {
        (0,): (2, 7),
        (1,): (5, 1),
        (2, 3): (3, 4),
        (0, 2): (2, 7),
        (0, 1, 2, 3): (5, 7),
    }


def test_samples_are_copies():
    buffer, given = stored(8, 4)
    for _ in range(2):
        rows = buffer[:]
        assert_held(rows, given)
        rows["tokens", "full"].zero_()
        rows["next", "reward"].fill_(9.0)


def test_what_is_stored_is_a_copy():
    buffer = ReplayBuffer(storage=RolloutStorage(8))
    (rows,) = batches(5)
    given = contents(rows)
    buffer.extend(rows)
    rows["tokens", "full"].zero_()
    rows["policy_versions", "full"].zero_()
    assert_held(buffer[:], given)


def test_the_oldest_rows_are_overwritten():
    buffer, given = stored(10, 6, 3, 7, 5, 2)
    assert len(buffer) == 10
    assert {one["row"] for one in contents(buffer[:])} == {one["row"] for one in given[-10:]}
    assert_held(buffer[:], given)
    rows = batches(23, seed=4)[0]  # more than there is room for
    buffer.extend(rows)
    assert {one["row"] for one in contents(buffer[:])} == {
        one["row"] for one in contents(rows)[-10:]
    }


@pytest.mark.parametrize("batch_size", [3, 8, 20])
def test_every_row_is_sampled_once_without_replacement(batch_size):
    sampler = SamplerWithoutReplacement(drop_last=False)
    buffer, given = stored(64, 6, 10, 4, sampler=sampler, batch_size=batch_size)
    for _ in range(2):
        seen = []
        while len(seen) < 20:
            rows = buffer.sample()
            assert_held(rows, given)
            seen += [one["row"] for one in contents(rows)]
        assert sorted(seen) == sorted(by_name(given))


def test_random_samples_may_be_larger_than_an_extend():
    buffer, given = stored(64, 6, 10, 4, sampler=RandomSampler(), batch_size=100)
    rows = buffer.sample()
    assert len(rows) == 100
    assert_held(rows, given)
    assert len({one["row"] for one in contents(rows)}) > 10


def test_prefetched_samples_are_whole():
    buffer, given = stored(64, 6, 10, prefetch=3)
    for at, rows in enumerate(batches(*[5] * 8, seed=9)):
        given += contents(rows)
        buffer.extend(rows)
        for _ in range(1 + at % 3):
            assert_held(buffer.sample(), given)


def test_an_empty_buffer_takes_other_rows():
    buffer, _ = stored(16, 6)
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(IndexError, match="empty"):
        buffer[:]
    (rows,) = batches(3, seed=2)
    rows["advantage"] = torch.ones(3, 1)
    buffer.extend(rows)
    assert_held(buffer[:], contents(rows))
    assert buffer[:]["advantage"].sum() == 3


def test_one_row_is_stored_and_read():
    buffer = ReplayBuffer(storage=RolloutStorage(4))
    (rows,) = batches(3)
    for row in rows.unbind(0):
        buffer.add(row)
    assert len(buffer) == 3
    assert_held(buffer[:], contents(rows))
    assert buffer[1]["row"] == rows["row"][1]
    assert buffer[1].batch_size == ()
    assert 2 in buffer.storage
    assert 3 not in buffer.storage
    assert [*buffer[-2:]["row"]] == rows["row"][1:]
    with pytest.raises(IndexError):
        buffer[3]


@pytest.mark.parametrize("kind", ["state_dict", "pickle"])
def test_a_state_holds_all_rows(kind):
    buffer, given = stored(10, 6, 7)
    if kind == "pickle":
        other = ReplayBuffer(storage=pickle.loads(pickle.dumps(buffer.storage)))
        assert_held(other[:], given)
        assert len(pickle.loads(pickle.dumps(RolloutStorage(4)))) == 0
        return
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other, _ = stored(10, 4, 3)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert contents(other[:]) == contents(buffer[:])
    (more,) = batches(4, seed=8)
    for one in (buffer, other):
        one.extend(more)
    assert [one["row"] for one in contents(other[:])] == [one["row"] for one in contents(buffer[:])]
    empty = RolloutStorage(4)
    empty.load_state_dict(RolloutStorage(4).state_dict())
    assert len(empty) == 0


def test_buffers_of_tensordicts_and_consuming_ones():
    buffer = TensorDictReplayBuffer(storage=RolloutStorage(16), batch_size=4)
    (rows,) = batches(6)
    buffer.extend(rows)
    sample = buffer.sample()
    assert [rows["row"][at] for at in sample["index"].flatten()] == sample["row"]
    buffer = ReplayBuffer(
        storage=RolloutStorage(16), sampler=ConsumingSampler(max_sample_count=1), batch_size=3
    )
    first, second = batches(6, 5)
    buffer.extend(first)
    seen = [*buffer.sample()["row"], *buffer.sample()["row"]]
    assert sorted(seen) == sorted(first["row"])
    buffer.extend(second)
    assert {*buffer.sample()["row"]} <= {*second["row"]}


def test_conversations_of_different_lengths_come_back():
    def chats(*turns):
        one = [[{"role": "user", "content": f"{n} {at}"} for at in range(n)] for n in turns]
        made = [History.from_chats([chat])[0] for chat in one]
        return ChatHistory._from_tensordict(TensorDict({"prompt": lazy_stack(made)}, [len(turns)]))

    buffer = ReplayBuffer(storage=RolloutStorage(16))
    first, second = batches(3, 2)
    first["history"], second["history"] = chats(2, 2, 2), chats(1, 3)
    buffer.extend(first)
    buffer.extend(second)
    rows = buffer[torch.tensor([4, 0, 3])]
    assert type(rows["history"]) is ChatHistory
    assert [one.content for one in rows["history"].prompt.unbind(0)] == [
        ["3 0", "3 1", "3 2"],
        ["2 0", "2 1"],
        ["1 0"],
    ]


def test_texts_are_not_made_before_somebody_looks():
    looked = []

    def late(values):
        return Texts.late((3,), lambda: looked.append(1) or objects(values))

    first, second = batches(3, 3)
    first["query"], second["query"] = late("aab"), late("bba")
    buffer = ReplayBuffer(storage=RolloutStorage(16), transform=GroupAdvantage(3), batch_size=3)
    buffer.extend(first)
    assert looked == [1]  # groups have to be known
    first, second = batches(3, 3)
    first["said"], second["said"] = late("def"), late("ghi")
    buffer = ReplayBuffer(storage=RolloutStorage(16), batch_size=3)
    buffer.extend(first)
    buffer.extend(second)
    rows, other = buffer[torch.tensor([4, 0])], buffer.sample().split(2)[0]
    assert looked == [1]
    assert type(rows.get("said")) is type(other.get("said")) is Texts
    assert rows["said"] == ["h", "d"]
    assert looked == [1, 1, 1]
    assert len(other["said"]) == 2


def test_a_value_of_all_rows_is_one_of_each():
    (rows,) = batches(3)
    rows["source"] = "everywhere"
    buffer = ReplayBuffer(storage=RolloutStorage(16))
    buffer.extend(rows)
    assert buffer[1:]["source"] == ["everywhere"] * 2


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda rows: rows.exclude(("masks", "all_attention_mask")), "all_attention_mask"),
        (lambda rows: rows.exclude(("tokens", "full")), "full"),
        (lambda rows: rows.exclude("policy_version"), "policy_version"),
        (lambda rows: rows.exclude("query"), "query"),
        (lambda rows: rows.set("other", torch.zeros(len(rows))), "other"),
        (lambda rows: rows.set("policy_version", torch.zeros(len(rows), 2).long()), "version"),
        (lambda rows: rows.set("policy_version", torch.zeros(len(rows))), "torch.float32"),
        (lambda rows: rows.set("policy_version", Texts.of("abc")), "policy_version"),
        (lambda rows: rows.set(("log_probs", "full"), torch.zeros(len(rows), 3)), "log_probs"),
        (
            lambda rows: rows.set(
                ("masks", "all_attention_mask"), rows["masks", "all_attention_mask"].long()
            ),
            "truth values",
        ),
        (lambda rows: lazy_stack(list(rows.unbind(0))), "LazyStackedTensorDict"),
        (
            lambda rows: rows.set("tokens", LazyStackedTensorDict(*rows["tokens"].unbind(0))),
            "tokens",
        ),
        (
            lambda rows: rows.set("query", Texts.of("abcdef", (3, 2))),
            r"query.*texts of \[2\] a row, in earlier rows texts of \[\]",
        ),
        (
            lambda rows: rows.set("query", lazy_stack([TensorDict({"a": at}) for at in range(3)])),
            "query.*no text a row",
        ),
    ],
)
def test_rows_of_another_layout_are_named_and_change_nothing(change, key):
    first, second, third = batches(3, 3, 3, classes=False)
    storage = RolloutStorage(16)
    storage.set(range(3), first)
    with pytest.raises(RowLayoutError, match=key):
        storage.set(range(3, 6), change(second))
    assert len(storage) == 3
    storage.set(range(3, 6), third)
    assert_held(storage[:], contents(first) + contents(third))


def turns(num_rows, number):
    """A history of so many messages a row."""
    texts = {
        "role": ["user"] * num_rows * number,
        "content": list(map(str, range(num_rows * number))),
    }
    shape = (num_rows, number)
    chat = TensorDict({name: Texts.of(one, shape) for name, one in texts.items()}, shape)
    prompt = History._from_tensordict(chat)
    return ChatHistory._from_tensordict(TensorDict({"prompt": prompt}, [num_rows]))


@pytest.mark.parametrize("number", [1, 3])
def test_histories_of_other_turns_are_refused(number):
    first, second = batches(2, 2)
    first["history"], second["history"] = turns(2, 2), turns(2, number)
    first["next", "reward"] = second["next", "reward"] = torch.zeros(2, 1, 1)
    storage, advantage = RolloutStorage(8), GroupAdvantage(3)
    storage.set(range(2), first)
    assert advantage.inv(first) is None
    for refuses in (lambda: storage.set(range(2, 4), second), lambda: advantage.inv(second)):
        with pytest.raises(RowLayoutError, match=rf"'history'.*\[{number}\] a row.*\[2\]"):
            refuses()
    assert (len(storage), advantage.queued_trajectories) == (2, 2)
    first["history"] = turns(2, 2)
    storage.set(range(2, 4), first)
    assert storage[:]["history"].prompt.content == [["0", "1"], ["2", "3"]] * 2


@pytest.mark.parametrize(
    ("places", "written"),
    [
        ([-1], [3]),
        (-1, [3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        (slice(None), [0, 1, 2, 3]),
        (slice(-2, None), [2, 3]),
        (slice(1, 3), [1, 2]),
    ],
)
def test_places_are_those_of_the_rows_that_there_are(places, written):
    first, second = batches(4, len(written))
    wanted, given = contents(first), contents(second)
    buffer = ReplayBuffer(storage=RolloutStorage(8), batch_size=4)
    for some in first.split([3, 1]):  # there is room for more then
        buffer.extend(some)
    buffer[places] = second[0] if isinstance(places, int) else second
    for at, one in zip(written, given, strict=True):
        wanted[at] = one
    assert [one["row"] for one in contents(buffer[:])] == [one["row"] for one in wanted]
    assert_held(buffer[:], wanted)


def test_rows_beyond_unwritten_places_are_refused():
    first, second = batches(3, 3)
    storage = RolloutStorage(16)
    storage.set(range(3), first)
    with pytest.raises(IndexError, match="rows at 9, and none at 3"):
        storage.set(range(7, 10), second)
    with pytest.raises(IndexError, match="rows at 5, and none at 3"):
        storage.set([5, 0, 1], second)
    with pytest.raises(RowLayoutError, match="3 rows for 1 places"):
        storage.set(3, second)
    assert len(storage) == 3


def test_padding_is_learned_or_told():
    def rows(width, **options):
        return dense_rows([width] * 2, [2, 2], **options)

    storage = RolloutStorage(8)
    storage.set(range(2), rows(2))
    storage.set(range(2, 4), dense_rows([1, 3], [2, 2], pad=8))
    assert storage[:]["tokens", "prompt"][:2, 0].tolist() == [8, 8]
    storage = RolloutStorage(8, padding_token=9)
    storage.set(range(2), rows(2))
    storage.set(range(2, 4), dense_rows([1, 3], [2, 1], pad=8))
    assert storage[:]["tokens", "prompt"][:, 0].tolist()[:2] == [9, 9]

"""Filtering and weighting rows by their age."""

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import (
    ConsumingSampler,
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import Compose, PolicyAgeFilter
from torchrl.objectives.llm.grpo import MCAdvantage

from tests.fakes.rl import Service, stamped_rows
from torchrl_vllm_sync import StalenessFilter, StalenessWeight, WeightUpdater
from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.rows import FULL_VERSIONS, POLICY_VERSION, RESPONSE_VERSIONS

LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])


def numbers(rows):
    return rows["number"].tolist() if len(rows) else []


# ---------------------------------------------------------------- the filter on batches


@LAYOUTS
@pytest.mark.parametrize(("bound", "kept"), [(0, [2]), (1, [1, 2]), (3, [0, 1, 2])])
def test_rows_are_as_old_as_their_oldest_token(padded, bound, kept):
    rows = stamped_rows([2, 2, 5], [4], [5, 5], padded=padded)
    keep = StalenessFilter(bound, 5)
    assert numbers(keep(rows)) == kept
    assert keep.num_dropped == 3 - len(kept)
    assert numbers(rows) == [0, 1, 2]


@LAYOUTS
def test_what_is_dropped_is_counted_by_age(padded):
    service = Service(5)
    keep = StalenessFilter(1, service)
    keep(stamped_rows([0], [3], [3], [5], padded=padded))
    assert keep.dropped_by_staleness == {2: 2, 5: 1}
    service.weight_version = 8
    keep(stamped_rows([0], [8], padded=padded))
    assert keep.dropped_by_staleness == {2: 2, 5: 1, 8: 1}
    assert keep.num_dropped == 4
    keep.reset_counts()
    assert (keep.num_dropped, keep.dropped_by_staleness) == (0, {})


def test_the_newest_version_may_be_set_by_hand():
    keep = StalenessFilter(1, 3)
    keep.current_version = 4
    assert numbers(keep(stamped_rows([2], [3]))) == [1]


@LAYOUTS
def test_all_may_be_dropped_and_nothing_is_nothing(padded):
    keep = StalenessFilter(0, 9)
    none = keep(stamped_rows([1], [2], padded=padded))
    assert len(none) == 0
    assert keep(none) is none
    assert StalenessWeight(9, half_life=1)(none) is none
    assert keep.num_dropped == 2


@LAYOUTS
def test_rows_newer_than_what_is_known_are_fresh(padded):
    rows = stamped_rows([7], [9], padded=padded)
    assert numbers(StalenessFilter(0, 7)(rows)) == [0, 1]
    assert StalenessWeight(7, half_life=1)(rows)["staleness"].tolist() == [0, 0]


@pytest.mark.parametrize("key", [RESPONSE_VERSIONS, FULL_VERSIONS], ids=str)
@LAYOUTS
def test_stamps_of_tokens_serve_too_and_padding_is_none(padded, key):
    rows = stamped_rows([2, 2, 5], [5], padded=padded)
    rows.rename_key_(RESPONSE_VERSIONS, key)
    assert numbers(StalenessFilter(2, 5, version_key=key)(rows)) == [1]


def test_a_row_of_several_steps_is_as_old_as_its_oldest():
    versions = torch.tensor([[3, 5], [5, 5], [5, 1]])
    rows = TensorDict({POLICY_VERSION: versions, "number": torch.arange(6).view(3, 2)}, [3, 2])
    keep = StalenessFilter(2, 5)
    assert keep(rows).batch_size == (2, 2)
    assert keep.dropped_by_staleness == {4: 1}
    weighed = StalenessWeight(5, half_life=2)(rows)
    assert weighed["staleness"].tolist() == [[2, 0], [0, 0], [0, 4]]
    assert weighed["staleness_weight"].tolist() == [[0.5, 1], [1, 1], [1, 0.25]]


# ---------------------------------------------------------------- rows without stamps


def unstamped(padded, some):
    rows = stamped_rows([1], [1], [1], padded=padded)
    if not some:
        return rows.exclude(POLICY_VERSION)
    if padded:
        rows[POLICY_VERSION][1] = -1
    else:
        del rows.tensordicts[1][POLICY_VERSION]
    return rows


@LAYOUTS
@pytest.mark.parametrize(("some", "missing"), [(True, 1), (False, 3)])
def test_rows_without_a_stamp_are_refused_by_name(padded, some, missing):
    rows = unstamped(padded, some)
    keep = StalenessFilter(0, 9)
    for transform in (keep, StalenessWeight(9, half_life=1)):
        with pytest.raises(UnstampedRowsError, match=f"{missing} of 3 rows have no 'policy_versi"):
            transform(rows)
    assert keep.num_dropped == 0
    with pytest.raises(KeyError):
        keep(rows)
    if not some:  # TorchRL's own lets them pass, however old
        assert len(PolicyAgeFilter(9, 0)(rows)) == 3


@LAYOUTS
def test_rows_without_a_stamp_may_pass_where_that_is_asked_for(padded):
    keep = StalenessFilter(0, 9, allow_unstamped=True)
    assert numbers(keep(unstamped(padded, some=True))) == [1]
    assert numbers(keep(unstamped(padded, some=False))) == [0, 1, 2]
    assert keep.dropped_by_staleness == {8: 2}


def test_versions_that_are_no_numbers_are_refused():
    for rows in (
        TensorDict({POLICY_VERSION: torch.rand(2)}, [2]),
        LazyStackedTensorDict(TensorDict({POLICY_VERSION: "7f"}), stack_dim=0),
    ):
        with pytest.raises(UnsupportedArgumentError, match="integer policy versions"):
            StalenessFilter(0, 9)(rows)


# ---------------------------------------------------------------- buffers


def buffer_of(transform, *, storage=LazyStackStorage, sampler=SamplerWithoutReplacement, **kwargs):
    return ReplayBuffer(
        storage=storage(16), sampler=sampler(), transform=transform, **{"batch_size": 4, **kwargs}
    )


@LAYOUTS
@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, ConsumingSampler])
def test_a_buffer_takes_and_gives_only_rows_that_are_fresh(padded, sampler):
    service = Service(4)
    keep = StalenessFilter(2, service)
    buffer = buffer_of(keep, sampler=sampler)
    buffer.extend(stamped_rows([1], [2], [3], [4], [4, 5], padded=padded))
    assert len(buffer) == 4
    assert keep.dropped_by_staleness == {3: 1}
    service.weight_version = 6
    assert sorted(numbers(buffer.sample())) == [3, 4]
    assert keep.dropped_by_staleness == {3: 2, 4: 1}


def test_a_dense_storage_too():
    keep = StalenessFilter(1, 3)
    buffer = buffer_of(keep, storage=LazyTensorStorage, batch_size=2)
    buffer.extend(stamped_rows([1], [2], [3], padded=True).exclude("finish_reason"))
    assert sorted(numbers(buffer.sample())) == [1, 2]
    assert keep.num_dropped == 1


@LAYOUTS
def test_a_buffer_given_nothing_but_stale_rows_stays_as_it_was(padded):
    rows = stamped_rows([1], [2], padded=padded)
    buffer = buffer_of(StalenessFilter(0, 9))
    assert buffer.extend(rows).numel() == 0
    buffer.add(rows[0])
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="at least one element"):
        buffer_of(PolicyAgeFilter(9, 0)).extend(rows)


def test_a_buffer_refuses_rows_without_a_stamp_and_stays_as_it_was():
    buffer = buffer_of(StalenessFilter(0, 9))
    with pytest.raises(UnstampedRowsError, match="StalenessFilter"):
        buffer.extend(stamped_rows([9], [9]).exclude(POLICY_VERSION))
    assert len(buffer) == 0


def trajectories(versions, query="same"):
    """One finished row of one step for each version, as an LLM collector writes them."""
    rows = stamped_rows(*[[one] for one in versions])
    for i, one in enumerate(rows.tensordicts):
        one["query"] = query
        one["next"] = TensorDict(
            {"reward": torch.tensor([[float(i)]]), "done": torch.ones(1, dtype=torch.bool)}
        )
    return rows.exclude("advantage")


def test_groups_are_compared_whole_before_their_stale_rows_are_dropped():
    keep = StalenessFilter(1, 3)
    buffer = buffer_of(Compose(keep, MCAdvantage(grpo_size=4)))
    buffer.extend(trajectories([3, 1]))
    assert len(buffer) == 0  # held back by MCAdvantage, which hands on None
    buffer.extend(trajectories([2, 3]))
    assert len(buffer) == 3
    assert keep.dropped_by_staleness == {2: 1}
    found = buffer[:]["advantage"].flatten().sort().values
    torch.testing.assert_close(found, torch.tensor([-1.0, -1.0, 1.0]) * 0.75**0.5)


# ---------------------------------------------------------------- weights


@LAYOUTS
def test_the_weight_halves_with_each_half_life(padded):
    rows = stamped_rows([8], [6, 7], [4, 9], [0], padded=padded)
    out = StalenessWeight(8, half_life=2, max_staleness=4)(rows)
    assert out["staleness"].tolist() == [0, 2, 4, 8]
    assert out["staleness"].dtype == torch.int64
    assert out["staleness_weight"].tolist() == [1, 0.5, 0.25, 0]
    assert out["staleness_weight"].dtype == torch.float32
    assert "staleness" not in rows.keys()  # noqa: SIM118  a TensorDict
    assert (out["advantage"] == 1).all()


@LAYOUTS
def test_a_bound_alone_does_not_decay(padded):
    rows = stamped_rows([8], [6], [5], padded=padded)
    assert StalenessWeight(8, max_staleness=2)(rows)["staleness_weight"].tolist() == [1, 1, 0]


@LAYOUTS
def test_advantages_are_weighed_anew_each_time_a_row_is_sampled(padded):
    service = Service(2)
    weigh = StalenessWeight(service, half_life=1, multiply="advantage")
    buffer = buffer_of(weigh, batch_size=2)
    buffer.extend(stamped_rows([1], [2], padded=padded))
    for _ in range(2):
        sample = buffer.sample()
        assert sample["advantage"].shape == (2, 1, 1)
        found = dict(zip(numbers(sample), sample["advantage"].flatten().tolist(), strict=True))
        assert found == {0: 0.5, 1: 1.0}
    service.weight_version = 3
    assert sorted(buffer.sample()["advantage"].flatten().tolist()) == [0.25, 0.5]


def test_ragged_advantages_are_weighed_too():
    rows = stamped_rows([1, 1], [2, 2, 2])
    for one in rows.tensordicts:
        one["advantage"] = torch.ones(len(one["tokens", "response"]))
    out = StalenessWeight(2, half_life=1, multiply="advantage")(rows)
    assert [one.tolist() for one in out.get("advantage", as_list=True)] == [[0.5] * 2, [1.0] * 3]
    assert [one.tolist() for one in rows.get("advantage", as_list=True)] == [[1.0] * 2, [1.0] * 3]


def test_an_entry_to_multiply_that_is_not_there_is_refused():
    with pytest.raises(KeyError, match="missing"):
        StalenessWeight(2, half_life=1, multiply="missing")(stamped_rows([1], [2]))


@pytest.mark.parametrize("entry", ["policy_version", "text"])
def test_an_entry_to_multiply_that_would_be_rounded_is_refused(entry):
    rows = stamped_rows([1], [2])
    for one in rows.tensordicts:
        one["text"] = "said"
    with pytest.raises(UnsupportedArgumentError, match=f"floating-point entry, got '{entry}'"):
        StalenessWeight(2, half_life=1, multiply=entry)(rows)
    assert rows["policy_version"].tolist() == [1, 2]


# ---------------------------------------------------------------- where the version comes from


def test_each_kind_of_version_is_read_anew():
    service, counted = Service(3), PolicyVersion()
    updater = WeightUpdater(service)
    box = [3]
    counted.version = 3
    for version in (service, updater, counted, lambda: box[0]):
        keep = StalenessFilter(1, version)
        service.weight_version = box[0] = counted.version = 3
        assert len(keep(stamped_rows([2]))) == 1
        service.weight_version = box[0] = counted.version = 4
        assert len(keep(stamped_rows([2]))) == 0, version
    keep = StalenessFilter(1, 3)
    assert len(keep(stamped_rows([2]))) == 1


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "NoneType"),
        ("3", "got str"),
        (3.0, "got float"),
        (True, "truth value"),
        (-1, "at least 0"),
        (object(), "got object"),
        (torch.nn.Linear(1, 1), "got Linear"),
        (Service, "got type"),
        (WeightUpdater(None), "no service"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [StalenessFilter, StalenessWeight])
def test_other_versions_are_refused_at_the_door(version, message, kind):
    make = {StalenessFilter: partial(kind, 1), StalenessWeight: partial(kind, half_life=1)}[kind]
    with pytest.raises(UnsupportedArgumentError, match=message):
        make(version=version)


@pytest.mark.parametrize("now", [2.5, -1, None, True])
@pytest.mark.parametrize("kind", [StalenessFilter, StalenessWeight])
def test_a_function_that_returns_no_version_is_refused(now, kind):
    make = {StalenessFilter: partial(kind, 1), StalenessWeight: partial(kind, half_life=1)}[kind]
    with pytest.raises(UnsupportedArgumentError, match=f"the newest version must be .* got {now}"):
        make(version=lambda: now)(stamped_rows([1], [2]))


@pytest.mark.parametrize("bound", [-1, True, 1.5, None])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(UnsupportedArgumentError, match="max_staleness must be"):
        StalenessFilter(bound, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "half_life or max_staleness"),
        ({"half_life": 0}, "half_life must be greater than 0, got 0"),
        ({"half_life": float("nan")}, "half_life must be greater than 0"),
        ({"half_life": "2"}, "half_life must be greater than 0, got '2'"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"max_staleness": True}, "max_staleness must be an integer, got True"),
        ({"max_staleness": 1.5}, "max_staleness must be an integer, got 1.5"),
    ],
)
def test_weights_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UnsupportedArgumentError, match=message):
        StalenessWeight(3, **settings)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_work_and_count_on_their_own(duplicate):
    keep = StalenessFilter(0, Service(9))
    keep(stamped_rows([1]))
    copied = duplicate(keep)
    copied(stamped_rows([1]))
    assert (keep.num_dropped, copied.num_dropped) == (1, 2)
    weigh = duplicate(StalenessWeight(Service(2), half_life=1))
    assert weigh(stamped_rows([1]))["staleness_weight"].tolist() == [0.5]

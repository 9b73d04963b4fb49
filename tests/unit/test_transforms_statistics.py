"""Figures of how rows were generated, and their means."""

import math
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from tests.fakes.rl import stamped_rows
from torchrl_vllm_sync import GenerationStatistics, StalenessFilter
from torchrl_vllm_sync.errors import UnstampedRowsError
from torchrl_vllm_sync.rl import rows as keys

LAYOUTS = pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
NAN = math.nan


def rows(padded, **kwargs):
    """Three rows: one cut off that lived through a push, an empty one, one of a single token."""
    return stamped_rows(
        [1, 1, 1, 4, 4],
        [],
        [4],
        padded=padded,
        **{
            "prompts": [4, 2, 3],
            "reasons": ["length", "abort", "stop"],
            "cached": [1, keys.UNKNOWN_COUNT, 3],
            "queue_time": [0.5, NAN, 1.5],
            "decode_time": [2.0, NAN, 0.0],
            **kwargs,
        },
    )


WANTED = {
    "prompt_length": (torch.int64, [4, 2, 3]),
    "response_length": (torch.int64, [5, 0, 1]),
    "truncated": (torch.bool, [True, False, False]),
    "cached_fraction": (torch.float32, [0.25, NAN, 1.0]),
    "queue_time": (torch.float32, [0.5, NAN, 1.5]),
    "decode_time": (torch.float32, [2.0, NAN, 0.0]),
    "tokens_per_second": (torch.float32, [2.0, NAN, NAN]),
    "staleness_span": (torch.int64, [3, 0, 0]),
}
MEANS = {
    "rows": 3,
    "prompt_length": 3.0,
    "response_length": 2.0,
    "truncated": pytest.approx(1 / 3),
    "cached_fraction": 0.625,
    "queue_time": 1.0,
    "decode_time": 1.0,
    "tokens_per_second": 2.0,
    "staleness_span": 1.0,
}


def assert_wanted(found, shape=(3,)):
    assert set(found.keys()) == set(WANTED)
    for name, (dtype, values) in WANTED.items():
        assert found[name].dtype == dtype, name
        wanted = torch.tensor(values, dtype=dtype).view(shape)
        torch.testing.assert_close(found[name], wanted, equal_nan=True, rtol=0, atol=0, msg=name)


@LAYOUTS
def test_every_figure_of_every_row(padded):
    given = rows(padded)
    statistics = GenerationStatistics()
    out = statistics(given)
    assert_wanted(out["statistics"])
    assert "statistics" not in given.keys()  # noqa: SIM118  a TensorDict
    assert statistics.summary() == MEANS
    assert statistics(out) is out
    assert statistics.summary()["rows"] == 3


@LAYOUTS
def test_batches_of_two_dimensions(padded):
    given = rows(padded).unsqueeze(-1)
    assert_wanted(GenerationStatistics()(given)["statistics"], (3, 1))


def test_a_single_row():
    found = GenerationStatistics()(rows(False)[0])["statistics"]
    assert found.batch_size == ()
    assert (int(found["prompt_length"]), int(found["response_length"])) == (4, 5)
    assert bool(found["truncated"])


@LAYOUTS
def test_prompts_without_a_mask_are_of_unknown_length(padded):
    statistics = GenerationStatistics()
    found = statistics(rows(padded).exclude("masks"))["statistics"]
    assert found["prompt_length"].tolist() == [-1] * 3
    assert found["cached_fraction"].isnan().all()
    summary = statistics.summary()
    assert summary["prompt_length"] is summary["cached_fraction"] is None
    assert summary["response_length"] == 2.0


@LAYOUTS
def test_a_buffer_measures_each_row_once(padded):
    statistics = GenerationStatistics()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        transform=statistics,
        batch_size=3,
    )
    buffer.extend(rows(padded))
    for _ in range(2):
        sample = buffer.sample()
        assert sorted(sample["statistics", "response_length"].tolist()) == [0, 1, 5]
    assert statistics.summary() == MEANS


def test_a_batch_with_nothing_left_passes():
    none = StalenessFilter(0, 99)(rows(False))
    assert GenerationStatistics()(none) is none


def test_means_run_over_batches_until_they_are_reset():
    statistics = GenerationStatistics()
    assert statistics.summary() == {"rows": 0} | dict.fromkeys(WANTED)
    statistics(rows(False))
    statistics(stamped_rows([4] * 6, prompts=[9]))
    assert statistics.summary()["rows"] == 4
    assert statistics.summary()["response_length"] == 3.0
    assert statistics.summary()["prompt_length"] == 4.5
    assert statistics.summary()["queue_time"] == 1.0
    statistics.reset_summary()
    assert statistics.summary() == {"rows": 0} | dict.fromkeys(WANTED)


@LAYOUTS
@pytest.mark.parametrize(
    "key",
    [keys.RESPONSE_VERSIONS, keys.FINISH_REASON, keys.MAX_POLICY_VERSION, keys.DECODE_TIME],
    ids=str,
)
def test_rows_that_the_wrapper_did_not_stamp_are_refused(padded, key):
    statistics = GenerationStatistics()
    with pytest.raises(UnstampedRowsError) as caught:
        statistics(rows(padded).exclude(key))
    assert caught.value.key == key
    assert statistics.summary()["rows"] == 0


def test_a_copy_counts_on():
    statistics = GenerationStatistics()
    statistics(rows(False))
    copied = pickle.loads(pickle.dumps(statistics))
    copied(stamped_rows([1]))
    assert (statistics.summary()["rows"], copied.summary()["rows"]) == (3, 4)


def test_it_measures_and_counts_nothing_by_itself():
    statistics = GenerationStatistics()
    found = statistics.measure(rows(True))
    assert isinstance(found, TensorDict)
    assert_wanted(found)
    assert statistics.summary()["rows"] == 0

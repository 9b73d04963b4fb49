"""Time limits of pushes follow what pushes of the kind took."""

import pytest

from torchrl_vllm_sync.weights.push import FIRST_TIMEOUT_S, PushDeadlines, PushKind

KIND = PushKind(transport="memmap", num_bytes=8, mode="keep", clear_cache=False)


def test_a_multiple_of_the_median_of_the_last_few():
    deadlines = PushDeadlines()
    assert deadlines.timeout_s(KIND) == FIRST_TIMEOUT_S == 300
    for seconds in (100.0, 2.0, 4.0):
        deadlines.record(KIND, seconds)
    assert deadlines.timeout_s(KIND) == 30 + 3 * 4
    for _ in range(9):
        deadlines.record(KIND, 200.0)
    assert deadlines.timeout_s(KIND) == 30 + 3 * 200


@pytest.mark.parametrize(
    "change",
    [
        {"transport": "ipc"},
        {"num_bytes": 9},
        {"mode": "abort"},
        {"clear_cache": True},
        {"members": frozenset({("0", "restarted")})},
    ],
    ids=str,
)
def test_another_kind_of_push_is_measured_anew(change):
    deadlines = PushDeadlines()
    deadlines.record(KIND, 1.0)
    assert deadlines.timeout_s(KIND._replace(**change)) == 300
    assert deadlines.timeout_s(KIND) == 33


def test_where_requests_are_waited_for_the_first_limit_stays_the_least():
    deadlines, kind = PushDeadlines(), KIND._replace(mode="wait")
    deadlines.record(kind, 1.0)
    assert deadlines.timeout_s(kind) == 300
    for _ in range(9):
        deadlines.record(kind, 500.0)
    assert deadlines.timeout_s(kind) == 1530


def test_only_the_last_kind_is_remembered():
    deadlines = PushDeadlines()
    deadlines.record(KIND, 1.0)
    deadlines.record(KIND._replace(num_bytes=107), 1.0)
    assert deadlines.timeout_s(KIND) == 300

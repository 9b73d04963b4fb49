"""Time limits, against a clock that is set by hand."""

import pytest

from torchrl_vllm_sync.checks import Deadline


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_what_is_left_shrinks_to_nothing_and_not_below(clock):
    deadline = Deadline(5.0, clock=clock)
    assert (deadline.at, deadline.left_s, deadline.passed) == (105.0, 5.0, False)
    clock.now = 104.0
    assert (deadline.left_s, deadline.passed) == (1.0, False)
    clock.now = 105.0
    assert (deadline.left_s, deadline.passed) == (0.0, True)
    clock.now = 200.0
    assert (deadline.left_s, deadline.passed) == (0.0, True)


def test_a_part_ends_with_the_whole_at_the_latest(clock):
    deadline = Deadline(5.0, clock=clock)
    deadline.shorten(30.0)
    assert deadline.at == 105.0
    deadline.shorten(3.0)
    assert deadline.at == 103.0
    clock.now = 110.0
    deadline.shorten(3.0)
    assert deadline.at == 103.0
    assert deadline.passed

"""Rates within windows that begin and end in the middle of steps; requests that are aborted."""

import asyncio
from types import SimpleNamespace

import pytest

from benchmarks.sync_actors import TokenLog, UnderLoad

# Two requests: a step every 10 ms, every 20 ms from 0.1 s on, and none from 0.2 s to 0.26 s.
STEPS = [
    *(step / 100 for step in range(11)),
    *(0.1 + step / 50 for step in range(1, 6)),
    *(0.26 + step / 100 for step in range(11)),
]
LOG = TokenLog(requests=[[(when, index + 1) for index, when in enumerate(STEPS)]] * 2)


@pytest.mark.parametrize(
    ("window", "rate"),
    [((0.0, 0.1), 200), ((0.013, 0.099), 200), ((0.1, 0.2), 100), ((0.05, 0.15), 150)],
)
def test_rates_count_parts_of_steps(window, rate):
    assert LOG.rate(window) == pytest.approx(rate)


def test_rates_around_a_moment():
    assert LOG.rates(0.1, range(-20, 30, 10)) == pytest.approx([200, 200, 100, 100, 100])


def test_outputs_of_several_tokens_count_by_their_tokens():
    log = TokenLog(requests=[[(0.0, 1), (0.1, 5), (0.2, 6)]])
    assert log.rate((0.0, 0.2)) == pytest.approx(25)
    assert log.rate((0.0, 0.1)) == pytest.approx(40)


def test_a_window_beyond_the_requests_is_refused():
    for window in ((0.2, 0.5), (-0.1, 0.1)):
        with pytest.raises(ValueError, match=r"a request ran from 0\.000 to 0\.360 s"):
            LOG.rate(window)


def test_steps_and_gaps():
    assert LOG.step_s() == pytest.approx(0.01)
    assert LOG.longest_gap_s((0.15, 0.3)) == pytest.approx(0.06)
    assert LOG.longest_gap_s((0.11, 0.19)) == pytest.approx(0.02)
    assert LOG.longest_gap_s((5.0, 6.0)) == 0.0


async def test_a_request_that_is_aborted_makes_way_for_another():
    class Engine:
        asked = 0

        async def generate(self, prompt, params, name, lora_request):
            self.asked += 1
            for count in (1, 2, 3, 3):  # the last output of an aborted request brings no token
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count)])
                await asyncio.sleep(0.001)

    actor = UnderLoad()
    actor.engine = Engine()
    begin = actor.mark()
    await actor.begin_load(2, 1900)
    log = await actor.end_load()
    for one in log.requests:
        assert [count for _, count in one] == list(range(1, len(one) + 1))
        assert len(one) > 5
    assert 2 <= log.ended((begin, actor.mark())) < actor.engine.asked
    assert log.ended((begin - 1, begin)) == 0

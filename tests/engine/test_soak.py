"""The short form of the soak; ``make soak`` runs the long one."""

import pytest

from tests.soak.soak import KINDS, soak

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_a_short_soak_loses_nothing_and_keeps_nothing(cluster, checkpoint):
    """By its seed each kind of event happens once, after most have once before it is measured."""
    found, told = soak(
        checkpoint, num_requests=500, num_events=4, seed=129, call_pause_s=1.0, push_pause_s=3.0
    )
    assert not found
    assert told["requests"] > 500
    assert {name: told[name] for name in KINDS} == {
        "kill actor": 2,
        "kill core": 1,
        "join": 2,
        "leave": 2,
    }
    assert told["push"] > 10

"""The short form of the soak; ``make soak`` runs the long one."""

import pytest

from tests.soak.soak import soak

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_a_short_soak_loses_nothing_and_keeps_nothing(cluster, checkpoint):
    found, _ = soak(checkpoint, num_requests=500, num_events=3, seed=1)
    assert not found

"""What a replica takes of a peer's weights, and what it leaves as it is."""

import pytest

from tests.fakes.engine import BareUpdates
from torchrl_vllm_sync.engine.arrivals import Arrivals
from torchrl_vllm_sync.errors import StaleVersionError, SyncError

OFFER = {"version": 5, "run_id": "run", "token": "t", "workers": []}


class FailingWorker:
    """Fails whatever it is asked."""

    def __getattr__(self, method):
        answer = {"error": f"{method} failed", "error_type": "SyncError"}
        return lambda *args: answer


def updates_at(version, run_id="run", whole=True):
    return BareUpdates([FailingWorker()], version, run_id, whole)


async def test_what_an_engine_came_to_hold_meanwhile_is_not_taken_again():
    updates = updates_at(5)
    report = await Arrivals(updates, list).take_weights(OFFER, timeout_s=1.0)
    assert (report.version, report.loaded) == (5, False)
    assert not updates.asked


async def test_an_older_version_never_replaces_a_newer_one():
    updates = updates_at(6)
    with pytest.raises(StaleVersionError, match="at least 6, which replica 0 holds, got 5"):
        await Arrivals(updates, list).take_weights(OFFER, timeout_s=1.0)
    assert not updates.asked


@pytest.mark.parametrize("held", [(4,), (5, "other"), (5, "run", False), (6, "run", False)])
async def test_everything_else_is_taken(held):
    updates = updates_at(*held)
    with pytest.raises(SyncError, match="sync_peer_open failed"):
        await Arrivals(updates, list).take_weights(OFFER, timeout_s=1.0)
    assert updates.asked == ["sync_peer_open"]

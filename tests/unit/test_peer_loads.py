"""What a replica takes of a peer's weights, and what it leaves as it is."""

import contextlib
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.engine.arrivals import PeerLoads
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.errors import StaleVersionError, SyncError

OFFER = {"version": 5, "run_id": "run", "token": "t", "workers": []}


class Updates:
    """An engine's weights whose workers fail whatever they are asked."""

    replica_id = "0"

    def __init__(self, version, run_id="run", whole=True):
        self.version, self.run_id, self.whole, self.asked = version, run_id, whole, []

    @contextlib.asynccontextmanager
    async def exclusive(self, timeout_s):
        yield

    async def call_workers(self, method, *args, **kwargs):
        self.asked.append(method)
        return [{"error": f"{method} failed"}]


async def test_what_an_engine_came_to_hold_meanwhile_is_not_taken_again():
    updates = Updates(5)
    report = await PeerLoads(updates).take(OFFER, timeout_s=1.0)
    assert (report.version, report.loaded) == (5, False)
    assert not updates.asked


async def test_an_older_version_never_replaces_a_newer_one():
    updates = Updates(6)
    with pytest.raises(StaleVersionError, match="at least 6, which replica 0 holds, got 5"):
        await PeerLoads(updates).take(OFFER, timeout_s=1.0)
    assert not updates.asked


@pytest.mark.parametrize(
    "updates", [Updates(4), Updates(5, "other"), Updates(5, whole=False), Updates(6, whole=False)]
)
async def test_everything_else_is_taken(updates):
    with pytest.raises(SyncError, match="failed"):
        await PeerLoads(updates).take(OFFER, timeout_s=1.0)
    assert "sync_peer_open" in updates.asked


def test_what_was_never_opened_can_be_closed():
    class Worker(SyncWorkerExtension):
        def _sync_receiver(self):
            return SimpleNamespace(rank_in_replica=0)

        def _sync_uncopyable(self, gives):
            return "they are odd"

        def _sync_forget_encodings(self):
            pass

    worker = object.__new__(Worker)
    assert "they are odd" in worker.sync_peer_open("t", False)["error"]
    assert not worker.sync_peer_close()["error"]

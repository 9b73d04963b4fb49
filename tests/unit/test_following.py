"""A replica that follows a directory says why it does not load what is there."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from torchrl_vllm_sync import SnapshotWriter
from torchrl_vllm_sync.weights.snapshots.data_file import SnapshotReader
from torchrl_vllm_sync.weights.source import MappingSource

pytest.importorskip("vllm")


def test_a_version_that_is_too_old_is_told_of_once(tmp_path, caplog, monkeypatch):
    from torchrl_vllm_sync.engine.arrivals import Arrivals

    directory = tmp_path / "weights"
    source = MappingSource({"a": torch.ones(2)})
    updates = SimpleNamespace(replica_id="0", version=8, whole=True, is_over=False)

    looks, current = [], SnapshotReader.current
    monkeypatch.setattr(SnapshotReader, "current", lambda one: looks.append(1) or current(one))

    async def follow():
        loads = Arrivals(updates, list)
        loads.follow_snapshots(str(directory), None, interval_s=0.01, timeout_s=5.0)
        try:
            while len(looks) < 20:  # noqa: ASYNC110  looks raise no event
                await asyncio.sleep(0.01)
        finally:
            loads._stop()

    with SnapshotWriter(directory) as writer:
        writer.publish(source, source.metadata(), 1)
        asyncio.run(asyncio.wait_for(follow(), 30))
    (record,) = caplog.records
    assert "replica 0 cannot follow" in record.getMessage()
    assert "version 1 is older than the replica's 8" in record.getMessage()

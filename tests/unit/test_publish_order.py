"""The order in which a publish writes: what a crash of the machine in between would leave."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from torchrl_vllm_sync import ParamMeta, SnapshotWriter
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, TensorWriter
from torchrl_vllm_sync.weights.snapshots.records import CURRENT, HEAD, Head

METADATA = [ParamMeta("weight", torch.float32, (300,))]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Names what the system is asked to do with HEAD, data and manifest, in its order."""
    found = []
    replace, fsync, filling = os.replace, os.fsync, TensorWriter.filling

    def note_replace(source, target, **kwargs):
        replace(source, target, **kwargs)
        name = Path(target).name
        if name == HEAD:
            head = Head.read(Path(target).parent)
            found.append("HEAD complete" if head.complete else "HEAD being written")
        elif name == CURRENT:
            found.append("manifest")

    def note_fsync(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == DATA_FILE:
            found.append("data on disk")
        elif path.is_dir():
            found.append("names on disk" if path == tmp_path else "names of the folder on disk")
        else:  # a temporary one, before it is renamed
            found.append("record on disk")

    @contextlib.contextmanager
    def note_filling(self, file):
        found.append("data begins")
        with filling(self, file) as filled:
            yield filled
        found.append("data ends")

    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(TensorWriter, "filling", note_filling)
    return found


BEGUN = ["HEAD being written", "data begins", "data ends"]
HEAD_DURABLE = ["record on disk", "HEAD complete", "names of the folder on disk"]
MANIFEST_DURABLE = ["record on disk", "manifest", "names on disk"]


@pytest.mark.parametrize(
    ("layout", "fsync", "order"),
    [
        ("slots", False, [*BEGUN, "HEAD complete", "manifest"]),
        ("versions", False, [*BEGUN, "HEAD complete", "manifest"]),
        ("slots", True, [*BEGUN, "data on disk", *HEAD_DURABLE, *MANIFEST_DURABLE]),
        # The folder gets its name as it is completed.
        (
            "versions",
            True,
            [*BEGUN, "data on disk", *HEAD_DURABLE, "names on disk", *MANIFEST_DURABLE],
        ),
    ],
)
def test_a_publish_writes_in_an_order_that_any_crash_may_interrupt(
    tmp_path, steps, layout, fsync, order
):
    with SnapshotWriter(tmp_path, layout=layout, fsync=fsync) as writer:
        for version in range(5):  # into new folders, and over old ones
            steps.clear()
            writer.publish([("weight", torch.rand(300))], METADATA, version)
            assert steps == order
